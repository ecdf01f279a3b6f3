"""The fast path for a step of generation under frequencies that move with the length.

Every cached key has to be rotated for the length in force. They are kept rotated from one step to the next, so that a
step rotates its own keys alone, until the length moves on by a bucket.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from hf_posenc.attention.branches import Branch
from hf_posenc.attention.call import Call
from hf_posenc.attention.decode import decode
from hf_posenc.attention.encoding import Encoding

QUERIES = 8
"""More queries than this are left to other paths."""


class RotatedKeys:
    """The keys of one layer's cache as they were rotated in the step before.

    Whoever sees the cache says before a step whether it still holds what that step left there (`check`): a cache
    that was cropped, reordered or exchanged holds another tensor, and one that is written in place another version.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops everything."""
        self._cached: weakref.ref[Tensor] | None = None
        self._version = math.nan
        self._rotated: Tensor | None = None
        self._positions: Tensor | None = None
        self._origins: Tensor | None = None

    def __reduce__(self) -> tuple[type[RotatedKeys], tuple[()]]:
        return RotatedKeys, ()  # a copy of the model has caches of its own

    def check(self, cached: Tensor | None) -> None:
        """Forgets the keys unless the cache still holds them.

        Args:
            cached: The keys in the cache before the step; `None`: none, or somewhere else.
        """
        if (
            self._cached is None
            or self._cached() is not cached
            or _version(cached) != self._version
        ):
            self.forget()

    def rotated(self, call: Call, branch: Branch, origins: Tensor) -> Tensor:
        """All keys of a call, rotated for the length in force.

        Args:
            call: The call.
            branch: What rotates.
            origins: That length for each row of the batch, shape (batch,).
        """
        positions = call.key_position
        known = 0 if self._positions is None else self._positions.shape[1]
        if (
            self._rotated is not None
            and self._positions is not None
            and self._origins is not None
            and known <= positions.shape[1]
            and torch.equal(self._positions, positions[:, :known])
            and torch.equal(self._origins, origins)
        ):
            new = _rotated(call.key[:, :, known:], positions[:, known:], branch, origins)
            keys = torch.cat((self._rotated, new), 2)
        else:
            keys = _rotated(call.key, positions, branch, origins)
        if not torch.is_grad_enabled():
            self._cached, self._version = weakref.ref(call.key), _version(call.key)
            self._rotated, self._positions, self._origins = keys, positions, origins
        return keys


def accepts(call: Call, encoding: Encoding) -> bool:
    """Whether this path computes the call: all queries of a row are of one bucket."""
    if encoding.moving is None or encoding.bias is not None or torch.compiler.is_compiling():
        return False
    if call.query.shape[2] > QUERIES or call.dropout:
        return False
    bucket = encoding.bucket(call.query_position)
    return bool((bucket == bucket[:, :1]).all())


def step(call: Call, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    """Attention of few queries over keys of which only the new ones are rotated."""
    m = call.query_position
    query = encoding.scaled(call.query, m)
    (branch,) = encoding.branches()
    origins = encoding.bucket(m)[:, 0].expand(len(query)) if call.lengths is None else call.lengths
    keys = RotatedKeys() if call.rotated is None else call.rotated
    out, weights = decode(
        _rotated_queries(query, m, branch, origins),
        keys.rotated(call, branch, origins),
        call.value,
        call.scaling,
        bias=call.mask.added(0, query.shape[2]),
        mask=call.mask.rows(0, query.shape[2]),
        softcap=call.softcap,
        sinks=call.sinks,
        weights=True,
    )
    return out, weights.to(call.value.dtype) if call.weights else None


def _rotated(keys: Tensor, positions: Tensor, branch: Branch, origins: Tensor) -> Tensor:
    if len({*origins.tolist()}) == 1:
        return branch.key(keys, positions, origins[0])
    rows = positions.expand(len(keys), -1).split(1)
    return torch.cat([branch.key(*row) for row in zip(keys.split(1), rows, origins, strict=True)])


def _rotated_queries(queries: Tensor, positions: Tensor, branch: Branch, origins: Tensor) -> Tensor:
    rows = positions.expand(len(queries), -1).split(1)
    return torch.cat(
        [branch.query(*row) for row in zip(queries.split(1), rows, origins, strict=True)]
    )


def _version(tensor: Tensor | None) -> float:
    """How often a tensor was written in place; never the same twice where nobody counts."""
    return math.nan if tensor is None or tensor.is_inference() else tensor._version
