"""One collator for all kinds of positions.

Without an attention mask, transformers reads document boundaries from `position_ids`: every step other than 1 between
two neighbours begins a new document, and attention does not cross it (`masking_utils.find_packed_sequence_indices`).
Packed documents need this, and no cache. Drawn positions need a mask of ones to prevent it.
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
"""The kinds of positions."""

IGNORED = -100
"""Label of a token without a loss: the `ignore_index` of `torch.nn.functional.cross_entropy`."""


class PositionCollator(TrainerCallback):
    """Builds batches, with positions that are drawn anew in every epoch.

    A draw depends on the seed, the epoch and the tokens of the example. It does not depend on the example's index, the
    number of processes or workers, or on where a run was interrupted.

    The collator must be notified of each epoch. The Trainer does this if the collator is also one of its callbacks:
    `Trainer(..., data_collator=collator, callbacks=[collator])`. Other loops call `set_epoch` before they iterate over
    their dataloader. (accelerate's dataloaders notify the dataset, but not with two processes or after a resume.)

    Args:
        positions: `"contiguous"`: 0 .. n - 1. `"packed"`: an example holds several documents, which begin at 0 each
            and do not attend to each other. `"pose"`, `"random"`, `"cream"`: see
            `hf_posenc.training.batches.positions`.
        target_length: The long context that drawn positions reach, in tokens; unused by the other two.
        seed: The seed of the draws.
        pad_token_id: Padding behind the shorter examples of a batch; it is masked.
        flatten: For packed batches: put all examples into one row. Flash attention, which gets no mask, separates
            documents only in batches of one row.

    Raises:
        PosencError: An unknown name, or drawn positions without a target length.
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
            raise unknown("kind of positions", positions, POSITIONS)
        if positions in DRAWS and target_length is None:
            raise PosencError(
                f"positions={positions!r} draws positions up to a long context: give target_length, in tokens."
            )
        self.positions, self.target_length = positions, target_length
        self.seed, self.pad_token_id = seed, pad_token_id
        self.flatten = flatten and positions == "packed"
        # Shared memory: persistent workers would otherwise keep a copy.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch of the draws, counted from 0."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, in every worker too."""
        self._epoch.fill_(epoch)

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Set the epoch before the Trainer requests its first batch."""
        self.set_epoch(int(state.epoch or 0))  # a resumed run begins within an epoch

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch of b examples, the longest of n tokens.

        Args:
            examples: `input_ids` of each; packed also `document_lengths`, which sum to the number of its tokens.

        Returns:
            `input_ids` and `labels` (b, n), int64. Packed: `position_ids` (b, n), and `use_cache` False. Flattened: all
            of them (1, b n). Drawn: `position_ids` and `attention_mask` (b, n). Contiguous: `attention_mask`, if
            lengths differ. A document's first token has the label -100: no token of that document precedes it.

        Raises:
            PosencError: Packed examples without document lengths, or more tokens than the long context has.
        """
        rows = [np.asarray(example["input_ids"], dtype=np.int64) for example in examples]
        starts = [self._starts(e, len(r)) for e, r in zip(examples, rows, strict=True)]
        labels = [row.copy() for row in rows]
        for row, first in zip(labels, starts, strict=True):
            row[first] = IGNORED
        batch: dict[str, Any] = {
            "input_ids": _stack(rows, self.pad_token_id),
            "labels": _stack(labels, IGNORED),
        }
        mask = _stack([np.ones_like(row) for row in rows], 0)
        if self.positions == "packed":
            restarting = [_restart(first, len(r)) for first, r in zip(starts, rows, strict=True)]
            batch["position_ids"] = _stack(restarting, 0)
            if self.flatten:
                batch = {name: rows.reshape(1, -1) for name, rows in batch.items()}
            batch["use_cache"] = False
        elif self.positions in DRAWS:
            batch["position_ids"] = _stack([self._draw(row) for row in rows], 0)
            batch["attention_mask"] = mask
        elif not bool(mask.all()):
            batch["attention_mask"] = mask
        return batch

    def _starts(self, example: Mapping[str, Any], length: int) -> Numbers:
        """Return the index of each document's first token."""
        if self.positions != "packed":
            return np.zeros(1, dtype=np.int64)
        if "document_lengths" not in example:
            raise PosencError(
                "positions='packed' needs the column document_lengths, which holds the length of each document. The "
                "Trainer drops it unless TrainingArguments has remove_unused_columns=False."
            )
        lengths = np.asarray(example["document_lengths"], dtype=np.int64)
        if int(lengths.sum()) != length or (lengths < 1).any():
            raise PosencError(
                f"document_lengths {lengths.tolist()} sum to {int(lengths.sum()):,}; the example has {length:,} "
                "tokens, and every document at least one token."
            )
        return np.cumsum(lengths) - lengths

    def _draw(self, ids: Numbers) -> Numbers:
        assert self.target_length is not None
        if len(ids) > self.target_length:
            raise PosencError(
                f"An example has {len(ids):,} tokens, more than target_length={self.target_length:,}: positions="
                f"{self.positions!r} spreads short examples over a longer context."
            )
        random = generator(self.seed, self.epoch, ids)
        return DRAWS[self.positions](len(ids), self.target_length, random)


def _restart(starts: Numbers, length: int) -> Numbers:
    """Return positions that restart at 0 with every document, shape (length,)."""
    indices = np.arange(length)
    document = np.searchsorted(starts, indices, side="right") - 1
    return indices - starts[document]


def _stack(rows: Sequence[Numbers], fill: int) -> Tensor:
    """Return rows of different lengths as one tensor (b, n), padded with `fill`."""
    longest = max(map(len, rows))
    padded = [np.pad(row, (0, longest - len(row)), constant_values=fill) for row in rows]
    return torch.from_numpy(np.stack(padded))
