"""The one entry of the engine, the table that chooses the path, and the check of a path before it is used.

A backend for a device that no test has run on is compared with the general path in float64 before its first use there.
One that differs or raises is struck with a warning, and the next one computes. `set_backend` and the environment
variable HF_POSENC_BACKEND choose by name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention import decode, prefill, windowed
from hf_posenc.attention.call import Call, Mask, Run
from hf_posenc.attention.encoding import BandPlan, Encoding
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
        proven: True if tests have run it; else it is checked on the device before its first use.
    """

    name: str
    accepts: Callable[[Call, Encoding], bool]
    run: Callable[[Call, Encoding], Result]
    proven: bool = True


def _windowed(name: str, fused: Fused, *, proven: bool) -> Backend:
    accepts = functools.partial(windowed.accepts, fused=fused)
    return Backend(name, accepts, functools.partial(windowed.attend, fused=fused), proven)


BACKENDS: tuple[Backend, ...] = (
    Backend("triton decode", triton_decode.accepts, triton_decode.run, proven=False),
    Backend("triton biased", triton_biased.accepts, triton_biased.run, proven=False),
    Backend("prefill", prefill.accepts, prefill.prefill),
    _windowed("cuda flash", CudaFlash(), proven=False),
    Backend("few", decode.accepts_few, decode.few),
    Backend("moving", decode.accepts_moving, decode.moving),
    Backend("exact", lambda call, encoding: True, exact),
)
"""Tried in this order; a faster kernel joins ahead of the general path."""

ON_REQUEST: tuple[Backend, ...] = (_windowed("emulated flash", EmulatedFlash(), proven=True),)
"""Tried only where `set_backend` names them."""


@dataclass(frozen=True)
class Key:
    """The calls for which a backend is checked, and struck, as one.

    Attributes:
        device: The device of the queries.
        dtype: Their dtype.
        head_dim: Their features.
        kind: `Encoding.kind`.
        gradients: True if a backward follows.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    kind: str
    gradients: bool = False


_struck: set[tuple[str, Key]] = set()
_checked: set[tuple[str, Key]] = set()
_forced: str | None = os.environ.get("HF_POSENC_BACKEND") or None


def key_of(call: Call, encoding: Encoding) -> Key:
    """Return the key of a call."""
    query = call.query
    gradients = torch.is_grad_enabled() and query.requires_grad
    return Key(query.device, query.dtype, query.shape[-1], encoding.kind, gradients)


def strike(name: str, key: Key) -> None:
    """Leave a backend out for all calls of a key, until `restore`.

    Raises:
        PosencError: An unknown backend, or the general path, which has no substitute.
    """
    if _named(name).name == "exact":
        raise PosencError("The general path 'exact' computes what no other backend does; keep it.")
    _struck.add((name, key))


def restore() -> None:
    """Let every backend that was struck compute again, after another check."""
    _struck.clear()
    _checked.clear()


def set_backend(name: str | None) -> None:
    """Compute attention by one backend wherever it accepts a call, and by the general path elsewhere.

    For all models of the process. `"exact"` is the general path, in plain PyTorch operations on any device; `None`
    chooses by the table again.

    Raises:
        PosencError: An unknown backend.
    """
    global _forced  # one setting for all models, as for PyTorch's own backends
    _forced = None if name is None else _named(name).name


@contextlib.contextmanager
def forced(name: str | None) -> Iterator[None]:
    """Force a backend, as `set_backend`, inside a `with` block."""
    before = _forced
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def _named(name: str) -> Backend:
    backends = {backend.name: backend for backend in (*BACKENDS, *ON_REQUEST)}
    if name not in backends:
        raise unknown("backend", name, backends)
    return backends[name]


def choose(call: Call, encoding: Encoding) -> Backend:
    """Return the first backend that computes a call, and passes its check."""
    candidates = BACKENDS if _forced is None else (_named(_forced), _named("exact"))
    key = key_of(call, encoding) if _struck else None
    return next(
        backend
        for backend in candidates
        if (key is None or (backend.name, key) not in _struck)
        and backend.accepts(call, encoding)
        and (backend.proven or _passes(backend, call, encoding))
    )


def _passes(backend: Backend, call: Call, encoding: Encoding) -> bool:
    """Return whether a backend passed its check for such calls; the first of them makes it."""
    key = key_of(call, encoding)
    if (backend.name, key) in _checked or key.device.type == "meta":  # there, nothing is computed
        return True
    if torch.compiler.is_compiling() or _is_captured(key.device):
        return False  # nothing may be tried in here
    reason = check(backend, call, encoding)
    if reason is None:
        _checked.add((backend.name, key))
        return True
    strike(backend.name, key)
    warnings.warn(
        f"The attention backend {backend.name!r} is not used for {key.dtype} on {key.device}: {reason}. Another one "
        "computes instead, and results stay right. HF_POSENC_BACKEND=exact in the environment avoids all such "
        "backends.",
        stacklevel=2,
    )
    return False


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# The check.

ROWS, KEYS = 129, 385
"""Queries of the check where a backend takes so many, and keys beyond the last border between two bands."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Largest root mean square of the error, relative to that of the result: for halves about 1.5 roundings. A window that
is wrong by one of N keys changes the result by about `N ** -0.5`, which is more."""


def check(backend: Backend, call: Call, encoding: Encoding) -> str | None:
    """Compare a backend with the general path in float64, on a problem like a call; `None`: they agree.

    The problem has the call's encoding, heads and device, an offset, a row with padding on the left and, if gradients
    are on, a backward.

    Returns:
        The reason not to use it: a difference beyond `BOUNDS`, or the exception that it raised.
    """
    gradients = key_of(call, encoding).gradients
    device = call.query.device
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(gradients),
            torch.autocast(device.type, enabled=False),
        ):
            # Steps of a generation have backends that take a few queries alone.
            sizes = ROWS, min(ROWS, call.query.shape[2])
            problems = (_problem(call, encoding, rows, gradients) for rows in sizes)
            small = next((each for each in problems if backend.accepts(each, encoding)), None)
            if small is None:
                return "it does not compute the problem of its check"
            double: dict[str, Any] = {
                name: _leaf(getattr(small, name).double(), gradients) for name in _INPUTS
            }
            wide = replace(small, **double)
            results = [*_results(backend.run, small, encoding, gradients)]
            expected = [*_results(exact, wide, encoding, gradients)]
            bound = BOUNDS[call.query.dtype]
            for name, one, other in zip(_COMPARED, results, expected, strict=False):
                error = float((one.double() - other).norm() / other.norm())
                if not error <= bound:  # NaN too
                    return (
                        f"its {name} differs by {error:.1e} from float64, of {bound:.1e} accepted"
                    )
    except Exception as error:
        return f"it raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


_INPUTS = ("query", "key", "value")
_COMPARED = ("output", *(f"gradient of the {name}" for name in _INPUTS))


def _problem(call: Call, encoding: Encoding, rows: int, gradients: bool) -> Call:
    plan, query = encoding.plan, call.query
    bands = plan.bands if isinstance(plan, BandPlan) else ()
    border = max(
        (max(band.least, band.below or 0) * (band.chunk or 1) for band in bands), default=0
    )
    keys, padding = border + KEYS, 37
    generator = torch.Generator(query.device).manual_seed(0)

    def normal(heads: int, length: int, features: int) -> Tensor:
        # In the memory layout of transformers.
        sizes = 2, length, heads, features
        return torch.randn(sizes, generator=generator, device=query.device).transpose(1, 2)

    features = query.shape[-1]
    tensors = (
        normal(query.shape[1], rows, features) / (call.scaling * features**0.5),
        normal(call.key.shape[1], keys, features),
        normal(call.key.shape[1], keys, call.value.shape[-1]),
    )
    every = torch.arange(keys, device=query.device)
    positions = torch.stack((every, (every - padding).clamp(min=0)))
    lengths = None if call.lengths is None else positions[:, -1] + 1
    rounded = (_leaf(x.to(query.dtype), gradients) for x in tensors)
    inputs: dict[str, Any] = dict(zip(_INPUTS, rounded, strict=True))
    return replace(
        call,
        **inputs,
        query_position=positions[:, keys - rows :],
        key_position=positions,
        mask=_Padded(rows, keys, padding, query.device),
        lengths=None if lengths is None else lengths.to(call.lengths),
        rotated=None,
    )


def _leaf(x: Tensor, gradients: bool) -> Tensor:
    return x.detach().requires_grad_(gradients)


def _results(
    run: Callable[[Call, Encoding], Result], call: Call, encoding: Encoding, gradients: bool
) -> Iterator[Tensor]:
    out = run(call, encoding)[0]
    yield out.detach()
    if gradients:
        weights = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype, device=out.device)
        inputs = [getattr(call, name) for name in _INPUTS]
        yield from torch.autograd.grad(out, inputs, weights.expand_as(out))


class _Padded(Mask):
    """Two causal sequences, the second of them with padding on the left."""

    def __init__(self, rows: int, keys: int, padding: int, device: torch.device) -> None:
        self._rows, self._keys, self._padding = rows, keys, padding
        self._first = torch.tensor([0, padding], device=device)

    def rows(self, start: int, stop: int) -> Tensor:
        own = torch.arange(self._keys - self._rows + start, self._keys - self._rows + stop)
        every = torch.arange(self._keys, device=self._first.device)
        causal = every <= own.to(every.device)[:, None]
        return (causal & (every >= self._first[:, None, None]))[:, None]

    def seen(self) -> Tensor:
        return torch.arange(self._keys, device=self._first.device) >= self._first[:, None]

    def runs(self, positions: Tensor) -> tuple[Run, ...]:
        offset, whole = self._keys - self._rows, slice(None)
        return tuple(
            Run(slice(row, row + 1), whole, slice(first, self._keys), offset - first)
            for row, first in enumerate((0, self._padding))
        )


def attend(call: Call, encoding: Encoding) -> Result:
    """Compute attention with an encoding.

    Returns:
        The output, shape (batch, heads, queries, value_dim), and the attention weights, shape (batch, heads,
        queries, keys), where they are requested.
    """
    return choose(call, encoding).run(call, encoding)
