"""The one entry of the engine, and the table that chooses the path."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.attention import decode, prefill, windowed
from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact
from hf_posenc.attention.fused.cuda import CudaFlash
from hf_posenc.attention.fused.emulated import EmulatedFlash
from hf_posenc.attention.fused.protocol import Fused
from hf_posenc.attention.kernels import biased as triton_biased
from hf_posenc.attention.kernels import decode as triton_decode
from hf_posenc.errors import PosencError, unknown

Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        name: For reports.
        accepts: True if it computes this call, exactly.
        run: Computes it: output of shape (batch, heads, queries, value_dim), and weights where requested.
    """

    name: str
    accepts: Callable[[Call, Encoding], bool]
    run: Callable[[Call, Encoding], Result]


def _windowed(name: str, fused: Fused) -> Backend:
    accepts = functools.partial(windowed.accepts, fused=fused)
    return Backend(name, accepts, functools.partial(windowed.attend, fused=fused))


BACKENDS: tuple[Backend, ...] = (
    Backend("triton decode", triton_decode.accepts, triton_decode.run),
    Backend("triton biased", triton_biased.accepts, triton_biased.run),
    Backend("prefill", prefill.accepts, prefill.prefill),
    _windowed("cuda flash", CudaFlash()),
    Backend("few", decode.accepts_few, decode.few),
    Backend("moving", decode.accepts_moving, decode.moving),
    Backend("exact", lambda call, encoding: True, exact),
)
"""Tried in this order; a faster kernel joins ahead of the general path."""

ON_REQUEST: tuple[Backend, ...] = (_windowed("emulated flash", EmulatedFlash()),)
"""Tried only where `force` names them."""


@dataclass(frozen=True)
class Key:
    """The calls for which a backend is struck as one.

    Attributes:
        device: The device of the queries.
        dtype: Their dtype.
        head_dim: Their features.
        kind: `Encoding.kind`.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    kind: str


_struck: set[tuple[str, Key]] = set()
_forced: str | None = None


def key_of(call: Call, encoding: Encoding) -> Key:
    """Return the key of a call."""
    query = call.query
    return Key(query.device, query.dtype, query.shape[-1], encoding.kind)


def strike(name: str, key: Key) -> None:
    """Leave a backend out for all calls of a key, until `restore`.

    Raises:
        PosencError: An unknown backend, or the general path, which has no substitute.
    """
    if _named(name).name == "exact":
        raise PosencError("The general path 'exact' computes what no other backend does; keep it.")
    _struck.add((name, key))


def restore() -> None:
    """Let every backend that was struck compute again."""
    _struck.clear()


def force(name: str | None) -> None:
    """Compute by one backend wherever it accepts a call, and by the general path elsewhere; `None`: by the table.

    Raises:
        PosencError: An unknown backend.
    """
    global _forced  # one setting for all models, as for PyTorch's own backends
    _forced = None if name is None else _named(name).name


@contextlib.contextmanager
def forced(name: str | None) -> Iterator[None]:
    """Force a backend, as `force`, inside a `with` block."""
    before = _forced
    force(name)
    try:
        yield
    finally:
        force(before)


def _named(name: str) -> Backend:
    backends = {backend.name: backend for backend in (*BACKENDS, *ON_REQUEST)}
    if name not in backends:
        raise unknown("backend", name, backends)
    return backends[name]


def choose(call: Call, encoding: Encoding) -> Backend:
    """Return the first backend that computes a call."""
    candidates = BACKENDS if _forced is None else (_named(_forced), _named("exact"))
    key = key_of(call, encoding) if _struck else None
    return next(
        backend
        for backend in candidates
        if (key is None or (backend.name, key) not in _struck) and backend.accepts(call, encoding)
    )


def attend(call: Call, encoding: Encoding) -> Result:
    """Compute attention with an encoding.

    Returns:
        The output, shape (batch, heads, queries, value_dim), and the attention weights, shape (batch, heads,
        queries, keys), where they are requested.
    """
    return choose(call, encoding).run(call, encoding)
