"""Result of `hf-posenc extend`: the choice of a method, the demands on it, the verdict, and the card."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from huggingface_hub import ModelCardData

from hf_posenc.evaluation.grid import (
    Field,
    Grid,
    Result,
    number,
    number_range,
    percent_range,
    to_markdown,
)
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import NEEDED, TOO_FEW, Cell, Interval
from hf_posenc.evaluation.options import duration
from hf_posenc.evaluation.perplexity.result import COLUMNS, PerplexityResult
from hf_posenc.evaluation.retrieval.result import Record, RetrievalResult, mcnemar, wilson
from hf_posenc.evaluation.tuning import Board
from hf_posenc.evaluation.tuning.sweep import with_range

SINKS = "attention_sinks"
TABLE, ATTENTION = "table", "attention"
"""Kinds of methods: those that change the rotary table alone cost nothing, and engines can have them."""
SIGNIFICANT = 0.05
CAN_ANSWER = 0.5
"""Answers count if the unpatched model gives at least this share of them at its original length; else ranks do."""


@dataclass(frozen=True)
class Choice:
    """The choice by one half of the documents.

    Attributes:
        ranked: Methods with numbers, the lowest perplexity first; those past the bound on short texts come last.
        equal: The first of them, and those that are not told apart from it.
        winner: The cheapest of the equal ones; `None` without numbers.
    """

    ranked: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    winner: str | None = None


def choose(choosing: PerplexityResult, kinds: Mapping[str, str], bound: float) -> Choice:
    """Choose a method by tail perplexity at the target length; among equals a table before attention.

    Equal to the best is a method whose paired interval contains 1, corrected for all pairs, and whose ratio is at most
    1 + `bound`: with few documents intervals are wide, and do not make a much worse method equal.
    """
    board = Board.of(choosing, bound, 1, TRUNCATION)
    documents = [document["name"] for document in choosing.documents]
    if not (ranked := board.rank(kinds, documents)):
        return Choice()
    best, board.comparisons = ranked[0], max(1, math.comb(len(ranked), 2))
    rivals = [label for label in kinds if label in ranked[1:]]
    past = {label: board.past(label, documents) for label in ranked}
    rows = (board.row(label, documents, best) for label in rivals if past[label] == past[best])
    near = (row for row in rows if row.ratio is not None and row.ratio <= 1 + bound)
    equal = (best, *(row.label for row in near if not row.significant))
    winner = min(equal, key=lambda label: (kinds[label] != TABLE, ranked.index(label)))
    return Choice(tuple(ranked), equal, winner)


@dataclass(frozen=True)
class Demand:
    """A demand on the winner, whether it is met, and the numbers in a sentence."""

    name: str
    met: bool
    numbers: str


@dataclass(repr=False, kw_only=True)
class ExtendResult(Result):
    """Verdict on extending a model; the choice and the demands are computed from the parts.

    Attributes:
        about: The model, the source of the documents, the versions, the command.
        settings: `original` and `target` length in tokens, `budget` in seconds, `max_regression`.
        plan: The amounts that fit the budget, and the seconds that they took.
        kinds: `"table"` or `"attention"` by method, each kind in the order of `recommend`.
        remarks: What was left out, and what the verdict cannot say.
        choosing: The methods on one half of the documents.
        perplexity: The winner and the controls on the other half; `None` without a winner.
        retrieval: Passkeys of the winner and of truncation; `None` where none could be measured.
        training: The command that fine-tunes the model instead.
        recipe: The winner as `load_patch` reads it, where the verdict is to extend.
        saved: Folder, verification and exports of the saved model.
    """

    kind = "extend"
    _stored = ("settings", "plan", "kinds", "remarks", "training", "recipe", "saved")
    _parts: ClassVar[Mapping[str, type[Any]]] = {
        "choosing": PerplexityResult,
        "perplexity": PerplexityResult,
        "retrieval": RetrievalResult,
    }
    columns: ClassVar[Mapping[str, str]] = {
        "half": "its documents: choosing or reporting",
        **COLUMNS,
    }

    about: dict[str, Any]
    settings: dict[str, Any]
    plan: dict[str, Any]
    kinds: dict[str, str]
    remarks: list[str]
    choosing: PerplexityResult
    perplexity: PerplexityResult | None = None
    retrieval: RetrievalResult | None = None
    training: str = ""
    recipe: dict[str, Any] | None = None
    saved: dict[str, Any] | None = None
    choice: Choice = field(init=False)
    demands: list[Demand] = field(init=False)

    def __post_init__(self) -> None:
        self.bound = float(self.settings["max_regression"])
        self.lengths: tuple[int, int] = self.settings["original"], self.settings["target"]
        self.choice = choose(self.choosing, self.kinds, self.bound)
        self.demands = list(self._demands())

    def __repr__(self) -> str:
        return f"ExtendResult({self.lines()[0]})"

    @property
    def winner(self) -> str | None:
        """The chosen method; `None` if none gave numbers."""
        return self.choice.winner

    @property
    def extended(self) -> bool:
        """True if all demands on the winner are met."""
        return self.winner is not None and all(demand.met for demand in self.demands)

    def against(self, label: str, control: str, length: int) -> Cell | None:
        """Return the number of a method on the reporting half, with its paired ratio to a control."""
        if self.perplexity is None:
            return None
        # All demands must be met together, so that a single one needs no correction for their number.
        documents = [document["name"] for document in self.perplexity.documents]
        return Board.of(self.perplexity).cell(label, length, documents, control)

    def needles(self, label: str, far: bool) -> dict[tuple[float | None, int], Record]:
        """Return the answers in texts of the target length, by depth and sample.

        With `far` those about needles that lie farther back than the original length; else about the others.
        """
        found = self.retrieval.needles(label, "passkey", far=far) if self.retrieval else ()
        return {(record.depth, record.sample): record for record in found}

    @property
    def answers(self) -> bool:
        """True if the unpatched model answers passkeys at its original length: else ranks are compared."""
        # truncation leaves texts of this length as they are
        part = self.retrieval and self.retrieval.cell(TRUNCATION, "passkey", self.lengths[0])
        return bool(part and part.accuracy >= CAN_ANSWER)

    def _demands(self) -> Iterator[Demand]:
        original, target = self.lengths
        if self.winner is None or self.perplexity is None:
            return
        labels = [entry.label for entry in self.perplexity.candidates]
        for control in (label for label in (TRUNCATION, SINKS) if label in labels):
            if self.perplexity.failure(control, "tail", target) and control != TRUNCATION:
                continue  # in the remarks
            yield self._compared(f"long texts against {control}", control, target)
        yield self._retrieved(far=True)
        if self.needles(TRUNCATION, far=False):  # older results have none
            yield self._retrieved(far=False)
        yield self._compared("short texts", TRUNCATION, original)

    def _compared(self, name: str, control: str, length: int) -> Demand:
        """Demand that the winner is not significantly worse, and its ratio itself not above the bound.

        On short texts the ratio alone counts: they may cost what the user accepts.
        """
        assert self.winner is not None
        assert self.perplexity is not None
        cell = self.against(self.winner, control, length)
        if cell is None or cell.ratio is None or not math.isfinite(cell.ratio):
            reason = self.perplexity.failure(self.winner, "tail", length)
            return Demand(name, False, reason or f"no number at {length:,} tokens")
        worse = length > self.lengths[0] and cell.differs > 0
        met = cell.ratio <= 1 + self.bound and not worse
        whose = "the unpatched model" if length == self.lengths[0] else control
        needs = f"; {NEEDED.format(cell.needed)}" if cell.needed and not cell.differs else ""
        numbers = f"{number(cell.ratio)} times {whose}{_ends(cell.ratio_interval, needs)}"
        return Demand(name, met, f"{numbers}{', significantly worse' * worse}")

    def _retrieved(self, far: bool) -> Demand:
        """Demand significantly more far needles than truncation finds, or not significantly fewer near ones."""
        assert self.winner is not None
        name = f"needles {'beyond' if far else 'within'} {self.lengths[0]:,} tokens"
        parts = [self.needles(label, far) for label in (self.winner, TRUNCATION)]
        both = parts[0].keys() & parts[1].keys()
        if not both:
            return Demand(name, False, "none could be measured")
        own, others = (
            {key for key in both if (part[key].correct if self.answers else part[key].rank == 1)}
            for part in parts
        )
        chance = mcnemar(len(own - others), len(others - own))
        shares = [f"{len(x)} ({percent_range(wilson(len(x), len(both)))} %)" for x in (own, others)]
        candidates = next(iter(parts[0].values())).candidates
        verb = "answers" if self.answers else f"ranks the key first of {candidates} in"
        numbers = f"{verb} {shares[0]} of {len(both)}, truncation {shares[1]}; p = {chance:.2g}"
        gain = len(own) - len(others) if chance < SIGNIFICANT else 0
        return Demand(name, gain > 0 if far else gain >= 0, numbers)

    def lines(self) -> list[str]:
        """Return the verdict in five lines: what to do, long texts, needles, short texts, the choice."""
        original, target = self.lengths
        others = [label for label in self.choice.equal if label != self.winner]
        long, needles, short = (
            [demand for demand in self.demands if demand.name.startswith(word)]
            for word in ("long", "needles", "short")
        )
        if self.extended:
            verdict = f"Extend to {target:,} tokens: {self.winner} meets every demand."
        else:
            unmet = ", ".join(demand.name for demand in self.demands if not demand.met)
            reason = f"{self.winner} does not meet the demands on {unmet}"
            finds = any(demand.met and "beyond" in demand.name for demand in needles)
            although = ", although it finds needles that truncation cannot" * finds
            verdict = (
                f"Do not extend to {target:,} tokens: {reason if unmet else 'no method gave numbers'}{although}. "
                f"Truncate texts to the last {original:,} tokens, or fine-tune: {self.training}"
            )
        cell = self.winner and self.against(self.winner, TRUNCATION, target)
        perplexity = f"perplexity {number(cell.perplexity)}{_ends(cell.interval)}, " if cell else ""
        documents = 0 if self.perplexity is None else len(self.perplexity.documents)

        def told(demands: Sequence[Demand], first: str = "") -> str:
            numbers = ", ".join(demand.numbers for demand in demands) or "not measured"
            return "NOT MET: " * (not all(demand.met for demand in demands)) + first + numbers

        found = "; ".join(f"{each.name}: {told([each])}" for each in needles)
        equal = f"; not told apart from it: {', '.join(others)}" if others else ""
        measured, budget = duration(self.plan["measured"]), duration(self.settings["budget"])
        return [
            verdict,
            f"Long texts, {documents} documents that did not choose: {told(long, perplexity)}.",
            f"N{found[1:]}." if found else "Needles: not measured.",
            f"Short texts: {told(short)}.",
            (
                f"Chosen among {len(self.kinds)} methods by {len(self.choosing.documents)} other documents{equal}. "
                f"Measured in {measured} of {budget}; ranges: 95 %."
            ),
        ]

    def notes(self) -> Iterator[str]:
        yield from self.lines()
        yield from self.remarks
        if self.saved is not None:
            yield self.saved["verified"]
            engines: dict[str, list[str]] = {}
            for engine, support in self.saved["exports"].items():
                engines.setdefault(support, []).append(engine)
            yield from (f"{', '.join(names)}: {support}" for support, names in engines.items())

    def csv_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the perplexities of both halves."""
        for name, part in (("choosing", self.choosing), ("reporting", self.perplexity)):
            if part is not None:
                yield from ({"half": name, **row} for row in part.csv_rows())

    def tables(self) -> list[Grid]:
        """Return the winner beside the controls, and the methods that it was chosen from."""
        original, target = self.lengths
        parts = [(self.choosing, "by which the method was chosen", tuple(self.choice.ranked))]
        if self.perplexity is not None:
            parts.insert(0, (self.perplexity, "that did not choose it", ()))
        heads = (f"at\n{target:,}", "by\ntruncation", f"at {original:,}, by\nunpatched")
        grids = []
        for part, which, ranked in parts:
            count = len(part.documents)
            title = f"Tail perplexity, {count} document{'s' * (count != 1)} {which}"
            caption = (
                f"{title}; ratios to truncation, paired (all of a column hold together in 95 %)."
            )
            grid = Grid(title, caption=caption)
            grid.column("method", least=12)
            for head in ("kind", *heads):
                grid.column(head, numeric=head != "kind")
            labels = [entry.label for entry in part.candidates]
            for label in sorted(labels, key=lambda each: ((*ranked, each)).index(each)):
                long, short = (part.cell(label, "tail", n) for n in (target, original))
                mark = "" if label in self.kinds else "control"
                values = [_field(long, "perplexity"), _field(long, "ratio"), _field(short, "ratio")]
                kind = self.kinds.get(label, "control")
                grid.row(label, kind, *values, mark="best" if label == self.winner else mark)
            grids.append(grid)
        return grids

    def _values(self) -> dict[str, Any]:
        return {
            "verdict": "extend" if self.extended else "do not extend",
            "winner": self.winner,
            "lines": self.lines(),
            "choice": self.choice,
            "demands": self.demands,
            **self.about,
            **super()._values(),
        }

    @classmethod
    def _fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        about = {name: values[name] for name in ("model", "source", "environment", "command")}
        return {"about": about, **super()._fields_of(values)}

    def card(self, plain: bool, methods: Sequence[str]) -> str:
        """Return the model card of the saved model; `plain` transformers can load it."""
        assert self.saved is not None
        name, (original, target) = self.about["model"]["name"], self.lengths
        metadata = ModelCardData(
            base_model=name if "/" in name else None,
            library_name="transformers" if plain else "hf_posenc",
            pipeline_tag="text-generation",
            tags=["hf_posenc", "long-context", "positional-encoding", *methods],
        )
        package = "transformers" if plain else "hf_posenc"
        loader = "AutoModelForCausalLM" if plain else "from_pretrained"
        call = f"{loader}.from_pretrained" if plain else loader
        engines = Grid.of("", "engine", "computes this model")
        for engine, support in self.saved["exports"].items():
            engines.row(engine, support)
        sections = (
            f"---\n{metadata.to_yaml()}\n---\n\n# {name} for {target:,} tokens with {self.winner}",
            (
                f"{name}, trained at {original:,} tokens and not trained further: only its positions are changed. "
                "extend_recipe.json has the patch, extend.json every number."
            ),
            f'```python\nfrom {package} import {loader}\n\nmodel = {call}("PATH")\n```',
            to_markdown(engines),
            self.saved["verified"],
            "## Measured",
            "\n".join(f"- {line}" for line in (*self.lines(), *self.remarks)),
            *map(to_markdown, self.tables()),
            f"```bash\n{self.about['command']}\n```" if self.about["command"] else "",
        )
        return "\n\n".join(filter(None, sections)) + "\n"


def _ends(interval: Interval | None, more: str = "") -> str:
    return f" ({TOO_FEW if interval is None else number_range(interval)}{more})"


def _field(cell: Cell | None, name: str) -> Field:
    if cell is None or (value := getattr(cell, name)) is None:
        return Field("-")
    return with_range(value, cell.interval if name == "perplexity" else cell.ratio_interval)
