"""Methods inside attention on encoders, which read keys on both sides of a query: float64 references, pair by pair."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hf_posenc import PosencError, UnsupportedModelError, patch_model, unpatch_model
from tests.support.families import build_text_model, text_types
from tests.support.zoo import relative_difference, tokens

LENGTH, WINDOW, GROUP, SLOWNESS = 40, 8, 4, 4.0
Rule = Callable[
    [Tensor, Tensor], Tensor
]  # (m, n) -> the rotary distance of a pair, negative for a key after the query


def _rope(m: Tensor, n: Tensor) -> Tensor:
    return m - n


def _rerope(m: Tensor, n: Tensor) -> Tensor:  # kexue.fm 9708
    return (m - n).clamp(-WINDOW, WINDOW)


def _leaky(m: Tensor, n: Tensor) -> Tensor:
    far = (m - n).abs() >= WINDOW
    slow = (m - n).sign() * (WINDOW + ((m - n).abs() - WINDOW) / SLOWNESS)
    return torch.where(far, slow, m - n)


def _self_extend(m: Tensor, n: Tensor) -> Tensor:  # arXiv 2401.01325, eq. 4 and 5, on either side
    shift = WINDOW - WINDOW // GROUP
    before, after = m // GROUP + shift - n // GROUP, m // GROUP - shift - n // GROUP
    far = torch.where(m > n, before, after)
    return torch.where((m - n).abs() < WINDOW, m - n, far)


def _nothing(m: Tensor, n: Tensor) -> Tensor:
    return torch.zeros_like(m - n)


def _alibi(m: Tensor, n: Tensor, heads: int) -> Tensor:
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1).double() / heads)
    return -slopes[:, None, None] * (m - n).abs()


CASES: dict[str, tuple[dict[str, Any], Rule, Any]] = {
    "rerope": ({"window": WINDOW}, _rerope, None),
    "leaky_rerope": ({"window": WINDOW, "k": SLOWNESS}, _leaky, None),
    "self_extend": ({"window": WINDOW, "group": GROUP}, _self_extend, None),
    "alibi": ({}, _nothing, _alibi),
}


def _reference(
    model: PreTrainedModel, rule: Rule, bias: Any, ids: Tensor, mask: Tensor | None
) -> Tensor:
    """Logits in float64, with the rotation of the layers that read the whole text by a rule; others keep RoPE."""
    other = copy.deepcopy(model).double()
    tables: dict[str, Tensor] = {}
    for module in other.modules():
        for name, value in list(module.named_buffers(recurse=False)):
            if name.endswith("inv_freq") and "original" not in name:
                tables[name.removesuffix("inv_freq").rstrip("_")] = value.clone()
                setattr(module, name, torch.zeros_like(value))  # queries and keys come unrotated

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        kinds = getattr(other.config, "layer_types", None)
        kind = kinds[module.layer_idx] if kinds and "" not in tables else ""
        local = kind.startswith("sliding")
        count = query.shape[2]
        m, n = torch.arange(count)[:, None], torch.arange(count)[None]
        angle = (_rope if local else rule)(m, n).double()[..., None] * tables[kind]
        cos, sin = angle.cos(), angle.sin()
        first, second = query[:, :, :, None].chunk(
            2, -1
        )  # half-split, as the layers of both types rotate
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("bhmnd,bhnd->bhmn", turned, key) * scaling
        if bias is not None and not local:
            scores = scores + bias(m, n, query.shape[1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("reference", attention)
    AttentionMaskInterface.register("reference", lambda **given: sdpa_mask(**given))
    other.set_attn_implementation("reference")
    return _run(other, ids, mask)


def _run(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits.double()


@pytest.mark.parametrize("method", CASES)
@pytest.mark.parametrize("model_type", ["eurobert", "modernbert"])
def test_a_pair_is_scored_by_its_signed_distance(model_type: str, method: str) -> None:
    options, rule, bias = CASES[method]
    model, ids = build_text_model(model_type), tokens(LENGTH)
    expected = _reference(model, rule, bias, ids, None)
    assert relative_difference(_reference(model, _rope, None, ids, None), _run(model, ids)) < 1e-5
    patch_model(model, method, **options)
    assert relative_difference(_run(model, ids), expected) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", CASES)
def test_padding_changes_nothing(method: str, side: str) -> None:
    options, rule, bias = CASES[method]
    model, ids = build_text_model("eurobert"), tokens(LENGTH, batch=2)
    short = 25
    mask, shown = torch.ones_like(ids), slice(0, short)
    if side == "left":
        mask[1, : LENGTH - short] = 0
        ids[1, LENGTH - short :] = ids[1, :short].clone()
        shown = slice(LENGTH - short, LENGTH)
    else:
        mask[1, short:] = 0
    expected = [_reference(model, rule, bias, row, None)[0] for row in (ids[:1], ids[1:, shown])]
    patch_model(model, method, **options)
    out = _run(model, ids, mask)
    assert relative_difference(out[0], expected[0]) < 1e-5
    assert relative_difference(out[1, shown], expected[1]) < 1e-5


def test_far_more_tokens_than_a_written_mask_holds() -> None:
    model, ids = (
        build_text_model("eurobert"),
        tokens(520, batch=2),
    )  # handles of masks from 512 x 512 pairs on
    mask = torch.ones_like(ids)
    mask[1, 300:] = 0
    patch_model(model, "rerope", window=WINDOW)
    short = _run(model, ids[1:, :300])
    assert relative_difference(_run(model, ids, mask)[1, :300], short[0]) < 1e-5


def test_gradients_are_those_of_the_reference() -> None:
    model, ids = build_text_model("eurobert"), tokens(LENGTH)
    torch.manual_seed(0)
    patch_model(model, "kerple_log").double()
    model(input_ids=ids).logits.square().sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if "r1" in name or "r2" in name}
    assert trained
    name = next(iter(trained))
    parameter = dict(model.named_parameters())[name]
    with torch.no_grad():
        values = []
        for step in (2**-10, -(2**-10)):  # the parameters stay in float32
            parameter[0] += step
            values.append(_run(model, ids).square().sum())
            parameter[0] -= step
    slope = (values[0] - values[1]) / 2**-9
    grad = trained[name]
    assert grad is not None
    assert abs(float(slope - grad[0])) < 2e-3 * abs(float(slope))


def test_a_patched_encoder_copies_and_is_undone_to_the_bit() -> None:
    model, ids = build_text_model("modernbert"), tokens(LENGTH)
    before = _run(model, ids)
    patch_model(model, "self_extend", window=WINDOW, group=GROUP)
    out = _run(model, ids)
    assert not torch.allclose(out, before)
    assert torch.equal(_run(copy.deepcopy(model), ids), out)
    assert torch.equal(_run(pickle.loads(pickle.dumps(model)), ids), out)
    assert torch.equal(_run(unpatch_model(model), ids), before)


@pytest.mark.parametrize("method", ["log_n", "fire", "t5", "shaw", "xpos", "dynamic_ntk"])
def test_methods_of_causal_texts_are_refused(method: str) -> None:
    model, ids = build_text_model("eurobert"), tokens(9)
    before = _run(model, ids)
    words = f"in both directions, and {method} is defined for keys that come before the query. Defined for both: "
    with pytest.raises(UnsupportedModelError, match=words):
        patch_model(model, method)
    assert torch.equal(_run(model, ids), before)


def test_what_counts_the_past_is_refused() -> None:
    with pytest.raises(PosencError, match="log_n counts the keys before a query"):
        patch_model(build_text_model("eurobert"), "rerope", log_n=True)


def _rotary_encoders() -> list[str]:
    return [name for name, kind in text_types().items() if "MaskedLM" in kind and name in ROTARY]


ROTARY = (
    "eurobert",
    "gte",
    "jina_embeddings_v3",
    "modernbert",
    "modernvbert",
    "nomic_bert",
    "ultrabert",
    "ultravbert",
)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", _rotary_encoders())
def test_every_rotary_encoder_takes_bands_and_biases(model_type: str) -> None:
    model, ids = build_text_model(model_type), tokens(LENGTH)
    before = _run(model, ids)
    for method, options, changes in (
        ("rerope", {"window": 500}, False),
        ("self_extend", {"window": WINDOW, "group": GROUP}, True),
        ("alibi", {}, True),
    ):
        patch_model(model, method, layers="all", **options)  # type: ignore[arg-type]
        difference = relative_difference(_run(model, ids), before)
        assert difference > 1e-2 if changes else difference < 1e-5, method
        assert torch.equal(_run(unpatch_model(model), ids), before)
