"""The training data: documents as blocks of tokens, the same on every rank, kept from run to run if asked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from hf_posenc.evaluation.documents.token_ids import Vocabulary
from hf_posenc.evaluation.identity import tokenizer_hash
from hf_posenc.training.blocks import NAMED, Blocks, Writer, is_complete, read_blocks, remove
from hf_posenc.training.collator import POSITIONS
from hf_posenc.training.packing import Block, Cutter
from hf_posenc.training.sources import stamped

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
    """Reads documents and makes blocks of them (see `hf_posenc.training.packing.Cutter`).

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
