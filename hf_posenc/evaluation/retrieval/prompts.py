"""A prompt that has, with its answer, exactly so many tokens, put together from its pieces.

L counts all that the model reads, as everywhere in this package: special tokens, the prompt and the answer. So at the
trained length nothing lies past it, and what a method promises for such texts holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.retrieval.encoder import Encoder
from hf_posenc.evaluation.retrieval.fillers import Filler


@dataclass(frozen=True)
class Place:
    """Which sample of a task it is; nothing else decides what is drawn.

    Attributes:
        seed: The run's seed.
        task: The task's name.
        length: Tokens of prompt and answer.
        depth: Where the needle stands, from 0 (in front of all filler) to 1 (behind it); `None` for tasks without one.
        sample: The number of the sample.
    """

    seed: int
    task: str
    length: int
    depth: float | None
    sample: int

    @property
    def needle(self) -> tuple[str | int | float | None, ...]:
        """The name of the draws that make the needle: not of the length, so every length hides the same one."""
        return ("needle", self.seed, self.task, self.depth, self.sample)

    @property
    def filler(self) -> tuple[str | int | float | None, ...]:
        """The name of the draws that make everything else."""
        return ("filler", self.seed, self.task, self.length, self.depth, self.sample)


@dataclass(frozen=True)
class Answer:
    """An answer as tokens behind the question.

    Attributes:
        ids: Its tokens.
        ends: For each of its parts, how many tokens there are up to its end.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]


def answer_of(encoder: Encoder, question: str, parts: Sequence[str]) -> Answer:
    """The tokens of an answer of one or more parts, each behind a space, as they follow the question."""
    before = f"\n{question}"
    ends = []
    for count in range(1, len(parts) + 1):
        ids = encoder.behind(before, "".join(f" {part}" for part in parts[:count]))
        ends.append(len(ids))
    return Answer(ids, tuple(ends))


@dataclass(frozen=True)
class Scene:
    """The pieces of a prompt.

    Attributes:
        head: Tokens in front: the task's description.
        needles: Where each needle stands, as a part of the filler from 0 to 1, ascending, and its tokens.
        filler: What stands between them.
        question: Tokens at the end.
        answer: The right answer.
        distractors: Gives wrong answers, better ones first; called when the filler is laid out.
        references: What a generated text must contain.
        least_filler: Tokens of filler without which the task makes no sense.
    """

    head: Sequence[int]
    needles: Sequence[tuple[float, Sequence[int]]]
    filler: Filler
    question: Sequence[int]
    answer: Answer
    distractors: Callable[[], Iterable[Answer]]
    references: tuple[str, ...]
    least_filler: int = 0

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt and its answer, without special tokens."""
        return self.fixed + self.least_filler

    @property
    def fixed(self) -> int:
        """Tokens of everything but the filler."""
        needles = sum(len(ids) for _, ids in self.needles)
        return len(self.head) + needles + len(self.question) + len(self.answer.ids)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One sample.

    Attributes:
        ids: The tokens of the prompt, special tokens included, shape (L - tokens of the answer,), int64.
        answer: The right answer, whose last token is token L.
        distractors: Wrong answers of the same form.
        references: What a generated text must contain.
        distance: Tokens from the end of the needle, of the first of several, to the end of the prompt; `None` without
            a needle.
    """

    ids: Tensor
    answer: Answer
    distractors: tuple[Answer, ...]
    references: tuple[str, ...]
    distance: int | None


def lay_out(scene: Scene, length: int, special: Sequence[int], distractors: int) -> Prompt:
    """Puts a prompt together.

    A needle's place is that part of the filler's tokens, moved back to the end of a sentence or line; the papers cut
    the filler anywhere, also within a word.

    Args:
        scene: The pieces; its filler is used up.
        length: Tokens of the prompt and its answer, at least `scene.shortest + len(special)`.
        special: Token ids in front.
        distractors: How many wrong answers to keep.

    Raises:
        PosencError: The length is too short.
    """
    room = length - len(special) - scene.fixed
    if room < scene.least_filler:
        least = scene.shortest + len(special)
        raise PosencError(
            f"This prompt and its answer have at least {least:,} tokens, not {length:,}."
        )
    ids = [*special, *scene.head]
    used, end = 0, None
    for fraction, needle in scene.needles:
        piece = scene.filler.whole(round(fraction * room) - used)
        used += len(piece)
        ids += [*piece, *needle]
        end = len(ids) if end is None else end
    ids += [*scene.filler.exactly(room - used), *scene.question]
    return Prompt(
        ids=torch.tensor(ids, dtype=torch.int64),
        answer=scene.answer,
        distractors=_fair(scene, distractors),
        references=scene.references,
        distance=None if end is None else len(ids) - end,
    )


def _fair(scene: Scene, count: int) -> tuple[Answer, ...]:
    """The distractors with as many tokens as the answer, in their order; where those are too few, the nearest others.

    A sum of log probabilities is only comparable between answers of one length. What the tokenizer does not tell apart
    from the answer, or from another distractor, is none.
    """
    size = len(scene.answer.ids)
    seen = {scene.answer.ids}
    equal: list[Answer] = []
    unequal: list[Answer] = []
    for other in scene.distractors() if count else ():
        if other.ids not in seen:
            seen.add(other.ids)
            (equal if len(other.ids) == size else unequal).append(other)
            if len(equal) == count:
                break
    unequal.sort(key=lambda other: abs(len(other.ids) - size))
    return tuple([*equal, *unequal][:count])
