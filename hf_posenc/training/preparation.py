"""The model of a run before its training: its patch, the lengths that follow from it, and ZeRO-3 partitioning."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from hf_posenc.errors import PosencError, UntrainedWarning
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate, original_length
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.patching import get_patch, patch_model, unpatch_model
from hf_posenc.saving import apply_config
from hf_posenc.training.batches.collator import DRAWS
from hf_posenc.training.checks import wants_fsdp

_KEEP = "Leave --patch out to train it further as it is"


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run in tokens: the model's original context, the target, and that of an example."""

    original: int
    target: int
    block: int
    drawn: bool = False  # positions are drawn up to the target


def apply_patch(model: nn.Module, text: str | None, target_length: int | None = None) -> None:
    """Patch a model in place as `--patch` specifies; `None` is for a model that was loaded with its patch.

    Methods without a given scale reach the target length. A patched model is not patched again without `replace=true`.
    """
    patch = get_patch(model)
    saved = "" if patch is None else f"this model was saved with {str(patch).splitlines()[0]}"
    if text is None:
        if patch is None:
            raise PosencError(
                "The model carries no patch: give --patch, e.g. --patch yarn:scale=4, or --patch none to train it as "
                "it is."
            )
        return
    if text.strip().lower() == UNPATCHED:
        if patch is not None:
            raise PosencError(f"--patch none: {saved}. {_KEEP}.")
        return
    candidate = Candidate.parse(text)
    if patch is not None:
        if not candidate.beside.get("replace"):
            raise PosencError(f"--patch {text}: {saved}. {_KEEP}, or replace it by replace=true.")
        unpatch_model(model)
        beside = {k: v for k, v in candidate.beside.items() if k != "replace"}
        candidate = dataclasses.replace(candidate, beside=beside)
    scale = 1.0
    if candidate.auto_scale:
        original = candidate.beside.get("original_max_position_embeddings")
        original = original or original_length(model, ())
        if target_length is None or original is None:
            raise PosencError(f"--patch {text}: give a scale, as in scale=8, or --target_length.")
        scale = max(1.0, target_length / original)
    method, options = candidate.arguments(scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # they are about to be trained
        patch_model(model, method, **options)


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


def resolve_lengths(
    model: nn.Module,
    positions: str,
    target_length: int | None = None,
    block_length: int | None = None,
) -> Lengths:
    """Return the lengths of a run; by default the target is the length that the model's patch reaches.

    A block has that length by default, or the original length if positions are drawn.
    """
    patch = get_patch(model)
    original = original_length(model, ())
    if target_length is not None and target_length < 2:
        raise PosencError(f"--target_length {target_length}: a context has at least 2 tokens.")
    target = target_length or (None if patch is None else patch.extended_length)
    if target is None:
        why = "there is no patch" if patch is None else f"{patch.method} follows the text"
        raise PosencError(
            f"There is no length to train for, since {why}: give --target_length, in tokens."
        )
    original, drawn = original or target, positions in DRAWS
    default = min(original, target) if drawn else target
    block = default if block_length is None else block_length
    if not 1 < block <= target:
        raise PosencError(
            f"--block_length {block}: an example has from 2 to {target:,} tokens, the target length."
        )
    return Lengths(original, target, block, drawn)


def check_enough(blocks: int, arguments: TrainingArguments) -> None:
    """Check that the blocks fill one batch on every process, if incomplete batches are dropped."""
    batch = arguments.train_batch_size * arguments.world_size
    if arguments.dataloader_drop_last and blocks < batch:
        raise PosencError(
            f"The text gives {blocks:,} blocks, and a batch over all processes has {batch:,}. Give more text, a "
            "smaller --block_length or --per_device_train_batch_size, or --dataloader_drop_last false."
        )


def needs_one_row(model: Any, positions: str) -> bool:
    """Return whether packed batches need one row: transformers' flash attention separates documents in no other."""
    return positions == "packed" and "flash" in (model.config._attn_implementation or "")


# DeepSpeed ZeRO-3. transformers partitions the weights while it loads them (`zero3_init_flag: false` does not change
# that), and no process can run the model until the Trainer has wrapped it. But a patch, the loss in chunks and the
# dependencies of a batch are all verified on the live model first. So the model is loaded whole into CPU memory and
# partitioned afterwards, one parameter at a time: no device ever holds all of it.


@contextlib.contextmanager
def whole_weights(arguments: TrainingArguments) -> Iterator[None]:
    """Load models with all their weights on every process, under ZeRO-3 too. Create the arguments first."""
    if not _is_zero3(arguments):
        yield
        return
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        config = getattr(arguments, "hf_deepspeed_config", None)
        if config is None:  # by `accelerate launch`, not by --deepspeed
            plugin: Any = arguments.deepspeed_plugin
            plugin.set_deepspeed_weakref()
        else:
            deepspeed.set_hf_deepspeed_config(config)


def partition_weights(model: nn.Module, arguments: TrainingArguments) -> None:
    """Partition a whole model over the processes for ZeRO-3, in place; without it, do nothing.

    All processes get the first one's values. The model was loaded in `whole_weights`, and has its patch and adapter.
    Call it last, just before `Trainer(model, ...)`.
    """
    if not _is_zero3(arguments):
        return
    import deepspeed
    from transformers.integrations.deepspeed import deepspeed_config

    config: dict[str, Any] = deepspeed_config() or {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(name, {}).get("enabled") is True:  # DeepSpeed keeps float32 copies of its own
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)


def will_be_sharded(arguments: TrainingArguments) -> bool:
    """Return whether the Trainer will shard the weights by FSDP or DeepSpeed, so that no device may hold all."""
    return wants_fsdp(arguments) or arguments.deepspeed_plugin is not None


def _is_zero3(arguments: TrainingArguments) -> bool:
    plugin: Any = arguments.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3
