"""Search of a factor for every pair of features, judged on documents that the search has not read.

The score of a list of factors is the perplexity of the search documents' tails, or that of answers about needles hidden
in them (LongRoPE2, Shang et al. 2025, arXiv 2502.20082, section 3.2 and appendix C).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import Grid, number
from hf_posenc.evaluation.measuring.candidates import CONTROLS, Candidate, Part
from hf_posenc.evaluation.measuring.identity import check_tokenizer
from hf_posenc.evaluation.measuring.statistics import FEW_DOCUMENTS, FEW_NOTE, TOO_FEW, exp_or_inf
from hf_posenc.evaluation.options import SearchSettings, TailOptions
from hf_posenc.evaluation.perplexity.protocols import Span, Window
from hf_posenc.evaluation.perplexity.run import PerplexityRun
from hf_posenc.evaluation.plots import search_figure
from hf_posenc.evaluation.retrieval import Kit, Sample, lay_out
from hf_posenc.evaluation.retrieval.tasks import get_task
from hf_posenc.evaluation.tuning import Race, prepared, tried
from hf_posenc.evaluation.tuning.algorithms import (
    ALGORITHMS,
    LABEL,
    STARTS,
    Genome,
    Space,
    Step,
    best_of,
    critical_starts,
    divide,
    evolve,
    starts,
)
from hf_posenc.evaluation.tuning.board import Board, Row
from hf_posenc.evaluation.tuning.results import TuningResult
from hf_posenc.model.context import context_of
from hf_posenc.model.discovery import read_spec, select, tables_of
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.rope import RopeSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEARCH_DOCUMENTS = 8
NEEDLE_TASK = "niah_single_1"
"""The retrieval task whose words LongRoPE2 uses (appendix C)."""


def rope_of(model: nn.Module, own: SearchSettings) -> RopeSpec:
    """Return the rotary table of an unpatched model that the search starts from."""
    tables = select(tables_of(unwrap(model)), "full", whole=True)
    if tables[0].scaled and not own.replace:
        raise PosencError(
            f"This checkpoint is already scaled (rope_type={tables[0].rope_type!r}). --replace drops its scaling and "
            "searches from its rope_theta and original length."
        )
    specs = []
    for table in tables:
        context = context_of(table, own.scaled_from, argument="--scaled-from")
        specs.append(read_spec(table, context.original, compose=False))
    if len({spec.dim for spec in specs}) > 1:
        raise PosencError(
            f"This model has rotary tables of different sizes ({', '.join(str(s.dim // 2) for s in specs)} pairs): one "
            "list of factors does not fit them all."
        )
    return specs[0]


@dataclass(repr=False, kw_only=True)
class SearchResult(TuningResult):
    """Result of `hf-posenc search`; the rows are of the held-out documents.

    Attributes:
        race: The bound and the search's own settings: objective, algorithm, budget, short texts, ...
        steps: Every individual in the order in which it was scored.
        searched: Indices of the documents that the search read; the others are `held_out`.
        needles: With the objective `needle`, the needle of every document.
        needle_rows: The rows of the needles in the held-out documents.
        judged: The rows of the tokens that the search was for.
        best: The step with the lowest score; `None` if none gave a number within the bound.
    """

    kind = "search"
    title = "Search, held-out documents"
    stored = ("steps", "searched", "needles")

    steps: Sequence[Step]
    searched: Sequence[int]
    needles: Sequence[dict[str, Any]] = ()
    held_out: list[int] = field(init=False)
    needle_rows: list[Row] = field(init=False)
    judged: list[Row] = field(init=False)
    best: Step | None = field(init=False)

    def _compare(self) -> dict[str, Sequence[str]]:
        self.held_out = [n for n in range(len(self.documents)) if n not in self.searched]
        self.best = best_of(self.steps)
        self.winner = None if self.best is None else LABEL
        labels = [entry.label for entry in self.candidates]
        held_out, needles = (
            [texts[index]["name"] for index in self.held_out] if texts else []
            for texts in (self.documents, self.needles)
        )

        def rows(texts: Sequence[str]) -> list[Row]:
            return [
                self.board.row(
                    label, texts, self.winner, control=label in self.controls, short=held_out
                )
                for label in labels
            ]

        self.rows, self.needle_rows = rows(held_out), rows(needles) if needles else []
        self.judged = self.needle_rows or self.rows
        return dict.fromkeys(labels, held_out)

    @property
    def comparisons(self) -> int:
        """Number of the other methods in all tables; other documents have chosen the best one."""
        return (len(self.candidates) - 1) * (2 if self.needles else 1)

    def best_start(self) -> Row | None:
        """Return the best of the published starts, by the perplexity of what was searched for in held-out documents."""
        names = {step.kind for step in self.steps if step.kind in STARTS}
        rows = [r for r in self.judged if self.entry(r.label).method in names and r.failed is None]
        return min(rows, key=lambda row: row.perplexity, default=None)

    @property
    def kept(self) -> Row | None:
        """The best published start, unless the search is significantly better on the held-out documents."""
        start = self.best_start()
        if self.best is None or start is None or start.ratio is None:
            return None
        return None if start.significant and start.ratio > 1 else start

    def _own(self) -> dict[str, Any]:
        kept = self.kept
        return {
            "searched": list(self.searched),
            "best": None if self.best is None else self.best.to_dict(),
            "kept": None if kept is None else kept.label,
            "steps": [step.to_dict() for step in self.steps],
            "needles": list(self.needles),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchResult:
        steps = list(map(Step.from_dict, values["steps"]))
        return super().from_dict({"needles": (), **values, "steps": steps})

    def tables(self) -> list[Grid]:
        """Return the tails of the held-out documents, and the needles in them if the search was for needles."""
        if not self.needles:
            return super().tables()
        title = "Search, needles in the held-out documents: perplexity of the answers' tokens alone"
        needles = self._grid(self.needle_rows, title, scored="needle")
        return [needles, self._grid(self.rows, word="chosen")]

    def plot(self) -> Figure:
        """Draw the path of the search, and the factors found beside those it began with. Needs matplotlib."""
        scores = [step.score for step in self.steps]
        perplexities = [math.exp(score) if score < 700 else math.nan for score in scores]
        begun = {step.kind: step.genome.factors for step in self.steps if step.kind in STARTS}
        best = None if self.best is None else self.best.genome.factors
        scored = "needle" if self.needles else "tail"
        return search_figure(perplexities, begun, best, self.target, scored)

    def notes(self) -> Iterator[str]:
        searched, count = len(self.searched), len(self.held_out)
        table = "table is" if not self.needles else "tables are"
        yield (
            f"{len(self.steps)} evaluations on {searched} document{'s' * (searched != 1)}; the {table} of the other "
            f"{count}. Ranges: 95 % intervals over documents; {self._family()}."
        )
        if self.needles:
            yield (
                "Objective: needle. An evaluation is scored by the perplexity of the answers about needles hidden in "
                "the documents, and the verdicts below are about it."
            )
        if count < FEW_DOCUMENTS:
            yield FEW_NOTE
        if self.best is None:
            yield "No individual gave a number within the bound: there is no recipe."
            return
        begun = best_of([step for step in self.steps if step.kind in STARTS])
        found = next(row for row in self.judged if row.label == LABEL)
        began = "" if begun is None else f" from {number(exp_or_inf(begun.score))} ({begun.kind})"
        yield (
            f"On its own documents the search went{began} to {number(exp_or_inf(self.best.score))}; on the others it "
            f"is at {number(found.perplexity)}{self._on_short(found)}."
        )
        if (start := self.best_start()) is not None:
            yield _to_start(start)
        yield from self._against(self.judged)

    def _origin(self) -> tuple[str, str]:
        row = next(row for row in self.judged if row.label == LABEL)
        source = f"hf-posenc search, after {ALGORITHMS[self.race.get('algorithm', 'longrope')]}"
        by = "; scored by needles (arXiv 2502.20082)" if self.needles else ""
        start = self.best_start()
        beside = "" if start is None else f", {start.label} {start.perplexity:.5g}"
        return source + by, (
            f"{'Needle' if self.needles else 'Tail'} perplexity {row.perplexity:.5g} at {self.target:,} tokens on "
            f"{row.documents} document{'s' * (row.documents != 1)} that the search has not read{beside}; "
            f"{len(self.steps)} evaluations, seed {self.race['seed']}."
        )


def _to_start(start: Row) -> str:
    """Compare the search to the best published start, on documents that neither was fitted to."""
    if start.ratio is None:
        return f"There is no number to compare with {start.label}."
    verdict = f"is worse than {start.label}: keep that"
    if start.documents < FEW_DOCUMENTS:
        verdict = f"has {TOO_FEW} to be told from {start.label}: keep that"
    elif not start.significant:
        verdict = f"is not significantly different from {start.label}: keep that"
    elif start.ratio > 1:
        gain = 100 * (1 - 1 / start.ratio)
        verdict = f"beats {start.label} by {gain:.1f} % of its perplexity"
    return f"On documents that it has not read, the search {verdict}."


def split(documents: int, requested: int) -> list[int]:
    """Return indices of the documents to search on, spread evenly over all of them; at least one is held out."""
    if documents < 2:
        raise PosencError(
            "A search needs two documents at least: one to search on, and one that it has not read to measure the "
            "outcome on."
        )
    count = requested or min(SEARCH_DOCUMENTS, documents // 2)
    if not 1 <= count < documents:
        raise PosencError(
            f"--search-documents {requested}: there are {documents} documents, and one at least stays held out."
        )
    return [index * documents // count for index in range(count)]


@dataclass(frozen=True, eq=False)
class Needle(TokenizedDocument):
    """A prompt with its answer: a needle hidden in a document, and the question about it at the end.

    Attributes:
        answer: Number of the last tokens, which are the answer's.
        depth: Position of the needle in the document's text, from 0 (front) to 1 (back).
    """

    answer: int = 0
    depth: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "depth": self.depth, "answer_tokens": self.answer}


class SearchRun(PerplexityRun):
    """Perplexity of the tails of documents, and of the answers about needles."""

    def windows(self, document: TokenizedDocument, **how: Any) -> Sequence[Window]:
        if not isinstance(document, Needle):
            return super().windows(document, **how)
        # Of a prompt, all tokens are read, or the last of them; those of the answer are scored.
        special, body, most = len(self.special), len(document), how["most"]
        begin = 0 if most is None else max(0, special + body - most)
        stop, answer = special + body - begin, document.answer
        span = Span("tail", self.settings.lengths[-1], stop - answer, stop, float(answer))
        return [Window(begin, body, special, True, (span,))]


def needles_in(
    documents: Sequence[TokenizedDocument],
    searched: Sequence[int],
    tokenizer: Any,
    special: Sequence[int],
    length: int,
    seed: int,
) -> list[Needle]:
    """Hide one needle in every document, whose beginning is cut so that the prompt has `length` tokens with its answer.

    The paper hides all of them at the front. Here the needle of the k-th of n documents has the depth `(k - 1) / n`,
    both in the searched documents and in the others, so that other distances count too. `special` are token ids in
    front of all, `searched` indices of documents.
    """
    check_tokenizer(tokenizer)
    others = [index for index in range(len(documents)) if index not in searched]
    depths = {
        index: rank / len(group) for group in (searched, others) for rank, index in enumerate(group)
    }
    hidden = []
    for index, document in enumerate(documents):
        kit = Kit(tokenizer, 0, tokenizer.decode(document.tokens(0, length).tolist()))
        sample = Sample(seed, NEEDLE_TASK, length, depths[index], index)
        prompt = lay_out(get_task(NEEDLE_TASK).scene(sample, kit), length, special, 0)
        answer = torch.tensor(prompt.answer.ids, dtype=torch.int64)
        ids = torch.cat([prompt.ids[len(special) :], answer])
        name = f"needle of {len(answer)} tokens in {document.name}"
        hidden.append(Needle(name, ids, None, None, answer=len(answer), depth=depths[index]))
    return hidden


@dataclass(kw_only=True)
class SearchJob(Race[SearchResult]):
    """Search on a loaded model and its documents. The objective `needle` has a needle for every document too."""

    result = SearchResult

    own: SearchSettings
    needles: Sequence[Needle] = ()

    @functools.cached_property
    def beside(self) -> dict[str, Any]:
        """Arguments of `patch_model` for a checkpoint that is scaled already."""
        given = {
            "replace": self.own.replace,
            "original_max_position_embeddings": self.own.scaled_from,
        }
        return {name: value for name, value in given.items() if value}

    @functools.cached_property
    def named(self) -> list[tuple[Candidate, bool]]:
        """The controls and the methods that a search starts from, with the keys that a sweep stores them under."""
        original, target = self.settings.lengths
        scale = {"scale": target / original}
        methods = [(Candidate.of([Part(name, scale)], self.beside), False) for name in STARTS]
        controls = [(Candidate.parse(spec), True) for spec in CONTROLS]
        return tried(self.whole.model, [*controls, *methods], original)

    def course(self, board: Board) -> tuple[Sequence[tuple[Candidate, bool]], dict[str, Any]]:
        own, documents, (original, target) = self.own, self.whole.documents, self.settings.lengths
        searched = split(len(documents), own.search_documents)
        held_out = [index for index in range(len(documents)) if index not in searched]
        near, rest = ([documents[index] for index in part] for part in (searched, held_out))
        scored = [self.needles[index] for index in searched] if self.needles else near
        # the bound on short texts is of tails, whatever is searched for
        bounded = [original] if self.max_regression is not None else []
        lengths = [target] if self.needles else [*bounded, target]
        scale, evaluations = target / original, itertools.count(1)
        names = [[document.name for document in part] for part in (scored, near)]

        def score(genomes: Sequence[Genome]) -> list[float]:
            candidates = [
                dataclasses.replace(
                    genome.candidate(scale, own.short_texts, self.beside),
                    name=f"evaluation {next(evaluations)}",
                )
                for genome in genomes
            ]
            board.measure(candidates, scored, lengths)
            if bounded:
                board.measure([self.named[0][0]], near, bounded)
                if self.needles:
                    board.measure(candidates, near, bounded)
            return [board.score(candidate.label, *names) for candidate in candidates]

        rope = rope_of(self.whole.model, own)
        begin = starts(rope, scale, own.attention_factor)
        if own.algorithm == "dcis":
            steps = divide(begin, own.budget, score)
        else:
            space, critical = Space.of(scale, own.attention_factor, own.algorithm), {}
            if own.algorithm == "longrope2":
                critical = critical_starts(rope, scale, space, own.seed)
            steps = evolve(begin | critical, own.budget, space, own.seed, score)
        compared = list(self.named)
        if (best := best_of(steps)) is not None:
            found = best.genome.candidate(scale, own.short_texts, self.beside)
            compared.append((found, False))
        finalists = [each for each, _ in compared]
        board.measure(finalists, rest, self.settings.lengths)
        if self.needles:
            board.measure(finalists, [self.needles[index] for index in held_out], [target])
        race = {"max_regression": self.max_regression, **dataclasses.asdict(own)}
        needles = [each.to_dict() for each in self.needles]
        return compared, {"race": race, "steps": steps, "searched": searched, "needles": needles}

    def cost_line(self) -> str:
        _, own = self.planned
        return f"{self.forwarded:,} tokens for {len(own['steps']):,} evaluations."


def prepare_search(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    own: SearchSettings,
    **about: Any,
) -> SearchJob:
    """Check the model's rotary table, and read documents of at least the target length; `about` as for `prepared`."""
    original = rope_of(model, own).original_max_position_embeddings
    about |= {"embedded_limit": 24, "kind": SearchRun}
    whole = prepared(model, tokenizer, source, options, original, **about)
    needles: Sequence[Needle] = ()
    if own.objective == "needle":
        searched = split(len(whole.documents), own.search_documents)
        how = whole.special.tolist(), whole.settings.lengths[-1], own.seed
        needles = needles_in(whole.documents, searched, tokenizer, *how)
    return SearchJob(whole=whole, own=own, needles=needles, max_regression=options.max_regression)
