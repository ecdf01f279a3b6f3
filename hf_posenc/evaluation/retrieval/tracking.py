"""RULER's variable tracking, after `scripts/data/synthetic/variable_tracking.py` of NVIDIA/RULER (arXiv 2404.06654).

Taken from there: the template, one chain of four hops (`scripts/synthetic.yaml`), names of five capital letters, a
value of five digits, noise in lines of five sentences, one worked example in front of every prompt (five lines of
noise, names of three letters, new names every time), 30 new tokens, `string_match_all`.

Different here: prompt and answer have exactly L tokens; the statements have no space at their end; where they stand is
drawn as parts of the filler, the same at every length.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence

from hf_posenc.evaluation.retrieval.draws import Draws
from hf_posenc.evaluation.retrieval.fillers import NOISE
from hf_posenc.evaluation.retrieval.prompts import Place, Scene, answer_of
from hf_posenc.evaluation.retrieval.tasks import TRIES, Kit, Task

HOPS = 4
_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_QUESTION = (
    "Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {count} variables are assigned the value {value}, they are:"
)


class VariableTracking(Task):
    """`vt`: which variables have a value, through a chain of assignments."""

    name = "vt"
    definition = (
        "RULER: the five variables of a chain of assignments in noise, behind one worked example"
    )
    has_depth = False
    new_tokens = 30

    def scene(self, place: Place, kit: Kit) -> Scene:
        draws, encoder = Draws(*place.needle), kit.encoder
        example = _names(draws, 3, ())
        names = _names(draws, 5, ())
        first, second = draws.digits(5), draws.digits(5)
        question = _QUESTION.format(value=second, count=HOPS + 1)
        places = sorted(draws.fraction() for _ in names)
        statements = [encoder.line(f"{text}\n") for text in _chain(names, second)]
        other = Draws("distractors", *place.needle)
        wrong = (_names(other, 5, names) for _ in range(TRIES * kit.distractors))
        return Scene(
            head=encoder.line(_example(example, first) + _HEAD),
            needles=list(zip(places, statements, strict=True)),
            filler=kit.lines_of_noise(),
            question=encoder.line(question),
            answer=answer_of(encoder, question, names),
            distractors=lambda: (answer_of(encoder, question, others) for others in wrong),
            references=tuple(names),
        )


def _names(draws: Draws, letters: int, taken: Sequence[str]) -> list[str]:
    """Names of variables for one chain, all different."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = draws.letters(letters, string.ascii_uppercase)
        if name not in names and name not in taken:
            names.append(name)
    return names


def _chain(names: Sequence[str], value: str) -> list[str]:
    """The statements that hand a value on from variable to variable."""
    hops = [f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(names)]
    return [f"VAR {names[0]} = {value}", *hops]


def _example(names: Sequence[str], value: str) -> str:
    """A whole short prompt and its answer."""
    context = "\n".join(f"{statement}\n{NOISE}" for statement in _chain(names, value))
    question = _QUESTION.format(value=value, count=len(names))
    return f"{_HEAD}{context}\n{question} {' '.join(names)}\n\n"
