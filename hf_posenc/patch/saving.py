"""The `save_pretrained` of a patched model, which wraps that of its class while it is patched."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn

from hf_posenc.patch.state import state_of

_NAME = "save_pretrained"
_OF_TRAINER = re.compile(r"checkpoint-\d+")
_SCALING = "rope_scaling"


def wrap_saving(model: nn.Module) -> None:
    """Make a model's `save_pretrained` write what the readers of the folder need; a copy of the model has its own."""
    if hasattr(type(model), _NAME):
        vars(model)[_NAME] = MethodType(save_pretrained, model)


def unwrap_saving(model: nn.Module) -> None:
    """Undo `wrap_saving`."""
    vars(model).pop(_NAME, None)


def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a patched model as its class does.

    The Trainer reads a `checkpoint-N` to resume as a config without a model type. As such, transformers 5 fails on the
    `rope_scaling` of transformers 4, so that key is left out there. Warns once where plain transformers cannot
    compute the patch.
    """
    _warn_once(model, save_directory)
    resumable = _OF_TRAINER.fullmatch(Path(save_directory).name)
    with _without_scaling(model.config) if resumable else contextlib.nullcontext():
        return getattr(type(model), _NAME)(model, save_directory, *args, **kwargs)


def _warn_once(model: Any, save_directory: Any) -> None:
    state = state_of(model)
    saves_adapter = getattr(model, "_hf_peft_config_loaded", False)
    if state is None or state.export is not None or state.warned or saves_adapter:
        return
    state.warned = True
    warnings.warn(
        f"Plain transformers cannot compute {' + '.join(name for name, _ in state.config.parts)} and would load this "
        f"model without it, silently. Load it with hf_posenc.from_pretrained({str(save_directory)!r}).",
        stacklevel=3,
    )


@contextlib.contextmanager
def _without_scaling(config: Any) -> Iterator[None]:
    values = vars(config)
    scaling = {_SCALING: values.pop(_SCALING)} if _SCALING in values else {}
    try:
        yield
    finally:
        values.update(scaling)
