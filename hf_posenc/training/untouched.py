"""Looking at a model in the middle of its training without a trace: the next step is what it would have been."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


class RandomState:
    """The generators of Python, NumPy and PyTorch (the CPU's and that of the current GPU) as they stand now."""

    def __init__(self) -> None:
        self._python, self._numpy, self._cpu = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
        )
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state() if in_use else None

    def restore(self) -> None:
        """Puts all of them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts back what forwards leave behind: random generators, and what modules without weights remember.

    transformers' dynamic RoPE keeps the table of the longest text so far. FSDP2 keeps the outermost parameters whole
    after a forward that no backward follows.

    Args:
        model: The model, wrapped or sharded as it may be.
    """
    draws, kept = RandomState(), [(module, _memory(module)) for module in _without_weights(model)]
    reshard(model)
    try:
        yield
    finally:
        reshard(model)
        for module, before in kept:
            _put_back(module, *before)
        draws.restore()


def reshard(model: nn.Module) -> None:
    """Lets every FSDP2 module hold its own part of the parameters only."""
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):
            free()


def _without_weights(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if not module._parameters)


def _memory(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return own, dict(module._buffers)


def _put_back(module: nn.Module, own: dict[str, Any], buffers: dict[str, Any]) -> None:
    for name in [name for name in vars(module) if not name.startswith("_")]:
        if name not in own:
            del vars(module)[name]
    vars(module).update(own)
    module._buffers.clear()
    module._buffers.update(buffers)
