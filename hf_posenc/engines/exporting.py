"""From a saved model to what an engine is given, and how far its table is from the model's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_posenc.engines.engine import Draft, Engine
from hf_posenc.engines.formulas import Table
from hf_posenc.engines.llama_cpp import Divisors, LlamaCpp
from hf_posenc.engines.opening import open_source
from hf_posenc.engines.servers import VLLM, SGLang
from hf_posenc.engines.source import Source, clean_json
from hf_posenc.engines.transformers import Transformers4, Transformers5
from hf_posenc.errors import unknown
from hf_posenc.export import BLOCK, config_parts, quiet
from hf_posenc.export import write as write_values
from hf_posenc.methods import seam_of
from hf_posenc.resolve import MethodLike

_ENGINES: tuple[Engine, ...] = (Transformers4(), Transformers5(), VLLM(), SGLang(), LlamaCpp())
ENGINES = tuple(engine.name for engine in _ENGINES)
"""The engines, by the names that the command line takes."""

# What float32 makes of two ways to compute the same table.
_FREQUENCY_TOLERANCE = 1e-5
_FACTOR_TOLERANCE = 1e-6
_STILL = 1e-9  # radians per token: a turn in 6e9 tokens


@dataclass(frozen=True)
class TableError:
    """How far an engine's table is from the model's.

    Attributes:
        layers: The layer type; `""` where one table serves all layers.
        length: For a text of so many tokens.
        frequency: The largest difference of a frequency, relative to it.
        factor: The difference of the factor on cos and sin, relative to it.
        phase: The largest difference of an angle at the last of these tokens, in radians.
    """

    layers: str
    length: int
    frequency: float
    factor: float
    phase: float

    @property
    def small(self) -> bool:
        """Whether it is no more than rounding."""
        return self.frequency <= _FREQUENCY_TOLERANCE and self.factor <= _FACTOR_TOLERANCE


@dataclass(frozen=True)
class Export:
    """What an engine is given.

    Attributes:
        engine: Its name.
        version: The version whose source its formula was read from.
        path: What is exported.
        base: Where the weights are.
        form: How the engine is told; `None` where it cannot be.
        reason: Why it cannot be; empty where it can.
        config: The whole `config.json` for it.
        flags: What its command is started with, beside the folder.
        overrides: What it is started with, beside the flags, to serve the original folder instead of an exported one.
        notes: What a user must know.
        errors: How far its tables are from the model's, by its published formula in float64.
        divisors: What goes into a GGUF file; `None` where its keys say it all.
    """

    engine: str
    version: str
    path: str
    base: str
    form: str | None
    reason: str
    config: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    errors: tuple[TableError, ...] = ()
    divisors: Divisors | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are those of a base model and of an adapter on it."""
        return self.path != self.base

    @property
    def possible(self) -> bool:
        """Whether the engine computes what the model does."""
        return self.form is not None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, without the config."""
        values = asdict(self)
        del values["config"]
        return values


def export(
    directory: str | Path, engine: str, *, method: MethodLike | None = None, **options: Any
) -> Export:
    """Says how an engine computes what a saved model computes.

    Nothing is written, and no weights are read; `write_export` writes.

    Args:
        directory: A saved model, patched or not, or a saved adapter: a folder or a hub name.
        engine: One of `ENGINES`.
        method: What to patch a model with that is not patched, as for `patch_model`.
        **options: As for `patch_model`.

    Raises:
        PosencError: An unknown engine, no config, or a patch that the model cannot take.
    """
    return export_source(open_source(directory, method, **options), engine)


def export_source(source: Source, name: str) -> Export:
    """As `export`, of what was read."""
    engine = find_engine(name)
    blocked = _not_a_table(source)
    if blocked:
        return _impossible(source, engine, blocked)
    failures: list[str] = []
    for draft in engine.drafts(source):
        config = _written(source, draft)
        if not (isinstance(engine, Transformers4) or _readable(config)):
            failures.append(f"the config class of {config.model_type} does not take {draft.form}")
            continue
        text = dict(config_parts(config))[source.text_path]
        result = measure(source, engine, draft, vars(text))
        if isinstance(result, str):
            failures.append(result)
        elif all(error.small for error in result):
            return Export(
                engine.name,
                engine.version,
                source.path,
                source.base,
                draft.form,
                "",
                _own_json(source) if name == Transformers5.name else clean_json(config, whole=True),
                flags=draft.flags,
                # The original folder of an adapter has no weights that an engine could be started with.
                overrides=engine.overrides(vars(text), source)
                if source.path == source.base
                else (),
                notes=draft.notes,
                errors=result,
                divisors=draft.extra.get("divisors"),
            )
        else:
            worst = max(result, key=lambda error: max(error.frequency, error.factor))
            failures.append(
                f"told as {draft.form} it is {worst.frequency:.2g} off in a frequency and {worst.factor:.2g} in the "
                f"factor, at {worst.length} tokens"
            )
    if source.length_dependent and engine.fixed_table:
        failures.insert(0, f"{engine.name} makes one table for texts of every length")
    why = "; ".join(dict.fromkeys(failures)) or f"{engine.name} has no words for it"
    return _impossible(source, engine, why)


def measure(
    source: Source, engine: Engine, draft: Draft, config: Mapping[str, Any]
) -> tuple[TableError, ...] | str:
    """How far an engine's tables are from the model's, or why it does not start."""
    original, reach = source.original, source.reach
    lengths = {reach}
    if source.length_dependent and (source.follows_text or reach > original):
        lengths = {original + 1, 4 * original if source.follows_text else reach}
        if not engine.fixed_table:
            lengths.add(original)
    errors = []
    for entry in source.tables:
        for length in sorted(lengths):
            told = engine.table(config, draft, entry, source, length)
            if isinstance(told, str):
                return told
            errors.append(table_error(entry.label, length, told, entry.in_force(length)))
    return tuple(errors)


def table_error(label: str, length: int, told: Table, meant: Table) -> TableError:
    """Compares two tables."""
    difference = (told.inv_freq - meant.inv_freq).abs()
    relative = difference / meant.inv_freq.abs().clamp(min=_STILL)
    return TableError(
        label,
        length,
        float(relative.max()),
        abs(told.factor / meant.factor - 1),
        float(difference.max()) * (length - 1),
    )


def find_engine(name: str) -> Engine:
    """The engine of this name.

    Raises:
        PosencError: There is none.
    """
    for engine in _ENGINES:
        if engine.name == name:
            return engine
    raise unknown("engine", name, ENGINES)


def _not_a_table(source: Source) -> str:
    """Why a patch is more than a table that travels in a config; empty where it is not."""
    beyond = [method.name for method in source.methods if seam_of(method) != "rotary"]
    if beyond:
        return (
            f"{' and '.join(beyond)} changes attention and not the frequencies alone, which no config says: it loads "
            "with hf_posenc.from_pretrained only"
        )
    return ""


def _impossible(source: Source, engine: Engine, reason: str) -> Export:
    return Export(engine.name, engine.version, source.path, source.base, None, reason, {})


def _written(source: Source, draft: Draft) -> Any:
    """The whole config as a draft has it."""
    config = copy.deepcopy(source.config)
    write_values(dict(config_parts(config))[source.text_path], draft.values)
    return config


def _readable(config: Any) -> bool:
    """Whether transformers' class for the config takes it back: it is what every engine reads configs with."""
    with quiet():
        try:
            loaded = type(config).from_dict(config.to_dict())
        except Exception:
            return False
    pairs = zip(config_parts(config), config_parts(loaded), strict=True)
    told = [
        (
            getattr(part, "rope_parameters", None) or {},
            getattr(again, "rope_parameters", None) or {},
        )
        for (_, part), (_, again) in pairs
    ]
    return all(again.get(key) == value for one, again in told for key, value in one.items())


def _own_json(source: Source) -> dict[str, Any]:
    """What `save_pretrained` writes, with the block that `hf_posenc.from_pretrained` reads."""
    values = clean_json(source.model.config)
    block = vars(source.model.config).get(BLOCK)
    return values if block is None else {**values, BLOCK: copy.deepcopy(block)}
