"""Sweeps and searches of a model and a source of documents."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Skipped, TokenizedDocument, special_prefix
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.candidates import Candidate, original_length
from hf_posenc.evaluation.measuring.execute import Progress, silent
from hf_posenc.evaluation.measuring.identity import describe_model, environment, name_of
from hf_posenc.evaluation.measuring.store import ALONE, Memory, Records, Shard, Store
from hf_posenc.evaluation.options import SWEEP_METHODS, SearchSettings, SweepOptions, TailOptions
from hf_posenc.evaluation.tuning import search, sweep
from hf_posenc.evaluation.tuning.evolution import rope_of
from hf_posenc.evaluation.tuning.objective import Meter, TailSettings
from hf_posenc.evaluation.tuning.search import SearchResult
from hf_posenc.evaluation.tuning.sweep import SweepResult, crossed, tried

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class TailJob(abc.ABC, Generic[ResultT]):
    """A sweep or a search whose model and documents are loaded.

    Attributes:
        model: The model.
        settings: The objective.
        special: Token ids in front of every window.
        documents: The usable documents.
        skipped: The others.
        about: Description of model, source, versions and command that the result stores.
        missing: Always 0: every process waits for the others.
        total: Always 0.
    """

    model: nn.Module
    settings: TailSettings
    special: Sequence[int]
    documents: Sequence[TokenizedDocument]
    skipped: Sequence[Skipped]
    about: dict[str, Any]
    missing: int = 0
    total: int = 0

    def measure(
        self,
        folder: Path | None,
        shard: Shard = ALONE,
        progress: Progress = silent,
        waiting: Callable[[int], None] = silent,
    ) -> ResultT | None:
        """Measure this process's share of every round, and wait for the others' shares.

        Args:
            folder: Folder of the records; `None`: nothing is written.
            shard: This process's place among those of the run.
            progress: Called after every document.
            waiting: Called with the number of records that other processes have still to write.

        Returns:
            The result; `None` in all processes but the first.

        Raises:
            PosencError: The folder cannot be written to, or another process writes the same share.
        """
        decisive = {
            "kind": "tail",
            "model": self.about["model"],
            "settings": self.settings.decisive,
            "environment": self.about["environment"],
        }

        def advance(label: str, tokens: int) -> None:
            # the other processes do as much meanwhile
            progress(label, min(tokens * shard.count, total), total)

        records = (
            contextlib.nullcontext(Memory()) if folder is None else Store(folder, decisive, shard)
        )
        with records as store:
            meter = self.meter(store, shard=shard, progress=advance, waiting=waiting)
            total = self.cost(meter)
            result = self.run(meter)
        return None if shard.index else result

    def meter(self, store: Records, **more: Any) -> Meter:
        """Return a meter over these records."""
        protocol = self.settings.protocol
        return Meter(self.model, self.documents, protocol, store, special=self.special, **more)

    @abc.abstractmethod
    def cost(self, meter: Meter) -> int:
        """Return the tokens that the model reads if no method fails."""

    @abc.abstractmethod
    def cost_line(self) -> str:
        """Return the cost in one sentence."""

    @abc.abstractmethod
    def run(self, meter: Meter) -> ResultT:
        """Measure."""


@dataclass(frozen=True, kw_only=True)
class SweepJob(TailJob[SweepResult]):
    """A sweep that is ready.

    Attributes:
        candidates: The methods, each with whether it is a control.
        first_documents: Documents of the first round.
    """

    candidates: Sequence[tuple[Candidate, bool]]
    first_documents: int

    def cost(self, meter: Meter) -> int:
        return sweep.work(meter, self.candidates, self.first_documents)[0]

    def cost_line(self) -> str:
        halved, full = sweep.work(self.meter(Memory()), self.candidates, self.first_documents)
        return f"{halved:,} tokens instead of {full:,} for everything on every document."

    def run(self, meter: Meter) -> SweepResult:
        return sweep.sweep(
            meter,
            self.candidates,
            self.settings,
            about=self.about,
            skipped=self.skipped,
            first_documents=self.first_documents,
        )


@dataclass(frozen=True, kw_only=True)
class SearchJob(TailJob[SearchResult]):
    """A search that is ready.

    Attributes:
        own: The search's own settings.
    """

    own: SearchSettings

    def cost(self, meter: Meter) -> int:
        return search.work(meter, self.settings, self.own)

    def cost_line(self) -> str:
        return f"{self.cost(self.meter(Memory())):,} tokens for {self.own.budget:,} evaluations."

    def run(self, meter: Meter) -> SearchResult:
        return search.search(meter, self.settings, self.own, about=self.about, skipped=self.skipped)


def prepare_sweep(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: SweepOptions,
    *,
    name: str | None = None,
    command: str | None = None,
) -> SweepJob:
    """Check the methods against the model, and read documents of at least the target length.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        source: The documents.
        options: Methods, scales and the objective.
        name: Name of the model in results; `None`: read from its config.
        command: Command line that gives this result again.

    Raises:
        PosencError: Options exclude each other, or no document can be used.
    """
    methods = options.methods or SWEEP_METHODS
    candidates = tried(model, crossed(methods, options.scales or (2.0,)))
    original = original_length(model, [candidate for candidate, _ in candidates])
    settings = tail_settings(options, original)
    if options.scales is None:
        scales = (settings.scale, 2 * settings.scale)
        candidates = tried(model, crossed(methods, scales))
    loaded = _loaded(model, tokenizer, source, options, settings, name, command, 20)
    return SweepJob(**loaded, candidates=candidates, first_documents=options.first_documents)


def prepare_search(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    own: SearchSettings,
    *,
    name: str | None = None,
    command: str | None = None,
) -> SearchJob:
    """Check the model's rotary table, and read documents of at least the target length.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        source: The documents.
        options: The objective.
        own: The search's own settings.
        name: Name of the model in results; `None`: read from its config.
        command: Command line that gives this result again.

    Raises:
        PosencError: Options exclude each other, or no document can be used.
    """
    original = rope_of(model, replace=own.replace).original_max_position_embeddings
    settings = tail_settings(options, original)
    loaded = _loaded(model, tokenizer, source, options, settings, name, command, 24)
    return SearchJob(**loaded, own=own)


def tail_settings(options: TailOptions, original: int | None) -> TailSettings:
    """Return the objective; the default target is four times the original length.

    Raises:
        PosencError: The original length is unknown, or numbers exclude each other.
    """
    if original is None:
        raise PosencError(
            "The model's config names no context length that it was trained on; give it with a method, as in "
            "--patch yarn:original_max_position_embeddings=4096."
        )
    return TailSettings(
        original,
        options.target_length or 4 * original,
        tail_tokens=options.tail_tokens,
        windows_per_document=options.windows_per_document,
        max_regression=options.max_regression,
        chunk=options.chunk,
        prefill=options.prefill,
        seed=options.seed,
    )


def _loaded(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    settings: TailSettings,
    name: str | None,
    command: str | None,
    embedded_limit: int,
) -> dict[str, Any]:
    """Return the fields that sweeps and searches share."""
    policy = options.bos or "auto"
    special = special_prefix(tokenizer, policy)
    documents, skipped, origin = source.load(
        tokenizer,
        options,
        min_tokens=settings.target - len(special),
        embedded_limit=embedded_limit,
        embedded_tokens=settings.target * settings.windows_per_document,
    )
    about = {
        "model": describe_model(name or name_of(model), model, tokenizer, special, policy),
        "source": origin,
        "environment": environment(),
        "command": command,
    }
    return {
        "model": model,
        "settings": settings,
        "special": special,
        "documents": documents,
        "skipped": skipped,
        "about": about,
    }
