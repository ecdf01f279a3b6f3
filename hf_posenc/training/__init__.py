"""Training of a patched model for a longer context: the parts of scripts/finetune.py, imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.training.batches.blocks import prepare_blocks
    from hf_posenc.training.batches.collator import PositionCollator
    from hf_posenc.training.batches.dependencies import check_dependencies
    from hf_posenc.training.callbacks import PerplexityCallback, SaveOnSignal
    from hf_posenc.training.checkpoints import SafeCheckpoints, last_complete_checkpoint
    from hf_posenc.training.checks import check_run
    from hf_posenc.training.chunked_loss.loss import chunk_loss
    from hf_posenc.training.folder import TrainingFolder
    from hf_posenc.training.log import TrainingLog, loss_figure
    from hf_posenc.training.parameters import choose_parameters, lora_config
    from hf_posenc.training.result import write_card
    from hf_posenc.training.scoring import Scores, score

__all__ = [
    "PerplexityCallback",
    "PositionCollator",
    "SafeCheckpoints",
    "SaveOnSignal",
    "Scores",
    "TrainingFolder",
    "TrainingLog",
    "check_dependencies",
    "check_run",
    "choose_parameters",
    "chunk_loss",
    "last_complete_checkpoint",
    "lora_config",
    "loss_figure",
    "prepare_blocks",
    "score",
    "write_card",
]

_HOMES = {
    "PerplexityCallback": "callbacks",
    "PositionCollator": "batches.collator",
    "SafeCheckpoints": "checkpoints",
    "SaveOnSignal": "callbacks",
    "Scores": "scoring",
    "TrainingFolder": "folder",
    "TrainingLog": "log",
    "check_dependencies": "batches.dependencies",
    "check_run": "checks",
    "choose_parameters": "parameters",
    "chunk_loss": "chunked_loss.loss",
    "last_complete_checkpoint": "checkpoints",
    "lora_config": "parameters",
    "loss_figure": "log",
    "prepare_blocks": "batches.blocks",
    "score": "scoring",
    "write_card": "result",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
