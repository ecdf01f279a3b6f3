"""Successive halving: many on few documents, the better half on twice as many, and so on.

Jamieson and Talwalkar 2016, arXiv 1502.07943, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FIRST = 5
LEAST = 2
"""Two at least reach the last rung, so that the best is compared with something on every document."""


@dataclass(frozen=True)
class Rung:
    """One round.

    Attributes:
        documents: How many documents, counted from the first, it compared on.
        entered: The labels of those compared, in their own order.
        kept: Who went on, the best first; in the last round all that gave numbers.
    """

    documents: int
    entered: tuple[str, ...]
    kept: tuple[str, ...]


def rung_sizes(documents: int, first: int = FIRST) -> list[int]:
    """Numbers of documents: `first`, then twice as many each time, at last all."""
    sizes = []
    size = first
    while size < documents:
        sizes.append(size)
        size *= 2
    return [*sizes, documents]


def kept_of(entered: int) -> int:
    """How many of so many go on."""
    return min(entered, max(LEAST, -(-entered // 2)))


def run_rungs(
    racers: Sequence[str],
    sizes: Sequence[int],
    rank: Callable[[Sequence[str], Sequence[int]], list[str]],
    measure: Callable[[Sequence[str], Sequence[int]], None] = lambda entered, documents: None,
) -> list[Rung]:
    """Plays all rounds. With every measurement there, it is a function of the measurements.

    Args:
        racers: The labels of those that compete.
        sizes: Number of documents of each round.
        rank: Orders these by what was measured on these documents, the best first; those that gave no numbers are
            left out.
        measure: Makes sure that these have been measured on these documents.

    Returns:
        The rounds; none after one that nobody survived.
    """
    rungs: list[Rung] = []
    entered = tuple(racers)
    for number, size in enumerate(sizes):
        documents = range(size)
        measure(entered, documents)
        ranked = rank(entered, documents)
        last = number + 1 == len(sizes)
        kept = tuple(ranked if last else ranked[: kept_of(len(entered))])
        rungs.append(Rung(size, entered, kept))
        entered = tuple(label for label in racers if label in kept)
        if not entered:
            break
    return rungs


def planned(racers: int, sizes: Sequence[int]) -> list[int]:
    """How many compete in each round, if none fails."""
    counts = []
    for _ in sizes:
        counts.append(racers)
        racers = kept_of(racers)
    return counts
