"""From what was asked for to a patched model, and the lengths that follow from its patch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from hf_posenc.errors import PosencError, UntrainedWarning
from hf_posenc.evaluation.measuring.candidates import Request, original_length
from hf_posenc.model.attention import trained_parameters
from hf_posenc.patch.patching import get_patch, patch_model, unpatch_model
from hf_posenc.patch.request import unwrap
from hf_posenc.saving import apply_config
from hf_posenc.training.batches.positions import DRAWS
from hf_posenc.training.checks import wants_fsdp

UNPATCHED = "none"


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run, all in tokens.

    Attributes:
        original: The context that the model was trained on.
        target: The context that it is trained for.
        block: Tokens in an example.
        drawn: Whether its positions are drawn, up to the target.
    """

    original: int
    target: int
    block: int
    drawn: bool = False


def apply_patch(model: nn.Module, text: str | None, target_length: int | None = None) -> None:
    """Patches a model as `--patch` says.

    Args:
        model: The model, in place.
        text: `method:option=value,...`, several joined by `+`; `"none"`, to train without one; or `None`, for a model
            that was loaded with its patch.
        target_length: The context to reach, in tokens, for methods that were given no scale.

    Raises:
        PosencError: No patch at all, a second one on a model that has one, or one that the model cannot take.
    """
    patch = get_patch(model)
    if text is None:
        if patch is None:
            raise PosencError(
                "The model carries no patch: give --patch, e.g. --patch yarn:scale=4, or --patch none to train it as "
                "it is."
            )
        return
    if text.strip().lower() == UNPATCHED:
        if patch is not None:
            raise PosencError(
                f"--patch none: this model was saved with {_headline(patch)}. {_KEEP}."
            )
        return
    request = Request.parse(text)
    if patch is not None:
        if not request.beside.get("replace"):
            raise PosencError(
                f"--patch {text}: this model was saved with {_headline(patch)}. {_KEEP}, or add replace=true to put "
                "the new one in its place."
            )
        unpatch_model(model)
        request = Request(
            request.parts, {k: v for k, v in request.beside.items() if k != "replace"}
        )
    scale = 1.0
    if request.auto:
        original = request.beside.get("original_max_position_embeddings")
        original = original or original_length(model, ())
        if target_length is None or original is None:
            raise PosencError(f"--patch {text}: give a scale, as in scale=8, or --target_length.")
        scale = max(1.0, target_length / original)
    method, options = request.arguments(scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # that is what the training is for
        patch_model(model, method, **options)


def check_enough(blocks: int, arguments: TrainingArguments) -> None:
    """Whether there are blocks for a batch on every process, where a batch that is not full is left out.

    Raises:
        PosencError: There are not.
    """
    batch = arguments.train_batch_size * arguments.world_size
    if arguments.dataloader_drop_last and blocks < batch:
        raise PosencError(
            f"The text gives {blocks:,} blocks, and a batch over all processes has {batch:,}. Give more text, a "
            "smaller --block_length or --per_device_train_batch_size, or --dataloader_drop_last false."
        )


def needs_one_row(model: Any, positions: str) -> bool:
    """Whether packed batches must be of one row: transformers' flash attention tells documents apart in no other."""
    return positions == "packed" and "flash" in (model.config._attn_implementation or "")


@contextlib.contextmanager
def without_patch(model: nn.Module) -> Iterator[None]:
    """Takes a model's patch out for the length of a block, and puts it back with what it has trained."""
    patch = get_patch(model)
    if patch is None:
        yield
        return
    trained = {
        name: tensor.detach().clone() for name, tensor in trained_parameters(unwrap(model)).items()
    }
    unpatch_model(model)
    try:
        yield
    finally:
        apply_config(model, patch.config, trained=True)
        for name, tensor in trained_parameters(unwrap(model)).items():
            tensor.data.copy_(trained[name])


_KEEP = "Leave --patch out to train it further as it is"


def resolve_lengths(
    model: nn.Module,
    positions: str,
    target_length: int | None = None,
    block_length: int | None = None,
) -> Lengths:
    """The lengths of a run.

    Args:
        model: The model, patched where it will be.
        positions: As `PositionCollator` takes it.
        target_length: As given; by default what the patch reaches.
        block_length: As given; by default the target length, and the original length where positions are drawn.

    Raises:
        PosencError: There is no length to take, or a block that does not fit.
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
    original = original or target
    block = block_length
    if block is None:
        block = min(original, target) if positions in DRAWS else target
    if not 1 < block <= target:
        raise PosencError(
            f"--block_length {block}: an example has from 2 to {target:,} tokens, the target length."
        )
    return Lengths(original, target, block, positions in DRAWS)


def _headline(patch: object) -> str:
    return str(patch).splitlines()[0]


# DeepSpeed ZeRO-3 and a model that is to be tried before it is trained.
#
# Under ZeRO-3 transformers splits the weights while it loads them (`zero3_init_flag: false` does not change that),
# and no
# process can run the model until the Trainer has wrapped it. But a patch, the loss in chunks and the dependencies of a
# batch are all tried on the live model first. So it is loaded whole, into the memory of the CPU, and split afterwards,
# one parameter at a time: no device ever holds all of it.


@contextlib.contextmanager
def whole_weights(arguments: TrainingArguments) -> Iterator[None]:
    """Models that are loaded in the block have all their weights in every process; nothing changes without ZeRO-3.

    Args:
        arguments: The run's; made before, so that DeepSpeed is set up.
    """
    if not _splits(arguments):
        yield
        return
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        given = getattr(arguments, "hf_deepspeed_config", None)
        if given is None:  # by `accelerate launch`, not by --deepspeed
            plugin: Any = arguments.deepspeed_plugin
            plugin.set_deepspeed_weakref()
        else:
            deepspeed.set_hf_deepspeed_config(given)


def share_weights(model: nn.Module, arguments: TrainingArguments) -> None:
    """Splits a whole model over the processes for ZeRO-3, in place; does nothing without it.

    The first process's values count. Call it last, just before `Trainer(model, ...)`.

    Args:
        model: Loaded in `whole_weights`, patched, with its adapter.
        arguments: The run's.
    """
    if not _splits(arguments):
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


def is_planned(arguments: TrainingArguments) -> bool:
    """Whether the Trainer will share the weights out, by FSDP or DeepSpeed: no device may hold all of them."""
    return wants_fsdp(arguments) or arguments.deepspeed_plugin is not None


def _splits(arguments: TrainingArguments) -> bool:
    plugin: Any = arguments.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3
