"""Terminals: every command on any encoding and at any width."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_posenc import available_recipes
from hf_posenc.cli import main
from hf_posenc.cli.app import app
from hf_posenc.methods import METHODS
from tests.support import commands
from tests.support.selection import late, quick
from tests.support.tiny_text import text_files, tiny_checkpoint

ROOT = Path(__file__).parents[2]
TAIL = "--text {texts} --target-length 128 --limit 2 --output {out} --no-plot"

# One command line of every command, or several. {model} is a checkpoint trained at 64 tokens, {texts} a folder of
# texts, {out} a folder for results, {run} one with results.
COMMANDS = [
    "methods",
    "show yarn",
    "models",
    "recipes",
    "inspect {model}",
    "inspect {model} --patch rerope:window=16",
    "recommend {model} --target-length 512",
    "recommend {model} --target-length 512 --all",
    "perplexity {model} --text {texts} --lengths 32,64,128 --patch none --patch yarn --output {out} --no-plot",
    "perplexity {model} --text {texts} --lengths 32,64 --patch none --dry-run",
    "retrieval {model} --tasks passkey --lengths 256 --samples 1 --depths 2 --patch none --output {out} --no-plot",
    "retrieval {model} --tasks passkey --lengths 256 --patch yarn --dry-run",
    "bench {model} --text {texts} --suite smoke --lengths 64,128 --rounds 0 --output {out} --no-plot",
    "bench {model} --text {texts} --suite smoke --lengths 64,128 --dry-run",
    "sweep {model} --patch pi --patch yarn " + TAIL,
    "search {model} --budget 8 " + TAIL,
    "extend {model} --text {texts} --target-length 304 --output {out}",
    "report {run} --output {out}.html",
    "export {model} --to vllm --patch yarn:scale=4 --output {out}",
    "export {model} --to vllm --patch yarn:scale=4 --dry-run",
    "export {model} --to vllm --methods",
    "selftest --device cpu --length 64 --seconds 1",
    "doctor",
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("terminals")
    texts = text_files(folder / "texts", 6, 310)
    names = {"model": tiny_checkpoint(folder / "model"), "texts": texts}
    names["run"] = folder / "run"
    line = "perplexity {model} --text {texts} --lengths 32,64 --patch none --output {run} --no-plot"
    commands.succeeded(*shlex.split(line.format(**names)))
    return names


def invoke(line: str, places: dict[str, Path], out: Path, **runner: Any) -> Any:
    return CliRunner(**runner).invoke(app, shlex.split(line.format(**places, out=out)))


def test_the_table_has_every_command() -> None:
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    others = {"fetch", "finetune"}  # one downloads, the other has the Trainer's output
    assert {line.split()[0] for line in COMMANDS} == names - others


def takes_long(line: str) -> bool:
    """Return whether a command runs for a second; perplexity, which does too, stands for the others."""
    names = ("retrieval", "bench", "sweep", "search", "extend", "selftest")
    return "--methods" in line or (line.startswith(names) and "--dry-run" not in line)


SHORT = [line for line in COMMANDS if not takes_long(line)]
WRITING = [line for line in COMMANDS if "{out}" in line and not line.startswith("report")]


@pytest.mark.parametrize("line", quick(COMMANDS, SHORT))
def test_json_is_alone_on_stdout(line: str, places: dict[str, Path], tmp_path: Path) -> None:
    result = invoke(f"{line} --json --quiet", places, tmp_path / "out")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values
    assert not result.stderr
    written = tmp_path / "out" / f"{line.split()[0]}.json"
    if written.is_file():
        assert json.loads(written.read_text()).items() <= values.items()
        assert "--json" not in json.dumps(values)
    elif "--dry-run" in line or "--methods" in line:
        assert not (tmp_path / "out").exists()


def test_notes_and_warnings_go_to_stderr(places: dict[str, Path], tmp_path: Path) -> None:
    line = COMMANDS[8].replace("yarn", "shaw").replace("32,64,128", "32")
    plain = invoke(line, places, tmp_path / "out")
    assert "Wrote perplexity.json" in plain.stdout
    assert "warning: shaw" in plain.stderr
    assert "Wrote perplexity.json" in invoke(line + " --json", places, tmp_path / "out").stderr
    quiet = invoke(line + " --quiet", places, tmp_path / "out")
    assert not quiet.stderr
    assert "Wrote" not in quiet.stdout
    assert "shaw" in quiet.stdout


def test_verbose_prints_the_traceback(tmp_path: Path) -> None:
    for option, traceback in (("", False), ("--verbose", True)):
        result = commands.invoke("show", "yran", *option.split())
        assert result.exit_code == 2
        assert ("Traceback" in result.stderr) == traceback
        assert result.stderr.splitlines()[-1].startswith("error: Unknown method 'yran'.")


@pytest.mark.parametrize("width", [40, *late([60, 80])])
def test_names_are_whole_at_any_width(width: int, places: dict[str, Path], tmp_path: Path) -> None:
    names = {
        "methods": [method.name for method in METHODS] + ["position_interpolation."],
        "show yarn": list(METHODS[6].knobs()),
        "recipes": [*available_recipes(), "codellama/CodeLlama-7b-hf"],
        "inspect {model}": ["wavelength", "(rad/token)", "0.000316228"],
        "recommend {model} --target-length 512 --all": ["dual_chunk", "pose-t6-govreport)"],
        COMMANDS[8]: ["128", "yarn", "(auto)", "tokens"],
    }
    for line, expected in names.items():
        result = invoke(line, places, tmp_path / "out", env={"COLUMNS": str(width)})
        assert result.exit_code == 0, result.output
        assert set(expected) <= set(result.stdout.split())
        assert "…" not in result.stdout


@pytest.mark.parametrize("line", ["--help", "methods", "show yarn", "perplexity --help"])
def test_a_terminal_of_ascii(line: str) -> None:
    result = CliRunner(charset="ascii").invoke(app, line.split())
    assert result.exit_code == 0, result.output
    assert result.stdout.isascii()


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.slow
def test_a_process_prints_any_name(encoding: str, tmp_path: Path) -> None:
    """Also what no encoding has: half a surrogate pair, as in a file name that is not UTF-8."""
    env = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    env |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "from hf_posenc.cli import main; main(['\\u00fc\\udcff\\u2191'])"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 2, done.stderr
    name = {"ascii": "\\xfc\\udcff\\u2191", "utf-8": "ü\\udcff↑"}[encoding]
    assert done.stderr.decode(encoding).startswith(f"error: No such command '{name}'")


@pytest.mark.parametrize("line", quick(WRITING, SHORT))
def test_files_are_written_before_anything_is_printed(
    line: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the terminal is gone")

    for name in ("hf_posenc.evaluation.grid.Grid.__rich_console__", "hf_posenc.cli.export._show"):
        monkeypatch.setattr(name, fail)
    assert "the terminal is gone" in str(invoke(line, places, tmp_path / "out").exception)
    name = "config" if line.startswith("export") else line.split()[0]
    assert (tmp_path / "out" / f"{name}.json").is_file()


def command(code: str, **options: Any) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes, **options)


@pytest.mark.parametrize(
    "module",
    ["rich", "typer", "hf_posenc.cli.app", "hf_posenc.cli.inspection", "hf_posenc.methods"],
)
@pytest.mark.slow
def test_an_interrupt_during_imports_is_one_line(module: str) -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from hf_posenc.cli import main; main(['methods'])"
    )
    out, error = (process := command(code)).communicate(timeout=300)
    assert (process.returncode, out, error) == (130, "", "error: interrupted\n")


def test_an_interrupt_in_a_measurement_is_one_line(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_posenc.evaluation.measuring.execute.Measurement.run", interrupt)
    result = invoke(COMMANDS[8], places, tmp_path / "out")
    assert result.exit_code == 130
    lines = result.stderr.splitlines()
    assert lines[-2:] == ["The same command resumes from the records.", "error: interrupted"]


@pytest.mark.parametrize("options", [[], pytest.param(["--json"], marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_closed_pipe_is_quiet(options: list[str]) -> None:
    process: Any = command(f"from hf_posenc.cli import main; main({['methods', *options]})")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=300) == 1


@pytest.mark.parametrize(
    ("line", "status"), [("methods", 0), ("methods --json", 0), ("show banana", 2)]
)
def test_closed_streams_are_quiet(line: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):  # as after >&- in a shell
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert (end.value.code or 0) == status


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.slow
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        code = "from hf_posenc.cli import main; main(['methods'])"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    error = "error: stdout cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, error)
