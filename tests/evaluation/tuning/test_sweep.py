"""Methods times scales by successive halving: who goes on, who wins, what is left undecided, and that it is true."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.candidates import Candidate, crossed
from hf_posenc.evaluation.measuring.execute import Attempt
from hf_posenc.evaluation.measuring.statistics import estimate
from hf_posenc.evaluation.options import SweepOptions, parse_scales
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.evaluation.tuning import tried
from hf_posenc.evaluation.tuning.sweep import SweepResult, prepare_sweep, round_sizes, run_rounds
from hf_posenc.methods import LogN, YaRN
from tests.support import zoo
from tests.support.sweep_cases import finished, planted, sweep_of, tail_nats, texts
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose, tiny

PATCHES = ("yarn", "pi", "ntk:scale=3", "dynamic_yarn", "yarn+log_n")
NAN = math.nan
CONTROLS = ("none", "truncation", "attention_sinks")


@pytest.mark.parametrize(
    ("specs", "controls", "racers"),
    [
        ("yarn ntk:scale=3", 3, "yarn (scale 2), yarn (scale 4), ntk (scale 3)"),
        ("dynamic_ntk", 3, "dynamic_ntk (scale 2), dynamic_ntk (scale 4)"),
        ("yarn+log_n", 3, "yarn (scale 2) + log_n, yarn (scale 4) + log_n"),
        ("rerope:window=24 self_extend:group=4", 3, "rerope (window 24), self_extend (group 4)"),
        # a named control competes, if it is a method; with options of its own it is another one
        ("attention_sinks:window=24 pi:scale=2", 3, "attention_sinks (window 24), pi (scale 2)"),
        ("attention_sinks none truncation pi:scale=2", 2, "attention_sinks, pi (scale 2)"),
    ],
)
def test_methods_are_crossed_with_scales(specs: str, controls: int, racers: str) -> None:
    made = crossed(specs.split(), (2.0, 4.0))
    assert [c.label for c, control in made if control] == list(CONTROLS[:controls])
    assert ", ".join(c.label for c, control in made if not control) == racers
    are_controls = [control for _, control in made]
    assert are_controls == sorted(are_controls, reverse=True)


@pytest.mark.parametrize("text", ["", "two", "1", "2,2", "0.5", "inf", "nan"])
def test_scales_that_are_none(text: str) -> None:
    with pytest.raises(PosencError, match="--scales"):
        parse_scales(text)


SPECS = ("yarn:beta_fast=16,truncate=false", "dynamic_ntk:update=sequence")


@pytest.mark.parametrize("spec", [*SPECS, "yarn+log_n", "pi:layers=all"])
def test_spec_and_call_give_the_same_patch(spec: str) -> None:
    model = tiny()
    (candidate,) = (each for each, control in crossed([spec], (2.0,)) if not control)
    parsed = Candidate.parse(candidate.spec)
    assert (parsed.label, parsed.key) == (candidate.label, candidate.key)
    patches = []
    with candidate.applied(model, 1):
        patches.append(hf_posenc.get_patch(model))
    names = {"patch_model": hf_posenc.patch_model, "YaRN": YaRN, "LogN": LogN, "model": model}
    eval(candidate.call, names)
    patches.append(hf_posenc.get_patch(model))
    wanted, given = (patch.config for patch in patches if patch is not None)
    assert given == wanted


def test_rounds_double_the_documents_and_halve_the_methods() -> None:
    assert round_sizes(20, 5) == [5, 10, 20]
    assert round_sizes(12, 5) == [5, 10, 12]
    assert round_sizes(3, 5) == [3]
    for entered, kept in {16: 8, 9: 5, 3: 2, 2: 2, 1: 1}.items():
        first, _ = run_rounds(list("abcdefghijklmnop"[:entered]), [1, 2], lambda own, _: list(own))
        assert len(first.kept) == kept
    seen: list[tuple[int, int]] = []
    quality = {f"m{index}": (index * 7) % 16 for index in range(16)}
    rungs = run_rounds(
        list(quality),
        [5, 10, 20],
        lambda labels, documents: sorted(labels, key=quality.__getitem__),
        lambda labels, documents: seen.append((len(labels), documents)),
    )
    assert seen == [(16, 5), (8, 10), (4, 20)]
    assert [quality[label] for label in rungs[-1].kept] == [0, 1, 2, 3]
    assert list(rungs[1].entered) == sorted(rungs[1].entered, key=list(quality).index)


def test_work_is_what_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    forwarded: list[int] = []
    plain = TokenScorer.__call__

    def scorer(self: Any, windows: torch.Tensor, *how: Any, **more: Any) -> Any:
        forwarded.extend(len(window) for window in windows)
        return plain(self, windows, *how, **more)

    monkeypatch.setattr(TokenScorer, "__call__", scorer)
    model = tiny()
    job = sweep_of(model, 5, tried(model, crossed(("pi", "ntk", "yarn"), (2.0, 4.0))))
    forwarded.clear()
    finished(job)
    everything = 8 * 5 * (64 + 160) + 5 * 64  # truncation reads 64 tokens, for both lengths
    assert sum(forwarded) == job.forwarded < everything
    assert f"instead of {everything:,} " in job.cost_line()


@pytest.fixture(scope="module")
def swept() -> SweepResult:
    candidates = tried(model := tiny(), crossed(PATCHES, (2.0, 4.0)))
    return finished(sweep_of(model, 6, candidates))


def test_the_recipe_gives_the_measured_perplexity(swept: Any, tmp_path: Path) -> None:
    result, winner = swept, swept.row(swept.winner)
    (tmp_path / "recipe.json").write_text(result.files()["sweep_recipe.json"])
    fresh = tiny()
    hf_posenc.load_patch(fresh, tmp_path / "recipe.json")
    nats = [tail_nats(fresh, document) for document in texts(6)]
    assert math.exp(math.fsum(nats) / (6 * 32)) == pytest.approx(winner.perplexity)
    about = result.recipe["recipe"]
    assert about["model_types"] == ["llama"]
    assert f"{winner.perplexity:.5g}" in about["description"]


def test_windows_per_document_score_more_tails() -> None:
    settings = Settings((64, 160), ("tail",), windows_per_document=2)
    candidates = tried(model := tiny(), crossed(("pi", "ntk"), (2.0,)))
    result = finished(sweep_of(model, 4, candidates, settings))
    tokens = {record.document: record.tokens for record in result.records}
    assert tokens["d0"] == 32  # 170 tokens: no room for a second tail
    assert tokens["d3"] == 64


def test_a_difference_is_called_one_only_where_the_paired_interval_says_so() -> None:
    plain, near = [3.0, 4.0, 5.0, 6.0, 7.0, 3.5], (0.1, -0.1, 0.08, -0.07, 0.1, -0.09)
    losses = {"none": [v + 2 for v in plain], "best": plain, "worse": [v + 0.1 for v in plain]}
    losses["near"] = [v + d for v, d in zip(plain, near, strict=True)]
    result = planted(losses, first_documents=6)
    assert result.winner == "best"
    assert [row.label for row in result.undecided()] == ["near"]
    worse = result.row("worse")
    assert worse.significant
    assert worse.ratio == pytest.approx(math.exp(0.1))
    assert worse.ratio_interval == pytest.approx((math.exp(0.1), math.exp(0.1)))
    # unpaired, the two could not be told apart at all
    intervals: list[Any] = [result.row(label).interval for label in ("best", "worse")]
    assert intervals[0][1] > intervals[1][0]
    said = " ".join(result.notes())
    assert "Not significantly different from it on these documents: near." in said
    words = [result.verdict(row).text for row in result.rows]
    assert words == ["worse, control", "best", "undecided", "worse"]


def words_of(
    rng: np.random.Generator, methods: int, documents: int, first: int, gain: float = 0.0
) -> list[str]:
    """The verdicts of a sweep whose methods differ by noise; the last one is better by `gain` nats per token."""
    difficulty = rng.normal(3, 0.3, documents)
    noise = rng.normal(0, 0.03, (methods + 2, documents))
    noise[-1] -= gain
    names = ["none", "control", *(f"m{index}" for index in range(methods))]
    losses = {name: difficulty + row for name, row in zip(names, noise, strict=True)}
    result = planted({name: row.tolist() for name, row in losses.items()}, first_documents=first)
    return [result.verdict(row).text for row in result.rows]


def share_with_a_false_word(runs: int, methods: int, documents: int, first: int) -> float:
    rng = np.random.default_rng([methods, documents])
    sweeps = (words_of(rng, methods, documents, first) for _ in range(runs))
    return sum(any(w.startswith(("worse", "better")) for w in words) for words in sweeps) / runs


@pytest.mark.parametrize(
    ("runs", "methods", "documents", "first"),
    [
        (60, 16, 20, 5),
        (150, 4, 12, 6),
        pytest.param(3000, 16, 20, 5, marks=pytest.mark.slow),
        pytest.param(3000, 16, 12, 12, marks=pytest.mark.slow),
        pytest.param(5000, 4, 6, 6, marks=pytest.mark.slow),
    ],
)
def test_equal_methods_stay_equal(runs: int, methods: int, documents: int, first: int) -> None:
    share = share_with_a_false_word(runs, methods, documents, first)
    assert share <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("comparisons", "first", "percent"), [(None, 5, 0.5), (1, 5, 29), (1, 20, 82)]
)
def test_the_page_has_the_shares_of_a_simulation(
    comparisons: int | None, first: int, percent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comparisons:  # an interval for each comparison by itself
        monkeypatch.setattr(SweepResult, "comparisons", comparisons)
    assert 100 * share_with_a_false_word(1000, 16, 20, first) == pytest.approx(percent, abs=0.5)
    assert f"{percent} %" in (Path(__file__).parents[3] / "docs" / "sweep.md").read_text()


def test_a_real_difference_is_still_found() -> None:
    rng = np.random.default_rng(0)
    sweeps = [words_of(rng, 16, 20, 5, gain=0.08) for _ in range(20)]  # 8 %, noise of 3 %
    assert all(words.count("best") == 1 for words in sweeps)
    rivals_in_the_last_round = [sum(w.startswith("worse") for w in words[:6]) for words in sweeps]
    assert np.mean(rivals_in_the_last_round) > 4.5  # of 5: two controls and three methods


def test_fewer_than_five_documents_get_no_word() -> None:
    losses = {"none": [9.0] * 8, "a": [3.0] * 8, "b": [4.0] * 8, "c": [5.0] * 8, "d": [6.0] * 8}
    result = planted(losses, first_documents=4)
    words = {row.label: result.verdict(row).text for row in result.rows}
    left, few = "left early", "too few documents"
    assert words == {"none": "worse, control", "a": "best", "b": "worse", "c": left, "d": left}
    assert [row.ratio_interval for row in result.rows[-2:] if row.ratio] == [None, None]
    assert not result.undecided()
    short = planted({name: values[:4] for name, values in losses.items()}, first_documents=4)
    words = {row.label: short.verdict(row).text for row in short.rows}
    assert words == {"none": f"{few}, control", "a": "best", "b": few, "c": few, "d": few}
    assert "There are too few documents to compare it with the unpatched model." in short.notes()
    assert not short.undecided()
    assert "significantly different" not in " ".join(short.notes())


def test_the_page_compares_the_committed_winner_to_truncation() -> None:
    docs = Path(__file__).parents[3] / "docs"
    file = docs / "data" / "benchmarks" / "sweep.json"
    result = SweepResult.from_dict(json.loads(file.read_text()))
    names, (original, target) = [each["name"] for each in result.documents], result.settings.lengths
    asked: list[Any] = [(result.winner, target), ("none", original)]
    sums = [
        ([record.nats for record in records], [float(record.tokens) for record in records])
        for records in (result.board.records_of(label, n, names) for label, n in asked)
    ]
    difference, interval = estimate(*sums[0], sums[1])
    ratio, low, high = (math.exp(value) for value in (difference, *(interval or ())))
    said = f"{ratio:.3f} times that of truncation, with a paired 95 % interval of {low:.3f} to {high:.3f}"
    assert said in " ".join((docs / "sweep.md").read_text().split())
    assert low < 1 < high  # the page: not told apart


def test_a_control_cannot_win_and_is_said_to_be_better() -> None:
    result = planted({"none": [5.0] * 6, "control": [1.0] * 6, "a": [3.0] * 6, "b": [4.0] * 6})
    assert result.winner == "a"
    *_, unpatched, control = result.notes()
    assert unpatched == "It is better than the unpatched model."
    assert control.startswith("It is worse than control")


def test_the_bound_on_short_texts() -> None:
    losses = {"none": [5.0] * 6, "long": [3.0] * 6, "both": [3.5] * 6, "c": [4.0] * 6}
    short = {"long": [1.05] * 6, "both": [1.01] * 6, "c": [1.03] * 6}
    assert planted(losses, short).winner == "long"
    assert planted(losses, short, bound=0.02).winner == "both"
    nobody = planted(losses, short, bound=0.005)
    assert nobody.winner is None
    assert "the nearest is both with +1.0 %" in " ".join(nobody.notes())
    assert nobody.verdict(nobody.row("long")).text == "past the bound"


def test_failures_are_cells() -> None:
    good = {"none": [5.0] * 4, "a": [3.0] * 4}
    bad = {"dies": [NAN] * 4, "late": [2.0, 2.0, NAN, 2.0]}
    result = planted({**good, **bad, "b": [4.0] * 4})
    assert result.winner == "a"
    assert [result.row(label).failed for label in bad] == ["out of memory"] * 2
    assert result.verdict(result.row("dies")).text == "OOM"
    reason = "failed at length 160: out of memory"
    assert list(result.problems()) == [f"{each}: {reason}" for each in ("dies", "late")]
    alone = planted({"none": [5.0] * 6, "a": [3.0] * 6, "dies": [NAN] * 6})
    assert "every other method" not in " ".join(alone.notes())
    nobody = planted({"none": [5.0] * 2, "a": [NAN] * 2})
    assert nobody.winner is None
    assert SweepResult.from_dict(nobody.to_dict()).to_dict() == nobody.to_dict()
    everywhere = planted({**good, "none": [NAN] * 4, "b": [4.0] * 4})
    assert everywhere.winner == "a"
    assert everywhere.row("a").ratio is None
    assert "none gave no number to compare with." in list(everywhere.notes())


@pytest.mark.usefixtures("quick_collection")
def test_what_is_refused_or_runs_out_of_memory_is_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Attempt.__call__

    def attempt(self: Any, forward: Any, cells: Any) -> Any:
        cells, item = list(cells), self._item
        if (item.label, item.document, cells) == ("ntk (scale 4)", "d1", [("tail", 160)]):
            self.fail(torch.OutOfMemoryError("CUDA out of memory"), cells)
            return None
        return plain(self, forward, cells)

    monkeypatch.setattr(Attempt, "__call__", attempt)
    model = tiny()
    candidates = tried(model, crossed(("yarn", "ntk", "pi:layers=[9]"), (2.0, 4.0)))
    result = finished(sweep_of(model, 3, candidates))
    assert result.row("ntk (scale 4)").failed == "out of memory"
    assert "layers" in str(result.row("pi (scale 2, layers [9])").failed)
    assert result.winner is not None
    assert hf_posenc.get_patch(model) is None
    with pytest.raises(PosencError, match="layers"):
        tried(model, crossed(("pi:layers=[9]",), (2.0, 4.0)))


def test_the_result_reads_back_draws_and_shows(swept: SweepResult) -> None:
    result, values = swept, json.loads(json.dumps(swept.to_dict()))
    again = SweepResult.from_dict(values)
    assert again.to_dict() == values
    assert again.rows == result.rows
    names = [tick.get_text() for tick in result.plot().axes[0].get_yticklabels()]
    assert result.winner in names
    assert any(name.endswith("2 documents") for name in names)
    page = result._repr_html_()
    assert "attention_sinks" in page
    assert "Rounds: 8 on 2 documents; 4 on 4 documents; 2 on 6 documents." in page


SCALED: dict[str, Any] = {"rope_theta": 1e4, "factor": 4.0}
OF: dict[str, Any] = {"original_max_position_embeddings": 16}
LLAMA3 = {**OF, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {**OF, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GIVEN = "original_max_position_embeddings=32"


@pytest.mark.parametrize(
    ("scaling", "specs", "window", "scales"),
    [
        (LLAMA3, "yarn:replace=true yarn:compose=true", 64, [8, 16, 2, 4]),  # 16 and 64 tokens
        (LLAMA3, f"yarn:compose=true,{GIVEN}", 32, [4, 8]),
        ({}, f"yarn:{GIVEN} pi", 32, [4, 8, 2, 4]),
        (LISTS, "yarn:compose=true", 64, [2, 4]),
        ({"rope_type": "linear"}, f"pi:compose=true,{GIVEN}", 32, [4, 8]),  # two readings
        ({"rope_type": "linear", "factor": 2.0}, f"pi:replace=true,{GIVEN}", 64, [4, 8]),  # of 32
    ],
)
def test_scales_and_controls_start_from_the_original_length_of_the_options(
    scaling: dict[str, Any], specs: str, window: int, scales: list[float]
) -> None:
    rope = {"rope_parameters": {**SCALED, **scaling}} if scaling else {}
    model = zoo.build("llama", vocab_size=VOCABULARY, **rope)
    options = SweepOptions(methods=specs.split(), target_length=128, limit=2)
    texts = [prose(200, seed) for seed in range(2)]
    job = prepare_sweep(model, byte_tokenizer(), Source.of(texts), options)
    racers = [candidate for candidate, control in job.candidates if not control]
    assert [each.parts[0].options["scale"] for each in racers] == scales
    assert job.settings.lengths == (window, 128)
    controls = {each.label: each.original for each, control in job.candidates if control}
    assert controls == {"none": None, "truncation": window, "attention_sinks": window}
