"""Runs a sweep."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.documents import Skipped
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.perplexity.result import FEW_DOCUMENTS, failed, number
from hf_posenc.evaluation.tuning.board import (
    Board,
    Comparison,
    Intervals,
    Loss,
    Losses,
    Row,
    perplexity,
)
from hf_posenc.evaluation.tuning.meter import Item, Meter, TailSettings
from hf_posenc.evaluation.tuning.trials import Trial, recipe_of
from hf_posenc.files import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Successive halving: many on few documents, the better half on twice as many, and so on.
#
# Jamieson and Talwalkar 2016, arXiv 1502.07943, section 2.


FIRST = 5
LEAST = 2
"""Two at least reach the last rung, so that the best is compared with something on every document."""


@dataclass(frozen=True)
class Rung:
    """One round.

    Attributes:
        documents: How many documents, counted from the first, it compared on.
        entered: The labels of those compared, in their own order.
        kept: Who went on, the best first; in the last round all that gave numbers.
    """

    documents: int
    entered: tuple[str, ...]
    kept: tuple[str, ...]


def rung_sizes(documents: int, first: int = FIRST) -> list[int]:
    """Numbers of documents: `first`, then twice as many each time, at last all."""
    sizes = []
    size = first
    while size < documents:
        sizes.append(size)
        size *= 2
    return [*sizes, documents]


def kept_of(entered: int) -> int:
    """How many of so many go on."""
    return min(entered, max(LEAST, -(-entered // 2)))


def run_rungs(
    racers: Sequence[str],
    sizes: Sequence[int],
    rank: Callable[[Sequence[str], Sequence[int]], list[str]],
    measure: Callable[[Sequence[str], Sequence[int]], None] = lambda entered, documents: None,
) -> list[Rung]:
    """Plays all rounds. With every measurement there, it is a function of the measurements.

    Args:
        racers: The labels of those that compete.
        sizes: Number of documents of each round.
        rank: Orders these by what was measured on these documents, the best first; those that gave no numbers are
            left out.
        measure: Makes sure that these have been measured on these documents.

    Returns:
        The rounds; none after one that nobody survived.
    """
    rungs: list[Rung] = []
    entered = tuple(racers)
    for index, size in enumerate(sizes):
        documents = range(size)
        measure(entered, documents)
        ranked = rank(entered, documents)
        last = index + 1 == len(sizes)
        kept = tuple(ranked if last else ranked[: kept_of(len(entered))])
        rungs.append(Rung(size, entered, kept))
        entered = tuple(label for label in racers if label in kept)
        if not entered:
            break
    return rungs


def planned(racers: int, sizes: Sequence[int]) -> list[int]:
    """How many compete in each round, if none fails."""
    counts = []
    for _ in sizes:
        counts.append(racers)
        racers = kept_of(racers)
    return counts


# The result of a sweep: everything measured, the rounds, the winner, and what is left undecided.


FORMAT = 1


@dataclass(repr=False)
class SweepResult:
    """What `hf-posenc sweep` measured. All but the losses and what was asked for is worked out from them.

    Attributes:
        about: The model, the source of the documents, the versions, the command: what does not enter any sum.
        settings: Lengths, tail, bound, seed.
        first_documents: Documents of the first round.
        trials: The lines: the controls first.
        documents: The documents, as `TokenizedDocument.to_dict` says them.
        skipped: Those that were not used, and why.
        losses: By label, length and the document's index.
        recipe: The winner as `load_patch` reads it; `None` where there is no winner.
        rungs: The rounds.
        winner: The label of the winner; `None` where no method gave numbers within the bound.
        rows: A line for every trial: the controls, the winner, the others by the round that they reached, then by how
            they stood in it.
    """

    about: dict[str, Any]
    settings: TailSettings
    first_documents: int
    trials: Sequence[Trial]
    documents: Sequence[dict[str, Any]]
    skipped: Sequence[dict[str, Any]]
    losses: Losses
    recipe: dict[str, Any] | None = None
    rungs: list[Rung] = field(init=False)
    winner: str | None = field(init=False)
    rows: list[Row] = field(init=False)

    def __repr__(self) -> str:
        return f"SweepResult({len(self.trials)} methods, {len(self.documents)} documents; best: {self.winner})"

    def __post_init__(self) -> None:
        racers = [trial.label for trial in self.trials if not trial.control]
        sizes = rung_sizes(len(self.documents), self.first_documents)
        self.rungs = run_rungs(racers, sizes, self.board.ranking(self.settings.max_regression))
        self.winner = self._winner()
        self.rows = self._rows()

    @property
    def board(self) -> Board:
        """The losses with what is asked of them."""
        settings = self.settings
        intervals = Intervals(settings.seed, settings.resamples)
        return Board(
            self.losses, settings.original, settings.target, self.trials[0].label, intervals
        )

    def row(self, label: str) -> Row:
        """The line of a method."""
        return next(row for row in self.rows if row.label == label)

    def trial(self, label: str) -> Trial:
        """What a line measures."""
        return next(trial for trial in self.trials if trial.label == label)

    def undecided(self) -> list[Row]:
        """The methods that the winner is not told apart from, the nearest first: the paired interval holds 1."""
        rows = [row for row in self.rows if not row.control and row.to_best is not None]
        open_ = [
            (row.to_best.ratio, row) for row in rows if row.to_best and not row.to_best.decided
        ]
        return [row for _, row in sorted(open_, key=lambda pair: pair[0])]

    def _winner(self) -> str | None:
        last = self.rungs[-1]
        bound = self.settings.max_regression
        if last.kept and self.board.within(last.kept[0], range(last.documents), bound):
            return last.kept[0]
        return None

    def _rows(self) -> list[Row]:
        board, count = self.board, self.rungs[-1].documents
        controls = [trial.label for trial in self.trials if trial.control]
        rows = [board.row(label, range(count), self.winner, control=True) for label in controls]
        seen: set[str] = set()
        for rung in reversed(self.rungs):
            documents = range(rung.documents)
            entered = [label for label in rung.entered if label not in seen]
            ranked = board.ranking(self.settings.max_regression)(entered, documents)
            order = [*ranked, *(label for label in entered if label not in ranked)]
            rows += [board.row(label, documents, self.winner, control=False) for label in order]
            seen.update(entered)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values; a number that is not finite becomes `None`."""
        values = {
            "format": FORMAT,
            "kind": "sweep",
            **self.about,
            "settings": {**self.settings.to_dict(), "first_documents": self.first_documents},
            "protocol": self.settings.protocol.definition("tail"),
            "documents": list(self.documents),
            "skipped": list(self.skipped),
            "methods": [dataclasses.asdict(trial) for trial in self.trials],
            "rungs": [dataclasses.asdict(rung) for rung in self.rungs],
            "summary": [dataclasses.asdict(row) for row in self.rows],
            "winner": self.winner,
            "undecided": [row.label for row in self.undecided()],
            "recipe": self.recipe,
            "records": records_of(self.losses),
        }
        ready: dict[str, Any] = finite(values)
        return ready

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SweepResult:
        """Reads what `to_dict` wrote."""
        settings = dict(values["settings"])
        first = settings.pop("first_documents")
        return cls(
            about=about_of(values),
            settings=TailSettings.from_dict(settings),
            first_documents=first,
            trials=[Trial(**trial) for trial in values["methods"]],
            documents=values["documents"],
            skipped=values["skipped"],
            losses=losses_of(values["records"]),
            recipe=values["recipe"],
        )

    def plot(self) -> Figure:
        """Every method with its interval, the controls as lines, as a matplotlib figure."""
        from hf_posenc.evaluation.plots.tuning import sweep_figure

        return sweep_figure(self)

    def _repr_html_(self) -> str:
        from hf_posenc.evaluation.perplexity.result import as_html

        return as_html([sweep_table(self)], sweep_lines(self))


ABOUT = ("model", "source", "environment", "command")


def about_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a result says of itself that enters no sum."""
    return {name: values[name] for name in ABOUT}


def records_of(losses: Losses) -> list[dict[str, Any]]:
    """The losses as a list."""
    return [
        {"method": label, "length": length, "document": document, **loss.to_dict()}
        for (label, length, document), loss in losses.items()
    ]


def losses_of(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, int], Loss]:
    """The losses from their list."""
    return {(r["method"], r["length"], r["document"]): Loss.from_dict(r) for r in records}


SOURCE = "hf-posenc sweep: methods times scales by successive halving"


def sweep(
    meter: Meter,
    candidates: Sequence[tuple[Candidate, bool]],
    settings: TailSettings,
    *,
    about: dict[str, Any],
    skipped: Sequence[Skipped] = (),
    first_documents: int = FIRST,
) -> SweepResult:
    """Measures round by round. What the store holds is not measured again, so that a run may be killed at any time.

    Args:
        meter: The model, the documents and the store.
        candidates: What `crossed` gave: each with whether it is a control.
        settings: The objective.
        about: The model (with its `name`), the source of the documents, the versions.
        skipped: Documents that were not used.
        first_documents: Documents of the first round.
    """
    lengths = meter.settings.lengths
    by_label = {candidate.label: candidate for candidate, _ in candidates}
    controls = [candidate.label for candidate, control in candidates if control]
    names = list(by_label)
    losses: dict[tuple[str, int, int], Loss] = {}
    intervals = Intervals(settings.seed, settings.resamples)
    board = Board(losses, settings.original, settings.target, names[0], intervals)

    def measure(entered: Sequence[str], documents: Sequence[int]) -> None:
        wanted = [*controls, *entered]
        meter.measure([Item(by_label[label], d) for label in wanted for d in documents], lengths)
        for label, length, document in itertools.product(wanted, lengths, documents):
            losses[label, length, document] = meter.loss(by_label[label], length, document)

    racers = [label for label in names if label not in controls]
    sizes = rung_sizes(len(meter.documents), first_documents)
    run_rungs(racers, sizes, board.ranking(settings.max_regression), measure)
    result = SweepResult(
        about=about,
        settings=settings,
        first_documents=first_documents,
        trials=[Trial.of(candidate, control=control) for candidate, control in candidates],
        documents=[document.to_dict() for document in meter.documents],
        skipped=[{"name": s.name, "reason": s.reason} for s in skipped],
        losses=dict(
            sorted(losses.items(), key=lambda item: (names.index(item[0][0]), *item[0][1:]))
        ),
    )
    if result.winner is not None:
        result.recipe = recipe_of(
            meter.model,
            by_label[result.winner],
            name="sweep",
            checkpoint=about["model"]["name"],
            source=SOURCE,
            description=described(result, result.winner),
        )
    return result


def described(result: SweepResult, label: str) -> str:
    """One sentence for the recipe: what was measured of the winner."""
    row, settings = result.row(label), result.settings
    short = (
        "" if row.short is None else f"; {row.short.ratio - 1:+.1%} at {settings.original:,} tokens"
    )
    plain = perplexity(
        result.board.of(result.trials[0].label, settings.target, range(row.documents))
    )
    return (
        f"{label}: tail perplexity {row.perplexity:.5g} at {settings.target:,} tokens on {row.documents} documents, "
        f"unpatched {plain:.5g}{short}."
    )


def work(
    meter: Meter, candidates: Sequence[tuple[Candidate, bool]], first_documents: int
) -> tuple[int, int]:
    """Tokens that a sweep forwards if no method fails, and those of measuring everything on every document."""
    lengths = meter.settings.lengths
    costs = [meter.cost(document, lengths) for document in range(len(meter.documents))]
    racers = sum(not control for _, control in candidates)
    controls = len(candidates) - racers
    sizes = rung_sizes(len(costs), first_documents)
    done = halved = 0
    for size, count in zip(sizes, planned(racers, sizes), strict=True):
        halved += (count + controls) * sum(costs[done:size])
        done = size
    return halved, len(candidates) * sum(costs)


# What a sweep prints.


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
