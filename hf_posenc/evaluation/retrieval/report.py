"""The tables that a run prints, and what a reader must know beside them."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.report import as_html, failed, heading
from hf_posenc.evaluation.retrieval.catalogue import get_task
from hf_posenc.evaluation.retrieval.result import RetrievalResult
from hf_posenc.evaluation.retrieval.settings import DECODES
from hf_posenc.evaluation.retrieval.statistics import PI_SUCCESS, YARN_SUCCESS, Cell


def table(result: RetrievalResult, task: str) -> Table:
    """Accuracy by method and length in one task, and how often the answer is ranked first; the best in bold."""
    settings = result.settings
    longest = _longest(result, task)
    made = Table(
        title=f"Retrieval, {task}: {get_task(task).definition}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=settings.ranks,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("method", footer="first by chance", overflow="fold")
    best = {length: _best(result, task, length) for length in settings.lengths}
    for length in settings.lengths:
        chances = [c.chance for c in _column(result, task, length) if c.chance is not None]
        footer = percent(max(chances)) if chances else "-"
        made.add_column(heading(length, result.original), footer, justify="right", no_wrap=True)
    made.add_column(f"passes\n{YARN_SUCCESS:.0%}", justify="right", no_wrap=True)
    depths = get_task(task).has_depth and longest is not None
    if depths:
        made.add_column(f"k_max\n{PI_SUCCESS:.0%}", justify="right", no_wrap=True)
    for entry in result.candidates:
        shown = [_shown(result, entry.label, task, n, best[n]) for n in settings.lengths]
        context, _ = result.passing(entry.label, task)
        row = [*shown, Text("-" if context is None else f"{context:,}")]
        if depths and longest is not None:
            reached = result.k_max(entry.label, task, longest)
            row.append(Text("-" if reached is None else f"{reached:,}"))
        made.add_row(entry.label, *row)
    return made


def percent(share: float) -> str:
    """A share in whole percent; one digit more where it would read 0 or 100 and is not."""
    if 0 < share < 0.005 or 0.995 <= share < 1:
        return f"{share:.1%}"
    return f"{share:.0%}"


def _longest(result: RetrievalResult, task: str) -> int | None:
    fitting = (n for n in result.settings.lengths if not result.is_left_out(task, n))
    return max(fitting, default=None)


def _column(result: RetrievalResult, task: str, length: int) -> list[Cell]:
    return [cell for cell in result.cells if (cell.task, cell.length) == (task, length)]


def _best(result: RetrievalResult, task: str, length: int) -> tuple[float, float]:
    return max(
        ((c.accuracy, c.first or 0.0) for c in _column(result, task, length)), default=(2.0, 0.0)
    )


def _shown(
    result: RetrievalResult, method: str, task: str, length: int, best: tuple[float, float]
) -> Text:
    if result.is_left_out(task, length):
        return Text("-", style="dim")
    cell = result.cell(method, task, length)
    if cell is None:
        reason = result.failure(method, task, length)
        return failed(reason)
    top = best > (0, 0) and (cell.accuracy, cell.first or 0.0) == best
    text = Text(percent(cell.accuracy), style="bold" if top else "")
    text.append(f"\n{percent_range(cell.interval)}", style="dim not bold")
    if cell.first is not None and cell.first_interval is not None:
        above = cell.chance is not None and cell.first_interval[0] > cell.chance
        text.append(f"\n1st {percent(cell.first)}", style="not bold" if above else "dim not bold")
        text.append(f"\n{percent_range(cell.first_interval)}", style="dim not bold")
    return text


def percent_range(interval: tuple[float, float]) -> str:
    """Both ends of an interval of shares, in whole percent."""
    return f"{interval[0] * 100:.0f}-{interval[1] * 100:.0f}"


def notes(result: RetrievalResult) -> Iterator[str]:
    """What a reader must know beside the tables."""
    settings = result.settings
    depths, samples = len(settings.depths), settings.samples
    yield (
        f"{depths * samples} samples at every length ({depths} depths, {samples} each; seed {settings.seed}): "
        f"{DECODES[settings.decode]}. Ranges: 95 %, Wilson."
    )
    if settings.ranks:
        yield (
            f"1st: how often the answer is the most probable of {settings.distractors + 1} candidates, each behind the "
            "same prompt; dim where chance (last row) is within its range."
        )
    yield (
        f"passes {YARN_SUCCESS:.0%}: YaRN's passkey context, the longest with that accuracy. k_max {PI_SUCCESS:.0%}: "
        "Position Interpolation's effective context, the largest distance up to which at least that many are found, at "
        "the longest length."
    )
    if result.haystack.get("kind") != "noise":
        yield (
            "Haystack: your own text in the place of the noise sentences; not comparable with published numbers."
        )
    auto = next((entry for entry in result.candidates if entry.auto_scale), None)
    if auto is not None:
        yield f"(auto): scale = length / {auto.original:,}, the original length, set anew at every length."
    for task in settings.tasks:
        short = [entry for entry in result.left_out if entry.task == task]
        if short:
            yield f"-: {task} needs at least {max(e.needed for e in short):,} tokens with this tokenizer."


def reading_guide(result: RetrievalResult) -> Iterator[str]:
    """What the numbers say about a method."""
    if not result.settings.ranks:
        return
    ranked = [c for c in result.cells if c.first_interval is not None and c.chance is not None]
    for task in result.settings.tasks:
        mine = [c for c in ranked if c.task == task]
        if mine and all(c.first_interval[0] <= c.chance for c in mine):  # type: ignore[index,operator]
            yield f"{task}: no method ranks the answer first more often than chance; this model cannot do the task."
        elif mine and not any(c.accuracy for c in mine):
            yield (
                f"{task}: the model never gives an answer outright, but the ranks show whether it has seen the needle."
            )


def problems(result: RetrievalResult) -> Iterator[str]:
    """One line for every cell without a number; with any of them a run has failed."""
    reasons: dict[tuple[str, str, str], list[int]] = {}
    for failure in result.failures:
        reasons.setdefault((failure.method, failure.task, failure.reason), []).append(
            failure.length
        )
    for (method, task, reason), lengths in reasons.items():
        listed = ", ".join(f"{length:,}" for length in sorted(lengths))
        yield f"{method}: {task} failed at length {listed}: {reason}"


def to_html(result: RetrievalResult) -> str:
    """The tables and notes, for a notebook."""
    return as_html((table(result, task) for task in result.settings.tasks), notes(result))
