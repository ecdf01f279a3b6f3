"""Places beside a rotary embedding from which a model gets positions, which a patch of the rotation would miss.

One forward over seven tokens shows that an ordinary model has none. Only where it does not are more experiments run.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from hf_posenc.errors import UnsupportedModelError, one_line
from hf_posenc.model.discovery import SinCosTable, Tables, adapter_of
from hf_posenc.model.sampled import Sample
from hf_posenc.model.unwrapping import is_sharded
from hf_posenc.seams import probes, traces
from hf_posenc.seams.inspection import (
    OUTSIDE,
    QUERIES,
    ROTARY,
    ROTARY_TABLE,
    SCALING,
    SINKS,
    UNKNOWN,
    Source,
    constant,
    inspect,
    silenced,
    sinks_of,
    unrotated,
)

_ROTATION = (ROTARY, ROTARY_TABLE, SINKS)  # sinks count keys, wherever these are

T = TypeVar("T")
_known = weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[str, Any]]]()
"""Findings about models, each with the modules and weights that the model had."""


def once(model: nn.Module, question: str, answer: Callable[[], T]) -> T:
    """Return what is found out about a model, once for the modules and weights that it has; no error is kept."""
    known, version = _known.get(model), version_of(model)
    if known is None or known[0] != version:
        _known[model] = known = version, {}
    if question not in known[1]:
        known[1][question] = answer()
    found: T = known[1][question]
    return found


def refuse_hidden(model: nn.Module, tables: Tables, method: str, sample: Sample) -> None:
    """Raise if an unpatched model gets positions from more than its rotation, and from no recurrence or convolution.

    Only where the blocks of a sample show something is the whole model tried. It is not tried if its weights are not
    all in this process, nor filled in by the sample, or if it does not run on tokens alone.
    """
    lacking = not sample.empty and any(each.is_meta for each in model.parameters())
    if lacking or is_sharded(model):
        return

    def check() -> None:
        if found := _found(model, tables, sample):
            raise UnsupportedModelError(
                f"{type(model).__name__} gets positions from more than its rotary embedding: "
                f"{', '.join(map(str, found))}. {method} is for models with a rotation alone. Nothing was changed. "
                "`hf-posenc inspect MODEL`, or inspect_positions(model), lists every place. Take this one out of the "
                "model first; or if it is to stay, name its kind in an adapter (`beside`, see CONTRIBUTING.md)."
            )

    once(model, "hidden", check)


def _found(model: nn.Module, tables: Tables, sample: Sample) -> list[Source]:
    """Return the places of a whole model whose sample has something unexplained."""
    filled = sample.only() if sample.empty else contextlib.nullcontext()
    # Parts that torch.compile has wrapped in place are not compiled for seven tokens.
    with torch.compiler.set_stance("force_eager"):
        # Whatever a model raises that needs more than tokens, or blocks that need what others leave for them.
        with contextlib.suppress(Exception), sample.only(), _still(model, tables):
            if sample.twins and not _unexplained(model):
                return []
        with contextlib.suppress(Exception), filled:
            return _beside(model, tables)
    return []


def version_of(model: nn.Module) -> tuple[Any, ...]:
    """Return what differs once modules, hooks or weights have changed."""
    modules = (
        (id(each), id(vars(each).get("forward")), *each._forward_hooks, *each._forward_pre_hooks)
        for each in model.modules()
    )
    tensors = (*model.parameters(), *model.buffers())
    return *modules, *((id(each), each.is_inference() or each._version) for each in tensors)


def _beside(model: nn.Module, tables: Tables) -> list[Source]:
    """Return the places that a patch of the rotation must not leave as they are."""
    with _still(model, tables):
        left = _unexplained(model)
    if not left:
        return []
    try:
        positions = inspect(model)
    except UnsupportedModelError as error:
        warnings.warn(
            f"{type(model).__name__} may get positions from more than its rotary embedding, and hf_posenc could not "
            f"find out ({one_line(error)}). The patch leaves the rest as it is.",
            stacklevel=8,
        )
        return []
    found = [each for each in positions.sources if each.kind not in _ROTATION]
    # Its other experiments add up rounding from block to block, which half precision has enough of.
    found += [
        each
        for each in positions.hidden
        if any(_within(one, two) or _within(two, one) for one in left for two in each.places)
    ]
    named = [place for each in positions.rest for place in each.places]
    if not found and not any(each.kind in (SCALING, QUERIES) for each in positions.rest):
        for path, size in left.items():
            if size > probes.tolerance(model) and not any(_within(path, place) for place in named):
                kind = type(model.get_submodule(path)).__name__ if path else OUTSIDE
                found.append(Source(UNKNOWN, (path,), kind))
    config: Any = model.config
    allowed = adapter_of(model).beside.get(config.get_text_config(decoder=True).model_type, ())
    return [each for each in found if each.kind not in allowed]


def _within(path: str, place: str) -> bool:
    """Return whether a path is or lies in a place; `""`, what is outside of the blocks, lies in itself alone."""
    return path == place or bool(place and path.startswith(f"{place}."))


@contextlib.contextmanager
def _still(model: nn.Module, tables: Tables) -> Iterator[None]:
    """Let every token stand at position 0 of the rotation."""
    precomputed = [(table.tensor(), 0) for table in tables if isinstance(table, SinCosTable)]
    with unrotated(model), constant(model, precomputed):
        yield


def _unexplained(model: nn.Module) -> dict[str, float]:
    """Return how far the innermost modules are moved that read order, or count keys, for no known reason.

    Known are recurrences and convolutions, which mix rows without attention weights, and attention sinks, which count
    keys and do not see their order. `""` is what happens outside of the blocks.
    """
    limit = probes.sharp_tolerance(model)
    moved, rows = probes.twice(model), _rows_that_differ(model)
    if paths := {*probes.innermost(moved, limit), *filter(None, rows)}:
        order = probes.relative(model, paths=paths)
        weighing = traces.weighing(model, paths)
        mixing = {path for path in paths if order.get(path, 0.0) > limit}
        known = mixing - weighing
        sinks = sinks_of(model, weighing - mixing)
        if sinks:  # rows that are read by position are none
            reads = traces.rows_read(model, probes.ordinary_tokens(model, probes.TOKENS))
            sinks = [] if reads.keys() & {*sinks[0][0].places} else sinks
        with silenced(sinks):
            moved = probes.twice(model, mended=known)
            rows = _rows_that_differ(model)
        rows = {
            path: size
            for path, size in rows.items()
            if not any(_within(path, one) or _within(one, path) for one in known)
        }
    outside = [""] if moved[""] > limit else []
    return {path: moved[path] for path in (*outside, *probes.innermost(moved, limit))} | rows


def _rows_that_differ(model: nn.Module) -> dict[str, float]:
    """Return how far outputs for one repeated token differ by position, by innermost module; `""` for no module."""
    moved, limit = probes.absolute(model), probes.tolerance(model)
    whole = moved.pop("")
    inner = {path: moved[path] for path in probes.innermost(moved, limit)}
    return inner or ({"": whole} if whole > limit else {})
