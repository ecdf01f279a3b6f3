"""The perplexity section: a table per protocol, what short and long texts pay, and the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.evaluation.page.collect import (
    Line,
    Merged,
    Source,
    against,
    by_texts,
    merge,
    variant,
    why_another,
    why_apart,
)
from hf_posenc.evaluation.page.figures import Picture, pictures
from hf_posenc.evaluation.page.numbers import (
    NOT_FINITE,
    Entry,
    ends,
    failure_entry,
    ratio_ends,
    ratio_entry,
    shown,
    shown_ratio,
    verdict,
)
from hf_posenc.evaluation.plots.style import CONTROL

# Short and long texts side by side: what a method costs at the trained length, and what it does past it.


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


WIDE = 12
"""With more lengths than this, a table has a row for each and a column per method."""


@dataclass(frozen=True)
class Heading:
    """A length as a table's heading."""

    text: str
    times: str
    long: bool


@dataclass(frozen=True)
class Table:
    """One protocol's numbers.

    Attributes:
        protocol: Its name.
        definition: Its sentence.
        apart: Why it is not the table of the same protocol above, if there is one.
        headings: The lengths.
        short: How many of them are not longer than the original context.
        rows: The methods.
        summary: Short and long texts side by side; `None` where the original length is not known.
        pictures: The figures.
        baseline: What the ratios are relative to.
        documents: Number of documents.
        turned: Whether lengths are rows, for there are many.
    """

    protocol: str
    definition: str
    apart: str
    headings: Sequence[Heading]
    short: int
    rows: Sequence[Row]
    summary: Summary | None
    pictures: Sequence[Picture]
    baseline: str
    documents: int
    turned: bool


@dataclass(frozen=True)
class Section:
    """The results that read the same tokens.

    Attributes:
        sources: The results.
        apart: Why it is not part of the first section.
        documents: Number of documents.
        tables: One per protocol.
    """

    sources: Sequence[Source]
    apart: Sequence[str]
    documents: int
    tables: Sequence[Table]


def sections(sources: Sequence[Source], *, figures: bool) -> list[Section]:
    """All perplexity results, those that may be compared together; with figures or without."""
    groups = by_texts([source for source in sources if source.kind == "perplexity"])
    return [
        Section(
            group,
            why_apart(groups[0], group) if index else [],
            len(group[0].data["documents"]),
            _tables(group, figures),
        )
        for index, group in enumerate(groups)
    ]


def _tables(group: Sequence[Source], figures: bool) -> list[Table]:
    tables: list[Table] = []
    firsts: dict[str, Merged] = {}
    for merged in merge(group):
        name = merged.protocol
        first = firsts.setdefault(name, merged)
        apart = ""
        if first is not merged:
            reason = why_another(first.sources[0].data, merged.sources[0].data, name)
            apart = f"Not comparable with the {name} above: {reason}."
        tables.append(_table(merged, apart, pictures(merged) if figures else []))
    return tables


def _table(merged: Merged, apart: str, drawn: Sequence[Picture]) -> Table:
    lengths, original = merged.settings.lengths, merged.original
    headings = [
        Heading(
            f"{length:,}",
            f"×{length / original:.3g}" if original else "",
            bool(original) and length > (original or 0),
        )
        for length in lengths
    ]
    lowest = {length: _lowest(merged, length) for length in lengths}
    rows = [
        Row(
            line.label,
            about(line, merged),
            [_entry(line, length, lowest[length]) for length in lengths],
        )
        for line in merged.lines
    ]
    return Table(
        merged.protocol,
        merged.definition,
        apart,
        headings,
        sum(1 for heading in headings if not heading.long) if original else 0,
        rows,
        summarized(merged),
        drawn,
        _baselines(merged),
        max((n.documents for line in merged.lines for n in line.numbers.values()), default=0),
        len(lengths) > WIDE,
    )


def _entry(line: Line, length: int, lowest: float) -> Entry:
    cell = line.numbers.get(length)
    if cell is None:
        return failure_entry(line.failures.get(length))
    if not math.isfinite(cell.perplexity):
        return NOT_FINITE
    low, high = ends(cell.interval)
    ratio_low, ratio_high = ratio_ends(cell.ratio_interval)
    itself = line.baseline == line.label
    compared = cell.ratio is not None and math.isfinite(cell.ratio) and not itself
    return Entry(
        shown(cell.perplexity),
        low,
        high,
        shown_ratio(cell.ratio) if compared and cell.ratio is not None else None,
        ratio_low if compared else None,
        ratio_high if compared else None,
        verdict(cell.ratio_interval, cell.documents),
        cell.perplexity == lowest,
    )


def _lowest(merged: Merged, length: int) -> float:
    cells = [line.numbers[length] for line in merged.lines if length in line.numbers]
    values = [cell.perplexity for cell in cells if math.isfinite(cell.perplexity)]
    return min(values) if len(set(values)) > 1 else math.nan


def _baselines(merged: Merged) -> str:
    return ", ".join(dict.fromkeys(line.baseline for line in merged.lines))
