"""Held-out perplexity before, during and after a training, measured on the same tokens each time."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hf_posenc.evaluation.documents import Entry, as_entries, load_documents, special_prefix
from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate, original_length
from hf_posenc.evaluation.measuring.execute import Progress, collected, execute, silent
from hf_posenc.evaluation.measuring.identity import check_tokenizer
from hf_posenc.evaluation.measuring.store import ALONE, Key, Records, Store, fingerprint_of
from hf_posenc.evaluation.options import output_folder, read_whole
from hf_posenc.evaluation.perplexity.protocols import make_settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.perplexity.run import PerplexityRun
from hf_posenc.files import to_json, write_atomically
from hf_posenc.lengths import read_length
from hf_posenc.model.unwrapping import is_sharded, unwrap
from hf_posenc.patch.patching import get_patch
from hf_posenc.training.processes import gather, group_shard, without_side_effects

if TYPE_CHECKING:
    from transformers import TrainingArguments

FILE = "perplexity.json"
PROTOCOLS = ("prefix", "tail")


@dataclass(frozen=True)
class Stage:
    """The state of the model in one row of a table: label, optimizer steps and tokens seen before it, and its hash."""

    label: str
    step: int
    tokens_seen: int | None = field(compare=False)
    state: str


def stages_of(table: PerplexityResult) -> list[Stage]:
    """Return the stages of a table's rows, in order."""
    return [Stage(**stage) for stage in table.source.get("stages", ())]


def before_and_after(table: PerplexityResult) -> PerplexityResult:
    """Return the rows before the training, and the last one."""
    stages = stages_of(table)
    return _select(table, [each.label for each in stages if each.step == 0 or each is stages[-1]])


def _select(table: PerplexityResult, labels: Collection[str]) -> PerplexityResult:
    stages = [dataclasses.asdict(each) for each in stages_of(table) if each.label in labels]
    return dataclasses.replace(
        table,
        source={**table.source, "stages": stages},
        candidates=[entry for entry in table.candidates if entry.label in labels],
        records=[record for record in table.records if record.method in labels],
        failures=[failure for failure in table.failures if failure.method in labels],
        curves={label: curve for label, curve in table.curves.items() if label in labels},
    )


def _with_row(table: PerplexityResult, row: PerplexityResult) -> PerplexityResult:
    """Append a row. Rows of later steps belong to a training that this one replaces, and are removed."""
    earlier_rows = zip(stages_of(table), table.candidates, strict=True)
    now = (stages_of(row)[0].step, row.candidates[0].method is not None)
    labels = [e.label for stage, e in earlier_rows if (stage.step, e.method is not None) < now]
    earlier = _select(table, labels)
    names = ("candidates", "records", "failures")
    lists: dict[str, Any] = {n: [*getattr(earlier, n), *getattr(row, n)] for n in names}
    return dataclasses.replace(
        row,
        source={**row.source, "stages": [*earlier.source["stages"], *row.source["stages"]]},
        curves={**earlier.curves, **row.curves},
        **lists,
    )


class GroupRecords(Records):
    """Records of all ranks of a process group; this rank's new values go to its own records too."""

    def __init__(self, keys: Sequence[Key], own: Records) -> None:
        super().__init__()
        self._keys, self._own = keys, own
        self.refresh()

    def append(self, key: Key, value: Mapping[str, Any]) -> None:
        self._own.append(key, value)
        super().append(key, value)

    def refresh(self) -> None:
        """Exchange values with the other ranks. Call it on all ranks."""
        for values in gather({key: self._own.get(key) for key in self._keys}):
            for key, value in values.items():
                if value is not None:
                    super().append(key, value)


class Scores:
    """Perplexities of one model before, during and after its training, on the same held-out tokens.

    Each measurement is one row of a growing table, written to `output/perplexity.json` at its end. The values of an
    interrupted measurement are in `output/records`, under a hash of everything that determines a number, including the
    weights. A repeated call measures only what is missing.

    With several processes, all of them must make each call. They share the windows, with the same sums as one process;
    a sharded model runs the same windows on all of them together.

    Args:
        tokenizer: The model's tokenizer.
        documents: Texts, or documents of a reader of `hf_posenc.evaluation.documents`; not used for training.
        lengths: Context lengths in tokens.
        output: Folder of the numbers and records; `None`: they are kept in memory.
        limit: Number of usable documents after which reading stops.
        device: Device to move an unsharded model to; by default it is measured on its own.
        autocast: The precision that the training computes in beside the weights' own (`precision_of`), so that every
            row is computed alike.
        **settings: Further fields of `Settings`, such as `tail_tokens`; the protocols are prefix and tail by default.

    Raises:
        PosencError: Incompatible settings, or no usable document.

    Examples:
        >>> from hf_posenc import patch_model
        >>> from hf_posenc.training import Scores
        >>> scores = Scores(tokenizer, texts, lengths=[64, 128])
        >>> before = scores.measure(model)
        >>> table = scores.measure(patch_model(model, "yarn", scale=4))
        >>> [row.label for row in table.candidates]
        ['none', 'yarn (scale 4), before']
        >>> ratio = table.cell("yarn (scale 4), before", "tail", 128).ratio  # to the row above it
    """

    def __init__(
        self,
        tokenizer: Any,
        documents: Iterable[str | Entry],
        *,
        lengths: Iterable[int | str] | int | str,
        output: Path | str | None = None,
        limit: int | None = None,
        device: torch.device | None = None,
        autocast: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        self.output = output_folder(output, silent)
        check_tokenizer(tokenizer)
        given = [lengths] if isinstance(lengths, int | str) else lengths
        lengths = [read_length(length, "lengths") for length in given]
        self._tokenizer, self._device, self._autocast = tokenizer, device, autocast
        options = {"protocols": PROTOCOLS, **settings, "lengths": tuple(sorted(set(lengths)))}
        self.settings, self._bos = make_settings(options, None, bos=None)
        self._special = special_prefix(tokenizer, self._bos)
        self.documents, self._skipped = load_documents(
            as_entries(documents),
            tokenizer,
            min_tokens=max(1, self.settings.shortest_document - len(self._special)),
            limit=None if limit is None else read_whole(limit, "limit"),
        )
        self._source = {"kind": "training", "limit": limit, "max_doc_tokens": None}
        self._decisive = {
            "kind": "scores",
            "tokenizer": identity.tokenizer_hash(tokenizer),
            "special": self._special,
            "settings": dataclasses.asdict(self.settings),
            "documents": [document.to_dict() for document in self.documents],
            "environment": identity.environment(),
        }
        self.fingerprint = fingerprint_of(self._decisive)  # of all but the model
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
        """Measure a model in its present state, patched or not, wrapped or sharded, without side effects on it.

        Args:
            model: The model.
            step: The number of optimizer steps that it was trained for.
            tokens_seen: The number of tokens that it was trained on.
            last: Whether this model is the final one, though not the latest (`load_best_model_at_end`).
            progress: Called after every forward with the row's label, operations done and in all.

        Returns:
            All rows so far. A new one is the last; rows of later steps, of a training that it replaces, are removed.

        Raises:
            PosencError: The model cannot be scored, or the folder cannot be written to.
        """
        model = unwrap(model, adapters=False)
        sharded = is_sharded(model)
        fixed = hasattr(model, "hf_device_map") or getattr(model, "is_quantized", False)
        if self._device is not None and not sharded and not fixed:
            model.to(self._device)
        precision: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._autocast is not None:
            precision = torch.autocast(next(model.parameters()).device.type, self._autocast)
        with without_side_effects(model), precision:
            described = identity.describe_model(
                None, model, self._tokenizer, self._special, self._bos
            )
            hashes = gather(described["weights_sha256"])  # each rank may hold another shard
            both = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16]
            described["weights_sha256"] = both if sharded else hashes[0]
            if self._autocast is not None:
                described["autocast"] = str(self._autocast).removeprefix("torch.")
            # Everything that the numbers depend on and that changes from row to row.
            unchanging = ("name", "revision", "tokenizer", "bos")
            state = fingerprint_of({k: v for k, v in described.items() if k not in unchanging})
            stage = Stage(label_of(model, step), step, tokens_seen or None, state)
            table = gather(self._read_table())[0]
            stages = [] if table is None else stages_of(table)
            if table is None or stage not in stages:
                row = self._measure_row(model, stage, described, sharded, progress)
                table = row if table is None else _with_row(table, row)
            elif last and stage != stages[-1]:
                table = _select(table, [each.label for each in stages[: stages.index(stage) + 1]])
            else:
                return table
        self._kept = table
        if self.output is not None and group_shard().index == 0:
            values = table.to_dict()
            text = to_json({**values, "checksum": fingerprint_of(values)})
            write_atomically(self.output / FILE, text)
        return table

    def _measure_row(
        self,
        model: nn.Module,
        stage: Stage,
        described: dict[str, Any],
        sharded: bool,
        progress: Progress,
    ) -> PerplexityResult:
        shard = group_shard()
        together = sharded and shard.count > 1
        share = ALONE if sharded else shard
        candidate = Candidate.as_it_is(model, stage.label, stage.state)
        run = PerplexityRun(
            model,
            self.documents,
            [candidate],
            self.settings,
            special=self._special,
            metadata={
                "model": described,
                "source": {**self._source, "stages": [dataclasses.asdict(stage)]},
                "original": original_length(model, [candidate]),
                "skipped": self._skipped,
            },
        )
        run.fingerprint = self.fingerprint
        store: contextlib.AbstractContextManager[Records] = contextlib.nullcontext(Records())
        if self.output is not None and not (sharded and shard.index):
            store = Store(self.output, self._decisive, share)
        with store as own:
            records = GroupRecords([item.key for item in run.items], own)
            execute(run, records, share, progress, strict=together)
        records.refresh()
        return cast(PerplexityResult, collected(run, records))

    def _read_table(self) -> PerplexityResult | None:
        if self.output is None or group_shard().index:
            return self._kept
        path = self.output / FILE
        if not path.exists():
            return None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            values = json.loads(path.read_bytes())
            if values.pop("checksum", None) == fingerprint_of(values):
                same = values["fingerprint"] == self.fingerprint
                return PerplexityResult.from_dict(values) if same else None
        warnings.warn(
            f"{path} is damaged, or not a training's. It is replaced, and any rows of earlier steps in it are lost.",
            stacklevel=3,
        )
        return None


def score(
    model: nn.Module, tokenizer: Any, documents: Iterable[str | Entry], **options: Any
) -> PerplexityResult:
    """Measure a model in its present state once, as `Scores(tokenizer, documents, **options).measure(model)`.

    Examples:
        >>> from hf_posenc.training import score
        >>> result = score(model, tokenizer, texts, lengths=[64, 128])
        >>> cell = result.cell("none", "tail", 128)
        >>> cell.tokens, cell.documents
        (64, 2)
    """
    return Scores(tokenizer, documents, **options).measure(model)


def label_of(model: nn.Module, step: int = 0) -> str:
    """Return the label of a row: the patch, and the number of steps of training."""
    patch = get_patch(model)
    name = UNPATCHED if patch is None else Candidate.installed(patch.config).label
    state = _after(step) or ("" if patch is None else "before")
    return f"{name}, {state}" if state else name


def _after(step: int) -> str:
    return f"after {step:,} step{'s' * (step > 1)}" if step else ""


def precision_of(arguments: TrainingArguments) -> torch.dtype | None:
    """Return the precision that a training computes in beside the weights' own."""
    return torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else None


def conclusion(scores: PerplexityResult) -> str:
    """Return the effect of the training at the longest length and at the model's original one, in one line.

    For example `tail perplexity at 1,024 tokens: 160.9 unpatched, 9.87 patched, 9.05 after 48 steps; ...`.
    """
    shown = before_and_after(scores)
    protocol, lengths = shown.settings.protocols[-1], shown.settings.lengths
    short = shown.original if shown.original in lengths else lengths[0]
    parts = []
    for length in dict.fromkeys((lengths[-1], short)):
        numbers = []
        for stage, row in zip(stages_of(shown), shown.candidates, strict=True):
            cell = shown.cell(row.label, protocol, length or 0)
            name = _after(stage.step) or ("unpatched" if row.method is None else "patched")
            numbers.append(f"{number(None if cell is None else cell.perplexity)} {name}")
        parts.append(f"at {length:,} tokens: {', '.join(numbers)}")
    return f"{protocol} perplexity {'; '.join(parts)}"
