"""Retrieval of a model: `measure_retrieval`, and the parts that `hf-posenc retrieval` shares with it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc.evaluation.documents import special_prefix
from hf_posenc.evaluation.measuring.candidates import original_length, parse_candidates
from hf_posenc.evaluation.measuring.execute import Progress, collected, silent
from hf_posenc.evaluation.measuring.identity import describe_model, environment, name_of
from hf_posenc.evaluation.measuring.job import Job
from hf_posenc.evaluation.measuring.store import ALONE, Records, Shard, Store
from hf_posenc.evaluation.options import RetrievalOptions, with_fields
from hf_posenc.evaluation.perplexity.protocols import default_lengths
from hf_posenc.evaluation.perplexity.result import MethodEntry
from hf_posenc.evaluation.retrieval.result import RetrievalResult
from hf_posenc.evaluation.retrieval.run import DEFAULT_TASKS, RetrievalRun, RetrievalSettings

# Settings that are parts of the keys, or only determine their number.
_OF_THE_KEYS = ("lengths", "tasks", "depths", "samples")


def measure_retrieval(
    model: nn.Module,
    tokenizer: Any,
    options: RetrievalOptions | None = None,
    *,
    haystack: str | None = None,
    output: Path | str | None = None,
    progress: Progress = silent,
    **fields: Any,
) -> RetrievalResult:
    """Measure what methods find in long prompts, all in the same ones.

    The model is patched and unpatched for every method; at the end it is what it was.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        options: Methods, lengths, tasks and their numbers.
        haystack: Text that replaces the noise sentences.
        output: Folder of the records: an interrupted call, made again, resumes.
        progress: Called after every sample with the method's label, tokens done and tokens in all.
        **fields: Fields of `RetrievalOptions` that replace those of `options`, such as `methods` or `samples`.

    Raises:
        PosencError: Options exclude each other, or no task has prompts of these lengths.
    """
    options = with_fields(RetrievalOptions, options, fields)
    job = prepare(model, tokenizer, options, haystack=haystack)
    result = job.measure(None if output is None else Path(output), progress=progress)
    assert result is not None
    return result


@dataclass
class RetrievalJob(Job[RetrievalResult]):
    """A measurement whose model and prompts are ready."""

    run: RetrievalRun

    def store(self, folder: Path, shard: Shard) -> Store:
        return open_store(folder, self.run, self.metadata, shard)

    def result(self, store: Records) -> RetrievalResult | None:
        return result_of(self.run, store, **self.metadata)


def prepare(
    model: nn.Module,
    tokenizer: Any,
    options: RetrievalOptions,
    *,
    haystack: str | None = None,
    paths: Sequence[str] = (),
    name: str | None = None,
    command: str | None = None,
) -> RetrievalJob:
    """Check the methods against the model, choose lengths and tasks, and lay out the prompts.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        options: Methods, lengths, tasks and their numbers.
        haystack: Text that replaces the noise sentences.
        paths: Files that the text comes from.
        name: Name of the model in results; `None`: read from its config.
        command: Command line that gives this result again.

    Raises:
        PosencError: Options exclude each other, or no task has prompts of these lengths.
    """
    candidates = [c.checked(model) for c in parse_candidates(options.methods or ("none",))]
    original = original_length(model, candidates)
    policy = options.bos or "auto"
    special = special_prefix(tokenizer, policy)
    settings = settings_of(options, options.lengths or default_lengths(original))
    run = RetrievalRun(model, tokenizer, candidates, settings, special=special, haystack=haystack)
    metadata = {
        "model": describe_model(name or name_of(model), model, tokenizer, special, policy),
        "haystack": describe_haystack(haystack, paths),
        "original": original,
        "command": command,
    }
    return RetrievalJob(run, metadata)


def settings_of(options: RetrievalOptions, lengths: Sequence[int]) -> RetrievalSettings:
    """Return the settings of a run at these lengths.

    Raises:
        PosencError: Options exclude each other, or an unknown task.
    """
    return RetrievalSettings(
        lengths=tuple(sorted(set(lengths))),
        tasks=DEFAULT_TASKS if options.tasks is None else tuple(options.tasks),
        depths=tuple(options.depths),
        samples=options.samples,
        distractors=options.distractors,
        decode=options.decode,
        seed=options.seed,
        chunk=options.chunk,
    )


def describe_haystack(text: str | None, paths: Sequence[str] = ()) -> dict[str, Any]:
    """Return the description of the text between the needles, which the result stores."""
    if text is None:
        return {"kind": "noise"}
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return {"kind": "text", "sha256": digest, "characters": len(text), "paths": list(paths)}


def open_store(
    folder: Path | str, run: RetrievalRun, metadata: dict[str, Any], shard: Shard = ALONE
) -> Store:
    """Open the records of a run in a folder, keyed by everything that determines a number, except parts of the keys.

    A run with more lengths, tasks, depths, samples or methods therefore keeps what a smaller one has measured.

    Raises:
        PosencError: The folder cannot be written to, or another process writes the same share.
    """
    settings = run.settings.to_dict()
    haystack = {name: value for name, value in metadata["haystack"].items() if name != "paths"}
    values = {
        "kind": "retrieval",
        "model": metadata["model"],
        "haystack": haystack,
        "settings": {name: settings[name] for name in settings if name not in _OF_THE_KEYS},
        "environment": environment(),
    }
    return Store(Path(folder), values, shard)


def result_of(run: RetrievalRun, store: Records, **metadata: Any) -> RetrievalResult | None:
    """Return the result of the stored values; `None` while some are missing.

    Args:
        run: The work.
        store: Its records.
        **metadata: `model`, `haystack`, `original` and `command`, which the result stores.
    """
    measured = collected(run, store)
    if measured is None:
        return None
    records, failures = measured
    return RetrievalResult(
        settings=run.settings,
        candidates=[MethodEntry.of(candidate, False) for candidate in run.candidates],
        records=records,
        failures=failures,
        left_out=run.left_out,
        head_replay=run.scorer.head_replay,
        environment=environment(),
        fingerprint=store.fingerprint if isinstance(store, Store) else None,
        **metadata,
    )
