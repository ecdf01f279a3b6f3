"""Change how a loaded Hugging Face model encodes position: in place, reversibly, with one call."""

from __future__ import annotations

from hf_posenc.adapters import available_architectures
from hf_posenc.errors import PosencError, UnsupportedModelError, VerificationError
from hf_posenc.methods import Method, available_methods, get_method
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.patching import get_patch, inspect_rope, patch_model, patched, unpatch_model
from hf_posenc.patch.report import EffectiveTable, Patch
from hf_posenc.saving import (
    available_recipes,
    from_pretrained,
    get_recipe,
    load_adapter,
    load_patch,
    save_patch,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "EffectiveTable",
    "Method",
    "Patch",
    "PatchConfig",
    "PosencError",
    "UnsupportedModelError",
    "VerificationError",
    "available_architectures",
    "available_methods",
    "available_recipes",
    "from_pretrained",
    "get_method",
    "get_patch",
    "get_recipe",
    "inspect_rope",
    "load_adapter",
    "load_patch",
    "patch_model",
    "patched",
    "save_patch",
    "unpatch_model",
]
