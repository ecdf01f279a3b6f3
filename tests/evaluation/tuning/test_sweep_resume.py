"""The commands: killed at any moment, shared by two processes, and every refusal one line."""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from pathlib import Path

import pytest
import torch

from hf_posenc.cli.app import app
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.support.commands import invoke, succeeded
from tests.support.processes import PATIENCE, running
from tests.support.selection import late
from tests.support.tiny_text import text_files, tiny_checkpoint

SWEEP = ("--patch", "yarn", "--patch", "pi", "--patch", "ntk_mixed", "--first-documents", "2")
SEARCH = ("--budget", "24", "--search-documents", "2", "--windows-per-document", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_files(tmp_path_factory.mktemp("texts"), 5, 340, step=11)


def arguments(command: str, model: Path, folder: Path, output: Path, *more: str) -> list[str]:
    given = [command, str(model), "--text", str(folder), "--target-length", "128", "--no-plot"]
    return [*given, *(SWEEP if command == "sweep" else SEARCH), "--output", str(output), *more]


def _run(given: list[str]) -> None:
    nothing = io.StringIO()
    with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        app(given, prog_name="hf-posenc")


def records(output: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in output.rglob("*.jsonl"))


@pytest.mark.parametrize("command", late(["search", "sweep"]))
def test_killed_shared_and_resumed_gives_the_same_bytes(
    command: str, model: Path, folder: Path, tmp_path: Path
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    succeeded(*arguments(command, model, folder, whole))
    total = records(whole)
    chance = random.Random(command)
    # one of two processes, killed while it measures or while it waits for the other
    share = arguments(command, model, folder, torn, "--shard", "2/2")
    with running(_run, share) as process:
        wanted, until = chance.randrange(1, 8), time.monotonic() + PATIENCE
        while records(torn) < wanted and process.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)
    kept = records(torn)
    assert wanted <= kept < total
    if command == "sweep":  # the same share again, beside the other one
        with running(_run, share) as process:
            resumed = succeeded(*arguments(command, model, folder, torn, "--shard", "1/2"))
            process.join(PATIENCE)
            assert process.exitcode == 0
    else:  # alone, over what the killed one left
        resumed = succeeded(*arguments(command, model, folder, torn))
    assert records(torn) == total
    kept = json.loads((torn / f"{command}.json").read_text()).get("kept")
    assert (kept is None) == ("Use it: hf_posenc.load_patch(" in resumed.output)
    assert (kept is None) == ("keep that" not in resumed.output)
    files = (f"{command}.json", f"{command}_recipe.json")
    written = {name: (torn / name).read_bytes() for name in files}
    for name, data in written.items():
        assert data == (whole / name).read_bytes(), name
        (torn / name).unlink()
    succeeded(*arguments(command, model, folder, torn))
    assert records(torn) == total  # nothing was measured again
    assert {name: (torn / name).read_bytes() for name in files} == written


def test_what_the_commands_say_and_write(model: Path, folder: Path, tmp_path: Path) -> None:
    result = succeeded(*arguments("sweep", model, folder, tmp_path, "--scales", "2,3"))
    assert "Rounds: 6 on 2 documents; 3 on 4 documents; 2 on 5 documents." in result.stdout
    assert "Best: " in result.stdout
    values = json.loads((tmp_path / "sweep.json").read_text())
    assert values["kind"] == "sweep"
    assert values["command"].startswith(f"hf-posenc sweep {model} --text")
    assert "--output" not in values["command"]
    assert f"Or: patch_model(model, '{values['recipe']['method']}', scale=" in result.stdout
    assert json.loads((tmp_path / "sweep_recipe.json").read_text()) == values["recipe"]


def test_a_dry_run_says_what_it_costs(model: Path, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "new"
    result = invoke(*arguments("sweep", model, folder, output, "--dry-run"))
    once = 64 + 128
    # 6 methods and 2 controls on 2 documents, 3 and 2 on the next 2, 2 and 2 on the last; truncation reads 64 tokens
    truncated = 5 * 64
    raced, every = once * (8 * 2 + 5 * 2 + 4) + truncated, once * 8 * 5 + truncated
    assert f"{raced:,} tokens instead of {every:,}" in result.stdout
    assert "at the rate measured for one thread" in " ".join(result.stdout.split())
    result = invoke(*arguments("search", model, folder, output, "--dry-run"))
    searched = 24 * 2 * 2 * 128 + 3 * 2 * (6 * once + 64)
    assert f"{searched:,} tokens for 24 evaluations" in result.stdout
    assert not output.exists()


@pytest.mark.usefixtures("quick_collection")
def test_without_a_winner_the_exit_status_is_1(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(TokenScorer, "__call__", full)
    result = invoke(*arguments("sweep", model, folder, tmp_path))
    assert result.exit_code == 1
    assert "OOM" in result.stdout
    assert "No method gave a number: there is no winner." in result.stdout
    assert "warning: yarn (scale 2): failed at length 64, 128: out of memory" in result.stderr
    assert json.loads((tmp_path / "sweep.json").read_text())["winner"] is None
    assert not (tmp_path / "sweep_recipe.json").exists()
