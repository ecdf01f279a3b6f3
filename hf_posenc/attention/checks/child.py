"""The process that checks backends for another one: cases from its stdin, findings to its stdout."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from hf_posenc.attention import engine
from hf_posenc.attention.checks.comparison import Comparison, compare, problem_of
from hf_posenc.attention.checks.samples import Case, call_of, encoding_of, kinds


def main(task: Mapping[str, Any]) -> None:
    """Check cases one by one: print a line before each, and one with the findings after it."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # libraries print there
        device = torch.device(task["device"])
        torch.zeros(1, device=device)  # an error of the device is no backend's
        end = time.monotonic() + task["seconds"]
        for index, values in enumerate(task["cases"]):
            if index and time.monotonic() > end:
                return
            print(json.dumps({"case": index}), file=out, flush=True)
            found = checked(Case(**values), device)
            line = {"case": index, "found": found and dataclasses.asdict(found)}
            print(json.dumps(line), file=out, flush=True)


def checked(case: Case, device: torch.device) -> Comparison | None:
    """Compare the backend of a case with float64; `None` where it computes no such problem."""
    backend, dtype = engine.backend_of(case.backend), getattr(torch, case.dtype)
    call = call_of(dtype, case.head_dim, device)
    encoding = encoding_of(kinds()[case.kind], case.head_dim, device)
    with torch.set_grad_enabled(case.gradients):
        if problem_of(backend, call, encoding, gradients=case.gradients) is None:
            return None
    return compare(backend, call, encoding, gradients=case.gradients)
