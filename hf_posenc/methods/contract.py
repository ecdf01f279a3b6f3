"""The contract of the hooks that a method overrides, checked on small probes while a model is patched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import Band, GrowingBands, RotaryBands
from hf_posenc.methods.base import Growing, Length, Method, RopeScaling, TableFilter, count
from hf_posenc.methods.bias import DistanceBias, RelativeKeys
from hf_posenc.methods.queries_keys import XPos
from hf_posenc.methods.tables import Sinusoidal, TableMethod
from hf_posenc.rope import RopeSpec

_FLOATS = (torch.float32, torch.float64)
_PLACES = (torch.int64, torch.int32, torch.float64)


def called(method: Method, hook: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a hook returns.

    Raises:
        PosencError: The hook raised an error of another kind, which the message names.
    """
    try:
        return function(*arguments)
    except PosencError:
        raise
    except NotImplementedError as error:
        raise PosencError(f"{method.name}: {hook} is needed, and not defined.") from error
    except Exception as error:
        raise PosencError(
            f"{method.name}: {hook} raised {type(error).__name__}: {error}"
        ) from error


def require(method: Method, hook: str, found: Any, needed: str, valid: bool) -> None:
    """Raise for a result of a hook that is not valid, with what is needed."""
    if not valid:
        raise PosencError(
            f"{method.name}: {hook} returned {_shown(found)}. It has to return {needed}."
        )


def require_tensor(
    method: Method,
    hook: str,
    found: Any,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype] = _FLOATS,
    least: float = -math.inf,
) -> None:
    """Raise for a result of a hook that is no tensor of this shape and of one of these dtypes, finite, at least so big.

    It has to lie on the CPU, where the arguments of a probe do.
    """
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    bound = "" if math.isinf(least) else f" of at least {least:g}"
    needed = f"finite numbers{bound}, {names}, of shape {tuple(shape)}, on the device of its input"
    valid = isinstance(found, Tensor) and found.device.type == "cpu" and found.dtype in dtypes
    valid = valid and found.shape == tuple(shape)
    require(
        method, hook, found, needed, valid and bool((found.isfinite() & (found >= least)).all())
    )


def _shown(value: Any) -> str:
    """Return a short description of a result: of a tensor its form, and what is not finite or else the range."""
    if not isinstance(value, Tensor):
        return f"{value!r:.80}"
    kind = str(value.dtype).removeprefix("torch.")
    text = f"{kind} of shape {tuple(value.shape)} on {value.device.type}"
    if value.device.type == "meta" or value.is_complex():
        return text
    odd = value[~value.isfinite()].tolist()
    if odd or not value.numel():
        return f"{text} with {', '.join(map(str, odd[:3])) or 'no numbers'}"
    return f"{text} from {value.amin().item():g} to {value.amax().item():g}"


def _is_positive(value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    single = isinstance(value, Tensor) and not value.dim() and value.device.type == "cpu"
    return (plain or single) and math.isfinite(value) and value > 0


@torch.no_grad()
def check_frequencies(method: RopeScaling, rope: RopeSpec) -> RopeSpec:
    """Check the hooks of a frequency method on the table that it starts from, and return that table.

    Raises:
        PosencError: A hook raised an error, or returned a result that cannot be meant.
    """
    trained, own = rope.original_max_position_embeddings, rope.default_inv_freq()
    lengths: list[Length] = [None]
    if method.length_dependent:
        lengths += [trained, 4 * trained, torch.tensor(4 * trained)]
    for length in lengths:
        for hook in ("scale_at", "cos_sin_factor"):
            number = called(method, hook, getattr(method, hook), rope, length)
            require(method, hook, number, "a finite number above 0", _is_positive(number))
        table, stopped = own, own == 0
        every: list[RopeScaling] = [method, *method.filters]
        for each in every:
            if isinstance(each, TableFilter):
                hook, table = "filtered", called(each, "filtered", each.filtered, table, rope)
            else:
                hook, table = "inv_freq", called(each, "inv_freq", each.inv_freq, rope, length)
            require_tensor(each, hook, table, own.shape, (torch.float64,), 0)
            held = table.float()  # in a model
            stopped = stopped | (held == 0) if each.stops_pairs else stopped
            needed = "numbers above 0 in float32, or the class sets stops_pairs = True"
            moving = bool((held.isfinite() & ((held > 0) | stopped)).all())
            require(each, hook, table, needed, moving)
    form = called(method, "rope_parameters", method.rope_parameters, rope)
    named = isinstance(form, dict) and isinstance(form.get("rope_type"), str)
    needed = 'None, or a dictionary with a "rope_type"'
    require(method, "rope_parameters", form, needed, form is None or named)
    return rope


@torch.no_grad()
def check_attention(
    method: Method, original: int, heads: int, key_heads: int, head_dim: int
) -> None:
    """Check the hooks of a method that computes attention.

    Args:
        method: The method.
        original: The original context length L, in tokens; 0 if there is none.
        heads: Query heads.
        key_heads: Key heads.
        head_dim: Width of a head, in features.

    Raises:
        PosencError: A hook raised an error, or returned a result that cannot be meant.
    """
    far = max(original, 1)
    m = torch.tensor([0, 1, 2, far - 1, far, 4 * far])
    factor = called(method, "query_factor", method.query_factor, m, original)
    if factor is not None:
        require_tensor(method, "query_factor", factor, m.shape, _FLOATS, 0)
    if isinstance(method, Growing):
        size = called(method, "bucket_size", method.bucket_size, original)
        require(method, "bucket_size", size, "a whole number of at least 1", count()["valid"](size))
    if isinstance(method, RotaryBands):
        _check_bands(method, called(method, "bands", method.bands, original), m)
    if isinstance(method, GrowingBands):
        for length in (far, 4 * far):
            bands = called(method, "bands", method.bands, original, length)
            _check_bands(method, bands, m[m < length])
    if isinstance(method, XPos):
        for hook in ("query_scale", "key_scale"):
            found = called(method, hook, getattr(method, hook), m[:3], 8, 0)
            require_tensor(method, hook, found, (3, 4), _FLOATS, 0)
    with torch.random.fork_rng(devices=[]):  # the draws of the layers are those of torch's own seed
        sizes = (heads, key_heads, head_dim, original)
        hook = "initial" if isinstance(method, DistanceBias | RelativeKeys) else "parameters_for"
        weights = called(method, hook, method.parameters_for, *sizes)
    require(method, hook, weights, "a dictionary of names and tensors", isinstance(weights, dict))
    for name, weight in weights.items():
        shape = weight.shape if isinstance(weight, Tensor) else ()
        require_tensor(method, f"{hook} ({name})", weight, shape, (torch.float32,))
    shared = called(method, "shared_parameters", lambda: tuple(method.shared_parameters))
    needed = f"names of its parameters ({', '.join(weights) or 'none'})"
    require(method, "shared_parameters", shared, needed, {*shared} <= {*weights})
    if isinstance(method, DistanceBias):
        _check_bias(method, m, heads, weights)
    if isinstance(method, RelativeKeys):
        distance = m.float()
        found = called(method, "relative", method.relative, distance, heads, head_dim, weights)
        rows = 1 if isinstance(found, Tensor) and found.shape[:1] == (1,) else heads
        require_tensor(method, "relative", found, (rows, len(m), head_dim))
        for hook in ("content_bias", "position_bias"):
            if (found := called(method, hook, getattr(method, hook), weights)) is not None:
                require_tensor(method, hook, found, (heads, head_dim))
        reach = called(method, "constant_from", method.constant_from)
        valid = reach is None or count(0)["valid"](reach)
        require(method, "constant_from", reach, "None, or a number of tokens", valid)


def _check_bands(method: RotaryBands | GrowingBands, bands: Any, m: Tensor) -> None:
    """Check bands, and their maps at positions of queries and keys that belong to them."""
    listed = isinstance(bands, tuple | list) and len(bands) > 0
    valid = listed and all(isinstance(band, Band) for band in bands)
    require(method, "bands", bands, "Band objects, at least one", valid)
    for number, band in enumerate(bands):
        queries = m + band.least * (band.chunk or 1)
        keys = m if band.keys is None else m[m < band.keys]
        for side, at in (("query_position", queries), ("key_position", keys)):
            hook = f"{side} of band {number}"
            found = called(method, hook, getattr(band, side), at)
            by_pair = getattr(method, "by_pair", False) and isinstance(found, Tensor)
            parts = found.shape[1:2] if by_pair else ()
            require_tensor(method, hook, found, (len(at), *parts), _PLACES)
    pairs = m[:, None], m[None]
    for one, other in itertools.combinations(bands, 2):
        both = one.contains(*pairs) & other.contains(*pairs) & (pairs[0] >= pairs[1])
        needed = "bands of which a pair is in one at most"
        require(method, "bands", bands, needed, not bool(both.any()))


def _check_bias(method: DistanceBias, m: Tensor, heads: int, weights: dict[str, Tensor]) -> None:
    """Check a bias, which may be -inf past distance 0, and the distance beyond which it is small."""
    distance, shape = m.float().view(2, 3), (heads, 2, 3)
    position = (distance.amax() + distance,) if method.of_query else ()
    found = called(method, "bias", method.bias, distance, heads, weights, *position)
    needed = f"a bias of shape {shape}, float32 or float64, finite at distance 0 and below inf"
    valid = isinstance(found, Tensor) and found.device.type == "cpu" and found.dtype in _FLOATS
    valid = valid and found.shape == shape and bool((found < math.inf).all())
    require(method, "bias", found, needed, valid and bool(found[:, 0, 0].isfinite().all()))
    reach = called(method, "horizon", method.horizon, torch.full((heads,), 64.0), heads, weights)
    valid = reach is None or (isinstance(reach, Tensor) and reach.shape == (heads,))
    valid = valid and (reach is None or bool((reach >= 0).all()))
    require(method, "horizon", reach, f"None, or distances, shape ({heads},)", valid)
    if reach is not None and not method.of_query:
        past = reach.float().clamp(max=2**24) * 1.01 + 1
        small = method.bias(past, heads, weights).diagonal() < -63.9
        needed = "distances beyond which the bias is below -drop"
        require(method, "horizon", reach, needed, bool((small | (reach > 2**24)).all()))


def check_table(method: TableMethod, trained: int, width: int, length: int) -> None:
    """Check the hooks of a method on a table of so many trained rows, for a new length in tokens.

    Raises:
        PosencError: A hook raised an error, or returned a result that cannot be meant.
    """
    called(method, "check", method.check, trained, length)
    length, width = min(length, 2 * trained), min(width, 64)  # for which there is memory and time
    if isinstance(method, Sinusoidal):
        angles = called(method, "angles", method.angles, (1.0, 0.1), length, 0)
        require_tensor(method, "angles", angles, (length, 2), (torch.float64,))
        return
    table = torch.arange(trained * width, dtype=torch.float64).sin().view(trained, width)
    rows = called(method, "rows", method.rows, table, length)
    require_tensor(method, "rows", rows, (length, width), (torch.float64,))
