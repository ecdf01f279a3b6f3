"""`selftest`: checks of all backends against float64, and the times of all methods in one layer."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from hf_posenc.attention import engine
from hf_posenc.attention.checks import Case, isolation, verdicts
from hf_posenc.attention.checks.comparison import (
    DTYPES,
    HEADS,
    KEY_HEADS,
    Comparison,
    check,
    kinds,
    methods,
    offers,
)
from hf_posenc.errors import unknown
from hf_posenc.evaluation.device import Clock, Layers, device_of
from hf_posenc.evaluation.device.result import PHASES, PLAIN, GpuResult, Row
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.evaluation.options import SelftestOptions, with_fields
from hf_posenc.evaluation.scoring import reason_of, release

ROUNDS, ENOUGH = 7, 0.1
"""The most rounds of a timing, and the seconds after which no further round begins."""
PROCESSES = 4
"""At most so many processes check at once; most of their time is compilation."""

Findings = dict[Case, Comparison | None]
"""`None`: the backend does not compute such calls."""


def selftest(options: SelftestOptions | None = None, **fields: Any) -> GpuResult:
    """Check every backend of the attention engine on a device against float64, and time every method there.

    The verdicts replace those that were kept of this device. Backends that may crash run in other processes.

    Args:
        options: The options; by default all of their defaults.
        fields: Options by name, which replace these.

    Returns:
        The verdict on every backend, and the time of every method.

    Raises:
        PosencError: A device that is not there, or an unknown dtype or method.
    """
    options = with_fields(SelftestOptions, options, fields)
    began, device, dtypes = time.monotonic(), device_of(options.device), _dtypes(options)
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        every = cases(dtypes, options.head_dims)
        found = check_all(every, device, options.seconds)
        checks = {case: result for case in every if (result := found.get(case)) is not None}
        decided = {
            case: result.reason
            for case, result in checks.items()
            if result.decided and engine.backend_of(case.backend).may_crash
        }
        verdicts.write(device, decided, anew=True)
        engine.restore()
        # As in models of 8B, where a step takes long enough to be compared.
        heads = (32, 8) if on_gpu else (HEADS, KEY_HEADS)
        clock = Clock(nn.Linear(1, 1, device=device))
        sizes = getattr(torch, dtypes[0]), options.head_dims[0], heads
        layers = Layers(device, *sizes, clock, ROUNDS, ENOUGH)
        for case, result in checks.items():
            if not result.decided and case.backend != "exact":  # what may fail is not timed
                engine.strike(case, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backends that are struck, which the result names
            records = list(_rows(layers, options))
        engine.restore()
    return GpuResult(
        records=records,
        model={"name": "layers alone", "dtype": dtypes[0], "device": str(device)},
        sizes=layers.sizes,
        machine=clock.machine(),
        memory=None,
        rounds=ROUNDS,
        environment={**verdicts.fingerprint(device), **environment()},
        checks=checks,
        not_reached=[case for case in every if case not in found],
        seconds=time.monotonic() - began,
    )


def _rows(layers: Layers, options: SelftestOptions) -> Iterator[Row]:
    """Yield the times of plain attention and of every method; of a second length, while there is time."""
    lengths = [8192, 32_768] if layers.device.type == "cuda" else [1024]
    lengths = [options.length] if options.length else lengths
    chosen = [m for m in methods() if options.methods is None or m.name in options.methods]
    end = time.monotonic() + options.seconds
    for length, phase, method in itertools.product(lengths, PHASES, (None, *chosen)):
        if length > lengths[0] and time.monotonic() > end:
            return
        name = PLAIN if method is None else method.name
        try:
            found = layers.measured(phase, length, method, host=True)
        except Exception as error:
            found = {"failed": reason_of(error)}
            release(error)
        yield Row(phase, name, length, **found)


def _dtypes(options: SelftestOptions) -> list[str]:
    """Return the dtypes to check; raise for an unknown one, or an unknown method."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    known = {"method of the engine": [method.name for method in methods()], "dtype": names}
    for kind, given in zip(known, (options.methods, options.dtypes), strict=True):
        for name in given or ():
            if name not in known[kind]:
                raise unknown(kind, name, known[kind])
    if options.dtypes is not None:
        return list(options.dtypes)
    on_cpu = device_of(options.device).type == "cpu"
    return sorted(names, key=lambda name: on_cpu and name != "float32")


def cases(dtypes: Sequence[str], head_dims: Sequence[int]) -> list[Case]:
    """Return all cases, the most telling ones first.

    First every backend and kind in the first dtype and head dimension, with a backward last. Then kind by kind the
    other dtypes and head dimensions, so that a short test has seen each backend in all of them.
    """
    first, *others = itertools.product(head_dims, dtypes)
    ordered = [(first, gradients, kind) for gradients in (False, True) for kind in kinds()]
    ordered += [
        (other, gradients, kind)
        for kind, gradients, other in itertools.product(kinds(), (False, True), others)
    ]
    return [
        Case(backend.name, kind, dtype, head_dim, gradients)
        for (head_dim, dtype), gradients, kind in ordered
        for backend in engine.BACKENDS
    ]


def check_all(every: Sequence[Case], device: torch.device, seconds: float) -> Findings:
    """Check cases until the time is over: backends that may crash in other processes, the others here.

    Those that are missing then had no time, and their backend computes such calls.
    """
    end, backends = time.monotonic() + seconds, {c: engine.backend_of(c.backend) for c in every}
    offered = [case for case in every if offers(backends[case], case, device)]
    found: Findings = dict.fromkeys({*every}.difference(offered))  # which needed no time
    elsewhere = [case for case in offered if backends[case].may_crash]
    count = min(PROCESSES, os.cpu_count() or 1, len(elsewhere))
    with ThreadPoolExecutor(max(1, count)) as threads:
        shares = [elsewhere[first::count] for first in range(count)]
        others = [threads.submit(_elsewhere, share, device, end, found) for share in shares]
        for case in offered:
            if not backends[case].may_crash and time.monotonic() < end:
                found[case] = check(backends[case], case, device)
    for other in others:
        other.result()
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
