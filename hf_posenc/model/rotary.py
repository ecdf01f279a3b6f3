"""The rotary seam: wrapper modules in place of a model's rotary embedding, with other frequencies or positions.

Of five ways to get other frequencies into a live model (edited buffers, forward hooks, a replaced forward as closure or
bound method, a wrapper module) the wrapper is the only one that survives deepcopy, pickling, `.to(bfloat16)`,
`torch.compile` before and after, `_init_weights`, accelerate's hooks and DataParallel replication.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.call import shared
from hf_posenc.attention.encoding import Encoding
from hf_posenc.errors import PosencError
from hf_posenc.methods import RopeScaling
from hf_posenc.model.forward import Forward, carry
from hf_posenc.model.weights import refuse_parts_of_texts
from hf_posenc.rope import RopeSpec

CosSin = tuple[Tensor, Tensor]


class RotaryWrapper(nn.Module):
    """Keeps the wrapped rotary module as the child `base`, invisible to checkpoints and to code that reads it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        # Saved and loaded under the names that the checkpoint has.
        self.register_state_dict_post_hook(_without_base)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_base)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Model code reads `rotary_emb.config`, `.layer_types`, `.mrope_section` of the module it built. Private
            # names are hooks on the base, which are not the wrapper's.
            if name == "base" or name.startswith("_"):
                raise
            return getattr(self.base, name)


def native_rotary(module: nn.Module) -> nn.Module:
    """Return the model's own rotary module, without wrappers."""
    while isinstance(module, RotaryWrapper):
        module = module.base
    return module


def _without_base(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if key.startswith(f"{prefix}base.")]:
        state_dict[prefix + key.removeprefix(f"{prefix}base.")] = state_dict.pop(key)


def _with_base(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}base.{key.removeprefix(prefix)}"] = state_dict.pop(key)


FREQUENCIES = "inv_freq"
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_ACCELERATE_HOOK = frozenset({"_hf_hook", "_old_forward", "forward"})


def table_labels(rotary: nn.Module) -> tuple[str, ...]:
    """Return the tables of a rotary module: `("",)`, or one label per layer type (`full_attention`, ...)."""
    return tuple(
        name.removesuffix(FREQUENCIES).removesuffix("_")
        for name, _ in rotary.named_buffers(recurse=False)
        if name.endswith(FREQUENCIES) and not name.endswith(f"original_{FREQUENCIES}")
    )


def attribute(label: str, name: str) -> str:
    """Return the attribute of a rotary module that belongs to one table: `inv_freq` or `full_attention_inv_freq`."""
    return f"{label}_{name}" if label else name


class PosencRotary(RotaryWrapper):
    """A wrapper that calls the rotary module's own forward, whatever its layout, with other frequencies.

    The original stays untouched as the child `base`; tables of other layer types than the patched ones still come from
    it. The patched tables are float32 attributes outside the buffers: no cast, `to_empty` or buffer broadcast reaches
    them. Both mappings are by label, `""` for a module with one table; `base_factors` on cos and sin are those of an
    already scaled checkpoint that the method is composed with.

    The attributes `inv_freq` and `attention_scaling`, with the label in front where there is one, are read as those in
    force. For a method that follows the length of the text, they are those of the original length.
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
        """False: (cos, sin) is computed here, half-split, for a base whose forward does not read its table."""
        self._warned = False
        self._engines: dict[torch.device, nn.Module] = {}
        self._engine(self.device)  # before the first forward, which may be a compiled one

    def __getattr__(self, name: str) -> Any:
        # Model code and tools read the frequencies here. The base has the ones from before the patch.
        for label in vars(self).get("specs", ()):  # absent while a pickle is loaded
            if name == attribute(label, FREQUENCIES):
                return self.table(label)[0].to(self.device)
            if name == attribute(label, "attention_scaling"):
                return self.table(label)[1]
        return super().__getattr__(name)

    def table(
        self, label: str = "", length: int | Tensor | None = None
    ) -> tuple[Tensor, float | Tensor]:
        """Return one table: float32 frequencies of shape (d/2,), and the factor on cos and sin.

        The length is the current number of tokens; `None` gives the table of a sequence within the original one.
        """
        spec = self.specs[label]
        factor = self.method.cos_sin_factor(spec, length) * self.base_factors.get(label, 1.0)
        inv_freq = self.method.frequencies(spec, length)
        if spec.order is not None:
            inv_freq = inv_freq[spec.order.to(inv_freq.device)]
        return inv_freq.to(torch.float32), factor

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the rotation in the base module's own form, (cos, sin) or complex; arguments as in transformers.

        Positions have the shape (batch, length), or (axes, batch, length) for M-RoPE. The layer type is `args[0]` or a
        keyword, where the base takes one; x gives device and dtype.
        """
        label = kwargs.get("layer_type", args[0] if args else None) or ""
        if label not in self.specs:
            return self.base(x, position_ids, *args, **kwargs)
        engine = self._engine(x.device)
        if self.method.length_dependent:
            refuse_parts_of_texts(f'{self.method.name} with update="sequence"')
            length = position_ids.max() + 1
            if not self._warned and not torch.compiler.is_compiling():
                self._warn_of_cache(position_ids, length, label)
            if x.device.type == "mps":  # has no float64, in which tables are computed
                length = length.cpu()
            if not torch.compiler.is_compiling():  # of this forward alone
                engine = copy.copy(engine)
            _set_table(engine, label, *self.table(label, length), x.device)
        if self.own_forward:
            return engine.forward(x, position_ids, *args, **kwargs)
        inv_freq: Tensor = getattr(engine, attribute(label, FREQUENCIES))
        factor: float = getattr(engine, attribute(label, "attention_scaling"))
        angles = position_ids[..., None].float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)

    def extra_repr(self) -> str:
        knobs = ", ".join(f"{knob}={value!r}" for knob, value in self.method.options().items())
        layers = "" if "" in self.specs else f" in {', '.join(self.specs)}"
        return f"{self.method.label}({knobs}){layers}"

    def _apply(self, fn: Any, recurse: bool = True) -> PosencRotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.refresh()
        return self

    def refresh(self) -> None:
        """Compute the tables anew."""
        self._engines.clear()
        self._engine(self.device)

    @property
    def device(self) -> torch.device:
        """The device of the base's tables; the CPU for a model on the meta device."""
        devices = [buffer.device for buffer in self.base.buffers() if buffer.device.type != "meta"]
        return devices[0] if devices else torch.device("cpu")

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
                "frequencies of their own step, so the result is not that of a full forward. Use "
                'update="row", a static method (yarn, ntk_by_parts, ...) or use_cache=False.',
                stacklevel=4,
            )


def _engine_of(base: nn.Module) -> nn.Module:
    """A copy of a rotary module without its buffers, hooks and dynamic updates: its forward, and nothing else."""
    engine = type(base).__new__(type(base))
    nn.Module.__init__(engine)
    for name, value in vars(base).items():
        if name not in _MODULE_INTERNALS and name not in _ACCELERATE_HOOK:
            engine.__dict__[name] = value
    for name, tensor in (*base.named_buffers(recurse=False), *base.named_parameters(recurse=False)):
        if not name.endswith(FREQUENCIES):  # a learned gain, say
            engine.__dict__[name] = tensor
    rope_type = engine.__dict__.get("rope_type")
    if isinstance(rope_type, dict):
        engine.__dict__["rope_type"] = dict.fromkeys(rope_type, "default")
    elif rope_type is not None:
        engine.__dict__["rope_type"] = "default"  # keeps transformers' `dynamic_rope_update` out
    return engine


def _set_table(
    engine: nn.Module, label: str, inv_freq: Tensor, factor: float | Tensor, device: torch.device
) -> None:
    setattr(engine, attribute(label, FREQUENCIES), inv_freq.to(device))
    setattr(engine, attribute(label, "attention_scaling"), factor)


# Read-back: the rotation that a rotary module really computes.

# Small positions separate fast frequencies, large ones slow frequencies. The expectation is computed by the same
# float32 product as in the models, so that the large ones do not amplify rounding.
_POSITIONS = (0, 1, 2, 5, 13, 34, 255, 1023, 4095)
_TOLERANCE = 1e-3


def probed_length(original: int) -> int:
    """Return the length to probe at, in tokens: past the original one, where dynamic tables move."""
    return max(1 + max(_POSITIONS), 2 * original)


@torch.no_grad()
def rotary_output(
    rotary: nn.Module, label: str, device: torch.device, *, length: int
) -> CosSin | None:
    """Return the (cos, sin) of a few positions of a text of `length` tokens, each of shape (positions, width), float32.

    `None` where the module cannot be called.
    """
    return _output_at((*_POSITIONS, length - 1), rotary, label, device)


@torch.no_grad()
def moves_with_length(rotary: nn.Module, label: str, device: torch.device) -> bool:
    """True if the rotation of a text's first tokens depends on the number of tokens that follow.

    False where the module cannot be called.
    """
    # Long before short: transformers' dynamic tables keep their largest length until a short text resets them.
    long = _output_at((0, 1, 2, 3, 2**20), rotary, label, device)
    short = _output_at((0, 1, 2, 3, 4), rotary, label, device)
    if long is None or short is None:
        return False
    return not all(torch.equal(a, b) for a, b in zip(long, short, strict=True))


def _output_at(
    positions: Sequence[int], rotary: nn.Module, label: str, device: torch.device
) -> CosSin | None:
    """The (cos, sin) at all positions but the last, which sets the length: rounding makes its phase arbitrary."""
    kwargs = {"layer_type": label} if label else {}
    ids = torch.tensor(positions, device=device)
    x = torch.zeros(1, len(ids), 1, device=device)
    for position_ids in (ids[None], ids[None, None].expand(3, 1, -1)):  # text, M-RoPE
        try:
            output = rotary(x, position_ids, **kwargs)
        except (RuntimeError, IndexError, TypeError, AttributeError, KeyError, ValueError):
            continue
        if isinstance(output, Tensor) and output.is_complex():
            output = output.real, output.imag
        if not isinstance(output, tuple | list) or len(output) != 2:
            continue
        if all(part.dim() >= 2 and part.shape[-2] == len(ids) for part in output):
            cos, sin = (o.float().reshape(-1, len(ids), o.shape[-1])[0, :-1] for o in output)
            return cos, sin
    return None


def computes(output: CosSin | None, inv_freq: Tensor, factor: float | Tensor) -> bool:
    """True if an output of `rotary_output` is the rotation by `inv_freq`, in any layout.

    Every output column must be the rotation of some pair, and every pair must have a column.
    """
    if output is None:
        return False
    inv_freq = inv_freq.to(output[0].device, torch.float32)
    angles = torch.tensor(_POSITIONS, device=inv_freq.device)[:, None].float() * inv_freq
    expected = torch.cat((angles.cos(), angles.sin())) * factor
    tolerance = _TOLERANCE * max(1.0, float(factor))
    for sign in (1, -1):
        actual = torch.cat((output[0], sign * output[1]))
        fits = torch.cdist(actual.T[None], expected.T[None], p=torch.inf)[0] < tolerance
        if bool(fits.any(0).all() & fits.any(1).all()):
            return True
    return False


def is_half_split(output: CosSin | None, pairs: int) -> bool:
    """True if cos and sin come as two equal halves of `pairs` features each, as in Llama."""
    return output is not None and all(
        part.shape[-1] == 2 * pairs and torch.equal(part[:, :pairs], part[:, pairs:])
        for part in output
    )


# The rotary side of the attention seam: the model's own rotary module, given other positions

ENGINE = "hf_posenc"
"""The name under which the attention and the mask function are registered."""
SCORES = f"{ENGINE}-scores"
"""The name of the mask function for attention in code of a model's own, while that runs."""


def refuse_another(config: Any, implementation: str) -> None:
    """Raise if the attention implementation was changed after the patch, which the new one would not compute."""
    chosen = config._attn_implementation
    if chosen not in (implementation, ENGINE, SCORES):  # the engine computes scaled queries too
        raise PosencError(
            "This model is patched with a method that computes attention or scales queries, and its attention "
            f"implementation was set to {chosen!r} afterwards. Call unpatch_model(model), choose it, and patch again."
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
