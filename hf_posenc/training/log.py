"""What a training was, as data: everything that its model card says comes from here and from the scores."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.candidates import Request
from hf_posenc.evaluation.measuring.identity import environment, global_shape
from hf_posenc.evaluation.perplexity.result import PerplexityResult, number
from hf_posenc.evaluation.plots.perplexity import MARKED
from hf_posenc.evaluation.plots.style import (
    COLOURS,
    CONTROL_COLOUR,
    MARKERS,
    STYLE,
    name_lines,
    require,
    value_axis,
)
from hf_posenc.files import finite
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.patching import get_patch
from hf_posenc.training.scoring import precision_of, stages_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Names that may be published: of models, files and documents, without the way to them on somebody's machine.


def shown_name(name: str) -> str:
    """A hub name or any other text as it is, a folder or a file of one's own by its last part."""
    path = Path(name)
    own = path.is_absolute() or path.is_dir() or name.startswith((".", "~"))
    return path.expanduser().resolve().name if own else name


def without_ways(value: Any) -> Any:
    """JSON-ready values with `shown_name` in the place of every text."""
    if isinstance(value, Mapping):
        return {key: without_ways(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_ways(inner) for inner in value]
    return shown_name(str(value)) if isinstance(value, str | Path) else value


def published(scores: PerplexityResult) -> PerplexityResult:
    """Scores whose documents lose the folders that all of them are in."""
    known = [str(document["name"]) for document in scores.documents]
    names = _below_common(known + [skipped.name for skipped in scores.skipped])
    return dataclasses.replace(
        scores,
        model={**scores.model, "name": shown_name(str(scores.model["name"]))},
        documents=[{**each, "name": names[each["name"]]} for each in scores.documents],
        skipped=[dataclasses.replace(each, name=names[each.name]) for each in scores.skipped],
        records=[
            dataclasses.replace(each, document=names[each.document]) for each in scores.records
        ],
    )


def _below_common(names: Iterable[str]) -> dict[str, str]:
    """Each name, and a path below the last folder that all absolute paths share: still no two the same."""
    names = list(names)
    own = [name for name in names if Path(name).is_absolute()]
    common = os.path.commonpath([str(Path(name).parent) for name in own]) if own else ""
    return {name: str(Path(name).relative_to(common)) if name in own else name for name in names}


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
    parameters = list(model.parameters())
    return {
        "class": type(unwrap(model)).__name__,
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


# The loss of a training and the held-out perplexities on the way. Needs matplotlib (`pip install hf-posenc[plot]`).


HEIGHT = 3.1  # inches
DOTTED = (0, (1.5, 1.5))
SMOOTHED = 8
"""The thick line is a mean over an eighth of the log, so that the trend can be seen in the noise of the batches."""
LEAST_SMOOTHED = 3
"""Of fewer logs than that a mean shows nothing."""


def loss_figure(
    log_history: Sequence[Mapping[str, Any]],
    table: PerplexityResult | None = None,
    protocol: str = "tail",
) -> Figure:
    """The training loss by step; on the right the perplexity of held-out documents, a line for each length.

    The dotted line is what the model had, unpatched, at the length that it was trained at.

    Args:
        log_history: The Trainer's (`trainer.state.log_history`), or a list of `{"step": ..., "loss": ...}`.
        table: The rows of `Scores`; without, or with fewer than two of the training, there is no right half.
        protocol: Which of its protocols.

    Raises:
        PosencError: matplotlib is not installed, or no loss was logged.
    """
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    losses = loss_points(log_history)
    if not losses:
        raise PosencError("No finite loss was logged, so there is none to draw.")
    lines = {} if table is None else score_points(table, protocol)
    with mpl.rc_context(STYLE):
        wide = any(len(points) > 1 for points in lines.values())
        drawn = Figure(figsize=(8.1 if wide else 4.4, HEIGHT), layout="constrained")
        panels = drawn.subplots(1, 2 if wide else 1, squeeze=False)[0]
        loss_panel(panels[0], losses, loss_points(log_history, "eval_loss"))
        panels[0].set_xlabel(_step_label(log_history))
        if wide:
            assert table is not None
            score_panel(panels[1], table, protocol, lines)
    return drawn


def loss_points(
    log_history: Sequence[Mapping[str, Any]], key: str = "loss"
) -> list[tuple[int, float]]:
    """Steps and losses of a log, where they are finite, in nats a token."""
    found = [(int(entry["step"]), float(entry[key])) for entry in log_history if key in entry]
    return [(step, loss) for step, loss in found if math.isfinite(loss)]


def score_points(table: PerplexityResult, protocol: str) -> dict[int, list[tuple[int, float]]]:
    """For each length, the steps of the training and the perplexity there."""
    lines: dict[int, list[tuple[int, float]]] = {}
    rows = list(zip(stages_of(table), table.candidates, strict=True))
    if len(rows) > 1 and rows[1][0].step == 0:
        rows = rows[1:]  # the first is of the model before it was patched
    for length in table.settings.lengths:
        cells = [(stage.step, table.cell(row.label, protocol, length)) for stage, row in rows]
        lines[length] = [
            (step, cell.perplexity)
            for step, cell in cells
            if cell is not None and math.isfinite(cell.perplexity)
        ]
    return lines


def smoothed(points: Sequence[tuple[int, float]]) -> tuple[list[tuple[float, float]], int]:
    """The running mean of a line, each in the middle of what it is the mean of, and of how many points it is."""
    width = len(points) // SMOOTHED
    if width < LEAST_SMOOTHED:
        return [], width
    parts = [points[begin : begin + width] for begin in range(len(points) - width + 1)]
    means = [
        (sum(step for step, _ in part) / width, math.fsum(loss for _, loss in part) / width)
        for part in parts
    ]
    return means, width


def loss_panel(
    panel: Axes, losses: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]] = ()
) -> None:
    """The left half: every logged loss, their trend, and the Trainer's own evaluations, if any."""
    means, width = smoothed(losses)
    panel.plot(
        *zip(*losses, strict=True),
        color=COLOURS[0],
        linewidth=0.6 if means else 1.3,
        alpha=0.45 if means else 1.0,
        label="logged" if means else "training",
    )
    if means:
        panel.plot(
            *zip(*means, strict=True), color=COLOURS[0], linewidth=1.6, label=f"mean of {width}"
        )
    if held_out:
        look: dict[str, Any] = {**MARKED, "color": COLOURS[1], "marker": MARKERS[0]}
        panel.plot(*zip(*held_out, strict=True), label="evaluation", **look)
    if means or held_out:
        panel.legend(frameon=False)
    panel.set_title("training loss", loc="left")
    panel.set_ylabel("nats per token")


def score_panel(
    panel: Axes,
    table: PerplexityResult,
    protocol: str,
    lines: Mapping[int, Sequence[tuple[int, float]]],
) -> None:
    """The right half: held-out perplexity by step, a line for each length, and the unpatched model's own."""
    names = [f"{length:,} tokens" for length in lines]
    for index, points in enumerate(lines.values()):
        look: dict[str, Any] = {
            **MARKED,
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
        }
        if points:
            panel.plot(*zip(*points, strict=True), label=names[index], **look)
    first = table.candidates[0]
    own = (
        None
        if first.method or table.original is None
        else table.cell(first.label, protocol, table.original)
    )
    if own is not None and math.isfinite(own.perplexity):
        # drawn as a line of the data, so that its name stands at its end as those of the others do
        names.append(f"{first.label} at {own.length:,}: {number(own.perplexity)}")
        steps = [step for points in lines.values() for step, _ in points]
        panel.plot(
            [min(steps), max(steps)],
            [own.perplexity] * 2,
            label=names[-1],
            color=CONTROL_COLOUR,
            linewidth=1.0,
            linestyle=DOTTED,
        )
    panel.set_title(f"held-out perplexity, {protocol}", loc="left")
    panel.set_xlabel("step")
    panel.set_ylabel("perplexity")
    value_axis(panel)
    name_lines(panel, names, (HEIGHT - 1.0) * 72)


def _step_label(log_history: Sequence[Mapping[str, Any]]) -> str:
    """`step`, and how many tokens one has, where the Trainer counts them."""
    seen = [
        (e["step"], e["num_input_tokens_seen"]) for e in log_history if "num_input_tokens_seen" in e
    ]
    if not seen or not seen[-1][0]:
        return "step"
    return f"step ({seen[-1][1] / seen[-1][0]:,.0f} tokens each)"
