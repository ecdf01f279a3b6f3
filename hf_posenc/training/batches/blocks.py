"""Training data: documents cut into blocks of tokens, equal on every rank and cached for later runs if requested."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import platform
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from filelock import FileLock

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.documents import (
    Conversation,
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
from hf_posenc.evaluation.flags import read_whole
from hf_posenc.evaluation.measuring.identity import check_tokenizer, tokenizer_hash
from hf_posenc.files import disk_errors, to_json, write_atomically
from hf_posenc.lengths import read_length
from hf_posenc.training.batches.chat import tokenize_conversation
from hf_posenc.training.batches.collator import IGNORED, Numbers
from hf_posenc.training.names import POSITIONS

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset

_FORMAT = 2
_TOKENS, _COUNTS = "blocks.arrow", "blocks.json"
_ROWS_PER_BATCH = 64
_MAX_REASONS = 100  # skipped documents that are stored by name
_UNWRITTEN = "The training data cannot be written to"
_SHUFFLED = 1000  # blocks of a stream that are shuffled at a time
Tokens = TokenizedDocument | Skipped
_OWN: Numbers = np.zeros(0, dtype=np.int64)

STANDARD_LIBRARY: dict[str, Any] = {
    "kind": "modules of the standard library that are not held out",
    "python": platform.python_version(),
}
"""Description of `read_standard_library` in results."""


class Block(NamedTuple):
    """An example: its tokens, shape (length,), the number of tokens of each document in it, and its labels.

    The labels are those of `PositionCollator`; without any, every token is its own label.
    """

    ids: Numbers
    documents: tuple[int, ...]
    labels: Numbers = _OWN

    def row(self, packed: bool) -> dict[str, Any]:
        row: dict[str, Any] = {"input_ids": self.ids, "labels": self.labels}
        return {**row, "document_lengths": self.documents} if packed else row


@dataclass
class Cutter:
    """Cuts documents into blocks and counts their tokens.

    Every document in a block begins with the special tokens of the prefix, and every document ends with those of the
    suffix; a conversation ends as its chat template does. If packed, documents are next to each other, and one that
    does not fit is continued, as another one, in the next block. Otherwise every block holds one document, and the
    remainder of that document is not used. A block without a token to train on is not used either. `tokens` is the
    number of those read, with the suffixes, and `unused` the number of these that are in no block.
    """

    length: int
    packed: bool = False
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    tokens: int = 0
    unused: int = 0
    _parts: list[Numbers] = field(default_factory=list)  # ids and labels, shape (2, n)

    def cut(self, document: TokenizedDocument) -> Iterator[Block]:
        """Yield the blocks that a document fills; if packed, its last tokens may wait for the next document."""
        ids = document.tokens(0, len(document)).numpy()
        tokens = np.stack([ids, ids])
        if document.trained is not None:
            tokens[1, ~document.trained.numpy()] = IGNORED
        elif ids[len(ids) - len(self.suffix) :].tolist() != [*self.suffix]:  # may be there already
            tokens = np.concatenate([tokens, _special(self.suffix)], axis=1)
        self.tokens += tokens.shape[1]
        while tokens.shape[1]:
            space = self.length - sum(part.shape[1] for part in self._parts)
            room = space - len(self.prefix)  # may be 0: special tokens then fill the block
            if not self.packed and tokens.shape[1] < room:
                break
            part = np.concatenate([_special(self.prefix), tokens], axis=1)[:, :space]
            tokens = tokens[:, max(room, 0) :]
            self._parts.append(part)
            if part.shape[1] < space:
                continue  # the block goes on with the next document
            if (block := self._block()) is None:
                self.finish()
            else:
                yield block
            self._parts = []
        self.unused += tokens.shape[1]

    def _block(self) -> Block | None:
        """Return the block of all parts; `None` if no token in it has a label."""
        ids, labels = np.concatenate(self._parts, axis=1)
        documents = tuple(part.shape[1] for part in self._parts)
        if (labels == ids).all():
            return Block(ids, documents)
        labels[np.cumsum(documents) - documents] = IGNORED  # no token precedes a document's first
        return Block(ids, documents, labels) if (labels != IGNORED).any() else None

    def finish(self) -> None:
        """Count the tokens of an incomplete last block as unused."""
        self.unused += sum(max(part.shape[1] - len(self.prefix), 0) for part in self._parts)
        self._parts = []


def _special(tokens: Sequence[int]) -> Numbers:
    """Return special tokens as ids and labels, shape (2, n)."""
    return np.tile(np.asarray(tokens, dtype=np.int64), (2, 1))


@dataclass
class Counts:
    """Counts of the training data.

    Attributes:
        length: Tokens in a block.
        tokens: Tokens of documents in blocks, without the special ones in front.
        unused: Tokens of those documents that are in no block.
        sha256: Hash of all blocks and document boundaries, equal on every rank and in every run.
        conversations: Number of the documents of which only the assistant's tokens have a label.
        skipped: Number of documents that were not used; `reasons` has the first of them.
    """

    length: int
    blocks: int = 0
    documents: int = 0
    tokens: int = 0
    unused: int = 0
    largest: int = -1
    sha256: str = ""
    conversations: int = 0
    skipped: int = 0
    reasons: tuple[Skipped, ...] = ()

    def line(self) -> str:
        if not self.blocks:
            return f"Blocks of {self.length:,} tokens, cut while training"
        share = self.unused / max(self.tokens + self.unused, 1)
        return (
            f"{self.blocks:,} blocks of {self.length:,} tokens from {self.documents:,} documents "
            f"({share:.0%} of their tokens are left over); {self.skipped:,} documents not used"
        )


@dataclass(frozen=True, eq=False)
class Blocks:
    """Training data.

    Attributes:
        rows: Columns `input_ids` (length,) and `labels`, (length,) of a conversation, otherwise (0,); packed also
            `document_lengths`, which sum to the length.
        counts: The counts; of a stream, only what is known before it is read.
    """

    rows: Dataset | IterableDataset
    counts: Counts

    def __len__(self) -> int:
        return self.counts.blocks

    @property
    def streamed(self) -> bool:
        """True if the blocks are made while they are read."""
        return not hasattr(self.rows, "__len__")

    @property
    def dataset(self) -> Dataset | IterableDataset:
        """The rows for a Trainer, as numpy arrays, int64; without the labels if every token is its own.

        A stream repeats without end: a Trainer that resumes skips batches within one epoch only.
        """
        rows = self.rows
        if self.streamed:
            rows = rows.repeat(None)
        elif not self.counts.conversations:
            rows = rows.remove_columns("labels")
        return rows.with_format("numpy")

    @classmethod
    def read(cls, folder: Path, *, in_memory: bool = False) -> Blocks:
        """Read the blocks that a `Writer` wrote, or copy them into memory, so that the folder can be removed."""
        from datasets import Dataset

        try:
            counts = json.loads((folder / _COUNTS).read_text(encoding="utf-8"))
            counts["reasons"] = tuple(Skipped(**each) for each in counts["reasons"])
            rows = Dataset.from_file(str(folder / _TOKENS), in_memory=in_memory)
            blocks = cls(rows, Counts(**counts))
            if len(rows) != len(blocks):
                raise ValueError(f"{len(rows)} blocks, {len(blocks)} were written")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PosencError(
                f"The prepared data in {folder} are damaged: remove that folder ({error})"
            ) from error
        return blocks


def mix_blocks(parts: Sequence[tuple[Blocks, float]], seed: int = 0) -> Blocks:
    """Mix the blocks of several sources, in proportion to their weights, until one source has no more.

    No block is repeated. Every part is shuffled first, so that a source that is not used up is represented by all of
    its documents.

    Args:
        parts: The blocks of each source, from `prepare_blocks`, with its weight: its share of the result.
        seed: Seed of the order.

    Returns:
        The mixed blocks; of streams, a stream.

    Raises:
        PosencError: A weight that is not positive; streams beside cached blocks; blocks of different lengths.

    Examples:
        >>> from hf_posenc.training import mix_blocks, prepare_blocks
        >>> code, books = (prepare_blocks([text], tokenizer, length=64) for text in texts)
        >>> len(mix_blocks([(code, 2.0), (books, 1.0)]).rows)
        9
    """
    from datasets import interleave_datasets

    sources, weights = [blocks for blocks, _ in parts], [weight for _, weight in parts]
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise PosencError(f"A mixture needs positive weights; these are {weights}.")
    kinds = {(each.streamed, each.counts.length, *each.rows.column_names) for each in sources}
    if len(kinds) > 1:
        raise PosencError("A mixture needs blocks of one length and kind, all streamed or none.")
    rows = interleave_datasets(
        [blocks.rows.shuffle(seed) if not blocks.streamed else blocks.rows for blocks in sources],
        probabilities=[weight / sum(weights) for weight in weights],
        seed=seed,
        stopping_strategy="first_exhausted",
    )
    counts = [blocks.counts for blocks in sources]
    digest = json.dumps([[c.sha256 for c in counts], weights, seed])
    length, blocks = counts[0].length, 0 if sources[0].streamed else len(rows)
    read, used = sum(c.tokens + c.unused for c in counts), blocks * length
    summed = ("documents", "conversations", "skipped")
    mixed = Counts(
        length,
        blocks,
        tokens=min(read, used),
        unused=max(0, read - used),
        largest=max(c.largest for c in counts),
        sha256=hashlib.sha256(digest.encode()).hexdigest(),
        reasons=tuple(itertools.chain(*(c.reasons for c in counts)))[:_MAX_REASONS],
        **{name: sum(getattr(c, name) for c in counts) for name in summed},
    )
    return Blocks(rows, mixed)


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
    workers: int = 1,
    stream: bool = False,
) -> Blocks:
    """Read documents and cut them into blocks (see `hf_posenc.training.batches.blocks.Cutter`).

    With a cache, the first process writes the blocks. The other processes, of this run or of a later one, wait for it
    and read them. A killed process leaves no folder that counts as complete. Without a cache, every process makes its
    own blocks in memory; they are equal, since nothing is random. A stream writes nothing: every process reads the
    documents while it trains, and shuffles 1,000 blocks at a time.

    Args:
        entries: Texts, or documents of a reader of `hf_posenc.evaluation.documents`; not read if the blocks are cached.
            A stream reads them anew in every epoch.
        tokenizer: A transformers tokenizer.
        length: Tokens in a block.
        positions: As for `PositionCollator`; `"packed"` puts several documents into a block.
        limit: Number of usable documents after which reading stops; by default all are read.
        cache: A folder; created if missing.
        source: Description of the entries, from `source_of` of the command line; part of the cache's key. The sizes
            and modification times of the files in it count too.
        workers: Processes that tokenize; the blocks do not depend on their number. A stream takes none.
        stream: Make the blocks while they are read. Needs a source, and documents that can be read again.

    Returns:
        The blocks: `dataset` for a Trainer, and `counts` of what was read, used and left out.

    Raises:
        PosencError: No document fills a block; token ids of another tokenizer; a cache or a stream without a source; a
            cache that cannot be written to.

    Examples:
        >>> from hf_posenc.training import prepare_blocks
        >>> blocks = prepare_blocks(texts, tokenizer, length=128)
        >>> len(blocks.rows), len(blocks.rows[0]["input_ids"])
        (6, 128)
    """
    if positions not in POSITIONS:
        raise unknown("kind of positions", positions, POSITIONS)
    length, workers = read_length(length, "length"), read_whole(workers, "workers")
    if limit is not None:
        limit = read_whole(limit, "limit")
    check_tokenizer(tokenizer)
    prefix = special_prefix(tokenizer, "auto")
    if length < len(prefix) + 2:
        raise PosencError(
            f"A block of {length} tokens has none to predict: give a longer block or target length."
        )
    if stream and workers > 1:
        raise PosencError(
            f"{workers} processes for tokenization: a stream is tokenized where it is read. Give "
            "--dataloader_num_workers 1 to do that in a process beside the training."
        )
    suffix = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    packed = positions == "packed"

    def writer() -> Writer:
        cutter = Cutter(length, packed, prefix, suffix)
        return Writer(entries, tokenizer, cutter, limit, workers)

    first = writer()  # refuses a missing library
    if not stream and cache is None:
        place = f"the folder for temporary files {tempfile.gettempdir()}"
        with disk_errors(f"{_UNWRITTEN} {place}"), tempfile.TemporaryDirectory() as folder:
            first.write(Path(folder))
            return Blocks.read(Path(folder), in_memory=True)
    if not isinstance(source, Mapping):
        raise PosencError(
            "A cache or a stream needs source, the description of the documents: a dictionary such as {'kind': 'mine'}."
        )
    decisive = {
        "format": _FORMAT,
        "tokenizer": tokenizer_hash(tokenizer),
        "chat_template": getattr(tokenizer, "chat_template", None),
        "length": length,
        "packed": packed,
        "special": [list(prefix), suffix],
        "limit": limit,
        "source": {**source, "files": _file_stamps(source)},
    }
    key = hashlib.sha256(json.dumps(decisive, sort_keys=True, default=repr).encode()).hexdigest()
    if not stream and cache is not None:
        return _read_cached(Path(cache), key[:32], first)
    if iter(entries) is entries:
        raise PosencError(
            "A stream reads its documents in every epoch: give a list or a Source, not an iterator."
        )
    from datasets import IterableDataset

    def rows() -> Iterator[dict[str, Any]]:
        reader = writer()
        yield from (block.row(packed) for block in reader.cut())
        reader.check()

    counts = Counts(length, largest=Vocabulary(tokenizer).size - 1, sha256=key)
    blocks = IterableDataset.from_generator(rows, features=_features(packed))
    return Blocks(blocks.shuffle(seed=0, buffer_size=_SHUFFLED), counts)


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
    workers: int = 1

    def __post_init__(self) -> None:
        if importlib.util.find_spec("datasets") is None:
            raise PosencError("Training needs datasets: pip install 'hf-posenc[train]'.")
        self._counts = Counts(self.cutter.length)

    def write(self, folder: Path) -> None:
        """Write all blocks and flush them to disk; the counts complete the folder."""
        import pyarrow as pa

        schema = _features(self.cutter.packed).arrow_schema
        with (folder / _TOKENS).open("wb") as file:
            with pa.ipc.new_stream(file, schema) as stream:
                rows = (block.row(self.cutter.packed) for block in self.cut())
                while batch := list(itertools.islice(rows, _ROWS_PER_BATCH)):
                    stream.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        self.check()
        write_atomically(folder / _COUNTS, to_json(asdict(self._counts)))

    def cut(self) -> Iterator[Block]:
        """Yield all blocks, in the order of the documents, and count them."""
        vocabulary, counts, digest = Vocabulary(self.tokenizer), self._counts, hashlib.sha256()
        for document in self._documents():
            document = self._usable(document, vocabulary)
            if isinstance(document, Skipped):
                counts.skipped += 1
                if len(counts.reasons) < _MAX_REASONS:
                    counts.reasons += (document,)
                continue
            counts.documents += 1
            counts.conversations += document.trained is not None
            for block in self.cutter.cut(document):
                counts.blocks += 1
                counts.largest = max(counts.largest, int(block.ids.max()))
                for numbers in (block.ids, np.asarray(block.documents), block.labels):
                    digest.update(numbers.astype("<i8").tobytes())
                yield block
            if counts.documents == self.limit:
                break
        self.cutter.finish()
        counts.tokens, counts.unused = self.cutter.tokens - self.cutter.unused, self.cutter.unused
        counts.sha256 = digest.hexdigest()

    def _documents(self) -> Iterator[Tokens]:
        if self.workers == 1:
            yield from (_tokenize(entry, self.tokenizer) for entry in as_entries(self.entries))
            return
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        pending: deque[Future[Tokens]] = deque()
        with ProcessPoolExecutor(self.workers, context, _keep, (self.tokenizer,)) as pool:
            try:
                for entry in as_entries(self.entries):
                    pending.append(pool.submit(_tokenize, entry))
                    if len(pending) >= 4 * self.workers:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _usable(self, document: Tokens, vocabulary: Vocabulary) -> Tokens:
        if isinstance(document, Skipped):
            return document
        # Token ids of unknown text, or a conversation with its own special tokens.
        if document.sha256 is None:
            try:
                document = vocabulary.usable(document)
            except UnreadableError as error:
                raise PosencError(
                    f"{document.name}: {error}. Give the tokenizer that wrote them (--tokenizer), or a text (--column)."
                ) from error
        cut = self.cutter
        least = 1 if cut.packed else cut.length - len(cut.prefix) - len(cut.suffix)
        if len(document) < least:
            reason = f"too short: {len(document):,} tokens, {least:,} are needed"
            return Skipped(document.name, reason)
        return document

    def check(self) -> None:
        """Raise with the reason if all documents gave no block."""
        counts, length = self._counts, self.cutter.length
        if counts.blocks:
            return
        if not counts.skipped and not counts.documents:
            raise PosencError("There is no document to read.")
        why = f"together they have {self.cutter.tokens:,} tokens"
        if counts.skipped:
            more = f"; and {counts.skipped - 1:,} more" if counts.skipped > 1 else ""
            why = f"{counts.reasons[0].name}: {counts.reasons[0].reason}{more}"
        raise PosencError(
            f"No document can be used for training ({why}). A block has {length:,} tokens: give more or longer texts, "
            "a shorter --block_length, or --positions packed, which puts short documents side by side."
        )


def _features(packed: bool) -> Features:
    from datasets import Features, List, Value

    names = ("input_ids", "labels", *(("document_lengths",) if packed else ()))
    return Features({name: List(Value("int32")) for name in names})


_kept: list[Any] = []  # the tokenizer of a process that tokenizes


def _keep(tokenizer: Any) -> None:
    _kept[:] = [tokenizer]


def _tokenize(entry: Entry, tokenizer: Any = None) -> Tokens:
    tokenizer = tokenizer or _kept[0]
    if isinstance(entry, (Skipped, TokenizedDocument)):
        return entry
    if isinstance(entry, Document) and not entry.text.strip():
        return Skipped(entry.name, "empty")
    try:
        if isinstance(entry, Conversation):
            return tokenize_conversation(entry, tokenizer)
        document = tokenize(entry, tokenizer)
    except UnreadableError as error:
        return Skipped(entry.name, str(error))
    return TokenizedDocument(entry.name, document.ids, None, document.sha256)
