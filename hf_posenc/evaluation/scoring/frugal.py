"""Scoring with less at a time whenever memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.evaluation.scoring.memory import is_out_of_memory, release

LEAST_CHUNK, LEAST_MLP, LEAST_PREFILL = 64, 512, 512
SHRINK = 4
"""Limits of what is run at a time, in tokens, and the factor of a reduction."""


class FrugalScorer:
    """Scores windows of one shape, `batch` of them at once, and fewer whenever memory runs out.

    The batch is reduced first. Then, where logits did not fit, their number; where the decoder did not, the tokens that
    an MLP runs at a time, then those of a prefill. A reduction is kept, so that later windows do not run out of memory
    anew. Once nothing is left to reduce, the platform's error is raised.

    Attributes:
        pieces: Whether a prefill in pieces gives the same numbers for the current patch.
        stateful: Whether the model keeps the largest length it has read as state (transformers' own dynamic RoPE).
            Two tokens in front of every forward reset it.
        patient: Reduce the batch when memory runs out; otherwise raise.
    """

    def __init__(self, scorer: TokenScorer, batch: int = 1) -> None:
        self.scorer, self.batch = scorer, batch
        self.pieces, self.stateful, self.patient = True, False, True

    def __call__(
        self, windows: Sequence[Tensor], first: int, *, read_last: bool = True
    ) -> list[Tensor]:
        """Return the losses of windows of shape (n,), each with the arguments and the result of `TokenScorer`."""
        done: list[Tensor] = []
        while len(done) < len(windows):
            part = list(windows[len(done) : len(done) + self.batch])
            # One alone goes in without a batch dimension: its numbers then never depend on `batch`.
            ids = torch.stack(part) if len(part) > 1 else part[0]
            forward = partial(self.scorer, ids, first, read_last=read_last)
            losses = self._attempt(forward, ids, ids.shape[-1])
            if losses is not None:
                done += list(losses) if len(part) > 1 else [losses]
        return done

    def logits(self, ids: Tensor, first: int, *, read_last: bool = True) -> Tensor:
        """Return the logits that predict tokens `first .. n-1` of a window of shape (n,), (n - first, vocabulary)."""

        def joined() -> Tensor:
            parts = list(self.scorer.logits(ids, first, read_last=read_last))
            return torch.cat([part.to(parts[0].device) for part in parts])

        while (logits := self._attempt(joined, ids, len(ids) - first)) is None:
            pass
        return logits

    def reset(self, ids: Tensor) -> None:
        """Make a stateful model forget the largest length it has read; it reads two of these token ids."""
        if self.stateful:
            self.scorer(ids[:2])

    @property
    def head_replay(self) -> str:
        """Agreement of head replay with full logits on the probe: `"bit-exact"`, `"up to rounding"` or `"off"`."""
        if not self.scorer.replays:
            return "off"
        return "bit-exact" if self.scorer.exact else "up to rounding"

    @property
    def reduced(self) -> dict[str, int | None]:
        """Windows and tokens that are run at a time, after any reduction."""
        scorer = self.scorer
        return {
            "batch": self.batch,
            "chunk": scorer.chunk,
            "mlp": scorer.mlp,
            "prefill": scorer.prefill if scorer.refused is None else None,
        }

    def _attempt(self, forward: Callable[[], Tensor], ids: Tensor, scored: int) -> Tensor | None:
        """Run a forward; return None if memory ran out and less is run at a time from now on."""
        try:
            self.reset(ids.reshape(-1, ids.shape[-1])[0])
            return forward()
        except Exception as error:
            if not self.patient or not is_out_of_memory(error):
                raise
            release(error)
            if not self._reduce(ids, scored):
                raise
            return None

    def _reduce(self, ids: Tensor, scored: int) -> bool:
        """Run less at a time from now on; return False if nothing can be reduced."""
        scorer, tokens = self.scorer, ids.shape[-1]
        prefill = min(scorer.prefill or tokens, tokens)
        mlp = min(scorer.mlp or prefill, prefill)
        if ids.dim() > 1:
            self.batch = max(1, len(ids) // 2)
        elif scorer.in_head:
            if scorer.chunk <= LEAST_CHUNK or scored <= LEAST_CHUNK:
                return False
            scorer.chunk = max(LEAST_CHUNK, min(scorer.chunk, tokens) // SHRINK)
        elif mlp > LEAST_MLP and scorer.mlps:
            scorer.mlp = max(LEAST_MLP, mlp // SHRINK)
        # Refused pieces are run whole all the same.
        elif prefill > LEAST_PREFILL and self.pieces and scorer.replays and scorer.refused is None:
            scorer.prefill = max(LEAST_PREFILL, prefill // SHRINK)
        else:
            return False
        return True
