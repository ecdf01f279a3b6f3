"""Tensors of a live model at the places that hold them, and what a forward is shown instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_posenc.errors import PosencError


@dataclass(eq=False)
class Held:
    """A tensor at every module that holds it, by the very same object."""

    places: tuple[tuple[nn.Module, str], ...]

    def tensor(self) -> Tensor:
        """Return the tensor in force."""
        module, name = self.places[0]
        tensor: Tensor = getattr(module, name)
        return tensor

    def swap(self, tensor: Tensor) -> None:
        """Replace the tensor; device and dtype stay, and so does whether it is a parameter."""
        old = self.tensor()
        new = tensor.to(old.device, old.dtype)
        if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        for module, name in self.places:
            setattr(module, name, new)


def held(model: nn.Module, path: str) -> Held:
    """Return a tensor of a model, by its path, at every module that holds it."""
    outer, _, name = path.rpartition(".")
    tensor = getattr(model.get_submodule(outer), name)
    return Held(
        tuple(
            (module, key)
            for module in model.modules()
            for own in (module._parameters, module._buffers)
            for key, value in own.items()
            if value is tensor
        )
    )


def length_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens of a forward, padding included, and those in its cache; `None` if it gets no text."""
    values = (kwargs.get("input_ids"), *args[:1], kwargs.get("inputs_embeds"))
    given = next((value for value in values if isinstance(value, Tensor)), None)
    if given is None or given.dim() < 2:
        return None
    count = getattr(kwargs.get("past_key_values"), "get_seq_length", None)
    return given.shape[1], int(count()) if count is not None else 0


@dataclass(frozen=True)
class TableEnd:
    """A hook in front of a forward that refuses more tokens than its tables have positions for."""

    positions: int

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or (length := length_of(args, kwargs)) is None:
            return
        tokens = _longest(sum(length), kwargs.get("attention_mask"))
        if tokens > self.positions:
            raise PosencError(
                f"{tokens:,} tokens: the patched tables of {type(model).__name__} have {self.positions:,} positions. "
                f"Patch it with a target_length of at least {tokens:,}."
            )


def _longest(tokens: int, mask: Any) -> int:
    """Return the tokens of the longest text of a padded batch, at most `tokens`."""
    rows = tokens_of_rows(mask)
    return tokens if rows is None else min(tokens, max(rows))


def tokens_of_rows(mask: Any) -> list[int] | None:
    """Return the tokens in each row of a padded batch; `None` without a mask of shape (batch, tokens)."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return None
    rows: list[int] = mask.ne(0).sum(1).tolist()
    return rows or None


@dataclass(eq=False)
class InPlace:
    """Hooks around a forward that show another tensor in place of a table, which itself stays.

    Attributes:
        table: The table.
        start: Its row of position 0.
    """

    table: Held
    start: int
    _made: Tensor | None = field(default=None, init=False, repr=False)
    _version: tuple[Any, ...] = field(default=(), init=False, repr=False)
    # While another one is shown.
    _original: Tensor | None = field(default=None, init=False, repr=False)

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call `show`, if the forward is to read another tensor."""
        raise NotImplementedError

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Show the original table again."""
        for module, name in self.table.places:
            vars(module).pop(name, None)
            # The forward may have put a copy of the other one there.
            if self._original is not None and name in module._buffers:
                module._buffers[name] = self._original
        self._original = None

    def around(self, owner: nn.Module) -> list[RemovableHandle]:
        """Register the hooks around a module's forward."""
        return [
            owner.register_forward_pre_hook(self.before, with_kwargs=True),
            owner.register_forward_hook(self.after, always_call=True),
        ]

    def show(self, tensor: Tensor) -> None:
        """Put a tensor in front of the parameter or buffer, until the end of the forward."""
        self._original = self.table.tensor()
        for module, name in self.table.places:
            vars(module)[name] = tensor

    def made(self, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what is made of the table; the last one if the table has not changed."""
        table = self.table.tensor()
        version = (id(table), table._version, table.dtype, table.device)
        if self._made is None or self._version != version:
            self._made, self._version = make(table.detach()), version
        return self._made
