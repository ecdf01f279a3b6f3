"""The patch in force in a model, as an object that prints well, and the rotary tables read back."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.methods import RopeScaling
from hf_posenc.model.discovery import RepositionedTable, SinCosTable, foreign_frequencies, tables_of
from hf_posenc.model.rotary import PosencRotary, RepositionedRotary, native_rotary
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.config import PatchConfig, short
from hf_posenc.patch.state import state_of
from hf_posenc.seams.inspection import Shown, html_table, text_table


@dataclass(frozen=True, eq=False)
class EffectiveTable:
    """One rotary table as the live model computes it.

    Attributes:
        layer_type: The layer type it belongs to; `None` where one table serves all layers.
        modules: The paths of the modules that hold it.
        rope_type: The method's name for a patched table, transformers' `rope_type` for another; `"dropped"` where a
            bias has replaced the rotation.
        theta: The base it started from; `None` where the config does not name one.
        inv_freq: Shape (d/2,), radians per token; float32 where patched.
        attention_factor: The factor on cos and sin.
        difference: How the frequencies differ from those that transformers computes from the config, in a sentence;
            empty if they do not.

    Examples:
        >>> from hf_posenc import inspect_rope, patch_model
        >>> (table,) = inspect_rope(patch_model(model, "yarn", scale=4))
        >>> table.rope_type, table.dim, tuple(table.inv_freq.shape)
        ('yarn', 16, (8,))
        >>> round(table.attention_factor, 4)  # 0.1 ln 4 + 1
        1.1386
    """

    layer_type: str | None
    modules: tuple[str, ...]
    rope_type: str
    theta: float | None
    inv_freq: Tensor
    attention_factor: float
    difference: str = ""

    @property
    def dim(self) -> int:
        """The rotary dimension d."""
        return 2 * self.inv_freq.shape[0]

    def row(self) -> tuple[str, ...]:
        """Return the table in one line: layers, modules, kind, d, theta, fastest and slowest frequency, factor."""
        more = f" (+{len(self.modules) - 1})" if len(self.modules) > 1 else ""
        ends = ["", ""] if self.inv_freq.is_meta else [f"{self.inv_freq[i]:.6g}" for i in (0, -1)]
        theta = "" if self.theta is None else f"{self.theta:g}"
        kind = (self.layer_type or "all", self.modules[0] + more, self.rope_type)
        return (*kind, str(self.dim), theta, *ends, f"{self.attention_factor:.6g}")


COLUMNS = ("layers", "module", "type", "d", "theta", "fastest", "slowest", "factor")
"""The headings of `EffectiveTable.row`; frequencies in radians per token."""


class EffectiveTables(Shown, tuple[EffectiveTable, ...]):
    """A tuple of rotary tables that a terminal and a notebook show as one table, a row each."""

    def rows(self) -> list[tuple[str, ...]]:
        return [COLUMNS, *(table.row() for table in self)]

    def notes(self) -> list[str]:
        return [table.difference for table in self if table.difference]


@dataclass(frozen=True, eq=False)
class Patch:
    """The patch that `get_patch` read back from a model.

    Attributes:
        config: The request, with everything resolved.
        tables: Every rotary table of the text decoder, patched or not; empty where another seam is patched.
        original_max_position_embeddings: The context length that the method starts from, in tokens; 0 if the model has
            none.
        extended_length: The context length that it reaches; `None` where no scale or target sets it.
        export: How plain transformers computes the patch after `save_pretrained`: by `"rope_parameters"`, as a
            `"longrope"` list, from the `"weights"` or another value of the `"config"`; `None` where only hf_posenc can
            (`from_pretrained`, `load_patch`).
        layers: The attention layers in which a method computes attention itself, by path.
        attention: The attention implementation of these layers without the patch; `None` where no layer is patched.
        places: What is patched in a model without rotary embedding, as rows of a table, its heading first.
        dropped: The values of the checkpoint's own scaling that `replace=True` dropped, and that the patch has not.
        scaled: True if these layers have scaled queries alone, and the implementation stays.

    Examples:
        >>> from hf_posenc import get_patch, patch_model
        >>> patch = get_patch(patch_model(model, "yarn", scale=4))
        >>> patch.method, patch.original_max_position_embeddings, patch.extended_length, patch.export
        ('yarn', 4096, 16384, 'rope_parameters')
        >>> patch.config.to_json() == get_patch(model).config.to_json()
        True
    """

    config: PatchConfig
    tables: EffectiveTables
    original_max_position_embeddings: int
    extended_length: int | None
    export: str | None
    layers: tuple[str, ...] = ()
    attention: str | None = None
    places: tuple[tuple[str, ...], ...] = ()
    dropped: Mapping[str, Any] = field(default_factory=dict)
    scaled: bool = False

    @property
    def method(self) -> str:
        """The method's canonical name."""
        return self.config.method

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of all methods, where several are composed."""
        return tuple(name for name, _ in self.config.parts)

    @property
    def options(self) -> dict[str, Any]:
        """The method's knobs that differ from their defaults, the scale included."""
        return dict(self.config.parts[0][1])

    def __str__(self) -> str:
        table = text_table(self.places) if self.places else self.tables
        return f"{self.config}\n{self._notes()}\n{table}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title = f"<b>{html.escape(str(self.config))}</b><br>{html.escape(self._notes())}"
        return title + (html_table(self.places) if self.places else self.tables._repr_html_())

    def _notes(self) -> str:
        reach = f"{self.extended_length} tokens" if self.extended_length else "no set length"
        saved = {
            "rope_parameters": "saves as native rope_parameters",
            "longrope": "saves as a longrope list that plain transformers loads",
            "weights": "saves in the weights, that plain transformers loads",
            "config": "saves in the config, that plain transformers loads",
            None: "saves for hf_posenc.from_pretrained only",
        }[self.export]
        original = self.original_max_position_embeddings
        lengths = f"{original} -> {reach}" if original else "texts of any length"
        notes = f"{lengths}; {saved}"
        if self.dropped:
            values = ", ".join(f"{key}={short(value)}" for key, value in self.dropped.items())
            notes += f"; drops of the checkpoint's own scaling: {values}"
        if self.attention is None:
            return notes
        where = self.layers[0] if len(self.layers) == 1 else f"{len(self.layers)} layers"
        if self.scaled:
            return f"{notes}; queries of {where} scaled, attention by {self.attention}"
        return f"{notes}; attention of {where} by hf_posenc instead of {self.attention}"


def inspect_rope(model: nn.Module) -> EffectiveTables:
    """Return every rotary table of a model's text decoder as it is in force, patched or not.

    A tuple that prints as one table. Equal tables are listed once, length-dependent ones as for a text within the
    original length.

    Args:
        model: A model, also wrapped by PEFT, DDP or `torch.compile`.

    Raises:
        UnsupportedModelError: A model without rotary embedding.

    Examples:
        >>> from hf_posenc import inspect_rope, patch_model
        >>> (plain,), (longer,) = inspect_rope(model), inspect_rope(patch_model(model, "pi", scale=4))
        >>> (plain.inv_freq / longer.inv_freq).mean().item()  # radians per token
        4.0
    """
    from hf_posenc.seams.handover import tables_in_place  # imports transformers

    inner, state = unwrap(model), state_of(model)
    wrappers = {id(m.base): m for m in inner.modules() if isinstance(m, PosencRotary)}
    repositioned: list[tuple[int, RepositionedRotary | RepositionedTable]] = [
        *((id(native_rotary(m)), m) for m in inner.modules() if isinstance(m, RepositionedRotary)),
        *tables_in_place(inner).items(),
    ]
    dropped = {
        (holder, label)
        for holder, each in repositioned
        if each.encoding is not None and not each.encoding.rotates
        for label in each.labels
    }
    effective: dict[tuple[Any, ...], EffectiveTable] = {}
    for table in tables_of(inner):
        wrapper = wrappers.get(id(table.module))
        (inv_freq, factor), kind = table.live(), table.rope_type
        theta = table.parameters.get("rope_theta")
        if wrapper is not None and table.label in wrapper.specs:
            inv_freq, live_factor = wrapper.table(table.label)
            factor, kind = float(live_factor), "default"
            if state is not None and wrapper.method in state.methods:
                kind = wrapper.method.label
            theta = wrapper.specs[table.label].theta
        elif state is not None and isinstance(table, SinCosTable):
            rest = (each for each in state.methods if each not in state.in_attention)
            kind = next((each.label for each in rest if isinstance(each, RopeScaling)), kind)
        if (id(table.module), table.label) in dropped:
            inv_freq, kind = torch.zeros_like(inv_freq), "dropped"
        patched_table = wrapper is not None and table.label in wrapper.specs
        difference = "" if patched_table else foreign_frequencies(inner, table)
        label, inv_freq = table.label or None, inv_freq.detach()
        values = inv_freq.shape if inv_freq.is_meta else tuple(inv_freq.tolist())
        key = label, kind, theta, factor, inv_freq.device, values
        names = (*(effective[key].modules if key in effective else ()), table.name)
        effective[key] = EffectiveTable(label, names, kind, theta, inv_freq, factor, difference)
    return EffectiveTables(effective.values())
