"""Check of a collator's batches: which token's logits depend on which other tokens, measured in the live model."""

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
from hf_posenc.evaluation.scoring.decoder import evaluation_mode, input_embeddings
from hf_posenc.training.batches.collator import DRAWS, PositionCollator

_TOKENS, _PROMPT = 12, 4
_DOCUMENTS = ((4, 5, 3), (6, 2, 4))
_SEED = 0


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
        depends = dependencies(model, batch)
    # A kernel may require another device, or have no backward on this one.
    except (RuntimeError, ImportError) as error:
        with contextlib.suppress(RuntimeError, ImportError):
            if fractions and _logits_at(model, batch, drawn.long()) is not None:
                raise PosencError(
                    f"{name} takes whole positions only, not positions={positions!r}: {one_line(error)}. Use "
                    "positions='random'."
                ) from error
        warnings.warn(f"{unverified}: {one_line(error)}.", stacklevel=2)
        return
    if positions == "packed":
        document = _jumps(batch).cumsum(-1).to(depends.device)
        if bool((depends & (document[:, :, None] != document[:, None, :])).any()):
            raise PosencError(
                f"In {name} packed documents attend to each other: its layers carry a state, its attention takes no "
                "mask, or its mask ignores positions. Use positions='contiguous', or another attention implementation "
                "(--attn sdpa)."
            )
    if positions not in DRAWS:
        return
    if not _crosses_jumps(depends, batch):
        raise PosencError(
            f"{name} separates the parts of a text where positions jump: positions={positions!r} would train on short "
            "texts. Use positions='contiguous'."
        )
    exact = _logits_at(model, batch, drawn)
    if torch.equal(exact, _logits_at(model, batch, torch.arange(drawn.shape[1]).expand_as(drawn))):
        raise PosencError(
            f"{name} does not read position_ids: positions={positions!r} would have no effect. Use "
            "positions='contiguous'."
        )
    whole = (to(drawn).long() for to in (torch.floor, torch.round, torch.ceil) if fractions)
    if any(torch.equal(exact, _logits_at(model, batch, each)) for each in whole):
        raise PosencError(
            f"{name} rounds positions: positions={positions!r} would train on whole ones. Use positions='random'."
        )


def dependencies(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the dependencies of tokens' logits on tokens' embeddings, by the gradient: 0 for a masked key.

    The batch has b rows of n tokens and no labels. The result is bool, shape (b, n, n): query, key.
    """
    rows = []
    with _embedding_leaves(model) as leaves:
        logits = _logits(model, batch)
        weights = torch.randn(
            logits.shape[-1], generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32
        ).to(logits.device)
        scores = (logits.float() * weights).sum(-1)
        for query in range(scores.shape[1]):
            gradients = torch.autograd.grad(
                scores[:, query].sum(), leaves, retain_graph=True, materialize_grads=True
            )
            rows.append(torch.stack([each.abs().amax(-1) for each in gradients]).amax(0) > 0)
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


@contextlib.contextmanager
def _embedding_leaves(model: nn.Module) -> Iterator[list[Tensor]]:
    """Make the output of the embedding layer a leaf, with the model in evaluation mode."""
    leaves: list[Tensor] = []

    def detach(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # some models write into it

    hook = input_embeddings(model).register_forward_hook(detach)
    try:
        with torch.enable_grad(), evaluation_mode(model):
            yield leaves
    finally:
        hook.remove()


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


def _crosses_jumps(depends: Tensor, batch: Mapping[str, Any]) -> bool:
    """Return whether some token behind every jump depends on some token in front of it."""
    return all(
        bool(row[index:, :index].any())
        for row, jumps in zip(depends, _jumps(batch), strict=True)
        for index in jumps.nonzero()[:, 0].tolist()
    )


@torch.no_grad()
def _logits_at(model: nn.Module, batch: Mapping[str, Any], positions: Tensor) -> Tensor:
    with evaluation_mode(model):
        return _logits(model, {**batch, "position_ids": positions})


def _attention(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def _describe(model: nn.Module) -> str:
    attention, name = _attention(model), type(model).__name__
    return f"{name} ({attention} attention)" if attention else name
