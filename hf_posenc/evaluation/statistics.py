"""From sums per document to perplexities with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Record:
    """What was measured: the sums of one document, never a ratio.

    Attributes:
        method: The label of the method.
        protocol: `"prefix"` or `"tail"`.
        length: Context length in tokens, special tokens included.
        document: The document's name.
        nats: Sum of the negative log-likelihoods of the scored tokens, in nats; NaN if one of them was not finite.
        tokens: Number of scored tokens.
        bytes: UTF-8 bytes of the text of the scored tokens; `None` where the tokenizer does not tell.
    """

    method: str
    protocol: str
    length: int
    document: str
    nats: float
    tokens: int
    bytes: int | None


@dataclass(frozen=True)
class Cell:
    """One number of the table: a method under a protocol at a length, over all documents.

    Attributes:
        method: The label of the method.
        protocol: `"prefix"` or `"tail"`.
        length: Context length in tokens.
        perplexity: `exp(total nats / total tokens)`; NaN if a loss was not finite.
        interval: 95 % bootstrap interval of the perplexity over documents; `None` with fewer than two documents.
        ratio: Perplexity divided by the baseline's (the run's first method) at the same protocol and length.
        ratio_interval: 95 % interval of that ratio over the same resamples: paired, so much tighter than `interval`.
        bits_per_byte: `total nats / (ln 2 x total bytes)`: comparable between tokenizers.
        nats: Total of the negative log-likelihoods.
        tokens: Number of scored tokens.
        bytes: UTF-8 bytes of their text.
        documents: Number of documents.
    """

    method: str
    protocol: str
    length: int
    perplexity: float
    interval: tuple[float, float] | None
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    bits_per_byte: float | None
    nats: float
    tokens: int
    bytes: int | None
    documents: int


class Bootstrap:
    """Seeded resampling over documents; every cell of a run sees the same resamples, which makes differences paired.

    Args:
        documents: Number of documents.
        seed: Seed of the resampling.
        resamples: Number of resamples.
    """

    def __init__(self, documents: int, seed: int, resamples: int = RESAMPLES) -> None:
        draws = np.random.default_rng(seed).multinomial(
            documents, [1 / documents] * documents, size=resamples
        )
        self._weights = draws.astype(
            np.float64
        )  # (resamples, documents): how often each one was drawn

    def log_perplexities(
        self, nats: Sequence[float], tokens: Sequence[int]
    ) -> np.ndarray[Any, Any]:
        """The log perplexity of every resample, shape (resamples,)."""
        total: np.ndarray[Any, Any] = self._weights @ np.asarray(nats, dtype=np.float64)
        return total / (self._weights @ np.asarray(tokens, dtype=np.float64))


def summarize(records: Sequence[Record], *, seed: int, resamples: int = RESAMPLES) -> list[Cell]:
    """Adds up the records of each (method, protocol, length), in the order of their first appearance."""
    groups: dict[tuple[str, str, int], dict[str, Record]] = {}
    for record in records:
        groups.setdefault((record.method, record.protocol, record.length), {})[record.document] = (
            record
        )
    names = list(dict.fromkeys(record.document for record in records))
    baseline = records[0].method if records else ""
    bootstrap = Bootstrap(len(names), seed, resamples) if len(names) > 1 else None
    cells = []
    for (method, protocol, length), group in groups.items():
        if len(group) < len(
            names
        ):  # a document failed here: a mean over others would not be comparable
            continue
        rows = [group[name] for name in names]
        reference = groups.get((baseline, protocol, length), {})
        other = [reference[name] for name in names if name in reference]
        cells.append(_cell((method, protocol, length), rows, other, bootstrap))
    return cells


def _cell(
    key: tuple[str, str, int],
    rows: Sequence[Record],
    baseline: Sequence[Record],
    bootstrap: Bootstrap | None,
) -> Cell:
    nats, tokens, size = _totals(rows)
    loss = nats / tokens
    interval = ratio = ratio_interval = None
    if bootstrap is not None:
        losses = bootstrap.log_perplexities(
            [row.nats for row in rows], [row.tokens for row in rows]
        )
        interval = _interval(losses)
    if len(baseline) == len(rows):
        base_nats, base_tokens, _ = _totals(baseline)
        ratio = _exp(loss - base_nats / base_tokens)
        if bootstrap is not None:
            base = bootstrap.log_perplexities(
                [row.nats for row in baseline], [row.tokens for row in baseline]
            )
            ratio_interval = _interval(losses - base)
    return Cell(
        *key,
        perplexity=_exp(loss),
        interval=interval,
        ratio=ratio,
        ratio_interval=ratio_interval,
        bits_per_byte=nats / math.log(2) / size if size else None,
        nats=nats,
        tokens=tokens,
        bytes=size,
        documents=len(rows),
    )


def _totals(rows: Sequence[Record]) -> tuple[float, int, int | None]:
    sizes = [row.bytes for row in rows if row.bytes is not None]
    size = sum(sizes) if len(sizes) == len(rows) else None
    return math.fsum(row.nats for row in rows), sum(row.tokens for row in rows), size


def _interval(logs: np.ndarray[Any, Any]) -> tuple[float, float]:
    low, high = np.quantile(logs, [0.025, 0.975])
    return _exp(float(low)), _exp(float(high))


def _exp(value: float) -> float:
    """`exp` that overflows to infinity instead of raising; NaN stays NaN."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
