"""Which documents are held out to be scored, and that no other part of them is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_posenc.evaluation.documents import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
)
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.training.blocks import candidates, without

TEXT = "".join(chr(97 + i % 26) for i in range(120))


def long(name: str) -> LongDocument:
    return LongDocument(name, lambda: iter([TEXT[:50], TEXT[50:]]))


@pytest.mark.parametrize(
    ("entries", "held_out"),
    [
        ([Document(f"{i}", "text") for i in range(25)], ["1", "11", "21"]),
        # What cannot be read does not count.
        ([Skipped("a", "damaged"), Document("b", " "), *map(long, "cde")], ["d"]),
    ],
)
def test_every_tenth_document_is_held_out_from_the_second_on(
    entries: Sequence[Entry], held_out: list[str]
) -> None:
    assert [entry.name for entry in candidates(entries)] == held_out
    source = Source(lambda: entries, {"kind": "test"}, embedded=False)
    rest = without(source, held_out[:1])  # the others are trained on if nothing scores them
    assert {entry.name for entry in rest} == {entry.name for entry in entries} - {held_out[0]}
    assert rest.about == {"kind": "test", "held_out": held_out[:1]}


def halves(document: Entry) -> list[Any]:
    """What is trained on and what is held out of a single document."""
    (end,) = candidates([document])
    (rest,) = without(Source(lambda: [document], embedded=False), [end.name])
    return [rest, end]


@pytest.mark.parametrize("document", [Document("a", TEXT), long("a")])
def test_the_last_tenth_of_a_single_text_is_held_out(document: Entry) -> None:
    assert ["".join(part.chunks()) for part in halves(document)] == [TEXT[:108], TEXT[108:]]


def test_the_last_tenth_of_single_token_ids_is_held_out() -> None:
    rest, end = halves(TokenizedDocument("a", torch.arange(30), None, None))
    assert torch.equal(torch.cat([rest.ids, end.ids]), torch.arange(30))
    assert len(end) == 3


def test_what_cannot_be_held_out_is_given_with_its_reason() -> None:
    entries: list[Entry] = [
        Skipped("a", "damaged"),
        Skipped("b", "a conversation"),
    ]
    assert list(candidates(entries)) == entries
