"""The model's own head over a chunk of hidden states at a time, its logits made again in the backward pass.

What `hf_posenc.evaluation.scoring.head_replay` does, with gradients: the decoder has run once, and the model's own
forward runs
over slices of its hidden states, handed out by a stub in the decoder's place. So soft caps, scales and biases behind
the decoder stay the model's code. Here each slice is a checkpoint (Chen et al. 2016, arXiv 1604.06174): of its logits
nothing but their loss outlives the slice, and the backward pass makes them again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from hf_posenc.evaluation.scoring.decoder import hidden_states, sliced
from hf_posenc.training.batches.collator import IGNORED
from hf_posenc.training.chunked_loss.decoder import DecoderPlace

# Gradients of many chunks added up in float32, whatever the precision of the weights.


_Mode: Any = TorchFunctionMode
_Function: Any = torch.autograd.Function


class SinglePrecisionSums(_Mode):  # type: ignore[misc]
    """Every half-precision weight used under it has its gradients, of all uses, added up in float32 and rounded once.

    Autograd adds up the gradients of a weight in the weight's own dtype, and under autocast in that of its one cast
    copy. With 500 chunks in bfloat16 that makes about 2 % of error, and from 512 on what is added may be less than the
    last bit of the sum. One mode serves all chunks of a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_grad_enabled() and func.__name__ != "__get__":
            args, kwargs = tree_map_only(nn.Parameter, self._used, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _used(self, weight: nn.Parameter) -> Tensor:
        half = weight.dtype in (torch.bfloat16, torch.float16)
        rounded = half or (
            weight.dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type)
        )
        if not (rounded and weight.requires_grad) or isinstance(weight, DTensor):
            return weight
        if id(weight) not in self._sums:
            self._sums[id(weight)] = weight, _Sum.apply(weight)
        used: Tensor = _Use.apply(self._sums[id(weight)][1], weight.detach())
        return used


class _Sum(_Function):  # type: ignore[misc]
    """A float32 tensor without contents, in whose place autograd adds up gradients; they are the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Use(_Function):  # type: ignore[misc]
    """The weight's values, whose gradient goes to the sum."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


# A head that runs many times in one forward, under FSDP2 (`torch.distributed.fsdp.fully_shard`).
#
# FSDP sees a forward by hooks on its modules: behind the backward of each, it shares out the gradients and frees the
# weights. accelerate puts the last norm and the head into one group, and a group counts as run when each of its modules
# has run once. Of a head that runs once for every slice of a text, FSDP would so free the weights, and share out the
# gradients, behind the first slice that comes back, while others still need them: gradients would be missing, or the
# process would end in memory that is no longer there. Here it sees one run of the head, the model's own.


_FSDP = "torch.distributed.fsdp"


def sharded_beside(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 shards and that are neither in the decoder nor around it: the head's."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    inside = set(decoder.modules())
    return [
        part
        for part in model.modules()
        if isinstance(part, FSDPModule)
        and part not in inside
        and not any(child is decoder for child in part.modules())
    ]


@contextlib.contextmanager
def held_whole(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block these modules have their whole weights, and FSDP does not see them run.

    Args:
        parts: As `sharded_beside` gives them.
    """
    with contextlib.ExitStack() as stack:
        for part in parts:
            sharded: Any = part
            sharded.unshard()
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(part, name)
                others = type(hooks)((n, hook) for n, hook in hooks.items() if not _of_fsdp(hook))
                setattr(part, name, others)
                stack.callback(setattr, part, name, hooks)
            stack.callback(part.register_forward_pre_hook(_in_own_precision).remove)
        yield


def _of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_FSDP)


def _in_own_precision(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What FSDP's own hook does with mixed precision: whole weights may be narrower than the hidden states."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    return tuple(
        value.to(dtype)
        if dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in inputs
    )


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
