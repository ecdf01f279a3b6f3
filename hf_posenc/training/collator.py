"""Batches for all kinds of positions, and positions that reach a long context from short examples.

Each draw takes the number of tokens n, the target length L and a random generator, and returns n rising positions
within 0 .. L - 1, shape (n,). Those of a terminal prompt also take its number of tokens k, the last k of the n.

Without an attention mask, transformers reads document boundaries from `position_ids`: every step other than 1 between
two neighbours begins a new document, and attention does not cross it (`masking_utils.find_packed_sequence_indices`).
Packed documents need this, and no cache. Drawn positions need a mask of ones to prevent it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerState

from hf_posenc.errors import PosencError
from hf_posenc.lengths import read_length
from hf_posenc.training.options import PROMPTED, check_positions

Numbers = NDArray[np.int64]
Draw = Callable[..., NDArray[Any]]

CREAM_SIGMA = 3.0
"""Standard deviation of CREAM's Gaussian, in halves of the trained length (the default of the authors' code)."""


def generator(seed: int, epoch: int, ids: Numbers) -> np.random.Generator:
    """Return the random generator of one example in one epoch; its tokens identify it, wherever it is in the data."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{seed} {epoch} ".encode())
    digest.update(np.ascontiguousarray(ids, dtype="<i8").data)
    return np.random.default_rng(int.from_bytes(digest.digest(), "little"))


def pose(length: int, target: int, random: np.random.Generator) -> Numbers:
    """PoSE (Zhu et al. 2023, arXiv 2309.10400, section 3.2) with two chunks and continuous text (`v_i = 0`).

    The first chunk has 1 .. ceil(n / 2) tokens and keeps its positions. The second chunk is moved by a skip of
    0 .. L - n. Both draws are uniform, as in the authors' code, whose first chunk always begins at 0.
    """
    first = int(random.integers(1, (length + 1) // 2, endpoint=True))
    skip = int(random.integers(0, target - length, endpoint=True))
    positions = np.arange(length, dtype=np.int64)
    positions[first:] += skip
    return positions


def randomized(length: int, target: int, random: np.random.Generator) -> Numbers:
    """Randomized positions (Ruoss et al. 2023, arXiv 2305.16843, section 3): n of L without repetition, in order."""
    chosen = random.choice(target, size=length, replace=False, shuffle=False)
    return np.sort(chosen).astype(np.int64)


def cream(length: int, target: int, random: np.random.Generator) -> Numbers:
    """CREAM (Wu et al. 2024, arXiv 2406.07138): a head at 0, a tail that ends at L, a middle in between.

    As in the authors' code, head and tail have k tokens each: k = n / 3 or k = 4 L / n with even odds (the paper's
    relativity and continuity). x is drawn from a Gaussian of mean 1 + L / n, clipped to [2, 2 L / n], and rounded down
    to alpha. The last position of the middle's m = n - 2k tokens is uniform from k + (m - 1) alpha / 2 to
    n alpha / 2 - k - 1. The Gaussian is therefore centred on the last position that the middle can reach, about L / 2,
    and the middle itself lies before it on average. The clipped mass of the Gaussian lies on the two ends, as in the
    interpolation of the authors' code. Without it, alpha = 2 L / n would never be drawn and the positions in front of
    the tail would never be used.

    Differences: k is drawn for every example, not once for 3,000; L / n need not be whole; k is at most n / 3, so that
    short examples have a middle; the text is continuous, as in `pose`.
    """
    scale, third = target / length, length // 3
    edge = third if random.random() < 0.5 else min(int(4 * scale), third)
    middle = length - 2 * edge
    alpha = math.floor(min(max(random.normal(1 + scale, CREAM_SIGMA), 2.0), 2 * scale))
    least = int(edge + (middle - 1) * alpha / 2)
    most = int(length * alpha / 2) - edge - 1
    last = int(random.integers(least, most, endpoint=True))
    head, tail = np.arange(edge), np.arange(target - edge, target)
    return np.concatenate([head, np.arange(last - middle + 1, last + 1), tail]).astype(np.int64)


def endprompt(length: int, target: int, random: np.random.Generator, prompt: int = 1) -> Numbers:
    """EndPrompt (Chen et al. 2026, arXiv 2605.14589): the text at 0 .. n - k - 1, the prompt at L - k .. L - 1."""
    positions = np.arange(length, dtype=np.int64)
    positions[length - prompt :] += target - length
    return positions


def endprompt_random(
    length: int, target: int, random: np.random.Generator, prompt: int = 1
) -> Numbers:
    """EndPrompt's random variant: the prompt begins anywhere behind the text, uniformly, as in the authors' code."""
    return endprompt(length, int(random.integers(length, target, endpoint=True)), random, prompt)


DRAWS: dict[str, Draw] = {
    "pose": pose,
    "random": randomized,
    "cream": cream,
    "endprompt": endprompt,
    "endprompt_random": endprompt_random,
}

IGNORED = -100
"""Label of a token without a loss: the `ignore_index` of `torch.nn.functional.cross_entropy`."""


class PositionCollator(TrainerCallback):
    """Builds batches, with positions that are drawn anew in every epoch.

    A draw depends on the seed, the epoch and the tokens of the example. It does not depend on the example's index, the
    number of processes or workers, or on where a run was interrupted.

    The collator must be notified of each epoch. The Trainer does this if the collator is also one of its callbacks:
    `Trainer(..., data_collator=collator, callbacks=[collator])`. Other loops call `set_epoch` before they iterate over
    their dataloader. (accelerate's dataloaders notify the dataset, but not with two processes or after a resume.)

    With a `curriculum`, positions reach one length after another, each in an equal share of the run's steps. A loader
    prepares batches steps ahead, so each holds the positions of every length, and those of the step are chosen when the
    model reads it: in the Trainer by this callback, in other loops by `at_step`.

    Args:
        positions: `"contiguous"`: 0 .. n - 1. `"packed"`: an example holds several documents, which begin at 0 each
            and do not attend to each other. `"pose"`, `"random"`, `"cream"`, `"endprompt"`, `"endprompt_random"`:
            the draws of `DRAWS`.
        target_length: The long context that drawn positions reach, in tokens, also as `"32k"`; unused by the other two.
            By default the last length of the curriculum.
        curriculum: Rising lengths in tokens, up to the long context (Randomized YaRN, arXiv 2606.23687).
        seed: The seed of the draws.
        pad_token_id: Padding behind the shorter examples of a batch; it is masked.
        flatten: For packed batches: put all examples into one row. Flash attention, which gets no mask, separates
            documents only in batches of one row.
        terminal_prompt: Token ids that `"endprompt"` and `"endprompt_random"` append to every example, with a loss.

    Raises:
        PosencError: An unknown name, a number that is none, drawn positions without a target length, a curriculum that
            does not rise, exceeds the target length, or has no draws to bound, or a terminal prompt of other positions.

    Examples:
        >>> from hf_posenc.training import PositionCollator
        >>> collator = PositionCollator("pose", target_length="32k")
        >>> batch = collator([{"input_ids": list(range(100))}])
        >>> batch["position_ids"].shape  # (batch, tokens); positions below 32,768
        torch.Size([1, 100])
    """

    def __init__(
        self,
        positions: str = "contiguous",
        *,
        target_length: int | str | None = None,
        curriculum: Sequence[int | str] | None = None,
        seed: int = 0,
        pad_token_id: int = 0,
        flatten: bool = False,
        terminal_prompt: Sequence[int] = (),
    ) -> None:
        check_positions(positions)
        stages = [read_length(length, "A length of the curriculum") for length in curriculum or ()]
        if stages and positions not in DRAWS:
            raise PosencError(
                f"A curriculum bounds positions that are drawn ({', '.join(DRAWS)}), not positions={positions!r}."
            )
        if any(after <= before for before, after in itertools.pairwise(stages)):
            raise PosencError(f"A curriculum is a list of rising lengths in tokens, not {stages}.")
        if target_length is not None:
            target_length = read_length(target_length, "target_length")
        elif positions in DRAWS and not stages:
            raise PosencError(
                f"positions={positions!r} draws positions up to a long context: give target_length, in tokens."
            )
        target = target_length or max(stages, default=None)
        if target is not None and stages and stages[-1] > target:
            raise PosencError(
                f"The curriculum ends at {stages[-1]:,} tokens, beyond target_length={target:,}: end it there, or "
                "give a longer one."
            )
        self.terminal_prompt = np.array(terminal_prompt, dtype=np.int64)
        if bool(len(self.terminal_prompt)) != (positions in PROMPTED):
            raise PosencError(
                f"A terminal prompt of {len(self.terminal_prompt)} tokens and positions={positions!r}: give "
                f"terminal_prompt, token ids, with {' or '.join(PROMPTED)}, and with no other kind."
            )
        self.positions, self.target_length, self.curriculum = positions, target, tuple(stages)
        self.seed, self.pad_token_id = seed, pad_token_id
        self.flatten = flatten and positions == "packed"
        # Shared memory: persistent workers would otherwise keep a copy.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._stage = 0
        self._hook: RemovableHandle | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the draws, counted from 0."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, in every worker too."""
        self._epoch.fill_(epoch)

    def on_epoch_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self.set_epoch(int(state.epoch or 0))  # a resumed run begins within an epoch

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **parts: Any) -> None:
        self.on_train_end()
        if self.curriculum:
            # As it was before it was wrapped for several processes.
            model: nn.Module = parts["model"]
            self._hook = model.register_forward_pre_hook(
                lambda _, args, kwargs: (args, self._of_stage(kwargs)), with_kwargs=True
            )

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self._stage = self._stage_of(state.global_step, state.max_steps)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def at_step(self, batch: Mapping[str, Any], step: int, steps: int) -> dict[str, Any]:
        """Return a batch with the positions of one optimizer step of all `steps`, counted from 0; in the Trainer, omit.

        Without a curriculum the batch is unchanged.
        """
        self._stage = self._stage_of(step, steps)
        return self._of_stage(batch)

    def _stage_of(self, step: int, steps: int) -> int:
        """Return the index in the curriculum: k lengths have equal shares of the steps, up to rounding."""
        return min(step * len(self.curriculum) // max(steps, 1), len(self.curriculum) - 1)

    def _of_stage(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        positions = batch.get("position_ids")
        stages = len(self.curriculum)
        if not stages or positions is None or positions.dim() != 3 or positions.shape[1] != stages:
            return dict(batch)  # not of this collator, such as texts that are scored
        return {**batch, "position_ids": positions[:, self._stage]}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_hook": None}  # of this process's model; workers get a copy

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch of b examples, the longest of n tokens.

        Args:
            examples: `input_ids` of each; packed also `document_lengths`, which sum to the number of its tokens.
                `labels`, if not empty, are its labels; otherwise every token is its own.

        Returns:
            `input_ids` and `labels` (b, n), int64; a terminal prompt is their end. Packed: `position_ids` (b, n), and
            `use_cache` False. Flattened: all of them (1, b n). Drawn: `position_ids` and `attention_mask` (b, n); with
            a curriculum of k lengths `position_ids` (b, k, n), of which the model gets one (b, n). Contiguous:
            `attention_mask`, if lengths differ. A document's first token has the label -100: no token of that document
            precedes it.

        Raises:
            PosencError: Examples without tokens, with labels of another number, packed without document lengths, or of
                more tokens than the long context, or the first length of the curriculum, has.
        """
        rows, labels, documents = list[Numbers](), list[Numbers](), list[Numbers]()
        for index, example in enumerate(examples):
            if not len(example["input_ids"]):
                raise PosencError(f"Example {index} of the batch has no tokens: leave it out.")
            row, given = _numbers(example["input_ids"]), example.get("labels")
            label = row.copy() if given is None or not len(given) else _numbers(given)
            if len(label) != len(row):
                raise PosencError(
                    f"Example {index} of the batch has {len(label):,} labels for {len(row):,} tokens: give one each, "
                    "-100 where there is no loss."
                )
            row = np.concatenate([row, self.terminal_prompt])
            label = np.concatenate([label, self.terminal_prompt])
            lengths = self._documents(example, len(row))
            label[np.cumsum(lengths) - lengths] = IGNORED
            rows.append(row)
            labels.append(label)
            documents.append(lengths)
        batch: dict[str, Any] = {
            "input_ids": _stack(rows, self.pad_token_id),
            "labels": _stack(labels, IGNORED),
        }
        mask = _stack([np.ones_like(row) for row in rows], 0)
        if self.positions == "packed":
            restarting = [np.concatenate([np.arange(n) for n in lengths]) for lengths in documents]
            batch["position_ids"] = _stack(restarting, 0)
            if self.flatten:
                batch = {name: rows.reshape(1, -1) for name, rows in batch.items()}
            batch["use_cache"] = False
        elif self.positions in DRAWS:
            stages = self.curriculum or (self.target_length,)
            drawn = [_stack([self._draw(row, stage) for row in rows], 0) for stage in stages]
            batch["position_ids"] = torch.stack(drawn, 1) if self.curriculum else drawn[0]
            batch["attention_mask"] = mask
        elif not bool(mask.all()):
            batch["attention_mask"] = mask
        return batch

    def _documents(self, example: Mapping[str, Any], length: int) -> Numbers:
        if self.positions != "packed":
            return np.array([length])
        if "document_lengths" not in example:
            raise PosencError(
                "positions='packed' needs the column document_lengths, which holds the length of each document. The "
                "Trainer drops it unless TrainingArguments has remove_unused_columns=False."
            )
        lengths = _numbers(example["document_lengths"])
        if int(lengths.sum()) != length or (lengths < 1).any():
            raise PosencError(
                f"document_lengths {lengths.tolist()} sum to {int(lengths.sum()):,}; the example has {length:,} "
                "tokens, and every document at least one token."
            )
        return lengths

    def _draw(self, ids: Numbers, target: int | None) -> NDArray[Any]:
        assert target is not None
        if len(ids) > target:
            limit = "the curriculum's first " if self.curriculum else "target_length="
            raise PosencError(
                f"An example has {len(ids):,} tokens, more than {limit}{target:,}: positions={self.positions!r} "
                "spreads short examples over a longer context."
            )
        prompt = (len(self.terminal_prompt),) if self.positions in PROMPTED else ()
        random = generator(self.seed, self.epoch, ids)
        return DRAWS[self.positions](len(ids), target, random, *prompt)


def _numbers(values: Any) -> Numbers:
    """Return whole numbers in one row as an array of its own; TypeError for fractions, which would be cut."""
    return np.asarray(values).astype(np.int64, casting="same_kind")


def _stack(rows: Sequence[NDArray[Any]], fill: int) -> Tensor:
    """Return rows of different lengths as one tensor (b, n), padded with `fill`."""
    tensors = [torch.from_numpy(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill)
