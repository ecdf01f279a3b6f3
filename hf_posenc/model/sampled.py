"""Trial forwards of one block of each kind: the others hand their hidden states on.

What a patch is tried for is a property of code and config, which the blocks of a kind share. So a trial costs the same
whatever the number of layers. The blocks that run are the model's own, with whatever was changed in them by hand.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.model.unwrapping import configs_of, swapped
from hf_posenc.model.weights import is_offloaded

_DEPTH = 6  # of closures in closures
_LOGITS = 1024
_PERIOD = 65521  # a prime, so that no two rows of a matrix are the same
_ROWS = 1 << 14
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, type)
_OF_MODULES = {*vars(nn.Module())} - {"training"}
"""What every module has: its parameters, buffers, children and hooks are described on their own."""


@dataclass(frozen=True, eq=False)
class Sample:
    """The blocks of a model that stand for others."""

    twins: Mapping[nn.Module, tuple[nn.Module, ...]]  # the blocks for which each block stands
    # A plain layer that turns hidden states into logits, of which a few are enough.
    head: nn.Module | None = None
    # The modules that run, of a model that has weights on the meta device.
    empty: tuple[nn.Module, ...] = ()
    _filled: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def counterparts(self) -> dict[nn.Module, list[dict[nn.Module, nn.Module]]]:
        """Return by module of a block that stands for others, for each of these, its module for every such module."""
        found: dict[nn.Module, list[dict[nn.Module, nn.Module]]] = {}
        for block, twins in self.twins.items():
            pairs = [dict(zip(block.modules(), twin.modules(), strict=True)) for twin in twins]
            for module in block.modules():
                found.setdefault(module, []).extend(pairs)
        return found

    def everywhere(self, model: nn.Module, places: Iterable[str]) -> tuple[str, ...]:
        """Return paths in blocks that stand for others, and the same ones in those."""
        numbered = enumerate(model.named_modules())
        order = {module: (number, path) for number, (path, module) in numbered}
        found: dict[str, int] = {}
        for place in places:
            found.setdefault(place, -1)
            for block, twins in self.twins.items():
                number, path = order[block]
                if place == path or place.startswith((f"{path}.", f"{path}(")):
                    found[place] = number
                    for twin in twins:
                        number, other = order[twin]
                        found[other + place.removeprefix(path)] = number
        return tuple(sorted(found, key=found.__getitem__))

    @contextlib.contextmanager
    def only(self) -> Iterator[None]:
        """Run no block that another one stands for, where that one has shown what a block returns.

        Tensors on the meta device have random values on the CPU meanwhile, in the blocks that run and outside of them.
        """
        latest: dict[nn.Module, tuple[torch.Size, Any]] = {}

        def keep(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = _text((*args, *kwargs.values()))
            shown = _text(output)
            latest.pop(block, None)
            if given is not None and shown is not None and given.shape == shown.shape:
                latest[block] = given.shape, output

        def passing(block: nn.Module, native: Any) -> Any:
            @functools.wraps(native)
            def forward(*args: Any, **kwargs: Any) -> Any:
                given, shown = _text((*args, *kwargs.values())), latest.get(block)
                if given is None or shown is None or given.shape != shown[0]:
                    return native(*args, **kwargs)
                return _with_text(shown[1], given)

            return forward

        with contextlib.ExitStack() as stack:
            for module in self.empty:
                holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for held in holders:
                    for name, tensor in held.items():
                        if tensor is not None and tensor.is_meta:
                            stack.enter_context(swapped(held, name, self._stand_in(tensor)))
            if self.head is not None:
                few = functools.partial(_few_logits, self.head)
                stack.enter_context(swapped(vars(self.head), "forward", few))
            for block, twins in self.twins.items():
                stack.callback(block.register_forward_hook(keep, with_kwargs=True).remove)
                for twin in twins:
                    forward = passing(block, twin.forward)
                    stack.enter_context(swapped(vars(twin), "forward", forward))
            yield

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return random values in place of a tensor on the meta device, the same ones each time."""
        if id(tensor) not in self._filled:
            with torch.device("cpu"):
                values = _random(tensor, len(self._filled)).to(tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                values = nn.Parameter(values, requires_grad=False)
            self._filled[id(tensor)] = tensor, values
        return self._filled[id(tensor)][1]


def _random(tensor: Tensor, seed: int) -> Tensor:
    """Return values like those of weights that were never trained; large tensors repeat themselves."""
    shape, generator = tensor.shape, torch.Generator().manual_seed(seed)
    if not tensor.is_floating_point():
        return torch.zeros(shape)
    if len(shape) < 2:  # the weight of a norm, for one
        return 1 + 0.1 * torch.rand(shape, generator=generator)
    values: Tensor = torch.randn(min(tensor.numel(), _PERIOD), generator=generator)
    values = (values * shape[-1] ** -0.5).to(tensor.dtype)
    if len(shape) == 2 and shape[0] > _ROWS:  # an embedding: rows that overlap
        count = shape[0] + shape[1]
        return values.repeat(-(-count // len(values)))[:count].as_strided(shape, (1, 1))
    count = tensor[0].numel() if len(shape) > 2 else tensor.numel()
    values = values.repeat(-(-count // len(values)))[:count]
    # Experts are all the same.
    return values.view(shape[1:]).expand(shape) if len(shape) > 2 else values.view(shape)


def without_weights(model: nn.Module) -> bool:
    """Return whether a model has weights on the meta device that nothing brings when they are needed."""
    return any(
        any(each is not None and each.is_meta for each in module._parameters.values())
        and not is_offloaded(module)
        for module in model.modules()
    )


def sample_of(model: nn.Module) -> Sample:
    """Return the blocks of a model by kind: the first of each stands for all that are built as it is."""
    twins: dict[nn.Module, tuple[nn.Module, ...]] = {}
    configs = [*configs_of(model).values()]
    for blocks in _lists(model):
        described = [_described(block) for block in blocks]
        # A model may read what a block is to do off a list in its config (`position_embeddings=None`).
        for config in configs:
            for name, values in vars(config).items():
                if isinstance(values, list | tuple) and len(values) == len(blocks):
                    for each, value in zip(described, values, strict=True):
                        each[f"config.{name}"] = _key(value)
        for name in dict.fromkeys(name for each in described for name in each):
            held = {index: each[name] for index, each in enumerate(described) if name in each}
            if len(held) < 3 or any(type(value) is not int for value in held.values()):
                continue
            if len({value - index for index, value in held.items()}) == 1:  # the number of a block
                for index in held:
                    described[index][name] = "number"
        kinds: dict[Any, list[nn.Module]] = {}
        for block, description in zip(blocks, described, strict=True):
            kinds.setdefault(tuple(description.items()), []).append(block)
        for first, *others in kinds.values():
            distinct = dict.fromkeys(each for each in others if each is not first)
            if distinct and len({first, *distinct}) == len(others) + 1:
                twins[first] = tuple(distinct)
    empty: tuple[nn.Module, ...] = ()
    if without_weights(model):
        still = {each for others in twins.values() for twin in others for each in twin.modules()}
        still -= {each for block in twins for each in block.modules()}
        empty = tuple(module for module in model.modules() if module not in still)
    return Sample(twins, _plain_head(model), empty)


def _plain_head(model: Any) -> nn.Module | None:
    try:
        head = model.get_output_embeddings()
    except Exception:  # it has none
        return None
    plain = type(head) is nn.Linear and not {"forward", "_hf_hook"} & vars(head).keys()
    return head if plain and head.out_features > _LOGITS else None


def _few_logits(head: Any, hidden: Tensor) -> Tensor:
    bias = None if head.bias is None else head.bias[:_LOGITS]
    return nn.functional.linear(hidden, head.weight[:_LOGITS], bias)


def _lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the outermost lists of blocks."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and all(any(each.children()) for each in child):
            yield [*child]
        else:
            yield from _lists(child)


def _described(block: nn.Module) -> dict[str, Any]:
    """Return what a block is built of: classes, shapes, hooks, attributes and functions, but no weights."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        found[path] = type(module)
        for name, value in vars(module).items():
            if name not in _OF_MODULES:
                # That of accelerate has the names of the weights that it brings.
                found[f"{path}.{name}"] = type(value) if name == "_hf_hook" else _key(value)
        found[f"{path}#before"] = tuple(map(_key, module._forward_pre_hooks.values()))
        found[f"{path}#after"] = tuple(map(_key, module._forward_hooks.values()))
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                found[f"{path}.{name}"] = _key(tensor)
    return found


def _key(value: Any, depth: int = 0) -> Any:
    """Return what is equal for values that do the same in two blocks; the value itself where that is unknown."""
    if isinstance(value, _PLAIN):
        return value if type(value) is int else (type(value), value)
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.device, tuple(value.shape)
    if isinstance(value, nn.Module):
        return type(value)
    if depth == _DEPTH:
        return id(value)
    inner = functools.partial(_key, depth=depth + 1)
    if isinstance(value, tuple | list | set | frozenset):
        return type(value), *map(inner, value)
    if isinstance(value, dict):
        return type(value), *((inner(key), inner(each)) for key, each in value.items())
    if isinstance(value, functools.partial):
        return functools.partial, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, types.MethodType):
        return types.MethodType, inner(value.__func__), inner(value.__self__)
    if isinstance(value, types.FunctionType):
        cells = tuple(inner(_contents(cell)) for cell in value.__closure__ or ())
        return value.__code__, cells, inner(value.__defaults__), inner(value.__kwdefaults__)
    return id(value)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _text(values: Any) -> Tensor | None:
    """Return the first tensor of hidden states among arguments, or in an output."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() and values.dim() > 2 else None
    for value in values if isinstance(values, tuple | list) else ():
        if isinstance(value, Tensor) and (found := _text(value)) is not None:
            return found
    return None


def _with_text(output: Any, hidden: Tensor) -> Any:
    if isinstance(output, Tensor):
        return hidden
    place = next(index for index, value in enumerate(output) if _text(value) is not None)
    return type(output)([*output[:place], hidden, *output[place + 1 :]])
