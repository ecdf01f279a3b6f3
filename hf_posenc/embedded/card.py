"""The model card of the embedded model: every number in it comes from the training log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["model_card"]

_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: code
tags: [llama, rope, long-context, positional-encoding]
---

# A tiny Llama that reads Python, for measuring positional encodings

A Llama of {parameters:,} parameters, trained from scratch with ordinary RoPE (`rope_theta` {theta:g})
at a context of {context} tokens. It is the default model of `hf-posenc`: small enough to ship in the
package and to run on two CPU cores, and trained well enough that its perplexity shows what happens past
the trained length.

- Shape: {layers} layers, hidden {hidden}, {heads} heads of {head_dim}, {kv_heads} key-value heads, MLP
  {mlp}, tied embeddings.
- Tokenizer: byte-level BPE of {vocab:,} entries, trained on the same corpus. `{special}` (id 0) separates
  documents and is bos and eos; none is added when encoding.
- Weights: bfloat16 safetensors, {megabytes:.1f} MB.

## Intended use

Comparing ways to extend a context: load it, patch it, measure it. It is no code model: it completes nothing
usefully, and what it writes must not be used as code. It knows Python source, and of natural language what
stands in docstrings and comments.

## Held-out perplexity, nothing patched

Measured by the training script with the weights as saved, in float32: the last {target} tokens of each of
{windows} windows of the held-out modules, {scored:,} tokens in all, the same ones at every length.

| tokens given | perplexity | bits per byte |
|---|---|---|
{perplexity}

At {longest:,} tokens the perplexity is {ratio:.1f} times that at {context}, the trained length.

## Data

Python source files of the environment it was trained in: {files:,} files, {corpus_bytes:.1f} MB,
{corpus_tokens:,} tokens. They are the standard library whole, and installed packages with a permissive
licence in their metadata, up to {per_source:g} MB of each. The rules are in `hf_posenc/embedded/corpus.py`.

| left out because | files |
|---|---|
{left_out}

Held out, as evaluation documents: {held_out}.

**Licences.** Only weights ship, no text of the corpus. The sources are under the licences that their
metadata give:

| source | version | licence | files | MB |
|---|---|---|---|---|
{sources}

## Training

{steps:,} steps of {batch} sequences of {context} tokens: {tokens:,} tokens, {epochs:.2f} epochs,
{minutes:.0f} minutes on {device}. Muon for the matrices (peak rate {muon_lr:g}), AdamW for the embedding and
the norms (peak rate {adamw_lr:g}), linear warm-up over {warmup} steps, then linearly to zero; bfloat16
autocast; seed {seed}. {versions}. All settings, the loss curve and the corpus are in `training_log.json`.
The held-out perplexity on the way is that of other windows than above.

| step | training loss | held-out perplexity at {context} |
|---|---|---|
{curve}

Made by `python scripts/train_tiny_llama.py --preset {preset}{flags} --output FOLDER`. The same environment,
settings, seed and processor give the same model; another environment has another corpus.
"""


def model_card(log: Mapping[str, Any]) -> str:
    """The text of README.md.

    Args:
        log: what `scripts/train_tiny_llama.py` writes to `training_log.json`.
    """
    settings, corpus, held_out = log["settings"], log["corpus"], log["held_out"]
    cores = f"{log['threads']} CPU thread{'s' * (log['threads'] > 1)}"
    measured = [row for row in log["curve"] if "held_out_perplexity" in row]
    return _CARD.format(
        parameters=log["parameters"],
        theta=settings["rope_theta"],
        context=settings["context"],
        layers=settings["layers"],
        hidden=settings["hidden"],
        heads=settings["heads"],
        head_dim=settings["hidden"] // settings["heads"],
        kv_heads=settings["kv_heads"],
        mlp=settings["mlp"],
        vocab=settings["vocab_size"],
        special=log["special_token"],
        megabytes=log["weight_bytes"] / 1e6,
        target=held_out["target"],
        windows=held_out["windows"],
        scored=held_out["target"] * held_out["windows"],
        perplexity=_table(
            (f"{row['length']:,}", f"{row['perplexity']:.2f}", f"{row['bits_per_byte']:.3f}")
            for row in held_out["results"]
        ),
        longest=held_out["results"][-1]["length"],
        ratio=held_out["results"][-1]["perplexity"] / held_out["results"][0]["perplexity"],
        files=corpus["files"],
        corpus_bytes=corpus["bytes"] / 1e6,
        corpus_tokens=corpus["tokens"],
        per_source=settings["bytes_per_source"] / 1e6,
        left_out=_table((reason, f"{count:,}") for reason, count in corpus["left_out"].items()),
        held_out=", ".join(f"`{name}`" for name in corpus["held_out"]),
        sources=_table(
            (row["name"], row["version"], row["licence"], row["files"], f"{row['bytes'] / 1e6:.2f}")
            for row in corpus["sources"]
        ),
        steps=settings["steps"],
        batch=settings["batch"],
        tokens=log["tokens"],
        epochs=log["tokens"] / corpus["tokens"],
        minutes=log["seconds"] / 60,
        device=cores if log["device"] == "cpu" else "one GPU",
        muon_lr=settings["muon_lr"],
        adamw_lr=settings["adamw_lr"],
        warmup=settings["warmup"],
        seed=settings["seed"],
        versions=", ".join(f"{name} {version}" for name, version in log["versions"].items()),
        curve=_table(
            (f"{row['step']:,}", f"{row['loss']:.3f}", f"{row['held_out_perplexity']:.2f}")
            for row in measured
        ),
        preset=log["preset"],
        flags=log["flags"],
    )


def _table(rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
