"""Tensors that are computed when an operation needs their numbers: masks and zeros that attention code is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

METADATA = frozenset(
    (
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__),  # type: ignore[attr-defined]
        *(Tensor.requires_grad.__get__, Tensor.grad_fn.__get__, Tensor.is_leaf.__get__),  # type: ignore[attr-defined, union-attr]
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
    )
)
"""Functions of a tensor that read none of its numbers."""
HIDDEN = -1e3
"""Scores that are set to less have no weight."""


class LazyTensor(Tensor):
    """A tensor without memory of its own, of which the shape, the dtype and the device are known."""

    @staticmethod
    def outline(cls: Any, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        """Return a tensor of a subclass with this shape, dtype and device."""
        made: Any = Tensor._make_wrapper_subclass
        return made(cls, torch.Size(size), dtype=dtype, device=device)

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def rule(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation by name; `NotImplemented` for one that needs numbers."""
        return NotImplemented

    @classmethod
    def applied(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Apply an operation to tensors of which one is lazy."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        return cls.applied(func, args, kwargs or {})


class Unwritten(LazyTensor):
    """A tensor that `write` makes, once: its numbers are then those of that tensor, which may be written in place."""

    write: Callable[[], Tensor]
    written: Tensor | None = None

    @staticmethod
    def __new__(
        cls: Any, write: Callable[[], Tensor], size: Sequence[int], dtype: Any, device: Any
    ) -> Any:
        made = LazyTensor.outline(cls, size, dtype, device)
        made.write = write
        return made

    def computed(self) -> Tensor:
        """Return the tensor with its numbers."""
        if self.written is None:
            self.written = self.write()
        return self.written

    @classmethod
    def applied(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first = args[0] if args else None
        if isinstance(first, Unwritten) and first.written is None:
            result = first.rule(func.__name__.strip("_"), args[1:], kwargs)
            if result is not NotImplemented:
                return result
        return func(*map(_real, args), **{key: _real(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {key: _real(value) for key, value in (kwargs or {}).items()}
        return func(*map(_real, args), **kwargs)


def _real(value: Any) -> Any:
    if isinstance(value, Unwritten):
        return value.computed()
    return type(value)(map(_real, value)) if type(value) in (list, tuple) else value


class UnwrittenMask(Unwritten):
    """A mask of attention in code of a model's own: additive, or bool and True for hidden pairs."""

    handle: Tensor | None  # the same mask as `posenc_mask` returns it
    # What an additive one holds for visible pairs, of a shape that broadcasts; `None`: zeros.
    bias: Tensor | None = None

    @classmethod
    def of(
        cls,
        handle: Tensor | None,
        write: Callable[[], Tensor],
        like: tuple[Sequence[int], torch.dtype, torch.device],
        bias: Tensor | None = None,
    ) -> UnwrittenMask:
        """Return a mask with the shape, the dtype and the device of `like`."""
        made: UnwrittenMask = cls(write, *like)
        made.handle, made.bias = handle, bias
        return made

    def without_bias(self) -> UnwrittenMask:
        """Return an additive mask that hides the same pairs, and adds nothing to the others."""
        least = torch.finfo(self.dtype).min

        def write() -> Tensor:
            return torch.zeros_like(made := self.computed()).masked_fill(made <= least / 2, least)

        return self.of(self.handle, write, (self.shape, self.dtype, self.device))

    def rule(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "to":
            return self._cast(args, kwargs)
        if kwargs or len(args) > 1:
            return NotImplemented
        if name == "bool":
            return self._cast((torch.bool,), {})
        if name in ("detach", "contiguous"):
            return self
        if name == "getitem":
            parts = args[0] if isinstance(args[0], tuple) else args
            sizes = zip(parts, self.shape, strict=False)
            whole = all(type(part) is slice and part.indices(n) == (0, n, 1) for part, n in sizes)
            return self if whole and len(parts) <= self.dim() else NotImplemented
        limit: Any = args[0] if args else None
        # Zero is not below it, and what stands for a hidden pair is.
        below = isinstance(limit, int | float) and HIDDEN <= limit <= 0
        if name == "lt" and below and self._is_additive:
            return self._as(torch.bool, lambda: self.computed() < limit)
        return NotImplemented

    @property
    def _is_additive(self) -> bool:
        return self.bias is None and self.dtype != torch.bool

    def _as(self, dtype: torch.dtype, write: Callable[[], Tensor]) -> UnwrittenMask:
        return self.of(self.handle, write, (self.shape, dtype, self.device), self.bias)

    def _cast(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = {"dtype" if isinstance(each, torch.dtype) else "device": each for each in args}
        given |= kwargs
        given.pop("non_blocking", None)
        device, dtype = given.pop("device", self.device), given.pop("dtype", self.dtype)
        known = not given and isinstance(device, str | torch.device)
        if not known or torch.device(device) != self.device:
            return NotImplemented
        if dtype == self.dtype:
            return self
        if self._is_additive and (dtype == torch.bool or dtype.is_floating_point):
            return self._as(dtype, lambda: self.computed().to(dtype))
        return NotImplemented

    @classmethod
    def applied(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in (torch.masked_fill, Tensor.masked_fill) and len(args) == 3 and not kwargs:
            result = _filled(*args)
            if result is not NotImplemented:
                return result
        return super().applied(func, args, kwargs)


def _filled(values: Any, hidden: Any, number: Any) -> Any:
    """Return the mask that holds values where no pair is hidden, and a number of no weight elsewhere."""
    plain = isinstance(values, Tensor) and not isinstance(values, LazyTensor)
    if not plain or not values.is_floating_point() or values.requires_grad:
        return NotImplemented
    if not isinstance(hidden, UnwrittenMask) or hidden.written is not None:
        return NotImplemented
    if not isinstance(number, int | float) or number > torch.finfo(values.dtype).min / 2:
        return NotImplemented
    size = torch.broadcast_shapes(values.shape, hidden.shape)
    like = size, values.dtype, values.device
    return UnwrittenMask.of(
        hidden.handle, lambda: values.masked_fill(hidden.computed(), number), like, values
    )


# Zeros in place of a bias that the engine computes.

_scalars: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def nothing(size: Sequence[int], like: Tensor) -> Tensor:
    """Return zeros of a shape, with the memory of one number; `is_nothing` knows them and their views."""
    key = like.device, like.dtype
    if key not in _scalars:
        with torch.inference_mode(False):
            _scalars[key] = torch.zeros((), device=like.device, dtype=like.dtype)
    return _scalars[key].expand(*size)


def is_nothing(value: Tensor) -> bool:
    """Return whether a tensor holds zeros of `nothing`, or ones that were not written yet."""
    if isinstance(value, UnwrittenZeros):
        return value.written is None
    if isinstance(value, LazyTensor) or value.device.type == "meta":
        return False
    if (scalar := _scalars.get((value.device, value.dtype))) is None:
        return False
    return scalar.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


class UnwrittenZeros(Unwritten):
    """Zeros that a module makes and adds a product to."""
