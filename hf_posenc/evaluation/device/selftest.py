"""`selftest`: checks of all backends, probes of operators, and the times of all methods in one layer."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_posenc.attention import engine
from hf_posenc.attention.checks import verdicts
from hf_posenc.attention.checks.comparison import DTYPES, HEADS, KEY_HEADS, methods
from hf_posenc.errors import unknown
from hf_posenc.evaluation.device.checks import cases, check_all, operators, probes
from hf_posenc.evaluation.device.clock import Clock, device_of
from hf_posenc.evaluation.device.layer import Layers
from hf_posenc.evaluation.device.result import PHASES, PLAIN, GpuResult, Row
from hf_posenc.evaluation.flags import with_fields
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.evaluation.options import SelftestOptions
from hf_posenc.evaluation.scoring.memory import reason_of, release

ROUNDS, ENOUGH = 7, 0.1
"""The most rounds of a timing, and the seconds after which no further round begins."""


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
    device, dtypes = device_of(options.device), _dtypes(options)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return _selftest(options, device, dtypes)


def _selftest(options: SelftestOptions, device: torch.device, dtypes: list[str]) -> GpuResult:
    began = time.monotonic()
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
    dtype, head_dim = getattr(torch, dtypes[0]), options.head_dims[0]
    # An operator that ended another process would end this one.
    ended = {case.backend for case, result in checks.items() if result.reason and not result.rows}
    fused = [each for each in operators(device, dtype) if each.name not in ended]
    claims = {each.name: probes(each, device, dtype) for each in fused}
    # As in models of 8B, where a step takes long enough to be compared.
    heads = (32, 8) if device.type == "cuda" else (HEADS, KEY_HEADS)
    clock = Clock(nn.Linear(1, 1, device=device))
    layers = Layers(device, dtype, head_dim, heads, clock, ROUNDS, ENOUGH)
    for case, result in checks.items():
        if not result.decided and case.backend != "exact":  # nothing that may fail is tried here
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
        probes=claims,
        seconds=time.monotonic() - began,
    )


def _rows(layers: Layers, options: SelftestOptions) -> Iterator[Row]:
    """Yield the times of plain attention and of every method, phase by phase."""
    length = options.length or (8192 if layers.device.type == "cuda" else 1024)
    chosen = [m for m in methods() if options.methods is None or m.name in options.methods]
    for phase in PHASES:
        for method in (None, *chosen):
            name = PLAIN if method is None else method.name
            try:
                found = layers.measured(phase, length, method, host=True)
            except Exception as error:
                found = {"failed": reason_of(error)}
                release(error)
            yield Row(phase, name, length, **found)


def _dtypes(options: SelftestOptions) -> list[str]:
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    for name in options.methods or ():
        if name not in {method.name for method in methods()}:
            raise unknown("method of the engine", name, (method.name for method in methods()))
    if options.dtypes is None:
        on_cpu = device_of(options.device).type == "cpu"
        return sorted(names, key=lambda name: name != "float32") if on_cpu else names
    for name in options.dtypes:
        if name not in names:
            raise unknown("dtype", name, names)
    return list(options.dtypes)
