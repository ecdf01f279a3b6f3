"""RULER's frequent words, after `scripts/data/synthetic/freq_words_extraction.py` of NVIDIA/RULER (arXiv 2404.06654).

Taken from there: the template, coded words of six small letters, a vocabulary of L / 50 words, the k-th most frequent
of which comes `N k^-alpha / zeta(alpha)` times (rounded down) with alpha = 2, the most frequent one being `...`, which
the question says to ignore, all in random order; the next three are the answer; 50 new tokens, `string_match_all`.

Different here: prompt and answer have exactly L tokens, filled up with `...`; at least ten words, so that short prompts
have some besides the answer; N is such that the words of the answer and the next one all have different counts (RULER's
may tie).
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterator, Sequence

from hf_posenc.evaluation.retrieval.draws import Draws
from hf_posenc.evaluation.retrieval.fillers import Filler
from hf_posenc.evaluation.retrieval.prompts import Answer, Place, Scene, answer_of
from hf_posenc.evaluation.retrieval.tasks import TRIES, Kit, Task

ALPHA = 2.0
ZETA = math.pi**2 / 6  # zeta(ALPHA)
ASKED = 3
LEAST_WORDS = 10
COMMON = 30  # distractors are made of the most frequent words behind those of the answer
DOTS = "..."

_HEAD = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words."
)
_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)


class FrequentWords(Task):
    """`fwe`: the three most frequent words, most frequent first."""

    name = "fwe"
    definition = "RULER: the three most frequent of made-up words, most frequent first"
    has_depth = False
    new_tokens = 50

    def scene(self, place: Place, kit: Kit) -> Scene:
        encoder = kit.encoder
        words = _vocabulary(place)
        sizes = [len(encoder.behind(".", f" {word}")) for word in (DOTS, *words)]
        head, question = encoder.line(_HEAD), encoder.line(_QUESTION)
        asked, rest = words[:ASKED], words[ASKED:]
        answer = answer_of(encoder, _QUESTION, asked)
        fixed = len(head) + len(question) + len(encoder.newline) + len(answer.ids)
        counts = _counts(sizes, place.length - fixed)

        def units() -> Iterator[Sequence[int]]:
            text = [
                word
                for word, count in zip((DOTS, *words), counts, strict=True)
                for _ in range(count)
            ]
            for word in Draws("order", *place.filler).shuffled(text):
                yield encoder.behind(".", f" {word}")
            while True:
                yield encoder.behind(".", f" {DOTS}")

        def distractors() -> Iterator[Answer]:
            draws, seen = Draws("distractors", *place.filler), set()
            for _ in range(TRIES * kit.distractors):
                others = tuple(draws.shuffled(rest[:COMMON])[:ASKED])
                if others not in seen:
                    seen.add(others)
                    yield answer_of(encoder, _QUESTION, others)

        return Scene(
            head=head,
            needles=[],
            filler=Filler(units, encoder.newline, running=True),
            question=question,
            answer=answer,
            distractors=distractors,
            references=tuple(asked),
            least_filler=_tokens(sizes, _first_clear(len(sizes))) + len(encoder.newline),
        )


def _vocabulary(place: Place) -> list[str]:
    """The coded words, most frequent first; those of the answer are the same at every length."""
    words: dict[str, None] = {}
    streams = [Draws(*place.needle)] * ASKED
    size = max(place.length // 50, LEAST_WORDS)
    filler = Draws(*place.filler)
    while len(words) < size:
        draws = streams.pop() if streams else filler
        words[draws.letters(6, string.ascii_lowercase)] = None
    return list(words)


def _counts(sizes: Sequence[int], room: int) -> list[int]:
    """How often each word comes: the most text that fits and leaves no doubt about the answer."""
    low, high = _first_clear(len(sizes)), max(room, 1) * 2
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _tokens(sizes, middle) <= room else (low, middle - 1)
    while not _clear(_zipf(low, len(sizes))):
        low -= 1
    return _zipf(low, len(sizes))


def _zipf(words: int, size: int) -> list[int]:
    return [int(words * k**-ALPHA / ZETA) for k in range(1, size + 1)]


def _tokens(sizes: Sequence[int], words: int) -> int:
    return sum(s * count for s, count in zip(sizes, _zipf(words, len(sizes)), strict=True))


def _clear(counts: Sequence[int]) -> bool:
    """Whether the asked words and the one that comes next have different counts."""
    deciding = counts[1 : ASKED + 2]
    return all(a > b for a, b in itertools.pairwise(deciding))


def _first_clear(size: int) -> int:
    """The shortest text that leaves no doubt."""
    return next(words for words in range(1, 1000) if _clear(_zipf(words, size)))
