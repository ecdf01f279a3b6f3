"""Training data: documents cut into blocks of tokens, equal on every rank and cached for later runs if requested."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from filelock import FileLock

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.documents import (
    Document,
    Entry,
    Skipped,
    TokenizedDocument,
    UnreadableError,
    Vocabulary,
    special_prefix,
    tokenize,
)
from hf_posenc.evaluation.measuring.identity import tokenizer_hash
from hf_posenc.files import to_json, write_atomically
from hf_posenc.training.batches.collator import POSITIONS, Numbers

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT = 1
_TOKENS, _COUNTS = "blocks.arrow", "blocks.json"
_ROWS_PER_BATCH = 64
_MAX_REASONS = 100  # skipped documents that are stored by name

STANDARD_LIBRARY: dict[str, Any] = {
    "kind": "modules of the standard library that are not held out",
    "python": platform.python_version(),
}
"""Description of `read_standard_library` in results."""


class Block(NamedTuple):
    """An example: its tokens, shape (length,), and the number of tokens of each document in it."""

    ids: Numbers
    documents: tuple[int, ...]


@dataclass
class Cutter:
    """Cuts documents into blocks and counts their tokens.

    Every document in a block begins with the special tokens of the prefix, and every document ends with those of the
    suffix. If packed, documents are next to each other, and one that does not fit is continued, as another one, in the
    next block. Otherwise every block holds one document, and the remainder of that document is not used. `tokens` is
    the number of those read, with the suffixes, and `unused` the number of these that are in no block.
    """

    length: int
    packed: bool = False
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    tokens: int = 0
    unused: int = 0
    _parts: list[Numbers] = field(default_factory=list)

    @property
    def least(self) -> int:
        """The number of tokens that a document needs."""
        return 1 if self.packed else self.length - len(self.prefix) - len(self.suffix)

    def cut(self, document: TokenizedDocument) -> Iterator[Block]:
        """Yield the blocks that a document fills; if packed, its last tokens may wait for the next document."""
        ids = document.tokens(0, len(document)).numpy()
        if ids[len(ids) - len(self.suffix) :].tolist() != [*self.suffix]:  # may be there already
            ids = np.concatenate([ids, np.asarray(self.suffix, dtype=np.int64)])
        self.tokens += len(ids)
        while len(ids):
            space = self.length - sum(map(len, self._parts))
            room = space - len(self.prefix)  # may be 0: special tokens then fill the block
            if not self.packed and len(ids) < room:
                break
            part = np.concatenate([np.asarray(self.prefix, dtype=np.int64), ids])[:space]
            ids = ids[max(room, 0) :]
            self._parts.append(part)
            if len(part) == space:
                yield Block(np.concatenate(self._parts), tuple(map(len, self._parts)))
                self._parts = []
        self.unused += len(ids)

    def finish(self) -> None:
        """Count the tokens of an incomplete last block as unused."""
        self.unused += sum(max(len(part) - len(self.prefix), 0) for part in self._parts)
        self._parts = []


@dataclass
class Counts:
    """Counts of the training data.

    Attributes:
        length: Tokens in a block.
        blocks: Number of blocks.
        documents: Number of documents in the blocks.
        tokens: Tokens of documents in blocks, without the special ones in front.
        unused: Tokens of those documents that are in no block.
        largest: The largest token id.
        sha256: Hash of all blocks and document boundaries, equal on every rank and in every run.
        skipped: Number of documents that were not used; `reasons` has the first of them.
    """

    length: int
    blocks: int = 0
    documents: int = 0
    tokens: int = 0
    unused: int = 0
    largest: int = -1
    sha256: str = ""
    skipped: int = 0
    reasons: tuple[Skipped, ...] = ()

    def line(self) -> str:
        """Return a summary in one line."""
        share = self.unused / max(self.tokens + self.unused, 1)
        return (
            f"{self.blocks:,} blocks of {self.length:,} tokens from {self.documents:,} documents "
            f"({share:.0%} of their tokens are left over); {self.skipped:,} documents not used"
        )


@dataclass(frozen=True, eq=False)
class Blocks:
    """Training data.

    Attributes:
        dataset: Column `input_ids` (length,); packed also `document_lengths`, which sum to the length. Rows are numpy
            arrays, int64.
        counts: The counts.
    """

    dataset: Dataset
    counts: Counts

    def __len__(self) -> int:
        return self.counts.blocks

    @classmethod
    def read(cls, folder: Path, *, in_memory: bool = False) -> Blocks:
        """Read the blocks that a `Writer` wrote, or copy them into memory, so that the folder can be removed."""
        from datasets import Dataset

        try:
            counts = json.loads((folder / _COUNTS).read_text(encoding="utf-8"))
            counts["reasons"] = tuple(Skipped(**each) for each in counts["reasons"])
            dataset = Dataset.from_file(str(folder / _TOKENS), in_memory=in_memory)
            blocks = cls(dataset.with_format("numpy"), Counts(**counts))
            if len(dataset) != len(blocks):
                raise ValueError(f"{len(dataset)} blocks, {len(blocks)} were written")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PosencError(
                f"The prepared data in {folder} are damaged: remove that folder ({error})"
            ) from error
        return blocks


def read_standard_library() -> Iterator[Document]:
    """Yield the part of the embedded model's training corpus that every Python has: its standard library.

    Selected by the rules of `hf_posenc.embedded.corpus`: no tests, no tables, no duplicates. The held-out modules that
    `read_embedded` reads for evaluation are excluded, and so is every file that quotes them.
    """
    from hf_posenc.embedded.corpus import environment, select

    first = itertools.islice(environment(), 1)  # the standard library, which is used whole
    for _, path, text in select(first, bytes_per_source=0).files:
        yield Document(path, text)


def prepare_blocks(
    entries: Iterable[Entry],
    tokenizer: Any,
    *,
    length: int,
    positions: str = "contiguous",
    limit: int | None = None,
    cache: Path | None = None,
    source: Mapping[str, Any] | None = None,
    seen: Callable[[str], None] = lambda name: None,
) -> Blocks:
    """Read documents and cut them into blocks (see `hf_posenc.training.batches.blocks.Cutter`).

    With a cache, the first process writes the blocks. The other processes, of this run or of a later one, wait for it
    and read them. A killed process leaves no folder that counts as complete. Without a cache, every process makes its
    own blocks in memory; they are equal, since nothing is random.

    Args:
        entries: Documents of a reader of `hf_posenc.evaluation.documents`; not read if the blocks are cached.
        tokenizer: A transformers tokenizer.
        length: Tokens in a block.
        positions: As for `PositionCollator`; `"packed"` puts several documents into a block.
        limit: Number of usable documents after which reading stops; by default all are read.
        cache: A folder; created if missing.
        source: Description of the entries, from `source_of` of the command line; part of the cache's key. The sizes
            and modification times of the files in it count too.
        seen: Called with each document's name, for progress.

    Raises:
        PosencError: No document fills a block; token ids of another tokenizer; a cache without a source, or that cannot
            be written to.
    """
    if positions not in POSITIONS:
        raise unknown("kind of positions", positions, POSITIONS)
    if limit is not None and limit < 1:
        raise PosencError(f"{limit} documents: at least 1 is needed, or no limit for all.")
    prefix = special_prefix(tokenizer, "auto")
    if length < len(prefix) + 2:
        raise PosencError(
            f"A block of {length} tokens has none to predict: give a longer block or target length."
        )
    ending = tokenizer.eos_token_id
    cutter = Cutter(length, positions == "packed", prefix, [] if ending is None else [int(ending)])
    writer = Writer(entries, tokenizer, cutter, limit, seen)
    if cache is None:
        place = f"the folder for temporary files {tempfile.gettempdir()}"
        with _disk_errors(place), tempfile.TemporaryDirectory(prefix="hf-posenc-") as folder:
            writer.write(Path(folder))
            return Blocks.read(Path(folder), in_memory=True)
    if source is None:
        raise PosencError("A cache needs source, the description of the documents.")
    decisive = {
        "format": _FORMAT,
        "tokenizer": tokenizer_hash(tokenizer),
        "length": length,
        "packed": cutter.packed,
        "special": [list(cutter.prefix), list(cutter.suffix)],
        "limit": limit,
        "source": {**source, "files": _file_stamps(source)},
    }
    text = json.dumps(decisive, sort_keys=True, default=repr)
    return _read_cached(cache, hashlib.sha256(text.encode()).hexdigest()[:32], writer)


def _file_stamps(source: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of the files in a source: a changed file is another source.

    The contents of a hub dataset are assumed to stay the same.
    """
    names = [*source.get("paths", ()), *([source["name"]] if "name" in source else ())]
    files = sorted({file for name in names for file in _files(str(name))})
    stats = [(file, file.stat() if file.exists() else file.lstat()) for file in files]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def _files(name: str) -> Iterator[Path]:
    for match in [name] if os.path.lexists(name) else glob(name, recursive=True):  # noqa: PTH207
        path = Path(match)
        yield from (path.rglob("*") if path.is_dir() else [path])


def _read_cached(cache: Path, key: str, writer: Writer) -> Blocks:
    folder, unfinished = cache / key, cache / f"unfinished-{key}"
    with _disk_errors(f"the cache {cache}"):
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock"):  # the system releases it if a process is killed
            if not (folder / _COUNTS).is_file():
                for incomplete in (folder, unfinished):
                    shutil.rmtree(incomplete, ignore_errors=True)
                unfinished.mkdir()
                try:
                    writer.write(unfinished)
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    return Blocks.read(folder)


@contextlib.contextmanager
def _disk_errors(place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PosencError(
            f"The training data cannot be written to {place}: {error.strerror or error}"
        ) from error


@dataclass
class Writer:
    """Reads documents and writes their blocks into an empty folder: an Arrow file, and last of all the counts."""

    entries: Iterable[Entry]
    tokenizer: Any
    cutter: Cutter
    limit: int | None
    seen: Callable[[str], None]

    def __post_init__(self) -> None:
        if importlib.util.find_spec("datasets") is None:
            raise PosencError(
                "Training needs the datasets library: pip install 'hf-posenc[train]'."
            )
        self._counts, self._longest = Counts(self.cutter.length), 0

    def write(self, folder: Path) -> None:
        """Write all blocks and flush them to disk; the counts complete the folder."""
        import pyarrow as pa

        names = ("input_ids", "document_lengths") if self.cutter.packed else ("input_ids",)
        schema = pa.schema([(name, pa.list_(pa.int32())) for name in names])
        with (folder / _TOKENS).open("wb") as file:
            with pa.ipc.new_stream(file, schema) as stream:
                blocks = self._cut()
                while rows := list(itertools.islice(blocks, _ROWS_PER_BATCH)):
                    batch = pa.RecordBatch.from_pydict(self._columns(rows), schema=schema)
                    stream.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        if not self._counts.blocks:
            raise PosencError(self._explanation())
        write_atomically(folder / _COUNTS, to_json(asdict(self._counts)))

    def _columns(self, rows: list[Block]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"input_ids": [row.ids for row in rows]}
        if self.cutter.packed:
            columns["document_lengths"] = [row.documents for row in rows]
        return columns

    def _cut(self) -> Iterator[Block]:
        vocabulary, counts, digest = Vocabulary(self.tokenizer), self._counts, hashlib.sha256()
        for entry in self.entries:
            self.seen(entry.name)
            document = self._tokenize(entry, vocabulary)
            if isinstance(document, Skipped):
                counts.skipped += 1
                if len(counts.reasons) < _MAX_REASONS:
                    counts.reasons += (document,)
                continue
            counts.documents += 1
            for block in self.cutter.cut(document):
                counts.blocks += 1
                counts.largest = max(counts.largest, int(block.ids.max()))
                for numbers in (block.ids, np.asarray(block.documents)):
                    digest.update(numbers.astype("<i8").tobytes())
                yield block
            if counts.documents == self.limit:
                break
        self.cutter.finish()
        counts.tokens, counts.unused = self.cutter.tokens - self.cutter.unused, self.cutter.unused
        counts.sha256 = digest.hexdigest()

    def _tokenize(self, entry: Entry, vocabulary: Vocabulary) -> TokenizedDocument | Skipped:
        if isinstance(entry, Skipped):
            return entry
        if isinstance(entry, Document) and not entry.text.strip():
            return Skipped(entry.name, "empty")
        try:
            if isinstance(entry, TokenizedDocument):
                document = vocabulary.usable(entry)
            else:
                document = tokenize(entry, self.tokenizer)
        except UnreadableError as error:
            if not isinstance(entry, TokenizedDocument):
                return Skipped(entry.name, str(error))
            raise PosencError(
                f"{entry.name}: {error}. Give the tokenizer that wrote them (--tokenizer), or a text (--column)."
            ) from error
        self._longest = max(self._longest, len(document))
        if len(document) < (least := self.cutter.least):
            return Skipped(entry.name, f"too short: {len(document):,} tokens, {least:,} are needed")
        return document

    def _explanation(self) -> str:
        """Return why there is no block."""
        counts, length = self._counts, self.cutter.length
        if not counts.skipped:
            if not counts.documents:
                return "There is no document to read."
            return (
                f"All documents together have {self.cutter.tokens:,} tokens, fewer than a block of {length:,}: give "
                "more text, or a shorter --block_length."
            )
        first = f"{counts.reasons[0].name}: {counts.reasons[0].reason}"
        others = f"; and {counts.skipped - 1:,} more" if counts.skipped > 1 else ""
        advice = ""
        if self._longest:
            advice = (
                f" The longest document has {self._longest:,} tokens, a block has {length:,}: give a shorter "
                "--block_length, or --positions packed, which puts short documents side by side."
            )
        return f"No document can be used for training ({first}{others}).{advice}"
