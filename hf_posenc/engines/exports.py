"""Exports of saved models for other engines: transformers 4.57 and 5, vLLM, SGLang, llama.cpp, mlx-lm.

`export(folder, engine)` returns the form in which an engine gets a model's rotary tables, or the reason why there is
none, with the difference of its table from the model's by the engine's own published formula. `write_export` writes it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_posenc.diagnosis import read_json
from hf_posenc.engines.engine import Divisors, Draft, Engine, Setup, Source, TableError, open_source
from hf_posenc.engines.names import HOMES, WEIGHTS
from hf_posenc.engines.servers import Transformers5, tokenizer_length
from hf_posenc.errors import PosencError, unknown
from hf_posenc.files import WEIGHT_FILES, disk_errors
from hf_posenc.gguf_file import find_gguf
from hf_posenc.methods import METHODS, LengthDependent, Method, seam_of
from hf_posenc.patch.export import config_parts, reloaded
from hf_posenc.patch.request import MethodLike
from hf_posenc.saving import from_pretrained
from hf_posenc.seams.held import write as write_values

_UNPATCHED = "There is no patch: this is the encoding of the model's own config."


@dataclass(frozen=True)
class Export:
    """The export of a model for an engine.

    Attributes:
        engine: One of `ENGINES`.
        version: The version of the engine whose source its formulas come from.
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
        plugin: Flags of its command with which our plug-in serves the model's own folder, where there is no form;
            `None` if it does not.
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
    plugin: tuple[str, ...] | None = None

    @property
    def is_adapter(self) -> bool:
        """True if the weights are those of a base model and of an adapter on it."""
        return self.path != self.base

    @property
    def possible(self) -> bool:
        """True if the engine computes the same as the model."""
        return self.form is not None


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

    Returns:
        The export: `possible`, with the config and the flags, or the `reason` why not.

    Raises:
        PosencError: An unknown engine, no config, or a patch that the model cannot take.

    Examples:
        >>> from hf_posenc.engines import export
        >>> model.save_pretrained("model")
        >>> found = export("model", "vllm", method="yarn", scale=4)
        >>> found.possible, found.config["rope_parameters"]["rope_type"]
        (True, 'yarn')
        >>> export("model", "vllm", method="rerope").possible
        False
    """
    return export_source(open_source(directory, method, **options), engine)


def export_source(source: Source, name: str) -> Export:
    """Find the form in which an engine computes the same as an opened model."""
    engine = find_engine(name)
    result = _native(source, engine)
    if result.possible or (plugin := engine.plugin(source)) is None:
        return result
    if isinstance(plugin, str):
        return replace(result, reason=f"{result.reason}; {plugin}")
    return replace(result, plugin=plugin)


def _native(source: Source, engine: Engine) -> Export:
    """Find the form without our plug-in."""
    result = Export(engine.name, engine.version, source.path, source.base)
    beyond = [method.name for method in source.methods if seam_of(method) != "rotary"]
    if beyond or (source.methods and source.patch is None):
        if beyond:
            what = f"{' and '.join(beyond)} changes attention and not the frequencies alone"
            if any(isinstance(method, LengthDependent) for method in source.methods):
                what += ' (a dynamic one with update="sequence" changes frequencies alone)'
        elif source.by_layers:
            names = " and ".join(method.name for method in source.methods)
            what = f"{names} in some of the layers that share a table changes attention"
        else:
            what = f"{source.config.model_type} keeps a precomputed table of sines and cosines"
        reason = (
            f"{what}, which no config can express: it loads with hf_posenc.from_pretrained only"
        )
        return replace(result, reason=reason)
    failures: list[str] = []
    for draft in engine.drafts(source):
        config = copy.deepcopy(source.config)
        text = dict(config_parts(config))[source.text_path]
        write_values(text, draft.values)
        if not engine.legacy and reloaded(config) is None:
            failures.append(f"the config class of {config.model_type} does not take {draft.form}")
            continue
        if isinstance(errors := measure(source, engine, draft, vars(text)), str):
            failures.append(errors)
        elif all(error.small for error in errors):
            own = isinstance(engine, Transformers5) and source.text_path == source.built_path
            # The original folder of an adapter has no weights that an engine could be started with.
            overrides = () if result.is_adapter else engine.overrides(vars(text), source)
            written: Any = source.model.config if own else config
            return replace(
                result,
                form=draft.form,
                # Defaults differ between versions of transformers: only its own config leaves them out.
                config=json.loads(written.to_json_string(use_diff=own)),
                flags=draft.flags,
                overrides=overrides,
                notes=draft.notes + (() if source.methods else (_UNPATCHED,)),
                errors=errors,
                divisors=draft.divisors,
            )
        else:
            if source.length_dependent and engine.fixed_table:
                failures.append(f"{engine.name} makes one table for texts of every length")
            worst = max(errors, key=lambda error: max(error.frequency, error.factor))
            failures.append(
                f"as {draft.form}, a frequency differs by {worst.frequency:.2g} and the factor by "
                f"{worst.factor:.2g}, at {worst.length} tokens"
            )
    reason = "; ".join(dict.fromkeys(failures)) or f"{engine.name} has no form for it"
    return replace(result, reason=reason)


def measure(
    source: Source, engine: Engine, draft: Draft, config: Mapping[str, Any]
) -> tuple[TableError, ...] | str:
    """Return the errors of an engine's tables, or the reason why it does not start."""
    original, reach = source.original, source.reach
    lengths = {reach}
    follows_text = source.patch is not None and source.patch.extended_length is None
    if source.length_dependent and (follows_text or reach > original):
        lengths = {original + 1, 4 * original if follows_text else reach}
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


@functools.cache
def find_engine(name: str) -> Engine:
    """Return the engine of this name."""
    if name not in HOMES:
        raise unknown("engine", name, HOMES)
    file, kind = HOMES[name]
    return getattr(importlib.import_module(f"hf_posenc.engines.{file}"), kind)()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Expressed:
    """One method in an engine.

    Attributes:
        method: Its name, with the `update` that was tried.
        form: The form in which the engine gets it; `None` if there is none.
        reason: The reason why there is none; empty otherwise.
    """

    method: str
    form: str | None
    reason: str


def survey(directory: str | Path, engine: str) -> tuple[Expressed, ...]:
    """Export a saved model with every method for rotary models, without its own patch.

    Args:
        directory: The model: a folder or a hub name.
        engine: One of `ENGINES`.

    Returns:
        An entry for each of them, whether the engine can have it or not.

    Raises:
        PosencError: An unknown engine, or no config.
    """
    find_engine(engine)
    plain = open_source(directory, unpatched=True)
    pairs = max((table.dim // 2 for table in plain.tables), default=1)
    rows = []
    for kind in METHODS:
        if not kind.for_rotary:
            continue
        options = _options(kind, pairs)
        shown = {key: value for key, value in options.items() if isinstance(value, str)}
        name = ", ".join([kind.name, *(f"{key}={value}" for key, value in shown.items())])
        for replace_scaling in (False, True):  # a checkpoint that is scaled already
            options["replace"] = replace_scaling
            try:
                source = open_source(directory, kind.name, unpatched=True, **options)
            except PosencError as error:
                row = Expressed(name, None, " ".join(str(error).split()))
                continue
            result = export_source(source, engine)
            row = Expressed(name, result.form, result.reason)
            break
        rows.append(row)
    return tuple(rows)


def _options(kind: type[Method], pairs: int) -> dict[str, Any]:
    """Return values for the required knobs, a scale, and the update mode that other engines could have."""
    short = [1.0 + step / pairs for step in range(pairs)]
    long = [2 * value for value in short]
    values = {"rope_theta": 1e6, "short_factor": short, "long_factor": long}
    values |= {"power": 0.5, "wavelength": 64.0, "factors": [1] * pairs}
    values |= {"growth": 0.01, "shift": -1.0, "capacity": 60.0}
    required = [k for k, default in kind.knobs().items() if default is MISSING]
    scale = {"scale": 4.0} if kind.takes_scale() else {}
    update = {"update": "sequence"} if issubclass(kind, LengthDependent) else {}
    return {knob: values[knob] for knob in required if knob in values} | scale | update


# The folder of an export: a config for the engine, and the model's other files beside it.

RECORD = "export.json"
"""The file that records the export: its form, flags, notes and errors."""

# Files that belong to training and not to the model, or are written anew.
_LEFT_OUT = ("config.json", RECORD, "posenc_config.json", "posenc.safetensors", "training_args.bin")
_PARTS = (".safetensors", ".json", ".model", ".jinja", ".txt", ".py", ".bin", ".md", ".png")
# The tokenizer class that transformers 5 writes, and its name in 4.57.
_TOKENIZER_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}


def write_export(export: Export, folder: str | Path, *, weights: str = "link") -> list[Path]:
    """Write `config.json` for the engine, and the model's other files beside it.

    Args:
        export: From `export`.
        folder: The folder to write, which must not be the model's; made if it does not exist.
        weights: One of `WEIGHTS`. The weights of an adapter are merged into its base model, unless this is
            `"none"`, and those of a GGUF file are dequantized. Of a hub model the config alone is written.

    Returns:
        The files that were written.

    Raises:
        PosencError: The engine cannot have the model, or the folder holds another.

    Examples:
        >>> from hf_posenc.engines import export, write_export
        >>> model.save_pretrained("model")
        >>> files = write_export(export("model", "vllm", method="yarn", scale=4), "for_vllm")
        >>> sorted(file.name for file in files)
        ['config.json', 'export.json', 'generation_config.json', 'model.safetensors']
    """
    if not export.possible:
        raise PosencError(f"{export.engine} cannot have {export.path}: {export.reason}.")
    if weights not in WEIGHTS:
        raise PosencError(f"weights is one of {', '.join(WEIGHTS)}, not {weights!r}.")
    if not isinstance(folder, str | Path) or not str(folder).strip():
        raise PosencError(f"{folder!r} is no folder to write the export to. Give its path.")
    folder, source = Path(folder), Path(export.base)
    if folder.resolve() in (Path(export.path).resolve(), source.resolve()):
        raise PosencError(f"{folder} is where the model is. Give another folder with --output.")
    if (folder / "config.json").exists() and not (folder / RECORD).exists():
        raise PosencError(f"{folder} holds another model. Give another folder with --output.")
    earlier = _earlier(folder)
    if earlier not in (None, (export.engine, export.path)):
        raise PosencError(
            f"{folder} holds the export of {earlier[1]} to {earlier[0]}. Give another folder with --output."
        )
    with disk_errors(f"The export cannot be written to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    dequantized = weights != "none" and find_gguf(source) is not None
    if dequantized or (export.is_adapter and weights != "none"):
        written += _merge(export, folder)
    elif source.is_dir() and weights != "none":
        written += [
            _place(path, folder / path.name, weights)
            for path in sorted(source.iterdir())
            if path.is_file() and path.name not in _LEFT_OUT and path.suffix in _PARTS
        ]
    if weights != "none":
        # Those of an earlier export may be in other files, which transformers would read first.
        old = {path for pattern in WEIGHT_FILES for path in folder.glob(pattern)} - set(written)
        for path in old:
            path.unlink()
    written += _adapt_tokenizer(export, folder)
    config = dict(export.config)
    if export.is_adapter and merged_dtype(export.path) != "auto":
        config |= {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
    if dequantized:
        config["dtype"] = read_json(folder / "config.json", folder).get("dtype")
    record = asdict(export)
    del record["config"]
    written += [_write_json(folder / "config.json", config), _write_json(folder / RECORD, record)]
    return sorted(set(written))


def _earlier(folder: Path) -> tuple[str, str] | None:
    """Return the engine and the model of the export that a folder holds; `None`: there is none."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return record["engine"], record["path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def merged_dtype(adapter: str | Path) -> str:
    """Return the dtype in which to merge an adapter: that of the weights it holds whole, else its base model's.

    Merging into bfloat16 would round away most of a short float32 training. LoRA's own matrices are no evidence:
    PEFT keeps them in float32 beside any base.
    """
    file = Path(adapter) / "adapter_model.safetensors"
    if not file.is_file():
        return "auto"
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        whole = [name for name in tensors.keys() if ".lora_" not in name]  # noqa: SIM118
        kinds = {tensors.get_slice(name).get_dtype() for name in whole}
    return "float32" if "F32" in kinds else "auto"


def _place(path: Path, target: Path, weights: str) -> Path:
    target.unlink(missing_ok=True)
    if weights == "link" and path.suffix in (".safetensors", ".bin"):
        with contextlib.suppress(OSError):  # another file system
            os.link(path.resolve(), target)
            return target
    shutil.copyfile(path, target)
    return target


def _merge(export: Export, folder: Path) -> list[Path]:
    """Write the weights of a model that is not stored as safetensors, and its tokenizer."""
    from transformers import AutoTokenizer

    model: Any = from_pretrained(export.path, dtype=merged_dtype(export.path))
    if export.is_adapter:
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    for path in (export.path, export.base):
        gguf = find_gguf(path)
        options = {} if gguf is None else {"gguf_file": str(gguf.resolve())}
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent if gguf else path, **options)
            tokenizer.save_pretrained(folder)
            break
        except Exception:  # none there, or none that can be loaded
            continue
    return [path for path in folder.iterdir() if path.name != RECORD]


def _adapt_tokenizer(export: Export, folder: Path) -> list[Path]:
    """Write the tokenizer's config with transformers 4.57's name of the class, or the context that vLLM serves."""
    file = folder / "tokenizer_config.json"
    if export.engine not in ("transformers4", "vllm") or not file.is_file():
        return []
    values = read_json(file, folder)
    if export.engine == "vllm":
        if tokenizer_length(folder) >= (served := int(export.flags[1])):
            return []
        return [_write_json(file, {**values, "model_max_length": served})]
    if (renamed := _TOKENIZER_CLASS.get(str(values.get("tokenizer_class")))) is None:
        return []
    values["tokenizer_class"] = renamed
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
