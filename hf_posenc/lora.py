"""LoRA adapters that carry the patch of the model that they were trained in. Needs peft (`hf-posenc[train]`).

An adapter is a change to weights that were trained under a patch; added to weights under none, it gives another model
without a word. PEFT has no field for that, and reads over fields that it does not know. What it cannot read over is the
type of an adapter: with one of our own on disk, plain PEFT stops at once (`KeyError: 'LORA_NEEDS_HF_POSENC'`), as do
transformers' `from_pretrained` and `load_adapter`, which ask it. In memory the adapter is an ordinary LoRA, so that
everything that knows LoRA (Trainer, TRL, merging, DoRA, quantized layers) treats it as one. vLLM does not read the
type, but takes no adapter with modules trained whole (`modules_to_save`), as those of `lora_config` are: merge first.
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
"""The type of the adapter on disk; what plain PEFT stops at, so it says what is needed."""


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
        """The patch.

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
        """The JSON form, with the type that plain PEFT does not load."""
        return {**super().to_dict(), "peft_type": PEFT_TYPE}  # type: ignore[no-untyped-call]


class _LoadedWithout:
    """What PEFT finds under `PEFT_TYPE` once this module is loaded: an error that says what to do instead."""

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
    """Reads an `adapter_config.json`, with a patch or without.

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


def check_patch(model: nn.Module, wanted: PatchConfig, source: str | Path) -> None:
    """Refuses a model whose patch is not that of an adapter.

    Raises:
        PosencError: It is another one, or there is none.
    """
    patch = get_patch(model)
    if patch is None or patch.config != wanted:
        there = "is not patched" if patch is None else f"is patched with {_words(patch.config)}"
        raise PosencError(
            f"The adapter in {source} was trained in a model patched with {_words(wanted)}, and this model {there}. "
            "Give hf_posenc.load_adapter a model that is not patched (unpatch_model), or one with that very patch."
        )


def _words(patch: PatchConfig) -> str:
    values = {**patch.to_dict(), "format": None, "method": None}
    said = ", ".join(f"{key}={value}" for key, value in values.items() if value not in (None, {}))
    return f"{patch.method} ({said})"


def add_adapter(
    model: nn.Module, config: PeftConfig, source: str | Path, **kwargs: Any
) -> PeftModel:
    """Adds a saved adapter to a model.

    Args:
        model: The base model, with the adapter's patch where it has one.
        config: What `read_adapter` read.
        source: The directory or the hub repository that the weights are in.
        **kwargs: For `PeftModel.from_pretrained`, `is_trainable` among them.
    """
    if isinstance(config, PosencLoraConfig):
        check_patch(model, config.patch(), source)
    found: PeftModel = PeftModel.from_pretrained(model, str(source), config=config, **kwargs)
    return found
