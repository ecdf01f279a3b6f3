"""LoRA adapters that carry the patch of the model that they were trained in. Needs peft (`hf-posenc[train]`).

An adapter is a change to weights that were trained under a patch. Added to an unpatched model, it gives another model
in silence. PEFT has no field for that, and ignores fields that it does not know. It cannot ignore the type of an
adapter: with our own type on disk, plain PEFT raises (`KeyError: 'LORA_NEEDS_HF_POSENC'`), as do transformers'
`from_pretrained` and `load_adapter`, which call it. In memory the adapter is an ordinary LoRA, so that Trainer, TRL,
merging, DoRA and quantized layers treat it as one. vLLM does not read the type, but refuses adapters with modules
trained whole (`modules_to_save`), as those of `lora_config` are: merge first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftConfig, PeftModel
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.patching import get_patch

PEFT_TYPE = "LORA_NEEDS_HF_POSENC"
"""The type of the adapter on disk; plain PEFT raises an error with this name, so it names what is needed."""


@dataclass
class PosencLoraConfig(LoraConfig):
    """A LoRA of a patched model: PEFT's own configuration, and the patch.

    Args:
        hf_posenc: The patch, as `PatchConfig.to_dict` gives it.
    """

    hf_posenc: dict[str, Any] | None = field(
        default=None, metadata={"help": "The patch of the model that the adapter was trained in."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.patch()

    def patch(self) -> PatchConfig:
        """Return the patch.

        Raises:
            PosencError: None was given, or one that this version cannot read.
        """
        if self.hf_posenc is None:
            raise PosencError(
                "PosencLoraConfig holds the patch of a model: pass hf_posenc=get_patch(model).config.to_dict(), or "
                "take LoraConfig for a model without one."
            )
        return PatchConfig.from_dict(self.hf_posenc)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with the type that plain PEFT does not load."""
        return {**super().to_dict(), "peft_type": PEFT_TYPE}  # type: ignore[no-untyped-call]


class _LoadedWithout:
    """The config class that PEFT calls for `PEFT_TYPE` once this module is loaded: it raises with the way out."""

    def __init__(self, **_: Any) -> None:
        self.from_pretrained("this directory")

    @classmethod
    def from_pretrained(cls, source: Any, **_: Any) -> NoReturn:
        raise PosencError(
            f"The adapter in {source} belongs to a patched model, and PEFT alone would add it to any. Load it with "
            "hf_posenc.from_pretrained(...), which loads the base model and patches it, or add it to a model that is "
            "loaded with hf_posenc.load_adapter(model, ...)."
        )


PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = _LoadedWithout  # type: ignore[index, assignment]


def read_adapter(path: str | Path) -> PeftConfig:
    """Read an `adapter_config.json`, with a patch or without.

    Raises:
        PosencError: A patch that this version cannot read.
    """
    values: Mapping[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if values.get("peft_type") != PEFT_TYPE:
        plain: PeftConfig = PeftConfig.from_peft_type(**values)
        return plain
    own = {key: value for key, value in values.items() if key != "peft_type"}
    config: PosencLoraConfig = PosencLoraConfig.from_peft_type(**own)  # type: ignore[no-untyped-call]
    return config


def check_patch(model: nn.Module, required: PatchConfig, source: str | Path) -> None:
    """Refuse a model whose patch is not that of an adapter.

    Raises:
        PosencError: The model has another patch, or none.
    """
    patch = get_patch(model)
    if patch is None or patch.config != required:
        actual = "is not patched" if patch is None else f"is patched with {_short(patch.config)}"
        raise PosencError(
            f"The adapter in {source} was trained in a model patched with {_short(required)}, and this model {actual}. "
            "Give hf_posenc.load_adapter a model that is not patched (unpatch_model), or one with that very patch."
        )


def _short(patch: PatchConfig) -> str:
    values = {**patch.to_dict(), "format": None, "method": None}
    shown = (f"{key}={value}" for key, value in values.items() if value not in (None, {}))
    return f"{patch.method} ({', '.join(shown)})"


def add_adapter(
    model: nn.Module, config: PeftConfig, source: str | Path, **kwargs: Any
) -> PeftModel:
    """Add a saved adapter to a model.

    Args:
        model: The base model, with the adapter's patch where it has one.
        config: The adapter's config (`read_adapter`).
        source: The directory or the hub repository of the weights.
        **kwargs: For `PeftModel.from_pretrained`, `is_trainable` among them.
    """
    if isinstance(config, PosencLoraConfig):
        check_patch(model, config.patch(), source)
    result: PeftModel = PeftModel.from_pretrained(model, str(source), config=config, **kwargs)
    return result
