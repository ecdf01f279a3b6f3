"""What a training was, as data: everything that its model card says comes from here and from the scores."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from hf_posenc.evaluation.files import finite
from hf_posenc.evaluation.identity import environment, global_shape
from hf_posenc.evaluation.requests import Request
from hf_posenc.patching import get_patch
from hf_posenc.training.names import shown_name, without_ways
from hf_posenc.training.scoring import precision_of

FILE = "training_log.json"


@dataclass(frozen=True)
class TrainingLog:
    """One training.

    Attributes:
        base: The model that it began with: a hub name, or a folder's name without the way to it.
        model: Class, number of parameters, and how many of them were trained.
        label: The patch as reports show it; `None` without one.
        patch: The patch, as `PatchConfig.to_dict` gives it.
        original: The context that the base was trained on, in tokens.
        extended: The context that the patch reaches, in tokens; `None` where it follows the text.
        train: `"full"`, `"lora"` or `"encoding"`.
        data: What was read: `source`, `documents`, `tokens`, `blocks`, `block_length`, `positions`, `target_length`,
            those that are known.
        run: How it was trained: `steps`, `sequences_per_step`, `processes`, `tokens_seen`, `learning_rate`, ...
        log_history: The Trainer's log.
        environment: Versions of the packages.
        command: What gives this training again, where it is known.
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
        """The names of the patch's methods."""
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
        """Describes what a Trainer has done.

        Args:
            trainer: After `train()`.
            base: Where the model was loaded from.
            train: Which parameters were trained.
            data: As the attribute; file names in it lose the way to them.
            command: As the attribute.
        """
        model = trainer.model
        assert model is not None
        patch = get_patch(model)
        return cls(
            base=shown_name(base),
            model=_sizes(model),
            label=None if patch is None else Request.installed(patch.config).label,
            patch=None if patch is None else patch.config.to_dict(),
            original=None if patch is None else patch.original_max_position_embeddings,
            extended=None if patch is None else patch.extended_length,
            train=train,
            data=without_ways(dict(data or {})),
            run=_run(trainer),
            log_history=list(trainer.state.log_history),
            environment=environment(),
            command=command,
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; a number that is not finite becomes `None`."""
        values: dict[str, Any] = finite(
            {"kind": "training", "format": 1, **dataclasses.asdict(self)}
        )
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainingLog:
        """Reads what `to_dict` wrote."""
        return cls(**{entry.name: values[entry.name] for entry in dataclasses.fields(cls)})

    @classmethod
    def read(cls, directory: Path) -> TrainingLog:
        """Reads the log that a card was written from."""
        return cls.from_dict(json.loads((directory / FILE).read_text(encoding="utf-8")))


def _sizes(model: nn.Module) -> dict[str, Any]:
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    parameters = list(model.parameters())
    return {
        "class": type(inner).__name__,
        "parameters": sum(global_shape(each).numel() for each in parameters),
        "trained": sum(global_shape(each).numel() for each in parameters if each.requires_grad),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
    }


def _run(trainer: Trainer) -> dict[str, Any]:
    arguments, state = trainer.args, trainer.state
    done = [entry for entry in state.log_history if "train_runtime" in entry]
    precision = precision_of(arguments)
    return {
        "steps": state.global_step,
        "epochs": state.epoch,
        "tokens_seen": state.num_input_tokens_seen or None,
        "sequences_per_step": arguments.train_batch_size
        * arguments.gradient_accumulation_steps
        * arguments.world_size,
        "processes": arguments.world_size,
        "distributed": None
        if arguments.world_size == 1
        else _plain(trainer.accelerator.distributed_type),
        "device": arguments.device.type,
        "seconds": done[-1]["train_runtime"] if done else None,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": _plain(arguments.lr_scheduler_type),
        "warmup_steps": arguments.get_warmup_steps(state.max_steps),
        "optimizer": _plain(arguments.optim),
        "betas": [arguments.adam_beta1, arguments.adam_beta2],
        "weight_decay": arguments.weight_decay,
        "max_grad_norm": arguments.max_grad_norm,
        "precision": None if precision is None else str(precision).removeprefix("torch."),
        "gradient_checkpointing": bool(
            getattr(arguments, "activation_checkpointing", arguments.gradient_checkpointing)
        ),
        "seed": arguments.seed,
    }


def _plain(option: Any) -> str:
    """The word for a member of one of transformers' enumerations."""
    return str(getattr(option, "value", option))
