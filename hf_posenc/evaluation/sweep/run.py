"""Runs a sweep."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.documents import Skipped
from hf_posenc.evaluation.sweep.board import Board
from hf_posenc.evaluation.sweep.halving import FIRST, planned, run_rungs, rung_sizes
from hf_posenc.evaluation.sweep.losses import Intervals, Loss, perplexity
from hf_posenc.evaluation.sweep.meter import Item, Meter
from hf_posenc.evaluation.sweep.recipe import recipe_of
from hf_posenc.evaluation.sweep.result import SweepResult
from hf_posenc.evaluation.sweep.settings import TailSettings
from hf_posenc.evaluation.sweep.trials import Trial

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
