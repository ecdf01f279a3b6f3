"""Prefill in pieces: its trial, and the fallback if it would change the numbers."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import patch_model, unpatch_model
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.frugal import FrugalScorer
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.evaluation.scoring.prefill import Pieces, disagreement
from hf_posenc.model import masks
from tests.support import zoo
from tests.support.selection import covering, late


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


def largest_pieces(model: Any) -> list[int]:
    """Return a list that records the tokens of every forward of the first layer."""
    seen: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[1])
    )
    return seen


@pytest.mark.parametrize("window", [None, 100])
def test_trying_pieces_takes_no_more_at_a_time_than_they_do(window: int | None) -> None:
    model = zoo.build("mistral", sliding_window=window)
    ids = zoo.tokens(700)[0]
    scorer = TokenScorer(model, ids[:16], prefill=128)
    seen = largest_pieces(model)
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
    expected = TokenScorer(model, ids)(ids)
    scorer = TokenScorer(model, ids, prefill=size)
    seen: list[Any] = []
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


class Forgetful:
    """Makes a model lose its past in a text longer than `after`: positions and cache restart."""

    def __init__(self, model: Any, after: int) -> None:
        self.forward, self.after = model.forward, after

    def __call__(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length() >= self.after:
            past_key_values = None
        return self.forward(*args, past_key_values=past_key_values, **kwargs)


@pytest.mark.parametrize(
    ("after", "window", "said"),
    [(0, None, "off those of one forward"), (150, 100, "off those of pieces of")],
)
def test_a_past_that_gets_lost_is_found(
    after: int, window: int | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Detect it also beyond the text that is run whole, if the config names a window."""
    model, ids = zoo.build("mistral", sliding_window=window), zoo.tokens(300)[0]
    expected = TokenScorer(model, ids)(ids)
    scorer = TokenScorer(model, ids, prefill=48)
    model.forward = Forgetful(model, after)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(scorer(ids), expected)
    assert said in str(scorer.refused)
    assert f"MistralForCausalLM cannot be prefilled in pieces: {scorer.refused}" in caplog.text
    assert "Its texts are run whole" in caplog.text


def test_a_window_that_only_the_cache_knows_is_found() -> None:
    """Detect the window of transformers' Moshi, which is 3,000 tokens in the real model."""
    model, ids = zoo.build("moshi", sliding_window=100), zoo.tokens(300)[0]
    expected = TokenScorer(model, ids)(ids)
    scorer = TokenScorer(model, ids, prefill=48)
    assert torch.equal(scorer(ids), expected)
    assert "off those of pieces of" in str(scorer.refused)


def test_what_is_patched_in_decides() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(90)[0]
    scorer = TokenScorer(model, ids, prefill=16)
    plain = scorer(ids)
    assert scorer.refused is None
    for update in ("sequence", "request"):
        patch_model(model, "dynamic_ntk", update=update, original_max_position_embeddings=16)
        expected = TokenScorer(model, ids)(ids)
        assert torch.equal(scorer(ids), expected)
        assert scorer.refused == "what it computes for a token depends on how much text follows"
        unpatch_model(model)
        assert torch.equal(scorer(ids), plain)
        assert scorer.refused is None


def test_a_checkpoint_that_is_dynamic_by_itself_is_run_whole() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model, ids = zoo.build("llama", rope_parameters=rope), zoo.tokens(200)[0]
    scorer = TokenScorer(model, ids, prefill=64)
    expected = TokenScorer(model, ids)(ids)
    assert torch.equal(scorer(ids), expected)
    assert "depends on how much text follows" in str(scorer.refused)


def limited(layer: Any, most: int) -> None:
    """Make a layer run out of memory above a number of tokens."""

    def check(module: Any, args: tuple[Tensor, ...]) -> None:
        if args[0].shape[1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.")

    layer.register_forward_pre_hook(check)


@pytest.mark.usefixtures("quick_collection")
def test_a_lack_of_memory_stays_one() -> None:
    model: Any = zoo.build("mamba")
    limited(model.backbone.layers[0], 750)
    ids = zoo.tokens(1050)[0]
    with pytest.raises(torch.OutOfMemoryError):
        FrugalScorer(TokenScorer(model, ids[:16], chunk=64))([ids], 1)


def test_a_lack_of_memory_is_no_refusal() -> None:
    model: Any = zoo.build("llama")
    limited(model.model.layers[0].mlp, 100)
    ids = zoo.tokens(500)[0]
    scorer = TokenScorer(model, ids[:16], prefill=200)
    with pytest.raises(torch.OutOfMemoryError):
        scorer(ids)
    assert scorer.refused is None
    scorer.prefill = 50
    expected = TokenScorer(zoo.build("llama"), ids)(ids)
    torch.testing.assert_close(scorer(ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "bamba"])
def test_models_wrapped_by_peft_are_run_in_pieces(model_type: str) -> None:
    peft = pytest.importorskip("peft")
    ids = zoo.tokens(57)[0]
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(zoo.build(model_type), config).eval()
    expected = TokenScorer(model, ids)(ids)
    scorer = TokenScorer(model, ids, prefill=16)
    torch.testing.assert_close(scorer(ids), expected, atol=1e-5, rtol=1e-5)
    assert scorer.refused is None


def test_a_piece_of_one_token_is_no_prefill() -> None:
    with pytest.raises(PosencError, match="A prefill has at least 2 tokens, not 1"):
        TokenScorer(zoo.build("llama"), zoo.tokens(9)[0], prefill=1)


def test_nothing_is_left_in_modules() -> None:
    """Recurrent Gemma stores its states in its modules while it has a cache."""
    model, ids = zoo.build("recurrent_gemma"), zoo.tokens(57)[0]
    states = [module for module in model.modules() if hasattr(module, "conv1d_state")]
    scorer = TokenScorer(model, ids, prefill=16)
    expected = TokenScorer(model, ids)(ids)
    assert torch.equal(scorer(ids), expected)
    assert states
    assert all(module.conv1d_state is None for module in states)
