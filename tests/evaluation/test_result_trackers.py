"""TensorBoard and Weights & Biases receive the numbers and the tables of a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

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


def run(folder: Path, command: str, *more: str) -> None:
    given = [command, str(folder / "model"), "--text", *(str(folder / f"{n}.txt") for n in (0, 1))]
    given = given if command != "retrieval" else given[:2]
    output = ["--output", str(folder / command), "--no-plot"]
    result = RUNNER.invoke(app, [*given, *output, *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_tensorboard(folder: Path) -> None:
    reader = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(reader).EventAccumulator
    run(
        folder,
        "perplexity",
        "--patch",
        "none",
        "--patch",
        "pi",
        "--lengths",
        "128,192",
        "--report-to",
        "tensorboard",
    )
    events = accumulator(str(folder / "perplexity" / "runs" / "perplexity")).Reload()
    result = PerplexityResult.from_dict(
        json.loads((folder / "perplexity" / "perplexity.json").read_text())
    )
    lengths = list(result.settings.lengths)
    for label in ("none", "pi (auto)"):
        found = [(event.step, event.value) for event in events.Scalars(f"tail/{label}/perplexity")]
        expected = [result.cell(label, "tail", length) for length in lengths]
        assert [step for step, _ in found] == lengths
        assert [value for _, value in found] == pytest.approx(
            [cell.perplexity for cell in expected if cell]
        )
    (text, *_) = events.Tags()["tensors"]
    assert b"| pi (auto) |" in events.Tensors(text)[0].tensor_proto.string_val[0]


@pytest.mark.slow
def test_weights_and_biases_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    run(
        folder,
        "retrieval",
        "--patch",
        "none",
        "--samples",
        "1",
        "--lengths",
        "320",
        "--report-to",
        "wandb",
    )
    (written,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"passkey/none/accuracy" in written.read_bytes()


def test_a_tracker_that_fails_is_one_line_and_the_files_are_there(folder: Path) -> None:
    output = folder / "blocked"
    output.mkdir()
    (output / "runs").write_text("a file where the folder goes")
    given = ["perplexity", str(folder / "model"), "--text", str(folder / "0.txt")]
    more = ["--no-plot", "--lengths", "128", "--patch", "none", "--report-to", "tensorboard"]
    result = RUNNER.invoke(app, [*given, *more, "--output", str(output)])
    assert result.exit_code == 2
    assert "error: --report-to tensorboard failed: " in result.output
    assert (output / "perplexity.json").is_file()


def test_other_trackers_are_refused_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PosencError, match="tracker 'paper'"):
        check_trackers(["paper"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = ["perplexity", str(folder / "model"), "--report-to", "wandb"]
    result = RUNNER.invoke(app, given)
    assert result.exit_code == 2
    assert "--report-to wandb needs its package: pip install wandb." in result.output
