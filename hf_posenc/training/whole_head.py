"""A head that runs many times in one forward, under FSDP2 (`torch.distributed.fsdp.fully_shard`).

FSDP sees a forward by hooks on its modules: behind the backward of each, it shares out the gradients and frees the
weights. accelerate puts the last norm and the head into one group, and a group counts as run when each of its modules
has run once. Of a head that runs once for every slice of a text, FSDP would so free the weights, and share out the
gradients, behind the first slice that comes back, while others still need them: gradients would be missing, or the
process would end in memory that is no longer there. Here it sees one run of the head, the model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
