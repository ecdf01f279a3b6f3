"""Modules that compute attention in code of their own: found by trial, and handed to the attention function."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from hf_posenc.model.attention import IMPLEMENTATION, recording
from hf_posenc.model.discovery import RepositionedTable, SinCosTable
from hf_posenc.model.forward import KEYWORD, Forward, carried, running
from hf_posenc.model.masks import HANDLE, described, visible
from hf_posenc.model.positions import LAYER
from hf_posenc.model.rotary import SCORES
from hf_posenc.seams.held import Replaced
from hf_posenc.seams.scores import Pending, Scope, Weights, _Product
from hf_posenc.seams.traces import following


class Search(Scope):
    """Finds the modules of a model that compute attention in code of their own."""

    def __init__(self, entered: list[nn.Module]) -> None:
        super().__init__(None, None, weights=False)
        self.running = entered  # the modules that run, the innermost last
        self.modules: list[nn.Module] = []  # the attention modules
        self.both_directions: list[nn.Module] = []  # those that show later keys to a query
        self.features_first: list[nn.Module] = []  # those whose keys have features before tokens
        self.operations: dict[str, None] = {}  # operations on scores that are unknown

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


def search(owner: nn.Module, forward: Callable[[], object]) -> Search:
    """Run a forward over a few tokens, and return the modules that compute attention in code of their own."""
    with following((each, each) for each in owner.modules()) as entered, recording() as calls:
        scope = Search(entered)
        with scope:
            forward()
    scope.modules = [*calls]
    return scope


class HandedOver(Replaced):
    """The forward of a module whose attention is handed to `posenc_attention`, or which reads a table by position.

    It is not traced by `torch.compile`.
    """

    def __init__(
        self, module: nn.Module, *, bidirectional: bool = False, transposed: bool = True
    ) -> None:
        super().__init__(module)
        self.bidirectional = bidirectional  # queries see later keys
        self.transposed = transposed  # False if keys have features before tokens
        names = inspect.signature(type(module).forward).parameters
        self.names = tuple(itertools.islice(names, 1, None))
        self.table: RepositionedTable | None = None  # the sin-cos table that the module holds
        # The table of the embedding that rotates the module's queries and keys outside of it.
        self.embedding: RepositionedTable | None = None
        # The module's own code computes the same, and is used unless an argument carries a record.
        self.optional = False
        # Pairs of a query and a key up to which that code is used, where it is optional.
        self.least = 0

    def remove(self) -> None:
        """Restore the module, which then has no encoding."""
        super().remove()
        vars(self.module).pop(LAYER, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = kwargs.pop(KEYWORD, None) or carried((*args, *kwargs.values()))
        if self.optional and (torch.compiler.is_compiling() or forward is None):
            return self.native(self.module, *args, **kwargs)
        return self._handed(forward, *args, **kwargs)

    @_disable_dynamo
    def _handed(self, forward: Forward | None, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own code, and compute its attention in the engine."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        found = forward or running() or Forward()
        positions = given.get("position_ids") if found.positions is None else found.positions
        weights = found.weights or bool(given.get("output_attentions"))
        scope = Scope(self.module, positions, weights=weights)
        scope.handed = {} if forward is None else {KEYWORD: forward}
        scope.transposed = self.transposed
        scope.bidirectional, scope.counts_padding = self.bidirectional, self.embedding is not None
        scope.arguments = {id(each) for each in given.values() if isinstance(each, Tensor)}
        others = {}
        if self.table is not None and isinstance(self.module, nn.Embedding):
            scope.embedding = self.table
        elif self.table is not None:
            others[self.table.table.attribute] = self.table.rows(positions)
        with scope:
            output = self.seen_as(others, *args, **kwargs)
        output = _settled(output, weights=scope.weights)
        if not scope.attended:
            scope.check()
        return output


class UnwrittenMasks(Replaced):
    """The forward of a decoder whose attention is handed over: the masks that it makes are `scores_mask`'s."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = self.module.config
        # Another implementation may have been chosen since the patch.
        if torch.compiler.is_compiling() or vars(config).get(IMPLEMENTATION) != "eager":
            return self.native(self.module, *args, **kwargs)
        config = copy.copy(config)
        vars(config)[IMPLEMENTATION] = SCORES
        return self.seen_as({"config": config}, *args, **kwargs)


def give_positions(model: nn.Module, table: SinCosTable) -> RepositionedTable | None:
    """Return a table that modules which are handed over read from now on; `None` if none can be given it.

    It is a buffer of one of them, an embedding whose rows they get, or a buffer of a module that is given positions.
    """
    repositioned, module = RepositionedTable(table, [table.label]), table.module
    forwards = handed_over(model)
    if isinstance(module, nn.Embedding):
        for each in forwards:
            each.embedding = repositioned
        forwards = [HandedOver(module)]
        forwards[0].install()
    elif not forwards and "position_ids" in inspect.signature(module.forward).parameters:
        forwards = [HandedOver(module)]  # of GPT-J since transformers 5.24
        forwards[0].install()
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


def hand_over(found: Search) -> None:
    """Replace the forward of attention modules, until `take_back`."""
    for module in found.modules:
        both, transposed = module in found.both_directions, module not in found.features_first
        HandedOver(module, bidirectional=both, transposed=transposed).install()


def handed_over(owner: nn.Module) -> list[HandedOver]:
    """Return the forwards of the modules whose attention is handed over, or which read a table by position."""
    names = "forward", "_old_forward"  # accelerate's hooks hold the one from before
    held = (vars(module).get(name) for module in owner.modules() for name in names)
    return [forward for forward in held if isinstance(forward, HandedOver)]


def take_back(model: nn.Module) -> None:
    """Restore the forward of every module."""
    for forward in handed_over(model):
        forward.remove()


def tables_in_place(model: nn.Module) -> dict[int, RepositionedTable]:
    """Return the sin-cos tables that are given other positions, by `id` of the module that holds them."""
    return {id(each.module): each.table for each in handed_over(model) if each.table is not None}
