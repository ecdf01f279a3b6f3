"""The processes of a training: how they were launched, their group, sharded weights, forwards without side effects."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils.modeling import get_non_persistent_buffers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import deepspeed_config
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.store import Shard
from hf_posenc.gguf_file import find_gguf
from hf_posenc.model.parameters import PARAMETERS

T = TypeVar("T")
_CONFIGS = "scripts/configs/"
_LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun")
_MODULES = re.compile(r"(accelerate[./]commands[./]launch|torch[./]distributed[./]run)(\.py)?$")
_HALF = {"BF16": "bfloat16", "F16": "float16"}


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
            "(DataParallel), where some patches do not run. Start a process for each: accelerate launch --config_file "
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
            "hold the whole model. Leave --use-cpu out; a CPU needs DS_ACCELERATOR=cpu and --ddp-backend gloo."
        )
    if (requested := launched_processes()) > state.num_processes:
        raise PosencError(
            f"{requested} processes were requested, and accelerate connected {state.num_processes}: each would train "
            f"alone. Without a GPU, use --config_file {_CONFIGS}two_cpu_processes.yaml --num_processes {requested}, or "
            "ACCELERATE_USE_CPU=true in front; with DeepSpeed, DS_ACCELERATOR=cpu and --ddp-backend gloo."
        )
    if kind == "DEEPSPEED":
        _check_deepspeed(arguments)


def wants_fsdp(arguments: TrainingArguments | None) -> bool:
    """Return whether FSDP is requested, by a launch file or by the arguments."""
    return is_set("ACCELERATE_USE_FSDP") or bool(arguments is not None and arguments.fsdp)


def is_set(name: str) -> bool:
    """Return whether a variable of the environment is true; an empty one is not, which accelerate refuses to parse."""
    return os.environ.get(name, "").lower() in ("true", "1")


def launched_processes() -> int:
    """Return the number of processes requested from the launcher; 1 if it is unknown.

    `accelerate launch` does not pass a larger number on to a single process, so its command line is parsed.
    """
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if (parent := launcher()) is None:
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
            "--save-on-each-node: a checkpoint in shards is read from one disk by all machines. Give an --output-dir "
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
        other = "" if norm is None else f" while max_grad_norm is {norm:g}"
        own = f"DeepSpeed clips gradients itself, and its gradient_clipping is {clipping}{other}"
        raise PosencError(f"{own}. Set both to the same number.")


def group_shard() -> Shard:
    """Return this rank and the number of ranks in the process group, which launched processes must have."""
    if dist.is_initialized():
        return Shard(dist.get_rank(), dist.get_world_size(), launched=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PosencError(
            "The launched processes have no process group yet: create TrainingArguments, or the Accelerator, first."
        )
    return Shard()


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in order, on every rank. Call it on all ranks."""
    if (count := group_shard().count) == 1:
        return [value]
    values: list[Any] = [None] * count
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until every rank has reached this point."""
    PartialState().wait_for_everyone()


def leave_group() -> None:
    """Destroy the process group once all ranks are done: a rank that exits within it may abort, or end the others."""
    barrier()
    PartialState().destroy_process_group()


def random_state() -> Callable[[], None]:
    """Return a function that restores the present state of Python's, NumPy's and PyTorch's random generators."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return restore


@contextlib.contextmanager
def without_side_effects(model: nn.Module) -> Iterator[None]:
    """Restore what forwards change: random generators, and the attributes of modules without weights.

    transformers' dynamic RoPE keeps the table of the longest text so far. FSDP2 keeps the outermost parameters gathered
    after a forward without a backward.
    """

    def public(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if not name.startswith("_")}

    def reshard() -> None:
        for module in model.modules():
            if callable(free := getattr(module, "reshard", None)):
                free()

    restore, modules = random_state(), [each for each in model.modules() if not each._parameters]
    before = [(module, public(module), dict(module._buffers)) for module in modules]
    reshard()
    try:
        yield
    finally:
        reshard()
        for module, attributes, buffers in before:
            for name in public(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        restore()


# Sharded training. A patch, the loss in chunks and the dependencies of a batch are all verified on the live model, on
# every process, before the Trainer shards it. A weight in the dtype of its file is a page of that file, which all
# processes of a machine share and which the system can drop. So every process loads the model whole in the dtype of the
# checkpoint, at no cost in memory of its own, and keeps nothing of it once it is verified: the first process hands out
# the shards. transformers' own ways (ZeRO-3 partitions the weights while it loads them, FSDP's
# `cpu_ram_efficient_loading` loads them on one process) leave nothing to verify.


@contextlib.contextmanager
def whole_weights(arguments: TrainingArguments) -> Iterator[None]:
    """Load models with all their weights on every process, under sharding too. Create the arguments first."""
    with contextlib.ExitStack() as stack:
        if _loads_once(arguments):
            switch = "FSDP_CPU_RAM_EFFICIENT_LOADING"
            stack.callback(os.environ.update, {switch: os.environ[switch]})
            os.environ[switch] = "false"
        elif _is_zero3(arguments):
            from transformers.integrations import deepspeed

            deepspeed.unset_hf_deepspeed_config()
            plugin: Any = arguments.deepspeed_plugin
            if config := getattr(arguments, "hf_deepspeed_config", None):
                stack.callback(deepspeed.set_hf_deepspeed_config, config)
            else:  # by `accelerate launch`, not by --deepspeed
                stack.callback(plugin.set_deepspeed_weakref)
        yield


def loading_dtype(name: str, dtype: str, arguments: TrainingArguments) -> str:
    """Return the dtype to load a model in whose trained weights shall have `dtype`.

    It is that of the checkpoint, if all weights have the same, where float32 copies are made afterwards: in mixed
    precision, under sharding. The weights of a patch are always float32. Those of a GGUF file are dequantized.
    """
    if dtype != "float32" or _copied_to(arguments) is None or find_gguf(name) is not None:
        return dtype
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    files, dtypes = {SAFE_WEIGHTS_NAME}, set()
    try:
        if (index := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **options)) is not None:
            files = {*json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()}
        for file in sorted(files):
            if (path := cached_file(name, file, **options)) is None:
                return dtype  # an adapter, or another format
            with safe_open(path, "pt") as weights:
                keys = [key for key in weights.keys() if f".{PARAMETERS}." not in f".{key}"]  # noqa: SIM118
                dtypes |= {weights.get_slice(key).get_dtype() for key in keys}
    except (OSError, ValueError, KeyError, SafetensorError):
        return dtype  # loading raises the same, in words
    return _HALF.get(dtypes.pop(), dtype) if len(dtypes) == 1 else dtype


def partition_weights(model: nn.Module, arguments: TrainingArguments) -> None:
    """Free a verified model's weights on all processes but the first, for FSDP2, and partition them for ZeRO-3.

    In place; without sharding, do nothing. All processes get the first one's values: under FSDP2 from the Trainer, with
    `fsdp_cpu_ram_efficient_loading`. The model was loaded in `whole_weights`, and has its patch and adapter. Call it
    last, just before `Trainer(model, ...)`.
    """
    zero3, copied = _is_zero3(arguments), _copied_to(arguments)
    if not zero3 and not _loads_once(arguments):
        return
    own = get_non_persistent_buffers(model, recurse=True, fqns=True)
    if not zero3 and (stored := [name for name, _ in model.named_buffers() if name not in own]):
        raise PosencError(
            f"accelerate cannot distribute {stored[0]}, a buffer that {type(model).__name__} stores in checkpoints. "
            "Set fsdp_cpu_ram_efficient_loading: false in the launch file."
        )
    for parameter in model.parameters():
        weights = parameter.data
        cast = weights.is_floating_point() and (zero3 or parameter.requires_grad)
        dtype = copied if copied is not None and cast else weights.dtype
        # Memory that nothing is written to takes no space.
        first = arguments.process_index == 0
        parameter.data = weights.to(dtype) if first else torch.empty_like(weights, dtype=dtype)
    if zero3:
        import deepspeed

        deepspeed.zero.Init(module=model, config_dict_or_path=deepspeed_config() or {})


def will_be_sharded(arguments: TrainingArguments) -> bool:
    """Return whether the Trainer will shard the weights by FSDP or DeepSpeed, so that no device may hold all."""
    return wants_fsdp(arguments) or arguments.deepspeed_plugin is not None


def _is_zero3(arguments: TrainingArguments) -> bool:
    plugin: Any = arguments.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def _loads_once(arguments: TrainingArguments) -> bool:
    """Return whether FSDP takes the weights from the first process; accelerate sets the variable from any option."""
    return wants_fsdp(arguments) and is_set("FSDP_CPU_RAM_EFFICIENT_LOADING")


def _copied_to(arguments: TrainingArguments) -> torch.dtype | None:
    """Return the dtype that sharding in mixed precision converts weights to; DeepSpeed's float32 copies are behind."""
    if _is_zero3(arguments):
        config: dict[str, Any] = deepspeed_config() or {}
        halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
        enabled = (halves[name] for name in halves if config.get(name, {}).get("enabled") is True)
        return next(enabled, None)
    return torch.float32 if (arguments.bf16 or arguments.fp16) and _loads_once(arguments) else None
