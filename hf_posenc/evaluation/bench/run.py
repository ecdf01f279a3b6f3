"""Benchmark of methods on one model: perplexity, retrieval and the speed of the prefill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import perplexity as measurement
from hf_posenc.evaluation.bench.result import BenchResult
from hf_posenc.evaluation.bench.suites import Suite, get_suite
from hf_posenc.evaluation.device.speed import SpeedRun, window_of
from hf_posenc.evaluation.documents import Entry
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.flags import output_folder, with_fields
from hf_posenc.evaluation.measuring.candidates import (
    original_length,
    parse_candidates,
    within_reach,
)
from hf_posenc.evaluation.measuring.execute import (
    Measurement,
    Progress,
    collected,
    execute,
    silent,
    wait_for_all,
    write_timings,
)
from hf_posenc.evaluation.measuring.store import ALONE, Records, Shard
from hf_posenc.evaluation.options import (
    BenchOptions,
    PerplexityOptions,
    ProtocolOptions,
)
from hf_posenc.evaluation.retrieval.run import RetrievalRun
from hf_posenc.evaluation.retrieval.tasks import RetrievalSettings
from hf_posenc.model.unwrapping import unwrap

MOST_ROUNDS = 1000


def suite_lengths(suite: Suite, original: int | None, target: int | None = None) -> tuple[int, ...]:
    """Return the lengths of a suite for a model: doublings of the trained length, the target last."""
    if original is None:
        raise PosencError("The model's config names no context length: give --lengths.")
    if target is not None and target < original:
        raise PosencError(
            f"--target-length {target}: the model was trained at {original} tokens already. Give a longer one, or "
            "--lengths to measure short texts."
        )
    last = original * suite.reach if target is None else target
    doublings = [original]
    while doublings[-1] * 2 < last:
        doublings.append(doublings[-1] * 2)
    every = [length for length in doublings if length < last] + [last]
    count = len(every) if suite.lengths is None else min(suite.lengths, len(every))
    step = (len(every) - 1) / max(1, count - 1)
    return tuple(every[len(every) - 1 - round(index * step)] for index in reversed(range(count)))


@dataclass
class BenchJob:
    """Benchmark whose model, documents and prompts are ready.

    Processes share `perplexity` and, if a task has prompts of these lengths, `retrieval`; one of them times the
    prefill. `about` are the other fields of the result, `missing` the items that other processes have not stored yet.
    """

    perplexity: measurement.PerplexityRun
    shared: Mapping[str, Measurement[Any, Any]]
    speed: SpeedRun | None
    about: Mapping[str, Any]
    missing: int = 0

    @property
    def total(self) -> int:
        """Number of items that are shared."""
        return sum(run.total for run in self.shared.values())

    def run(
        self,
        folder: Path | None = None,
        shard: Shard = ALONE,
        progress: Progress = silent,
        waiting: Callable[[int], None] = silent,
    ) -> BenchResult | None:
        """Measure this process's share of what is missing, as `Measurement.run`; the last process times the prefill."""
        with contextlib.ExitStack() as stack:

            def opened(run: Measurement[Any, Any]) -> tuple[Measurement[Any, Any], Records]:
                if folder is None:
                    return run, Records()
                return run, stack.enter_context(run.open(folder, shard))

            parts = {name: opened(run) for name, run in self.shared.items()}
            speed = None if self.speed is None else opened(self.speed)
            for name, part in parts.items():
                execute(*part, shard, _named(name, progress))
            self.missing = sum(wait_for_all(*part, shard, waiting) for part in parts.values())
            if self.missing or (shard.launched and shard.index):
                return None
            if speed is not None:
                execute(*speed, progress=_named("speed", progress))
                parts["speed"] = speed
            if folder is not None:
                for name in self.shared:
                    suffix = "" if name == "perplexity" else f"_{name}"
                    write_timings(*parts[name], folder / f"timings{suffix}.json")
            results: dict[str, Any] = {name: collected(*part) for name, part in parts.items()}
        return BenchResult(**results, **self.about)


def _named(part: str, progress: Progress) -> Progress:
    return lambda label, done, total: progress(f"{part}, {label}" if label else part, done, total)


def bench(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Entry] | None = None,
    options: BenchOptions | None = None,
    *,
    output: Path | str | None = None,
    progress: Progress = silent,
    **fields: Any,
) -> BenchResult:
    """Measure methods against each other: perplexity, retrieval, speed and memory.

    Each method is patched in and undone, so the model is unchanged at the end.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        documents: Texts, or the entries of a reader of `hf_posenc.evaluation.documents`; by default the held-out
            modules of the standard library.
        options: The suite, and whatever differs from it.
        output: Folder of the records: an interrupted call, made again, resumes. `BenchResult.write` writes tables and
            figures.
        progress: Called after every forward with the part and the method, tokens done and tokens in all of this part.
        **fields: Fields of `BenchOptions` that replace those of `options`, such as `methods` or `suite`.

    Returns:
        The results of the three parts, with a common table.

    Raises:
        PosencError: Options exclude each other, a published table is of another protocol, or no document can be used.
    """
    folder = output_folder(output, progress)
    options = with_fields(BenchOptions, options, fields)
    get_suite(options.suite)
    unwrap(model)  # raises for what is no model
    source = Source() if documents is None else Source.of(documents)
    job = prepare(model, tokenizer, source, options)
    result = job.run(folder, progress=progress)
    assert result is not None
    return result


def prepare(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: BenchOptions,
    *,
    name: str | None = None,
    command: str | None = None,
) -> BenchJob:
    """Check the methods against the model, read the documents and lay out the prompts."""
    suite = get_suite(options.suite).replaced(options)
    lengths, target = options.lengths, options.target_length
    if not lengths:
        candidates = [candidate.checked(model) for candidate in parse_candidates(suite.methods)]
        lengths = suite_lengths(suite, original_length(model, candidates), target)
        lengths = within_reach(model, candidates, lengths, given=target is not None)
    shared = {field.name: getattr(options, field.name) for field in fields(ProtocolOptions)}
    shared |= {"limit": suite.documents, "methods": suite.methods, "lengths": lengths}
    run = measurement.prepare(
        model, tokenizer, source, PerplexityOptions(**shared), name=name, command=command
    )
    remarks, settings = [], run.settings
    if run.read < suite.documents:
        remarks.append(f"{run.read} documents are long enough; {suite.documents} were requested.")
    metadata = {name: run.metadata[name] for name in ("model", "original", "command")}
    parts: dict[str, Measurement[Any, Any]] = {"perplexity": run}
    if suite.tasks:
        prompts = RetrievalSettings(
            lengths=settings.lengths,
            tasks=suite.tasks,
            depths=suite.depths,
            samples=suite.samples,
            seed=options.seed,
            chunk=settings.chunk,
        )
        special, noise = run.special.tolist(), {**metadata, "haystack": {"kind": "noise"}}
        try:
            parts["retrieval"] = RetrievalRun(
                model, tokenizer, run.candidates, prompts, special=special, metadata=noise
            )
        except PosencError as error:
            remarks.append(f"No retrieval: {error}")
    speed = None
    if suite.rounds > MOST_ROUNDS:
        raise PosencError(f"rounds is at most {MOST_ROUNDS:,}, not {suite.rounds:,}.")
    if suite.rounds:
        speed = SpeedRun(
            model,
            window_of(run.documents, settings.lengths[-1], run.special),
            run.candidates,
            rounds=suite.rounds,
            chunk=settings.chunk,
            prefill=settings.prefill,
            metadata=metadata,
        )
    compare = tuple(options.compare)
    about = {"suite": options.suite, "compare": compare, "remarks": tuple(remarks)}
    return BenchJob(run, parts, speed, about)
