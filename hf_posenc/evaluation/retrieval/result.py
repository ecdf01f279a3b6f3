"""Accuracies with intervals from single samples, the numbers that papers report, and the result of a retrieval run."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.grid import (
    Field,
    Grid,
    MethodsResult,
    auto_scale_note,
    failure_field,
    length_head,
    nan_if_none,
    percent,
    percent_range,
)
from hf_posenc.evaluation.measuring.statistics import VERDICTS
from hf_posenc.evaluation.plots import heat_figure
from hf_posenc.evaluation.retrieval.tasks import DECODES, RetrievalSettings, get_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
PI_SUCCESS = 0.2
YARN_SUCCESS = 0.8
COLUMNS = {
    "method": "label of the method",
    "task": "name of the task",
    "length": "tokens of prompt and answer",
    "depth": "depth of the needle, from 0 to 1; empty in the rows over all depths",
    "scale": "scale in force at this length",
    "samples": "prompts that were answered",
    "accuracy": "share of answers that are right, all of them",
    "accuracy_low": "lower end of its 95 % interval (Wilson)",
    "accuracy_high": "upper end",
    "score": "mean share of the answer's parts that are right",
    "first": "share of answers that are the most probable candidate",
    "first_low": "lower end of its 95 % interval (Wilson)",
    "first_high": "upper end",
    "chance": "`first` of random ranks",
    "rank": "mean rank of the answer among the candidates, from 1",
    "beaten": "mean share of the distractors that are less probable than the answer",
    "nats": "mean negative log-likelihood of the answer, in nats",
    "distance": "tokens from the farthest needle to the end of the prompt",
    "status": "ok, not finite, or the reason why there is no number",
}
"""The columns of the CSV file and of `frame`, with unit and meaning."""
VALUES = {
    "accuracy": "answers right",
    "beaten": "distractors less probable\nthan the answer (chance: 50 %)",
}
"""Attributes of `Cell` that heat maps show, with their names."""


@dataclass(frozen=True)
class Record:
    """The scores of one sample under one method.

    Attributes:
        length: Tokens of prompt and answer.
        depth: The needle's depth from 0 to 1; `None` where depth does not apply.
        correct: Whether the answer is right, all of it.
        score: The share of the answer's parts that are right.
        nats: Negative log-likelihood of the answer; `None` where answers are generated, which have a `text`.
        rank: The answer's rank among `candidates`; `None` without distractors.
        distance: Tokens from the end of the (first) needle to the end of the prompt.
    """

    method: str
    task: str
    length: int
    depth: float | None
    sample: int
    correct: bool
    score: float
    nats: float | None
    rank: int | None
    candidates: int | None
    distance: int | None
    text: str | None = None


@dataclass(frozen=True)
class Failure:
    """A cell that could not be measured, and why."""

    method: str
    task: str
    length: int
    reason: str


@dataclass(frozen=True)
class LeftOut:
    """A task without prompts of a length: its shortest prompt and answer have `needed` tokens."""

    task: str
    length: int
    needed: int


@dataclass(frozen=True)
class Cell:
    """One number of a table or a heat map.

    Its attributes are the columns of that name (`COLUMNS`); `interval` and `first_interval` are 95 % Wilson intervals
    of `accuracy` and `first`. `depth` is `None` for all depths together.
    """

    method: str
    task: str
    length: int
    depth: float | None
    samples: int
    accuracy: float
    interval: tuple[float, float]
    score: float
    first: float | None
    first_interval: tuple[float, float] | None
    chance: float | None
    rank: float | None
    beaten: float | None
    nats: float | None
    distance: int | None

    @property
    def quality(self) -> tuple[float, float]:
        """The accuracy, and `first` where accuracies are equal."""
        return self.accuracy, self.first or 0.0

    @property
    def beats_chance(self) -> bool:
        """True if chance is below the whole interval of `first`."""
        interval, chance = self.first_interval, self.chance
        return interval is not None and chance is not None and interval[0] > chance


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927), which also holds for shares of 0 and 1."""
    share, spread = successes / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(won: int, lost: int) -> float:
    """Return the exact two-sided p of pairs of which one side alone has `won` or `lost` (McNemar 1947)."""
    tail = sum(math.comb(won + lost, count) for count in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / (1 << (won + lost)))


def summarize(records: Iterable[Record], *, by_depth: bool) -> list[Cell]:
    """Return the cells of all methods, tasks and lengths, and maybe depths, in the order of their first appearance."""
    groups: dict[tuple[str, str, int, float | None], list[Record]] = {}
    for record in records:
        depth = record.depth if by_depth else None
        groups.setdefault((record.method, record.task, record.length, depth), []).append(record)
    return [_cell(key, group) for key, group in groups.items()]


def _cell(key: tuple[str, str, int, float | None], records: Sequence[Record]) -> Cell:
    count, right = len(records), sum(record.correct for record in records)
    ranks = [(r.rank, r.candidates) for r in records if r.rank is not None and r.candidates]
    first = sum(rank == 1 for rank, _ in ranks)
    return Cell(
        *key,
        samples=count,
        accuracy=right / count,
        interval=wilson(right, count),
        score=math.fsum(record.score for record in records) / count,
        first=first / len(ranks) if ranks else None,
        first_interval=wilson(first, len(ranks)) if ranks else None,
        chance=_mean([1 / total for _, total in ranks]),
        rank=_mean([rank for rank, _ in ranks]),
        beaten=_mean([(total - rank) / (total - 1) for rank, total in ranks]),
        nats=_mean([record.nats for record in records if record.nats is not None]),
        distance=max((r.distance for r in records if r.distance is not None), default=None),
    )


def _shown(cell: Cell, mark: str = "") -> Field:
    """Return the field of a number: the accuracy, how often the answer ranks first, and their intervals."""
    text = Field(percent(cell.accuracy), mark, cell.accuracy)
    text.append(f"\n{percent_range(cell.interval)}", "aside")
    if cell.first is not None and cell.first_interval is not None:
        text.append(f"\n1st {percent(cell.first)}", "" if cell.beats_chance else "aside")
        text.append(f"\n{percent_range(cell.first_interval)}", "aside")
    return text


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


@dataclass(repr=False, kw_only=True)
class RetrievalResult(MethodsResult[Cell]):
    """Answers measured by `hf-posenc retrieval`.

    Attributes:
        haystack: The text between the needles: `{"kind": "noise"}`, or the user's own text with its hash.
        left_out: Tasks and lengths for which there is no prompt.
        cells: One for each method, task and length, computed from the records.
        depth_cells: One for each depth as well.

    Examples:
        >>> from hf_posenc.evaluation import measure_retrieval
        >>> result = measure_retrieval(model, tokenizer, methods=["yarn:scale=4"], lengths=[512], samples=1)
        >>> cell = result.cell("yarn (scale 4)", "passkey", 512)
        >>> front = result.by_depth("yarn (scale 4)", "passkey", 512)[0]
        >>> cell.samples, front.samples  # beside cell.accuracy, cell.first, their intervals, ...
        (5, 1)
    """

    kind = "retrieval"
    condition = "task"
    _stored = (*MethodsResult._stored, "haystack")
    _settings_type = RetrievalSettings
    _lists: ClassVar[Mapping[str, type[Any]]] = {
        "records": Record,
        "failures": Failure,
        "left_out": LeftOut,
    }
    columns = COLUMNS
    nothing = "too short for the task"
    intervals = (("accuracy", "interval"), ("first", "first_interval"))

    settings: RetrievalSettings
    records: Sequence[Record]
    failures: Sequence[Failure]
    left_out: Sequence[LeftOut]
    haystack: dict[str, Any] = field(default_factory=dict)
    depth_cells: list[Cell] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = summarize(self.records, by_depth=False)
        self.depth_cells = summarize(self.records, by_depth=True)

    def by_depth(self, method: str, task: str, length: int) -> list[Cell]:
        """Return the numbers by depth, from the front to the back."""
        key = (method, task, length)
        return [c for c in self.depth_cells if (c.method, c.task, c.length) == key]

    def needles(self, method: str, task: str, *, far: bool) -> list[Record]:
        """Return the answers in prompts longer than the original length, by where the needle is.

        With `far` it lies farther from the end than that length; else within it, where truncation reads it. None where
        one of these prompts' lengths has no number.
        """
        original, own = self.original or math.inf, (method, task)
        if any((x.method, x.task) == own and x.length > original for x in self.failures):
            return []
        records = (r for r in self.records if (r.method, r.task) == own and r.length > original)
        return [r for r in records if r.distance is not None and (r.distance > original) == far]

    def is_left_out(self, task: str, length: int) -> bool:
        """Return whether the task has no prompt of this length."""
        return any((entry.task, entry.length) == (task, length) for entry in self.left_out)

    def k_max(self, method: str, task: str, length: int, success: float = PI_SUCCESS) -> int | None:
        """Return Position Interpolation's effective context (arXiv 2306.15595, section 3.3), in tokens.

        That is the largest distance between needle and question up to which every measured distance has the accuracy
        `success`; 0 where the shortest has not; `None` without distances.
        """
        cells = self.by_depth(method, task, length)
        near_first = sorted((c.distance, c.accuracy) for c in cells if c.distance is not None)
        reached = [d for d, _ in itertools.takewhile(lambda cell: cell[1] >= success, near_first)]
        return max(reached, default=0) if near_first else None

    def passing(self, method: str, task: str) -> tuple[int | None, float | None]:
        """Return YaRN's passkey context and passkey accuracy (arXiv 2309.00071, table 5), `None` for both without any.

        That is the longest context of at least the accuracy `YARN_SUCCESS`, in tokens, and the mean accuracy up to it.
        """
        cells = [cell for cell in self.cells if (cell.method, cell.task) == (method, task)]
        passed = [cell.length for cell in cells if cell.accuracy >= YARN_SUCCESS]
        longest = max(passed, default=0)
        return longest or None, _mean([cell.accuracy for cell in cells if cell.length <= longest])

    def _values(self) -> dict[str, Any]:
        tasks = {name: get_task(name).definition for name in self.conditions}
        scores = []  # the papers' numbers
        for entry, task in itertools.product(self.candidates, self.settings.tasks):
            context, accuracy = self.passing(entry.label, task)
            own: dict[str, Any] = {"method": entry.label, "task": task}
            own["k_max"] = {str(n): self.k_max(entry.label, task, n) for n in self.settings.lengths}
            scores.append({**own, "passing_context": context, "passing_accuracy": accuracy})
        methods = [{**vars(candidate)} for candidate in self.candidates]
        for method in methods:
            del method["prefix_from_one_forward"]  # perplexity's
        return self.described(
            {"tasks": tasks, "decode": DECODES[self.settings.decode]},
            haystack=self.haystack,
            left_out=self.left_out,
            summary=self.cells,
            by_depth=self.depth_cells,
            scores=scores,
            failures=self.failures,
            records=self.records,
            methods=methods,
        )

    def cells_of(self, method: str, condition: str, length: int) -> list[Cell]:
        depths = self.by_depth(method, condition, length) if get_task(condition).has_depth else []
        return [*super().cells_of(method, condition, length), *depths]

    def figures(self) -> dict[str, Figure]:
        figures = {"retrieval": self.plot("accuracy")}
        if self.settings.ranks:
            figures["retrieval_ranks"] = self.plot("beaten")
        return figures

    def plot(self, value: str | None = None) -> Figure:
        """Draw heat maps of depth and length, one for each task and method. Needs matplotlib.

        `value` is `"accuracy"`, or `"beaten"`, the share of distractors less probable than the answer; by default
        accuracy, unless it is 0 everywhere and answers are ranked. Raise `PosencError` for one that is absent.
        """
        ranks = self.settings.ranks
        if value is None:
            hidden = ranks and not any(cell.accuracy for cell in self.cells)
            value = "beaten" if hidden else "accuracy"
        if value not in VALUES or (value == "beaten" and not ranks):
            problem = f"This result has no {value!r} to draw: accuracy, or beaten where answers are ranked."
            raise PosencError(problem)
        return heat_figure(self, value, VALUES[value])

    def shares(self, task: str, method: str, value: str) -> list[list[float]]:
        """Return a heat map: a row for each depth, from the front, a share for each length; NaN where there is none."""
        cells = {(c.method, c.task, c.depth, c.length): c for c in self.depth_cells}
        return [
            [
                nan_if_none(getattr(cells.get((method, task, depth, length)), value, None))
                for length in self.settings.lengths
            ]
            for depth in (self.settings.depths if get_task(task).has_depth else (None,))
        ]

    def missing(self, task: str, method: str, length: int) -> str:
        """Return the reason why a length has no number, in a word; `""` if it has one."""
        if self.is_left_out(task, length):
            return "too short"
        if self.cell(method, task, length) is None:
            return failure_field(self.failure(method, task, length)).text
        return ""

    def tables(self) -> list[Grid]:
        """Return one table per task: accuracy by method and length, and how often the answer is ranked first."""
        return [self._table(task) for task in self.settings.tasks]

    def _table(self, task: str) -> Grid:
        settings, lengths, definition = self.settings, self.settings.lengths, get_task(task)
        fitting = [length for length in lengths if not self.is_left_out(task, length)]
        grid = Grid(f"Retrieval, {task}: {definition.definition}")
        grid.column("method", footer="first by chance" if settings.ranks else "")
        best: dict[int, tuple[float, float]] = {}
        for length in lengths:
            cells = [cell for cell in self.cells if (cell.task, cell.length) == (task, length)]
            best[length] = max((cell.quality for cell in cells), default=(0.0, 0.0))
            chances = [cell.chance for cell in cells if cell.chance is not None]
            footer = percent(max(chances)) if chances else "-" * settings.ranks
            grid.column(length_head(length, self.original), numeric=True, footer=footer)
        grid.column(f"passes\n{YARN_SUCCESS:.0%}", numeric=True)
        by_distance = definition.has_depth and bool(fitting)
        if by_distance:
            grid.column(f"k_max\n{PI_SUCCESS:.0%}", numeric=True)
        apart = by_distance and self.original is not None and max(fitting) > self.original
        for place in ("within", "beyond") if apart else ():
            grid.column(f"{place}\n{self.original:,}", numeric=True)
        for entry in self.candidates:
            fields = [self._field(entry.label, task, n, best[n]) for n in lengths]
            reached = [self.passing(entry.label, task)[0]]
            if by_distance:
                reached.append(self.k_max(entry.label, task, max(fitting)))
            tokens = ["-" if length is None else f"{length:,}" for length in reached]
            sides = [self.needles(entry.label, task, far=far) for far in (False, True) if apart]
            own = (entry.label, task, 0, None)
            split = [_shown(_cell(own, s)) if s else Field("-", "none") for s in sides]
            grid.row(entry.label, *fields, *tokens, *split)
        return grid

    def _field(self, method: str, task: str, length: int, best: tuple[float, float]) -> Field:
        if self.is_left_out(task, length):
            return Field("-", "none")
        if (cell := self.cell(method, task, length)) is None:
            return failure_field(self.failure(method, task, length))
        return _shown(cell, "best" if best > (0, 0) and cell.quality == best else "")

    def notes(self) -> Iterator[str]:
        settings = self.settings
        depths, each = len(settings.depths), settings.samples
        yield (
            f"{depths * each} sample{'s' * (depths * each > 1)} at every length ({depths} depth{'s' * (depths > 1)}, "
            f"{each} each; seed {settings.seed}): {DECODES[settings.decode]}. Ranges: 95 %, Wilson."
        )
        if settings.ranks:
            yield (
                f"1st: how often the answer is the most probable of {settings.distractors + 1} candidates (fewer where "
                "the task offers fewer), each after the same prompt; dim where chance (last row) is within its range."
            )
            unranked = Counter((r.task, r.length) for r in self.records if r.rank is None)
            for (task, length), count in unranked.items():
                yield f"{task} at {length:,} tokens: no rank of {count} answers; all wrong ones are longer."
        names = [name for name in settings.tasks if get_task(name).calibrated]
        if names and settings.ranks:
            yield (
                f"{', '.join(names)}: candidates are ranked by how much more probable they are than on average over "
                "the same question about others of the text."
            )
        yield f"passes {YARN_SUCCESS:.0%}: YaRN's passkey context, the longest with that accuracy."
        by_distance = any(get_task(name).has_depth for name in settings.tasks)
        if by_distance:
            yield (
                f"k_max {PI_SUCCESS:.0%}: Position Interpolation's effective context, the largest distance up to which "
                "at least that many are found, at the longest length."
            )
        if by_distance and self.original is not None and settings.lengths[-1] > self.original:
            yield (
                f"within, beyond: needles within {self.original:,} tokens of the end, all that truncation reads, and "
                "farther ones, in all longer prompts."
            )
        if self.haystack.get("kind") != "noise":
            yield "Haystack: your own text as noise; not comparable with published numbers."
        yield from auto_scale_note(self.candidates)
        for task in settings.tasks:
            needed = [entry.needed for entry in self.left_out if entry.task == task]
            if needed:
                yield f"-: {task} needs at least {max(needed):,} tokens with this tokenizer."

    def findings(self) -> Iterator[str]:
        """Compare the method that finds most to the control, at the longest length, by McNemar's exact test.

        Its p is multiplied by the number of methods of which it is the best (Bonferroni).
        """
        length = self.settings.lengths[-1]
        answers: dict[str, dict[Any, Record]] = {}
        records = [record for record in self.records if record.length == length]
        for record in records:
            answers.setdefault(record.method, {})[record.task, record.depth, record.sample] = record
        control, rivals = self.control(list(answers)) if answers else ("", [])
        if not rivals:
            return
        ranked = self.settings.ranks and not any(record.correct for record in records)
        hits = {
            label: {prompt for prompt, r in own.items() if (r.rank == 1 if ranked else r.correct)}
            for label, own in answers.items()
        }
        best = max(rivals, key=lambda label: len(hits[label] & answers[control].keys()))
        both = answers[best].keys() & answers[control].keys()
        found, base = hits[best] & both, hits[control] & both
        won, lost = len(found - base), len(base - found)
        chance = min(1.0, len(rivals) * mcnemar(won, lost))
        side = (won > lost) - (won < lost) if chance < 0.05 else 0
        none = "" if side > 0 else "no method is significantly better; "
        verb = "ranks the answer first in" if ranked else "answers"
        word = f"significantly {VERDICTS[-side]}" if side else "not significantly different"
        times = f", times {len(rivals)} methods" if len(rivals) > 1 else ""
        yield (
            f"{length:,} tokens, {control} as the control, {len(both)} prompts: {none}{best} {verb} {len(found)}, "
            f"{control} {len(base)}; {word} (exact McNemar test{times}, p = {chance:.2g})."
        )

    def guide(self) -> Iterator[str]:
        if not self.settings.ranks:
            return
        for task in self.settings.tasks:
            ranked = [cell for cell in self.cells if cell.task == task and cell.first is not None]
            if ranked and not any(cell.beats_chance for cell in ranked):
                yield f"{task}: no method ranks the answer first more often than chance; this model cannot do the task."
            elif ranked and not any(cell.accuracy for cell in ranked):
                yield (
                    f"{task}: the model never gives an answer outright, but the ranks show whether it has seen the "
                    "needle."
                )

    def problems(self) -> Iterator[str]:
        lengths = self.lengths_of_failures("method", "task", "reason")
        for (method, task, reason), at in lengths.items():
            yield f"{method}: {task} failed at length {at}: {reason}"
