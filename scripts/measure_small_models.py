"""Train small models of two other kinds, ALiBi (BLOOM) and masked (EuroBERT), and measure methods on them.

    python -m scripts.measure_small_models train alibi --work FOLDER      # and alibi_log, masked
    python -m scripts.measure_small_models measure --work FOLDER          # docs/data/benchmarks/small_models.json

A model has the size, the tokenizer, the corpus and the optimizers of the embedded one, and fewer steps. All lengths score
the same tokens: the last of a held-out text, or, where tokens are masked, those in its middle.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    PreTrainedModel,
)

from hf_posenc import patch_model, unpatch_model
from hf_posenc.embedded import held_out_documents, model_path
from hf_posenc.embedded.corpus import select

from hf_posenc.evaluation.measuring.statistics import Record, summarize

from scripts.train_tiny_llama import (
    Batches,
    Settings,
    build_optimizers,
    environment,
    rate,
    token_stream,
)

SETTINGS = Settings(batch=8, steps=500, warmup=50, bytes_per_source=400_000)
KINDS = {
    "alibi": ("none", "alibi:scale=2", "alibi:scale=4", "alibi:distance=log"),
    "alibi_log": ("none", "alibi:scale=4,distance=log", "alibi"),
    "masked": ("none", "ntk:scale=4", "diffusion_ntk:scale=4,sides=1", "diffusion_ntk:scale=4", "yarn:scale=4"),
}  # fmt: skip
"""What is measured on each kind, beside truncation; `alibi_log` is trained with ALiBi on logarithmic distances."""
LENGTHS, TARGET, MASKED = (256, 512, 1024), 128, 0.3
"""Lengths in tokens, tokens in the scored part of a text, and the share that is masked, ModernBERT's."""


def build(kind: str) -> PreTrainedModel:
    """Build a model, initialized from the seed."""
    torch.manual_seed(SETTINGS.seed)
    hidden, layers, heads = SETTINGS.hidden, SETTINGS.layers, 4 if kind == "masked" else 8
    if kind == "masked":
        config = EuroBertConfig(
            vocab_size=SETTINGS.vocab_size + 1, hidden_size=hidden, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=SETTINGS.mlp,
            max_position_embeddings=SETTINGS.context, tie_word_embeddings=True, pad_token_id=0, mask_token_id=SETTINGS.vocab_size,
            rope_parameters={"rope_type": "default", "rope_theta": SETTINGS.rope_theta},
        )  # fmt: skip
        return EuroBertForMaskedLM(config)
    plain = BloomConfig(
        vocab_size=SETTINGS.vocab_size, hidden_size=hidden, n_layer=layers, n_head=heads
    )
    model = BloomForCausalLM(plain)
    return patch_model(model, "alibi", distance="log") if kind == "alibi_log" else model


def losses(model: PreTrainedModel, ids: Tensor, masked: Tensor | None) -> Tensor:
    """Return the nats of the tokens that are masked, or of all but the first, shape (n,)."""
    if masked is None:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    hidden = ids.masked_fill(masked, SETTINGS.vocab_size)
    logits = model(input_ids=hidden).logits[masked]
    return F.cross_entropy(logits.float(), ids[masked], reduction="none")


app = typer.Typer(add_completion=False)


@app.command()
def train(kind: str, work: Annotated[Path, typer.Option()], steps: int = SETTINGS.steps) -> None:
    """Train a model of a kind, and save it in a folder of that name."""
    settings = dataclasses.replace(SETTINGS, steps=steps)
    work.mkdir(parents=True, exist_ok=True)
    if not (stream := work / "tokens.npy").exists():
        corpus = select(environment(), bytes_per_source=settings.bytes_per_source)
        np.save(stream, token_stream(corpus, AutoTokenizer.from_pretrained(model_path())))
    batches = Batches(np.load(stream), settings.context, settings.batch, settings.seed)
    torch.set_flush_denormal(True)  # ALiBi's far weights are such numbers
    model = build(kind).train()
    optimizers = build_optimizers(model, settings)
    for step in range(steps):
        for optimizer, peak in zip(optimizers, (settings.muon_lr, settings.adamw_lr), strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(step, settings)
        ids = torch.from_numpy(batches[step])
        masked = torch.rand(ids.shape) < MASKED if kind == "masked" else None
        loss = losses(model, ids, masked).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            print(step, round(float(loss), 3), flush=True)
    unpatch_model(model) if kind == "alibi_log" else model
    model.save_pretrained(work / kind)


if __name__ == "__main__":
    app()
