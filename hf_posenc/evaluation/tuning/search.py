"""Search of a factor for every pair of features, judged on documents that the search has not read.

The score of a list of factors is the perplexity of the search documents' tails, or that of answers about needles hidden
in them (LongRoPE2, Shang et al. 2025, arXiv 2502.20082, section 3.2 and appendix C).
"""

from __future__ import annotations

import dataclasses
import functools
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
from hf_posenc.evaluation.measuring.store import Records
from hf_posenc.evaluation.options import SearchSettings, TailOptions
from hf_posenc.evaluation.perplexity.protocols import Span, Window
from hf_posenc.evaluation.plots.results import search_figure
from hf_posenc.evaluation.retrieval.prompts import Kit, Sample, lay_out
from hf_posenc.evaluation.retrieval.tasks import get_task
from hf_posenc.evaluation.tuning import Batch, Board, Course, Row, TailJob, prepared
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
from hf_posenc.evaluation.tuning.results import TuningResult, against, family_note, on_short
from hf_posenc.evaluation.tuning.sweep import tried
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
    contexts = (context_of(t, own.scaled_from, argument="--scaled-from") for t in tables)
    specs = [
        read_spec(table, context.original, compose=False)
        for table, context in zip(tables, contexts, strict=True)
    ]
    if len({spec.dim for spec in specs}) > 1:
        raise PosencError(
            f"This model has rotary tables of different sizes ({', '.join(str(s.dim // 2) for s in specs)} pairs): one "
            "list of factors does not fit them all."
        )
    return specs[0]


@dataclass(repr=False, kw_only=True)
class SearchResult(TuningResult):
    """Result of `hf-posenc search`; losses and rows are of the held-out documents.

    Attributes:
        search: The search's own settings: objective, algorithm, budget, short texts, a fixed factor on cos and sin.
        steps: Every individual in the order in which it was scored.
        searched: Indices of the documents that the search read; the others are `held_out`.
        needles: With the objective `needle`, the needle of every document; in `losses`, they come after the documents.
        needle_rows: The rows of the needles in the held-out documents.
        judged: The rows of the tokens that the search was for.
        best: The step with the lowest score; `None` if none gave a number within the bound.
    """

    kind = "search"
    title = "Search, held-out documents"

    search: dict[str, Any]
    steps: Sequence[Step]
    searched: Sequence[int]
    needles: Sequence[dict[str, Any]] = ()
    held_out: list[int] = field(init=False)
    needle_rows: list[Row] = field(init=False)
    judged: list[Row] = field(init=False)
    best: Step | None = field(init=False)

    def __repr__(self) -> str:
        return f"SearchResult({len(self.steps)} evaluations, {len(self.documents)} documents)"

    def __post_init__(self) -> None:
        count, board = len(self.documents), self.board
        self.held_out = [index for index in range(count) if index not in self.searched]
        self.best = best_of(self.steps)
        self.chosen = None if self.best is None else LABEL

        def rows(texts: Sequence[int]) -> list[Row]:
            return [
                board.row(t.label, texts, self.chosen, control=t.control, short=self.held_out)
                for t in self.trials
            ]

        self.rows = rows(self.held_out)
        self.needle_rows = rows([count + d for d in self.held_out]) if self.needles else []
        self.judged = self.needle_rows or self.rows

    @property
    def comparisons(self) -> int:
        """Number of the other methods in all tables; other documents have chosen the best one."""
        return (len(self.trials) - 1) * (2 if self.needles else 1)

    def best_start(self) -> Row | None:
        """Return the published method among the starts with the lowest perplexity of what was searched for.

        It is the perplexity on the held-out documents.
        """
        names = {step.kind for step in self.steps if step.kind in STARTS}
        rows = [r for r in self.judged if self.trial(r.label).method in names and r.failed is None]
        return min(rows, key=lambda row: row.perplexity, default=None)

    @property
    def kept(self) -> Row | None:
        """The best published start, unless the search is significantly better on the held-out documents."""
        start = self.best_start()
        if self.best is None or start is None or start.to_best is None:
            return None
        return None if start.significant and start.to_best.ratio > 1 else start

    def _own(self) -> dict[str, Any]:
        kept = self.kept
        return {
            "settings": self.search,
            "searched": list(self.searched),
            "best": None if self.best is None else self.best.to_dict(),
            "kept": None if kept is None else kept.label,
            "steps": [step.to_dict() for step in self.steps],
            **({"needles": list(self.needles)} if self.needles else {}),
        }

    @classmethod
    def _own_fields(cls, values: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        own = {"searched": values["searched"], "needles": values.get("needles", ())}
        return {"search": settings, "steps": list(map(Step.from_dict, values["steps"])), **own}

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
        return search_figure(perplexities, begun, best, self.settings.target, scored)

    def notes(self) -> Iterator[str]:
        searched, count = len(self.searched), len(self.held_out)
        table = "table is" if not self.needles else "tables are"
        yield (
            f"{len(self.steps)} evaluations on {searched} document{'s' * (searched != 1)}; the {table} of the other "
            f"{count}. Ranges: 95 % intervals over documents; {family_note(self.comparisons)}."
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
            f"is at {number(found.perplexity)}{on_short(found, self.settings)}."
        )
        if (start := self.best_start()) is not None:
            yield _to_start(start)
        yield from (against(row, self.settings) for row in self.judged if row.control)

    def _origin(self) -> tuple[str, str]:
        row, settings = next(row for row in self.judged if row.label == LABEL), self.settings
        source = f"hf-posenc search, after {ALGORITHMS[self.search.get('algorithm', 'longrope')]}"
        by = "; scored by needles (arXiv 2502.20082)" if self.needles else ""
        start = self.best_start()
        beside = "" if start is None else f", {start.label} {start.perplexity:.5g}"
        return source + by, (
            f"{'Needle' if self.needles else 'Tail'} perplexity {row.perplexity:.5g} at {settings.target:,} tokens on "
            f"{row.documents} document{'s' * (row.documents != 1)} that the search has not read{beside}; "
            f"{len(self.steps)} evaluations, seed {self.search['seed']}."
        )


def _to_start(start: Row) -> str:
    """Compare the search to the best published start, on documents that neither was fitted to."""
    if start.to_best is None:
        return f"There is no number to compare with {start.label}."
    verdict = f"is worse than {start.label}: keep that"
    if start.documents < FEW_DOCUMENTS:
        verdict = f"has {TOO_FEW} to be told from {start.label}: keep that"
    elif not start.significant:
        verdict = f"is not significantly different from {start.label}: keep that"
    elif start.to_best.ratio > 1:
        gain = 100 * (1 - 1 / start.to_best.ratio)
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


@dataclass(frozen=True)
class Needle:
    """A prompt with its answer: a needle hidden in a document, and the question about it at the end.

    Attributes:
        document: The tokens behind the special tokens; the last `answer` of them are the answer's.
        depth: Position of the needle in the document's text, from 0 (front) to 1 (back).
    """

    document: TokenizedDocument
    answer: int
    depth: float

    @property
    def key(self) -> str:
        """Hash of the tokens, and the number of them that count."""
        return f"{self.to_dict()['tokens_sha256']} needle {self.answer}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {**self.document.to_dict(), "depth": self.depth, "answer_tokens": self.answer}


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
        text = TokenizedDocument(f"needle in {document.name}", ids, None, None)
        hidden.append(Needle(text, len(answer), depths[index]))
    return hidden


@dataclass(kw_only=True)
class SearchJob(TailJob[SearchResult]):
    """Search whose model and documents are ready; with the objective `needle`, also a needle for every document.

    The needle of document i is text `len(documents) + i` of the measurements.
    """

    result = SearchResult

    own: SearchSettings
    needles: Sequence[Needle] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.needles) != (len(self.documents) if self.own.objective == "needle" else 0):
            raise PosencError(
                "The objective needle, and no other, takes a needle for every document: needles_in makes them."
            )
        self.texts += [needle.document for needle in self.needles]
        self.hashes += [needle.key for needle in self.needles]

    def begin(self, store: Records) -> None:
        """Raise if the folder has the records of a search for another objective."""
        stored = store.get(("search", "objective"))
        if stored is None:
            store.append(("search", "objective"), {"name": self.own.objective})
        elif stored["name"] != self.own.objective:
            raise PosencError(
                f"This folder has a search with --objective {stored['name']}, not {self.own.objective}. Give another "
                "--output, or the same objective to resume it."
            )

    def windows(self, text: int, length: int, most: int | None) -> Sequence[Window]:
        if text < len(self.documents):
            return super().windows(text, length, most)
        # Of a prompt, all tokens are read, or the last of them; those of the answer are scored.
        special, body = len(self.special), len(self.texts[text])
        begin = 0 if most is None else max(0, special + body - most)
        stop, answer = special + body - begin, self.needles[text - len(self.documents)].answer
        span = Span("needle", self.settings.target, stop - answer, stop, float(answer))
        return [Window(begin, body, special, True, (span,))]

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
        scale = {"scale": self.settings.target / self.settings.original}
        methods = [(Candidate.of([Part(name, scale)], self.beside), False) for name in STARTS]
        controls = [(Candidate.parse(spec), True) for spec in CONTROLS]
        return tried(self.model, [*controls, *methods], self.settings.original)

    def course(self, measure: Batch) -> Course:
        settings, own, count = self.settings, self.own, len(self.documents)
        searched = split(count, own.search_documents)
        held_out = [index for index in range(count) if index not in searched]
        scored = [count + d for d in searched] if self.needles else searched
        # the bound on short texts is of tails, whatever is searched for
        bounded = [settings.original] if settings.max_regression is not None else []
        lengths = [settings.target] if self.needles else [*bounded, settings.target]
        scale, plain = settings.target / settings.original, self.named[0][0]

        def candidate(genome: Genome) -> Candidate:
            return genome.candidate(scale, own.short_texts, self.beside)

        def score(genomes: Sequence[Genome]) -> list[float]:
            candidates = [candidate(genome) for genome in genomes]
            losses = dict(measure(candidates, scored, lengths))
            if bounded:
                losses |= measure([plain], searched, bounded)
                if self.needles:
                    losses |= measure(candidates, searched, bounded)
            board = Board(losses, settings, plain.key)
            return [board.score(each.key, scored, searched) for each in candidates]

        rope = rope_of(self.model, own)
        begin = starts(rope, scale, own.attention_factor)
        if own.algorithm == "dcis":
            steps = divide(begin, own.budget, score)
        else:
            space, critical = Space.of(scale, own.attention_factor, own.algorithm), {}
            if own.algorithm == "longrope2":
                critical = critical_starts(rope, scale, space, own.seed)
            steps = evolve(begin | critical, own.budget, space, own.seed, score)
        best = best_of(steps)
        compared = [*self.named, *([] if best is None else [(candidate(best.genome), False)])]
        finalists = [each for each, _ in compared]
        losses = dict(measure(finalists, held_out, settings.lengths))
        if self.needles:
            losses |= measure(finalists, [count + d for d in held_out], [settings.target])
        fields = {"search": dataclasses.asdict(own), "steps": steps, "searched": searched}
        return compared, losses, {**fields, "needles": [each.to_dict() for each in self.needles]}

    def cost_line(self) -> str:
        _, (*_, own) = self.planned
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
    fields = prepared(model, tokenizer, source, options, original, embedded_limit=24, **about)
    needles: Sequence[Needle] = ()
    if own.objective == "needle":
        documents, target = fields["documents"], fields["settings"].target
        searched = split(len(documents), own.search_documents)
        needles = needles_in(documents, searched, tokenizer, fields["special"], target, own.seed)
    return SearchJob(**fields, own=own, needles=needles)
