"""What is known of model families: the loader of `patches/`.

`hf_posenc` finds rotary tables by inspection. A family needs an adapter for what inspection cannot
see, and to be named: naming a model type in `patches/` is a promise that the test matrix holds for
it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_posenc.errors import UnsupportedModelError
from hf_posenc.model.legacy import ROPE_TYPES, LegacyKeys


@dataclass(frozen=True, kw_only=True)
class ArchAdapter:
    """One family of model types and its quirks.

    Attributes:
        family: A name for tables.
        model_types: The `config.model_type` values of text decoders that the family covers.
        sincos_table: The attribute that holds a precomputed `[sin | cos]` table (GPT-J), instead of
            an `inv_freq` buffer.
        log_gain: A buffer of the rotary module with the logarithm of a learned factor on each
            frequency.
        legacy_keys: The names that transformers 4 gave `rope_theta` and its like in this family's config.
        legacy_rope_types: The rope types that transformers 4.57 computes, for model types where these are not all.
        legacy_fields: The keys that its `rope_scaling` must have, for model types where it takes no others.
        refused_if: Config attributes that, when true, mean that a model does not rotate, with the
            reason.
    """

    family: str
    model_types: tuple[str, ...]
    sincos_table: str | None = None
    log_gain: str | None = None
    legacy_keys: Mapping[str, str] = field(default_factory=dict)
    legacy_rope_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    legacy_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused_if: Mapping[str, str] = field(default_factory=dict)

    def legacy(self, config: Any) -> LegacyKeys:
        """How transformers 4.57 reads the rotary embedding of a model type."""
        name = config.model_type
        return LegacyKeys(
            names=self.legacy_keys,
            rope_types=self.legacy_rope_types.get(name, ROPE_TYPES),
            fields=self.legacy_fields.get(name),
        )

    def check(self, config: Any) -> None:
        """Refuses a model that the family is known not to support.

        Raises:
            UnsupportedModelError: With the reason.
        """
        reason = next(
            (why for key, why in self.refused_if.items() if getattr(config, key, False)), None
        )
        if reason is not None:
            raise UnsupportedModelError(f"{config.model_type} cannot be patched: {reason}")


_DISCOVERED = ArchAdapter(family="found by inspection", model_types=())


def get_adapter(model_type: str) -> ArchAdapter:
    """The adapter that names this model type; one without quirks where none does (inspection then decides)."""
    return _adapters().get(model_type, _DISCOVERED)


def available_architectures() -> tuple[str, ...]:
    """The model types that `patches/` names, sorted: those that the test matrix covers."""
    return tuple(sorted(_adapters()))


def patches_folder() -> Path:
    """The folder of the adapters and recipes, installed or in a checkout."""
    module = _patches()
    assert module.__file__ is not None
    return Path(module.__file__).parent


@functools.cache
def _adapters() -> Mapping[str, ArchAdapter]:
    package = _patches()
    found: dict[str, ArchAdapter] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if not info.ispkg:
            adapter: ArchAdapter = importlib.import_module(
                f"{package.__name__}.{info.name}"
            ).ADAPTER
            for model_type in adapter.model_types:
                if found.setdefault(model_type, adapter) is not adapter:
                    raise RuntimeError(f"Two files in patches/ name the model type {model_type!r}.")
    return found


def _patches() -> ModuleType:
    """The `patches/` folder: `hf_posenc.patches` once installed, the sibling folder in a bare checkout."""
    name = f"{__package__}.patches"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    folder = Path(__file__).resolve().parents[1] / "patches"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
