"""Results in TensorBoard and Weights & Biases: the numbers over the length in tokens, and the tables.

Not by accelerate's trackers, which join the processes of a launch: the processes of a measurement never wait for each
other in a collective operation.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path

from hf_posenc.errors import PosencError, one_line, unknown
from hf_posenc.evaluation.grid import Result, to_markdown

TRACKERS = ("tensorboard", "wandb")
"""The trackers, by transformers' names of them, which are those of their packages."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise for a tracker that is unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        if importlib.util.find_spec(name) is None:
            raise PosencError(f"--report-to {name} needs its package: pip install {name}.")


def report(result: Result, name: str, folder: Path) -> None:
    """Log the numbers and tables of a result to a tracker, which writes to `folder/runs` or by its own settings.

    Raises:
        PosencError: The tracker is unknown, not installed, or fails: no login, no network, a full disk.
    """
    check_trackers([name])
    try:
        _log(result, name, folder)
    except Exception as error:  # each tracker has errors of its own
        raise PosencError(f"--report-to {name} failed: {one_line(error)}") from error


def _log(result: Result, name: str, folder: Path) -> None:
    scalars = sorted(result.scalars(), key=lambda scalar: scalar[1])
    grids = [
        (grid.title or f"table {number}", grid) for number, grid in enumerate(result.tables(), 1)
    ]
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "runs" / result.kind)) as writer:
            for tag, step, value in scalars:
                writer.add_scalar(tag, value, step)
            for title, grid in grids:
                writer.add_text(title, to_markdown(grid))
        return
    import wandb

    with wandb.init(project="hf_posenc", job_type=result.kind) as run:
        for step, same in itertools.groupby(scalars, key=lambda scalar: scalar[1]):
            run.log({tag: value for tag, _, value in same}, step=step)
        for title, grid in grids:
            heads: list[str | int] = [column.head.replace("\n", " ") for column in grid.columns]
            empty = [""] * len(heads)
            rows = [
                [*(field.text for field in row.fields), *empty][: len(heads)] for row in grid.rows
            ]
            run.summary[title] = wandb.Table(columns=heads, data=rows)
