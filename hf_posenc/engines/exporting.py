"""From a saved model to the config, flags and notes for an engine, and the error of the engine's table."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_posenc.engines.engine import Divisors, Draft, Engine, Setup, TableError
from hf_posenc.engines.llama_cpp import LlamaCpp
from hf_posenc.engines.servers import VLLM, SGLang, Transformers4, Transformers5
from hf_posenc.engines.source import Source, clean_json, open_source
from hf_posenc.errors import PosencError, unknown
from hf_posenc.methods import METHODS, LengthDependent, Method, seam_of
from hf_posenc.patch.export import BLOCK, config_parts, reloaded
from hf_posenc.patch.export import write as write_values
from hf_posenc.patch.request import MethodLike

_ENGINES: tuple[Engine, ...] = (Transformers4(), Transformers5(), VLLM(), SGLang(), LlamaCpp())
ENGINES = tuple(engine.name for engine in _ENGINES)
"""The engines, by the names that the command line takes."""


@dataclass(frozen=True)
class Export:
    """The export of a model for an engine.

    Attributes:
        engine: The engine's name.
        version: The version whose source its formulas come from.
        path: The exported model.
        base: The folder or hub name of the weights.
        form: The form in which the engine gets the tables; `None` if there is none.
        reason: The reason why there is none; empty otherwise.
        config: The whole `config.json` for it.
        flags: Flags of its command, beside the folder.
        overrides: Further flags that serve the original folder instead of an exported one.
        notes: Notes for the user.
        errors: Differences between its tables and the model's, by its published formula in float64.
        divisors: The table for a GGUF file; `None` if its keys suffice.
    """

    engine: str
    version: str
    path: str
    base: str
    form: str | None = None
    reason: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    errors: tuple[TableError, ...] = ()
    divisors: Divisors | None = None

    @property
    def is_adapter(self) -> bool:
        """True if the weights are those of a base model and of an adapter on it."""
        return self.path != self.base

    @property
    def possible(self) -> bool:
        """True if the engine computes the same as the model."""
        return self.form is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the config."""
        values = asdict(self)
        del values["config"]
        return values


def export(
    directory: str | Path, engine: str, *, method: MethodLike | None = None, **options: Any
) -> Export:
    """Find the form in which an engine computes the same as a saved model.

    Nothing is written, and no weights are read; `write_export` writes.

    Args:
        directory: A saved model, patched or not, or a saved adapter: a folder or a hub name.
        engine: One of `ENGINES`.
        method: A patch for a model that has none, as for `patch_model`.
        **options: As for `patch_model`.

    Raises:
        PosencError: An unknown engine, no config, or a patch that the model cannot take.
    """
    return export_source(open_source(directory, method, **options), engine)


def export_source(source: Source, name: str) -> Export:
    """Find the form in which an engine computes the same as an opened model."""
    engine = find_engine(name)
    result = Export(engine.name, engine.version, source.path, source.base)
    beyond = [method.name for method in source.methods if seam_of(method) != "rotary"]
    if beyond:
        reason = (
            f"{' and '.join(beyond)} changes attention and not the frequencies alone, which no config can express: "
            "it loads with hf_posenc.from_pretrained only"
        )
        return replace(result, reason=reason)
    failures: list[str] = []
    for draft in engine.drafts(source):
        config = copy.deepcopy(source.config)
        text = dict(config_parts(config))[source.text_path]
        write_values(text, draft.values)
        if not isinstance(engine, Transformers4) and reloaded(config) is None:
            failures.append(f"the config class of {config.model_type} does not take {draft.form}")
            continue
        errors = measure(source, engine, draft, vars(text))
        if isinstance(errors, str):
            failures.append(errors)
        elif all(error.small for error in errors):
            own = isinstance(engine, Transformers5)
            # The original folder of an adapter has no weights that an engine could be started with.
            overrides = () if result.is_adapter else engine.overrides(vars(text), source)
            return replace(
                result,
                form=draft.form,
                config=_own_json(source) if own else clean_json(config, whole=True),
                flags=draft.flags,
                overrides=overrides,
                notes=draft.notes,
                errors=errors,
                divisors=draft.divisors,
            )
        else:
            worst = max(errors, key=lambda error: max(error.frequency, error.factor))
            failures.append(
                f"as {draft.form}, a frequency differs by {worst.frequency:.2g} and the factor by "
                f"{worst.factor:.2g}, at {worst.length} tokens"
            )
    if source.length_dependent and engine.fixed_table:
        failures.insert(0, f"{engine.name} makes one table for texts of every length")
    reason = "; ".join(dict.fromkeys(failures)) or f"{engine.name} has no form for it"
    return replace(result, reason=reason)


def measure(
    source: Source, engine: Engine, draft: Draft, config: Mapping[str, Any]
) -> tuple[TableError, ...] | str:
    """Return the errors of an engine's tables, or the reason why it does not start."""
    original, reach = source.original, source.reach
    lengths = {reach}
    if source.length_dependent and (source.follows_text or reach > original):
        lengths = {original + 1, 4 * original if source.follows_text else reach}
        if not engine.fixed_table:
            lengths.add(original)
    errors = []
    for table in source.tables:
        for length in sorted(lengths):
            computed = engine.compute(Setup(config, draft, table, source, length))
            if isinstance(computed, str):
                return computed
            errors.append(TableError.between(table.label, length, computed, table.in_force(length)))
    return tuple(errors)


def find_engine(name: str) -> Engine:
    """Return the engine of this name.

    Raises:
        PosencError: There is none.
    """
    for engine in _ENGINES:
        if engine.name == name:
            return engine
    raise unknown("engine", name, ENGINES)


def _own_json(source: Source) -> dict[str, Any]:
    """Return the config as `save_pretrained` writes it, with the block for `hf_posenc.from_pretrained`."""
    values = clean_json(source.model.config)
    block = vars(source.model.config).get(BLOCK)
    return values if block is None else {**values, BLOCK: copy.deepcopy(block)}


_SCALE = 4.0  # of the survey


@dataclass(frozen=True)
class Expressed:
    """One method in an engine.

    Attributes:
        method: Its name, with the options that were tried.
        form: The form in which the engine gets it; `None` if there is none.
        reason: The reason why there is none; empty otherwise.
    """

    method: str
    form: str | None
    reason: str


def survey(directory: str | Path, engine: str) -> tuple[Expressed, ...]:
    """Export a model with every method.

    Args:
        directory: A saved model: a folder or a hub name. A patch of its own is left out.
        engine: One of `ENGINES`.

    Raises:
        PosencError: An unknown engine, or no config.
    """
    find_engine(engine)
    plain = open_source(directory, unpatched=True)
    pairs = max((table.dim // 2 for table in plain.tables), default=1)
    return tuple(_try(kind, directory, engine, pairs) for kind in METHODS)


def _try(kind: type[Method], directory: str | Path, engine: str, pairs: int) -> Expressed:
    options = _options(kind, pairs)
    shown = {key: value for key, value in options.items() if isinstance(value, str)}
    name = ", ".join([kind.name, *(f"{key}={value}" for key, value in shown.items())])
    reason = ""
    for beside in ({}, {"replace": True}):  # a checkpoint that is scaled already
        try:
            source = open_source(directory, kind.name, unpatched=True, **options, **beside)
        except PosencError as error:
            reason = " ".join(str(error).split())
            continue
        result = export_source(source, engine)
        return Expressed(name, result.form, result.reason)
    return Expressed(name, None, reason)


def _options(kind: type[Method], pairs: int) -> dict[str, Any]:
    """Return values for the required knobs, a scale, and the update mode that other engines could have."""
    required = [k for k, default in kind.knobs().items() if default is dataclasses.MISSING]
    options: dict[str, Any] = {knob: 1e6 for knob in required if knob == "rope_theta"}
    options |= {
        knob: [1.0 + step / pairs for step in range(pairs)]
        for knob in required
        if "_factor" in knob
    }
    if "long_factor" in options:
        options["long_factor"] = [2 * value for value in options["long_factor"]]
    if kind.takes_scale():
        options["scale"] = _SCALE
    if issubclass(kind, LengthDependent):
        options["update"] = "sequence"
    return options
