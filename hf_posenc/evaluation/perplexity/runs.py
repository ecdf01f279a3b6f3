"""From a model, documents and methods to a result: what the command and the Python function share."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import (
    Entry,
    TokenizedDocument,
    as_entries,
    load_documents,
    special_prefix,
)
from hf_posenc.evaluation.measuring.candidates import original_length, parse_candidates
from hf_posenc.evaluation.measuring.execute import Progress, collected, execute, silent
from hf_posenc.evaluation.measuring.identity import describe_model, environment, name_of
from hf_posenc.evaluation.measuring.store import (
    ALONE,
    Memory,
    Records,
    Shard,
    Store,
)
from hf_posenc.evaluation.perplexity.measurement import PerplexityRun
from hf_posenc.evaluation.perplexity.protocols import (
    Settings,
    check_settings,
    default_lengths,
    preset_settings,
)
from hf_posenc.evaluation.perplexity.result import PerplexityResult

# They decide how numbers are put together, or what is said of them, and none of the numbers that are stored.
_OF_THE_SUMMARY = ("seed", "resamples", "base", "preset")


def measure_perplexity(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Entry],
    *,
    methods: Sequence[str] = ("none",),
    lengths: Sequence[int] | None = None,
    bos: str | None = None,
    preset: str | None = None,
    limit: int | None = None,
    max_doc_tokens: int | None = None,
    output: Path | str | None = None,
    progress: Progress = silent,
    **settings: Any,
) -> PerplexityResult:
    """Measures methods against each other on the same tokens.

    The model is patched and unpatched for every method; at the end it is what it was.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        documents: Texts, or what a reader of `hf_posenc.evaluation.documents` gives.
        methods: As `--patch` takes them: `"none"`, `"yarn"`, `"yarn:scale=8"`, `"pi:scale=4+log_n"`, ...; the first is
            the baseline.
        lengths: Context lengths in tokens; by default the original length times 1, 2, 4, ...
        bos: `"auto"`, `"always"` or `"never"`; by default `"auto"`, or as the preset says.
        preset: A peer's own arithmetic, from `presets.PRESETS`.
        limit: Number of usable documents after which reading stops.
        max_doc_tokens: Documents are cut to so many tokens first.
        output: A folder for the records: an interrupted call, made again, goes on where it was.
        progress: Called after every forward with the method's label, tokens done and tokens in all.
        **settings: Further fields of `Settings`, such as `protocols` or `tail_tokens`.

    Raises:
        PosencError: Something does not go together, or no document can be used.
    """
    candidates = [candidate.checked(model) for candidate in parse_candidates(methods)]
    original = original_length(model, candidates)
    given = {**settings, "lengths": None if lengths is None else tuple(sorted(set(lengths)))}
    chosen, policy = make_settings(given, original, preset=preset, bos=bos)
    special = special_tokens(tokenizer, policy)
    usable, skipped = load_documents(
        as_entries(documents),
        tokenizer,
        min_tokens=max(1, chosen.shortest_document - len(special)),
        max_tokens=max_doc_tokens,
        limit=limit,
    )
    used = joined(usable) if chosen.streams else usable
    run = PerplexityRun(model, used, candidates, chosen, special=special)
    described = describe_model(name_of(model), model, tokenizer, special, policy)
    with (
        contextlib.nullcontext(Memory()) if output is None else open_store(output, run, described)
    ) as store:
        execute(run, store, progress=progress)
        result = result_of(
            run,
            store,
            model=described,
            source={"kind": "python", "limit": limit, "max_doc_tokens": max_doc_tokens},
            original=original,
            skipped=skipped,
        )
    assert result is not None
    return result


def make_settings(
    given: dict[str, Any],
    original: int | None,
    *,
    preset: str | None = None,
    bos: str | None = None,
) -> tuple[Settings, str]:
    """The settings of a run: what was given, before what the preset says, before the defaults.

    Args:
        given: Fields of `Settings`; `None` stands for what was not given.
        original: The model's trained length in tokens, which the default lengths come from.
        preset: Name of a preset.
        bos: The policy for special tokens that was given.

    Returns:
        The settings, and the policy for special tokens.

    Raises:
        PosencError: An unknown preset or setting, or things that do not go together.
    """
    check_settings(Settings, given)
    values, policy = preset_settings(preset)
    values = {**values, **{name: value for name, value in given.items() if value is not None}}
    values.setdefault("lengths", None)
    if values["lengths"] is None:
        values["lengths"] = default_lengths(original)
    return Settings(**values), policy if bos is None else bos


def special_tokens(tokenizer: Any, policy: str) -> list[int]:
    """The special tokens in front of a window; `bos-or-eos` is lm-evaluation-harness's policy."""
    if policy != "bos-or-eos":
        return special_prefix(tokenizer, policy)
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise PosencError("--preset lm-eval puts BOS or EOS first; this tokenizer has neither.")
    return [int(token)]


def joined(documents: Sequence[TokenizedDocument]) -> list[TokenizedDocument]:
    """The documents as one stream of tokens; a single one stays where it is, which may be a file larger than memory."""
    if len(documents) == 1:
        return list(documents)
    known = [document.to_dict() for document in documents]
    hashes = [f"{each['tokens_sha256']} {each['text_sha256']}" for each in known]
    digest = hashlib.sha256("\n".join(hashes).encode())
    ids = torch.cat([document.tokens(0, len(document.ids)) for document in documents])
    name = f"stream of {len(documents)} document{'s' * (len(documents) != 1)}"
    byte_ends = _cumulative([document.byte_ends for document in documents])
    word_ends = _cumulative([document.word_ends for document in documents])
    return [TokenizedDocument(name, ids, byte_ends, digest.hexdigest(), word_ends)]


def _cumulative(ends: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    total, parts = 0, []
    for part in ends:
        if part is None:
            return None
        parts.append(part + total)
        total += int(part[-1]) if len(part) else 0
    return torch.cat(parts)


def open_store(
    folder: Path | str,
    run: PerplexityRun,
    described: dict[str, Any],
    shard: Shard = ALONE,
    command: str | None = None,
) -> Store:
    """The records of a run in a folder, keyed by everything that determines a number.

    Raises:
        PosencError: The folder cannot be written to, or another process writes the same share.
    """
    return Store(Path(folder), record_settings(run, described), shard, command)


def record_settings(run: PerplexityRun, described: dict[str, Any]) -> dict[str, Any]:
    """Everything that determines a number, but for what the keys hold: the method and the document."""
    values = run.settings.to_dict()
    kept = {name: value for name, value in values.items() if name not in _OF_THE_SUMMARY}
    made = {
        "kind": "perplexity",
        "model": described,
        "settings": kept,
        "environment": environment(),
    }
    return made


def result_of(run: PerplexityRun, store: Records, **metadata: Any) -> PerplexityResult | None:
    """Return the result of the stored values; `None` while some are missing."""
    measured = collected(run, store)
    if measured is None:
        return None
    return PerplexityResult.of(
        measured,
        run.candidates,
        settings=run.settings,
        documents=[document.to_dict() for document in run.documents],
        environment=environment(),
        fingerprint=store.fingerprint if isinstance(store, Store) else None,
        **metadata,
    )
