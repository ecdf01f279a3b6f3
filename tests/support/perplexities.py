"""Perplexities of documents in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.measuring.candidates import parse_candidates
from hf_posenc.evaluation.measuring.execute import Progress, silent
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.perplexity.run import PerplexityRun


def measured(
    model: Any, documents: Sequence[TokenizedDocument], specs: Sequence[str], settings: Settings, *,
    special: Sequence[int] = (), progress: Progress = silent,
) -> PerplexityResult:  # fmt: skip
    candidates = [candidate.checked(model) for candidate in parse_candidates(specs)]
    run = PerplexityRun(model, documents, candidates, settings, special=special)
    result = run.run(progress=progress)
    assert result is not None
    return result


def shared_prefix(result: PerplexityResult) -> dict[str, bool]:
    """For each method, whether its prefix curve came from one forward per document."""
    return {entry.label: entry.prefix_from_one_forward for entry in result.candidates}


def reference(
    model: Any,
    document: TokenizedDocument,
    protocol: str,
    length: int,
    tail: int,
    special: Any = (),
) -> tuple[float, int]:
    """Total nats and tokens of one document, from one forward of exactly this window, in float64."""
    room = length - len(special)
    body = document.ids[:room] if protocol == "prefix" else document.ids[-room:]
    window = torch.tensor([[*special, *body.tolist()]])
    with torch.no_grad():
        logs = model(input_ids=window, use_cache=False).logits[0].double().log_softmax(-1)
    first = max(1, len(special)) if protocol == "prefix" else length - tail
    losses = [-float(logs[t - 1, window[0, t]]) for t in range(first, length)]
    return math.fsum(losses), len(losses)
