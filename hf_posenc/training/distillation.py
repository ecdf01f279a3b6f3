"""Distillation: a term beside the loss that keeps the predictions of a model near those of a teacher."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.model.unwrapping import is_sharded
from hf_posenc.patch.patching import unpatch_model
from hf_posenc.training.chunked_loss import (
    Arguments,
    ChunkedLoss,
    chunk_loss,
    shifted,
    without_loss,
)
from hf_posenc.training.collator import DRAWS, IGNORED
from hf_posenc.training.options import Trained, check_positions
from hf_posenc.training.parameters import refuse_wrapped


def distill(
    model: nn.Module,
    *,
    positions: str,
    weight: float = 1.0,
    teacher: nn.Module | None = None,
    chunk: int | None = None,
) -> ChunkedLoss:
    """Add the divergence of a model's predictions from a teacher's to its loss, `model(**batch, labels=...).loss`.

    Without a `teacher` the model teaches itself: at positions 0 .. n - 1 it is the teacher of itself at the drawn ones
    (RoPE-perturbed self-distillation, Li et al. 2026, arXiv 2604.14339). With the model of `unpatched_teacher` (after
    LinearARD, arXiv 2604.00004), both read each block at positions 0 .. n - 1, also where others are drawn for the
    loss: then the model runs twice.

    The term is the mean over the tokens of the loss, and computed in chunks of tokens as in `chunk_loss`: whole logits
    never exist. The teacher has no gradient and no dropout. A model in evaluation mode has its plain loss.

    Args:
        model: A patched causal language model, also a `PeftModel`, before it is wrapped.
        positions: As for `PositionCollator`.
        weight: The factor of the term.
        teacher: The unpatched model.
        chunk: As for `chunk_loss`.

    Returns:
        The handle of `chunk_loss`, which removes both.

    Raises:
        PosencError: Unknown positions; a weight that is not positive; a model that would teach itself at the positions
            that it is trained on; a model whose loss cannot be computed in chunks.

    Examples:
        >>> from hf_posenc import patch_model
        >>> from hf_posenc.training import PositionCollator, distill
        >>> handle = distill(patch_model(model, "yarn", scale=4), positions="pose", weight=0.5)
        >>> batch = PositionCollator("pose", target_length=8192)([{"input_ids": list(range(100))}])
        >>> model.train()(**batch).loss.requires_grad
        True
    """
    check_positions(positions)
    if not 0 < weight < float("inf"):
        raise PosencError(f"The weight of a distillation is a positive number, not {weight}.")
    if teacher is None and positions not in DRAWS:
        raise PosencError(
            f"positions={positions!r} are those that a model would teach itself at. Use one of {', '.join(DRAWS)}, or "
            "the unpatched model as the teacher."
        )
    handle = chunk_loss(model, chunk)
    taught_by = handle if teacher is None else chunk_loss(teacher, handle.chunk)
    if handle.exact is False or taught_by.exact is False:
        raise PosencError(
            f"The loss of {type(handle.model).__name__} cannot be computed in chunks, which distillation needs. Train "
            "without it."
        )
    handle.beside = partial(_divergence, handle, taught_by, weight, positions in DRAWS)
    return handle


def unpatched_teacher(model: nn.Module, train: Trained = "full") -> nn.Module:
    """Return a patched model as it was before its patch, as the teacher of `distill`.

    Its modules are its own. Its weights are the model's where training leaves these as they are (`"lora"`,
    `"encoding"`), and a frozen copy otherwise, which takes the memory of the weights once more. Call it before
    `choose_parameters`, whose LoRA would be a part of the teacher.

    Raises:
        PosencError: A model that is wrapped or has an adapter, or a sharded one, of which no process has the weights.

    Examples:
        >>> from hf_posenc import get_patch, patch_model
        >>> from hf_posenc.training import unpatched_teacher
        >>> teacher = unpatched_teacher(patch_model(model, "yarn", scale=4), "lora")
        >>> get_patch(teacher) is None, teacher.lm_head.weight is model.lm_head.weight
        (True, True)
    """
    refuse_wrapped(model, "Make its unpatched teacher")
    if is_sharded(model):
        raise PosencError(
            "The weights of this model are sharded, so that no unpatched one can be made of it. Train it on one "
            "process or with DDP, or without the unpatched teacher."
        )
    copied = train == "full"
    known: Any = {} if copied else {id(weight): weight for weight in model.parameters()}
    teacher = unpatch_model(copy.deepcopy(model, known)).eval()
    return teacher.requires_grad_(False) if copied else teacher


def _divergence(
    model: ChunkedLoss,
    teacher: ChunkedLoss,
    weight: float,
    drawn: bool,
    arguments: Arguments,
    output: Any,
) -> Tensor:
    """Return the mean Kullback-Leibler divergence of predictions from the teacher's, in nats, times the weight.

    `arguments` are those of the forward, `output` that of the decoder that the loss is of.
    """
    ours, taught = arguments, arguments
    if drawn:
        taught = {name: value for name, value in arguments.items() if name != "position_ids"}
    if drawn and teacher is not model:
        ours, output = taught, model.run(without_loss(taught))[1]
    device = arguments["labels"].device  # to which the Trainer has moved the model
    if any(buffer.device != device for buffer in teacher.model.buffers()):
        teacher.model.to(device)
    with torch.no_grad(), evaluation_mode(teacher.model):
        expected = teacher.run(without_loss(taught))[1]
    head, teachers = model.head(output, ours), teacher.head(expected, taught)

    def summed(aims: Tensor, part: slice, states: Tensor, others: Tensor) -> Tensor:
        with torch.no_grad():
            logits = teachers(others, part)
        predicted = head(states, part)
        precision = torch.promote_types(predicted.dtype, torch.float32)
        own, theirs = (each.to(precision).log_softmax(-1) for each in (predicted, logits))
        each = F.kl_div(own, theirs, reduction="none", log_target=True).sum(-1)
        return each[aims != IGNORED].sum()

    targets, items = arguments.get("shift_labels"), arguments.get("num_items_in_batch")
    if targets is None:
        targets = shifted(arguments["labels"])
    return weight * model.mean([output, expected], targets, summed, items)
