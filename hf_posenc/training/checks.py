"""Checks before the first step: of everything that would silently be dropped, have no effect, or be misread."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_posenc.errors import PosencError, UnsupportedModelError, one_line
from hf_posenc.evaluation.measuring.identity import check_vocabulary
from hf_posenc.evaluation.scoring.decoder import READS_AHEAD_HALF, evaluation_mode, input_embeddings
from hf_posenc.methods import TableMethod, update_of
from hf_posenc.model.discovery import PER_LENGTH, rotary_tables
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.model.weights import rounding_dtype
from hf_posenc.patch.patching import get_patch, inspect_rope
from hf_posenc.patch.report import Patch
from hf_posenc.patch.scaled import moving_note
from hf_posenc.training.chunked_loss import ChunkedLoss
from hf_posenc.training.collator import DRAWS, PositionCollator
from hf_posenc.training.options import check_positions
from hf_posenc.training.processes import check_launch, gather, is_set, wants_fsdp

_SAMPLE = 4096  # weights of a tensor: enough to estimate a share to a percent
_TOKENS, _PROMPT = 12, 4
_DOCUMENTS = ((4, 5, 3), (6, 2, 4))
_ROUNDING = 1e-5
"""Of the largest logit, in single precision: experts are chosen per batch, which changes the order of sums."""


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
    """
    check_positions(positions)
    check_launch(arguments)
    patch = get_patch(model)
    # The frequency tables that depend on the length of a batch, with their update mode.
    methods = () if patch is None else patch.config.build()
    updates = {each.name: update_of(each) for each in methods}
    moving = {name: update for name, update in updates.items() if update != "static"}
    tables = [each.name for each in methods if isinstance(each, TableMethod)]
    with contextlib.suppress(UnsupportedModelError):  # no rotary embedding
        own = [t for t in rotary_tables(unwrap(model)) if moving_note(unwrap(model), t)]
        for table in inspect_rope(model) if own else ():  # unless a patch replaced them
            if table.rope_type in PER_LENGTH and table.rope_type not in updates:
                moving[f"the model's own {table.rope_type} RoPE"] = "sequence"
    for name, update in moving.items():
        if positions == "contiguous" or update == "row":
            continue  # blocks of one length, or one table per position
        if update == "request" and positions != "packed" and name not in tables:
            continue  # one table per row
        raise PosencError(
            f"{name} follows the longest text of a batch or row (update={update!r}), and with positions={positions!r} "
            "that length differs between batches and processes: the same weights would be trained with different "
            "frequencies at once. Use --positions contiguous, whose blocks have one length, update='row', or a static "
            "method (yarn, ntk_by_parts, ...)."
        )
    _check_parallelism(patch, [*moving], positions, arguments)
    _check_equal_weights(model)
    if arguments is None:
        return
    liger = arguments.liger_kernel_config or {}
    if arguments.use_liger_kernel and patch is not None and liger.get("rope", True):
        raise PosencError(
            "Liger replaces the rotation by a kernel of its own, for all models of this family in the process. "
            f"{' + '.join(patch.methods)} would be lost. Pass --liger-kernel-config '{{\"rope\": false}}'."
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
            "loss in chunks would not be used. Leave it, or --loss-chunk, at 0."
        )


def _check_parallelism(
    patch: Patch | None, moving: Sequence[str], positions: str, arguments: TrainingArguments | None
) -> None:
    config: Any = None if arguments is None else getattr(arguments, "parallelism_config", None)
    if config is None and is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        from accelerate.parallelism_config import ParallelismConfig

        config = ParallelismConfig()  # reads the environment of `accelerate launch`
    dropped = None
    if patch is not None and patch.layers:
        dropped = f"what {' + '.join(patch.methods)} changes in attention would be lost silently"
    elif positions == "packed":
        dropped = "packed documents would attend to each other"
    elif moving:
        dropped = f"{moving[0]}, which scales with the positions in a part, would differ between processes"
    for name, kind in (("Context", "cp_size"), ("Sequence", "sp_size")):
        size = getattr(config, kind, None) or 1
        if size > 1 and dropped is not None:
            raise PosencError(
                f"{name} parallelism (size {size}) splits a text over the processes and computes attention itself, "
                f"without any mask: {dropped}. Use a static frequency method (yarn, ...) and --positions contiguous, "
                "or train without it (FSDP2, ZeRO-3, tensor parallelism, --gradient-checkpointing)."
            )


def _check_precision(model: nn.Module, arguments: TrainingArguments) -> None:
    """Refuse half-precision weights that most steps would not change.

    Adam's step is about the learning rate for every weight, and the neighbours of a weight of 0.02 in bfloat16 are 1e-4
    away. DeepSpeed keeps float32 copies itself, and accelerate makes them for FSDP2 with mixed precision.
    """
    mixed = arguments.bf16 or arguments.fp16
    copies = arguments.deepspeed_plugin is not None or (wants_fsdp(arguments) and mixed)
    if not any(name in str(arguments.optim).lower() for name in ("adam", "lion")) or copies:
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


# A batch in the live model: do logits depend on the tokens in front of a jump of positions?


def check_dependencies(
    model: nn.Module, collator: PositionCollator, *, largest: int | None = None
) -> None:
    """Check that a model handles the collator's batches correctly, before it is trained on them.

    Two rows of a dozen tokens go through the model, in evaluation mode. Packed documents must not attend to each other.
    (Recurrent layers, attention functions without a mask, and models that do not pass positions to the mask let them.)
    Parts of a text whose positions jump must attend to each other. (Without a mask in the batch they would not.) And
    positions must have an effect. The jumps are short, so that a bias or a window is not mistaken for a mask.

    Args:
        model: A causal language model, patched or not, also a PEFT model; not yet wrapped for several processes.
        collator: The collator of the training.
        largest: The largest token id of the training data; by default it is not checked.

    Raises:
        PosencError: A token has no embedding; packed documents attend to each other; parts of a text do not; positions
            have no effect; the logits are not finite.

    Warns:
        UserWarning: The model cannot run on this process, so nothing was checked.

    Examples:
        >>> from hf_posenc.training import PositionCollator, check_dependencies
        >>> check_dependencies(model, PositionCollator("pose", target_length=8192))
    """
    if largest is not None:
        check_vocabulary(model, largest)
    name, positions = _describe(model), collator.positions
    unverified = f"Could not verify that {name} handles positions={positions!r} correctly"
    if any(p.is_meta or (hasattr(p, "ds_id") and not p.numel()) for p in model.parameters()):
        reason = "the weights are not on this process (meta, ZeRO-3)"
        warnings.warn(f"{unverified}: {reason}.", stacklevel=2)
        return
    if positions == "packed" and not collator.flatten and "flash" in _attention(model):
        raise PosencError(
            f"{name} separates packed documents only in batches of one row: use PositionCollator('packed', "
            "flatten=True)."
        )
    batch = _probe_batch(model, collator)
    try:
        exact = _logits(model, batch)
        reads = [] if positions == "contiguous" else _reads_across(model, batch, exact)
    except (RuntimeError, ImportError) as error:  # a kernel may require another device
        warnings.warn(f"{unverified}: {one_line(error)}.", stacklevel=2)
        return
    if positions == "packed" and any(reads):
        raise PosencError(
            f"In {name} packed documents attend to each other: its layers carry a state, its attention takes no mask, "
            "or its mask ignores positions. Use --positions contiguous, or another --attn if the model has one."
        )
    if positions not in DRAWS:
        return
    if not all(reads):
        raise PosencError(
            f"{name} separates the parts of a text where positions jump: positions={positions!r} would train on short "
            "texts. Use --positions contiguous."
        )
    drawn = batch["position_ids"]
    plain = torch.arange(drawn.shape[1]).expand_as(drawn)
    zeros = [p.data for p in trained_parameters(model).values() if not p.any()]
    try:  # new biases of zeros have no effect yet
        for each in zeros:
            each.copy_(torch.linspace(-1, 1, each.numel()).view_as(each))
        same = torch.equal(*(_logits(model, {**batch, "position_ids": p}) for p in (drawn, plain)))
    finally:
        for each in zeros:
            each.zero_()
    if same:
        raise PosencError(
            f"{name} does not read position_ids: positions={positions!r} would have no effect. Use "
            "--positions contiguous."
        )


def _reads_across(model: nn.Module, batch: Mapping[str, Any], exact: Tensor) -> list[bool]:
    """Return, for every jump of positions, whether the logits behind it depend on the tokens in front of it."""
    full = (torch.float32, torch.float64)
    half = exact.dtype not in full or rounding_dtype(model) not in full
    rounding = float(exact.abs().max()) * (READS_AHEAD_HALF if half else _ROUNDING)
    found = []
    for row, index in _jumps(batch).nonzero().tolist():
        if index:
            ids = batch["input_ids"].clone()
            ids[row, :index] -= 1
            moved = (_logits(model, {**batch, "input_ids": ids}) - exact)[row, index:].abs().max()
            found.append(float(moved) > rounding)
    return found


@torch.no_grad()
def _logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the logits of a batch in evaluation mode."""
    device, given = next(model.parameters()).device, {"use_cache": False, **batch}
    values = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    try:
        with evaluation_mode(model):
            output = model(**values)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise PosencError(
            f"{_describe(model)} does not accept positions: {error}. Use --positions contiguous."
        ) from error
    logits: Tensor | None = getattr(output, "logits", None)
    if logits is None:
        raise PosencError(f"{_describe(model)} is no causal language model: it returns no logits.")
    if not bool(logits.isfinite().all()):
        raise PosencError(
            f"{_describe(model)} returns logits that are not finite, untrained: broken weights, or too narrow a dtype."
        )
    return logits


def _probe_batch(model: nn.Module, collator: PositionCollator) -> dict[str, Any]:
    """Return a batch of the collator, in which every row of drawn positions has a jump."""
    embeddings: Any = input_embeddings(model)
    vocabulary = min(embeddings.weight.shape[0], 1 << 15)
    random = np.random.default_rng(0)
    ids = random.integers(vocabulary // 4, vocabulary, (len(_DOCUMENTS), _TOKENS))
    rows = zip(ids, _DOCUMENTS, strict=True)
    examples = [{"input_ids": row, "document_lengths": documents} for row, documents in rows]
    short = copy.copy(collator)
    if collator.positions in DRAWS:
        short.terminal_prompt = collator.terminal_prompt[:_PROMPT]
        short.target_length, short.curriculum = 2 * (_TOKENS + len(short.terminal_prompt)), ()
    for short.seed in itertools.count():
        batch = short(examples)
        if collator.positions not in DRAWS or bool(_jumps(batch).any(-1).all()):
            break
    del batch["labels"]
    return batch


def _jumps(batch: Mapping[str, Any]) -> Tensor:
    """Return whether a token begins a new part or document, shape (b, n)."""
    positions: Tensor = batch["position_ids"]
    return positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1


def _attention(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def _describe(model: nn.Module) -> str:
    attention, name = _attention(model), type(model).__name__
    return f"{name} ({attention} attention)" if attention else name
