"""From a saved model to what an engine is given, and how far its table is from the model's."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_posenc.engines import gguf
from hf_posenc.engines.engine import Draft, Engine
from hf_posenc.engines.formulas import Table
from hf_posenc.engines.llama_cpp import Divisors, LlamaCpp, runtime
from hf_posenc.engines.servers import VLLM, SGLang, Transformers4, Transformers5
from hf_posenc.engines.source import Source, SourceTable, clean_json, open_source
from hf_posenc.errors import PosencError, unknown
from hf_posenc.methods import seam_of
from hf_posenc.patch.export import BLOCK, config_parts, quiet
from hf_posenc.patch.export import write as write_values
from hf_posenc.patch.request import MethodLike

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


# The files of an export: a folder that the engine loads.


RECORD = "export.json"
"""What was exported, how, and with which error."""

WEIGHTS = ("link", "copy", "none")
"""What happens to the files beside the config: hard links (copies where the file system has none), copies, nothing."""

# What belongs to training and not to the model, or is written anew.
_LEFT_OUT = ("config.json", RECORD, "posenc_config.json", "posenc.safetensors", "training_args.bin")
_PARTS = (".safetensors", ".json", ".model", ".jinja", ".txt", ".py", ".bin", ".md")
# The tokenizer class that transformers 5 writes, and what 4.57 calls the same.
_TOKENIZER_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}


def write_export(export: Export, folder: str | Path, *, weights: str = "link") -> list[Path]:
    """Writes `config.json` for the engine, and the model's other files beside it.

    Args:
        export: From `export`.
        folder: Where to; must not be where the model is. Made where it does not exist.
        weights: One of `WEIGHTS`. The weights of an adapter are merged into its base model, whatever this says but
            `"none"`. A model of the hub has its config alone.

    Returns:
        The files that were written.

    Raises:
        PosencError: The engine cannot have the model, or the folder holds another.
    """
    if not export.possible:
        raise PosencError(f"{export.engine} cannot have {export.path}: {export.reason}.")
    if weights not in WEIGHTS:
        raise PosencError(f"weights is one of {', '.join(WEIGHTS)}, not {weights!r}.")
    folder = Path(folder)
    source = Path(export.base)
    if folder.resolve() in (Path(export.path).resolve(), source.resolve()):
        raise PosencError(f"{folder} is where the model is. Give another folder with --output.")
    if (folder / "config.json").exists() and not (folder / RECORD).exists():
        raise PosencError(f"{folder} holds another model. Give another folder with --output.")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    if export.is_adapter and weights != "none":
        written += _merged(export, folder)
    elif source.is_dir() and weights != "none":
        written += [_placed(path, folder / path.name, weights) for path in _files(source)]
    written += _tokenizer(export, folder)
    config = dict(export.config)
    if export.is_adapter and merged_dtype(export.path) != "auto":
        config |= {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
    for name, values in (("config.json", config), (RECORD, export.to_dict())):
        written.append(_write_json(folder / name, values))
    return sorted(set(written))


def _files(source: Path) -> Iterator[Path]:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in _LEFT_OUT and path.suffix in _PARTS:
            yield path


def _placed(path: Path, target: Path, how: str) -> Path:
    target.unlink(missing_ok=True)
    if how == "link" and path.suffix in (".safetensors", ".bin"):
        try:
            os.link(path.resolve(), target)
            return target
        except OSError:  # another file system
            pass
    shutil.copyfile(path, target)
    return target


def _merged(export: Export, folder: Path) -> list[Path]:
    """The base model with the adapter's weights in it."""
    from transformers import AutoTokenizer

    from hf_posenc.saving import from_pretrained

    model: Any = from_pretrained(export.path, dtype=merged_dtype(export.path)).merge_and_unload()
    model.save_pretrained(folder)
    for place in (export.path, export.base):
        try:
            AutoTokenizer.from_pretrained(place).save_pretrained(folder)
            break
        except Exception:  # none there, or none that can be loaded
            continue
    return [path for path in folder.iterdir() if path.name != RECORD]


def merged_dtype(adapter: str | Path) -> str:
    """The precision in which an adapter is merged: that of the weights which it holds whole, else of its base model.

    A base model in bfloat16 that was trained in float32 would lose most of a short training to rounding. LoRA's own
    matrices say nothing: PEFT keeps them in float32 beside any base.
    """
    file = Path(adapter) / "adapter_model.safetensors"
    if not file.is_file():
        return "auto"
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        whole = {
            tensors.get_slice(name).get_dtype()
            for name in tensors.keys()  # noqa: SIM118
            if ".lora_" not in name
        }
    return "float32" if "F32" in whole else "auto"


def _tokenizer(export: Export, folder: Path) -> list[Path]:
    """Names the tokenizer's class as transformers 4.57 does."""
    file = folder / "tokenizer_config.json"
    if export.engine != "transformers4" or not file.is_file():
        return []
    values = json.loads(file.read_text(encoding="utf-8"))
    known = _TOKENIZER_CLASS.get(values.get("tokenizer_class"))
    if known is None:
        return []
    values["tokenizer_class"] = known
    extra = values.pop("extra_special_tokens", None)
    if isinstance(extra, list):  # a list there is the older key
        values.setdefault("additional_special_tokens", extra)
    elif extra is not None:
        values["extra_special_tokens"] = extra
    return [_write_json(file, values)]


def _write_json(path: Path, values: Any) -> Path:
    path.unlink(missing_ok=True)  # never into a file that is linked
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return path


# A converted GGUF file against the model: what llama.cpp will compute from it, and a file that is right.


@dataclass(frozen=True)
class GGUFCheck:
    """What a file makes of the model's table.

    Attributes:
        path: The file.
        architecture: Its `general.architecture`.
        error: How far the table of llama.cpp is from the model's.
        divisors: What a file would need that has it right; `None` where no file can.
    """

    path: str
    architecture: str
    error: TableError
    divisors: Divisors | None

    @property
    def right(self) -> bool:
        """Whether llama.cpp computes what the model does."""
        return self.error.small


def check_gguf(
    file: str | Path,
    directory: str | Path,
    *,
    flags: tuple[str, ...] = (),
    method: MethodLike | None = None,
    **options: object,
) -> GGUFCheck:
    """Compares the rotary table of a GGUF file with that of the model that it was made from.

    Args:
        file: What `convert_hf_to_gguf` made.
        directory: The model, as for `export`.
        flags: The flags that llama.cpp is started with.
        method: As for `export`.
        **options: As for `export`.

    Raises:
        PosencError: Not a GGUF file, or a model without a table.
    """
    source = open_source(directory, method, **options)
    entry = _main_table(source)
    found = gguf.read(file)
    told = runtime(found.keys, found.tensors, entry.dim, source.reach, flags)
    error = table_error(entry.label, source.reach, told, entry.in_force(source.reach))
    drafts = [draft.extra.get("divisors") for draft in LlamaCpp().drafts(source)]
    divisors = next((one for one in drafts if one is not None), None)
    if divisors is not None and found.architecture not in divisors.architectures:
        divisors = None
    return GGUFCheck(str(file), found.architecture, error, divisors)


def write_gguf(check: GGUFCheck, target: str | Path) -> Path:
    """Writes a copy of a file with the model's table in it.

    Args:
        check: From `check_gguf`.
        target: The copy; must not exist.

    Raises:
        PosencError: llama.cpp reads no table for this architecture, or the copy exists.
    """
    if check.divisors is None:
        raise PosencError(
            f"llama.cpp reads no table from a GGUF file of the architecture {check.architecture}, and its own words "
            "do not say this one."
        )
    keys = check.divisors.keys(check.architecture)
    return gguf.write(check.path, target, keys, check.divisors.tensors(check.architecture))


def _main_table(source: Source) -> SourceTable:
    tables = {entry.label: entry for entry in source.tables}
    entry = tables.get("full_attention", tables.get(""))
    if entry is None:
        raise PosencError(
            f"{source.path} has no rotary table that a GGUF file could hold: methods that compute attention, and "
            "tables in the weights, stay with hf_posenc."
        )
    return entry
