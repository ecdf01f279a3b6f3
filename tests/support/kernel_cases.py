"""Calls of attention for the kernels, and their float64 references, pair by pair from the papers.

The kernels run in Triton's interpreter, which needs no GPU; where there is one, they run on it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import Call, Mask
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.rotation import Layout, Rotation
from hf_posenc.methods import get_method
from hf_posenc.model.parameters import MethodParameters
from tests.support import attention_references as naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest error over the largest number: sums in float32; for halves, the roundings of keys, weights and output."""
POISON = 1e4
"""A value where no query may look: it shows in every result that has read it."""


STEP = 1e-5
"""Of central differences: their error is its square."""
HIDDEN = -1e30
"""A score whose exponential is 0, with a gradient even in a row that sees nothing."""


RUNS = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
"""True if kernels can run; Triton reads the variable when it is imported."""


def teach_bfloat16() -> None:
    """Teach the interpreter bfloat16 as GPUs have it.

    It holds it as unsigned integers, which it multiplies as they are, and cuts off what a cast does not keep.
    """
    if DEVICE == "cuda":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32).reshape(np.shape(data))
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even
        return nearest.astype(np.uint16)

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    interpreter._convert_float = rounded
    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot
    builder.create_dot = lambda self, a, b, *rest: multiply(self, widened(a), widened(b), *rest)


@dataclass(frozen=True)
class Written(Mask):
    """A mask as a tensor, (batch, 1, queries, keys), bool."""

    visible: Tensor

    def rows(self, start: int, stop: int) -> Tensor | None:
        return self.visible[:, :, start:stop]


HALVES = Layout(0, 16, interleaved=False)
"""The rotated features by default: all, in the order of Llama."""


@dataclass(frozen=True)
class Case:
    """A step of a generation, or a whole text if `queries` is `length`.

    Attributes:
        method: The method's name; a bias or rotary bands.
        knobs: Its options.
        length: Tokens of the text, the queries among them.
        slots: Empty places behind the text, as a static cache has.
        padding: Of the first places of every row of the batch, those before its text.
        masked: False: no mask is given, and everything is visible.
        layout: The rotated features.
        original: The original context length.
    """

    method: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    queries: int = 1
    length: int = 70
    slots: int = 0
    padding: tuple[int, ...] = (0,)
    masked: bool = True
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    layout: Layout = HALVES
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sinks: bool = False
    original: int = 32

    def __str__(self) -> str:
        """Name the case by what differs from the defaults."""
        plain = Case("")
        given = {n: v for n, v in vars(self).items() if v != getattr(plain, n)}
        return "-".join(f"{value}" for value in given.values()).replace(" ", "")

    def encoding(self, **more: Any) -> Encoding:
        """Return the method in force in a layer, with parameters away from their initial values."""
        method = get_method(self.method)(**self.knobs)
        encoding = Encoding.of([method], self.original)
        inv_freq = 100.0 ** -torch.linspace(0, 1, self.layout.dim // 2)
        rotation = Rotation(inv_freq.to(DEVICE), self.layout)
        generator = torch.Generator().manual_seed(1)
        initial = method.parameters_for(self.heads, self.key_heads, self.head_dim, self.original)
        drawn = {n: 0.1 + torch.rand(v.shape, generator=generator) for n, v in initial.items()}
        parameters: Any = MethodParameters(drawn).requires_grad_(False).to(DEVICE)  # as in a model
        return replace(encoding, heads=self.heads, rotation=rotation, parameters=parameters, **more)

    def made(self) -> tuple[Call, Encoding]:
        encoding = self.encoding()
        return self.call(encoding), encoding

    def call(self, encoding: Encoding) -> Call:
        """Return the call: rotated queries and keys, and poison wherever nothing is visible."""
        generator = torch.Generator().manual_seed(2)
        place = torch.arange(self.length + self.slots)
        first = torch.tensor(self.padding)[:, None]
        position = place - first
        queries = place[self.length - self.queries : self.length]
        visible = (place <= queries[:, None]) & (place >= first)[:, None]
        tensors = [
            torch.randn(len(first), heads, length, size, generator=generator, dtype=torch.float64)
            for heads, length, size in (
                (self.heads, self.queries, self.head_dim),
                (self.key_heads, len(place), self.head_dim),
                (self.key_heads, len(place), self.value_dim),
            )
        ]
        seen = visible.any(1)[:, None, :, None]
        for x in tensors[1:]:
            x.masked_fill_(~seen, POISON)
        # In the memory layout of transformers: (batch, length, heads, features).
        query, key, value = (
            x.transpose(1, 2).to(DEVICE, self.dtype).contiguous().transpose(1, 2) for x in tensors
        )
        query_position = position[:, queries].to(DEVICE)
        return Call(
            query,
            key,
            value,
            query_position,
            position.masked_fill(~visible.any(1), -5).to(DEVICE),
            Written(visible[:, None].to(DEVICE)) if self.masked else Mask(),
            scaling=0.3,
            softcap=self.softcap,
            sinks=torch.randn(self.heads, generator=generator).to(DEVICE) if self.sinks else None,
        )


def reference(case: Case, call: Call, encoding: Encoding) -> Tensor:
    """Compute the output of a call in float64: every pair by the papers' relative position and bias."""
    query, key, value = (x.double().cpu() for x in (call.query, call.key, call.value))
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    m, n = call.query_position.cpu(), call.key_position.cpu()
    visible = call.mask.rows(0, case.queries)
    shape = (len(query), 1, query.shape[2], key.shape[2])
    visible = torch.ones(shape, dtype=torch.bool) if visible is None else visible.cpu()
    longest = int(m.max()) + 1
    if case.method in naive.BANDS:
        knobs = {**naive.BANDS[case.method].defaults(case.original), **case.knobs}
        relative = naive.position_map(case.method, longest, **knobs)
        back = [-encoding.cached_position(p).double() for p in (m, n)]
        plain = _turned(encoding, query, back[0]), _turned(encoding, key, back[1])
        rows = [relative[m[b]][:, n[b].clamp(0, longest - 1)] for b in range(len(m))]
        distance = torch.stack(rows)
        visible = visible & ~distance.isnan()[:, None]
        scores = _scores(encoding, *plain, distance.nan_to_num())
    else:
        scores = query @ key.mT
    scores = scores * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if case.method in naive.BIAS:
        parameters = encoding.parameters or {}
        values = {**case.knobs, **naive.as_numbers({name: parameters[name] for name in parameters})}
        matrix = naive.bias_matrix(case.method, longest, case.heads, **values)
        bias = [matrix[:, m[b]][:, :, n[b].clamp(0, longest - 1)] for b in range(len(m))]
        scores = scores + torch.stack(bias)
    scores = scores.masked_fill(~visible, HIDDEN)
    if call.sinks is not None:
        sinks = call.sinks.double().cpu().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]] * visible  # a row may see nothing
    return weights @ value.masked_fill(value == POISON, 0.0)


def reference_gradients(
    case: Case, call: Call, encoding: Encoding, weights: Tensor
) -> dict[str, Tensor]:
    """Compute the gradients of `(output * weights).sum()` in float64, by the name of the tensor or parameter.

    Those of parameters are central differences, since the papers' biases are computed from plain numbers. No two heads
    share an entry, and so the entries of all heads are moved at once.
    """
    inputs: dict[str, Any] = {
        name: getattr(call, name).detach().double().requires_grad_()
        for name in ("query", "key", "value")
    }
    weights = weights.double().cpu()
    out = reference(case, replace(call, **inputs), encoding)
    found = dict(zip(inputs, torch.autograd.grad(out, [*inputs.values()], weights), strict=True))
    parameters: Any = encoding.parameters
    values = {name: parameters[name].detach().double() for name in parameters}
    for name, value in values.items():
        found[name] = torch.empty_like(value, device="cpu")
        # A parameter has the shape (entries, heads) or (heads,).
        for entry in range(len(value)) if value.dim() > 1 else [slice(None)]:
            ends = []
            for step in (-STEP, STEP):
                moved = value.clone()
                moved[entry] += step
                other = encoding.with_parameters({**values, name: moved})
                ends.append((reference(case, call, other) * weights).sum((0, 2, 3)))
            found[name][entry] = (ends[1] - ends[0]) / (2 * STEP)
    return found


def _turned(encoding: Encoding, x: Tensor, positions: Tensor) -> Tensor:
    assert encoding.rotation is not None
    return encoding.rotation.turn(x, positions, encoding.rotation.inv_freq.double().cpu())


def _scores(encoding: Encoding, query: Tensor, key: Tensor, relative: Tensor) -> Tensor:
    """`q R(-relative) k` for every pair, from vectors that are not rotated."""
    rotation = encoding.rotation
    assert rotation is not None
    layout = rotation.layout
    rest = [i for i in range(query.shape[-1]) if not layout.start <= i < layout.start + layout.dim]
    scores = query[..., rest] @ key[..., rest].mT
    (a, b), (c, d) = (rotation.pairs(x, torch.float64) for x in (query, key))
    for i, frequency in enumerate(rotation.inv_freq.double().tolist()):
        angle = relative[:, None] * frequency * layout.sign
        along = a[..., i, None] * c[..., None, :, i] + b[..., i, None] * d[..., None, :, i]
        across = a[..., i, None] * d[..., None, :, i] - b[..., i, None] * c[..., None, :, i]
        scores = scores + along * angle.cos() + across * angle.sin()
    return scores


def error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest number."""
    expected = expected.cpu()
    return float((got.double().cpu() - expected).abs().max() / expected.abs().max())
