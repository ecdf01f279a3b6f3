"""Search by needles, by LongRoPE2's critical pair and by DCIS: independent references, and objectives that disagree."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Document, TokenizedDocument, tokenize
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.options import SearchSettings
from hf_posenc.evaluation.tuning import Loss, Losses, TailSettings
from hf_posenc.evaluation.tuning.algorithms import (
    Genome,
    Plan,
    Space,
    Step,
    critical_starts,
    divide,
    evaluations_of_division,
    evolve,
    starts,
)
from hf_posenc.evaluation.tuning.search import SearchJob, SearchResult, needles_in, split
from hf_posenc.rope import RopeSpec
from tests.support import zoo
from tests.support.sweep_cases import ABOUT, finished, tiny
from tests.support.tiny_text import byte_tokenizer, prose

PHI3, LLAMA3 = RopeSpec(96, 10000.0, 2048), RopeSpec(128, 500000.0, 8192)
ROPE = RopeSpec(32, 10000.0, 256)
SETTINGS = TailSettings(64, 640)
OWN = SearchSettings(objective="needle", budget=10, search_documents=2)


@functools.cache
def documents() -> list[TokenizedDocument]:
    words = byte_tokenizer()
    return [tokenize(Document(f"d{n}", text(n)), words) for n in range(4)]


def text(number: int) -> str:
    return prose(650 + 13 * number, number).replace("phase", "end. ")


def job_of(
    model: Any, own: SearchSettings = OWN, settings: TailSettings = SETTINGS, bos: bool = False
) -> SearchJob:
    """A search over four documents, two of them searched; with the objective needle, needles in all of them."""
    special = [0] if bos else []
    needles = []
    if own.objective == "needle":
        searched = split(4, own.search_documents)
        needles = needles_in(documents(), searched, byte_tokenizer(), special, settings.target, 0)
    return SearchJob(
        model=model,
        settings=settings,
        documents=documents(),
        about=ABOUT,
        own=own,
        special=special,
        needles=needles,
    )


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

    def score(genomes: Sequence[Genome]) -> list[float]:
        logs = [np.log(np.array(genome.factors) / np.array(goal.factors)) for genome in genomes]
        return [float((log**2).sum()) for log in logs]

    space = Space.of(4.0, 1.0, "longrope2")
    begin = starts(ROPE, 4.0, 1.0) | critical_starts(ROPE, 4.0, space, seed)
    steps = evolve(begin, Plan.of(600), space, seed, score)
    assert [step.kind for step in steps[:3]] == ["pi", "ntk", "yarn"]
    children = [step.genome for step in steps if step.kind not in ("pi", "ntk", "yarn")]
    assert {genome.critical for genome in children} == {3, 4, 5, 6, 7}
    best = min(steps, key=lambda step: step.score)
    assert best.genome.critical in (
        5,
        6,
    )  # the goal's, or the next, whose divisors may be nearly the same
    assert best.score < 0.15 * min(step.score for step in steps[:8])
    for genome in children:
        pair = genome.critical
        assert pair is not None
        assert genome.monotone
        assert min(genome.factors[pair:]) >= 4 - 1e-9
        assert max(genome.factors) <= 8 + 1e-9
        assert genome.factors[:pair] == pytest.approx(
            [genome.factors[pair] ** (i / pair) for i in range(pair)]
        )
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

    def score(genomes: Sequence[Genome]) -> list[float]:
        return [objective(np.array(genome.factors)) for genome in genomes]

    begin = starts(ROPE, 4.0, None)
    steps = divide(begin, 10**6, score)
    wanted = authors(np.array(begin["yarn"].factors), objective)
    assert len(steps) == 3 + len(wanted) == evaluations_of_division(16) == 303
    found = np.array([step.genome.factors for step in steps[3:]])
    assert np.abs(found - np.array(wanted)).max() < 1e-8
    assert all(step.genome.attention_factor == begin["yarn"].attention_factor for step in steps[3:])
    assert not min(steps, key=lambda step: step.score).genome.monotone
    assert any(not math.isfinite(step.score) for step in steps) == broken


def test_dcis_ends_before_its_budget_and_halves_odd_segments() -> None:
    rope = RopeSpec(24, 10000.0, 256)
    begin = starts(rope, 4.0, None)

    def score(genomes: Sequence[Genome]) -> list[float]:
        return [sum(genome.factors) for genome in genomes]

    whole = divide(begin, 10**6, score)
    assert len(whole) == evaluations_of_division(12) == 3 + 10 * (2 + 4 + 8 + 8)
    assert divide(begin, 48, score) == whole[:43]
    assert divide(begin, 8, score) == whole[:3]


# Needles


def test_a_needle_is_hidden_at_its_depth_in_the_text() -> None:
    words, searched = byte_tokenizer(), [0, 2]
    needles = needles_in(documents(), searched, words, [0], 640, 0)
    assert [needle.depth for needle in needles] == [0.0, 0.0, 0.5, 0.5]
    for index, needle in enumerate(needles):
        assert len(needle.document) == 639  # and the special token in front
        prompt = words.decode(needle.document.ids.tolist())
        assert prompt.startswith("A special magic number is hidden within the following text.")
        head, _, rest = prompt.partition("One of the special magic numbers for ")
        key, _, rest = rest.partition(" is: ")
        value = rest[:7]
        assert value.isdigit()
        assert prompt.endswith(
            f"The special magic number for {key} mentioned in the provided text is {value}"
        )
        assert words.decode(needle.document.ids[-needle.answer :].tolist()) == f" {value}"
        own = text(index)[:40]
        assert (own in head) == (needle.depth > 0)
        assert own in prompt
    assert len({needle.key for needle in needles}) == 4
    again = needles_in(documents(), searched, words, [0], 640, 0)
    other = needles_in(documents(), searched, words, [0], 640, 1)
    assert [needle.key for needle in again] == [needle.key for needle in needles]
    assert not {needle.key for needle in again} & {needle.key for needle in other}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, SearchResult, Path]:
    model, folder = tiny(), tmp_path_factory.mktemp("needles")
    return model, finished(job_of(model, bos=True), folder), folder


def test_only_the_answers_are_scored(found: tuple[Any, SearchResult, Path]) -> None:
    model, result, _ = found
    job = job_of(model, bos=True)
    assert result.searched == [0, 2]
    for step in (result.steps[0], result.steps[-1]):
        nats, count = 0.0, 0
        twin = zoo.twin(model)
        with step.genome.candidate(10.0, "same", {}).applied(twin, 1):
            for index in (0, 2):
                needle = job.needles[index]
                ids = torch.cat([torch.tensor([0]), needle.document.ids])
                with torch.no_grad():
                    logs = twin(input_ids=ids[None], use_cache=False).logits[0].double()
                logs = logs.log_softmax(-1)
                for position in range(640 - needle.answer, 640):
                    nats -= float(logs[position - 1, ids[position]])
                    count += 1
        assert count == 16  # a space and seven digits, twice
        assert step.score == pytest.approx(nats / count, rel=1e-6)


def test_a_result_of_needles_says_so_and_reads_back(
    found: tuple[Any, SearchResult, Path],
) -> None:
    _, result, _ = found
    said = " ".join(result.notes())
    assert "Objective: needle" in said
    assert result.recipe is not None
    about = result.recipe["recipe"]
    assert about["description"].startswith("Needle perplexity ")
    assert "arXiv 2502.20082" in about["source"]
    needles, tails = result.tables()
    assert "needles" in (needles.title or "")
    assert "tail" in (tails.title or "")
    assert [grid.columns[4].head for grid in (needles, tails)] == [
        "by the\nbest",
        "by the\nchosen",
    ]
    row = next(row for row in result.needle_rows if row.label == "search")
    assert f"{row.perplexity:.5g}" in about["description"]
    assert row.documents == 2
    held_out = [result.losses["search", 640, index] for index in (4 + 1, 4 + 3)]
    assert row.perplexity == pytest.approx(math.exp(sum(loss.nats for loss in held_out) / 16))
    values = json.loads(json.dumps(result.to_dict()))
    assert values["settings"]["objective"] == "needle"
    assert [needle["depth"] for needle in values["needles"]] == [0.0, 0.0, 0.5, 0.5]
    assert SearchResult.from_dict(values).to_dict() == values
    assert SearchResult.from_dict(values).needle_rows == result.needle_rows


@pytest.mark.parametrize(
    ("algorithm", "needle", "tail"),
    [("longrope", 12.3, 11.1), ("longrope2", 18.6, 15.4), ("dcis", 12.3, 11.1)],
)
def test_the_objective_decides_which_factors_win(
    algorithm: str, needle: float, tail: float
) -> None:
    """Needles prefer one divisor of the slowest pair, tails another: each search goes where its own objective is."""

    def measure(
        candidates: Sequence[Candidate], indices: Sequence[int], lengths: Sequence[int]
    ) -> Losses:
        losses = {}
        for candidate, index, length in itertools.product(candidates, indices, lengths):
            options = candidate.parts[0].options if candidate.parts else {}
            last = float(options.get("long_factor", [1.0])[-1])
            goal = needle if index >= 4 else tail
            losses[candidate.key, length, index] = Loss(math.log(last / goal) ** 2, 1)
        return losses

    best = {}
    for objective in ("needle", "perplexity"):
        own = dataclasses.replace(OWN, objective=objective, algorithm=algorithm, budget=240)
        result = job_of(tiny(), own).course(measure)
        assert result.best is not None
        best[objective] = result.best.genome.factors[-1]
    assert best["needle"] == pytest.approx(needle, rel=0.03)
    assert best["perplexity"] == pytest.approx(tail, rel=0.03)


def test_the_bound_on_short_texts_is_of_tails() -> None:
    """A score is the needles'; individuals whose tails at the original length exceed the bound have none."""
    asked = set()

    def measure(
        candidates: Sequence[Candidate], indices: Sequence[int], lengths: Sequence[int]
    ) -> Losses:
        losses = {}
        for candidate, index, length in itertools.product(candidates, indices, lengths):
            asked.add((index, length))
            options = candidate.parts[0].options if candidate.parts else {}
            first = options.get("long_factor", [1.0])[0]
            losses[candidate.key, length, index] = Loss(first if length == 64 else 1 / first, 1)
        return losses

    settings = dataclasses.replace(SETTINGS, max_regression=0.02)
    result = job_of(tiny(), dataclasses.replace(OWN, budget=60), settings).course(measure)
    for step in result.steps:
        first = step.genome.factors[0]
        assert step.score == (math.inf if math.exp(first - 1) > 1.02 else pytest.approx(1 / first))
    assert {math.isfinite(step.score) for step in result.steps} == {True, False}
    assert {length for index, length in asked if index >= 4} == {640}
    assert {index for index, length in asked if length == 64} == {0, 1, 2, 3}


def test_another_objective_is_refused_and_the_same_resumes(
    found: tuple[Any, SearchResult, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, first, folder = found
    monkeypatch.setattr(SearchJob, "score", lambda *_: pytest.fail("it was measured again"))
    other = job_of(model, dataclasses.replace(OWN, objective="perplexity"), bos=True)
    with pytest.raises(PosencError, match="--objective needle, not perplexity"):
        finished(other, folder)
    again = finished(job_of(model, bos=True), folder)
    assert again.to_dict() == first.to_dict()


def test_the_estimate_counts_the_needles() -> None:
    job = job_of(tiny())
    evaluations = 10 * 2 * 640
    finalists = 6 * 2 * (640 + 64 + 640)
    truncated = 2 * (64 + 64 + 64)
    assert job.forwarded == evaluations + finalists + truncated
    dcis = job_of(tiny(), dataclasses.replace(OWN, algorithm="dcis", budget=10**6))
    pairs = hf_posenc.inspect_rope(dcis.model)[0].inv_freq.numel()
    assert f"{evaluations_of_division(pairs)} evaluations" in dcis.cost_line()


@pytest.mark.parametrize("values", [{"objective": "needles"}, {"algorithm": "longrope3"}])
def test_unknown_names_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PosencError, match=r"--\w+ is .* or "):
        SearchSettings(**values)


def test_a_target_too_short_for_a_needle_is_refused() -> None:
    with pytest.raises(PosencError, match="at least"):
        needles_in(documents(), [0], byte_tokenizer(), [], 300, 0)
