"""Masks that are not written: operations give what they give of written ones, and whole models need O(length)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import eager_mask

from hf_posenc import patch_model
from hf_posenc.model import masks
from hf_posenc.model.lazy import UnwrittenMask, is_nothing, nothing
from hf_posenc.model.masks import HANDLE, described, scores_mask, seen_keys
from tests.support import zoo
from tests.support.alibi_models import build_alibi_model
from tests.support.selection import late
from tests.support.zoo import CACHE

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")
LEAST = torch.finfo(torch.float32).min
PADDING = torch.ones(2, 6, dtype=torch.bool)
PADDING[1, :2] = False


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave short masks unwritten too."""
    monkeypatch.setattr(masks, "DENSE", 0)


def arguments(padded: bool = True) -> dict[str, Any]:
    padding = PADDING if padded else None
    queries: dict[str, Any] = {"q_length": 6, "device": torch.device("cpu")}
    if "cache_position" in inspect.signature(eager_mask).parameters:  # transformers before 5.4
        queries = {"cache_position": torch.arange(6)}
    rest = {"batch_size": 2, "kv_length": 6, "attention_mask": padding, "dtype": torch.float32}
    return rest | queries


ALIBI = torch.arange(6.0).expand(2, 3, 1, 6) / 4
KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda mask: mask,
    "whole": lambda mask: mask[:, :, :, :6],
    "moved": lambda mask: mask.to("cpu", non_blocking=True),
    "double": lambda mask: mask.to(torch.float64),
    "bool": lambda mask: mask.to(torch.bool),
    "also bool": lambda mask: mask.bool(),
    "below": lambda mask: mask < -1,
    "filled": lambda mask: torch.masked_fill(ALIBI, mask < -1, LEAST),
}
UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "part": lambda mask: mask[:, :, 2:],
    "sum": lambda mask: mask + ALIBI,
    "not": lambda mask: ~mask.to(torch.bool),
    "below much": lambda mask: mask < -1e30,
    "half filled": lambda mask: torch.masked_fill(ALIBI, mask < -1, -1.0),
    "filled and cast": lambda mask: torch.masked_fill(ALIBI, mask < -1, LEAST).to(torch.bool),
    "concatenated": lambda mask: torch.cat([mask, mask], dim=1),
    "copied": copy.deepcopy,
}


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_operations_give_what_they_give_of_a_written_mask(name: str, padded: bool) -> None:
    given = arguments(padded=padded)
    operation = KNOWN.get(name) or UNKNOWN[name]
    got, want = operation(scores_mask(**given)), operation(eager_mask(**given))  # type: ignore[arg-type]
    assert isinstance(got, UnwrittenMask) == (name in KNOWN)
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
    if isinstance(got, UnwrittenMask):
        assert got.written is None
        if padded:
            assert torch.equal(seen_keys(got), PADDING)  # type: ignore[arg-type]
    assert torch.equal(got + 0, want + 0)


@pytest.mark.usefixtures("unwritten")
def test_what_is_written_into_a_mask_stays() -> None:
    mask: Any = scores_mask(**arguments())
    mask[:, :, :, 3] = LEAST
    assert torch.equal(mask[..., 3] + 0, torch.full((2, 1, 6), LEAST))
    mask = scores_mask(**arguments())
    mask += 1.0
    assert torch.equal(mask, eager_mask(**arguments()) + 1.0)


@pytest.mark.usefixtures("unwritten")
def test_a_bias_is_taken_out_of_a_mask() -> None:
    mask: Any = scores_mask(**arguments())
    biased = torch.masked_fill(ALIBI, mask < -1, LEAST)
    assert isinstance(biased, UnwrittenMask)
    expected = eager_mask(**arguments()).expand(2, 3, 6, 6)
    assert torch.equal(biased.without_bias() + 0, expected)
    assert biased.handle is not None
    assert biased.handle.dtype == HANDLE
    assert torch.equal(described(biased.handle).rows(0, 6)[:, 0], expected[:, 0] == 0)  # type: ignore[index]


def test_zeros_are_known_in_every_view() -> None:
    zeros = nothing((6, 1, 5), torch.zeros(()))
    assert all(is_nothing(each) for each in (zeros, zeros[:, :, 2:], zeros.view(2, 3, 1, 5)))
    assert not is_nothing(torch.zeros(6, 1, 5))
    assert zeros.untyped_storage().nbytes() == 4


# Whole models

_DispatchMode: Any = TorchDispatchMode


class Largest(_DispatchMode):  # type: ignore[misc]
    """The most bytes of a tensor that is made under it."""

    size = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if type(value) is Tensor and value.device.type != "meta":
                self.size = max(self.size, value.untyped_storage().nbytes())
        return output


ALIBI_MODELS = ("bloom", "mpt", "falcon", "falcon_eager")
OWN_CODE = ("gptj", "codegen", "gpt_neox_japanese", "roformer")


def build(name: str) -> Any:
    if name in ALIBI_MODELS:
        return patch_model(build_alibi_model(name), "alibi", scale=4)
    model = zoo.build(name, max_position_embeddings=2048)
    return patch_model(model, "rerope", window=8, layers="all")


@pytest.mark.usefixtures("unwritten")
def test_no_tensor_is_as_large_as_the_scores_of_one_head() -> None:
    largest: Any = Largest()
    model = build("bloom")
    with largest, torch.no_grad():
        model(zoo.tokens(600), use_cache=False)
    assert 600 * 64 * 4 <= largest.size < 600 * 600 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALIBI_MODELS, *OWN_CODE])
@pytest.mark.parametrize("way", ["plain", "padded", "cached", "trained"])
def test_no_tensor_grows_faster_than_the_text(name: str, way: str) -> None:
    """The largest one at two lengths; one head's scores in float32 would have four times as many bytes as allowed."""
    model: Any = build(name)
    found = []
    for length in (600, 1200):
        ids, options = zoo.tokens(length), dict[str, Any]()
        if way == "padded" and name != "roformer":  # which counts padding before a text as tokens
            options["attention_mask"] = torch.ones_like(ids)
            options["attention_mask"][:, :9] = 0
        with torch.set_grad_enabled(way == "trained"):
            if way == "cached" and name != "roformer":
                options[CACHE] = model(ids[:, :20], use_cache=True)[CACHE]
            largest: Any = Largest()
            with largest:
                out = model(ids, use_cache=CACHE in options, **options)
            if way == "trained":
                with largest:
                    out.logits.sum().backward()
        found.append(largest.size)
    assert found[1] <= 2.1 * found[0]
    assert found[1] < 1200 * 1200


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("name", late(ALIBI_MODELS))
def test_a_mask_that_a_hook_changes_is_the_changed_one(name: str) -> None:
    """Code that writes into the mask between the model and its blocks."""
    ids, path = zoo.tokens(20), "attention_mask"
    models: list[Any] = [patch_model(build_alibi_model(name), "alibi") for _ in range(2)]

    def hide(_: Any, args: Any, kwargs: Any) -> None:
        value = kwargs[path]
        value[..., 4] = True if value.dtype == torch.bool else torch.finfo(value.dtype).min

    outputs = []
    for model, limit in zip(models, (0, 1 << 18), strict=True):
        masks.DENSE = limit
        first = next(module for path, module in model.named_modules() if path.endswith(".0"))
        first.register_forward_pre_hook(hide, with_kwargs=True, prepend=True)
        outputs.append(zoo.logits(model, ids))
    assert zoo.relative_difference(*outputs) < 1e-6
    assert zoo.relative_difference(outputs[0], zoo.logits(build_alibi_model(name), ids)) > 1e-3
