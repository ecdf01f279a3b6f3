"""Numbers as the page shows them, and what their intervals allow to say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.evaluation.measuring.statistics import ROUNDING, side_of_one
from hf_posenc.evaluation.perplexity.result import FEW_DOCUMENTS, number
from hf_posenc.evaluation.scoring.memory import OUT_OF_MEMORY

Interval = tuple[float, float]


@dataclass(frozen=True)
class Shown:
    """A number for a `<data>` element: what stands there, and its exact value."""

    text: str
    exact: str


@dataclass(frozen=True)
class Entry:
    """One field of a table.

    Attributes:
        value: The number; `None` where `state` says why there is none.
        low: The lower end of its 95 % interval.
        high: The upper end.
        ratio: Its ratio to the baseline.
        ratio_low: The lower end of the ratio's paired interval.
        ratio_high: The upper end.
        verdict: `"better"` or `"worse"` where the interval says so, else nothing.
        lowest: Whether no other number of its column is lower.
        state: `""`, or why there is no number: `"OOM"`, `"nan"`, `"failed"`, `"not measured"`.
        reason: More about the state.
    """

    value: Shown | None = None
    low: Shown | None = None
    high: Shown | None = None
    ratio: Shown | None = None
    ratio_low: Shown | None = None
    ratio_high: Shown | None = None
    verdict: str = ""
    lowest: bool = False
    state: str = ""
    reason: str = ""


NOT_FINITE = Entry(state="nan", reason="the loss is not a finite number")


def shown(value: float, digits: int = 4) -> Shown:
    """A number with so many significant digits."""
    return Shown(number(value, digits), repr(value))


def interval_of(values: Sequence[float | None] | None) -> Interval | None:
    """An interval as JSON has it."""
    if values is None or values[0] is None or values[1] is None:
        return None
    return values[0], values[1]


def shown_ratio(value: float) -> Shown:
    """A ratio with as many digits as it takes to tell it from 1, but for what is rounding."""
    if not 0.9 < value < 1.1 or abs(value - 1) < ROUNDING:
        return shown(value, 3)
    texts = [f"{value:.{digits}f}" for digits in (3, 4)]
    return Shown(next((text for text in texts if float(text) != 1), texts[-1]), repr(value))


def ratio_ends(interval: Interval | None) -> tuple[Shown | None, Shown | None]:
    """Both ends of a ratio's interval, where there is one."""
    if interval is None:
        return None, None
    return shown_ratio(interval[0]), shown_ratio(interval[1])


def percent(share: float) -> Shown:
    """A share in whole percent; one digit more where it would read 0 or 100 and is not."""
    digits = 1 if 0 < share < 0.005 or 0.995 <= share < 1 else 0
    return Shown(f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%", repr(share))


def ends(interval: Interval | None) -> tuple[Shown | None, Shown | None]:
    """Both ends of an interval, where there is one."""
    if interval is None:
        return None, None
    return shown(interval[0], 3), shown(interval[1], 3)


def verdict(interval: Interval | None, documents: int) -> str:
    """`"better"` where the whole interval of a ratio of perplexities lies below 1, `"worse"` where above, else nothing.

    Below `FEW_DOCUMENTS` documents an interval says too little for either.
    """
    if interval is None or documents < FEW_DOCUMENTS or not all(map(math.isfinite, interval)):
        return ""
    return {-1: "better", 0: "", 1: "worse"}[side_of_one(interval)]


def ratio_entry(ratio: float | None, interval: Interval | None, documents: int) -> Entry:
    """A ratio by itself, as the summary shows it."""
    if ratio is None or not math.isfinite(ratio):
        return Entry(state="-", reason="one of the two was not measured")
    low, high = ratio_ends(interval)
    return Entry(shown_ratio(ratio), low, high, verdict=verdict(interval, documents))


def failure_entry(reason: str | None) -> Entry:
    """A field without a number."""
    if reason is None:
        return Entry(state="-", reason="not measured")
    return Entry(state="OOM" if reason == OUT_OF_MEMORY else "failed", reason=reason)
