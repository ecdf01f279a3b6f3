"""Tasks in words of our own: facts about people in other text (after BABILong), associations (after NoLiMa)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple, TypeAlias

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.retrieval.prompts import Draws, Kit, Sample, Scene

FACTS = json.loads(resources.files(__package__).joinpath("facts.json").read_text("utf-8"))
POOLS = PERSONS, _, _ = [FACTS[kind].split() for kind in ("persons", "objects", "places")]
OFFERED = 6
"""Candidates of every answer, all of them in the prompt: chance is one sixth."""


class Riddle(NamedTuple):
    """Sentences in order, one of which (`asked`, an index) names the answer, and the other candidates.

    `questions` ask the same about the other persons, objects or pairs.
    """

    sentences: list[str]
    asked: int
    question: str
    answer: str
    others: list[str]
    questions: list[str]


Riddles: TypeAlias = Callable[[Draws, Kit], tuple[Riddle, Riddle]]


def closed(sample: Sample, kit: Kit, *, riddles: Riddles) -> Scene:
    """Return a scene whose answer is one of `OFFERED` words, each named by one needle, behind one worked example.

    It takes more than to have seen the word in the prompt to be right more often than chance. Needles are in order:
    the one that names the answer at the depth, the others before and behind it at random. The example is the second
    riddle, which is small and made of other words. Ranks are calibrated by the same question about others of the text:
    a small model names the last place or person of the text behind any question.
    """
    draws, depth = Draws(*sample.needle), sample.depth
    assert depth is not None
    riddle, example = riddles(draws, kit)
    head = FACTS[sample.task.split("_")[0]]["head"]
    worked = f"{' '.join(example.sentences)}\nQuestion: {example.question} {example.answer}."
    places = draws.places(depth, riddle.asked, len(riddle.sentences))
    others = draws.shuffled(riddle.others)
    return kit.scene(
        f"{head}\n\nExample:\n{worked}\n\nText:\n",
        zip(places, riddle.sentences, strict=True),
        kit.noise(),
        f"Question: {riddle.question}",
        [riddle.answer],
        ([other] for other in others),
        asked=riddle.asked,
        questions=tuple(kit.encoder.line(f"Question: {other}") for other in riddle.questions),
    )


def whereabouts(draws: Draws, kit: Kit, *, facts: int) -> tuple[Riddle, Riddle]:
    """Return riddles of where a person or an object is, or was, from one to three facts.

    After BABILong (arXiv 2406.10149), which hides the facts of bAbI's tasks 1 to 3 (arXiv 1502.05698) in books. Every
    place is named by one fact, and the answer is equally often each of them. Three facts name one more place, that of
    the question, and draw both from all pairs: the first place is the answer in 6 of 21.
    """
    sizes = (3, 3, OFFERED + (facts == 3))
    fitting = [kit.unused(pool, size) for pool, size in zip(POOLS, sizes, strict=True)]
    used = [draws.shuffled(pool)[:size] for pool, size in zip(fitting, sizes, strict=True)]
    rest = [[word for word in pool if word not in used[i]] for i, pool in enumerate(POOLS)]
    other = [draws.shuffled(pool)[:size] for pool, size in zip(rest, (2, 2, 4), strict=True)]
    return _story(draws, facts, *used), _story(draws, facts, *other)


def _story(
    draws: Draws, facts: int, persons: list[str], objects: list[str], places: list[str]
) -> Riddle:
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
        turns.append(
            person if number in (answer, end) else draws.choice(persons if free else persons[1:])
        )
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
    return Riddle(
        [FACTS["facts"][verb].format(who, word) for verb, who, word in told],
        asked,
        question,
        places[answer],
        [place for place in places if place not in (places[answer], before)],
        questions,
    )


def associations(draws: Draws, kit: Kit, *, kind: str) -> tuple[Riddle, Riddle]:
    """Return riddles of a person, by an association, where needle and question have no word in common.

    After NoLiMa (arXiv 2502.05167): the needle says one thing about a person, the question asks by another that belongs
    to it, and the answer is the name.
    """
    used = draws.shuffled(kit.unused(PERSONS, OFFERED))[:OFFERED]
    rest = draws.shuffled([person for person in PERSONS if person not in used])
    fitting = []
    for relation in FACTS["nolima"][kind]:
        pairs = [tuple(pair.split(": ")) for pair in relation["pairs"].split(", ")]
        unused = {*kit.unused([word for pair in pairs for word in pair], 0)}
        if sum(unused.issuperset(pair) for pair in pairs) >= OFFERED:
            fitting.append((pairs, unused, relation["templates"]))
    if not fitting:
        raise PosencError(
            f"The haystack has too many of the words that nolima_{kind} draws from. Give another --haystack, or "
            "leave the task out."
        )
    pairs, unused, templates = draws.choice(fitting)
    asked = draws.shuffled([pair for pair in pairs if unused.issuperset(pair)])[:OFFERED]
    other = draws.shuffled([pair for pair in pairs if pair not in asked])[:2]
    needle, known = draws.choice(templates)

    def riddle(pairs: Sequence[tuple[str, ...]], persons: Sequence[str]) -> Riddle:
        asked = draws.below(len(pairs))
        question = FACTS["nolima"]["question"]
        questions = [question.format(known.format(*pair)) for pair in pairs]
        return Riddle(
            [needle.format(*pair, person=who) for pair, who in zip(pairs, persons, strict=True)],
            asked,
            questions.pop(asked),
            persons[asked],
            [who for who in persons if who != persons[asked]],
            questions,
        )

    return riddle(asked, used), riddle(other, rest[:2])


RIDDLES: dict[str, Riddles] = {
    "babilong_qa1": functools.partial(whereabouts, facts=1),
    "babilong_qa2": functools.partial(whereabouts, facts=2),
    "babilong_qa3": functools.partial(whereabouts, facts=3),
    "nolima_tools": functools.partial(associations, kind="tools"),
    "nolima_world": functools.partial(associations, kind="world"),
}
