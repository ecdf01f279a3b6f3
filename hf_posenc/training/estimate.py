"""Cost of a training before it starts: memory and operations of a step, from the sizes of a model without weights.

- Weights, gradients, optimizer: counted, parameter by parameter, in their dtypes. AdamW has two states for each trained
  number. Under --bf16, float32 weights have a copy in bfloat16.
- Activations: a layer keeps `STATES` hidden sizes, its keys and values, and `WIDE` widths of its widest projection for
  each token, and two hidden sizes in float32 for its norms: what transformers' Llama keeps. Without gradient
  checkpointing every layer does. With it, each keeps its input alone, and one layer at a time keeps all. The backward
  of a layer holds half as much again.
- Logits: those of a chunk, in the model's dtype and in float32, and their gradients.
- Operations: a forward, as in `scoring/estimate.py`; in the backward two for attention, and for linear maps one for the
  gradients of the activations and one for those of the weights where they are trained; one more of the
  decoder with gradient checkpointing, and of the head by the loss in chunks.

The memory is 0.85 to 2.1 times what the tensors of a step take (tests/training/test_finetune_estimate.py counts them).
Not counted: workspaces of kernels, a CUDA context, fragmentation, a teacher, and layers that FSDP gathers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import TrainingArguments

from hf_posenc.evaluation.options import duration
from hf_posenc.evaluation.scoring.estimate import (
    FLOAT,
    ModelShape,
    forward_flops,
    rate_of,
    read_shape,
    score_matrix,
)
from hf_posenc.model.weights import free_memory
from hf_posenc.training.blocks import Counts
from hf_posenc.training.chunked_loss import default_chunk
from hf_posenc.training.options import PatchArguments, Trained
from hf_posenc.training.parameters import choose_parameters
from hf_posenc.training.processes import will_be_sharded

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
    """Return the cost of an optimizer step on a model of this shape, in the dtype of its weights.

    `parameters` are all of them, `tokens` those of an example, `chunk` those whose logits exist at a time; `shards` are
    the processes that share weights, gradients and states.
    """
    moments = next((n for name, n in _MOMENTS.items() if name in optimizer), 2)
    weights = gradients = states = 0
    for each in parameters:
        weights += each.numel() * (each.itemsize + 2 * (mixed and each.itemsize == FLOAT))
        if each.requires_grad:
            gradients += each.numel() * each.itemsize
            states += moments * each.numel() * (1 if "8bit" in optimizer else each.itemsize)
    size, rows = 2 if mixed else shape.dtype.itemsize, batch * tokens
    cached = max((each.cached for each in shape.attentions), default=0)
    kept = size * (STATES * shape.hidden + WIDE * shape.width + cached)
    kept += FLOAT * _NORMS * shape.hidden
    layer = rows * kept + batch * score_matrix(shape, tokens, tokens, size)
    logits = min(chunk, rows) * shape.vocabulary * 2 * (size + FLOAT)
    maps, head = 2.0 * shape.met * rows, 2.0 * shape.head * rows
    pairs = batch * forward_flops(shape, tokens, tokens) - maps - head
    full, passes = train == "full", 2 + checkpointing
    inputs = rows * shape.hidden * shape.dtype.itemsize
    return Step(
        weights=weights // shards,
        gradients=gradients // shards,
        optimizer=states // shards,
        activations=len(shape.attentions) * (inputs if checkpointing else layer),
        working=max(layer // 2 + (layer if checkpointing else 0), logits),
        flops=accumulation * ((passes + full) * maps + (passes + 1) * pairs + (3 + full) * head),
    )


def print_cost(
    model: nn.Module,
    block: int,
    counts: Counts,
    choice: PatchArguments,
    arguments: TrainingArguments,
) -> None:
    """Print steps, memory and time of a run, and what the estimates rest on."""
    shape, chunk = read_shape(model), choice.loss_chunk
    batch, forwards = arguments.train_batch_size, arguments.gradient_accumulation_steps
    checkpointing = getattr(arguments, "activation_checkpointing", arguments.gradient_checkpointing)
    step = step_cost(
        shape,
        [*choose_parameters(model, choice.train, lora_rank=choice.lora_rank).parameters()],
        tokens=block,
        chunk=default_chunk(model) if chunk is None else chunk or batch * block,
        batch=batch,
        accumulation=forwards,
        train=choice.train,
        mixed=arguments.bf16 or arguments.fp16,
        checkpointing=bool(checkpointing),
        optimizer=str(getattr(arguments.optim, "value", arguments.optim)),
        shards=arguments.world_size if will_be_sharded(arguments) else 1,
    )
    examples, steps = batch * forwards * arguments.world_size, arguments.max_steps
    # As the Trainer counts: the last step of an epoch may have fewer batches than the others.
    batches = counts.blocks // (examples // forwards)
    of_epoch = max(1, math.ceil(batches / forwards))
    if steps < 0:
        steps = math.ceil(arguments.num_train_epochs * of_epoch)
    epochs, rest = divmod(steps, of_epoch)
    read = (epochs * batches + min(rest * forwards, batches)) * (examples // forwards)
    rate, source = rate_of(arguments.device)
    each = None if rate is None else step.flops / rate
    time = "unknown" if each is None else f"{each:.2g} s a step, {duration(steps * each)} in all"
    parts = (f"{name} {value / GIB:.2g}" for name, value in vars(step).items() if name != "flops")
    free = free_memory(arguments.device)
    have = "" if free is None else f"; {free / GIB:,.1f} GiB are free on {arguments.device}"
    blocks = f"{examples:,} block{'s' * (examples != 1)}"
    if arguments.process_index == 0:
        print(f"""\
texts:  {counts.tokens + counts.unused:,} tokens, {read / counts.blocks:,.2f} epochs
steps:  {steps:,} of {examples * block:,} tokens ({blocks}): {read * block:,} tokens
memory: about {step.total / GIB:.3g} GiB for each process ({", ".join(parts)}){have}
time:   about {time}, without scores: {step.flops:.3g} operations a step, {source}
The memory is by a formula, 0.85 to 2.1 times the tensors of a step. Nothing was trained or written.""")
