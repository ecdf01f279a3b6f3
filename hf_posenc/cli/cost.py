"""`--dry-run`: what a run will cost, method by method, before anything is run."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hf_posenc.cli.console import out

if TYPE_CHECKING:
    from hf_posenc.evaluation.estimate import Cost
    from hf_posenc.evaluation.items import Item
    from hf_posenc.evaluation.perplexity import Run

GIB = 2**30


def print_cost(run: Run) -> None:
    """Prints tokens, operations and the peak of memory of every method, and what memory there is."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    made.add_column("method", footer="in all")
    rows = []
    key = lambda item: item.candidate.key  # noqa: E731
    for _, group in itertools.groupby(run.items, key=key):
        items = list(group)
        costs = [
            _cost(run, list(same)) for _, same in itertools.groupby(items, key=lambda i: i.lengths)
        ]
        tokens, flops = sum(cost.tokens for cost in costs), sum(cost.flops for cost in costs)
        windows = sum(len(item.windows) for item in items)
        peak = max(costs, key=lambda cost: cost.total)
        rows.append((items[0].candidate.label, windows, tokens, flops, peak))
    heads = (
        ("forwards", f"{sum(row[1] for row in rows):,}"),
        ("tokens", f"{sum(row[2] for row in rows):,}"),
        ("FLOPs", f"{sum(row[3] for row in rows):.3g}"),
        ("GiB at the peak", f"{max(row[4].total for row in rows) / GIB:,.2f}"),
        ("of it logits", ""),
    )
    for name, footer in heads:
        made.add_column(name, footer=footer, justify="right")
    for label, windows, tokens, flops, peak in rows:
        made.add_row(
            label,
            f"{windows:,}",
            f"{tokens:,}",
            f"{flops:.3g}",
            f"{peak.total / GIB:,.2f}",
            f"{peak.logits / GIB:,.2f}",
        )
    console = out()
    console.print(made)
    weights = rows[0][4].weights / GIB
    console.print(
        f"{weights:,.2f} GiB are the weights. {_free(run)} An estimate from the model's sizes, on the high side "
        "(hf_posenc/evaluation/estimate.py says what is counted); nothing was run.",
        markup=False,
    )


def _cost(run: Run, items: list[Item]) -> Cost:
    """What the items of one method and the same lengths take, with the method in force."""
    from hf_posenc.evaluation.estimate import run_cost

    settings, candidate = run.settings, items[0].candidate
    windows = [(w.forwarded, w.tokens - w.first_scored) for item in items for w in item.windows]
    with candidate.applied(run.model, items[0].lengths[-1]):
        return run_cost(
            run.model,
            windows,
            batch=settings.batch,
            chunk=settings.chunk,
            prefill_chunk=None if candidate.length_dependent else settings.prefill,
            full_logits=not run.replays,
        )


def _free(run: Run) -> str:
    from hf_posenc.evaluation.free_memory import free_memory

    device = next(run.model.parameters()).device
    free = free_memory(device)
    return "" if free is None else f"{free / GIB:,.1f} GiB are free on {device}."
