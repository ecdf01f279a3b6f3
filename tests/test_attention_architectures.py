"""Attention-path methods in every rotary architecture of transformers.

Each either computes what a pair-by-pair reference does, in every way to run a text, or is refused with a reason. The
representative types run always, all others with `-m slow`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc import UnsupportedModelError, patch_model, unpatch_model
from tests import zoo
from tests.attention_llama import CASES, ORIGINAL, randomise
from tests.zoo_registry import quiet

DECODERS = (*zoo.decoder_types(), *zoo.text_tower_types())
TYPES = [
    pytest.param(name, marks=() if name in zoo.REPRESENTATIVE else pytest.mark.slow)
    for name in DECODERS
]
LENGTH = 24
pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")


def patch(model: PreTrainedModel, method: str, options: dict[str, Any]) -> PreTrainedModel:
    """Patches every layer, also of a checkpoint that comes scaled."""
    replace = method.startswith(("dynamic", "longrope"))
    patch_model(
        model,
        method,
        layers="all",
        original_max_position_embeddings=ORIGINAL,
        replace=replace,
        **options,
    )
    randomise(model)
    return model


@torch.no_grad()
def hidden(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
    """Logits or hidden states in float64, and the cache."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = model(**zoo._required_inputs(model.config, ids), **kwargs)
    values = getattr(out, "logits", None)
    return (out[0] if values is None else values).double(), out.past_key_values


def cached(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The text as a prefill, single steps and chunks."""
    parts, cache, start = [], None, 0
    for size in (11, 1, 1, 4, LENGTH - 17):
        more: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        part, cache = hidden(model, ids[:, start : start + size], use_cache=True, **more)
        parts.append(part)
        start += size
    return torch.cat(parts, 1)


def left_padded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    rows = torch.cat((zoo.tokens(5, batch=2, seed=4), ids.expand(2, -1)), 1)
    mask = torch.ones_like(rows)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return zoo.logits(model, rows, attention_mask=mask, position_ids=positions)[1:, 5:]


WAYS = {"cached": cached, "left-padded": left_padded}


def native_error(model: PreTrainedModel, way: str, ids: Tensor, full: Tensor) -> float | None:
    """How far the unpatched model is off; `None` where it cannot run a text so."""
    try:
        return zoo.relative_difference(WAYS[way](model, ids), full)
    except Exception:
        return None


def compared(model_type: str) -> dict[str, float]:
    """The ways to run a text that the unpatched model has, and how far it is off in each."""
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    full = zoo.logits(model, ids)
    errors = {way: native_error(model, way, ids, full) for way in WAYS}
    return {way: error for way, error in errors.items() if error is not None and error < 0.01}


def reasons(model_type: str, names: Iterable[str]) -> dict[str, str]:
    """For every case: nothing if it works in a model as it should, or the reason of a refusal."""
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    before, config = zoo.logits(model, ids), copy.deepcopy(model.config.to_dict())
    noise = zoo.relative_difference(zoo.logits(model, ids), before)
    modules, weights = [n for n, _ in model.named_modules()], list(model.state_dict())
    native = compared(model_type)
    found = {}
    for name in names:
        case = CASES[name]
        try:
            patch(model, case.method, dict(case.options))
        except UnsupportedModelError as error:
            found[name] = str(error)
        else:
            found[name] = ""
            full = zoo.logits(model, ids)
            acted = zoo.relative_difference(full, before)
            assert acted > 10 * noise + 1e-4, f"{name}: nothing happened ({acted:.1e})"
            for way, natively in native.items():
                off = zoo.relative_difference(WAYS[way](model, ids), full)
                assert off < max(1e-4, 10 * natively), f"{name}, {way}: {off:.1e}"
            unpatch_model(model)
        assert zoo.relative_difference(zoo.logits(model, ids), before) <= noise, name
        assert model.config.to_dict() == config, name
        assert [n for n, _ in model.named_modules()] == modules, name
        assert list(model.state_dict()) == weights, name
    return found


SPARSE = "chooses by a .* which keys a query sees"
OWN_CODE = "in its own code|in code of its own"
NOT_A_ROTATION = "is not a rotation in a known layout"
ALONE = "cannot be run on a few tokens alone"
