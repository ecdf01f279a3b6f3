"""Scores of answers: teacher-forced, in one forward per sample, or generated.

If every token of the answer is the most probable one at its position, greedy decoding would have written this answer.
A blank in front of it does not count: whether a number or another word comes next is a matter of wording.
For the rank, its summed log probability is compared with those of the distractors, each read from the prompt's cache.
If the right answer, read from there first and last, reproduces the forward's own value, the cache is exact and the sums
count. Otherwise, and where a cache is not exact or cannot be cropped, every distractor gets a forward of its own.
A full sliding window or a recurrent state can be cropped only if it has recorded what it dropped; there the prompt is
read once more, with recording.

Where a prompt has other questions about the same text, these are read too, from the cache if it is exact. Each sum is
reduced by the logarithm of the answer's mean probability over all questions (`calibrated`).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.retrieval.prompts import Answer, Prompt
from hf_posenc.evaluation.scoring.decoder import input_device
from hf_posenc.evaluation.scoring.frugal import FrugalScorer
from hf_posenc.evaluation.scoring.memory import is_out_of_memory, release
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.model.weights import rounding_dtype

SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
SAME_HALF = 0.1
"""Nats per token within which an exact cache reproduces the plain forward; others differ by more."""


class NotFiniteError(PosencError):
    """The logits of an answer are not finite numbers."""


@dataclass(frozen=True)
class Verdict:
    """The scores of one sample.

    Attributes:
        correct: Whether every token of the answer behind its leading blank is the most probable one.
        score: The share of the answer's parts of which that holds.
        nats: Negative log-likelihood of the whole answer, in nats.
        rank: 1 plus the number of distractors that are at least as probable, or whose `calibrated` value is at least as
            large if the prompt has other questions; `None` without `candidates` for it.
    """

    correct: bool
    score: float
    nats: float
    rank: int | None
    candidates: int | None


class AnswerScorer:
    """Scores the answers of prompts; the model may be patched between calls.

    Where the scorer's `pieces` is false, answers are not read from a cache either.
    """

    def __init__(self, model: nn.Module, scorer: FrugalScorer) -> None:
        self.model, self.scorer = model, scorer
        forward = unwrap(model).forward  # an adapter's names no arguments
        self._few_logits = "logits_to_keep" in inspect.signature(forward).parameters

    @torch.inference_mode()
    def __call__(self, prompt: Prompt) -> Verdict:
        """Score one prompt; raise `NotFiniteError` if the logits are not finite."""
        answer, wrong = prompt.answer, prompt.distractors
        predicted: Tensor | None = None
        sums: list[float] | None = None
        if self.scorer.pieces and self._few_logits and wrong:
            try:
                predicted, sums = self._with_cache(prompt)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                release(error)  # answers scored one by one need no cache
        if predicted is None:
            predicted = self._forward(prompt, answer)
        predicted = _single(predicted)
        right = _log_likelihood(predicted, answer.ids)
        hits = predicted.argmax(-1).cpu() == torch.tensor(answer.ids)
        hits[: answer.blank] = True
        if wrong and sums is None:
            sums = [right, *self._alone(prompt, wrong)]
            if prompt.questions:
                candidates = (answer, *wrong)
                asked = map(prompt.with_question, prompt.questions)
                sums = calibrated([sums, *(self._alone(other, candidates) for other in asked)])
        if not all(map(math.isfinite, (right, *(sums or ())))):
            raise NotFiniteError("the logits are not finite")
        starts = (0, *answer.ends)
        parts = [bool(hits[a:b].all()) for a, b in zip(starts, answer.ends, strict=False)]
        return Verdict(
            correct=bool(hits.all()),
            score=sum(parts) / len(parts),
            nats=-right,
            rank=None if sums is None else 1 + sum(other >= sums[0] for other in sums[1:]),
            candidates=None if sums is None else len(sums),
        )

    def _forward(self, prompt: Prompt, answer: Answer) -> Tensor:
        """Return the logits that predict an answer, shape (tokens, vocabulary), from a forward of its own."""
        ids = torch.cat([prompt.ids, torch.tensor(answer.ids)])
        # The last token predicts nothing, but where the length matters it is of that length.
        read_last = not self.scorer.pieces
        return self.scorer.logits(ids, len(prompt.ids), read_last=read_last)

    def _alone(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
        """Return the sums of answers, each from a forward of its own; those that differ in the last token share one."""
        logits: dict[tuple[int, ...], Tensor] = {}
        for answer in answers:
            if answer.ids[:-1] not in logits:
                logits[answer.ids[:-1]] = self._forward(prompt, answer)
        return [_log_likelihood(logits[answer.ids[:-1]], answer.ids) for answer in answers]

    def _with_cache(self, prompt: Prompt) -> tuple[Tensor, list[float] | None]:
        """Return the logits that predict the answer, and the sums of all answers read from the cache if it is exact."""
        answer = prompt.answer.ids
        device = input_device(self.model)
        read = torch.cat([prompt.ids, torch.tensor(answer[:-1], dtype=torch.int64)])
        output: Any = self.model(
            input_ids=read.unsqueeze(0).to(device), use_cache=True, logits_to_keep=len(answer)
        )
        predicted = output.logits[0]
        cache = getattr(output, "past_key_values", None)
        if not _crop(cache, len(answer) - 1):
            # It records from the end of the prompt on, so its question cannot be removed.
            cache = None if prompt.questions else self._recording_cache(prompt)
        if cache is None:
            return predicted, None
        dtype = rounding_dtype(self.model)
        plain, sums = _log_likelihood(predicted, answer), []
        # The right answer again at the end: the distractors must have left no trace.
        for candidate in (prompt.answer, *prompt.distractors, prompt.answer):
            total = _log_likelihood(predicted[:1], candidate.ids[:1])
            if more := len(candidate.ids) - 1:
                ids = torch.tensor([candidate.ids[:-1]], device=device)
                output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                total += _log_likelihood(output.logits[0], candidate.ids[1:])
            exact = abs(plain - total) / len(answer) <= SAME.get(dtype, SAME_HALF)
            if candidate is prompt.answer and not exact:
                return predicted, None
            sums.append(total)
            if not _crop(cache, more):
                return predicted, None
        sums = sums[:-1]
        if prompt.questions:
            own = tuple(prompt.ids[prompt.text :].tolist())
            if not _crop(cache, len(own)):
                return predicted, None
            candidates = (prompt.answer, *prompt.distractors)
            rows: list[list[float]] = []
            # Its own question first and last, as above: an answer of one token has not been read from the cache.
            for question in (own, *prompt.questions, own):
                row = self._from_cache(cache, question, candidates)
                if row is None or (question is own and not _same(row, sums, candidates, dtype)):
                    return predicted, None
                rows.append(row)
            sums = calibrated([sums, *rows[1:-1]])
        return predicted, sums

    def _from_cache(
        self, cache: Any, question: Sequence[int], answers: Sequence[Answer]
    ) -> list[float] | None:
        """Return the sums of answers behind a question, both read from a cache; `None` if it cannot be restored."""
        device = input_device(self.model)

        def read(ids: Sequence[int]) -> Tensor:
            behind = torch.tensor([ids], device=device)
            output: Any = self.model(input_ids=behind, past_key_values=cache, use_cache=True)
            logits: Tensor = output.logits[0]
            return logits

        first, sums = read(question)[-1:], []
        for answer in answers:
            total = _log_likelihood(first, answer.ids[:1])
            if len(answer.ids) > 1:
                total += _log_likelihood(read(answer.ids[:-1]), answer.ids[1:])
                if not _crop(cache, len(answer.ids) - 1):
                    return None
            sums.append(total)
        return sums if _crop(cache, len(question)) else None

    def _recording_cache(self, prompt: Prompt) -> Any:
        """Return the cache of the prompt alone, recording what full sliding windows and recurrent states drop."""
        ids = prompt.ids.unsqueeze(0).to(input_device(self.model))
        output: Any = self.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache: Any = getattr(output, "past_key_values", None)
        if not hasattr(cache, "activate_past_recording"):
            return None
        cache.activate_past_recording()  # records only what follows a prefill
        return cache


def _crop(cache: Any, tokens: int) -> bool:
    """Remove the last tokens from a cache; return False if it cannot, such as a full sliding window."""
    if not tokens:
        return True
    with contextlib.suppress(RuntimeError, ValueError, NotImplementedError, AttributeError):
        cache.crop(-tokens)
        return True
    return False


def _same(
    sums: Sequence[float], others: Sequence[float], answers: Sequence[Answer], dtype: torch.dtype
) -> bool:
    bound = SAME.get(dtype, SAME_HALF)
    rows = zip(sums, others, answers, strict=True)
    return all(abs(one - other) / len(answer.ids) <= bound for one, other, answer in rows)


def calibrated(sums: Sequence[Sequence[float]]) -> list[float]:
    """Return the first row of log probabilities, shape (questions, answers), over their mean of all rows, in nats.

    That is the pointwise mutual information of a question and each answer, if all questions are as frequent; after the
    domain-conditional one of Holtzman et al. (arXiv 2104.08315). What makes an answer probable behind every question,
    such as its place in the text, is divided out.
    """
    rows = torch.tensor(sums, dtype=torch.float64)
    information = rows[0] - rows.logsumexp(0) + math.log(len(rows))
    return [
        round(float(value), 9) for value in information
    ]  # equal rows: a tie, whatever the rounding


def _single(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _log_likelihood(logits: Tensor, ids: Sequence[int]) -> float:
    """Return the summed log probability of tokens, in float64, from their logits, shape (n, vocabulary)."""
    index = torch.tensor(ids, device=logits.device).unsqueeze(-1)
    return float(_single(logits).log_softmax(-1).gather(-1, index).double().sum())


_CONTROL = re.compile(r"[\x00-\x1f]")


@torch.inference_mode()
def generate(model: nn.Module, tokenizer: Any, prompt: Prompt, new_tokens: int) -> str:
    """Return the text of at most `new_tokens` tokens that the model generates greedily behind a prompt.

    Control characters become line ends, as in `postprocess_pred` of RULER's `scripts/eval/evaluate.py`.
    """
    ids = prompt.ids.unsqueeze(0).to(input_device(model))
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    live: Any = model
    output = live.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=padding,  # a batch of one has none; unset, transformers warns
    )
    text: str = tokenizer.decode(output[0, len(prompt.ids) :], skip_special_tokens=True)
    return _CONTROL.sub("\n", text.strip()).strip()
