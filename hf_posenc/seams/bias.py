"""The seam of models that hand ALiBi to their blocks as an argument: the argument is replaced by exact biases.

Transformers makes such biases in the model's dtype and relative to the first key. In bfloat16, the nearest keys of a
long text then share one bias. Here they are products of a slope and the distance of query and key. Which modules
receive them, by which name and in which shape, is read off the live model.

Attention that can be handed over is computed by the engine, which gets the slopes; its argument becomes zeros, and no
tensor holds a number for each query and key. Elsewhere the argument holds the biases themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_posenc.attention.call import shared
from hf_posenc.attention.encoding import Encoding
from hf_posenc.errors import PosencError, UnsupportedModelError, VerificationError
from hf_posenc.methods import ALiBi, Method
from hf_posenc.methods.base import real
from hf_posenc.model import masks
from hf_posenc.model.attention import IMPLEMENTATION, Layer, named, register
from hf_posenc.model.calibration import TOKENS, run, trial_tokens
from hf_posenc.model.discovery import LENGTH_KEYS, layer_index
from hf_posenc.model.forward import Forward, cache_name, cache_of, carry, named_arguments, text_of
from hf_posenc.model.lazy import UnwrittenMask, nothing
from hf_posenc.model.masks import seen_keys, visible
from hf_posenc.model.sampled import Sample
from hf_posenc.model.unwrapping import hooked, trial
from hf_posenc.seams import probes
from hf_posenc.seams.handover import UnwrittenMasks, hand_over, handed_over, search, take_back
from hf_posenc.seams.held import Record
from hf_posenc.seams.inspection import ALIBI, Positions, summary
from hf_posenc.seams.native import NativeSeam
from hf_posenc.seams.traces import Argument, flattened, read_arguments

Key = int | str
_ROUNDED = 2**-7  # relative: a slope that was rounded to bfloat16 once or twice
_OF_EFFECT = 0.02  # how far outputs may differ by the rounding of a model's own biases, as a share of their effect


@dataclass(frozen=True)
class Place:
    """The place among a block's arguments where biases are put."""

    key: Key  # the argument that gets them: its name, or its index among those without a name
    others: tuple[Key, ...]  # arguments that carry the same biases once more, which become zero
    # The argument is an additive mask, (batch, 1 or heads, queries, keys), of which only the hidden pairs stay, or
    # (`adds`) all else too; else it is (heads or batch * heads, 1, keys).
    visible: bool
    adds: bool = False  # the argument is a mask without biases
    exact: bool = True  # biases are float32; else of the argument's dtype


@dataclass(frozen=True)
class ExactBias:
    """A forward pre-hook of a block, which replaces the biases among its arguments; it can be copied and pickled."""

    place: Place  # the place where the biases go
    bias: ModelALiBi  # the score by distance, for each head
    layer: int  # the index of the block's layer in a cache

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the block's arguments with exact biases, or without any where the engine computes them."""
        values = {**dict(enumerate(args)), **kwargs}
        # All blocks of a forward get the same tensor of the model's biases, and share what replaces it.
        own = values[self.place.others[0] if self.place.adds else self.place.key]
        if not self._by_engine(module, own, values):
            question = (ExactBias, self.place, self.bias)
            values[self.place.key] = shared(own, question, lambda: self._made(values))
            for key in self.place.others:
                values[key] = torch.zeros_like(values[key])
        return tuple(values.pop(index) for index in range(len(args))), values

    def _by_engine(self, module: nn.Module, own: Tensor, values: dict[Key, Any]) -> bool:
        """Let the engine compute the biases, and return whether it does."""
        if torch.compiler.is_compiling() or not (forwards := handed_over(module)):
            return False
        question = (ExactBias, self.place.visible)
        m, n = shared(own, question, lambda: self.positions(values))
        # A few queries have few biases, and the block's own code needs no help for them.
        many = m.shape[1] * n.shape[1] > max(forward.least for forward in forwards)
        # Attention code may run in another way since it was handed over.
        configs = (getattr(forward.module, "config", None) for forward in forwards)
        same = all(getattr(c, "_attn_implementation", "eager") == "eager" for c in configs)
        if not many or not same:
            return False
        forward = Forward(m, n, weights=bool(values.get("output_attentions")))
        self._remove_biases(values, n.shape[1], forward)
        return True

    def _remove_biases(self, values: dict[Key, Any], keys: int, forward: Forward) -> None:
        """Leave a mask that hides pairs, and zeros as wide as the keys, which carry the record of the forward."""
        value: Tensor = values[self.place.key]
        removed = self.place.others
        if not self.place.visible:
            removed = (self.place.key, *removed)
        elif not self.place.adds and isinstance(value, UnwrittenMask) and value.written is None:
            values[self.place.key] = carry(value.without_bias(), forward)
        elif not self.place.adds:
            values[self.place.key] = carry(shared(value, "hides", lambda: _hiding(value)), forward)
        for key in removed:
            size = (*values[key].shape[:-1], keys)
            values[key] = carry(nothing(size, values[key]), forward)

    def _made(self, values: Mapping[Key, Any]) -> Tensor:
        """Return the argument that replaces the model's own."""
        value: Tensor = values[self.place.key]
        # Fused attention elsewhere than on a CPU may refuse a mask that is not of the queries' dtype.
        fused = self.place.visible and not self.place.adds and value.device.type != "cpu"
        dtype = torch.float32 if self.place.exact and not fused else value.dtype
        bias = self.biases(values)
        if not self.place.visible:
            bias = bias[0]
            texts = value.shape[0] // len(self.bias.own)  # in one axis with the heads
            return (bias.repeat(texts, 1, 1) if texts > 1 else bias).to(dtype)
        shown = visible(value)
        if self.place.adds:
            bias = bias + value
        return bias.to(dtype).where(shown, torch.finfo(dtype).min)

    def biases(self, values: Mapping[Key, Any]) -> Tensor:
        """Return the biases of a call, float32, shape (batch or 1, heads, queries, keys)."""
        m, n = self.positions(values)
        by_distance = real(torch.arange(n.shape[1], device=n.device))
        table = self.bias.bias(by_distance, len(self.bias.own), {}).float()
        distance = m[:, :, None] - n[:, None, :]
        return table[:, distance.clamp(min=0)].movedim(0, 1)

    def positions(self, values: Mapping[Key, Any]) -> tuple[Tensor, Tensor]:
        """Return the positions of a call's queries and keys, (batch or 1, queries) and (batch or 1, keys).

        A mask with a row for each text tells which tokens are there, and the others count nothing. A text that is
        padded on one side has the same biases without a mask, but for a constant in each row.
        """
        hidden = next(value for value in values.values() if isinstance(value, Tensor))
        queries, device = hidden.shape[1], hidden.device
        cache = next((each for each in values.values() if hasattr(each, "get_seq_length")), None)
        seen = 0 if cache is None else cache.get_seq_length(self.layer)
        rows = torch.arange(queries, device=device) + seen
        mask = next((value for value in values.values() if _is_mask(value, queries)), None)
        keys = int(seen) + queries if mask is None else mask.shape[-1]
        place = torch.arange(keys, device=device)[None]
        if self.place.visible and (shown := seen_keys(values[self.place.key])) is not None:
            place = (shown.long().cumsum(-1) - 1).clamp(min=0)
        return place.index_select(1, rows), place


def _hiding(mask: Tensor) -> Tensor:
    """Return an additive mask that hides the pairs that another one hides, in all heads alike."""
    hidden = ~visible(mask).any(1, keepdim=True)
    zeros = hidden.new_zeros(hidden.shape, dtype=mask.dtype)
    return zeros.masked_fill(hidden, torch.finfo(mask.dtype).min)


@lru_cache(maxsize=64)
def _on(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return real(torch.tensor(slopes, dtype=torch.float64)).to(device)


@dataclass(frozen=True, kw_only=True)
class ModelALiBi(ALiBi):
    """ALiBi with the slopes of a model, already divided by the scale."""

    own: tuple[float, ...] = ()  # the slope of each head

    def slopes(self, heads: int, device: torch.device | None = None) -> Tensor:
        return _on(self.own, torch.device("cpu") if device is None else device)


class WholeMask:
    """A forward pre-hook of the model around the blocks: its mask covers a static cache, as its biases must."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with a mask of shape (batch, keys); `None` without a static cache."""
        values = named_arguments(module, args, kwargs)
        cache, mask = cache_of(values), values.get("attention_mask")
        tokens = text_of((), values)
        if cache is None or not getattr(cache, "is_compileable", False) or tokens is None:
            return None
        keys = (getattr(cache, "get_max_length", None) or cache.get_max_cache_shape)()
        rows = torch.arange(tokens.shape[1], device=tokens.device) + cache.get_seq_length()
        written = torch.arange(keys, device=tokens.device)[None] <= rows[-1]
        if mask is None:
            seen = written.expand(len(tokens), -1)
        elif mask.dim() == 2:
            seen = nn.functional.pad(mask, (0, max(0, keys - mask.shape[1]))).bool()
        elif mask.dim() == 4 and _is_causal(mask, rows):
            seen = visible(mask).any(1).any(-2)
        else:
            return None
        return (), {**values, "attention_mask": seen.long()}


def _is_causal(mask: Tensor, rows: Tensor) -> bool:
    """Return whether queries see all tokens before them, so that the tokens alone give the mask."""
    if torch.compiler.is_compiling():
        return True
    shown = visible(mask)
    causal = torch.arange(mask.shape[-1], device=mask.device) <= rows[:, None]
    return bool((shown == shown.any(1, True).any(-2, True) & causal).all())


def _is_mask(value: Any, queries: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.shape[-2] == queries


@dataclass(frozen=True, eq=False)
class BiasSeam(NativeSeam):
    """The blocks of a model that are handed ALiBi."""

    blocks: tuple[str, ...]  # the outermost modules that receive it, by path
    # The slopes in each of their arguments that carries it, as the model has them.
    slopes: Mapping[Key, tuple[float, ...]]
    sources = (ALIBI,)

    @classmethod
    def takes(cls, method: type[Method], source: str) -> bool:
        return issubclass(method, ALiBi)

    @classmethod
    def of(cls, model: nn.Module, positions: Positions) -> BiasSeam:
        with trial(model):
            found = [each for each in read_arguments(model) if each.slopes]
        sites: dict[str, dict[Key, tuple[float, ...]]] = {}
        for each in found:
            if not any(each.path.startswith(f"{other.path}.") for other in found):
                sites.setdefault(each.path, {})[each.key] = each.slopes or ()
        slopes, *others = sites.values()
        if any(other != slopes for other in others):
            raise UnsupportedModelError(
                f"{type(model).__name__} hands ALiBi to its blocks in different ways, which hf_posenc does not patch. "
                "Please report it, with the model type."
            )
        # The trained length: the width of biases made for all texts at once, or what the config names.
        width = max(each.value.shape[-1] for each in found)
        length: int | None = width
        if width <= 2 * TOKENS:
            named = (getattr(model.config, key, None) for key in LENGTH_KEYS)
            length = next((value for value in named if isinstance(value, int)), None)
        return cls(model.config, length, tuple(sites), slopes)

    def install(self, model: nn.Module, state: Record, method: Method) -> None:
        """Find the place of the biases by trial, at scale 1; then put in those of the requested scale."""
        assert isinstance(method, ALiBi)
        if method.keep_rope:
            raise PosencError(
                f"{type(model).__name__} has no rotation that keep_rope=True could keep."
            )
        with trial(model), state.sample.only():
            place, slopes = self._fitting(model)
        scaled = tuple(slope / method.scale for slope in slopes)
        bias = ModelALiBi(own=scaled, distance=method.distance)
        state.hooks += self._hook(model, place, bias)
        for owner in {_around(model, path): None for path in self.blocks}:
            state.hooks.append(owner.register_forward_pre_hook(WholeMask(), with_kwargs=True))
        with trial(model):
            with state.sample.only():
                _verify(_arguments_of(model, self.blocks[-1])[place.key], bias)
            self._hand_over(model, state, bias)
        state.write_config(model, [])

    def _hand_over(self, model: nn.Module, state: Record, bias: ModelALiBi) -> None:
        """Let the engine compute attention, if that gives what biases in their place give."""
        register()
        owner = _around(model, self.blocks[0])
        with state.sample.only():
            expected = run(model, trial_tokens(model))
        try:  # code that may call sdpa itself must not
            with named([owner.config], "eager"):
                output = self._by_engine(model, owner, bias, state.sample)
        except (PosencError, RuntimeError, ValueError, TypeError):
            output = None
        limit = probes.tolerance(model) * float(expected.abs().max())
        if output is None or float((output - expected).abs().max()) > limit:
            take_back(owner)
            return
        for forward in handed_over(owner):
            forward.least = masks.DENSE
        state.set(owner.config, {IMPLEMENTATION: "eager"})
        state.hooks += [*handed_over(owner), UnwrittenMasks(owner).install()]

    def _by_engine(
        self, model: nn.Module, owner: nn.Module, bias: ModelALiBi, sample: Sample
    ) -> Tensor | None:
        """Return the output of a model whose attention is handed over; `None` where it is not found."""
        ids = trial_tokens(model)
        found = search(owner, lambda: run(model, ids))
        inside = [{*model.get_submodule(path).modules()} for path in self.blocks]
        every = all(each.intersection(found.modules) for each in inside)
        if found.both_directions or not every or {*found.modules} - set().union(*inside):
            return None
        hand_over(found)
        encoding = Encoding(self.length or 1, len(bias.own), bias=bias, rotates=False)
        for forward in handed_over(owner):
            forward.optional = True
            Layer(encoding, patched=True).attach(forward.module)
        with sample.only():
            return run(model, ids)

    def rows(self, model: nn.Module) -> list[tuple[str, ...]]:
        """Return the slopes in force, read from the hooks; blocks with the same ones in a row."""
        found: dict[tuple[str, ...], list[str]] = {}
        for path in self.blocks:
            for hook in model.get_submodule(path)._forward_pre_hooks.values():
                if isinstance(hook, ExactBias):
                    own = hook.bias.own
                    cells = str(hook.place.key), str(len(own)), f"{max(own):.6g}", f"{min(own):.6g}"
                    found.setdefault(cells, []).append(path)
        heading = ("module", "argument", "heads", "steepest slope", "flattest slope")
        return [heading, *((summary(paths), *cells) for cells, paths in found.items())]

    def _fitting(self, model: nn.Module) -> tuple[Place, tuple[float, ...]]:
        """Return the first place, and the slopes there, at which biases of scale 1 give the model's own output.

        Where two arguments carry the biases, one way to compute attention may add both: the output is then that with
        one of them.
        """
        ids, values = trial_tokens(model), _arguments_of(model, self.blocks[0])
        for place in _places(values, tuple(self.slopes)):
            own = self.slopes.get(place.key) or next(iter(self.slopes.values()))
            exact = _exact(own, values)
            twice = () if place.adds else place.others
            with flattened(model, [Argument(b, k, ids, None) for b in self.blocks for k in twice]):
                expected = run(model, ids)
            slopes = exact, (0.0,) * len(own)
            try:
                output, without = (self._tried(model, ids, place, each) for each in slopes)
            except (RuntimeError, ValueError, TypeError):  # a dtype or shape that the model refuses
                continue
            size, effect = float(expected.abs().max()), float((expected - without).abs().max())
            limit = max(probes.tolerance(model) * size, _OF_EFFECT * effect)
            if float((output - expected).abs().max()) <= limit:
                return place, exact
        raise UnsupportedModelError(
            f"{type(model).__name__} is handed ALiBi as {', '.join(map(str, self.slopes))}, but its output with biases "
            "that hf_posenc makes is another one. The model was not changed. Please report it, with the model type."
        )

    def _tried(
        self, model: nn.Module, ids: Tensor, place: Place, slopes: tuple[float, ...]
    ) -> Tensor:
        with hooked(self._hook(model, place, ModelALiBi(own=slopes))):
            return run(model, ids)

    def _hook(self, model: nn.Module, place: Place, bias: ModelALiBi) -> list[RemovableHandle]:
        hooks = []
        for path in self.blocks:
            block = model.get_submodule(path)
            indices = (layer_index(path, inner) for inner in block.modules())
            hook = ExactBias(place, bias, next((i for i in indices if i is not None), 0))
            hooks.append(block.register_forward_pre_hook(hook, with_kwargs=True))
        return hooks


def _arguments_of(model: nn.Module, path: str) -> dict[Key, Any]:
    """Return the arguments with which a module is called, by index and by name."""
    values: dict[Key, Any] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        values.update({**dict(enumerate(args)), **kwargs})

    with hooked([model.get_submodule(path).register_forward_pre_hook(keep, with_kwargs=True)]):
        run(model, trial_tokens(model))
    return values


def _places(values: Mapping[Key, Any], linear: Sequence[Key]) -> Iterator[Place]:
    """Yield the places that biases may go to, best first: a mask with them, one without, the argument itself."""
    masks = [key for key, x in values.items() if _is_mask(x, TOKENS) and x.is_floating_point()]
    for key in sorted((*masks, *linear), key=lambda key: (key not in masks, key not in linear)):
        others = tuple(other for other in linear if other != key)
        place = Place(key, others, visible=key in masks, adds=key not in linear)
        yield place
        yield replace(place, exact=False)


def _exact(read: Sequence[float], values: Mapping[Key, Any]) -> tuple[float, ...]:
    """Return the slopes of the paper where those that were read are these, up to bfloat16's rounding.

    Biases that are added to scaled scores may be divided by the root of the width of a head.
    """
    hidden = next(value for value in values.values() if isinstance(value, Tensor))
    slopes, paper = torch.tensor(read, dtype=torch.float64), ALiBi().slopes(len(read))
    for factor in (1.0, (hidden.shape[-1] // len(read)) ** -0.5):
        if float((slopes / (paper * factor) - 1).abs().max()) <= _ROUNDED:
            return tuple((paper * factor).tolist())
    return tuple(read)


def _around(model: nn.Module, path: str) -> nn.Module:
    """Return the innermost module around a block that is given the mask and the cache."""
    names = path.split(".")
    around = [model.get_submodule(".".join(names[:end])) for end in range(len(names))]
    return next(
        module
        for module in reversed(around)
        if cache_name(module) and "attention_mask" in inspect.signature(module.forward).parameters
    )


def _verify(value: Tensor, bias: ModelALiBi) -> None:
    """Raise if the argument that a block is given is not the requested bias by distance."""
    rows = value.reshape(-1, *value.shape[-2:])[:, -1].double().cpu()
    distance = torch.arange(rows.shape[-1], dtype=torch.float64).flip(0)
    expected = bias.bias(distance, len(bias.own), {})
    error = float((rows - expected).abs().max() / expected.abs().max())
    if error > 2 * torch.finfo(value.dtype).eps:
        raise VerificationError(
            f"The biases that the model is given differ from the requested ones by {error:.1e}. The model was "
            "restored. Please report it, with the model type."
        )
