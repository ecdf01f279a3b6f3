"""What a sweep prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.report import FEW_DOCUMENTS, failed, number
from hf_posenc.evaluation.sweep.board import Row
from hf_posenc.evaluation.sweep.losses import Comparison
from hf_posenc.evaluation.sweep.result import SweepResult
from hf_posenc.evaluation.sweep.settings import TailSettings

METHOD_WIDTH, VERDICT_WIDTH = 12, 9
"""Columns that a method's name and the last word have at least; what is longer goes on in the next line."""


def rows_table(rows: Iterable[Row], settings: TailSettings, best: str | None, title: str) -> Table:
    """Tail perplexity at the target length, the price on short texts, and how each method stands to the best."""
    made = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("method", overflow="fold", min_width=METHOD_WIDTH)
    made.add_column("docu-\nments", justify="right", no_wrap=True)
    made.add_column(f"tail at\n{settings.target:,}", justify="right", no_wrap=True)
    made.add_column(f"at {settings.original:,}, by\nunpatched", justify="right", no_wrap=True)
    made.add_column("by the\nbest", justify="right", no_wrap=True)
    made.add_column("", overflow="fold", min_width=VERDICT_WIDTH)
    for row in rows:
        style = "bold" if row.label == best else "dim" if row.control else ""
        made.add_row(
            Text(row.label),
            f"{row.documents:,}",
            _perplexity(row),
            _percent(row.short),
            _ratio(row.to_best),
            verdict(row, settings, best),
            style=style,
        )
    return made


def sweep_table(result: SweepResult) -> Table:
    """The whole sweep as one table."""
    definition = result.settings.protocol.definition("tail")
    return rows_table(result.rows, result.settings, result.winner, f"Sweep, tail: {definition}")


def verdict(row: Row, settings: TailSettings, best: str | None) -> Text:
    """How a line stands to the best, in a word; "undecided" where the paired interval holds no difference."""
    if row.failed is not None:
        return failed(row.failed)
    if row.label == best:
        return Text("best")
    past = settings.max_regression is not None and row.short is not None
    if past and row.short is not None and row.short.ratio > 1 + (settings.max_regression or 0):
        return Text("past the bound" + (", control" if row.control else ""))
    if row.to_best is None:
        return Text("control" if row.control else "")
    word = "worse" if row.to_best.ratio > 1 else "better"
    return Text(
        (word if row.to_best.decided else "undecided") + (", control" if row.control else "")
    )


def sweep_lines(result: SweepResult) -> Iterator[str]:
    """The outcome in sentences: the rounds, the winner, what is undecided, how the controls stand."""
    settings = result.settings
    rounds = "; ".join(
        f"{len(rung.entered)} on {rung.documents} document{'s' * (rung.documents > 1)}"
        for rung in result.rungs
    )
    yield (
        f"Rounds: {rounds}. Ranges and ratios: 95 % bootstrap over documents, paired, seed {settings.seed}; a "
        "method that left early is compared on the documents that it has read."
    )
    if result.rungs[-1].documents < FEW_DOCUMENTS:
        yield f"Fewer than {FEW_DOCUMENTS} documents: the ranges say little."
    if result.winner is None:
        yield _no_winner(result)
        return
    best = result.row(result.winner)
    yield (
        f"Best: {best.label}, {number(best.perplexity)} at {settings.target:,} tokens"
        f"{on_short(best, settings)}. It was chosen on these documents, which flatters it a little."
    )
    open_ = [row.label for row in result.undecided()]
    if open_:
        yield f"Not told apart from it by these documents: {', '.join(open_)}."
    elif len(result.rungs[0].entered) > 1:
        yield "It is told apart from every other method."
    for row in (row for row in result.rows if row.control):
        yield against(row, settings)


def problems(rows: Iterable[Row]) -> Iterator[str]:
    """One line for every method that gave no number."""
    for row in rows:
        if row.failed is not None:
            yield f"{row.label}: failed: {row.failed}"


def _no_winner(result: SweepResult) -> str:
    bound, settings = result.settings.max_regression, result.settings
    shorts = [
        (row.short.ratio, row.label)
        for row in result.rows
        if not row.control and row.short is not None and row.failed is None
    ]
    if bound is None or not shorts:
        return "No method gave a number: there is no winner."
    ratio, label = min(shorts)
    return (
        f"No method stays within +{100 * bound:.1f} % at {settings.original:,} tokens; the nearest is {label} with "
        f"{100 * (ratio - 1):+.1f} %. There is no winner: allow more, or try a method that leaves short texts "
        "alone, such as dynamic_yarn."
    )


def on_short(row: Row, settings: TailSettings) -> str:
    """The price on short texts, as the end of a sentence."""
    return "" if row.short is None else f", {_percent(row.short)} at {settings.original:,}"


def against(control: Row, settings: TailSettings) -> str:
    """How the best stands to a control, as a sentence."""
    if control.to_best is None:
        return f"{control.label} gave no number to compare with."
    what = {
        "none": "the unpatched model",
        "sliding_window": f"sliding_window, which reads only the last {settings.original:,} tokens",
    }.get(control.label, control.label)
    if not control.to_best.decided:
        return f"It is not told apart from {what}."
    if control.to_best.ratio > 1:
        return f"It is better than {what}."
    return f"It is worse than {what}: on these documents, nothing here makes more of the longer context."


def _perplexity(row: Row) -> Text:
    if row.failed is not None:
        return Text("-")
    text = Text(number(row.perplexity))
    if row.interval is not None:
        text.append(
            f"\n{number(row.interval[0], 3)}-{number(row.interval[1], 3)}", style="dim not bold"
        )
    return text


def _percent(short: Comparison | None) -> str:
    return "" if short is None else f"{100 * (short.ratio - 1):+.1f} %"


def _ratio(comparison: Comparison | None) -> Text:
    if comparison is None:
        return Text("")
    text = Text(number(comparison.ratio))
    if comparison.interval is not None:
        low, high = comparison.interval
        text.append(f"\n{number(low, 4)}-{number(high, 4)}", style="dim")
    return text
