"""What a live model reads by position: rows of tables, and arguments that are handed from module to module.

A table of positions is read at rows that do not depend on the tokens, one after the other, as many as there are tokens.
A relative position bias is read at the same row along each diagonal of queries and keys. Other biases are arguments
that do not depend on the tokens and vary along the keys.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_posenc.errors import UnsupportedModelError
from hf_posenc.model.unwrapping import hooked, trial
from hf_posenc.model.weights import execution_device, is_plain
from hf_posenc.seams.probes import TOKENS, forward, ordinary_tokens

T = TypeVar("T")
_aten = torch.ops.aten
_COPIES = {_aten.repeat.default, _aten.clone.default, _aten._to_copy.default}
_UNEVEN = 2 * TOKENS * 2**-9  # relative
_LONGER = TOKENS + 3  # the length of a second text


@dataclass(frozen=True)
class Reading:
    """The rows of a tensor that a forward reads."""

    name: str  # the tensor's path in the model
    axis: int  # the axis of the tensor that rows are counted along
    first: int | None  # the row of position 0; `None` for a relative position bias


@dataclass(frozen=True, eq=False)
class Argument:
    """A float argument of a module that depends on positions and not on tokens."""

    path: str  # the module's path in the model
    key: int | str  # the argument: its name, or its index among those without a name
    value: Tensor  # its value for the text of the trace
    # The factors on the distance, one for each head, where it is linear in the place of the key; else `None`.
    slopes: tuple[float, ...] | None


def read_tables(model: nn.Module) -> list[Reading]:
    """Return the float parameters and buffers that a model reads by position."""
    texts = (TOKENS, 1), (TOKENS, 2), (_LONGER, 3)
    first, second, longer = (rows_read(model, ordinary_tokens(model, *text)) for text in texts)
    readings = []
    for name, reads in first.items():
        others, long = second.get(name, []), longer.get(name)
        same = len(reads) == len(others) and all(
            a == b and torch.equal(rows, again)
            for (a, rows), (b, again) in zip(reads, others, strict=True)
        )
        if not same or not long:
            continue
        (axis, index), (_, later) = reads[0], long[0]
        if not index.numel():  # of LongT5: a global token per sixteen
            raise UnsupportedModelError(f"{name} is read beyond {TOKENS} tokens only: unsupported.")
        start = _start(index, TOKENS)
        if start is not None and _start(later, _LONGER) == start:
            readings.append(Reading(name, axis, start))
        elif _by_distance(index, TOKENS) and _by_distance(later, _LONGER):
            readings.append(Reading(name, axis, None))
    return readings


def _start(index: Tensor, tokens: int) -> int | None:
    """Return the first row where rows are read one after the other along one axis; else `None`."""
    for axis, size in enumerate(index.shape):
        if size < tokens:
            continue
        lines = index.movedim(axis, -1).reshape(-1, size)[:, :tokens]
        if bool((lines.diff(dim=1) == 1).all()) and bool((lines == lines[:1]).all()):
            return int(lines[0, 0])
    return None


def _by_distance(index: Tensor, tokens: int) -> bool:
    """Return whether rows are read by the distance of query and key."""
    if index.dim() < 2 or min(index.shape[-2:]) < tokens:
        return False
    square = index.reshape(-1, *index.shape[-2:])[0]
    return bool((square[1:, 1:] == square[:-1, :-1]).all()) and len(square.unique()) > 1


class _Reads(TorchDispatchMode):
    """Records which rows of a model's float parameters and buffers a forward reads, copies of them included."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, tuple[str, Tensor]] = {}
        # A copy that is freed would give its address to another tensor.
        self.kept: list[Tensor] = []
        self.reads: dict[str, list[tuple[int, Tensor]]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and is_plain(tensor) and tensor.numel():
                self.names.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if not isinstance(source, Tensor) or not is_plain(source) or not source.is_floating_point():
            return output
        named = self.names.get(source.untyped_storage().data_ptr())
        if named is None:
            return output
        if func in _COPIES:
            self.names[output.untyped_storage().data_ptr()] = named
            self.kept.append(output)
        elif (read := _rows_read(func, args)) is not None:
            # `repeat` puts axes before the table's own.
            axis = read[0] - source.dim() + named[1].dim()
            self.reads.setdefault(named[0], []).append((max(axis, 0), read[1].detach().clone()))
        return output


def _rows_read(func: Any, args: Sequence[Any]) -> tuple[int, Tensor] | None:
    """Return the axis and the rows that an operation reads of its first argument; `None` for other operations."""
    if func is _aten.embedding.default:
        return 0, args[1]
    if func in (_aten.index_select.default, _aten.gather.default):
        return args[1] % args[0].dim(), args[2]
    if func is _aten.index.Tensor:
        given = [(axis, index) for axis, index in enumerate(args[1]) if index is not None]
        return given[0] if len(given) == 1 and given[0][1].dtype != torch.bool else None
    if func is _aten.slice.Tensor:
        axis, start, end = ([*args, *[None] * 4])[1:4]
        axis = (axis or 0) % args[0].dim()
        size = args[0].shape[axis]
        rows = range(size)[slice(start, end)]
        return (axis, torch.tensor(rows)) if 0 < len(rows) < size else None
    return None


def rows_read(model: nn.Module, ids: Tensor) -> dict[str, list[tuple[int, Tensor]]]:
    """Return the axis and the rows of each read of a float parameter or buffer in a forward, by the tensor's path."""
    trace = _Reads(model)
    with trial(model), trace:
        forward(model, ids)
    return trace.reads


@contextlib.contextmanager
def following(modules: Iterable[tuple[T, nn.Module]]) -> Iterator[list[T]]:
    """Yield a list of those modules that run at the moment, by the names given to them, the innermost last."""
    entered: list[T] = []
    with contextlib.ExitStack() as stack:
        for name, module in modules:
            enter = functools.partial(lambda name, *_: entered.append(name), name)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            leave = module.register_forward_hook(lambda *_: entered.pop() and None)
            stack.callback(leave.remove)
        yield entered


class _Kernels(TorchDispatchMode):
    """Records the modules in which weights of attention are computed, and those in which something is convolved."""

    def __init__(self, entered: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entered = entered
        self.weighing: set[str] = set()
        self.convolving: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if any(word in name for word in ("softmax", "attention", "attn")):
            self.weighing.update(self.entered)
        if any(word in name for word in ("convolution", "conv1d", "conv2d")):
            self.convolving.update(self.entered)
        return func(*args, **(kwargs or {}))


def weighing(model: nn.Module, paths: Collection[str]) -> set[str]:
    """Return those of some modules that mix tokens by weights of attention alone, with no convolution beside it.

    Weights are known by a softmax, or by a kernel of attention. A recurrence has neither.
    """
    with following((path, model.get_submodule(path)) for path in paths) as entered:
        trace = _Kernels(entered)
        with trial(model), trace:
            forward(model, ordinary_tokens(model, TOKENS))
    return trace.weighing - trace.convolving


class _Derived(TorchDispatchMode):
    """Follows some tensors through a forward: what is computed from one, or written over with one, is derived."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage, since a model may write on a view. Kept, or another tensor could get the same one.
        self.storages: dict[int, Tensor] = {}

    def add(self, value: Tensor) -> None:
        self.storages[value.untyped_storage()._cdata] = value

    def __contains__(self, value: Tensor) -> bool:
        return value.untyped_storage()._cdata in self.storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if any(each in self for each in _tensors((args, kwargs))):
            for each in _tensors(output):
                self.add(each)
        return output


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors with a storage among nested values."""
    native = Tensor.__torch_dispatch__
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    return [
        each
        for each in tensors
        if type(each).__torch_dispatch__ is native and each.layout == torch.strided
    ]


def users_of(model: nn.Module, sources: Collection[str]) -> set[str]:
    """Return the paths of the modules that compute with what the modules of some paths return.

    A use inside of a submodule counts for that alone. No value is compared, so models on the meta device are traced
    too. Raises whatever a model raises that cannot be run on a few tokens alone.
    """
    on_meta = execution_device(model).type == "meta"
    if on_meta:  # the only precision that experts have there; a copy takes no memory
        model = copy.deepcopy(model).to("meta", torch.bfloat16)
    ids = torch.arange(4, 4 + TOKENS, device=execution_device(model))[None]
    modules = {path: model.get_submodule(path) for path in sources}
    inside = {each for module in modules.values() for each in module.modules()}
    trace, found = _Derived(), set[str]()

    def begin(module: nn.Module, args: Any, output: Any) -> None:
        for each in _tensors(output):
            trace.add(each)

    def end(path: str) -> Any:
        def cut(module: nn.Module, args: Any, output: Any) -> Any:
            if not any(each in trace for each in _tensors(output)):
                return None
            found.add(path)
            with _disable_current_modes():
                return tree_map_only(Tensor, torch.clone, output)

        return cut

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            if path in modules or module not in inside:
                hook = begin if path in modules else end(path)
                stack.callback(module.register_forward_hook(hook).remove)
        stack.enter_context(trial(model))
        if on_meta:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(trace)
        if on_meta:  # without a cache, its positions are compared with those of a packed text
            model(input_ids=ids, use_cache=True)
        else:
            forward(model, ids)
    return found


def read_arguments(model: nn.Module) -> list[Argument]:
    """Return the arguments that carry positions: those that grow with the text, and linear ones of a fixed length.

    Tables and rotations must be silenced, or they are found again.
    """
    texts = (TOKENS, 1), (TOKENS, 2), (_LONGER, 3)
    first, second, longer = (_arguments(model, ordinary_tokens(model, *text)) for text in texts)
    found = []
    for place, value in first.items():
        other, long = second.get(place), longer.get(place)
        if other is None or long is None or not torch.equal(other, value):
            continue
        slopes = _slopes(value)
        if slopes is not None or _varies(value, long):
            found.append(Argument(*place, value, slopes))
    return found


def _varies(value: Tensor, longer: Tensor) -> bool:
    """Return whether an argument grows with the text and is uneven along the axes that grow."""
    if value.dim() != longer.dim():
        return False
    axes = [axis for axis in range(value.dim()) if value.shape[axis] != longer.shape[axis]]
    shown = value > torch.finfo(value.dtype).min / 4  # what a mask hides says nothing
    visible = value.double().masked_fill(~shown, torch.nan).movedim(axes, list(range(len(axes))))
    lines = visible.reshape(*visible.shape[: len(axes)], -1).flatten(0, -2) if axes else visible[:0]
    return bool((lines != lines[:1])[~lines.isnan() & ~lines[:1].isnan()].any())


def _slopes(value: Tensor) -> tuple[float, ...] | None:
    """Return the factors on the place of the key, where an argument (..., heads, queries, keys) is linear in it."""
    if not value.numel() or value.shape[-1] < TOKENS or value.dim() < 2:
        return None
    steps = value.double()[..., -1, :].diff(dim=-1).reshape(-1, value.shape[-1] - 1)
    size = float(steps.abs().max())
    uneven = float((steps - steps[:, :1]).abs().max())
    # ALiBi moves in steps of its rounding: two of bfloat16, in which some models make it whatever their dtype.
    limit = max(_UNEVEN, 2 * TOKENS * torch.finfo(value.dtype).eps) * size
    return tuple(steps.mean(-1).tolist()) if size > 0 and uneven <= limit else None


def _arguments(model: nn.Module, ids: Tensor) -> dict[tuple[str, int | str], Tensor]:
    values: dict[tuple[str, int | str], Tensor] = {}

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            for key, value in [*enumerate(args), *kwargs.items()]:
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
                    values.setdefault((path, key), value.detach().clone())

        return keep

    handles = (
        module.register_forward_pre_hook(hook(path), with_kwargs=True)
        for path, module in model.named_modules()
        if path
    )
    with hooked(handles), trial(model):
        forward(model, ids)
    return values


@contextlib.contextmanager
def flattened(model: nn.Module, arguments: Sequence[Argument]) -> Iterator[None]:
    """Hand zeros to modules instead of arguments that carry positions; what a mask hides stays hidden."""
    keys: dict[str, list[int | str]] = {}
    for argument in arguments:
        keys.setdefault(argument.path, []).append(argument.key)

    def hook(own: Sequence[int | str]) -> Any:
        def flatten(module: nn.Module, args: Any, kwargs: Any) -> Any:
            args = tuple(_flat(v) if i in own else v for i, v in enumerate(args))
            return args, {key: _flat(v) if key in own else v for key, v in kwargs.items()}

        return flatten

    modules = ((model.get_submodule(path), own) for path, own in keys.items())
    with hooked(m.register_forward_pre_hook(hook(own), with_kwargs=True) for m, own in modules):
        yield


def _flat(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    hidden = value <= torch.finfo(value.dtype).min / 2
    return value.where(hidden, torch.zeros_like(value))
