"""Cost of a training before it starts: memory and operations of a step, from the sizes of a model without weights.

- Weights, gradients, optimizer: counted, parameter by parameter, in their dtypes. AdamW has two states for each trained
  number. Under --bf16, float32 weights have a copy in bfloat16.
- Activations: a layer keeps `STATES` hidden sizes, its keys and values, and `WIDE` widths of its widest projection for
  each token, and two hidden sizes in float32 for its norms: what transformers' Llama keeps. Without gradient
  checkpointing every layer does. With it, each keeps its input alone, and one layer at a time keeps all. The backward
  of a layer holds half as much again.
- Logits: those of a chunk, in the model's dtype and in float32, and their gradients.
- Operations: a forward, once more for the gradients of the activations, once more for those of the weights where the
  decoder's are trained, once more with gradient checkpointing. Those of a forward are `scoring/estimate.py`'s.

The memory is 0.9 to 1.7 times what the tensors of a step take (tests/training/run/test_estimate.py counts them). Not
counted: workspaces of kernels, a CUDA context, fragmentation, a teacher, and layers that FSDP gathers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import TrainingArguments

from hf_posenc.evaluation.flags import duration
from hf_posenc.evaluation.scoring.estimate import (
    FLOAT,
    ModelShape,
    forward_flops,
    rate_of,
    score_matrix,
)
from hf_posenc.model.memory import free_memory
from hf_posenc.training.batches.blocks import Counts
from hf_posenc.training.names import Trained

STATES, WIDE = 8, 4
"""Tensors of the hidden size, and of the width of the widest projection, that a layer keeps for its backward."""
_NORMS = 2  # float32 copies of the hidden state
_MOMENTS = {"adafactor": 0, "sgd": 0, "lion": 1, "adagrad": 1, "rmsprop": 1}
"""States of an optimizer for each trained number, by a part of its name; AdamW's are 2."""
GIB = 2**30


@dataclass(frozen=True)
class Step:
    """Bytes at the peak of an optimizer step on one device, and its operations.

    `activations` are those that every layer keeps; `working` are those of one layer or of one chunk of logits.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    flops: float

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def step_cost(
    shape: ModelShape,
    parameters: Iterable[nn.Parameter],
    *,
    tokens: int,
    chunk: int,
    batch: int = 1,
    accumulation: int = 1,
    train: Trained = "full",
    mixed: bool = False,
    checkpointing: bool = False,
    optimizer: str = "adamw_torch",
    shards: int = 1,
) -> Step:
    """Return the cost of an optimizer step.

    Args:
        shape: The model's sizes, from `read_shape`, in the dtype of its weights, patched.
        parameters: All parameters; `requires_grad` marks the trained ones.
        tokens: Tokens of an example.
        chunk: Tokens whose logits exist at a time.
        batch: Examples of a forward.
        accumulation: Forwards of a step.
        train: The parameters that are trained.
        mixed: Computes in bfloat16.
        checkpointing: Gradient checkpointing.
        optimizer: Its name, as `--optim` has it.
        shards: Processes that share weights, gradients and states.
    """
    moments = next((n for name, n in _MOMENTS.items() if name in optimizer), 2)
    weights = gradients = states = 0
    for each in parameters:
        weights += each.numel() * (each.itemsize + 2 * (mixed and each.itemsize == FLOAT))
        if each.requires_grad:
            gradients += each.numel() * each.itemsize
            states += moments * each.numel() * (1 if "8bit" in optimizer else each.itemsize)
    residual, size, rows = (
        shape.dtype.itemsize,
        2 if mixed else shape.dtype.itemsize,
        batch * tokens,
    )
    count, cached = len(shape.attentions), max((a.cached for a in shape.attentions), default=0)
    kept = (
        size * (STATES * shape.hidden + WIDE * shape.width + cached) + FLOAT * _NORMS * shape.hidden
    )
    layer = rows * kept + batch * score_matrix(shape, tokens, tokens, size)
    logits = min(chunk, rows) * shape.vocabulary * 2 * (size + FLOAT)
    passes = 2 + (train == "full") + checkpointing
    head = 2.0 * shape.head * rows  # whose forward the loss in chunks repeats
    return Step(
        weights=weights // shards,
        gradients=gradients // shards,
        optimizer=states // shards,
        activations=count * (rows * shape.hidden * residual if checkpointing else layer),
        working=max(layer // 2 + (layer if checkpointing else 0), logits),
        flops=accumulation * (passes * batch * forward_flops(shape, tokens, tokens) + head),
    )


def lines(
    step: Step, counts: Counts, block: int, arguments: TrainingArguments, device: torch.device
) -> Iterator[str]:
    """Yield the cost of a run in words: texts, steps, memory and time, and what the estimates rest on."""
    examples = arguments.train_batch_size * arguments.gradient_accumulation_steps
    examples *= arguments.world_size
    steps, tokens = arguments.max_steps, examples * block
    if steps < 0:
        steps = math.ceil(arguments.num_train_epochs * (counts.blocks // examples))
    yield f"texts:  {counts.tokens + counts.unused:,} tokens. {counts.line()}"
    epochs = f", {steps * examples / counts.blocks:.2g} epochs" if counts.blocks else ""
    yield (
        f"steps:  {steps:,} of {examples:,} blocks, {tokens:,} tokens: {steps * tokens:,} tokens in all{epochs}"
    )
    parts = (f"{name} {value / GIB:.2f}" for name, value in vars(step).items() if name != "flops")
    free = free_memory(device)
    have = "" if free is None else f"; {free / GIB:,.1f} GiB are free on {device}"
    yield f"memory: about {step.total / GIB:.2f} GiB for each process ({', '.join(parts)}){have}"
    rate, source = rate_of(device)
    takes = "unknown"
    if rate is not None:
        each = step.flops / rate
        takes = f"about {each:.2g} s a step, {duration(steps * each)} in all, without scores"
    yield f"time:   {takes}: {step.flops:.3g} operations a step, {source}"
    yield "Memory is by a formula, 0.9 to 1.7 times the tensors of a step. Nothing was trained or written."
