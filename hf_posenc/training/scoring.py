"""Held-out perplexity before, during and after a training: the same tokens each time, by the project's own scorer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posenc.evaluation.documents import Entry, as_entries, load_documents
from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate, original_length
from hf_posenc.evaluation.measuring.execute import Progress, execute, silent
from hf_posenc.evaluation.measuring.identity import (
    describe_model,
    environment,
    name_of,
    tokenizer_hash,
)
from hf_posenc.evaluation.measuring.store import (
    ALONE,
    Key,
    Memory,
    Records,
    Shard,
    Store,
    fingerprint_of,
)
from hf_posenc.evaluation.perplexity.measurement import PerplexityRun
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.perplexity.runs import make_settings, result_of, special_tokens
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.patching import get_patch
from hf_posenc.training.ranks import (
    broadcast,
    gather,
    group_shard,
    is_sharded,
    without_side_effects,
)

if TYPE_CHECKING:
    from transformers import TrainingArguments


# The rows of a table of scores: one model at several points of its training.


@dataclass(frozen=True)
class Stage:
    """When a row was measured, and of what.

    Attributes:
        label: The row's name.
        step: Optimizer steps before it.
        tokens_seen: Tokens that the model was trained on before it, where the Trainer counts them.
        state: A hash of the model with its weights and its patch.
    """

    label: str
    step: int
    tokens_seen: int | None = field(compare=False)
    state: str


def stages_of(result: PerplexityResult) -> list[Stage]:
    """The stages of a table, in its order."""
    return [Stage(**stage) for stage in result.source.get("stages", ())]


def with_row(
    table: PerplexityResult | None, row: PerplexityResult, stage: Stage
) -> PerplexityResult:
    """A table with one more row at its end.

    Rows that came after the new one's step are of a training that was given up for this one, and go.

    Args:
        table: The rows so far.
        row: The new one, measured on the same tokens.
        stage: What the new one is.
    """
    stages = [] if table is None else stages_of(table)
    patched = row.candidates[0].method is not None
    earlier = []
    for old, entry in zip(stages, () if table is None else table.candidates, strict=True):
        if (old.step, entry.method is not None) < (stage.step, patched):
            earlier.append(old)
    parts = [row] if table is None else [only(table, [old.label for old in earlier]), row]
    source: dict[str, Any] = {
        **row.source,
        "stages": [dataclasses.asdict(each) for each in (*earlier, stage)],
    }
    return dataclasses.replace(
        row,
        source=source,
        candidates=[entry for part in parts for entry in part.candidates],
        records=[record for part in parts for record in part.records],
        failures=[failure for part in parts for failure in part.failures],
        curves={label: curve for part in parts for label, curve in part.curves.items()},
    )


def up_to(table: PerplexityResult, stage: Stage) -> PerplexityResult:
    """A table that ends with a row that it has: what came after is not of the model that is kept."""
    stages = stages_of(table)
    return only(table, [each.label for each in stages[: stages.index(stage) + 1]])


def only(table: PerplexityResult, labels: Collection[str]) -> PerplexityResult:
    """Some of the rows of a table."""
    return dataclasses.replace(
        table,
        source={
            **table.source,
            "stages": [dataclasses.asdict(s) for s in stages_of(table) if s.label in labels],
        },
        candidates=[entry for entry in table.candidates if entry.label in labels],
        records=[record for record in table.records if record.method in labels],
        failures=[failure for failure in table.failures if failure.method in labels],
        curves={label: curve for label, curve in table.curves.items() if label in labels},
    )


def before_and_after(table: PerplexityResult) -> PerplexityResult:
    """The rows before the training, and the last one."""
    stages = stages_of(table)
    return only(table, [stage.label for stage in stages if stage.step == 0 or stage is stages[-1]])


# The records of a measurement that several processes make together.


class Both:
    """Records that are looked up in one place and stored in two.

    Args:
        known: What any process has measured.
        store: Where a value outlives this one.
    """

    def __init__(self, known: Records, store: Records) -> None:
        self._known, self._store = known, store

    def get(self, key: Key) -> dict[str, Any] | None:
        """What any process has measured."""
        return self._known.get(key)

    def append(self, key: Key, value: Mapping[str, Any]) -> None:
        """Stores a value where it outlives the process, and where it is found."""
        self._store.append(key, value)
        self._known.append(key, value)

    def refresh(self) -> None:
        """Read what other processes have stored."""
        self._known.refresh()


def known_to_all(run: PerplexityRun, records: Records) -> Memory:
    """The records of a run that any process has, in every process. All must call it."""
    own = {item.key: records.get(item.key) for item in run.items}
    known = Memory()
    for part in gather(own):
        for key, value in part.items():
            if value is not None:
                known.append(key, value)
    return known


FILE = "perplexity.json"
PROTOCOLS = ("prefix", "tail")


class Scores:
    """Perplexities of one model before, during and after its training, on the same held-out tokens.

    Each measurement is one row of a table that grows, and is written to `output/perplexity.json` when it is done. What
    was measured of it before an interruption is in `output/records`, under a hash of everything that decides a number,
    the weights among it: a call made again measures only what is missing.

    In several processes, all of them must make each call. They share out the windows, with the very sums of one
    process; of a sharded model all run the same windows together.

    Args:
        tokenizer: The model's tokenizer.
        documents: Texts, or what a reader of `hf_posenc.evaluation.documents` gives; none of them trained on.
        lengths: Context lengths in tokens.
        output: Folder of the numbers and records; `None`: they end with the process.
        limit: Number of usable documents after which reading stops.
        max_doc_tokens: Documents are cut to so many tokens first.
        bos: `"auto"`, `"always"` or `"never"`.
        device: Where an unsharded model is put to be measured, and stays; by default it is measured where it is.
        autocast: The precision that the training computes in beside the weights' own (`precision_of`), so that every
            row is computed alike.
        command: What gives these numbers again, for reports.
        **settings: Further fields of `Settings`, such as `tail_tokens`; the protocols are prefix and tail by default.

    Attributes:
        documents: The documents that are scored.
        settings: Protocols, lengths and the other numbers.
        output: As given.
        fingerprint: Of everything that determines a number, but for the model.

    Raises:
        PosencError: Something does not go together, or no document can be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        documents: Iterable[str | Entry],
        *,
        lengths: Sequence[int],
        output: Path | str | None = None,
        limit: int | None = None,
        max_doc_tokens: int | None = None,
        bos: str | None = None,
        device: torch.device | None = None,
        autocast: torch.dtype | None = None,
        command: str | None = None,
        **settings: Any,
    ) -> None:
        self.output = None if output is None else Path(output)
        self._tokenizer, self._device, self._autocast = tokenizer, device, autocast
        self._command = command
        given = {"protocols": PROTOCOLS, **settings, "lengths": tuple(sorted(set(lengths)))}
        self.settings, self._bos = make_settings(given, None, bos=bos)
        self._special = special_tokens(tokenizer, self._bos)
        needed = max(1, self.settings.shortest_document - len(self._special))
        self.documents, self._skipped = load_documents(
            as_entries(documents),
            tokenizer,
            min_tokens=needed,
            max_tokens=max_doc_tokens,
            limit=limit,
        )
        self._source = {"kind": "training", "limit": limit, "max_doc_tokens": max_doc_tokens}
        self._decisive = {
            "kind": "scores",
            "tokenizer": tokenizer_hash(tokenizer),
            "special": self._special,
            "settings": self.settings.to_dict(),
            "documents": [document.to_dict() for document in self.documents],
            "environment": environment(),
        }
        self.fingerprint = fingerprint_of(self._decisive)
        self._kept: PerplexityResult | None = None

    def measure(
        self,
        model: nn.Module,
        step: int = 0,
        *,
        tokens_seen: int | None = None,
        last: bool = False,
        progress: Progress = silent,
    ) -> PerplexityResult:
        """Measures a model as it is now, patched or not, wrapped or sharded, and leaves no trace in it.

        Args:
            model: The model.
            step: The number of optimizer steps that it was trained for.
            tokens_seen: The number of tokens that it was trained on.
            last: Whether this is the model that is kept, so that rows of later steps go: the best one is not the
                newest (`load_best_model_at_end`).
            progress: Called after every forward with the row's label, tokens done and tokens in all.

        Returns:
            All rows so far, this one the last. Rows of later steps, of a training that this one takes the place of,
            are gone.

        Raises:
            PosencError: The model cannot be scored, or the folder not be written to.
        """
        model = unwrap(model, adapters=False)
        sharded = is_sharded(model)
        if self._device is not None and not sharded and _can_move(model):
            model.to(self._device)
        with without_side_effects(model), self._precision(model):
            described = self._described(model, sharded)
            state = self._state(described)
            stage = Stage(label_of(model, step), step, tokens_seen or None, state)
            before = broadcast(self._rows())
            if before is None or stage not in stages_of(before):
                row = self._row(model, stage, described, sharded, progress)
                before = with_row(before, row, stage)
                self._keep(before)
            elif last and stage != stages_of(before)[-1]:
                before = up_to(before, stage)
                self._keep(before)
        return before

    def _row(
        self,
        model: nn.Module,
        stage: Stage,
        described: dict[str, Any],
        sharded: bool,
        progress: Progress,
    ) -> PerplexityResult:
        here = group_shard()
        candidate = Candidate.as_it_is(model, stage.label, stage.state)
        run = PerplexityRun(
            model,
            self.documents,
            [candidate],
            self.settings,
            special=self._special,
        )
        with self._store(here, sharded) as store:
            known = known_to_all(run, store)
            execute(
                run,
                Both(known, store),
                ALONE if sharded else here,
                progress,
                strict=sharded and here.count > 1,
            )
        result = result_of(
            run,
            known_to_all(run, known),
            model=described,
            source=self._source,
            original=original_length(model, [candidate]),
            skipped=self._skipped,
            command=self._command,
        )
        assert result is not None
        result.fingerprint = self.fingerprint
        return result

    def _described(self, model: nn.Module, sharded: bool) -> dict[str, Any]:
        """What the result says of the model; the same in every process, though each may hold another part of it."""
        described = describe_model(name_of(model), model, self._tokenizer, self._special, self._bos)
        hashes = gather(described["weights_sha256"])
        described["weights_sha256"] = _digest(hashes) if sharded else hashes[0]
        if self._autocast is not None:
            described["autocast"] = str(self._autocast).removeprefix("torch.")
        return described

    def _state(self, described: dict[str, Any]) -> str:
        """A hash of all that the numbers depend on and that changes from row to row."""
        fixed = ("name", "revision", "tokenizer", "bos")
        return _digest({key: value for key, value in described.items() if key not in fixed})

    def _precision(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(next(model.parameters()).device.type, self._autocast)

    def _store(self, here: Shard, sharded: bool) -> contextlib.AbstractContextManager[Records]:
        if self.output is None or (sharded and here.index):
            return contextlib.nullcontext(Memory())
        return Store(self.output, self._decisive, ALONE if sharded else here)

    def _rows(self) -> PerplexityResult | None:
        """What was measured before, of the same documents in the same way."""
        if self.output is None or group_shard().index:
            return self._kept
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((self.output / FILE).read_text(encoding="utf-8"))
            if values["fingerprint"] == self.fingerprint:
                return PerplexityResult.from_dict(values)
        return None

    def _keep(self, result: PerplexityResult) -> None:
        self._kept = result
        if self.output is not None and group_shard().index == 0:
            result.write_json(self.output / FILE)


def score(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Entry],
    *,
    lengths: Sequence[int],
    output: Path | str | None = None,
    **options: Any,
) -> PerplexityResult:
    """Measures a model as it is, patched or not, once; `Scores` measures it again while it is trained.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        documents: As for `Scores`, as are the others.
        lengths: See there.
        output: See there.
        **options: See there.
    """
    return Scores(tokenizer, documents, lengths=lengths, output=output, **options).measure(model)


def label_of(model: nn.Module, step: int = 0) -> str:
    """The name of a row: what is patched in, and how long the model was trained so."""
    patch = get_patch(model)
    name = UNPATCHED if patch is None else Candidate.installed(patch.config).label
    if step:
        return f"{name}, after {step:,} step{'s' * (step > 1)}"
    return name if patch is None else f"{name}, before"


def precision_of(arguments: TrainingArguments) -> torch.dtype | None:
    """The precision that a training computes in beside the weights' own."""
    if arguments.bf16:
        return torch.bfloat16
    return torch.float16 if arguments.fp16 else None


def _can_move(model: Any) -> bool:
    """Whether nothing has put the model's parts where they are for good: a device map, or quantization."""
    return not (hasattr(model, "hf_device_map") or getattr(model, "is_quantized", False))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# What a training says of its scores: the tables, and one sentence before them.


def conclusion(scores: PerplexityResult) -> str:
    """What the training did, at the longest length and at the one that the model came with.

    Args:
        scores: The rows of `Scores`.

    Returns:
        One line, such as `tail perplexity at 1,024 tokens: 160.9 unpatched, 9.87 patched, 9.05 after 48 steps; ...`.
    """
    shown = before_and_after(scores)
    protocol, lengths = shown.settings.protocols[-1], shown.settings.lengths
    short = shown.original if shown.original in lengths else lengths[0]
    assert short is not None
    said = [
        f"at {length:,} tokens: {', '.join(_numbers(shown, protocol, length))}"
        for length in dict.fromkeys((lengths[-1], short))
    ]
    return f"{protocol} perplexity {'; '.join(said)}"


def _numbers(scores: PerplexityResult, protocol: str, length: int) -> Iterator[str]:
    for stage, row in zip(stages_of(scores), scores.candidates, strict=True):
        name = "unpatched" if row.method is None else "patched"
        if stage.step:
            name = f"after {stage.step:,} step{'s' * (stage.step > 1)}"
        cell = scores.cell(row.label, protocol, length)
        yield f"{number(None if cell is None else cell.perplexity)} {name}"
