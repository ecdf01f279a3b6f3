"""Protocols: the definitions of "perplexity at length L", their settings, and the windows that they run.

One set of weights gives a different number under every definition, and methods rank differently too. So a protocol is
always named, and stored with every result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.options import PerplexityOptions, read_whole

DEFINITIONS = {
    "prefix": "the first L tokens of each document",
    "tail": "the same last {tail} tokens of each document, read with the L tokens that end there",
    "sliding": "windows of L tokens, {stride} apart; each scores the tokens that the one before it did not reach",
    "disjoint": "pieces of L tokens; every token once, read with what is in front of it in its piece",
    "longppl": "the key tokens of the first L tokens of each document, those that need far context (LongPPL)",
    "stream": "the documents as one stream, windows of L tokens {stride} apart; all tokens of every window",
}
PROTOCOLS = tuple(DEFINITIONS)
AGGREGATES = {
    "tokens": "every token weighs the same",
    "windows": "every window weighs the same, however many tokens it scores",
    "batches": "every batch of 32 windows weighs the same, the last and smaller one too",
    "documents": "every document weighs the same, however many tokens it has",
    "hf-docs": "windows weigh by their tokens, less one in every window but the first",
}
READERS = {
    "tail_tokens": ("--protocol tail", "--patch truncation"),
    "stride": ("--protocol sliding", "--protocol stream"),
    "windows_per_document": ("--protocol tail", "--protocol sliding"),
    "bos_windows": ("--protocol sliding",),
    "buckets": ("--protocol prefix",),
    "longppl_short": ("--longppl",),
}
"""Options that matter to some protocols or methods only."""
TAIL_TOKENS, STRIDE, BUCKETS, MIN_LENGTH = 1024, 256, 64, 8
SELF = "self"
"""The measured model, as the evaluator of `longppl`."""
BATCH = 32
"""Windows per batch in LongLoRA's eval.py."""
# Whole numbers among the settings, and their least values; 0 stands for the default.
_LEAST = {
    **dict.fromkeys(("tail_tokens", "stride"), 0),
    **dict.fromkeys(("windows_per_document", "min_tokens", "buckets", "chunk", "prefill"), 1),
    "batch": 1,
}


@dataclass(frozen=True)
class Settings:
    """Settings that determine the numbers of a run, beside the model, the methods and the documents.

    Most fields are those of `PerplexityOptions`, with their defaults filled in.

    Attributes:
        tail_tokens: The K of `tail`, in tokens; 0: 1024, at most half of the shortest length.
        stride: Tokens from one window of `sliding` and `stream` to the next; 0: 256, for `sliding` at most half of the
            shortest length, so that every token but the first is scored.
        windows_per_document: Of `tail`, evenly spaced windows per document whose targets never overlap (default 1).
            Of `sliding`, the number of full windows after the first (default: all, and the first).
        read_last: Whether the last token of a `tail` window is read too, though nothing behind it is scored. Then L
            counts the tokens with the last target; otherwise those before it.
        joined: Concatenate the documents first; `stream` always does.
        aggregate: The way from losses to one number, from `AGGREGATES`.
        base: Base of the power of the mean loss.
        evaluator: Name and numbers of the model that selects the key tokens of `longppl`.
        preset: The preset that they come from.
    """

    lengths: tuple[int, ...]
    protocols: tuple[str, ...] = ("prefix", "tail")
    tail_tokens: int = 0
    stride: int = 0
    windows_per_document: int | None = None
    bos_windows: str = "every"
    read_last: bool = True
    joined: bool = False
    aggregate: str = "tokens"
    base: float | None = None
    min_tokens: int | None = None
    buckets: int = BUCKETS
    evaluator: dict[str, Any] | None = None
    chunk: int | None = None
    prefill: int | None = None
    batch: int = 1
    preset: str | None = None

    def __post_init__(self) -> None:
        for name in ("lengths", "protocols"):  # lists in a file
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, read_whole(value, name, least))
        lengths, protocols = self.lengths, self.protocols
        if not lengths or list(lengths) != sorted(set(lengths)):
            raise PosencError(f"Lengths are ascending and different, not {list(lengths)}.")
        if lengths[0] < MIN_LENGTH:
            raise PosencError(f"A length has at least {MIN_LENGTH} tokens, not {lengths[0]}.")
        if not 0 < len(protocols) == len(set(protocols)):
            raise PosencError(f"Give at least one protocol, each once, not {list(protocols)}.")
        for kind, given, possible in (
            *(("protocol", name, PROTOCOLS) for name in protocols),
            ("aggregate", self.aggregate, AGGREGATES),
            ("value of --bos-windows", self.bos_windows, ("every", "first")),
        ):
            if given not in possible:
                raise unknown(kind, given, possible)
        half, slides = lengths[0] // 2, "sliding" in protocols
        if self.tail_tokens == 0:  # every target has at least so much context
            object.__setattr__(self, "tail_tokens", min(TAIL_TOKENS, half))
        if self.stride == 0:
            object.__setattr__(self, "stride", min(STRIDE, half) if slides else STRIDE)
        if "tail" in protocols and self.tail_tokens >= lengths[0]:
            raise PosencError(
                f"The tail has {self.tail_tokens} tokens, which must be fewer than the shortest length "
                f"({lengths[0]}): the same tokens are scored at every length. Give longer --lengths, or "
                f"--tail-tokens {min(TAIL_TOKENS, half)}."
            )
        if slides and self.stride > lengths[0]:
            raise PosencError(
                f"--stride {self.stride} is more than the shortest length ({lengths[0]}): the tokens between two "
                f"windows would not be scored. Give --stride {half}, or longer --lengths."
            )
        if "longppl" in protocols and self.evaluator is None:
            raise PosencError("longppl needs a model that selects the tokens: --longppl EVALUATOR.")
        apart = [name for name in protocols if name in ("prefix", "tail", "longppl")]
        if self.streams and apart:
            joins = "this preset" if self.joined else "stream"
            raise PosencError(
                f"{joins} joins the documents, and {' and '.join(apart)} need{'s' * (len(apart) == 1)} them one by "
                "one: measure them in two runs."
            )
        if "stream" in protocols and len(protocols) > 1 and not self.joined:
            raise PosencError(
                "stream joins the documents; the others do not: measure them in two runs."
            )
        if self.min_tokens is not None and apart and self.min_tokens < lengths[-1]:
            raise PosencError(
                f"min_tokens {self.min_tokens}: {' and '.join(apart)} need documents of the longest length "
                f"({lengths[-1]}), so that every length reads the same ones."
            )

    @property
    def streams(self) -> bool:
        """True if the documents are joined."""
        return self.joined or "stream" in self.protocols

    @property
    def shortest_document(self) -> int:
        """Least number of tokens of a document, special tokens in front included."""
        if self.streams:
            return self.min_tokens or 1
        longest = self.lengths[-1] + (0 if self.read_last else 1)
        return longest if self.min_tokens is None else self.min_tokens

    def definition(self, protocol: str) -> str:
        """Return the tokens that a protocol scores, in one sentence."""
        text = DEFINITIONS[protocol].format(tail=f"{self.tail_tokens:,}", stride=f"{self.stride:,}")
        if self.windows_per_document is not None and protocol in ("tail", "sliding"):
            count = self.windows_per_document
            windows = f"up to {count:,} evenly spaced windows" if count > 1 else "one window"
            text += f"; {windows} of each document"
            text += ", the first one left out" if protocol == "sliding" else ""
        if self.joined and protocol != "stream":
            text += "; the documents as one stream"
        by_tokens = protocol == "longppl" and self.aggregate != "documents"
        if self.aggregate != "tokens" and not by_tokens:  # key tokens weigh the same in any window
            text += f"; {AGGREGATES[self.aggregate]}"
        return text


def default_lengths(original: int | None) -> tuple[int, ...]:
    """Return the original length times 1, 2, 4, 8, 16 up to 4,096 tokens, and at least three lengths."""
    if original is None:
        raise PosencError("The model's config names no context length: give --lengths.")
    lengths = [original * factor for factor in (1, 2, 4, 8, 16)]
    return tuple(n for index, n in enumerate(lengths) if index < 3 or n <= 4096)


_FILE = resources.files(__package__).joinpath("presets.json")
PRESETS: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
"""The arithmetic of other projects: `source`, fields of `Settings`, the policy `bos` for special tokens, a `remark`."""


def settings_of(options: PerplexityOptions, original: int | None) -> tuple[Settings, str]:
    """Return `make_settings` of some options; raise if one was given that the run does not read."""
    lengths = options.lengths
    short = options.short and options.preset is None
    if short and lengths and original and original < min(lengths):
        with contextlib.suppress(PosencError):  # other options may need more tokens
            both = dataclasses.replace(options, lengths=(*lengths, original), short=False)
            return settings_of(both, original)
    names = {field.name for field in dataclasses.fields(Settings)} - {"preset", "lengths"}
    values = {name: getattr(options, name, None) for name in names}
    values["lengths"] = None if lengths is None else sorted(set(lengths))
    settings, policy = make_settings(values, original, preset=options.preset, bos=options.bos)
    read = [f"--protocol {name}" for name in settings.protocols]
    read += ["--longppl"] * (options.longppl is not None)
    read += [f"--patch {spec.strip().lower()}" for spec in options.methods or ()]
    for name, users in READERS.items():
        value = getattr(options, name)
        if value is not None and not set(users) & set(read):
            raise PosencError(
                f"--{name.replace('_', '-')} {value} is for {' or '.join(users)}, and this run measures "
                f"{' and '.join(settings.protocols)}: leave it out, or add that."
            )
    return settings, policy


def make_settings(
    values: Mapping[str, Any],
    original: int | None,
    *,
    preset: str | None = None,
    bos: str | None = None,
) -> tuple[Settings, str]:
    """Return the settings of a run, and the policy for special tokens.

    A value that is `None` leaves the decision to the preset, and then to the defaults. The default lengths come from
    `original`, the model's trained length in tokens.
    """
    chosen, policy = dict[str, Any](), "auto"
    if preset is not None:
        if preset not in PRESETS:
            raise unknown("preset", preset, PRESETS)
        chosen, policy = {**PRESETS[preset]["settings"], "preset": preset}, PRESETS[preset]["bos"]
    chosen |= {name: value for name, value in values.items() if value is not None}
    names = [field.name for field in dataclasses.fields(Settings)]
    for name in sorted(set(chosen) - set(names)):
        raise unknown("setting", name, names)
    if "lengths" not in chosen:
        chosen["lengths"] = default_lengths(original)
    return Settings(**chosen), policy if bos is None else bos


def check_options(options: PerplexityOptions) -> None:
    """Raise for what `settings_of` refuses on every model; lengths that are not given are long enough."""
    long_enough: dict[str, Any] = {"lengths": (2**40,), "min_tokens": None}
    settings_of(options if options.lengths else dataclasses.replace(options, **long_enough), None)


def parse_evaluator(text: str) -> tuple[str, str]:
    """Return the name and the method of an evaluator, `NAME` or `NAME@METHOD`; the method may be empty."""
    name, at, spec = text.partition("@")
    if not name.strip() or (at and not spec.strip()):
        raise PosencError(
            f"--longppl {text}: give a name or {SELF}, and a method behind an @, as in {SELF}@rerope."
        )
    return name, spec


@dataclass(frozen=True)
class Span:
    """Tokens `first .. stop-1` of a window, special tokens included, which count under a protocol at a length.

    `weight` is that of the mean loss of these tokens in the aggregate.
    """

    protocol: str
    length: int
    first: int
    stop: int
    weight: float

    @property
    def cell(self) -> tuple[str, int]:
        return self.protocol, self.length


@dataclass(frozen=True)
class Window:
    """One forward: the special tokens, then tokens `begin .. end-1` of a document, the last read if `read_last`."""

    begin: int
    end: int
    special: int
    read_last: bool
    spans: tuple[Span, ...] = ()

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


Cut = tuple[Window, int, int, int]
"""A window without spans, the first token that counts, one past the last, and the number of new tokens."""


def plan(
    tokens: int,
    settings: Settings,
    *,
    special: int,
    shared_prefix: bool,
    lengths: Sequence[int] | None = None,
    most: int | None = None,
) -> list[Window]:
    """Return the forwards that a method needs for one document of so many tokens, behind `special` special tokens.

    They come shortest first: transformers' own dynamic RoPE keeps the largest length that it has read. With
    `shared_prefix`, one forward at the longest length gives the prefix of every length: correct only where the
    result for a token does not depend on the tokens behind it. `lengths` are some of the settings'. `most` is the most
    tokens of a window, special tokens included: longer ones are read in pieces, which score `tail_tokens` each.
    """
    lengths = sorted(settings.lengths if lengths is None else lengths)
    spans: dict[Window, list[Span]] = {}
    for protocol, length in itertools.product(settings.protocols, lengths):
        if protocol in ("prefix", "longppl"):
            end = (lengths[-1] if shared_prefix else length) - special
            cuts = [(Window(0, end, special, True), max(1, special), length, length)]
        else:
            cuts = list(_CUTTERS[protocol](tokens, settings, special, length))
        for index, (window, first, stop, new) in enumerate(cuts):
            weight = float(stop - first)
            if settings.aggregate == "windows":
                weight = 1.0
            elif settings.aggregate == "hf-docs":
                weight = float(new - 1)
            elif settings.aggregate == "batches":
                weight = 1 / min(BATCH, len(cuts) - index // BATCH * BATCH)
            for piece, start, end in _pieces(window, first, stop, most, settings.tail_tokens):
                share = weight if piece is window else weight * (end - start) / (stop - first)
                spans.setdefault(piece, []).append(Span(protocol, length, start, end, share))
    windows = [dataclasses.replace(window, spans=tuple(own)) for window, own in spans.items()]
    return sorted(windows, key=lambda window: window.tokens)


def _pieces(
    window: Window, first: int, stop: int, most: int | None, step: int
) -> Iterator[tuple[Window, int, int]]:
    """Yield pieces of a window of at most so many tokens, which score its tokens `first .. stop-1`.

    With the last target unread, a piece has one token more, as the window itself. Every piece is full; one at the
    window's begin scores all that it holds, the others `step` tokens, or half of what they hold if that is too many.
    """
    size = window.tokens if most is None else most + (0 if window.read_last else 1)
    if size >= window.tokens:
        yield window, first, stop
        return
    step = step if step <= size - max(1, window.special) else size // 2
    while first < stop:
        end = min(stop, max(size, first + step))
        shift = max(0, end - size)  # a shared prefix may end within the first piece
        begin = window.begin + shift
        piece = Window(begin, begin + size - window.special, window.special, window.read_last)
        yield piece, first - shift, end - shift
        first = end


def _tail(tokens: int, settings: Settings, special: int, length: int) -> Iterator[Cut]:
    """Windows at even distances, the last at the end of the document."""
    extra = 0 if settings.read_last else 1
    size, scored = length + extra, settings.tail_tokens
    if size - scored < special:
        raise PosencError(
            f"The tail has {scored} tokens, and a length of {length} has room for {size - special} behind the special "
            f"tokens: give --tail-tokens {size - special} or fewer, or longer lengths."
        )
    first = settings.lengths[-1] - special + extra
    count = min(settings.windows_per_document or 1, 1 + (tokens - first) // scored)
    step = (tokens - first) / max(1, count - 1)
    for end in [first + round(n * step) for n in range(count)] if count != 1 else [tokens]:
        window = Window(end - size + special, end, special, settings.read_last)
        yield window, size - scored, size, scored


def _sliding(tokens: int, settings: Settings, special: int, length: int) -> Iterable[Cut]:
    """Press et al. 2022, appendix B; with special tokens in every window, as in jquesnelle/yarn."""
    cuts: list[Cut] = []
    reached, index = 0, 0
    while reached < tokens:
        begin, front = index * settings.stride, special
        if settings.bos_windows == "first":  # then they are the first tokens of the document
            begin, front = max(0, begin - special), max(0, special - begin)
        end = min(begin + length - front, tokens)
        if reached < begin:
            raise PosencError(
                f"--stride {settings.stride}: a window of {length} tokens has room for {length - special} behind the "
                f"special tokens, and the others would not be scored. Give --stride {length - special} or less."
            )
        stop, before = front + end - begin, front + reached - begin
        first = max(1, front, before)  # special tokens are not scored
        if first < stop:
            cuts.append((Window(begin, end, front, True), first, stop, stop - max(front, before)))
        reached, index = max(reached, end), index + 1
    if settings.windows_per_document is not None:
        full = [cut for cut in cuts[1:] if cut[2] == length] or cuts
        count = min(settings.windows_per_document, len(full))
        step = (len(full) - 1) / max(1, count - 1)
        cuts = [full[round(index * step)] for index in range(count)]
    return cuts


def _disjoint(tokens: int, _: Settings, special: int, length: int) -> Iterator[Cut]:
    """lm-evaluation-harness's rolling windows with a context of 1, made disjoint.

    Every piece reads L tokens and predicts L. The last one reads L tokens too, reaching back as far as it must.
    """
    reached = 0 if special else 1  # the first token has no prediction without one before it
    begin, end, front = 0, min(length + 1 - special, tokens), special
    while reached < end:
        stop, first = front + end - begin, front + reached - begin
        yield Window(begin, end, front, False), first, stop, stop - first
        reached, front = end, 0
        end = min(reached + length, tokens)
        begin = max(0, end - length - 1)


def _stream(tokens: int, settings: Settings, special: int, length: int) -> Iterator[Cut]:
    """LongLoRA's batches: the windows with a token behind them, without the last."""
    longest, body = settings.lengths[-1], length - special
    if tokens <= longest - special + settings.stride:
        raise PosencError(
            f"The stream has {tokens:,} tokens, and windows of {longest:,} without the last one need more than "
            f"{longest - special + settings.stride:,}: give more documents, shorter --lengths or a smaller --stride."
        )
    for begin in range(0, tokens - body, settings.stride)[:-1]:
        yield Window(begin, begin + body, special, True), max(1, special), length, body


_CUTTERS: dict[str, Callable[[int, Settings, int, int], Iterable[Cut]]] = {
    "tail": _tail,
    "sliding": _sliding,
    "disjoint": _disjoint,
    "stream": _stream,
}
