"""Lets a model's configs follow a patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_posenc import export
from hf_posenc.install.state import State


def write_config(
    model: nn.Module, state: State, edits: Sequence[tuple[Any, Mapping[str, Any]]]
) -> None:
    """Writes to configs, and into the outermost one the block that `from_pretrained` reads."""
    outer: Any = model.config
    paths = {id(part): path for path, part in export.config_parts(outer)}
    before = {}
    for config, values in edits:
        state.configs.append((config, export.write(config, values)))
        if id(config) in paths:
            before[paths[id(config)]] = state.configs[-1][1]
    block = {**state.config.to_dict(), "before": before}
    state.configs.append((outer, export.write(outer, {export.BLOCK: block})))
