"""The perplexity section: a table per protocol, what short and long texts pay, and the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.comparable import by_texts, why_another, why_apart
from hf_posenc.evaluation.page.figures import Picture, pictures
from hf_posenc.evaluation.page.lines import Line, Merged
from hf_posenc.evaluation.page.merge import merge
from hf_posenc.evaluation.page.numbers import (
    NOT_FINITE,
    Entry,
    ends,
    failure_entry,
    ratio_ends,
    shown,
    shown_ratio,
    verdict,
)
from hf_posenc.evaluation.page.summary import Row, Summary, about, summarized

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
