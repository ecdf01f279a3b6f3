"""Text into tokens that know their place in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from hf_posenc.evaluation.documents.cache import TokenCache
from hf_posenc.evaluation.documents.document import Document, LongDocument, TokenizedDocument
from hf_posenc.evaluation.documents.errors import UnreadableError
from hf_posenc.evaluation.documents.joining import joined
from hf_posenc.evaluation.documents.spool import Spool, Stored
from hf_posenc.evaluation.documents.window import Tokens


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
