"""`bench --suite gpu` on a CPU, in tiny sizes: the code that a GPU runs."""

from __future__ import annotations

import csv
import gc
import json
import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_posenc.attention.checks.comparison import encoding_of, methods
from hf_posenc.attention.engine import attend, forced
from hf_posenc.cli.app import app
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import device as layers
from hf_posenc.evaluation.bench import bench
from hf_posenc.evaluation.device import Layer
from hf_posenc.evaluation.device import run as gpu
from hf_posenc.evaluation.device.result import GENERATION, PERPLEXITY, PHASES, PLAIN, GpuResult
from hf_posenc.evaluation.device.run import GpuRun
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.execute import Attempt
from hf_posenc.evaluation.options import BenchOptions
from hf_posenc.evaluation.page import collect, render
from hf_posenc.files import to_json
from hf_posenc.methods import get_method
from scripts import benchmark_gpu, gpu_table
from scripts.peers import PEERS
from tests.support.sweep_cases import finished
from tests.support.tiny_text import sizes

CPU = torch.device("cpu")
LENGTHS = (16, 32)
METHODS = ("rerope", "alibi", "yarn")
LAYERS = (PLAIN, "rerope", "alibi")
WHOLE = ("none", "rerope", "alibi", "yarn (auto)")


def shorten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layers, "LEAST", 0.0)
    patch.setattr(gpu, "TOKENS", 4)
    patch.setattr(gpu, "GENERATIONS", 1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time one call at a time; collecting garbage after an injected failure frees nothing here."""
    shorten(monkeypatch)
    monkeypatch.setattr(gc, "collect", lambda: 0)


def config(**more: Any) -> LlamaConfig:
    return LlamaConfig(**sizes(64, 16, width=32, layers=1, heads=(4, 2)), **more)


def work(**options: Any) -> GpuRun:
    given = {"suite": "gpu", "methods": METHODS, "lengths": LENGTHS, "rounds": 1, **options}
    return GpuRun(BenchOptions(**given), config(), device="cpu", peers=PEERS)


def row(result: GpuResult, method: str, phase: str, length: int = LENGTHS[-1]) -> Any:
    wanted = (method, phase, length)
    return next(r for r in result.records if (r.method, r.phase, r.length) == wanted)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[..., Any]]:
    """The folder of a finished run of the command, and the command."""
    folder = tmp_path_factory.mktemp("gpu")
    config().save_pretrained(folder / "sizes")

    def invoke(*arguments: object, output: Path = folder / "out") -> Any:
        given = ["bench", folder / "sizes", "--suite", "gpu", "--rounds", 1, "--output", output]
        given += ["--device", "cpu", *(x for name in METHODS for x in ("--patch", name))]
        texts = [str(x) for x in (*given, "--lengths", "16,32", *arguments)]
        return CliRunner().invoke(app, texts, env={"COLUMNS": "160", "TERM": "dumb"})

    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        result = invoke()
    assert result.exit_code == 0, result.output
    for shown in (*LAYERS, *WHOLE, "Wrote gpu.json, gpu.csv, gpu.md"):
        assert shown in result.output
    return folder / "out", invoke


def test_every_method_is_measured_in_every_phase(command: tuple[Path, Callable[..., Any]]) -> None:
    folder, _ = command
    text = (folder / "gpu.json").read_text()
    result = GpuResult.from_dict(json.loads(text))
    assert to_json(result.to_dict()) == text
    found = [(each.length, each.phase, each.method) for each in result.records]
    phases = {GENERATION: WHOLE, PERPLEXITY: WHOLE, **dict.fromkeys(PHASES, LAYERS)}
    rows = [(phase, name) for phase in phases for name in phases[phase]]
    assert found == [(length, *row) for length in LENGTHS for row in rows]
    for each in result.records:
        assert each.failed is None, each
        assert (each.milliseconds or 0) > 0
        assert each.backend
        if each.phase == PERPLEXITY:
            assert each.tokens_per_second == pytest.approx(each.length / each.seconds[0])
            assert each.estimate_bytes > result.model["parameters"] * 4
        elif each.phase == GENERATION:
            assert each.tokens_per_second == pytest.approx(1 / statistics.median(each.seconds))
        else:
            assert each.ratio == pytest.approx(each.seconds[0] / each.plain[0])
    assert result.sizes == {"heads": 4, "key_heads": 2, "head_dim": 8}
    assert result.model["dtype"] == "float32"
    assert result.environment["torch"] == torch.__version__
    lines = csv.DictReader((folder / "gpu.csv").open())
    assert [line["status"] for line in lines] == ["ok"] * len(LENGTHS) * len(rows)
    page = (folder / "gpu.md").read_text()
    assert page == result._repr_markdown_()
    assert all(f"| {name} |" in page for name in (*LAYERS, *WHOLE))
    assert "--suite gpu" in page  # the command


def test_the_report_shows_it(command: tuple[Path, Callable[..., Any]]) -> None:
    page = render(collect([command[0]]), figures=False)
    assert 'id="gpu-1"' in page
    assert page.count("plain attention") >= len(PHASES)
    assert "tokens/s" in page


def test_docs_gpu_shows_what_was_sent(
    command: tuple[Path, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_table, "RESULTS", tmp_path)
    assert gpu_table.measured() == ""
    shutil.copy(command[0] / "gpu.json", tmp_path / "some_gpu.json")
    shown = gpu_table.measured()
    assert "\n#### Prefill: one layer" in shown
    assert "| rerope |" in shown
    arguments = ["--output", str(tmp_path / "other.json"), "--rounds", "1", "--longest", "64"]
    benchmark_gpu.main([*arguments, "--seconds", "0"])  # the first row alone
    written = json.loads((tmp_path / "other.json").read_text())
    (row,) = written["rows"]
    assert (row["phase"], row["method"], row["length"]) == ("prefill", "rerope", 64)
    row |= {"error": {"cudnn": 1e-3}, "ms": {"plain": 2.0, "flash attention 4": 3.0, "cudnn": 5.0}}
    written["machine"] |= dict.fromkeys(("triton", "cudnn", "flash-attn-4"), "1")
    (tmp_path / "other.json").write_text(json.dumps(written))
    assert "| `rerope`, window 4,096 | 64 | 2 | 1.50 | 2.50 |" in gpu_table.measured()


def lack(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")


def test_what_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "rerope", ("two score matrices", lack))
    monkeypatch.setattr(gpu, "_built", lack)
    result = finished(work(methods=("rerope",)))
    lost = {(each.method, each.phase) for each in result.records if each.failed}
    whole = {(name, phase) for phase in (GENERATION, PERPLEXITY) for name in ("none", "rerope")}
    assert lost == {("rerope, two score matrices", phase) for phase in PHASES} | whole
    assert row(result, "rerope", "training").ratio > 0
    assert row(result, "rerope, two score matrices", "step").failed == "out of memory"
    assert any("OOM: out of memory, 14 of 26 rows" in line for line in result.notes())
    assert "| OOM | OOM | OOM |" in result._repr_markdown_()
    assert not list(result.problems())


def test_another_failure_is_a_row_and_a_problem(
    monkeypatch: pytest.MonkeyPatch, command: tuple[Path, Callable[..., Any]], tmp_path: Path
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(layers, "attended", broken)
    monkeypatch.setattr(gpu, "_built", lack)
    done = command[1](output=tmp_path)
    assert done.exit_code == 1, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2 * len(PHASES) * len(LENGTHS)
    said = "rerope, prefill at 16 tokens: RuntimeError: no kernel image is available"
    assert lines[0] == f"error: {said}"
    result = GpuResult.from_dict(json.loads((tmp_path / "gpu.json").read_text()))
    assert row(result, PLAIN, "prefill").milliseconds > 0


@pytest.mark.parametrize("phase", ["prefill", "step"])
@pytest.mark.parametrize("name", PEERS)
def test_the_formulations_of_others_compute_the_same(name: str, phase: str) -> None:
    method = next(method for method in methods() if method.name == name)
    layer = Layer.of(48, 8, torch.float64, CPU, (4, 2)).of_phase(phase)
    encoding = encoding_of(method, 8, CPU, 16, (4, 2))
    with forced("exact"):
        expected, _ = attend(layer.call(), encoding)
    found = PEERS[name][1](layer.call(), encoding)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(layer.plain(), expected, atol=1e-2)


def test_times_alternate_and_are_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    run = work(rounds=3)
    monkeypatch.setattr(layers, "LEAST", 0.004)
    seconds = {"plain": 0.001, "own": 0.002}

    def time(work: Callable[[], None]) -> tuple[float, None]:
        before = len(calls)
        work()
        return sum(seconds[name] for name in calls[before:]), None

    monkeypatch.setattr(run.clock, "time", time)
    found = run.layers.compared(partial(calls.append, "own"), partial(calls.append, "plain"))
    assert calls == ["plain"] * 2 + ["own"] * 2 + (["plain"] * 4 + ["own"] * 2) * 3
    assert found == {"plain": [0.001] * 3, "seconds": [0.002] * 3, "peak_bytes": None}


def test_memory_on_a_gpu_is_what_comes_beyond_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = work()
    run.layers.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(run.clock, "time", lambda _: (0.5, 350))
    assert run.layers.compared(list, list)["peak_bytes"] == 250


def test_what_was_run_in_pieces_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaForCausalLM.forward

    def hungry(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        if input_ids.shape[-1] > 600:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, input_ids, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", hungry)
    run = GpuRun(BenchOptions(lengths=(1024,)), config(attn_implementation="eager"), device="cpu")
    assert run._forward(Candidate.parse("none"), 1024)["backend"].endswith("prefill by 512 tokens")


def test_training_reaches_queries_keys_values_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    differentiate, reached = torch.autograd.grad, set()

    def grad(out: torch.Tensor, inputs: list[torch.Tensor], *_: Any, **__: Any) -> None:
        reached.add(len(inputs))
        differentiate(out, inputs, torch.ones_like(out))  # raises if one is not reached

    monkeypatch.setattr(torch.autograd, "grad", grad)
    run = work(methods=("kerple_log",), lengths=(16,))
    run.layers.measured("training", 16, get_method("kerple_log").from_options())
    assert reached == {3, 5}


def test_the_sizes_of_a_gpu_run_are_those_of_llama_3_8b() -> None:
    run = GpuRun(BenchOptions(lengths=(16,)), LlamaConfig(**gpu.LLAMA_8B), device="cpu")
    assert run.metadata["model"]["parameters"] == 8_030_261_248
    assert run.layers.sizes == {"heads": 32, "key_heads": 8, "head_dim": 128}
    assert sorted(gpu.LENGTHS) == [8192, 32768, 131072]
    layers = [item.name for item in run.items if item.phase == "prefill"]
    names = [name.partition(" (")[0].partition(",")[0] for name in layers]
    first = [name in (PLAIN, *gpu.WHOLE) for name in names]
    assert first == sorted(first, reverse=True)
    assert not all(first)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": None}, "takes a CPU days: give shorter lengths, such as --lengths 256,512"),
        ({"rounds": 0}, "give --rounds 1 or more"),
        ({"tail_tokens": 8}, "--tail-tokens has no meaning for --suite gpu"),
        ({"protocols": ("prefix",)}, "--protocol has no meaning for --suite gpu"),
        ({"methods": ("truncation",)}, "--patch truncation: the suite gpu measures"),
    ],
)
def test_what_it_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PosencError, match=said):
        work(**options)
    with pytest.raises(PosencError, match="takes no model"):
        bench(None, None, suite="gpu")  # type: ignore[arg-type]


def test_a_budget_leaves_out_what_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[Path, Callable[..., Any]]
) -> None:
    few: dict[str, Any] = {"methods": ("rerope",), "lengths": (16,)}
    begun, measure = [], GpuRun.measure

    def measured_late(run: GpuRun, item: gpu.GpuItem, attempt: Attempt) -> Any:
        begun.append(item.phase)
        if len(begun) == 3:
            run.until = 0.0
        return measure(run, item, attempt)

    monkeypatch.setattr(GpuRun, "measure", measured_late)
    result = finished(work(**few, budget=600), tmp_path)
    found = [(each.method, each.phase) for each in result.records]
    assert found == [("none", GENERATION), ("rerope", GENERATION), ("none", PERPLEXITY)]
    assert any("10 of 13 measurements were not begun in time" in line for line in result.notes())
    assert GpuResult.from_dict(result.to_dict()).missing == 10
    assert "| rerope |" in result._repr_markdown_()
    assert not finished(work(**few, budget=600), tmp_path).missing
    assert len(begun) == 13
    assert command[1]("--suite", "smoke", "--budget", "8m").exit_code == 2


@pytest.mark.slow
def test_by_default_all_methods_of_the_engine_and_the_embedded_sizes() -> None:
    result = finished(GpuRun(BenchOptions(suite="gpu", lengths=(64, 128), rounds=1), device="cpu"))
    names = {each.method.partition(" (")[0].partition(",")[0] for each in result.records}
    assert {method.name for method in methods()} | {PLAIN, "none", "yarn"} == names
    assert not list(result.problems())
    assert not any(each.failed for each in result.records)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    options = BenchOptions(suite="gpu", lengths=(512,), rounds=2)
    result = finished(GpuRun(options, config(), device="cuda"), tmp_path)
    assert not list(result.problems())
    assert all(each.peak_bytes is not None for each in result.records if not each.failed)
