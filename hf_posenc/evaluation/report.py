"""The table that a run prints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.candidates import UNPATCHED
from hf_posenc.evaluation.result import PerplexityResult
from hf_posenc.evaluation.statistics import Cell

FEW_DOCUMENTS = 5


def number(value: float | None, digits: int = 4) -> str:
    """So many significant digits; powers of ten from 10,000."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    if value >= 9999.5:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:#.{digits}g}".rstrip(".")


def table(result: PerplexityResult, protocol: str) -> Table:
    """Perplexity by method and length under one protocol, each with its range; the lowest of a column in bold."""
    lengths, settings = result.settings.lengths, result.settings
    made = Table(
        title=f"Perplexity, {protocol}: {settings.definition(protocol)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=True,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column(
        "method", footer="tokens scored", overflow="fold"
    )  # what gives way on a narrow terminal
    for length in lengths:
        counts = {c.tokens for c in result.cells if (c.protocol, c.length) == (protocol, length)}
        footer = f"{counts.pop():,}" if counts else "-"
        made.add_column(_heading(length, result.original), footer, justify="right", no_wrap=True)
    made.add_column("bits/\nbyte", justify="right", no_wrap=True)
    lowest = {length: _lowest(result, protocol, length) for length in lengths}
    for candidate in result.candidates:
        cells = [result.cell(candidate.label, protocol, length) for length in lengths]
        shown = [
            _cell_text(cell, lowest[length])
            if cell
            else _failure_text(result, candidate.label, protocol, length)
            for cell, length in zip(cells, lengths, strict=True)
        ]
        made.add_row(
            candidate.label, *shown, number(cells[-1].bits_per_byte if cells[-1] else None)
        )
    return made


def _heading(length: int, original: int | None) -> str:
    if not original:
        return f"{length:,}"
    return f"{length:,}\nx{length / original:.3g}"


def _lowest(result: PerplexityResult, protocol: str, length: int) -> float:
    values = [c.perplexity for c in result.cells if (c.protocol, c.length) == (protocol, length)]
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _cell_text(cell: Cell, lowest: float) -> Text:
    text = Text(number(cell.perplexity), style="bold" if cell.perplexity == lowest else "")
    if cell.interval is not None:
        low, high = cell.interval
        text.append(f"\n{number(low, 3)}-{number(high, 3)}", style="dim not bold")
    return text


def _failure_text(result: PerplexityResult, method: str, protocol: str, length: int) -> Text:
    reason = result.failure(method, protocol, length)
    return Text("OOM" if reason == "out of memory" else "failed", style="red")


def notes(result: PerplexityResult) -> Iterator[str]:
    """What a reader must know beside the table: documents, scales, and what could not be measured."""
    settings, count = result.settings, len(result.documents)
    skipped = f", {len(result.skipped)} skipped" if result.skipped else ""
    yield (
        f"{count} document{'s' * (count != 1)}{skipped}; ranges: 95 % bootstrap over documents, seed {settings.seed}; "
        f"bits/byte at {settings.lengths[-1]:,} tokens."
    )
    if count < FEW_DOCUMENTS:
        yield f"Fewer than {FEW_DOCUMENTS} documents: the ranges say little."
    auto = next((candidate for candidate in result.candidates if candidate.auto_scale), None)
    if auto is not None:
        yield f"(auto): scale = length / {auto.original:,}, the original length, set anew at every length."


def problems(result: PerplexityResult) -> Iterator[str]:
    """One line for every method that gave something else than numbers; with any of them a run has failed."""
    for candidate in result.candidates:
        label = candidate.label
        lengths = sorted({cell.length for cell in result.not_finite() if cell.method == label})
        if lengths:
            yield f"{label}: the loss is not a finite number at length {_listed(lengths)}; try --dtype float32."
        reasons: dict[str, set[int]] = {}
        for failure in result.failures:
            if failure.method == label:
                reasons.setdefault(failure.reason, set()).add(failure.length)
        for reason, where in reasons.items():
            yield f"{label}: failed at length {_listed(sorted(where))}: {reason}"


def reading_guide(result: PerplexityResult) -> Iterator[str]:
    """Two lines: what to compare with, and what the protocols say."""
    settings = result.settings
    baseline = result.candidates[0].label
    length = next((n for n in settings.lengths if n == result.original), settings.lengths[0])
    protocol = settings.protocols[-1]
    cell = result.cell(baseline, protocol, length)
    value = f" ({number(cell.perplexity)})" if cell else ""
    trained = ", the length it was trained at" if length == result.original else ""
    what = "the unpatched model" if baseline == UNPATCHED else baseline
    yield (
        f"Baseline: {what} at {length:,} tokens{trained}{value}. A method holds where its {protocol} stays at or below "
        "that as the context grows."
    )
    both = {
        "prefix": "prefix averages over contexts of 1 to L tokens and hides a failure at the far end",
        "tail": "tail scores the same tokens at every L, so context is all that changes",
    }
    shown = "; ".join(both[name] for name in settings.protocols)
    yield f"Protocol: {shown}. Compare numbers of one protocol only."


def _listed(lengths: list[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)
