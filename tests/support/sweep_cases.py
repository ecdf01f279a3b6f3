"""Tiny models and documents for the tests of sweep and search."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hf_posenc.evaluation.documents import Document, TokenizedDocument, tokenize
from hf_posenc.evaluation.grid import MethodEntry
from hf_posenc.evaluation.measuring.statistics import Failure, Record
from hf_posenc.evaluation.options import SearchSettings
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import PerplexityRun
from hf_posenc.evaluation.tuning.search import SearchJob
from hf_posenc.evaluation.tuning.sweep import SweepJob, SweepResult
from tests.support.perplexities import reference
from tests.support.tiny_text import byte_tokenizer, prose

ResultT = TypeVar("ResultT", covariant=True)
SETTINGS = Settings((64, 160), ("tail",))
ABOUT: dict[str, Any] = {"model": {"name": "tiny"}, "original": 64, "source": {"kind": "test"}}
ABOUT |= {"skipped": (), "command": "test"}


@functools.cache
def texts(count: int) -> tuple[TokenizedDocument, ...]:
    """Documents of different lengths, all longer than the target."""
    words = byte_tokenizer()
    return tuple(tokenize(Document(f"d{n}", prose(170 + 13 * n, n)), words) for n in range(count))


def sweep_of(model: Any, count: int, candidates: Any, settings: Settings = SETTINGS) -> SweepJob:
    """A sweep over so many documents, two of them in the first round."""
    whole = PerplexityRun(model, texts(count), (), settings, metadata=ABOUT)
    return SweepJob(whole=whole, candidates=candidates, first_documents=2)


def search_of(model: Any, count: int, own: SearchSettings, bound: float | None = None) -> SearchJob:
    whole = PerplexityRun(model, texts(count), (), SETTINGS, metadata=ABOUT)
    return SearchJob(whole=whole, own=own, max_regression=bound)


class Job(Protocol[ResultT]):
    """A measurement that ends with a result."""

    def run(self, folder: Path | None = None) -> ResultT | None: ...


def finished(job: Job[ResultT], folder: Path | None = None) -> ResultT:
    result = job.run(folder)
    assert result is not None
    return result


def tail_nats(model: Any, document: TokenizedDocument, length: int = 160) -> float:
    """Nats of the last 32 tokens of a document, from one plain forward over the tokens that end it, in float64."""
    return reference(model, document, "tail", length, 32)[0]


def loss(method: str, length: int, document: str, nats: float, tokens: int = 1) -> Record:
    return Record(method, "tail", length, document, nats, tokens, None, None, nats, float(tokens))


def entries(labels: Iterable[str]) -> list[MethodEntry]:
    return [MethodEntry(label, label, label, (), {}, None, False, None) for label in labels]


def planted(
    losses: Mapping[str, Sequence[float]],
    short: Mapping[str, Sequence[float]] | None = None,
    *,
    first_documents: int = 2,
    bound: float | None = None,
) -> SweepResult:
    """A sweep whose mean losses are given: by method, one number per document; NaN stands for a failure.

    `none` is the first; names that begin with `control` are controls too.
    """
    records, failures = [], []
    for label, numbers in losses.items():
        near = (short or {}).get(label, [1.0] * len(numbers))
        for index, values in enumerate(zip(numbers, near, strict=True)):
            for length, value in zip((160, 64), values, strict=True):
                if math.isnan(value):
                    failures.append(Failure(label, "tail", length, "out of memory"))
                else:
                    records.append(loss(label, length, f"d{index}", 32 * value, 32))
    return SweepResult(
        **ABOUT,
        settings=SETTINGS,
        candidates=entries(losses),
        controls=[label for label in losses if label == "none" or label.startswith("control")],
        documents=[{"name": f"d{index}"} for index in range(len(losses["none"]))],
        records=records,
        failures=failures,
        race={"max_regression": bound, "first_documents": first_documents},
    )
