"""The model before the training: its patch, the lengths of the run, its weights if sharded."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
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

from hf_posenc.errors import PosencError, UntrainedWarning
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate, original_length
from hf_posenc.gguf_file import find_gguf
from hf_posenc.model.context import length_of
from hf_posenc.model.parameters import PARAMETERS
from hf_posenc.patch.patching import get_patch, patch_model, unpatch_model
from hf_posenc.training.batches.blocks import Blocks
from hf_posenc.training.checks import is_set, wants_fsdp
from hf_posenc.training.names import DRAWN
from hf_posenc.training.parameters import choose_parameters
from hf_posenc.training.run.options import PatchArguments

_HALF = {"BF16": "bfloat16", "F16": "float16"}
_KEEP = "Leave --patch out to train it further as it is"


def apply_patch(model: nn.Module, text: str | None, target_length: int | None = None) -> None:
    """Patch a model in place as `--patch` specifies; `None` is for a model that was loaded with its patch.

    Methods without a given scale reach the target length. A patched model is not patched again without `replace=true`.
    """
    patch = get_patch(model)
    saved = "" if patch is None else f"this model was saved with {str(patch).splitlines()[0]}"
    if text is None:
        if patch is None:
            raise PosencError(
                "The model carries no patch: give --patch, e.g. yarn:scale=4, or --patch none to train it as it is."
            )
        return
    if text.strip().lower() == UNPATCHED:
        if patch is not None:
            raise PosencError(f"--patch none: {saved}. {_KEEP}.")
        return
    candidate = Candidate.parse(text, unpatched=False)
    beside = dict(candidate.beside)
    replaces = beside.pop("replace", False)
    if patch is not None and not replaces:
        raise PosencError(f"--patch {text}: {saved}. {_KEEP}, or replace it by replace=true.")
    if patch is not None:
        unpatch_model(model)
        candidate = dataclasses.replace(candidate, beside=beside)
    scale = 1.0
    if candidate.auto_scale:
        original = beside.get("original_max_position_embeddings")
        original = original or length_of(model, replaced=bool(replaces))
        if target_length is None or original is None:
            raise PosencError(f"--patch {text}: give a scale, as in scale=8, or --target_length.")
        scale = max(1.0, target_length / original)
    method, options = candidate.arguments(scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # they are about to be trained
        patch_model(model, method, **options)


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run in tokens: the model's original context, the target, and that of an example."""

    original: int
    target: int
    block: int
    drawn: bool = False  # positions are drawn up to the target
    curriculum: tuple[int, ...] | None = None  # up to these lengths, one after another


def resolve_lengths(
    model: nn.Module,
    positions: str,
    target_length: int | None = None,
    block_length: int | None = None,
    curriculum: str | None = None,
) -> Lengths:
    """Return the lengths of a run; by default the target is the length that the model's patch reaches.

    A block has that length by default, or the original length if positions are drawn. A curriculum such as "1,2,4,8"
    has rising factors on the original length.
    """
    patch = get_patch(model)
    original = original_length(model, ())
    target = target_length or (None if patch is None else patch.extended_length)
    if target is None:
        why = "there is no patch" if patch is None else f"{patch.method} follows the text"
        raise PosencError(f"No length to train for, since {why}: give --target_length, in tokens.")
    original, drawn = original or target, positions in DRAWN
    block = block_length or (min(original, target) if drawn else target)
    if not 1 < block <= target:
        raise PosencError(
            f"--block_length {block}: an example has from 2 to {target:,} tokens, the target length."
        )
    lengths = Lengths(original, target, block, drawn)
    if curriculum is None:
        return lengths
    return dataclasses.replace(lengths, curriculum=_stages(curriculum, lengths))


def _stages(curriculum: str, lengths: Lengths) -> tuple[int, ...]:
    """Return the lengths of a curriculum; `PositionCollator` checks that they rise up to the target."""
    given = f"--curriculum {curriculum}"
    original, target, block = lengths.original, lengths.target, lengths.block
    try:
        tokens = [float(factor) * original for factor in curriculum.split(",")]
        stages = tuple(map(int, tokens))
    except (ValueError, OverflowError):  # no numbers, or none that end
        tokens, stages = [], (0,)
    if list(stages) != tokens:
        raise PosencError(
            f"{given}: give rising factors on the original length, {original:,} tokens, as in 1,2,4,8."
        )
    if stages[0] < block:
        raise PosencError(
            f"{given}: {stages[0]:,} positions are too few for a block of {block:,} tokens. Begin with a larger "
            f"factor, or give --block_length {max(stages[0], 2)}."
        )
    if stages[-1] < target:
        warnings.warn(
            f"{given} ends at {stages[-1]:,} tokens: no step reads positions up to the target of {target:,}. End with "
            f"a factor of {target / original:g}, or give --target_length {stages[-1]}.",
            stacklevel=3,
        )
    return stages


def choose(choice: PatchArguments, model: nn.Module) -> nn.Module:
    """Choose the trained parameters."""
    options = {"lora_rank": choice.lora_rank, "lora_alpha": choice.lora_alpha}
    return choose_parameters(model, choice.train, **options, lora_dropout=choice.lora_dropout)


def check_short(lengths: Lengths, distill: str | None) -> None:
    """Check that blocks are within the original length, which the teacher of `--distill short` was trained on."""
    if distill == "short" and lengths.block > lengths.original:
        raise PosencError(
            f"--distill short: blocks of {lengths.block:,} tokens are longer than the {lengths.original:,} that the "
            f"unpatched model was trained on. Give --block_length {lengths.original}, or --positions pose."
        )


def check_enough(blocks: Blocks, arguments: TrainingArguments) -> None:
    """Check that the blocks fill one batch on every process, if incomplete batches are dropped."""
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
