"""A device in Python: tensors that are elsewhere, with numbers, and a count of what a GPU would do and wait for.

A `Distant` tensor reports the meta device, so that code takes its path for devices other than the CPU, and keeps its
numbers on the CPU. Every operation on it passes through `Elsewhere`, which counts launches and waits and refuses to mix
the two devices, as CUDA does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

VIEWS = {
    *("view", "_unsafe_view", "transpose", "t", "expand", "slice", "select", "unsqueeze"),
    *("squeeze", "permute", "as_strided", "alias", "detach", "split", "narrow", "unbind"),
    *("_reshape_alias", "unflatten", "empty", "new_empty", "empty_like", "empty_strided"),
    *("split_with_sizes", "diagonal", "lift_fresh", "unfold", "chunk", "new_empty_strided"),
}
READS = {"_local_scalar_dense", "equal", "is_nonzero"}
SIZED = {"nonzero", "unique_consecutive", "_unique2", "unique_dim", "masked_select"}
"""Operations whose result has a size that only the device knows."""
META = torch.device("meta")
CPU = torch.device("cpu")

_Mode: Any = TorchDispatchMode


class Distant(torch.Tensor):
    """A tensor on the other device."""

    numbers: Tensor

    @staticmethod
    def __new__(cls: type[Distant], numbers: Tensor) -> Distant:
        make: Any = torch.Tensor._make_wrapper_subclass
        out: Distant = make(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            layout=numbers.layout,
            device=META,
            requires_grad=False,
        )
        out.numbers = numbers
        return out

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Distant({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise RuntimeError("a distant tensor is used outside of Elsewhere")


class Elsewhere(_Mode):  # type: ignore[misc]
    """Runs operations on the meta device with numbers; counts them.

    Attributes:
        launches: Operations on the device that are no views, by name.
        waits: Reads of a value by the host, results of unknown size, and copies between the devices, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._lists: Any = _Lists(self)

    def __enter__(self) -> Elsewhere:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._lists.__exit__(*raised)

    def wait(self, name: str) -> None:
        """Count a wait, with the line of the package that caused it."""
        frame: FrameType | None = sys._getframe(1)  # `traceback` would read the source as well
        while frame is not None and "/hf_posenc/" not in frame.f_code.co_filename:
            frame = frame.f_back
        file = frame and frame.f_code.co_filename.split("/hf_posenc/")[-1]
        where = f"{file}:{frame.f_lineno}" if frame else "not of the package"
        self.waits[f"{name} ({where})"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        given = [x for value in (*args, *kwargs.values()) for x in _flat(value)]
        distant = [x for x in given if isinstance(x, Distant)]
        local = [x for x in given if isinstance(x, Tensor) and not isinstance(x, Distant)]
        onto = kwargs.get("device")
        onto = None if onto is None else torch.device(onto).type
        if not distant and onto != "meta":
            return func(*args, **kwargs)
        if onto is not None:
            kwargs["device"] = CPU
        if name in READS | SIZED:
            self.wait(name)
        elif onto == "cpu":
            self.wait("copy to the host")
        elif name in ("_to_copy", "copy_") and local:
            if not kwargs.get("non_blocking"):
                self.wait("copy to the device")
        elif name not in VIEWS:
            self.launches[name] += 1
            if any(x.dim() for x in local):  # a number is an argument of the launch
                raise RuntimeError(f"{name} mixes two devices")
        inner_args = _mapped(_numbers, args)
        out = func(*inner_args, **{key: _mapped(_numbers, value) for key, value in kwargs.items()})
        if onto == "cpu":
            return out
        out = _mapped(_distant, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


class _Lists(TorchFunctionMode):
    """`torch.tensor` and `Tensor.tolist` on the other device, which never reach the dispatcher."""

    def __init__(self, counts: Elsewhere) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and isinstance(args[0], Distant):
            self.counts.wait("tolist")
            return args[0].numbers.tolist()
        if func is not torch.tensor or torch.device(kwargs.get("device") or CPU).type != "meta":
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": CPU})
        if made.numel():
            self.counts.wait("copy to the device")
        return Distant(made)


def _flat(x: Any) -> list[Any]:
    return [y for each in x for y in _flat(each)] if isinstance(x, list | tuple) else [x]


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to what an operation takes or returns: lists, tuples and values."""
    if isinstance(x, list | tuple):
        return type(x)([_mapped(function, each) for each in x])
    return function(x)


def _numbers(x: Any) -> Any:
    return x.numbers if isinstance(x, Distant) else x


def _distant(x: Any) -> Any:
    return Distant(x) if isinstance(x, Tensor) and not isinstance(x, Distant) else x


def move(model: nn.Module) -> None:
    """Move a model to the other device, by the way that `model.to(device)` takes."""
    with torch.no_grad(), Elsewhere():
        model._apply(lambda x: Distant(x.detach()))
