"""Tasks in words of our own: facts about people in other text (after BABILong), associations (after NoLiMa)."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.retrieval.prompts import Draws, Kit, Sample, Scene, Task, answer_of

_DATA = json.loads(resources.files(__package__).joinpath("facts.json").read_text("utf-8"))
POOLS = PERSONS, OBJECTS, PLACES = [
    _DATA[kind].split() for kind in ("persons", "objects", "places")
]
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


class Closed(Task):
    """A task whose answer is one of `OFFERED` words, each named by one needle, behind one worked example.

    It takes more than to have seen the word in the prompt to be right more often than chance. Needles are in order:
    the one that names the answer at the depth, the others before and behind it at random. The example is made of other
    words. Ranks are calibrated by the same question about others of the text: a small model names the last place or
    person of the text behind any question.
    """

    calibrated = True

    head: str
    new_tokens = 10

    @abstractmethod
    def riddles(self, draws: Draws, kit: Kit) -> tuple[Riddle, Riddle]:
        """Return a riddle of names that are not in the user's own text, and a small one of other names."""

    def scene(self, sample: Sample, kit: Kit) -> Scene:
        draws, encoder, depth = Draws(*sample.needle), kit.encoder, sample.depth
        assert depth is not None
        riddle, example = self.riddles(draws, kit)
        worked = f"{' '.join(example.sentences)}\nQuestion: {example.question} {example.answer}."
        question = f"Question: {riddle.question}"
        needles = [encoder.line(f"{sentence}\n") for sentence in riddle.sentences]
        before = sorted(depth * draws.fraction() for _ in needles[: riddle.asked])
        behind = sorted(depth + (1 - depth) * draws.fraction() for _ in needles[riddle.asked + 1 :])
        others = draws.shuffled(riddle.others)
        return Scene(
            head=encoder.line(f"{self.head}\n\nExample:\n{worked}\n\nText:\n"),
            needles=list(zip((*before, depth, *behind), needles, strict=True)),
            filler=kit.noise(),
            question=encoder.line(question),
            answer=answer_of(encoder, question, [riddle.answer]),
            distractors=(answer_of(encoder, question, [other]) for other in others),
            references=(riddle.answer,),
            asked=riddle.asked,
            questions=tuple(encoder.line(f"Question: {other}") for other in riddle.questions),
        )

    def hit(self, text: str, references: Sequence[str]) -> float:
        """Return 1 if the first word of a generated text is the answer."""
        return float(re.findall(r"\w+", text.lower())[:1] == [references[0].lower()])


class Whereabouts(Closed):
    """`babilong_qa1` to `qa3`: where a person or an object is, or was, from one to three facts.

    After BABILong (arXiv 2406.10149), which hides the facts of bAbI's tasks 1 to 3 (arXiv 1502.05698) in books. Taken
    from there: facts in their order in other text, the rules and a worked example in front, the question behind.

    Different here: words and sentences are our own; every place is named by one fact; in the order of the facts the
    answer is equally often the first, second, ... place, so that "the last place" is right no more often than chance.
    `qa3` names one more place, that of its question, and draws both from all pairs: the first place is the answer in 6
    of 21, and so is the one before that of the question.
    """

    head = _DATA["babilong"]["head"]

    def __init__(self, facts: int) -> None:
        self.facts, self.name = facts, f"babilong_qa{facts}"
        asked = ("a person is", "an object is", "an object was before")[facts - 1]
        self.definition = (
            f"after BABILong: where {asked}, of {OFFERED} places in facts about people; in noise"
        )

    def riddles(self, draws: Draws, kit: Kit) -> tuple[Riddle, Riddle]:
        sizes = (3, 3, OFFERED + (self.facts == 3))
        fitting = [kit.unused(pool, size) for pool, size in zip(POOLS, sizes, strict=True)]
        used = [draws.shuffled(pool)[:size] for pool, size in zip(fitting, sizes, strict=True)]
        rest = [[word for word in pool if word not in used[i]] for i, pool in enumerate(POOLS)]
        other = [draws.shuffled(pool)[:size] for pool, size in zip(rest, (2, 2, 4), strict=True)]
        return self._story(draws, *used), self._story(draws, *other)

    def _story(
        self, draws: Draws, persons: list[str], objects: list[str], places: list[str]
    ) -> Riddle:
        """Return a story in which somebody goes to each of the places, in their order.

        The first person is the one asked about, directly or by the first object.
        """
        person, thing = persons[0], objects[0]
        count = len(places)
        answer = end = draws.below(count)
        if self.facts == 3:
            answer, end = sorted(draws.shuffled(range(count))[:2])
        dropped = self.facts > 1 and draws.fraction() < 0.5
        may_leave = dropped or self.facts == 3
        turns = [
            person
            if number in (answer, end)
            else draws.choice(
                persons if number < answer or (number > end and may_leave) else persons[1:]
            )
            for number in range(count)
        ]
        takes = {
            who: draws.choice(
                [n for n in range(count) if turns[n] == who and (n <= answer or who != person)]
            )
            for who in dict.fromkeys(turns)
        }
        facts: list[tuple[str, str, str]] = []
        asked = 0
        for number, (who, place) in enumerate(zip(turns, places, strict=True)):
            if number == answer:
                asked = len(facts)
            facts.append(("go", who, place))
            if self.facts > 1 and takes[who] == number:
                facts.append(("take", who, objects[persons.index(who)]))
            if dropped and number == end:
                facts.append(("drop", person, thing))
        before = places[end] if self.facts == 3 else ""
        template = _DATA["babilong"]["questions"][self.facts - 1]
        question, *questions = (
            template.format(person=who, object=what, place=before)
            for who, what in zip(persons, objects, strict=True)
        )
        return Riddle(
            [_DATA["facts"][verb].format(who, word) for verb, who, word in facts],
            asked,
            question,
            places[answer],
            [place for place in places if place not in (places[answer], before)],
            questions,
        )


class Associations(Closed):
    """`nolima_...`: a person, by an association, where needle and question have no word in common.

    After NoLiMa (arXiv 2502.05167). Taken from there: the needle says one thing about a person, the question asks by
    another that belongs to it, and the answer is the name. Different here: words and sentences are our own; both
    directions of an association are asked; the candidates are the names of needles of the same form, in random order,
    as in RULER's multikey tasks (NoLiMa has one needle); one worked example.
    """

    head = _DATA["nolima"]["head"]

    def __init__(self, kind: str, definition: str) -> None:
        self.name = f"nolima_{kind}"
        self.definition = f"after NoLiMa: a person, by {definition}; {OFFERED} persons in noise"
        self.relations: list[dict[str, Any]] = _DATA["nolima"][kind]

    def riddles(self, draws: Draws, kit: Kit) -> tuple[Riddle, Riddle]:
        used = draws.shuffled(kit.unused(PERSONS, OFFERED))[:OFFERED]
        rest = draws.shuffled([person for person in PERSONS if person not in used])
        fitting = []
        for relation in self.relations:
            pairs = [tuple(pair.split(": ")) for pair in relation["pairs"].split(", ")]
            unused = {*kit.unused([word for pair in pairs for word in pair], 0)}
            if sum(unused.issuperset(pair) for pair in pairs) >= OFFERED:
                fitting.append((pairs, unused, relation["templates"]))
        if not fitting:
            raise PosencError(
                f"The haystack has too many of the words that {self.name} draws from. Give another --haystack, or "
                "leave the task out."
            )
        pairs, unused, templates = draws.choice(fitting)
        asked = draws.shuffled([pair for pair in pairs if unused.issuperset(pair)])[:OFFERED]
        other = draws.shuffled([pair for pair in pairs if pair not in asked])[:2]
        template = draws.choice(templates)
        return _by_association(draws, asked, used, template), _by_association(
            draws, other, rest[:2], template
        )


def _by_association(
    draws: Draws, pairs: Sequence[Sequence[str]], persons: list[str], template: Sequence[str]
) -> Riddle:
    needle, known = template
    asked = draws.below(len(pairs))
    questions = [_DATA["nolima"]["question"].format(known.format(*pair)) for pair in pairs]
    return Riddle(
        [needle.format(*pair, person=who) for pair, who in zip(pairs, persons, strict=True)],
        asked,
        questions.pop(asked),
        persons[asked],
        [who for who in persons if who != persons[asked]],
        questions,
    )
