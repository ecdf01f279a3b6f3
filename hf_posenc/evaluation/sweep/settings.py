"""What decides the numbers of a sweep or a search, apart from the model, the methods and the documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.protocols import Settings
from hf_posenc.evaluation.statistics import RESAMPLES


@dataclass(frozen=True)
class TailSettings:
    """The objective: tail perplexity at a target length, with that at the original length beside it.

    Attributes:
        original: The context length that the model was trained on, in tokens.
        target: The length to do well at, in tokens, special tokens included.
        tail_tokens: The K of `tail`, the same tokens at both lengths; 0: 1,024, but at most half of the original.
        windows_per_document: Tails scored in each document, evenly spaced.
        max_regression: How much the perplexity at the original length may grow, as a fraction; `None`: any.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.
        prefill: Tokens that the model runs at a time, over a key-value cache; `None`: all at once.
        seed: Seed of all that is drawn.
        resamples: Number of bootstrap resamples.

    Raises:
        PosencError: Lengths or numbers that do not go together.
    """

    original: int
    target: int
    tail_tokens: int = 0
    windows_per_document: int = 1
    max_regression: float | None = None
    chunk: int | None = None
    prefill: int | None = None
    seed: int = 0
    resamples: int = RESAMPLES

    def __post_init__(self) -> None:
        if self.target <= self.original:
            raise PosencError(
                f"--target-length {self.target}: the model was trained at {self.original} tokens already. Give a "
                "longer one."
            )
        if self.max_regression is not None and not self.max_regression >= 0:
            raise PosencError(
                f"--max-regression is a fraction of at least 0, such as 0.02, not {self.max_regression}."
            )
        if self.windows_per_document < 1:
            raise PosencError(
                f"windows_per_document is at least 1, not {self.windows_per_document}."
            )
        object.__setattr__(self, "tail_tokens", self.protocol.tail_tokens)  # checks the others too

    @property
    def protocol(self) -> Settings:
        """The lengths and the tail as the protocol's own settings."""
        return Settings(
            lengths=(self.original, self.target),
            protocols=("tail",),
            tail_tokens=self.tail_tokens,
            windows_per_document=None
            if self.windows_per_document == 1
            else self.windows_per_document,
            chunk=self.chunk,
            prefill=self.prefill,
            seed=self.seed,
            resamples=self.resamples,
        )

    @property
    def scale(self) -> float:
        """The target as a multiple of the original length."""
        return self.target / self.original

    @property
    def decisive(self) -> dict[str, Any]:
        """What determines the loss of a candidate on a document at a length: part of the store's fingerprint."""
        names = ("original", "target", "tail_tokens", "windows_per_document", "chunk", "prefill")
        return {"protocol": "tail", **{name: getattr(self, name) for name in names}}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TailSettings:
        """What `to_dict` wrote."""
        return cls(**values)
