"""What cannot work is refused before the first step, above all what would be dropped or do nothing in silence."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.methods import LengthDependent
from hf_posenc.patch import Patch
from hf_posenc.patching import get_patch, inspect_rope
from hf_posenc.training.launching import check_launch, is_set, wants_fsdp
from hf_posenc.training.loss import ChunkedLoss
from hf_posenc.training.ranks import from_all

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
