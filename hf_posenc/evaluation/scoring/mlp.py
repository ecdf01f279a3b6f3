"""MLPs of a model's layers: which modules they are, and their forward over a slice of the tokens after another.

An MLP computes every token by itself, so the intermediate features of a long text need not exist at once. They are the
widest tensors of most decoders; unlike a prefill in pieces, slices of them need no cache and no mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.scoring.decoder import replaced

_PROBE, _PART = 8, 3
_NEAR = 1e-2
"""Largest difference of a slice, relative to the largest value: rounding of half precision, not another function."""


@dataclass(frozen=True)
class MLP:
    """A module that projects from an intermediate size to the hidden one, and others to that size (gate and value).

    Attributes:
        hidden: Features that it reads and returns.
        intermediate: Features between its projections.
        up: Features that the projections to that size return together.
        projections: How many those are.
    """

    module: nn.Module
    hidden: int
    intermediate: int
    up: int
    projections: int


def mlps(root: nn.Module) -> Iterator[MLP]:
    """Yield the MLPs inside a module, those of experts in a list included."""
    for module in root.modules():
        children = [
            (child, size) for child in module.children() if (size := linear_features(child))
        ]
        for last, (intermediate, out) in children:
            others = [s[1] for child, s in children if child is not last and s[0] == out]
            up = sum(size for size in others if size in (intermediate, 2 * intermediate))
            if up and not intermediate == out == up:
                yield MLP(module, out, intermediate, up, len(others))


def linear_features(module: nn.Module) -> tuple[int, int] | None:
    """Return the features in and out of a linear layer, quantized (its weight is packed) and GPT-2's included."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        sizes = [getattr(module, name, None) for name in names]
        if all(type(size) is int for size in sizes):
            return sizes[0], sizes[1]  # type: ignore[return-value]
    return None


@torch.no_grad()
def tokenwise_mlps(model: nn.Module) -> list[nn.Module]:
    """Return the MLPs of a model that compute tokens one by one, as a probe of random features shows."""
    candidates = {id(each.module): each for each in mlps(model)}
    return [each.module for each in candidates.values() if _is_tokenwise(each)]


@contextlib.contextmanager
def in_slices(modules: Iterable[nn.Module], tokens: int) -> Iterator[None]:
    """Run each of these MLPs over so many tokens at a time inside a `with` block."""

    def sliced(forward: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args or kwargs or hidden.dim() < 2 or hidden.shape[-2] <= tokens:
                return forward(hidden, *args, **kwargs)
            out = torch.empty_like(hidden)
            for part, rows in zip(out.split(tokens, -2), hidden.split(tokens, -2), strict=True):
                part.copy_(forward(rows))
            return out

        return run

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced(module, "forward", sliced(module.forward)))
        yield


def _is_tokenwise(mlp: MLP) -> bool:
    weight = next(mlp.module.parameters())
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _PROBE, mlp.hidden, generator=draw).to(weight.device, dtype)
    try:
        whole = mlp.module(hidden)
        parts = [mlp.module(part) for part in hidden.split(_PART, 1)]
        off = (torch.cat(parts, 1) - whole).abs().max()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return False  # it reads more than the hidden states, or returns more
    return whole.shape == hidden.shape and bool(off <= _NEAR * whole.abs().max())
