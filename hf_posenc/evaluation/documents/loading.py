"""Documents of a run: read, tokenized, checked and counted."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.document import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    UnreadableError,
)
from hf_posenc.evaluation.documents.storage import Spool, Stored, TokenCache
from hf_posenc.evaluation.documents.tokens import Tokens, joined

EMBEDDED_SOURCE: dict[str, Any] = {"kind": "held-out modules of the standard library"}
"""Description of `read_embedded` in a result."""


def read_embedded() -> Iterator[Document]:
    """Yield the held-out modules of the running Python: text that the embedded model was not trained on."""
    from hf_posenc.embedded import held_out_documents

    for name, text in held_out_documents():
        yield Document(name, text)


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
    """Read and tokenize documents until `limit` usable ones are found.

    Args:
        source: A reader of this package.
        tokenizer: A transformers tokenizer.
        min_tokens: Tokens that the longest length requires; the same documents serve every length.
        max_tokens: Documents are cut to so many tokens; a file is read no further than that takes.
        limit: Number of usable documents after which reading stops.
        seen: Called with each document's name, for progress, and again while a long one is read.
        cache: Stores tokens from run to run.

    Returns:
        The usable documents and the skipped ones, in the order of the source, no two of the same name.

    Raises:
        PosencError: No document is usable.
    """
    spool, vocabulary, longest = Spool(), None, 0
    usable: list[_Tokenized | TokenizedDocument] = []
    skipped: list[Skipped] = []
    for entry in source:
        seen(entry.name)
        if isinstance(entry, Skipped):
            skipped.append(entry)
            continue
        document: _Tokenized | TokenizedDocument
        try:
            if isinstance(entry, TokenizedDocument):
                vocabulary = vocabulary or Vocabulary(tokenizer)
                document = vocabulary.usable(entry, max_tokens)
            elif isinstance(entry, Document) and not entry.text.strip():
                raise UnreadableError("empty")
            else:
                document = _tokenized(entry, tokenizer, max_tokens, spool, cache, seen)
                if document.blank or len(document) < min_tokens:
                    spool.forget(document.stored)
                if document.blank:
                    raise UnreadableError("empty")
            longest = max(longest, len(document))
            if len(document) < min_tokens:
                raise UnreadableError(
                    f"too short: {len(document):,} tokens, {min_tokens:,} are needed"
                )
        except UnreadableError as error:
            skipped.append(Skipped(entry.name, str(error)))
            continue
        usable.append(document)
        if len(usable) == limit:
            break
    if not usable:
        raise PosencError(_none_left(skipped, longest, min_tokens))
    # The spool is read only after its last write, so that each of its files is mapped once.
    documents = [each.finish(spool) if isinstance(each, _Tokenized) else each for each in usable]
    return _with_unique_names(documents), skipped


def tokenize(
    document: Document | LongDocument, tokenizer: Any, max_tokens: int | None = None
) -> TokenizedDocument:
    """Convert a text to tokens, without special tokens, the first `max_tokens` of them.

    A text of more than a quarter of a million characters is tokenized window by window (see `tokens.joined`); the
    tokens are those of the whole text.

    Raises:
        PosencError: The text cannot be read or tokenized.
    """
    spool = Spool()
    return _tokenized(document, tokenizer, max_tokens, spool).finish(spool)


@dataclass(frozen=True)
class _Tokenized:
    """A document whose tokens are in a spool until all documents are read."""

    name: str
    stored: Stored
    sha256: str
    hashed_bytes: int | None
    blank: bool

    def __len__(self) -> int:
        return self.stored.count

    def finish(self, spool: Spool) -> TokenizedDocument:
        """Return the document; nothing may be stored in the spool afterwards."""
        ids = spool.column(self.stored, "ids")
        assert ids is not None
        return TokenizedDocument(
            self.name,
            ids,
            spool.column(self.stored, "byte_ends"),
            self.sha256,
            spool.column(self.stored, "word_ends"),
            self.hashed_bytes,
        )


def _tokenized(
    document: Document | LongDocument,
    tokenizer: Any,
    max_tokens: int | None,
    spool: Spool,
    cache: TokenCache | None = None,
    seen: Callable[[str], None] = lambda name: None,
) -> _Tokenized:
    text = _Text()
    # A text in memory, and one for the cache, is hashed as a whole and first; any other while it is tokenized, which
    # reads it once and no further than needed.
    hashed_first = isinstance(document, Document) or (cache is not None and max_tokens is None)
    stopped = False

    def parts() -> Iterator[Tokens]:
        nonlocal stopped
        count = 0
        for piece in joined(document.chunks(), tokenizer, max_tokens):
            if not hashed_first:
                text.add(piece.text)
            stopped = piece.stopped
            count += len(piece.tokens)
            if isinstance(document, LongDocument):
                seen(f"{document.name}: {count:,} tokens")
            yield piece.tokens

    tokens = parts()
    if hashed_first:
        for chunk in document.chunks():
            text.add(chunk)
        if cache is not None:
            tokens = cache.through(text.digest.hexdigest(), max_tokens, tokens)
    stored = spool.store(tokens)
    hashed = text.bytes if stopped and not hashed_first else None
    return _Tokenized(document.name, stored, text.digest.hexdigest(), hashed, text.blank)


class _Text:
    """The hash and the size of a text that comes in chunks."""

    def __init__(self) -> None:
        self.digest, self.bytes, self.blank = hashlib.sha256(), 0, True

    def add(self, chunk: str) -> None:
        try:
            data = chunk.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            raise UnreadableError(
                f"holds half of a surrogate pair ({half}), which is not a character"
            ) from error
        self.blank &= not chunk.strip()
        self.digest.update(data)
        self.bytes += len(data)


def special_prefix(tokenizer: Any, policy: str) -> list[int]:
    """Return the special tokens in front of every window.

    Args:
        tokenizer: A transformers tokenizer.
        policy: `"auto"`, those that the tokenizer itself puts in front of a text; `"always"`, its BOS token;
            `"never"`.

    Raises:
        PosencError: An unknown policy, or `"always"` with a tokenizer that has no BOS token.
    """
    if policy == "never":
        return []
    if policy == "always":
        if tokenizer.bos_token_id is None:
            raise PosencError(
                "--bos always: this tokenizer has no BOS token; use --bos auto or --bos never."
            )
        return [int(tokenizer.bos_token_id)]
    if policy != "auto":
        raise PosencError(f"Unknown BOS policy {policy!r}: auto, always or never.")
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return [int(token) for token in special[:start]]
    return []


class Vocabulary:
    """The token ids that a tokenizer can produce.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._prefix = special_prefix(tokenizer, "auto")
        self._size = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)

    def usable(
        self, document: TokenizedDocument, max_tokens: int | None = None
    ) -> TokenizedDocument:
        """Return a document of ids as the tokenizer would produce it: without special tokens in front, and cut.

        Raises:
            UnreadableError: An id that this tokenizer cannot produce.
        """
        prefix = self._prefix
        first = len(prefix) if document.tokens(0, len(prefix)).tolist() == prefix else 0
        stop = None if max_tokens is None else first + max_tokens
        cut = dataclasses.replace(document, ids=document.ids[first:stop])
        for block in cut.blocks():
            least, largest = int(block.min()), int(block.max())
            if least < 0:
                raise UnreadableError(f"token {least} is negative")
            if largest >= self._size:
                raise UnreadableError(
                    f"token {largest:,} is outside the vocabulary of {self._size:,}: not this tokenizer's ids"
                )
        return cut


def _with_unique_names(documents: list[TokenizedDocument]) -> list[TokenizedDocument]:
    """Number documents of the same name; a result stores them by name."""
    taken: set[str] = set()
    unique = []
    for document in documents:
        numbered = (f"{document.name} ({number})" for number in itertools.count(2))
        name = next(n for n in itertools.chain([document.name], numbered) if n not in taken)
        taken.add(name)
        unique.append(dataclasses.replace(document, name=name))
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
