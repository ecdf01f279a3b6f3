"""A bias, or no position at all, in the place of a table of positions."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hf_posenc import (
    PosencError,
    UnsupportedModelError,
    from_pretrained,
    patch_model,
    unpatch_model,
)
from hf_posenc.errors import UntrainedWarning
from hf_posenc.methods import ALiBi
from hf_posenc.seams.inspection import inspect
from tests.support import zoo
from tests.support.attention_ways import in_steps
from tests.support.families import build_text_model
from tests.support.selection import covering, late, quick
from tests.support.zoo import relative_difference, tokens

LENGTH, LONG = 40, 150  # the tables have about 64 rows
# The tables of a model type, and the row of position 0.
TABLES = {
    "gpt2": (("transformer.wpe.weight",), 0),
    "opt": (("model.decoder.embed_positions.weight",), 2),
    "bert": (("bert.embeddings.position_embeddings.weight",), 0),
    "roberta": (("roberta.embeddings.position_embeddings.weight",), 1),
    "bart": (("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"), 2),
    "ctrl": (("transformer.pos_encoding",), 0),
    "gpt_neo": (("transformer.wpe.weight",), 0),
}
FEW_TABLES = ("gpt2", "roberta", "ctrl")  # at the start, after rows for padding, and a buffer
CAUSAL = ("gpt2", "opt")
REGISTERED = [kind for kind in TABLES if kind != "gpt_neo"]  # which computes attention itself


def _run(model: PreTrainedModel, ids: Tensor, **arguments: Any) -> Tensor:
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids.flip(1)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **arguments).logits
    return logits.double()


def _with_mean_rows(model: PreTrainedModel, model_type: str, length: int) -> PreTrainedModel:
    """A model, natively of that length, whose table has the mean of the rows of another one at every position."""
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = length  # in GPT-2 and CTRL another name of `n_positions`
    names, start = TABLES[model_type]
    if model_type == "roberta":
        config.max_position_embeddings += start
    kind: Any = type(model)
    other: Any = kind(config).eval()
    weights = model.state_dict()
    means = {
        name: {**dict(model.named_parameters()), **dict(model.named_buffers())}[name][start:].mean(
            0
        )
        for name in names
    }
    other.load_state_dict({k: v for k, v in weights.items() if k not in names}, strict=False)
    for name, row in means.items():
        table = {**dict(other.named_parameters()), **dict(other.named_buffers())}[name]
        assert len(table) == length + start
        table.data[:] = row
    return other


def _reference(model: PreTrainedModel, model_type: str, ids: Tensor, scale: float = 1.0) -> Tensor:
    """Logits in float64 of a model with ALiBi (Press et al. 2022, section 3) in the place of its table."""
    other = _with_mean_rows(model, model_type, ids.shape[1]).double()
    causal = {
        m for n, m in other.named_modules() if model_type in (*CAUSAL, "ctrl") or "decoder" in n
    }
    crossing = {m for n, m in other.named_modules() if n.endswith("encoder_attn")}

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        heads, count = query.shape[1:3]
        distance = (torch.arange(count)[:, None] - torch.arange(count)).double()
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1).double() / heads) / scale
        scores = query @ key.mT * scaling
        if module not in crossing:
            scores = scores - slopes[:, None, None] * distance.abs()
        if module in causal and module not in crossing:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("alibi_reference", attention)
    AttentionMaskInterface.register("alibi_reference", lambda **given: sdpa_mask(**given))
    other.set_attn_implementation("alibi_reference")
    return _run(other, ids)


@pytest.mark.parametrize(
    ("model_type", "length"),
    [
        *covering(FEW_TABLES, [LENGTH, LONG]),
        *late([t for t in TABLES if t not in FEW_TABLES], [LENGTH, LONG]),
    ],
)
def test_nope_reads_the_mean_row_everywhere(model_type: str, length: int) -> None:
    model, ids = build_text_model(model_type), tokens(length)
    expected = _run(_with_mean_rows(model, model_type, length), ids)
    patch_model(model, "nope", target_length=max(length, 64))
    assert relative_difference(_run(model, ids), expected) < 1e-6
    positions = inspect(model)
    assert not positions.sources
    assert positions.complete


@pytest.mark.parametrize("model_type", quick(REGISTERED, ("gpt2", "bert", "bart")))
def test_alibi_equals_a_float64_reference(model_type: str) -> None:
    """Also past the rows of the table, with the slopes of the paper, or divided by the scale."""
    model = build_text_model(model_type)
    cases: tuple[tuple[int, Any, dict[str, Any], float], ...] = (
        (LENGTH, "alibi", {}, 1.0),
        (LONG, ALiBi(), {"target_length": LONG}, 1.0),
        (LONG, "alibi", {"scale": 3}, 3.0),
    )
    for length, method, options, scale in cases:
        ids = tokens(length)
        expected = _reference(model, model_type, ids, scale)
        patch_model(model, method, **options)
        assert relative_difference(_run(model, ids), expected) < 1e-5
        unpatch_model(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "length"),
    covering(["gpt_neo", "rembert", "megatron-bert", "big_bird", "tapas"], [LENGTH, LONG]),
)
def test_alibi_in_code_of_its_own_equals_the_same_bias_as_a_mask(
    model_type: str, length: int
) -> None:
    """Such code adds a mask of four axes to its scores, so the unpatched model computes the reference."""
    model, ids = build_text_model(model_type), tokens(length)
    distance = (torch.arange(length)[:, None] - torch.arange(length)).float()
    slopes = 2.0 ** (-8 * torch.arange(1, 5) / 4)
    bias = -slopes[None, :, None, None] * distance.abs()
    if model_type == "gpt_neo":
        bias = bias.masked_fill(distance < 0, torch.finfo(torch.float32).min)
    target = max(length, 64)
    expected = _run(patch_model(model, "nope", target_length=target), ids, attention_mask=bias)
    patch_model(model, ALiBi(), target_length=target, replace=True)
    assert relative_difference(_run(model, ids), expected) < 1e-5


OWN_CODE: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("git", "mvp", "openai-gpt", "squeezebert")},
    **{kind: {"relative_attention": True} for kind in ("deberta", "deberta-v2")},
}
MORE_OWN_CODE = (
    *("big_bird", "convbert", "gpt_neo", "ibert", "luke", "megatron-bert", "rembert", "tapas"),
    *("trocr", "xglm", "flaubert", "xlm"),
)


class _AddedBeforeSoftmax(TorchFunctionMode):
    """ALiBi added to all scores of as many keys as queries, by the paper, in whatever code computes them."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = args[0] if args else None
        if func.__name__ == "softmax" and isinstance(scores, Tensor):
            queries, keys = scores.shape[-2:]
            if queries == keys:
                heads = scores.shape[1] if scores.dim() == 4 else scores.shape[0] // 2  # two texts
                distance = (torch.arange(queries)[:, None] - torch.arange(keys)).abs().double()
                slopes = 2.0 ** (-8 * torch.arange(1, heads + 1).double() / heads)
                bias = -slopes[:, None, None] * distance
                bias = bias.repeat(2, 1, 1) if scores.dim() == 3 else bias
                args = (scores + bias.to(scores.dtype), *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "model_type", quick([*OWN_CODE, *MORE_OWN_CODE], ("openai-gpt", "mvp", "deberta"))
)
def test_alibi_in_any_code_equals_a_float64_reference(model_type: str) -> None:
    model = build_text_model(model_type, **OWN_CODE.get(model_type, {}))
    ids = torch.cat((tokens(20), tokens(20).flip(1)))
    arguments = {}
    if model.config.is_encoder_decoder:  # attention to another text has no position
        arguments = {"decoder_input_ids": ids[:, :13]}

    def logits(one: Any) -> Tensor:
        with torch.no_grad():
            return one(input_ids=ids, use_cache=False, **arguments).logits.double()

    before = logits(model)
    patch_model(model, "nope")
    exact: Any = copy.deepcopy(model)
    if model_type != "xglm":  # whose code fails in float64
        exact.double()
    exact.set_attn_implementation("eager")
    rounding = relative_difference(logits(model), logits(exact))  # 4e-4 in XLM's 2,048 features
    with _AddedBeforeSoftmax():
        expected = logits(exact)
    patch_model(model, "alibi", replace=True)
    assert relative_difference(logits(model), expected) < max(1e-5, 2 * rounding)
    assert relative_difference(logits(exact), expected) > 1e-3
    assert torch.equal(logits(unpatch_model(model)), before)


@pytest.mark.parametrize(("model_type", "method"), covering(CAUSAL, ["alibi", "fire"]))
def test_a_cache_and_left_padding_change_nothing(model_type: str, method: str) -> None:
    """Also where the text grows past the rows of the table."""
    model, ids = build_text_model(model_type), tokens(84, batch=2)
    torch.manual_seed(0)
    patch_model(model, method, target_length=100)
    whole = _run(model, ids)
    assert relative_difference(in_steps(model, ids, [10, 50, 7, 1, 16]), whole) < 1e-5
    padded = torch.cat((torch.zeros(2, 5, dtype=torch.long), ids), 1)
    mask = torch.cat((torch.zeros(2, 5, dtype=torch.long), torch.ones_like(ids)), 1)
    assert relative_difference(_run(model, padded, attention_mask=mask)[:, 5:], whole) < 1e-5


@pytest.mark.parametrize(
    ("model_type", "method"), [("gpt2", "nope"), ("ctrl", "kerple_log"), ("bart", "alibi")]
)
def test_a_patch_survives_copies_and_is_undone_to_the_bit(model_type: str, method: str) -> None:
    model, ids = build_text_model(model_type), tokens(LENGTH)
    before, weights = _run(model, ids), copy.deepcopy(model.state_dict())
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    patch_model(model, method, target_length=100)
    out = _run(model, ids)
    assert relative_difference(out, before) > 1e-2
    assert torch.equal(_run(copy.deepcopy(model), ids), out)
    assert torch.equal(_run(pickle.loads(pickle.dumps(model)), ids), out)
    assert zoo.in_force(model).method == method
    assert torch.equal(_run(unpatch_model(model), ids), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())


# MRA has `position_ids` among its weights.
@pytest.mark.parametrize(("model_type", "method"), [("opt", "kerple_log"), ("mra", "nope")])
def test_a_saved_model_keeps_its_rows_and_its_patch(
    model_type: str, method: str, tmp_path: Path
) -> None:
    model, ids = build_text_model(model_type), tokens(100)
    (name,) = (name for name, _ in model.named_parameters() if "position" in name)
    rows = model.get_parameter(name).detach().clone()
    out = _run(patch_model(model, method, target_length=128), ids)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert relative_difference(_run(loaded.eval(), ids), out) < 1e-6
    assert torch.equal(loaded.get_parameter(name), rows)
    patch = zoo.in_force(loaded)
    assert patch.extended_length == 128
    assert str(patch.config) == f"{method}(target_length=128)"


def test_gradients_reach_the_trained_bias_and_the_weights() -> None:
    model, ids = build_text_model("gpt2"), tokens(LENGTH)
    torch.manual_seed(0)
    patch_model(model, "kerple_log")
    model(input_ids=ids).logits.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(
        g is not None and bool(g.any()) for name, g in grads.items() if name.endswith(("r1", "r2"))
    )
    assert grads["transformer.wte.weight"] is not None
    assert grads["transformer.wpe.weight"] is None  # its rows are not read


@pytest.mark.parametrize("model_type", ["gpt2", "bart"])
def test_a_text_longer_than_the_silenced_table_is_refused(model_type: str) -> None:
    model = patch_model(build_text_model(model_type), "nope")
    assert torch.isfinite(_run(model, tokens(64))).all()
    with pytest.raises(PosencError, match=r"65 tokens: .* target_length of at least 65"):
        _run(model, tokens(65))


@pytest.mark.parametrize(
    ("model_type", "method", "words"),
    [
        (
            "bert",
            "t5",
            "reads the text in both directions, and t5 is defined for keys .* Defined for both: alibi",
        ),
        ("layoutlm", "t5", "reads the text in both directions"),  # which its mask alone tells
        ("fsmt", "alibi", "cannot be run alone, so alibi cannot be tried on both"),
        ("gpt2", ALiBi(keep_rope=True), "keep_rope keeps a rotation, and GPT2LMHeadModel has none"),
        (
            "gpt2",
            "rerope",
            "has no rotary embedding. Positions come from a learned table transformer.wpe.weight",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    model_type: str, method: Any, words: str
) -> None:
    model, ids = build_text_model(model_type), tokens(9)
    before = _run(model, ids)
    with pytest.raises(PosencError, match=words):
        patch_model(model, method)
    assert torch.equal(_run(model, ids), before)


@pytest.mark.filterwarnings("error::hf_posenc.errors.UntrainedWarning")
def test_a_refused_method_warns_of_nothing() -> None:
    with pytest.raises(UnsupportedModelError, match="in both directions"):
        patch_model(build_text_model("bert"), "fire")


@pytest.mark.parametrize(
    ("method", "options", "length"),
    [
        ("nope", {}, 64),
        ("nope", {"target_length": 100}, 100),
        ("fire", {"target_length": 100}, 100),
        ("alibi", {"scale": 2}, 128),
        ("alibi", {"scale": 2, "target_length": 100}, 100),
        ("t5", {"scale": 2}, 128),
    ],
)
def test_the_length_is_that_of_the_target_or_the_scale(
    method: str, options: dict[str, Any], length: int
) -> None:
    model = patch_model(build_text_model("gpt2", n_layer=1), method, **options)
    assert zoo.in_force(model).extended_length == length
    assert torch.isfinite(_run(model, tokens(length))).all()
    with pytest.raises(PosencError, match=f"{length + 1} tokens: the patched tables"):
        _run(model, tokens(length + 1))


@pytest.mark.parametrize("method", ["alibi", "nope", "kerple_log"])
def test_a_method_in_the_place_of_a_table_warns_that_it_needs_training(method: str) -> None:
    with pytest.warns(UntrainedWarning, match="before its output means anything") as warned:
        patch_model(build_text_model("gpt2", n_layer=1), method)
    assert [each.filename for each in warned] == [__file__]
