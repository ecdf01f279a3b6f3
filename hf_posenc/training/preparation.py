"""The patch of a model before its training, as options give it, and the lengths that follow from it."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

from torch import nn

from hf_posenc.errors import PosencError, UntrainedWarning
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate, original_length
from hf_posenc.model.context import length_of
from hf_posenc.patch.patching import get_patch, patch_model, unpatch_model
from hf_posenc.training.batches.collator import DRAWS

_KEEP = "Leave --patch out to train it further as it is"


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run in tokens: the model's original context, the target, and that of an example."""

    original: int
    target: int
    block: int
    drawn: bool = False  # positions are drawn up to the target
    curriculum: tuple[int, ...] | None = None  # up to these lengths, one after another


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
    if patch is not None:
        if not candidate.beside.get("replace"):
            raise PosencError(f"--patch {text}: {saved}. {_KEEP}, or replace it by replace=true.")
        unpatch_model(model)
        beside = {k: v for k, v in candidate.beside.items() if k != "replace"}
        candidate = dataclasses.replace(candidate, beside=beside)
    scale = 1.0
    if candidate.auto_scale:
        original = candidate.beside.get("original_max_position_embeddings")
        original = original or length_of(model, replaced=bool(candidate.beside.get("replace")))
        if target_length is None or original is None:
            raise PosencError(f"--patch {text}: give a scale, as in scale=8, or --target_length.")
        scale = max(1.0, target_length / original)
    method, options = candidate.arguments(scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # they are about to be trained
        patch_model(model, method, **options)


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
        raise PosencError(f"No length to train for, since {why}: give --target_length, in tokens.")
    original, drawn = original or target, positions in DRAWS
    default = min(original, target) if drawn else target
    block = default if block_length is None else block_length
    if not 1 < block <= target:
        raise PosencError(
            f"--block_length {block}: an example has from 2 to {target:,} tokens, the target length."
        )
    return Lengths(original, target, block, drawn)
