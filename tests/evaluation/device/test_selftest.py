"""The self-test of the attention engine, on a CPU, with backends and operators that are broken on purpose too."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from hf_posenc.attention import engine
from hf_posenc.attention.checks import Case, comparison, verdicts
from hf_posenc.attention.checks.comparison import Comparison, kinds, methods
from hf_posenc.evaluation.device import selftest as run
from hf_posenc.evaluation.device.result import PHASES, PLAIN, GpuResult, Row
from hf_posenc.evaluation.device.selftest import selftest
from hf_posenc.evaluation.options import SelftestOptions
from hf_posenc.evaluation.page import collect, render
from tests.support import broken_backends, emulated
from tests.support.commands import invoke

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"device": "cpu", "dtypes": ["float32"], "head_dims": [16], "length": 64}
SMALL["methods"] = ["rerope", "alibi", "fire"]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path / "cache"))
    engine.restore()
    yield
    engine.restore()


def broken(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    backends = tuple(broken_backends.EVERY[name] for name in names)
    monkeypatch.setattr(engine, "BACKENDS", (*backends, *engine.BACKENDS))
    monkeypatch.setenv(verdicts.EXTRA, broken_backends.__name__)
    monkeypatch.setenv("BROKEN", ",".join(names))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> GpuResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_POSENC_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(comparison, "ROWS", 65)  # problems a fraction of their size
        patch.setattr(comparison, "KEYS", 129)
        return selftest(**SMALL, seconds=1000)


def timed(result: GpuResult, method: str, phase: str) -> Row:
    return next(row for row in result.records if (row.method, row.phase) == (method, phase))


@pytest.mark.slow
def test_every_backend_of_a_cpu_is_right(result: GpuResult) -> None:
    assert result.passed
    assert not result.not_reached
    own = {emulated.EmulatedFlash.name, emulated.EmulatedCudnn().name}
    assert {case.backend for case in result.checks} == {"prefill", "few", "moving", "exact", *own}
    assert {case.kind for case in result.checks} == {*kinds()}
    assert {case.gradients for case in result.checks} == {False, True}
    for case, found in result.checks.items():
        assert 0 < max(found.errors.values()) <= found.bound == 1e-5, case
    trained = result.checks[Case("exact", "kerple_log", "float32", 16, True)]
    assert "gradient of the parameters" in trained.errors


@pytest.mark.slow
def test_methods_are_timed_beside_plain_attention(result: GpuResult) -> None:
    assert timed(result, PLAIN, "prefill").backend == "flash_attention"
    names = [PLAIN, "rerope", "alibi", "fire"]
    assert {row.method for row in result.records} == {*names}
    assert len(result.records) == len(PHASES) * len(names)
    for row in result.records:
        assert len(row.seconds) == len(row.plain) > 0
        assert (row.waits, row.captured, row.peak_bytes) == (None, None, None)
    backends = {name: timed(result, name, "prefill").backend for name in names[1:]}
    assert backends == {"rerope": "prefill", "alibi": "prefill", "fire": "exact"}
    for answers in result.verdicts.values():
        assert sorted(x for found in answers.values() for x in found) == ["alibi", "fire", "rerope"]
    *lines, last = result.summary.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"cpu, {phase}" for phase in PHASES]
    assert last == "Not used, since its check failed: none."


@pytest.mark.slow
def test_a_backend_that_fails_in_training_counts_for_training_alone(result: GpuResult) -> None:
    failed = {
        Case("few", kind, "float32", 16, gradients): Comparison(reason="it raises")
        for kind, gradients in (("fire", True), ("bands", True), ("bands", False))
    }
    changed = replace(result, checks={**result.checks, **failed})
    assert changed.verdicts == result.verdicts
    assert not changed.passed
    last = changed.summary.splitlines()[-1]
    assert last.endswith(": few (bands, bands in training, fire in training).")
    lost = [replace(timed(result, "fire", "step"), failed="no")]
    assert replace(result, records=lost).verdicts["step"]["not possible"] == ["fire"]


@pytest.mark.slow
def test_json_has_everything_and_report_shows_it(result: GpuResult, tmp_path: Path) -> None:
    file = tmp_path / "selftest.json"
    result.write_json(file)
    values = json.loads(file.read_text())
    assert values["environment"]["torch"] == torch.__version__
    assert values["checks"][0].keys() >= {"backend", "kind", "dtype", "head_dim", "errors", "bound"}
    assert values["summary"] == result.summary
    again = GpuResult.from_dict(values)
    assert again.to_dict() == result.to_dict()
    assert (again.checks, again.summary) == (result.checks, result.summary)
    page = render(collect([file]), figures=False)
    assert "largest error relative to float64" in page
    assert "Prefill: one layer" in page


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "check_all", lambda *_: {})


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_all_methods_of_the_engine_are_timed_by_default() -> None:
    everything = selftest(**{**SMALL, "methods": None, "length": 32})
    assert {row.method for row in everything.records} == {PLAIN, *(x.name for x in methods())}
    assert not [row for row in everything.records if row.failed]


@pytest.mark.slow
def test_a_backend_that_is_wrong_is_named_and_the_status_is_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, "wrong")
    few = {name: kinds()[name] for name in ("bands", "alibi")}
    monkeypatch.setattr(run, "kinds", lambda: few)
    monkeypatch.setattr(run, "selftest", functools.partial(selftest, **SMALL, seconds=1000))
    verdicts.write(CPU, {Case("old", "bands", "float32", 16): None})
    file = tmp_path / "selftest.json"
    result = invoke("selftest", "--device", "cpu", file)
    assert result.exit_code == 1, result.output
    values = json.loads(file.read_text())
    assert not values["passed"]
    assert values["summary"] in result.stdout
    last = values["summary"].splitlines()[-1]
    assert last.startswith("Not used, since its check failed: wrong (")
    assert {"bands", "bands in training"} <= {*last.partition("(")[2].rstrip(").").split(", ")}
    assert "failed: wrong, bands, float32, head dimension 16: its output differs" in result.stdout
    assert {case.backend for case in verdicts.read(CPU)} == {"wrong"}, "the old ones are replaced"
    assert timed(GpuResult.from_dict(values), "rerope", "prefill").backend != "wrong"


@pytest.mark.slow
def test_one_that_crashes_leaves_others_to_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "right", "wrong")  # the first crashes for alibi
    monkeypatch.setattr(run, "PROCESSES", 1)
    every = [Case("right", kind, "float32", 16) for kind in ("bands", "alibi", "t5")]
    every.append(Case("wrong", "bands", "float32", 16))
    found = run.check_all(every, CPU, 1000)
    reasons = [str(result and result.reason) for result in (found[case] for case in every)]
    assert reasons[:2] == ["None", "it crashes the process (SIGSEGV)"]
    assert reasons[2].startswith("not tried, since right, alibi, float32")
    assert reasons[3].startswith("its output differs")


def test_the_most_telling_cases_come_first() -> None:
    every = run.cases(["float32", "bfloat16"], (16, 32))
    assert len({*every}) == len(every)
    backends = [backend.name for backend in engine.BACKENDS]
    first = len(backends) * len(kinds())
    assert {(case.backend, case.kind) for case in every[:first]} == {
        (name, kind) for name in backends for kind in kinds()
    }
    assert {(case.dtype, case.head_dim) for case in every[: 2 * first]} == {("float32", 16)}
    # Of the others, one kind is enough to see every backend in every dtype and head dimension.
    breadth = every[2 * first : 2 * first + 2 * 3 * len(backends)]
    assert len({case.kind for case in breadth}) == 1
    assert len({(c.backend, c.dtype, c.head_dim, c.gradients) for c in breadth}) == len(breadth)


@pytest.mark.usefixtures("unchecked")
def test_the_last_line_says_what_had_no_time() -> None:
    hurried = selftest(**SMALL)
    every = f"{len(hurried.not_reached):,} cases had no time"
    first = "triton decode, causal, float32, head dimension 16"
    assert hurried.summary.endswith(f". {every}, first {first}: give more --seconds.")


def test_cases_that_no_backend_computes_need_no_time() -> None:
    every = [Case(name, "alibi", "float32", 16) for name in ("cuda flash", "emulated flash", "few")]
    assert run.check_all(every, CPU, 0) == {every[0]: None, every[1]: None}


@pytest.mark.parametrize(
    ("name", "field", "command"),
    [
        ("bug", "selftest", "hf-posenc selftest selftest.json"),
        ("gpu", "json", "hf-posenc bench --suite gpu"),
    ],
)
def test_the_forms_ask_for_it(name: str, field: str, command: str) -> None:
    forms = Path(__file__).parents[3] / ".github" / "ISSUE_TEMPLATE"
    form = yaml.safe_load((forms / f"{name}.yml").read_text())
    asked = next(part for part in form["body"] if part.get("id") == field)
    assert command in asked["attributes"]["description"]
    assert asked["validations"]["required"]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    found = selftest(device="cuda")
    assert found.passed, found.refused
    for row in found.records:
        assert row.waits is not None
        assert (row.captured is not None) == (row.phase == "step")


def test_a_gpu_is_timed_at_a_second_length_while_there_is_time(monkeypatch: Any) -> None:
    layers: Any = SimpleNamespace(device=torch.device("cuda"), measured=lambda *_, **__: {})
    for seconds, lengths in ((1000, {8192, 32_768}), (1, {8192})):
        monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=itertools.count(0, 10).__next__))
        options = SelftestOptions(seconds=seconds, methods=["rerope"])
        assert {row.length for row in run._rows(layers, options)} == lengths
