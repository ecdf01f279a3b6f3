"""Runs a script, or a module, with accelerate's own FSDP on a CPU: only its choice of the backend is replaced.

    accelerate launch --config_file scripts/configs/fsdp2.yaml tests/support/fsdp_on_cpu.py -m hf_posenc.training ...

accelerate gives FSDP to processes with a device of their own and silently none to those on a CPU, where torch's
`fully_shard` works as well. A bare loop also gets DeepSpeed's backend so (DS_ACCELERATOR=cpu in front).
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def allow() -> None:
    """Lets accelerate use FSDP in this process, and the Trainer --bf16 beside it."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    import torch.distributed as dist
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import training_args

    def choose(*_: Any, **__: Any) -> tuple[str, Any]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = choose
    # --bf16 without --use_cpu, which would leave FSDP out
    vars(training_args)["is_torch_bf16_gpu_available"] = lambda: True


def main() -> None:
    allow()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        runpy.run_module(sys.argv.pop(1), run_name="__main__")
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
