"""The score seam: attention that a module computes in code of its own is handed to the attention function.

While such a module runs, a product of queries and keys is not computed. It becomes `Scores`, which note what is done
to them (a factor, a mask or a bias that is added, a view, a cast). Softmax makes them `Weights`, and their product with
the values calls `posenc_attention` once. So calibration, verification and the engine are those of all other models.

An operation that is not known here gets real scores or weights: slower, and as the module computes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_posenc.attention.call import product_dtype, shared
from hf_posenc.errors import PosencError
from hf_posenc.model.attention import is_recording, posenc_attention
from hf_posenc.model.discovery import RepositionedTable
from hf_posenc.model.lazy import HIDDEN, LazyTensor, UnwrittenMask, UnwrittenZeros, is_nothing
from hf_posenc.model.masks import seen_keys, visible
from hf_posenc.model.positions import LAYER


@dataclass(frozen=True, eq=False)
class _Product:
    """Queries (..., queries, d) and keys (..., keys, d) of a running module, and what was done to their products."""

    scope: Scope  # the forward that multiplied them
    path: tuple[nn.Module, ...]  # the modules that were running then, the innermost last
    query: Tensor  # three or four dimensions
    key: Tensor  # as many
    factor: float = 1.0
    # Tensors that were added, each with the factor on it since; they broadcast to the scores.
    added: tuple[tuple[Tensor, float], ...] = ()
    # Bool tensors of the pairs that were given no weight; they broadcast to the scores.
    hidden: tuple[Tensor, ...] = ()
    # Bool, of pairs whose score was multiplied by 0 and is yet to be hidden; broadcasts to the scores.
    zeroed: Tensor | None = None
    lead: tuple[int, int] | None = None  # batch and heads; `None` where only their product was seen
    dropout: float = 0.0  # probability of leaving out a weight

    @property
    def size(self) -> torch.Size:
        """The shape of the products before any view."""
        lead = torch.broadcast_shapes(self.query.shape[:-2], self.key.shape[:-2])
        return torch.Size((*lead, self.query.shape[-2], self.key.shape[-2]))

    def times(self, factor: float) -> _Product:
        added = tuple((each, own * factor) for each, own in self.added)
        return replace(self, factor=self.factor * factor, added=added)

    def mask(self) -> Tensor | None:
        """Return all that was added or hidden as one mask of four dimensions: bool, additive or a handle.

        `None`: all is causal, as in `posenc_attention`.
        """
        queries, keys = self.size[-2:]
        noted = [*(each for each, factor in self.added if factor > 0), *self.hidden]
        if len(noted) == len(self.added) + len(self.hidden) == 1:
            only = noted[0]
            if isinstance(only, UnwrittenMask) and only.written is None and only.bias is None:
                return only.handle
        parts = [(self.wide(each), own) for each, own in self.added]
        masks = [~self.wide(each) for each in self.hidden]
        if len(parts) == 1 and not masks:
            mask, factor = parts[0]
            whole = factor == 1.0 and mask.shape[-2:] == (queries, keys)
            if id(mask) not in self.scope.arguments:  # a parameter, say, whose numbers may change
                return mask.view_as(mask) if whole else _joined(parts, [], queries, keys)
            if whole:
                return mask  # the very tensor that other layers add
            question = ("scaled", factor, queries)
            return shared(mask, question, lambda: _joined(parts, [], queries, keys))
        return _joined(parts, masks, queries, keys)

    def wide(self, noted: Tensor) -> Tensor:
        """Return what was added or hidden with four dimensions, if batch and heads are known."""
        if noted.dim() == 4 or self.lead is None:
            return noted
        wide: Tensor = noted.unflatten(0, (1, 1) if len(noted) == 1 else self.lead)
        return wide

    def attend(self, value: Tensor, *, weights: bool) -> tuple[Tensor, Tensor | None]:
        """Call the attention function: the output in the layout of the values, and the weights if requested."""
        assert self.lead is not None
        batch, heads = self.lead
        query, key, own = (self._split(each, self.lead) for each in (self.query, self.key, value))
        if key.shape[1] != own.shape[1]:
            key, own = (each.expand(-1, heads, -1, -1) for each in (key, own))
        module = self.scope.common(self.path)
        self.scope.attended = True
        out, found = posenc_attention(
            module,
            query.expand(batch, heads, -1, -1).to(value.dtype),
            key.to(value.dtype),
            own,
            self.scope.seen(module, self.mask()),
            scaling=self.factor,
            dropout=self.dropout,
            position_ids=self.scope.positions,
            output_attentions=weights or None,
            is_causal=False if self.scope.bidirectional else None,
            **self.scope.handed,
        )
        out = out.transpose(1, 2).contiguous()
        return out.flatten(0, 1) if value.dim() == 3 else out, found

    @staticmethod
    def _split(tensor: Tensor, lead: tuple[int, int]) -> Tensor:
        if tensor.dim() == 3:
            split: Tensor = tensor.unflatten(0, lead)
            return split
        return tensor.expand(lead[0], -1, -1, -1)


def _filled(noted: Tensor, dims: int) -> Tensor:
    """Return what broadcasts to scores with as many dimensions as these have; the very tensor if it has them."""
    return noted if noted.dim() == dims else noted.view((1,) * (dims - noted.dim()) + noted.shape)


def _joined(
    parts: Sequence[tuple[Tensor, float]], masks: Sequence[Tensor], queries: int, keys: int
) -> Tensor:
    """Return one mask of several that are added, each with a factor, and of bool ones."""
    seen, total = torch.ones((), dtype=torch.bool), torch.zeros(())
    if some := [*(each for each, _ in parts), *masks]:
        seen, total = seen.to(some[0].device), total.to(some[0].device)
    for each in masks:
        seen = seen & each
    for each, factor in parts:
        shown = visible(each)
        seen, total = seen & shown, total + each.masked_fill(~shown, 0.0) * factor
    mask = seen
    if parts:
        mask = total.masked_fill(~seen, torch.finfo(total.dtype).min)
    while mask.dim() < 4:
        mask = mask[None]
    return mask.expand(*mask.shape[:2], queries, keys)


class Pending(LazyTensor):
    """Scores or weights that are not computed."""

    product: _Product

    @staticmethod
    def __new__(cls: Any, product: _Product, size: Sequence[int], dtype: torch.dtype) -> Any:
        pending = LazyTensor.outline(cls, size, dtype, product.query.device)
        pending.product = product
        return pending

    def computed(self, reason: str) -> Tensor:
        """Return the tensor with its numbers, which an operation needs."""
        raise NotImplementedError

    @classmethod
    def applied(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return _applied(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PosencError(
            f"{func} reads attention scores that hf_posenc has not computed. Please report it, with the model type."
        )

    def like(self, product: _Product, size: Sequence[int] | None = None, dtype: Any = None) -> Any:
        """Return the same kind of tensor after an operation."""
        return type(self)(product, self.shape if size is None else size, dtype or self.dtype)

    def rule(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name in ("view", "reshape") and not kwargs:
            return self.view_of(args)
        return self.cast_of(name, args, kwargs) if name in _CASTS else NotImplemented

    def view_of(self, args: Sequence[Any]) -> Any:
        """Return another view, which keeps the last two axes; `NotImplemented` for others."""
        wanted = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        size = torch.empty((), device="meta").expand(self.shape).view(*wanted).shape
        if size[-2:] != self.shape[-2:] or len(size) not in (3, 4):
            return NotImplemented
        if len(size) == 4 and self.product.lead not in (None, tuple(size[:2])):
            return NotImplemented
        known = len(size) == 4
        product = replace(self.product, lead=(size[0], size[1])) if known else self.product
        return self.like(product, size)

    def cast_of(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a cast or a copy."""
        dtypes = {"float": torch.float32, "double": torch.float64}
        target = args[0] if args else kwargs.get("dtype", dtypes.get(name, self.dtype))
        target = target.dtype if isinstance(target, Tensor) else target
        if not isinstance(target, torch.dtype) or (name == "type" and not args):
            return NotImplemented
        return self.like(self.product, dtype=target)


class Scores(Pending):
    """Scores that are not computed: shape (batch, heads, queries, keys) or (batch * heads, queries, keys)."""

    def computed(self, reason: str) -> Tensor:
        """Return the scores as the module computes them."""
        product = self.product
        product.scope.refuse(reason)
        size = self.shape if product.lead is None else (*product.lead, *self.shape[-2:])
        scores = (product.query @ product.key.transpose(-1, -2)).reshape(size) * product.factor
        for each, factor in product.added:
            scores = scores + product.wide(each) * factor
        for each in product.hidden:
            scores = scores.masked_fill(product.wide(each), torch.finfo(scores.dtype).min)
        if product.zeroed is not None:
            scores = scores.masked_fill(product.wide(product.zeroed), 0.0)
        return scores.reshape(self.shape).to(self.dtype)

    def rule(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.product.zeroed is not None and name != "add":
            return NotImplemented
        if name in ("mul", "div") and not kwargs:
            factor = _number(args[0])
            if factor is None and name == "mul":
                return self._zeroing(args[0])
            if factor is None or (name == "div" and factor == 0):
                return NotImplemented
            return self.like(self.product.times(factor if name == "mul" else 1 / factor))
        if name in ("add", "sub") and not kwargs:
            return self._plus(args[0], 1.0 if name == "add" else -1.0)
        if name == "masked_fill" and args:
            return self._hiding(args[0], args[1] if len(args) > 1 else kwargs.get("value"))
        if name == "where" and len(args) == 2:
            return self._hiding(~args[0], args[1])
        if name in ("max", "maximum", "clamp") and len(args) + len(kwargs) == 1:
            least = _number(args[0] if args else kwargs.get("min"))
            return self if least is not None and least < HIDDEN else NotImplemented
        if name == "softmax":
            axis = kwargs.get("dim", args[0] if args else None)
            product = self.product
            if product.lead is None:
                product = replace(product, lead=product.scope.lead_of(product))
            if axis not in (-1, self.dim() - 1) or product.lead is None:
                return NotImplemented
            return Weights(product, self.shape, kwargs.get("dtype") or self.dtype)
        return super().rule(name, args, kwargs)

    def _plus(self, other: Any, sign: float) -> Any:
        if _number(other) == 0:
            return self
        if isinstance(other, Tensor) and is_nothing(other):
            dtype = torch.promote_types(self.dtype, other.dtype)
            return self.like(self.product, dtype=dtype)
        plain = isinstance(other, Tensor) and not isinstance(other, Pending)
        if not plain or not other.is_floating_point():
            return NotImplemented
        if torch.broadcast_shapes(other.shape, self.shape) != self.shape or not other.dim():
            return NotImplemented
        other, product = _filled(other, self.dim()), self.product
        if product.zeroed is not None:
            if bool((other > HIDDEN).logical_and(product.zeroed).any()):
                return NotImplemented
            hidden = (*product.hidden, product.zeroed)
            product = replace(product, hidden=hidden, zeroed=None)
        dtype = torch.promote_types(self.dtype, other.dtype)
        return self.like(replace(product, added=(*product.added, (other, sign))), dtype=dtype)

    def _zeroing(self, mask: Any) -> Any:
        """Return the scores times a mask of ones and zeros."""
        if not isinstance(mask, Tensor) or isinstance(mask, Pending) or mask.requires_grad:
            return NotImplemented
        zeros = mask == 0
        fits = torch.broadcast_shapes(mask.shape, self.shape) == self.shape
        if not fits or not bool((zeros | (mask == 1)).all()):
            return NotImplemented
        return self.like(replace(self.product, zeroed=_filled(zeros, self.dim())))

    def _hiding(self, hidden: Any, value: Any) -> Any:
        least = _number(value)
        if least is None or least > HIDDEN or hidden.dtype != torch.bool:
            return NotImplemented
        if torch.broadcast_shapes(hidden.shape, self.shape) != self.shape:
            return NotImplemented
        every = (*self.product.hidden, _filled(hidden, self.dim()))
        return self.like(replace(self.product, hidden=every))


class Weights(Pending):
    """The softmax of scores, which is not computed."""

    found: Tensor | None = None

    def computed(self, reason: str) -> Tensor:
        """Return the weights that the attention function computes."""
        found = self.found
        if found is None:
            product = replace(self.product, dropout=0.0)
            _, found = product.attend(product.key.to(self.dtype), weights=True)
            if found is None and is_recording():
                found = torch.eye(*self.shape[-2:], dtype=self.dtype, device=self.device)
                found = found.expand(self.shape)
            elif found is None:  # without a patch
                found = Scores(self.product, self.shape, self.dtype).computed(reason).softmax(-1)
            found = nn.functional.dropout(found, self.product.dropout, self.product.dropout > 0)
        return found.reshape(self.shape).to(self.dtype)

    def rule(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "dropout":
            given = dict(zip(("p", "training"), args, strict=False)) | dict(kwargs)
            chance = float(given.get("p", 0.5)) if given.get("training", True) else 0.0
            if self.product.dropout and chance:
                return NotImplemented
            return self.like(replace(self.product, dropout=self.product.dropout or chance))
        if name == "matmul" and not kwargs and isinstance(args[0], Tensor):
            value, (batch, heads) = args[0], self.product.lead or (0, 0)
            fits = {(batch, heads), (batch, 1)} if value.dim() == 4 else {(batch * heads,)}
            plain = not isinstance(value, Pending) and value.dim() == self.dim()
            if not plain or value.shape[:-2] not in fits:
                return NotImplemented
            out, self.found = self.product.attend(value, weights=self.product.scope.weights)
            return out
        return super().rule(name, args, kwargs)


_CASTS = frozenset(("to", "type", "type_as", "float", "double", "contiguous", "clone"))
_NAMES = {
    "multiply": "mul", "divide": "div", "true_divide": "div", "truediv": "div", "bmm": "matmul",
    "rmul": "mul", "radd": "add", "imul": "mul", "iadd": "add", "isub": "sub",
    "itruediv": "div", "idiv": "div",
}  # fmt: skip


def _number(value: Any) -> float | None:
    """Return a number, also that of a tensor with one element that is not trained; `None` for anything else."""
    if isinstance(value, int | float):
        return float(value)
    single = isinstance(value, Tensor) and not isinstance(value, Pending) and value.numel() == 1
    return float(value) if single and not value.requires_grad else None


def _applied(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply an operation to scores or weights: by its rule, or to their numbers."""
    plain = func.__name__.strip("_")
    name, given = _NAMES.get(plain, plain), list(args)
    if name == "where" and not isinstance(
        args[0], Pending
    ):  # torch.where(condition, scores, other)
        given[:2] = args[1::-1]
    elif name in ("add", "mul") and not isinstance(args[0], Pending):
        given.reverse()
    first = given[0] if given else kwargs.get("input")
    result = NotImplemented
    if isinstance(first, Pending):
        options = {key: value for key, value in kwargs.items() if key != "input"}
        result = first.rule(name, given[1:], options)
    writes = func.__name__ in _IN_PLACE or (func.__name__[-1] == "_" and func.__name__[0] != "_")
    if result is not NotImplemented:
        if writes and isinstance(first, Pending):
            first.product = result.product
            return first
        return result
    if writes:
        raise PosencError(
            f"{func.__name__} writes into attention scores in a way that hf_posenc cannot follow."
        )

    outline = plain in _OUTLINE and (plain.endswith("like") or not isinstance(first, Pending))

    def real(value: Any) -> Any:
        if isinstance(value, Pending) and outline:
            return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
        if isinstance(value, Pending):
            return value.computed(func.__name__)
        return type(value)(map(real, value)) if type(value) in (list, tuple) else value

    return func(*map(real, args), **{key: real(value) for key, value in kwargs.items()})


_OUTLINE = frozenset(
    ("expand_as", "view_as", "type_as", "zeros_like", "ones_like", "full_like", "empty_like")
)
"""Operations that read the shape and the dtype of another tensor alone."""
_IN_PLACE = frozenset(("__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__"))


class Scope(TorchFunctionMode):
    """Notes products of queries and keys while one module runs."""

    bidirectional = False
    attended = False
    transposed = True
    """True for a module that transposes keys, and not values; False for one whose features come before tokens."""
    unknown = ""
    """The operation that made scores real, if there was one."""
    arguments: Collection[int] = ()
    """The `id` of the tensors that the module was given, which other layers are given too."""
    counts_padding = False
    """True for a module that gets the rows of an embedding, one for all rows of the batch, and no positions."""
    embedding: RepositionedTable | None = None
    """The table that this module reads as an embedding."""
    handed: Mapping[str, Any] = MappingProxyType({})
    """The record of the forward as a keyword of the attention function, where the module was given it."""

    def __init__(
        self, module: nn.Module | None, positions: Tensor | None, *, weights: bool
    ) -> None:
        super().__init__()
        self.module, self.positions, self.weights = module, positions, weights

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, Pending) for each in (*args, *kwargs.values())):
            return Pending.__torch_function__(func, kinds, args, kwargs)
        if func is nn.functional.embedding and self.embedding is not None:
            return self.embedding.rows(args[0])[args[0]]
        name = func.__name__.strip("_")
        if name in ("matmul", "bmm") and not kwargs and len(args) == 2:
            scores = self._scores(*args)
            return func(*args) if scores is None else scores
        if name == "softmax" and self.unknown:
            self.check()
        if name == "baddbmm":
            scores = self._biased(*args, **kwargs)
            return func(*args, **kwargs) if scores is None else scores
        if func is torch.zeros and (zeros := _unwritten_zeros(args, **kwargs)) is not None:
            return zeros
        return func(*args, **kwargs)

    def _scores(self, query: Tensor, key: Tensor) -> Any:
        if not query.dim() == key.dim() in (3, 4) or isinstance(key, nn.Parameter):
            return None
        if not self.are_keys(query, key):
            return None
        product = _Product(self, self.path(), query, key.transpose(-1, -2))
        size = product.size
        lead = (size[0], size[1]) if len(size) == 4 else None
        return Scores(replace(product, lead=lead), size, product_dtype(query))

    def are_keys(self, query: Tensor, key: Tensor) -> bool:
        """Return whether the right factor of a product has a key in each column, and is not the values."""
        transposed = key.stride(-2) == 1 and key.stride(-1) != 1
        return transposed == self.transposed

    def _biased(
        self, bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Any:
        scores = self._scores(batch1, batch2)
        if scores is None:
            return None
        scores = scores * alpha
        return scores if beta == 0 or is_nothing(bias) else scores + bias * beta

    def path(self) -> tuple[nn.Module, ...]:
        """Return the running modules, the innermost last."""
        assert self.module is not None
        return (self.module,)

    def common(self, path: tuple[nn.Module, ...]) -> nn.Module:
        """Return the innermost of the running modules that ran then, too."""
        return [one for one, other in zip(path, self.path(), strict=False) if one is other][-1]

    def lead_of(self, product: _Product) -> tuple[int, int] | None:
        """Return batch and heads of a product of which only theirs was seen; `None` if they cannot be told apart."""
        layer, count = vars(self.common(product.path)).get(LAYER), product.size[0]
        heads = count if layer is None else layer.encoding.heads
        return (count // heads, heads) if count % heads == 0 else None

    def seen(self, module: nn.Module, mask: Tensor | None) -> Tensor | None:
        """Receive the mask of a call of the attention function, which is returned."""
        if mask is None or not self.counts_padding:
            return mask

        def first_keys() -> bool:
            seen = seen_keys(mask)
            return seen is None or bool(seen[:, 0].all())

        if not shared(mask, "first keys", first_keys):
            raise PosencError(
                f"{type(module).__name__} gets no positions, so that padding before a text counts as tokens. Pad after "
                "the text, or run texts one at a time."
            )
        return mask

    def refuse(self, operation: str) -> None:
        """Note an operation that makes scores real, which are not those of the method in force.

        They may be a part of the scores (of positions, in DeBERTa) that is added to the others.
        """
        self.unknown = self.unknown or operation

    def check(self) -> None:
        """Raise where real scores become weights, or nothing reached the attention function."""
        layer = None if self.module is None else vars(self.module).get(LAYER)
        if layer is not None and not layer.encoding.plain:
            raise PosencError(
                f"{type(self.module).__name__} applies {self.unknown or 'operations that are unknown'} to its "
                "attention scores, which hf_posenc cannot follow while a method that computes attention itself is in "
                "force."
            )


def _unwritten_zeros(
    size: Sequence[Any], *, dtype: Any = None, device: Any = None, **kwargs: Any
) -> Tensor | None:
    """Return zeros to which scores may be added; `None` for others."""
    size, dtype = size[0] if len(size) == 1 else size, dtype or torch.get_default_dtype()
    known = not kwargs and isinstance(size, tuple | list) and len(size) == 3
    if not known or not dtype.is_floating_point:
        return None
    device = torch.device(device or torch.get_default_device())
    zeros: Tensor = UnwrittenZeros(
        lambda: torch.zeros(size, dtype=dtype, device=device), size, dtype, device
    )
    return zeros
