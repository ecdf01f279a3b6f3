"""`hf-posenc finetune`: its help, and the same training as `python -m hf_posenc.training` and the script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_posenc.evaluation.options import DocumentOptions
from hf_posenc.training import TrainingLog, options
from hf_posenc.training.result import print_next
from hf_posenc.training.train import parse_arguments
from tests.support.commands import succeeded
from tests.support.tiny_text import prose, tiny_checkpoint

ROOT = Path(__file__).parents[2]


def help_of(option: str) -> dict[str, list[str]]:
    text = succeeded("finetune", option, columns=200).output
    assert "Every option of transformers' TrainingArguments works too" in text
    assert ("--help-all shows the rest" in text) == (option == "--help")
    parts = re.split(r"╭─ (.*?) ─+╮", text)[1:]
    panels = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: re.findall(r"^│ (--[\w-]+)", text, re.MULTILINE) for name, text in panels.items()}


def test_the_help_has_a_dozen_options_in_groups_and_the_whole_one_each_once() -> None:
    short, whole = help_of("--help"), help_of("--help-all")
    assert tuple(short)[1:] == tuple(whole)[1:] == options.GROUPS
    for group in options.GROUPS:
        assert 2 <= len(short[group]) <= 4
        assert set(short[group]) <= set(whole[group])
    listed = [name for group in options.GROUPS for name in whole[group]]
    own = [field.name for kind in options.KINDS for field in fields(kind)]
    assert sorted(listed) == sorted(f"--{name.replace('_', '-')}" for name in own)
    assert all(text for *_, text in options.listed())


def test_the_names_of_transformers_options_are_all_known() -> None:
    """They are read from its source without an import; its own parser has them from the class."""
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    names = {action.dest for action in parser._actions} - {"help"}
    assert set(options._training_arguments()) == names
    assert set(options.DEFAULTS) <= names
    (recipe,) = (text for field, _, text in options.listed() if field.name == "recipe")
    assert all(name in recipe for name in options.recipes())


def test_every_option_is_read_with_hyphens_and_with_underscores(tmp_path: Path) -> None:
    given = (
        f"--output_dir {tmp_path} --max_steps 3 --score_lengths 64 --weight_decay 0.1 --no_score "
        "--no_dataloader_drop_last --no_include_num_input_tokens_seen --use_cpu"
    )
    one, other = (
        parse_arguments([w.replace("_", mark) if w[0] == "-" else w for w in given.split()])
        for mark in "_-"
    )
    assert one[:2] == other[:2]
    assert asdict(one[2]) == asdict(other[2])
    assert not other[2].dataloader_drop_last
    parser = options.Parser()
    options.add_options(parser)
    names = {name for name in parser._option_string_actions if name.startswith("--")}
    assert {name[:2] + name[2:].replace("_", "-") for name in names} <= names


@pytest.mark.slow
def test_the_command_the_module_and_the_script_train_the_same(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text(prose(3_000))
    given = f"--model {model} --text {tmp_path}/text.txt --patch yarn:scale=2 --no_score --max_steps 2 --use_cpu"
    command = [sys.executable, "-c", "from hf_posenc.cli import main; main()", "finetune"]
    programs = {
        "command": command,
        "module": [sys.executable, "-m", "hf_posenc.training"],
        "script": [sys.executable, str(ROOT / "scripts" / "finetune.py")],
    }
    losses = {}
    for name, program in programs.items():
        words = [*program, *given.split(), "--output-dir", name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        kept: Any = {"capture_output": True, "text": True, "check": False}
        done = subprocess.run(words, cwd=tmp_path, env=environment, **kept)
        assert done.returncode == 0, done.stderr
        log = TrainingLog.read(tmp_path / name)
        losses[name] = [entry["loss"] for entry in log.log_history if "loss" in entry]
        assert log.command == f"hf-posenc finetune {given}"
        assert f"hf-posenc export {name} --to vllm" in done.stdout
    assert len(losses["script"]) == 2
    assert losses["command"] == losses["module"] == losses["script"]
    # The same command resumes what the script began.
    words = [*command, *given.split(), "--output_dir", "script"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, **kept)
    assert done.returncode == 0, done.stderr
    wrong = subprocess.run([*programs["module"], "--modl", "x"], cwd=tmp_path, **kept)
    assert wrong.stderr.startswith("error: No such option: --modl. Did you mean --model?")
    assert wrong.returncode == 2


TEXTS = DocumentOptions(text=["a b.txt", "c.jsonl"], column="body", encoding="latin-1")
ROWS = DocumentOptions(dataset="rows", split="dev", tokenized="ids", encoding="latin-1")
PLAIN = replace(TEXTS, text=None)


@pytest.mark.parametrize(
    ("kind", "scored", "held_out", "measure"),
    [
        ("llama", PLAIN, [], "perplexity 'my run' --lengths 64,128"),
        ("llama", TEXTS, [], " --text 'a b.txt' c.jsonl --column body --encoding latin-1"),
        ("bloom", ROWS, [], " --dataset rows --split dev --tokenized ids"),
        ("llama", PLAIN, ["a b.txt"], " --text 'a b.txt' --encoding latin-1"),
        ("llama", PLAIN, ["a b.txt, last tenth"], "retrieval 'my run' --lengths 64,128 --tasks passkey"),
        ("llama", PLAIN, ["a b.txt", "d.csv"], "retrieval 'my run' --lengths 64,128 --tasks passkey"),
    ],
)  # fmt: skip
def test_the_next_commands_can_be_copied(
    kind: str,
    scored: Any,
    held_out: Any,
    measure: str,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a b.txt", "c.jsonl", "d.csv"):
        Path(name).touch()
    tiny_checkpoint(Path("my run"), kind)
    capsys.readouterr()
    print_next(Path("my run"), scored, held_out, [128, 64])
    shown = capsys.readouterr().out
    export = "  hf-posenc export 'my run' --to vllm\n" * (kind == "llama")  # BLOOM has no table
    assert shown.startswith("\nNext:\n  hf-posenc ")
    assert f"{measure}\n{export}  hf upload 'YOUR_NAME/my run' 'my run' . --exclude '*/*'" in shown
    nothing = not (held_out or scored.text or scored.dataset)
    assert shown.endswith("held-out modules of the standard library.\n") == nothing
