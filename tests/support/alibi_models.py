"""Models with ALiBi, and their forwards written from the papers in float64, for references."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import FalconConfig, FalconForCausalLM, PreTrainedModel

from tests.support.families import build_text_model
from tests.support.zoo import _ready

BUILDERS = ("bloom", "mpt", "falcon", "falcon_eager")


def build_alibi_model(name: str, heads: int = 4) -> PreTrainedModel:
    """Build a tiny model with ALiBi and a config object of its own: bloom, mpt, falcon (sdpa) or falcon_eager."""
    if not name.startswith("falcon"):
        sizes = ("n_heads", "d_model") if name == "mpt" else ("n_head", "hidden_size")
        overrides: dict[str, Any] = dict(zip(sizes, (heads, 16 * heads), strict=True))
        return build_text_model(name, **({} if heads == 4 else overrides))
    config = FalconConfig(
        vocab_size=128, hidden_size=16 * heads, num_hidden_layers=2, num_attention_heads=heads, alibi=True,
        new_decoder_architecture=False, multi_query=False, max_position_embeddings=64,
    )  # fmt: skip
    attention = "eager" if name.endswith("eager") else "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _ready(FalconForCausalLM._from_config(config, attn_implementation=attention))


def slopes_of(heads: int) -> list[float]:
    """Return ALiBi's slopes as the code of Press et al. computes them (fairseq/models/transformer.py)."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**index for index in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return slopes_of(closest) + slopes_of(2 * closest)[0::2][: heads - closest]


def reference_logits(model: Any, ids: Tensor, scale: float = 1.0, log: bool = False) -> Tensor:
    """Return the logits of one text by a forward in float64, shape (1, tokens, vocabulary); `log`: of ln(1 + r)."""
    model = copy.deepcopy(model).double()
    body, kind = model.transformer, model.config.model_type
    with torch.no_grad():
        hidden = (body.wte if kind == "mpt" else body.word_embeddings)(ids)
        if kind == "bloom":
            hidden = body.word_embeddings_layernorm(hidden)
        for block in body.blocks if kind == "mpt" else body.h:
            hidden = _BLOCKS[kind](block, hidden, (scale, log))
        hidden = (body.norm_f if kind == "mpt" else body.ln_f)(hidden)
        logits: Tensor = model.lm_head(hidden)
        return logits


def _attend(parts: Sequence[Tensor], form: tuple[float, bool], factor: float = 1.0) -> Tensor:
    """Attend with ALiBi; queries, keys and values of shape (1, tokens, heads, width)."""
    query, key, value = (each.transpose(1, 2) for each in parts)
    heads, tokens, width = query.shape[1:]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    scale, log = form
    slopes = torch.tensor(slopes_of(heads), dtype=torch.float64) * factor / scale
    counted = (1.0 + distance.clamp(min=0)).log() if log else distance
    scores = query @ key.mT / math.sqrt(width) - slopes[:, None, None] * counted
    weights = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def _bloom(block: Any, hidden: Tensor, form: tuple[float, bool]) -> Tensor:
    own = block.self_attention
    fused = own.query_key_value(block.input_layernorm(hidden))
    parts = fused.unflatten(-1, (own.num_heads, 3, -1)).unbind(-2)
    hidden = hidden + own.dense(_attend(parts, form))
    inner = block.mlp.dense_h_to_4h(block.post_attention_layernorm(hidden))
    gelu = 0.5 * inner * (1 + torch.tanh(0.79788456 * inner * (1 + 0.044715 * inner * inner)))
    result: Tensor = hidden + block.mlp.dense_4h_to_h(gelu)
    return result


def _mpt(block: Any, hidden: Tensor, form: tuple[float, bool]) -> Tensor:
    own = block.attn
    parts = own.Wqkv(block.norm_1(hidden)).unflatten(-1, (3, own.n_heads, -1)).unbind(-3)
    hidden = hidden + own.out_proj(_attend(parts, form))
    inner = torch.nn.functional.gelu(block.ffn.up_proj(block.norm_2(hidden)))
    result: Tensor = hidden + block.ffn.down_proj(inner)
    return result


def _falcon(block: Any, hidden: Tensor, form: tuple[float, bool]) -> Tensor:
    """Attention and MLP side by side; the biases are divided by the root of the width, as the scores are."""
    own, normed = block.self_attention, block.input_layernorm(hidden)
    parts = own.query_key_value(normed).unflatten(-1, (own.num_heads, 3, -1)).unbind(-2)
    attended = own.dense(_attend(parts, form, factor=own.head_dim**-0.5))
    inner = torch.nn.functional.gelu(block.mlp.dense_h_to_4h(normed))
    result: Tensor = hidden + attended + block.mlp.dense_4h_to_h(inner)
    return result


_BLOCKS = {"bloom": _bloom, "mpt": _mpt, "falcon": _falcon}
