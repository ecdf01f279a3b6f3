"""Whether the loss in chunks is the plain one: both on a few tokens, compared in value and in gradients."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.decoder import (
    hidden_states,
    input_embeddings,
    sliced,
    without_cache,
)
from hf_posenc.evaluation.documents import one_line
from hf_posenc.training.collator import IGNORED
from hf_posenc.training.decoder_place import DecoderPlace
from hf_posenc.training.head_chunks import cut, with_hidden

CHUNK = 4
"""Positions of a chunk of the probe."""

_TOKENS, _BATCH = 9, 2


def runs_here(model: nn.Module) -> bool:
    """Whether all weights are here: not on the meta device, not sharded, not waiting for those of another process."""
    from torch.distributed.tensor import DTensor
    from transformers.integrations.fsdp import is_fsdp_enabled

    absent = (
        weight.is_meta or not weight.numel() or isinstance(weight, DTensor)
        for weight in model.parameters()
    )
    return not is_fsdp_enabled() and not any(absent)


def batch(model: Any) -> dict[str, Any]:
    """Arguments for a forward: two texts of a few tokens, some of which are not learned."""
    device = next(input_embeddings(model).parameters()).device
    ids = (
        torch.arange(_BATCH * _TOKENS, device=device) * 7919 + 11
    ) % model.config.get_text_config().vocab_size
    ids = ids.view(_BATCH, _TOKENS)
    labels = ids.masked_fill(ids % 5 == 0, IGNORED)
    return {"input_ids": ids, "labels": labels, **without_cache(model)}


def start_of(
    forward: Callable[..., Any], given: dict[str, Any], output: Any
) -> tuple[dict[str, Any], Any]:
    """The first tokens of a batch and of what the decoder made of it.

    All of them are labels, since a text may begin with many that are not learned; and the balance of experts is left
    out, for which the output counts all tokens.

    Args:
        forward: The model's own forward.
        given: Its arguments.
        output: What the decoder made of them.
    """
    hidden = hidden_states(output)
    assert hidden is not None
    first = slice(0, _TOKENS)
    few = {name: cut(value, hidden, first) for name, value in given.items()}
    few.pop("shift_labels", None)
    few["labels"] = few.get("input_ids", torch.zeros_like(few["labels"])).contiguous()
    if "output_router_logits" in inspect.signature(forward).parameters:
        few["output_router_logits"] = False
    return few, sliced(output, first)


def difference(
    plain: Callable[..., Any],
    chunked: Callable[[dict[str, Any]], Any],
    model: nn.Module,
    decoder: DecoderPlace,
    given: dict[str, Any],
    output: Any,
) -> str | None:
    """What is different about the loss in chunks.

    Where gradients are enabled, those of the hidden states and of all weights behind them are compared. Those of the
    decoder's weights follow from them.

    Args:
        plain: The model's own forward.
        chunked: The one to be compared with it.
        model: The language model.
        decoder: Where its decoder is.
        given: Arguments of the forward.
        output: What the decoder makes of them.

    Returns:
        One line, or `None` where all is equal up to rounding.
    """
    hidden = hidden_states(output)
    assert hidden is not None
    states = hidden.detach().requires_grad_(torch.is_grad_enabled())
    wanted = [states, *_behind(model, decoder.module)]
    handed = with_hidden(output, states)
    for name, arguments in _cases(plain, given):
        try:
            with decoder.handing_out(handed):
                expected = _measured(plain(**arguments), wanted)
                found = _measured(chunked(arguments), wanted)
        except Exception as error:
            return f"{type(error).__name__}: {one_line(error)}"
        for kind, a, b in zip(("loss", *["gradients"] * len(wanted)), found, expected, strict=True):
            if not _close(a, b, hidden.dtype):
                return f"another {kind}{name}" if kind == "loss" else f"other {kind}{name}"
    return None


def _cases(
    forward: Callable[..., Any], given: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", given
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        yield " with num_items_in_batch", given | {"num_items_in_batch": 5}
        yield " with shift_labels", given | {"shift_labels": given["labels"]}


def _behind(model: Any, decoder: nn.Module) -> list[Tensor]:
    """The weights that are learned outside the decoder, and those of the head, which may be the embeddings'."""
    inside = {id(weight) for weight in decoder.parameters()}
    weights = [weight for weight in model.parameters() if id(weight) not in inside]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weights += [] if head is None else list(head.parameters())
    return [weight for weight in {id(w): w for w in weights}.values() if weight.requires_grad]


def _measured(output: Any, wanted: list[Tensor]) -> list[Tensor | None]:
    loss: Tensor = output.loss
    if not loss.requires_grad:
        return [loss, *[None] * len(wanted)]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)]


def _close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> bool:
    if found is None or expected is None:
        return found is expected
    # Half of the digits: sums over the vocabulary round by the shape of the product, and what is wrong is so by far.
    # transformers computes losses in float32, those of a float64 model too.
    precision = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    largest = float(expected.nan_to_num(0, 0, 0).abs().max())
    tolerance = math.sqrt(precision) * largest
    return torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)
