"""What every patch promises, whatever it changes: undone to the bit, the same in copies, repeated, saved and loaded."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc import get_patch, load_patch, patch_model, patched, save_patch, unpatch_model
from hf_posenc.methods import ReRoPE, YaRN
from tests.attention.test_attention import build
from tests.patch.test_patching import OPTIONS
from tests.seams.test_native_bias import build_table_model
from tests.support import zoo
from tests.support.alibi_models import BUILDERS, build_alibi_model
from tests.support.attention_llama import CASES, ORIGINAL, randomise
from tests.support.families import build_text_model
from tests.support.selection import quick

pytestmark = pytest.mark.filterwarnings("ignore:.*(starts untrained|must be trained)")
START = {"original_max_position_embeddings": ORIGINAL}
BOTH_PARTS = {"window": 6, "group": 3, "layers": "all", **START}


@dataclass(frozen=True)
class Kind:
    """A model, a patch, and the length of a text that shows it, in tokens."""

    build: Callable[[], Any]
    method: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    length: int = 40

    def patch(self, model: Any) -> Any:
        patch_model(model, self.method, **self.options)
        randomise(model)
        return model


IN_ATTENTION = {
    **{name: Kind(build, case.method, {**case.options, **START}) for name, case in CASES.items()},
    "list": Kind(build, [YaRN(scale=4), ReRoPE(window=8)], START),
    "layers": Kind(build, {0: YaRN(scale=4), 1: ReRoPE(window=8)}, START),
}
OTHERS = {
    **{name: Kind(partial(build_alibi_model, name), "alibi", {"scale": 4}) for name in BUILDERS},
    "t5 distances": Kind(partial(build_table_model, "t5"), "t5", {"scale": 4}),
    "umt5 limit": Kind(
        partial(build_table_model, "umt5"), "t5", {"scale": 4, "mode": "max_distance"}, 90
    ),
    "gptj": Kind(partial(zoo.build, "gptj"), "rerope", {"window": 8}),
    "logarithmic mpt": Kind(
        partial(build_alibi_model, "mpt"), "alibi", {"scale": 2, "distance": "log"}
    ),
    **{
        model_type: Kind(partial(zoo.build, model_type), "self_extend", BOTH_PARTS, 20)
        for model_type in ("t5gemma", "t5gemma2")
    },
    **{
        f"{model_type} {method}": Kind(partial(build_text_model, model_type), method, options)
        for model_type, method, options in (
            ("gpt2", "nope", {"target_length": 100}),
            ("ctrl", "kerple_log", {"target_length": 100}),
            ("bart", "alibi", {"target_length": 100}),
            ("bert", "interpolate", {"scale": 2}),
            ("opt", "stretch", {"scale": 2, "keep": 4}),
            ("xglm", "sinusoidal", {"scale": 2}),
        )
    },
}
FREQUENCIES = {
    name: Kind(partial(zoo.build, "llama"), name, options, 96) for name, options in OPTIONS.items()
}
KINDS = {**FREQUENCIES, **IN_ATTENTION, **OTHERS}
MAIN = ("rerope", "dual_chunk", "alibi_keep_rope", "fire", "rope_bias", "dynamic_ntk_row", "layers")
FEW = (
    *(*MAIN, "mpt", "t5 distances", "gptj", "gpt2 nope", "ctrl kerple_log", "bart alibi"),
    *("t5gemma", "logarithmic mpt"),
)


@pytest.mark.parametrize("kind", quick(KINDS, (*FREQUENCIES, *FEW, "bert interpolate")))
def test_a_patch_is_undone_to_the_bit_and_copies_have_their_own(kind: str) -> None:
    case, model = KINDS[kind], KINDS[kind].build()
    ids = zoo.tokens(case.length)
    before, plain = zoo.snapshot(model), zoo.logits(model, ids)
    case.patch(model.train())
    assert all(module.training for module in model.modules())
    expected = zoo.logits(model.eval(), ids)
    assert zoo.relative_difference(expected, plain) > 1e-3
    assert zoo.in_force(model).method in str(zoo.in_force(model))
    state = zoo.snapshot(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(zoo.logits(other, ids), expected)
        assert torch.equal(zoo.logits(unpatch_model(other), ids), plain)
        with torch.no_grad():
            for weight in other.parameters():
                weight.zero_()
    patch_model(model, case.method, **case.options)  # the same request changes nothing
    with patched(model, case.method, **case.options):
        assert torch.equal(zoo.logits(model, ids), expected)
    assert zoo.snapshot(model) == state
    assert unpatch_model(model) is model
    assert zoo.snapshot(model) == before
    assert torch.equal(zoo.logits(model, ids), plain)
    assert get_patch(model) is None


# Not Falcon's eager attention, which a folder does not name, and which adds its biases twice.
SAVED = [kind for kind in KINDS if kind != "falcon_eager"]
FEW_SAVED = (
    *(*MAIN, "umt5 limit", "mpt", "bert interpolate", "t5gemma", "logarithmic mpt"),
    # One of each rope_type of transformers, and no rotation at all.
    *("pi", "abf", "yarn", "llama3", "longrope", "dynamic_ntk", "nope"),
)


@pytest.mark.parametrize("kind", quick(SAVED, FEW_SAVED))
def test_a_patch_is_saved_with_its_model_and_as_a_file(kind: str, tmp_path: Path) -> None:
    """Trained parameters are included; plain transformers refuses what it cannot compute."""
    case, model = KINDS[kind], KINDS[kind].build()
    ids = zoo.tokens(case.length)
    plain, before = zoo.logits(model, ids), model.config.to_dict()
    expected, patch = zoo.logits(case.patch(model), ids), zoo.in_force(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pickle.loads(pickle.dumps(model)).save_pretrained(tmp_path)  # as the model itself does
    save_patch(model, tmp_path / "patch")
    other: Any = load_patch(case.build(), tmp_path / "patch")
    assert torch.equal(zoo.logits(other, ids), expected)
    if patch.export is None:
        with pytest.raises(Exception, match="needs hf_posenc"):
            type(model).from_pretrained(tmp_path)
    else:
        stock = type(model).from_pretrained(tmp_path)
        assert zoo.relative_difference(zoo.logits(stock, ids), expected) < 1e-4
    loaded: Any = hf_posenc.from_pretrained(tmp_path, auto_class=type(model))
    assert zoo.relative_difference(zoo.logits(loaded, ids), expected) < 1e-6
    if patch.export == "weights":  # loading these is all that the patch needs
        assert get_patch(loaded) is None
        return
    assert zoo.in_force(loaded).config == patch.config
    patch_model(loaded, case.method, **case.options)  # the same request
    assert torch.equal(zoo.logits(unpatch_model(loaded), ids), plain)
    after = loaded.config.to_dict()
    for key in ("rope_parameters", "max_position_embeddings", "relative_attention_max_distance"):
        assert after.get(key) == before.get(key)


@pytest.mark.slow
def test_a_pickled_model_is_read_in_another_process(tmp_path: Path) -> None:
    ids, model = zoo.tokens(40), KINDS["fire"].patch(build())
    torch.save({"model": model, "ids": ids, "logits": zoo.logits(model, ids)}, tmp_path / "all.pt")
    code = (
        "import sys, torch; saved = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.no_grad(): found = saved['model'](input_ids=saved['ids'], use_cache=False)\n"
        "assert torch.equal(found.logits.double(), saved['logits'])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "all.pt")], check=True)
