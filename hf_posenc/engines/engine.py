"""Base class of the engines: the forms in which each gets a model's tables, and the tables that it computes."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_posenc.adapters import LegacyKeys, patches_folder
from hf_posenc.diagnosis import check_base, check_source, loader_of, read_config
from hf_posenc.engines.formulas import Table, of_transformers
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.gguf_file import ROPE_TENSORS as GGUF_TENSORS
from hf_posenc.methods import Method, RopeScaling, seam_of
from hf_posenc.model.context import config_length, length_of, readings
from hf_posenc.model.discovery import NoRotaryError, RotaryTable, SinCosTable, adapter_of, tables_of
from hf_posenc.model.rotary import PosencRotary
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.export import BLOCK, PatchedTable, config_parts, lengths_of, rope_forms
from hf_posenc.patch.files import apply_config
from hf_posenc.patch.patching import get_patch, patch_model
from hf_posenc.patch.report import Patch
from hf_posenc.patch.request import MethodLike, resolve_request
from hf_posenc.saving import take_patch

# Rounding between two ways to compute the same float32 table.
_FREQUENCY_TOLERANCE = 1e-5
_FACTOR_TOLERANCE = 1e-6
_STILL = 1e-9  # radians per token: a turn in 6e9 tokens


@functools.cache
def known_names(engine: str) -> Mapping[str, frozenset[str]]:
    """Return the architectures that an engine treats alike, from `patches/engines/<engine>.json`."""
    text = (patches_folder() / "engines" / f"{engine}.json").read_text(encoding="utf-8")
    values: dict[str, Any] = json.loads(text)
    return {key: frozenset(names) for key, names in values.items() if isinstance(names, list)}


@functools.cache
def gguf_architectures() -> Mapping[str, str]:
    """Return the GGUF architecture to which llama.cpp converts a class of transformers, by the class's name."""
    text = (patches_folder() / "engines" / "llama.cpp.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["converter"])


@dataclass(frozen=True)
class Divisors:
    """A table as a GGUF file can hold it.

    Attributes:
        short: The divisor of every pair's frequency, for contexts of up to `original` tokens.
        long: The same for longer ones.
        factor: The factor on cos and sin.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    factor: float
    original: int

    @property
    def architectures(self) -> frozenset[str]:
        """The GGUF architectures that read it."""
        known = known_names("llama.cpp")
        one = known["rope_freqs"] if self.short == self.long else frozenset[str]()
        return one | known["rope_factors"]

    def tensors(self, architecture: str) -> dict[str, tuple[float, ...]]:
        """Return the tensors for an architecture, by name."""
        if self.short == self.long and architecture in known_names("llama.cpp")["rope_freqs"]:
            return {GGUF_TENSORS[0]: self.short}
        return {GGUF_TENSORS[1]: self.short, GGUF_TENSORS[2]: self.long}

    def keys(self, architecture: str) -> dict[str, Any]:
        """Return the `rope.scaling` keys beside them, without the architecture's name in front."""
        keys: dict[str, Any] = {"rope.scaling.type": "none"}
        if len(self.tensors(architecture)) > 1:
            keys["rope.scaling.type"] = "longrope"
            keys["rope.scaling.original_context_length"] = self.original
        return {**keys, "rope.scaling.attn_factor": self.factor}


@dataclass(frozen=True)
class Draft:
    """One form in which an engine can get a model's tables, with the fields of `Export`.

    The form is `"rope_parameters"` (the engine's own name for the method), `"longrope"` (a list of divisors), or an
    engine's own; the values are attributes of the text part of the config.
    """

    form: str
    values: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    divisors: Divisors | None = None


@dataclass(frozen=True, eq=False)
class Setup:
    """One table of an exported model in an engine: the text part of its config, and a text of `length` tokens."""

    config: Mapping[str, Any]
    draft: Draft
    table: SourceTable
    source: Source
    length: int


class Engine:
    """An engine, in the version whose source the formulas come from."""

    name: ClassVar[str]
    version: ClassVar[str]
    fixed_table: ClassVar[bool] = False
    """True if it makes one table at the start, for texts of every length."""
    legacy: ClassVar[bool] = False
    """True if it reads the keys of transformers 4.57, in classes of its own."""

    def drafts(self, source: Source) -> Iterator[Draft]:
        """Yield the forms for a model, best first."""
        raise NotImplementedError

    def compute(self, setup: Setup) -> Table | str:
        """Return the engine's table by its published formula, in float64, or the reason why it does not start."""
        raise NotImplementedError

    def overrides(self, config: Mapping[str, Any], source: Source) -> tuple[str, ...]:
        """Return the flags that serve the original folder instead of the exported one; empty if there are none."""
        return ()

    def plugin(self, source: Source) -> tuple[str, ...] | str | None:
        """Return the flags that serve the folder of a saved patch through our plug-in, or the reason why it does not.

        It is `None` for an engine without one.
        """
        return None


def entry_of(rope_parameters: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    """Return one table's entry of `rope_parameters`, flat or nested by layer type."""
    entry: Mapping[str, Any] = rope_parameters.get(label) or rope_parameters
    return entry


@dataclass(frozen=True)
class TableError:
    """The difference between an engine's table and the model's.

    Attributes:
        layers: The layer type; `""` where one table serves all layers.
        length: Tokens of the text.
        frequency: The largest relative difference of a frequency.
        factor: The relative difference of the factor on cos and sin.
        phase: The largest difference of an angle at the last token, in radians.
    """

    layers: str
    length: int
    frequency: float
    factor: float
    phase: float

    @property
    def small(self) -> bool:
        """True if it is rounding."""
        return self.frequency <= _FREQUENCY_TOLERANCE and self.factor <= _FACTOR_TOLERANCE

    @classmethod
    def between(cls, label: str, length: int, engine: Table, model: Table) -> TableError:
        difference = (engine.inv_freq - model.inv_freq).abs()
        relative = difference / model.inv_freq.abs().clamp(min=_STILL)
        return cls(
            label,
            length,
            float(relative.max()),
            abs(engine.factor / model.factor - 1),
            float(difference.max()) * (length - 1),
        )


# The model to export: its saved config, its patch, and the rotary tables in force; no weights are read.


@dataclass(frozen=True, eq=False)
class SourceTable:
    """One rotary table to export, and the module that patches it; `None` if it is the checkpoint's own."""

    table: RotaryTable
    wrapper: PosencRotary | None

    @property
    def label(self) -> str:
        """The layer type; `""` where one table serves all layers."""
        return self.table.label

    @property
    def dim(self) -> int:
        """The rotary dimension d."""
        return 2 * self.table.live()[0].shape[0]

    @property
    def moves(self) -> bool:
        """True for a checkpoint's own table that follows the length of the text."""
        return self.wrapper is None and self.table.rope_type in ("dynamic", "longrope")

    def in_force(self, length: int) -> Table:
        """Return the model's table for a text of so many tokens."""
        if self.moves:
            rope, config = self.table.parameters, vars(self.table.config)
            table = of_transformers(rope, config, float(rope["rope_theta"]), self.dim, length)
            assert isinstance(table, Table)
            return table
        live = self.table.live() if self.wrapper is None else self.wrapper.table(self.label, length)
        return Table(live[0].detach().double(), float(live[1]))


@dataclass(frozen=True, eq=False)
class Source:
    """A model to export.

    Attributes:
        path: The folder, or the hub name, that it was read from.
        base: The same, or the base model of an adapter.
        stored: The config as it is stored there.
        config: The same without the patch.
        model: The model on the meta device, patched unless a method computes attention itself.
        tables: Its rotary tables; none for a family that has them in its weights.
        by_layers: True if layers that share a rotary table differ, so that attention turns queries and keys further.
        request: The patch that it was saved with.
    """

    path: str
    base: str
    stored: Any
    config: Any
    methods: tuple[Method, ...]
    model: Any
    patch: Patch | None = None
    tables: tuple[SourceTable, ...] = ()
    by_layers: bool = False
    request: PatchConfig | None = None

    @property
    def original(self) -> int:
        """The context length that the patch starts from, in tokens; without a patch, the config's."""
        if self.patch is not None:
            return self.patch.original_max_position_embeddings
        read = readings(self.tables[0].table) if self.tables else ()
        return read[0].original if len(read) == 1 else self.reach

    @property
    def reach(self) -> int:
        """The context length to serve, in tokens: the patch's, or else the config's."""
        extended = None if self.patch is None else self.patch.extended_length
        length = extended or length_of(self.model) or config_length(self.text_config)
        if not length:
            raise PosencError(
                f"The config of {self.path} names no context length: write max_position_embeddings into config.json."
            )
        return length

    @property
    def length_dependent(self) -> bool:
        return any(table.moves for table in self.tables) or any(
            method.length_dependent for method in self.methods
        )

    @property
    def main_table(self) -> SourceTable | None:
        """The table of full attention, if there is one."""
        tables = {table.label: table for table in self.tables}
        return tables.get("full_attention", tables.get(""))

    @property
    def patched(self) -> list[PatchedTable]:
        return [PatchedTable(one.table, one.wrapper) for one in self.tables if one.wrapper]

    @property
    def text_path(self) -> str:
        """The dotted path, in the config, of the part that the tables are built from."""
        # A language model alone is built from a part of the config of a model for texts and images.
        parts, built = config_parts(self.config), type(self.model.config)
        outer = next((path for path, part in parts if type(part) is built), "")
        return ".".join(filter(None, (outer, self.built_path)))

    @property
    def built_path(self) -> str:
        """The same in the config of the model that is built."""
        own = [table.table.config for table in self.tables[:1]]
        parts = config_parts(self.model.config)
        return next((path for path, part in parts if own and part is own[0]), "")

    @property
    def text_config(self) -> Any:
        """The part of the config at `text_path`, without the patch."""
        return dict(config_parts(self.config))[self.text_path]

    @property
    def legacy(self) -> LegacyKeys:
        """The attributes in which transformers 4.57 reads the rotary embedding."""
        return adapter_of(self.model).legacy(self.text_config)

    def forms(self) -> dict[str, dict[str, Any]]:
        """Return the forms of the tables in `rope_parameters`, by name, best first."""
        if not self.patched:
            own = copy.deepcopy(getattr(self.text_config, "rope_parameters", None))
            return {"rope_parameters": own} if own else {}
        (method,) = self.methods
        assert isinstance(method, RopeScaling)
        forms: dict[str, dict[str, Any]] = {}
        for name, rope_parameters in rope_forms(self.text_config, self.patched, method):
            forms.setdefault(name, rope_parameters)
        return forms

    def saved(self) -> dict[str, Any]:
        """Return the `rope_parameters` that `save_pretrained` writes."""
        text = dict(config_parts(self.model.config))[self.built_path]
        return copy.deepcopy(getattr(text, "rope_parameters", None) or {})

    def lengths(self) -> dict[str, Any]:
        """Return the config's attributes for the length of a text, with the patch."""
        if self.patch is None:
            return {}
        return lengths_of(self.text_config, self.patched, self.patch.extended_length)


def open_source(
    path: str | Path, method: MethodLike | None = None, *, unpatched: bool = False, **options: Any
) -> Source:
    """Read a saved model or adapter, with a patch as for `patch_model`; `unpatched`: without the one that was saved."""
    check_source(path, "model")
    base, of_adapter = _of_adapter(path)
    if base != str(path):
        check_base(base, path)
    stored = read_config(base)
    if method is None and options:
        raise PosencError(f"{', '.join(options)} belong to a method, and none is given.")
    config = copy.deepcopy(stored)
    of_base = take_patch(config, base)
    saved = None if unpatched else of_adapter or of_base
    if saved is not None and method is not None:
        raise PosencError(
            f"{path} is already patched with {saved.method}. Leave the patch out, or give the model from before."
        )
    model = empty_model(config)
    try:
        found = tables_of(model)
    except NoRotaryError as error:
        raise _without_rotary(path, model, saved, method) from error
    request = {"method": method, **options} if saved is None else saved.request()
    state = None if method is None and saved is None else resolve_request(found, **request)
    methods = () if state is None else state.methods
    read = str(path), base, stored, config, methods
    # Sines and cosines that a model keeps precomputed are in the weights, which are not here.
    precomputed = any(isinstance(table, SinCosTable) for table in found)
    if methods and (precomputed or any(seam_of(part) != "rotary" for part in methods)):
        return Source(*read, model, request=saved)
    if state is not None and state.parts:
        return Source(*read, model, by_layers=True, request=saved)
    if saved is not None:
        apply_config(model, saved)
    elif method is not None:
        patch_model(model, method, **options)
    patch = get_patch(model)
    return Source(*read, model, patch, source_tables(model), request=saved)


def source_tables(model: Any) -> tuple[SourceTable, ...]:
    """Return the rotary tables of a model, patched or not; none where they lie in the weights."""
    wrappers = {id(m.base): m for m in model.modules() if isinstance(m, PosencRotary)}
    tables: dict[tuple[str, str], SourceTable] = {}  # an encoder and a decoder have the same labels
    for table in tables_of(model):
        if isinstance(table, SinCosTable):
            continue
        wrapper = wrappers.get(id(table.module))
        if wrapper is not None and table.label not in wrapper.specs:
            wrapper = None
        tables.setdefault((table.part, table.label), SourceTable(table, wrapper))
    return tuple(tables.values())


def _without_rotary(
    path: str | Path, model: Any, saved: PatchConfig | None, method: MethodLike | None
) -> UnsupportedModelError:
    """Return the error for a model without rotary embedding, with what other engines can read of it."""
    if saved is not None:
        way = f"Its patch, {saved.method}, is computed by hf_posenc alone: load it with hf_posenc.from_pretrained."
    elif method is None:
        longer = "Its patch is in its weights" if hasattr(model.config, BLOCK) else "It needs none"
        way = f"{longer}: {path} is a plain checkpoint, which engines that have this model type read as it is."
    else:
        way = (
            "Patch the loaded model and call its save_pretrained: a longer learned table is in the weights of a plain "
            "checkpoint, and for other patches there is a warning."
        )
    return UnsupportedModelError(
        f"{type(model).__name__} has no rotary embedding, whose table an export writes. {way}"
    )


def _of_adapter(path: str | Path) -> tuple[str, PatchConfig | None]:
    """Return the base model of a saved adapter and the adapter's patch; of a model, its own path."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return str(path), None
    from hf_posenc.patch.lora import read_adapter

    config, patch = read_adapter(file)
    if not config.base_model_name_or_path:  # PEFT 0.18 writes "" for a model made from a config
        raise PosencError(f"{file} names no base model. Merge the adapter, save, and export that.")
    return config.base_model_name_or_path, patch


def empty_model(config: Any) -> Any:
    """Build the model on the meta device; its rotary tables are real."""
    from transformers import AutoModel, AutoModelForCausalLM

    config, loader = copy.deepcopy(config), loader_of(config)
    try:
        with torch.device("meta"):
            if loader is not AutoModelForCausalLM:
                return loader(config)
            auto: Any = loader if type(config) in loader._model_mapping else AutoModel
            return auto.from_config(config)
    except ValueError as error:  # no class for it; a damaged config raises others
        raise UnsupportedModelError(
            f"transformers cannot build a {config.model_type} model from its config alone. If this is a part of "
            "another model, give that model's folder."
        ) from error
