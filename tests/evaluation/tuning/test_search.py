"""The search of factors: what it finds, its constraints, independent references, objectives, and its outcome."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Document, TokenizedDocument, tokenize
from hf_posenc.evaluation.measuring.candidates import CONTROLS, crossed
from hf_posenc.evaluation.options import SearchSettings
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import Item, PerplexityRun
from hf_posenc.evaluation.tuning import tried
from hf_posenc.evaluation.tuning.algorithms import (
    Genome,
    Space,
    Step,
    critical_starts,
    divide,
    evolve,
    starts,
)
from hf_posenc.evaluation.tuning.board import Board
from hf_posenc.evaluation.tuning.search import (
    Needle,
    SearchJob,
    SearchResult,
    SearchRun,
    needles_in,
    rope_of,
    split,
)
from hf_posenc.rope import RopeSpec
from tests.support import zoo
from tests.support.sweep_cases import (
    ABOUT,
    SETTINGS,
    entries,
    finished,
    loss,
    reference,
    search_of,
    sweep_of,
    texts,
    tiny,
)
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

ROPE = RopeSpec(32, 10000.0, 256)
PHI3, LLAMA3 = RopeSpec(96, 10000.0, 2048), RopeSpec(128, 500000.0, 8192)
GOAL = (1, 1, 1, 1.1, 1.3, 1.5, 1.8, 2.2, 2.6, 3, 3.2, 3.4, 3.5, 3.8, 4.5, 4.9)
OWN = SearchSettings(budget=24, search_documents=2)
NEEDLE = SearchSettings(objective="needle", budget=10, search_documents=2)
FAR = Settings((64, 640), ("tail",))
Objective = Callable[[Genome], float]


def distance(genome: Genome) -> float:
    """A known objective: how far the factors are from `GOAL`, and the factor on cos and sin from 1.1."""
    logs = sum(math.log(a / b) ** 2 for a, b in zip(genome.factors, GOAL, strict=True))
    return logs + (10 * (genome.attention_factor - 1.1)) ** 2


def scorer(objective: Objective) -> Callable[[Sequence[Genome]], list[float]]:
    return lambda genomes: list(map(objective, genomes))


def played(budget: int, seed: int, attention: float | None = None) -> list[Step]:
    """Every individual of a search for `GOAL`."""
    begin, space = starts(ROPE, 4.0, attention), Space.of(4.0, attention)
    return evolve(begin, budget, space, seed, scorer(distance))


# LongRoPE


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_optimum_is_found(seed: int) -> None:
    """Of twelve seeds, the worst ends at 0.038 and 0.095, and 11 times below the first round."""
    steps = played(800, seed)
    begun = min(step.score for step in steps if step.kind in ("pi", "ntk", "yarn"))
    best = min(steps, key=lambda step: step.score)
    assert begun > 1.4
    assert best.score < 0.06  # a root mean square of 6 % over 16 factors
    logs = [abs(math.log(a / b)) for a, b in zip(best.genome.factors, GOAL, strict=True)]
    assert max(logs) < 0.2
    assert min(step.score for step in steps[:40]) > 5 * best.score  # the first round is far away


@pytest.mark.parametrize("seed", range(3))
def test_every_individual_is_new_monotone_and_within_the_space(seed: int) -> None:
    steps = played(400, seed)
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


def test_the_seed_decides_the_path_and_a_given_attention_factor_stays() -> None:
    assert played(100, 1) == played(100, 1)
    assert played(100, 1) != played(100, 2)
    assert {step.genome.attention_factor for step in played(60, 0, 1.07)} == {1.07}


def test_scores_that_are_no_numbers_never_have_children() -> None:
    begin = starts(ROPE, 4.0, None)
    steps = evolve(
        begin,
        40,
        Space.of(4.0, None),
        0,
        scorer(lambda genome: math.nan if genome == begin["pi"] else distance(genome)),
    )
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

    evolve(starts(ROPE, 4.0, None), budget, Space.of(4.0, None), 0, score)
    assert rounds[0] == population
    assert max(rounds[1:], default=population // 4 * 2) == population // 4 * 2
    assert sum(rounds) == budget


# What it starts from


def test_the_starts_are_the_methods() -> None:
    model = tiny()
    rope = rope_of(model, SearchSettings())
    assert rope.original_max_position_embeddings == 64
    for name, genome in starts(rope, 2.5, None).items():
        patches = (
            genome.candidate(2.5, "same", {}).applied(model, 1),
            hf_posenc.patched(model, name, scale=2.5),
        )
        seen = []
        for patch in patches:
            with patch:
                table = hf_posenc.inspect_rope(model)[0]
                seen.append((table, reference(model, texts(2)[1], 160, 32)))
        (found, ours), (wanted, theirs) = seen
        assert found.attention_factor == pytest.approx(wanted.attention_factor)
        assert (found.inv_freq / wanted.inv_freq - 1).abs().max() < 1e-6
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_scaled_checkpoint_wants_replace() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    model = zoo.build("llama", rope_parameters=rope)
    with pytest.raises(PosencError, match="--replace"):
        rope_of(model, SearchSettings())
    with pytest.raises(PosencError, match="64 or 32"):
        rope_of(model, SearchSettings(replace=True))
    assert rope_of(model, SearchSettings(replace=True, scaled_from=64)).theta == 10000.0


def test_controls_of_a_dynamic_checkpoint_read_with_its_first_table() -> None:
    """A long text makes the table grow for good; then truncation would no longer be the unpatched model."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = zoo.build("llama", vocab_size=VOCABULARY, num_hidden_layers=1, rope_parameters=rope)
    own = dataclasses.replace(OWN, replace=True, scaled_from=64, budget=8)
    result = finished(search_of(model, 4, own))
    assert result.row("truncation").short == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("documents", "wanted", "searched"),
    [(24, 0, [0, 3, 6, 9, 12, 15, 18, 21]), (5, 0, [0, 2]), (2, 0, [0]), (4, 3, [0, 1, 2])],
)
def test_the_split(documents: int, wanted: int, searched: list[int]) -> None:
    assert split(documents, wanted) == searched


# LongRoPE2's critical pair


@pytest.mark.parametrize(("rope", "first", "last"), [(PHI3, 19, 31), (LLAMA3, 24, 35)])
def test_the_critical_pairs_are_the_papers(rope: RopeSpec, first: int, last: int) -> None:
    """31 and 35 are the paper's theoretical critical dimensions of Phi3-mini and LLaMA3-8B (section 3.2)."""
    found = critical_starts(rope, 16.0, Space.of(16.0, None, "longrope2"), 0)
    assert [genome.critical for genome in found.values()] == list(range(first, last + 1))
    half = rope.dim // 2
    for name, genome in found.items():
        pair = genome.critical
        assert pair is not None
        assert name == f"critical pair {pair}"
        divisor = genome.factors[pair]
        assert divisor in range(16, 33)
        assert set(genome.factors[pair:]) == {divisor}
        # algorithm 2, lines 7 and 8: the base that gives the critical pair its angle
        base = (divisor * rope.theta ** (pair / half)) ** (half / pair)
        ntk = [base ** (i / half) / rope.theta ** (i / half) for i in range(pair)]
        assert list(genome.factors[:pair]) == pytest.approx(ntk, rel=1e-9)
    assert len({genome.factors[-1] for genome in found.values()}) > 1
    turns = rope.original_max_position_embeddings / (2 * math.pi)
    assert math.ceil(half * math.log(turns, rope.theta)) == last  # equation 7
    assert math.ceil(half * math.log(turns / 10, rope.theta)) == first  # algorithm 1, line 2


def test_a_table_without_a_critical_pair_is_refused() -> None:
    with pytest.raises(PosencError, match="longrope2"):
        critical_starts(RopeSpec(8, 2.0, 4096), 4.0, Space.of(4.0, None, "longrope2"), 0)


@pytest.mark.parametrize("seed", range(2))
def test_longrope2_searches_the_slow_pairs_alone(seed: int) -> None:
    goal = Genome.of([1.0] * 5 + [4.2, 4.3, 4.4, 4.6, 5.0, 5.2, 5.5, 6.0, 6.5, 7.0, 7.5], 1.0, 5)

    def objective(genome: Genome) -> float:
        return float((np.log(np.array(genome.factors) / np.array(goal.factors)) ** 2).sum())

    space = Space.of(4.0, 1.0, "longrope2")
    begin = starts(ROPE, 4.0, 1.0) | critical_starts(ROPE, 4.0, space, seed)
    steps = evolve(begin, 600, space, seed, scorer(objective))
    assert [step.kind for step in steps[:3]] == ["pi", "ntk", "yarn"]
    children = [step.genome for step in steps if step.kind not in ("pi", "ntk", "yarn")]
    assert {genome.critical for genome in children} == {3, 4, 5, 6, 7}
    best = min(steps, key=lambda step: step.score)
    # the goal's, or the next, whose divisors may be nearly the same
    assert best.genome.critical in (5, 6)
    assert best.score < 0.15 * min(step.score for step in steps[:8])
    for genome in children:
        pair = genome.critical
        assert pair is not None
        assert genome.monotone
        assert min(genome.factors[pair:]) >= 4 - 1e-9
        assert max(genome.factors) <= 8 + 1e-9
        ntk = [genome.factors[pair] ** (i / pair) for i in range(pair)]
        assert genome.factors[:pair] == pytest.approx(ntk)
    assert len(set(children)) == len(children)
    values = json.loads(json.dumps([step.to_dict() for step in steps]))
    assert [Step.from_dict(value) for value in values] == steps


# DCIS


def authors(
    factors: np.ndarray, objective: Callable[[np.ndarray], float], tries: int = 10
) -> list[np.ndarray]:
    """Every list that DCIS measures, by the loops of the authors' script; the pairs are a power of two."""
    pairs, measured = len(factors), []
    size, ranges = len(factors) // 2, [[-5.0, 5.0], [-5.0, 5.0]]
    while size >= 1:
        new: list[list[float]] = []
        for start in reversed(range(0, pairs, size)):
            low, high = ranges[start // size]
            step = (high - low) / (tries - 1)
            scored = []
            for k in [low + step * i for i in range(tries)]:
                moved = factors.copy()
                moved[start : start + size] += k
                measured.append(moved := np.maximum(moved, 0.0001))
                if math.isfinite(value := objective(moved)):
                    scored.append((value, k))
            if not scored:
                new[:0] = [[low, high], [low, high]]
                continue
            scored.sort(key=lambda pair: pair[0])
            best, three = scored[0][1], [k for _, k in scored[:3]]
            factors = factors.copy()
            factors[start : start + size] += best
            ends = [min(three) - step - best, max(three) + step - best]
            new[:0] = [ends, ends]
        ranges, size = new, size // 2
    return measured


@pytest.mark.parametrize("broken", [False, True])
def test_dcis_takes_the_authors_path(broken: bool) -> None:
    goal = np.array([1, 3, 1, 1.1, 0.9, 2.5, 1.8, 1.2, 2.6, 1, 6.2, 3.4, 7.5, 3.8, 2.5, 4.9])

    def objective(factors: np.ndarray) -> float:
        value = float((np.log(factors / goal) ** 2).sum())
        return math.nan if broken and (value > 8 or factors[15] > 4) else value

    begin = starts(ROPE, 4.0, None)
    steps = divide(begin, 10**6, scorer(lambda genome: objective(np.array(genome.factors))))
    wanted = authors(np.array(begin["yarn"].factors), objective)
    assert len(steps) == 3 + len(wanted) == 303
    found = np.array([step.genome.factors for step in steps[3:]])
    assert np.abs(found - np.array(wanted)).max() < 1e-8
    assert all(step.genome.attention_factor == begin["yarn"].attention_factor for step in steps[3:])
    assert not min(steps, key=lambda step: step.score).genome.monotone
    assert any(not math.isfinite(step.score) for step in steps) == broken


def test_dcis_ends_before_its_budget_and_halves_odd_segments() -> None:
    begin, score = starts(RopeSpec(24, 10000.0, 256), 4.0, None), scorer(lambda g: sum(g.factors))
    whole = divide(begin, 10**6, score)
    assert len(whole) == 3 + 10 * (2 + 4 + 8 + 8)
    assert divide(begin, 48, score) == whole[:43]
    assert divide(begin, 8, score) == whole[:3]


# Needles


@functools.cache
def documents() -> list[TokenizedDocument]:
    words = byte_tokenizer()
    return [tokenize(Document(f"d{n}", text(n)), words) for n in range(4)]


def text(number: int) -> str:
    return prose(650 + 13 * number, number).replace("phase", "end. ")


def needle_job(
    model: Any, own: SearchSettings = NEEDLE, bound: float | None = None, bos: bool = True
) -> SearchJob:
    """A search over four documents, two of them searched; with the objective needle, needles in all of them."""
    special, needles = [0] if bos else [], []
    if own.objective == "needle":
        searched = split(4, own.search_documents)
        needles = needles_in(documents(), searched, byte_tokenizer(), special, 640, 0)
    whole = SearchRun(model, documents(), (), FAR, special=special, metadata=ABOUT)
    return SearchJob(whole=whole, own=own, needles=needles, max_regression=bound)


def test_a_needle_is_hidden_at_its_depth_in_the_text() -> None:
    words, searched = byte_tokenizer(), [0, 2]
    needles = needles_in(documents(), searched, words, [0], 640, 0)
    assert [needle.depth for needle in needles] == [0.0, 0.0, 0.5, 0.5]
    for index, needle in enumerate(needles):
        assert len(needle) == 639  # and the special token in front
        prompt = words.decode(needle.ids.tolist())
        assert prompt.startswith("A special magic number is hidden within the following text.")
        head, _, rest = prompt.partition("One of the special magic numbers for ")
        key, _, rest = rest.partition(" is: ")
        value = rest[:7]
        assert value.isdigit()
        assert prompt.endswith(
            f"The special magic number for {key} mentioned in the provided text is {value}"
        )
        assert words.decode(needle.ids[-needle.answer :].tolist()) == f" {value}"
        own = text(index)[:40]
        assert (own in head) == (needle.depth > 0)
        assert own in prompt
    again, other = (needles_in(documents(), searched, words, [0], 640, seed) for seed in (0, 1))
    keys, same, others = ([needle.content for needle in each] for each in (needles, again, other))
    assert len(set(keys)) == 4
    assert same == keys
    assert not {*keys} & {*others}
    with pytest.raises(PosencError, match="at least"):
        needles_in(documents(), [0], words, [], 300, 0)


@pytest.mark.parametrize(
    ("algorithm", "needle", "tail"),
    [("longrope", 12.3, 11.1), ("longrope2", 18.6, 15.4), ("dcis", 12.3, 11.1)],
)
def test_the_objective_decides_which_factors_win(
    algorithm: str, needle: float, tail: float
) -> None:
    """Needles prefer one divisor of the slowest pair, tails another: each search goes where its own objective is."""

    def nats(options: dict[str, Any], document: TokenizedDocument, length: int) -> float:
        last = float(options.get("long_factor", [1.0])[-1])
        return math.log(last / (needle if isinstance(document, Needle) else tail)) ** 2

    for objective, goal in (("needle", needle), ("perplexity", tail)):
        own = dataclasses.replace(NEEDLE, objective=objective, algorithm=algorithm, budget=240)
        result, _ = planted(needle_job(tiny(), own, bos=False), nats)
        assert result.best is not None
        assert result.best.genome.factors[-1] == pytest.approx(goal, rel=0.03)


def planted(
    job: SearchJob, nats: Callable[[dict[str, Any], TokenizedDocument, int], float]
) -> tuple[SearchResult, set[tuple[str, int]]]:
    """The result of a search whose losses are given by options, text and length; and what texts it asked for."""
    asked = set()

    def measure(candidates: Any, texts: Any, lengths: Any) -> Any:
        records = []
        for candidate, text, length in itertools.product(candidates, texts, lengths):
            asked.add((text.name, length))
            options = candidate.parts[0].options if candidate.parts else {}
            records.append(loss(candidate.label, length, text.name, nats(options, text, length)))
        return SimpleNamespace(records=records, failures=())

    board = Board(job.settings, job.max_regression, measured=measure)
    return SearchResult.measured(job, *job.course(board), board), asked


def test_the_bound_on_short_texts_is_of_tails() -> None:
    """A score is the needles'; individuals whose tails at the original length exceed the bound have none."""

    def nats(options: dict[str, Any], _: TokenizedDocument, length: int) -> float:
        first = float(options.get("long_factor", [1.0])[0])
        return first if length == 64 else 1 / first

    own = dataclasses.replace(NEEDLE, budget=60)
    result, asked = planted(needle_job(tiny(), own, 0.02, bos=False), nats)
    for step in result.steps:
        first = step.genome.factors[0]
        assert step.score == (math.inf if math.exp(first - 1) > 1.02 else pytest.approx(1 / first))
    assert {math.isfinite(step.score) for step in result.steps} == {True, False}
    assert {length for name, length in asked if name.startswith("needle")} == {640}
    assert {name for name, length in asked if length == 64} == {"d0", "d1", "d2", "d3"}


# The whole


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def found(model: Any) -> SearchResult:
    return finished(search_of(model, 5, OWN))


@pytest.fixture(scope="module")
def needles(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchResult, Path]:
    folder = tmp_path_factory.mktemp("needles")
    return finished(needle_job(model), folder), folder


def test_scores_and_rows_are_what_full_logits_give(model: Any, found: SearchResult) -> None:
    assert (found.searched, found.held_out) == ([0, 2], [1, 3, 4])
    assert [step.kind for step in found.steps[:3]] == ["pi", "ntk", "yarn"]
    assert found.best == min(found.steps, key=lambda step: step.score)
    for step in (found.steps[0], found.steps[-1], found.best):
        assert step is not None
        twin = zoo.twin(model)
        with step.genome.candidate(2.5, "same", {}).applied(twin, 1):
            nats = [reference(twin, texts(5)[index], 160, 32) for index in found.searched]
        assert step.score == pytest.approx(sum(nats) / 64, rel=1e-6)


def test_of_needles_only_the_answers_are_scored(
    model: Any, needles: tuple[SearchResult, Path]
) -> None:
    result, job = needles[0], needle_job(model)
    assert result.searched == [0, 2]
    for step in (result.steps[0], result.steps[-1]):
        nats, count = 0.0, 0
        twin = zoo.twin(model)
        with step.genome.candidate(10.0, "same", {}).applied(twin, 1):
            for index in (0, 2):
                needle = job.needles[index]
                ids = torch.cat([torch.tensor([0]), needle.ids])
                with torch.no_grad():
                    logs = twin(input_ids=ids[None], use_cache=False).logits[0].double()
                logs = logs.log_softmax(-1)
                for position in range(640 - needle.answer, 640):
                    nats -= float(logs[position - 1, ids[position]])
                    count += 1
        assert count == 16  # a space and seven digits, twice
        assert step.score == pytest.approx(nats / count, rel=1e-6)


def test_the_recipe_loads_and_gives_the_held_out_perplexity(
    model: Any, found: SearchResult, tmp_path: Path
) -> None:
    assert found.recipe is not None
    assert found.recipe["method"] == "longrope"
    (tmp_path / "recipe.json").write_text(found.files()["search_recipe.json"])
    fresh = zoo.twin(model)
    hf_posenc.load_patch(fresh, tmp_path / "recipe.json")
    nats = [reference(fresh, texts(5)[index], 160, 32) for index in found.held_out]
    row = found.row("search")
    assert row.perplexity == pytest.approx(math.exp(sum(nats) / 96))
    assert f"{row.perplexity:.5g}" in found.recipe["recipe"]["description"]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Item]:
    """What is measured."""
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
    finished(sweep_of(model, 5, racers), tmp_path)
    raced = {item.key for item in read}
    read.clear()
    job = search_of(model, 5, dataclasses.replace(OWN, budget=8))
    result = finished(job, tmp_path)
    assert not raced & {item.key for item in read}
    named = {candidate.label: control for candidate, control in job.named}
    again = {item.label for item in read} & set(named)
    assert not any(named[label] for label in again)
    assert len(again) <= 1  # the one that left the sweep early
    assert result.to_dict() == finished(search_of(model, 5, job.own)).to_dict()


def test_the_estimate_counts_the_needles(model: Any) -> None:
    evaluations = 10 * 2 * 640
    finalists = 6 * 2 * (640 + 64 + 640)
    truncated = 2 * (64 + 64)  # both tails are of one window
    assert needle_job(model, bos=False).forwarded == evaluations + finalists + truncated
    own = dataclasses.replace(NEEDLE, algorithm="dcis", budget=10**6)
    pairs = hf_posenc.inspect_rope(model)[0].inv_freq.numel()
    assert f"for {3 + 20 * (pairs - 1)} evaluations" in needle_job(model, own).cost_line()


def test_native_short_texts_are_the_unpatched_models(model: Any, tmp_path: Path) -> None:
    own = dataclasses.replace(OWN, budget=8, short_texts="native")
    result = finished(search_of(model, 3, own))
    row = result.row("search")
    assert row.short == 1
    assert result.recipe is not None
    fresh = zoo.twin(model)
    (tmp_path / "r.json").write_text(result.files()["search_recipe.json"])
    hf_posenc.load_patch(fresh, tmp_path / "r.json")
    document = texts(3)[1]
    assert reference(fresh, document, 64, 32) == reference(model, document, 64, 32)
    assert reference(fresh, document, 160, 32) != reference(model, document, 160, 32)


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


def test_the_results_read_back_draw_and_show(
    found: SearchResult, needles: tuple[SearchResult, Path]
) -> None:
    for result in (found, needles[0]):
        values = json.loads(json.dumps(result.to_dict()))
        again = SearchResult.from_dict(values)
        assert again.to_dict() == values
        assert (again.rows, again.needle_rows) == (result.rows, result.needle_rows)
    lines = found.plot().axes[1].get_lines()
    assert [line.get_label() for line in lines] == ["pi", "ntk", "yarn", "search"]
    assert "24 evaluations on 2 documents; the table is of the other 3" in found._repr_html_()


def test_a_result_of_needles_is_about_their_perplexity(needles: tuple[SearchResult, Path]) -> None:
    result, _ = needles
    assert "Objective: needle" in " ".join(result.notes())
    assert result.recipe is not None
    about = result.recipe["recipe"]
    assert about["description"].startswith("Needle perplexity ")
    assert "arXiv 2502.20082" in about["source"]
    grids = result.tables()
    assert ["needles" in grids[0].title, "tail" in grids[1].title] == [True, True]
    assert [grid.columns[4].head for grid in grids] == ["by the\nbest", "by the\nchosen"]
    row = next(row for row in result.needle_rows if row.label == "search")
    assert f"{row.perplexity:.5g}" in about["description"]
    assert row.documents == 2
    names = [result.needles[index]["name"] for index in (1, 3)]
    nats = sum(record.nats for record in result.board.records_of("search", 640, names))
    assert row.perplexity == pytest.approx(math.exp(nats / 16))
    values = result.to_dict()
    assert values["race"]["objective"] == "needle"
    assert [needle["depth"] for needle in values["needles"]] == [0.0, 0.0, 0.5, 0.5]


def test_the_same_search_measures_nothing_again(
    model: Any, needles: tuple[SearchResult, Path], read: list[Item]
) -> None:
    first, folder = needles
    assert finished(needle_job(model), folder).to_dict() == first.to_dict()
    assert not read


YARN = [2.0, 3.0, 4.0, 5.0, 6.0, 2.5]


@pytest.mark.parametrize(
    ("ours", "said", "kept"),
    [
        ([v - 0.05 for v in YARN], f"beats yarn by {100 * (1 - math.exp(-0.05)):.1f} % of", None),
        ([v + 0.05 for v in YARN], "is worse than yarn: keep that.", "yarn"),
        (
            [v + 0.1 * (-1) ** n for n, v in enumerate(YARN)],
            "is not significantly different from yarn: keep that.",
            "yarn",
        ),
    ],
)
def test_the_outcome_is_judged_by_the_interval(
    ours: list[float], said: str, kept: str | None
) -> None:
    means = {"none": [9.0] * 6, "yarn": YARN, "search": ours}
    result = SearchResult(
        **ABOUT,
        settings=SETTINGS,
        candidates=entries(means),
        controls=["none"],
        documents=[{"name": str(index)} for index in range(6)],
        records=[
            loss(label, length, str(index), 10 * value, 10)
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
