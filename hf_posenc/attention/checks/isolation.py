"""Checks in a process of its own, which a backend may crash, break or block."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from hf_posenc.attention.checks import Backend, Case
from hf_posenc.attention.checks.comparison import Comparison, check

STARTING, HANGING = 120.0, 180.0
"""Seconds after which the process ends itself: to import torch and reach the device, and for one case with its
compilation, which takes FlashAttention-4 a minute on a slow core."""
_CHILD = (
    "import faulthandler, json, sys; task = json.load(sys.stdin); sys.path[:] = task['path']; "
    "faulthandler.dump_traceback_later(task['starting'], exit=True); from hf_posenc.attention.checks.isolation import "
    "main; from hf_posenc.attention.engine import backend_of; main(task, backend_of)"
)


def compared(
    cases: Sequence[Case], device: torch.device, seconds: float
) -> Iterator[tuple[Case, Comparison | None]]:
    """Yield the findings of another process, case by case; those that it had no time for are missing.

    The first case is always checked; after `seconds`, the start included, no further one is begun. `None` is found
    where a backend does not compute a case. One that ends the process, raises or hangs is the last.
    """
    cases = tuple(cases)  # the caller's list may change meanwhile
    task = {
        "device": str(device),
        "cases": [asdict(case) for case in cases],
        "until": time.time() + seconds,
        "path": sys.path,
        "starting": STARTING,
        "hanging": HANGING,
    }
    command, pipe, null = [sys.executable, "-c", _CHILD], subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)
    except OSError:  # no Python to start, as in an embedded one
        return
    assert process.stdin is not None
    assert process.stdout is not None
    begun: tuple[Case, float] | None = None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            json.dump(task, stdin)
        for line in process.stdout:
            values: dict[str, Any] = json.loads(line)
            case = cases[values["case"]]
            begun = None if "found" in values else (case, time.monotonic())
            if begun is None:
                found = values["found"] and Comparison(**values["found"])
                yield case, found
                if found and found.raised:
                    return  # the device may be broken for that process
        if begun is not None:
            code, (case, since) = process.wait(), begun
            yield case, Comparison(reason=_ended(code, time.monotonic() - since))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _ended(code: int, seconds: float) -> str:
    if code == 1 and seconds >= HANGING:
        return f"it gives no result within {HANGING:g} s"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it crashes the process ({signal.Signals(-code).name})"
    return f"it ends the process with status {code}"


def main(task: Mapping[str, Any], backend_of: Callable[[str], Backend]) -> None:
    """Check cases one by one, in the other process: print a line before each, and one with the findings after it."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # libraries print there
        device = torch.device(task["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # an error of the device is no backend's
        for index, values in enumerate(task["cases"]):
            if index and time.time() > task["until"]:
                return
            print(json.dumps({"case": index}), file=out, flush=True)
            faulthandler.dump_traceback_later(task["hanging"], exit=True)
            case = Case(**values)
            found = check(backend_of(case.backend), case, device)
            answer = {"case": index, "found": found and asdict(found)}
            print(json.dumps(answer), file=out, flush=True)
