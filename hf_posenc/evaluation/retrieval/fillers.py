"""What stands between a prompt's needles: as many tokens of it as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hf_posenc.evaluation.retrieval.encoder import Encoder

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
