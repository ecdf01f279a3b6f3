"""RULER's needles in a haystack, after `scripts/data/synthetic/niah.py` of NVIDIA/RULER (arXiv 2404.06654).

Taken from there: the template in its form for a single needle, the needle's sentence, the kinds of haystack (`noise`:
lines of five sentences; `needle`: other needles), keys (an adjective and a noun, or a UUID) and values (seven digits,
or a UUID), one key, value and query each (`scripts/synthetic.yaml`), 128 new tokens, `string_match_all`.

Different here: prompt and answer have exactly L tokens (RULER fills up to L with whole lines, 128 new tokens
included); the needle's place is its depth instead of a random line; the lists of words are our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hf_posenc.evaluation.retrieval.draws import Draws
from hf_posenc.evaluation.retrieval.fillers import Filler, lines
from hf_posenc.evaluation.retrieval.prompts import Place, Scene, answer_of
from hf_posenc.evaluation.retrieval.tasks import Kit, Task, answers
from hf_posenc.evaluation.retrieval.words import word_key

_HEAD = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n"
)
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_QUESTION = (
    "What is the special magic {kind} for {key} mentioned in the provided text? The special magic {kind} for {key} "
    "mentioned in the provided text is"
)


class NeedleInHaystack(Task):
    """One needle in RULER's words; the subclasses say what it and the haystack are made of."""

    new_tokens = 128
    kind = "number"
    among_needles = False

    def make_key(self, draws: Draws) -> str:
        """What the needle is asked for by."""
        return word_key(draws)

    def make_value(self, draws: Draws) -> str:
        """What is to be found."""
        return draws.digits(7)

    def scene(self, place: Place, kit: Kit) -> Scene:
        draws, encoder = Draws(*place.needle), kit.encoder
        key = kit.absent(lambda: self.make_key(draws))
        value = kit.absent(lambda: self.make_value(draws))
        wrong = Draws("distractors", *place.needle)
        others: Iterable[str] = kit.others(lambda: self.make_value(wrong), value)
        question = _QUESTION.format(kind=self.kind, key=key)
        filler = kit.lines_of_noise()
        if self.among_needles:
            filler, others = self._other_needles(place, kit, (key, value), others)
        assert place.depth is not None
        return Scene(
            head=encoder.line(_HEAD.format(kind=self.kind)),
            needles=[(place.depth, encoder.line(f"{self._needle(key, value)}\n"))],
            filler=filler,
            question=encoder.line(question),
            answer=answer_of(encoder, question, [value]),
            distractors=lambda: answers(encoder, question, others),
            references=(value,),
        )

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.kind, key=key, value=value)

    def _other_needles(
        self, place: Place, kit: Kit, needle: tuple[str, str], spare: Iterable[str]
    ) -> tuple[Filler, Iterable[str]]:
        """A haystack of other needles, and their values.

        Those are the distractors: finding any needle is not enough, it must be the key's. Where a short prompt holds
        fewer than are wanted, values that are nowhere in it make up the number.
        """
        draws = Draws(*place.filler)
        values: dict[str, None] = {}

        def line() -> str:
            key, value = needle
            while key == needle[0]:
                key = self.make_key(draws)
            while value == needle[1] or value in values:
                value = self.make_value(draws)
            values[value] = None
            return self._needle(key, value)

        filler = lines(kit.encoder, line)

        def others() -> Iterator[str]:
            shown = list(values)[: filler.whole_units]
            yield from Draws("distractors", *place.filler).shuffled(shown)
            yield from (value for value in spare if value not in values)

        return filler, others()


class NiahSingle1(NeedleInHaystack):
    """`niah_single_1`: noise; the key is a pair of words, the value a number."""

    name = "niah_single_1"
    definition = "RULER: a number of seven digits under a key of two words, in lines of noise"


class NiahMultikey2(NeedleInHaystack):
    """`niah_multikey_2`: the haystack is made of other needles."""

    name = "niah_multikey_2"
    definition = "RULER: as niah_single_1, in a haystack of other such needles, whose numbers are distractors"
    among_needles = True


class NiahMultikey3(NeedleInHaystack):
    """`niah_multikey_3`: the haystack is made of other needles, keys and values are UUIDs."""

    name = "niah_multikey_3"
    definition = "RULER: as niah_multikey_2, with UUIDs as keys and values"
    kind = "uuid"
    among_needles = True

    def make_key(self, draws: Draws) -> str:
        return draws.uuid()

    def make_value(self, draws: Draws) -> str:
        return draws.uuid()
