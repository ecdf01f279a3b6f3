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
from hf_posenc.attention.checks.comparison import check
from hf_posenc.attention.checks.samples import Case


def main(task: Mapping[str, Any]) -> None:
    """Check cases one by one: print a line before each, and one with the findings after it."""
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
            case = Case(**values)
            found = check(engine.backend_of(case.backend), case, device)
            line = {"case": index, "found": found and dataclasses.asdict(found)}
            print(json.dumps(line), file=out, flush=True)
