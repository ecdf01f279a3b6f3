"""One way to compute attention, and the calls for which it is checked as one.

It is checked before its first use on a device: in a process of its own, then here, against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.kernels import trains

Result = tuple[Tensor, Tensor | None]
CAPPED = ", soft cap"
"""Behind a kind, of calls whose scores have one: other kernels are compiled for them."""


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
class Case:
    """One backend and the calls for which it is checked, and struck, as one; beside them counts the device.

    Attributes:
        backend: Its name.
        kind: `Encoding.kind`, and `CAPPED` where scores have a soft cap.
        dtype: Name of `Call.dtype` in torch.
        head_dim: Features of a head.
        gradients: True if a backward follows.
    """

    backend: str
    kind: str
    dtype: str
    head_dim: int
    gradients: bool = False

    def __str__(self) -> str:
        kind = self.kind + " with backward" * self.gradients
        return f"{self.backend}, {kind}, {self.dtype}, head dimension {self.head_dim}"


def case_of(backend: Backend, call: Call, encoding: Encoding) -> Case:
    """Return the case of a call."""
    dtype = str(call.dtype).removeprefix("torch.")
    kind = encoding.kind if call.softcap is None else encoding.kind + CAPPED
    return Case(backend.name, kind, dtype, call.query.shape[-1], trains(call, encoding))
