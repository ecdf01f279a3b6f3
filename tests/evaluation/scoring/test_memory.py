"""Smaller batches, chunks and pieces give the same numbers; running out of memory is never a crash."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import patch_model
from hf_posenc.evaluation.documents import Document, tokenize
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.scoring.frugal import FrugalScorer
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.evaluation.scoring.test_head_replay import expected_losses, full_logits
from tests.support import zoo
from tests.support.perplexities import measured
from tests.support.selection import covering, late
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

pytestmark = pytest.mark.usefixtures("quick_collection")
CACHED = ("llama", "gemma2", "bloom", "deepseek_v3")
"""The kinds of caches and of positions beside them; all families are in `test_every_family.py`."""
DOCUMENTS = [
    tokenize(Document(f"d{n}", prose(300 + 41 * n, n)), byte_tokenizer()) for n in range(2)
]


@pytest.mark.parametrize(
    ("model_type", "piece"),
    [*covering(CACHED, (7, 16, 64)), *late(["gpt2", "opt", "mixtral"], (7, 16, 64))],
)
def test_a_prefill_in_pieces_gives_the_same_losses(model_type: str, piece: int) -> None:
    model = zoo.build(model_type)
    ids = zoo.tokens(57)[0]
    expected = expected_losses(full_logits(model, ids), ids)
    scorer = TokenScorer(model, ids, prefill=piece, chunk=5)
    torch.testing.assert_close(scorer(ids), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scorer(ids, 40), expected[39:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("yarn", {"scale": 4}),
        ("rerope", {"window": 16}),
        ("alibi", {}),
        ("dynamic_ntk", {"update": "row", "bucket": 8, "original_max_position_embeddings": 16}),
        ("log_n", {"original_max_position_embeddings": 16}),
    ],
)
def test_a_patched_model_too(method: str, options: dict[str, Any]) -> None:
    model = patch_model(zoo.build("llama"), method, **options)
    ids = zoo.tokens(57)[0]
    expected = expected_losses(full_logits(model, ids), ids)
    torch.testing.assert_close(
        TokenScorer(model, ids, prefill=9)(ids), expected, atol=1e-5, rtol=1e-5
    )


def test_pieces_bound_what_the_decoder_makes() -> None:
    model, seen = zoo.build("llama"), []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[1])
    )
    ids = zoo.tokens(57)[0]
    scorer = TokenScorer(model, ids, prefill=16)
    scorer(ids)  # the first call tries pieces on a text of its own
    seen.clear()
    scorer(ids)
    hook.remove()
    assert seen == [16, 16, 16, 9]


def test_a_model_without_a_cache_is_run_whole_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(57)[0]
    expected = TokenScorer(model, ids)(ids)
    forward = model.forward

    def cacheless(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **{**kwargs, "use_cache": False})
        output.past_key_values = None
        return output

    scorer = TokenScorer(model, ids, prefill=16)
    model.forward = cacheless
    assert torch.equal(scorer(ids), expected)
    assert scorer.refused == "it returns no cache"
    assert "LlamaForCausalLM cannot be prefilled in pieces: it returns no cache" in caplog.text


def test_several_windows_at_once_give_the_losses_of_each() -> None:
    model = zoo.build("llama")
    windows = zoo.tokens(120).reshape(4, 30)
    for read_last in (True, False):
        for prefill in (None, 8):
            scorer = TokenScorer(model, windows[0], chunk=20, prefill=prefill)
            together = scorer(windows, 5, read_last=read_last)
            assert together.shape == (4, 25)
            for row, ids in zip(together, windows, strict=True):
                torch.testing.assert_close(row, scorer(ids, 5), atol=2e-6, rtol=2e-6)


def run(model: Any, specs: list[str], **settings: Any) -> PerplexityResult:
    return measured(model, DOCUMENTS, specs, Settings(**{"lengths": (64, 256), **settings}))


def tiny() -> Any:
    return zoo.build("llama", vocab_size=VOCABULARY, num_hidden_layers=2)


class Limited:
    """Makes a model run out of memory above a number of tokens in its decoder, an MLP's projection or its head."""

    def __init__(
        self, model: Any, *, decoder: int = 10**9, down: int = 10**9, head: int = 10**9
    ) -> None:
        self.largest = {"decoder": 0, "down": 0, "head": 0}
        self.tries = 0
        for name, module, limit in (
            ("decoder", model.model.layers[0].mlp, decoder),
            ("down", model.model.layers[0].mlp.down_proj, down),
            ("head", model.lm_head, head),
        ):
            module.register_forward_pre_hook(self._refuse(name, limit))

    def _refuse(self, name: str, limit: int) -> Any:
        def check(module: Any, args: tuple[Tensor, ...]) -> None:
            tokens = args[0].shape[0] * args[0].shape[1]
            if tokens > limit:
                self.tries += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.")
            self.largest[name] = max(self.largest[name], tokens)

        return check


def test_less_at_a_time_gives_the_same_numbers() -> None:
    sliding = {"protocols": ("sliding",), "stride": 64, "batch": 4}
    expected = run(tiny(), ["none", "rerope:window=32"], **sliding)
    for name, limit in {"head": 100, "decoder": 300}.items():  # smaller chunks, and batches
        model = tiny()
        limited = Limited(model, **{name: limit})
        result = run(model, ["none", "rerope:window=32"], **sliding)
        assert not result.failures
        assert 0 < limited.largest[name] <= limit
        for record, other in zip(result.records, expected.records, strict=True):
            assert record.nats == pytest.approx(other.nats, rel=1e-5)
            assert (record.method, record.tokens) == (other.method, other.tokens)


def wide(**sizes: Any) -> Any:
    """A model whose MLPs, and then its activations, are most of its memory."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, **heads, **sizes}
    return zoo.build("llama", vocab_size=VOCABULARY, **sizes)


def test_mlps_that_do_not_fit_are_run_in_slices() -> None:
    ids = torch.arange(2400) % VOCABULARY
    model = wide(intermediate_size=2048, num_hidden_layers=1)
    expected = TokenScorer(model, ids)(ids)
    limited = Limited(model, down=700)
    scorer = FrugalScorer(TokenScorer(model, ids[:16]))
    (losses,) = scorer([ids], 1)
    assert limited.largest["down"] == 600
    chunk = scorer.scorer.chunk
    assert scorer.reduced == {"batch": 1, "chunk": chunk, "mlp": 600, "prefill": None}
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)


def test_a_prefill_is_run_in_pieces_where_that_needs_less() -> None:
    ids = torch.arange(2400) % VOCABULARY
    expected = TokenScorer(tiny(), ids)(ids)
    model = tiny()
    model.set_attn_implementation("eager")  # whose scores are most of the memory
    limited = Limited(model, decoder=700)
    scorer = FrugalScorer(TokenScorer(model, ids[:16]))
    (losses,) = scorer([ids], 1)
    assert limited.largest["decoder"] <= 700
    assert scorer.reduced == {**scorer.reduced, "batch": 1, "mlp": None, "prefill": 600}
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)


def test_nothing_is_tried_that_needs_more() -> None:
    model = wide(num_key_value_heads=4, num_hidden_layers=32)
    ids = torch.arange(3000) % VOCABULARY
    limited = Limited(model, decoder=1024)
    scorer = FrugalScorer(TokenScorer(model, ids[:16], mlp=1024))
    chunk = scorer.scorer.chunk
    with pytest.raises(torch.OutOfMemoryError):
        scorer([ids], 1)
    # A cache would be more than smaller pieces save; fewer logits would save nothing.
    assert limited.tries == 2
    assert scorer.reduced == {"batch": 1, "chunk": chunk, "mlp": 512, "prefill": None}


def test_where_pieces_would_give_other_numbers_the_length_is_a_cell_of_its_own() -> None:
    model = tiny()
    Limited(model, decoder=128)
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
