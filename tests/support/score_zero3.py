"""Training under ZeRO-3, scored or not: started by `accelerate launch` in test_training_scoring_ranks.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from hf_posenc.model.unwrapping import is_sharded
from hf_posenc.training.callbacks import PerplexityCallback
from hf_posenc.training.processes import group_shard, leave_group, partition_weights, whole_weights
from tests.training.test_training_scoring import blocks, make_scores, patched_model

STEPS = 4


def run(folder: Path, scored: bool) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2} if scored else {}
    options |= {"max_steps": STEPS, "per_device_train_batch_size": 1, "learning_rate": 3e-3}
    options |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    options |= {"disable_tqdm": True, "ddp_backend": "gloo"}
    arguments = TrainingArguments(str(folder), **options)
    with whole_weights(arguments):
        model = patched_model()
    partition_weights(model, arguments)
    trainer = Trainer(model=model, args=arguments, train_dataset=blocks(), eval_dataset=[])
    if scored:
        trainer.add_callback(PerplexityCallback(make_scores(folder), trainer))
    trainer.train()
    assert is_sharded(model)
    if group_shard().index == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (folder / "losses.json").write_text(json.dumps(losses))
    trainer.save_model(str(folder / "made"))
    # A rank that exits while gloo's threads still serve another rank is aborted.
    leave_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2] == "scored")
