"""A part of a text, tokenized on its own, whose tokens know their place in the whole text."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posenc.evaluation.documents.document import UnreadableError

# Where tokens end in their text: counted in characters by the tokenizer, here in bytes and words.


Numbers = np.ndarray[Any, np.dtype[Any]]

# Every character that `str.split` splits at; none lies behind the ideographic space.
_SPACES = np.array([point for point in range(0x3001) if chr(point).isspace()], dtype=np.uint32)


def code_points(text: str) -> Numbers:
    """The characters of a text as numbers, shape (characters,), uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def bytes_up_to(points: Numbers) -> Numbers:
    """UTF-8 bytes in front of each character and behind the last, shape (characters + 1,), int64."""
    sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate([[0], np.cumsum(sizes)])


def words_up_to(points: Numbers, inside: bool = False) -> Numbers:
    """Words that begin in front of each character and behind the last, shape (characters + 1,), int64.

    Args:
        points: From `code_points`.
        inside: The character in front of the text belongs to a word.
    """
    solid = ~np.isin(points, _SPACES)
    begins = solid & ~np.concatenate([[inside], solid[:-1]])
    return np.concatenate([[0], np.cumsum(begins, dtype=np.int64)])


# Where a tokenizer lets a long text be cut, so that the parts give the tokens of the whole.
#
# Two windows that overlap are joined at a place in the overlap that both of them cut. Is what the right one says behind
# that place what the whole text gives? It depends on the tokenizer:
#
# * At a word (a piece of the pre-tokenizer) it is, for every model: the model sees one word at a time, and a
#   pre-tokenizer goes from left to right and forgets, where a word ends, what stood in front of it.
# * At any token it is for byte-pair encoding (BPE) whose pre-tokenizer cuts by the characters next to a place, or not
# at
#   all: a sequence of tokens is the encoding of its text exactly if each pair of neighbours is the encoding of its own,
#   since the first merge across a boundary joins pieces of these two. In the joined sequence every pair of neighbours
#   stands in one of the windows.
# * Viterbi paths (Unigram) over a text that nothing cuts depend on all of it, as do patterns that look ahead or back
#   without end, and phases that are counted from the beginning of the text.


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


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens, with the ends of `TokenizedDocument`: numpy arrays of one length, int64."""

    ids: Numbers
    byte_ends: Numbers | None
    word_ends: Numbers | None

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, begin: int, stop: int | None) -> Tokens:
        """Tokens `begin .. stop-1` of these."""
        byte_ends = None if self.byte_ends is None else self.byte_ends[begin:stop]
        word_ends = None if self.word_ends is None else self.word_ends[begin:stop]
        return Tokens(self.ids[begin:stop], byte_ends, word_ends)


@dataclass(frozen=True)
class Part:
    """A part of a text that is not tokenized yet.

    Attributes:
        text: Its characters.
        begin: The first of them, counted in the whole text.
        bytes_before: UTF-8 bytes of the text in front of it.
        words_before: Words that begin in front of it.
        inside: The character in front of it belongs to a word.
    """

    text: str
    begin: int = 0
    bytes_before: int = 0
    words_before: int = 0
    inside: bool = False

    @property
    def end(self) -> int:
        """The character behind it, counted in the whole text."""
        return self.begin + len(self.text)

    def tail(self, size: int, more: str) -> Part:
        """The part that begins `size` characters in front of this one's end and goes on with `more` text."""
        kept = len(self.text) - size
        points = code_points(self.text[:kept])
        return Part(
            self.text[kept:] + more,
            self.begin + kept,
            self.bytes_before + int(bytes_up_to(points)[-1]),
            self.words_before + int(words_up_to(points, self.inside)[-1]),
            not self.text[kept - 1].isspace() if kept else self.inside,
        )


@dataclass(frozen=True)
class Window:
    """A part of the text with its tokens.

    Attributes:
        part: The text.
        tokens: Its tokens, with ends counted in the whole text.
        starts: First character of each token, counted in the whole text, never falling, shape (n,).
        stops: The character behind each token, likewise.
        cuts: Whether two windows may be joined in front of a token, shape (n,), bool.
    """

    part: Part
    tokens: Tokens
    starts: Numbers
    stops: Numbers
    cuts: Numbers


def open_window(part: Part, tokenizer: Any, cutting: Cutting) -> Window:
    """Tokenizes a part, without special tokens."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(
        part.text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False
    )
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    nothing = np.zeros(0, dtype=np.int64)
    if not fast:
        return Window(part, Tokens(ids, None, None), nothing, nothing, nothing)
    places = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    # a place may run backwards, and a token takes nothing away from those in front of it
    starts, stops = np.maximum.accumulate(places, axis=0).T
    points = code_points(part.text)
    byte_ends = part.bytes_before + bytes_up_to(points)[stops]
    word_ends = part.words_before + words_up_to(points, part.inside)[stops]
    cuts = np.diff(starts, prepend=-1) > 0  # never within a character that takes several tokens
    if cutting is Cutting.AT_WORDS:
        cuts &= np.diff(np.asarray(encoded.word_ids(0), dtype=np.int64), prepend=-1) != 0
    tokens = Tokens(ids, byte_ends, word_ends)
    return Window(part, tokens, starts + part.begin, stops + part.begin, cuts)


# Tokens of a text that is never whole in memory: it is tokenized window by window, and the windows are joined.


@dataclass(frozen=True)
class Sizes:
    """How a long text is cut, in characters; none of it changes a token.

    Attributes:
        window: Text that is tokenized at a time.
        overlap: Text that two windows share at first; more where they do not agree.
        largest: No window grows beyond it in search of a place to cut; a text that has none in so much is left out.
        whole: Longer texts are left out where nothing says where this tokenizer's texts may be cut.
        per_token: Text that is read at first for each token that is asked for.
    """

    window: int = 1 << 18
    overlap: int = 1 << 13
    largest: int = 1 << 21
    whole: int = 1 << 25
    per_token: int = 6


SIZES = Sizes()
AGREED = 8
"""Tokens that two windows must share, at the least, in the middle of their overlap."""


@dataclass(frozen=True)
class Piece:
    """Tokens of the document, and the text that they and no tokens in front of them stand for.

    Attributes:
        tokens: The next tokens.
        text: From the end of the last piece's text; in the last piece all that is left, unless reading stopped early.
        stopped: Reading stopped here, with text left.
    """

    tokens: Tokens
    text: str
    stopped: bool = False


def joined(
    chunks: Iterator[str],
    tokenizer: Any,
    max_tokens: int | None = None,
    sizes: Sizes | None = None,
) -> Iterator[Piece]:
    """The tokens of a text that comes in chunks, the same as those of the whole text, the first `max_tokens` of them.

    Raises:
        UnreadableError: The text is too large to be tokenized whole, and this tokenizer, or this text, cannot be cut.
    """
    sizes = sizes or SIZES
    reader, cutting = _Reader(chunks), cutting_of(tokenizer)
    wanted = sizes.window
    if max_tokens is not None:
        wanted = min(wanted, sizes.per_token * max_tokens + 4 * sizes.overlap)
    if cutting is Cutting.NEVER:
        wanted = sizes.whole
    left = open_window(Part(reader.read(wanted)), tokenizer, cutting)
    at = given = said = 0  # the next token in `left`; tokens and characters that were given out
    overlap = sizes.overlap
    while not reader.ended:
        enough = None if max_tokens is None else at + max_tokens - given
        if enough is not None and settled(left, overlap, cutting) >= enough:
            yield _last(left, at, enough, said)
            return
        if cutting is Cutting.NEVER:
            raise UnreadableError(
                f"longer than {sizes.whole:,} characters, and nothing says where a text may be cut for this tokenizer"
            )
        more = reader.read(sizes.window)
        right = open_window(left.part.tail(overlap, more), tokenizer, cutting)
        joint = join(left, right)
        if joint is None or joint[0] < at:
            more += reader.read(len(left.part.text))
            left = _grown(left, at, more, tokenizer, cutting, sizes)
            overlap = min(4 * overlap, len(left.part.text) // 2)
            continue
        stop, following = joint
        if enough is not None and stop >= enough:
            yield _last(left, at, enough, said)
            return
        yield Piece(left.tokens.cut(at, stop), _text(left, said, int(left.starts[stop])))
        given, said = given + stop - at, int(left.starts[stop])
        left, at, overlap = right, following, sizes.overlap
    end = None if max_tokens is None else at + max_tokens - given
    yield Piece(left.tokens.cut(at, end), _text(left, said, left.part.end))


def _last(window: Window, at: int, stop: int, said: int) -> Piece:
    """The piece in which reading stops early: the text ends with its last token."""
    return Piece(
        window.tokens.cut(at, stop), _text(window, said, int(window.stops[stop - 1])), stopped=True
    )


def join(left: Window, right: Window) -> tuple[int, int] | None:
    """Where the left window gives way to the right one: the same token's number in both; `None` where they disagree.

    In the middle half of the overlap, far from where either window is cut off, they must have the same tokens and
    cuts at the same places. (A quarter of the overlap is more than any known pattern looks ahead.)
    """
    first, last = right.part.begin, left.part.end
    margin = (last - first) // 4
    middle = first + margin, last - margin
    ours, theirs = _within(left, *middle), _within(right, *middle)
    if ours.stop - ours.start < AGREED or ours.stop - ours.start != theirs.stop - theirs.start:
        return None
    for name in ("starts", "stops"):
        if not np.array_equal(getattr(left, name)[ours], getattr(right, name)[theirs]):
            return None
    if not np.array_equal(left.tokens.ids[ours], right.tokens.ids[theirs]):
        return None
    places = np.flatnonzero(left.cuts[ours] & right.cuts[theirs])[1:]
    if not len(places) or not np.array_equal(left.cuts[ours][1:], right.cuts[theirs][1:]):
        return None
    chosen = int(places[len(places) // 2])
    return ours.start + chosen, theirs.start + chosen


def settled(window: Window, overlap: int, cutting: Cutting) -> int:
    """The number of tokens that stay as they are, whatever text follows the window."""
    if cutting is Cutting.NEVER:
        return 0
    sure = window.part.end - overlap
    if cutting is Cutting.AT_WORDS:
        behind = window.starts[window.cuts & (window.starts >= sure)]
        if not len(behind) or _widest(behind, sure, window.part.end) > overlap // 8:
            return 0
    return int(np.searchsorted(window.stops, sure, side="right"))


def _within(window: Window, first: int, last: int) -> slice:
    """The tokens that lie between two characters."""
    begin = int(np.searchsorted(window.starts, first, side="left"))
    return slice(begin, max(begin, int(np.searchsorted(window.stops, last, side="right"))))


def _widest(places: np.ndarray[Any, Any], first: int, last: int) -> int:
    return int(np.diff(places, prepend=first, append=last).max())


def _text(window: Window, first: int, last: int) -> str:
    return window.part.text[first - window.part.begin : last - window.part.begin]


def _grown(
    window: Window, at: int, more: str, tokenizer: Any, cutting: Cutting, sizes: Sizes
) -> Window:
    """The window and more text in one; the tokens up to `at`, where it was joined, are still the same."""
    part = window.part
    size = len(part.text) + len(more)
    if size > sizes.largest:
        raise UnreadableError(
            f"no place to cut its text for tokenization within {size:,} characters"
        )
    grown = open_window(
        Part(part.text + more, part.begin, part.bytes_before, part.words_before, part.inside),
        tokenizer,
        cutting,
    )
    same = slice(0, at + AGREED if at else 0)
    for before, now in ((window.tokens.ids, grown.tokens.ids), (window.starts, grown.starts)):
        if not np.array_equal(before[same], now[same]):
            raise UnreadableError("its tokens change with the text that follows them")
    return grown


class _Reader:
    """Chunks of text, so many characters at a time.

    Attributes:
        ended: There is no more text.
    """

    def __init__(self, chunks: Iterator[str]) -> None:
        self._chunks, self._held = chunks, ""
        self._fill(1)

    def read(self, size: int) -> str:
        """The next `size` characters, fewer only at the end."""
        self._fill(size + 1)
        text, self._held = self._held[:size], self._held[size:]
        return text

    @property
    def ended(self) -> bool:
        return not self._held

    def _fill(self, size: int) -> None:
        parts = [self._held]
        held = len(self._held)
        while held < size and (chunk := next(self._chunks, None)) is not None:
            parts.append(chunk)
            held += len(chunk)
        self._held = "".join(parts)
