"""Documents into blocks of one length: what the model is given, and what is left over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.training.positions import Numbers


@dataclass(frozen=True)
class Block:
    """An example.

    Attributes:
        ids: Its tokens, shape (length,).
        documents: The tokens of each document in it, which sum to the length.
    """

    ids: Numbers
    documents: tuple[int, ...]


@dataclass
class Cutter:
    """Cuts documents into blocks and counts what happens to them.

    A context begins with what the tokenizer puts in front of a text: so does every block, and every document in one.
    Behind a document's last token stands the token that ends a text, where the tokenizer has one.

    Args:
        length: Tokens in a block, special ones included.
        packed: Put documents next to each other; one that does not fit goes on, as another, in the next block. Without
            it every block is of one document, and what is left at that document's end is not used.
        prefix: The special tokens in front of every document.
        suffix: Those behind it.

    Attributes:
        tokens: Tokens that were read, those of the suffix included.
        unused: How many of them are in no block.
    """

    length: int
    packed: bool = False
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    tokens: int = 0
    unused: int = 0
    _parts: list[Numbers] = field(default_factory=list)
    _space: int = field(init=False)

    def __post_init__(self) -> None:
        self._space = self.length

    @property
    def least(self) -> int:
        """Tokens that a document must have to be used."""
        return 1 if self.packed else self.length - len(self.prefix) - len(self.suffix)

    def cut(self, document: TokenizedDocument) -> Iterator[Block]:
        """The blocks that a document fills; packed, the last of its tokens may wait for the next document."""
        ids = document.tokens(0, len(document)).numpy()
        if ids[len(ids) - len(self.suffix) :].tolist() != [*self.suffix]:  # ids may come with it
            ids = np.concatenate([ids, np.asarray(self.suffix, dtype=np.int64)])
        self.tokens += len(ids)
        while len(ids):
            room = self._space - len(self.prefix)  # none, maybe: then special tokens fill the block
            if not self.packed and len(ids) < room:
                break
            part = np.concatenate([np.asarray(self.prefix, dtype=np.int64), ids])[: self._space]
            ids = ids[max(room, 0) :]
            self._parts.append(part)
            self._space -= len(part)
            if not self._space:
                yield Block(np.concatenate(self._parts), tuple(map(len, self._parts)))
                self._parts, self._space = [], self.length
        self.unused += len(ids)

    def finish(self) -> None:
        """Counts what waits for a document that does not come."""
        self.unused += sum(max(len(part) - len(self.prefix), 0) for part in self._parts)
        self._parts, self._space = [], self.length
