"""The search of factors: what it finds, its constraints, independent references, objectives, and its outcome."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.candidates import CONTROLS, Candidate, crossed
from hf_posenc.evaluation.options import SearchSettings, SweepOptions
from hf_posenc.evaluation.perplexity.run import Item, PerplexityRun
from hf_posenc.evaluation.tuning import tried
from hf_posenc.evaluation.tuning.search import (
    Genome,
    SearchResult,
    Step,
    evolve,
    rope_of,
    split,
    starts,
)
from hf_posenc.evaluation.tuning.sweep import prepare_sweep
from hf_posenc.rope import RopeSpec
from tests.support import sweep_cases as cases
from tests.support import zoo
from tests.support.sweep_cases import finished, search_of, tail_nats, texts
from tests.support.tiny_text import tiny

ROPE = RopeSpec(32, 10000.0, 256)
GOAL = (1, 1, 1, 1.1, 1.3, 1.5, 1.8, 2.2, 2.6, 3, 3.2, 3.4, 3.5, 3.8, 4.5, 4.9)
OWN = SearchSettings(budget=24, search_documents=2)
Objective = Callable[[Genome], float]


def distance(genome: Genome) -> float:
    """A known objective: how far the factors are from `GOAL`, and the factor on cos and sin from 1.1."""
    logs = sum(math.log(a / b) ** 2 for a, b in zip(genome.factors, GOAL, strict=True))
    return logs + (10 * (genome.attention_factor - 1.1)) ** 2


def scorer(objective: Objective) -> Callable[[Sequence[Genome]], list[float]]:
    return lambda genomes: list(map(objective, genomes))


def played(budget: int, seed: int) -> list[Step]:
    return evolve(starts(ROPE, 4.0), budget, 4.0, seed, scorer(distance))


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_optimum_is_found(seed: int) -> None:
    """Of twelve seeds, the worst ends at 0.038 and 0.095, and 11 times below the first round."""
    steps = played(800, seed)
    begun = min(step.score for step in steps if step.kind in ("pi", "ntk", "yarn"))
    best = min(steps, key=lambda step: step.score)
    assert begun > 1.4
    assert best.score < 0.06  # a root mean square of 6 % over 16 factors
    assert max(abs(math.log(a / b)) for a, b in zip(best.genome.factors, GOAL, strict=True)) < 0.2
    assert min(step.score for step in steps[:40]) > 5 * best.score  # the first round is far away


@pytest.mark.parametrize("seed", range(3))
def test_every_individual_is_new_monotone_and_within_the_space(seed: int) -> None:
    steps = played(400, seed)
    assert steps == played(400, seed) != played(400, seed + 1)  # the seed decides the path
    genomes = [step.genome for step in steps]
    assert len(genomes) == len(set(genomes)) == 400
    assert {step.kind for step in steps} == {"pi", "ntk", "yarn", "mutation", "crossover"}
    for genome in genomes:
        assert genome.monotone
        assert list(genome.factors) == sorted(genome.factors)
        assert genome.factors[0] >= 1
        assert genome.factors[-1] <= 5 + 1e-9
        assert 1 <= genome.attention_factor <= 1 + 0.2 * math.log(4) + 1e-9
    assert any(genome.factors[-1] > 4 for genome in genomes)


def test_scores_that_are_no_numbers_never_have_children() -> None:
    begin = starts(ROPE, 4.0)

    def score(genome: Genome) -> float:
        return math.nan if genome == begin["pi"] else distance(genome)

    steps = evolve(begin, 40, 4.0, 0, scorer(score))
    assert [step.score for step in steps if step.kind == "pi"] == [math.inf]
    later = [step.genome for step in steps[8:]]
    # PI alone has all factors at the scale from the first pair on
    assert later
    assert all(genome.factors[0] < 4 for genome in later)


@pytest.mark.parametrize(("budget", "population"), [(8, 8), (400, 20), (1344, 64)])
def test_the_rounds_grow_to_the_papers(budget: int, population: int) -> None:
    """64 individuals, of which 32 are parents, and 16 mutations and 16 crossovers in a round."""
    rounds: list[int] = []

    def score(genomes: Sequence[Genome]) -> list[float]:
        rounds.append(len(genomes))
        return list(map(distance, genomes))

    evolve(starts(ROPE, 4.0), budget, 4.0, 0, score)
    assert rounds[0] == population
    assert max(rounds[1:], default=population // 4 * 2) == population // 4 * 2
    assert sum(rounds) == budget


def test_the_starts_are_the_methods() -> None:
    model = tiny()
    rope = rope_of(model)
    assert rope.original_max_position_embeddings == 64
    for name, genome in starts(rope, 2.5).items():
        seen = []
        candidate = genome.candidate(2.5, "same")
        for patch in (candidate.applied(model, 1), hf_posenc.patched(model, name, scale=2.5)):
            with patch:
                seen.append((hf_posenc.inspect_rope(model)[0], tail_nats(model, texts(2)[1])))
        (found, ours), (wanted, theirs) = seen
        assert found.attention_factor == pytest.approx(wanted.attention_factor)
        assert (found.inv_freq / wanted.inv_freq - 1).abs().max() < 1e-6
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_scaled_checkpoint_is_refused_and_a_patched_one() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(PosencError, match="already scaled, by rope_type linear in its config, and"):
        rope_of(zoo.build("llama", rope_parameters=rope))
    for spec in ("yarn:scale=2", "rerope"):
        with Candidate.parse(spec).applied(model := tiny(), 1):
            for refuses in (rope_of, lambda m: prepare_sweep(m, None, Source(), SweepOptions())):
                with pytest.raises(PosencError, match=rf"^This model carries a patch \({spec[:4]}"):
                    refuses(model)


@pytest.mark.parametrize(
    ("documents", "wanted", "searched"),
    [(24, 0, [0, 3, 6, 9, 12, 15, 18, 21]), (5, 0, [0, 2]), (2, 0, [0]), (4, 3, [0, 1, 2])],
)
def test_the_split(documents: int, wanted: int, searched: list[int]) -> None:
    assert split(documents, wanted) == searched


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def found(model: Any) -> SearchResult:
    return finished(search_of(model, 5, OWN))


def test_scores_and_rows_are_what_full_logits_give(model: Any, found: SearchResult) -> None:
    assert (found.searched, found.held_out) == ([0, 2], [1, 3, 4])
    assert [step.kind for step in found.steps[:3]] == ["pi", "ntk", "yarn"]
    assert found.best == min(found.steps, key=lambda step: step.score)
    some: list[Any] = [found.steps[0], found.steps[-1], found.best]
    for step in some:
        twin = zoo.twin(model)
        with step.genome.candidate(2.5, "same").applied(twin, 1):
            nats = [tail_nats(twin, texts(5)[index]) for index in found.searched]
        assert step.score == pytest.approx(sum(nats) / 64, rel=1e-6)


def test_the_recipe_gives_its_perplexity(model: Any, found: SearchResult, tmp_path: Path) -> None:
    recipe: Any = found.recipe
    assert recipe["method"] == "longrope"
    (tmp_path / "recipe.json").write_text(found.files()["search_recipe.json"])
    fresh = zoo.twin(model)
    hf_posenc.load_patch(fresh, tmp_path / "recipe.json")
    nats = [tail_nats(fresh, texts(5)[index]) for index in found.held_out]
    row = found.row("search")
    assert row.perplexity == pytest.approx(math.exp(sum(nats) / 96))
    assert f"{row.perplexity:.5g}" in recipe["recipe"]["description"]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Item]:
    items: list[Item] = []
    plain = PerplexityRun.measure

    def measure(self: PerplexityRun, item: Item, attempt: Any) -> Any:
        items.append(item)
        return plain(self, item, attempt)

    monkeypatch.setattr(PerplexityRun, "measure", measure)
    return items


def test_the_search_reads_no_held_out_document(model: Any, read: list[Item]) -> None:
    job = search_of(model, 5, OWN)
    assert finished(job).best is not None
    assert {item.document for item in read[: 24 * 2]} == {"d0", "d2"}
    assert {item.document for item in read[24 * 2 :]} == {"d1", "d3", "d4"}
    labels = [*CONTROLS, *(f"{name} (scale 2.5)" for name in ("pi", "ntk", "yarn")), "search"]
    assert list(dict.fromkeys(item.label for item in read[24 * 2 :])) == labels
    assert job.forwarded == 24 * 2 * 160 + 3 * (6 * (64 + 160) + 64)


def test_what_a_sweep_has_measured_is_not_measured_again(
    model: Any, tmp_path: Path, read: list[Item]
) -> None:
    racers = tried(model, crossed(("pi", "ntk", "yarn"), (2.5,)))
    finished(cases.sweep_of(model, 5, racers), tmp_path)
    raced = {item.key for item in read}
    read.clear()
    job = search_of(model, 5, dataclasses.replace(OWN, budget=8))
    result = finished(job, tmp_path)
    measured = len(read)
    assert finished(job, tmp_path).to_dict() == result.to_dict()
    assert len(read) == measured  # the same search again
    assert not raced & {item.key for item in read}
    named = {candidate.label: control for candidate, control in job.named}
    again = {item.label for item in read} & set(named)
    assert not any(named[label] for label in again)
    assert len(again) <= 1  # the one that left the sweep early
    assert result.to_dict() == finished(search_of(model, 5, job.own)).to_dict()


def test_native_short_texts_are_the_unpatched_models(model: Any, tmp_path: Path) -> None:
    result = finished(search_of(model, 3, dataclasses.replace(OWN, budget=8, short_texts="native")))
    assert result.row("search").short == 1
    fresh = zoo.twin(model)
    (tmp_path / "r.json").write_text(result.files()["search_recipe.json"])
    hf_posenc.load_patch(fresh, tmp_path / "r.json")
    document = texts(3)[1]
    assert tail_nats(fresh, document, 64) == tail_nats(model, document, 64)
    assert tail_nats(fresh, document) != tail_nats(model, document)


def test_the_bound_holds_for_the_best(model: Any, found: SearchResult) -> None:
    bound = finished(search_of(model, 4, dataclasses.replace(OWN, budget=12), 0.001))
    assert [step for step in bound.steps if not math.isfinite(step.score)]
    assert not [step for step in found.steps if not math.isfinite(step.score)]
    nobody = dataclasses.replace(
        found,
        candidates=found.candidates[:-1],
        records=[record for record in found.records if record.method != "search"],
        steps=[Step("pi", Genome((1.0,), 1.0), math.inf)],
        recipe=None,
    )
    assert nobody.best is None
    assert "there is no recipe" in " ".join(nobody.notes())
    assert SearchResult.from_dict(nobody.to_dict()).to_dict() == nobody.to_dict()


def test_the_result_reads_back_draws_and_shows(found: SearchResult) -> None:
    values = json.loads(json.dumps(found.to_dict()))
    again = SearchResult.from_dict(values)
    assert (again.to_dict(), again.rows) == (values, found.rows)
    lines = found.plot().axes[1].get_lines()
    assert [line.get_label() for line in lines] == ["pi", "ntk", "yarn", "search"]
    assert "24 evaluations on 2 documents; the table is of the other 3" in found._repr_html_()


YARN = [2.0, 3.0, 4.0, 5.0, 6.0, 2.5]


@pytest.mark.parametrize(
    ("more", "said", "kept"),
    [
        ([-0.05] * 6, f"beats yarn by {100 * (1 - math.exp(-0.05)):.1f} % of", None),
        ([0.05] * 6, "is worse than yarn: keep that.", "yarn"),
        ([0.1, -0.1] * 3, "is not significantly different from yarn: keep that.", "yarn"),
    ],
)
def test_the_interval_judges_the_outcome(more: list[float], said: str, kept: str | None) -> None:
    ours = [yarn + difference for yarn, difference in zip(YARN, more, strict=True)]
    means = {"none": [9.0] * 6, "yarn": YARN, "search": ours}
    result = SearchResult(
        **cases.ABOUT,
        settings=cases.SETTINGS,
        candidates=cases.entries(means),
        controls=["none"],
        documents=[{"name": str(index)} for index in range(6)],
        records=[
            cases.loss(label, length, str(index), 10 * value, 10)
            for label, values in means.items()
            for length in (64, 160)
            for index, value in enumerate(values)
        ],
        failures=[],
        race={},
        steps=[Step(kind, Genome((1.0, 2.0), 1.0), 2.0) for kind in ("yarn", "mutation")],
        searched=[],
    )
    *_, verdict, control = result.notes()
    assert said in verdict
    assert control == "It is better than the unpatched model."
    assert result.to_dict()["kept"] == kept
    bounded = dataclasses.replace(result, race={"max_regression": -1.0})  # which all exceed
    assert bounded.kept is None
