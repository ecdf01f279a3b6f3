"""The documents of a run: read, tokenized, counted."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.document import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    UnreadableError,
    Vocabulary,
)
from hf_posenc.evaluation.documents.storage import Spool, Stored, TokenCache
from hf_posenc.evaluation.documents.tokens import Tokens, joined

# Text into tokens that know their place in it.


class Tokenization:
    """One document on its way to a `TokenizedDocument`: its tokens lie in a spool until all documents are read.

    Args:
        document: Its text.
        tokenizer: A transformers tokenizer.
        max_tokens: Only so many tokens are kept; the text behind them need not be read.
        spool: Takes the tokens.
        cache: Knows tokens of earlier runs.
        told: Called with the number of tokens so far.

    Attributes:
        blank: There is nothing but white space in what was read.

    Raises:
        UnreadableError: The text cannot be read or tokenized.
        PosencError: The disk is full.
    """

    def __init__(
        self,
        document: Document | LongDocument,
        tokenizer: Any,
        max_tokens: int | None,
        spool: Spool,
        cache: TokenCache | None = None,
        told: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.name, self._spool, self._told = document.name, spool, told
        self._hash, self._hashed, self._stopped = hashlib.sha256(), 0, False
        self.blank = True
        parts = self._parts(document, tokenizer, max_tokens)
        if isinstance(document, Document) or (cache and max_tokens is None):
            for chunk in document.chunks():
                self._digest(chunk)
            self._whole: str | None = self._hash.hexdigest()
            if cache:
                parts = cache.through(self._whole, max_tokens, parts)
        else:
            self._whole = None
        self.stored: Stored = spool.store(parts)

    def __len__(self) -> int:
        return self.stored.count

    def finish(self) -> TokenizedDocument:
        """The document, once nothing more goes into the spool."""
        ids = self._spool.column(self.stored, "ids")
        assert ids is not None
        return TokenizedDocument(
            self.name,
            ids,
            self._spool.column(self.stored, "byte_ends"),
            self._whole or self._hash.hexdigest(),
            self._spool.column(self.stored, "word_ends"),
            self._hashed if self._stopped and self._whole is None else None,
        )

    def _parts(
        self, document: Document | LongDocument, tokenizer: Any, max_tokens: int | None
    ) -> Iterator[Tokens]:
        count = 0
        for piece in joined(document.chunks(), tokenizer, max_tokens):
            if self._whole is None:
                self._digest(piece.text)
            self._stopped = piece.stopped
            count += len(piece.tokens)
            self._told(count)
            yield piece.tokens

    def _digest(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            raise UnreadableError(
                f"holds half of a surrogate pair ({half}), which is no character"
            ) from error
        self.blank &= not text.strip()
        self._hash.update(data)
        self._hashed += len(data)


def tokenize(
    document: Document | LongDocument, tokenizer: Any, max_tokens: int | None = None
) -> TokenizedDocument:
    """Turns a text into tokens, without special tokens, the first `max_tokens` of them.

    A text of more than a quarter of a million characters is tokenized window by window (see `joining`); the tokens are
    those of the whole text.

    Raises:
        PosencError: The text cannot be read or tokenized.
    """
    return Tokenization(document, tokenizer, max_tokens, Spool()).finish()


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


# The text that is always there.


EMBEDDED_SOURCE: dict[str, Any] = {"kind": "held-out modules of the standard library"}
"""What a result says of `read_embedded`."""


def read_embedded() -> Iterator[Document]:
    """The held-out modules of the user's own Python: text that the embedded model was not trained on."""
    from hf_posenc.embedded import held_out_documents

    for name, text in held_out_documents():
        yield Document(name, text)
