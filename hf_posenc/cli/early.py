"""Checks of a command's words that need neither torch nor a model: names, numbers, files and folders."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_posenc.diagnosis import check_folder, read_json, unreadable
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.loading import ADAPTER, base_of, check_name, check_tokenizer
from hf_posenc.evaluation.options import (
    BenchOptions,
    DocumentOptions,
    ModelOptions,
    PerplexityOptions,
    ProtocolOptions,
    RunOptions,
)
from hf_posenc.gguf_file import find_gguf, read_header

# PyTorch's own devices; a package that adds one is found by its entry point, and its names are checked by PyTorch.
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|mtia|xla|ipu|maia|vulkan)(:\d+)?")
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "meta")


def check(
    options: Any, model: ModelOptions, documents: DocumentOptions | None, run: RunOptions
) -> None:
    """Check the words of a command that measures: methods, model, protocol and documents."""
    check_methods(getattr(options, "methods", None))
    check_model(model, weights=not run.dry_run)
    if isinstance(options, ProtocolOptions):
        check_protocol(options)
    if documents is not None:
        check_documents(documents)


def check_model(options: ModelOptions, *, weights: bool = False) -> None:
    """Refuse a model, a tokenizer, a number format or a device that is not there, and weights that are damaged."""
    device, device_map = options.device, options.device_map
    if device is not None and device_map not in (None, "meta"):
        raise PosencError("--device and --device-map exclude each other: give one of them.")
    check_device(device)
    if device_map not in _MAPS:
        check_device(device_map, f"--device-map is {', '.join(_MAPS)} or a device.")
    if options.attn is not None and not options.trust_remote_code:
        _check_attention(options.attn)
    if options.model is not None:
        check_checkpoint(options.model, options.revision)
    if options.tokenizer is not None:
        check_name(options.tokenizer, given="tokenizer")
    source = options.tokenizer or options.model
    if source is not None and not options.trust_remote_code:
        check_tokenizer(source)
    if not weights or options.model is None or options.trust_remote_code:
        return
    folder = Path(options.model).expanduser()
    if (folder / ADAPTER).is_file():  # `check_checkpoint` has read it
        folder = Path(read_json(folder / ADAPTER, folder)["base_model_name_or_path"])
    damage = unreadable(folder)
    if damage is not None:
        raise PosencError(
            f"The model {folder} cannot be loaded: {damage.rstrip('.')}. --dry-run reads no weights."
        )


def check_checkpoint(name: str, revision: str | None = None) -> str:
    """Return the name of a model as `check_name`; check its config or header too, and of an adapter the base model."""
    name = check_name(name, revision)
    folder, gguf = Path(name), find_gguf(name)
    if gguf is not None:
        read_header(gguf)
    elif (folder / ADAPTER).is_file():
        check_checkpoint(*base_of(folder / ADAPTER, name))
    elif folder.is_dir():
        check_folder(folder, name)
        values = read_json(folder / "config.json", name)
        kind = values.get("model_type")
        if isinstance(kind, str) and "auto_map" not in values and not _named("models/auto", kind):
            raise PosencError(
                f"The config.json of {name} cannot be read: The checkpoint you are trying to load has model type "
                f"`{kind}`, and transformers {metadata.version('transformers')} does not have it. Correct it there, "
                "or install a newer version."
            )
    return name


def check_device(name: str | None, also: str = "") -> None:
    """Refuse the name of a device that PyTorch does not have."""
    if name == "meta":
        raise PosencError("The device 'meta' holds no weights: give cpu, or an accelerator.")
    if name is None or _DEVICE.fullmatch(name) or metadata.entry_points(group="torch.backends"):
        return
    raise PosencError(
        f"The device {name!r} cannot be used: PyTorch has none of this name. Give cpu, cuda or cuda:1. {also}".rstrip()
    )


def _check_attention(name: str) -> None:
    """Refuse a plain name that the source of transformers does not contain; a kernel of the hub has a slash."""
    if name.isidentifier() and not _named("modeling_utils.py", name):
        raise PosencError(
            f"--attn {name}: transformers has no such attention. Give sdpa, eager or flash_attention_2."
        )


def _named(place: str, name: str) -> bool:
    """Return whether a file of the source of transformers, or one of a folder, contains a name in quotes."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return True
    path = Path(spec.origin).parent / place
    files = path.glob("*auto*.py") if path.is_dir() else (path,)
    return any(f'"{name}"' in file.read_text(encoding="utf-8") for file in files)


def check_documents(options: DocumentOptions) -> None:
    """Refuse options that exclude each other or that nothing reads, and files of which there is none."""
    from hf_posenc.evaluation.documents.source import check_readable, refuse_ignored, source_of

    if (
        options.dataset
        and re.match(r"[./~]", options.dataset)
        and not Path(options.dataset).exists()
    ):
        raise PosencError(
            f"There is no folder {options.dataset}. Give --dataset a hub name or a folder."
        )
    refuse_ignored(options)
    check_readable(source_of(options), options.text or ())


def check_methods(specs: Sequence[str] | None) -> None:
    """Refuse unknown methods and options, and values that a method refuses on every model."""
    if not specs:  # nothing to check, and no reason to import all methods
        return
    from hf_posenc.evaluation.measuring.candidates import parse_candidates

    for candidate in parse_candidates(specs):
        candidate.check_values()


def check_protocol(options: ProtocolOptions) -> None:
    """Refuse protocols, presets and evaluators that do not exist or exclude each other."""
    from hf_posenc.evaluation.perplexity import protocols

    if isinstance(options, BenchOptions):
        names = [field.name for field in dataclasses.fields(ProtocolOptions)]
        shared = {name: getattr(options, name) for name in names}
        options = PerplexityOptions(**shared, lengths=options.lengths)
    assert isinstance(options, PerplexityOptions)
    protocols.check_options(options)
    if options.longppl is not None:
        name, spec = protocols.parse_evaluator(options.longppl)
        check_methods([spec] if spec else None)
        if name != protocols.SELF:
            check_name(name)
