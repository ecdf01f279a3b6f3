"""Methods that train parameters of their own, and gradients through every method."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import patch_model, unpatch_model
from hf_posenc.attention import exact
from hf_posenc.errors import UnsupportedModelError
from hf_posenc.methods import T5, KerpleLog, get_method
from hf_posenc.model.parameters import MethodParameters, share_parameters
from tests.attention.test_attention import ALIKE, FLASH, PATHS, WINDOWED, apply, build, patched
from tests.support import zoo
from tests.support.attention_llama import (
    CASES,
    FORMS,
    TRAINABLE,
    parameters_of,
    randomise,
    reference,
)
from tests.support.families import build_text_model
from tests.support.selection import covering, late

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*starts untrained"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
LAYERS = 2


@pytest.fixture
def model() -> PreTrainedModel:
    return build()


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:])


def gradients(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model(input_ids=ids, use_cache=False, **kwargs).logits, ids).backward()
    found = {}
    for name, value in model.named_parameters():
        if value.grad is not None:
            found[name] = value.grad.double().clone()
    return found


def slope(model: PreTrainedModel, name: str, ids: Tensor, moved: dict[str, Tensor]) -> float:
    """The derivative of the float64 reference's loss along a direction, by a central difference."""
    step, losses = 1e-5, []
    for sign in (1, -1):
        weights = {key: value.detach().double() for key, value in model.state_dict().items()}
        for key, direction in moved.items():
            weights[key] = weights[key] + sign * step * direction
        losses.append(loss_of(reference(model, CASES[name], ids, weights), ids))
    return float(losses[0] - losses[1]) / (2 * step)


TRAINED = ("fire", "shaw", "transformer_xl_shared", "temperature_ssmax", "kerple_power")
"""Cases whose parameters are of other kinds than those of `FORMS`."""


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *covering([*FORMS, *TRAINED], PATHS),
        *late([name for name in ALIKE if name not in TRAINED], PATHS),
        *itertools.product(WINDOWED, FLASH),
    ],
    indirect=["path"],
)
def test_gradients_equal_those_of_the_reference(name: str, path: str) -> None:
    """Of every parameter of the method, and of weights before attention, along random directions."""
    model, ids = patched(name), zoo.tokens(16 if name == "fire" else 40)
    found = gradients(model, ids)
    generator = torch.Generator().manual_seed(3)
    kinds = {key.rpartition(".")[2] for key in parameters_of(model)}
    groups = {kind: [k for k in found if k.endswith(f".posenc.{kind}")] for kind in kinds}
    for part in ("q_proj", "k_proj", "v_proj"):
        groups[part] = [f"model.layers.0.self_attn.{part}.weight"]
    for kind, keys in groups.items():
        assert keys, f"no gradient for {kind}"
        moved = {
            key: torch.randn(found[key].shape, generator=generator, dtype=torch.float64)
            for key in keys
        }
        got = sum(float((found[key] * direction).sum()) for key, direction in moved.items())
        scale = sum(float(found[key].norm() * moved[key].norm()) for key in keys)
        assert abs(got - slope(model, name, ids, moved)) < 1e-4 * scale + 1e-7, kind
        # A constant per head changes no softmax.
        assert scale > 1e-5 or kind == "bias_out", f"{kind} has no part in the loss"


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_parameters_are_the_models(model: PreTrainedModel, name: str) -> None:
    names = list(model.state_dict())
    apply(model, name)
    mine = parameters_of(model)
    method = get_method(CASES[name].method)(**CASES[name].options)
    for kind in {key.rpartition(".")[2] for key in mine}:
        shared, each = ["model"], [f"model.layers.{i}.self_attn" for i in range(LAYERS)]
        places = [key.split(".posenc.")[0] for key in mine if key.endswith(f".{kind}")]
        assert places == (shared if kind in method.shared_parameters else each)
    assert all(value.requires_grad and value.dtype == torch.float32 for value in mine.values())
    assert set(mine) == set(model.state_dict()) - set(names)
    before = {key: value.detach().clone() for key, value in mine.items()}
    half = copy.deepcopy(model).bfloat16()
    for key, value in parameters_of(half).items():
        assert torch.equal(value, before[key])  # not rounded
    assert half.get_parameter("model.layers.0.mlp.up_proj.weight").dtype == torch.bfloat16
    unpatch_model(model)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("name", "dtype"),
    covering(
        ["rerope", "dual_chunk", "alibi", "t5", "fire", "rope_bias"],
        [torch.float32, torch.bfloat16],
    ),
)
def test_gradients_are_finite_also_under_padding(
    model: PreTrainedModel, name: str, dtype: torch.dtype
) -> None:
    """Rows of nothing but padding have no key to see."""
    apply(model, name)
    model = model.bfloat16() if dtype == torch.bfloat16 else model
    ids = zoo.tokens(80, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :30], mask[1, 60:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    model.train()
    model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    for key, value in model.named_parameters():
        assert value.grad is not None, key
        assert value.grad.isfinite().all(), key


AGAIN = "rerope", "kerple_log", "dynamic_ntk_row"


@pytest.mark.parametrize(
    ("name", "path"),
    [*covering(AGAIN, PATHS), *late([name for name in CASES if name not in AGAIN], PATHS)],
    indirect=["path"],
)
def test_gradient_checkpointing_gives_the_same_gradients(
    name: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two forwards before the backward: what is computed again sees its own positions."""
    monkeypatch.setattr(exact, "SCRATCH", 2000)  # the blocks are computed again too
    model = copy.deepcopy(patched(name)).train()
    first, second = zoo.tokens(45, seed=1), zoo.tokens(30, seed=2)
    packed = torch.cat([torch.arange(n) for n in (14, 16)])[None]

    def both() -> dict[str, Tensor]:
        model.zero_grad()
        one = model(input_ids=first, use_cache=False).logits
        two = model(input_ids=second, position_ids=packed, use_cache=False).logits
        (loss_of(one, first) + loss_of(two, second)).backward()
        return {k: v.grad.clone() for k, v in model.named_parameters() if v.grad is not None}

    want = both()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.testing.assert_close(both(), want, rtol=1e-4, atol=1e-6)
        model.gradient_checkpointing_disable()


@pytest.mark.filterwarnings("default:.*starts untrained")
@pytest.mark.parametrize("name", TRAINABLE)
def test_says_once_that_it_must_be_trained(model: PreTrainedModel, name: str) -> None:
    case = CASES[name]
    with pytest.warns(UserWarning, match=f"{case.method} starts untrained.*must be") as seen:
        patch_model(model, case.method, **case.options)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.logits(model, zoo.tokens(20))


def test_others_say_nothing(model: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in sorted(set(CASES) - set(TRAINABLE)):
            apply(model, name)
            zoo.logits(model, zoo.tokens(20))
            unpatch_model(model)


# One set of parameters for all layers

SHARED = {"kerple_log": "r1", "kerple_power": "r2", "t5": "table", "transformer_xl": "u"}
"""A parameter that all layers have in common."""


@pytest.mark.parametrize("name", SHARED)
def test_shared_parameters_get_the_gradients_of_all_layers(name: str) -> None:
    """The sum of those that every layer's own parameters get where all have the same values."""
    shared, own, ids = build(), build(), zoo.tokens(40)
    patch_model(shared, name, shared=True)
    patch_model(own, name)
    randomise(shared)
    common = {
        key.rpartition(".")[2]: value
        for key, value in parameters_of(shared).items()
        if key.startswith("model.posenc.")
    }
    assert SHARED[name] in common
    values: dict[str, Tensor] = shared.state_dict()
    for key, value in parameters_of(own).items():
        kind = key.rpartition(".")[2]
        value.data.copy_(common[kind] if kind in common else values[key])
    assert torch.equal(zoo.logits(shared, ids), zoo.logits(own, ids))
    found, expected = gradients(shared, ids), gradients(own, ids)
    for key, gradient in found.items():
        if key.startswith("model.posenc."):
            ending = key.removeprefix("model")
            parts = [part for other, part in expected.items() if other.endswith(ending)]
            assert len(parts) == LAYERS
            assert all(part.any() for part in parts)
            torch.testing.assert_close(gradient, torch.stack(parts).sum(0), rtol=1e-5, atol=1e-8)
        else:
            torch.testing.assert_close(gradient, expected[key], rtol=1e-5, atol=1e-8, msg=key)


@pytest.mark.parametrize("name", ["kerple_log", "transformer_xl"])
def test_shared_parameters_are_saved_once_copied_and_dropped(
    model: PreTrainedModel, name: str, tmp_path: Path
) -> None:
    """That a loaded model and a copy compute the same: `tests/patch/test_promises.py`."""
    names = list(model.state_dict())
    patch_model(model, name, shared=True)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = [key for key in file.keys() if key.endswith(f".{SHARED[name]}")]  # noqa: SIM118
    assert stored == [f"model.posenc.{SHARED[name]}"]
    layer = copy.deepcopy(model.model.layers[1])
    assert layer.self_attn.posenc[SHARED[name]] is model.get_parameter(stored[0])
    assert list(unpatch_model(model).state_dict()) == names


def test_an_encoder_and_a_decoder_share_apart() -> None:
    """Each has a table of its own, as in T5."""
    model = patch_model(build_text_model("bart"), "kerple_log", shared=True)
    owners = {key.rpartition(".posenc.")[0] for key in parameters_of(model)}
    assert owners == {"model.encoder", "model.decoder"}


def test_layers_that_differ_share_nothing() -> None:
    layers = [nn.Module(), nn.Module()]
    for heads, layer in zip((2, 4), layers, strict=True):
        parameters = KerpleLog().parameters_for(heads, heads, 8, 16)
        layer.register_module("posenc", MethodParameters(parameters))
    with pytest.raises(UnsupportedModelError, match=r"one r1.*\(2,\).*\(4,\).*Leave shared out"):
        share_parameters(nn.Module(), [(each, KerpleLog(shared=True)) for each in layers])


def test_a_dictionary_of_layers_shares_among_those_that_ask_for_it() -> None:
    model, ids = build(num_hidden_layers=3), zoo.tokens(40)
    before = zoo.logits(model, ids)
    patch_model(model, {range(2): KerpleLog(shared=True), range(2, 3): KerpleLog()})
    owners = {key.rpartition(".posenc.")[0] for key in parameters_of(model)}
    assert owners == {"model", "model.layers.2.self_attn"}
    unpatch_model(model)
    with pytest.raises(UnsupportedModelError, match="parameters of one method, not of"):
        patch_model(model, {range(2): KerpleLog(shared=True), range(2, 3): T5(shared=True)})
    assert not parameters_of(model)
    assert torch.equal(zoo.logits(model, ids), before)
