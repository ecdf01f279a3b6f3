"""Methods inside attention on encoders, which read keys on both sides of a query: float64 references, pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import PosencError, patch_model, unpatch_model
from tests.support import zoo
from tests.support.attention_native import GROUP, RULES, WINDOW, Rule, reference
from tests.support.families import build_text_model, text_types
from tests.support.zoo import relative_difference, tokens

LENGTH, SLOWNESS = 40, 4.0
CASES: dict[str, tuple[dict[str, Any], Rule]] = {
    **RULES,
    "leaky_rerope": (
        {"window": WINDOW, "k": SLOWNESS},
        Rule(query=lambda m: WINDOW + (m - WINDOW) / SLOWNESS, key=lambda n: n / SLOWNESS),
    ),
}


def _reference(model: PreTrainedModel, rule: Rule, ids: Tensor) -> Tensor:
    """Logits with the rotation of the layers that read the whole text by a rule; others keep RoPE."""
    other = zoo.twin(model)
    kinds = getattr(model.config, "layer_types", None)
    layers = next(each for name, each in other.named_modules() if name.endswith("layers"))
    chosen = [
        layer
        for index, layer in enumerate(layers.children())
        if not kinds or not kinds[index].startswith("sliding")
    ]
    found = reference(other, ids, rule, nn.ModuleList(chosen))
    assert found is not None
    return found


def _run(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits.double()


@pytest.mark.parametrize("method", CASES)
@pytest.mark.parametrize("model_type", ["eurobert", "modernbert"])
def test_a_pair_is_scored_by_its_signed_distance(model_type: str, method: str) -> None:
    options, rule = CASES[method]
    model, ids = build_text_model(model_type), tokens(LENGTH)
    expected = _reference(model, rule, ids)
    assert relative_difference(_reference(model, Rule(), ids), _run(model, ids)) < 1e-5
    patch_model(model, method, **options)
    assert relative_difference(_run(model, ids), expected) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", CASES)
def test_padding_changes_nothing(method: str, side: str) -> None:
    options, rule = CASES[method]
    model, ids = build_text_model("eurobert"), tokens(LENGTH, batch=2)
    short = 25
    mask, shown = torch.ones_like(ids), slice(0, short)
    if side == "left":
        mask[1, : LENGTH - short] = 0
        ids[1, LENGTH - short :] = ids[1, :short].clone()
        shown = slice(LENGTH - short, LENGTH)
    else:
        mask[1, short:] = 0
    expected = [_reference(model, rule, row)[0] for row in (ids[:1], ids[1:, shown])]
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


@pytest.mark.parametrize("method", ["log_n", "fire", "t5", "shaw", "xpos", "dynamic_ntk"])
def test_methods_of_causal_texts_are_refused(method: str) -> None:
    words = f"in both directions, and {method} is defined for keys that come before the query. Defined for both: "
    zoo.refused(build_text_model("eurobert"), words, method)


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
