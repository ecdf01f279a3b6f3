"""The model and the data of scripts/finetune.py before the training, and the model's weights if it is sharded."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.modeling import get_non_persistent_buffers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import deepspeed_config
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from hf_posenc.errors import PosencError
from hf_posenc.gguf_file import find_gguf
from hf_posenc.model.parameters import PARAMETERS, trained_parameters
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.patching import get_patch, unpatch_model
from hf_posenc.saving import apply_config
from hf_posenc.training.batches.blocks import Blocks
from hf_posenc.training.checks import is_set, wants_fsdp

_HALF = {"BF16": "bfloat16", "F16": "float16"}


@contextlib.contextmanager
def without_patch(model: nn.Module) -> Iterator[None]:
    """Remove a model's patch within the block, and restore it with its trained parameters."""
    patch = get_patch(model)
    if patch is None:
        yield
        return
    trained = {n: p.detach().clone() for n, p in trained_parameters(unwrap(model)).items()}
    unpatch_model(model)
    try:
        yield
    finally:
        apply_config(model, patch.config, trained=True)
        for name, tensor in trained_parameters(unwrap(model)).items():
            tensor.data.copy_(trained[name])


def check_enough(blocks: Blocks, arguments: TrainingArguments) -> None:
    """Check that the blocks fill one batch on every process, if incomplete batches are dropped.

    Of a stream, the number of steps must be given, and every process selects its own rows of the stream.
    """
    if blocks.streamed:
        if arguments.max_steps < 1:
            raise PosencError("--stream_blocks has no epochs of known length: give --max_steps.")
        launch: Any = arguments.accelerator_config
        launch.dispatch_batches = False  # which cannot broadcast a flag such as use_cache
        return
    batch = arguments.train_batch_size * arguments.world_size
    if arguments.dataloader_drop_last and len(blocks) < batch:
        raise PosencError(
            f"The text gives {len(blocks):,} blocks, and a batch over all processes has {batch:,}. Give more text, a "
            "smaller --block_length or --per_device_train_batch_size, or --dataloader_drop_last false."
        )


def needs_one_row(model: Any, positions: str) -> bool:
    """Return whether packed batches need one row: transformers' flash attention separates documents in no other."""
    return positions == "packed" and "flash" in (model.config._attn_implementation or "")


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

    It is that of the checkpoint where float32 copies are made afterwards: in mixed precision, under sharding.
    """
    if dtype != "float32" or _copied_to(arguments) is None:
        return dtype
    return _stored_dtype(name) or dtype


def _stored_dtype(name: str) -> str | None:
    """Return the dtype of a checkpoint's weights, if all have the same; those of a patch are always float32."""
    if find_gguf(name) is not None:  # dequantized
        return None
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    files, dtypes = {SAFE_WEIGHTS_NAME}, set()
    try:
        if (index := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **options)) is not None:
            files = {*json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()}
        for file in sorted(files):
            if (path := cached_file(name, file, **options)) is None:
                return None  # an adapter, or another format
            with safe_open(path, "pt") as weights:
                keys = [key for key in weights.keys() if f".{PARAMETERS}." not in f".{key}"]  # noqa: SIM118
                dtypes |= {weights.get_slice(key).get_dtype() for key in keys}
    except (OSError, ValueError, KeyError, SafetensorError):
        return None  # loading raises the same, in words
    return _HALF.get(dtypes.pop()) if len(dtypes) == 1 else None


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
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if config.get(name, {}).get("enabled") is True:
                return dtype
        return None
    mixed = arguments.bf16 or arguments.fp16
    return torch.float32 if mixed and _loads_once(arguments) else None
