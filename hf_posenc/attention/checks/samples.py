"""Small encodings of every method, and of every kind of computation, to check backends with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from hf_posenc.attention.call import Call, Mask
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.rotation import Layout, Rotation
from hf_posenc.errors import PosencError
from hf_posenc.methods import METHODS, Method, seam_of
from hf_posenc.rope import RopeSpec

ORIGINAL, THETA, SCALE = 128, 10000.0, 4.0
HEADS, KEY_HEADS = 8, 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (128, 64, 256)
"""The usual ones, the most usual first."""


def methods() -> Iterator[Method]:
    """Yield every method that the engine computes, with its defaults where it has any."""
    for method in METHODS:
        try:
            built = method.from_options(**({"scale": SCALE} if method.takes_scale() else {}))
        except PosencError:  # a knob without a default: a method of its kind stands for it
            continue
        if seam_of(built) in ("attention", "bias"):
            yield built


@functools.cache
def kinds() -> dict[str, Method | None]:
    """Return the first method of every kind of computation; `None`: the model's own positions."""
    found: dict[str, Method | None] = {"causal": None}
    for method in methods():
        found.setdefault(Encoding.of([method], ORIGINAL).kind, method)
    return found


def encoding_of(
    method: Method | None,
    head_dim: int,
    device: torch.device,
    original: int = ORIGINAL,
    heads: tuple[int, int] = (HEADS, KEY_HEADS),
) -> Encoding:
    """Return the encoding of a method in a layer, all of whose features are rotated; heads of queries and of keys.

    Trained parameters are moved off their initial values, at which some methods compute nothing.
    """
    spec = RopeSpec(head_dim, THETA, original)
    table = spec.default_inv_freq().float().to(device)
    rotation = Rotation(table, Layout(0, head_dim, interleaved=False))
    encoding = Encoding.of([] if method is None else [method], original)
    parameters = {}
    if method is not None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # that of the CPU alone
            initial = method.parameters_for(*heads, head_dim, original)
            parameters = {name: (x + 0.1 * torch.rand(x.shape)).to(device) for name, x in initial.items()}  # fmt: skip
    return dataclasses.replace(
        encoding, heads=heads[0], rotation=rotation, spec=spec, parameters=parameters
    )


def call_of(dtype: torch.dtype, head_dim: int, device: torch.device) -> Call:
    """Return the outline of a call: heads, dtype and device, of which a comparison makes its problem."""

    def empty(heads: int) -> torch.Tensor:
        return torch.zeros(1, heads, 1, head_dim, dtype=dtype, device=device)

    position = torch.zeros(1, 1, dtype=torch.int64, device=device)
    key = empty(KEY_HEADS)
    return Call(empty(HEADS), key, key, position, position, Mask(), head_dim**-0.5)
