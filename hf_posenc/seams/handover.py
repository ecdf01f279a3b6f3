"""Modules that compute attention in code of their own: found by trial, and handed to the attention function."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from hf_posenc.model.attention import IMPLEMENTATION, recording
from hf_posenc.model.discovery import SinCosTable
from hf_posenc.model.masks import HANDLE, described, visible
from hf_posenc.model.repositioned import SCORES, RepositionedTable
from hf_posenc.seams.scores import Pending, Scope, Weights, _Product


class _Search(Scope):
    """Finds the modules of a model that hand attention over, and those that show later keys to a query."""

    def __init__(self) -> None:
        super().__init__(None, None, weights=False)
        self.running: list[nn.Module] = []
        self.operations: dict[str, None] = {}
        self.both_directions: list[nn.Module] = []
        self.features_first: list[nn.Module] = []

    def path(self) -> tuple[nn.Module, ...]:
        return tuple(self.running)

    def are_keys(self, query: Tensor, key: Tensor) -> bool:
        """Return it by the shapes: as many keys as queries, and another number of features."""
        tokens, features = query.shape[-2:]
        if tokens == features:
            return super().are_keys(query, key)
        if tokens != key.shape[-1]:
            return False
        if not super().are_keys(query, key):
            self.features_first += self.running
        return True

    def lead_of(self, product: _Product) -> tuple[int, int] | None:
        """Return them for a batch of two rows of the same tokens, whose heads come row by row."""
        count = product.size[0]
        one, other = product.query.chunk(2) if count % 2 == 0 else (product.query, None)
        return (2, count // 2) if other is not None and torch.allclose(one, other) else None

    def seen(self, module: nn.Module, mask: Tensor | None) -> Tensor | None:
        if mask is not None and mask.dtype == HANDLE:
            mask = described(mask).rows(0, mask.shape[-2])
        if mask is not None and bool(visible(mask).triu(1).any()):
            self.both_directions.append(module)
        return mask

    def refuse(self, operation: str) -> None:
        self.operations[operation] = None


@dataclass(frozen=True)
class Found:
    """What `search` found.

    Attributes:
        modules: The attention modules.
        both_directions: Those that are not causal.
        features_first: Modules whose keys have features before tokens.
        operations: Operations on scores that are unknown.
    """

    modules: tuple[nn.Module, ...]
    both_directions: tuple[nn.Module, ...]
    features_first: tuple[nn.Module, ...]
    operations: tuple[str, ...]


def search(owner: nn.Module, forward: Callable[[], object]) -> Found:
    """Run a forward over a few tokens, and return the modules that compute attention in code of their own."""
    scope = _Search()

    def enter(module: nn.Module, args: Any) -> None:
        scope.running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        scope.running.pop()

    with contextlib.ExitStack() as stack:
        for module in owner.modules():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        calls = stack.enter_context(recording())
        stack.enter_context(scope)
        forward()
    directions, layouts = tuple(scope.both_directions), tuple(scope.features_first)
    return Found(tuple(calls), directions, layouts, tuple(scope.operations))


class HandedOver:
    """The forward of a module whose attention is handed to `posenc_attention`, or which reads a table by position.

    It is an attribute of the module, so that it survives a copy, and is not traced by `torch.compile`.

    Attributes:
        bidirectional: True if queries see later keys.
        transposed: False if keys have features before tokens.
        optional: True if the module's own code computes the same where this is not used.
        least: Pairs of a query and a key up to which that code is used, where it is `optional`.
        used: False where the next call is to run that code.
        weights: True where the next call returns attention weights, which it may not be asked for by name.
        table: The sin-cos table that the module holds.
        embedding: The table of the embedding that rotates the module's queries and keys outside of it.
    """

    def __init__(
        self, module: nn.Module, *, bidirectional: bool = False, transposed: bool = True
    ) -> None:
        self.module, self.bidirectional, self.transposed = module, bidirectional, transposed
        self.earlier = vars(module).get("forward")  # of accelerate, say
        names = inspect.signature(type(module).forward).parameters
        self.names = tuple(itertools.islice(names, 1, None))
        self.table: RepositionedTable | None = None
        self.embedding: RepositionedTable | None = None
        self.optional, self.least, self.used, self.weights = False, 0, True, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.optional and (torch.compiler.is_compiling() or not self.used):
            return self._own(*args, **kwargs)
        return self._handed(*args, **kwargs)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own code."""
        if self.earlier is not None:
            return self.earlier(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @_disable_dynamo
    def _handed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own code, and compute its attention in the engine."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        positions = given.get("position_ids")
        if positions is None and self.embedding is not None:
            positions = self.embedding.latest
        weights = self.weights or bool(given.get("output_attentions"))
        scope = Scope(self.module, positions, weights=weights)
        scope.transposed = self.transposed
        scope.bidirectional, scope.counts_padding = self.bidirectional, self.embedding is not None
        scope.arguments = {id(each) for each in given.values() if isinstance(each, Tensor)}
        with contextlib.ExitStack() as stack:
            if self.table is not None and isinstance(self.module, nn.Embedding):
                scope.embedding = self.table
            elif self.table is not None:
                stack.enter_context(self.table.in_place(positions))
            stack.enter_context(scope)
            output = self._own(*args, **kwargs)
        output = _settled(output, weights=scope.weights)
        if not scope.attended:
            scope.check()
        return output


class UnwrittenMasks:
    """Hooks around a decoder whose attention is handed over: the masks that it makes are `scores_mask`'s."""

    def before(self, owner: Any, args: Any) -> None:
        """Choose the mask function, unless another implementation was chosen since the patch."""
        if not torch.compiler.is_compiling() and vars(owner.config).get(IMPLEMENTATION) == "eager":
            vars(owner.config)[IMPLEMENTATION] = SCORES

    def after(self, owner: Any, args: Any, output: Any) -> None:
        """Restore the implementation."""
        if vars(owner.config).get(IMPLEMENTATION) == SCORES:
            vars(owner.config)[IMPLEMENTATION] = "eager"

    def around(self, owner: nn.Module) -> list[RemovableHandle]:
        """Register the hooks."""
        return [
            owner.register_forward_pre_hook(self.before),
            owner.register_forward_hook(self.after, always_call=True),
        ]


def give_positions(model: nn.Module, table: SinCosTable) -> RepositionedTable | None:
    """Return a table that modules which are handed over read from now on; `None` if it is not theirs.

    It is a buffer of one of them, or an embedding whose rows they get.
    """
    repositioned, module = RepositionedTable(table, [table.label]), table.module
    forwards = handed_over(model)
    if isinstance(module, nn.Embedding):
        for each in forwards:
            each.embedding = repositioned
        forwards = [HandedOver(module)]
        vars(module)["forward"] = forwards[0]
    own = [each for each in forwards if each.module is module]
    for each in own:
        each.table = repositioned
    return repositioned if own else None


def _settled(output: Any, *, weights: bool) -> Any:
    """Return the output of a module with real tensors, and `None` for weights that are not requested."""
    if isinstance(output, Weights) and not weights:
        return None
    if isinstance(output, Pending):
        return output.computed("a return of them")
    if type(output) in (list, tuple):
        return type(output)(_settled(each, weights=weights) for each in output)
    return output


def hand_over(found: Found) -> None:
    """Replace the forward of attention modules, until `take_back`."""
    for module in found.modules:
        both, transposed = module in found.both_directions, module not in found.features_first
        vars(module)["forward"] = HandedOver(module, bidirectional=both, transposed=transposed)


def handed_over(owner: nn.Module) -> list[HandedOver]:
    """Return the forwards of the modules whose attention is handed over, or which read a table by position."""
    names = "forward", "_old_forward"  # accelerate's hooks hold the one from before
    held = (vars(module).get(name) for module in owner.modules() for name in names)
    return [forward for forward in held if isinstance(forward, HandedOver)]


def take_back(model: nn.Module) -> None:
    """Restore the forward of every module."""
    for module in model.modules():
        for name in ("forward", "_old_forward"):  # as in `handed_over`
            forward = vars(module).get(name)
            if isinstance(forward, HandedOver):
                del vars(module)[name]
                if forward.earlier is not None:
                    vars(module)[name] = forward.earlier
                elif name != "forward":
                    vars(module)[name] = types.MethodType(type(module).forward, module)


def tables_in_place(model: nn.Module) -> dict[int, RepositionedTable]:
    """Return the sin-cos tables that are given other positions, by `id` of the module that holds them."""
    forwards = {id(module): vars(module).get("forward") for module in model.modules()}
    return {
        key: forward.table
        for key, forward in forwards.items()
        if isinstance(forward, HandedOver) and forward.table is not None
    }
