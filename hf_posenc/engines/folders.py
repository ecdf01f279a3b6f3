"""The folder of an export: a config for the engine, and the model's other files beside it."""

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
"""The file that records the export: its form, flags, notes and errors."""

WEIGHTS = ("link", "copy", "none")
"""Ways to treat the files beside the config: hard links (copies where the file system has none), copies, nothing."""

# Files that belong to training and not to the model, or are written anew.
_LEFT_OUT = ("config.json", RECORD, "posenc_config.json", "posenc.safetensors", "training_args.bin")
_PARTS = (".safetensors", ".json", ".model", ".jinja", ".txt", ".py", ".bin", ".md")
# The tokenizer class that transformers 5 writes, and its name in 4.57.
_TOKENIZER_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}


def write_export(export: Export, folder: str | Path, *, weights: str = "link") -> list[Path]:
    """Write `config.json` for the engine, and the model's other files beside it.

    Args:
        export: From `export`.
        folder: The folder to write, which must not be the model's; made if it does not exist.
        weights: One of `WEIGHTS`. The weights of an adapter are merged into its base model, unless this is
            `"none"`. Of a hub model the config alone is written.

    Returns:
        The files that were written.

    Raises:
        PosencError: The engine cannot have the model, or the folder holds another.
    """
    if not export.possible:
        raise PosencError(f"{export.engine} cannot have {export.path}: {export.reason}.")
    if weights not in WEIGHTS:
        raise PosencError(f"weights is one of {', '.join(WEIGHTS)}, not {weights!r}.")
    folder, source = Path(folder), Path(export.base)
    if folder.resolve() in (Path(export.path).resolve(), source.resolve()):
        raise PosencError(f"{folder} is where the model is. Give another folder with --output.")
    if (folder / "config.json").exists() and not (folder / RECORD).exists():
        raise PosencError(f"{folder} holds another model. Give another folder with --output.")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    if export.is_adapter and weights != "none":
        written += _merge(export, folder)
    elif source.is_dir() and weights != "none":
        written += [_place(path, folder / path.name, weights) for path in _files(source)]
    written += _rename_tokenizer_class(export, folder)
    config = dict(export.config)
    if export.is_adapter and merged_dtype(export.path) != "auto":
        config |= {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
    for name, values in (("config.json", config), (RECORD, export.to_dict())):
        written.append(_write_json(folder / name, values))
    return sorted(set(written))


def merged_dtype(adapter: str | Path) -> str:
    """Return the dtype in which to merge an adapter: that of the weights it holds whole, else its base model's.

    Merging into bfloat16 would lose most of a short float32 training to rounding. LoRA's own matrices are
    no evidence: PEFT keeps them in float32 beside any base.
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


def _files(source: Path) -> Iterator[Path]:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in _LEFT_OUT and path.suffix in _PARTS:
            yield path


def _place(path: Path, target: Path, weights: str) -> Path:
    target.unlink(missing_ok=True)
    if weights == "link" and path.suffix in (".safetensors", ".bin"):
        try:
            os.link(path.resolve(), target)
            return target
        except OSError:  # another file system
            pass
    shutil.copyfile(path, target)
    return target


def _merge(export: Export, folder: Path) -> list[Path]:
    """Save the base model with the adapter's weights in it."""
    from transformers import AutoTokenizer

    from hf_posenc.saving import from_pretrained

    model: Any = from_pretrained(export.path, dtype=merged_dtype(export.path)).merge_and_unload()
    model.save_pretrained(folder)
    for path in (export.path, export.base):
        try:
            AutoTokenizer.from_pretrained(path).save_pretrained(folder)
            break
        except Exception:  # none there, or none that can be loaded
            continue
    return [path for path in folder.iterdir() if path.name != RECORD]


def _rename_tokenizer_class(export: Export, folder: Path) -> list[Path]:
    """Write the tokenizer's config with the class name of transformers 4.57."""
    file = folder / "tokenizer_config.json"
    if export.engine != "transformers4" or not file.is_file():
        return []
    values = json.loads(file.read_text(encoding="utf-8"))
    renamed = _TOKENIZER_CLASS.get(values.get("tokenizer_class"))
    if renamed is None:
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
