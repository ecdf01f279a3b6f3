"""Checks before the first step: of the launch, and of everything that would silently be dropped or have no effect."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainingArguments

from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.methods import Growing
from hf_posenc.patch.patching import get_patch, inspect_rope
from hf_posenc.patch.report import Patch
from hf_posenc.training.chunked_loss import ChunkedLoss
from hf_posenc.training.ranks import gather

_CONFIGS = "scripts/configs/"
_LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun")
_MODULES = re.compile(r"(accelerate[./]commands[./]launch|torch[./]distributed[./]run)(\.py)?$")
_SAMPLE = 4096  # weights of a tensor: enough to estimate a share to a percent


def join_on_cpu() -> None:
    """Connect the processes of a launcher on a machine without a GPU: accelerate alone would let each train by itself.

    Call it first.
    """
    sharded = is_set("ACCELERATE_USE_FSDP") or is_set("ACCELERATE_USE_DEEPSPEED")
    if "LOCAL_RANK" in os.environ and not sharded and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def check_launch(arguments: TrainingArguments | None = None) -> None:
    """Refuse a launch that did not do what was requested. Without the Trainer, call it after `Accelerator(...)`."""
    if arguments is not None:
        _ = arguments.device  # sets up the processes
    state = PartialState()
    kind = state.distributed_type.value
    if arguments is not None and arguments.n_gpu > 1:
        raise PosencError(
            f"One process sees {arguments.n_gpu} GPUs, and the Trainer would copy the model to each in every step "
            "(DataParallel), without its patch. Start one process for each: accelerate launch --config_file "
            f"{_CONFIGS}two_processes.yaml --num_processes {arguments.n_gpu} -m hf_posenc.training ..., or "
            "CUDA_VISIBLE_DEVICES=0."
        )
    if wants_fsdp(arguments):
        if kind in ("NO", "MULTI_CPU"):
            raise PosencError(
                "FSDP was requested, but accelerate supports it on GPUs only: on a CPU every process would silently "
                f"hold the whole model. Use {_CONFIGS}two_cpu_processes.yaml."
            )
        _check_fsdp(arguments)
    if (
        is_set("ACCELERATE_USE_DEEPSPEED") or (arguments and arguments.deepspeed)
    ) and kind != "DEEPSPEED":
        raise PosencError(
            "DeepSpeed was requested, but accelerate leaves it out if a CPU is requested: every process would silently "
            "hold the whole model. Leave --use_cpu out; a CPU needs DS_ACCELERATOR=cpu and --ddp_backend gloo."
        )
    requested = launched_processes()
    if requested > state.num_processes:
        raise PosencError(
            f"{requested} processes were requested, and accelerate connected {state.num_processes}: each would train "
            f"alone. Without a GPU, use --config_file {_CONFIGS}two_cpu_processes.yaml --num_processes {requested}, or "
            "ACCELERATE_USE_CPU=true in front; with DeepSpeed, DS_ACCELERATOR=cpu and --ddp_backend gloo."
        )
    if kind == "DEEPSPEED":
        _check_deepspeed(arguments)


def wants_fsdp(arguments: TrainingArguments | None) -> bool:
    """Return whether FSDP is requested, by a launch file or by the arguments."""
    return is_set("ACCELERATE_USE_FSDP") or bool(arguments is not None and arguments.fsdp)


def launched_processes() -> int:
    """Return the number of processes requested from the launcher; 1 if it is unknown.

    `accelerate launch` does not pass a larger number on to a single process, so its command line is parsed.
    """
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    parent = launcher()
    if parent is None:
        return 1
    try:
        from accelerate.commands.launch import launch_command_parser, load_config_from_file

        arguments = parent[1][1:] if parent[1][:1] == ["launch"] else parent[1]
        options, _ = launch_command_parser().parse_known_args(arguments)
        if options.num_processes is None and (options.config_file or not options.cpu):
            return int(load_config_from_file(options.config_file).num_processes)
        return int(options.num_processes or 1)
    except (Exception, SystemExit):  # another parent, another version
        return 1


def launcher() -> tuple[int, list[str]] | None:
    """Return process id and arguments of the launcher of accelerate or torch that started this process."""
    import psutil  # accelerate depends on it

    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        command = parent.cmdline()
        for index, argument in enumerate(command[:4]):
            if Path(argument).name in _LAUNCHERS or _MODULES.search(argument):
                return int(parent.pid), command[index + 1 :]
    return None


def is_set(name: str) -> bool:
    """Return whether a variable of the environment is true."""
    return os.environ.get(name, "false").lower() in ("true", "1")


def _check_fsdp(arguments: TrainingArguments | None) -> None:
    options: dict[str, Any] = (None if arguments is None else arguments.fsdp_plugin_args) or {}
    plugin = FullyShardedDataParallelPlugin(**options)
    if plugin.fsdp_version != 2:
        raise PosencError(
            "FSDP1 flattens weights into buffers, which leaves no separate parameters for a patch and for the head. "
            f"Set fsdp_version: 2, as {_CONFIGS}fsdp2.yaml does."
        )
    sharded = "SHARDED" in str(plugin.state_dict_type)
    if sharded and arguments is not None and arguments.save_on_each_node:
        raise PosencError(
            "--save_on_each_node: a checkpoint in shards is read from one disk by all machines. Give an --output_dir "
            "that they share, or set fsdp_state_dict_type: FULL_STATE_DICT in the launch file."
        )


def _check_deepspeed(arguments: TrainingArguments | None) -> None:
    plugin: Any = arguments.deepspeed_plugin if arguments else AcceleratorState().deepspeed_plugin
    zero = plugin.deepspeed_config.get("zero_optimization", {})
    if zero.get("stage") == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        raise PosencError(
            "ZeRO-3 without stage3_gather_16bit_weights_on_model_save would write no model that can be loaded. Set it "
            f"to true, or zero3_save_16bit_model in a launch file, as {_CONFIGS}zero3.yaml does."
        )
    clipping = plugin.deepspeed_config.get("gradient_clipping")
    norm = None if arguments is None else arguments.max_grad_norm
    if clipping != "auto" and (not clipping if norm is None else (clipping or 0.0) != norm):
        raise PosencError(
            f"DeepSpeed clips gradients itself, and its gradient_clipping is {clipping}"
            + ("" if norm is None else f" while max_grad_norm is {norm:g}")
            + ". Set both to the same number."
        )


def check_run(
    model: nn.Module, *, positions: str, arguments: TrainingArguments | None = None
) -> None:
    """Refuse a run that cannot work, or would silently compute something else. Call it in every process.

    Args:
        model: The model to train, patched, with its adapter, before Trainer or accelerate wrap it.
        positions: As for `PositionCollator`.
        arguments: The Trainer's; `None` in a loop without the Trainer, after its `Accelerator(...)`.

    Raises:
        PosencError: With the reason, and an alternative that works.

    Examples:
        >>> from hf_posenc import patch_model
        >>> from hf_posenc.training import check_run
        >>> check_run(patch_model(model, "yarn", scale=4), positions="pose")  # nothing to report
    """
    check_launch(arguments)
    patch = get_patch(model)
    for name, update in _moving_tables(model, patch).items():
        if positions == "contiguous" or update == "row":
            continue  # blocks of one length, or one table per position
        if update == "request" and positions != "packed":
            continue  # one table per row
        raise PosencError(
            f"{name} scales with the longest text of a batch (update={update!r}), and with positions={positions!r} "
            "that length differs between batches and processes: the same weights would be trained with different "
            "frequencies at once. Use positions='contiguous', whose blocks have one length, update='row', or a static "
            "method (yarn, ntk_by_parts, ...)."
        )
    _check_parallelism(model, patch, positions, arguments)
    sharded = wants_fsdp(arguments) or is_set("ACCELERATE_USE_DEEPSPEED")
    if positions == "random_float" and (sharded or (arguments and arguments.deepspeed)):
        raise PosencError(
            "FSDP and DeepSpeed convert a model's floating-point inputs to the dtype they compute in, and "
            "positions='random_float' would be rounded to it. Use positions='random', or train without sharding."
        )
    _check_equal_weights(model)
    if arguments is None:
        return
    liger = arguments.liger_kernel_config or {}
    if arguments.use_liger_kernel and patch is not None and liger.get("rope", True):
        raise PosencError(
            "Liger replaces the rotation by a kernel of its own, for all models of this family in the process. "
            f"{' + '.join(patch.methods)} would be lost. Pass --liger_kernel_config '{{\"rope\": false}}'."
        )
    _check_precision(model, arguments)
    if positions == "packed" and arguments.remove_unused_columns:
        raise PosencError(
            "remove_unused_columns=True removes document_lengths from the data, and packed documents would attend to "
            "each other. Set it to False."
        )
    if arguments.label_smoothing_factor and any(
        isinstance(value, ChunkedLoss) for part in model.modules() for value in vars(part).values()
    ):
        raise PosencError(
            "With label_smoothing_factor the Trainer computes another loss, from the logits of the whole batch: the "
            "loss in chunks would not be used. Leave it, or --loss_chunk, at 0."
        )


def _moving_tables(model: nn.Module, patch: Patch | None) -> dict[str, str]:
    """Return name and update mode of the frequency tables that depend on the length of a batch."""
    moving = {
        method.name: method.update
        for method in (() if patch is None else patch.config.build())
        if isinstance(method, Growing)
    }
    with contextlib.suppress(UnsupportedModelError):  # no rotary embedding
        for table in inspect_rope(model):  # transformers' own, unless a patch replaced them
            if table.rope_type in ("dynamic", "longrope") and table.rope_type not in moving:
                moving[f"the model's own {table.rope_type} RoPE"] = "sequence"
    return moving


def _check_parallelism(
    model: nn.Module, patch: Patch | None, positions: str, arguments: TrainingArguments | None
) -> None:
    config: Any = None if arguments is None else getattr(arguments, "parallelism_config", None)
    if config is None and is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        from accelerate.parallelism_config import ParallelismConfig

        config = ParallelismConfig()  # reads the environment of `accelerate launch`
    moving = [*_moving_tables(model, patch)]
    if patch is not None and patch.layers:
        dropped = (
            f"what {' + '.join(patch.methods)} changes in attention would be dropped in silence"
        )
    elif positions == "packed":
        dropped = "packed documents would attend to each other"
    elif moving:
        dropped = f"{moving[0]}, which scales with the positions in a part, would differ between processes"
    else:
        return
    for name, kind in (("Context", "cp_size"), ("Sequence", "sp_size")):
        size = getattr(config, kind, None) or 1
        if size > 1:
            raise PosencError(
                f"{name} parallelism (size {size}) splits a text over the processes and computes attention itself, "
                f"without any mask: {dropped}. Use a static frequency method (yarn, ...) and "
                "positions='contiguous', or train without it (FSDP2, ZeRO-3, tensor parallelism, "
                "--gradient_checkpointing)."
            )


def _check_precision(model: nn.Module, arguments: TrainingArguments) -> None:
    """Refuse half-precision weights that most steps would not change.

    Adam's step is about the learning rate for every weight, and the neighbours of a weight of 0.02 in bfloat16 are 1e-4
    away. DeepSpeed keeps float32 copies itself, and accelerate makes them for FSDP2 with mixed precision.
    """
    adam = any(name in str(arguments.optim).lower() for name in ("adam", "lion"))
    mixed = arguments.bf16 or arguments.fp16
    copies = arguments.deepspeed_plugin is not None or (wants_fsdp(arguments) and mixed)
    if not adam or copies:
        return
    moved = seen = 0.0
    for parameter in model.parameters():
        half = parameter.dtype in (torch.bfloat16, torch.float16)
        if half and parameter.requires_grad and parameter.numel() and not parameter.is_meta:
            sample = parameter.detach().flatten()[:_SAMPLE]
            share = float((sample - arguments.learning_rate != sample).double().mean())
            moved, seen = moved + share * parameter.numel(), seen + parameter.numel()
            dtype = str(parameter.dtype).removeprefix("torch.")
    if moved < seen / 2:
        raise PosencError(
            f"The weights are {dtype}, and for {1 - moved / seen:.0%} of them a step of the learning rate, "
            f"{arguments.learning_rate:g}, is lost in rounding. Load them in float32 (--dtype float32), with --bf16."
        )


def _check_equal_weights(model: nn.Module) -> None:
    """Check that all processes start from the same model: FSDP2 takes a shard from each without comparing."""
    values = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    with contextlib.suppress(UnsupportedModelError):
        values |= {table.modules[0]: table.inv_freq for table in inspect_rope(model)}  # type: ignore[misc]
    parts = {n: value.detach().flatten()[:64] for n, value in values.items() if not value.is_meta}
    begin = {name: part.float().tolist() for name, part in parts.items()}
    for process, other in enumerate(gather(begin)):
        if other != begin:
            name = next((n for n in begin if other.get(n) != begin[n]), "set of parameters")
            raise PosencError(
                f"Process {process} starts from another {name} than this one. Set the same seed in all processes "
                "before the model is patched: transformers.set_seed(0)."
            )
