"""The rotary side of the attention seam: the model's own rotary module or table, given other positions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.call import shared
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.rotation import by_pair
from hf_posenc.errors import PosencError
from hf_posenc.model.discovery import SinCosTable
from hf_posenc.model.forward import Forward, carry
from hf_posenc.model.rotary import RotaryWrapper

ENGINE = "hf_posenc"
"""The name under which the attention and the mask function are registered."""
SCORES = f"{ENGINE}-scores"
"""The name of the mask function for attention in code of a model's own, while that runs."""


def refuse_another(config: Any, implementation: str) -> None:
    """Raise if the attention implementation was changed after the patch, which the new one would not compute."""
    chosen = config._attn_implementation
    if chosen not in (implementation, ENGINE, SCORES):  # the engine computes scaled queries too
        raise PosencError(
            f"This model is patched with a method that computes attention itself, but its attention implementation "
            f"was set to {chosen!r} afterwards. Call unpatch_model(model), choose it, and patch again."
        )


class RepositionedRotary(RotaryWrapper):
    """Rotates queries and keys to the position at which an encoding caches keys; the attention function does the rest.

    The true positions travel with the output, as an attribute of its first tensor. That tensor is an argument of every
    layer's call, so a layer that gradient checkpointing computes again gets those of its own forward. `config` is the
    one whose attention implementation the layers read, and `labels` are the tables of the patched layers.
    """

    def __init__(self, base: nn.Module, config: Any, labels: Collection[str]) -> None:
        super().__init__(base)
        self.seam_config = config
        self.implementation = config._attn_implementation
        # Determines where keys are cached; `None`: at their own positions.
        self.encoding: Encoding | None = None
        self.labels = frozenset(labels)
        # The features of a pair are neighbours in cos and sin; read off in the trial that ends a patch.
        self._interleaved: bool | None = None

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the base's output for the positions at which keys are cached; arguments as in `PosencRotary`."""
        refuse_another(self.seam_config, self.implementation)
        if position_ids.dim() > 2:  # beside an image, some models hand their layers no positions
            shared(position_ids, "text", lambda: text_positions(position_ids).clone())
        label = kwargs.get("layer_type", args[0] if args else None) or ""
        cached = position_ids
        if label in self.labels and self.encoding is not None:
            cached = self.encoding.cached_position(position_ids)
        if cached.dim() > position_ids.dim():
            output = self._by_part(x, cached, *args, **kwargs)
        else:
            output = self.base(x, cached, *args, **kwargs)
        carry(output[0] if isinstance(output, tuple) else output, Forward(position_ids))
        return output

    def _by_part(self, x: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output for positions with a last axis, one for each of several equal parts of the pairs."""
        count = positions.shape[-1]
        outputs = [self.base(x, positions[..., part], *args, **kwargs) for part in range(count)]
        if self._interleaved is None:
            probe = self.base(x, torch.ones_like(positions[..., :1, 0]), *args, **kwargs)
            cos = probe[0] if isinstance(probe, tuple) else probe
            self._interleaved = not torch.equal(*cos.chunk(2, -1))
        if not isinstance(outputs[0], tuple):
            return self._joined(outputs)
        return tuple(self._joined(tensors) for tensors in zip(*outputs, strict=True))

    def _joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """Take the features of each part from its output; the two of a pair are neighbours or half a head apart."""
        features = outputs[0].shape[-1]
        every = pair = torch.arange(features, device=outputs[0].device)
        pairs = features if outputs[0].is_complex() else features // 2
        if pairs < features:
            pair = pair // 2 if self._interleaved else pair % pairs
        part = pair * len(outputs) // pairs
        return torch.stack(list(outputs), -1)[..., every, part]


class RepositionedTable:
    """A sin-cos table whose rows are those of the positions at which an encoding caches keys.

    The module that holds the table reads these rows instead, as many as the positions need.
    """

    def __init__(self, table: SinCosTable, labels: Collection[str]) -> None:
        self.table = table
        self.base = table.module
        self.labels = frozenset(labels)
        self.encoding: Encoding | None = None  # as of `RepositionedRotary`
        self._kept: tuple[Tensor, Encoding | None, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def rows(self, positions: Tensor | None) -> Tensor:
        """Return a table with a row for each of these positions, and at least as many as the model's own."""
        native, needed = self.table.tensor(), 0
        if positions is not None:
            needed = shared(positions, "rows", lambda: int(positions.max()) + 1)
        count = max(needed, len(native))
        kept = self._kept  # once, for the threads
        if kept is not None:
            of, encoding, rows = kept
            if of is native and encoding is self.encoding and len(rows) >= count:
                return rows
        # Twice as many at a time: a generation needs another row in each step.
        count = count if count <= len(native) else 2 * count
        every = torch.arange(count, device=native.device)
        if self.encoding is not None:
            every = self.encoding.cached_position(every)
        frequencies, factor = self.table.live()
        angles = by_pair(every.double(), 1, len(frequencies)) * frequencies.double()
        rows = (torch.cat((angles.sin(), angles.cos()), -1) * factor).to(native.dtype)
        if every.dim() == 1:
            own = (every == every.long()) & (every < len(native))
            rows[own] = native.detach()[every[own].long()]
        self._kept = native, self.encoding, rows
        return rows


def text_positions(position_ids: Tensor) -> Tensor:
    """Return positions of shape (batch or 1, length), from those or from M-RoPE's axes, which must be equal."""
    if position_ids.dim() == 2:
        return position_ids
    if position_ids.dim() == 1:
        return position_ids[None]
    if not torch.compiler.is_compiling() and not bool((position_ids == position_ids[:1]).all()):
        raise PosencError(
            "An image or a video has positions on three axes, of which a method that computes attention itself "
            "supports one. Use a frequency method (yarn, ntk_by_parts, ...), or text alone."
        )
    return position_ids[0]
