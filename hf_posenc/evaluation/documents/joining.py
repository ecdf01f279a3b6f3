"""Tokens of a text that is never whole in memory: it is tokenized window by window, and the windows are joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posenc.evaluation.documents.cutting import Cutting, cutting_of
from hf_posenc.evaluation.documents.errors import UnreadableError
from hf_posenc.evaluation.documents.window import Part, Tokens, Window, open_window


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
