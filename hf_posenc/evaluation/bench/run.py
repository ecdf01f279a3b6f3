"""A benchmark as three pieces of work on one model: perplexity, retrieval, speed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.bench.result import BenchResult
from hf_posenc.evaluation.bench.speed import SpeedRun, window_of
from hf_posenc.evaluation.documents import Entry, Skipped, TokenizedDocument
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.candidates import Candidate, original_length, parse_candidates
from hf_posenc.evaluation.measuring.execute import (
    Measurement,
    Progress,
    collected,
    execute,
    wait_for_all,
    write_timings,
)
from hf_posenc.evaluation.measuring.identity import describe_model, name_of
from hf_posenc.evaluation.measuring.store import ALONE, Memory, Records, Shard, missing
from hf_posenc.evaluation.options import BenchOptions, with_fields
from hf_posenc.evaluation.perplexity.measurement import PerplexityRun
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.runs import (
    joined,
    open_store,
    result_of,
    settings_of,
    special_tokens,
)
from hf_posenc.evaluation.published import comparable
from hf_posenc.evaluation.published import get as get_table
from hf_posenc.evaluation.retrieval import RetrievalRun, RetrievalSettings, measuring

# The suites: how much a benchmark measures where nothing else is said. All of it is data.


@dataclass(frozen=True)
class Suite:
    """How much is measured.

    Attributes:
        methods: As `--patch` takes them; the first is the baseline.
        documents: Usable documents after which reading stops.
        reach: The longest length, as a multiple of the trained one.
        lengths: How many lengths up to there, both ends included; `None`: every doubling.
        tasks: Retrieval tasks.
        depths: Depths of the needle.
        samples: Samples at every length and depth.
        rounds: Times that the prefill of every method is timed.
    """

    methods: tuple[str, ...]
    documents: int
    reach: int
    lengths: int | None
    tasks: tuple[str, ...]
    depths: tuple[float, ...]
    samples: int
    rounds: int


# In every suite the second method is the control: plain attention to as many tokens as the model was trained at.
SUITES = {
    # whether everything runs; seconds on a CPU
    "smoke": Suite(
        methods=("none", "sliding_window", "yarn", "rerope"),
        documents=4,
        reach=2,
        lengths=2,
        tasks=("passkey",),
        depths=(0.0, 0.5, 1.0),
        samples=1,
        rounds=3,
    ),
    # a first table; minutes on one GPU
    "quick": Suite(
        methods=("none", "sliding_window", "pi", "ntk", "yarn", "dynamic_yarn", "rerope"),
        documents=10,
        reach=4,
        lengths=3,
        tasks=("passkey", "niah_single_1"),
        depths=(0.0, 0.25, 0.5, 0.75, 1.0),
        samples=2,
        rounds=3,
    ),
    # a table to publish; hours, by several processes if you like
    "full": Suite(
        methods=(
            *("none", "sliding_window", "pi", "ntk", "ntk_mixed", "ntk_by_parts", "llama3"),
            *("yarn", "yarn:scale=16", "dynamic_ntk:scale=2", "dynamic_yarn", "rerope"),
            "self_extend",
        ),
        documents=20,
        reach=16,
        lengths=None,
        tasks=(*("passkey", "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "fwe"),),
        depths=(0.0, 0.25, 0.5, 0.75, 1.0),
        samples=4,
        rounds=5,
    ),
}


def get_suite(name: str) -> Suite:
    """The suite of this name.

    Raises:
        PosencError: There is none.
    """
    if name not in SUITES:
        raise unknown("suite", name, tuple(SUITES))
    return SUITES[name]


def suite_lengths(suite: Suite, original: int | None, target: int | None = None) -> tuple[int, ...]:
    """The lengths of a suite for a model: doublings of the trained length, the target last.

    Args:
        suite: How many of them.
        original: The model's trained length in tokens.
        target: The longest length in tokens, in the place of the suite's multiple of the trained one.

    Raises:
        PosencError: The trained length is not known.
    """
    if original is None:
        raise PosencError("The model's config names no context length: give --lengths.")
    last = original * suite.reach if target is None else target
    doublings = [original]
    while doublings[-1] * 2 < last:
        doublings.append(doublings[-1] * 2)
    every = [length for length in doublings if length < last] + [last]
    count = len(every) if suite.lengths is None else min(suite.lengths, len(every))
    step = (len(every) - 1) / max(1, count - 1)
    return tuple(every[len(every) - 1 - round(index * step)] for index in reversed(range(count)))


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
        self.perplexity = PerplexityRun(
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

    @property
    def total(self) -> int:
        """Number of items of perplexity and retrieval."""
        runs = (self.perplexity, self.retrieval)
        return sum(len(run.items) for run in runs if run is not None)

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
            perplexity, retrieval, speed = map(stack.enter_context, self._stores(folder, shard))
            parts: list[tuple[str, Measurement[Any, Any], Records, str]]
            parts = [("perplexity", self.perplexity, perplexity, "timings.json")]
            if self.retrieval is not None:
                parts.append(("retrieval", self.retrieval, retrieval, "timings_retrieval.json"))
            for name, run, store, _ in parts:
                execute(run, store, shard, _named(name, progress))
            complete = all(wait_for_all(run, store, shard, waiting) for _, run, store, _ in parts)
            if not complete or (shard.launched and shard.index):
                self.missing = sum(
                    len(missing(store, (item.key for item in run.items)))
                    for _, run, store, _ in parts
                )
                return None
            if self.speed is not None:
                execute(self.speed, speed, progress=_named("speed", progress))
            if folder is not None:
                for _, run, store, name in parts:
                    write_timings(run, store, folder / name)
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

    def _stores(
        self, folder: Path | None, shard: Shard
    ) -> Iterator[contextlib.AbstractContextManager[Records]]:
        """Yield the records of perplexity, retrieval and speed."""
        described = self.inputs.described
        if folder is None:
            yield from (contextlib.nullcontext(Memory()) for _ in range(3))
            return
        yield open_store(folder, self.perplexity, described, shard)
        if self.retrieval is not None:
            metadata = {"model": described, "haystack": HAYSTACK}
            yield measuring.open_store(folder, self.retrieval, metadata, shard)
        else:
            yield contextlib.nullcontext(Memory())
        if self.speed is not None:
            yield self.speed.open_store(folder, described, shard)
        else:
            yield contextlib.nullcontext(Memory())

    def _result(self, perplexity: Records, retrieval: Records, speed: Records) -> BenchResult:
        inputs = self.inputs
        metadata = {
            "model": inputs.described,
            "original": inputs.original,
            "command": inputs.command,
        }
        measured = result_of(
            self.perplexity, perplexity, source=inputs.source, skipped=inputs.skipped, **metadata
        )
        assert measured is not None
        found = None
        if self.retrieval is not None:
            found = measuring.result_of(self.retrieval, retrieval, haystack=HAYSTACK, **metadata)
        return BenchResult(
            perplexity=measured,
            retrieval=found,
            speed=None if self.speed is None else collected(self.speed, speed),
            suite=inputs.suite_name,
            compare=tuple(inputs.compare),
            remarks=tuple(self.remarks),
        )


def _named(part: str, progress: Progress) -> Progress:
    return lambda label, done, total: progress(f"{part}, {label}" if label else part, done, total)


# From a model, documents and methods to a benchmark: the Python function, and the part that the command shares.


def bench(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Entry] | None = None,
    options: BenchOptions | None = None,
    *,
    output: Path | str | None = None,
    progress: Progress = lambda label, done, total: None,
    **fields: Any,
) -> BenchResult:
    """Measure methods against each other: perplexity, retrieval, speed and memory.

    The model is patched and unpatched for every method; at the end it is what it was.

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

    Raises:
        PosencError: Options exclude each other, a published table is of another protocol, or no document can be used.
    """
    options = with_fields(BenchOptions, options, fields)
    source = Source() if documents is None else Source.of(documents)
    inputs = gather(model, tokenizer, source, options)
    folder = None if output is None else Path(output)
    result = Bench(inputs).measure(folder, progress=progress)
    assert result is not None
    return result


def gather(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: BenchOptions,
    *,
    name: str | None = None,
    command: str | None = None,
) -> Inputs:
    """Check the methods against the model, and read the documents.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        source: The documents.
        options: The suite, and whatever differs from it.
        name: Name of the model in results; `None`: read from its config.
        command: Command line that gives this result again.

    Raises:
        PosencError: As `bench` does.
    """
    suite = _changed(get_suite(options.suite), options)
    candidates = [candidate.checked(model) for candidate in parse_candidates(suite.methods)]
    original = original_length(model, candidates)
    lengths, target = options.lengths, options.target_length
    if lengths is not None and target is not None:
        raise PosencError("Lengths and a target length exclude each other: give one of them.")
    settings, policy = settings_of(
        options, original, lengths or suite_lengths(suite, original, target)
    )
    for table in options.compare:
        comparable(get_table(table), settings)
    special = special_tokens(tokenizer, policy)
    needed = max(1, settings.shortest_document - len(special))
    documents, skipped, about = source.load(
        tokenizer,
        dataclasses.replace(options, limit=suite.documents),
        min_tokens=needed,
        embedded_tokens=max(needed, settings.lengths[-1] - len(special)),
    )
    return Inputs(
        model=model,
        tokenizer=tokenizer,
        candidates=candidates,
        settings=settings,
        suite=suite,
        special=special,
        documents=documents,
        skipped=skipped,
        described=describe_model(name or name_of(model), model, tokenizer, special, policy),
        original=original,
        source=about,
        suite_name=options.suite,
        compare=tuple(options.compare),
        command=command,
    )


def _changed(suite: Suite, options: BenchOptions) -> Suite:
    """Return the suite with the options that replace its own."""
    given = {
        "methods": options.methods,
        "tasks": options.tasks,
        "rounds": options.rounds,
        "documents": options.limit,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(suite, **changes)
