"""The L x L reference for any architecture: the model's own layers and its own rotary, asked several times.

Every attention module is called once per band, with the output of the model's rotary for the positions of that band,
and what it hands to the attention function is written down. Then the scores are put together pair by pair, in float64.
So nothing needs to be known of layouts, partial rotation, latent attention or axes, and nothing of the package is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from tests.support import attention_references as naive
from tests.support import zoo
from tests.support.zoo_registry import quiet

NAME = "pair_by_pair"
WINDOW, GROUP = 6, 3

Positions = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rule:
    """A near and a far band of rotary positions, and a bias.

    Attributes:
        near: Positions of both, of the near band.
        query: Positions of the far band.
        key: The same for keys.
        alibi: Whether the linear penalty is added.
    """

    near: Positions = lambda m: m
    query: Positions = lambda m: m
    key: Positions = lambda m: m
    alibi: bool = False


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


@dataclass
class _State:
    rule: Rule
    outputs: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = field(
        default_factory=list
    )
    recording: list[tuple[Tensor, Tensor]] | None = None
    bands: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    calls: int = 0


_state: _State | None = None


def reference(model: PreTrainedModel, ids: Tensor, method: str) -> Tensor | None:
    """Logits of an unpatched model with a method of `RULES` in all layers; `None` where nobody can say.

    That is a model whose attention modules make their own rotation, or call no attention function.
    """
    global _state
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    state = _state = _State(RULES[method][1])
    with quiet():
        model.set_attn_implementation(NAME)
    for module in list(model.modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(_note, with_kwargs=True)
    modules = list(_attention_modules(model))
    for module in modules:
        _ask_several_times(module, state)
    try:
        found = zoo.logits(model, ids)
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
            alone = {"past_key_values": None} if "past_key_values" in kwargs else {}
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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert _state is not None
    batch, heads, length, width = query.shape
    if _state.recording is not None:
        _state.recording.append((query, key))
        return value.new_zeros(batch, length, heads, value.shape[-1]), None
    rotates = bool(_state.bands) and bool(_state.bands[0])
    if rotates:
        _state.calls += 1
        near, query_far, key_far = (band.pop(0) for band in _state.bands)
    else:  # a layer without positions
        near = query_far = key_far = (query, key)
    groups = heads // key.shape[1]

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return q.double() @ k.double().repeat_interleave(groups, 1).transpose(2, 3)

    index = torch.arange(length)
    distance = index[:, None] - index[None]
    table = torch.where(distance < WINDOW, scores(*near), scores(query_far[0], key_far[1]))
    table = table * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        table = softcap * torch.tanh(table / softcap)
    if _state.rule.alibi and not torch.equal(query, near[0]):  # it rotates
        slopes = torch.tensor(naive.alibi(1, 0, heads), dtype=torch.float64)
        table = table + slopes[:, None, None] * distance.clamp(min=0)
    assert attention_mask is not None
    table = table + attention_mask.double()
    if s_aux is not None:
        sink = s_aux.double().view(1, -1, 1, 1).expand(batch, heads, length, 1)
        table = torch.cat((table, sink), -1)
    weights = table.softmax(-1)[..., :length]
    out = weights @ value.double().repeat_interleave(groups, 1)
    return out.transpose(1, 2).to(query.dtype).contiguous(), None
