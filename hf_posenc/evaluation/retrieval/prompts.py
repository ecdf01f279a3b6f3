"""A prompt that has, with its answer, exactly so many tokens, put together from its pieces.

L counts all that the model reads, as everywhere in this package: special tokens, the prompt and the answer. So at the
trained length nothing lies past it, and what a method promises for such texts holds.
"""

from __future__ import annotations

import functools
import hashlib
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_posenc.errors import PosencError

# Text as tokens the way they stand in the middle of a longer text.


LINE = "\n"
REMEMBERED = 1024
"""Pieces whose tokens are kept: those that come again, and not every line of a haystack."""


class Encoder:
    """Turns pieces of a prompt into tokens.

    A prompt is put together from tokens, so that its length is exact. Tokenized by itself a piece would begin as a text
    does (SentencePiece puts a space in front, for instance), so it is tokenized behind a few characters, whose
    tokens are then taken off.

    Args:
        tokenizer: A transformers tokenizer; special tokens are never added here.

    Attributes:
        tokenizer: As given.
        newline: The tokens of a line's end; none where the tokenizer drops it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encoded = functools.lru_cache(maxsize=REMEMBERED)(self._encode)
        self.newline = self.behind("a", LINE)

    def plain(self, text: str) -> tuple[int, ...]:
        """A text by itself, without special tokens."""
        return self.behind("", text)

    def line(self, text: str) -> tuple[int, ...]:
        """A text at the beginning of a line."""
        return self.behind(LINE, text)

    def behind(self, before: str, text: str) -> tuple[int, ...]:
        """The tokens that `text` adds behind `before`.

        Where the last token of `before` changes with what follows it, those of `text` by itself.
        """
        return self._encoded(before, text)

    def _encode(self, before: str, text: str) -> tuple[int, ...]:
        whole, start = self._ids(before + text), self._ids(before) if before else ()
        return whole[len(start) :] if whole[: len(start)] == start else self._ids(text)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


# What stands between a prompt's needles: as many tokens of it as it takes.


SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""The filler of Mohtashami and Jaggi (arXiv 2305.16300), which PI, YaRN, LongLoRA, DCA and RULER use too."""

NOISE = " ".join(SENTENCES)
_SENTENCE_ENDS = ".!?\n"


class Filler:
    """Units of text, sentences or lines, handed out in order as tokens.

    Args:
        units: Gives the tokens of one unit after the other, without end.
        newline: The tokens of a line's end.
        running: The units are sentences of a running text, which is closed by a line's end before something else
            follows; otherwise they are lines, which bring their own.
        again: A running text begins anew behind every needle.
    """

    def __init__(
        self,
        units: Callable[[], Iterator[Sequence[int]]],
        newline: Sequence[int],
        *,
        running: bool,
        again: bool = False,
    ) -> None:
        self._make, self._newline, self._running, self._again = (
            units,
            list(newline),
            running,
            again,
        )
        self._units = units()
        self._next: Sequence[int] | None = None
        self.whole_units = 0
        """How many units have been handed out whole."""

    def whole(self, limit: int) -> list[int]:
        """As many whole units as fit into `limit` tokens, and the end of their line."""
        closing = self._newline if self._running else []
        ids = self._fill(limit - len(closing))
        if ids and self._again:
            self._units, self._next = self._make(), None
        return ids + closing if ids else []

    def exactly(self, size: int) -> list[int]:
        """Exactly `size` tokens: the last unit may be cut off, and the end of a line comes last."""
        ids = self._fill(size - len(self._newline) if self._running else size)
        rest = size - len(ids)
        if rest:
            ids += [*self._peek()[: max(0, rest - len(self._newline))], *self._newline]
        return ids[:size]

    def _fill(self, limit: int) -> list[int]:
        ids: list[int] = []
        while len(ids) + len(self._peek()) <= limit:
            ids += self._peek()
            self._next = None
            self.whole_units += 1
        return ids

    def _peek(self) -> Sequence[int]:
        if self._next is None:
            self._next = next(self._units)
        return self._next


def noise(encoder: Encoder) -> Filler:
    """The five sentences over and over as one running text, which begins anew behind the needle as in the papers."""
    first = encoder.line(SENTENCES[0])
    others = [encoder.behind(".", f" {sentence}") for sentence in SENTENCES]

    def units() -> Iterator[Sequence[int]]:
        yield first
        while True:
            yield from (*others[1:], others[0])

    return Filler(units, encoder.newline, running=True, again=True)


def lines(encoder: Encoder, line: Callable[[], str]) -> Filler:
    """Lines, each made when it is needed."""

    def units() -> Iterator[Sequence[int]]:
        while True:
            yield encoder.line(f"{line()}\n")

    return Filler(units, encoder.newline, running=False)


class OwnText:
    """The user's own text as a haystack; one that is too short is repeated, as RULER does.

    Args:
        text: The text.
        encoder: Turns it into tokens, once.
    """

    def __init__(self, text: str, encoder: Encoder) -> None:
        self.text = text
        ids = encoder.plain(text if text.endswith("\n") else f"{text}\n")
        ends = {
            token: encoder.tokenizer.decode([token]).rstrip(" ")[-1:] or " " for token in set(ids)
        }
        self._sentences: list[Sequence[int]] = []
        start = 0
        for place, token in enumerate(ids, start=1):
            if ends[token] in _SENTENCE_ENDS or place == len(ids):
                self._sentences.append(ids[start:place])
                start = place

    def filler(self, encoder: Encoder) -> Filler:
        """Its sentences from the beginning."""

        def units() -> Iterator[Sequence[int]]:
            while True:
                yield from self._sentences

        return Filler(units, encoder.newline, running=True)


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


# Random choices that depend on their name alone: the same in every process, Python and order of work.


T = TypeVar("T")


class Draws:
    """A stream of random choices, named by what it is for.

    Only `random.Random.random` is used: of Python's generator it alone is promised to give the same numbers for the
    same seed in every version.

    Args:
        *name: What the stream is for, e.g. seed, task, length, depth and sample. Streams of different names are
            independent.
    """

    def __init__(self, *name: str | int | float | None) -> None:
        digest = hashlib.sha256("/".join(map(repr, name)).encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:8], "big"))

    def fraction(self) -> float:
        """A number of [0, 1)."""
        return self._random.random()

    def below(self, count: int) -> int:
        """A whole number of `0 .. count-1`."""
        return int(self._random.random() * count)

    def choice(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.below(len(values))]

    def digits(self, count: int) -> str:
        """A decimal number of so many digits; the first is not 0."""
        lowest = 10 ** (count - 1)
        return str(lowest + self.below(9 * lowest))

    def letters(self, count: int, alphabet: str) -> str:
        """A word of so many letters of an alphabet."""
        return "".join(self.choice(alphabet) for _ in range(count))

    def uuid(self) -> str:
        """A version 4 UUID."""
        bits = 0
        for _ in range(4):
            bits = bits << 32 | self.below(2**32)
        return str(uuid.UUID(int=bits, version=4))

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """The values in a random order."""
        order = sorted((self.fraction(), place) for place in range(len(values)))
        return [values[place] for _, place in order]


# Words for the keys of needles: 95 adjectives and 98 nouns, in pairs such as `quiet-harbor`.
#
# RULER takes its adjectives and nouns from the `wonderwords` package. These lists are our own and fixed, so that a
# prompt does not change with another package's version.


_ADJECTIVES = """
    able amber ancient bitter bold brave brief bright broad broken calm careful clean clear clever cold common cool
    curious daily damp dark deep dense distant double dry dull eager early easy empty exact faint fair famous fast fine
    firm flat fresh frozen full gentle giant golden good grand gray happy hard heavy hidden high hollow honest huge
    humble icy idle jolly keen kind large late lazy light little lonely long loud lucky mellow mild modest narrow neat
    new noble odd old pale patient plain polite proud pure quick quiet rapid rare rich rough round royal
"""
_NOUNS = """
    acorn anchor apple arrow badge basket beach bell bench bird bottle branch bread bridge brush bucket butter button
    cabin camera candle canyon carpet castle chair cherry circle cliff clock cloud coast coffee comet copper corner
    cotton cradle creek curtain desert dragon drum eagle engine falcon feather fence field finger flame flower forest
    fountain garden gate glove guitar hammer harbor helmet hill honey island jacket jewel kettle ladder lake lantern
    leaf lemon letter lion market meadow mirror mountain needle ocean orchard oven paper pebble pencil piano pillow
    planet pocket pond rabbit ribbon river rocket saddle sailor shadow silver spoon
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())


def word_key(draws: Draws) -> str:
    """An adjective and a noun, joined by a hyphen as in RULER."""
    return f"{draws.choice(ADJECTIVES)}-{draws.choice(NOUNS)}"
