"""Which rotary tables a choice of layers means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.seams.discovery import RotaryTable

_LOCAL = ("sliding", "chunked", "local")
_LAYER_INDEX = re.compile(r"\blayers?\.(\d+)\.")


def select(
    tables: Sequence[RotaryTable], layers: str | Sequence[int], *, whole: bool
) -> tuple[RotaryTable, ...]:
    """The tables that serve the chosen layers.

    Args:
        tables: Every table of the model.
        layers: `"full"`: every table but those of sliding-window and chunked layers; `"all"`; or
            layer indices.
        whole: The table itself is to be changed, so layer indices must be exactly those of one or more tables.

    Raises:
        PosencError: A choice that is no choice, or that cuts through a table.
        UnsupportedModelError: A model whose full-attention layers do not rotate.
    """
    if layers == "all":
        return tuple(tables)
    if layers == "full":
        chosen = tuple(table for table in tables if not table.label.startswith(_LOCAL))
        if not chosen:
            raise UnsupportedModelError(
                f"Only the layers of type {', '.join(table.label for table in tables)} of this model "
                'rotate, and they never look past their window. Pass layers="all" to patch them all the same.'
            )
        return chosen
    if (
        isinstance(layers, str)
        or not isinstance(layers, Iterable)
        or not all(isinstance(layer, int) for layer in layers)
    ):
        raise PosencError(f'layers is "full", "all" or a list of layer indices, not {layers!r}.')
    wanted = set(layers)
    groups = {index: _layers_of(table) for index, table in enumerate(tables)}
    if not whole and wanted and wanted <= set().union(*groups.values()):
        return tuple(tables[index] for index, served in groups.items() if served & wanted)
    chosen = tuple(tables[index] for index, served in groups.items() if served and served <= wanted)
    covered = set().union(*(_layers_of(table) for table in chosen)) if chosen else set()
    if not wanted or covered != wanted:
        listing = "; ".join(
            f"{table.label or table.name}: {_span(groups[index])}"
            for index, table in enumerate(tables)
        )
        raise PosencError(
            f"layers={sorted(wanted)} cuts through a rotary table. The tables of this model serve these "
            f"layers: {listing}. Choose all layers of one or more tables."
        )
    return chosen


def _layers_of(table: RotaryTable) -> frozenset[int]:
    own = _LAYER_INDEX.search(f"{table.name}.")
    if own:
        return frozenset({int(own[1])})
    count = range(getattr(table.config, "num_hidden_layers", 0))
    if not table.label:
        return frozenset(count)
    types = getattr(table.config, "layer_types", None) or []
    return frozenset(layer for layer in count if layer < len(types) and types[layer] == table.label)


def _span(layers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "unknown"


def attends_locally(module: nn.Module, config: Any) -> bool:
    """Whether an attention module is of a sliding-window or chunked layer in a model that has others too."""
    kinds = {*(getattr(config, "layer_types", None) or [])}
    return len(kinds) > 1 and layer_type(module, config).startswith(_LOCAL)


def layer_type(module: nn.Module, config: Any) -> str:
    """The type of the layer that an attention module is of, as the config names it; `""` where it does not."""
    kinds = getattr(config, "layer_types", None) or []
    index = layer_index("", module)
    own = getattr(module, "layer_type", None)
    return str(own or (kinds[index] if index is not None and index < len(kinds) else ""))


def layer_index(name: str, module: nn.Module) -> int | None:
    """Which layer an attention module belongs to."""
    own = getattr(module, "layer_idx", None)
    if isinstance(own, int):
        return own
    found = _LAYER_INDEX.search(f"{name}.")
    return int(found[1]) if found else None
