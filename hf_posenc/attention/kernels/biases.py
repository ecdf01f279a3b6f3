"""Biases as kernels read them: a closed form or a table, and trained parameters as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.toeplitz import LEAST
from hf_posenc.methods import T5, ALiBi, DistanceBias, KerpleLog, KerplePower

KINDS = ("alibi", "kerple_log", "kerple_power", "buckets", "table")
"""`-a d`, `-a ln(1 + b d)`, `-a d^b`, `table[index[d]]` and `table[d]` of a distance d."""


class Operands(NamedTuple):
    """A bias in the form of a kernel.

    Attributes:
        kind: One of `KINDS`; empty: no bias.
        first: The a of each head, (heads,); or a table (heads, entries).
        second: The b of each head; or the entry of each distance, int32. Beyond its end, and beyond that of a table
            without it, all distances are alike.
    """

    kind: str = ""
    first: Tensor | None = None
    second: Tensor | None = None

    @property
    def distances(self) -> int:
        """The number of distances that a table tells apart; 1 for closed forms."""
        entries = self.second if self.kind == "buckets" else self.first
        return 1 if entries is None else entries.shape[-1]


def operands_of(
    encoding: Encoding, queries: int, keys: int, device: torch.device
) -> Operands | None:
    """Return the bias of an encoding for a call of that size; `None` where it has neither form.

    A table by distance ends with the keys. Keys that outnumber the queries are a cache, whose positions have no gaps.
    That of a method with parameters is computed for the call, and passes gradients on to them; it would cost a step of
    a generation, with `queries`, more than its attention, and is not given there.
    """
    method, heads, parameters = encoding.bias, encoding.all_heads, encoding.parameters or {}
    own = encoding.own
    if method is None:
        return Operands()
    if _is_line(method):
        slopes = _kept(encoding, device, 1, lambda _: own(method.slopes(heads)).float())
        return Operands("alibi", slopes)
    if type(method) in (KerpleLog, KerplePower):
        return Operands(method.name, own(parameters["r1"]), own(parameters["r2"]))
    if type(method) is T5:
        size = 2 * math.ceil(method.max_distance * method.scale)
        index = _kept(encoding, device, size, lambda d: method.bucket(d).int())
        return Operands("buckets", own(parameters["table"].T), index)
    if not has_table(encoding) or (queries and parameters) or keys <= queries:
        return None
    assert isinstance(method, DistanceBias)
    if parameters:
        distance = torch.arange(keys, device=device, dtype=torch.float32)
        return Operands("table", own(method.bias(distance, heads, parameters)).clamp_min(LEAST))
    size = max(1024, 1 << (keys - 1).bit_length())  # serves the following steps too
    table = _kept(
        encoding, device, size, lambda d: own(method.bias(d.float(), heads, {})).clamp_min(LEAST)
    )
    return Operands("table", table)


def has_table(encoding: Encoding) -> bool:
    """True if a bias is read from a table by distance."""
    method, closed = encoding.bias, (KerpleLog, KerplePower, T5)
    closed_form = _is_line(method) or type(method) in closed
    return isinstance(method, DistanceBias) and not method.of_query and not closed_form


def _is_line(method: object) -> TypeGuard[ALiBi]:
    """Return whether a bias is ALiBi's line, also with slopes of a class of its own."""
    return isinstance(method, ALiBi) and method.line


def _kept(
    encoding: Encoding, device: torch.device, size: int, make: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute the biases of so many distances once, and keep them on the plan, where a traced graph finds them too."""
    name = f"_bias of {size} on {device}"
    found: Tensor | None = getattr(encoding.plan, name, None)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # a training step may read it later
            found = make(torch.arange(size)).contiguous().to(device)
        if not torch.compiler.is_compiling():
            setattr(encoding.plan, name, found)
    return found
