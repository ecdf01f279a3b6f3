"""Documents that are held out of those to train on, to be scored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial

from hf_posenc.evaluation.documents import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    UnreadableError,
)
from hf_posenc.evaluation.documents.source import Source


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
    """Yield documents, with True for every tenth from the second on, or for the last tenth of a single one."""
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
    """Yield a document without its last tenth, and that tenth; a conversation as it is."""
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
