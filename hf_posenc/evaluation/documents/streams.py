"""The content of files, compressed or not, piece by piece: never more than a piece in memory."""

from __future__ import annotations

import codecs
import gzip
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from hf_posenc.evaluation.documents.errors import UnreadableError, one_line, reason_of

PIECE = 1 << 16
"""Bytes that are read at a time."""

COMPRESSED = (".gz", ".zst")
"""Endings of files that are decompressed."""

_LARGEST_ZSTD_WINDOW = (
    1 << 27
)  # what a decompressor must allow by default; more is memory that the file chooses
_ZSTD_INPUT = 256
_KINDS = {
    b"\x1f\x8b": "gzip data: its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "zstd data: its name must end in .zst",
    b"\xff\xfe": "UTF-16 (or UTF-32), not UTF-8: convert it with iconv",
    b"\xfe\xff": "UTF-16, not UTF-8: convert it with iconv",
}


def inner_suffix(path: Path) -> str:
    """The ending that says what a file holds: `.jsonl` of `a.jsonl.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def check_regular(path: Path) -> int:
    """The size of a file that can be read from beginning to end, any number of times.

    Raises:
        UnreadableError: It is something else, or it cannot be looked at.
    """
    try:
        found = path.stat()
    except OSError as error:
        if path.is_symlink() and isinstance(error, FileNotFoundError):
            raise UnreadableError("a link that leads nowhere") from error
        raise UnreadableError(reason_of(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise UnreadableError("a pipe or a device, not a file: write its content to a file first")
    return found.st_size


def byte_pieces(path: Path) -> Iterator[bytes]:
    """What a file holds, decompressed where its name ends in `.gz` or `.zst`.

    Raises:
        UnreadableError: It cannot be read, or is not what its name says.
    """
    suffix = path.suffix.lower()
    check_regular(path)
    try:
        if suffix == ".gz":
            with gzip.open(path, "rb") as file:
                yield from iter(lambda: file.read(PIECE), b"")
        elif suffix == ".zst":
            yield from _zstd(path)
        else:
            with path.open("rb") as plain:
                yield from iter(lambda: plain.read(PIECE), b"")
    except EOFError as error:
        raise UnreadableError("cut off: its gzip data end too early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UnreadableError(f"not gzip data, or damaged ({one_line(error)})") from error
    except OSError as error:
        raise UnreadableError(reason_of(error)) from error


def _zstd(path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise UnreadableError(
            ".zst files need the zstandard library: pip install 'hf-posenc[data]'"
        ) from error
    unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_ZSTD_WINDOW)
    frame = None
    try:
        with path.open("rb") as file:
            # few bytes at a time: four of them may stand for 128 KiB
            for data in iter(lambda: file.read(_ZSTD_INPUT), b""):
                while data:
                    frame = frame or unpacker.decompressobj()
                    yield frame.decompress(data)
                    data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise UnreadableError(f"not zstd data, or damaged ({one_line(error)})") from error
    if frame is not None:
        raise UnreadableError("cut off: its zstd data end too early")


def text_pieces(path: Path) -> Iterator[str]:
    """The text of a file as it stands, without a byte order mark.

    Raises:
        UnreadableError: It is no UTF-8 text, or cannot be read.
    """
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    for data in byte_pieces(path):
        if offset == 0:
            for magic, reason in _KINDS.items():
                if data.startswith(magic):
                    raise UnreadableError(reason)
        if (zero := data.find(0)) >= 0:
            raise UnreadableError(f"no text: a NUL byte at offset {offset + zero:,}")
        yield _decoded(decoder, data, offset)
        offset += len(data)
    _decoded(decoder, b"", offset, final=True)


def _decoded(
    decoder: codecs.IncrementalDecoder, data: bytes, offset: int, final: bool = False
) -> str:
    held = len(decoder.getstate()[0])
    try:
        text = decoder.decode(data, final)
    except UnicodeDecodeError as error:
        place = offset - held + error.start
        reason = f"not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {place})"
        raise UnreadableError(reason) from error
    return text.removeprefix("\ufeff") if offset == 0 else text
