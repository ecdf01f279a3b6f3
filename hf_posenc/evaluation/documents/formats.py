"""The column of a row that holds a document: its text, or its tokens."""

from __future__ import annotations

import codecs
import gzip
import json
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.documents.document import (
    Document,
    Entry,
    Skipped,
    UnreadableError,
    document_of_ids,
    printable,
    reason_of,
)


@dataclass(frozen=True)
class Field:
    """Which column to read.

    Attributes:
        text: The column of texts.
        tokens: The column of token ids; read instead where it is given.
    """

    text: str = "text"
    tokens: str | None = None

    @property
    def name(self) -> str:
        """The column that is read."""
        return self.text if self.tokens is None else self.tokens

    @property
    def option(self) -> str:
        """The command's option that names it."""
        return "--column" if self.tokens is None else "--tokenized"

    def entry(self, label: str, row: Mapping[str, Any]) -> Entry:
        """The document of a row."""
        if self.name not in row:
            return Skipped(label, self.missing(row))
        value = row[self.name]
        if self.tokens is not None:
            return document_of_ids(label, value)
        if isinstance(value, str):
            return Document(label, value)
        kind = "null" if value is None else type(value).__name__
        return Skipped(label, f"column {self.name!r} holds {kind}, not text")

    def missing(self, columns: Iterable[str]) -> str:
        """Says that there is no such column."""
        names = printable(", ".join(columns))[:200] or "none"
        return f"no column {self.name!r}; its columns are {names}. Pass {self.option}"


# The content of files, compressed or not, piece by piece: never more than a piece in memory.


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


# JSON lines: a document per line.


LONGEST = 1 << 28
"""Bytes of a line that is still read; it is in memory as a whole."""


def read_jsonl(path: Path, field: Field) -> Iterator[Entry]:
    """The lines of a file, compressed or not; blank ones are none.

    Raises:
        UnreadableError: The file cannot be read, or not to its end.
    """
    empty = True
    for number, line, ended in _lines(path):
        label = f"{printable(path)}:{number}"
        if line is None:
            yield Skipped(label, f"a line of more than {LONGEST:,} bytes")
        elif line.strip():
            yield _entry(label, line, ended, field)
        empty &= line is not None and not line.strip()
    if empty:
        yield Skipped(printable(path), "empty")


def _entry(label: str, line: bytes, ended: bool, field: Field) -> Entry:
    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Skipped(label, f"not UTF-8 (byte 0x{error.object[error.start]:02x})")
    except json.JSONDecodeError as error:
        torn = "" if ended else "; the file ends within this line"
        return Skipped(label, f"not JSON ({error.msg}, character {error.pos + 1:,}){torn}")
    except (ValueError, RecursionError):  # a number of 5,000 digits, 5,000 brackets
        return Skipped(label, "JSON beyond what Python reads")
    if not isinstance(row, dict):
        return Skipped(label, f"a JSON {type(row).__name__}, not an object with columns")
    return field.entry(label, row)


def _lines(path: Path) -> Iterator[tuple[int, bytes | None, bool]]:
    """Number, content (`None`: too long) and whether a line break follows, of every line."""
    number, held, size = 1, [b""], 0
    for piece in byte_pieces(path):
        first, *others = piece.split(b"\n")
        for part in (first, *others):
            if part is not first:
                yield number, b"".join(held) if size <= LONGEST else None, True
                number, held, size = number + 1, [], 0
            size += len(part)
            held = [*held, part] if size <= LONGEST else []
    if size:
        yield number, b"".join(held) if size <= LONGEST else None, False


# Parquet files: a document per row, a few rows in memory at a time.


_ROWS = 8


def read_parquet(path: Path, field: Field) -> Iterator[Entry]:
    """The rows of a file; only the column that is asked for is read.

    Raises:
        UnreadableError: The file cannot be read, has no such column, or there is no pyarrow.
    """
    check_regular(path)
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UnreadableError(
            ".parquet files need the pyarrow library: pip install 'hf-posenc[data]'"
        ) from error
    try:
        with ParquetFile(path) as file:
            if field.name not in file.schema_arrow.names:
                raise UnreadableError(field.missing(file.schema_arrow.names))
            announced, index = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=[field.name]):
                for row in batch.to_pylist():
                    yield field.entry(f"{printable(path)}#{index}", row)
                    index += 1
            if index != announced:
                raise UnreadableError(f"damaged: it has {index:,} rows and announces {announced:,}")
            if not index:
                yield Skipped(printable(path), "a parquet file without rows")
    except UnreadableError:
        raise
    except Exception as error:  # those of Arrow, of the disk, and of text that is no UTF-8
        raise UnreadableError(f"not a parquet file, or damaged ({one_line(error)})") from error


# Token ids in files: `.npy`, and the bare arrays of `.bin` that LongLoRA, nanoGPT and others write.


TOKEN_DTYPES = ("uint16", "uint32", "int32", "int64")
"""What a `.bin` file may consist of, little-endian."""

MAPPED = 1 << 24
"""Bytes from which on a file is mapped instead of read."""


def read_npy(path: Path) -> Iterator[Entry]:
    """One document, or a document per row of a matrix.

    Raises:
        UnreadableError: It is no array of numbers, or cannot be read.
    """
    name, size = printable(path), check_regular(path)
    try:
        values = np.load(path, mmap_mode="c" if size >= MAPPED else None, allow_pickle=False)
    except OSError as error:
        raise UnreadableError(reason_of(error)) from error
    except Exception as error:  # the header is Python, and so are the errors of reading it
        raise UnreadableError(f"not a .npy file of numbers ({one_line(error)})") from error
    if not isinstance(values, np.ndarray):  # an archive of several arrays under this name
        values.close()
        raise UnreadableError("not a .npy file but a .npz archive")
    if values.ndim == 2 and values.size:
        for index, row in enumerate(values):
            yield document_of_ids(f"{name}#{index}", row)
    else:
        yield document_of_ids(name, values)


def read_bin(path: Path, dtype: str) -> Iterator[Entry]:
    """One document: the whole file.

    Raises:
        UnreadableError: Its size is not that of so many numbers, or it cannot be read.
    """
    name, size = printable(path), check_regular(path)
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise UnreadableError(
            f"{size:,} bytes are no whole number of {dtype} ids; --token-dtype says what it holds"
        )
    if not size:
        yield Skipped(name, "empty")
        return
    try:
        if size >= MAPPED:
            yield document_of_ids(name, np.memmap(path, kind, mode="c"))
        else:
            yield document_of_ids(name, np.fromfile(path, kind))
    except OSError as error:
        raise UnreadableError(reason_of(error)) from error


# Rows of the `datasets` library: a hub name, a folder that it can load, or one that `save_to_disk` wrote.


_SAVED = ("state.json", "dataset_info.json")
_SAVED_SPLITS = "dataset_dict.json"


def read_dataset(
    name: str,
    *,
    config: str | None = None,
    split: str = "test",
    column: str = "text",
    streaming: bool = True,
    tokenized: str | None = None,
) -> Iterator[Entry]:
    """The rows of one split of a dataset.

    Args:
        name: A hub name, or a folder.
        config: The dataset's configuration.
        split: The part of the dataset.
        column: The column of texts.
        streaming: Read row by row, without downloading all of it.
        tokenized: The column of token ids, read instead of a text: `input_ids` of `emozilla/pg19-test-tokenized`.

    Raises:
        PosencError: `datasets` is not installed, or it cannot load this dataset or split, or there is no such column.
    """
    field = Field(column, tokenized)
    if is_saved(Path(name)):
        yield from read_saved(Path(name), split, field)
        return
    library = _library()

    def load() -> Any:
        return library.load_dataset(name, config, split=split, streaming=streaming)

    what = f"{name}{f' ({config})' if config else ''}"
    yield from _rows(load, name, what, split, field)


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of the datasets library wrote a folder."""
    splits, one = folder / _SAVED_SPLITS, [folder / name for name in _SAVED]
    return splits.is_file() or all(path.is_file() for path in one)


def read_saved(folder: Path, split: str, field: Field) -> Iterator[Entry]:
    """The rows of a dataset in a folder that `save_to_disk` wrote.

    Raises:
        PosencError: As `read_dataset`.
    """
    library = _library()

    def load() -> Any:
        found = library.load_from_disk(str(folder))
        if isinstance(found, library.DatasetDict):
            if split not in found:
                raise PosencError(
                    f"The dataset {name} has no split {split!r}; it has {', '.join(found)}. Pass --split."
                )
            return found[split]
        return found

    name = printable(folder)
    yield from _rows(load, name, name, split, field)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise PosencError(
            "A dataset needs the datasets library: pip install 'hf-posenc[data]'. Text files work without it (--text)."
        ) from error
    return datasets


def _rows(
    load: Callable[[], Any], name: str, what: str, split: str, field: Field
) -> Iterator[Entry]:
    index = -1
    try:
        for index, row in enumerate(load()):
            if field.name not in row:
                raise PosencError(f"The dataset {what} has {field.missing(row)}.")
            yield field.entry(f"{name}[{split}]#{index}", row)
    except PosencError:
        raise
    except Exception as error:  # whatever the hub, a file format or a script of the dataset raises
        raise PosencError(
            f"The split {split!r} of dataset {what} cannot be read: {one_line(error)}"
        ) from error
    if index < 0:
        yield Skipped(f"{name}[{split}]", "a split without rows")
