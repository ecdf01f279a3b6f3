"""The model's own head over a chunk of hidden states at a time, its logits made again in the backward pass.

What `hf_posenc.evaluation.head_replay` does, with gradients: the decoder has run once, and the model's own forward runs
over slices of its hidden states, handed out by a stub in the decoder's place. So soft caps, scales and biases behind
the decoder stay the model's code. Here each slice is a checkpoint (Chen et al. 2016, arXiv 1604.06174): of its logits
nothing but their loss outlives the slice, and the backward pass makes them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_posenc.evaluation.decoder import hidden_states, sliced
from hf_posenc.training.collator import IGNORED
from hf_posenc.training.decoder_place import DecoderPlace
from hf_posenc.training.head_gradients import SinglePrecisionSums
from hf_posenc.training.whole_head import held_whole, sharded_beside


def summed_loss(
    forward: Callable[..., Any],
    decoder: DecoderPlace,
    output: Any,
    given: dict[str, Any],
    targets: Tensor,
    *,
    chunk: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The losses of all tokens added up, with the logits of `chunk` tokens at a time.

    Args:
        forward: The model's own forward.
        decoder: Where its decoder is.
        output: What the decoder made of the whole batch.
        given: The arguments of the forward.
        targets: What each position predicts, shape (batch, n).
        chunk: Tokens whose logits exist at a time.
        loss: The sum of losses from logits, shape (batch, m, vocabulary), and what they predict, shape (batch, m).

    Returns:
        The sum, a scalar with a gradient where the hidden states or the head have one.
    """
    hidden = hidden_states(output)
    assert hidden is not None
    step = max(1, chunk // len(hidden))
    options = _of_head(forward, given)
    sums, parts = SinglePrecisionSums(), sharded_beside(decoder.model, decoder.module)

    def replay(states: Tensor, aims: Tensor, part: slice) -> Tensor:
        # Contiguous as the whole is: some heads view it in another shape.
        handed = with_hidden(sliced(output, part), states.contiguous())
        arguments = {name: cut(value, hidden, part) for name, value in options.items()}
        with decoder.handing_out(handed), sums, held_whole(parts):
            return loss(forward(**arguments).logits, aims)

    total: Tensor | int = 0
    # One node for all slices, whose backward puts their gradients together once. Each `hidden[:, a:b]` would make a
    # gradient of the whole length: time quadratic in the length.
    for index, states in enumerate(hidden.split(step, dim=1)):
        part = slice(index * step, index * step + states.shape[1])
        aims = targets[:, part].contiguous()  # transformers flattens it by a view
        if torch.is_grad_enabled():
            value = checkpoint(replay, states, aims, part, use_reentrant=False)
        else:
            value = replay(states, aims, part)
        total = total + value
    assert isinstance(total, Tensor)
    return total


def shifted(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """What each position predicts: the label of the next, and nothing at the last; shape as the labels'."""
    return F.pad(labels, (0, 1), value=ignored)[..., 1:]


def without_loss(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward but for those of its loss."""
    loss = ("labels", "shift_labels", "num_items_in_batch")
    return {name: value for name, value in given.items() if name not in loss}


def cut(value: Any, like: Tensor, part: slice) -> Any:
    """Some positions of an argument that has an entry for every token of `like`; any other argument as it is."""
    each = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == like.shape[:2]
    return value[:, part] if each else value


def with_hidden(output: Any, states: Tensor) -> Any:
    """A decoder's output with other last hidden states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    return type(output)(**{**output, "last_hidden_state": states})


def _of_head(forward: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments for hidden states that are there: no loss, no cache, and no balance of experts for every slice."""
    accepted = inspect.signature(forward).parameters
    off = {name: False for name in ("use_cache", "output_router_logits") if name in accepted}
    kept = {name: value for name, value in without_loss(given).items() if name != "past_key_values"}
    return kept | off
