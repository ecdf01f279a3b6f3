"""The one entry of the engine, and the table that chooses who computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_posenc.attention import call as moving
from hf_posenc.attention import few, prefill
from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact

Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        name: For reports.
        accepts: Whether it can compute this call, exactly.
        run: Computes it: output of shape (batch, heads, queries, value_dim), and weights where asked for.
    """

    name: str
    accepts: Callable[[Call, Encoding], bool]
    run: Callable[[Call, Encoding], Result]


BACKENDS: tuple[Backend, ...] = (
    Backend("prefill", prefill.accepts, prefill.prefill),
    Backend("few", few.accepts, few.few),
    Backend("moving", moving.accepts, moving.step),
    Backend("exact", lambda call, encoding: True, exact),
)
"""Tried in this order; a faster kernel joins ahead of the general path."""


def choose(call: Call, encoding: Encoding) -> Backend:
    """The first backend that can compute a call."""
    return next(backend for backend in BACKENDS if backend.accepts(call, encoding))


def attend(call: Call, encoding: Encoding) -> Result:
    """Attention with an encoding.

    Returns:
        The output, shape (batch, heads, queries, value_dim), and the attention weights, shape (batch, heads,
        queries, keys), where they are asked for.
    """
    return choose(call, encoding).run(call, encoding)
