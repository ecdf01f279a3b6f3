"""Train the embedded model on as two other kinds, ALiBi and masked, and measure methods on them.

    python -m scripts.measure_small_models alibi        # or alibi_log, masked: some CPU minutes each

Both start from the embedded model's weights. `alibi` and `alibi_log` drop the rotation for a bias; `masked` is the
same model without a causal mask (EuroBERT in transformers, a small LLaDA) and fills in masked tokens. The result is a
part of docs/data/benchmarks/small_models.json. All lengths score the same tokens: the last of a held-out text, or those
that are masked in its middle.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import (
    EuroBertConfig,
    EuroBertForMaskedLM,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_posenc import patch_model, unpatch_model
from hf_posenc.embedded import held_out_documents, model_path
from hf_posenc.embedded.corpus import select
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import Record, summarize
from hf_posenc.files import to_json, write_atomically
from scripts import train_tiny_llama as tiny
from scripts.results import SMALL_MODELS

SETTINGS = tiny.Settings(batch=8, steps=100, warmup=10, muon_lr=0.005, adamw_lr=0.002)
LOG = {"distance": "log"}
Request = tuple[str, dict[str, Any]] | None
KINDS: dict[str, dict[str, Request]] = {
    "alibi": {
        "as trained": ("alibi", {}), "scale 2": ("alibi", {"scale": 2}), "scale 4": ("alibi", {"scale": 4}),
        "distance log": ("alibi", LOG),
    },
    "alibi_log": {
        "as trained": ("alibi", LOG), "scale 2": ("alibi", {"scale": 2} | LOG), "distance linear": ("alibi", {}),
    },
    "masked": {
        "as trained": None, "ntk": ("ntk", {"scale": 4}), "diffusion_ntk": ("diffusion_ntk", {"scale": 4}),
        "diffusion_ntk, both_sides=False": ("diffusion_ntk", {"scale": 4, "both_sides": False}),
        "yarn": ("yarn", {"scale": 4}),
    },
}  # fmt: skip
"""The measurements of each kind of model, by label; the first is that of its training."""
LENGTHS, TARGET, SHARE, DOCUMENTS = (256, 512, 1024), 128, 0.3, 12
"""Lengths in tokens, tokens in the scored part of a text, the share that is masked, and held-out texts."""


def build(kind: str) -> PreTrainedModel:
    """Build the embedded model as another kind."""
    llama = LlamaForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    if kind != "masked":
        return llama
    mask = SETTINGS.vocab_size
    own = {"vocab_size": mask + 1, "pad_token_id": 0, "mask_token_id": mask}
    model = EuroBertForMaskedLM(EuroBertConfig(**{**llama.config.to_dict(), **own}))
    weights = llama.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # and a row for the mask token
        weights[name] = F.pad(weights[name], (0, 0, 0, 1))
    model.load_state_dict(weights, strict=True)
    return model


def losses(model: PreTrainedModel, ids: Tensor, masked: Tensor | None) -> Tensor:
    """Return the nats of the masked tokens, or of all but the first, shape (n,)."""
    if masked is None:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    logits = model(input_ids=ids.masked_fill(masked, SETTINGS.vocab_size)).logits[masked]
    return F.cross_entropy(logits, ids[masked], reduction="none")


def train(model: PreTrainedModel, *, masks: bool) -> None:
    """Train a model for the steps of `SETTINGS`."""
    corpus = select(itertools.islice(tiny.environment(), 6), bytes_per_source=400_000)
    stream = tiny.token_stream(corpus, PreTrainedTokenizerFast.from_pretrained(model_path()))
    batches = tiny.Batches(stream, SETTINGS.context, SETTINGS.batch, SETTINGS.seed)
    optimizers = tiny.build_optimizers(model.train(), SETTINGS)
    for step in range(SETTINGS.steps):
        ids = torch.from_numpy(batches[step])
        loss = losses(model, ids, torch.rand(ids.shape) < SHARE if masks else None).mean()
        loss.backward()
        tiny.update(model, optimizers, step, SETTINGS)
        if step % 20 == 0:
            print(step, round(loss.item(), 3), flush=True)


@torch.no_grad()
def scored(model: PreTrainedModel, label: str, *, masks: bool) -> Iterator[Record]:
    """Yield the loss of the same tokens of each held-out document, read with more and more context."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path())
    for name, text in itertools.islice(held_out_documents(), DOCUMENTS):
        tokens = torch.tensor(tokenizer(text)["input_ids"][:8192])
        for length in LENGTHS:
            start = (len(tokens) - length) // 2 if masks else len(tokens) - length
            ids, masked = tokens[None, start : start + length], None
            if masks:
                drawn = torch.rand(len(tokens), generator=torch.Generator().manual_seed(0)) < SHARE
                masked = drawn[None, start : start + length]
                middle = torch.arange(start, start + length) - (len(tokens) - TARGET) // 2
                inside = (middle >= 0) & (middle < TARGET)
                nats = losses(model, ids, masked)[inside[masked[0]]]
            else:
                nats = losses(model, ids, None)[-TARGET:]
            sums = float(nats.sum()), len(nats)
            yield Record(label, "tail", length, name, *sums, None, None, *sums)


def main(kind: str) -> None:
    """Train and measure a kind."""
    torch.manual_seed(SETTINGS.seed)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # far weights of ALiBi are such numbers, which are slow
    model, masks = build(kind), kind == "masked"
    requests = KINDS[kind]
    if own := next(iter(requests.values())):
        patch_model(model, own[0], **own[1])
    train(model, masks=masks)
    records: list[Record] = []
    for label, request in requests.items():
        if own:
            unpatch_model(model)
        if own := request:
            patch_model(model, own[0], **own[1])
        records += scored(model.eval(), label, masks=masks)
    short = [r for r in records if r.method == "as trained" and r.length == SETTINGS.context]
    cut = [dataclasses.replace(r, method=TRUNCATION, length=n) for r in short for n in LENGTHS]
    cells = summarize([*records, *cut], baseline=TRUNCATION)
    table = [
        {"method": c.method, "length": c.length, "perplexity": c.perplexity, "ratio": c.ratio, "ends": c.ratio_interval}
        for c in cells
    ]  # fmt: skip
    every = json.loads(SMALL_MODELS.read_text(encoding="utf-8")) if SMALL_MODELS.exists() else {}
    every[kind] = {
        "command": f"python -m scripts.measure_small_models {kind}",
        "settings": dataclasses.asdict(SETTINGS),
        "documents": len(short),
        "environment": {"python": platform.python_version(), "torch": torch.__version__},
        "cells": table,
    }
    write_atomically(SMALL_MODELS, to_json(every))
    print(to_json(table), end="")


if __name__ == "__main__":
    typer.run(main)
