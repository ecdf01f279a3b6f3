"""Held-out perplexity before, during and after a training: the same tokens each time, by the project's own scorer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posenc.evaluation.candidates import UNPATCHED, Candidate, original_length
from hf_posenc.evaluation.documents import Entry, as_entries, load_documents
from hf_posenc.evaluation.identity import (
    describe_model,
    environment,
    name_of,
    tokenizer_hash,
)
from hf_posenc.evaluation.perplexity import Progress, Run
from hf_posenc.evaluation.processes import Shard
from hf_posenc.evaluation.requests import Request
from hf_posenc.evaluation.result import PerplexityResult
from hf_posenc.evaluation.runs import make_settings, result_of, special_tokens
from hf_posenc.evaluation.store import ALONE, Memory, Records, Store, fingerprint_of
from hf_posenc.patching import get_patch
from hf_posenc.training.ranks import from_all, from_first, is_sharded, place, without_wrapper
from hf_posenc.training.shared_records import Both, known_to_all
from hf_posenc.training.stages import Stage, stages_of, up_to, with_row
from hf_posenc.training.untouched import untouched

if TYPE_CHECKING:
    from transformers import TrainingArguments

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
        progress: Progress = lambda label, done, total: None,
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
        model = without_wrapper(model)
        sharded = is_sharded(model)
        if self._device is not None and not sharded and _can_move(model):
            model.to(self._device)
        with untouched(model), self._precision(model):
            described = self._described(model, sharded)
            state = self._state(described)
            stage = Stage(label_of(model, step), step, tokens_seen or None, state)
            before = from_first(self._rows())
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
        here = place()
        candidate = Candidate.as_it_is(model, stage.label, stage.state)
        run = Run(
            model,
            self.documents,
            [candidate],
            self.settings,
            special=self._special,
            strict=sharded and here.count > 1,
        )
        with self._store(here, sharded) as store:
            known = known_to_all(run, store)
            run.measure(Both(known, store), ALONE if sharded else here, progress)
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
        hashes = from_all(described["weights_sha256"])
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
        if self.output is None or place().index:
            return self._kept
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((self.output / FILE).read_text(encoding="utf-8"))
            if values["fingerprint"] == self.fingerprint:
                return PerplexityResult.from_dict(values)
        return None

    def _keep(self, result: PerplexityResult) -> None:
        self._kept = result
        if self.output is not None and place().index == 0:
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
    name = UNPATCHED if patch is None else Request.installed(patch.config).label
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
