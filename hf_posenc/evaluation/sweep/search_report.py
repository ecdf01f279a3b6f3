"""What a search prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from hf_posenc.evaluation.report import FEW_DOCUMENTS, number
from hf_posenc.evaluation.statistics import exp_or_inf
from hf_posenc.evaluation.sweep.board import Row
from hf_posenc.evaluation.sweep.factors import LABEL
from hf_posenc.evaluation.sweep.report import against, on_short, rows_table
from hf_posenc.evaluation.sweep.search_result import SearchResult


def search_table(result: SearchResult) -> Table:
    """What was measured on the documents that the search has not read."""
    definition = result.settings.protocol.definition("tail")
    best = LABEL if result.best is not None else None
    title = f"Search, held-out documents, tail: {definition}"
    return rows_table(result.rows, result.settings, best, title)


def search_lines(result: SearchResult) -> Iterator[str]:
    """The outcome in sentences: the path, and whether the search is worth its price on documents it has not read."""
    settings, count = result.settings, len(result.held_out)
    yield (
        f"{len(result.steps)} evaluations on {len(result.searched)} documents; the table is of the other {count}. "
        f"Ranges and ratios: 95 % bootstrap over documents, paired, seed {settings.seed}."
    )
    if count < FEW_DOCUMENTS:
        yield f"Fewer than {FEW_DOCUMENTS} held-out documents: the ranges say little."
    if result.best is None:
        yield "No individual gave a number within the bound: there is no recipe."
        return
    begun = min(
        (step for step in result.steps if step.kind not in ("mutation", "crossover")),
        key=lambda step: step.score,
    )
    found = result.row(LABEL)
    yield (
        f"On its own documents the search went from {number(exp_or_inf(begun.score))} ({begun.kind}) to "
        f"{number(exp_or_inf(result.best.score))}; on the others it is at {number(found.perplexity)}"
        f"{on_short(found, settings)}."
    )
    start = result.best_start()
    if start is not None:
        yield _to_start(start)
    for row in (row for row in result.rows if row.control):
        yield against(row, settings)


def _to_start(start: Row) -> str:
    """How the search stands to the best published start, on documents that neither was fitted to."""
    stands = start.to_best
    if stands is None:
        return f"There is no number to compare with {start.label}."
    if not stands.decided:
        return f"On documents that it has not read, the search is not told apart from {start.label}: keep that."
    if stands.ratio > 1:
        gain = 100 * (1 - 1 / stands.ratio)
        return f"On documents that it has not read, the search beats {start.label} by {gain:.1f} % of its perplexity."
    return f"On documents that it has not read, the search is worse than {start.label}: keep that."
