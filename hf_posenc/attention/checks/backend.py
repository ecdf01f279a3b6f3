"""One way to compute attention, and the calls for which it is checked as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding

Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        name: For reports.
        accepts: True if it computes this call, exactly.
        run: Computes it: output of shape (batch, heads, queries, value_dim), and weights where requested.
        proven: True if tests have run it; else it is checked on the device before its first use.
        fused: Its scores never are in memory.
        may_crash: Its failure may end the process, or break the device for it; so another process checks it first.
    """

    name: str
    accepts: Callable[[Call, Encoding], bool]
    run: Callable[[Call, Encoding], Result]
    proven: bool = True
    may_crash: bool = False
    fused: bool = False


@dataclass(frozen=True)
class Key:
    """The calls for which a backend is checked, and struck, as one.

    Attributes:
        device: The device of the queries.
        dtype: `Call.dtype`.
        head_dim: Their features.
        kind: `Encoding.kind`.
        gradients: True if a backward follows.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    kind: str
    gradients: bool = False


def key_of(call: Call, encoding: Encoding) -> Key:
    """Return the key of a call."""
    query, trained = call.query, encoding.parameters or {}
    leaves = (query, call.key, call.value, *(trained[name] for name in trained))
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    return Key(query.device, call.dtype, query.shape[-1], encoding.kind, gradients)
