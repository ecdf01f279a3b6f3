"""The record of a running forward: what the attention function reads beside its arguments.

It travels with the call. No module and no config holds it, so that several threads may run one model, and a layer that
gradient checkpointing computes again gets the record of its own forward. What outlives a forward is an attribute of
transformers' cache. There are three ways:

* as a keyword, which most decoders hand on to their layers, and these to the attention function;
* as an attribute of a tensor among a module's arguments, for code that hands on no keywords;
* in a context variable, from the decoder to the functions that it calls, and `Again` to those of a recomputation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_posenc.attention.call import Mask, RotatedKeys

KEYWORD = "posenc"
"""The keyword of a decoder, its layers and the attention function that holds the `Forward`."""
_ATTRIBUTE = "_hf_posenc_forward"
_TensorT = TypeVar("_TensorT", bound=Tensor)


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a module's forward by their names."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


CACHES = ("cache", "past_key_values")
"""Names of a model's cache, as an argument and in an output: transformers 5.24 renamed it."""


def cache_of(given: Any) -> Any:
    """Return the cache among arguments by name, or in an output; `None` if there is none, or one of pages."""
    get: Any = given.get if isinstance(given, Mapping) else lambda name: getattr(given, name, None)
    return next((each for each in map(get, CACHES) if hasattr(each, "get_seq_length")), None)


def cache_name(module: nn.Module) -> str | None:
    """Return the name by which a module's forward, or that of its class, takes a cache; `None` if it takes none."""
    own, usual = (inspect.signature(f).parameters for f in (module.forward, type(module).forward))
    return next((name for name in CACHES if name in own or name in usual), None)


def text_of(args: Any, kwargs: Any) -> Tensor | None:
    """Return the tokens of a forward, or their embeddings; `None` if it gets neither."""
    given = (kwargs.get("input_ids"), *args[:1], kwargs.get("inputs_embeds"))
    return next((value for value in given if isinstance(value, Tensor)), None)


@dataclass(frozen=True, eq=False)
class Forward:
    """The record of one forward of a decoder, or of one call of an attention module; its fields never change."""

    # Those of the queries, shape (batch or 1, queries); `None`: the module hands them over itself.
    positions: Tensor | None = None
    # Those of the keys, shape (batch or 1, keys); `None`: they follow from the mask.
    key_positions: Tensor | None = None
    # The mask of a module that leaves in its own one the chosen keys alone.
    mask: Mask | None = None
    others: int = 0  # number of keys of another text, which come last
    weights: bool = False  # True if attention weights are to be returned
    # The lengths in force with `update="request"`, shape (batch,), by bucket and original length.
    lengths: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    # The keys that layers keep from one step to the next, by the layer's index in the cache.
    rotated: Mapping[int, RotatedKeys] = field(default_factory=dict)


def carry(tensor: _TensorT, forward: Forward) -> _TensorT:
    """Let a tensor of a forward carry its record to the modules that are given this tensor."""
    setattr(tensor, _ATTRIBUTE, forward)
    return tensor


def carried(values: Iterable[Any]) -> Forward | None:
    """Return the record that one of a module's arguments carries; `None` if none does.

    A rotary module's output is a tensor, or several of which the first one carries it. Where a module gets several
    rotations, they are in a dictionary.
    """
    for value in values:
        if isinstance(value, dict):
            found = carried(value.values())
        else:
            first = value[0] if isinstance(value, tuple | list) and len(value) else value
            found = getattr(first, _ATTRIBUTE, None) if isinstance(first, Tensor) else None
        if found is not None:
            return found
    return None


# What runs at the moment, the outermost first: each entry has the object that entered it and its value. The variable is
# one of the context, so that threads and tasks do not see each other's.
_running: ContextVar[tuple[tuple[object, Any], ...]] = ContextVar("hf_posenc", default=())


def running(of: object = None) -> Any:
    """Return the value that an object has entered, or the innermost `Forward`; `None` if there is none."""
    for key, value in reversed(_running.get()):
        if key is of or (of is None and isinstance(value, Forward)):
            return value
    return None


class Entering:
    """Hooks around a module's forward, while which `running` returns what `before` enters.

    A compiled forward enters nothing, unless `breaks` is set: then it leaves its graph for that.
    """

    breaks = False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Call `enter`, and return the arguments of the forward; `None` where they stay."""
        raise NotImplementedError

    def enter(self, value: Any) -> None:
        """Enter a value, until the end of the module's forward."""
        if self.breaks or not torch.compiler.is_compiling():
            self._enter(value)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Leave, also where the forward has raised."""
        if self.breaks or not torch.compiler.is_compiling():
            self._leave()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, value: Any) -> None:
        self._leave()  # a forward that was abandoned
        _running.set((*_running.get(), (self, value)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self) -> None:
        entries = _running.get()
        own = [index for index, (of, _) in enumerate(entries) if of is self]
        if own:
            _running.set(entries[: own[0]])

    def around(self, owner: nn.Module) -> list[RemovableHandle]:
        """Register the hooks."""
        return [
            owner.register_forward_pre_hook(self.before, with_kwargs=True),
            owner.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]


class Again:
    """A function of gradient checkpointing whose layer finds what runs now, also when it is computed again."""

    attribute = "_gradient_checkpointing_func"

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        entries = _running.get()

        def entered(*args: Any, **kwargs: Any) -> Any:
            token = _running.set(entries)
            try:
                return layer(*args, **kwargs)
            finally:
                _running.reset(token)

        return self.original(entered, *args, **kwargs)

    @classmethod
    def install(cls, owner: nn.Module) -> None:
        """Replace the functions that transformers gave the layers of a module."""
        for module in owner.modules():
            function = vars(module).get(cls.attribute)
            if function is not None and not isinstance(function, cls):
                vars(module)[cls.attribute] = cls(function)

    @classmethod
    def remove(cls, owner: nn.Module) -> None:
        """Restore them."""
        for module in owner.modules():
            function = vars(module).get(cls.attribute)
            if isinstance(function, cls):
                vars(module)[cls.attribute] = function.original
