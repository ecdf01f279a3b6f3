"""Presets against the peers' own programs, on the same model and tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Document, TokenizedDocument, tokenize
from hf_posenc.evaluation.measuring.statistics import Cell, summarize
from hf_posenc.evaluation.options import parse_lengths
from hf_posenc.evaluation.perplexity.protocols import (
    PRESETS,
    Settings,
    Window,
    default_lengths,
    make_settings,
    plan,
)
from hf_posenc.evaluation.perplexity.run import joined
from tests.support import peers
from tests.support.perplexities import measured
from tests.support.selection import late
from tests.support.tiny_text import byte_tokenizer, prose, tiny

BOS = 0
SOURCE = [Document(f"d{n}", prose(150 + 41 * n, n)) for n in range(3)]
DOCUMENTS = [tokenize(document, byte_tokenizer()) for document in SOURCE]
IDS = [document.ids.tolist() for document in DOCUMENTS]
LENGTH = 48
SLIDING, PAIRS = {"protocols": ("sliding",)}, ((13, 1), (16, 4))
FLOAT32 = 1e-6  # transformers computes the losses of peers in float32, whatever the model's dtype


def cell(
    preset: str,
    model: Any,
    *,
    special: tuple[int, ...] = (),
    documents: list[TokenizedDocument] = DOCUMENTS,
    **given: Any,
) -> Cell:
    settings, _ = make_settings({"lengths": (LENGTH,), **given}, None, preset=preset)
    used = joined(documents) if settings.streams else documents
    records = measured(model, used, ["none"], settings, special=special).records
    (made,) = summarize(records, aggregate=settings.aggregate, base=settings.base)
    return made


@pytest.mark.parametrize(
    ("preset", "program", "given"),
    [
        ("yarn", {"bos": BOS, "truncate": True}, {}),
        *(
            ("yarn", {"bos": BOS, "stride": n}, {**SLIDING, "stride": n, "batch": m})
            for n, m in PAIRS
        ),
        *(("pose", {"bos": BOS, "stride": n}, {"stride": n}) for n in (13, 16)),
        *(("hf-docs", {"stride": n}, {"stride": n}) for n in (13, LENGTH)),
        *(
            ("pi", {"bos": bos, "stride": n}, {"stride": n, "bos_windows": "first"})
            for bos, n in ((None, 13), (BOS, 16))
        ),
    ],
)
def test_a_preset_gives_the_number_of_its_program(
    preset: str, program: dict[str, Any], given: dict[str, Any]
) -> None:
    """That of `pi` is the sliding window of Press et al."""
    model, names = tiny().double(), {"hf-docs": "hf_docs", "pi": "press"}
    expected = getattr(peers, names.get(preset, preset))(model, IDS, LENGTH, **program)
    precision = 1e-5 if preset == "hf-docs" else FLOAT32  # the page adds up in float32
    made = cell(preset, model, special=() if program.get("bos") is None else (BOS,), **given)
    assert made.perplexity == pytest.approx(expected, rel=precision)


@pytest.mark.parametrize("stride", [*late([5]), 12])
def test_longlora(stride: int) -> None:
    model = tiny().double()
    expected = peers.longlora(model, IDS, LENGTH, stride=stride)
    made = cell("longlora", model, stride=stride)
    assert made.perplexity == pytest.approx(expected, rel=FLOAT32)
    starts = len(range(0, sum(map(len, IDS)) - LENGTH, stride)) - 1
    assert starts > 32  # so that there is a smaller last batch
    assert made.tokens == starts * (LENGTH - 1)


def test_su() -> None:
    model = tiny().double()
    expected = peers.su(model, IDS, LENGTH, tail=20)
    made = cell("su", model, tail_tokens=20)
    assert math.log(made.perplexity) == pytest.approx(expected, rel=FLOAT32)


def test_lm_eval() -> None:
    model = tiny().double()
    sums = peers.lm_eval(model, IDS, LENGTH, prefix=BOS)
    made = cell("lm-eval", model, special=(BOS,))
    assert made.nats == pytest.approx(-math.fsum(sums), rel=FLOAT32)
    assert made.tokens == sum(map(len, IDS))
    sizes = [document.bytes_between(0, len(document.ids)) or 0 for document in DOCUMENTS]
    assert made.bits_per_byte == pytest.approx(peers.bits_per_byte(sums, sizes), rel=FLOAT32)
    words = [(d.words_between(0, len(d.ids)) or 0) + d.white_ends for d in DOCUMENTS]
    by_word = peers.weighted_perplexity(sums, words)
    assert made.word_perplexity == pytest.approx(by_word, rel=FLOAT32)


def test_every_preset_is_tested() -> None:
    assert set(PRESETS) == {"yarn", "pi", "pose", "longlora", "su", "lm-eval", "hf-docs"}


def test_what_is_given_comes_before_what_the_preset_says() -> None:
    settings, bos = make_settings({"lengths": (64,), "stride": 8}, None, preset="pose")
    assert (settings.stride, settings.protocols, bos) == (8, ("sliding",), "always")
    assert make_settings({"lengths": (1024,)}, None, preset="pose", bos="never")[1] == "never"
    with pytest.raises(PosencError, match="--stride 1024 is more than the shortest length"):
        make_settings({"lengths": (64,)}, None, preset="pose")
    with pytest.raises(PosencError, match="Did you mean 'pose'"):
        make_settings({"lengths": (64,)}, None, preset="posse")
    with pytest.raises(PosencError, match="Did you mean 'tail_tokens'"):
        make_settings({"lengths": (64,), "tail_token": 8}, None)


@pytest.mark.parametrize("special", [0, 1, 3])
@pytest.mark.parametrize("bos_windows", ["every", "first"])
@pytest.mark.parametrize("tokens", [5, 48, 49, 50, 97, 150])
def test_every_token_is_scored_in_all_windows(special: int, bos_windows: str, tokens: int) -> None:
    for protocol in ("sliding", "disjoint"):
        options: dict[str, Any] = {"stride": 7, "bos_windows": bos_windows, "min_tokens": 1}
        settings = make((LENGTH,), protocols=(protocol,), **options)
        windows = plan(tokens, settings, special=special, shared_prefix=True)
        assert all(window.forwarded <= LENGTH for window in windows)
        # nothing predicts the first token of a text
        expected = list(range(0 if special else 1, tokens))
        assert sorted(t for t in scored(windows, protocol)[LENGTH] if t >= 0) == expected


def test_a_64_point_curve_of_prefixes_costs_33_times_fewer_tokens_than_64_runs() -> None:
    lengths = parse_lengths("2k:128k:2k")
    settings = Settings(lengths=lengths, protocols=("prefix",))
    ours = sum(w.forwarded for w in plan(2**17, settings, special=0, shared_prefix=True))
    theirs = sum(w.forwarded for w in plan(2**17, settings, special=0, shared_prefix=False))
    assert (ours, theirs) == (2**17, sum(lengths))
    assert round(theirs / ours, 1) == 32.5


def test_the_stream_keeps_bytes_and_words() -> None:
    (stream,) = joined(DOCUMENTS)
    assert stream.ids.tolist() == [token for ids in IDS for token in ids]
    end = len(IDS[0])
    for count in ("bytes_between", "words_between"):
        within, one, two = (getattr(each, count) for each in (stream, *DOCUMENTS[:2]))
        assert within(end - 3, end + 5) == one(end - 3, end) + two(0, 5)
    assert isinstance(stream.ids, torch.Tensor)


# Windows of each protocol, and the tokens that count in them.
def make(lengths: tuple[int, ...] = (16, 32, 64), **options: Any) -> Settings:
    return Settings(lengths=lengths, **options)


def scored(windows: list[Window], protocol: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for window in windows:
        for span in window.spans:
            if span.protocol == protocol:
                offset = window.begin - window.special
                tokens = range(offset + span.first, offset + span.stop)
                found.setdefault(span.length, []).extend(tokens)
    return found


@pytest.mark.parametrize("special", [0, 1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_prefix_scores_the_first_tokens_of_every_document(special: int, shared: bool) -> None:
    windows = plan(100, make(protocols=("prefix",)), special=special, shared_prefix=shared)
    tokens = scored(windows, "prefix")
    for length in (16, 32, 64):
        # without special tokens, the first token of a document has no prediction
        assert tokens[length] == list(range(0 if special else 1, length - special))
    assert all(window.begin == 0 for window in windows)
    assert [window.tokens for window in windows] == ([64] if shared else [16, 32, 64])


@pytest.mark.parametrize("special", [0, 1])
@pytest.mark.parametrize("read_last", [True, False])
def test_tail_scores_the_same_tokens_at_every_length(special: int, read_last: bool) -> None:
    settings = make(protocols=("tail",), tail_tokens=5, read_last=read_last)
    windows = plan(100, settings, special=special, shared_prefix=True)
    tokens = scored(windows, "tail")
    for length in (16, 32, 64):
        assert tokens[length] == list(range(95, 100))
    assert [window.forwarded for window in windows] == [16, 32, 64]
    assert [window.tokens for window in windows] == ([16, 32, 64] if read_last else [17, 33, 65])
    assert all(window.end == 100 for window in windows)


def test_windows_that_would_score_nothing_or_special_tokens_are_refused() -> None:
    settings = make(protocols=("tail",), tail_tokens=15)
    assert plan(100, settings, special=1, shared_prefix=True)
    with pytest.raises(PosencError, match=r"a length of 16 has room for 14 .* --tail-tokens 14 or"):
        plan(100, settings, special=2, shared_prefix=True)
    settings = make(protocols=("stream",), stride=8)
    assert plan(72, settings, special=1, shared_prefix=True)
    with pytest.raises(PosencError, match=r"71 tokens, and windows of 64 .* more than 71: give"):
        plan(71, settings, special=1, shared_prefix=True)


@pytest.mark.parametrize("special", [0, 1, 2, 3])
def test_sliding_windows_score_every_token_or_are_refused(special: int) -> None:
    with pytest.raises(PosencError, match=r"shortest length \(16\): the tokens .* --stride 8"):
        make((16,), protocols=("sliding",), stride=20)
    settings = make((16,), protocols=("sliding",))
    assert settings.stride == 8
    tokens = scored(plan(100, settings, special=special, shared_prefix=True), "sliding")[16]
    assert sorted(tokens) == list(range(0 if special else 1, 100))
    apart = make((16,), protocols=("sliding",), stride=16)  # as the documentation of transformers
    if special:
        with pytest.raises(PosencError, match=f"Give --stride {16 - special} or less"):
            plan(100, apart, special=special, shared_prefix=True)
        return
    tokens = scored(plan(100, apart, special=0, shared_prefix=True), "sliding")[16]
    # the first of a window has no prediction
    assert sorted(tokens) == [t for t in range(100) if t % 16]


@pytest.mark.parametrize(
    ("options", "special", "want"),
    [
        ({"protocols": ("prefix",)}, 1, [(0, 7, 1, 1, 8)]),
        ({"protocols": ("tail",), "windows_per_document": 2}, 1, [(0, 7, 1, 5, 8), (13, 20, 1, 5, 8)]),
        ({"protocols": ("tail",), "windows_per_document": 2, "read_last": False}, 1,
         [(0, 8, 1, 6, 9), (12, 20, 1, 6, 9)]),
        ({"protocols": ("sliding",), "stride": 4}, 2,
         [(16, 20, 2, 4, 6), (0, 6, 2, 2, 8), (4, 10, 2, 4, 8), (8, 14, 2, 4, 8), (12, 18, 2, 4, 8)]),
        ({"protocols": ("sliding",), "stride": 4, "bos_windows": "first"}, 2,
         [(14, 20, 0, 4, 6), (0, 6, 2, 2, 8), (2, 10, 0, 4, 8), (6, 14, 0, 4, 8), (10, 18, 0, 4, 8)]),
        ({"protocols": ("sliding",), "stride": 4, "windows_per_document": 2}, 0,
         [(4, 12, 0, 4, 8), (12, 20, 0, 4, 8)]),
        ({"protocols": ("disjoint",)}, 0, [(0, 9, 0, 1, 9), (8, 17, 0, 1, 9), (11, 20, 0, 6, 9)]),
        ({"protocols": ("disjoint",)}, 1, [(0, 8, 1, 1, 9), (7, 16, 0, 1, 9), (11, 20, 0, 5, 9)]),
        ({"protocols": ("stream",), "stride": 5}, 0, [(0, 8, 0, 1, 8), (5, 13, 0, 1, 8)]),
        ({"protocols": ("stream",), "stride": 5}, 1, [(0, 7, 1, 1, 8), (5, 12, 1, 1, 8)]),
    ],
)  # fmt: skip
def test_windows_by_hand(options: dict[str, Any], special: int, want: list[Any]) -> None:
    """Windows of 8 tokens in a text of 20: begin, end, special tokens, first one that counts, one past the last."""
    windows = plan(20, make((8,), tail_tokens=3, **options), special=special, shared_prefix=True)
    assert [(w.begin, w.end, w.special, s.first, s.stop) for w in windows for s in w.spans] == want


EACH = "of each document"
STREAM, PREFIX = "the documents as one stream", f"the first L tokens {EACH}"
READ = "tokens of each document, read with the L tokens that end there"
WINDOWS = (
    "windows of L tokens, 8 apart; each scores the tokens that the one before it did not reach; "
    "up to 2 evenly spaced windows of each document, the first one left out"
)
ALIKE = "every window weighs the same, however many tokens it scores"
APART = "windows of L tokens 256 apart; all tokens of every window"
LONGPPL = {"protocols": ("longppl",), "aggregate": "windows", "evaluator": {}}


@pytest.mark.parametrize(
    ("options", "protocol", "definition"),
    [
        ({"tail_tokens": 9}, "tail", f"the same last 9 {READ}"),
        ({"windows_per_document": 1}, "tail", f"the same last 8 {READ}; one window {EACH}"),
        ({"windows_per_document": 3}, "prefix", PREFIX),
        ({**SLIDING, "windows_per_document": 2, "joined": True}, "sliding", f"{WINDOWS}; {STREAM}"),
        ({"protocols": ("stream",), "joined": True}, "stream", f"{STREAM}, {APART}"),
        ({"aggregate": "windows"}, "prefix", f"{PREFIX}; {ALIKE}"),
        (LONGPPL, "longppl", f"the key tokens of {PREFIX}, those that need far context (LongPPL)"),
    ],
)
def test_definitions(options: dict[str, Any], protocol: str, definition: str) -> None:
    assert make(**options).definition(protocol) == definition


def test_a_window_that_serves_both_protocols_runs_once() -> None:
    windows = plan(64, make(), special=0, shared_prefix=True)
    assert len(windows) == 3
    assert {(span.protocol, span.length) for span in windows[-1].spans} == {
        *(("prefix", length) for length in (16, 32, 64)),
        ("tail", 64),
    }


@given(
    tokens=st.integers(64, 400),
    windows=st.integers(1, 9),
    tail=st.integers(1, 15),
    special=st.integers(0, 2),
)
def test_tails_score_every_token_once(tokens: int, windows: int, tail: int, special: int) -> None:
    settings = make(protocols=("tail",), tail_tokens=tail, windows_per_document=windows)
    made = plan(tokens, settings, special=special, shared_prefix=False)
    by_length = scored(made, "tail")
    positions = by_length[64]
    assert all(each == positions for each in by_length.values())
    assert len(set(positions)) == len(positions)
    assert len(positions) % tail == 0
    assert 1 <= len(positions) // tail <= windows
    assert max(positions) == tokens - 1
    assert all(window.begin >= 0 for window in made)


def test_default_lengths_follow_the_model_and_tails_the_shortest_length() -> None:
    assert default_lengths(256) == (256, 512, 1024, 2048, 4096)
    assert default_lengths(4096) == (4096, 8192, 16384)
    with pytest.raises(PosencError, match="give --lengths"):
        default_lengths(None)
    assert make((256, 512)).tail_tokens == 128
    assert make((4096, 8192)).tail_tokens == 1024
    assert make((17, 64)).tail_tokens == 8
    assert make((64, 128), tail_tokens=63).tail_tokens == 63
    assert make((64, 128), tail_tokens=0).tail_tokens == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (32, 16)}, "ascending"),
        ({"lengths": (16, 16)}, "ascending"),
        ({"lengths": ()}, "ascending"),
        ({"lengths": (4, 16)}, "at least 8 tokens, not 4"),
        ({"protocols": ("tail", "window")}, "Unknown protocol 'window'"),
        ({"protocols": ("tail", "tail")}, "Give at least one protocol, each once"),
        ({"protocols": ()}, "Give at least one protocol"),
        ({"protocols": ("sliding", "stream")}, "stream joins the documents; the others do not"),
        ({"protocols": ("prefix",), "joined": True}, "this preset joins .* prefix needs them one"),
        ({"min_tokens": 63}, "min_tokens 63: prefix and tail need documents of the longest length"),
        ({"aggregate": "bytes"}, "Unknown aggregate 'bytes'"),
        ({"bos_windows": "some"}, "--bos-windows 'some'"),
        ({"stride": -1}, "stride is a whole number of at least 0, not -1"),
        ({"tail_tokens": 16}, "fewer than the shortest length .* or --tail-tokens 8"),
        ({"protocols": ("tail", "longppl")}, "--longppl EVALUATOR"),
        ({"protocols": ("tail", "stream")}, "stream joins the documents, and tail needs them one"),
        ({"windows_per_document": 0}, "windows_per_document is a whole number of at least 1"),
        ({"batch": 0}, "batch is a whole number of at least 1, not 0"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PosencError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("options", "shortest"),
    [
        ({"lengths": (8,), "tail_tokens": 1}, 8),
        ({"protocols": ("prefix",), "tail_tokens": 99}, 64),
        ({"read_last": False}, 65),
        ({"min_tokens": 64}, 64),
        ({"protocols": ("sliding",), "min_tokens": 5}, 5),
        ({"protocols": ("stream",)}, 1),
        ({"protocols": ("sliding", "stream"), "joined": True, "min_tokens": 5}, 5),
    ],
)
def test_settings_at_their_limits(options: dict[str, Any], shortest: int) -> None:
    settings = make(**options)
    assert settings.shortest_document == shortest
    assert Settings(**dataclasses.asdict(settings)) == settings


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512, 1024,4k,128K", (512, 1024, 4096, 131072)),
        ("1M,2m", (1_048_576, 2_097_152)),
        ("4k,4096", (4096,)),
        ("2k:8k:2k,64", (64, 2048, 4096, 6144, 8192)),
        ("1k:2k:1k", (1024, 2048)),
        *((bad, "is no length") for bad in ("", "abc", "1.5k", "-4", "512,,1024", "4g", "M", "x")),
        *((bad, "--lengths") for bad in ("1:2", "2:8:0", "1k:2k:3k:4k")),
        ("2k:1k:1k", "'2k:1k:1k' ends before it begins"),
    ],
)
def test_lengths_as_text(text: str, lengths: tuple[int, ...] | str) -> None:
    if isinstance(lengths, tuple):
        assert parse_lengths(text) == lengths
        return
    with pytest.raises(PosencError, match=lengths):
        parse_lengths(text)


@pytest.mark.parametrize("protocol", ["prefix", "tail", "sliding", "disjoint", "longppl", "stream"])
@pytest.mark.parametrize(("special", "read_last"), [(0, True), (1, True), (1, False)])
def test_truncated_windows_score_the_same(protocol: str, special: int, read_last: bool) -> None:
    evaluator: Any = {} if protocol == "longppl" else None
    options: dict[str, Any] = {"tail_tokens": 5, "stride": 7, "evaluator": evaluator}
    settings = make(protocols=(protocol,), read_last=read_last, **options)
    whole = plan(100, settings, special=special, shared_prefix=True)
    windows = plan(100, settings, special=special, shared_prefix=True, most=16)
    assert max(window.forwarded for window in whole) > 16
    assert max(window.forwarded for window in windows) <= 16
    assert max(window.end for window in windows) <= 100
    # A piece is full; the end of a text may fit in less.
    assert {w.forwarded for w in windows if w.spans[-1].length > 16} == {16}
    ours, theirs = scored(windows, protocol), scored(whole, protocol)
    assert {n: sorted(ours[n]) for n in ours} == {n: sorted(theirs[n]) for n in theirs}
    for window in windows:
        for span in window.spans:
            # The first piece of a text is whole; behind it, all but the last few tokens are context.
            if span.length > 16 and window.begin and protocol not in ("stream", "disjoint"):
                assert span.first >= 16 - 7
    for length in (16, 32, 64):
        weights = [
            sum(span.weight for window in way for span in window.spans if span.length == length)
            for way in (whole, windows)
        ]
        assert weights[0] == pytest.approx(weights[1])
