"""What a document is: a text, tokens, or a reason why there are none."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hf_posenc.errors import PosencError, one_line

BLOCK = 1 << 20
"""Tokens or characters that are looked at at a time where a whole document would not fit into memory."""


@dataclass(frozen=True)
class Document:
    """A text and the name that reports show for it."""

    name: str
    text: str

    def chunks(self) -> Iterator[str]:
        """The text, piece by piece."""
        for begin in range(0, len(self.text), BLOCK):
            yield self.text[begin : begin + BLOCK]


@dataclass(frozen=True)
class LongDocument:
    """A text that is read piece by piece, as often as it is needed, and is never whole in memory.

    Attributes:
        name: The name that reports show for it.
        chunks: Opens the text and gives its pieces in order; may raise `UnreadableError` at any of them.
    """

    name: str
    chunks: Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Skipped:
    """A document that could not be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """A document as token ids, without special tokens.

    Attributes:
        name: The document's name.
        ids: Token ids, shape (n,), of any integer type; a memory-mapped file where the document is large.
        byte_ends: For each token, the number of UTF-8 bytes of the text up to its end, shape (n,), int64. A character
            that is split over several tokens counts with the first of them. `None` where nobody says which text a
            token came from.
        sha256: Hash of the text, as UTF-8; `None` where there is none, only token ids.
        word_ends: For each token, the number of words that began up to its end, shape (n,), int64. A word is a maximal
            run of characters that are not white space (`str.split`), the unit of PG19 (Rae et al. 2020, table 2);
            it counts with the token in which it begins. `None` as `byte_ends`.
        hashed_bytes: How much of the text the hash is of, where reading stopped early: up to the end of the last token
            that was kept. `None`: the whole text, before any cut.
    """

    name: str
    ids: Tensor
    byte_ends: Tensor | None
    sha256: str | None
    word_ends: Tensor | None = None
    hashed_bytes: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, begin: int, end: int) -> Tensor:
        """Tokens `begin .. end-1` as the model takes them: in memory, int64, shape (end - begin,)."""
        return self.ids[begin:end].to(torch.int64)

    def bytes_between(self, first: int, stop: int) -> int | None:
        """UTF-8 bytes of the text of tokens `first .. stop-1`."""
        return _between(self.byte_ends, first, stop)

    def words_between(self, first: int, stop: int) -> int | None:
        """Words that begin in tokens `first .. stop-1`."""
        return _between(self.word_ends, first, stop)

    def blocks(self) -> Iterator[Tensor]:
        """All tokens in order, int64, so many at a time as fit into memory anywhere."""
        for begin in range(0, len(self.ids), BLOCK):
            yield self.tokens(begin, begin + BLOCK)

    def largest(self) -> int:
        """The largest token id, -1 without tokens."""
        return max((int(block.max()) for block in self.blocks()), default=-1)

    def to_dict(self) -> dict[str, Any]:
        """What a result stores of it: enough to tell whether two results read the same tokens."""
        count = len(self.ids)
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block.numpy().astype("<i8").tobytes())
        return {
            "name": self.name,
            "tokens": count,
            "bytes": self.bytes_between(0, count),
            "words": self.words_between(0, count),
            "text_sha256": self.sha256,
            "text_sha256_of": self._hashed(),
            "tokens_sha256": digest.hexdigest(),
        }

    def _hashed(self) -> str | None:
        if self.sha256 is None:
            return None
        return "all" if self.hashed_bytes is None else f"the first {self.hashed_bytes} bytes"


Entry: TypeAlias = Document | LongDocument | TokenizedDocument | Skipped
"""What a reader gives for each thing that it was asked to read."""


def as_entries(documents: Iterable[str | Entry]) -> Iterator[Entry]:
    """What a Python caller may give as documents: texts, which get their place as a name, and what readers give."""
    for index, document in enumerate(documents):
        yield Document(f"#{index}", document) if isinstance(document, str) else document


def _between(ends: Tensor | None, first: int, stop: int) -> int | None:
    if ends is None or stop <= first:
        return None if ends is None else 0
    return int(ends[stop - 1]) - (int(ends[first - 1]) if first else 0)


# Names that can be printed anywhere.


def printable(name: str | Path) -> str:
    """A name on one line: bytes that are no UTF-8 and characters that would not show as escapes."""
    text = str(name).encode("utf-8", "backslashreplace").decode("utf-8")
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


# What cannot be read, and what an error of another library says, in one line.


class UnreadableError(PosencError):
    """A document that turns out to be unusable while it is read; the message is the reason of its `Skipped`."""


def reason_of(error: OSError) -> str:
    """What the operating system says, without the path."""
    return f"cannot be read ({error.strerror or one_line(error)})"


# The special tokens in front of a window.


def special_prefix(tokenizer: Any, policy: str) -> list[int]:
    """The special tokens that go in front of every window.

    Args:
        tokenizer: A transformers tokenizer.
        policy: `"auto"`, what the tokenizer itself puts in front of a text; `"always"`, its BOS token; `"never"`.

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


# Documents that come as token ids.


def document_of_ids(name: str, values: Any) -> TokenizedDocument | Skipped:
    """A document of ids; what text they stand for is not known. A memory-mapped array stays one.

    Args:
        name: The document's name.
        values: A list or an array of whole numbers, shape (n,).
    """
    try:
        ids = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths, numbers of 80 bits
        return Skipped(name, "holds no list of token ids")
    if not ids.size:
        return Skipped(name, "empty")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        return Skipped(name, f"holds {_kind(values, ids)}, not a list of token ids")
    if not ids.dtype.isnative:
        ids = ids.astype(ids.dtype.newbyteorder("="))
    return TokenizedDocument(name, torch.from_numpy(ids), None, None)


class Vocabulary:
    """What a tokenizer can give.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._prefix = special_prefix(tokenizer, "auto")
        self._size = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)

    def usable(
        self, document: TokenizedDocument, max_tokens: int | None = None
    ) -> TokenizedDocument:
        """A document of ids as the tokenizer would have given it: without special tokens in front, and cut.

        Raises:
            UnreadableError: An id that the tokenizer cannot give, so another one wrote them.
        """
        prefix = self._prefix
        first = len(prefix) if document.tokens(0, len(prefix)).tolist() == prefix else 0
        stop = None if max_tokens is None else first + max_tokens
        found = dataclasses.replace(document, ids=document.ids[first:stop])
        for block in found.blocks():
            least, largest = int(block.min()), int(block.max())
            if least < 0:
                raise UnreadableError(f"token {least} is negative")
            if largest >= self._size:
                raise UnreadableError(
                    f"token {largest:,} is outside the vocabulary of {self._size:,}: not this tokenizer's ids"
                )
        return found


def _kind(values: Any, found: np.ndarray[Any, Any]) -> str:
    if values is None:
        return "null"
    if found.ndim == 0:
        return type(values).__name__
    return f"an array of {found.dtype}, {found.ndim} dimension{'s' * (found.ndim != 1)}"
