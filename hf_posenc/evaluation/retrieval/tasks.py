"""The tasks: what is hidden, what is asked, and what else could be answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.evaluation.retrieval.draws import Draws
from hf_posenc.evaluation.retrieval.encoder import Encoder
from hf_posenc.evaluation.retrieval.fillers import NOISE, Filler, OwnText, lines, noise
from hf_posenc.evaluation.retrieval.prompts import Answer, Place, Scene, answer_of

TRIES = 40
"""At most so many times the wanted distractors are drawn, to have enough with as many tokens as the answer."""


@dataclass(frozen=True)
class Kit:
    """What every prompt of a run is made with.

    Attributes:
        encoder: Text to tokens.
        distractors: How many wrong answers are wanted.
        haystack: The user's own text in the place of the noise sentences.
    """

    encoder: Encoder
    distractors: int = 10
    haystack: OwnText | None = None

    def running_noise(self) -> Filler:
        """Noise as one running text, or the user's own."""
        return self.haystack.filler(self.encoder) if self.haystack else noise(self.encoder)

    def lines_of_noise(self) -> Filler:
        """Noise in lines of five sentences, or the user's own text."""
        if self.haystack:
            return self.haystack.filler(self.encoder)
        return lines(self.encoder, lambda: NOISE)

    def absent(self, draw: Callable[[], str]) -> str:
        """Something random that the user's own text does not contain."""
        while True:
            value = draw()
            if self.haystack is None or value not in self.haystack.text:
                return value

    def others(self, draw: Callable[[], str], known: str) -> Iterator[str]:
        """Different random values other than the known one: more than are wanted, each made when it is asked for."""
        seen = {known}
        for _ in range(TRIES * self.distractors):
            value = self.absent(draw)
            if value not in seen:
                seen.add(value)
                yield value


class Task(ABC):
    """One kind of prompt.

    Attributes:
        name: As in reports and `--tasks`.
        definition: What it asks, in one sentence.
        has_depth: Whether there is one needle with a depth; otherwise depths do not apply.
        new_tokens: Tokens to generate, where answers are generated.
    """

    name: ClassVar[str]
    definition: ClassVar[str]
    has_depth: ClassVar[bool] = True
    new_tokens: ClassVar[int]

    @abstractmethod
    def scene(self, place: Place, kit: Kit) -> Scene:
        """The pieces of a sample; the needle depends on `place.needle`, the filler on `place.filler`."""

    def hit(self, text: str, references: Sequence[str]) -> float:
        """How much of the answer a generated text has: RULER's `string_match_all`, from 0 to 1."""
        return sum(reference.lower() in text.lower() for reference in references) / len(references)


def answers(encoder: Encoder, question: str, values: Iterable[str]) -> Iterator[Answer]:
    """Answers of a single part."""
    return (answer_of(encoder, question, [value]) for value in values)


class Passkey(Task):
    """A number of five digits in noise.

    The text is that of Mohtashami and Jaggi (arXiv 2305.16300), used word for word by Position Interpolation (arXiv
    2306.15595, figure 3), YaRN (arXiv 2309.00071, `eval/passkey.py`), LongLoRA and DCA (`passkey/test_passkey.py`).
    The number has five digits as in Position Interpolation; the scripts draw it from 1 to 50,000. Prompt and
    answer have exactly L tokens, where the scripts count characters of filler.
    """

    name = "passkey"
    definition = "a number of five digits in noise; the text of the passkey papers"
    new_tokens = 10  # YaRN's; it then takes the first number of the text

    _HEAD = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.\n"
    )
    _NEEDLE = "The pass key is {0}. Remember it. {0} is the pass key.\n"
    _QUESTION = "What is the pass key? The pass key is"

    def scene(self, place: Place, kit: Kit) -> Scene:
        draws, encoder = Draws(*place.needle), kit.encoder
        key = kit.absent(lambda: draws.digits(5))
        wrong = Draws("distractors", *place.needle)
        assert place.depth is not None
        return Scene(
            head=encoder.line(self._HEAD),
            needles=[(place.depth, encoder.line(self._NEEDLE.format(key)))],
            filler=kit.running_noise(),
            question=encoder.line(self._QUESTION),
            answer=answer_of(encoder, self._QUESTION, [key]),
            distractors=lambda: answers(
                encoder, self._QUESTION, kit.others(lambda: wrong.digits(5), key)
            ),
            references=(key,),
        )

    def hit(self, text: str, references: Sequence[str]) -> float:
        """Whether the first number of a generated text is the key, as in YaRN's script."""
        digits = "".join(letter if letter in "0123456789" else " " for letter in text).split()
        return float(digits[:1] == list(references))
