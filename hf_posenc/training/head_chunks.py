"""The model's own head over a chunk of hidden states at a time, its logits made again in the backward pass.

What `hf_posenc.evaluation.head_replay` does, with gradients: the decoder has run once, and the model's own forward runs
over slices of its hidden states, handed out by a stub in the decoder's place. So soft caps, scales and biases behind
the decoder stay the model's code. Here each slice is a checkpoint (Chen et al. 2016, arXiv 1604.06174): of its logits
nothing but their loss outlives the slice, and the backward pass makes them again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_posenc.evaluation.decoder import hidden_states, input_embeddings, sliced

IGNORED = -100
"""The label of a token that is not learned; the `ignore_index` of `torch.nn.functional.cross_entropy`."""


class DecoderPlace:
    """Where a language model holds the decoder that its forward calls; its head is what runs behind it.

    Args:
        model: The language model.
        forward: Its own forward.
        given: Arguments to find out with; nothing behind the first embedding is run.

    Raises:
        LookupError: The forward calls no part that holds the embeddings.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], given: dict[str, Any]
    ) -> None:
        def stop(module: nn.Module, _: Any) -> None:
            raise _ReachedError(module)

        places = list(_holders(model))
        hooks = [
            getattr(parent, name).register_forward_pre_hook(stop, prepend=True)
            for parent, name in places
        ]
        try:
            forward(**given)
        except _ReachedError as reached:
            calls = [getattr(parent, name) is reached.module for parent, name in places]
        else:
            raise LookupError("its forward calls no part that holds its embeddings")
        finally:
            for hook in hooks:
                hook.remove()
        self.parent, self.name = places[calls.index(True)]

    @property
    def module(self) -> nn.Module:
        """The decoder; looked up anew each time, since wrappers such as FSDP's put other modules there."""
        decoder: nn.Module = getattr(self.parent, self.name)
        return decoder

    def run(
        self, forward: Callable[..., Any], given: dict[str, Any], made: list[Any] | None = None
    ) -> tuple[Any, Any]:
        """Runs the forward with the logits of the last token alone.

        Args:
            forward: The model's own forward.
            given: Its arguments.
            made: Where the decoder's output goes as soon as it is there.

        Returns:
            What the forward returned, and the whole output of the decoder.
        """
        made = [] if made is None else made

        def last(module: nn.Module, _: Any, output: Any) -> Any:
            made.append(output)
            return sliced(output, slice(-1, None))

        hook = self.module.register_forward_hook(last)  # behind those of FSDP, which see the whole
        try:
            output = forward(**given)
        finally:
            hook.remove()
        return output, made[0]

    @contextlib.contextmanager
    def handing_out(self, output: Any) -> Iterator[None]:
        """Puts a stub in the decoder's place, so that neither its forward nor anybody's hooks on it run."""
        decoder = self.module
        setattr(self.parent, self.name, _Stub(decoder, output))
        try:
            yield
        finally:
            setattr(self.parent, self.name, decoder)


class _Stub(nn.Module):
    """Hands out hidden states; of everything else that model code reads of a decoder, the decoder's."""

    def __init__(self, decoder: nn.Module, output: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "decoder":
                raise
            return getattr(self.decoder, name)


class _ReachedError(Exception):
    def __init__(self, module: nn.Module) -> None:
        self.module = module


def _holders(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The parts of a model that hold its embeddings, each as its parent and its name, from the outside in."""
    embeddings, parent = input_embeddings(model), model
    while True:
        for name, child in parent.named_children():
            if child is not embeddings and any(part is embeddings for part in child.modules()):
                yield parent, name
                parent = child
                break
        else:
            return


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

    def replay(states: Tensor, aims: Tensor, part: slice) -> Tensor:
        # Contiguous as the whole is: some heads view it in another shape.
        handed = with_hidden(sliced(output, part), states.contiguous())
        arguments = {name: cut(value, hidden, part) for name, value in options.items()}
        with decoder.handing_out(handed):
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


@contextlib.contextmanager
def loss_replaced(model: nn.Module, loss: Callable[..., Tensor]) -> Iterator[None]:
    """Replaces the loss function of this one model, and puts back exactly what was there.

    transformers: `PreTrainedModel.loss_function` is chosen by the config until somebody sets it.
    """
    had, before = "_loss_function" in vars(model), vars(model).get("_loss_function")
    model.loss_function = loss  # type: ignore[assignment]
    try:
        yield
    finally:
        if had:
            model._loss_function = before  # type: ignore[assignment]
        else:
            del model._loss_function


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
