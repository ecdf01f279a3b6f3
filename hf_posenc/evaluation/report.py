"""The tables that a run prints, and what a reader must know beside them."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.candidates import UNPATCHED
from hf_posenc.evaluation.memory import OUT_OF_MEMORY
from hf_posenc.evaluation.presets import PRESETS
from hf_posenc.evaluation.result import PerplexityResult
from hf_posenc.evaluation.statistics import Cell

FEW_DOCUMENTS = 5
SAME_RATIO = 0.0005
"""A difference below 0.1 % is rounding of what is shown."""
SAYS = {
    "prefix": "prefix averages over contexts of 1 to L tokens and hides a failure at the far end",
    "tail": "tail scores the same tokens at every L, so context is all that changes",
    "sliding": "sliding scores tokens with nearly L tokens in front of them, and every L scores others too",
    "disjoint": "disjoint averages over contexts of 1 to L tokens, in pieces all through the text",
    "longppl": "longppl scores the tokens that an evaluator predicts by far context alone",
    "stream": "stream averages over contexts of 1 to L tokens, across the ends of documents",
}


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
    """Perplexity by method and length under one protocol, each with its range; the lowest of a column in bold.

    An arrow says where a number is lower or higher than the baseline's by more than chance.
    """
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
        made.add_column(heading(length, result.original), footer, justify="right", no_wrap=True)
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


def heading(length: int, original: int | None) -> str:
    """A length above its column, and below it how many times the trained length that is."""
    return f"{length:,}\nx{length / original:.3g}" if original else f"{length:,}"


def failed(reason: str | None) -> Text:
    """A field without a number."""
    return Text("OOM" if reason == OUT_OF_MEMORY else "failed", style="red")


def _lowest(result: PerplexityResult, protocol: str, length: int) -> float:
    values = [c.perplexity for c in result.cells if (c.protocol, c.length) == (protocol, length)]
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _cell_text(cell: Cell, lowest: float) -> Text:
    arrow = {-1: " ↓", 0: "", 1: " ↑"}[cell.differs]
    text = Text(number(cell.perplexity) + arrow, style="bold" if cell.perplexity == lowest else "")
    if cell.interval is not None and not math.isnan(cell.perplexity):
        low, high = cell.interval
        text.append(f"\n{number(low, 3)}-{number(high, 3)}", style="dim not bold")
    return text


def _failure_text(result: PerplexityResult, method: str, protocol: str, length: int) -> Text:
    reason = result.failure(method, protocol, length)
    return Text("-") if reason is None else failed(reason)  # none: no token to score


def notes(result: PerplexityResult) -> Iterator[str]:
    """What a reader must know beside the table: documents, scales, and what could not be measured."""
    settings, count = result.settings, len(result.documents)
    skipped = f", {len(result.skipped)} skipped" if result.skipped else ""
    what = "One stream" if settings.streams else f"{count} document{'s' * (count != 1)}"
    ranges = f"ranges: 95 % bootstrap over documents, seed {settings.seed}"
    yield (
        f"{what}{skipped}; {ranges if count > 1 else 'no ranges, which need several documents'}; "
        f"bits/byte at {settings.lengths[-1]:,} tokens."
    )
    baseline = result.candidates[0].label
    if any(cell.differs for cell in result.cells):
        yield (
            f"↓ ↑: lower or higher than {baseline} by more than chance (paired 95 % interval of the ratio); no arrow: "
            "it may be chance."
        )
    if 1 < count < FEW_DOCUMENTS:
        yield f"Fewer than {FEW_DOCUMENTS} documents: the ranges say little."
    yield from _gaps(result)
    if "longppl" in settings.protocols and not any(c.protocol == "longppl" for c in result.cells):
        yield "longppl: the evaluator found no key token in these texts, so there is nothing to score."
    yield from _short_texts(result)
    yield from _orders(result)
    auto = next((candidate for candidate in result.candidates if candidate.auto_scale), None)
    if auto is not None:
        yield f"(auto): scale = length / {auto.original:,}, the original length, set anew at every length."


def _gaps(result: PerplexityResult) -> Iterator[str]:
    """Windows that are farther apart than they are long leave text unread between them."""
    settings = result.settings
    slid = [name for name in settings.protocols if name in ("sliding", "stream")]
    every = settings.bos_windows == "every" or "stream" in slid
    special = len(result.model.get("bos", {}).get("token_ids", ())) if every else 0
    short = [length for length in settings.lengths if length - special < settings.stride]
    if slid and short:
        yield (
            f"Windows of {_listed(short)} tokens lie {settings.stride:,} apart: the text between them is not read, and "
            "all that is in them is scored; --stride sets another distance."
        )


def _telling(result: PerplexityResult, length: int) -> str:
    """The last protocol that has a number for the baseline at this length."""
    label, names = result.candidates[0].label, result.settings.protocols
    return next((name for name in reversed(names) if result.cell(label, name, length)), names[-1])


def _short_texts(result: PerplexityResult) -> Iterator[str]:
    """What texts within the trained length pay, in percent of the baseline's perplexity."""
    baseline = result.candidates[0].label
    short = [n for n in result.settings.lengths if result.original and n <= result.original]
    if not short or len(result.settings.lengths) == len(short):
        return
    protocol = _telling(result, short[-1])
    cells = [result.cell(entry.label, protocol, short[-1]) for entry in result.candidates[1:]]
    ratios = [
        (cell, cell.ratio)
        for cell in cells
        if cell is not None and cell.ratio is not None and math.isfinite(cell.ratio)
    ]
    said = [
        f"{cell.method} {_percent(cell)}" for cell, ratio in ratios if abs(ratio - 1) >= SAME_RATIO
    ]
    if len(said) < len(ratios):
        said.append(f"the others as {baseline}" if said else f"all as {baseline}")
    if said:
        yield f"Short texts ({short[-1]:,} tokens, {protocol}, against {baseline}): {'; '.join(said)}."


def _percent(cell: Cell) -> str:
    assert cell.ratio is not None
    text = f"{(cell.ratio - 1) * 100:+.1f} %"
    if cell.ratio_interval is not None:
        low, high = ((bound - 1) * 100 for bound in cell.ratio_interval)
        text += f" ({low:+.1f} to {high:+.1f})"
    return text


def _orders(result: PerplexityResult) -> Iterator[str]:
    """Whether the protocols put the methods in the same order; they often do not."""
    length = result.settings.lengths[-1]
    orders: dict[str, list[str]] = {}
    for protocol in result.settings.protocols:
        cells = [result.cell(entry.label, protocol, length) for entry in result.candidates]
        ranked = sorted(
            (c.perplexity, c.method) for c in cells if c is not None and math.isfinite(c.perplexity)
        )
        orders[protocol] = [method for _, method in ranked]
    (first, order), *others = orders.items()
    for protocol, other in others:
        if order != other and set(order) == set(other):
            swapped = next((a, b) for a, b in zip(order, other, strict=True) if a != b)
            yield (
                f"The order of methods at {length:,} tokens depends on the protocol: {first} has {swapped[0]} in a "
                f"place that {protocol} gives to {swapped[1]}."
            )
            return


def to_html(result: PerplexityResult) -> str:
    """The tables and notes, for a notebook."""
    return as_html(
        (table(result, protocol) for protocol in result.settings.protocols), notes(result)
    )


def as_html(tables: Iterable[Table], lines: Iterable[str], width: int = 160) -> str:
    """Tables and the sentences below them as HTML.

    Args:
        tables: As the terminal shows them.
        lines: Sentences.
        width: Of the tables, in characters.
    """
    # In a notebook rich would display what it records, and the result then stood there twice.
    console = Console(
        file=io.StringIO(), record=True, width=width, highlight=False, force_jupyter=False
    )
    for made in tables:
        console.print(made)
    for line in lines:
        console.print(line, markup=False)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def problems(result: PerplexityResult) -> Iterator[str]:
    """One line for every method that gave something else than numbers; with any of them a run has failed."""
    for candidate in result.candidates:
        label = candidate.label
        lengths = sorted({cell.length for cell in result.not_finite() if cell.method == label})
        if lengths:
            yield f"{label}: the loss is not a finite number at length {_listed(lengths)}{_advice(result)}."
        reasons: dict[str, set[int]] = {}
        for failure in result.failures:
            if failure.method == label:
                reasons.setdefault(failure.reason, set()).add(failure.length)
        for reason, where in reasons.items():
            yield f"{label}: failed at length {_listed(sorted(where))}: {reason}"


def _advice(result: PerplexityResult) -> str:
    """More digits help only where there were few."""
    enough = str(result.model.get("dtype")) in ("float32", "float64")
    return "" if enough else "; try --dtype float32"


def reading_guide(result: PerplexityResult) -> Iterator[str]:
    """Two lines: what to compare with, and what the protocols say."""
    settings = result.settings
    baseline = result.candidates[0].label
    length = next((n for n in settings.lengths if n == result.original), settings.lengths[0])
    protocol = _telling(result, length)
    cell = result.cell(baseline, protocol, length)
    value = f" ({number(cell.perplexity)})" if cell else ""
    trained = ", the length it was trained at" if length == result.original else ""
    what = "the unpatched model" if baseline == UNPATCHED else baseline
    yield (
        f"Baseline: {what} at {length:,} tokens{trained}{value}. A method holds where its perplexity ({protocol}) "
        "stays at or below that as the context grows."
    )
    shown = "; ".join(SAYS[name] for name in settings.protocols)
    yield f"Protocol: {shown}. Compare numbers of one protocol only."
    if settings.preset is not None:
        yield f"Preset {settings.preset}: {PRESETS[settings.preset].remark}"


def _listed(lengths: list[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)
