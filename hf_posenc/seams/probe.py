"""Reads back from a rotary module what it really computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Small positions tell fast frequencies apart, large ones slow frequencies. The expectation is
# computed by the same float32 product as in the models, so that the large ones do not amplify
# rounding.
_POSITIONS = (0, 1, 2, 5, 13, 34, 255, 1023, 4095)
_TOLERANCE = 1e-3


def probed_length(original: int) -> int:
    """The length to probe at, in tokens: past the original one, where dynamic tables move."""
    return max(1 + max(_POSITIONS), 2 * original)


@torch.no_grad()
def rotary_output(
    rotary: nn.Module, label: str, device: torch.device, *, length: int
) -> tuple[Tensor, Tensor] | None:
    """The (cos, sin) of a few positions, each of shape (positions, width), float32.

    `None` where the module cannot be called.

    Args:
        rotary: A rotary module, wrapped or not.
        label: Its table.
        device: Where to call it.
        length: Tokens of the text that the positions are from.
    """
    return _output_at((*_POSITIONS, length - 1), rotary, label, device)


@torch.no_grad()
def moves_with_length(rotary: nn.Module, label: str, device: torch.device) -> bool:
    """Whether the rotation of a text's first tokens depends on how many tokens follow.

    `False` where the module cannot be called.

    Args:
        rotary: A rotary module, wrapped or not.
        label: Its table.
        device: Where to call it.
    """
    # Long before short: transformers' dynamic tables keep the largest length they met until a short text resets them.
    long = _output_at((0, 1, 2, 3, 2**20), rotary, label, device)
    short = _output_at((0, 1, 2, 3, 4), rotary, label, device)
    if long is None or short is None:
        return False
    return not all(torch.equal(a, b) for a, b in zip(long, short, strict=True))


def _output_at(
    places: Sequence[int], rotary: nn.Module, label: str, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """The (cos, sin) at all places but the last, which is there for the length: rounding makes its phase a guess."""
    kwargs = {"layer_type": label} if label else {}
    positions = torch.tensor(places, device=device)
    x = torch.zeros(1, len(positions), 1, device=device)
    for position_ids in (positions[None], positions[None, None].expand(3, 1, -1)):  # text, M-RoPE
        try:
            parts = _cos_sin(rotary(x, position_ids, **kwargs))
        except (RuntimeError, IndexError, TypeError, AttributeError, KeyError, ValueError):
            continue
        if parts is not None and all(
            part.dim() >= 2 and part.shape[-2] == len(positions) for part in parts
        ):
            cos, sin = (
                part.float().reshape(-1, len(positions), part.shape[-1])[0, :-1] for part in parts
            )
            return cos, sin
    return None


def computes(
    output: tuple[Tensor, Tensor] | None, inv_freq: Tensor, factor: float | Tensor
) -> bool:
    """Whether an output of `rotary_output` is the rotation by `inv_freq`, in any layout.

    Every output column must be the rotation of some pair, and every pair must have a column.
    """
    if output is None:
        return False
    inv_freq = inv_freq.to(output[0].device, torch.float32)
    angles = torch.tensor(_POSITIONS, device=inv_freq.device)[:, None].float() * inv_freq
    expected = torch.cat((angles.cos(), angles.sin())) * factor
    tolerance = _TOLERANCE * max(1.0, float(factor))
    for sign in (1, -1):
        found = torch.cat((output[0], sign * output[1]))
        fits = torch.cdist(found.T[None], expected.T[None], p=torch.inf)[0] < tolerance
        if bool(fits.any(0).all() & fits.any(1).all()):
            return True
    return False


def is_half_split(output: tuple[Tensor, Tensor] | None, pairs: int) -> bool:
    """Whether cos and sin come as two equal halves of `pairs` features each, as in Llama."""
    return output is not None and all(
        part.shape[-1] == 2 * pairs and torch.equal(part[:, :pairs], part[:, pairs:])
        for part in output
    )


def _cos_sin(output: Any) -> tuple[Tensor, Tensor] | None:
    if isinstance(output, Tensor):
        return (output.real, output.imag) if output.is_complex() else None
    if isinstance(output, tuple | list) and len(output) == 2:
        return output[0], output[1]
    return None
