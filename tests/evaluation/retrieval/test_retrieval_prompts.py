"""Prompts: of exactly so many tokens, the same everywhere, with the needle where it should be and nowhere else."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import re
import uuid
from functools import cache
from typing import Any

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import special_prefix
from hf_posenc.evaluation.retrieval import NOISE, Draws, Kit, Prompt, Sample, lay_out
from hf_posenc.evaluation.retrieval.tasks import FACTS as DATA
from hf_posenc.evaluation.retrieval.tasks import TASKS, RetrievalSettings, stories
from tests.support.retrieval_models import TOKENIZERS
from tests.support.selection import covering
from tests.support.tiny_text import prose

PROMPTS = {
    "passkey": "c89d2ac08a9d",
    "niah_single_1": "ab9c250d9d5b",
    "niah_multikey_2": "c6a0e26f5df7",
    "niah_multikey_3": "f04f1eac6183",
    "kv": "ab86c0bceb42",
    "mrcr": "7a985daacd20",
    "vt": "aa986a367fcb",
    "fwe": "1bf5b29f3beb",
    "babilong_qa1": "7dff9d86c4b5",
    "babilong_qa2": "5f1d5ee7abed",
    "babilong_qa3": "4e6114b20159",
}
DEEP = [name for name, task in TASKS.items() if task.has_depth]
WORDS = [name for name in TASKS if name.startswith(("vt", "fwe", "babilong"))]


@cache
def kit_of(tokenizer: str, haystack: str | None = None, distractors: int = 5) -> Kit:
    return Kit(TOKENIZERS[tokenizer](), distractors, haystack)


def make(
    task: str,
    length: int,
    *,
    depth: float = 0.5,
    sample: int = 0,
    seed: int = 0,
    tokenizer: str = "bytes",
    haystack: str | None = None,
) -> Prompt:
    kit = kit_of(tokenizer, haystack)
    special = special_prefix(kit.encoder.tokenizer, "auto")
    place = Sample(seed, task, length, depth if TASKS[task].has_depth else None, sample)
    return lay_out(TASKS[task].scene(place, kit), length, special, kit.distractors)


def text(ids: Any, tokenizer: str = "bytes") -> str:
    return str(kit_of(tokenizer).encoder.tokenizer.decode(ids))


def shortest(task: str, tokenizer: str, *depths: float) -> int:
    """Tokens that every one of these prompts fits into."""
    kit = kit_of(tokenizer)
    special = special_prefix(kit.encoder.tokenizer, "auto")
    places = [Sample(0, task, 4096, d if TASKS[task].has_depth else None, 0) for d in depths]
    return max(TASKS[task].scene(place, kit).shortest for place in places) + len(special)


@pytest.mark.parametrize(("task", "tokenizer"), covering(TASKS, TOKENIZERS))
def test_prompt_and_answer_have_exactly_the_tokens_asked_for(task: str, tokenizer: str) -> None:
    depths = (0.0, 0.37, 1.0)
    # the last pair of `kv` is another one at every length
    least = shortest(task, tokenizer, *depths) + 9 * (task == "kv")
    for length in (least, least + 1, least + 7, 2 * least + 3, 3000):
        for depth in depths:
            prompt = make(task, length, depth=depth, tokenizer=tokenizer)
            assert (
                prompt.longest + max(len(a.ids) for a in (prompt.answer, *prompt.distractors))
                == length
            )
            behind = max([len(prompt.ids) - prompt.text, *map(len, prompt.questions)])
            assert prompt.text + behind == prompt.longest
            assert bool(prompt.questions) == TASKS[task].calibrated
            assert prompt.answer.ends[-1] == len(prompt.answer.ids)
            wrong = {other.ids for other in prompt.distractors}
            assert prompt.answer.ids not in wrong
            # to a tokenizer of known words, all names and made-up words are one
            few = tokenizer == "words" and task in (*WORDS, "mrcr")
            assert few or len(wrong) == 5
            assert len(prompt.distractors) == len(wrong)


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    least = shortest("passkey", "bytes", 0.5)
    with pytest.raises(PosencError, match=f"at least {least} tokens, not {least - 1}"):
        make("passkey", least - 1)


@pytest.mark.parametrize("tokenizer", ["bytes", "bytes with bos", "embedded", "bpe", "metaspace"])
def test_a_prompt_reads_as_the_papers_wrote_it(tokenizer: str) -> None:
    prompt = make("passkey", 700, tokenizer=tokenizer)
    shown = text(prompt.ids, tokenizer).removeprefix("<s>").lstrip(" ")
    (key,) = prompt.references
    assert shown.startswith(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        f"about the important information there.\n{NOISE.split('.')[0]}."
    )
    assert f"\nThe pass key is {key}. Remember it. {key} is the pass key.\nThe grass" in shown
    assert shown.endswith("\nWhat is the pass key? The pass key is")
    assert text(prompt.answer.ids, tokenizer).strip() == key
    # behind the question the answer continues the tokens of the text
    whole = kit_of(tokenizer).encoder.behind("", f"\nThe pass key is {key}")
    assert whole[-len(prompt.answer.ids) :] == prompt.answer.ids


@pytest.mark.parametrize("tokenizer", ["bytes", "embedded"])
@pytest.mark.parametrize("task", DEEP)
def test_the_needle_goes_back_as_its_depth_grows(task: str, tokenizer: str) -> None:
    depths = [index / 4 for index in range(5)]
    length = 9000 if task in WORDS else 3000  # heads with an example are long
    prompts = [make(task, length, depth=depth, tokenizer=tokenizer) for depth in depths]
    places = []
    for depth, prompt in zip(depths, prompts, strict=True):
        (value,) = prompt.references
        shown = text(prompt.ids, tokenizer)
        where = shown.index(value) / len(shown)
        places.append(where)
        assert abs(where - depth) < 0.2  # head, question and one unit of filler
        # the distance is that from the needle's end to the end of the prompt
        assert value not in text(prompt.ids[-int(prompt.distance or 0) :], tokenizer)
        assert value in text(prompt.ids[: -int(prompt.distance or 0)], tokenizer)
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    distances = [prompt.distance or 0 for prompt in prompts]
    assert distances == sorted(distances, reverse=True)


@pytest.mark.parametrize("task", TASKS)
def test_longer_prompts_hide_the_same_needle(task: str) -> None:
    short, long = make(task, 2500), make(task, 5000)
    assert short.references == long.references
    assert short.answer == long.answer
    others: list[dict[str, Any]] = [{"sample": 1}, {"seed": 1}, {"depth": 0.75}]
    for other in others:
        if task in DEEP or "depth" not in other:
            assert make(task, 2500, **other).references != short.references


@pytest.mark.parametrize("haystack", [None, prose(900) + " 12345 and 6789012.\n"])
@pytest.mark.parametrize("task", TASKS)
def test_the_answer_stands_only_where_it_was_put(task: str, haystack: str | None) -> None:
    # A passkey is named twice; of a chain, all variables but the last one; words are frequent.
    least, most = {"passkey": (2, 2), "vt": (1, 2), "fwe": (1, 10**6)}.get(task, (1, 1))
    for sample in range(6):
        prompt = make(task, 3000, sample=sample, haystack=haystack)
        shown = text(prompt.ids)
        for reference in prompt.references:
            assert least <= shown.count(reference) <= most
            assert reference not in (haystack or "")


def test_keys_that_are_in_the_users_own_text_are_not_drawn() -> None:
    draws = iter(["12345", "12345", "99999"])
    assert kit_of("bytes", prose(200) + " 12345\n").absent(lambda: next(draws)) == "99999"


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_other_needles_are_the_distractors(task: str) -> None:
    prompt = make(task, 4000, depth=0.4)
    shown = text(prompt.ids)
    needles = re.findall(r"One of the special magic \w+s for (\S+) is: (\S+)\.\n", shown)
    keys, values = zip(*needles, strict=True)
    (asked,) = re.findall(r"(?:number|uuid) for (\S+) mentioned in the provided text\?", shown)
    assert keys.count(asked) == 1
    assert values[keys.index(asked)] == prompt.references[0]
    assert len(set(values)) == len(values)
    assert {text(other.ids).strip() for other in prompt.distractors} <= set(values)
    if task == "niah_multikey_3":
        assert all(uuid.UUID(value).version == 4 for value in values)


@pytest.mark.parametrize("tokenizer", ["bytes", "embedded", "metaspace"])
def test_the_object_can_be_parsed_and_has_the_value(tokenizer: str) -> None:
    for depth, length in itertools.product((0.0, 0.6, 1.0), (3000, 3001, 3049)):
        prompt = make("kv", length, depth=depth, tokenizer=tokenizer)
        shown = text(prompt.ids, tokenizer)
        pairs: list[tuple[str, str]] = []
        json.loads(shown[shown.index("{") : shown.index("}") + 1], object_pairs_hook=pairs.extend)
        keys, values = zip(*pairs, strict=True)
        assert all(uuid.UUID(each).version == 4 for each in (*keys, *values))
        assert len({*keys, *values}) == 2 * len(pairs)
        (asked,) = re.findall(r'Key: "(\S+)"\nCorresponding value:$', shown)
        place = keys.index(asked)
        assert prompt.references == (values[place],)
        assert json.loads(text(prompt.answer.ids, tokenizer)) == values[place]
        assert place == (0 if depth == 0 else len(pairs) - 2 if depth == 1 else place)
        wrong = [json.loads(text(other.ids, tokenizer)) for other in prompt.distractors]
        assert values[place] not in wrong
        assert len(pairs) < 8 or {*wrong} & {*values}  # in bytes all have the tokens of the answer
        assert len(pairs) < 8 or tokenizer != "bytes" or {*wrong} < {*values}


@pytest.mark.parametrize("haystack", [None, prose(900)])
def test_one_of_the_equal_requests_is_asked_for(haystack: str | None) -> None:
    numbers = set()
    for sample in range(8):
        prompt = make("mrcr", 4000, sample=sample, haystack=haystack, tokenizer="embedded")
        shown = text(prompt.ids, "embedded")
        (number, subject) = re.findall(
            r"User: Repeat the (\w+) line that you wrote about the (\w+)\.\nAssistant:$", shown
        )[0]
        request = f"User: Write a line about the {subject}.\nAssistant: "
        replies = re.findall(f"{re.escape(request)}(.*)\n", shown)
        assert len(set(replies)) == len(replies) == 4
        index = ("first", "second", "third", "fourth").index(number)
        assert (replies.pop(index),) == prompt.references
        assert text(prompt.answer.ids, "embedded") == f" {prompt.references[0]}"
        wrong = [text(other.ids, "embedded").strip() for other in prompt.distractors]
        assert wrong[:3] == replies  # the others come first
        assert sum(other in shown for other in wrong) > 3  # and replies to other requests
        behind = len(text(prompt.ids[-int(prompt.distance or 0) :], "embedded"))
        assert shown[:-behind].endswith(f"{request}{prompt.references[0]}\n")
        assert re.findall(r"User: Read on\.\nAssistant: (.*)\n", shown)[0] in (haystack or NOISE)
        numbers.add(number)
    assert len(numbers) > 2


def test_a_chain_of_variables_can_be_followed() -> None:
    prompt = make("vt", 4000)
    shown = text(prompt.ids).rsplit("Memorize and track", 1)[1]  # behind the example
    value = re.findall(r"assigned the value (\d+), they are:$", shown)[0]
    values: dict[str, str] = {}
    for name, given in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\n", shown):
        values[name] = values.get(given, given)
    assert set(values) == set(prompt.references)
    assert set(values.values()) == {value}
    assert text(prompt.answer.ids) == "".join(f" {name}" for name in prompt.references)
    first_two = text(prompt.answer.ids[: prompt.answer.ends[1]])
    assert first_two == "".join(f" {name}" for name in prompt.references[:2])
    assert re.search(r"they are:( [A-Z]{3}){5}\n", text(prompt.ids).split("Memorize and track")[1])


@pytest.mark.parametrize("lengths", [range(530, 690, 4), range(4000, 5000, 201)])
def test_the_three_words_of_the_answer_are_the_most_frequent(lengths: range) -> None:
    for sample, length in enumerate(lengths):
        prompt = make("fwe", length, sample=sample)
        shown = text(prompt.ids)
        words = re.findall(r"\b[a-z]{6}\b", shown.split("coded words.")[1].split("Question")[0])
        counts = collections.Counter(words).most_common(4)
        assert tuple(word for word, _ in counts[:3]) == prompt.references
        assert [count for _, count in counts] == sorted({c for _, c in counts}, reverse=True)
        assert shown.count("...") > counts[0][1]


def test_distractors_have_as_many_tokens_as_the_answer() -> None:
    equal = 0
    for sample in range(20):
        prompt = make("passkey", 400, sample=sample, tokenizer="embedded")
        off = [len(other.ids) - len(prompt.answer.ids) for other in prompt.distractors]
        assert all(-1 <= difference <= 0 for difference in off)  # the nearest, for a rare size
        equal += not any(off)
    assert equal >= 18
    drawn = make("passkey", 400, tokenizer="embedded", sample=3)
    assert len({len(drawn.answer.ids), *(len(o.ids) for o in drawn.distractors)}) == 1
    for task, sample in (("fwe", 13), ("vt", 22)):  # shorter than all of the usual ones
        drawn = make(task, 768, tokenizer="embedded", sample=sample)
        assert [len(o.ids) for o in drawn.distractors] == [len(drawn.answer.ids)] * 5


def test_depths_are_numbers_by_which_needles_are_drawn() -> None:
    """A number of them is spread evenly, and a whole number is the same depth."""
    for depths in (3, (0, 0.5, 1)):
        settings = RetrievalSettings((400,), depths=depths)  # type: ignore[arg-type]
        assert list(map(repr, settings.depths)) == ["0.0", "0.5", "1.0"]


def test_prompts_are_fixed_for_ever() -> None:
    """Whoever changes a task changes its numbers: then its name has to change as well.

    They are the same in every process and version of Python, whatever the seed of its hashes.
    """
    made = {}
    for task in TASKS:
        digest = hashlib.sha256()
        for depth, tokenizer, haystack in itertools.product(
            (0.0, 0.7), ("bytes with bos", "embedded"), (None, prose(900))
        ):
            prompt = make(task, 2500, depth=depth, tokenizer=tokenizer, haystack=haystack)
            digest.update(repr({**vars(prompt), "ids": prompt.ids.tolist()}).encode())
        made[task] = digest.hexdigest()[:12]
    assert made == PROMPTS


# Facts about people: an interpreter of the text finds the answer, and nothing gives it away.


shown_by = text
FACTS = ["babilong_qa1", "babilong_qa2", "babilong_qa3"]
DEPTHS = (0.0, 0.3, 1.0)
BOOK = prose(900)


def prompt_of(task: str, number: int, depth: float = 0.3, haystack: str | None = None) -> Prompt:
    return make(task, 1600, depth=depth, sample=number, haystack=haystack)


def parts_of(prompt: Prompt) -> tuple[str, str, str]:
    """The worked example, the text and the question."""
    example, rest = shown_by(prompt.ids).split("\n\nExample:\n")[1].split("\n\nText:\n")
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
        others = [shown_by(other.ids).strip() for other in prompt.distractors]
        offered = [*prompt.references, *others]
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
    with pytest.raises(PosencError, match=r"all of 10,000 values.*another --haystack"):
        prompt_of("passkey", 0, haystack=" ".join(map(str, range(10_000, 100_000))))


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
            right = [interpreted(text, q) for q in others if known[q] in named]
            assert len({*right, *prompt.references}) == len(right) + 1
            assert {*re.findall(r"went to the (\w+)\.", text)}.issuperset(right)
        cut = prompt.truncated(len(prompt.ids) - 40, 0, 1)
        assert cut.longest == len(prompt.ids) - 41
        assert shown_by(cut.ids).rsplit("Question: ", 1)[1] == question


@pytest.mark.parametrize(
    ("text", "score"), [("kitchen", 1), ("Kitchen.\nJohn", 1), ("the kitchen", 0), ("kitchens", 0)]
)
def test_the_first_word_of_a_generated_text_is_the_answer(text: str, score: int) -> None:
    assert TASKS["babilong_qa1"].hit(text, ["kitchen"]) == score
