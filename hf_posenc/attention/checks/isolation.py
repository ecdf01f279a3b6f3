"""Checks in a process of its own, which a backend may crash, break or block."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from hf_posenc.attention.checks.comparison import Comparison
from hf_posenc.attention.checks.samples import Case

STARTING, HANGING = 120.0, 180.0
"""Seconds for the process to import torch and reach the device, and for one case with its compilation, which takes
FlashAttention-4 a minute on a slow core."""
_CHILD = (
    "import json, sys; task = json.load(sys.stdin); sys.path[:] = task['path']; "
    "from hf_posenc.attention.checks.child import main; main(task)"
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
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:  # no Python to start, as in an embedded one
        return
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        json.dump(task, stdin)
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    begun: Case | None = None
    try:
        while True:
            try:
                line = lines.get(timeout=STARTING if begun is None else HANGING)
            except queue.Empty:
                if begun is not None:
                    yield begun, Comparison(reason=f"it gives no result within {HANGING:g} s")
                return
            if line is None:
                if begun is not None:
                    yield begun, Comparison(reason=_ended(process.wait()))
                return
            values: dict[str, Any] = json.loads(line)
            case = cases[values["case"]]
            begun = None if "found" in values else case
            if begun is None:
                found = values["found"] and Comparison(**values["found"])
                yield case, found
                if found and found.raised:
                    return  # the device may be broken for that process
    finally:
        process.kill()
        process.wait()
        reader.join()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it crashes the process ({signal.Signals(-code).name})"
    return f"it ends the process with status {code}"
