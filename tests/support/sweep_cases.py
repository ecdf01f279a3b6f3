"""Tiny models and documents for the tests of sweep and search."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_posenc.evaluation.documents import Document, TokenizedDocument, tokenize
from hf_posenc.evaluation.options import SearchSettings
from hf_posenc.evaluation.tuning import Loss, ResultT, TailJob, TailSettings
from hf_posenc.evaluation.tuning.results import Trial
from hf_posenc.evaluation.tuning.search import SearchJob
from hf_posenc.evaluation.tuning.sweep import SweepJob, SweepResult
from tests.support import zoo
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

SETTINGS = TailSettings(64, 160)
ABOUT: dict[str, Any] = {
    "model": {"name": "tiny"},
    "source": {"kind": "test"},
    "environment": {},
    "command": "test",
}


def tiny() -> Any:
    """A random Llama of 64 trained positions."""
    return zoo.build("llama", vocab_size=VOCABULARY, num_hidden_layers=1)


@functools.cache
def texts(count: int) -> tuple[TokenizedDocument, ...]:
    """Documents of different lengths, all longer than the target."""
    words = byte_tokenizer()
    return tuple(tokenize(Document(f"d{n}", prose(170 + 13 * n, n)), words) for n in range(count))


def sweep_of(
    model: Any, count: int, candidates: Any, settings: TailSettings = SETTINGS
) -> SweepJob:
    """A sweep over so many documents, two of them in the first round."""
    given: dict[str, Any] = {"model": model, "settings": settings, "documents": texts(count)}
    return SweepJob(about=ABOUT, candidates=candidates, first_documents=2, **given)


def search_of(
    model: Any, count: int, own: SearchSettings, settings: TailSettings = SETTINGS
) -> SearchJob:
    """A search over so many documents."""
    return SearchJob(model=model, settings=settings, documents=texts(count), about=ABOUT, own=own)


def finished(job: TailJob[ResultT], folder: Path | None = None) -> ResultT:
    """The result of a job."""
    result = job.run(folder)
    assert result is not None
    return result


def reference(model: Any, document: TokenizedDocument, length: int, tail: int) -> float:
    """Nats of the last tokens of a document, from one plain forward over the tokens that end it, in float64."""
    ids = document.ids[-length:].unsqueeze(0)
    with torch.no_grad():
        logs = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
    targets = ids[0, length - tail :]
    return -float(logs[length - tail - 1 : -1].gather(1, targets[:, None]).sum())


def planted(
    losses: Mapping[str, Sequence[float]],
    short: Mapping[str, Sequence[float]] | None = None,
    *,
    first_documents: int = 2,
    **settings: Any,
) -> SweepResult:
    """A sweep whose mean losses are given: by method, one number per document; NaN stands for a failure.

    `none` is the first; names that begin with `control` are controls too.
    """
    made: dict[tuple[str, int, int], Loss] = {}
    for label, numbers in losses.items():
        near = (short or {}).get(label, [1.0] * len(numbers))
        for document, values in enumerate(zip(numbers, near, strict=True)):
            for length, value in zip((160, 64), values, strict=True):
                lost = Loss(math.nan, 0, "out of memory")
                made[label, length, document] = lost if math.isnan(value) else Loss(32 * value, 32)
    trials = [
        Trial(label, label, method, None, method is None or label.startswith("control"), None)
        for label, method in ((name, None if name == "none" else name) for name in losses)
    ]
    return SweepResult(
        about=ABOUT,
        settings=TailSettings(64, 160, **settings),
        trials=trials,
        documents=[{"name": f"d{index}"} for index in range(len(losses["none"]))],
        skipped=[],
        losses=made,
        first_documents=first_documents,
    )
