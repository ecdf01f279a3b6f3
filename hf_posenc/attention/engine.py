"""The one entry of the engine, and the table that chooses the path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_posenc.attention import decode, prefill
from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact
from hf_posenc.attention.kernels import decode as triton_decode

Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        name: For reports.
        accepts: True if it computes this call, exactly.
        run: Computes it: output of shape (batch, heads, queries, value_dim), and weights where requested.
    """

    name: str
    accepts: Callable[[Call, Encoding], bool]
    run: Callable[[Call, Encoding], Result]


BACKENDS: tuple[Backend, ...] = (
    Backend("triton decode", triton_decode.accepts, triton_decode.run),
    Backend("prefill", prefill.accepts, prefill.prefill),
    Backend("few", decode.accepts_few, decode.few),
    Backend("moving", decode.accepts_moving, decode.moving),
    Backend("exact", lambda call, encoding: True, exact),
)
"""Tried in this order; a faster kernel joins ahead of the general path."""


def choose(call: Call, encoding: Encoding) -> Backend:
    """Return the first backend that computes a call."""
    return next(backend for backend in BACKENDS if backend.accepts(call, encoding))


def attend(call: Call, encoding: Encoding) -> Result:
    """Compute attention with an encoding.

    Returns:
        The output, shape (batch, heads, queries, value_dim), and the attention weights, shape (batch, heads,
        queries, keys), where they are requested.
    """
    return choose(call, encoding).run(call, encoding)
