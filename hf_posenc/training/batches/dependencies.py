"""Check of a collator's batches in the live model: do logits depend on the tokens in front of a jump of positions."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.measuring.identity import check_vocabulary
from hf_posenc.evaluation.scoring.decoder import (
    READS_AHEAD_HALF,
    evaluation_mode,
    input_embeddings,
)
from hf_posenc.model.weights import rounding_dtype
from hf_posenc.training.batches.collator import DRAWS, PositionCollator

_TOKENS, _PROMPT = 12, 4
_DOCUMENTS = ((4, 5, 3), (6, 2, 4))
_SEED = 0
_ROUNDING = 1e-5
"""Of the largest logit, in single precision: experts are chosen per batch, which changes the order of sums."""


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
    drawn = batch["position_ids"] if positions in DRAWS else torch.empty(0)
    fractions = positions in DRAWS and drawn.is_floating_point()
    try:
        exact = _logits(model, batch)
        reads = [] if positions == "contiguous" else _reads_across(model, batch, exact)
    except (RuntimeError, ImportError) as error:  # a kernel may require another device
        with contextlib.suppress(RuntimeError, ImportError):
            if fractions and _logits(model, batch, drawn.long()) is not None:
                raise PosencError(
                    f"{name} takes whole positions only, not positions={positions!r}: {one_line(error)}. Use "
                    "positions='random'."
                ) from error
        warnings.warn(f"{unverified}: {one_line(error)}.", stacklevel=2)
        return
    if positions == "packed" and any(reads):
        raise PosencError(
            f"In {name} packed documents attend to each other: its layers carry a state, its attention takes no mask, "
            "or its mask ignores positions. Use positions='contiguous', or another attention implementation (--attn "
            "sdpa)."
        )
    if positions not in DRAWS:
        return
    if not all(reads):
        raise PosencError(
            f"{name} separates the parts of a text where positions jump: positions={positions!r} would train on short "
            "texts. Use positions='contiguous'."
        )
    if torch.equal(exact, _logits(model, batch, torch.arange(drawn.shape[1]).expand_as(drawn))):
        raise PosencError(
            f"{name} does not read position_ids: positions={positions!r} would have no effect. Use "
            "positions='contiguous'."
        )
    whole = (to(drawn).long() for to in (torch.floor, torch.round, torch.ceil) if fractions)
    if any(torch.equal(exact, _logits(model, batch, each)) for each in whole):
        raise PosencError(
            f"{name} rounds positions: positions={positions!r} would train on whole ones. Use positions='random'."
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
def _logits(model: nn.Module, batch: Mapping[str, Any], positions: Tensor | None = None) -> Tensor:
    """Return the logits of a batch in evaluation mode, at other positions if given."""
    device = next(model.parameters()).device
    given = {
        "use_cache": False,
        **batch,
        **({} if positions is None else {"position_ids": positions}),
    }
    values = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    try:
        with evaluation_mode(model):
            output = model(**values)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise PosencError(
            f"{_describe(model)} does not accept positions: {error}. Use positions='contiguous'."
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
    random = np.random.default_rng(_SEED)
    ids = random.integers(vocabulary // 4, vocabulary, (len(_DOCUMENTS), _TOKENS))
    examples = [
        {"input_ids": row, "document_lengths": documents}
        for row, documents in zip(ids, _DOCUMENTS, strict=True)
    ]
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
