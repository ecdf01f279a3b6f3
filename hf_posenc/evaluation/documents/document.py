"""Documents: texts, token ids, or the reason why there are none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 1 << 20  # tokens or characters at a time where a whole document would not fit into memory


@dataclass(frozen=True)
class Document:
    """A text.

    Attributes:
        name: The name that reports show for it.
        text: All of it.
    """

    name: str
    text: str

    def chunks(self) -> Iterator[str]:
        """Yield the text in order, at most `BLOCK` characters at a time."""
        for begin in range(0, len(self.text), BLOCK):
            yield self.text[begin : begin + BLOCK]


@dataclass(frozen=True)
class LongDocument:
    """A text that is read chunk by chunk, as often as it is needed.

    `chunks` opens the text and yields its chunks in order; each of them may raise `UnreadableError`.
    """

    name: str
    chunks: Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Skipped:
    """A document that could not be used, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """A document as token ids, without special tokens.

    Attributes:
        name: The document's name.
        ids: Token ids, shape (n,), of any integer type; a memory-mapped file if the document is large.
        byte_ends: For each token, the number of UTF-8 bytes of the text up to its end, shape (n,), int64. A character
            that is split over several tokens counts with the first of them. `None` if the text is unknown.
        sha256: Hash of the text, as UTF-8; `None` if the text is unknown.
        word_ends: For each token, the number of words that began up to its end, shape (n,), int64. A word is a maximal
            run of characters that are not white space (`str.split`), the unit of PG19 (Rae et al. 2020, table 2);
            it counts with the token in which it begins. `None` if the text is unknown.
        hashed_bytes: UTF-8 bytes that the hash covers, up to the end of the last token, if reading stopped early.
            `None`: the hash covers the whole text, before any cut.
        white_ends: Number of ends of the text, front and back, that are white space.
    """

    name: str
    ids: Tensor
    byte_ends: Tensor | None
    sha256: str | None
    word_ends: Tensor | None = None
    hashed_bytes: int | None = None
    white_ends: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, begin: int, end: int) -> Tensor:
        """Return tokens `begin .. end-1` as a model takes them: in memory, int64, shape (end - begin,)."""
        import torch

        return self.ids[begin:end].to(torch.int64).contiguous()

    def bytes_between(self, first: int, stop: int) -> int | None:
        """Return the number of UTF-8 bytes of tokens `first .. stop-1`."""
        return _between(self.byte_ends, first, stop)

    def words_between(self, first: int, stop: int) -> int | None:
        """Return the number of words that begin in tokens `first .. stop-1`."""
        return _between(self.word_ends, first, stop)

    def blocks(self) -> Iterator[Tensor]:
        """Yield all tokens in order, int64, at most `BLOCK` at a time."""
        for begin in range(0, len(self.ids), BLOCK):
            yield self.tokens(begin, begin + BLOCK)

    def largest(self) -> int:
        """Return the largest token id, -1 without tokens."""
        return max((int(block.max()) for block in self.blocks()), default=-1)

    @property
    def content(self) -> str:
        """Hash of the tokens."""
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that a result stores, enough to decide whether two results read the same tokens."""
        count = len(self.ids)
        hashed = "all" if self.hashed_bytes is None else f"the first {self.hashed_bytes} bytes"
        return {
            "name": self.name,
            "tokens": count,
            "bytes": self.bytes_between(0, count),
            "words": self.words_between(0, count),
            "text_sha256": self.sha256,
            "text_sha256_of": None if self.sha256 is None else hashed,
            "tokens_sha256": self.content,
        }


def _between(ends: Tensor | None, first: int, stop: int) -> int | None:
    if ends is None or stop <= first:
        return None if ends is None else 0
    return int(ends[stop - 1]) - (int(ends[first - 1]) if first else 0)


Entry: TypeAlias = Document | LongDocument | TokenizedDocument | Skipped
"""The output of a reader, one for each file, row or line of its input."""


class UnreadableError(PosencError):
    """A document that turns out to be unusable while it is read; the message is the reason of its `Skipped`."""


def as_entries(documents: Iterable[str | Entry]) -> Iterator[Entry]:
    """Yield the documents of a Python caller; a plain text is named by its index."""
    if isinstance(documents, str):
        raise PosencError(
            "The documents are a list of texts, not one text: write [text]. read_paths reads files and named texts."
        )
    if isinstance(documents, Mapping) or not isinstance(documents, Iterable):
        raise PosencError(f"The documents are a list of texts, not {type(documents).__name__}.")
    for index, document in enumerate(documents):
        entry = Document(f"#{index}", document) if isinstance(document, str) else document
        if not isinstance(entry, Entry):
            raise PosencError(
                f"Document {index} is {type(entry).__name__}, not a text. Give strings, or what read_paths and "
                "read_dataset yield."
            )
        yield entry


def printable(name: str | Path) -> str:
    """Return a name on one line, with escapes for bytes that are not UTF-8 and for invisible characters."""
    text = str(name).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
