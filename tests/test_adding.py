"""One of each that CONTRIBUTING.md says how to add, in a copy of the package: a file and a row, and nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.processes import printed

ROOT = Path(__file__).parents[1]
METHOD = """
from dataclasses import dataclass
from hf_posenc.methods.base import RopeScaling
@dataclass(frozen=True, kw_only=True)
class Halving(RopeScaling):
    name, summary, source, needs = "halving", "half of it", "this test", "nothing"
    def inv_freq(self, rope, length=None):
        return rope.default_inv_freq() / 2
"""
ENGINE = """
from hf_posenc.engines.servers import VLLM
class Mine(VLLM):
    name, version = "mine", "1.0"
"""
TASK = '''
def colour(sample: Sample, kit: Kit) -> Scene:
    """Return a colour in noise."""
    draws, wrong = Draws(*sample.needle), Draws("distractors", *sample.needle)
    word = kit.absent(lambda: draws.digits(3))
    others = kit.others(lambda: wrong.digits(3), word)
    needle = sample.depth, f"The colour is {word}."
    more = ([other] for other in others)
    return kit.scene("Find it.", [needle], kit.noise(), "The colour is", [word], more)


TASKS: dict[str, Task] = {'''
FIGURE = """
def own_figure(result: Any) -> Figure:
    from hf_posenc.evaluation.plots import styled_panels
    with styled_panels(3, 2) as (figure, _):
        return figure
"""
USE = """
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from hf_posenc import embedded, get_patch, patch_model, patched, set_backend
from hf_posenc.engines import export
from hf_posenc.evaluation import measure_retrieval

tokenizer = AutoTokenizer.from_pretrained(embedded.model_path())
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(4, 64)[None]
with torch.no_grad():
    before = model(ids).logits
    with patched(model, "halving"):
        assert not torch.equal(model(ids).logits, before)
    with patched(model, "rerope", window=8):
        logits = []
        for backend in ("exact", "own"):
            set_backend(backend)
            logits.append(model(ids).logits)
        set_backend(None)
        torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
        assert not torch.equal(*logits), "another backend computed"
model.save_pretrained("saved")
assert export("saved", "mine").version == "1.0"
result = measure_retrieval(model, tokenizer, tasks=["colour"], lengths=[200], samples=1)
assert result.cell("none", "colour", 200).samples == 5
assert "own.png" in result.write("out")
"""


def row(file: Path, before: str, added: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, (file, before)
    file.write_text(text.replace(before, added + before), encoding="utf-8")


@pytest.mark.slow  # it needs another process
def test_one_of_each_is_a_file_and_a_row(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    package = tmp_path / "hf_posenc"
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for name in ("hf_posenc", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    (package / "methods" / "halving.py").write_text(METHOD)
    (package / "engines" / "mine.py").write_text(ENGINE)
    row(package / "engines" / "names.py", '    "llama.cpp": (', '    "mine": ("mine", "Mine"),\n')
    fused = (ROOT / "tests" / "support" / "emulated.py").read_text(encoding="utf-8")
    fused = re.sub(r"\nengine\.BACKENDS \+= \(\n.*?\n\)\n", "\n", fused, flags=re.DOTALL)
    fused = fused.replace("from hf_posenc.attention import engine\n", "")
    (package / "attention" / "fused" / "own.py").write_text(fused)
    engine = package / "attention" / "engine.py"
    row(engine, "BACKENDS: tuple[", "from hf_posenc.attention.fused.own import EmulatedFlash\n\n")
    row(engine, '    Backend("few"', '    windowed_backend("own", EmulatedFlash()),\n')
    tasks = package / "evaluation" / "retrieval" / "tasks.py"
    tasks.write_text(tasks.read_text().replace("TASKS: dict[str, Task] = {", TASK.lstrip("\n")))
    row(tasks, '        Task("passkey"', '        Task("colour", colour, 4, first_number),\n')
    row(tasks.parent / "words.json", '"passkey": "a number', '"colour": "a colour in noise",\n')
    with (package / "evaluation" / "plots.py").open("a") as plots:
        plots.write(FIGURE)
    result = tasks.parent / "result.py"
    ranks = "        if self.settings.ranks:\n            figures["
    row(result, ranks, '        figures["own"] = own_figure(self)\n')
    plots_of = "from hf_posenc.evaluation.plots import"
    row(result, plots_of, f"{plots_of} own_figure\n")
    printed(USE, tmp_path)
