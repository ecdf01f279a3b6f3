"""Whether a launcher did what it was asked: accelerate trains on, silently, with fewer processes or without shards."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from hf_posenc.errors import PosencError

_CONFIGS = "scripts/configs/"
_LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun")
_MODULES = (
    *("accelerate.commands.launch", "accelerate/commands/launch.py"),
    *("torch.distributed.run", "torch/distributed/run.py"),
)


def join_on_cpu() -> None:
    """Lets the processes of a launcher find each other on a machine without a GPU. Call it before anything of a run.

    accelerate looks for a GPU in each process that torchrun or a launch file with `use_cpu: true` started, and where
    there is none, lets each train alone, unless it is told in the environment.
    """
    import torch

    sharded = is_set("ACCELERATE_USE_FSDP") or is_set("ACCELERATE_USE_DEEPSPEED")
    if "LOCAL_RANK" in os.environ and not sharded and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def check_launch(arguments: TrainingArguments | None = None) -> None:
    """Refuses a run that was started in a way in which it is not what was asked for. Needs no model.

    Args:
        arguments: The Trainer's; `None` in a loop of one's own, behind its `Accelerator(...)`.

    Raises:
        PosencError: Fewer processes than were asked for, several GPUs in one process, sharding that is asked for and
            not done, or sharding that would leave no model behind.
    """
    from accelerate import PartialState

    if arguments is not None:
        _ = arguments.device  # sets up the processes
    state = PartialState()
    kind = state.distributed_type.value
    if arguments is not None and arguments.n_gpu > 1:
        raise PosencError(
            f"One process sees {arguments.n_gpu} GPUs, and the Trainer would copy the model to each in every step "
            "(DataParallel), without its patch. Start one process for each: accelerate launch --config_file "
            f"{_CONFIGS}two_processes.yaml --num_processes {arguments.n_gpu} ..., or hide all but one "
            "(CUDA_VISIBLE_DEVICES=0)."
        )
    if wants_fsdp(arguments):
        if kind in ("NO", "MULTI_CPU"):
            raise PosencError(
                "FSDP was asked for, but accelerate gives it to GPUs only: on a CPU every process would hold the whole "
                f"model, without a word. Use {_CONFIGS}two_cpu_processes.yaml."
            )
        _check_fsdp(arguments)
    wants_deepspeed = arguments is not None and arguments.deepspeed
    if (is_set("ACCELERATE_USE_DEEPSPEED") or wants_deepspeed) and kind != "DEEPSPEED":
        raise PosencError(
            "DeepSpeed was asked for, but accelerate leaves it out where a CPU is asked for: every process would hold "
            "the whole model, without a word. Leave --use_cpu out; DeepSpeed takes a CPU by DS_ACCELERATOR=cpu and "
            "--ddp_backend gloo."
        )
    _check_processes(state.num_processes, deepspeed=is_set("ACCELERATE_USE_DEEPSPEED"))
    if kind == "DEEPSPEED":
        _check_deepspeed(arguments)


def is_set(name: str) -> bool:
    """Whether `accelerate launch` has switched something on for the processes that it starts."""
    return os.environ.get(name, "false").lower() in ("true", "1")


def wants_fsdp(arguments: TrainingArguments | None) -> bool:
    """Whether FSDP is asked for, by a launch file or by the arguments."""
    return is_set("ACCELERATE_USE_FSDP") or bool(arguments is not None and arguments.fsdp)


def launched_processes() -> int:
    """How many processes the launcher of this one was asked for; 1 where that cannot be seen.

    `accelerate launch` tells a single process nothing of a larger number that it did not start, so its own command line
    is read.
    """
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    found = launcher()
    if found is None:
        return 1
    try:
        from accelerate.commands.launch import launch_command_parser, load_config_from_file

        words = found[1][1:] if found[1][:1] == ["launch"] else found[1]
        given, _ = launch_command_parser().parse_known_args(words)
        if given.num_processes is None and (given.config_file or not given.cpu):
            return int(load_config_from_file(given.config_file).num_processes)
        return int(given.num_processes or 1)
    except (Exception, SystemExit):  # another parent, another version: nothing is known
        return 1


def launcher() -> tuple[int, list[str]] | None:
    """The launcher of accelerate or torch that started this process: its process id and its arguments."""
    import psutil  # accelerate depends on it

    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        words = parent.cmdline()
        for place, word in enumerate(words[:4]):
            if Path(word).name in _LAUNCHERS or word.endswith(_MODULES):
                return int(parent.pid), words[place + 1 :]
    return None


def _check_processes(running: int, *, deepspeed: bool) -> None:
    asked = launched_processes()
    if asked <= running:
        return
    if "WORLD_SIZE" in os.environ:
        cpu = (
            "DS_ACCELERATOR=cpu in front and --ddp_backend gloo behind"
            if deepspeed
            else "--use_cpu, or ACCELERATE_USE_CPU=true in front of the command"
        )
        raise PosencError(
            f"{asked} processes were started and do not know of each other: each would train on its own and write into "
            f"the same folder. Where there is no GPU, use {cpu}."
        )
    raise PosencError(
        f"{asked} processes were asked for, and accelerate started one: on a CPU `--cpu --num_processes {asked}` and "
        f"MULTI_CPU do that. Use --config_file {_CONFIGS}two_cpu_processes.yaml --num_processes {asked}."
    )


def _check_fsdp(arguments: TrainingArguments | None) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    given: dict[str, Any] = (None if arguments is None else arguments.fsdp_plugin_args) or {}
    plugin = FullyShardedDataParallelPlugin(**given)
    if plugin.fsdp_version != 2:
        raise PosencError(
            "FSDP1 flattens weights into buffers, in which the parameters of a patch and of the head have no place of "
            f"their own. Set fsdp_version: 2, as {_CONFIGS}fsdp2.yaml does."
        )
    if plugin.cpu_ram_efficient_loading:
        raise PosencError(
            "fsdp_cpu_ram_efficient_loading leaves all processes but the first without weights while the patch, the "
            f"loss and the data are tried on the model. Set it to false, as {_CONFIGS}fsdp2.yaml does."
        )
    if "FULL" not in str(plugin.state_dict_type):
        raise PosencError(
            f"fsdp_state_dict_type {plugin.state_dict_type.name}: the Trainer would write no model at the end. Set it "
            f"to FULL_STATE_DICT, as {_CONFIGS}fsdp2.yaml does."
        )


def _check_deepspeed(arguments: TrainingArguments | None) -> None:
    from accelerate.state import AcceleratorState

    plugin: Any = (
        AcceleratorState().deepspeed_plugin if arguments is None else arguments.deepspeed_plugin
    )
    zero = plugin.deepspeed_config.get("zero_optimization", {})
    if zero.get("stage") == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        raise PosencError(
            "ZeRO-3 without stage3_gather_16bit_weights_on_model_save would write no model that can be loaded. Set it "
            f"to true, or zero3_save_16bit_model in a launch file, as {_CONFIGS}zero3.yaml does."
        )
    clipped, wanted = plugin.deepspeed_config.get("gradient_clipping"), None
    if arguments is not None:
        wanted = arguments.max_grad_norm
    if clipped != "auto" and (not clipped if wanted is None else (clipped or 0.0) != wanted):
        raise PosencError(
            f"DeepSpeed clips gradients itself, and its gradient_clipping is {clipped}"
            + ("" if wanted is None else f" where max_grad_norm is {wanted:g}")
            + ". Set both to the same number."
        )
