"""The rotary seam: a wrapper module that stands in the place of a model's rotary embedding.

Of five ways to get other frequencies into a live model (edited buffers, forward hooks, a replaced
forward as closure or bound method, a wrapper module) the wrapper is the only one that survives
deepcopy, pickling, `.to(bfloat16)`, `torch.compile` before and after, `_init_weights`, accelerate's
hooks and DataParallel replication.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.methods import RopeScaling
from hf_posenc.rope import RopeSpec
from hf_posenc.seams.wrapper import RotaryWrapper

FREQUENCIES = "inv_freq"
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_ACCELERATE_HOOK = frozenset({"_hf_hook", "_old_forward", "forward"})


def table_labels(rotary: nn.Module) -> tuple[str, ...]:
    """The tables of a rotary module: `("",)`, or one label per layer type (`full_attention`, ...)."""
    names = [name for name, _ in rotary.named_buffers(recurse=False) if name.endswith(FREQUENCIES)]
    prefixes = [
        name.removesuffix(FREQUENCIES)
        for name in names
        if not name.endswith(f"original_{FREQUENCIES}")
    ]
    return tuple(prefix.removesuffix("_") for prefix in prefixes)


def attribute(label: str, name: str) -> str:
    """The attribute of a rotary module that belongs to one table: `inv_freq` or `full_attention_inv_freq`."""
    return f"{label}_{name}" if label else name


class PosencRotary(RotaryWrapper):
    """Calls the wrapped rotary's own forward, whatever its layout, with other frequencies.

    The original stays untouched as the child `base`; tables of other layer types than the patched
    ones still come from it. The patched tables are float32 attributes outside the buffers: no cast,
    `to_empty` or buffer broadcast reaches them.

    Args:
        base: The rotary module to stand in for.
        method: A frequency method.
        specs: The tables to patch, by label; the label is `""` for a module with one table.
        base_factors: What the method's factor on cos and sin is multiplied by, by label (an already
            scaled checkpoint that the method is composed with); 1 where absent.
    """

    def __init__(
        self,
        base: nn.Module,
        method: RopeScaling,
        specs: Mapping[str, RopeSpec],
        base_factors: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(base)
        self.method = method
        self.specs = dict(specs)
        self.base_factors = dict(base_factors or {})
        self.own_forward = True
        self._warned = False
        self._engines: dict[torch.device, nn.Module] = {}
        self._prepare_device()

    def table(
        self, label: str = "", length: int | Tensor | None = None
    ) -> tuple[Tensor, float | Tensor]:
        """What one table is: float32 frequencies of shape (d/2,), the factor on cos and sin.

        Args:
            label: The table.
            length: Current number of tokens; `None` gives the table of a sequence within the
                original length.
        """
        spec = self.specs[label]
        factor = self.method.cos_sin_factor(spec, length) * self.base_factors.get(label, 1.0)
        inv_freq = self.method.inv_freq(spec, length)
        if spec.order is not None:
            inv_freq = inv_freq[spec.order.to(inv_freq.device)]
        return inv_freq.to(torch.float32), factor

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The rotation in the base module's own form: (cos, sin) or complex.

        Args:
            x: Gives device and dtype, as in transformers.
            position_ids: Shape (batch, length), or (axes, batch, length) for M-RoPE.
            *args: The layer type, where the base takes one.
            **kwargs: The same by name.
        """
        label = kwargs.get("layer_type", args[0] if args else None) or ""
        if label not in self.specs:
            return self.base(x, position_ids, *args, **kwargs)
        engine = self._engine(x.device)
        if self.method.length_dependent:
            length = position_ids.max() + 1
            if not self._warned and not torch.compiler.is_compiling():
                self._warn_of_cache(position_ids, length, label)
            if x.device.type == "mps":  # has no float64, in which tables are made
                length = length.cpu()
            _set_table(engine, label, *self.table(label, length), x.device)
        if self.own_forward:
            return engine.forward(x, position_ids, *args, **kwargs)
        return _half_split_forward(engine, label, x, position_ids)

    def use_half_split_forward(self) -> None:
        """For a base whose forward does not read its table: compute (cos, sin) here, in the half-split layout."""
        self.own_forward = False

    def extra_repr(self) -> str:
        knobs = ", ".join(f"{knob}={value!r}" for knob, value in self.method.options().items())
        layers = "" if "" in self.specs else f" in {', '.join(self.specs)}"
        return f"{self.method.name}({knobs}){layers}"

    def _apply(self, fn: Any, recurse: bool = True) -> PosencRotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._engines.clear()
        self._prepare_device()
        return self

    @property
    def device(self) -> torch.device:
        """Where the base keeps its tables; the CPU for a model on the meta device."""
        devices = [buffer.device for buffer in self.base.buffers() if buffer.device.type != "meta"]
        return devices[0] if devices else torch.device("cpu")

    def _prepare_device(self) -> None:
        """Makes the engine ahead of the first forward, which may be a compiled one."""
        self._engine(self.device)

    def _engine(self, device: torch.device) -> nn.Module:
        engine = self._engines.get(device)
        if engine is None:
            engine = _engine_of(self.base)
            for label in self.specs:
                _set_table(engine, label, *self.table(label), device)
            self._engines[device] = engine
        return engine

    def _warn_of_cache(self, position_ids: Tensor, length: Tensor, label: str) -> None:
        trained = self.specs[label].original_max_position_embeddings
        if bool((position_ids.min() > 0) & (length > trained)):
            self._warned = True
            warnings.warn(
                f"{self.method.name} met a cache past the original {trained} tokens: cached keys keep the "
                "frequencies of their own time, so the result is not that of a full forward. Use a static "
                "method (yarn, ntk_by_parts, ...) or use_cache=False.",
                stacklevel=4,
            )


def _engine_of(base: nn.Module) -> nn.Module:
    """A copy of a rotary module without its buffers, hooks and dynamic updates: its forward, and nothing else."""
    engine = type(base).__new__(type(base))
    nn.Module.__init__(engine)
    for name, value in vars(base).items():
        if name not in _MODULE_INTERNALS and name not in _ACCELERATE_HOOK:
            engine.__dict__[name] = value
    for name, buffer in base.named_buffers(recurse=False):
        if not name.endswith(FREQUENCIES):  # a learned gain, say
            engine.__dict__[name] = buffer
    rope_type = engine.__dict__.get("rope_type")
    if isinstance(rope_type, dict):
        engine.__dict__["rope_type"] = dict.fromkeys(rope_type, "default")
    elif rope_type is not None:
        engine.__dict__["rope_type"] = "default"  # keeps transformers' `dynamic_rope_update` out
    return engine


def _set_table(
    engine: nn.Module, label: str, inv_freq: Tensor, factor: float | Tensor, device: torch.device
) -> None:
    """Puts a table where the engine's forward reads it, as plain attributes."""
    setattr(engine, attribute(label, FREQUENCIES), inv_freq.to(device))
    setattr(engine, attribute(label, "attention_scaling"), factor)


def _half_split_forward(
    engine: nn.Module, label: str, x: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    inv_freq: Tensor = getattr(engine, attribute(label, FREQUENCIES))
    factor: float = getattr(engine, attribute(label, "attention_scaling"))
    angles = position_ids[..., None].float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
