"""Prompts that have, with their answer, an exact number of tokens.

L counts everything that the model reads, as everywhere in this package: special tokens, the prompt and the answer. So
at the trained length nothing lies past it, and the guarantees of a method for such texts hold.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")
Name: TypeAlias = tuple[str | int | float | None, ...]

TRIES, _DRAWS = 40, 10_000
"""Draws per requested distractor, to have enough with as many tokens as the answer; and of a value not in a text."""
CACHED = 1024
"""Pieces whose tokens are cached: those that recur, and not every line of a haystack."""
SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""The filler of Mohtashami and Jaggi (arXiv 2305.16300), also used by PI, YaRN, LongLoRA, DCA and RULER."""
NOISE = " ".join(SENTENCES)
_SENTENCE_ENDS = ".!?\n"


class Encoder:
    """Turns pieces of a prompt into tokens; special tokens are never added.

    A prompt is assembled from tokens, so that its length is exact. Tokenized by itself, a piece would begin like a text
    (SentencePiece prepends a space, for instance). So it is tokenized behind a few characters, whose tokens are then
    removed. `newline` has the tokens of a line's end; it is empty where the tokenizer drops it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encoded = functools.lru_cache(maxsize=CACHED)(self._encode)
        self._start = functools.lru_cache(maxsize=CACHED)(self._ids)  # of few texts before others
        self.newline = self.behind("a", "\n")

    def line(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text at the beginning of a line."""
        return self.behind("\n", text)

    def behind(self, before: str, text: str) -> tuple[int, ...]:
        """Return the tokens of `text` behind `before`, or by itself where the last token of `before` depends on it."""
        return self._encoded(before, text)

    def _encode(self, before: str, text: str) -> tuple[int, ...]:
        whole, start = self._ids(before + text), self._start(before) if before else ()
        return whole[len(start) :] if whole[: len(start)] == start else self._ids(text)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class Filler:
    """Units of text, sentences or lines, handed out in order as tokens; `whole_units` counts those handed out whole.

    `units` are the tokens of one unit after the other, without end. If `running`, they are sentences of a running text,
    which a line's end (`newline`) closes before something else follows; lines bring their own. `restarts` returns the
    units of a running text that begins again behind every needle. If `blank`, empty lines stand for a truncated unit.
    """

    def __init__(
        self,
        units: Iterator[Sequence[int]],
        newline: Sequence[int],
        *,
        running: bool = True,
        restarts: Callable[[], Iterator[Sequence[int]]] | None = None,
        blank: bool = False,
    ) -> None:
        self._blank = blank and bool(newline)
        self._units, self._restarts, self._newline = units, restarts, list(newline)
        self._closing = self._newline if running else []
        self._next, self.whole_units = next(units), 0

    def whole(self, limit: int) -> list[int]:
        """Return as many whole units as fit into `limit` tokens, and the end of their line."""
        ids = self._fill(limit - len(self._closing))
        if ids and self._restarts is not None:
            self._units = self._restarts()
            self._next = next(self._units)
        return ids + self._closing if ids else []

    def exactly(self, size: int) -> list[int]:
        """Return exactly `size` tokens: the last unit may be truncated, and the end of a line comes last."""
        ids = self._fill(size - len(self._closing))
        if self._blank:
            return [*ids, *itertools.islice(itertools.cycle(self._newline), size - len(ids))]
        if rest := size - len(ids):
            ids += [*self._next[: max(0, rest - len(self._newline))], *self._newline]
        return ids[:size]

    def _fill(self, limit: int) -> list[int]:
        ids: list[int] = []
        while len(ids) + len(self._next) <= limit:
            ids += self._next
            self._next = next(self._units)
            self.whole_units += 1
        return ids


def lines(encoder: Encoder, line: Callable[[], str], *, blank: bool = False) -> Filler:
    """Return a filler of lines, each made when it is needed; `blank` as in `Filler`."""
    units = (encoder.line(f"{line()}\n") for _ in itertools.count())
    return Filler(units, encoder.newline, running=False, blank=blank)


def sentences(encoder: Encoder, text: str) -> Iterator[Sequence[int]]:
    """Yield the tokens of every sentence of the user's own text."""
    ids = encoder.behind("", text if text.endswith("\n") else f"{text}\n")
    ends = {token: encoder.tokenizer.decode([token]).rstrip(" ")[-1:] or " " for token in set(ids)}
    start = 0
    for stop, token in enumerate(ids, start=1):
        if ends[token] in _SENTENCE_ENDS or stop == len(ids):
            yield ids[start:stop]
            start = stop


@dataclass(frozen=True)
class Sample:
    """One sample of a task; nothing else determines what is drawn for it.

    Prompt and answer have `length` tokens. The `depth` of the needle goes from 0 (in front of all filler) to 1 (behind
    it); `None` for tasks without one.
    """

    seed: int
    task: str
    length: int
    depth: float | None
    number: int

    @property
    def needle(self) -> Name:
        """Name of the draws for the needle: independent of the length, so every length hides the same one."""
        return ("needle", self.seed, self.task, self.depth, self.number)

    @property
    def filler(self) -> Name:
        """Name of the draws for everything else."""
        return ("filler", self.seed, self.task, self.length, self.depth, self.number)


@dataclass(frozen=True)
class Answer:
    """An answer as tokens behind the question.

    Attributes:
        ends: For each of its parts, the number of tokens up to its end.
        blank: Leading tokens that are only white space, as a tokenizer has them that separates digits.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]
    blank: int = 0


def answer_of(encoder: Encoder, question: str, parts: Sequence[str]) -> Answer:
    """Return the tokens of an answer of one or more parts, each behind a space, as they follow the question."""
    texts = itertools.accumulate(f" {part}" for part in parts)
    ids = [encoder.behind(f"\n{question}", text) for text in texts]
    pieces = (encoder.tokenizer.decode([token]) for token in ids[-1])
    blank = sum(1 for _ in itertools.takewhile(lambda piece: not piece.strip(), pieces))
    return Answer(ids[-1], tuple(map(len, ids)), blank)


@dataclass(frozen=True)
class Scene:
    """The pieces of a prompt; `head` and `question` are its begin and end.

    Attributes:
        needles: Position of each needle, as a fraction of the filler in ascending order, and its tokens.
        distractors: Wrong answers, better ones first; drawn once the filler is laid out.
        spare: More of them, which are as long as the answer, for where too few of the others are short enough.
        references: Strings that a generated text must contain.
        least_filler: Tokens of filler without which the task makes no sense.
        asked: Index of the needle whose distance counts.
        questions: Other questions about the same text, whose answers are among the distractors.
        longest: Tokens of the longest answer that is read; by default none is longer than the right one.
    """

    head: Sequence[int]
    needles: Sequence[tuple[float, Sequence[int]]]
    filler: Filler
    question: Sequence[int]
    answer: Answer
    distractors: Iterator[Answer]
    spare: Iterator[Answer]
    references: tuple[str, ...]
    least_filler: int = 0
    asked: int = 0
    questions: tuple[tuple[int, ...], ...] = ()
    longest: int = 0

    @property
    def fixed(self) -> int:
        """Tokens of everything but the filler, with the longest of the questions and of the answers."""
        question = max(map(len, (self.question, *self.questions)))
        pieces = (self.head, *(ids for _, ids in self.needles))
        return question + sum(map(len, pieces)) + max(len(self.answer.ids), self.longest)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt and its longest answer, without special tokens."""
        return self.fixed + self.least_filler


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as tokens.

    Attributes:
        ids: The tokens of the prompt, special tokens included, int64. With the longest of its answers and questions it
            has L tokens.
        references: Strings that a generated text must contain.
        distance: Tokens from the end of the needle (of several, `Scene.asked`) to the end of the prompt; `None` without
            a needle.
        questions: Other questions, which replace the tokens behind the first `text`.
    """

    ids: Tensor
    answer: Answer
    distractors: tuple[Answer, ...]
    references: tuple[str, ...]
    distance: int | None
    questions: tuple[tuple[int, ...], ...] = ()
    text: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the prompt with the longest of its questions."""
        return max([len(self.ids), *(self.text + len(question) for question in self.questions)])

    def with_question(self, question: Sequence[int]) -> Prompt:
        """Return the prompt that ends with another question."""
        import torch

        ids = torch.cat([self.ids[: self.text], torch.tensor(question, dtype=torch.int64)])
        return dataclasses.replace(self, ids=ids)

    def truncated(self, most: int, special: int, behind: int) -> Prompt:
        """Return the end of the prompt that has, with `behind` tokens after it, at most `most` tokens.

        The special tokens in front, so many, stay there.
        """
        import torch

        cut = max(0, self.longest + behind - most)
        ids = torch.cat([self.ids[:special], self.ids[special + cut :]])
        return dataclasses.replace(self, ids=ids, text=self.text - cut)


def lay_out(scene: Scene, length: int, special: Sequence[int], distractors: int) -> Prompt:
    """Assemble a prompt that has, with its longest answer, so many tokens; the scene's filler is consumed.

    A needle is put at its fraction of the filler's tokens, moved back to the end of a sentence or line; the papers cut
    the filler anywhere, also within a word. Raise if the length is too short.
    """
    import torch

    room = length - len(special) - scene.fixed
    if room < scene.least_filler:
        least = length - room + scene.least_filler
        raise PosencError(f"Prompt and answer have at least {least:,} tokens, not {length:,}.")
    ids = [*special, *scene.head]
    used, end = 0, None
    for index, (fraction, needle) in enumerate(scene.needles):
        piece = scene.filler.whole(round(fraction * room) - used)
        used += len(piece)
        ids += [*piece, *needle]
        end = len(ids) if index == scene.asked else end
    ids += [*scene.filler.exactly(room - used), *scene.question]
    return Prompt(
        ids=torch.tensor(ids, dtype=torch.int64),
        answer=scene.answer,
        distractors=_fair(scene, distractors),
        references=scene.references,
        distance=None if end is None else len(ids) - end,
        questions=scene.questions,
        text=len(ids) - len(scene.question),
    )


def _fair(scene: Scene, count: int) -> tuple[Answer, ...]:
    """Return the distractors with as many tokens as the answer, in their order; if too few, then the nearest others.

    A sum of log probabilities is only comparable between answers of one length. A distractor with the tokens of the
    answer or of another distractor is left out, and one for which the prompt has no room.
    """
    size = len(scene.answer.ids)
    most = max(size, scene.longest)
    seen = {scene.answer.ids}
    equal: list[Answer] = []
    unequal: list[Answer] = []
    for short, others in enumerate((scene.distractors, scene.spare) if count else ()):
        for other in others:
            if other.ids not in seen and len(other.ids) <= most:
                seen.add(other.ids)
                (equal if len(other.ids) == size else unequal).append(other)
            if len(equal) + short * len(unequal) >= count:
                break
    unequal.sort(key=lambda other: abs(len(other.ids) - size))
    return tuple([*equal, *unequal][:count])


class Draws:
    """A stream of random choices that depends on its name alone: the same in every process and version of Python.

    Only `random.Random.random` is used: it alone is guaranteed to return the same numbers for a seed in every version.
    Streams of different names, such as seed, task, length, depth and sample, are independent. `fraction` draws a number
    in [0, 1).
    """

    def __init__(self, *name: str | float | None) -> None:
        digest = hashlib.sha256("/".join(map(repr, name)).encode()).digest()
        self.fraction = random.Random(int.from_bytes(digest[:8], "big")).random

    def below(self, count: int) -> int:
        """Draw an integer from `0 .. count-1`."""
        return int(self.fraction() * count)

    def choice(self, values: Sequence[T]) -> T:
        """Draw one of the values."""
        return values[self.below(len(values))]

    def digits(self, count: int) -> str:
        """Draw a decimal number of `count` digits; the first is not 0."""
        lowest = 10 ** (count - 1)
        return str(lowest + self.below(9 * lowest))

    def letters(self, count: int, alphabet: str) -> str:
        """Draw a word of `count` letters."""
        return "".join(self.choice(alphabet) for _ in range(count))

    def uuid(self) -> str:
        """Draw a version 4 UUID."""
        words = (self.below(2**32).to_bytes(4, "big") for _ in range(4))
        return str(uuid.UUID(bytes=b"".join(words), version=4))

    def places(self, depth: float, asked: int, count: int) -> list[float]:
        """Draw ascending places of so many needles, of which the one with the index `asked` is at the depth."""
        before = sorted(depth * self.fraction() for _ in range(asked))
        behind = sorted(depth + (1 - depth) * self.fraction() for _ in range(asked + 1, count))
        return [*before, depth, *behind]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """Return the values in a random order."""
        order = sorted((self.fraction(), index) for index in range(len(values)))
        return [values[index] for _, index in order]


class Kit:
    """Tools shared by all prompts of a run: the encoder, the number of distractors, and the user's own text, if any."""

    def __init__(self, tokenizer: Any, distractors: int = 10, haystack: str | None = None) -> None:
        self.encoder, self.distractors = Encoder(tokenizer), distractors
        self._text = haystack or ""
        self._words = " ".join(["", *re.findall(r"[^\W_]+", self._text.lower()), ""])
        self._unused: dict[str, bool] = {}
        self._sentences = list(sentences(self.encoder, self._text)) if haystack else []

    def noise(self, *, running: bool = False) -> Filler:
        """Return noise in lines of five sentences or as a running text; or the user's own, repeated as in RULER."""
        encoder = self.encoder
        if self._sentences:
            return Filler(itertools.cycle(self._sentences), encoder.newline)
        if not running:
            return lines(encoder, lambda: NOISE)
        first, *others = SENTENCES
        following = [encoder.behind(".", f" {sentence}") for sentence in (*others, first)]

        def units() -> Iterator[Sequence[int]]:  # they restart behind the needle, as in the papers
            return itertools.chain([encoder.line(first)], itertools.cycle(following))

        return Filler(units(), encoder.newline, restarts=units)

    def absent(self, draw: Callable[[], str]) -> str:
        """Draw until the value is not in the user's own text; raise if it has nearly all of them."""
        for value in (draw() for _ in range(_DRAWS)):
            if value not in self._text:
                return value
        raise PosencError(
            f"The haystack has all of {_DRAWS:,} values that were drawn, such as {value}. Give another --haystack, or "
            "leave the task out."
        )

    def passages(self) -> Iterator[str]:
        """Return sentences of the user's own text, or of noise, again and again."""
        decode = self.encoder.tokenizer.decode
        own = (decode(ids).strip() for ids in self._sentences)
        return filter(None, itertools.cycle(own if self._sentences else SENTENCES))

    def unused(self, words: Sequence[str], needed: int) -> list[str]:
        """Return those of the names or phrases that are not in the user's own text, whatever their capitals.

        Raise if they are fewer than `needed`.
        """
        for word in words:
            if word not in self._unused:
                self._unused[word] = f" {word.lower()} " not in self._words
        left = [word for word in words if self._unused[word]]
        if len(left) < needed:
            raise PosencError(
                f"The haystack has all but {len(left)} of the {len(words)} names that this task draws {needed} from "
                f"({words[0]}, {words[1]}, ...). Give another --haystack, or leave the task out."
            )
        return left

    def others(self, draw: Callable[[], str], value: str) -> Iterator[str]:
        """Yield different random values other than `value`, more than are needed."""
        seen = {value}
        for _ in range(TRIES * self.distractors):
            other = self.absent(draw)
            if other not in seen:
                seen.add(other)
                yield other

    def alike(self, answer: Sequence[str], draw: Callable[[], str]) -> Iterator[list[str]]:
        """Yield wrong answers of which each part has as many tokens as that of the right one, while some are drawn."""
        behind = self.encoder.behind
        sizes = [len(behind("a", f" {part}")) for part in answer]
        for _ in range(TRIES * self.distractors):
            drawn = (self.absent(draw) for _ in range(TRIES**2 * len(sizes)))
            parts = [next((x for x in drawn if len(behind("a", f" {x}")) == n), "") for n in sizes]
            if not all(parts):
                return
            yield parts

    def scene(
        self,
        head: str,
        needles: Iterable[tuple[float, str]],
        filler: Filler,
        question: str,
        answer: Sequence[str],
        wrong: Iterable[Sequence[str]],
        spare: Iterable[Sequence[str]] = (),
        **more: Any,
    ) -> Scene:
        """Return the pieces of a prompt from their texts; each needle is a line, an answer a list of its parts."""
        encoder = self.encoder
        return Scene(
            head=encoder.line(head),
            needles=[(place, encoder.line(f"{needle}\n")) for place, needle in needles],
            filler=filler,
            question=encoder.line(question),
            answer=answer_of(encoder, question, answer),
            distractors=(answer_of(encoder, question, other) for other in wrong),
            spare=(answer_of(encoder, question, other) for other in spare),
            references=tuple(answer),
            **more,
        )
