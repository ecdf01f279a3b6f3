"""Retrieval tasks: the hidden text, the question and the wrong answers; the settings of a run."""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import math
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.retrieval.prompts import (
    NOISE,
    TRIES,
    Draws,
    Filler,
    Kit,
    Sample,
    Scene,
    Task,
    answer_of,
    lines,
    word_key,
)
from hf_posenc.evaluation.retrieval.reasoning import Associations, Whereabouts
from hf_posenc.lengths import even_depths, plain

MOST_PROMPTS = 100_000
MOST_DISTRACTORS = 10_000


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

    def scene(self, sample: Sample, kit: Kit) -> Scene:
        draws, encoder = Draws(*sample.needle), kit.encoder
        key = kit.absent(lambda: draws.digits(5))
        wrong = Draws("distractors", *sample.needle)
        others = kit.others(lambda: wrong.digits(5), key)
        assert sample.depth is not None
        return Scene(
            head=encoder.line(self._HEAD),
            needles=[(sample.depth, encoder.line(self._NEEDLE.format(key)))],
            filler=kit.noise(running=True),
            question=encoder.line(self._QUESTION),
            answer=answer_of(encoder, self._QUESTION, [key]),
            distractors=(answer_of(encoder, self._QUESTION, [other]) for other in others),
            references=(key,),
        )

    def hit(self, text: str, references: Sequence[str]) -> float:
        """Return 1 if the first number of a generated text is the key, as in YaRN's script."""
        digits = "".join(letter if letter in "0123456789" else " " for letter in text).split()
        return float(digits[:1] == list(references))


_NEEDLE_HEAD = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n"
)
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_NEEDLE_QUESTION = (
    "What is the special magic {kind} for {key} mentioned in the provided text? The special magic {kind} for {key} "
    "mentioned in the provided text is"
)


class NeedleInHaystack(Task):
    """One needle in RULER's words, after `scripts/data/synthetic/niah.py` of NVIDIA/RULER (arXiv 2404.06654).

    Taken from there: the template for a single needle, the needle's sentence, the kinds of haystack (lines of five
    sentences; other needles), keys (an adjective and a noun, or a UUID) and values (seven digits, or a UUID), one key,
    value and query each (`scripts/synthetic.yaml`), 128 new tokens, `string_match_all`.

    Different here: prompt and answer have exactly L tokens (RULER fills up to L with whole lines, 128 new tokens
    included); the needle is put at its depth instead of a random line; the lists of words are our own.
    """

    new_tokens = 128

    def __init__(
        self, name: str, definition: str, kind: str = "number", among_needles: bool = True
    ) -> None:
        self.name, self.definition = name, f"RULER: {definition}"
        self.kind, self.among_needles = kind, among_needles

    def _make(self, draws: Draws, *, key: bool = False) -> str:
        if self.kind == "uuid":
            return draws.uuid()
        return word_key(draws) if key else draws.digits(7)

    def scene(self, sample: Sample, kit: Kit) -> Scene:
        draws, encoder = Draws(*sample.needle), kit.encoder
        key = kit.absent(lambda: self._make(draws, key=True))
        value = kit.absent(lambda: self._make(draws))
        wrong = Draws("distractors", *sample.needle)
        others = kit.others(lambda: self._make(wrong), value)
        question = _NEEDLE_QUESTION.format(kind=self.kind, key=key)
        filler = kit.noise()
        if self.among_needles:
            filler, others = self._other_needles(sample, kit, key, value, others)
        assert sample.depth is not None
        return Scene(
            head=encoder.line(_NEEDLE_HEAD.format(kind=self.kind)),
            needles=[(sample.depth, encoder.line(f"{self._needle(key, value)}\n"))],
            filler=filler,
            question=encoder.line(question),
            answer=answer_of(encoder, question, [value]),
            distractors=(answer_of(encoder, question, [other]) for other in others),
            references=(value,),
        )

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.kind, key=key, value=value)

    def _other_needles(
        self, sample: Sample, kit: Kit, key: str, value: str, spare: Iterator[str]
    ) -> tuple[Filler, Iterator[str]]:
        """Return a haystack of other needles, and their values: finding any needle is not enough, it must be the key's.

        Where a short prompt holds too few needles, values that do not occur in it are added.
        """
        draws, values = Draws(*sample.filler), {value: None}

        def line() -> str:
            keys = iter(lambda: self._make(draws, key=True), None)
            other_key = next(other for other in keys if other != key)
            other = next(v for v in iter(lambda: self._make(draws), None) if v not in values)
            values[other] = None
            return self._needle(other_key, other)

        def others() -> Iterator[str]:
            shown = list(values)[1 : filler.whole_units + 1]
            yield from Draws("distractors", *sample.filler).shuffled(shown)
            yield from (other for other in spare if other not in values)

        filler = lines(kit.encoder, line)
        return filler, others()


HOPS = 4
_TRACKING_HEAD = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
_TRACKING_QUESTION = (
    "Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {count} variables are assigned the value {value}, they are:"
)


class VariableTracking(Task):
    """`vt`: the variables that have a value, through a chain of assignments.

    After `scripts/data/synthetic/variable_tracking.py` of NVIDIA/RULER (arXiv 2404.06654). Taken from there: the
    template, one chain of four hops (`scripts/synthetic.yaml`), names of five capital letters, a value of five digits,
    noise in lines of five sentences, one worked example in front of every prompt (five lines of noise, names of three
    letters, new names every time), 30 new tokens, `string_match_all`.

    Different here: prompt and answer have exactly L tokens; the statements have no space at their end; their positions
    are drawn as fractions of the filler, the same at every length.
    """

    name = "vt"
    definition = (
        "RULER: the five variables of a chain of assignments in noise, behind one worked example"
    )
    has_depth = False
    new_tokens = 30

    def scene(self, sample: Sample, kit: Kit) -> Scene:
        draws, encoder = Draws(*sample.needle), kit.encoder
        example, names = _names(draws, 3, ()), _names(draws, 5, ())
        first, second = draws.digits(5), draws.digits(5)
        text = "\n".join(f"{statement}\n{NOISE}" for statement in _chain(example, first))
        asked = _TRACKING_QUESTION.format(value=first, count=len(example))
        worked_example = f"{_TRACKING_HEAD}{text}\n{asked} {' '.join(example)}\n\n"
        question = _TRACKING_QUESTION.format(value=second, count=len(names))
        positions = sorted(draws.fraction() for _ in names)
        statements = [encoder.line(f"{statement}\n") for statement in _chain(names, second)]
        other = Draws("distractors", *sample.needle)
        wrong = (_names(other, 5, names) for _ in range(TRIES * kit.distractors))
        return Scene(
            head=encoder.line(worked_example + _TRACKING_HEAD),
            needles=list(zip(positions, statements, strict=True)),
            filler=kit.noise(),
            question=encoder.line(question),
            answer=answer_of(encoder, question, names),
            distractors=(answer_of(encoder, question, others) for others in wrong),
            references=tuple(names),
        )


def _names(draws: Draws, letters: int, taken: Sequence[str]) -> list[str]:
    """Draw different names of variables for one chain."""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        name = draws.letters(letters, string.ascii_uppercase)
        if name not in taken:
            names[name] = None
    return list(names)


def _chain(names: Sequence[str], value: str) -> list[str]:
    """Return the statements that pass a value from variable to variable."""
    hops = [f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(names)]
    return [f"VAR {names[0]} = {value}", *hops]


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
    """`fwe`: the three most frequent words, most frequent first.

    After `scripts/data/synthetic/freq_words_extraction.py` of NVIDIA/RULER (arXiv 2404.06654). Taken from there: the
    template, coded words of six small letters, a vocabulary of L / 50 words. The k-th most frequent word comes
    `N k^-alpha / zeta(alpha)` times (rounded down) with alpha = 2, all in random order. The most frequent one is `...`,
    which the question tells the reader to ignore; the next three are the answer. 50 new tokens, `string_match_all`.

    Different here: prompt and answer have exactly L tokens, padded with `...`; at least ten words, so that short
    prompts have some besides the answer; N is such that the words of the answer and the next one have different counts
    (RULER's may tie).
    """

    name = "fwe"
    definition = "RULER: the three most frequent of made-up words, most frequent first"
    has_depth = False
    new_tokens = 50

    def scene(self, sample: Sample, kit: Kit) -> Scene:
        encoder = kit.encoder
        words = _vocabulary(sample)
        sizes = [len(encoder.behind(".", f" {word}")) for word in (DOTS, *words)]
        head, question = encoder.line(_HEAD), encoder.line(_QUESTION)
        asked, rest = words[:ASKED], words[ASKED:]
        answer = answer_of(encoder, _QUESTION, asked)
        fixed = len(head) + len(question) + len(encoder.newline) + len(answer.ids)
        counts = _counts(sizes, sample.length - fixed)

        text = collections.Counter(dict(zip((DOTS, *words), counts, strict=True))).elements()
        order = Draws("order", *sample.filler).shuffled([*text])
        units = itertools.chain(order, itertools.repeat(DOTS))

        draws = Draws("distractors", *sample.filler)
        tries = range(TRIES * kit.distractors)
        others = (draws.shuffled(rest[:COMMON])[:ASKED] for _ in tries)
        return Scene(
            head=head,
            needles=[],
            filler=Filler((encoder.behind(".", f" {word}") for word in units), encoder.newline),
            question=question,
            answer=answer,
            distractors=(answer_of(encoder, _QUESTION, other) for other in others),
            references=tuple(asked),
            least_filler=_tokens(sizes, _shortest(len(sizes))) + len(encoder.newline),
        )


def _vocabulary(sample: Sample) -> list[str]:
    """Draw the coded words, most frequent first; those of the answer are the same at every length."""
    words: dict[str, None] = {}
    streams = [Draws(*sample.needle)] * ASKED
    filler = Draws(*sample.filler)
    while len(words) < max(sample.length // 50, LEAST_WORDS):
        draws = streams.pop() if streams else filler
        words[draws.letters(6, string.ascii_lowercase)] = None
    return list(words)


def _counts(sizes: Sequence[int], room: int) -> list[int]:
    """Return the count of each word in the longest text that fits and has an unambiguous answer."""
    low, high = _shortest(len(sizes)), max(room, 1) * 2 + 1
    fits = bisect.bisect(range(high), room, lo=low + 1, key=functools.partial(_tokens, sizes)) - 1
    return next(c for n in range(fits, 0, -1) if _unambiguous(c := _zipf(n, len(sizes))))


def _zipf(words: int, size: int) -> list[int]:
    return [int(words * k**-ALPHA / ZETA) for k in range(1, size + 1)]


def _tokens(sizes: Sequence[int], words: int) -> int:
    return sum(s * count for s, count in zip(sizes, _zipf(words, len(sizes)), strict=True))


def _unambiguous(counts: Sequence[int]) -> bool:
    """Return whether the words of the answer and the next one have different counts."""
    deciding = counts[1 : ASKED + 2]
    return all(a > b for a, b in itertools.pairwise(deciding))


def _shortest(size: int) -> int:
    """Return the number of words of the shortest text with an unambiguous answer."""
    return next(words for words in range(1, 1000) if _unambiguous(_zipf(words, size)))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Passkey(),
        NeedleInHaystack(
            "niah_single_1",
            "a number of seven digits under a key of two words, in lines of noise",
            among_needles=False,
        ),
        NeedleInHaystack(
            "niah_multikey_2",
            "as niah_single_1, in a haystack of other such needles, whose numbers are distractors",
        ),
        NeedleInHaystack(
            "niah_multikey_3", "as niah_multikey_2, with UUIDs as keys and values", "uuid"
        ),
        VariableTracking(),
        FrequentWords(),
        *map(Whereabouts, (1, 2, 3)),
        Associations("tools", "the tool of a profession"),
        Associations(
            "world", "the kind of a thing, the city of a landmark, the capital of a country, ..."
        ),
    )
}


def get_task(name: str) -> Task:
    """Return a task by its name."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


DECODES = {
    "teacher-forced": "the answer is right if each of its tokens, behind a blank of its own, is the most probable one; "
    "nothing is generated",
    "generate": "the answer is right if the greedily generated text contains all of it",
}
DEFAULT_TASKS = ("passkey", "niah_single_1", "niah_multikey_2")


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings that determine the numbers of a run, beside the model, the methods and the haystack.

    Attributes:
        lengths: Tokens of prompt and answer, special tokens included, ascending.
        depths: Depths of the needle from 0 to 1, ascending; a number: so many at equal distances.
        samples: Samples at every depth; tasks without a depth have as many at every length as the others.
        distractors: Wrong answers that the right one is ranked among; 0 for no rank.
        decode: A name from `DECODES`.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.
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
        if isinstance(self.depths, int):
            object.__setattr__(self, "depths", even_depths(self.depths))
        for name in ("lengths", "tasks", "depths"):
            values = plain(getattr(self, name))
            if not isinstance(values, Iterable):
                raise PosencError(f"{name} is a list, not {values!r}.")
            values = tuple(values)
            object.__setattr__(self, name, values)
            numbers = name != "tasks"
            if numbers and not all(isinstance(n, int | float) and n == n for n in values):
                raise PosencError(f"{name} is a list of numbers, not {list(values)!r:.80}.")
            ordered = name == "tasks" or list(values) == sorted(values)
            if not values or len(set(values)) != len(values) or not ordered:
                order = "" if name == "tasks" else ", in ascending order"
                raise PosencError(
                    f"Give at least one of the {name}, each once{order}, not {list(values)}."
                )
        # A needle is drawn by its depth's text: 0 and 0.0 would be two.
        object.__setattr__(self, "depths", tuple(map(float, self.depths)))
        for task in self.tasks:
            get_task(task)
        if self.depths[0] < 0 or self.depths[-1] > 1:
            raise PosencError(
                f"Depths go from 0 to 1, not from {self.depths[0]:g} to {self.depths[-1]:g}."
            )
        if self.decode not in DECODES:
            raise unknown("way to decode", self.decode, DECODES)
        for name, least in (("samples", 1), ("distractors", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise PosencError(f"{name} is at least {least}, not {getattr(self, name)}.")
        if self.distractors > MOST_DISTRACTORS:
            raise PosencError(
                f"distractors is at most {MOST_DISTRACTORS:,}, not {self.distractors:,}."
            )
        prompts = self.samples * len(self.depths)
        if prompts > MOST_PROMPTS:
            raise PosencError(
                f"{self.samples:,} samples at {len(self.depths)} depths are {prompts:,} prompts of a task and length, "
                f"and at most {MOST_PROMPTS:,} are measured."
            )

    @property
    def ranks(self) -> bool:
        """True if the answers are ranked among distractors."""
        return self.decode == "teacher-forced" and self.distractors > 0

    def samples_of(self, name: str, length: int) -> list[Sample]:
        """Return the samples of a task at a length."""
        depths: Sequence[float | None] = self.depths
        if not get_task(name).has_depth:
            depths = (None,)
        numbers = range(self.samples * len(self.depths) // len(depths))
        pairs = itertools.product(depths, numbers)
        return [Sample(self.seed, name, length, *pair) for pair in pairs]


def settings_of(options: Any, lengths: Sequence[int]) -> RetrievalSettings:
    """Return the settings of a run with these `RetrievalOptions`, at these lengths."""
    names = ("depths", "samples", "distractors", "decode", "seed", "chunk")
    return RetrievalSettings(
        lengths=tuple(sorted(set(lengths))),
        tasks=DEFAULT_TASKS if options.tasks is None else tuple(options.tasks),
        **{name: getattr(options, name) for name in names},
    )
