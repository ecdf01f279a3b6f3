"""The documents of a run: read, tokenized, counted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.cache import TokenCache
from hf_posenc.evaluation.documents.document import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
)
from hf_posenc.evaluation.documents.errors import UnreadableError
from hf_posenc.evaluation.documents.spool import Spool
from hf_posenc.evaluation.documents.token_ids import Vocabulary
from hf_posenc.evaluation.documents.tokenizing import Tokenization


def load_documents(
    source: Iterable[Entry],
    tokenizer: Any,
    *,
    min_tokens: int,
    max_tokens: int | None = None,
    limit: int | None = None,
    seen: Callable[[str], None] = lambda name: None,
    cache: TokenCache | None = None,
) -> tuple[list[TokenizedDocument], list[Skipped]]:
    """Reads documents until `limit` usable ones are found.

    Args:
        source: A reader of this package.
        tokenizer: A transformers tokenizer.
        min_tokens: What a document must have to serve the longest length: the same documents are used for every length.
        max_tokens: Documents are cut to so many tokens; a file is read no further than that takes.
        limit: Number of usable documents after which reading stops.
        seen: Called with each document's name, for progress, and again while a long one is read.
        cache: Where tokens are kept from run to run.

    Returns:
        The usable documents and the skipped ones, in the order of the source, no two of the same name.

    Raises:
        PosencError: No document is usable.
    """
    reader = _Loader(tokenizer, min_tokens, max_tokens, seen, cache)
    usable: list[Tokenization | TokenizedDocument] = []
    skipped: list[Skipped] = []
    for entry in source:
        found = reader.load(entry)
        if isinstance(found, Skipped):
            skipped.append(found)
            continue
        usable.append(found)
        if limit is not None and len(usable) == limit:
            break
    if not usable:
        raise PosencError(_none_left(skipped, reader.longest, min_tokens))
    documents = [each.finish() if isinstance(each, Tokenization) else each for each in usable]
    return _with_unique_names(documents), skipped


class _Loader:
    """Turns what a reader gives into tokens.

    Attributes:
        longest: Tokens of the longest document so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        min_tokens: int,
        max_tokens: int | None,
        seen: Callable[[str], None],
        cache: TokenCache | None,
    ) -> None:
        self._tokenizer, self._min, self._max = tokenizer, min_tokens, max_tokens
        self._seen, self._cache, self._spool = seen, cache, Spool()
        self.longest = 0

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer)

    def load(self, entry: Entry) -> Tokenization | TokenizedDocument | Skipped:
        """The tokens of a document, or why it is not used."""
        self._seen(entry.name)
        if isinstance(entry, Skipped):
            return entry
        if isinstance(entry, Document) and not entry.text.strip():
            return Skipped(entry.name, "empty")
        try:
            if isinstance(entry, TokenizedDocument):
                document = self._vocabulary.usable(entry, self._max)
                return self._long_enough(document) or document
            found = self._tokenized(entry)
            unused = Skipped(entry.name, "empty") if found.blank else self._long_enough(found)
            if unused:
                self._spool.forget(found.stored)
            return unused or found
        except UnreadableError as error:
            return Skipped(entry.name, str(error))

    def _tokenized(self, entry: Document | LongDocument) -> Tokenization:
        def told(tokens: int) -> None:
            self._seen(f"{entry.name}: {tokens:,} tokens")

        return Tokenization(
            entry,
            self._tokenizer,
            self._max,
            self._spool,
            self._cache,
            told if isinstance(entry, LongDocument) else lambda tokens: None,
        )

    def _long_enough(self, document: Tokenization | TokenizedDocument) -> Skipped | None:
        count = len(document)
        self.longest = max(self.longest, count)
        if count >= self._min:
            return None
        reason = f"too short: {count:,} tokens, {self._min:,} are needed"
        return Skipped(document.name, reason)


def _with_unique_names(documents: list[TokenizedDocument]) -> list[TokenizedDocument]:
    """Numbers documents of one name, since results are kept by name."""
    taken: set[str] = set()
    unique = []
    for document in documents:
        numbered = (f"{document.name} ({number})" for number in itertools.count(2))
        name = next(n for n in itertools.chain([document.name], numbered) if n not in taken)
        taken.add(name)
        unique.append(document if name == document.name else replace(document, name=name))
    return unique


def _none_left(skipped: Sequence[Skipped], longest: int, min_tokens: int) -> str:
    if not skipped:
        return "There is no document to read."
    first = f"{skipped[0].name}: {skipped[0].reason}"
    others = f"; and {len(skipped) - 1} more" if len(skipped) > 1 else ""
    advice = ""
    if longest:
        advice = (
            f" The longest document has {longest:,} tokens, {min_tokens:,} are needed: give shorter lengths, or "
            "longer documents."
        )
    return f"No document can be used ({first}{others}).{advice}"
