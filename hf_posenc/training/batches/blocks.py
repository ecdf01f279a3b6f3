"""Training data: documents cut into blocks of tokens, equal on every rank and cached for later runs if requested."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

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
from hf_posenc.evaluation.documents.document import as_entries
from hf_posenc.evaluation.measuring.identity import check_tokenizer, tokenizer_hash
from hf_posenc.evaluation.options import read_whole
from hf_posenc.files import disk_errors, to_json, write_atomically
from hf_posenc.lengths import read_length
from hf_posenc.training.batches.collator import Numbers
from hf_posenc.training.names import POSITIONS

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT = 3
_TOKENS, _COUNTS = "blocks.arrow", "blocks.json"
_ROWS_PER_BATCH = 64
_UNWRITTEN = "The training data cannot be written to"

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

    def cut(self, document: TokenizedDocument) -> Iterator[Block]:
        """Yield the blocks that a document fills; if packed, its last tokens may wait for the next document."""
        tokens = document.tokens(0, len(document)).numpy()
        end = tokens[len(tokens) - len(self.suffix) :].tolist()
        if end != [*self.suffix]:  # it may be there already
            tokens = np.concatenate([tokens, np.asarray(self.suffix, dtype=np.int64)])
        self.tokens += len(tokens)
        while len(tokens):
            space = self.length - sum(map(len, self._parts))
            room = space - len(self.prefix)  # may be 0: special tokens then fill the block
            if not self.packed and len(tokens) < room:
                break
            part = np.concatenate([np.asarray(self.prefix, dtype=np.int64), tokens])[:space]
            tokens = tokens[max(room, 0) :]
            self._parts.append(part)
            if len(part) == space:
                yield Block(np.concatenate(self._parts), tuple(map(len, self._parts)))
                self._parts = []
        self.unused += len(tokens)

    def finish(self) -> None:
        """Count the tokens of an incomplete last block as unused."""
        self.unused += sum(max(len(part) - len(self.prefix), 0) for part in self._parts)
        self._parts = []


@dataclass
class Counts:
    """Counts of the training data.

    Attributes:
        length: Tokens in a block.
        tokens: Tokens of documents in blocks, without the special ones in front.
        unused: Tokens of those documents that are in no block.
        sha256: Hash of all blocks and document boundaries, equal on every rank and in every run.
        skipped: Number of documents that were not used; `reason` is that of the first.
    """

    length: int
    blocks: int = 0
    documents: int = 0
    tokens: int = 0
    unused: int = 0
    largest: int = -1
    sha256: str = ""
    skipped: int = 0
    reason: str = ""

    def line(self) -> str:
        share = self.unused / max(self.tokens + self.unused, 1)
        return (
            f"{self.blocks:,} blocks of {self.length:,} tokens from {self.documents:,} documents "
            f"({share:.0%} of their tokens are left over); {self.skipped:,} documents not used"
        )


@dataclass(frozen=True, eq=False)
class Blocks:
    """Training data.

    Attributes:
        dataset: The rows for a Trainer, as numpy arrays, int64: `input_ids`, shape (length,), and if packed
            `document_lengths`, which sum to the length.
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
            rows = Dataset.from_file(str(folder / _TOKENS), in_memory=in_memory)
            blocks = cls(rows.with_format("numpy"), Counts(**counts))
            if len(rows) != len(blocks):
                raise ValueError(f"{len(rows)} blocks, {len(blocks)} were written")
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
    from hf_posenc.embedded.corpus import select, standard_library

    for _, path, text in select([standard_library()], bytes_per_source=0).files:  # it is used whole
        yield Document(path, text)


def prepare_blocks(
    entries: Iterable[str | Entry],
    tokenizer: Any,
    *,
    length: int | str,
    positions: str = "contiguous",
    limit: int | None = None,
    cache: Path | str | None = None,
    source: Mapping[str, Any] | None = None,
) -> Blocks:
    """Read documents and cut them into blocks (see `hf_posenc.training.batches.blocks.Cutter`).

    With a cache, the first process writes the blocks. The other processes, of this run or of a later one, wait for it
    and read them. A killed process leaves no folder that counts as complete. Without a cache, every process makes its
    own blocks in memory; they are equal, since nothing is random.

    Args:
        entries: Texts, or documents of a reader of `hf_posenc.evaluation.documents`; not read if the blocks are cached.
        tokenizer: A transformers tokenizer.
        length: Tokens in a block.
        positions: As for `PositionCollator`; `"packed"` puts several documents into a block.
        limit: Number of usable documents after which reading stops; by default all are read.
        cache: A folder; created if missing.
        source: Description of the entries, from `source_of` of the command line; part of the cache's key. The sizes
            and modification times of the files in it count too.

    Returns:
        The blocks: `dataset` for a Trainer, and `counts` of what was read, used and left out.

    Raises:
        PosencError: No document fills a block; token ids of another tokenizer; a cache without a source, or that cannot
            be written to.

    Examples:
        >>> from hf_posenc.training import prepare_blocks
        >>> blocks = prepare_blocks(texts, tokenizer, length=128)
        >>> len(blocks), len(blocks.dataset[0]["input_ids"])
        (6, 128)
    """
    if positions not in POSITIONS:
        raise unknown("kind of positions", positions, POSITIONS)
    length = read_length(length, "length")
    if limit is not None:
        limit = read_whole(limit, "limit")
    if importlib.util.find_spec("datasets") is None:
        raise PosencError("Training needs datasets: pip install 'hf-posenc[train]'.")
    check_tokenizer(tokenizer)
    prefix = special_prefix(tokenizer, "auto")
    if length < len(prefix) + 2:
        raise PosencError(
            f"A block of {length} tokens has none to predict: give a longer block or target length."
        )
    suffix = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    packed = positions == "packed"
    writer = Writer(entries, tokenizer, Cutter(length, packed, prefix, suffix), limit)
    if cache is None:
        place = f"the folder for temporary files {tempfile.gettempdir()}"
        with disk_errors(f"{_UNWRITTEN} {place}"), tempfile.TemporaryDirectory() as folder:
            writer.write(Path(folder))
            return Blocks.read(Path(folder), in_memory=True)
    if not isinstance(source, Mapping):
        raise PosencError(
            "A cache needs source, the description of the documents: a dictionary such as {'kind': 'mine'}."
        )
    decisive = {
        "format": _FORMAT,
        "tokenizer": tokenizer_hash(tokenizer),
        "length": length,
        "packed": packed,
        "special": [list(prefix), suffix],
        "limit": limit,
        "source": {**source, "files": _file_stamps(source)},
    }
    key = hashlib.sha256(json.dumps(decisive, sort_keys=True, default=repr).encode()).hexdigest()
    return _read_cached(Path(cache), key[:32], writer)


def _file_stamps(source: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of the files in a source: a changed file is another source.

    The contents of a hub dataset are assumed to stay the same.
    """
    files = set[Path]()
    for name in map(str, (*source.get("paths", ()), source.get("name", ""))):
        for match in [name] if os.path.lexists(name) else glob(name, recursive=True):  # noqa: PTH207
            path = Path(match)
            files |= {*path.rglob("*")} if path.is_dir() else {path}
    stats = [(file, file.stat() if file.exists() else file.lstat()) for file in sorted(files)]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def _read_cached(cache: Path, key: str, writer: Writer) -> Blocks:
    folder, unfinished = cache / key, cache / f"unfinished-{key}"
    with disk_errors(f"{_UNWRITTEN} the cache {cache}"):
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


@dataclass
class Writer:
    """Reads documents and writes their blocks into an empty folder: an Arrow file, and last of all the counts."""

    entries: Iterable[str | Entry]
    tokenizer: Any
    cutter: Cutter
    limit: int | None

    def write(self, folder: Path) -> None:
        """Write all blocks and flush them to disk; the counts complete the folder."""
        import pyarrow as pa

        names = ("input_ids", "document_lengths") if self.cutter.packed else ("input_ids",)
        schema = pa.schema([(name, pa.list_(pa.int32())) for name in names])
        counts = Counts(self.cutter.length)
        with (folder / _TOKENS).open("wb") as file:
            with pa.ipc.new_stream(file, schema) as stream:
                rows = (dict(zip(names, block, strict=False)) for block in self.cut(counts))
                while batch := list(itertools.islice(rows, _ROWS_PER_BATCH)):
                    stream.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        if not counts.blocks:
            self._refuse(counts)
        write_atomically(folder / _COUNTS, to_json(asdict(counts)))

    def cut(self, counts: Counts) -> Iterator[Block]:
        """Yield all blocks, in the order of the documents, and count them."""
        vocabulary, digest = Vocabulary(self.tokenizer), hashlib.sha256()
        for entry in as_entries(self.entries):
            try:
                document = self._usable(entry, vocabulary)
            except UnreadableError as error:
                counts.skipped += 1
                counts.reason = counts.reason or f"{entry.name}: {error}"
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

    def _usable(self, entry: Entry, vocabulary: Vocabulary) -> TokenizedDocument:
        """Return a document's tokens, or raise `UnreadableError` with the reason why it is skipped."""
        if isinstance(entry, Skipped):
            raise UnreadableError(entry.reason)
        if isinstance(entry, Document) and not entry.text.strip():
            raise UnreadableError("empty")
        if isinstance(entry, TokenizedDocument):
            try:
                document = vocabulary.usable(entry)
            except UnreadableError as error:
                raise PosencError(
                    f"{entry.name}: {error}. Give the tokenizer that wrote them (--tokenizer), or a text (--column)."
                ) from error
        else:
            document = tokenize(entry, self.tokenizer)
        cut = self.cutter
        least = 1 if cut.packed else cut.length - len(cut.prefix) - len(cut.suffix)
        if len(document) < least:
            raise UnreadableError(f"too short: {len(document):,} tokens, {least:,} are needed")
        return document

    def _refuse(self, counts: Counts) -> NoReturn:
        """Raise with the reason why no document gave a block."""
        if not counts.skipped and not counts.documents:
            raise PosencError("There is no document to read.")
        why = f"together they have {self.cutter.tokens:,} tokens"
        if counts.skipped:
            more = f"; and {counts.skipped - 1:,} more" if counts.skipped > 1 else ""
            why = f"{counts.reason}{more}"
        raise PosencError(
            f"No document can be used for training ({why}). A block has {counts.length:,} tokens: give more or longer "
            "texts, a shorter --block_length, or --positions packed, which puts short documents side by side."
        )
