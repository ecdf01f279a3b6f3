"""Whether a model writes the answer: greedy generation, and RULER's way to look at the text."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from hf_posenc.evaluation.head_replay import input_device
from hf_posenc.evaluation.retrieval.prompts import Prompt
from hf_posenc.evaluation.retrieval.tasks import Task

_CONTROL = re.compile(r"[\x00-\x1f]")


@torch.inference_mode()
def generate(model: nn.Module, tokenizer: Any, prompt: Prompt, new_tokens: int) -> str:
    """What the model writes behind a prompt, always the most probable token, with its cache.

    Control characters become line ends, as in `postprocess_pred` of RULER's `scripts/eval/evaluate.py`.

    Args:
        model: A causal language model that generates.
        tokenizer: Its tokenizer.
        prompt: The prompt.
        new_tokens: At most so many tokens.
    """
    ids = prompt.ids.unsqueeze(0).to(input_device(model))
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    live: Any = model
    made = live.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=filler,  # a batch of one has none; unset, transformers warns
    )
    text: str = tokenizer.decode(made[0, len(prompt.ids) :], skip_special_tokens=True)
    return _CONTROL.sub("\n", text.strip()).strip()


def judge(task: Task, prompt: Prompt, text: str) -> dict[str, Any]:
    """What a generated text is worth, as a record stores it."""
    score = task.hit(text, prompt.references)
    return {"correct": score == 1.0, "score": score, "text": text}
