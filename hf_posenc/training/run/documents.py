"""The documents: those to train on, and those that are held out to be scored."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    UnreadableError,
)
from hf_posenc.evaluation.documents.source import Source, source_of
from hf_posenc.training.batches.blocks import (
    STANDARD_LIBRARY,
    Blocks,
    prepare_blocks,
    read_standard_library,
)
from hf_posenc.training.run.options import DataArguments


def training_blocks(
    data: DataArguments,
    tokenizer: Any,
    length: int,
    *,
    cache: Path | None,
    held_out: Collection[str] = (),
) -> tuple[Blocks, dict[str, Any]]:
    """Return the blocks to train on, by default of the standard library, and the description that results store.

    `held_out` has the names of the documents that are scored, which are not trained on.
    """
    source = source_of(data.source(data.text, data.dataset, data.split))
    if source.embedded:
        source = Source(read_standard_library, STANDARD_LIBRARY)
    elif held_out:
        source = without(source, held_out)
    blocks = prepare_blocks(
        source,
        tokenizer,
        length=length,
        positions=data.positions,
        limit=data.documents,
        cache=cache,
        source=source.about,
    )
    return blocks, dict(source.about)


def holds_out(data: DataArguments) -> bool:
    """Return whether documents to score are taken out of those to train on: texts are given, and none to score."""
    given = bool(data.text) or data.dataset is not None
    return given and not data.score_text and data.score_dataset is None


@contextlib.contextmanager
def held_out_text(data: DataArguments) -> Iterator[Iterable[Entry]]:
    """Give the documents to score, and add to an error about them how to give others.

    By default they are held out: every tenth of the documents to train on, from the second on, or the last tenth of a
    single one; of the standard library, the modules that its training text leaves out.
    """
    try:
        if holds_out(data):
            yield candidates(source_of(data.source(data.text, data.dataset, data.split)))
        else:
            score = data.source(data.score_text, data.score_dataset, data.score_split)
            yield source_of(score).read()
    except PosencError as error:
        raise PosencError(
            f"No perplexity can be measured: {error} Give --score_text or --score_dataset, or train with --no_score."
        ) from error


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


def without(source: Source, names: Collection[str]) -> Source:
    """Return a source without the held-out documents of these names."""

    def read() -> Iterator[Entry]:
        return (entry for entry, out in _parted(source) if not (out and entry.name in names))

    return replace(source, read=read, about={**source.about, "held_out": sorted(names)})


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
        start = size * 9 // 10
        yield LongDocument(document.name, partial(_characters, document, 0, start))
        yield LongDocument(end, partial(_characters, document, start, size))
    else:
        yield document


def _characters(document: Document | LongDocument, start: int, stop: int) -> Iterator[str]:
    """Yield a part of a text."""
    position = 0
    for chunk in document.chunks():
        yield chunk[max(start - position, 0) : max(stop - position, 0)]
        position += len(chunk)
