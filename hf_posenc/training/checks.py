"""What cannot work is refused before the first step, above all what would be dropped or do nothing in silence."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.methods import LengthDependent
from hf_posenc.patch.patching import get_patch, inspect_rope
from hf_posenc.patch.report import Patch
from hf_posenc.training.chunked_loss.loss import ChunkedLoss
from hf_posenc.training.ranks import from_all

# Whether a launcher did what it was asked: accelerate trains on, silently, with fewer processes or without shards.


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


_SAMPLE = 4096
"""Weights of a tensor that are looked at: enough to tell a share by a percent."""


def check_run(
    model: nn.Module, *, positions: str, arguments: TrainingArguments | None = None
) -> None:
    """Refuses a run that cannot work, or would not be what it looks like. Call it in every process.

    Args:
        model: The model to train, patched, with its adapter, before Trainer or accelerate wrap it.
        positions: As `PositionCollator` takes it.
        arguments: The Trainer's; `None` in a loop of one's own, behind its `Accelerator(...)`.

    Raises:
        PosencError: With the reason, and what works instead.
    """
    check_launch(arguments)
    patch = get_patch(model)
    _check_lengths(model, patch, positions)
    _check_parallel(model, patch, positions, _parallelism(arguments))
    _check_same_everywhere(model)
    if arguments is None:
        return
    _check_liger(patch, arguments)
    _check_precision(model, arguments)
    if positions == "packed" and arguments.remove_unused_columns:
        raise PosencError(
            "remove_unused_columns=True takes document_lengths out of the data, and packed documents would see each "
            "other. Set it to False."
        )
    if arguments.label_smoothing_factor and any(
        isinstance(value, ChunkedLoss) for part in model.modules() for value in vars(part).values()
    ):
        raise PosencError(
            f"label_smoothing_factor={arguments.label_smoothing_factor:g} makes the Trainer compute another loss, "
            "from the logits of the whole batch: the loss in chunks would not be used. Leave it at 0, or "
            "--loss_chunk 0."
        )


def following_text(model: nn.Module, patch: Patch | None) -> dict[str, str]:
    """The frequency tables that move with the length of a batch, by what each is: `{name: update mode}`."""
    found = {}
    for method in () if patch is None else patch.config.build():
        if isinstance(method, LengthDependent):
            found[method.name] = method.update
    try:
        tables = inspect_rope(model)
    except UnsupportedModelError:  # no rotary embedding: nothing of it moves
        tables = ()
    for table in tables:  # transformers' own, where no patch has taken their place
        if table.rope_type in ("dynamic", "longrope") and table.rope_type not in found:
            found[f"the model's own {table.rope_type} RoPE"] = "sequence"
    return found


def _check_lengths(model: nn.Module, patch: Patch | None, positions: str) -> None:
    for name, update in following_text(model, patch).items():
        if positions == "contiguous" or update == "row":
            continue  # blocks of one length, or a table for each position by itself
        if update == "request" and positions != "packed":
            continue  # each row by itself
        raise PosencError(
            f"{name} scales as far as the longest text of a batch reaches (update={update!r}), and with positions="
            f"{positions!r} that is another length in every batch and on every process: the same weights would be "
            "trained with different frequencies at once. Use positions='contiguous', whose blocks have one length, "
            "update='row', or a static method (yarn, ntk_by_parts, ...)."
        )


def _parallelism(arguments: TrainingArguments | None) -> Any:
    """What accelerate is to split beside the data, if anything: its ParallelismConfig."""
    given = None if arguments is None else getattr(arguments, "parallelism_config", None)
    if given is None and is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        from accelerate.parallelism_config import ParallelismConfig

        given = ParallelismConfig()  # reads what `accelerate launch` was told
    return given


def _check_parallel(model: nn.Module, patch: Patch | None, positions: str, parallel: Any) -> None:
    sizes = {
        "Context parallelism": getattr(parallel, "cp_size", None) or 1,
        "Sequence parallelism": getattr(parallel, "sp_size", None) or 1,
        "Tensor parallelism": max(
            getattr(parallel, "tp_size", None) or 1, getattr(model, "tp_size", None) or 1
        ),
    }
    for name, size in sizes.items():
        if size < 2:
            continue
        if patch is not None and patch.layers:
            lost = (
                "deals the heads out to the processes, and a bias for each head would be that of another head"
                if name.startswith("Tensor")
                else "splits a text over the processes and computes attention itself, causal and without any mask: "
                "biases, bands and whatever else a method does there would be dropped in silence"
            )
            raise PosencError(
                f"{name} (size {size}) {lost}; {' + '.join(patch.methods)} computes attention. Use a frequency method "
                "(yarn, ntk_by_parts, ...), or train without it (FSDP2, ZeRO-3, --gradient_checkpointing)."
            )
        if name.startswith("Tensor"):
            continue
        if positions == "packed":
            raise PosencError(
                f"{name} (size {size}) drops every mask, and packed documents would see each other. Use positions="
                "'contiguous'."
            )
        for moving in following_text(model, patch):
            raise PosencError(
                f"{name} (size {size}) shows each process a part of the text, and {moving} scales as far as the "
                "positions that it sees: every process would take other frequencies. Use a static method (yarn, "
                "ntk_by_parts, ...)."
            )


def _check_liger(patch: Patch | None, arguments: TrainingArguments) -> None:
    options = arguments.liger_kernel_config or {}
    if arguments.use_liger_kernel and patch is not None and options.get("rope", True):
        raise PosencError(
            "Liger puts a kernel of its own in the place of the rotation, for all models of this family in the "
            f"process, and {' + '.join(patch.methods)} would be computed by that, or not at all. Pass "
            "--liger_kernel_config '{\"rope\": false}'."
        )


def _check_precision(model: nn.Module, arguments: TrainingArguments) -> None:
    """Refuses half-precision weights that steps of the learning rate would mostly leave as they are.

    Adam's step is about the learning rate for every weight, and a weight of 0.02 in bfloat16 has its neighbours 1e-4
    away. DeepSpeed keeps float32 copies itself, and accelerate makes them for FSDP2 with mixed precision.
    """
    adam = any(name in str(arguments.optim).lower() for name in ("adam", "lion"))
    mixed = arguments.bf16 or arguments.fp16
    copies = arguments.deepspeed_plugin is not None or (wants_fsdp(arguments) and mixed)
    half = [
        p
        for p in model.parameters()
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) and p.numel()
    ]
    if not adam or copies or not half:
        return
    moved = seen = 0.0
    for parameter in half:
        sample = parameter.detach().flatten()[:_SAMPLE]
        if sample.is_meta:
            continue
        share = float((sample - arguments.learning_rate != sample).double().mean())
        moved, seen = moved + share * parameter.numel(), seen + parameter.numel()
    if seen and moved < seen / 2:
        dtype = str(half[0].dtype).removeprefix("torch.")
        raise PosencError(
            f"The weights are {dtype}, and for {1 - moved / seen:.0%} of them a step of the learning rate, "
            f"{arguments.learning_rate:g}, is lost in rounding. Load them in float32 (--dtype float32), with --bf16 to "
            "compute in bfloat16."
        )


def _check_same_everywhere(model: nn.Module) -> None:
    """Makes sure that all processes start from one model: FSDP2 takes a share from each without comparing.

    What a patch or an adapter draws depends on the seed, and the frequencies on what the process was told.
    """
    marks: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() and not parameter.is_meta:
            first = parameter.detach().flatten()[:64].to("cpu", torch.float32)
            marks[name] = hashlib.sha256(first.numpy().tobytes()).hexdigest()
    try:
        for table in inspect_rope(model):
            if not table.inv_freq.is_meta:
                marks[table.modules[0]] = hashlib.sha256(
                    table.inv_freq.cpu().numpy().tobytes()
                ).hexdigest()
    except UnsupportedModelError:
        pass
    for process, other in enumerate(from_all(marks)):
        different = next((name for name in marks if other.get(name) != marks[name]), None)
        if different is not None or len(other) != len(marks):
            raise PosencError(
                f"Process {process} starts from another {different or 'set of parameters'} than this one. Set the same "
                "seed in all processes before the model is patched: transformers.set_seed(0)."
            )
