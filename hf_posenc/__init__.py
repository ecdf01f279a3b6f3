"""Change how a loaded Hugging Face model encodes position: in place, reversibly, with one call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.adapters import available_architectures as available_architectures
    from hf_posenc.adapters import available_recipes as available_recipes
    from hf_posenc.adapters import get_recipe as get_recipe
    from hf_posenc.attention.engine import set_backend as set_backend
    from hf_posenc.errors import PosencError as PosencError
    from hf_posenc.errors import UnsupportedModelError as UnsupportedModelError
    from hf_posenc.errors import VerificationError as VerificationError
    from hf_posenc.methods import Method as Method
    from hf_posenc.methods import available_methods as available_methods
    from hf_posenc.methods import get_method as get_method
    from hf_posenc.methods import register_method as register_method
    from hf_posenc.patch.config import PatchConfig as PatchConfig
    from hf_posenc.patch.files import load_patch as load_patch
    from hf_posenc.patch.files import save_patch as save_patch
    from hf_posenc.patch.patching import get_patch as get_patch
    from hf_posenc.patch.patching import inspect_positions as inspect_positions
    from hf_posenc.patch.patching import patch_model as patch_model
    from hf_posenc.patch.patching import patched as patched
    from hf_posenc.patch.patching import unpatch_model as unpatch_model
    from hf_posenc.patch.report import EffectiveTable as EffectiveTable
    from hf_posenc.patch.report import Patch as Patch
    from hf_posenc.patch.report import inspect_rope as inspect_rope
    from hf_posenc.saving import from_pretrained as from_pretrained
    from hf_posenc.saving import load_adapter as load_adapter

__version__ = "0.1.0.dev0"

# Importing the package loads neither torch nor transformers: a name is imported from its module on first use.
_MODULES = {
    "adapters": "available_architectures available_recipes get_recipe",
    "attention.engine": "set_backend",
    "errors": "PosencError UnsupportedModelError VerificationError",
    "methods": "Method available_methods get_method register_method",
    "patch.config": "PatchConfig",
    "patch.files": "load_patch save_patch",
    "patch.patching": "get_patch inspect_positions patch_model patched unpatch_model",
    "patch.report": "EffectiveTable Patch inspect_rope",
    "saving": "from_pretrained load_adapter",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
_ROOMS = {module.split(".")[0] for module in _MODULES} | {"attention", "files", "model", "rope"}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _ROOMS:  # `import hf_posenc` alone makes `hf_posenc.methods` usable
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
