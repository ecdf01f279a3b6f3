"""Which token's logits depend on which: what a batch means is decided by the live model, and checked in it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.measuring.identity import check_vocabulary
from hf_posenc.training.batches.collator import PositionCollator
from hf_posenc.training.batches.positions import DRAWS

TOKENS = 12
_DOCUMENTS = ((4, 5, 3), (6, 2, 4))
_SEED = 0


def check_dependencies(
    model: nn.Module, collator: PositionCollator, *, largest: int | None = None
) -> None:
    """Makes sure that a model reads the collator's batches as they are meant, before it is trained on them.

    Two rows of a dozen tokens go through the model, in eval mode. Packed documents must not see each other (layers with
    a state, attention functions without a mask function, and models that do not hand their positions on to the mask let
    them). Parts whose positions jump must (without a mask in the batch they would not), and the positions must count at
    all. Jumps are short here, so that a bias or a window that reaches so far only is not taken for a mask.

    Args:
        model: A causal language model, patched or not, also a PEFT model; not yet wrapped for several processes.
        collator: What it will be trained with.
        largest: The largest token id of the training data; by default it is not looked at.

    Raises:
        PosencError: The model has no embedding for a token; packed documents see each other; parts of a text do not;
            positions change nothing; the logits are not finite.

    Warns:
        UserWarning: The model cannot run where it is, so nothing was looked at.
    """
    if largest is not None:
        check_vocabulary(model, largest)
    if _is_elsewhere(model):
        _warn_unchecked(
            model, collator, "the weights are not on this process (meta device, ZeRO-3)"
        )
        return
    if collator.positions == "packed" and not collator.flatten and "flash" in _attention(model):
        raise PosencError(
            f"{_named(model)} tells packed documents apart in batches of one row only: use "
            "PositionCollator('packed', flatten=True)."
        )
    batch = _probe(model, collator)
    try:
        seen = dependencies(model, batch)
    # A kernel may be for another device, or have no backward on this one.
    except (RuntimeError, ImportError) as error:
        _warn_unchecked(model, collator, one_line(error))
        return
    if collator.positions == "packed":
        if _crosses(seen, batch):
            raise PosencError(
                f"In {_named(model)} packed documents see each other: its layers carry a state, its attention takes "
                "no mask, or its mask knows no positions. Use positions='contiguous', or another attention "
                "implementation (--attn sdpa)."
            )
        return
    if collator.positions in DRAWS:
        if not _joined(seen, batch):
            raise PosencError(
                f"{_named(model)} keeps the parts of a text apart where positions jump: positions="
                f"{collator.positions!r} would train on short texts. Use positions='contiguous'."
            )
        if not _positions_count(model, batch):
            raise PosencError(
                f"{_named(model)} does not read position_ids: positions={collator.positions!r} would change "
                "nothing. Use positions='contiguous'."
            )


def dependencies(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Whether the logits of a token change with the embedding of another, by the gradient: a masked key has exactly 0.

    Args:
        model: A causal language model.
        batch: What its forward takes, without labels; b rows of n tokens.

    Returns:
        Bool, shape (b, n, n): query, key.

    Raises:
        PosencError: The model does not take what is in the batch, or its logits are not finite.
    """
    rows = []
    with _embedded(model) as leaves:
        logits = _logits(model, batch)
        weights = torch.randn(
            logits.shape[-1], generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32
        ).to(logits.device)
        scores = (logits.float() * weights).sum(-1)
        for query in range(scores.shape[1]):
            found = torch.autograd.grad(
                scores[:, query].sum(), leaves, retain_graph=True, materialize_grads=True
            )
            rows.append(torch.stack([each.abs().amax(-1) for each in found]).amax(0) > 0)
    return torch.stack(rows, dim=1)


def _logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    device = next(model.parameters()).device
    values = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    try:
        output = model(**{"use_cache": False, **values})
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise PosencError(
            f"{_named(model)} cannot be given positions: {error}. Use positions='contiguous'."
        ) from error
    logits: Tensor | None = getattr(output, "logits", None)
    if logits is None:
        raise PosencError(f"{_named(model)} is no causal language model: it gives no logits.")
    if not bool(logits.isfinite().all()):
        raise PosencError(
            f"{_named(model)} gives logits that are not finite, before any training: its weights are broken, or its "
            "dtype is too narrow."
        )
    return logits


@contextlib.contextmanager
def _embedded(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block the output of the embedding layer is a leaf, and the model is in eval mode."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # some models write into it

    inner: Any = model
    hook = inner.get_input_embeddings().register_forward_hook(cut)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.enable_grad():
            model.eval()
            yield leaves
    finally:
        hook.remove()
        for module, mode in modes:
            module.training = mode


def _probe(model: nn.Module, collator: PositionCollator) -> dict[str, Any]:
    """A batch as the collator makes it, with jumps in every row where it makes any."""
    inner: Any = model
    words = min(inner.get_input_embeddings().weight.shape[0], 1 << 15)
    ids = np.random.default_rng(_SEED).integers(words // 4, words, (len(_DOCUMENTS), TOKENS))
    examples = [
        {"input_ids": row, "document_lengths": documents}
        for row, documents in zip(ids, _DOCUMENTS, strict=True)
    ]
    short = copy.copy(collator)
    if collator.positions in DRAWS:
        short.target_length = 2 * TOKENS
    for short.seed in itertools.count():
        batch = short(examples)
        if collator.positions not in DRAWS or bool(_jumps(batch).any(-1).all()):
            break
    del batch["labels"]
    return batch


def _jumps(batch: Mapping[str, Any]) -> Tensor:
    """Whether a token begins a new part or document, shape (b, n)."""
    positions: Tensor = batch["position_ids"]
    return positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1


def _crosses(seen: Tensor, batch: Mapping[str, Any]) -> bool:
    """Whether a token of one document depends on one of another."""
    document = _jumps(batch).cumsum(-1).to(seen.device)
    return bool((seen & (document[:, :, None] != document[:, None, :])).any())


def _joined(seen: Tensor, batch: Mapping[str, Any]) -> bool:
    """Whether something behind every jump depends on something in front of it."""
    return all(
        bool(row[place:, :place].any())
        for row, jumps in zip(seen, _jumps(batch), strict=True)
        for place in jumps.nonzero()[:, 0].tolist()
    )


@torch.no_grad()
def _positions_count(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    plain = {**batch, "position_ids": torch.arange(TOKENS).expand(len(batch["input_ids"]), -1)}
    with _embedded(model):
        return not torch.equal(_logits(model, batch), _logits(model, plain))


def _warn_unchecked(model: nn.Module, collator: PositionCollator, reason: str) -> None:
    warnings.warn(
        f"Nobody has looked whether {_named(model)} reads positions={collator.positions!r} as it is meant: {reason}.",
        stacklevel=3,
    )


def _is_elsewhere(model: nn.Module) -> bool:
    return any(p.is_meta or (hasattr(p, "ds_id") and not p.numel()) for p in model.parameters())


def _attention(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def _named(model: nn.Module) -> str:
    attention, name = _attention(model), type(model).__name__
    return f"{name} ({attention} attention)" if attention else name
