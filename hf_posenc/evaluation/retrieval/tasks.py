"""Retrieval tasks: each is a function from a sample to the pieces of its prompt; the settings of a run.

A new task is such a function, its words and definition in `words.json`, and a row of `TASKS`. What the tasks take from
their papers, and what differs, is in docs/retrieval.md.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import json
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.retrieval import (
    NOISE,
    TRIES,
    Draws,
    Filler,
    Kit,
    Sample,
    Scene,
    answer_of,
    lines,
)
from hf_posenc.lengths import even_depths, plain

# RULER takes its words from the `wonderwords` package; the 95 adjectives and 98 nouns of this file are fixed, so that a
# prompt does not change with another package's version.
WORDS = json.loads(resources.files(__package__).joinpath("words.json").read_text("utf-8"))
ADJECTIVES, NOUNS, VERBS, ORDINALS = (
    str(WORDS[kind]).split() for kind in ("adjectives", "nouns", "verbs", "ordinals")
)


def string_match_all(text: str, references: Sequence[str]) -> float:
    """Return the share of the answer that a generated text contains, from 0 to 1, as in RULER."""
    return sum(reference.lower() in text.lower() for reference in references) / len(references)


def first_number(text: str, references: Sequence[str]) -> float:
    """Return 1 if the first number of a generated text is the answer, as in YaRN's script."""
    return float(re.findall("[0-9]+", text)[:1] == list(references))


def first_word(text: str, references: Sequence[str]) -> float:
    """Return 1 if the first word of a generated text is the answer."""
    return float(re.findall(r"\w+", text.lower())[:1] == [references[0].lower()])


@dataclass(frozen=True)
class Task:
    """One kind of prompt.

    Attributes:
        scene: Returns the pieces of a sample; the needle depends on `sample.needle`, the filler on `sample.filler`.
        new_tokens: Tokens to generate where answers are generated.
        hit: Returns the share of the answer that a generated text contains.
        has_depth: False without one needle that has a depth.
        calibrated: Scenes have other questions about the same text, and ranks are by how much more probable an answer
            is behind its own question.
        noise: Whether a user's own text replaces something in its prompts.
    """

    name: str
    scene: Callable[[Sample, Kit], Scene]
    new_tokens: int
    hit: Callable[[str, Sequence[str]], float] = string_match_all
    has_depth: bool = True
    calibrated: bool = False
    noise: bool = True

    @property
    def definition(self) -> str:
        """The question, for reports."""
        return str(WORDS["definitions"].get(self.name, self.name))


def passkey(sample: Sample, kit: Kit) -> Scene:
    """Return a number of five digits in noise, in the words of Mohtashami and Jaggi (arXiv 2305.16300)."""
    draws, wrong = Draws(*sample.needle), Draws("distractors", *sample.needle)
    key = kit.absent(lambda: draws.digits(5))
    draw, text = partial(wrong.digits, 5), WORDS["passkey"]
    assert sample.depth is not None
    needle = sample.depth, text["needle"].format(key)
    pieces = text["head"], [needle], kit.noise(running=True), text["question"], [key]
    return kit.scene(*pieces, ([v] for v in kit.others(draw, key)), kit.alike([key], draw))


def needle_in_haystack(
    sample: Sample, kit: Kit, *, kind: str = "number", among_needles: bool = False
) -> Scene:
    """Return one needle in RULER's words, after `scripts/data/synthetic/niah.py` of NVIDIA/RULER (arXiv 2404.06654)."""

    def key_of(draws: Draws) -> str:
        if kind == "uuid":
            return draws.uuid()
        return f"{draws.choice(ADJECTIVES)}-{draws.choice(NOUNS)}"

    def value_of(draws: Draws) -> str:
        return draws.uuid() if kind == "uuid" else draws.digits(7)

    draws, wrong = Draws(*sample.needle), Draws("distractors", *sample.needle)
    key = kit.absent(lambda: key_of(draws))
    value = kit.absent(lambda: value_of(draws))
    draw = partial(value_of, wrong)
    spare = kit.others(draw, value)
    text: dict[str, str] = {n: words.replace("{kind}", kind) for n, words in WORDS["niah"].items()}
    filler, others = kit.noise(), spare
    if among_needles:
        # Finding any needle is not enough, it must be the key's: the distractors are the values of the others.
        more, values = Draws(*sample.filler), [value]

        def line() -> str:
            other_key = next(other for other in iter(lambda: key_of(more), None) if other != key)
            other = next(v for v in iter(lambda: value_of(more), None) if v not in values)
            values.append(other)
            return text["needle"].format(key=other_key, value=other)

        filler = lines(kit.encoder, line)
        others = _shown_first(sample, filler, values, spare)
    assert sample.depth is not None
    needle = sample.depth, text["needle"].format(key=key, value=value)
    question = text["question"].format(key=key)
    pieces = text["head"], [needle], filler, question, [value]
    return kit.scene(*pieces, ([v] for v in others), kit.alike([value], draw))


def _shown_first(
    sample: Sample, filler: Filler, values: Sequence[str], spare: Iterable[str]
) -> Iterator[str]:
    """Yield the values in the laid out filler, those behind the first; then spare ones, if there are few."""
    shown = values[1 : filler.whole_units + 1]
    yield from Draws("distractors", *sample.filler).shuffled(shown)
    yield from (other for other in spare if other not in values)


def key_value(sample: Sample, kit: Kit) -> Scene:
    """Return one of the UUIDs in a JSON object, by its key, in the words of Liu et al. (arXiv 2307.03172).

    Blank lines at the end of the object fill up the length, so that it can be parsed.
    """
    draws, more = Draws(*sample.needle), Draws(*sample.filler)
    text: dict[str, str] = WORDS["kv"]
    key, value, wrong = draws.uuid(), draws.uuid(), Draws("distractors", *sample.needle)
    values = [value]

    def pair() -> str:
        values.append(more.uuid())
        return text["pair"].format(more.uuid(), values[-1])

    last = text["pair"].format(more.uuid(), more.uuid()).rstrip(",")
    filler = lines(kit.encoder, pair, blank=True)
    assert sample.depth is not None
    needle, question = (sample.depth, text["pair"].format(key, value)), text["question"]
    pieces = text["head"], [needle], filler, question.format(last, key), [f'"{value}"']
    others = _shown_first(sample, filler, values, kit.others(wrong.uuid, value))
    spare = kit.alike([f'"{value}"'], lambda: f'"{wrong.uuid()}"')
    return replace(kit.scene(*pieces, ([f'"{v}"'] for v in others), spare), references=(value,))


def repeated_request(sample: Sample, kit: Kit) -> Scene:
    """Return the n-th reply to a request that a conversation has four times, after MRCR (arXiv 2409.12640).

    The four have as many tokens, so that the others are distractors. Behind them come replies to other requests.
    """
    draws, more = Draws(*sample.needle), Draws(*sample.filler)
    text: dict[str, str] = WORDS["mrcr"]
    depth, subject, passages = sample.depth, draws.choice(NOUNS), kit.passages()
    assert depth is not None

    def reply(about: str, draws: Draws) -> str:
        words = (ADJECTIVES, VERBS, ADJECTIVES, NOUNS)
        return kit.absent(lambda: text["reply"].format(about, *map(draws.choice, words)))

    by_size: dict[int, dict[str, None]] = {}
    equal: dict[str, None] = {}
    while len(equal) < len(ORDINALS):
        other = reply(subject, draws)
        equal = by_size.setdefault(len(kit.encoder.behind(":", f" {other}")), {})
        equal[other] = None
    asked = draws.below(len(equal))
    values = [answer := list(equal)[asked]]

    def turns() -> str:
        other = next(noun for noun in iter(lambda: more.choice(NOUNS), None) if noun != subject)
        values.append(reply(other, more))
        return f"{text['turn'].format(other, values[-1])}\n{text['passage'].format(next(passages))}"

    filler, wrong = lines(kit.encoder, turns), Draws("distractors", *sample.needle)
    spare = kit.others(lambda: reply(wrong.choice(NOUNS), wrong), answer)
    question, places = text["question"], draws.places(depth, asked, len(equal))
    others = itertools.chain(equal, _shown_first(sample, filler, values, spare))
    return kit.scene(
        text["head"],
        zip(places, (text["turn"].format(subject, each) for each in equal), strict=True),
        filler,
        question.format(ORDINALS[asked], subject),
        [answer],
        ([other] for other in others),  # with the answer, which `lay_out` leaves out
        asked=asked,
    )


def variable_tracking(sample: Sample, kit: Kit) -> Scene:
    """Return the variables that have a value, through a chain of assignments, after RULER's `variable_tracking.py`."""
    hops = 4

    def names_of(draws: Draws, letters: int, taken: Sequence[str] = ()) -> list[str]:
        names: dict[str, None] = {}
        while len(names) <= hops:
            name = draws.letters(letters, string.ascii_uppercase)
            if name not in taken:
                names[name] = None
        return list(names)

    def chain(names: Sequence[str], value: str) -> list[str]:
        passed = [f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(names)]
        return [f"VAR {names[0]} = {value}", *passed]

    draws, text = Draws(*sample.needle), WORDS["vt"]
    example, names = names_of(draws, 3), names_of(draws, 5)
    first, second = draws.digits(5), draws.digits(5)
    asked, question = (text["question"].format(value=x, count=hops + 1) for x in (first, second))
    told = "\n".join(f"{statement}\n{NOISE}" for statement in chain(example, first))
    worked_example = f"{text['head']}{told}\n{asked} {' '.join(example)}\n\n"
    places = sorted(draws.fraction() for _ in names)
    needles = zip(places, chain(names, second), strict=True)
    other = Draws("distractors", *sample.needle)
    wrong = (names_of(other, 5, names) for _ in range(TRIES * kit.distractors))
    pieces = worked_example + text["head"], needles, kit.noise(), question, names, wrong
    return kit.scene(*pieces, kit.alike(names, partial(other.letters, 5, string.ascii_uppercase)))


def frequent_words(sample: Sample, kit: Kit) -> Scene:
    """Return a text of made-up words, of which the three most frequent are asked for, most frequent first.

    After RULER's `freq_words_extraction.py`. The k-th most frequent word comes `N k^-alpha / zeta(alpha)` times
    (rounded down) with alpha = 2, all in random order. The most frequent one is `...`, which the question tells the
    reader to ignore; the next three are the answer. N is such that these and the next one have different counts.
    """
    asked, dots = 3, "..."
    common = 30  # distractors are made of the most frequent words behind those of the answer
    words: dict[str, None] = {}
    needle, filler = Draws(*sample.needle), Draws(*sample.filler)
    # The words of the answer are the same at every length.
    streams = itertools.chain([needle] * asked, itertools.repeat(filler))
    while len(words) < max(sample.length // 50, 10):
        words[next(streams).letters(6, string.ascii_lowercase)] = None
    answer, rest = list(words)[:asked], list(words)[asked:]

    text, encoder = WORDS["fwe"], kit.encoder
    sizes = [len(encoder.behind(".", f" {word}")) for word in (dots, *words)]

    def counts(total: int) -> list[int]:
        zeta = math.pi**2 / 6
        return [int(total * rank**-2.0 / zeta) for rank in range(1, len(sizes) + 1)]

    def tokens(total: int) -> int:
        return sum(size * count for size, count in zip(sizes, counts(total), strict=True))

    def is_clear(total: int) -> bool:
        return all(a > b for a, b in itertools.pairwise(counts(total)[1 : asked + 2]))

    shortest = next(filter(is_clear, range(1, 1000)))
    parts = encoder.line(text["head"]), encoder.line(text["question"]), encoder.newline
    ids = answer_of(encoder, text["question"], answer).ids
    room = sample.length - sum(map(len, (*parts, ids)))
    fits = bisect.bisect(range(max(room, 1) * 2 + 1), room, lo=shortest + 1, key=tokens) - 1
    longest = next(filter(is_clear, range(fits, 0, -1)))

    shown = collections.Counter(dict(zip((dots, *words), counts(longest), strict=True)))
    order = Draws("order", *sample.filler).shuffled([*shown.elements()])
    units = itertools.chain(order, itertools.repeat(dots))
    draws = Draws("distractors", *sample.filler)
    return kit.scene(
        text["head"],
        [],
        Filler((encoder.behind(".", f" {word}") for word in units), encoder.newline),
        text["question"],
        answer,
        (draws.shuffled(rest[:common])[:asked] for _ in range(TRIES * kit.distractors)),
        kit.alike(answer, partial(draws.letters, 6, string.ascii_lowercase)),  # not in the text
        least_filler=tokens(shortest) + len(encoder.newline),
    )


FACTS = json.loads(resources.files(__package__).joinpath("facts.json").read_text("utf-8"))
OFFERED = 6
"""Candidates of every answer, all of them in the prompt: chance is one sixth."""


class Story(NamedTuple):
    """Sentences in order, one of which (`asked`, an index) names the answer, and the other candidates.

    `questions` ask the same about the other persons or objects.
    """

    sentences: list[str]
    asked: int
    question: str
    answer: str
    others: list[str]
    questions: list[str]


def babilong(sample: Sample, kit: Kit, *, facts: int) -> Scene:
    """Return where a person or an object is, or was, from one to three facts, after BABILong (arXiv 2406.10149).

    It takes more than to have seen the word in the prompt to be right more often than chance. Needles are in order:
    the one that names the answer at the depth, the others before and behind it at random. The worked example is a
    second story, which is small and made of other words. Ranks are calibrated by the same question about others of the
    text: a small model names the last place of the text behind any question.
    """
    draws, depth = Draws(*sample.needle), sample.depth
    assert depth is not None
    story, example = stories(draws, kit, facts)
    worked = f"{' '.join(example.sentences)}\nQuestion: {example.question} {example.answer}."
    places = draws.places(depth, story.asked, len(story.sentences))
    others = draws.shuffled(story.others)
    question = f"Question: {story.question}"
    sizes = (len(answer_of(kit.encoder, question, [other]).ids) for other in others)
    return kit.scene(
        f"{FACTS['babilong']['head']}\n\nExample:\n{worked}\n\nText:\n",
        zip(places, story.sentences, strict=True),
        kit.noise(),
        question,
        [story.answer],
        ([other] for other in others),
        asked=story.asked,
        longest=max(sizes),
        questions=tuple(kit.encoder.line(f"Question: {other}") for other in story.questions),
    )


def stories(draws: Draws, kit: Kit, facts: int) -> tuple[Story, Story]:
    """Return a story and a small one of other words, as bAbI's tasks 1 to 3 (arXiv 1502.05698).

    Every place is named by one fact, and the answer is equally often each of them. Three facts name one more place,
    that of the question, and draw both from all pairs: the first place is the answer in 6 of 21.
    """
    pools = [FACTS[kind].split() for kind in ("persons", "objects", "places")]
    sizes = (3, 3, OFFERED + (facts == 3))
    fitting = [kit.unused(pool, size) for pool, size in zip(pools, sizes, strict=True)]
    used = [draws.shuffled(pool)[:size] for pool, size in zip(fitting, sizes, strict=True)]
    rest = [[word for word in pool if word not in used[i]] for i, pool in enumerate(pools)]
    other = [draws.shuffled(pool)[:size] for pool, size in zip(rest, (2, 2, 4), strict=True)]
    return _story(draws, facts, *used), _story(draws, facts, *other)


def _story(
    draws: Draws, facts: int, persons: list[str], objects: list[str], places: list[str]
) -> Story:
    """Return a story in which somebody goes to each of the places, in their order.

    The first person is the one asked about, directly or by the first object.
    """
    person, thing = persons[0], objects[0]
    count = len(places)
    answer = end = draws.below(count)
    if facts == 3:
        answer, end = sorted(draws.shuffled(range(count))[:2])
    dropped = facts > 1 and draws.fraction() < 0.5
    may_leave = dropped or facts == 3
    turns = []
    for number in range(count):
        free = number < answer or (number > end and may_leave)
        able = persons if free else persons[1:]
        turns.append(person if number in (answer, end) else draws.choice(able))
    takes = {}  # the turn in which each person takes an object
    for who in dict.fromkeys(turns):
        own = [n for n in range(count) if turns[n] == who and (n <= answer or who != person)]
        takes[who] = draws.choice(own)

    told: list[tuple[str, str, str]] = []
    asked = 0
    for number, (who, place) in enumerate(zip(turns, places, strict=True)):
        if number == answer:
            asked = len(told)
        told.append(("go", who, place))
        if facts > 1 and takes[who] == number:
            told.append(("take", who, objects[persons.index(who)]))
        if dropped and number == end:
            told.append(("drop", person, thing))
    before = places[end] if facts == 3 else ""
    template = FACTS["babilong"]["questions"][facts - 1]
    question, *questions = (
        template.format(person=who, object=what, place=before)
        for who, what in zip(persons, objects, strict=True)
    )
    return Story(
        [FACTS["facts"][verb].format(who, word) for verb, who, word in told],
        asked,
        question,
        places[answer],
        [place for place in places if place not in (places[answer], before)],
        questions,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("passkey", passkey, 10, first_number),
        Task("niah_single_1", needle_in_haystack, 128),
        *(
            Task(name, partial(needle_in_haystack, among_needles=True, kind=kind), 128, noise=False)
            for name, kind in (("niah_multikey_2", "number"), ("niah_multikey_3", "uuid"))
        ),
        Task("kv", key_value, 64, noise=False),
        Task("mrcr", repeated_request, 64),
        Task("vt", variable_tracking, 30, has_depth=False),
        Task("fwe", frequent_words, 50, has_depth=False, noise=False),
        *(
            Task(f"babilong_qa{n}", partial(babilong, facts=n), 10, first_word, calibrated=True)
            for n in (1, 2, 3)
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
    "generate": "an answer is right if the greedy text has it (passkey: as first number; babilong: as first word)",
}
DEFAULT_TASKS = ("passkey", "niah_single_1", "niah_multikey_2")


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings that determine the numbers of a run, beside the model, the methods and the haystack.

    The fields are those of `RetrievalOptions`. Tasks without a depth have as many samples at a length as the others.
    """

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = DEFAULT_TASKS
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 4
    distractors: int = 10
    decode: str = "teacher-forced"
    seed: int = 0
    chunk: int | None = None
    prefill: int | None = None

    def __post_init__(self) -> None:
        # a needle is drawn by its depth's text: 0 and 0.0 would be two
        depths = map(float, even_depths(plain(self.depths)))
        object.__setattr__(self, "depths", tuple(sorted(set(depths))))
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))
        object.__setattr__(self, "tasks", tuple(dict.fromkeys(self.tasks)))
        for name in ("lengths", "tasks", "depths"):
            if not getattr(self, name):
                raise PosencError(f"Give at least one of the {name}.")
        for task in self.tasks:
            get_task(task)
        if not 0 <= self.depths[0] <= self.depths[-1] <= 1:
            raise PosencError(f"Depths go from 0 to 1, not {list(self.depths)!r:.80}.")
        if self.decode not in DECODES:
            raise unknown("way to decode", self.decode, DECODES)
        if self.decode == "generate" and (self.prefill or self.chunk):
            raise PosencError("--decode generate takes no --prefill-chunk, no --chunk: omit them.")

    @property
    def ranks(self) -> bool:
        """True if the answers are ranked among distractors."""
        return self.decode == "teacher-forced" and self.distractors > 0

    def samples_of(self, name: str, length: int) -> list[Sample]:
        """Return the samples of a task at a length."""
        depths: Sequence[float | None] = self.depths if get_task(name).has_depth else (None,)
        numbers = range(self.samples * len(self.depths) // len(depths))
        pairs = itertools.product(depths, numbers)
        return [Sample(self.seed, name, length, *pair) for pair in pairs]


def settings_of(options: Any, lengths: Sequence[int]) -> RetrievalSettings:
    """Return the settings of a run with these `RetrievalOptions`, at these lengths."""
    names = ("depths", "samples", "distractors", "decode", "seed", "chunk", "prefill")
    return RetrievalSettings(
        tuple(lengths),
        DEFAULT_TASKS if options.tasks is None else tuple(options.tasks),
        **{name: getattr(options, name) for name in names},
    )
