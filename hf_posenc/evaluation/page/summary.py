"""Short and long texts side by side: what a method costs at the trained length, and what it does past it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.evaluation.page.lines import Line, Merged
from hf_posenc.evaluation.page.merge import variant
from hf_posenc.evaluation.page.numbers import NOT_FINITE, Entry, failure_entry, ratio_entry
from hf_posenc.evaluation.page.ratios import against
from hf_posenc.evaluation.plots.style import CONTROL


@dataclass(frozen=True)
class Row:
    """A method's row."""

    name: str
    about: str
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Summary:
    """What the intervals say of short and of long texts: ratios at single lengths."""

    columns: Sequence[str]
    rows: Sequence[Row]


def about(line: Line, merged: Merged) -> str:
    """Which results a row comes from, where there are several."""
    if len(merged.sources) == 1:
        return ""
    runs = ", ".join(str(source.number) for source in (line.source, *line.also))
    said = f"run {runs}" if not line.also else f"runs {runs}, the same numbers"
    if len({variant(source) for source in merged.sources}) > 1:
        model = line.source.data["model"]
        said += f": {model.get('name', '')}, {model.get('dtype', '')}"
    return said


def summarized(merged: Merged) -> Summary | None:
    """Each method at the longest length that is no longer than the original, and at the longest of all."""
    original = merged.original
    lengths = merged.settings.lengths
    short = max((n for n in lengths if original and n <= original), default=None)
    if short is None or lengths[-1] == short:
        return None
    long = lengths[-1]
    base = merged.lines[0]
    columns = [f"{short:,} tokens, to the baseline", f"{long:,} tokens, to the baseline"]
    control = next((line for line in merged.lines if line.method == CONTROL), None)
    if control is not None:
        columns.append(f"{long:,} tokens, to {control.label}")
    tail = merged.protocol == "tail"
    if tail:
        columns.append(f"{long:,} tokens, to {base.label} at {short:,}")
    rows = []
    for line in merged.lines:
        entries = [_own_ratio(line, short), _own_ratio(line, long)]
        if control is not None:
            entries.append(_ratio(line, control, merged.protocol, long, long))
        if tail:
            entries.append(_ratio(line, base, merged.protocol, long, short))
        rows.append(Row(line.label, about(line, merged), entries))
    return Summary(columns, rows)


def _own_ratio(line: Line, length: int) -> Entry:
    cell = line.numbers.get(length)
    if cell is None:
        return failure_entry(line.failures.get(length))
    if not math.isfinite(cell.perplexity):
        return NOT_FINITE
    if line.baseline == line.label:
        return Entry(state="baseline", reason="the others are relative to it")
    return ratio_entry(cell.ratio, cell.ratio_interval, cell.documents)


def _ratio(line: Line, other: Line, protocol: str, length: int, other_length: int) -> Entry:
    if line is other and length == other_length:
        return Entry(state="baseline", reason="the others are relative to it")
    ratio, interval = against(line, other, protocol, length, other_length)
    documents = len(line.source.data["documents"])
    return ratio_entry(ratio, interval, documents)
