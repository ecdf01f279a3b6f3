"""What "perplexity at length L" means: which windows are run, and which of their tokens count.

`prefix`: the first L tokens of each document; every token with a prediction counts. One number averages over contexts
of 1 to L tokens, so a failure at the far end is diluted. The tables of YaRN and EasyContext are of this kind.

`tail`: the same last K tokens of each document at every length, read with the L tokens that end there. Context is the
only thing that changes with L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.errors import PosencError

DEFINITIONS = {
    "prefix": "the first L tokens of each document",
    "tail": "the same last {tail} tokens of each document, read with the L tokens that end there",
}
PROTOCOLS = tuple(DEFINITIONS)
TAIL_TOKENS = 1024
MIN_LENGTH = 8


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run, apart from the model, the methods and the documents.

    Attributes:
        lengths: Context lengths in tokens, special tokens in front included, ascending.
        protocols: Names from `PROTOCOLS`.
        tail_tokens: The K of `tail`, in tokens.
        windows_per_document: Number of `tail` windows per document, evenly spaced, their targets never overlapping.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.
        seed: Seed of the bootstrap.
        resamples: Number of bootstrap resamples.

    Raises:
        PosencError: Lengths, protocols or numbers that do not go together.
    """

    lengths: tuple[int, ...]
    protocols: tuple[str, ...] = PROTOCOLS
    tail_tokens: int = 0
    windows_per_document: int = 1
    chunk: int | None = None
    seed: int = 0
    resamples: int = 10_000

    def definition(self, protocol: str) -> str:
        """What a protocol scores, in one sentence."""
        return DEFINITIONS[protocol].format(tail=f"{self.tail_tokens:,}")

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise PosencError(f"Lengths are ascending and different, not {list(self.lengths)}.")
        if self.lengths[0] < MIN_LENGTH:
            raise PosencError(f"A length has at least {MIN_LENGTH} tokens, not {self.lengths[0]}.")
        unknown = [name for name in self.protocols if name not in PROTOCOLS]
        if unknown or not self.protocols:
            raise PosencError(f"Unknown protocol {', '.join(unknown)!r}: {', '.join(PROTOCOLS)}.")
        if self.tail_tokens == 0:
            object.__setattr__(self, "tail_tokens", default_tail_tokens(self.lengths))
        if not 1 <= self.tail_tokens < self.lengths[0]:
            raise PosencError(
                f"The tail has {self.tail_tokens} tokens, which must be fewer than the shortest length "
                f"({self.lengths[0]}): the same tokens are scored at every length."
            )
        for name, least in (("windows_per_document", 1), ("resamples", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise PosencError(f"{name} is at least {least}, not {getattr(self, name)}.")


def default_tail_tokens(lengths: Sequence[int]) -> int:
    """K = 1024, but at most half of the shortest length, so that every target has at least so much context."""
    return min(TAIL_TOKENS, min(lengths) // 2)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Reads `512,1024,4k`; k is 1,024.

    Raises:
        PosencError: Something else than positive numbers.
    """
    lengths = set()
    for part in text.lower().replace(" ", "").split(","):
        digits, factor = (part[:-1], 1024) if part.endswith("k") else (part, 1)
        if not digits.isdecimal():
            raise PosencError(
                f"--lengths {text}: {part!r} is no length; give tokens as in 512,1024,4k."
            )
        lengths.add(int(digits) * factor)
    return tuple(sorted(lengths))


def default_lengths(original: int | None) -> tuple[int, ...]:
    """The original length times 1, 2, 4, 8, 16 up to 4,096 tokens, and three of them at least.

    Raises:
        PosencError: The original length is not known.
    """
    if original is None:
        raise PosencError("The model's config names no context length: give --lengths.")
    lengths = [original * factor for factor in (1, 2, 4, 8, 16)]
    return tuple(n for index, n in enumerate(lengths) if index < 3 or n <= 4096)


@dataclass(frozen=True)
class Span:
    """Tokens `first .. stop-1` of a window, which count under a protocol at a length."""

    protocol: str
    length: int
    first: int
    stop: int


@dataclass(frozen=True)
class Window:
    """One forward: the special tokens, then tokens `begin .. end-1` of a document.

    Attributes:
        document: Index of the document.
        begin: First token of the document in the window.
        end: One past the last.
        special: Number of special tokens in front.
        spans: What counts; indices into the window, special tokens included.
    """

    document: int
    begin: int
    end: int
    special: int
    spans: tuple[Span, ...]

    def __len__(self) -> int:
        return self.special + self.end - self.begin

    @property
    def first_scored(self) -> int:
        """Index of the first token of the window that any span needs."""
        return min(span.first for span in self.spans)


def plan(
    document_tokens: Sequence[int],
    settings: Settings,
    *,
    special: int,
    shared_prefix: bool,
    lengths: Sequence[int] | None = None,
) -> list[Window]:
    """The forwards that a method needs.

    Args:
        document_tokens: Length of each document in tokens.
        settings: Lengths and protocols.
        special: Number of special tokens in front of every window.
        shared_prefix: Take the prefix of every length from one forward at the longest: right where what a model
            computes for a token does not depend on the tokens behind it.
        lengths: Some of the settings' lengths only.

    Returns:
        The windows, shortest first: transformers' own dynamic RoPE keeps the largest length it has met as state.
    """
    wanted = sorted(settings.lengths if lengths is None else lengths)
    windows: dict[tuple[int, int, int], list[Span]] = {}

    def add(document: int, begin: int, end: int, span: Span) -> None:
        windows.setdefault((document, begin, end), []).append(span)

    for document, tokens in enumerate(document_tokens):
        if "prefix" in settings.protocols:
            for length in wanted:
                end = (wanted[-1] if shared_prefix else length) - special
                add(document, 0, end, Span("prefix", length, max(1, special), length))
        if "tail" in settings.protocols:
            for end in _tail_ends(tokens, settings, special):
                for length in wanted:
                    span = Span("tail", length, length - settings.tail_tokens, length)
                    add(document, end - (length - special), end, span)
    made = [Window(*place, special, tuple(spans)) for place, spans in windows.items()]
    return sorted(made, key=len)


def _tail_ends(tokens: int, settings: Settings, special: int) -> list[int]:
    """Where the tail windows of a document end, the last at its end."""
    first = settings.lengths[-1] - special
    room = 1 + (tokens - first) // settings.tail_tokens
    count = min(settings.windows_per_document, room)
    if count == 1:
        return [tokens]
    step = (tokens - first) / (count - 1)
    return [first + round(index * step) for index in range(count)]
