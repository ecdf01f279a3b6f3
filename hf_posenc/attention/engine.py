"""The one entry of the engine, the table that chooses the path, and the check of a path before it is used.

A backend for a device that no test has run on is compared with the general path in float64 before its first use there,
the first time after an installation in a process of its own (`checks`). One that differs, raises or crashes is struck
with a warning, and the next one computes. `set_backend` and the environment variable HF_POSENC_BACKEND choose by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from hf_posenc.attention import decode, growing, prefill, windowed
from hf_posenc.attention.call import Call, outside_autocast, product_dtype
from hf_posenc.attention.checks import CAPPED, isolation, verdicts
from hf_posenc.attention.checks import Backend as Backend
from hf_posenc.attention.checks import Case as Case
from hf_posenc.attention.checks import Result as Result
from hf_posenc.attention.checks import case_of as case_of
from hf_posenc.attention.checks.comparison import DTYPES, HEAD_DIMS, compare, kinds
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact
from hf_posenc.attention.fused import Fused
from hf_posenc.attention.fused.flash4 import Flash4
from hf_posenc.attention.fused.pytorch import CudaFlash, CudnnAttention
from hf_posenc.attention.kernels import biased as triton_biased
from hf_posenc.attention.kernels import decode as triton_decode
from hf_posenc.attention.kernels import parts
from hf_posenc.attention.softmax import is_exporting, is_transformed
from hf_posenc.errors import PosencError, one_line, unknown


def windowed_backend(name: str, fused: Fused, *, kernel: bool = False, **options: Any) -> Backend:
    """Return a fused operator's backend; with `kernel`, kernels turn queries and keys and merge the parts."""
    turns, turned = (parts.accepts, parts.turned) if kernel else (None, windowed.turned)
    accepts = functools.partial(windowed.accepts, fused=fused, turns=turns)
    run = functools.partial(windowed.attend, fused=fused, turned=turned)
    return Backend(name, accepts, run, fused=True, **options)


_UNPROVEN = {"proven": False, "may_crash": True}
_kernels = functools.partial(Backend, fused=True, proven=False, may_crash=True)
BACKENDS: tuple[Backend, ...] = (
    _kernels("triton decode", triton_decode.accepts, triton_decode.run),
    _kernels("flash attention 4, table", triton_biased.accepts_table, triton_biased.run_table),
    _kernels("triton biased", triton_biased.accepts, triton_biased.run),
    Backend("prefill", prefill.accepts, prefill.prefill),
    Backend("moving", decode.accepts_moving, decode.moving),
    windowed_backend("flash attention 4", Flash4(parts.merge), kernel=True, **_UNPROVEN),
    windowed_backend("cudnn", CudnnAttention(CudaFlash(parts.merge)), kernel=True, **_UNPROVEN),
    windowed_backend("cuda flash, triton", CudaFlash(parts.merge), kernel=True, **_UNPROVEN),
    windowed_backend("cuda flash", CudaFlash(), **_UNPROVEN),
    Backend("few", decode.accepts_few, decode.few),
    Backend("exact", lambda call, encoding: True, exact),
)
"""Tried in this order; a faster kernel joins ahead of the general path."""
SECONDS = 20.0
"""Time for a process that checks the case at hand to check others that may follow too."""

_struck: set[tuple[Case, torch.device]] = set()
_checked: set[tuple[Case, torch.device]] = set()
_warned: set[tuple[str, torch.device]] = set()
_forced: str | None = os.environ.get("HF_POSENC_BACKEND") or None


def strike(case: Case, device: torch.device) -> None:
    """Leave a backend out for all calls of a case, until `restore`; the general path has no substitute."""
    _struck.add((case, device))


def restore() -> None:
    """Let every backend that was struck compute again, after another check."""
    _struck.clear()
    _checked.clear()
    _warned.clear()


def set_backend(name: str | None) -> None:
    """Compute attention by one backend wherever it accepts a call, and by the general path elsewhere.

    For all models of the process. `"exact"` is the general path, in plain PyTorch operations on any device; `None`
    chooses by the table again.

    Args:
        name: The backend, or `None`.

    Raises:
        PosencError: An unknown backend.

    Examples:
        >>> from hf_posenc import set_backend
        >>> set_backend("exact")
        >>> set_backend(None)
    """
    global _forced  # one setting for all models, as for PyTorch's own backends
    _forced = None if name is None else backend_of(name).name


@contextlib.contextmanager
def forced(name: str | None) -> Iterator[None]:
    """Force a backend, as `set_backend`, inside a `with` block."""
    before = _forced
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def backend_of(name: str) -> Backend:
    """Return a backend by its name.

    Raises:
        PosencError: An unknown one.
    """
    backends = {backend.name: backend for backend in BACKENDS}
    if name not in backends:
        raise unknown("backend", name, backends)
    return backends[name]


def _table() -> tuple[Backend, ...]:
    return BACKENDS if _forced is None else (backend_of(_forced), backend_of("exact"))


def choose(call: Call, encoding: Encoding) -> Backend:
    """Return the first backend that computes a call, and passes its check; of several lengths, the last."""
    call, encoding = growing.last(call, encoding)
    return next(
        backend
        for backend in _table()
        if not (_struck and (case_of(backend, call, encoding), call.query.device) in _struck)
        and backend.accepts(call, encoding)
        and (backend.proven or _passes(backend, call, encoding))
    )


def candidate(call: Call, encoding: Encoding) -> tuple[Backend, bool]:
    """Return the first backend that would compute a call, and whether it was shown to work; nothing is tried."""
    call, encoding = growing.last(call, encoding)
    device = call.query.device
    for backend in _table():
        case = case_of(backend, call, encoding)
        if (case, device) in _struck or not backend.accepts(call, encoding):
            continue
        if backend.proven or (case, device) in _checked:
            return backend, True
        known = verdicts.read(device)
        if known.get(case) is None:
            return backend, case in known
    return backend_of("exact"), True


def _passes(backend: Backend, call: Call, encoding: Encoding) -> bool:
    """Return whether a backend passed its check for such calls; the first of them makes it."""
    case, device = case_of(backend, call, encoding), call.query.device
    if (case, device) in _checked or device.type == "meta":  # there, nothing is computed
        return True
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or capturing:
        return False  # nothing may be tried in here
    reason = _elsewhere(case, device) if backend.may_crash else None
    if reason is None:
        reason = compare(backend, call, encoding, gradients=case.gradients).reason
    if reason is None:
        _checked.add((case, device))
        return True
    strike(case, device)
    if (backend.name, device) not in _warned:  # one warning, for all its kinds
        _warned.add((backend.name, device))
        warnings.warn(
            f"The attention backend {backend.name!r} is not used for {call.dtype} on {device}: {reason}. Another "
            "one computes instead, and results stay right. Its other failures give no warning; "
            f"`hf-posenc selftest --device {device.type}` shows what works here. HF_POSENC_BACKEND=exact in the "
            "environment avoids all such backends.",
            stacklevel=2,
        )
    return False


def _elsewhere(case: Case, device: torch.device) -> str | None:
    """Return the reason not to try a backend in this process, from the cache or from another process that tries it.

    `None` too where that process cannot decide: it did not start, had no memory, or does not know the kind.
    """
    if case.kind.removesuffix(CAPPED) not in kinds():
        return None
    known = verdicts.read(device)
    if case not in known:
        new = [each for each in dict.fromkeys((case, *_likely(case))) if each not in known]
        decided: verdicts.Verdicts = {}
        for each, found in isolation.compared(new, device, SECONDS):
            if found is not None and found.decided:
                decided[each] = found.reason
            elif found is None and each == case:
                decided[each] = None  # nothing to ask another process again
        verdicts.write(device, decided)
        known.update(decided)
    return known.get(case)


def _likely(case: Case) -> Iterator[Case]:
    """Yield what may follow a case: other kinds and backends, then other usual dtypes and sizes."""
    names = [backend.name for backend in BACKENDS if backend.may_crash]
    usual = [(str(d).removeprefix("torch."), size) for d in DTYPES for size in HEAD_DIMS]
    for dtype, head_dim in ((case.dtype, case.head_dim), *usual):
        for gradients in (case.gradients, not case.gradients):
            for kind in kinds():
                yield from (Case(name, kind, dtype, head_dim, gradients) for name in names)


def attend(call: Call, encoding: Encoding) -> Result:
    """Compute attention with an encoding.

    Returns:
        The output, shape (batch, heads, queries, value_dim), and the attention weights, shape (batch, heads,
        queries, keys), where they are requested.
    """
    if (dtype := product_dtype(call.value)) != call.dtype:
        call = dataclasses.replace(call, value=call.value.to(dtype))
    # As in PyTorch's fused attention, autocast chooses the dtype of the products alone, and none of what is inside.
    with outside_autocast(call.value.device.type):
        # An exported graph is for all lengths and devices.
        if call.beside is not None or is_exporting() or is_transformed():
            return exact(call, encoding)
        if growing.accepts(call, encoding):
            out = call.value.new_zeros(*call.query.shape[:3], call.value.shape[-1])
            for rows, queries, piece, fixed in growing.calls(call, encoding):
                out[rows, :, queries] = choose(piece, fixed).run(piece, fixed)[0]
            return out, None
        return choose(call, encoding).run(call, encoding)


def _extra() -> tuple[Backend, ...]:
    """The backends of the module that the environment names."""
    module = os.environ.get(verdicts.EXTRA)
    try:
        return tuple(importlib.import_module(module).BACKENDS) if module else ()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise PosencError(
            f"{verdicts.EXTRA}={module!r} names no module with a tuple BACKENDS ({one_line(error)}): unset it, or "
            "correct it."
        ) from error


BACKENDS = (*_extra(), *BACKENDS)
