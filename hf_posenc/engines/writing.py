"""The files of an export: a folder that the engine loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_posenc.engines.exporting import Export
from hf_posenc.errors import PosencError

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
