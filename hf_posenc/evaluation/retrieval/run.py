"""Retrieval: every candidate on the same prompts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring import execute as machine
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.execute import Attempt, Failures, Measurement, Value
from hf_posenc.evaluation.measuring.identity import check_vocabulary
from hf_posenc.evaluation.measuring.store import Key
from hf_posenc.evaluation.retrieval.answers import AnswerScorer, generate, judge
from hf_posenc.evaluation.retrieval.prompts import Encoder, OwnText, Prompt, Sample, lay_out
from hf_posenc.evaluation.retrieval.statistics import Record
from hf_posenc.evaluation.retrieval.tasks import Kit, get_task
from hf_posenc.evaluation.scoring.head_replay import FrugalScorer, TokenScorer, evaluation_mode

DECODES = {
    "teacher-forced": "the answer is right if each of its tokens is the most probable one; nothing is generated",
    "generate": "the answer is right if the greedily generated text contains all of it",
}
DEFAULT_TASKS = ("passkey", "niah_single_1", "niah_multikey_2")


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings that determine the numbers of a run, beside the model, the methods and the haystack.

    Attributes:
        lengths: Tokens of prompt and answer, special tokens included, ascending.
        tasks: Names of tasks.
        depths: Depths of the needle from 0 to 1, ascending.
        samples: Samples at every depth; tasks without a depth have as many at every length as the others.
        distractors: Wrong answers that the right one is ranked among; 0 for no rank.
        decode: `"teacher-forced"` or `"generate"`.
        seed: Seed of all draws.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.

    Raises:
        PosencError: A number out of range, or an unknown task.
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
        """True if the answers are ranked among distractors."""
        return self.decode == "teacher-forced" and self.distractors > 0

    def samples_of(self, name: str, length: int) -> list[Sample]:
        """Return the samples of a task at a length."""
        count = self.samples
        depths: Sequence[float | None] = self.depths
        if not get_task(name).has_depth:
            depths, count = (None,), count * len(self.depths)
        return [
            Sample(self.seed, name, length, depth, number)
            for depth in depths
            for number in range(count)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RetrievalSettings:
        """Read the values of `to_dict`."""
        return cls(**values)


@dataclass(frozen=True)
class Failure:
    """A cell that could not be measured, and why."""

    method: str
    task: str
    length: int
    reason: str


Measured = tuple[list[Record], list[Failure]]


@dataclass(frozen=True)
class LeftOut:
    """A task without prompts of a length.

    Attributes:
        task: Its name.
        length: The requested length.
        needed: Tokens of its shortest prompt and answer.
    """

    task: str
    length: int
    needed: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Item(machine.Item):
    """One sample under one method; its cell is the task and the length.

    Attributes:
        sample: The sample.
    """

    sample: Sample

    @property
    def about(self) -> dict[str, Any]:
        """Return what identifies the item in `timings.json`, beside its method."""
        sample = self.sample
        return {
            "task": sample.task,
            "length": sample.length,
            "depth": sample.depth,
            "sample": sample.number,
        }


class RetrievalRun(Measurement[Item, Measured]):
    """The retrieval of every candidate on every task, length, depth and sample.

    Args:
        model: A causal language model, unpatched or with a saved patch.
        tokenizer: Its tokenizer.
        candidates: The methods to compare, each `checked` against the model.
        settings: Tasks, lengths and their numbers.
        special: Token ids in front of every prompt.
        haystack: The user's own text, instead of the noise sentences.

    Attributes:
        left_out: Tasks and lengths for which there is no prompt.

    Raises:
        PosencError: No task fits into these lengths, this is not a causal language model, or the tokenizer is
            another model's.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        candidates: Sequence[Candidate],
        settings: RetrievalSettings,
        *,
        special: Sequence[int] = (),
        haystack: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.candidates = model, tokenizer, candidates
        self.settings, self.special = settings, list(special)
        encoder = Encoder(tokenizer)
        own = OwnText(haystack, encoder) if haystack is not None else None
        self._kit = Kit(encoder, settings.distractors if settings.ranks else 0, own)
        self.left_out: list[LeftOut] = []
        self.items = self._items(self._fitting())
        ids = self.prompt(self.items[0].sample).ids
        check_vocabulary(model, int(ids.max()))
        with evaluation_mode(model):
            self.scorer = FrugalScorer(TokenScorer(model, ids, chunk=settings.chunk))
        self._answers = AnswerScorer(model, self.scorer)

    @property
    def forwarded(self) -> int:
        """Tokens of all prompts."""
        return sum(item.cost for item in self.items)

    def prompt(self, sample: Sample) -> Prompt:
        """Return the prompt of a sample: with its answer of `sample.length` tokens, the same in every process."""
        scene = get_task(sample.task).scene(sample, self._kit)
        return lay_out(scene, sample.length, self.special, self._kit.distractors)

    def _fitting(self) -> list[tuple[int, str]]:
        """Return the lengths and tasks for which there are prompts."""
        fitting = []
        for length, name in itertools.product(self.settings.lengths, self.settings.tasks):
            task = get_task(name)
            samples = self.settings.samples_of(name, length)
            needed = max(task.scene(sample, self._kit).shortest for sample in samples)
            needed += len(self.special)
            if needed <= length:
                fitting.append((length, name))
            else:
                self.left_out.append(LeftOut(name, length, needed))
        if not fitting:
            least = min(self.left_out, key=lambda entry: entry.needed)
            raise PosencError(
                f"No task fits into {self.settings.lengths[-1]:,} tokens: {least.task} needs at least "
                f"{least.needed:,} with this tokenizer. Give longer --lengths."
            )
        return fitting

    def _items(self, fitting: Sequence[tuple[int, str]]) -> list[Item]:
        items = []
        for candidate, (length, name) in itertools.product(self.candidates, fitting):
            for order, sample in enumerate(self.settings.samples_of(name, length)):
                item = Item(
                    key=(candidate.key, name, length, sample.depth, sample.number),
                    candidate=candidate,
                    length=length,
                    cost=length,
                    cells=((name, length),),
                    order=order,
                    sample=sample,
                )
                items.append(item)
        return items

    def measure(self, item: Item, attempt: Attempt) -> Value:
        """Score the answer of one sample."""
        prompt = self.prompt(item.sample)
        scores = attempt(partial(self._score, item, prompt))
        return {} if scores is None else {**scores, "distance": prompt.distance}

    def _score(self, item: Item, prompt: Prompt) -> dict[str, Any]:
        if self.settings.decode == "teacher-forced":
            return asdict(self._answers(prompt))
        self.scorer.reset(prompt.ids)
        task = get_task(item.sample.task)
        return judge(task, prompt, generate(self.model, self.tokenizer, prompt, task.new_tokens))

    def collect(self, values: Mapping[Key, Value]) -> Measured:
        """Return the records and the failures.

        A cell in which any sample failed has no records: a share of the others would not be comparable.
        """
        reasons = Failures.of(self.items, values.get).reasons()
        failures = [
            Failure(label, str(task), int(length), reason)
            for (label, (task, length)), reason in reasons.items()
        ]
        records = [
            _record(item, values[item.key])
            for item in self.items
            if (item.label, item.cells[0]) not in reasons
        ]
        return records, failures


def _record(item: Item, value: Value) -> Record:
    sample = item.sample
    return Record(
        method=item.label,
        task=sample.task,
        length=sample.length,
        depth=sample.depth,
        sample=sample.number,
        correct=value["correct"],
        score=value["score"],
        nats=value.get("nats"),
        rank=value.get("rank"),
        candidates=value.get("candidates"),
        distance=value["distance"],
        text=value.get("text"),
    )
