"""Presets against the peers' own programs, on the same model and tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Document, TokenizedDocument, tokenize
from hf_posenc.evaluation.measuring.statistics import Cell, summarize
from hf_posenc.evaluation.options import parse_lengths
from hf_posenc.evaluation.perplexity.protocols import PRESETS, Settings, make_settings, plan
from hf_posenc.evaluation.perplexity.run import joined
from tests.support import peers, zoo
from tests.support.perplexities import measured
from tests.support.selection import late
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

BOS = 0
DOCUMENTS = [
    tokenize(Document(f"d{n}", prose(150 + 41 * n, n)), byte_tokenizer()) for n in range(3)
]
IDS = [document.ids.tolist() for document in DOCUMENTS]
LENGTH = 48
FLOAT32 = 1e-6  # transformers computes the losses of peers in float32, whatever the model's dtype


def tiny() -> Any:
    return zoo.build("llama", vocab_size=VOCABULARY, num_hidden_layers=1).double()


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
            (
                "yarn",
                {"bos": BOS, "stride": n},
                {"protocols": ("sliding",), "stride": n, "batch": m},
            )
            for n, m in ((13, 1), (16, 4))
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
    model, names = tiny(), {"hf-docs": "hf_docs", "pi": "press"}
    expected = getattr(peers, names.get(preset, preset))(model, IDS, LENGTH, **program)
    special = () if program.get("bos") is None else (BOS,)
    precision = 1e-5 if preset == "hf-docs" else FLOAT32  # the page adds up in float32
    made = cell(preset, model, special=special, **given)
    assert made.perplexity == pytest.approx(expected, rel=precision)


@pytest.mark.parametrize("stride", [*late([5]), 12])
def test_longlora(stride: int) -> None:
    model = tiny()
    expected = peers.longlora(model, IDS, LENGTH, stride=stride)
    made = cell("longlora", model, stride=stride)
    assert made.perplexity == pytest.approx(expected, rel=FLOAT32)
    starts = len(range(0, sum(map(len, IDS)) - LENGTH, stride)) - 1
    assert starts > 32  # so that there is a smaller last batch
    assert made.tokens == starts * (LENGTH - 1)


def test_su() -> None:
    model = tiny()
    expected = peers.su(model, IDS, LENGTH, tail=20)
    made = cell("su", model, tail_tokens=20)
    assert math.log(made.perplexity) == pytest.approx(expected, rel=FLOAT32)


def test_lm_eval() -> None:
    model = tiny()
    sums = peers.lm_eval(model, IDS, LENGTH, prefix=BOS)
    made = cell("lm-eval", model, special=(BOS,))
    assert made.nats == pytest.approx(-math.fsum(sums), rel=FLOAT32)
    assert made.tokens == sum(map(len, IDS))
    sizes = [document.bytes_between(0, len(document.ids)) or 0 for document in DOCUMENTS]
    assert made.bits_per_byte == pytest.approx(peers.bits_per_byte(sums, sizes), rel=FLOAT32)
    words = [(d.words_between(0, len(d.ids)) or 0) + d.white_ends for d in DOCUMENTS]
    assert made.word_perplexity == pytest.approx(
        peers.weighted_perplexity(sums, words), rel=FLOAT32
    )


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
def test_every_token_is_scored_once_in_sliding_and_disjoint_windows(
    special: int, bos_windows: str, tokens: int
) -> None:
    for protocol in ("sliding", "disjoint"):
        settings = Settings(
            lengths=(LENGTH,),
            protocols=(protocol,),
            stride=7,
            bos_windows=bos_windows,
            min_tokens=1,
        )
        scored: list[int] = []
        for window in plan(tokens, settings, special=special, shared_prefix=True):
            assert window.forwarded <= LENGTH
            for span in window.spans:
                offset = window.begin - window.special
                scored += range(offset + span.first, offset + span.stop)
        skipped = 0 if special else 1  # nothing predicts the first token of a text
        assert sorted(t for t in scored if t >= 0) == list(range(skipped, tokens))


def test_a_few_sliding_windows_are_full_ones() -> None:
    settings = Settings(lengths=(LENGTH,), protocols=("sliding",), stride=8, windows_per_document=3)
    windows = plan(200, settings, special=0, shared_prefix=True)
    assert [(w.begin, w.end, w.first_scored) for w in windows] == [
        (8, 56, 40),
        (80, 128, 40),
        (152, 200, 40),
    ]


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
    first, second = len(IDS[0]) - 3, len(IDS[0]) + 5
    for count in ("bytes_between", "words_between"):
        across = getattr(DOCUMENTS[0], count)(first, len(IDS[0])) + getattr(DOCUMENTS[1], count)(
            0, 5
        )
        assert getattr(stream, count)(first, second) == across
    assert isinstance(stream.ids, torch.Tensor)
