"""Accuracies with intervals from single samples, and the numbers that papers report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
PI_SUCCESS = 0.2
YARN_SUCCESS = 0.8


@dataclass(frozen=True)
class Record:
    """The scores of one sample under one method.

    Attributes:
        method: The label of the method.
        task: The task's name.
        length: Tokens of prompt and answer.
        depth: The needle's depth from 0 to 1; `None` where depth does not apply.
        sample: The number of the sample.
        correct: Whether the answer is right, all of it.
        score: The share of the answer's parts that are right.
        nats: Negative log-likelihood of the answer; `None` where answers are generated.
        rank: The answer's rank among the candidates; `None` without distractors.
        candidates: Number of candidates for the rank.
        distance: Tokens from the end of the (first) needle to the end of the prompt.
        text: The generated text, where answers are generated.
    """

    method: str
    task: str
    length: int
    depth: float | None
    sample: int
    correct: bool
    score: float
    nats: float | None
    rank: int | None
    candidates: int | None
    distance: int | None
    text: str | None = None


@dataclass(frozen=True)
class Failure:
    """A cell that could not be measured, and why."""

    method: str
    task: str
    length: int
    reason: str


@dataclass(frozen=True)
class LeftOut:
    """A task without prompts of a length.

    Attributes:
        task: Its name.
        length: The requested length.
        needed: Tokens of its shortest prompt and answer.
    """

    task: str
    length: int
    needed: int


@dataclass(frozen=True)
class Cell:
    """One number of a table or a heat map.

    Attributes:
        method: The label of the method.
        task: The task's name.
        length: Tokens of prompt and answer.
        depth: The needle's depth; `None` for all depths together.
        samples: Number of samples.
        accuracy: The share of samples whose answer is right, all of it.
        interval: 95 % Wilson interval of the accuracy.
        score: Mean share of the answer's parts that are right.
        first: The share of samples whose answer is the most probable candidate.
        first_interval: 95 % Wilson interval of `first`.
        chance: `first` of random ranks.
        rank: Mean rank.
        beaten: Mean share of the distractors that are less probable than the answer; one half for random ranks.
        nats: Mean negative log-likelihood of the answer.
        distance: The largest distance of a needle from the end.
    """

    method: str
    task: str
    length: int
    depth: float | None
    samples: int
    accuracy: float
    interval: tuple[float, float]
    score: float
    first: float | None
    first_interval: tuple[float, float] | None
    chance: float | None
    rank: float | None
    beaten: float | None
    nats: float | None
    distance: int | None


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927), which also holds for shares of 0 and 1.

    Args:
        successes: Number of successes.
        trials: Number of trials, at least 1.
    """
    share, spread = successes / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def summarize(records: Iterable[Record], *, by_depth: bool) -> list[Cell]:
    """Return the cells of all methods, tasks and lengths, in the order of their first appearance.

    Args:
        records: The samples.
        by_depth: One cell for every depth, instead of one for all together.
    """
    groups: dict[tuple[str, str, int, float | None], list[Record]] = {}
    for record in records:
        depth = record.depth if by_depth else None
        groups.setdefault((record.method, record.task, record.length, depth), []).append(record)
    return [_cell(*key, records=group) for key, group in groups.items()]


def _cell(
    method: str, task: str, length: int, depth: float | None, *, records: Sequence[Record]
) -> Cell:
    count = len(records)
    right = sum(record.correct for record in records)
    ranks = [(r.rank, r.candidates) for r in records if r.rank is not None and r.candidates]
    nats = [record.nats for record in records if record.nats is not None]
    distances = [record.distance for record in records if record.distance is not None]
    first = sum(rank == 1 for rank, _ in ranks)
    return Cell(
        method=method,
        task=task,
        length=length,
        depth=depth,
        samples=count,
        accuracy=right / count,
        interval=wilson(right, count),
        score=math.fsum(record.score for record in records) / count,
        first=first / len(ranks) if ranks else None,
        first_interval=wilson(first, len(ranks)) if ranks else None,
        chance=_mean([1 / total for _, total in ranks]),
        rank=_mean([rank for rank, _ in ranks]),
        beaten=_mean([(total - rank) / (total - 1) for rank, total in ranks]),
        nats=_mean(nats),
        distance=max(distances, default=None),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def k_max(cells: Iterable[Cell], success: float = PI_SUCCESS) -> int | None:
    """Return Position Interpolation's effective context (arXiv 2306.15595, section 3.3).

    Args:
        cells: The cells by depth of one method, task and length.
        success: The required accuracy.

    Returns:
        The largest distance between needle and question, in tokens, up to which every measured distance has that
        accuracy; 0 where the shortest has not; `None` without distances.
    """
    reached: int | None = None
    near_first = sorted((c.distance, c.accuracy) for c in cells if c.distance is not None)
    for distance, accuracy in near_first:
        if accuracy < success:
            return reached or 0
        reached = distance
    return reached


def passing(
    cells: Iterable[Cell], success: float = YARN_SUCCESS
) -> tuple[int | None, float | None]:
    """Return YaRN's pair of numbers (arXiv 2309.00071, table 5): passkey context and passkey accuracy.

    Args:
        cells: The cells over all depths of one method and task.
        success: The required accuracy.

    Returns:
        The longest context with at least that accuracy, in tokens, and the mean accuracy of all measured contexts up to
        it; `None` for both where there is none.
    """
    ordered = sorted(cells, key=lambda cell: cell.length)
    longest = max((c.length for c in ordered if c.accuracy >= success), default=None)
    if longest is None:
        return None, None
    return longest, _mean([cell.accuracy for cell in ordered if cell.length <= longest])
