"""The table of a benchmark, and what a reader must know beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation import report as perplexity_report
from hf_posenc.evaluation.bench.pooled import pooled
from hf_posenc.evaluation.bench.result import BenchResult, difference
from hf_posenc.evaluation.published import PublishedTable, get
from hf_posenc.evaluation.published.compare import beside, remarks
from hf_posenc.evaluation.report import FEW_DOCUMENTS, as_html, failed, heading, number
from hf_posenc.evaluation.retrieval import RetrievalResult
from hf_posenc.evaluation.retrieval import report as retrieval_report
from hf_posenc.evaluation.retrieval.report import percent, percent_range
from hf_posenc.evaluation.statistics import Cell

BOUND = 1000.0
"""Perplexities above are shown as papers do; the JSON has them exactly."""

GIB = 2**30


def table(result: BenchResult) -> Table:
    """Methods against lengths: a block for every protocol; retrieval, speed and memory at the right of the first.

    A field has the perplexity, its interval, and the paired difference to the first method in parentheses.
    """
    measured = result.perplexity
    lengths, settings = measured.settings.lengths, measured.settings
    made = _empty(f"Benchmark, suite {result.suite}: perplexity by method and context length")
    made.add_column("method", overflow="fold")  # what gives way on a narrow terminal
    for length in lengths:
        made.add_column(heading(length, measured.original), justify="right", no_wrap=True)
    for name in _beside_headings(result):
        made.add_column(name, justify="right", no_wrap=True)
    for place, protocol in enumerate(settings.protocols):
        if place:
            made.add_section()
        made.add_row(Text(protocol, style="bold italic"))
        lowest = {length: _lowest(result, protocol, length) for length in lengths}
        for entry in measured.candidates:
            fields = [_perplexity(result, entry.label, protocol, n, lowest[n]) for n in lengths]
            more = [] if place else _beside(result, entry.label)
            made.add_row(entry.label, *fields, *more)
    return made


def task_table(result: BenchResult) -> Table | None:
    """Retrieval by task, over all lengths; `None` with fewer than two tasks."""
    found = result.retrieval
    if found is None or len(found.settings.tasks) < 2:
        return None
    made = _empty(f"Retrieval by task, prompts of up to {found.settings.lengths[-1]:,} tokens")
    made.add_column("method", overflow="fold")
    for task in found.settings.tasks:
        made.add_column(task, justify="right", no_wrap=True)
    for entry in found.candidates:
        fields = [_share(found, entry.label, [task]) for task in found.settings.tasks]
        made.add_row(entry.label, *fields)
    return made


def published(result: BenchResult) -> list[tuple[PublishedTable, Table]]:
    """The published tables that were asked for, beside the perplexities."""
    return [(wanted, beside(wanted, result.perplexity)) for wanted in map(get, result.compare)]


def tables(result: BenchResult) -> Iterator[Table]:
    """All of them, in the order in which they are shown."""
    yield table(result)
    by_task = task_table(result)
    if by_task is not None:
        yield by_task
    for _, made in published(result):
        yield made


def notes(result: BenchResult) -> Iterator[str]:
    """What a reader must know beside the tables."""
    measured, settings = result.perplexity, result.perplexity.settings
    baseline, count = measured.candidates[0].label, len(measured.documents)
    for protocol in settings.protocols:
        yield f"{protocol}: {settings.definition(protocol)}."
    yield (
        f"In each field the perplexity over {count} document{'s' * (count != 1)}, its 95 % bootstrap interval over "
        f"documents (seed {settings.seed}), and in parentheses the difference in log-perplexity (nats per token) to "
        f"{baseline} on the same documents; *: the paired 95 % interval of that difference leaves out 0."
    )
    if any(_above(cell) for cell in measured.cells):
        yield f">1e3: above {BOUND:,.0f}; bench.json has the number."
    if count < FEW_DOCUMENTS:
        yield f"Fewer than {FEW_DOCUMENTS} documents: the intervals say little."
    yield from result.remarks
    auto = next((entry for entry in measured.candidates if entry.auto_scale), None)
    if auto is not None:
        yield f"(auto): scale = length / {auto.original:,}, the trained length, set anew at every length."
    yield from _about_retrieval(result)
    yield from _about_speed(result)
    for wanted in result.compare:
        yield from remarks(get(wanted))
    yield from perplexity_report.reading_guide(measured)


def problems(result: BenchResult) -> Iterator[str]:
    """One line for everything that has no number; with any of them a run has failed."""
    yield from perplexity_report.problems(result.perplexity)
    if result.retrieval is not None:
        yield from retrieval_report.problems(result.retrieval)
    if result.speed is not None:
        for cell in result.speed.cells:
            if cell.failed is not None:
                yield f"{cell.method}: the prefill failed at length {result.speed.length:,}: {cell.failed}"


def to_html(result: BenchResult) -> str:
    """The tables and notes, for a notebook."""
    return as_html(tables(result), notes(result), width=180)


def _empty(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _perplexity(
    result: BenchResult, method: str, protocol: str, length: int, lowest: float
) -> Text:
    cell = result.perplexity.cell(method, protocol, length)
    if cell is None:
        return failed(result.perplexity.failure(method, protocol, length))
    text = Text(_bounded(cell.perplexity), style="bold" if cell.perplexity == lowest else "")
    if cell.interval is not None and math.isfinite(cell.perplexity):
        low, high = (_bounded(end, 3) for end in cell.interval)
        text.append(f"\n{low}-{high}", style="dim not bold")
    change, *_ = difference(cell)
    if change is not None and math.isfinite(change) and method != _baseline(result):
        shown = round(change, 3) or 0.0  # no -0.000
        text.append(f"\n({shown:+.3f}){'*' * bool(cell.differs)}", style="not bold")
    return text


def _baseline(result: BenchResult) -> str:
    return result.perplexity.candidates[0].label


def _bounded(value: float, digits: int = 4) -> str:
    return ">1e3" if value > BOUND else number(value, digits)


def _above(cell: Cell) -> bool:
    return any(value > BOUND for value in (cell.perplexity, *(cell.interval or ())))


def _lowest(result: BenchResult, protocol: str, length: int) -> float:
    cells = result.perplexity.cells
    values = [c.perplexity for c in cells if (c.protocol, c.length) == (protocol, length)]
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _beside_headings(result: BenchResult) -> list[str]:
    headings = []
    if result.retrieval is not None:
        tasks, longest = result.retrieval.settings.tasks, result.retrieval.settings.lengths[-1]
        name = tasks[0] if len(tasks) == 1 else "retrieval"
        headings.append(f"{name}\n≤{longest:,}")
    if result.speed is not None:
        headings += [f"{name}\n@{result.speed.length:,}" for name in ("tok/s", "GiB")]
    return headings


def _beside(result: BenchResult, method: str) -> list[Text]:
    fields = []
    if result.retrieval is not None:
        fields.append(_share(result.retrieval, method, None))
    if result.speed is not None:
        cell = result.speed.cell(method)
        if cell.tokens_per_second is None:
            return [*fields, failed(cell.failed), failed(cell.failed)]
        speed = Text(f"{cell.tokens_per_second:,.0f}")
        if cell.ratio is not None and method != _baseline(result):
            speed.append(f"\nx{cell.ratio:.2f}", style="dim")
        memory = "-" if cell.peak_bytes is None else number(cell.peak_bytes / GIB, 3)
        fields += [speed, Text(memory)]
    return fields


def _share(result: RetrievalResult, method: str, tasks: list[str] | None) -> Text:
    found = pooled(result, method, tasks=tasks)
    if found.cell is None:
        left_out = not any(failure.method == method for failure in result.failures)
        return Text("-", style="dim") if left_out else failed(found.failure)
    cell = found.cell
    text = Text(percent(cell.accuracy))
    text.append(f"\n{percent_range(cell.interval)}", style="dim")
    if cell.first is not None and cell.first_interval is not None and cell.chance is not None:
        above = cell.first_interval[0] > cell.chance
        text.append(f"\n1st {percent(cell.first)}{'*' * above}")
    return text


def _about_retrieval(result: BenchResult) -> Iterator[str]:
    if result.retrieval is None:
        return
    settings = result.retrieval.settings
    count = len(settings.depths) * settings.samples
    cell = next(
        (
            p.cell
            for e in result.retrieval.candidates
            if (p := pooled(result.retrieval, e.label)).cell
        ),
        None,
    )
    samples = "" if cell is None else f", {cell.samples} in all"
    first = ""
    if cell is not None and cell.chance is not None:
        first = (
            f" 1st: how often the right answer is the most probable of {settings.distractors + 1}; *: more often than "
            f"chance ({percent(cell.chance)})."
        )
    yield (
        f"Retrieval: answers that are right, of {', '.join(settings.tasks)} at all lengths ({count} samples each"
        f"{samples}), with a 95 % Wilson interval.{first}"
    )
    for task in settings.tasks:
        short = [entry for entry in result.retrieval.left_out if entry.task == task]
        if short:
            lengths = ", ".join(f"{entry.length:,}" for entry in short)
            yield f"{task} has no prompt as short as {lengths} tokens."


def _about_speed(result: BenchResult) -> Iterator[str]:
    speed = result.speed
    if speed is None:
        return
    threads = (
        "" if speed.threads is None else f", {speed.threads} thread{'s' * (speed.threads != 1)}"
    )
    replays = result.perplexity.head_replay != "off"
    logits = "the last token" if replays else "every token, as this model cannot do with fewer"
    yield (
        f"tok/s: prefill of {speed.length:,} tokens (one forward without a key-value cache, logits of {logits}), "
        f"median of {len(speed.rounds)} after a warm-up each, methods in turn, on {speed.device}{threads}; x: times as "
        f"fast as {_baseline(result)}, median over the rounds."
    )
    if speed.memory is not None:
        yield f"GiB: {speed.memory}, in the timed forward."
    for cell in speed.cells:
        if cell.prefill is not None:
            yield f"{cell.method}: prefill in pieces of {cell.prefill:,} tokens."
