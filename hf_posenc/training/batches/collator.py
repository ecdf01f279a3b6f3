"""From examples to the batch that a model takes: one collator for every way of giving positions.

What each way must emit is a matter of what transformers reads into `position_ids` where there is no attention mask:
every step other than 1 between two neighbours begins a new document (`masking_utils.find_packed_sequence_indices`), and
attention does not cross it. Packed documents need that, and no cache; drawn positions need a mask of ones against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import PosencError, unknown
from hf_posenc.training.batches.positions import DRAWS, Numbers, generator

POSITIONS = ("contiguous", "packed", *DRAWS)
"""How tokens get their positions."""

IGNORED = -100
"""The label of a token that is not learned: the `ignore_index` of `torch.nn.functional.cross_entropy`."""


class PositionCollator(TrainerCallback):
    """Makes batches, with positions that are drawn anew in every epoch.

    A draw depends on the seed, the epoch and the tokens of the example: not on its place, the number of processes or of
    workers, or on where a run was interrupted. The epoch has to be told: the Trainer does it where the collator is also
    one of its callbacks, `Trainer(..., data_collator=collator, callbacks=[collator])`; another loop calls `set_epoch`
    before it iterates over its dataloader. (accelerate's dataloaders tell the epoch to a dataset, but not in every
    arrangement of samplers: neither with two processes nor after a resume.)

    Args:
        positions: `"contiguous"`: 0 .. n - 1. `"packed"`: an example holds several documents, which begin at 0 each
            and do not see each other. `"pose"`, `"random"`, `"cream"`: see `hf_posenc.training.batches.positions`.
        target_length: The long context that drawn positions reach, in tokens; not for the other two.
        seed: Of the draws.
        pad_token_id: What stands behind the shorter examples of a batch; nobody sees it.
        flatten: Packed: put all examples of a batch into one row. Flash attention, which is given no mask, tells
            documents apart in a batch of one row only.

    Raises:
        PosencError: An unknown name, or positions to be drawn without a target length.
    """

    def __init__(
        self,
        positions: str = "contiguous",
        *,
        target_length: int | None = None,
        seed: int = 0,
        pad_token_id: int = 0,
        flatten: bool = False,
    ) -> None:
        if positions not in POSITIONS:
            raise unknown("way of giving positions", positions, POSITIONS)
        if positions in DRAWS and target_length is None:
            raise PosencError(
                f"positions={positions!r} draws positions up to a long context: give target_length, in tokens."
            )
        self.positions, self.target_length = positions, target_length
        self.seed, self.pad_token_id = seed, pad_token_id
        self.flatten = flatten and positions == "packed"
        # In shared memory, since workers that live on from epoch to epoch would keep a copy.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that draws are for, counted from 0."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch, in every worker too."""
        self._epoch.fill_(epoch)

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer before it asks its dataloader for the epoch's first batch."""
        self.set_epoch(int(state.epoch or 0))  # a resumed run begins within an epoch

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch of b examples, the longest of n tokens.

        Args:
            examples: `input_ids` of each; packed also `document_lengths`, which sum to the number of its tokens.

        Returns:
            `input_ids` and `labels` (b, n), int64. Packed: `position_ids` (b, n), and `use_cache` False. Flattened: all
            of them (1, b n). Drawn:
            `position_ids` and `attention_mask` (b, n). Contiguous: `attention_mask`, where lengths differ. The label of
            a document's first token is -100, since no token of that document stands in front of it.

        Raises:
            PosencError: Packed examples without their documents' lengths, or more tokens than the long context has.
        """
        rows = [np.asarray(example["input_ids"], dtype=np.int64) for example in examples]
        firsts = [self._firsts(e, len(r)) for e, r in zip(examples, rows, strict=True)]
        labels = [_without(row, first) for row, first in zip(rows, firsts, strict=True)]
        batch: dict[str, Any] = {
            "input_ids": _stacked(rows, self.pad_token_id),
            "labels": _stacked(labels, IGNORED),
        }
        mask = _stacked([np.ones_like(row) for row in rows], 0)
        if self.positions == "packed":
            within = [_restarting(first, len(r)) for first, r in zip(firsts, rows, strict=True)]
            batch["position_ids"] = _stacked(within, 0)
            if self.flatten:
                batch = {name: rows.reshape(1, -1) for name, rows in batch.items()}
            batch["use_cache"] = False
        elif self.positions in DRAWS:
            batch["position_ids"] = _stacked([self._drawn(row) for row in rows], 0)
            batch["attention_mask"] = mask
        elif not bool(mask.all()):
            batch["attention_mask"] = mask
        return batch

    def _firsts(self, example: Mapping[str, Any], length: int) -> Numbers:
        """Where the documents of an example begin."""
        if self.positions != "packed":
            return np.zeros(1, dtype=np.int64)
        if "document_lengths" not in example:
            raise PosencError(
                "positions='packed' needs the column document_lengths, which says where documents end. The Trainer "
                "drops it unless TrainingArguments has remove_unused_columns=False."
            )
        lengths = np.asarray(example["document_lengths"], dtype=np.int64)
        if int(lengths.sum()) != length or (lengths < 1).any():
            raise PosencError(
                f"document_lengths {lengths.tolist()} sum to {int(lengths.sum()):,}; the example has {length:,} "
                "tokens, and every document at least one token."
            )
        return np.cumsum(lengths) - lengths

    def _drawn(self, ids: Numbers) -> Numbers:
        assert self.target_length is not None
        if len(ids) > self.target_length:
            raise PosencError(
                f"An example has {len(ids):,} tokens, more than target_length={self.target_length:,}: positions="
                f"{self.positions!r} spreads short examples over a longer context."
            )
        random = generator(self.seed, self.epoch, ids)
        return DRAWS[self.positions](len(ids), self.target_length, random)


def _without(ids: Numbers, firsts: Numbers) -> Numbers:
    labels = ids.copy()
    labels[firsts] = IGNORED
    return labels


def _restarting(firsts: Numbers, length: int) -> Numbers:
    """0, 1, ... from every first token on."""
    places = np.arange(length)
    document = np.searchsorted(firsts, places, side="right") - 1
    return places - firsts[document]


def _stacked(rows: Sequence[Numbers], fill: int) -> Tensor:
    """Rows of different lengths as one tensor (b, n), with `fill` behind the shorter ones."""
    longest = max(map(len, rows))
    padded = [np.pad(row, (0, longest - len(row)), constant_values=fill) for row in rows]
    return torch.from_numpy(np.stack(padded))
