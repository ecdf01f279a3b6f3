"""From a model, documents and methods to a benchmark: the Python function, and what the command shares with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.bench.result import BenchResult
from hf_posenc.evaluation.bench.suites import Suite, get_suite, suite_lengths
from hf_posenc.evaluation.bench.work import Bench, Inputs
from hf_posenc.evaluation.candidates import original_length, parse_candidates
from hf_posenc.evaluation.documents import (
    EMBEDDED_SOURCE,
    Entry,
    TokenCache,
    as_entries,
    load_documents,
    read_embedded,
)
from hf_posenc.evaluation.identity import describe_model, name_of
from hf_posenc.evaluation.perplexity import Progress
from hf_posenc.evaluation.published import get as get_table
from hf_posenc.evaluation.published.compare import comparable
from hf_posenc.evaluation.runs import make_settings, special_tokens


def bench(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Entry] | None = None,
    *,
    methods: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    suite: str = "quick",
    target_length: int | None = None,
    tasks: Sequence[str] | None = None,
    rounds: int | None = None,
    limit: int | None = None,
    max_doc_tokens: int | None = None,
    bos: str | None = None,
    preset: str | None = None,
    compare: Sequence[str] = (),
    output: Path | str | None = None,
    progress: Progress = lambda label, done, total: None,
    **settings: Any,
) -> BenchResult:
    """Measures methods against each other: perplexity, retrieval, speed and memory.

    The model is patched and unpatched for every method; at the end it is what it was.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        documents: Texts, or what a reader of `hf_posenc.evaluation.documents` gives; by default the held-out modules of
            the standard library.
        methods: As `--patch` takes them; the first is the baseline. By default the suite's.
        lengths: Context lengths in tokens; by default the suite's.
        suite: `"smoke"`, `"quick"` or `"full"`: how much is measured where nothing else is said.
        target_length: The longest of the suite's lengths, in tokens.
        tasks: Retrieval tasks; none: no retrieval.
        rounds: How often the prefill is timed; 0: not at all.
        limit: Number of usable documents after which reading stops.
        max_doc_tokens: Documents are cut to so many tokens first.
        bos: `"auto"`, `"always"` or `"never"`.
        preset: A peer's own arithmetic, from `presets.PRESETS`.
        compare: Names of published tables to show beside.
        output: A folder for the records: an interrupted call, made again, goes on where it was. `BenchResult.write`
            writes tables and figures.
        progress: Called after every forward with what is done, tokens done and tokens in all of this part.
        **settings: Further fields of `protocols.Settings`, such as `protocols` or `tail_tokens`.

    Raises:
        PosencError: Something does not go together, a published table is of another protocol, or no document can be
            used.
    """
    inputs = gather(
        model,
        tokenizer,
        None if documents is None else as_entries(documents),
        name=name_of(model),
        origin={"kind": "python"},
        methods=methods,
        lengths=lengths,
        suite=suite,
        target_length=target_length,
        tasks=tasks,
        rounds=rounds,
        limit=limit,
        max_doc_tokens=max_doc_tokens,
        bos=bos,
        preset=preset,
        compare=compare,
        settings=settings,
    )
    folder = None if output is None else Path(output)
    result = Bench(inputs).measure(folder, progress=progress)
    assert result is not None
    return result


def gather(
    model: nn.Module,
    tokenizer: Any,
    source: Iterable[Entry] | None,
    *,
    name: str,
    origin: dict[str, Any],
    suite: str,
    methods: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    target_length: int | None = None,
    tasks: Sequence[str] | None = None,
    rounds: int | None = None,
    limit: int | None = None,
    max_doc_tokens: int | None = None,
    bos: str | None = None,
    preset: str | None = None,
    compare: Sequence[str] = (),
    command: str | None = None,
    settings: dict[str, Any] | None = None,
    cache: TokenCache | None = None,
    seen: Callable[[str], None] = lambda name: None,
) -> Inputs:
    """Tries the methods and reads the documents; see `bench` for what is not said here.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        source: What reads the documents; `None`: the held-out modules.
        name: What results call the model.
        origin: What results say of the source.
        suite: The suite's name.
        methods: As in `bench`, as are the others up to `compare`.
        lengths: See there.
        target_length: See there.
        tasks: See there.
        rounds: See there.
        limit: See there.
        max_doc_tokens: See there.
        bos: See there.
        preset: See there.
        compare: See there.
        command: What gives this result again.
        settings: Further fields of `protocols.Settings`; `None` stands for what was not given.
        cache: Where tokens are kept from one run to the next.
        seen: Called with the name of every document that is read.

    Raises:
        PosencError: As `bench` does.
    """
    chosen = _changed(get_suite(suite), methods, tasks, rounds, limit)
    candidates = [candidate.checked(model) for candidate in parse_candidates(chosen.methods)]
    original = original_length(model, candidates)
    if lengths is not None and target_length is not None:
        raise PosencError("Lengths and a target length exclude each other: give one of them.")
    wanted = suite_lengths(chosen, original, target_length) if lengths is None else lengths
    given = {**(settings or {}), "lengths": tuple(sorted(set(wanted)))}
    made, policy = make_settings(given, original, preset=preset, bos=bos)
    for table in compare:
        comparable(get_table(table), made)
    special = special_tokens(tokenizer, policy)
    needed = max(1, made.shortest_document - len(special))
    if source is None:
        source, origin = read_embedded(), EMBEDDED_SOURCE
        max_doc_tokens = max_doc_tokens or max(needed, made.lengths[-1] - len(special))
    usable, skipped = load_documents(
        source,
        tokenizer,
        min_tokens=needed,
        max_tokens=max_doc_tokens,
        limit=chosen.documents,
        seen=seen,
        cache=cache,
    )
    return Inputs(
        model=model,
        tokenizer=tokenizer,
        candidates=candidates,
        settings=made,
        suite=chosen,
        special=special,
        documents=usable,
        skipped=skipped,
        described=describe_model(name, model, tokenizer, special, policy),
        original=original,
        source={**origin, "limit": chosen.documents, "max_doc_tokens": max_doc_tokens},
        suite_name=suite,
        compare=tuple(compare),
        command=command,
    )


def _changed(
    suite: Suite,
    methods: Sequence[str] | None,
    tasks: Sequence[str] | None,
    rounds: int | None,
    limit: int | None,
) -> Suite:
    """The suite with what was said otherwise."""
    given = {"methods": methods, "tasks": tasks, "rounds": rounds, "documents": limit}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(suite, **changes)
