"""DeepSpeed ZeRO-3 and a model that is to be tried before it is trained.

Under ZeRO-3 transformers splits the weights while it loads them (`zero3_init_flag: false` does not change that), and no
process can run the model until the Trainer has wrapped it. But a patch, the loss in chunks and the dependencies of a
batch are all tried on the live model first. So it is loaded whole, into the memory of the CPU, and split afterwards,
one parameter at a time: no device ever holds all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from hf_posenc.training.launching import wants_fsdp


@contextlib.contextmanager
def whole_weights(arguments: TrainingArguments) -> Iterator[None]:
    """Models that are loaded in the block have all their weights in every process; nothing changes without ZeRO-3.

    Args:
        arguments: The run's; made before, so that DeepSpeed is set up.
    """
    if not _splits(arguments):
        yield
        return
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        given = getattr(arguments, "hf_deepspeed_config", None)
        if given is None:  # by `accelerate launch`, not by --deepspeed
            plugin: Any = arguments.deepspeed_plugin
            plugin.set_deepspeed_weakref()
        else:
            deepspeed.set_hf_deepspeed_config(given)


def share_weights(model: nn.Module, arguments: TrainingArguments) -> None:
    """Splits a whole model over the processes for ZeRO-3, in place; does nothing without it.

    The first process's values count. Call it last, just before `Trainer(model, ...)`.

    Args:
        model: Loaded in `whole_weights`, patched, with its adapter.
        arguments: The run's.
    """
    if not _splits(arguments):
        return
    import deepspeed
    from transformers.integrations.deepspeed import deepspeed_config

    config: dict[str, Any] = deepspeed_config() or {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(name, {}).get("enabled") is True:  # DeepSpeed keeps float32 copies of its own
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)


def is_planned(arguments: TrainingArguments) -> bool:
    """Whether the Trainer will share the weights out, by FSDP or DeepSpeed: no device may hold all of them."""
    return wants_fsdp(arguments) or arguments.deepspeed_plugin is not None


def _splits(arguments: TrainingArguments) -> bool:
    plugin: Any = arguments.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3
