"""TensorBoard and Weights & Biases receive the numbers and the tables of a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_posenc.cli.app import app
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.grid import check_trackers
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from tests.support.tiny_text import prose, tiny_checkpoint

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracked")
    tiny_checkpoint(folder / "model")
    for seed in range(2):
        (folder / f"{seed}.txt").write_text(prose(400, seed=seed))
    return folder


def run(folder: Path, command: str, output: Path, tracker: str) -> Result:
    texts = ["--text", str(folder / "0.txt"), str(folder / "1.txt"), "--patch", "pi"]
    own = {"perplexity": [*texts, "--lengths", "128,192"], "retrieval": ["--lengths", "320"]}
    options = ["--patch", "none", "--no-plot", "--output", str(output), "--report-to", tracker]
    return RUNNER.invoke(app, [command, str(folder / "model"), *options, *own[command]])


def test_tensorboard(folder: Path) -> None:
    reader = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(reader).EventAccumulator
    output = folder / "perplexity"
    assert run(folder, "perplexity", output, "tensorboard").exit_code == 0
    events = accumulator(str(output / "runs" / "perplexity")).Reload()
    result = PerplexityResult.from_dict(json.loads((output / "perplexity.json").read_text()))
    for label in ("none", "pi (auto)"):
        found = [(event.step, event.value) for event in events.Scalars(f"tail/{label}/perplexity")]
        cells = [cell for cell in result.cells if (cell.method, cell.protocol) == (label, "tail")]
        assert [step for step, _ in found] == [cell.length for cell in cells]
        assert [value for _, value in found] == pytest.approx([c.perplexity for c in cells])
    (text, *_) = events.Tags()["tensors"]
    assert b"| pi (auto) |" in events.Tensors(text)[0].tensor_proto.string_val[0]


@pytest.mark.slow
def test_weights_and_biases_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(folder)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert run(folder, "retrieval", folder / "retrieval", "wandb").exit_code == 0
    (written,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"passkey/none/accuracy" in written.read_bytes()


def test_a_tracker_that_fails_is_one_line_and_the_files_are_there(folder: Path) -> None:
    output = folder / "blocked"
    output.mkdir()
    (output / "runs").write_text("a file where the folder goes")
    result = run(folder, "perplexity", output, "tensorboard")
    assert result.exit_code == 2
    assert "error: --report-to tensorboard failed: " in result.output
    assert (output / "perplexity.json").is_file()


def test_other_trackers_are_refused_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PosencError, match="tracker 'paper'"):
        check_trackers(["paper"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(folder, "perplexity", folder / "none", "wandb")
    assert result.exit_code == 2
    assert "--report-to wandb needs its package: pip install wandb." in result.output
