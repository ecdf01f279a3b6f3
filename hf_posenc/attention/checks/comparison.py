"""A backend against the general path in float64: on a small problem like a call, or on a sample of every kind."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import Call, Mask, Run
from hf_posenc.attention.checks import CAPPED, Backend, Case
from hf_posenc.attention.encoding import BandPlan, Encoding
from hf_posenc.attention.exact import exact
from hf_posenc.attention.rotation import Layout, Rotation
from hf_posenc.errors import PosencError
from hf_posenc.methods import METHODS, Method, seam_of
from hf_posenc.rope import RopeSpec

ROWS, KEYS = 129, 385
"""Queries of the problem where a backend takes so many, and keys beyond the last border between two bands."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Largest root mean square of the error, relative to that of the result: for halves about 1.5 roundings. A window that
is wrong by one of N keys changes the result by about `N ** -0.5`, which is more."""
ORIGINAL, THETA, SCALE = 128, 10000.0, 4.0
HEADS, KEY_HEADS = 8, 2
SOFTCAP = 2.0  # scores are about 1, and noticeably capped
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (128, 64, 256)
"""The usual ones, the most usual first."""
INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class Comparison:
    """The findings about a backend for one key.

    Attributes:
        errors: By the name of a result, the root mean square of its error relative to that of the result.
        bound: The largest that is accepted.
        reason: The reason not to use the backend; `None`: it may be used.
        decided: False if the reason is not the backend's: there was no memory for the problem.
        rows: Queries of the problem; 0 if it gave no result.
        raised: True if it raised an error, after which the device may be broken for the process.
    """

    errors: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    reason: str | None = None
    decided: bool = True
    rows: int = 0
    raised: bool = False


def rows_of(backend: Backend, call: Call, encoding: Encoding, *, gradients: bool = False) -> int:
    """Return the queries of the problem of a check, `ROWS` or those of a step; 0: the backend takes none."""
    # Steps of a generation have backends that take a few queries alone.
    for rows in (ROWS, min(ROWS, call.query.shape[2])):
        if backend.accepts(problem(call, encoding, rows, gradients, drawn=False), encoding):
            return rows
    return 0


def compare(backend: Backend, call: Call, encoding: Encoding, *, gradients: bool) -> Comparison:
    """Compare a backend with the general path in float64, on a problem like a call.

    The problem has the call's encoding, heads and device, an offset, a row with padding on the left and, with
    `gradients`, a backward, of trained parameters too. A backend for whole texts is given one alone besides, for which
    operators have another form.
    """
    device, bound = call.query.device, BOUNDS[call.dtype]
    errors: dict[str, float] = {}
    rows = 0
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(gradients),
            torch.autocast(device.type, enabled=False),
        ):
            if trained := encoding.parameters:  # copies, so that no gradient reaches the model
                copies = {name: _leaf(trained[name].clone(), gradients) for name in trained}
                encoding = encoding.with_parameters(copies)
            rows = rows_of(backend, call, encoding, gradients=gradients)
            if not rows:
                return Comparison(reason="it does not compute the problem of its check")
            problems = [problem(call, encoding, rows, gradients)]
            if rows == ROWS:
                alone = problem(call, encoding, 0, gradients)
                problems += [alone] if backend.accepts(alone, encoding) else []
            for small in problems:
                double: dict[str, Any] = {
                    name: _leaf(getattr(small, name).double(), gradients) for name in INPUTS
                }
                results = _results(backend.run, small, encoding, gradients)
                expected = _results(exact, replace(small, **double), encoding, gradients)
                for (name, one), (_, other) in zip(results, expected, strict=True):
                    found = float((one.double() - other).norm() / other.norm())
                    before = errors.setdefault(name, 0.0)
                    if not (math.isnan(before) or found <= before):  # a NaN stays
                        errors[name] = found
    except torch.OutOfMemoryError:
        return Comparison(errors, bound, "no memory for its check", decided=False, rows=rows)
    except Exception as raised:
        text = f"it raises {type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
        return Comparison(errors, bound, text, rows=rows, raised=True)
    for name, error in errors.items():
        if not error <= bound:  # NaN too
            reason = f"its {name} differs by {error:.1e} from float64, of {bound:.1e} accepted"
            return Comparison(errors, bound, reason, rows=rows)
    return Comparison(errors, bound, rows=rows)


def check(backend: Backend, case: Case, device: torch.device) -> Comparison | None:
    """Compare a backend with the general path in float64 on a sample of a case; `None`: it computes no such calls."""
    if not offers(backend, case, device):
        return None
    call, encoding = _sample(case.kind, case.dtype, case.head_dim, device)
    return compare(backend, call, encoding, gradients=case.gradients)


def offers(backend: Backend, case: Case, device: torch.device) -> bool:
    """Return whether a backend computes such calls; nothing is computed for that."""
    call, encoding = _sample(case.kind, case.dtype, case.head_dim, device)
    with torch.set_grad_enabled(case.gradients):
        return rows_of(backend, call, encoding, gradients=case.gradients) > 0


@functools.lru_cache(maxsize=16)
def _sample(kind: str, dtype: str, head_dim: int, device: torch.device) -> tuple[Call, Encoding]:
    name, capped, _ = kind.partition(CAPPED)
    call = call_of(getattr(torch, dtype), head_dim, device)
    call = replace(call, softcap=SOFTCAP) if capped else call
    return call, encoding_of(kinds()[name], head_dim, device)


def problem(
    call: Call, encoding: Encoding, rows: int, gradients: bool, *, drawn: bool = True
) -> Call:
    """Return the problem of a comparison; with `drawn` false without values, which cost most of its time.

    Two sequences, of which the queries are the last `rows`; 0: a whole one alone.
    """
    plan, query = encoding.plan, call.query
    bands = plan.bands if isinstance(plan, BandPlan) else ()
    border = max(
        (max(band.least, band.below or 0) * (band.chunk or 1) for band in bands), default=0
    )
    keys, padding = border + KEYS, (0, 37) if rows else (0,)
    rows = rows or keys
    generator = torch.Generator(query.device).manual_seed(0)

    def normal(heads: int, length: int, features: int) -> Tensor:
        # In the memory layout of transformers.
        draw = functools.partial(torch.randn, generator=generator) if drawn else torch.empty
        return draw((len(padding), length, heads, features), device=query.device).transpose(1, 2)

    features = query.shape[-1]
    tensors = (
        normal(query.shape[1], rows, features) / (call.scaling * features**0.5),
        normal(call.key.shape[1], keys, features),
        normal(call.key.shape[1], keys, call.value.shape[-1]),
    )
    every = torch.arange(keys, device=query.device)
    positions = torch.stack([(every - count).clamp(min=0) for count in padding])
    rounded = (_leaf(x.to(call.dtype), gradients) for x in tensors)
    inputs: dict[str, Any] = dict(zip(INPUTS, rounded, strict=True))
    return replace(
        call,
        **inputs,
        query_position=positions[:, keys - rows :],
        key_position=positions,
        mask=_Padded(rows, keys, padding, query.device),
        lengths=None if call.lengths is None else (positions[:, -1] + 1).to(call.lengths),
        rotated=None,
    )


def _leaf(x: Tensor, gradients: bool) -> Tensor:
    return x.detach().requires_grad_(gradients)


def _results(
    run: Any, call: Call, encoding: Encoding, gradients: bool
) -> Iterator[tuple[str, Tensor]]:
    out = run(call, encoding)[0]
    yield "output", out.detach()
    if gradients:
        weights = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype, device=out.device)
        parameters = encoding.parameters or {}
        leaves = [*(getattr(call, name) for name in INPUTS), *(parameters[x] for x in parameters)]
        every = torch.autograd.grad(
            out, leaves, weights.expand_as(out), materialize_grads=True, allow_unused=True
        )
        for name, gradient in zip(INPUTS, every, strict=False):
            yield f"gradient of the {name}", gradient
        if parameters:
            # One vector, since that of a single parameter may be 0 (a bias that all keys share).
            flat = [gradient.double().flatten() for gradient in every[len(INPUTS) :]]
            yield "gradient of the parameters", torch.cat(flat)


class _Padded(Mask):
    """Causal sequences, with padding on the left."""

    def __init__(
        self, rows: int, keys: int, padding: tuple[int, ...], device: torch.device
    ) -> None:
        self._rows, self._keys, self._padding = rows, keys, padding
        self._first = torch.tensor(padding, device=device)

    def rows(self, start: int, stop: int) -> Tensor:
        own = torch.arange(self._keys - self._rows + start, self._keys - self._rows + stop)
        every = torch.arange(self._keys, device=self._first.device)
        causal = every <= own.to(every.device)[:, None]
        return (causal & (every >= self._first[:, None, None]))[:, None]

    def seen(self) -> Tensor:
        return torch.arange(self._keys, device=self._first.device) >= self._first[:, None]

    def runs(self, positions: Tensor) -> tuple[Run, ...]:
        offset, whole = self._keys - self._rows, slice(None)
        return tuple(
            Run(slice(row, row + 1), whole, slice(first, self._keys), offset - first)
            for row, first in enumerate(self._padding)
        )


# Small encodings of every method, and of every kind of computation.


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
    return replace(encoding, heads=heads[0], rotation=rotation, spec=spec, parameters=parameters)


def call_of(dtype: torch.dtype, head_dim: int, device: torch.device) -> Call:
    """Return the outline of a call: heads, dtype and device, of which a comparison makes its problem."""

    def empty(heads: int) -> Tensor:
        return torch.zeros(1, heads, 1, head_dim, dtype=dtype, device=device)

    position = torch.zeros(1, 1, dtype=torch.int64, device=device)
    key = empty(KEY_HEADS)
    return Call(empty(HEADS), key, key, position, position, Mask(), head_dim**-0.5)
