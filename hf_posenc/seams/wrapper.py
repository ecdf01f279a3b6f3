"""What every module does that stands in the place of a model's rotary embedding."""

from __future__ import annotations

from typing import Any

from torch import nn


class RotaryWrapper(nn.Module):
    """Keeps the wrapped rotary module as the child `base`, invisible to checkpoints and to code that reads it.

    Args:
        base: The rotary module to stand in for.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        # Saved and loaded under the names that the checkpoint has.
        self.register_state_dict_post_hook(_without_base)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_base)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Model code reads `rotary_emb.config`, `.layer_types`, `.mrope_section` of the module it
            # built. Private names are somebody's hooks on the base, which are not the wrapper's.
            if name == "base" or name.startswith("_"):
                raise
            return getattr(self.base, name)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model's own rotary module."""
    while isinstance(module, RotaryWrapper):
        module = module.base
    return module


def _without_base(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for key in [key for key in state_dict if key.startswith(f"{prefix}base.")]:
        state_dict[prefix + key.removeprefix(f"{prefix}base.")] = state_dict.pop(key)


def _with_base(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}base.{key.removeprefix(prefix)}"] = state_dict.pop(key)
