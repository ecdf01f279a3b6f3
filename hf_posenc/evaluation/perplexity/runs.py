"""Perplexity of a model on documents: `measure_perplexity`, and what `hf-posenc perplexity` shares with it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.documents import Entry, TokenizedDocument, special_prefix
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.candidates import (
    Candidate,
    original_length,
    parse_candidates,
)
from hf_posenc.evaluation.measuring.execute import Progress, collected, silent
from hf_posenc.evaluation.measuring.identity import describe_model, environment, name_of
from hf_posenc.evaluation.measuring.job import Job
from hf_posenc.evaluation.measuring.store import (
    ALONE,
    Records,
    Shard,
    Store,
)
from hf_posenc.evaluation.options import PerplexityOptions, ProtocolOptions, with_fields
from hf_posenc.evaluation.perplexity.longppl import (
    SELF,
    Evaluator,
    default_short,
    finder,
    split_evaluator,
    with_evaluator,
)
from hf_posenc.evaluation.perplexity.measurement import PerplexityRun
from hf_posenc.evaluation.perplexity.protocols import Settings, default_lengths, preset_settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.published import PublishedTable, comparable
from hf_posenc.evaluation.published import get as get_table

EMBEDDED_DOCUMENTS = 12
"""Default number of the held-out modules."""

# Settings of the summary, which determine none of the stored numbers.
_OF_THE_SUMMARY = ("seed", "resamples", "base", "preset")


def measure_perplexity(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Entry],
    options: PerplexityOptions | None = None,
    *,
    output: Path | str | None = None,
    progress: Progress = silent,
    **fields: Any,
) -> PerplexityResult:
    """Measure methods against each other on the same tokens.

    The model is patched and unpatched for every method; at the end it is what it was.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        documents: Texts, or the entries of a reader of `hf_posenc.evaluation.documents`.
        options: Methods, lengths, protocols and their numbers.
        output: Folder of the records: an interrupted call, made again, resumes.
        progress: Called after every forward with the method's label, tokens done and tokens in all.
        **fields: Fields of `PerplexityOptions` that replace those of `options`, such as `methods` or `tail_tokens`.

    Raises:
        PosencError: Options exclude each other, or no document can be used.
    """
    options = with_fields(PerplexityOptions, options, fields)
    job = prepare(model, tokenizer, Source.of(documents), options)
    result = job.measure(None if output is None else Path(output), progress=progress)
    assert result is not None
    return result


@dataclass
class PerplexityJob(Job[PerplexityResult]):
    """Perplexities whose model and documents are loaded.

    Attributes:
        run: The work.
        compare: Published tables of the same protocol, to show beside the result.
    """

    run: PerplexityRun
    compare: Sequence[PublishedTable] = ()

    def store(self, folder: Path, shard: Shard) -> Store:
        return open_store(folder, self.run, self.metadata["model"], shard, self.metadata["command"])

    def result(self, store: Records) -> PerplexityResult | None:
        return result_of(self.run, store, **self.metadata)


def prepare(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: PerplexityOptions,
    *,
    name: str | None = None,
    command: str | None = None,
    load: Callable[[str], tuple[nn.Module, Any]] | None = None,
) -> PerplexityJob:
    """Check the methods against the model, choose lengths and protocols, and read the documents.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        source: The documents.
        options: Methods, lengths, protocols and their numbers.
        name: Name of the model in results; `None`: read from its config.
        command: Command line that gives this result again.
        load: Load the model and the tokenizer of this name, for an evaluator of LongPPL that is another model.

    Raises:
        PosencError: Options exclude each other, or no document can be used.
    """
    candidates = [c.checked(model) for c in parse_candidates(options.methods or ("none",))]
    original = original_length(model, candidates)
    settings, policy = settings_of(options, original)
    compare = [get_table(table) for table in options.compare]
    for table in compare:
        comparable(table, settings)
    special = special_tokens(tokenizer, policy)
    needed = max(1, settings.shortest_document - len(special))
    documents, skipped, about = source.load(
        tokenizer,
        options,
        min_tokens=needed,
        embedded_limit=EMBEDDED_DOCUMENTS,
        embedded_tokens=max(needed, settings.lengths[-1] - len(special)),
    )
    key_tokens = None
    if options.longppl is not None:
        evaluator = _evaluator(options, settings, model, tokenizer, original, policy, load)
        settings = with_evaluator(settings, evaluator)
        key_tokens = finder(
            evaluator,
            documents,
            tokenizer,
            settings.lengths[-1],
            lambda: source.reload(documents, evaluator.tokenizer),
        )
    run = PerplexityRun(
        model,
        joined(documents) if settings.streams else documents,
        candidates,
        settings,
        special=special,
        key_tokens=key_tokens,
    )
    metadata = {
        "model": describe_model(name or name_of(model), model, tokenizer, special, policy),
        "source": about,
        "original": original,
        "skipped": skipped,
        "command": command,
    }
    return PerplexityJob(run, metadata, compare=compare)


def _evaluator(
    options: PerplexityOptions,
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    original: int | None,
    policy: str,
    load: Callable[[str], tuple[nn.Module, Any]] | None,
) -> Evaluator:
    """Return the evaluator of LongPPL: the measured model itself, or one that is loaded."""
    name, spec = split_evaluator(options.longppl or SELF)
    if name != SELF:
        if load is None:
            raise PosencError(f"longppl={name!r}: in Python only {SELF!r}, with @METHOD or not.")
        model, tokenizer = load(name)
    return Evaluator(
        name=name,
        model=model,
        tokenizer=tokenizer,
        candidate=Candidate.parse(spec).checked(model),
        special=special_tokens(tokenizer, policy),
        short=options.longppl_short or default_short(settings.lengths[-1], original),
    )


def settings_of(
    options: ProtocolOptions, original: int | None, lengths: Sequence[int] | None = None
) -> tuple[Settings, str]:
    """Return the settings of a run, and the policy for special tokens.

    Args:
        options: The options; a field that is `None` leaves the decision to the preset, and then to the defaults.
        original: The model's trained length in tokens, which the default lengths come from.
        lengths: Context lengths in tokens, instead of those of the options.

    Raises:
        PosencError: An unknown preset, or options that exclude each other.
    """
    names = {field.name for field in dataclasses.fields(Settings)} - {"preset", "lengths"}
    values = {name: getattr(options, name, None) for name in names}
    if isinstance(options, PerplexityOptions):
        lengths = options.lengths
        short = options.short and options.preset is None
        if lengths and short and original and original < min(lengths):
            lengths = (original, *lengths)
    values["lengths"] = None if lengths is None else tuple(sorted(set(lengths)))
    return make_settings(values, original, preset=options.preset, bos=options.bos)


def make_settings(
    values: Mapping[str, Any],
    original: int | None,
    *,
    preset: str | None = None,
    bos: str | None = None,
) -> tuple[Settings, str]:
    """Return the settings of a run, and the policy for special tokens.

    Args:
        values: Fields of `Settings`; `None` leaves the decision to the preset, and then to the defaults.
        original: The model's trained length in tokens, which the default lengths come from.
        preset: Name of a preset.
        bos: The policy for special tokens.

    Raises:
        PosencError: An unknown preset or setting, or settings that exclude each other.
    """
    chosen, policy = preset_settings(preset)
    chosen |= {name: value for name, value in values.items() if value is not None}
    names = [field.name for field in dataclasses.fields(Settings)]
    for name in chosen:
        if name not in names:
            raise unknown("setting", name, names)
    if chosen.get("lengths") is None:
        chosen["lengths"] = default_lengths(original)
    return Settings(**chosen), policy if bos is None else bos


def special_tokens(tokenizer: Any, policy: str) -> list[int]:
    """Return the special tokens in front of a window; `bos-or-eos` is lm-evaluation-harness's policy."""
    if policy != "bos-or-eos":
        return special_prefix(tokenizer, policy)
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise PosencError("--preset lm-eval puts BOS or EOS first; this tokenizer has neither.")
    return [int(token)]


def joined(documents: Sequence[TokenizedDocument]) -> list[TokenizedDocument]:
    """Return the documents as one stream of tokens; a single one, maybe larger than memory, stays in its file."""
    if len(documents) == 1:
        return list(documents)
    identities = [document.to_dict() for document in documents]
    hashes = [f"{each['tokens_sha256']} {each['text_sha256']}" for each in identities]
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
    """Open the records of a run in a folder, keyed by everything that determines a number.

    Raises:
        PosencError: The folder cannot be written to, or another process writes the same share.
    """
    return Store(Path(folder), record_settings(run, described), shard, command)


def record_settings(run: PerplexityRun, described: dict[str, Any]) -> dict[str, Any]:
    """Return everything that determines a number, except the parts of the keys: the method and the document."""
    values = run.settings.to_dict()
    kept = {name: value for name, value in values.items() if name not in _OF_THE_SUMMARY}
    return {
        "kind": "perplexity",
        "model": described,
        "settings": kept,
        "environment": environment(),
    }


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
