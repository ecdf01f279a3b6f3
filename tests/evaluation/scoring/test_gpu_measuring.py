"""Measuring on a GPU: numbers, memory, and recovery when memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posenc import patched
from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.support import zoo
from tests.support.live_bytes import forward_cost
from tests.support.perplexities import measured
from tests.support.tiny_text import sizes

pytestmark = pytest.mark.gpu
VOCABULARY = 128_256
LENGTH = 32_768


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def wide(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A small model with the vocabulary of Llama 3, whose whole logits at 32k tokens are 16 GiB in float32."""
    torch.manual_seed(0)
    own = sizes(VOCABULARY, 4096, width=512, layers=2, heads=(8, 2))
    model: Any = LlamaForCausalLM(LlamaConfig(**own))
    return model.to("cuda", dtype).eval()


def text(length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(0))


def peak(work: Any) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("method", ["none", "yarn", "rerope", "alibi", "dynamic_ntk"])
def test_losses_are_those_of_the_cpu(method: str) -> None:
    options: dict[str, Any] = {"yarn": {"scale": 4}, "rerope": {"window": 16}}.get(method, {})
    model: Any = zoo.build("llama")
    ids = zoo.tokens(200)[0]
    expected = None
    for place in ("cpu", "cuda"):
        model.to(place)
        if method == "none":
            losses = TokenScorer(model, ids)(ids)
        else:
            with patched(model, method, **options):
                losses = TokenScorer(model, ids)(ids)
        if expected is None:
            expected = losses
    torch.testing.assert_close(losses, expected, atol=1e-3, rtol=1e-3)


def test_whole_logits_are_never_held_and_the_estimate_is_near() -> None:
    model, ids = wide(), text(LENGTH)
    scorer = TokenScorer(model, ids)
    used = peak(lambda: scorer(ids))
    assert used < LENGTH * VOCABULARY * 4 / 8
    assert 0.5 < forward_cost(model, LENGTH).beside_weights / used < 3


def test_peak_memory_is_linear_in_length() -> None:
    scorer = TokenScorer(wide(), text(64))
    peaks = [peak(lambda n=n: scorer(text(n))) for n in (LENGTH, 2 * LENGTH, 4 * LENGTH)]
    assert peaks[2] - peaks[1] < 2.2 * (peaks[1] - peaks[0]) + 2**28


def test_memory_that_runs_out_is_answered_with_less_at_a_time() -> None:
    model, ids = wide(torch.float32), text(LENGTH)
    expected = TokenScorer(model, ids)(ids)
    scorer = TokenScorer(model, ids)
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_allocated() + forward_cost(model, LENGTH).activations // 2
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    losses = scorer(ids)
    assert scorer.reduced["prefill"] is not None
    torch.testing.assert_close(losses, expected, atol=1e-2, rtol=1e-2)


def test_a_length_that_does_not_fit_is_a_cell() -> None:
    model = wide()
    document = TokenizedDocument("d", text(4 * LENGTH), None, "")
    settings = Settings(lengths=(1024, 4 * LENGTH), protocols=("prefix",))
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**29) / total)
    result = measured(model, [document], ["dynamic_ntk:update=sequence"], settings)
    assert [(f.length, f.reason) for f in result.failures] == [(4 * LENGTH, "out of memory")]
    assert [record.length for record in result.records] == [1024]
