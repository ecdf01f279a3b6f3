"""Runs a search."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Skipped
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.statistics import exp_or_inf
from hf_posenc.evaluation.perplexity.result import FEW_DOCUMENTS, number
from hf_posenc.evaluation.tuning.board import (
    Board,
    Intervals,
    Loss,
    Losses,
    Row,
    failure_of,
    log_perplexity,
)
from hf_posenc.evaluation.tuning.evolution import (
    LABEL,
    SHORT_TEXTS,
    STARTS,
    Batch,
    Genome,
    Plan,
    Space,
    evolve,
    rope_of,
    starts,
)
from hf_posenc.evaluation.tuning.meter import Item, Meter, TailSettings
from hf_posenc.evaluation.tuning.sweep import (
    FORMAT,
    about_of,
    against,
    losses_of,
    on_short,
    records_of,
    rows_table,
)
from hf_posenc.evaluation.tuning.trials import CONTROLS, Trial, recipe_of
from hf_posenc.files import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The result of a search: the path, the factors found, and what they do to documents that the search has not read.


@dataclass(frozen=True)
class Step:
    """One individual that was scored.

    Attributes:
        kind: The start that it is, or `mutation`, or `crossover`.
        genome: Its factors.
        score: Log tail perplexity at the target length over the search documents; infinite where it failed or was past
            the bound.
    """

    kind: str
    genome: Genome
    score: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        score = self.score if math.isfinite(self.score) else None
        return {"kind": self.kind, **dataclasses.asdict(self.genome), "score": score}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Step:
        """What `to_dict` wrote."""
        genome = Genome(tuple(values["factors"]), values["attention_factor"])
        score = values["score"]
        return cls(values["kind"], genome, math.inf if score is None else score)


@dataclass(repr=False)
class SearchResult:
    """What `hf-posenc search` found.

    Attributes:
        about: The model, the source of the documents, the versions.
        settings: Lengths, tail, bound, seed.
        search: The search's own settings: budget, short texts, a given factor on cos and sin.
        steps: Every individual in the order in which it was scored.
        trials: What was measured on the held-out documents: the controls, the starts, the search's best.
        documents: All documents; those of `searched` were read by the search, the others are held out.
        searched: Indices of the documents that the search read.
        skipped: Documents that were not used, and why.
        losses: On the held-out documents, by label, length and the document's index.
        recipe: The best as `load_patch` reads it; `None` where nothing gave numbers within the bound.
        best: The step with the lowest score; `None` as above.
        rows: A line for every trial, over the held-out documents.
    """

    about: dict[str, Any]
    settings: TailSettings
    search: dict[str, Any]
    steps: Sequence[Step]
    trials: Sequence[Trial]
    documents: Sequence[dict[str, Any]]
    searched: Sequence[int]
    skipped: Sequence[dict[str, Any]]
    losses: Losses
    recipe: dict[str, Any] | None = None
    best: Step | None = field(init=False)
    rows: list[Row] = field(init=False)

    def __repr__(self) -> str:
        return f"SearchResult({len(self.steps)} evaluations, {len(self.documents)} documents)"

    def __post_init__(self) -> None:
        self.best = best_of(self.steps)
        labels = {trial.label for trial in self.trials}
        reference = LABEL if LABEL in labels else None
        self.rows = [
            self.board.row(trial.label, self.held_out, reference, control=trial.control)
            for trial in self.trials
        ]

    @property
    def held_out(self) -> list[int]:
        """Indices of the documents that the search has not read."""
        return [index for index in range(len(self.documents)) if index not in self.searched]

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

    def best_start(self) -> Row | None:
        """The published method among the starts that does best on the held-out documents."""
        names = {step.kind for step in self.steps} - {"mutation", "crossover"}
        methods = {trial.label: trial.method for trial in self.trials}
        rows = [r for r in self.rows if methods[r.label] in names and r.failed is None]
        return min(rows, key=lambda row: row.perplexity, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values; a number that is not finite becomes `None`."""
        values = {
            "format": FORMAT,
            "kind": "search",
            **self.about,
            "settings": {**self.settings.to_dict(), **self.search},
            "protocol": self.settings.protocol.definition("tail"),
            "documents": list(self.documents),
            "searched": list(self.searched),
            "skipped": list(self.skipped),
            "methods": [dataclasses.asdict(trial) for trial in self.trials],
            "summary": [dataclasses.asdict(row) for row in self.rows],
            "best": None if self.best is None else self.best.to_dict(),
            "recipe": self.recipe,
            "records": records_of(self.losses),
            "steps": [step.to_dict() for step in self.steps],
        }
        ready: dict[str, Any] = finite(values)
        return ready

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchResult:
        """Reads what `to_dict` wrote."""
        known = {entry.name for entry in dataclasses.fields(TailSettings)}
        settings = values["settings"]
        return cls(
            about=about_of(values),
            settings=TailSettings.from_dict({k: v for k, v in settings.items() if k in known}),
            search={k: v for k, v in settings.items() if k not in known},
            steps=[Step.from_dict(step) for step in values["steps"]],
            trials=[Trial(**trial) for trial in values["methods"]],
            documents=values["documents"],
            searched=values["searched"],
            skipped=values["skipped"],
            losses=losses_of(values["records"]),
            recipe=values["recipe"],
        )

    def plot(self) -> Figure:
        """The path of the search, and the factors found beside those it began with, as a matplotlib figure."""
        from hf_posenc.evaluation.plots.tuning import search_figure

        return search_figure(self)

    def _repr_html_(self) -> str:
        from hf_posenc.evaluation.perplexity.result import as_html

        return as_html([search_table(self)], search_lines(self))


def best_of(steps: Sequence[Step]) -> Step | None:
    """The lowest score, of equals the first; `None` where none is finite."""
    working = [step for step in steps if math.isfinite(step.score)]
    return min(working, key=lambda step: step.score, default=None)


SOURCE = "hf-posenc search, after LongRoPE (Ding et al. 2024, arXiv 2402.13753, algorithm 1)"
SEARCH_DOCUMENTS = 8


@dataclass(frozen=True)
class SearchSettings:
    """What is asked of a search beside the objective.

    Attributes:
        budget: Individuals scored; each costs a forward per tail of every search document.
        search_documents: Documents that the search reads; the others are held out. 0: half of them, at most 8.
        short_texts: What the recipe does to texts of up to the original length: `"same"`, the same factors, or
            `"native"`, nothing.
        attention_factor: The factor on cos and sin, given outright; `None`: it is searched too.
        replace: On a checkpoint that is scaled already: drop its scaling.

    Raises:
        PosencError: A budget below 8, or an unknown `short_texts`.
    """

    budget: int = 400
    search_documents: int = 0
    short_texts: str = "same"
    attention_factor: float | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        Plan.of(self.budget)
        if self.short_texts not in SHORT_TEXTS:
            raise PosencError(
                f"--short-texts is {' or '.join(SHORT_TEXTS)}, not {self.short_texts!r}."
            )
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise PosencError(
                f"--attention-factor is a number above 0, not {self.attention_factor}."
            )


def split(documents: int, wanted: int) -> list[int]:
    """Indices of the documents to search on, spread evenly over all of them; the others are held out.

    Raises:
        PosencError: Too few documents to leave one out.
    """
    if documents < 2:
        raise PosencError(
            "A search needs two documents at least: one to search on, and one that it has not read to measure the "
            "outcome on."
        )
    count = wanted or min(SEARCH_DOCUMENTS, documents // 2)
    if not 1 <= count < documents:
        raise PosencError(
            f"--search-documents {wanted}: there are {documents} documents, and one at least stays held out."
        )
    return [index * documents // count for index in range(count)]


def search(
    meter: Meter,
    settings: TailSettings,
    own: SearchSettings,
    *,
    about: dict[str, Any],
    skipped: Sequence[Skipped] = (),
) -> SearchResult:
    """Searches, then measures what was found on the documents that the search has not read.

    Args:
        meter: The model, the documents and the store.
        settings: The objective.
        own: The search's own settings.
        about: The model (with its `name`), the source of the documents, the versions.
        skipped: Documents that were not used.
    """
    searched = split(len(meter.documents), own.search_documents)
    rope = rope_of(meter.model, replace=own.replace)
    begin = starts(rope, settings.scale, own.attention_factor)
    beside = {"replace": True} if own.replace else {}

    def candidate(genome: Genome) -> Candidate:
        return genome.candidate(settings.scale, own.short_texts, beside)

    steps: list[Step] = []
    plan, space = Plan.of(own.budget), Space.of(settings.scale, own.attention_factor)
    path = evolve(begin, plan, space, settings.seed)
    batch: Batch | None = next(path)
    while batch is not None:
        made = [candidate(genome) for _, genome in batch]
        scores = _scores(meter, made, searched, settings)
        steps += [Step(kind, genome, s) for (kind, genome), s in zip(batch, scores, strict=True)]
        batch = _sent(path, scores)
    best = best_of(steps)
    found = [] if best is None else [(candidate(best.genome), False)]
    compared = [*_published(settings.scale, begin, beside), *found]
    result = _measured(meter, compared, settings, own, steps, searched, about, skipped)
    if found:
        result.recipe = recipe_of(
            meter.model,
            found[0][0],
            name="search",
            checkpoint=about["model"]["name"],
            source=SOURCE,
            description=_described(result),
        )
    return result


def work(meter: Meter, settings: TailSettings, own: SearchSettings) -> int:
    """Tokens that a search forwards, those of the final comparison included."""
    documents = range(len(meter.documents))
    searched = split(len(meter.documents), own.search_documents)
    bound = settings.max_regression is not None
    lengths = [settings.original, settings.target] if bound else [settings.target]
    once = sum(meter.cost(document, lengths) for document in searched)
    both = sum(meter.cost(d, meter.settings.lengths) for d in documents if d not in searched)
    compared = len(CONTROLS) + len(STARTS) + 1
    return own.budget * once + compared * both


def _sent(path: Any, scores: Sequence[float]) -> Batch | None:
    try:
        batch: Batch = path.send(scores)
    except StopIteration:
        return None
    return batch


def _scores(
    meter: Meter, made: Sequence[Candidate], documents: Sequence[int], settings: TailSettings
) -> list[float]:
    """Log tail perplexity at the target length of every candidate; infinite past the bound on short texts."""
    bound = settings.max_regression
    lengths = [settings.target] if bound is None else [settings.original, settings.target]
    plain = Candidate.parse(CONTROLS[0])
    if bound is not None:
        meter.measure([Item(plain, document) for document in documents], [settings.original])
    meter.measure([Item(c, document) for c in made for document in documents], lengths)

    def log(c: Candidate, length: int) -> float:
        losses = [meter.loss(c, length, document) for document in documents]
        return math.inf if failure_of(losses) is not None else log_perplexity(losses)

    return [
        math.inf
        if bound is not None
        and not log(c, settings.original) <= log(plain, settings.original) + math.log1p(bound)
        else log(c, settings.target)
        for c in made
    ]


def _published(
    scale: float, begin: dict[str, Genome], beside: dict[str, Any]
) -> list[tuple[Candidate, bool]]:
    """The controls and the methods that the search begins with, as they are published."""
    extra = "".join(f",{name}=true" for name in beside)
    controls = [(Candidate.parse(spec), True) for spec in CONTROLS]
    methods = [(Candidate.parse(f"{name}:scale={scale!r}{extra}"), False) for name in begin]
    return [*controls, *methods]


def _measured(
    meter: Meter,
    compared: Sequence[tuple[Candidate, bool]],
    settings: TailSettings,
    own: SearchSettings,
    steps: Sequence[Step],
    searched: Sequence[int],
    about: dict[str, Any],
    skipped: Sequence[Skipped],
) -> SearchResult:
    held_out = [index for index in range(len(meter.documents)) if index not in searched]
    lengths = meter.settings.lengths
    meter.measure([Item(c, document) for c, _ in compared for document in held_out], lengths)
    losses: dict[tuple[str, int, int], Loss] = {
        (c.label, length, document): meter.loss(c, length, document)
        for (c, _), length, document in itertools.product(compared, lengths, held_out)
    }
    return SearchResult(
        about=about,
        settings=settings,
        search=dataclasses.asdict(own),
        steps=steps,
        trials=[Trial.of(c, control=control) for c, control in compared],
        documents=[document.to_dict() for document in meter.documents],
        searched=list(searched),
        skipped=[{"name": s.name, "reason": s.reason} for s in skipped],
        losses=losses,
    )


def _described(result: SearchResult) -> str:
    """One sentence for the recipe: what was measured of the best."""
    row, settings = result.row(LABEL), result.settings
    start = result.best_start()
    beside = "" if start is None else f", {start.label} {start.perplexity:.5g}"
    return (
        f"Tail perplexity {row.perplexity:.5g} at {settings.target:,} tokens on {row.documents} documents that the "
        f"search has not read{beside}; {len(result.steps)} evaluations, seed {settings.seed}."
    )


# What a search prints.


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
