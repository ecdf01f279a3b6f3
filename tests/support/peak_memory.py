"""Runs a training and prints the peak of each process's own memory in MiB, from its start to its first step.

Pages of files do not count: all processes of a machine share them, and the system drops them when memory is short.

accelerate launch --config_file ... tests/support/fsdp_on_cpu.py tests/support/peak_memory.py scripts/finetune.py ...
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any


def anonymous_memory() -> int:
    """MiB of memory that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) // 1024


def main() -> None:
    from transformers import Trainer

    import hf_posenc.training  # noqa: F401  what the script imports is no part of the measurement

    before, peak, done = anonymous_memory(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_memory())

    prepare: Any = Trainer._prepare_for_training

    def prepared(*given: Any, **options: Any) -> Any:
        result = prepare(*given, **options)
        done.set()
        print(f"rank {os.environ['RANK']}: {peak - before} MiB", flush=True)
        return result

    Trainer._prepare_for_training = prepared  # type: ignore[method-assign]
    threading.Thread(target=sample, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
