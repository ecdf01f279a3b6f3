"""Checks of every backend, by kind, dtype and head dimension, and probes of how fused operators align and mask."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Sequence

import torch

from hf_posenc.attention import engine
from hf_posenc.attention.checks import Case, isolation
from hf_posenc.attention.checks.comparison import Comparison, check, kinds, offers
from hf_posenc.attention.fused import Fused, Segments, Shape
from hf_posenc.attention.fused.flash4 import Flash4
from hf_posenc.attention.fused.pytorch import CudaFlash
from hf_posenc.attention.parts import CPU

PROCESSES = 4
"""At most so many processes check at once; most of their time is compilation."""

Findings = dict[Case, Comparison | None]
"""`None`: the backend does not compute such calls."""


def cases(dtypes: Sequence[str], head_dims: Sequence[int]) -> list[Case]:
    """Return all cases, the most telling ones first.

    First every backend and kind in the first dtype and head dimension, with a backward last. Then kind by kind the
    other dtypes and head dimensions, so that a short test has seen each backend in all of them.
    """
    names = [backend.name for backend in engine.BACKENDS]
    first, *others = itertools.product(head_dims, dtypes)
    ordered = [(*first, gradients, kind) for gradients in (False, True) for kind in kinds()]
    ordered += [
        (*other, gradients, kind)
        for kind in kinds()
        for gradients in (False, True)
        for other in others
    ]
    return [
        Case(name, kind, dtype, head_dim, gradients)
        for head_dim, dtype, gradients, kind in ordered
        for name in names
    ]


def check_all(every: Sequence[Case], device: torch.device, seconds: float) -> Findings:
    """Check cases until the time is over: backends that may crash in other processes, the others here.

    Those that are missing then had no time, and their backend computes such calls.
    """
    end = time.monotonic() + seconds
    found: Findings = {}
    elsewhere = []
    for case in every:
        backend = engine.backend_of(case.backend)
        if backend.may_crash and offers(backend, case, device):
            elsewhere.append(case)
        elif backend.may_crash:
            found[case] = None
    count = min(PROCESSES, os.cpu_count() or 1, len(elsewhere))
    threads = [
        threading.Thread(target=_elsewhere, args=(elsewhere[first::count], device, end, found))
        for first in range(count)
    ]
    for thread in threads:
        thread.start()
    for case in every:
        backend = engine.backend_of(case.backend)
        if backend.may_crash:
            continue
        if time.monotonic() < end:
            found[case] = check(backend, case, device)
        elif not offers(backend, case, device):  # which needs no time
            found[case] = None
    for thread in threads:
        thread.join()
    return found


def _elsewhere(pending: list[Case], device: torch.device, end: float, found: Findings) -> None:
    """Check a share of the cases, in a new process after an error; a backend that ended one is not tried again."""
    while pending and (left := end - time.monotonic()) > 0:
        before = len(pending)
        for case, result in isolation.compared(pending, device, left):
            found[case] = result
            pending.remove(case)
            if result is not None and result.reason and not result.rows:
                for other in [other for other in pending if other.backend == case.backend]:
                    reason = f"not tried, since {case} failed: {result.reason}"
                    found[other] = Comparison(reason=reason, decided=False)
                    pending.remove(other)
        if len(pending) == before:  # no process could be started
            return


def operators(device: torch.device, dtype: torch.dtype) -> list[Fused]:
    """Return the fused operators that serve a device."""
    every: tuple[Fused, ...] = (CPU, Flash4(), CudaFlash())
    return [fused for fused in every if fused.serves(device, dtype, FEATURES)]


def probes(fused: Fused, device: torch.device, dtype: torch.dtype) -> dict[str, bool | str]:
    """Return whether a fused operator keeps its contract, claim by claim: alignment, windows, rows without keys."""
    try:
        return _claims(fused, device, dtype if fused.windows else torch.float32)
    except Exception as error:
        return {"runs": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


FEATURES, ROWS, KEYS = 16, 2, 6


def _claims(fused: Fused, device: torch.device, dtype: torch.dtype) -> dict[str, bool | str]:
    query = torch.zeros(1, 2, ROWS, FEATURES, dtype=dtype, device=device)
    key = query.new_zeros(1, 1, KEYS, FEATURES)
    value = torch.eye(KEYS, FEATURES, dtype=dtype, device=device)[None, None]

    def sees(shape: Shape, *expected: range) -> bool:
        """Return whether each row weighs its keys, and no others, alike."""
        out, lse, _ = fused.forward(query, key, value, shape)
        rows = [row.nonzero()[:, 0].tolist() for row in out[0, 0]]
        sizes = zip(lse[0, 0].double().tolist(), expected, strict=True)
        near = all(math.isclose(x, math.log(len(keys)), abs_tol=1e-5) for x, keys in sizes)
        return near and rows == [[*keys] for keys in expected]

    causal, rows = Shape(causal=True), range(1, ROWS + 1)
    if not fused.windows:
        return {"causal, aligned to the top left": sees(causal, *map(range, rows))}
    stops = [KEYS - ROWS + row for row in rows]
    empty = Shape(segments=Segments.of([((0, 1), (0, 3))], ROWS, KEYS))
    out, lse, _ = fused.forward(query, key, value, empty)
    windows = {
        f"a window of {size} sees {size}": sees(
            Shape(causal=True, window=size), *(range(stop - size, stop) for stop in stops)
        )
        for size in (1, 3)
    }
    return {
        "all keys without a mask": sees(Shape(), *[range(KEYS)] * ROWS),
        "causal, aligned to the bottom right": sees(causal, *map(range, stops)),
        **windows,
        "rows without keys: zeros that no merge counts": bool(
            (out[:, :, 1] == 0).all() and (lse[:, :, 1] < -1e29).all()
        ),
    }
