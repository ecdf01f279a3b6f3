"""From a protocol to forwards: which windows of a document are run, and which of their tokens count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.perplexity.protocols import Settings


@dataclass(frozen=True)
class Span:
    """Tokens `first .. stop-1` of a window, which count under a protocol at a length.

    Attributes:
        protocol: Its name.
        length: The context length, in tokens.
        first: Index into the window, special tokens included.
        stop: One past the last.
        weight: Of the mean loss of these tokens in the aggregate.
    """

    protocol: str
    length: int
    first: int
    stop: int
    weight: float

    @property
    def cell(self) -> tuple[str, int]:
        """Protocol and length."""
        return self.protocol, self.length


@dataclass(frozen=True)
class Window:
    """One forward: the special tokens, then tokens `begin .. end-1` of a document.

    Attributes:
        begin: First token of the document in the window.
        end: One past the last.
        special: Number of special tokens in front.
        read_last: Whether the last token is read too; otherwise it is a target only.
        spans: What counts.
    """

    begin: int
    end: int
    special: int
    read_last: bool
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the window, special tokens and the last target included."""
        return self.special + self.end - self.begin

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads."""
        return self.tokens - (0 if self.read_last else 1)

    @property
    def first_scored(self) -> int:
        """Index of the first token of the window that any span needs."""
        return min((span.first for span in self.spans), default=1)

    @property
    def shape(self) -> tuple[int, int, bool]:
        """Windows of one shape can be run together."""
        return self.tokens, self.first_scored, self.read_last


def plan(
    tokens: int,
    settings: Settings,
    *,
    special: int,
    shared_prefix: bool,
    lengths: Sequence[int] | None = None,
) -> list[Window]:
    """The forwards that a method needs for one document.

    Args:
        tokens: Length of the document in tokens.
        settings: Lengths and protocols.
        special: Number of special tokens in front of a window.
        shared_prefix: Take the prefix of every length from one forward at the longest: right where what a model
            computes for a token does not depend on the tokens behind it.
        lengths: Some of the settings' lengths only.

    Returns:
        The windows, shortest first: transformers' own dynamic RoPE keeps the largest length it has met as state.

    Raises:
        PosencError: The tail does not fit behind the special tokens of the shortest length.
    """
    wanted = sorted(settings.lengths if lengths is None else lengths)
    made: dict[tuple[int, int, int, bool], list[Span]] = {}
    for place, span in _spans(tokens, settings, special, shared_prefix, wanted):
        made.setdefault(place, []).append(span)
    windows = [Window(*place, tuple(spans)) for place, spans in made.items()]
    return sorted(windows, key=lambda window: window.tokens)


Place = tuple[int, int, int, bool]  # begin, end, special, read_last
BATCH = 32
"""Windows per batch in LongLoRA's eval.py."""


def _spans(
    tokens: int, settings: Settings, special: int, shared_prefix: bool, lengths: Sequence[int]
) -> Iterator[tuple[Place, Span]]:
    for protocol in settings.protocols:
        for length in lengths:
            if protocol in ("prefix", "longppl"):
                end = (lengths[-1] if shared_prefix else length) - special
                places = [((0, end, special, True), max(1, special), length, length)]
            elif protocol == "tail":
                places = list(_tail(tokens, settings, special, length))
            elif protocol == "sliding":
                places = list(_sliding(tokens, settings, special, length))
            elif protocol == "disjoint":
                places = list(_disjoint(tokens, special, length))
            else:
                places = list(_stream(tokens, settings, special, length))
            for index, (place, first, stop, new) in enumerate(places):
                weight = float(stop - first)
                if settings.aggregate == "windows":
                    weight = 1.0
                elif settings.aggregate == "hf-docs":
                    weight = float(new - 1)
                elif settings.aggregate == "batches":
                    weight = 1 / min(BATCH, len(places) - index // BATCH * BATCH)
                yield place, Span(protocol, length, first, stop, weight)


Cut = tuple[Place, int, int, int]
"""A window, the first token that counts, one past the last, and how many are new."""


def _tail(tokens: int, settings: Settings, special: int, length: int) -> Iterator[Cut]:
    extra = 0 if settings.read_last else 1
    size, scored = length + extra, settings.tail_tokens
    if size - scored < special:
        raise PosencError(
            f"The tail has {scored} tokens, and a length of {length} has room for {size - special} behind the special "
            f"tokens: give --tail-tokens {size - special} or fewer, or longer lengths."
        )
    for end in _tail_ends(tokens, settings, special - extra):
        place = (end - (size - special), end, special, settings.read_last)
        yield place, size - scored, size, scored


def _tail_ends(tokens: int, settings: Settings, special: int) -> list[int]:
    """Where the tail windows of a document end, the last at its end."""
    first = settings.lengths[-1] - special
    room = 1 + (tokens - first) // settings.tail_tokens
    count = min(settings.windows_per_document or 1, room)
    if count == 1:
        return [tokens]
    step = (tokens - first) / (count - 1)
    return [first + round(index * step) for index in range(count)]


def _sliding(tokens: int, settings: Settings, special: int, length: int) -> Iterator[Cut]:
    """Press et al. 2022, appendix B; with special tokens in every window, as jquesnelle/yarn cuts them."""
    cuts: list[Cut] = []
    reached, index = 0, 0
    while reached < tokens:
        begin, front = index * settings.stride, special
        if settings.bos_windows == "first":  # then they are the first tokens of the document
            begin, front = max(0, begin - special), max(0, special - begin)
        end = min(begin + length - front, tokens)
        stop, before = front + end - begin, front + reached - begin
        first = max(1, front, before)  # special tokens are no text, in front of a gap neither
        if first < stop:
            cuts.append(((begin, end, front, True), first, stop, stop - max(front, before)))
        reached, index = max(reached, end), index + 1
    if settings.windows_per_document is not None:
        full = [cut for cut in cuts[1:] if cut[2] == length] or cuts
        count = min(settings.windows_per_document, len(full))
        step = (len(full) - 1) / max(1, count - 1)
        cuts = [full[round(index * step)] for index in range(count)]
    yield from cuts


def _disjoint(tokens: int, special: int, length: int) -> Iterator[Cut]:
    """lm-evaluation-harness's rolling windows with a context of 1, made disjoint.

    Every piece reads L tokens and predicts L. The last one reads L tokens too, going back as far as it must.
    """
    # without anything in front of it, the first token has no prediction
    reached = 0 if special else 1
    begin, end, front = 0, min(length + 1 - special, tokens), special
    while reached < end:
        stop, first = front + end - begin, front + reached - begin
        yield (begin, end, front, False), first, stop, stop - first
        reached, front = end, 0
        end = min(reached + length, tokens)
        begin = max(0, end - length - 1)


def _stream(tokens: int, settings: Settings, special: int, length: int) -> Iterator[Cut]:
    """LongLoRA's batches: it takes the windows that have a token behind them, and drops the last."""
    body = length - special
    for begin in range(0, tokens - body, settings.stride)[:-1]:
        yield (begin, begin + body, special, True), max(1, special), length, body
