"""Documents of files, folders, glob patterns and datasets.

Every reader yields entries and keeps no more than a piece, a line or a few rows in memory. The reader of a format
raises `UnreadableError` with a reason of one line if a file cannot be read.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import glob
import gzip
import importlib
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.documents.document import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    UnreadableError,
    printable,
)
from hf_posenc.evaluation.documents.named import NAMED, is_name

SMALL = 1 << 20  # characters, or bytes, from which on a text stays in its file
PIECE = 1 << 16  # bytes that are read at a time
LONGEST = 1 << 28  # bytes of the longest line of JSON that is read; a line is in memory as a whole
_TABLES = (".json", ".csv", ".tsv")
_COMPRESSED = {".gz": "gzip data", ".zst": "zstd data"}
_ROWS = 8  # of a parquet file, in memory at a time
_MAGIC = {
    b"%PDF-": "a PDF, not text: extract its text first, with pdftotext",
    b"PK\x03\x04": "a zip archive, as are .docx and .xlsx: extract its text first",
    b"BZh9": "bzip2 data: decompress it first",
    b"\xfd7zXZ": "xz data: decompress it first",
    b"\x1f\x8b": "gzip data: its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "zstd data: its name must end in .zst",
    b"\x93NUMPY": "an array of numpy: write token ids as rows, and name their column by --tokenized",
}
_UTF_16 = dict.fromkeys((codecs.BOM_LE, codecs.BOM_BE), "UTF-16: give --encoding utf-16")


def read_paths(
    paths: Iterable[str | Path] | str | Path,
    *,
    column: str = "text",
    tokenized: str | None = None,
    split: str = "test",
    encoding: str = "utf-8",
) -> Iterator[Entry]:
    """Yield the documents of files, folders (all files below them except hidden ones), glob patterns and names.

    The names are `books`, `code` and `prose` (`documents.named`), where there is no such file or folder.

    Each file is read once. Its suffix, without `.gz` or `.zst`, selects the format: `.jsonl`, `.ndjson` and `.parquet`
    contain rows; everything else is one text, except `.json`, `.csv` or `.tsv` by name or pattern. A folder that
    `save_to_disk` of the datasets library wrote is that dataset.

    Args:
        paths: Files, folders, patterns.
        column: The column of rows that contains their text.
        tokenized: The column of rows that contains token ids, read instead of a text.
        split: The split of a saved `DatasetDict`.
        encoding: Encoding of files of text, as Python names it.

    Yields:
        A document for each usable file or row, and an entry with the reason for each other one.

    Raises:
        PosencError: There is no such `encoding`, a saved dataset cannot be read, or the documents of a name have not
            been fetched.

    Examples:
        >>> from pathlib import Path
        >>> from hf_posenc.evaluation import read_paths
        >>> Path("book.txt").write_text(texts[0])
        400
        >>> [entry.name for entry in read_paths("book.txt")]
        ['book.txt']
    """
    try:
        "".encode(encoding)
    except LookupError as error:
        raise PosencError(f"--encoding {encoding}: Python has no such encoding of text.") from error
    seen: dict[tuple[int, int], Path] = {}
    rows = Column(column, tokenized)
    for argument in map(str, [paths] if isinstance(paths, str | Path) else paths):
        path, folder = _named(argument)
        if is_name(argument):
            yield from NAMED[argument]()
            continue
        if folder and is_saved(path):
            yield from read_dataset(str(path), split=split, column=column, tokenized=tokenized)
            continue
        for file in files_of(argument):
            if isinstance(file, Skipped):
                yield file
                continue
            try:
                status = _status(file)
                first = seen.setdefault((status.st_dev, status.st_ino), file)
                if first is file:
                    yield from _read_file(file, status.st_size, rows, not folder, encoding)
                elif os.path.abspath(first) != os.path.abspath(file):  # noqa: PTH100 (links stay)
                    yield Skipped(printable(file), f"the same file as {printable(first)}")
            except UnreadableError as error:
                yield Skipped(printable(file), str(error))


def _named(argument: str) -> tuple[Path, bool]:
    """Return the path of an argument, and whether it is a folder; an empty shell variable is none."""
    # os.path, since pathlib raises for an unknown user and for a name that is too long
    path = Path(os.path.expanduser(argument))  # noqa: PTH111
    return path, bool(argument) and os.path.isdir(path)  # noqa: PTH112


def files_of(argument: str) -> Iterator[Path | Skipped]:
    """Yield the files of an argument: itself, those below a folder, or the matches of a pattern."""
    path, folder = _named(argument)
    files: Iterator[Path | Skipped]
    if argument and os.path.lexists(path):
        files = _below(path, set())
    else:
        matches = sorted(glob.glob(str(path), recursive=True)) if argument else ()  # noqa: PTH207
        files = (Path(file) for file in matches if not os.path.isdir(file))  # noqa: PTH112
    reason = "a folder without files" if folder else "no such file"
    shown = path if folder else argument or "(an empty name)"
    yield next(files, Skipped(printable(shown), reason))
    yield from files


def _below(path: Path, seen: set[tuple[int, int]]) -> Iterator[Path | Skipped]:
    """Yield a file, or every file below a folder, by name and through links; hidden entries are left out."""
    if not os.path.isdir(path):  # noqa: PTH112 (pathlib's raises for some names)
        yield path
        return
    try:
        status = path.stat()
        entries = sorted(path.iterdir())
    except OSError as error:
        yield Skipped(printable(path), _system_reason(error))
        return
    if (status.st_dev, status.st_ino) in seen:
        yield Skipped(printable(path), "a link to a folder that is read already")
        return
    seen.add((status.st_dev, status.st_ino))
    for entry in entries:
        if not entry.name.startswith("."):
            yield from _below(entry, seen)


def _read_file(path: Path, size: int, rows: Column, named: bool, encoding: str) -> Iterator[Entry]:
    """Yield the documents of a file, in the format of its suffix; it is `named`, or found in a folder."""
    compressed = path.suffix.lower() in _COMPRESSED
    suffix = Path(path.stem if compressed else path).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        yield from _read_jsonl(path, rows)
    elif suffix == ".parquet" and compressed:
        raise UnreadableError(".parquet files need random access: decompress it first")
    elif suffix == ".parquet":
        yield from _read_parquet(path, rows)
    elif rows.tokens is not None:
        raise UnreadableError("text without columns, and --tokenized names one: leave it out")
    elif suffix in _TABLES and named:
        raise UnreadableError(
            f"a {suffix} file, whose syntax would be part of the text: write JSON lines (.jsonl) or parquet, or rename "
            "it to .txt to read it as it is"
        )
    else:
        name, pieces = printable(path), functools.partial(_text_pieces, path, encoding)
        held, length = list[str](), 0 if compressed else size
        for piece in pieces():
            if length > SMALL:
                break
            held.append(piece)
            length += len(piece) * compressed
        yield LongDocument(name, pieces) if length > SMALL else Document(name, "".join(held))


# The errors of files, as reasons of one line.


@contextlib.contextmanager
def _readable(kind: str) -> Iterator[None]:
    """Raise every error of reading as an `UnreadableError`: of the system, or because a file is not of this kind."""
    try:
        yield
    except UnreadableError:
        raise
    except Exception as error:  # those of Arrow and zlib have many types
        if isinstance(error, OSError) and error.errno is not None:
            raise UnreadableError(_system_reason(error)) from error
        raise UnreadableError(f"not {kind}, or damaged ({one_line(error)})") from error


def _system_reason(error: OSError) -> str:
    return f"cannot be read ({error.strerror or one_line(error)})"


def _status(path: Path) -> os.stat_result:
    """Return the status of a regular file, which can be read any number of times."""
    try:
        status = path.stat()
    except OSError as error:
        if path.is_symlink() and isinstance(error, FileNotFoundError):
            raise UnreadableError("a link that leads nowhere") from error
        raise UnreadableError(_system_reason(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError("a pipe or a device, not a file: write its content to a file first")
    return status


# Text, compressed or not.


@contextlib.contextmanager
def _content(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if its name ends in `.gz` or `.zst`."""
    suffix = path.suffix.lower()
    kind = _COMPRESSED.get(suffix, "a file")
    with _readable(kind), path.open("rb") as file:
        content: Any = file
        if suffix == ".gz":
            content = gzip.GzipFile(fileobj=file)
        elif suffix == ".zst":
            stream = _pyarrow("pyarrow", suffix).CompressedInputStream(file, "zstd")
            content = io.BufferedReader(stream, PIECE)
        try:
            yield content
        except (EOFError, OSError) as error:
            if isinstance(error, EOFError) or "Truncated" in str(error):
                raise UnreadableError(f"truncated: its {kind} ends too early") from error
            raise


def _pyarrow(module: str, suffix: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        way = "pip install 'hf-posenc[data]'"
        raise UnreadableError(f"{suffix} files need the pyarrow library: {way}") from error


def _text_pieces(path: Path, encoding: str) -> Iterator[str]:
    """Yield the text of a file as it is, without a byte order mark, piece by piece."""
    decoder, offset, before = codecs.getincrementaldecoder(encoding)(), 0, b""
    wide = b"\0" in " ".encode(encoding)
    with _content(path) as file:
        while True:
            data = file.read(PIECE)
            if not offset:
                magics = _MAGIC if wide else _MAGIC | _UTF_16
                reasons = (reason for magic, reason in magics.items() if data.startswith(magic))
                if reason := next(reasons, None):
                    raise UnreadableError(reason)
            if not wide and (zero := data.find(0)) >= 0:
                raise UnreadableError(f"not text: a NUL byte at offset {offset + zero:,}")
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                place, byte = offset - pending + error.start, error.object[error.start]
                guess = _encoding_of(before + data)
                advice = f"; if it is {guess}, give --encoding {guess}" * bool(guess)
                known = error.encoding.upper()
                reason = f"not {known} (byte 0x{byte:02x} at offset {place}){advice}"
                raise UnreadableError(reason) from error
            yield text if offset else text.removeprefix("\ufeff")
            if not data:
                return
            offset, before = offset + len(data), data


def _encoding_of(data: bytes) -> str:
    """Return the likely encoding of text that is not UTF-8; empty if nothing is known."""
    if 4 * sum(byte > 127 for byte in data) < len(data):  # the alphabet is Latin
        undefined = {0x81, 0x8D, 0x8F, 0x90, 0x9D}.intersection(data)
        return "latin-1" if undefined else "cp1252"
    with contextlib.suppress(ImportError):
        from charset_normalizer import from_bytes

        return getattr(from_bytes(data).best(), "encoding", "")
    return ""


# Rows: one column of each is a document.


@dataclass(frozen=True)
class Column:
    """The column of a row that holds a document: its text or messages, or its token ids if that column is given."""

    text: str = "text"
    tokens: str | None = None

    @property
    def name(self) -> str:
        """Name of the column that is read."""
        return self.text if self.tokens is None else self.tokens

    def entry(self, label: str, row: Mapping[str, Any]) -> Entry:
        """Return the document of a row under this name."""
        if self.name not in row:
            return Skipped(label, self.missing(row))
        value = row[self.name]
        if self.tokens is not None:
            return document_of_ids(label, value)
        if isinstance(value, str):
            return Document(label, value)
        parts = value if isinstance(value, list) else ()
        if parts and all(isinstance(x, dict) and {"role", "content"} <= x.keys() for x in parts):
            return Skipped(label, "a conversation, which TRL trains on (docs/trainers.md)")
        kind = "null" if value is None else type(value).__name__
        return Skipped(label, f"column {self.name!r} holds {kind}, not text")

    def missing(self, columns: Iterable[str]) -> str:
        """Return the reason that the column is not among these."""
        option = "--column" if self.tokens is None else "--tokenized"
        names = printable(", ".join(columns))[:200] or "none"
        return f"no column {self.name!r}; its columns are {names}. Pass {option}"


def _read_jsonl(path: Path, column: Column) -> Iterator[Entry]:
    """Yield a document per line of a file, compressed or not; blank lines are ignored."""
    name, number, empty = printable(path), 0, True
    with _content(path) as file:
        while line := file.readline(LONGEST + 1):
            number += 1
            label, complete = f"{name}:{number}", line.endswith(b"\n")
            if not complete and len(line) > LONGEST:
                while (rest := file.readline(PIECE)) and not rest.endswith(b"\n"):
                    pass
                yield Skipped(label, f"a line of more than {LONGEST:,} bytes")
            elif line.strip():
                yield _json_entry(label, line, complete, column)
            else:
                continue
            empty = False
    if empty:
        yield Skipped(name, "empty")


def _json_entry(label: str, line: bytes, complete: bool, column: Column) -> Entry:
    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Skipped(label, f"not UTF-8 (byte 0x{error.object[error.start]:02x})")
    except json.JSONDecodeError as error:
        torn = "" if complete else "; the file ends within this line"
        return Skipped(label, f"not JSON ({error.msg}, character {error.pos + 1:,}){torn}")
    except (ValueError, RecursionError):  # a number of 5,000 digits, 5,000 brackets
        return Skipped(label, "JSON beyond the limits of Python's parser")
    if not isinstance(row, dict):
        return Skipped(label, f"a JSON {type(row).__name__}, not an object with columns")
    return column.entry(label, row)


def _read_parquet(path: Path, column: Column) -> Iterator[Entry]:
    """Yield a document per row of a file; no other column is read."""
    parquet = _pyarrow("pyarrow.parquet", ".parquet")
    name, index = printable(path), 0
    with _readable("a parquet file"), parquet.ParquetFile(path) as file:
        if column.name not in file.schema_arrow.names:
            raise UnreadableError(column.missing(file.schema_arrow.names))
        for batch in file.iter_batches(batch_size=_ROWS, columns=[column.name]):
            for row in batch.to_pylist():
                yield column.entry(f"{name}#{index}", row)
                index += 1
        if index != (rows := file.metadata.num_rows):
            raise UnreadableError(f"damaged: it has {index:,} rows and announces {rows:,}")
        if not index:
            yield Skipped(name, "a parquet file without rows")


def document_of_ids(name: str, values: Any) -> TokenizedDocument | Skipped:
    """Return a document of token ids, a list or an array of shape (n,)."""
    import numpy as np
    import torch

    try:
        ids = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths, numbers of 80 bits
        return Skipped(name, "not a list of token ids")
    if not ids.size:
        return Skipped(name, "empty")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        kind = f"an array of {ids.dtype}, {ids.ndim} dimension{'s' * (ids.ndim != 1)}"
        if not ids.ndim:
            kind = "null" if values is None else type(values).__name__
        return Skipped(name, f"holds {kind}, not a list of token ids")
    if not ids.dtype.isnative:
        ids = ids.astype(ids.dtype.newbyteorder("="))
    return TokenizedDocument(name, torch.from_numpy(ids), None, None)


# Rows of the `datasets` library: a hub name, a folder that it can load, or one that `save_to_disk` wrote.


def read_dataset(
    name: str,
    *,
    config: str | None = None,
    split: str = "test",
    column: str = "text",
    streaming: bool = True,
    tokenized: str | None = None,
) -> Iterator[Entry]:
    """Yield the rows of one split of a dataset.

    Args:
        name: A hub name, or a folder.
        config: The dataset's configuration.
        split: The part of the dataset.
        column: The column of texts.
        streaming: Read row by row, without downloading all of it.
        tokenized: The column of token ids, read instead of a text: `input_ids` of `emozilla/pg19-test-tokenized`.

    Yields:
        A document for each usable row, and an entry with the reason for each other one.

    Raises:
        PosencError: `datasets` is not installed, the dataset or split cannot be loaded, or it has no such column.
    """
    try:
        import datasets
    except ImportError as error:
        raise PosencError(
            "A dataset needs the datasets library: pip install 'hf-posenc[data]'. Text files work without it (--text)."
        ) from error
    if not isinstance(name, str | Path) or not str(name).strip():
        raise PosencError(f"A dataset is given by its hub name or folder, not by {name!r}.")
    rows, saved, index = Column(column, tokenized), is_saved(Path(name)), -1
    folder, name = str(name), printable(name) if saved else name
    title = f"{name} ({config})" if config and not saved else name
    try:
        if saved:
            dataset: Any = datasets.load_from_disk(folder)
            if isinstance(dataset, datasets.DatasetDict):
                if split not in dataset:
                    has = f"has no split {split!r}; it has {', '.join(dataset)}"
                    raise PosencError(f"The dataset {name} {has}. Pass --split.")
                dataset = dataset[split]
        else:
            dataset = datasets.load_dataset(name, config, split=split, streaming=streaming)
        for index, row in enumerate(dataset):
            if rows.name not in row:
                raise PosencError(f"The dataset {title} has {rows.missing(row)}.")
            yield rows.entry(f"{name}[{split}]#{index}", row)
    except PosencError:
        raise
    except Exception as error:  # whatever the hub, a file format or a script of the dataset raises
        failed = f"The split {split!r} of dataset {title} cannot be read"
        raise PosencError(f"{failed}: {one_line(error)}") from error
    if index < 0:
        yield Skipped(f"{name}[{split}]", "a split without rows")


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of the datasets library wrote a folder."""
    one = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return one or (folder / "dataset_dict.json").is_file()
