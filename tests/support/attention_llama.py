"""A Llama in float64, written from its formulas, with attention scores from the papers: the naive L x L reference.

Nothing of the package is used but `trainable` of its classes. `CASES` names every method of the attention path with
knobs that matter on short texts; `reference` evaluates a patched model's own weights, and the parameters its method
trains, the slow way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.methods import get_method
from tests.support import attention_references as naive
from tests.support import references

ORIGINAL = 16
"""The context length, in tokens, that every case takes the models to be trained on."""


@dataclass(frozen=True)
class Case:
    """A method with its options, in the words of `patch_model` and in those of the references."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)  # for `patch_model`
    relative: Mapping[str, Any] | None = None  # the knobs of `naive.RELATIVE`, all of them
    bias: Mapping[str, Any] | None = None  # the knobs of `naive.BIAS`; parameters join them
    table: tuple[str, Mapping[str, Any]] = ("default", {})  # a frequency method beside it
    law: str = ""  # of `naive.TEMPERATURES`, by which queries are scaled
    law_knobs: Mapping[str, Any] = field(default_factory=dict)
    bias_of: str = ""  # whose bias, of a method beside this one that keeps the rotation

    @property
    def rotates(self) -> bool:
        trained = self.method in ("shaw", "transformer_xl")
        drops = trained or (self.bias is not None and not self.bias_of)
        return not drops or bool(self.options.get("keep_rope"))


def _bands(name: str, **knobs: Any) -> Case:
    return Case(name, knobs, relative=knobs)


_LISTS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
_ROW = {"update": "row", "bucket": 8}

CASES: dict[str, Case] = {
    **{name: _bands(name, **bands.short) for name, bands in naive.BANDS.items()},
    **{name: Case(name, bias={}) for name in naive.BIAS},
    "rerope_log_n": Case("rerope", {"window": 8, "log_n": True}, {"window": 8}, law="log_n"),
    "alibi_keep_rope": Case("alibi", {"keep_rope": True, "scale": 2.0}, bias={"scale": 2.0}),
    "sandwich": Case("sandwich", {"dim": 16}, bias={"dim": 16}),
    "sandwich_first": Case("sandwich", {"dim": 16, "first": 0}, bias={"dim": 16, "first": 0}),
    "kerple_log_shared": Case("kerple_log", {"shared": True}, bias={}),
    "transformer_xl_shared": Case("transformer_xl", {"shared": True}),
    "t5": Case("t5", {"buckets": 8, "max_distance": 24}, bias={"buckets": 8, "max_distance": 24}),
    "t5_keep_rope": Case("t5", {"keep_rope": True}, bias={}),
    "fire": Case("fire", {"hidden": 6, "threshold": 12.0}, bias={}),
    "shaw": Case("shaw", {"max_distance": 6}),
    "shaw_keep_rope": Case("shaw", {"max_distance": 6, "keep_rope": True}),
    "transformer_xl": Case("transformer_xl"),
    "transformer_xl_keep_rope": Case("transformer_xl", {"keep_rope": True}),
    "dpe": Case("dpe", {"factors": [2, 1, 4, 3], "window": 8}),
    "jet_long": Case("jet_long", {"window": 6, "bucket": 8}),
    "xpos": Case("xpos", {"scale_base": 12}),
    "rope_bias": Case("rope_bias"),
    "log_n": Case("log_n", law="log_n"),
    **{
        f"temperature_{law}": Case("temperature", {"law": law, **knobs}, law=law, law_knobs=knobs)
        for law, knobs in naive.LAW_KNOBS.items()
    },
    **{
        f"{name}_row": Case(name, {**knobs, **_ROW}, table=(name, knobs))
        for name, knobs in (
            *(("dynamic_ntk", {"scale": 2.0}), ("dynamic_yarn", {})),
            ("longrope", {"scale": 4.0, **_LISTS}),
        )
    },
}

FORMS = (
    *("rerope", "dual_chunk", "attention_sinks", "alibi_keep_rope", "kerple_log", "t5"),
    *("transformer_xl_keep_rope", "xpos", "rope_bias", "log_n", "dynamic_ntk_row", "jet_long"),
)
"""A case for every path through the engine: other cases of a path differ by the numbers of the method."""

PLAIN = Case("default")
"""RoPE itself."""
TRAINABLE = tuple(
    name for name, case in CASES.items() if get_method(case.method)(**case.options).trainable
)


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if ".posenc." in name}


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Moves trainable parameters away from their initial values, many of which are zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in parameters_of(model).items():
        if value.numel() == 1 or name.endswith((".r1", ".r2")):  # positive ones
            value.data.copy_(0.2 + 0.6 * torch.rand(value.shape, generator=generator))
        else:
            value.data.copy_(0.4 * torch.randn(value.shape, generator=generator))


def reference(
    model: nn.Module,
    case: Case | Mapping[int, Case],
    ids: Tensor,
    weights: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Logits of a Llama with this method, shape (1, length, vocabulary), float64.

    Nothing of the patched model is read but its config and its weights, or those given. Where layers differ, `case` is
    by layer, and the others are plain.
    """
    config: Any = model.config
    named = model.state_dict() if weights is None else weights
    values = {name: value.detach().double() for name, value in named.items()}
    hidden = values["model.embed_tokens.weight"][ids[0]]
    length, width = len(ids[0]), config.head_dim
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return values[name] * x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()

    for layer in range(config.num_hidden_layers):
        path = f"model.layers.{layer}"

        def linear(x: Tensor, name: str, path: str = path) -> Tensor:
            return x @ values[f"{path}.{name}.weight"].T

        def split(x: Tensor, count: int) -> Tensor:
            return x.view(length, count, width).transpose(0, 1)

        x = norm(hidden, f"{path}.input_layernorm.weight")
        query = split(linear(x, "self_attn.q_proj"), heads)
        keys = split(linear(x, "self_attn.k_proj"), key_heads)
        value = split(linear(x, "self_attn.v_proj"), key_heads)
        trained = {
            name.rpartition(".")[2]: tensor
            for name, tensor in values.items()
            if name.startswith((f"{path}.self_attn.posenc.", "model.posenc."))
        }
        own = case if isinstance(case, Case) else case.get(layer, PLAIN)
        table = _scores(own, trained, query, keys, config.rope_parameters["rope_theta"])
        weight = table.masked_fill(future, -math.inf).softmax(-1)
        out = weight @ value.repeat_interleave(heads // key_heads, 0)
        hidden = hidden + linear(out.transpose(0, 1).reshape(length, -1), "self_attn.o_proj")
        x = norm(hidden, f"{path}.post_attention_layernorm.weight")
        gate = nn.functional.silu(linear(x, "mlp.gate_proj"))
        hidden = hidden + linear(gate * linear(x, "mlp.up_proj"), "mlp.down_proj")
    return (norm(hidden, "model.norm.weight") @ values["lm_head.weight"].T)[None]


def _scores(
    case: Case, trained: Mapping[str, Tensor], query: Tensor, key: Tensor, theta: float
) -> Tensor:
    """Shape (heads, length, length), float64; masked where a method hides a pair, but not the future."""
    heads, length, width = query.shape
    groups = heads // key.shape[0]
    if "a" in trained:
        query = query + trained["a"][:, None]
        key = key + trained["b"][:, None]
    key = key.repeat_interleave(groups, 0)
    position = torch.arange(length, dtype=torch.float64)
    relative = position[:, None] - position[None]
    if case.method in _GROWING:
        given = {k: knob for k, knob in case.options.items() if k not in ("text", "bucket")}
        relative = torch.zeros(length, length, dtype=torch.float64)
        for m, text in enumerate(_texts(case, length)):
            of_text = _GROWING[case.method](text, min(length, text), **given)
            relative[m, : m + 1] = of_text[m, : m + 1]
    if case.relative is not None:
        relative = _relative(case.method, length, tuple(case.relative.items()))
    content = query + trained["u"][:, None] if "u" in trained else query
    plain = content @ key.transpose(1, 2)
    scores = _rotated(case, content, key, relative, theta) if case.rotates else plain
    distance = (position[:, None] - position[None]).clamp(min=0)
    if case.method == "shaw":
        rows = trained["table"][distance.long().clamp(max=len(trained["table"]) - 1)]
        scores = scores + torch.einsum("hmd,mnd->hmn", query, rows)
    if case.method == "transformer_xl":
        steps = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = distance[..., None] * 10_000.0**-steps
        sinusoid = torch.cat((angles.sin(), angles.cos()), -1)
        embedded = torch.einsum("hde,mne->hmnd", trained["weight"], sinusoid)
        scores = scores + torch.einsum("hmd,hmnd->hmn", query + trained["v"][:, None], embedded)
    if case.law:
        law, knobs = naive.TEMPERATURES[case.law], case.law_knobs
        factor = [law(m, ORIGINAL, **knobs) for m in range(length)]
        scores = scores * torch.tensor(factor, dtype=torch.float64)[:, None]
    if "query_scale" in trained:
        scores = scores * trained["query_scale"][:, None, None]
    scores = scores / math.sqrt(width)
    if case.bias is not None:
        scores = scores + _bias(case, trained, heads, length)
    return scores.masked_fill(relative.isnan(), -math.inf)


def _texts(case: Case, length: int) -> Sequence[int]:
    """The length in force for each query: the option `text`, one or for each its own, else by whole buckets."""
    if "text" in case.options:
        text = case.options["text"]
        return [text] * length if isinstance(text, int) else list(text)
    if case.method == "lampe":
        return [length] * length
    bucket = case.options.get("bucket", 1)
    return [ORIGINAL + math.ceil(max(0, m + 1 - ORIGINAL) / bucket) * bucket for m in range(length)]


def _rotated(case: Case, query: Tensor, key: Tensor, relative: Tensor, theta: float) -> Tensor:
    """`q R(relative) k`, with the frequencies of each query, shape (heads, length, length)."""
    _, length, width = query.shape
    name, options = case.table
    tables = []
    for reach in _texts(case, length):
        tables.append(getattr(references, name)(width, theta, ORIGINAL, reach, **options))
    frequencies = torch.tensor([table for table, _ in tables], dtype=torch.float64)
    factor = torch.tensor([factor for _, factor in tables], dtype=torch.float64)
    scores = torch.zeros(len(query), length, length, dtype=torch.float64)
    gap = relative.nan_to_num()
    for i in range(width // 2):
        if case.method == "dpe":
            gap = _dpe(length, i, width // 2, **case.options)
        q = torch.complex(query[..., i], query[..., i + width // 2])
        k = torch.complex(key[..., i], key[..., i + width // 2])
        angle = gap * frequencies[:, i, None]
        part = (q[:, :, None] * k[:, None].conj() * torch.polar(torch.ones_like(angle), angle)).real
        if case.method == "xpos":
            decay = (2 * i / width + 0.4) / 1.4
            part = part * decay ** (gap.clamp(min=0) / case.options["scale_base"])
        scores += part
    return scores * factor.square()[:, None]


def _dpe(length: int, pair: int, pairs: int, factors: list[int], window: int) -> Tensor:
    """The relative positions of one pair (arXiv 2504.18857): SelfExtend's, by the group size of its part."""
    group = factors[pair * len(factors) // pairs]
    return _relative("self_extend", length, (("window", window), ("group", group)))


_GROWING = {
    "lampe": functools.cache(naive.lampe),
    "jet_long": functools.cache(functools.partial(naive.jet_long, ORIGINAL)),
}


@functools.cache
def _relative(name: str, length: int, knobs: tuple[tuple[str, Any], ...]) -> Tensor:
    return naive.position_map(name, length, **dict(knobs))


def _bias(case: Case, trained: Mapping[str, Tensor], heads: int, length: int) -> Tensor:
    """Shape (heads, length, length); anything where n > m."""
    values = {**(case.bias or {}), **naive.as_numbers(trained)}
    if case.method == "fire":
        (values["c"],), (multiplier,) = values["c"], values.pop("multiplier")
        values["threshold"] = case.options["threshold"] * multiplier
        return naive.bias_matrix("fire", length, heads, **values)
    by_distance = torch.tensor(
        [naive.BIAS[case.bias_of or case.method](r, r, heads, **values) for r in range(length)],
        dtype=torch.float64,
    )
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    return by_distance[distance.clamp(min=0)].permute(2, 0, 1)
