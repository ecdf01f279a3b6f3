"""Runs a search."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.documents import Skipped
from hf_posenc.evaluation.sweep.evolution import Batch, Plan, Space, evolve
from hf_posenc.evaluation.sweep.factors import LABEL, SHORT_TEXTS, STARTS, Genome, rope_of, starts
from hf_posenc.evaluation.sweep.losses import Loss, failure_of, log_perplexity
from hf_posenc.evaluation.sweep.meter import Item, Meter
from hf_posenc.evaluation.sweep.recipe import recipe_of
from hf_posenc.evaluation.sweep.search_result import SearchResult, Step, best_of
from hf_posenc.evaluation.sweep.settings import TailSettings
from hf_posenc.evaluation.sweep.trials import CONTROLS, Trial

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
