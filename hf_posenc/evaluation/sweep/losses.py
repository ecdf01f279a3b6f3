"""What a method lost on a document, and what may be said of several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posenc.evaluation.statistics import INTERVAL, Bootstrap, exp_or_inf, side_of_one


@dataclass(frozen=True)
class Loss:
    """The tail tokens of one document, read at one length.

    Attributes:
        nats: Sum of their negative log-likelihoods; NaN where one was not finite, or where there is no number.
        tokens: How many they are.
        failed: Why there is no number.
    """

    nats: float
    tokens: int
    failed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        if self.failed is not None:
            return {"failed": self.failed}
        return {"nats": self.nats if math.isfinite(self.nats) else None, "tokens": self.tokens}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Loss:
        """What `to_dict` wrote."""
        if "failed" in values:
            return cls(math.nan, 0, str(values["failed"]))
        nats = values["nats"]
        return cls(math.nan if nats is None else float(nats), int(values["tokens"]))


def log_perplexity(losses: Sequence[Loss]) -> float:
    """Total nats by total tokens; NaN where any document gave no number."""
    tokens = sum(loss.tokens for loss in losses)
    return math.fsum(loss.nats for loss in losses) / tokens if tokens else math.nan


def failure_of(losses: Sequence[Loss]) -> str | None:
    """Why there is no perplexity; `None` where there is one."""
    reason = next((loss.failed for loss in losses if loss.failed is not None), None)
    if reason is None and not math.isfinite(log_perplexity(losses)):
        return "the loss is not a finite number"
    return reason


@dataclass(frozen=True)
class Comparison:
    """A ratio of two perplexities over the same documents.

    Attributes:
        ratio: The first by the second.
        interval: 95 % paired bootstrap interval over documents; `None` with fewer than two documents.
    """

    ratio: float
    interval: tuple[float, float] | None

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 1, no difference. Without an interval nothing is decided."""
        return side_of_one(self.interval) != 0


class Intervals:
    """Intervals of perplexities and of their ratios, from one seed.

    Args:
        seed: Seed of the bootstrap.
        resamples: Its number of resamples.
    """

    def __init__(self, seed: int, resamples: int) -> None:
        self._seed, self._resamples = seed, resamples
        self._bootstraps: dict[int, Bootstrap] = {}

    def interval(self, losses: Sequence[Loss]) -> tuple[float, float] | None:
        """95 % bootstrap interval of the perplexity over documents; `None` where there is none."""
        if len(losses) < 2 or failure_of(losses) is not None:
            return None
        return _interval(self._resampled(losses))

    def compare(self, losses: Sequence[Loss], others: Sequence[Loss]) -> Comparison | None:
        """The paired ratio over the same documents; `None` where one side has no number."""
        if failure_of(losses) is not None or failure_of(others) is not None:
            return None
        ratio = exp_or_inf(log_perplexity(losses) - log_perplexity(others))
        if len(losses) < 2:
            return Comparison(ratio, None)
        return Comparison(ratio, _interval(self._resampled(losses) - self._resampled(others)))

    def _resampled(self, losses: Sequence[Loss]) -> np.ndarray[Any, Any]:
        count = len(losses)
        if count not in self._bootstraps:
            self._bootstraps[count] = Bootstrap(count, self._seed, self._resamples)
        return self._bootstraps[count].means(
            [loss.nats for loss in losses], [loss.tokens for loss in losses]
        )


def perplexity(losses: Sequence[Loss]) -> float:
    """`exp` of `log_perplexity`; infinity where that overflows."""
    return exp_or_inf(log_perplexity(losses))


def _interval(logs: np.ndarray[Any, Any]) -> tuple[float, float]:
    low, high = np.quantile(logs, INTERVAL)
    return exp_or_inf(float(low)), exp_or_inf(float(high))
