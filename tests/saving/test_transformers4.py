"""Loading in transformers 4.57, compared with the documented behaviour.

`pip install --target FOLDER --no-deps transformers==4.57.1 "huggingface_hub<1" "tokenizers<0.23"` makes the folder
that `HF_POSENC_TRANSFORMERS4` names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc import PosencError, get_method, inspect_rope, patch_model
from hf_posenc.engines import export, write_export
from hf_posenc.verification import verify_export
from tests.patch.test_patching import OPTIONS
from tests.saving.test_saving import EVERY, outputs, patched_for_saving
from tests.support import zoo
from tests.support.tiny_text import byte_tokenizer, tiny_checkpoint
from tests.support.zoo_registry import quiet

PACKAGES = os.environ.get("HF_POSENC_TRANSFORMERS4", "")
pytestmark = pytest.mark.skipif(
    not PACKAGES, reason="HF_POSENC_TRANSFORMERS4 names no folder with transformers 4.57"
)

ARCHITECTURES = ("llama", "olmo2", "olmo3", "phi3", "gemma3_text", "gpt_neox", "nemotron")
METHODS = ("pi", "ntk", "ntk_by_parts", "ntk_mixed", "yarn", "llama3", "abf", "nope", "longrope")
LENGTHS = (48, 96, 240)  # within the trained 64 tokens, just past them, and far

_LOAD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, transformers
transformers.logging.set_verbosity_error()
assert transformers.__version__.startswith("4."), transformers.__version__
found = {}
for folder, name, *attention in json.load(open(sys.argv[2])):
    given = {"attn_implementation": attention[0]} if attention else {}
    try:
        model = getattr(transformers, name).from_pretrained(folder, **given).eval().float()
        probes = torch.load(f"{folder}/probes.pt")
        with torch.no_grad():
            errors = [
                float((model(input_ids=ids, use_cache=False).logits - logits).abs().max() / logits.abs().max())
                for ids, logits in probes
            ]
        result = max(errors)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    found[" ".join((folder, *attention))] = result
json.dump(found, open(sys.argv[3], "w"))
"""


def options_of(method: str, pairs: int) -> dict[str, Any]:
    options = dict(OPTIONS[method])
    if method == "longrope":
        options |= {"short_factor": [1.5] * pairs, "long_factor": [3.0] * pairs}
    return options


def loaded(
    models: Sequence[tuple[Path, str] | tuple[Path, str, str]], folder: Path
) -> dict[str, float | str]:
    """The error of every folder's logits in one process of transformers 4, or how it fails there.

    A third entry is the attention implementation, which the key then ends with.
    """
    (folder / "models.json").write_text(json.dumps([(str(path), *how) for path, *how in models]))
    files = [folder / "models.json", folder / "found.json"]
    command: list[Any] = [sys.executable, "-I", "-c", _LOAD, PACKAGES, *files]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, capture_output=True, env=offline)
    found: dict[str, float | str] = json.loads((folder / "found.json").read_text())
    return found


def cases(folder: Path) -> Iterator[tuple[str, Path, Path, str, bool]]:
    """Name, folder of `save_pretrained`, folder of the export, class, and whether the export is said to be possible."""
    for architecture in ARCHITECTURES:
        for method in METHODS:
            model = zoo.build(architecture)
            patch_model(model, method, **options_of(method, inspect_rope(model)[-1].dim // 2))
            saved = folder / f"{architecture}-{method}"
            model.save_pretrained(saved)
            found = export(saved, "transformers4")
            target = folder / f"{architecture}-{method}-exported"
            if found.possible:
                write_export(found, target)
            with torch.no_grad():
                texts = [zoo.tokens(length) for length in LENGTHS]
                probes = [(ids, model(input_ids=ids, use_cache=False).logits) for ids in texts]
            for place in (saved, target):
                if place.exists():
                    torch.save(probes, place / "probes.pt")
            yield saved.name, saved, target, type(model).__name__, found.possible


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("transformers4")
    every = list(cases(folder))
    models = [
        (path, name)
        for _, saved, target, name, _ in every
        for path in (saved, target)
        if path.exists()
    ]
    found = loaded(models, folder)
    return {
        name: (possible, found[str(saved)], found.get(str(target)))
        for name, saved, target, _, possible in every
    }


def test_what_is_said_to_load_gives_the_same_logits(results: dict[str, Any]) -> None:
    said = {name: error for name, (possible, _, error) in results.items() if possible}
    assert len(said) > len(results) / 2
    wrong = {name: error for name, error in said.items() if not is_small(error)}
    assert not wrong


def test_what_is_said_not_to_load_does_not(results: dict[str, Any]) -> None:
    others = {name: saved for name, (possible, saved, _) in results.items() if not possible}
    assert others
    assert not [name for name, error in others.items() if is_small(error)]


def test_save_pretrained_alone_does_the_same_but_for_phi3(results: dict[str, Any]) -> None:
    """Phi-3's 4.57 takes lists and nothing beside them, which 5 would read first; it refuses the saved config."""
    worse = {
        name for name, (possible, saved, _) in results.items() if possible and not is_small(saved)
    }
    assert worse == {name for name, (possible, *_) in results.items() if possible} & {
        f"phi3-{method}" for method in METHODS if method not in ("ntk", "abf")
    }
    assert "phi3-pi" in worse


def is_small(error: float | str | None) -> bool:
    return isinstance(error, float) and error < 1e-4


def test_every_method_of_llama(results: dict[str, Any]) -> None:
    static = {method for method in METHODS if not get_method(method).length_dependent}
    assert all(results[f"llama-{method}"][0] for method in (*static, "longrope"))


def test_a_model_that_is_not_patched_loads_too(tmp_path: Path) -> None:
    """transformers 5 alone writes `rope_parameters`, of which 4.57 reads nothing."""
    model = zoo.build("cohere")
    model.save_pretrained(tmp_path / "model")
    assert not verify_export(tmp_path / "model", model, packages=PACKAGES).passed
    write_export(export(tmp_path / "model", "transformers4"), tmp_path / "out")
    found = verify_export(tmp_path / "out", model, packages=PACKAGES)
    assert found.passed
    assert found.version.startswith("4.57")


def test_the_tokenizer_loads(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    write_export(export(tmp_path / "model", "transformers4"), tmp_path / "out")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from transformers import AutoTokenizer\n"
        "print(AutoTokenizer.from_pretrained(sys.argv[2])('a few words')['input_ids'])\n"
    )
    command: list[Any] = [sys.executable, "-I", "-c", code, PACKAGES, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected: Any = byte_tokenizer()("a few words")["input_ids"]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_what_only_hf_posenc_computes_is_refused(tmp_path: Path) -> None:
    model = patch_model(zoo.build("llama"), "alibi")
    model.save_pretrained(tmp_path / "model")
    found = loaded([(tmp_path / "model", name) for name in ("AutoModelForCausalLM",)], tmp_path)
    assert "alibi needs hf_posenc" in str(found[str(tmp_path / "model")])
    with pytest.raises(PosencError, match="alibi needs hf_posenc"):
        verify_export(tmp_path / "model", model, packages=PACKAGES)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # more than 200 models
def test_every_type_is_loaded_with_its_patch_or_not_at_all(tmp_path: Path) -> None:
    models: list[tuple[Path, str] | tuple[Path, str, str]] = []
    for family in EVERY:
        try:
            model = patched_for_saving(family)
        except pytest.skip.Exception:  # it takes no method
            continue
        folder = tmp_path / family
        with quiet():
            model.save_pretrained(folder)
        ids = zoo.tokens(60)
        torch.save([(ids, outputs(model, ids))], folder / "probes.pt")
        name = type(model).__name__
        models += [(folder, name), *((folder, name, way) for way in ("eager", "sdpa"))]
    found = loaded(models, tmp_path)
    assert len(found) == len(models) > 500
    wrong = {key for key, error in found.items() if isinstance(error, float) and error > 1e-4}
    assert not wrong


def test_an_architecture_that_it_does_not_know(tmp_path: Path) -> None:
    zoo.build("ministral3").save_pretrained(tmp_path)
    assert "has no model type ministral3" in export(tmp_path, "transformers4").reason
    with pytest.raises(PosencError, match="cannot load"):
        verify_export(tmp_path, zoo.build("ministral3"), packages=PACKAGES)
