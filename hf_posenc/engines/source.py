"""What is exported: a saved model's config, its patch, and the rotary tables in force; no weights are read."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from hf_posenc.adapters import ArchAdapter
from hf_posenc.engines.formulas import Table, of_transformers
from hf_posenc.export import BLOCK, PatchedTable, config_parts, lengths_of, rope_forms
from hf_posenc.methods import Method, RopeScaling
from hf_posenc.patch import Patch
from hf_posenc.resolve import adapter_of
from hf_posenc.seams.discovery import RotaryTable, original_length
from hf_posenc.seams.rotary import PosencRotary

_BY_LENGTH = ("dynamic", "longrope")
"""The rope types of transformers whose table follows the length of the text."""


@dataclass(frozen=True, eq=False)
class SourceTable:
    """One rotary table to export.

    Attributes:
        table: Where the model holds it.
        wrapper: What patches it; `None` where it is as the checkpoint has it.
        dim: The rotary dimension d.
    """

    table: RotaryTable
    wrapper: PosencRotary | None
    dim: int

    @property
    def label(self) -> str:
        """The layer type; `""` where one table serves all layers."""
        return self.table.label

    def in_force(self, length: int) -> Table:
        """What the model computes for a text of so many tokens."""
        if self.wrapper is None and self.table.rope_type in _BY_LENGTH:
            rope, config = self.table.parameters, vars(self.table.config)
            told = of_transformers(rope, config, float(rope["rope_theta"]), self.dim, length)
            assert isinstance(told, Table)
            return told
        if self.wrapper is None:
            inv_freq, factor = self.table.live()
            return Table(inv_freq.detach().double(), factor)
        inv_freq, live_factor = self.wrapper.table(self.label, length)
        return Table(inv_freq.double(), float(live_factor))


@dataclass(frozen=True, eq=False)
class Source:
    """A model to export.

    Attributes:
        path: The folder, or the hub name, that it was read from.
        base: Where its weights are: the same, or the base model of an adapter.
        stored: The config as it is stored there.
        config: The same without the patch.
        methods: The methods in force; empty for a model as it is.
        model: The model on the meta device; `None` where a method computes attention itself.
        patch: What is in force in it.
        tables: Its rotary tables; none for a family that has them in its weights.
    """

    path: str
    base: str
    stored: Any
    config: Any
    methods: tuple[Method, ...]
    model: Any
    patch: Patch | None
    tables: tuple[SourceTable, ...]

    @property
    def follows_text(self) -> bool:
        """Whether the patch reaches as far as a text needs, however long."""
        return self.patch is not None and self.patch.extended_length is None

    @property
    def original(self) -> int:
        """The context length that the patch starts from, in tokens; without a patch, the config's."""
        if self.patch is not None:
            return self.patch.original_max_position_embeddings
        if self.tables:
            return original_length(self.tables[0].table, compose=False)
        return self.reach

    @property
    def reach(self) -> int:
        """The context length to serve, in tokens: what the patch reaches, or else the config's."""
        extended = None if self.patch is None else self.patch.extended_length
        return extended or int(self.text_config.max_position_embeddings)

    @property
    def length_dependent(self) -> bool:
        """Whether the tables follow the length of the text."""
        own = any(one.wrapper is None and one.table.rope_type in _BY_LENGTH for one in self.tables)
        return own or any(method.length_dependent for method in self.methods)

    @property
    def text_path(self) -> str:
        """The dotted path, in the config, of the part that the tables are built from."""
        wanted = self.tables[0].table.config if self.tables else None
        parts = () if wanted is None else config_parts(self.model.config)
        return next((path for path, part in parts if part is wanted), "")

    @property
    def text_config(self) -> Any:
        """That part, without the patch."""
        return dict(config_parts(self.config))[self.text_path]

    @property
    def adapter(self) -> ArchAdapter:
        """What is known of the model's family."""
        return adapter_of(self.model)

    def forms(self) -> dict[str, dict[str, Any]]:
        """The ways to say the tables in `rope_parameters`, by name, best first."""
        patched = [
            PatchedTable(entry.table, entry.wrapper) for entry in self.tables if entry.wrapper
        ]
        if not patched:
            own = copy.deepcopy(getattr(self.text_config, "rope_parameters", None))
            return {"rope_parameters": own} if own else {}
        (method,) = self.methods
        assert isinstance(method, RopeScaling)
        found: dict[str, dict[str, Any]] = {}
        for name, rope_parameters in rope_forms(self.text_config, patched, method):
            found.setdefault(name, rope_parameters)
        return found

    def saved(self) -> dict[str, Any]:
        """What `save_pretrained` writes as `rope_parameters`."""
        text = dict(config_parts(self.model.config))[self.text_path]
        return copy.deepcopy(getattr(text, "rope_parameters", None) or {})

    def lengths(self) -> dict[str, Any]:
        """The config's attributes that say how long a text may be, with the patch."""
        if self.patch is None:
            return {}
        patched = [
            PatchedTable(entry.table, entry.wrapper) for entry in self.tables if entry.wrapper
        ]
        return lengths_of(self.text_config, patched, self.patch.extended_length)


def clean_json(config: Any, *, whole: bool = False) -> dict[str, Any]:
    """A config as `config.json` has it, without the block of hf_posenc.

    Args:
        config: The config.
        whole: With the attributes that are at their defaults, which are others in another version of transformers.
    """
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=not whole))
    values.pop(BLOCK, None)
    return values
