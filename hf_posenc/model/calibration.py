"""Finds out what every attention layer of a live model does with positions, by trying it.

Two forwards over a few tokens, one with the model's own rotation and one with every token at position 0, in which
attention itself is replaced by something that does not read queries and keys. So the hidden states are the same in
both, in every layer, and the queries and keys that reach the attention function differ by the rotation alone: whichever
of the known layouts turns the one into the other is the layer's. No table of architectures is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.branches import Layout, Rotation
from hf_posenc.errors import FREQUENCY_METHODS_WORK, UnsupportedModelError

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
_TOLERANCE_HALF = 0.03
TOKENS = 7
"""Length of the text that a model is tried on."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What one attention layer handed to the attention function.

    Attributes:
        query: Shape (1, heads, tokens, head_dim).
        key: Shape (1, key heads, tokens, head_dim).
        kwargs: What came beside the tensors.
    """

    query: Tensor
    key: Tensor
    kwargs: Mapping[str, Any]


class Recorder:
    """An attention function that writes down its arguments and lets every token look at itself alone."""

    def __init__(self) -> None:
        self.seen: dict[nn.Module, list[Seen]] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The values, in the place of attention's output."""
        self.seen.setdefault(module, []).append(Seen(query.clone(), key.clone(), kwargs))
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode is restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def trial_tokens(model: Any) -> Tensor:
    """A few different token ids, shape (1, tokens), on the device of the embedding."""
    count = min(100, model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.arange(TOKENS) * 13 % max(1, count - 3) + 3
    device: torch.device = next(model.parameters()).device
    on_device: Tensor = ids[None].to(device)
    return on_device


def rotation_of(
    native: Seen, still: Seen, tables: Sequence[tuple[Tensor, float]], name: str
) -> tuple[Rotation | None, int | None]:
    """The rotation that a layer applies.

    Args:
        native: What the layer handed over for tokens at their own positions.
        still: The same, all at position 0.
        tables: The model's rotary tables in force: frequencies of shape (d/2,), and the factor on cos and sin.
        name: The layer, for the error.

    Returns:
        The rotation, and the index of its table; `None` twice for a layer that does not rotate.

    Raises:
        UnsupportedModelError: No known layout turns the one into the other.
    """
    tolerance = _TOLERANCE.get(native.query.dtype, _TOLERANCE_HALF)
    pairs = ((native.query, still.query), (native.key, still.key))
    if all(_close(moved, rest, tolerance / 10) for moved, rest in pairs):
        return None, None
    positions = torch.arange(native.query.shape[2], device=native.query.device)[None]
    for index, (table, factor) in enumerate(tables):
        for layout in _layouts(native.query.shape[-1], 2 * len(table)):
            rotation = Rotation(table, layout, factor)
            if all(
                _close(moved, rotation.turn(rest, positions), tolerance) for moved, rest in pairs
            ):
                return rotation, index
    raise UnsupportedModelError(
        f"{name}: what its queries and keys go through between position 0 and others is not a rotation in a known "
        f"layout (a weighted norm after the rotation, say). {FREQUENCY_METHODS_WORK}"
    )


def _layouts(width: int, dim: int) -> Iterator[Layout]:
    for start in dict.fromkeys((0, width - dim)):
        if start >= 0:
            for interleaved in (False, True):
                for sign in (1, -1):
                    yield Layout(start, dim, interleaved, sign)


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())
