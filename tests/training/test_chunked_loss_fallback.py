"""Models whose loss cannot be computed in chunks, or not in the usual way: found by the probe, trained as before."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from hf_posenc.training import chunked_loss as loss_probe
from hf_posenc.training.chunked_loss import chunk_loss
from tests.support import zoo
from tests.support.selection import late
from tests.training.test_chunked_loss import CHUNK, assert_same, texts, trained

pytestmark = pytest.mark.slow  # whole trainings or graphs

LARGE = {"vocab_size": 32_768, "hidden_size": 256, "num_hidden_layers": 1}


_Llama: Any = LlamaForCausalLM


class Changed(_Llama):  # type: ignore[misc]
    """Its logits are changed behind the head, and the loss is of these."""

    def change(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
        return output


class PositionBias(Changed):
    """Its head depends on where a token stands, which a slice of hidden states does not tell."""

    def change(self, logits: Tensor) -> Tensor:
        places = torch.arange(logits.shape[1], dtype=torch.float32)
        return logits + places[:, None] * torch.linspace(-1, 1, logits.shape[-1])


@pytest.mark.parametrize("late", [False, True])
def test_a_head_that_chunks_change_keeps_its_plain_forward_and_says_so(
    late: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = PositionBias(zoo.tiny_config("llama"))
    expected = trained(model, **texts())
    if late:
        monkeypatch.setattr(loss_probe, "runs_here", lambda model: False)
    with caplog.at_level(logging.WARNING):
        handle = chunk_loss(model, CHUNK)
        found = trained(model, **texts())
    assert handle.exact is False
    assert "PositionBias: its loss cannot be computed in chunks (another loss)" in caplog.text
    assert_same(found, expected, 0)
    assert "logits" in model(**texts())


class Detached(Changed):
    """Its loss is right in chunks and its gradient is not."""

    def change(self, logits: Tensor) -> Tensor:
        return logits.detach() + 0 * logits if logits.shape[1] < 9 else logits


def test_wrong_gradients_alone_are_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chunk_loss(Detached(zoo.tiny_config("llama")), CHUNK).exact is False
    assert "(other gradients)" in caplog.text


@pytest.mark.parametrize("seed", [0, 1, *late([2, 3])])
@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, LARGE), (torch.float64, {})])
def test_rounding_is_no_difference(dtype: torch.dtype, options: dict[str, int], seed: int) -> None:
    """Over a large vocabulary, and of a model in float64, whose loss is float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(zoo.tiny_config("llama", **options))  # type: ignore[arg-type]
        assert chunk_loss(model.to(dtype)).exact


class Flattened(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden.view(-1, hidden.shape[-1]), self.weight)
        return logits.view(*hidden.shape[:-1], -1)


def test_a_head_may_view_what_it_gets_in_another_shape() -> None:
    model: Any = zoo.build("llama")
    expected = trained(model, **texts())
    weight = model.lm_head.weight
    model.lm_head = Flattened(64, 128, bias=False)
    model.lm_head.weight = weight
    assert chunk_loss(model, CHUNK).exact
    assert_same(trained(model, **texts()), expected)


class NoHead(_Llama):  # type: ignore[misc]
    """Its embeddings are none that its forward uses."""

    def get_input_embeddings(self) -> Any:
        return nn.Embedding(128, 8)


def test_a_model_without_a_decoder_to_be_found_trains_as_it_did(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = NoHead(zoo.tiny_config("llama"))
    given = texts()
    expected = model(**given).loss
    handle = chunk_loss(model, CHUNK)
    with caplog.at_level(logging.WARNING):
        assert model(**given).loss == expected
    assert handle.exact is False
    assert "calls no part that holds its embeddings" in caplog.text
