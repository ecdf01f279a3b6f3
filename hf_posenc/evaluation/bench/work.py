"""A benchmark as three pieces of work on one model: perplexity, retrieval, speed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.bench.result import BenchResult
from hf_posenc.evaluation.bench.speed import SpeedRun, window_of
from hf_posenc.evaluation.bench.suites import Suite
from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.documents import Skipped, TokenizedDocument
from hf_posenc.evaluation.perplexity import Progress, Run
from hf_posenc.evaluation.processes import Shard
from hf_posenc.evaluation.protocols import Settings
from hf_posenc.evaluation.retrieval import RetrievalRun, RetrievalSettings, measuring
from hf_posenc.evaluation.runs import joined, open_store, result_of, wait_for_all, write_timings
from hf_posenc.evaluation.store import ALONE, Memory, Records, missing

HAYSTACK = {"kind": "noise"}


@dataclass(frozen=True)
class Inputs:
    """What a benchmark is made from.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        candidates: The methods, `checked`, the baseline first.
        settings: Of the perplexities; their lengths are those of the prompts too.
        suite: How much of the rest is measured, as it is to be run.
        special: Token ids in front of every window and prompt.
        documents: As they were read.
        skipped: Those that cannot be used.
        described: What results store of the model (`describe_model`).
        original: The trained length.
        source: Where the documents came from.
        suite_name: The suite that this comes from.
        compare: Published tables to show beside the result.
        command: What gives this result again.
    """

    model: nn.Module
    tokenizer: Any
    candidates: Sequence[Candidate]
    settings: Settings
    suite: Suite
    special: Sequence[int]
    documents: Sequence[TokenizedDocument]
    skipped: Sequence[Skipped]
    described: dict[str, Any]
    original: int | None
    source: dict[str, Any]
    suite_name: str
    compare: Sequence[str] = ()
    command: str | None = None


class Bench:
    """The pieces of work of a benchmark.

    Args:
        inputs: What it is made from.

    Attributes:
        perplexity: Perplexities by protocol and length.
        retrieval: What is found in prompts of these lengths; `None` without tasks, or where no task has such prompts.
        speed: The timed prefill; `None` without rounds.
        missing: Once `measure` has returned `None`: parts of perplexity and retrieval that other processes owe.
        remarks: What a reader must know of what is left out.

    Raises:
        PosencError: The model is not a causal language model.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, settings, suite = inputs, inputs.settings, inputs.suite
        self.remarks: list[str] = []
        self.missing = 0
        used = joined(inputs.documents) if settings.streams else inputs.documents
        self.perplexity = Run(
            inputs.model, used, inputs.candidates, settings, special=inputs.special
        )
        if len(inputs.documents) < suite.documents:
            self.remarks.append(
                f"{len(inputs.documents)} documents are long enough; {suite.documents} were asked for."
            )
        self.retrieval = self._prompts() if suite.tasks else None
        self.speed: SpeedRun | None = None
        if suite.rounds:
            special = self.perplexity.special
            self.speed = SpeedRun(
                inputs.model,
                window_of(used, settings.lengths[-1], special),
                inputs.candidates,
                rounds=suite.rounds,
                chunk=settings.chunk,
                prefill=settings.prefill,
            )

    def measure(
        self,
        folder: Path | None,
        shard: Shard = ALONE,
        progress: Progress = lambda label, done, total: None,
        waiting: Callable[[int], None] = lambda count: None,
    ) -> BenchResult | None:
        """Measures what is missing of this process's share; speed is timed by the process that sees the whole.

        Args:
            folder: Where records and timings go; `None`: nowhere.
            shard: This process's place among those of the run.
            progress: Called after every forward.
            waiting: Called once, with the number of missing parts, when a launched process has waited long.

        Returns:
            The result; `None` while other processes are at work, or where another one has it.

        Raises:
            PosencError: The folder cannot be written to, or another process writes the same share.
        """
        with contextlib.ExitStack() as stack:
            stores = [stack.enter_context(store) for store in self._stores(folder, shard)]
            perplexity, retrieval, speed = stores
            self.perplexity.measure(perplexity, shard, _named("perplexity", progress))
            if self.retrieval is not None:
                self.retrieval.measure(retrieval, shard, _named("retrieval", progress))
            if not self._all_there(stores, shard, waiting) or (shard.launched and shard.index):
                self.missing = sum(
                    len(missing(store, (item.key for item in run.items)))
                    for run, store in zip((self.perplexity, self.retrieval), stores, strict=False)
                    if run is not None
                )
                return None
            if self.speed is not None:
                self.speed.measure(speed, _named("speed", progress))
            if folder is not None:
                write_timings(self.perplexity, perplexity, folder / "timings.json")
                if self.retrieval is not None:
                    name = "timings_retrieval.json"
                    measuring.write_timings(self.retrieval, retrieval, folder / name)
            return self._result(perplexity, retrieval, speed)

    def _prompts(self) -> RetrievalRun | None:
        inputs, suite = self.inputs, self.inputs.suite
        settings = RetrievalSettings(
            lengths=inputs.settings.lengths,
            tasks=suite.tasks,
            depths=suite.depths,
            samples=suite.samples,
            seed=inputs.settings.seed,
            chunk=inputs.settings.chunk,
        )
        try:
            return RetrievalRun(
                inputs.model,
                inputs.tokenizer,
                inputs.candidates,
                settings,
                special=inputs.special,
            )
        except PosencError as error:
            self.remarks.append(f"No retrieval: {error}")
            return None

    def _stores(self, folder: Path | None, shard: Shard) -> list[Any]:
        """The records of perplexity, retrieval and speed, to be entered."""
        if folder is None:
            return [contextlib.nullcontext(Memory()) for _ in range(3)]
        described, known = self.inputs.described, self._known_of_retrieval()
        stores: list[Any] = [open_store(folder, self.perplexity, described, shard)]
        nothing = contextlib.nullcontext(Memory())
        stores.append(
            measuring.open_store(folder, self.retrieval, known, shard)
            if self.retrieval is not None
            else nothing
        )
        stores.append(
            self.speed.open_store(folder, described, shard) if self.speed is not None else nothing
        )
        return stores

    def _known_of_retrieval(self) -> dict[str, Any]:
        return {"model": self.inputs.described, "haystack": HAYSTACK}

    def _all_there(
        self, stores: Sequence[Any], shard: Shard, waiting: Callable[[int], None]
    ) -> bool:
        runs: tuple[Any, ...] = (self.perplexity, self.retrieval)
        return all(
            run is None or isinstance(store, Memory) or wait_for_all(run, store, shard, waiting)
            for run, store in zip(runs, stores, strict=False)
        )

    def _result(self, perplexity: Records, retrieval: Records, speed: Records) -> BenchResult:
        inputs = self.inputs
        known = {"original": inputs.original, "command": inputs.command}
        measured = result_of(
            self.perplexity,
            perplexity,
            model=inputs.described,
            source=inputs.source,
            skipped=inputs.skipped,
            **known,
        )
        assert measured is not None
        found = None
        if self.retrieval is not None:
            found = measuring.result_of(
                self.retrieval, retrieval, **self._known_of_retrieval(), **known
            )
        return BenchResult(
            perplexity=measured,
            retrieval=found,
            speed=None if self.speed is None else self.speed.collect(speed),
            suite=inputs.suite_name,
            compare=tuple(inputs.compare),
            remarks=tuple(self.remarks),
        )


def _named(part: str, progress: Progress) -> Progress:
    return lambda label, done, total: progress(f"{part}, {label}", done, total)
