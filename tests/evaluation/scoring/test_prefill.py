"""Prefill in pieces: its trial, and the fallback if it would change the numbers; less at a time if memory runs out."""

from __future__ import annotations

import itertools
import logging
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import patch_model, unpatch_model
from hf_posenc.evaluation.documents import Document, tokenize
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.scoring.head_replay import Pieces, TokenScorer, disagreement
from hf_posenc.model import masks
from tests.evaluation.scoring import test_head_replay as replay
from tests.evaluation.scoring.test_head_replay import IN_ATTENTION, check
from tests.support import zoo
from tests.support.perplexities import measured
from tests.support.selection import covering, late, quick
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose, tiny
from tests.support.zoo import CACHE

pytestmark = pytest.mark.usefixtures("quick_collection")


@pytest.mark.parametrize(
    ("tokens", "size", "edges"),
    [
        (57, 16, [0, 16, 32, 48, 57]),
        (64, 16, [0, 16, 32, 48, 64]),
        (65, 16, [0, 16, 32, 48, 65]),  # none has a single token
        (3, 2, [0, 3]),
        (16, 16, [0, 16]),
        (5, 16, [0, 5]),
    ],
)
def test_pieces_cover_a_text(tokens: int, size: int, edges: list[int]) -> None:
    assert Pieces(size).bounds(tokens) == list(itertools.pairwise(edges))


def test_disagreement_is_a_mean_behind_the_first_seam() -> None:
    whole = torch.zeros(31)  # of tokens 1 to 31
    pieces = whole.clone()
    pieces[:16] = 9.0  # up to token 16, which is predicted by the last of the first piece
    assert disagreement(pieces, whole, [16]) == 0.0
    pieces[16:] = torch.linspace(0, 1, 15)
    assert disagreement(pieces, whole, [16]) == pytest.approx(0.5)
    forgotten = torch.zeros(1023)
    forgotten[[512, 513, 514]] = 0.4  # a convolution that restarts
    assert disagreement(forgotten, torch.zeros(1023), [512]) == pytest.approx(0.075)


def test_infinite_losses_may_be_equal() -> None:
    whole = torch.tensor([0.0, math.inf, math.nan, 1.0])
    assert disagreement(whole.clone(), whole, [1]) == 0.0
    assert disagreement(torch.tensor([0.0, 1.0, math.nan, 1.0]), whole, [1]) == math.inf


@pytest.mark.parametrize("window", [None, 100])
def test_trying_pieces_takes_no_more_at_a_time_than_they_do(window: int | None) -> None:
    model = zoo.build("mistral", sliding_window=window)
    ids = zoo.tokens(700)[0]
    scorer, seen = TokenScorer(model, ids[:16], prefill=128), list[int]()
    layer = model.get_submodule("model.layers.0.mlp")
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    scorer(ids)
    assert scorer.refused is None
    assert max(seen) == 128
    assert sum(seen) <= 700 + 2 * 128 + 2 + (2 * (100 + 2 * 128) if window else 0)
    tried = len(seen)
    scorer(ids)
    assert len(seen) == tried + 6  # tried once


@pytest.mark.parametrize(
    ("model_type", "size"),
    [*covering(["gemma3_text", "falcon"], [64, 700]), *late(["llama"], [64, 700])],
)
def test_the_engine_computes_pieces_where_it_can(model_type: str, size: int) -> None:
    """Falcon calls sdpa in its own code, which fails on a mask that is no matrix: it keeps its matrices."""
    model, ids = zoo.build(model_type), zoo.tokens(1500)[0]
    expected, seen = TokenScorer(model, ids)(ids), list[Any]()
    scorer = TokenScorer(model, ids, prefill=size)
    hook = attention_of(model).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    assert (scorer(ids) - expected).abs().max() < 2e-5
    hook.remove()
    assert scorer.refused is None
    matrices = {mask is not None and mask.dtype != masks.HANDLE for mask in seen[-2:]}
    assert matrices == {model_type == "falcon"}
    assert model.config._attn_implementation == "sdpa"


def attention_of(model: Any) -> Any:
    return next(m for m in model.modules() if type(m).__name__.endswith("Attention"))


def forgetful(forward: Any, after: int) -> Any:
    """Lose the past in a text longer than `after`: positions and cache restart."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(CACHE) is not None and kwargs[CACHE].get_seq_length() >= after:
            kwargs[CACHE] = None
        return forward(*args, **kwargs)

    return run


def cacheless(forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **{**kwargs, "use_cache": False})
        output[CACHE] = None
        return output

    return run


PIECES_OF, ONE_FORWARD = "off those of pieces of", "off those of one forward"
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("model_type", "sizes", "change", "said"),
    [
        ("llama", {}, cacheless, "it returns no cache"),
        ("mistral", {"sliding_window": None}, partial(forgetful, after=0), ONE_FORWARD),
        # Beyond the text that is run whole, as the config names a window.
        ("mistral", {"sliding_window": 100}, partial(forgetful, after=150), PIECES_OF),
        # Only the cache of transformers' Moshi knows its window, which is 3,000 tokens in the real model.
        ("moshi", {"sliding_window": 100}, None, PIECES_OF),
        ("llama", {"rope_parameters": DYNAMIC}, None, "depends on how much text follows"),
    ],
)
def test_a_model_that_pieces_would_change_is_run_whole_and_says_so(
    model_type: str, sizes: dict[str, Any], change: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = zoo.build(model_type, **sizes), zoo.tokens(300)[0]
    expected = TokenScorer(model, ids)(ids)
    scorer = TokenScorer(model, ids, prefill=48)
    if change is not None:
        model.forward = change(model.forward)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(scorer(ids), expected)
    assert said in str(scorer.refused)
    line = f"{type(model).__name__} cannot be prefilled in pieces: {scorer.refused}. Its texts"
    assert line in caplog.text


def test_what_is_patched_in_decides() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(90)[0]
    scorer = TokenScorer(model, ids, prefill=16)
    plain = scorer(ids)
    assert scorer.refused is None
    for update in ("sequence", "request"):
        patch_model(model, "dynamic_ntk", update=update, original_max_position_embeddings=16)
        assert torch.equal(scorer(ids), TokenScorer(model, ids)(ids))
        assert scorer.refused == "what it computes for a token depends on how much text follows"
        unpatch_model(model)
        assert torch.equal(scorer(ids), plain)
        assert scorer.refused is None


def test_a_lack_of_memory_stays_one() -> None:
    model: Any = zoo.build("mamba")
    limit(model.backbone.layers[0], 750)
    ids = zoo.tokens(1050)[0]
    with pytest.raises(torch.OutOfMemoryError):
        TokenScorer(model, ids[:16], chunk=64)(ids)


def test_a_lack_of_memory_is_no_refusal() -> None:
    model: Any = zoo.build("llama")
    limit(model.model.layers[0].mlp, 100)
    ids = zoo.tokens(500)[0]
    scorer = TokenScorer(model, ids[:16], prefill=200)
    with pytest.raises(torch.OutOfMemoryError):
        scorer(ids)
    assert scorer.refused is None
    scorer.prefill = 50
    check(scorer(ids), TokenScorer(zoo.build("llama"), ids)(ids), 1e-5)


def test_nothing_is_left_in_modules() -> None:
    """Recurrent Gemma stores its states in its modules while it has a cache."""
    model, ids = zoo.build("recurrent_gemma"), zoo.tokens(57)[0]
    states = [module for module in model.modules() if hasattr(module, "conv1d_state")]
    scorer = TokenScorer(model, ids, prefill=16)
    expected = TokenScorer(model, ids)(ids)
    assert torch.equal(scorer(ids), expected)
    assert states
    assert all(module.conv1d_state is None for module in states)


# The losses of whole texts, and what is run at a time once memory has run out.

SOURCE = [Document(f"d{n}", prose(300 + 41 * n, n)) for n in range(2)]
DOCUMENTS = [tokenize(document, byte_tokenizer()) for document in SOURCE]
YARN: tuple[str, dict[str, Any]] = ("yarn", {"scale": 4})


@pytest.mark.parametrize("patch", quick([YARN, *IN_ATTENTION], [YARN, IN_ATTENTION[0]]))
def test_a_prefill_in_pieces_gives_the_same_losses(patch: tuple[str, dict[str, Any]]) -> None:
    """All families are in `test_every_family.py`."""
    check_pieces(patch_model(zoo.build("llama"), patch[0], **patch[1]), prefill=9, chunk=5)


def test_a_model_wrapped_by_peft_too() -> None:
    check_pieces(replay.with_adapter(zoo.build("bamba")), prefill=16)


def check_pieces(model: Any, **sizes: int) -> None:
    ids = zoo.tokens(57)[0]
    expected = replay.expected_losses(replay.full_logits(model, ids), ids)
    scorer = TokenScorer(model, ids, **sizes)
    check(scorer(ids), expected, 1e-5)
    check(scorer(ids, 40), expected[39:], 1e-5)


def test_several_windows_at_once_give_the_losses_of_each() -> None:
    model = zoo.build("llama")
    windows = zoo.tokens(120).reshape(4, 30)
    for read_last in (True, False):
        for prefill in (None, 8):
            scorer = TokenScorer(model, windows[0], chunk=20, prefill=prefill)
            together = scorer(windows, 5, read_last=read_last)
            assert together.shape == (4, 25)
            for row, ids in zip(together, windows, strict=True):
                check(row, scorer(ids, 5))


def run(model: Any, specs: list[str], **settings: Any) -> PerplexityResult:
    return measured(model, DOCUMENTS, specs, Settings(**{"lengths": (64, 256), **settings}))


def test_a_measurement_says_what_is_run_whole(caplog: pytest.LogCaptureFixture) -> None:
    run(tiny(num_hidden_layers=2), ["dynamic_ntk:update=sequence,scale=2"], prefill=16)
    assert "cannot be prefilled in pieces" in caplog.text


class Limit:
    """Makes a module run out of memory above a number of tokens, of all rows together."""

    def __init__(self, most: int) -> None:
        self.most, self.largest = most, 0

    def __call__(self, module: Any, args: tuple[Tensor, ...]) -> None:
        tokens = args[0].shape[0] * args[0].shape[1]
        if tokens > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.")
        self.largest = max(self.largest, tokens)


def limit(module: Any, most: int) -> Limit:
    limit = Limit(most)
    module.register_forward_pre_hook(limit)
    return limit


def test_less_at_a_time_gives_the_same_numbers() -> None:
    sliding = {"protocols": ("sliding",), "stride": 64, "batch": 4}
    expected = run(tiny(num_hidden_layers=2), ["none", "rerope:window=32"], **sliding)
    for most in (100, 300):  # of the head and the decoder: smaller chunks, and batches
        model = tiny(num_hidden_layers=2)
        limited = limit(model.lm_head if most == 100 else model.model.layers[0].mlp, most)
        result = run(model, ["none", "rerope:window=32"], **sliding)
        assert not result.failures
        assert 0 < limited.largest <= most
        for record, other in zip(result.records, expected.records, strict=True):
            assert record.nats == pytest.approx(other.nats, rel=1e-5)
            assert (record.method, record.tokens) == (other.method, other.tokens)


def test_texts_are_run_in_pieces() -> None:
    ids = torch.arange(2400) % VOCABULARY
    model = tiny(num_hidden_layers=2)
    expected = TokenScorer(model, ids)(ids)
    limited = limit(model.model.layers[0].mlp, 700)
    scorer = TokenScorer(model, ids[:16])
    losses = scorer(ids)
    assert limited.largest == 600
    assert scorer.reduced["prefill"] == 600
    check(losses, expected, 1e-5)


def test_where_pieces_would_give_other_numbers_the_length_is_a_cell_of_its_own() -> None:
    model = tiny(num_hidden_layers=2)
    limit(model.model.layers[0].mlp, 128)
    result = run(model, ["yarn:scale=4", "dynamic_ntk:update=sequence"])
    failed = {(f.method, f.protocol, f.length, f.reason) for f in result.failures}
    assert failed == {
        (method, protocol, 256, "out of memory")
        for method in ("yarn (scale 4)", "dynamic_ntk (update sequence)")
        for protocol in ("prefix", "tail")
    }
    # the shorter prefixes of the same forward are measured on their own
    assert {(r.protocol, r.length) for r in result.records} == {("prefix", 64), ("tail", 64)}
    assert len(result.records) == 8
