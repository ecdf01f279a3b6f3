"""The rows of a table of scores: one model at several points of its training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.evaluation.result import PerplexityResult


@dataclass(frozen=True)
class Stage:
    """When a row was measured, and of what.

    Attributes:
        label: The row's name.
        step: Optimizer steps before it.
        tokens_seen: Tokens that the model was trained on before it, where the Trainer counts them.
        state: A hash of the model with its weights and its patch.
    """

    label: str
    step: int
    tokens_seen: int | None = field(compare=False)
    state: str


def stages_of(result: PerplexityResult) -> list[Stage]:
    """The stages of a table, in its order."""
    return [Stage(**stage) for stage in result.source.get("stages", ())]


def with_row(
    table: PerplexityResult | None, row: PerplexityResult, stage: Stage
) -> PerplexityResult:
    """A table with one more row at its end.

    Rows that came after the new one's step are of a training that was given up for this one, and go.

    Args:
        table: The rows so far.
        row: The new one, measured on the same tokens.
        stage: What the new one is.
    """
    stages = [] if table is None else stages_of(table)
    patched = row.candidates[0].method is not None
    earlier = []
    for old, entry in zip(stages, () if table is None else table.candidates, strict=True):
        if (old.step, entry.method is not None) < (stage.step, patched):
            earlier.append(old)
    parts = [row] if table is None else [only(table, [old.label for old in earlier]), row]
    source: dict[str, Any] = {
        **row.source,
        "stages": [dataclasses.asdict(each) for each in (*earlier, stage)],
    }
    return dataclasses.replace(
        row,
        source=source,
        candidates=[entry for part in parts for entry in part.candidates],
        records=[record for part in parts for record in part.records],
        failures=[failure for part in parts for failure in part.failures],
        curves={label: curve for part in parts for label, curve in part.curves.items()},
    )


def up_to(table: PerplexityResult, stage: Stage) -> PerplexityResult:
    """A table that ends with a row that it has: what came after is not of the model that is kept."""
    stages = stages_of(table)
    return only(table, [each.label for each in stages[: stages.index(stage) + 1]])


def only(table: PerplexityResult, labels: Collection[str]) -> PerplexityResult:
    """Some of the rows of a table."""
    return dataclasses.replace(
        table,
        source={
            **table.source,
            "stages": [dataclasses.asdict(s) for s in stages_of(table) if s.label in labels],
        },
        candidates=[entry for entry in table.candidates if entry.label in labels],
        records=[record for record in table.records if record.method in labels],
        failures=[failure for failure in table.failures if failure.method in labels],
        curves={label: curve for label, curve in table.curves.items() if label in labels},
    )


def before_and_after(table: PerplexityResult) -> PerplexityResult:
    """The rows before the training, and the last one."""
    stages = stages_of(table)
    return only(table, [stage.label for stage in stages if stage.step == 0 or stage is stages[-1]])
