"""Where a tokenizer lets a long text be cut, so that the parts give the tokens of the whole.

Two windows that overlap are joined at a place in the overlap that both of them cut. Is what the right one says behind
that place what the whole text gives? It depends on the tokenizer:

* At a word (a piece of the pre-tokenizer) it is, for every model: the model sees one word at a time, and a
  pre-tokenizer goes from left to right and forgets, where a word ends, what stood in front of it.
* At any token it is for byte-pair encoding (BPE) whose pre-tokenizer cuts by the characters next to a place, or not at
  all: a sequence of tokens is the encoding of its text exactly if each pair of neighbours is the encoding of its own,
  since the first merge across a boundary joins pieces of these two. In the joined sequence every pair of neighbours
  stands in one of the windows.
* Viterbi paths (Unigram) over a text that nothing cuts depend on all of it, as do patterns that look ahead or back
  without end, and phases that are counted from the beginning of the text.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from typing import Any


class Cutting(enum.Enum):
    """Where two windows may be joined."""

    AT_TOKENS = "at any token"
    AT_WORDS = "where a word begins"
    NEVER = "nowhere"


# What cuts by the character in front of a place and the one behind it.
_BY_CHARACTER = {
    *("BertPreTokenizer", "CharDelimiterSplit", "Metaspace", "Punctuation", "Whitespace"),
    *("WhitespaceSplit", "Digits"),
}
_BY_PATTERN = {"ByteLevel", "Split", "UnicodeScripts"}
_LOCAL_NORMALIZERS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer"),
    *("Precompiled", "Prepend", "Replace", "ByteLevel"),
}
_LOOKS = re.compile(r"\(\?<?[=!]")
_LOOKS_AT_ONE = re.compile(
    r"\(\?<?[=!](?:\\[pP]\{\^?\w+\}|\\.|\[(?:\\.|[^\]\\])*\]|[^()\\\[*+{])*\)"
)
_REFERS = re.compile(r"\\[1-9k]")
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
LONGEST_COUNT = 64
"""Repetitions that a pattern may count and still forget its phase within an overlap."""


def cutting_of(tokenizer: Any) -> Cutting:
    """Where texts may be cut for a transformers tokenizer; `NEVER` where nothing is known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return Cutting.NEVER
    from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

    normalizers = _steps(backend.normalizer, "normalizers")
    cutters = _steps(backend.pre_tokenizer, "pretokenizers")
    if normalizers is None or cutters is None or getattr(backend.model, "dropout", None):
        return Cutting.NEVER
    if not all(step["type"] in _LOCAL_NORMALIZERS and _looks_near(step) for step in normalizers):
        return Cutting.NEVER
    cutters = [step for step in cutters if _cuts(step)]
    if isinstance(backend.model, BPE) and all(_by_character(step) for step in cutters):
        return Cutting.AT_TOKENS
    known = isinstance(backend.model, (BPE, Unigram, WordLevel, WordPiece))
    forgets = all(
        _by_character(step) or (step["type"] in _BY_PATTERN and _looks_near(step))
        for step in cutters
    )
    return Cutting.AT_WORDS if known and forgets and cutters else Cutting.NEVER


def _steps(component: Any, several: str) -> list[dict[str, Any]] | None:
    """The settings of a component and of those in it; `None` for one that is written in Python."""
    if component is None:
        return []
    try:
        return list(_flat(json.loads(component.__getstate__()), several))
    except Exception:  # the library has no class of its own for this
        return None


def _flat(step: dict[str, Any], several: str) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for inner in step[several]:
            yield from _flat(inner, several)
    else:
        yield step


def _cuts(step: dict[str, Any]) -> bool:
    return (
        bool(step.get("use_regex", True))
        if step["type"] == "ByteLevel"
        else bool(step.get("split", True))
    )


def _by_character(step: dict[str, Any]) -> bool:
    literal = step.get("pattern", {}).get("String")
    return step["type"] in _BY_CHARACTER or (
        step["type"] == "Split" and literal is not None and len(literal) == 1
    )


def _looks_near(step: dict[str, Any]) -> bool:
    """Whether the pattern of a step, if it has one, looks around by single characters and counts little."""
    pattern = step.get("pattern", {}).get("Regex", "")
    counts = [int(n) for pair in _COUNT.findall(pattern) for n in pair if n]
    near = len(_LOOKS.findall(pattern)) == len(_LOOKS_AT_ONE.findall(pattern))
    return near and not _REFERS.search(pattern) and max(counts, default=0) <= LONGEST_COUNT
