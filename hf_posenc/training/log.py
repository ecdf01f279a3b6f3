"""The log of a training as data, and names without paths."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.identity import environment, global_shape
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.files import finite
from hf_posenc.gguf_file import origin_of
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.patching import get_patch
from hf_posenc.training.scoring import precision_of

FILE = "training_log.json"


@dataclass(frozen=True)
class TrainingLog:
    """The log of one training.

    Attributes:
        base: The model that it began with: a hub name, or the last part of a folder's path.
        model: Class, number of parameters, and number of trained ones.
        label: The patch as reports show it; `None` without one.
        patch: The patch, from `PatchConfig.to_dict`.
        original: The context that the base was trained on, in tokens.
        extended: The context that the patch reaches, in tokens; `None` if it follows the text.
        train: `"full"`, `"lora"` or `"encoding"`.
        data: The training data: `source`, `documents`, `tokens`, `blocks`, `block_length`, `positions`,
            `target_length`, as far as known.
        run: The run: `steps`, `sequences_per_step`, `processes`, `tokens_seen`, `learning_rate`, ...
        command: The command that repeats this training, if known.

    Examples:
        >>> from transformers import Trainer, TrainingArguments
        >>> from hf_posenc import patch_model
        >>> from hf_posenc.training import TrainingLog
        >>> trainer = Trainer(patch_model(model, "yarn", scale=4), TrainingArguments("run", report_to=[]))
        >>> log = TrainingLog.of(trainer, base="meta-llama/Llama-2-7b-hf")  # after trainer.train()
        >>> log.label, log.original, log.extended
        ('yarn (scale 4)', 4096, 16384)
    """

    base: str
    model: Mapping[str, Any]
    label: str | None
    patch: Mapping[str, Any] | None
    original: int | None
    extended: int | None
    train: str
    data: Mapping[str, Any]
    run: Mapping[str, Any]
    log_history: list[dict[str, Any]] = field(repr=False)
    environment: Mapping[str, Any]
    command: str | None = None

    @property
    def methods(self) -> list[str]:
        if self.patch is None:
            return []
        return [self.patch["method"], *(other["method"] for other in self.patch.get("others", ()))]

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        *,
        base: str,
        train: str = "full",
        data: Mapping[str, Any] | None = None,
        command: str | None = None,
    ) -> TrainingLog:
        """Return the log of a Trainer after `train()`; folders and files in `base` and `data` lose their paths."""
        model: Any = trainer.model
        patch = get_patch(model)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        origin = origin_of(model.config, dtype)
        sizes = [(global_shape(each).numel(), each.requires_grad) for each in model.parameters()]
        return cls(
            base=shown_name(base),
            model={
                "class": type(unwrap(model)).__name__,
                "parameters": sum(size for size, _ in sizes),
                "trained": sum(size for size, trained in sizes if trained),
                "dtype": dtype,
                **({"weights": origin} if origin else {}),
            },
            label=None if patch is None else Candidate.installed(patch.config).label,
            patch=None if patch is None else patch.config.to_dict(),
            original=None if patch is None else patch.original_max_position_embeddings,
            extended=None if patch is None else patch.extended_length,
            train=train,
            data=_without_paths(dict(data or {})),
            run=_run(trainer),
            log_history=list(trainer.state.log_history),
            environment=environment(),
            command=command,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; a number that is not finite becomes `None`."""
        values = {"kind": "training", "format": 1, **dataclasses.asdict(self)}
        return dict(finite(values))

    @classmethod
    def read(cls, directory: Path) -> TrainingLog:
        values = json.loads((directory / FILE).read_text(encoding="utf-8"))
        return cls(**{entry.name: values[entry.name] for entry in dataclasses.fields(cls)})


def _run(trainer: Trainer) -> dict[str, Any]:
    arguments, state = trainer.args, trainer.state
    seconds = [entry["train_runtime"] for entry in state.log_history if "train_runtime" in entry]
    precision = precision_of(arguments)
    batch = arguments.train_batch_size * arguments.gradient_accumulation_steps
    checkpointing = getattr(arguments, "activation_checkpointing", arguments.gradient_checkpointing)
    distributed = None if arguments.world_size == 1 else trainer.accelerator.distributed_type
    return {
        "steps": state.global_step,
        "epochs": state.epoch,
        "tokens_seen": state.num_input_tokens_seen or None,
        "sequences_per_step": batch * arguments.world_size,
        "processes": arguments.world_size,
        "distributed": None if distributed is None else _plain(distributed),
        "device": arguments.device.type,
        "seconds": seconds[-1] if seconds else None,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": _plain(arguments.lr_scheduler_type),
        "warmup_steps": arguments.get_warmup_steps(state.max_steps),
        "optimizer": _plain(arguments.optim),
        "betas": [arguments.adam_beta1, arguments.adam_beta2],
        "weight_decay": arguments.weight_decay,
        "max_grad_norm": arguments.max_grad_norm,
        "precision": None if precision is None else str(precision).removeprefix("torch."),
        "gradient_checkpointing": bool(checkpointing),
        "seed": arguments.seed,
    }


def _plain(option: Any) -> str:
    return str(getattr(option, "value", option))


def shown_name(name: str) -> str:
    """Return a hub name or other text unchanged, and the last part of a local path."""
    path = Path(name)
    local = path.is_absolute() or path.is_dir() or name.startswith((".", "~"))
    return path.expanduser().resolve().name if local else name


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(inner) for inner in value]
    return shown_name(str(value)) if isinstance(value, str | Path) else value


def published(scores: PerplexityResult) -> PerplexityResult:
    """Return scores whose documents' names lose the folders that all have in common, so that they stay different."""
    names = [str(document["name"]) for document in scores.documents]
    names += [skipped.name for skipped in scores.skipped]
    absolute = {name: Path(name) for name in names if Path(name).is_absolute()}
    common = os.path.commonpath([p.parent for p in absolute.values()]) if absolute else ""
    relative = {name: str(path.relative_to(common)) for name, path in absolute.items()}
    shown = {name: relative.get(name, name) for name in names}
    return dataclasses.replace(
        scores,
        model={**scores.model, "name": shown_name(str(scores.model["name"]))},
        documents=[{**each, "name": shown[each["name"]]} for each in scores.documents],
        skipped=[dataclasses.replace(each, name=shown[each.name]) for each in scores.skipped],
        records=[
            dataclasses.replace(each, document=shown[each.document]) for each in scores.records
        ],
    )
