"""Facts about people: an interpreter of the text finds the answer, and nothing gives it away."""

from __future__ import annotations

import collections
import re

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.retrieval import Draws, Prompt, Sample
from hf_posenc.evaluation.retrieval.tasks import FACTS as DATA
from hf_posenc.evaluation.retrieval.tasks import TASKS, stories
from tests.evaluation.retrieval.test_retrieval_prompts import kit_of, make
from tests.evaluation.retrieval.test_retrieval_prompts import text as shown_by
from tests.support.tiny_text import prose

FACTS = ["babilong_qa1", "babilong_qa2", "babilong_qa3"]
DEPTHS = (0.0, 0.3, 1.0)
BOOK = prose(900)


def prompt_of(task: str, number: int, depth: float = 0.3, haystack: str | None = None) -> Prompt:
    return make(task, 1600, depth=depth, sample=number, haystack=haystack)


def parts_of(prompt: Prompt) -> tuple[str, str, str]:
    """The worked example, the text and the question."""
    shown = shown_by(prompt.ids)
    example, rest = shown.split("\n\nExample:\n")[1].split("\n\nText:\n")
    text, question = rest.rsplit("Question: ", 1)
    return example, text, question


def interpreted(text: str, question: str) -> str:
    """The answer, by following persons and objects through the sentences of the text."""
    where: dict[str, str] = {}
    holds: dict[str, str] = {}  # object: person
    places: dict[str, list[str]] = collections.defaultdict(list)
    for person, verb, word in re.findall(r"(\w+) (went to|took|dropped) the (\w+)\.", text):
        if verb == "went to":
            where[person] = word
        elif verb == "took":
            holds[word] = person
        else:
            assert holds.pop(word) == person
        for seen in [person, *(thing for thing, who in holds.items() if who == person)]:
            if places[seen][-1:] != [where[person]]:
                places[seen].append(where[person])
    if found := re.match(r"Where was the (\w+) before the (\w+)\?", question):
        thing, later = found.groups()
        return places[thing][places[thing].index(later) - 1]
    (asked,) = re.findall(r"Where is (?:the )?(\w+) now\?", question)
    return places[asked][-1]


@pytest.mark.parametrize("task", FACTS)
def test_the_answer_follows_from_the_facts_in_their_order(task: str) -> None:
    """An interpreter of the prompt's text finds it, in the worked example too, and not with the facts reversed."""
    reversed_right = 0
    for number in range(24):
        prompt = prompt_of(task, number, DEPTHS[number % 3], (None, BOOK)[number % 2])
        example, text, question = parts_of(prompt)
        (answer,) = prompt.references
        assert interpreted(text, question) == answer
        told, asked = example.split("Question: ")
        assert asked.endswith(f" {interpreted(told, asked)}.")
        if task == "babilong_qa1":
            facts = re.findall(r"\w+ went to the \w+\.", text)
            reversed_right += interpreted(" ".join(reversed(facts)), question) == answer
    assert reversed_right < 18


@pytest.mark.parametrize("task", FACTS)
def test_every_place_is_a_candidate_and_named_once(task: str) -> None:
    for number in range(20):
        prompt = prompt_of(task, number)
        example, text, question = parts_of(prompt)
        places = re.findall(r"went to the (\w+)\.", text)
        asked = re.findall(r"before the (\w+)\?", question)
        offered = [
            *prompt.references,
            *(shown_by(other.ids).strip() for other in prompt.distractors),
        ]
        assert sorted([*offered, *asked]) == sorted({*places})
        assert len(offered) == 6
        named = re.findall(r"\w+", text)
        assert all(named.count(place) == 1 for place in places)
        people = {*re.findall(r"(\w+) (?:went|took|dropped)", text)}
        assert not {*places, *people}.intersection(re.findall(r"\w+", example))


@pytest.mark.parametrize("task", FACTS)
def test_no_place_is_right_by_its_position_alone(task: str) -> None:
    """Of 300 stories: the answer's number among the places, against the shares that docs/retrieval.md promises."""
    numbers: collections.Counter[int] = collections.Counter()
    just_before = 0
    for number in range(300):
        sample = Sample(0, task, 1600, 0.5, number)
        story, _ = stories(Draws(*sample.needle), kit_of("bytes"), int(task[-1]))
        places = re.findall(r"went to the (\w+)\.", " ".join(story.sentences))
        place = places.index(story.answer)
        numbers[place] += 1
        if task == "babilong_qa3":
            (later,) = re.findall(r"before the (\w+)\?", story.question)
            just_before += places.index(later) == place + 1
    shares = [(6 - i) / 21 if task == "babilong_qa3" else 1 / 6 for i in range(6)]
    assert sorted(numbers) == list(range(6))
    assert [numbers[i] / 300 for i in range(6)] == pytest.approx(shares, abs=0.07)
    assert just_before / 300 == pytest.approx(6 / 21 if task == "babilong_qa3" else 0, abs=0.07)


@pytest.mark.parametrize("task", FACTS)
def test_names_of_the_users_own_text_are_not_drawn(task: str) -> None:
    names = [*DATA["persons"].split(), *DATA["places"].split(), *DATA["objects"].split()]
    taken = [name for name in names if name not in names[::5]]
    haystack = " ".join(taken).upper() + ". carpenters!\n"
    assert kit_of("bytes", haystack).unused(["carpenter"], 1) == ["carpenter"]  # another word
    for number in range(6):
        assert prompt_of(task, number, haystack=haystack).references[0] in names[::5]
    with pytest.raises(PosencError, match=r"all but 0 of the 50 names.*another --haystack"):
        prompt_of(task, 0, haystack=f"{' '.join(names)}.\n")


@pytest.mark.parametrize("task", FACTS)
def test_other_questions_are_the_same_about_others(task: str) -> None:
    for number in range(8):
        prompt = prompt_of(task, number)
        _, text, question = parts_of(prompt)
        shown = [
            shown_by(prompt.with_question(q).ids).rsplit("Question: ", 1) for q in prompt.questions
        ]
        before = shown_by(prompt.ids).rsplit("Question: ", 1)[0]
        assert [start for start, _ in shown] == [before] * len(shown)
        others = [end for _, end in shown]
        assert len({question, *others}) == 3
        if task == "babilong_qa1":
            named = {*re.findall(r"(\w+) went", text)}
            known = {q: q.split()[2] for q in (question, *others)}
            assert named <= {*known.values()}
            places = {*re.findall(r"went to the (\w+)\.", text)}
            right = [interpreted(text, q) for q in others if known[q] in named]
            assert len({*right, *prompt.references}) == len(right) + 1
            assert places.issuperset(right)
        cut = prompt.truncated(len(prompt.ids) - 40, 0, 1)
        assert cut.longest == len(prompt.ids) - 41
        assert shown_by(cut.ids).rsplit("Question: ", 1)[1] == question


@pytest.mark.parametrize(
    ("text", "score"), [("kitchen", 1), ("Kitchen.\nJohn", 1), ("the kitchen", 0), ("kitchens", 0)]
)
def test_the_first_word_of_a_generated_text_is_the_answer(text: str, score: int) -> None:
    assert TASKS["babilong_qa1"].hit(text, ["kitchen"]) == score
