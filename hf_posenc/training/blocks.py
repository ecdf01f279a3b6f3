"""Training data: documents cut into blocks of tokens, equal on every rank and cached if requested; those held out."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.documents import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    UnreadableError,
    Vocabulary,
    special_prefix,
    tokenize,
)
from hf_posenc.evaluation.documents.document import as_entries
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.identity import check_tokenizer, tokenizer_hash
from hf_posenc.evaluation.options import read_whole
from hf_posenc.files import disk_errors, to_json, write_atomically
from hf_posenc.lengths import read_length
from hf_posenc.training.collator import Numbers
from hf_posenc.training.options import check_positions

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT = 4
_COUNTS = "blocks.json"
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
        skipped: Number of documents that were not used; `reason` has the name of the first, and why.
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
        counted = ("block", self.blocks), ("document", self.documents), ("document", self.skipped)
        blocks, used, skipped = (f"{count:,} {one}{'s' * (count != 1)}" for one, count in counted)
        first = f" (the first: {self.reason})" if self.reason else ""
        return (
            f"{blocks} of {self.length:,} tokens from {used} ({share:.0%} of their tokens are left over); {skipped} "
            f"not used{first}"
        )


Cut = Callable[[Cutter, Counts], Iterator[Block]]


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
    """Read documents and cut them into blocks (see `hf_posenc.training.blocks.Cutter`).

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
        source: Description of the entries, `about` of `source_of(...)`; part of the cache's key. The sizes
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
    check_positions(positions)
    length = read_length(length, "length")
    if limit is not None:
        limit = read_whole(limit, "limit")
    if importlib.util.find_spec("datasets") is None:
        raise PosencError("Training needs datasets: pip install 'hf-posenc[train]'.")
    check_tokenizer(tokenizer)
    prefix = special_prefix(tokenizer, "auto")
    if length < len(prefix) + 2:
        raise PosencError(f"A block of {length} tokens has none to predict: give a longer one.")
    suffix = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    packed = positions == "packed"
    cutter = Cutter(length, packed, prefix, suffix)
    cut = partial(_blocks, entries, tokenizer, limit)
    if cache is None:
        place = f"the folder for temporary files {tempfile.gettempdir()}"
        with disk_errors(f"{_UNWRITTEN} {place}"), tempfile.TemporaryDirectory() as folder:
            return _written(Path(folder), cutter, cut, in_memory=True)
    if not isinstance(source, Mapping):
        raise PosencError("A cache needs source, which describes documents: {'kind': 'mine'}.")
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
    with disk_errors(f"{_UNWRITTEN} the cache {cache}"):
        return _written(Path(cache) / key[:32], cutter, cut)


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


def _written(folder: Path, cutter: Cutter, cut: Cut, *, in_memory: bool = False) -> Blocks:
    """Return the blocks in a folder, by datasets' own cache: one process writes them, the others wait for it.

    The counts come last of what the generator writes, so that there is no complete dataset without them.
    """
    import pyarrow as pa
    from datasets import Dataset, Features, List, Value
    from datasets.exceptions import DatasetGenerationError

    folder.mkdir(parents=True, exist_ok=True)
    names = ("input_ids", "document_lengths") if cutter.packed else ("input_ids",)

    def rows() -> Iterator[dict[str, Any]]:
        counts = Counts(cutter.length)
        for block in cut(cutter, counts):
            yield dict(zip(names, block, strict=False))
        write_atomically(folder / _COUNTS, to_json(asdict(counts)))

    try:
        dataset = Dataset.from_generator(
            rows,
            features=Features({name: List(Value("int32")) for name in names}),
            cache_dir=str(folder),
            keep_in_memory=in_memory,
            fingerprint="blocks",  # the folder's name has the key
            writer_batch_size=64,  # rows that wait in memory; a thousand by default
        )
        counts = Counts(**json.loads((folder / _COUNTS).read_text(encoding="utf-8")))
        if len(dataset) != counts.blocks:
            raise ValueError(f"{len(dataset):,} of {counts.blocks:,} blocks")
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    except (ValueError, TypeError, pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError):
            raise  # the system's own: a full disk, a folder that may not be written to
        raise PosencError(
            f"The prepared data in {folder} are damaged: remove that folder ({one_line(error)})"
        ) from error
    return Blocks(dataset.with_format("numpy"), counts)


def _blocks(
    given: Iterable[str | Entry], tokenizer: Any, limit: int | None, cutter: Cutter, counts: Counts
) -> Iterator[Block]:
    """Yield all blocks, in the order of the documents, and count them; raise if there is none."""
    vocabulary, digest = Vocabulary(tokenizer), hashlib.sha256()
    for entry in as_entries(given):
        try:
            document = _usable(entry, tokenizer, vocabulary, cutter)
        except UnreadableError as error:
            counts.skipped += 1
            counts.reason = counts.reason or f"{entry.name}: {error}"
            continue
        counts.documents += 1
        for block in cutter.cut(document):
            counts.blocks += 1
            counts.largest = max(counts.largest, int(block.ids.max()))
            for numbers in (block.ids, np.asarray(block.documents)):
                digest.update(numbers.astype("<i8").tobytes())
            yield block
        if counts.documents == limit:
            break
    cutter.finish()
    counts.tokens, counts.unused = cutter.tokens - cutter.unused, cutter.unused
    counts.sha256 = digest.hexdigest()
    if not counts.skipped and not counts.documents:
        raise PosencError("There is no document to read.")
    if not counts.blocks:
        more = f"; and {counts.skipped - 1:,} more" if counts.skipped > 1 else ""
        why = f"{counts.reason}{more}" or f"together they have {cutter.tokens:,} tokens"
        raise PosencError(
            f"No document can be used for training ({why}). A block has {counts.length:,} tokens: give more or longer "
            "texts, a shorter --block-length, or --positions packed, which puts short documents side by side."
        )


def _usable(
    entry: Entry, tokenizer: Any, vocabulary: Vocabulary, cutter: Cutter
) -> TokenizedDocument:
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
        document = tokenize(entry, tokenizer)
    least = 1 if cutter.packed else cutter.length - len(cutter.prefix) - len(cutter.suffix)
    if len(document) < least:
        raise UnreadableError(f"too short: {len(document):,} tokens, {least:,} are needed")
    return document


# Which documents are held out.


def candidates(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the documents that may be held out; if there is none, all others, whose errors give the reason."""
    others: list[Entry] | None = []
    for entry, out in _parted(entries):
        if out:
            yield entry
            others = None
        elif others is not None:
            others.append(entry)
    yield from others or ()


def without(
    source: Source, held: Sequence[TokenizedDocument], tokenizer: Any, *, own: bool = True
) -> Source:
    """Return a source without documents that begin with all tokens of a scored one, nor those held out of its `own`."""
    names, vocabulary = sorted(document.name for document in held), Vocabulary(tokenizer)

    def read() -> Iterator[Entry]:
        for entry, out in _parted(source) if own else ((entry, False) for entry in source):
            if out and entry.name in names:
                continue
            with suppress(UnreadableError):  # who cuts it into blocks gives the reason
                if isinstance(entry, Document | LongDocument):
                    entry = tokenize(entry, tokenizer)
                elif isinstance(entry, TokenizedDocument):
                    entry = vocabulary.usable(entry)  # without special tokens, as what is scored
            if isinstance(entry, TokenizedDocument):
                starts = (x for x in held if np.array_equal(entry.ids[: len(x)], x.ids))
                if (other := next(starts, None)) is not None:
                    entry = Skipped(entry.name, f"begins as {other.name}, which is scored")
            yield entry

    return replace(source, read=read, about={**source.about, "held_out": names})


def _parted(entries: Iterable[Entry]) -> Iterator[tuple[Entry, bool]]:
    """Yield documents, each with True if it is held out: every tenth from the second, or a single one's last tenth."""
    first: Entry | None = None
    count = 0
    for entry in entries:
        if isinstance(entry, Document) and not entry.text.strip():
            entry = Skipped(entry.name, "empty")
        if isinstance(entry, Skipped):
            yield entry, False
            continue
        count += 1
        if first is None:
            first = entry  # which is cut if no other follows
            continue
        if count == 2:
            yield first, False
        yield entry, count % 10 == 2
    if first is not None and count == 1:
        yield from zip(_cut(first), (False, True), strict=False)


def _cut(document: Entry) -> Iterator[Entry]:
    """Yield a document without its last tenth, and that tenth; what is skipped as it is."""
    end = f"{document.name}, last tenth"
    if isinstance(document, TokenizedDocument):
        start = len(document) * 9 // 10
        yield replace(document, ids=document.ids[:start])
        yield replace(document, name=end, ids=document.ids[start:])
    elif isinstance(document, Document | LongDocument):
        try:
            size = sum(map(len, document.chunks()))
        except UnreadableError as error:
            yield Skipped(document.name, str(error))
            return
        yield LongDocument(document.name, partial(_part, document, 0, size * 9 // 10))
        yield LongDocument(end, partial(_part, document, size * 9 // 10, size))
    else:
        yield document


def _part(document: Document | LongDocument, start: int, stop: int) -> Iterator[str]:
    position = 0
    for chunk in document.chunks():
        yield chunk[max(start - position, 0) : max(stop - position, 0)]
        position += len(chunk)
