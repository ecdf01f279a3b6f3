"""A bias, or no position at all, in the place of a table of positions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

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
from tests.support.selection import covering, late
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
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    means = {name: tensors[name][start:].mean(0) for name in names}
    other.load_state_dict({k: v for k, v in weights.items() if k not in names}, strict=False)
    for name, row in means.items():
        table = {**dict(other.named_parameters()), **dict(other.named_buffers())}[name]
        assert len(table) == length + start
        table.data[:] = row
    return other


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

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = args[0] if args else None
        if func.__name__ == "softmax" and isinstance(scores, Tensor):
            queries, keys = scores.shape[-2:]
            if queries == keys:
                heads = scores.shape[1] if scores.dim() == 4 else scores.shape[0] // 2  # two texts
                distance = (torch.arange(queries)[:, None] - torch.arange(keys)).abs().double()
                slopes = 2.0 ** (-8 * torch.arange(1, heads + 1).double() / heads) / self.scale
                bias = -slopes[:, None, None] * distance
                bias = bias.repeat(2, 1, 1) if scores.dim() == 3 else bias
                args = (scores + bias.to(scores.dtype), *args[1:])
        return func(*args, **(kwargs or {}))


EVERY = tuple(dict.fromkeys((*TABLES, *OWN_CODE, *MORE_OWN_CODE)))


@pytest.mark.parametrize(
    ("model_type", "length", "scale"),
    [
        *((kind, 20, 1.0) for kind in ("bert", "openai-gpt", "mvp", "deberta")),
        *(("gpt2", LONG, 1.0), ("bart", LONG, 3.0)),
        *late(EVERY, [20], [1.0]),
        *late([kind for kind in TABLES if kind != "roberta"], [LONG], [3.0]),
    ],
)
def test_alibi_equals_a_float64_reference(model_type: str, length: int, scale: float) -> None:
    """Also past the rows of the table, with the slopes of the paper divided by the scale; undone to the bit."""
    model = build_text_model(model_type, **OWN_CODE.get(model_type, {}))
    ids, options = torch.cat((tokens(length), tokens(length).flip(1))), dict[str, Any]()
    short, arguments = ids[:, :20], dict[str, Any]()
    if length > 64:
        options["target_length"] = length
    if model.config.is_encoder_decoder:  # attention to another text has no position
        arguments["decoder_input_ids"] = ids[:, :13]

    def logits(one: Any, ids: Tensor = ids) -> Tensor:
        with torch.no_grad():
            return one(input_ids=ids, use_cache=False, **arguments).logits.double()

    before = logits(model, short)
    patch_model(model, "nope", **options)
    exact: Any = copy.deepcopy(model)
    if model_type != "xglm":  # whose code fails in float64
        exact.double()
    exact.set_attn_implementation("eager")
    rounding = relative_difference(logits(model), logits(exact))  # 4e-4 in XLM's 2,048 features
    with _AddedBeforeSoftmax(scale):
        expected = logits(exact)
    patch_model(model, ALiBi(scale=scale), replace=True, **options)
    assert relative_difference(logits(model), expected) < max(1e-5, 2 * rounding)
    assert relative_difference(logits(exact), expected) > 1e-3
    assert torch.equal(logits(unpatch_model(model), short), before)


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
    pieces = in_steps(model, padded, [15, 50, 7, 1, 16], attention_mask=mask)
    assert relative_difference(pieces[:, 5:], whole) < 1e-5


# MRA has `position_ids` among its weights.
@pytest.mark.parametrize(("model_type", "method"), [("opt", "kerple_log"), ("mra", "nope")])
def test_a_saved_model_keeps_rows_and_patch(model_type: str, method: str, tmp_path: Path) -> None:
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
    assert all(g is not None and g.any() for n, g in grads.items() if n.endswith(("r1", "r2")))
    assert grads["transformer.wte.weight"] is not None
    assert grads["transformer.wpe.weight"] is None  # its rows are not read


@pytest.mark.parametrize(
    ("model_type", "method", "words"),
    [
        ("bert", "t5", "both directions, and t5 is defined for keys .* Defined for both: alibi"),
        ("layoutlm", "t5", "reads the text in both directions"),  # which its mask alone tells
        ("fsmt", "alibi", "cannot be run alone, so alibi cannot be tried on both"),
        ("gpt2", ALiBi(keep_rope=True), "keep_rope keeps a rotation, and GPT2LMHeadModel has none"),
        (
            "gpt2",
            "rerope",
            "no rotary embedding. Positions come from a learned table transformer.w",
        ),
    ],
)
def test_what_is_refused_changes_nothing(model_type: str, method: Any, words: str) -> None:
    zoo.refused(build_text_model(model_type), words, method)


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
def test_the_length_of_target_or_scale(method: str, options: dict[str, Any], length: int) -> None:
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
