"""Attention in code of a module's own, handed to the engine: compared with formulas in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc import PosencError, UnsupportedModelError, inspect_rope, patch_model, unpatch_model
from hf_posenc.attention.encoding import Encoding
from hf_posenc.evaluation.scoring.decoder import position_limit
from hf_posenc.methods import ALiBi, LogN, ReRoPE, YaRN
from hf_posenc.model.attention import Layer
from hf_posenc.model.forward import Forward
from hf_posenc.seams.handover import hand_over, search, take_back
from tests.support import attention_references as naive
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL, randomise
from tests.support.attention_ways import WAYS, natively
from tests.support.selection import late

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")
LENGTH = 24

# Types whose attention modules compute scores themselves: queries, keys and values, the pairs, and the output.


def _linear(layer: Any, x: Tensor) -> Tensor:
    bias = getattr(layer, "bias", None)
    return x @ layer.weight.T + (0 if bias is None else bias)


def _separate(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    names = (
        ("q_proj", "k_proj", "v_proj") if hasattr(module, "q_proj") else ("query", "key", "value")
    )
    return tuple(_linear(getattr(module, name), x).unflatten(-1, (4, 16)) for name in names)


def _codegen(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Four blocks, each with its queries, values and keys."""
    blocks = _linear(module.qkv_proj, x).unflatten(-1, (4, 3, 16))
    return blocks[:, :, 0], blocks[:, :, 2], blocks[:, :, 1]


def _falcon(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    fused = _linear(module.query_key_value, x)
    if module.new_decoder_architecture:
        groups = fused.unflatten(-1, (module.num_kv_heads, -1, 16))
        count = groups.shape[2] - 2
        key, value = (groups[:, :, at, None].expand(-1, -1, count, -1) for at in (-2, -1))
        return groups[:, :, :-2].flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2)
    if module.multi_query:
        heads = fused.unflatten(-1, (6, 16))
        return heads[:, :4], heads[:, 4:5].expand(-1, 4, -1), heads[:, 5:].expand(-1, 4, -1)
    heads = fused.unflatten(-1, (4, 3, 16))
    return heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]


def _japanese(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    return _linear(module.query_key_value, x).unflatten(-1, (4, 48)).split(16, -1)


@dataclass(frozen=True)
class Own:
    """How the reference computes a type: what a module projects, its rotated features, their pairs, its last layer."""

    split: Callable[[Any, Tensor], tuple[Tensor, ...]]
    last: str = ""  # none in the module
    rotated: int = 16
    interleaved: bool = False
    fields: tuple[tuple[str, Any], ...] = ()

    def build(self, name: str) -> PreTrainedModel:
        return zoo.build(name.partition(" ")[0], **dict(self.fields))


TYPES = {
    "gptj": Own(_separate, "out_proj", rotated=8, interleaved=True),
    "codegen": Own(_codegen, "out_proj", rotated=8, interleaved=True),
    "gpt_neox_japanese": Own(_japanese, "dense"),
    "roformer": Own(_separate, interleaved=True),
    "falcon": Own(_falcon, "dense"),
    "falcon multi query": Own(
        _falcon, "dense", fields=(("multi_query", True), ("new_decoder_architecture", False))
    ),
    "falcon all heads": Own(
        _falcon,
        "dense",
        fields=(("multi_query", False), ("new_decoder_architecture", False), ("num_kv_heads", 4)),
    ),
}
METHODS = (
    *("rerope", "self_extend", "alibi", "kerple_log", "t5", "log_n"),
    *("leaky_rerope", "alibi_keep_rope"),
)


def patch(model: PreTrainedModel, name: str) -> PreTrainedModel:
    case = CASES[name]
    patch_model(
        model, case.method, layers="all", original_max_position_embeddings=ORIGINAL, **case.options
    )
    randomise(model)
    return model


def attention_modules(model: nn.Module) -> list[nn.Module]:
    kinds = ("GPTJ", "CodeGen", "Falcon", "GPTNeoXJapanese", "RoFormerSelf")
    names = {f"{kind}Attention" for kind in kinds}
    return [module for module in model.modules() if type(module).__name__ in names]


def reference(own: Own, model: PreTrainedModel, name: str) -> PreTrainedModel:
    """A twin in float64, of which every attention module computes all pairs by the formulas of the method's paper."""
    twin = zoo.twin(model).double()
    patched = attention_modules(model)
    for module in twin.modules():
        if isinstance(module, nn.Embedding) and "Sinusoidal" in type(module).__name__:
            vars(module)["forward"] = lambda shape, past=0: torch.zeros(shape[1], 16)
    for module, source in zip(attention_modules(twin), patched, strict=True):
        trained = dict(getattr(source, "posenc", nn.Module()).named_parameters())
        values = {each: value.detach().double() for each, value in trained.items()}

        def forward(*args: Any, module: Any = module, values: Any = values, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            out = torch.stack([_attended(own, module, name, values, row) for row in hidden])
            out = _linear(getattr(module, own.last), out) if own.last else out
            return (out, None, module.dense_bias) if hasattr(module, "dense_bias") else (out, None)

        vars(module)["forward"] = forward
    return twin


def _attended(own: Own, module: Any, name: str, trained: dict[str, Tensor], x: Tensor) -> Tensor:
    query, key, value = (each.transpose(0, 1) for each in own.split(module, x))
    heads, length, width = query.shape
    case = CASES[name]
    position = torch.arange(length, dtype=torch.float64)
    relative = position[:, None] - position
    future, both = relative < 0, not getattr(module, "is_decoder", True)
    if case.relative is not None:
        relative = naive.position_map(case.method, length, **case.relative).nan_to_num()
        relative = relative - relative.T  # of a later key, the opposite of the mirrored pair's
    if case.rotates:
        half = own.rotated // 2
        q, k = (_complex(own, each) for each in (query, key))
        angles = relative[..., None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = q[:, :, None] * k[:, None].conj() * torch.polar(torch.ones_like(angles), angles)
        rest = query[..., own.rotated :] @ key[..., own.rotated :].transpose(1, 2)
        scores = turned.real.sum(-1) + rest
    else:
        scores = query @ key.transpose(1, 2)
    if case.law:
        law = naive.TEMPERATURES[case.law]
        factor = [law(m, ORIGINAL, **case.law_knobs) for m in range(length)]
        scores = scores * torch.tensor(factor, dtype=torch.float64)[:, None]
    if "query_scale" in trained:
        scores = scores * trained["query_scale"][:, None, None]
    scores = scores / math.sqrt(width)
    if case.bias is not None:
        values = {**case.bias, **naive.as_numbers(trained)}
        bias = naive.bias_matrix(case.method, length, heads, **values).masked_fill(future, 0.0)
        scores = scores + bias + bias.tril(-1).transpose(1, 2)
    weights = (scores if both else scores.masked_fill(future, -math.inf)).softmax(-1)
    return (weights @ value).transpose(0, 1).flatten(1)


def _complex(own: Own, x: Tensor) -> Tensor:
    part = x[..., : own.rotated]
    if own.interleaved:
        return torch.complex(part[..., ::2], part[..., 1::2])
    return torch.complex(*part.chunk(2, -1))


def check(kind: str, name: str, length: int = LENGTH) -> None:
    own = TYPES[kind]
    model, ids = own.build(kind), zoo.tokens(length)
    before = zoo.logits(model, ids[:, :LENGTH])
    patch(model, name)
    other = reference(own, model, name)
    # Transformers 5.24 still looks rows up that the formulas do not read.
    for module in other.modules():
        if isinstance(table := getattr(module, "embed_positions", None), Tensor):
            module.embed_positions = table.new_zeros(length, table.shape[1])
    assert zoo.relative_difference(zoo.logits(model, ids), zoo.logits(other, ids)) < 1e-5
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, ids[:, :LENGTH]), before)


@pytest.mark.parametrize(("kind", "name"), [("gptj", "self_extend"), *late(TYPES, METHODS)])
def test_equals_the_formulas(kind: str, name: str) -> None:
    check(kind, name)


@pytest.mark.parametrize("kind", ["roformer", *late(TYPES)])
def test_plain_rotation_gives_the_logits_of_the_model(kind: str) -> None:
    model, ids = TYPES[kind].build(kind), zoo.tokens(LENGTH)
    before, modules = zoo.logits(model, ids), [dict(vars(module)) for module in model.modules()]
    patch_model(model, "sliding_window", window=LENGTH, layers="all")
    assert zoo.relative_difference(zoo.logits(model, ids), before) < 1e-5
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, ids), before)
    assert [set(vars(module)) for module in model.modules()] == [set(each) for each in modules]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaky_rerope", "t5"])
@pytest.mark.parametrize("kind", ["gptj", "codegen", "roformer"])
def test_texts_longer_than_the_table(kind: str, name: str) -> None:
    """The model's own table has 64 rows; it grows as the text does."""
    check(kind, name, length=150)
    model = patch(zoo.build(kind), name)
    assert position_limit(model) is None
    unpatch_model(model)
    assert position_limit(model) == 64


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["self_extend", "alibi", "dynamic_ntk_row"])
@pytest.mark.parametrize("kind", TYPES)
def test_every_way_to_run_a_text(kind: str, name: str, way: Callable[..., Tensor]) -> None:
    model, ids = TYPES[kind].build(kind), zoo.tokens(40)
    error = natively(model, way, ids)
    if error is None:
        assert kind == "roformer"  # it takes no position_ids
        return
    if error > 1e-3:
        assert way.__name__ == "packed"  # its documents see each other
        assert kind.startswith(("falcon", "roformer"))
        return
    full = zoo.logits(patch(model, name), ids)
    if kind == "roformer" and re.search("left|both|right", way.__name__):
        with pytest.raises(PosencError, match="padding before a text counts as tokens"):
            way(model, ids)
        return
    assert zoo.relative_difference(way(model, ids), full) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rerope", "kerple_log"])
@pytest.mark.parametrize("kind", ["gptj", "falcon"])
def test_gradients_are_those_of_the_formulas(kind: str, name: str) -> None:
    own, ids = TYPES[kind], zoo.tokens(LENGTH)
    model = patch(own.build(kind), name)
    gradients = []
    for one in (model, reference(own, model, name)):
        anything: Any = one
        anything(input_ids=ids, labels=ids).loss.backward()
        gradients.append(anything.get_input_embeddings().weight.grad.double())
    assert zoo.relative_difference(*gradients) < 1e-4
    trained = [value for path, value in model.named_parameters() if ".posenc." in path]
    assert all(value.grad is not None and bool(value.grad.any()) for value in trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["self_extend", "rerope", "alibi", "kerple_log"])
def test_encoders_equal_the_formulas_by_signed_distance(name: str) -> None:
    own = replace(TYPES["roformer"], fields=(("is_decoder", False),))
    model, ids = own.build("roformer"), zoo.tokens(LENGTH)
    before = zoo.logits(model, ids)
    want = zoo.logits(reference(own, patch(model, name), name), ids)
    assert zoo.relative_difference(zoo.logits(model, ids), want) < 1e-5
    with pytest.raises(UnsupportedModelError, match="reads the text in both directions"):
        patch(unpatch_model(model), "log_n")
    assert torch.equal(zoo.logits(model, ids), before)


def test_cross_attention_is_left_alone() -> None:
    model: Any = zoo.build("roformer", add_cross_attention=True, num_hidden_layers=1)
    ids, states = zoo.tokens(LENGTH), torch.randn(1, LENGTH, 64)
    modules: list[Any] = attention_modules(model)
    given: list[Tensor] = []
    modules[1].register_forward_hook(lambda module, args, output: given.append(output[0]))
    patch(model, "rerope")
    assert ["forward" in vars(module) for module in modules] == [True, False]
    with torch.no_grad():
        model(ids, encoder_hidden_states=states)
        patched = given[-1]
        unpatch_model(model)
        model(ids, encoder_hidden_states=states)
    assert patched.shape == given[-1].shape
    assert not torch.equal(patched, given[-1])  # it gets other queries


@pytest.mark.slow
def test_compiled_code_leaves_these_modules_out() -> None:
    model, ids = patch(zoo.build("gptj"), "rerope"), zoo.tokens(LENGTH)
    full = zoo.logits(model, ids)
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert zoo.relative_difference(compiled(ids).logits.double(), full) < 1e-5
        torch._dynamo.reset()
        whole: Any = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            whole(ids)
    torch._dynamo.reset()


@pytest.mark.slow
def test_attention_weights_are_those_of_the_method() -> None:
    model, ids = patch(zoo.build("falcon"), "sliding_window"), zoo.tokens(LENGTH)
    weights = model(ids, output_attentions=True).attentions[0]
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    assert not weights[..., 8:, 0].any()
    assert weights[..., 7, 0].all()


def test_the_report_names_the_table_of_the_model() -> None:
    model = zoo.build("gptj")
    (before,) = inspect_rope(model)
    patch(model, "rerope")
    (table,) = inspect_rope(model)
    assert (table.rope_type, table.inv_freq.tolist()) == ("default", before.inv_freq.tolist())
    patch_model(model, "alibi", layers="all", replace=True)
    assert inspect_rope(model)[0].rope_type == "dropped"


# Ways to write attention, which modules have


class Written(nn.Module):
    """An attention module around a function of queries, keys, values, and a mask that is added."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        return self.function(query, key, value, mask)


def _batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As GPT-NeoX did: three dimensions, a product that is added to zeros."""
    flat = [each.reshape(-1, *each.shape[-2:]) for each in (q, k, v)]
    zeros = torch.zeros(flat[0].shape[0], q.shape[2], k.shape[2])
    scores = torch.baddbmm(zeros, flat[0], flat[1].transpose(1, 2), beta=1.0, alpha=0.25)
    scores = scores.view(*q.shape[:2], *scores.shape[1:]) + mask
    weights = nn.functional.softmax(scores.view(-1, *scores.shape[2:]), dim=-1)
    return torch.bmm(weights, flat[2]).view(v.shape)


def _biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As BLOOM: a bias of its own in the product."""
    bias = torch.arange(float(k.shape[2])).expand(q.shape[0] * q.shape[1], 1, -1) * 0.3
    flat = [each.reshape(-1, *each.shape[-2:]) for each in (q, k)]
    scores = bias.baddbmm(batch1=flat[0], batch2=flat[1].transpose(-1, -2), beta=1.0, alpha=0.25)
    scores = scores.view(*q.shape[:2], *scores.shape[1:]) + mask
    return nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def _filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)).float() / torch.tensor(4.0)
    scores = scores.masked_fill(mask[:1, :1] < 0, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, -1).to(v.dtype), v)


def _chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As GPT-Neo: `where`, and a mask besides."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = torch.where(mask[:1] == 0, scores, torch.tensor(torch.finfo(scores.dtype).min))
    scores = torch.max(scores * 0.25 + mask, torch.tensor(torch.finfo(scores.dtype).min))
    return scores.softmax(dim=-1) @ v


def _in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores += mask
    scores /= 4
    scores.masked_fill_(mask < 0, -1e9)
    return nn.Dropout(0.5).eval()(nn.Softmax(dim=-1)(scores)) @ v


def _shaped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As XLM: a mask in the shape of the scores, and weights in their dtype."""
    scores = torch.matmul(q / 4, k.transpose(2, 3))
    scores.masked_fill_((mask < 0).expand_as(scores), torch.finfo(scores.dtype).min)
    return torch.matmul(nn.functional.softmax(scores.float(), dim=-1).type_as(scores), v)


def _scaled_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As CodeGen: the mask is divided too."""
    return torch.softmax((q @ k.transpose(-1, -2) + mask) / 4, dim=-1) @ v


def _scaled_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As Falcon with ALiBi: a bias before the scale, the mask after it."""
    scores = (q @ k.transpose(-1, -2) + torch.arange(float(k.shape[2]))) * 0.25
    return torch.softmax(scores + mask, dim=-1) @ v


def _multiplied(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As OpenAI GPT: scores times ones and zeros, and large numbers where there are zeros."""
    shown = (mask >= 0).float()
    return torch.softmax((q @ k.transpose(-1, -2) / 4) * shown + -1e4 * (1 - shown), dim=-1) @ v


def _features_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As SqueezeBERT: the features of keys and values come before the tokens."""
    keys, values = (each.transpose(-1, -2).contiguous() for each in (k, v))
    weights = torch.softmax(torch.matmul(q, keys) / 4 + mask, dim=-1)
    return torch.matmul(weights, values.transpose(-1, -2))


def _with_another_term(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As DeBERTa: a second product becomes a part of the scores, by an operation that is unknown."""
    term = torch.matmul(q, k.flip(2).mT).gather(3, torch.arange(6).expand(2, 3, 6, 6))
    return torch.softmax(q @ k.transpose(-1, -2) / 4 + term + mask, dim=-1) @ v


def _zeroed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Zeros that are no mask: nothing hides the pairs."""
    return torch.softmax((q @ k.transpose(-1, -2)) * (mask >= 0) + mask / 1e38, dim=-1) @ v


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(5 * torch.tanh(q @ k.transpose(-1, -2) / 20) + mask, dim=-1) @ v


def _permuted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2) / 4).permute(0, 1, 2, 3) + mask, dim=-1) @ v


def _reweighted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(-1, -2) / 4 + mask, dim=-1)
    return (weights * torch.tensor([0.5, 1.0, 2.0])[:, None, None]) @ v


def _returned(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2)


KNOWN = (
    *(_batched, _biased, _filled, _chosen, _in_place, _shaped, _scaled_after, _scaled_bias),
    *(_multiplied, _features_first, _with_another_term),
)
UNKNOWN = (_capped, _permuted, _returned, _zeroed)


HERE = Forward(torch.arange(6)[None])
"""The record of a forward over six tokens, which a decoder hands to its modules."""


def arguments() -> tuple[Tensor, ...]:
    """Queries, keys and values, and the mask of two rows, of which the second is padded on the left."""
    q, k, v = torch.randn(3, 2, 3, 6, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.full((2, 1, 6, 6), torch.finfo(torch.float32).min).triu(1)
    mask[1, :, 2:, :2] = torch.finfo(torch.float32).min
    return q, k, v, mask


@pytest.mark.parametrize("function", [*KNOWN, *UNKNOWN, _reweighted])
def test_ways_to_write_attention(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The known ones reach the attention function once; all give what they gave."""
    module, given = Written(function), arguments()
    want, calls = module(*given), list[Any]()
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", counted)
    found = search(module, lambda: module(*given))
    assert bool(found.modules) == (function not in UNKNOWN)
    made_real = function in (*UNKNOWN, _with_another_term) and function is not _returned
    assert bool(found.operations) == made_real
    assert not found.both_directions
    found.modules = found.modules or [module]
    hand_over(found)
    got = module(*given)
    assert type(got) is Tensor
    rows = slice(None, None) if function in (*UNKNOWN, _reweighted) else slice(2, None)
    assert torch.allclose(got[:, :, rows], want[:, :, rows], atol=1e-5)
    assert len(calls) == (function in (*KNOWN, _reweighted))
    take_back(module)
    assert torch.equal(module(*given), want)


def test_attention_without_a_mask_sees_both_directions() -> None:
    def encoder(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v

    module = Written(encoder)
    assert search(module, lambda: module(*arguments())).both_directions == [module]


@pytest.mark.parametrize("texts_first", [True, False])
def test_heads_and_texts_in_one_axis_are_told_apart(texts_first: bool) -> None:
    """As in MVP, without a mask: the head of a row is known only where the texts come first."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if not texts_first:
            q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        flat = [each.reshape(-1, *each.shape[-2:]) for each in (q, k, v)]
        weights = torch.softmax(torch.bmm(flat[0], flat[1].transpose(1, 2)), dim=-1)
        return torch.bmm(weights, flat[2])

    module, given = Written(attention), arguments()
    same = [each[:1].expand(2, -1, -1, -1) for each in given]
    found = search(module, lambda: module(*same))
    assert bool(found.modules) == texts_first
    if texts_first:
        hand_over(found)
        heads = replace(Encoding.of([ALiBi()], 8), heads=3, bidirectional=True)
        Layer(heads, patched=True).attach(module)
        q, k, v, _ = given
        bias = ALiBi().bias((torch.arange(6.0)[:, None] - torch.arange(6.0)).abs(), 3, {})
        want = torch.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v
        assert torch.allclose(module(*given, posenc=HERE), want.flatten(0, 1), atol=1e-5)


def test_real_scores_beside_those_that_are_followed_are_refused_as_weights() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return _capped(q, k, v, mask) + _scaled_after(q, k, v, mask)

    module, given = Written(function), arguments()
    hand_over(search(module, lambda: module(*given)))
    Layer(replace(Encoding.of([ALiBi()], 8), heads=3), patched=True).attach(module)
    with pytest.raises(PosencError, match="Written applies tanh to its attention scores"):
        module(*given, posenc=HERE)


def _with_attention(monkeypatch: pytest.MonkeyPatch, model: nn.Module, change: Any) -> None:
    kind: Any = type(attention_modules(model)[0])

    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
        weights = change(torch.matmul(query, key.transpose(-1, -2)) / query.shape[-1] ** 0.5 + mask)
        return torch.matmul(weights, value), weights

    monkeypatch.setattr(kind, "_attn", attend)


def test_weights_that_are_changed_are_those_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = patch(zoo.build("gpt_neox_japanese"), "alibi"), zoo.tokens(LENGTH)
    full = zoo.logits(model, ids)
    _with_attention(monkeypatch, model, lambda scores: scores.softmax(-1).square().sqrt())
    assert zoo.relative_difference(zoo.logits(model, ids), full) < 1e-5


def test_scores_that_are_changed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At patch time; and in the forward, where only that meets them."""
    model, ids = zoo.build("gpt_neox_japanese"), zoo.tokens(LENGTH)
    patch(model, "alibi")
    _with_attention(monkeypatch, model, lambda scores: (scores.tanh() * 2).softmax(-1))
    with pytest.raises(PosencError, match="Attention applies tanh to its attention scores"):
        zoo.logits(model, ids)
    unpatch_model(model)
    before = zoo.logits(model, ids)
    with pytest.raises(UnsupportedModelError, match=r"own code, .* follow \(it applies tanh"):
        patch_model(model, "alibi")
    assert torch.equal(zoo.logits(model, ids), before)


def test_attention_that_is_not_found_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward in which no product of queries and keys is seen, by a module that was tried."""
    model, ids = patch(zoo.build("gpt_neox_japanese"), "alibi"), zoo.tokens(LENGTH)
    kind: Any = type(attention_modules(model)[0])

    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
        return nn.functional.scaled_dot_product_attention(query, key, value, mask), None

    monkeypatch.setattr(kind, "_attn", attend)
    with pytest.raises(PosencError, match="Attention applies operations that are unknown"):
        zoo.logits(model, ids)


def test_a_parameter_that_is_added_may_change() -> None:
    """Masks are read once for all layers; what is no argument of the module is read in every forward."""
    bias = nn.Parameter(torch.zeros(1, 3, 6, 6))

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) + bias, dim=-1) @ v

    module, given = Written(function), arguments()
    hand_over(search(module, lambda: module(*given)))
    Layer(Encoding(original=8, heads=3, method=None, query=LogN()), patched=True).attach(module)
    outputs = []
    for _ in range(2):
        outputs.append(module(*given, posenc=HERE).detach())
        with torch.no_grad():
            bias[..., 0] = 50.0
    assert not torch.allclose(*outputs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptj", "falcon"])
def test_a_scaled_table_beside_a_method(kind: str) -> None:
    """Within the window of ReRoPE, the text is that of the scaled table alone."""
    model, ids = zoo.build(kind), zoo.tokens(LENGTH)
    alone = zoo.logits(patch_model(zoo.build(kind), "yarn", scale=2), ids)
    patch_model(model, [YaRN(scale=2), ReRoPE(window=LENGTH)])
    assert zoo.relative_difference(zoo.logits(model, ids), alone) < 1e-5
    assert inspect_rope(model)[0].rope_type == "yarn"
