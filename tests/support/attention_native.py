"""The L x L reference for any architecture: the model's own layers and its own rotary, asked several times.

Every attention module is called once per band, with the output of the model's rotary for the positions of that band,
and what it hands to the attention function is written down. Then the scores are put together pair by pair, in float64:
a key after the query has the opposite distance of the same pair the other way round.
So nothing needs to be known of layouts, partial rotation, latent attention or axes, and nothing of the package is used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from tests.support import attention_references as naive
from tests.support import zoo
from tests.support.zoo import CACHE
from tests.support.zoo_registry import quiet

NAME = "pair_by_pair"
WINDOW, GROUP = 6, 3

Positions = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rule:
    """A near and a far band of rotary positions, and a bias."""

    near: Positions = lambda m: m  # of queries and keys
    query: Positions = lambda m: m  # of the far band
    key: Positions = lambda m: m
    alibi: bool = False  # the linear penalty is added
    log_n: int | None = None  # the trained length of the factor on queries
    keeps: bool = False  # the penalty is added beside the rotation


RULES: dict[str, tuple[dict[str, Any], Rule]] = {
    "rerope": (
        {"window": WINDOW},
        Rule(query=lambda m: torch.full_like(m, WINDOW), key=torch.zeros_like),
    ),
    "self_extend": (
        {"window": WINDOW, "group": GROUP},
        Rule(query=lambda m: m // GROUP + WINDOW - WINDOW // GROUP, key=lambda n: n // GROUP),
    ),
    "alibi": ({}, Rule(torch.zeros_like, torch.zeros_like, torch.zeros_like, alibi=True)),
}
"""Method, its options, and the same as positions."""
KEEPING: tuple[dict[str, Any], Rule] = ({"keep_rope": True}, Rule(alibi=True, keeps=True))
"""The same of ALiBi beside the rotation."""


@dataclass
class _State:
    rule: Rule
    outputs: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = field(
        default_factory=list
    )
    recording: list[tuple[Tensor, Tensor]] | None = None
    bands: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    calls: int = 0
    asks: bool = False


_state: _State | None = None


def reference(
    model: PreTrainedModel,
    ids: Tensor,
    method: str | Rule,
    part: nn.Module | None = None,
    **given: Any,
) -> Tensor | None:
    """Logits of an unpatched model with a method of `RULES`, or a rule, in all layers; `None` where nobody can say.

    That is a model whose attention modules make their own rotation, or call no attention function. Other layers than
    those of `part` stay as they are. `given` are further arguments of the forward.
    """
    global _state
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    state = _state = _State(method if isinstance(method, Rule) else RULES[method][1])
    with quiet():
        model.set_attn_implementation(NAME)
    for module in list(model.modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(_note, with_kwargs=True)
    modules = list(_attention_modules(model if part is None else part))
    state.asks = part is not None or not state.rule.keeps
    if state.asks:  # else all bands are the one that the model has
        for module in modules:
            _ask_several_times(module, state)
    try:
        found = zoo.logits(model, ids, **given)
    finally:
        _state = None
    return found if state.calls else None


def _note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if _state is not None:
        _state.outputs.append((module, args, kwargs, output))


def _attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    def takes(module: nn.Module) -> bool:
        return "position_embeddings" in inspect.signature(module.forward).parameters

    for module in model.modules():
        inner = [child for child in module.modules() if child is not module]
        if takes(module) and not any(takes(child) for child in inner):
            yield module


def _ask_several_times(module: nn.Module, state: _State) -> None:
    original = module.forward
    parameters = list(inspect.signature(original).parameters)

    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**dict(zip(parameters, args, strict=False)), **kwargs}
        rotated = kwargs.get("position_embeddings")
        known = [entry for entry in state.outputs if entry[3] is rotated]
        if rotated is None or not known:
            return original(**kwargs)
        rotary, rotary_args, rotary_kwargs, _ = known[-1]
        state.bands = []
        for positions in (state.rule.near, state.rule.query, state.rule.key):
            state.recording = []
            embeddings = _rotary_at(rotary, rotary_args, rotary_kwargs, positions)
            alone = {CACHE: None} if CACHE in kwargs else {}
            original(**{**kwargs, **alone, "position_embeddings": embeddings})
            state.bands.append(state.recording)
        state.recording = None
        return original(**kwargs)

    vars(module)["forward"] = forward


def _rotary_at(rotary: nn.Module, args: Any, kwargs: Any, positions: Positions) -> Any:
    def moved(value: Any) -> Any:
        whole = isinstance(value, Tensor) and not value.is_floating_point()
        return positions(value) if whole else value

    forward: Any = rotary.forward
    return forward(*map(moved, args), **{name: moved(value) for name, value in kwargs.items()})


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    assert _state is not None
    batch, heads, length, width = query.shape
    if _state.recording is not None:
        _state.recording.append((query, key))
        return value.new_zeros(batch, length, heads, value.shape[-1]), None
    rotates = bool(_state.bands) and bool(_state.bands[0])
    _state.calls += rotates or _state.rule.keeps
    if rotates:
        near, query_far, key_far = (band.pop(0) for band in _state.bands)
    else:  # a layer without positions
        near = query_far = key_far = (query, key)
    groups = heads // key.shape[1]

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return q.double() @ k.double().repeat_interleave(groups, 1).transpose(2, 3)

    index = torch.arange(length)
    distance = index[:, None] - index[None]
    if rotates:  # keys of another text, after its own, stay as they are
        before, after = scores(query_far[0], key_far[1]), scores(key_far[0], query_far[1])
        table = torch.where(distance > 0, before[..., :length], after[..., :length])
        table = torch.where(distance.abs() < WINDOW, scores(*near)[..., :length], table)
        if _state.rule.log_n is not None:
            table = table * ((index + 1).log() / math.log(_state.rule.log_n)).clamp(min=1)[:, None]
        table = torch.cat((table, scores(query, key)[..., length:]), -1)
    else:
        table = scores(query, key)
    table = table * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        table = softcap * torch.tanh(table / softcap)
    moved = not torch.equal(query, near[0])
    beside = rotates if _state.asks else getattr(module, "use_rope", True)
    if _state.rule.alibi and (beside if _state.rule.keeps else moved):
        slopes = torch.tensor(naive.alibi(1, 0, heads), dtype=torch.float64)
        table[..., :length] += slopes[:, None, None] * distance.abs()
    if attention_mask is not None:
        table = table + attention_mask.double()
    if kwargs.get("indices") is not None:  # the keys that an indexer has chosen
        every = torch.full((batch, length, length), -torch.inf, dtype=torch.float64)
        table = table + every.scatter(-1, kwargs["indices"].long(), 0.0)[:, None]
    if s_aux is not None:
        sink = s_aux.double().view(1, -1, 1, 1).expand(batch, heads, length, 1)
        table = torch.cat((table, sink), -1)
    out = table.softmax(-1)[..., : value.shape[2]] @ value.double().repeat_interleave(groups, 1)
    return out.transpose(1, 2).to(query.dtype).contiguous(), None
