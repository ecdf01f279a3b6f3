"""LoRA adapters that carry the patch of the model that they were trained in. Needs peft (`hf-posenc[train]`).

Added to an unpatched model, such an adapter would give another model in silence. PEFT ignores fields that it does not
know, but not the type of an adapter: with our own type on disk, plain PEFT and transformers raise a `KeyError` with its
name. In memory the adapter is an ordinary LoRA for Trainer, TRL, merging, DoRA and quantized layers. vLLM does not
read the type, but refuses modules that were trained whole (`modules_to_save`): merge first.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftConfig

from hf_posenc.errors import PosencError, one_line
from hf_posenc.methods import available_methods
from hf_posenc.model.parameters import PARAMETERS, trained_parameters, write_parameters
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.export import BLOCK
from hf_posenc.patch.state import BESIDE, State

PEFT_TYPE = "LORA_NEEDS_HF_POSENC"
"""The type of the adapter on disk; plain PEFT raises an error with this name, so it names what is needed."""


@dataclass
class PosencLoraConfig(LoraConfig):
    """A LoRA of a patched model: PEFT's own configuration, and the patch as `PatchConfig.to_dict` gives it."""

    hf_posenc: dict[str, Any] | None = field(
        default=None, metadata={"help": "The patch of the model that the adapter was trained in."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.patch()

    def patch(self) -> PatchConfig:
        """Return the patch; raise if none was given, or one that this version cannot read."""
        if self.hf_posenc is None:
            raise PosencError(
                "PosencLoraConfig holds the patch of a model: pass hf_posenc=get_patch(model).config.to_dict(), or "
                "take LoraConfig for a model without one."
            )
        return PatchConfig.from_dict(self.hf_posenc)

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save as PEFT does, and beside it the parameters of the patch that the adapter's weights do not hold."""
        super().save_pretrained(save_directory, **kwargs)
        write_parameters(vars(self).get(BESIDE, {}), save_directory)

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


def carry_patch(model: Any, state: State) -> None:
    """Make the plain LoRA configs of a patched model such that carry its patch; warn once of what is not saved.

    The parameters of the patch are not trained by such a LoRA, but may have started from random values.
    """
    lost = []
    own = [name for name, _ in state.config.parts if name not in available_methods()]
    for name, config in model.peft_config.items():
        whole = config.modules_to_save or () if isinstance(config, LoraConfig) else ()
        if type(config) is LoraConfig and not (own or state.foreign):
            config.__class__ = PosencLoraConfig
            vars(config)[BLOCK] = state.config.to_dict()
            state.adapters.append(config)
        elif not isinstance(config, PosencLoraConfig):
            kind = "a method that is not registered" if own else config.peft_type.value
            way = "Use a LoRA and a registered method (hf_posenc.register_method), or patch before you load the adapter"
            if state.foreign:
                kind = "frequencies set by hand"
                way = "Set them and patch again before you load the adapter"
            lost.append(
                f"The adapter {name!r} ({kind}) is saved without the patch, {state.config}, and PEFT would load "
                f"it on an unpatched model. {way}."
            )
        if isinstance(config, PosencLoraConfig) and PARAMETERS not in whole:
            vars(config)[BESIDE] = trained_parameters(model)
    if lost and "adapter" not in state.warned:
        state.warned.add("adapter")
        warnings.warn(" ".join(lost), stacklevel=2)


PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = _LoadedWithout  # type: ignore[index, assignment]


def read_adapter(path: str | Path) -> tuple[PeftConfig, PatchConfig | None]:
    """Read an `adapter_config.json`, and the patch that it carries, if any."""
    try:
        values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise TypeError("it holds no JSON object")
        if values.get("peft_type") != PEFT_TYPE:
            return PeftConfig.from_peft_type(**values), None
    except KeyError as error:
        raise PosencError(f"{path} has a peft_type that PEFT does not know: {error}.") from error
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise PosencError(f"{path} is not the config of an adapter: {one_line(error)}") from error
    if not isinstance(values.get(BLOCK), dict):
        raise PosencError(
            f"{path} belongs to an adapter of a patched model, and lacks the block {BLOCK!r} that holds the patch. "
            "Restore the file, or save the adapter again."
        )
    del values["peft_type"]
    config: PosencLoraConfig = PosencLoraConfig.from_peft_type(**values)  # type: ignore[no-untyped-call]
    return config, config.patch()
