"""The rotation of one attention layer: its frequencies, and the features that they turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

KEPT = 256
"""Most tables that are kept with frequencies: a table is half a kilobyte."""
Answer = TypeVar("Answer")


def by_pair(positions: Tensor, axes: int, pairs: int) -> Tensor:
    """Return positions with a last axis that broadcasts over pairs: one more than `axes`.

    Args:
        positions: Of so many axes, or with a last one more: a position for each of several equal parts of the pairs.
        axes: The axes of positions without parts.
        pairs: Number of pairs.
    """
    if positions.dim() == axes:
        return positions[..., None]
    return positions.repeat_interleave(pairs // positions.shape[-1], -1)


@dataclass(frozen=True)
class Layout:
    """The place of the rotated pairs in a head's features.

    Attributes:
        start: The first rotated feature.
        dim: Number of rotated features d; even.
        interleaved: Pair i is features 2i and 2i+1 (GPT-J) instead of i and i + d/2 (Llama).
        sign: 1; -1 where the model turns the other way.
    """

    start: int
    dim: int
    interleaved: bool
    sign: int = 1


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of one layer's queries, and of its keys.

    Attributes:
        inv_freq: Frequencies in force, shape (d/2,), float32, radians per token.
        layout: The features that they turn.
        factor: The factor on cos and sin.
        order: Places in the model's table of these frequencies, shape (d/2,); `None`: they are in its order.
        norm: A norm that the layer applies after the rotation R. Its weights D make the rotation D R D^-1.
        keys: The rotation of the keys, where their norm is another one.
    """

    inv_freq: Tensor
    layout: Layout
    factor: float = 1.0
    order: Tensor | None = None
    norm: nn.Module | None = None
    keys: Rotation | None = None
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def turn(
        self,
        x: Tensor,
        positions: Tensor,
        inv_freq: Tensor | None = None,
        factor: float | Tensor = 1.0,
    ) -> Tensor:
        """Rotate x, (batch, heads, length, head_dim), by so many tokens beyond the rotation that it has.

        Positions, (batch or 1, length or 1), may be negative or fractional, and may have a last axis, one for each of
        several equal parts of the pairs. Angles, sines and products are at least float32; the dtype of x stays. The
        rotated features are multiplied by the factor.
        """
        table = self.on(x.device) if inv_freq is None else inv_freq
        exact = torch.promote_types(x.dtype, torch.float32)
        angles = by_pair(positions, 2, len(table))[:, None].to(exact) * table.to(x.device, exact)
        cos, sin = angles.cos(), angles.sin() * self.layout.sign
        if isinstance(factor, Tensor) or factor != 1.0:
            cos, sin = (cos * factor).to(exact), (sin * factor).to(exact)
        first, second = self.pairs(x, exact)
        return self.joined(x, first * cos - second * sin, second * cos + first * sin)

    def on(self, device: torch.device) -> Tensor:
        """Return the frequencies on a device, to which they are copied once, for models that have moved."""
        if self.inv_freq.device == device or torch.compiler.is_compiling():
            return self.inv_freq.to(device)
        return self.kept(device, lambda: self.inv_freq.to(device))

    def kept(self, question: Hashable, compute: Callable[[], Answer]) -> Answer:
        """Return what was computed for a question before, by any layer with these frequencies, and compute it else."""
        found: Answer | None = self._kept.get(question)
        if found is None:  # no answer is
            if len(self._kept) >= KEPT:
                # Another thread may make room too.
                with contextlib.suppress(StopIteration, RuntimeError):
                    self._kept.pop(next(iter(self._kept)), None)
            found = self._kept[question] = compute()
        return found

    def tables(
        self,
        positions: Tensor,
        dtype: torch.dtype,
        inv_freq: Tensor | None = None,
        factor: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin for `turned`, at least float32, which all layers of a forward may share.

        Arguments are those of `turn`, positions several times, (turns, batch or 1, length). Shapes: cos (turns, batch
        or 1, 1, length, 1, pairs) and, with both signs, sin (turns, batch or 1, 1, length, 2, pairs); the last two the
        other way around where pairs are interleaved.
        """
        exact = torch.promote_types(dtype, torch.float32)
        table = self.on(positions.device) if inv_freq is None else inv_freq
        angles = by_pair(positions, 3, len(table))[:, :, None].to(exact) * table.to(exact)
        axis = -1 if self.layout.interleaved else -2
        cos, sin = angles.cos(), angles.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        signed = (-sin, sin) if self.layout.sign == 1 else (sin, -sin)
        return cos.unsqueeze(axis), torch.stack(signed, axis)

    def turned(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x as `turn` by every entry of the tables, and return (entries, *x.shape); in few operations."""
        (cos, sin), layout = tables, self.layout
        axis, half = (-1 if layout.interleaved else -2), layout.dim // 2
        rotated, weight = x[..., layout.start : layout.start + layout.dim], self.weight(cos)
        if weight is not None:
            rotated = rotated / weight
        pairs = rotated.unflatten(-1, (half, 2) if layout.interleaved else (2, half))
        crossed = pairs.flip(axis) * sin
        if crossed.requires_grad or crossed.dtype == x.dtype or weight is not None:
            result = torch.addcmul(crossed, pairs, cos).flatten(-2)
            result = (result if weight is None else result * weight).to(x.dtype)
        else:
            result = torch.empty_like(crossed, dtype=x.dtype)
            torch.addcmul(crossed, pairs, cos, out=result)
            result = result.flatten(-2)
        if layout.dim == x.shape[-1]:
            return result
        before, after = x[..., : layout.start], x[..., layout.start + layout.dim :]
        shape = len(cos), *x.shape[:-1], -1
        return torch.cat((before.expand(shape), result, after.expand(shape)), -1)

    def pairs(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the first and the second feature of every pair, each (..., d/2), without the norm's weights."""
        layout = self.layout
        rotated = x[..., layout.start : layout.start + layout.dim].to(dtype)
        if (weight := self.weight(rotated)) is not None:
            rotated = rotated / weight
        if layout.interleaved:
            return rotated[..., ::2], rotated[..., 1::2]
        return rotated[..., : layout.dim // 2], rotated[..., layout.dim // 2 :]

    def joined(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return x with other pairs; the features that are not rotated stay."""
        layout = self.layout
        rotated = torch.stack((first, second), -1 if layout.interleaved else -2).flatten(-2)
        if (weight := self.weight(rotated)) is not None:
            rotated = rotated * weight
        rotated = rotated.to(x.dtype)
        if layout.dim == x.shape[-1]:
            return rotated
        before, after = x[..., : layout.start], x[..., layout.start + layout.dim :]
        return torch.cat((before, rotated, after), -1)

    def weight(self, like: Tensor) -> Tensor | None:
        """Return the norm's weights of the rotated features, shape (d,), as they are now; `None` without a norm."""
        if self.norm is None:
            return None
        weight = self.norm.get_parameter("weight")
        return weight[self.layout.start : self.layout.start + self.layout.dim].to(like)

    @property
    def of_keys(self) -> Rotation:
        """The rotation of the keys."""
        return self.keys or self
