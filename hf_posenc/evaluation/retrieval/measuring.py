"""From a model and methods to a result: what the command and the Python function share."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc.evaluation.documents import special_prefix
from hf_posenc.evaluation.measuring.candidates import original_length, parse_candidates
from hf_posenc.evaluation.measuring.execute import Progress, collected, execute, silent
from hf_posenc.evaluation.measuring.identity import describe_model, environment, name_of
from hf_posenc.evaluation.measuring.store import ALONE, Memory, Records, Shard, Store
from hf_posenc.evaluation.perplexity.protocols import check_settings, default_lengths
from hf_posenc.evaluation.perplexity.result import MethodEntry
from hf_posenc.evaluation.retrieval.result import RetrievalResult
from hf_posenc.evaluation.retrieval.run import RetrievalRun, RetrievalSettings

# What the keys hold, and what only says how many of them there are.
_OF_THE_KEYS = ("lengths", "tasks", "depths", "samples")


def measure_retrieval(
    model: nn.Module,
    tokenizer: Any,
    *,
    methods: Sequence[str] = ("none",),
    lengths: Sequence[int] | None = None,
    haystack: str | None = None,
    bos: str = "auto",
    output: Path | str | None = None,
    progress: Progress = silent,
    **settings: Any,
) -> RetrievalResult:
    """Measures what methods find in long prompts, all in the same ones.

    The model is patched and unpatched for every method; at the end it is what it was.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        methods: As `--patch` takes them: `"none"`, `"yarn"`, `"yarn:scale=8"`, `"pi:scale=4+log_n"`, ...
        lengths: Tokens of prompt and answer; by default the original length times 1, 2, 4, ...
        haystack: A text to stand in the place of the noise sentences.
        bos: `"auto"`, `"always"` or `"never"`.
        output: A folder for the records: an interrupted call, made again, goes on where it was.
        progress: Called after every sample with the method's label, tokens done and tokens in all.
        **settings: Further fields of `RetrievalSettings`, such as `tasks` or `samples`.

    Raises:
        PosencError: Something does not go together, or no task has prompts of these lengths.
    """
    check_settings(RetrievalSettings, settings)
    candidates = [candidate.checked(model) for candidate in parse_candidates(methods)]
    original = original_length(model, candidates)
    wanted = default_lengths(original) if lengths is None else sorted(set(lengths))
    special = special_prefix(tokenizer, bos)
    run = RetrievalRun(
        model,
        tokenizer,
        candidates,
        RetrievalSettings(lengths=tuple(wanted), **settings),
        special=special,
        haystack=haystack,
    )
    known = {
        "model": describe_model(name_of(model), model, tokenizer, special, bos),
        "haystack": describe_haystack(haystack),
    }
    with (
        contextlib.nullcontext(Memory()) if output is None else open_store(output, run, known)
    ) as store:
        execute(run, store, progress=progress)
        result = result_of(run, store, original=original, **known)
    assert result is not None
    return result


def describe_haystack(text: str | None, paths: Sequence[str] = ()) -> dict[str, Any]:
    """What a result stores of what stands between the needles."""
    if text is None:
        return {"kind": "noise"}
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return {"kind": "text", "sha256": digest, "characters": len(text), "paths": list(paths)}


def open_store(
    folder: Path | str, run: RetrievalRun, known: dict[str, Any], shard: Shard = ALONE
) -> Store:
    """The records of a run in a folder, keyed by everything that determines a number but for what the keys hold.

    So a run with more lengths, tasks, depths, samples or methods keeps what a smaller one has measured.

    Raises:
        PosencError: The folder cannot be written to, or another process writes the same share.
    """
    settings = run.settings.to_dict()
    haystack = {name: value for name, value in known["haystack"].items() if name != "paths"}
    values = {
        "kind": "retrieval",
        "model": known["model"],
        "haystack": haystack,
        "settings": {name: settings[name] for name in settings if name not in _OF_THE_KEYS},
        "environment": environment(),
    }
    return Store(Path(folder), values, shard)


def result_of(run: RetrievalRun, store: Records, **known: Any) -> RetrievalResult | None:
    """The result, from what is stored; `None` while something is missing.

    Args:
        run: What was measured.
        store: Its records.
        **known: `model`, `haystack`, `original` and, where there is one, `command`.
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
        **known,
    )
