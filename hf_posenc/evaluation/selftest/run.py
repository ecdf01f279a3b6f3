"""The self-test: checks, probes, times."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
import warnings
from typing import Any

import torch
import transformers

from hf_posenc.attention import engine
from hf_posenc.attention.checks import verdicts
from hf_posenc.attention.checks.backend import Key
from hf_posenc.attention.checks.samples import DTYPES, HEADS, KEY_HEADS, methods
from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.flags import with_fields
from hf_posenc.evaluation.options import SelftestOptions
from hf_posenc.evaluation.selftest.checking import cases, check_all, operators, probes
from hf_posenc.evaluation.selftest.result import SelftestResult
from hf_posenc.evaluation.selftest.timing import Layer, plain_times, times_of


def selftest(options: SelftestOptions | None = None, **fields: Any) -> SelftestResult:
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


def _selftest(options: SelftestOptions, device: torch.device, dtypes: list[str]) -> SelftestResult:
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
    length = options.length or (8192 if device.type == "cuda" else 1024)
    # An operator that ended another process would end this one.
    ended = {case.backend for case, result in checks.items() if result.reason and not result.rows}
    claims = {
        fused.name: probes(fused, device, dtype)
        for fused in operators(device, dtype)
        if fused.name not in ended
    }
    # As in models of 8B, where a step takes long enough to be compared.
    heads = (32, 8) if device.type == "cuda" else (HEADS, KEY_HEADS)
    layer = Layer.of(length, head_dim, dtype, device, heads)
    plain = plain_times(layer)
    for case, result in checks.items():
        if not result.decided and case.backend != "exact":  # nothing that may fail is tried here
            engine.strike(case.backend, Key(device, getattr(torch, case.dtype), case.head_dim, case.kind))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backends that are struck, which the result names
        times = {
            method.name: times_of(method, layer, plain)
            for method in methods()
            if options.methods is None or method.name in options.methods
        }
    engine.restore()
    return SelftestResult(
        str(device),
        {
            **verdicts.fingerprint(device),
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "system": f"{sys.platform} {platform.machine()}",
        },
        checks,
        [case for case in every if case not in found],
        claims,
        {
            "dtype": dtypes[0],
            "head_dim": head_dim,
            "heads": heads[0],
            "key_heads": heads[1],
            "length": length,
            **plain,
        },
        times,
        time.monotonic() - began,
    )


def device_of(name: str | None) -> torch.device:
    """Return the device of this name, by default the GPU if there is one; refuse one that is not there."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PosencError(f"{name!r} is no device: give cpu, cuda or cuda:1.") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda" or (device.index or 0) >= count:
        raise PosencError(
            f"The device {name} is not here: PyTorch {torch.__version__} sees cpu and {count} CUDA devices."
        )
    return torch.device("cuda", device.index or 0)


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
