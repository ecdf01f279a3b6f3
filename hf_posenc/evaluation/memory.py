"""Answers a lack of memory with less at a time, and says what it took."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import one_line
from hf_posenc.evaluation.head_replay import TokenScorer

LEAST_CHUNK = 64
LEAST_PREFILL = 512
SHRINK = 4
OUT_OF_MEMORY = "out of memory"


class FrugalScorer:
    """Scores windows of one shape, fewer at a time whenever memory runs out.

    First fewer windows at a time, then fewer logits, then a prefill in pieces. What a run has come down to it keeps, so
    that not every window runs out of memory anew.

    Args:
        scorer: What scores.
        batch: Windows that are run at once, to begin with.
        patient: Whether to answer a lack of memory with less at a time; otherwise it is raised.

    Attributes:
        batch: Windows that are run at once.
        pieces: Whether a prefill in pieces gives the same numbers here; set by the caller for what is patched in.
    """

    def __init__(self, scorer: TokenScorer, batch: int = 1, patient: bool = True) -> None:
        self.scorer, self.batch, self.pieces, self._patient = scorer, batch, True, patient

    def __call__(
        self, windows: Sequence[Tensor], first: int, *, read_last: bool = True
    ) -> list[Tensor]:
        """The losses of each window, as `TokenScorer` gives them.

        Args:
            windows: Token ids, each of shape (n,).
            first: As `TokenScorer` takes it, as is `read_last`.
            read_last: See there.

        Raises:
            torch.OutOfMemoryError: Or whatever the lack of memory looks like here, when nothing is left to cut.
        """
        done: list[Tensor] = []
        while len(done) < len(windows):
            part = list(windows[len(done) : len(done) + self.batch])
            # One alone goes in without a batch dimension: its numbers then never depend on `batch`.
            ids = torch.stack(part) if len(part) > 1 else part[0]
            try:
                losses = self._score(ids, first, read_last)
            except Exception as error:
                if not self._patient or not is_out_of_memory(error) or not self._cut(ids):
                    raise
                release(error)
                continue
            done += list(losses) if len(part) > 1 else [losses]
        return done

    @property
    def reduced(self) -> dict[str, int | None]:
        """How much is run at a time now."""
        return {"batch": self.batch, "chunk": self.scorer.chunk, "prefill": self.scorer.prefill}

    def _score(self, ids: Tensor, first: int, read_last: bool) -> Tensor:
        prefill = self.scorer.prefill
        if not self.pieces:
            self.scorer.prefill = None
        try:
            return self.scorer(ids, first, read_last=read_last)
        finally:
            self.scorer.prefill = prefill

    def _cut(self, ids: Tensor) -> bool:
        """Takes less at a time; whether there was something to cut."""
        tokens = ids.shape[-1]
        if ids.dim() > 1:
            self.batch = max(1, len(ids) // 2)
        elif self.scorer.chunk > LEAST_CHUNK and tokens > LEAST_CHUNK:
            self.scorer.chunk = max(LEAST_CHUNK, min(self.scorer.chunk, tokens) // SHRINK)
        elif (
            self.pieces
            and self.scorer.replays
            and self.scorer.refused is None  # else they would be run whole all the same
            and self._pieced(tokens) > LEAST_PREFILL
        ):
            self.scorer.prefill = max(LEAST_PREFILL, self._pieced(tokens) // SHRINK)
        else:
            return False
        return True

    def _pieced(self, tokens: int) -> int:
        return min(self.scorer.prefill or tokens, tokens)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is a lack of memory: CUDA's, the system's, or that of PyTorch's allocator for CPUs."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in said for words in ("not enough memory", "out of memory", "can't allocate memory")
    )


def reason_of(error: Exception) -> str:
    """Why there is no number, in the words of the results and reports."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    said = one_line(error)
    return said if isinstance(error, PosencError) else f"{type(error).__name__}: {said}"


def release(error: Exception) -> None:
    """Gives back the memory of what an error ended."""
    error.__traceback__ = None  # its frames hold the tensors that are to be freed
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
