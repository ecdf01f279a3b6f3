"""Tokens of a text that is never whole in memory: it is tokenized window by window, and the windows are joined.

Two windows that overlap are joined at a place in the overlap where both of them may be cut. Whether the right window
continues there as the whole text would depends on the tokenizer:

* Where a word (a piece of the pre-tokenizer) begins, it does for every model: the model reads one word at a time, and a
  pre-tokenizer goes from left to right and forgets everything in front of a word at its beginning.
* At any token, it does for byte-pair encoding (BPE) whose pre-tokenizer cuts by the characters next to a place, or not
  at all: a sequence of tokens is the encoding of its text exactly if each pair of neighbours is the encoding of its own
  text, since the first merge across a boundary joins pieces of these two. In the joined sequence every pair of
  neighbours lies in one of the windows.
* Nowhere, if the tokens may depend on all of the text: Viterbi paths (Unigram) over a text that nothing cuts, patterns
  with unlimited lookahead or lookbehind, and phases that are counted from the beginning of the text.
"""

from __future__ import annotations

import enum
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posenc.evaluation.documents.document import UnreadableError
from hf_posenc.files import disk_errors

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of windows, in characters; none of them changes a token."""

    window: int = 1 << 18  # text that is tokenized at a time
    overlap: int = 1 << 13  # text that two windows share at first; more if they do not agree
    largest: int = 1 << 21  # to which a window grows in search of a place to cut, if need be
    whole: int = 1 << 25  # longer texts are left out if this tokenizer's texts cannot be cut
    per_token: int = 6  # text that is read at first for each requested token


SIZES = Sizes()

IN_MEMORY = 1 << 20  # most tokens of a document that is kept in memory, 24 bytes each
AGREED = 8  # least number of tokens that two windows must share in the middle of their overlap
LONGEST_COUNT = 64  # repetitions that a pattern may count and still forget its phase in an overlap


# The places where a tokenizer's texts can be cut.


class Cutting(enum.Enum):
    """Places where two windows may be joined."""

    AT_TOKENS = "at any token"
    AT_WORDS = "where a word begins"
    NEVER = "nowhere"


# Pre-tokenizers that cut by the characters in front of and behind a place.
_BY_CHARACTER = {
    *("BertPreTokenizer", "CharDelimiterSplit", "Metaspace", "Punctuation", "Whitespace"),
    *("WhitespaceSplit", "Digits"),
}
_BY_PATTERN = {"ByteLevel", "Split", "UnicodeScripts"}
_LOCAL_NORMALIZERS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer"),
    *("Precompiled", "Prepend", "Replace", "ByteLevel"),
}
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
_LOOKAROUND_OF_ONE = re.compile(
    r"\(\?<?[=!](?:\\[pP]\{\^?\w+\}|\\.|\[(?:\\.|[^\]\\])*\]|[^()\\\[*+{])*\)"
)
_BACKREFERENCE = re.compile(r"\\[1-9k]")
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


def cutting_of(tokenizer: Any) -> Cutting:
    """Return where texts may be cut for a transformers tokenizer; `NEVER` if its components are unknown."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return Cutting.NEVER
    from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

    normalizers = _steps(backend.normalizer, "normalizers")
    cutters = _steps(backend.pre_tokenizer, "pretokenizers")
    if normalizers is None or cutters is None or getattr(backend.model, "dropout", None):
        return Cutting.NEVER
    if not all(step["type"] in _LOCAL_NORMALIZERS and _is_local(step) for step in normalizers):
        return Cutting.NEVER
    # A step may be there for its other effects and cut nothing.
    cutters = [
        step
        for step in cutters
        if step.get("use_regex" if step["type"] == "ByteLevel" else "split", True)
    ]
    if isinstance(backend.model, BPE) and all(_by_character(step) for step in cutters):
        return Cutting.AT_TOKENS
    known = isinstance(backend.model, (BPE, Unigram, WordLevel, WordPiece))
    forgets = all(
        _by_character(step) or (step["type"] in _BY_PATTERN and _is_local(step)) for step in cutters
    )
    return Cutting.AT_WORDS if known and forgets and cutters else Cutting.NEVER


def _steps(component: Any, key: str) -> list[dict[str, Any]] | None:
    """Return the settings of a component, of a sequence those of its parts; `None` if it is written in Python."""
    try:
        steps = [] if component is None else [json.loads(component.__getstate__())]
    except Exception:  # the library has no type of its own for this
        return None
    for step in steps:  # which grows
        steps += step.get(key, ()) if step["type"] == "Sequence" else ()
    return [step for step in steps if step["type"] != "Sequence"]


def _by_character(step: dict[str, Any]) -> bool:
    literal = step.get("pattern", {}).get("String")
    return step["type"] in _BY_CHARACTER or (
        step["type"] == "Split" and literal is not None and len(literal) == 1
    )


def _is_local(step: dict[str, Any]) -> bool:
    """Return whether the pattern of a step, if any, looks around by single characters and counts little."""
    pattern = step.get("pattern", {}).get("Regex", "")
    counts = [int(n) for pair in _COUNT.findall(pattern) for n in pair if n]
    near = len(_LOOKAROUND.findall(pattern)) == len(_LOOKAROUND_OF_ONE.findall(pattern))
    return near and not _BACKREFERENCE.search(pattern) and max(counts, default=0) <= LONGEST_COUNT


# A window: a part of the text, tokenized on its own. Characters are counted in the whole text.


@dataclass(frozen=True)
class Window:
    """A part of the text with its tokens.

    Attributes:
        begin: The first character of the text.
        ids: Its token ids, shape (n,), int64.
        starts: First character of each token, never decreasing, shape (n,); empty if the tokenizer cannot report it.
        stops: The character behind each token, likewise.
        cuts: True if two windows may be joined in front of a token, shape (n,), bool.
    """

    text: str
    begin: int
    ids: Numbers
    starts: Numbers
    stops: Numbers
    cuts: Numbers

    @property
    def end(self) -> int:
        """The character behind it."""
        return self.begin + len(self.text)

    def between(self, first: int, last: int) -> slice:
        """Return the slice of the tokens that lie between two characters."""
        begin = int(np.searchsorted(self.starts, first, side="left"))
        return slice(begin, max(begin, int(np.searchsorted(self.stops, last, side="right"))))


def open_window(text: str, begin: int, tokenizer: Any, cutting: Cutting) -> Window:
    """Tokenize a part of a text, without special tokens."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    offsets = np.asarray(encoded["offset_mapping"] if fast else [], dtype=np.int64).reshape(-1, 2)
    # An offset may be lower than the one before it; a token then adds no text to those in front of it.
    starts, stops = np.maximum.accumulate(offsets, axis=0).T + begin
    cuts = np.diff(starts, prepend=-1) > 0  # never within a character of several tokens
    if cutting is Cutting.AT_WORDS:
        cuts &= np.diff(np.asarray(encoded.word_ids(0), dtype=np.int64), prepend=-1) != 0
    return Window(text, begin, ids, starts, stops, cuts)


# Pieces: the tokens of windows, one after the other, with the bytes and the words of the text up to them.


@dataclass(frozen=True)
class Piece:
    """Tokens of the document, and the text that belongs to them and to no token in front of them.

    Attributes:
        tokens: Their ids, and, if the tokenizer reports places, their `byte_ends` and `word_ends` as in
            `TokenizedDocument`: shape (n, 1) or (n, 3), int64.
        text: From the end of the last piece's text; in the last piece all that is left, unless reading stopped early.
        stopped: Reading stopped here, with text left.
    """

    tokens: Numbers
    text: str
    stopped: bool = False


# Every character that `str.split` splits at; none lies behind the ideographic space.
_SPACES = np.array([point for point in range(0x3001) if chr(point).isspace()], dtype=np.uint32)


@dataclass
class _Counter:
    """Bytes and words up to the character `end`, where the next piece begins, `inside` a word or not."""

    end: int = 0
    bytes: int = 0
    words: int = 0
    inside: bool = False

    def piece(
        self, window: Window, at: int, stop: int | None, end: int, stopped: bool = False
    ) -> Piece:
        """Return tokens `at .. stop-1` of a window and the text up to the character `end`."""
        ids, stops = window.ids[at:stop], window.stops[at:stop]
        text = window.text[self.end - window.begin : end - window.begin]
        if len(stops) < len(ids):
            return Piece(ids[:, None], text, stopped)
        # The last token may end behind the text, within the next token's character.
        behind = max([end, *stops[-1:]]) - window.begin
        data = window.text[self.end - window.begin : behind].encode("utf-32-le", "surrogatepass")
        points = np.frombuffer(data, dtype="<u4")
        sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
        solid = ~np.isin(points, _SPACES)
        begins = solid & ~np.concatenate([[self.inside], solid[:-1]])
        # In front of each character and behind the last.
        byte_ends = self.bytes + np.concatenate([[0], np.cumsum(sizes)])
        word_ends = self.words + np.concatenate([[0], np.cumsum(begins, dtype=np.int64)])
        behind_tokens = stops - self.end
        tokens = np.stack([ids, byte_ends[behind_tokens], word_ends[behind_tokens]], axis=1)
        self.bytes, self.words = int(byte_ends[len(text)]), int(word_ends[len(text)])
        self.inside = not text[-1].isspace() if text else self.inside
        self.end = end
        return Piece(tokens, text, stopped)


def joined(
    chunks: Iterator[str],
    tokenizer: Any,
    max_tokens: int | None = None,
    sizes: Sizes | None = None,
) -> Iterator[Piece]:
    """Yield the first `max_tokens` tokens of a text that comes in chunks, the same as those of the whole text.

    The text of a piece in which reading stops early ends with its last token.
    """
    sizes = sizes or SIZES
    reader, cutting, counter = _Reader(chunks), cutting_of(tokenizer), _Counter()
    size = sizes.window
    if max_tokens is not None:
        size = min(size, sizes.per_token * max_tokens + 4 * sizes.overlap)
    if cutting is Cutting.NEVER:
        size = sizes.whole
    left = open_window(reader.read(size), 0, tokenizer, cutting)
    at = count = 0  # the next token in `left`; tokens that were yielded
    overlap = sizes.overlap
    while not reader.ended:
        enough = None if max_tokens is None else at + max_tokens - count
        if enough is not None and _settled(left, overlap, cutting) >= enough:
            yield counter.piece(left, at, enough, int(left.stops[enough - 1]), stopped=True)
            return
        if cutting is Cutting.NEVER:
            raise UnreadableError(
                f"longer than {sizes.whole:,} characters, and texts of this tokenizer cannot be cut safely"
            )
        more, shared = reader.read(sizes.window), left.text[len(left.text) - overlap :]
        right = open_window(shared + more, left.end - overlap, tokenizer, cutting)
        joint = join(left, right)
        if joint is None or joint[0] < at:
            more += reader.read(len(left.text))
            left = _grown(left, at, more, tokenizer, cutting, sizes)
            overlap = min(4 * overlap, len(left.text) // 2)
            continue
        stop, following = joint
        if enough is not None and stop >= enough:
            yield counter.piece(left, at, enough, int(left.stops[enough - 1]), stopped=True)
            return
        yield counter.piece(left, at, stop, int(left.starts[stop]))
        count += stop - at
        left, at, overlap = right, following, sizes.overlap
    enough = None if max_tokens is None else at + max_tokens - count
    yield counter.piece(left, at, enough, left.end)


def join(left: Window, right: Window) -> tuple[int, int] | None:
    """Return the number in either window of the token at which they are joined; `None` if they disagree.

    In the middle half of the overlap, far from where either window is cut off, they must have the same tokens and
    cuts at the same places. (A quarter of the overlap is more than any known pattern looks ahead.)
    """
    margin = (left.end - right.begin) // 4
    middle = right.begin + margin, left.end - margin
    ours, theirs = left.between(*middle), right.between(*middle)
    length = ours.stop - ours.start
    if length < AGREED or length != theirs.stop - theirs.start:
        return None
    pairs = (
        (left.ids[ours], right.ids[theirs]),
        (left.starts[ours], right.starts[theirs]),
        (left.stops[ours], right.stops[theirs]),
        (left.cuts[ours][1:], right.cuts[theirs][1:]),
    )
    if not all(np.array_equal(one, other) for one, other in pairs):
        return None
    places = np.flatnonzero(left.cuts[ours] & right.cuts[theirs])[1:]
    if not len(places):
        return None
    chosen = int(places[len(places) // 2])
    return ours.start + chosen, theirs.start + chosen


def _settled(window: Window, overlap: int, cutting: Cutting) -> int:
    """Return the number of tokens that no text behind the window can change."""
    if cutting is Cutting.NEVER:
        return 0
    safe = window.end - overlap
    if cutting is Cutting.AT_WORDS:
        cuts = window.starts[window.cuts & (window.starts >= safe)]
        widest = np.diff(cuts, prepend=safe, append=window.end).max()
        if not len(cuts) or widest > overlap // 8:
            return 0
    return int(np.searchsorted(window.stops, safe, side="right"))


def _grown(
    window: Window, at: int, more: str, tokenizer: Any, cutting: Cutting, sizes: Sizes
) -> Window:
    """Return the window with more text; the tokens up to `at`, where it was joined, must not change."""
    text = window.text + more
    if len(text) > sizes.largest:
        raise UnreadableError(
            f"no place to cut its text for tokenization within {len(text):,} characters"
        )
    grown = open_window(text, window.begin, tokenizer, cutting)
    same = slice(0, at + AGREED if at else 0)
    for before, now in ((window.ids, grown.ids), (window.starts, grown.starts)):
        if not np.array_equal(before[same], now[same]):
            raise UnreadableError("its tokens change with the text that follows them")
    return grown


class _Reader:
    """Chunks of text, read as so many characters at a time; `ended` once there is no more text."""

    def __init__(self, chunks: Iterator[str]) -> None:
        self._chunks, self._held, self.ended = chunks, "", False

    def read(self, size: int) -> str:
        """Return the next `size` characters, fewer only at the end."""
        parts, held = [self._held], len(self._held)
        while held <= size and (chunk := next(self._chunks, None)) is not None:
            parts.append(chunk)
            held += len(chunk)
        text = "".join(parts)
        self._held, self.ended = text[size:], held <= size
        return text[:size]


# The tokens of a whole document.


def stored(parts: Iterable[Numbers]) -> Numbers:
    """Return all rows of a document, those of its `Piece.tokens`: in memory, or mapped from a nameless file if many."""
    room = "Let TMPDIR name a folder on a larger disk, or cut the documents (--max-doc-tokens)."
    columns, limit = 1, IN_MEMORY * 24
    with tempfile.SpooledTemporaryFile(max(1, limit)) as file:
        for part in parts:
            columns = part.shape[1]
            with disk_errors(f"The tokens cannot be written to {tempfile.gettempdir()}", room):
                file.write(np.ascontiguousarray(part, "<i8").tobytes())
        if file.tell() > limit:
            return np.memmap(file, "<i8", "r+").reshape(-1, columns)
        file.seek(0)
        return np.frombuffer(bytearray(file.read()), "<i8").reshape(-1, columns)
