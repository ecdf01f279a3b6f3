"""The training data: documents as blocks of tokens, the same on every rank, kept from run to run if asked for."""

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
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.documents import (
    Document,
    Entry,
    Skipped,
    TokenizedDocument,
    UnreadableError,
    special_prefix,
    tokenize,
)
from hf_posenc.evaluation.documents.document import Vocabulary
from hf_posenc.evaluation.measuring.identity import tokenizer_hash
from hf_posenc.training.batches.collator import POSITIONS
from hf_posenc.training.batches.positions import Numbers

if TYPE_CHECKING:
    from datasets import Dataset


# Documents into blocks of one length: what the model is given, and what is left over.


@dataclass(frozen=True)
class Block:
    """An example.

    Attributes:
        ids: Its tokens, shape (length,).
        documents: The tokens of each document in it, which sum to the length.
    """

    ids: Numbers
    documents: tuple[int, ...]


@dataclass
class Cutter:
    """Cuts documents into blocks and counts what happens to them.

    A context begins with what the tokenizer puts in front of a text: so does every block, and every document in one.
    Behind a document's last token stands the token that ends a text, where the tokenizer has one.

    Args:
        length: Tokens in a block, special ones included.
        packed: Put documents next to each other; one that does not fit goes on, as another, in the next block. Without
            it every block is of one document, and what is left at that document's end is not used.
        prefix: The special tokens in front of every document.
        suffix: Those behind it.

    Attributes:
        tokens: Tokens that were read, those of the suffix included.
        unused: How many of them are in no block.
    """

    length: int
    packed: bool = False
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    tokens: int = 0
    unused: int = 0
    _parts: list[Numbers] = field(default_factory=list)
    _space: int = field(init=False)

    def __post_init__(self) -> None:
        self._space = self.length

    @property
    def least(self) -> int:
        """Tokens that a document must have to be used."""
        return 1 if self.packed else self.length - len(self.prefix) - len(self.suffix)

    def cut(self, document: TokenizedDocument) -> Iterator[Block]:
        """The blocks that a document fills; packed, the last of its tokens may wait for the next document."""
        ids = document.tokens(0, len(document)).numpy()
        if ids[len(ids) - len(self.suffix) :].tolist() != [*self.suffix]:  # ids may come with it
            ids = np.concatenate([ids, np.asarray(self.suffix, dtype=np.int64)])
        self.tokens += len(ids)
        while len(ids):
            room = self._space - len(self.prefix)  # none, maybe: then special tokens fill the block
            if not self.packed and len(ids) < room:
                break
            part = np.concatenate([np.asarray(self.prefix, dtype=np.int64), ids])[: self._space]
            ids = ids[max(room, 0) :]
            self._parts.append(part)
            self._space -= len(part)
            if not self._space:
                yield Block(np.concatenate(self._parts), tuple(map(len, self._parts)))
                self._parts, self._space = [], self.length
        self.unused += len(ids)

    def finish(self) -> None:
        """Counts what waits for a document that does not come."""
        self.unused += sum(max(len(part) - len(self.prefix), 0) for part in self._parts)
        self._parts, self._space = [], self.length


# Blocks of tokens on disk: an Arrow file and what was counted, written whole or not at all, read as a dataset.


NAMED = 100
"""So many of the documents that were not used are kept by name; the others are counted."""

_TOKENS, _COUNTS = "blocks.arrow", "blocks.json"
_ROWS = 64


@dataclass(frozen=True)
class Counts:
    """What was counted while blocks were made.

    Attributes:
        length: Tokens in a block.
        blocks: Number of blocks.
        documents: Documents that are in them.
        tokens: Tokens of documents in blocks, without the special ones in front.
        unused: Tokens of those documents that are in no block.
        largest: The largest token id.
        sha256: Hash of all blocks, documents' boundaries included: equal on every rank and in every run.
        skipped: Number of documents that were not used.
        reasons: Name and reason of the first of them.
    """

    length: int
    blocks: int
    documents: int
    tokens: int
    unused: int
    largest: int
    sha256: str
    skipped: int
    reasons: tuple[Skipped, ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Counts:
        """What `dataclasses.asdict` gave."""
        reasons = tuple(Skipped(**each) for each in values["reasons"])
        return cls(**{**values, "reasons": reasons})

    def line(self) -> str:
        """All of it in a line."""
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
        counts: What was counted.
    """

    dataset: Dataset
    counts: Counts

    def __len__(self) -> int:
        return self.counts.blocks


class Writer:
    """Writes blocks into a folder.

    Args:
        folder: Exists and is empty.
        packed: Whether blocks hold several documents.
    """

    def __init__(self, folder: Path, packed: bool) -> None:
        require_datasets()
        import pyarrow as pa

        numbers = pa.list_(pa.int32())
        names = ("input_ids", "document_lengths") if packed else ("input_ids",)
        self._schema = pa.schema([(name, numbers) for name in names])
        self._packed, self._folder = packed, folder
        self._hash, self.blocks, self.largest = hashlib.sha256(), 0, -1

    def write(self, blocks: Iterable[Block]) -> None:
        """All blocks, some rows at a time; on the disk when this returns."""
        import pyarrow as pa

        with (self._folder / _TOKENS).open("wb") as file:
            with pa.ipc.new_stream(file, self._schema) as stream:
                rows: list[Block] = []
                for block in blocks:
                    self._count(block)
                    rows.append(block)
                    if len(rows) == _ROWS:
                        stream.write_batch(self._batch(rows))
                        rows = []
                stream.write_batch(self._batch(rows))
            file.flush()
            os.fsync(file.fileno())

    def close(self, **counted: Any) -> None:
        """Adds what was counted elsewhere; with this the folder is complete."""
        counts = Counts(
            blocks=self.blocks,
            largest=self.largest,
            sha256=self._hash.hexdigest(),
            **counted,
        )
        with (self._folder / _COUNTS).open("w", encoding="utf-8") as file:
            json.dump(asdict(counts), file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def _count(self, block: Block) -> None:
        self.blocks += 1
        self.largest = max(self.largest, int(block.ids.max()))
        for numbers in (block.ids, np.asarray(block.documents)):
            self._hash.update(numbers.astype("<i8").tobytes())

    def _batch(self, rows: list[Block]) -> Any:
        import pyarrow as pa

        columns = [pa.array([row.ids for row in rows], self._schema.field(0).type)]
        if self._packed:
            documents = [row.documents for row in rows]
            columns.append(pa.array(documents, self._schema.field(1).type))
        return pa.record_batch(columns, schema=self._schema)


def read_blocks(folder: Path, *, in_memory: bool = False) -> Blocks:
    """What a `Writer` has written.

    Args:
        folder: Where.
        in_memory: Copy it, so that the folder may go.

    Raises:
        PosencError: The folder is damaged.
    """
    from datasets import Dataset

    try:
        counts = json.loads((folder / _COUNTS).read_text(encoding="utf-8"))
        dataset = Dataset.from_file(str(folder / _TOKENS), in_memory=in_memory)
        found = Blocks(dataset.with_format("numpy"), Counts.from_dict(counts))
        if len(dataset) != len(found):
            raise ValueError(f"{len(dataset)} blocks, {len(found)} were written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PosencError(
            f"The prepared data in {folder} are damaged: remove that folder ({error})"
        ) from error
    return found


def require_datasets() -> None:
    """Says how to get the library that holds training data.

    Raises:
        PosencError: It is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise PosencError("Training needs the datasets library: pip install 'hf-posenc[train]'.")


def is_complete(folder: Path) -> bool:
    """Whether a writer has come to its end there."""
    return (folder / _COUNTS).is_file()


def remove(folder: Path) -> None:
    """Takes away what an interrupted writer has left."""
    if folder.exists():
        shutil.rmtree(folder)


# Where training text comes from when nothing is named, and what tells two states of a source apart.


STANDARD_LIBRARY: dict[str, Any] = {
    "kind": "modules of the standard library that are not held out",
    "python": platform.python_version(),
}
"""What a result says of `read_standard_library`."""


def read_standard_library() -> Iterator[Document]:
    """The part of the embedded model's training corpus that every Python has: its standard library.

    Chosen by the rules of `hf_posenc.embedded.corpus`: no tests, no tables, nothing twice, and none of the held-out
    modules that `read_embedded` gives for evaluation, nor what quotes them.
    """
    from hf_posenc.embedded.corpus import environment, select

    first = itertools.islice(environment(), 1)  # the standard library, which is taken whole
    for _, path, text in select(first, bytes_per_source=0).files:
        yield Document(path, text)


def stamped(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source's description with the sizes and times of the files that it names.

    So a file that was changed is another source. What a hub dataset holds is taken to stay what it was.

    Args:
        source: As `source_of` of the command line gives it: `paths` of texts, or the `name` of a dataset.
    """
    named = [*source.get("paths", ()), *([source["name"]] if "name" in source else ())]
    files = sorted({file for name in named for file in _files(str(name))})
    return {**source, "files": [(str(file), *_stamp(file)) for file in files]}


def _files(name: str) -> Iterator[Path]:
    for found in [name] if os.path.lexists(name) else glob(name, recursive=True):  # noqa: PTH207
        path = Path(found)
        yield from (path.rglob("*") if path.is_dir() else [path])


def _stamp(file: Path) -> tuple[int, int]:
    found = file.lstat() if not file.exists() else file.stat()
    return found.st_size, found.st_mtime_ns


FORMAT = 1


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
    """Reads documents and makes blocks of them (see `hf_posenc.training.batches.blocks.Cutter`).

    With a cache the first process to come makes the blocks and the others, of this run or of a later one, wait for it
    and read them; a process that is killed leaves nothing that is taken for complete. Without one every process makes
    its own, in memory; they are equal, since nothing here is drawn.

    Args:
        entries: What a reader of `hf_posenc.evaluation.documents` gives; not read where the cache has the blocks.
        tokenizer: A transformers tokenizer.
        length: Tokens in a block.
        positions: As for `PositionCollator`; `"packed"` puts several documents into a block.
        limit: Number of usable documents after which reading stops; by default all are read.
        cache: A folder, made where it is missing.
        source: What the entries are of, as `source_of` of the command line describes it; a cache is searched by it.
            Files and folders named in it count with their sizes and times.
        seen: Called with each document's name, for progress.

    Raises:
        PosencError: No document gives a block; token ids of another tokenizer; a cache without a source, or that cannot
            be written to.
    """
    if positions not in POSITIONS:
        raise unknown("way of giving positions", positions, POSITIONS)
    if limit is not None and limit < 1:
        raise PosencError(f"{limit} documents: at least 1 is needed, or no limit for all.")
    prefix = special_prefix(tokenizer, "auto")
    if length < len(prefix) + 2:
        raise PosencError(
            f"A block of {length} tokens has none to predict: give a longer block or target length."
        )
    ending = tokenizer.eos_token_id
    cutter = Cutter(length, positions == "packed", prefix, [] if ending is None else [int(ending)])
    reading = _Reading(entries, tokenizer, cutter, limit, seen)
    if cache is None:
        with _disk("the folder for temporary files", tempfile.gettempdir()), _temporary() as folder:
            reading.write(folder)
            return read_blocks(folder, in_memory=True)
    if source is None:
        raise PosencError("A cache needs source, which says what the documents are of.")
    asked = {
        "format": FORMAT,
        "tokenizer": tokenizer_hash(tokenizer),
        "length": length,
        "packed": cutter.packed,
        "special": [list(cutter.prefix), list(cutter.suffix)],
        "limit": limit,
        "source": stamped(source),
    }
    key = hashlib.sha256(json.dumps(asked, sort_keys=True, default=repr).encode()).hexdigest()[:32]
    return _cached(cache, key, reading)


def _cached(cache: Path, key: str, reading: _Reading) -> Blocks:
    from filelock import FileLock

    folder, unfinished = cache / key, cache / f"unfinished-{key}"
    with _disk("the cache", cache):
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock"):  # the system lets go of it where a process is killed
            if not is_complete(folder):
                remove(folder)
                remove(unfinished)
                unfinished.mkdir()
                try:
                    reading.write(unfinished)
                    unfinished.rename(folder)
                finally:
                    remove(unfinished)
    return read_blocks(folder)


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hf-posenc-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _disk(what: str, folder: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PosencError(
            f"The training data cannot be written to {what} {folder}: {error.strerror or error}"
        ) from error


@dataclass
class _Reading:
    """Documents on their way into blocks."""

    entries: Iterable[Entry]
    tokenizer: Any
    cutter: Cutter
    limit: int | None
    seen: Callable[[str], None]
    used: int = 0
    longest: int = 0
    skipped: int = 0
    reasons: list[Skipped] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Reads everything and writes the blocks."""
        writer = Writer(folder, self.cutter.packed)
        writer.write(self._blocks())
        if not writer.blocks:
            raise PosencError(self._nothing())
        writer.close(
            length=self.cutter.length,
            documents=self.used,
            tokens=self.cutter.tokens - self.cutter.unused,
            unused=self.cutter.unused,
            skipped=self.skipped,
            reasons=self.reasons,
        )

    def _blocks(self) -> Iterator[Block]:
        vocabulary = Vocabulary(self.tokenizer)
        for entry in self.entries:
            self.seen(entry.name)
            found = self._tokens(entry, vocabulary)
            if isinstance(found, Skipped):
                self._skip(found)
                continue
            self.used += 1
            yield from self.cutter.cut(found)
            if self.used == self.limit:
                break
        self.cutter.finish()

    def _tokens(self, entry: Entry, vocabulary: Vocabulary) -> TokenizedDocument | Skipped:
        if isinstance(entry, Skipped):
            return entry
        if isinstance(entry, Document) and not entry.text.strip():
            return Skipped(entry.name, "empty")
        if isinstance(entry, TokenizedDocument):
            try:
                found = vocabulary.usable(entry)
            except UnreadableError as error:
                raise PosencError(
                    f"{entry.name}: {error}. Give the tokenizer that wrote them (--tokenizer), or a text (--column)."
                ) from error
        else:
            try:
                found = tokenize(entry, self.tokenizer)
            except UnreadableError as error:
                return Skipped(entry.name, str(error))
        self.longest = max(self.longest, len(found))
        if len(found) < (least := self.cutter.least):
            return Skipped(entry.name, f"too short: {len(found):,} tokens, {least:,} are needed")
        return found

    def _nothing(self) -> str:
        if not self.skipped and not self.used:
            return "There is no document to read."
        if not self.skipped:
            return (
                f"All documents together have {self.cutter.tokens:,} tokens, fewer than a block of "
                f"{self.cutter.length:,}: give more text, or a shorter --block_length."
            )
        first = f"{self.reasons[0].name}: {self.reasons[0].reason}"
        others = f"; and {self.skipped - 1:,} more" if self.skipped > 1 else ""
        advice = ""
        if self.longest:
            advice = (
                f" The longest document has {self.longest:,} tokens, a block has {self.cutter.length:,}: give a "
                "shorter --block_length, or --positions packed, which puts short documents side by side."
            )
        return f"No document can be trained on ({first}{others}).{advice}"

    def _skip(self, skipped: Skipped) -> None:
        self.skipped += 1
        if len(self.reasons) < NAMED:
            self.reasons.append(skipped)
