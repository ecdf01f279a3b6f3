"""What decides the numbers of a run, apart from the model, the methods and the haystack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.retrieval.catalogue import get_task
from hf_posenc.evaluation.retrieval.tasks import Task

DECODES = {
    "teacher-forced": "the answer is right if each of its tokens is the most probable one; nothing is generated",
    "generate": "the answer is right if the greedily generated text contains all of it",
}
DEFAULT_TASKS = ("passkey", "niah_single_1", "niah_multikey_2")


@dataclass(frozen=True)
class RetrievalSettings:
    """The settings of a run.

    Attributes:
        lengths: Tokens of prompt and answer, special tokens included, ascending.
        tasks: Names of tasks.
        depths: Depths of the needle from 0 to 1, ascending.
        samples: Samples at every depth; tasks without a depth get as many at every length as the others.
        distractors: Wrong answers that the right one is ranked among; 0 for no rank.
        decode: `"teacher-forced"` or `"generate"`.
        seed: Seed of all that is drawn.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.

    Raises:
        PosencError: Numbers that make no sense, or an unknown task.
    """

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = DEFAULT_TASKS
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 4
    distractors: int = 10
    decode: str = "teacher-forced"
    seed: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("lengths", "tasks", "depths"):
            values: Sequence[Any] = getattr(self, name)
            object.__setattr__(self, name, tuple(values))
            ordered = name == "tasks" or list(values) == sorted(values)
            if not values or len(set(values)) != len(values) or not ordered:
                raise PosencError(
                    f"{name.capitalize()} are different and ascending, not {list(values)}."
                )
        for task in self.tasks:
            get_task(task)
        if self.depths[0] < 0 or self.depths[-1] > 1:
            raise PosencError(
                f"Depths go from 0 to 1, not from {self.depths[0]:g} to {self.depths[-1]:g}."
            )
        if self.decode not in DECODES:
            raise PosencError(f"Unknown way to decode {self.decode!r}: {', '.join(DECODES)}.")
        for name, least in (("samples", 1), ("distractors", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise PosencError(f"{name} is at least {least}, not {getattr(self, name)}.")

    @property
    def ranks(self) -> bool:
        """Whether the answers are ranked among distractors."""
        return self.decode == "teacher-forced" and self.distractors > 0

    def places(self, task: Task) -> list[tuple[float | None, int]]:
        """Depth and number of every sample of a task at one length."""
        if task.has_depth:
            return [(depth, sample) for depth in self.depths for sample in range(self.samples)]
        return [(None, sample) for sample in range(self.samples * len(self.depths))]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RetrievalSettings:
        """Reads what `to_dict` wrote."""
        return cls(**values)


def even_depths(count: int) -> tuple[float, ...]:
    """So many depths from 0 to 1 at equal distances; the middle where there is but one."""
    return tuple(index / (count - 1) for index in range(count)) if count > 1 else (0.5,)
