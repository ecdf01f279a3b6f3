"""Training of a patched model for a longer context: the parts of `hf-posenc finetune`, imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import naming_extras

if TYPE_CHECKING:
    from hf_posenc.training.blocks import prepare_blocks as prepare_blocks
    from hf_posenc.training.callbacks import PerplexityCallback as PerplexityCallback
    from hf_posenc.training.callbacks import SaveOnSignal as SaveOnSignal
    from hf_posenc.training.checkpoints import SafeCheckpoints as SafeCheckpoints
    from hf_posenc.training.checkpoints import TrainingFolder as TrainingFolder
    from hf_posenc.training.checkpoints import last_complete_checkpoint as last_complete_checkpoint
    from hf_posenc.training.checks import check_dependencies as check_dependencies
    from hf_posenc.training.checks import check_run as check_run
    from hf_posenc.training.chunked_loss import chunk_loss as chunk_loss
    from hf_posenc.training.collator import PositionCollator as PositionCollator
    from hf_posenc.training.distillation import distill as distill
    from hf_posenc.training.distillation import unpatched_teacher as unpatched_teacher
    from hf_posenc.training.parameters import choose_parameters as choose_parameters
    from hf_posenc.training.parameters import lora_config as lora_config
    from hf_posenc.training.result import TrainingLog as TrainingLog
    from hf_posenc.training.result import write_card as write_card
    from hf_posenc.training.scoring import Scores as Scores
    from hf_posenc.training.scoring import score as score

_MODULES = {
    "blocks": "prepare_blocks",
    "collator": "PositionCollator",
    "callbacks": "PerplexityCallback SaveOnSignal",
    "checkpoints": "SafeCheckpoints TrainingFolder last_complete_checkpoint",
    "checks": "check_dependencies check_run",
    "chunked_loss": "chunk_loss",
    "distillation": "distill unpatched_teacher",
    "parameters": "choose_parameters lora_config",
    "result": "TrainingLog write_card",
    "scoring": "Scores score",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_extras():
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
