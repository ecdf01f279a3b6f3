"""Scores of answers: teacher-forced, in one forward per sample, or generated.

If every token of the answer is the most probable one at its position, greedy decoding would have written this answer.
A blank in front of it does not count: whether a number or another word comes next is a matter of wording.
For the rank, its summed log probability is compared with those of the distractors, all read from the prompt's cache: in
one forward behind copies of it, or one by one where copies are large or a cache has none, the right answer once more at
the end. If the right answer reproduces the forward's own value there, the cache is exact and the sums count. Otherwise,
and where a cache is not exact or cannot be cropped, every distractor gets a forward of its own.
A full sliding window or a recurrent state can be cropped only if it has recorded what it dropped; there the prompt is
read once more, with recording.

Where a prompt has other questions about the same text, these are read too, from the cache if it is exact. Each sum is
reduced by the logarithm of the answer's mean probability over all questions (`calibrated`).
"""

from __future__ import annotations

import contextlib
import copy
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
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.evaluation.scoring.memory import is_out_of_memory, release
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.model.weights import rounding_dtype

SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
SAME_HALF = 0.1
"""Nats per token within which an exact cache reproduces the plain forward; others differ by more."""

SPARE = 2**30
"""Bytes that copies of a cache may take on a CPU; on a GPU they may take a quarter of what is free."""


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

    def __init__(self, model: nn.Module, scorer: TokenScorer) -> None:
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
        return self.scorer.whole_logits(ids, len(prompt.ids), read_last=read_last)

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
        candidates = (prompt.answer, *prompt.distractors)
        dtype = rounding_dtype(self.model)
        sums = self._behind(cache, predicted[:1], candidates)
        plain = _log_likelihood(predicted, answer)
        if sums is None or not _same([plain], sums[:1], candidates[:1], dtype):
            return predicted, None
        if prompt.questions:
            own = tuple(prompt.ids[prompt.text :].tolist())
            if not _crop(cache, len(own)):
                return predicted, None
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
        first = self._read(cache, [question])[0, -1:]
        sums = self._behind(cache, first, answers)
        return sums if sums is not None and _crop(cache, len(question)) else None

    def _read(self, cache: Any, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of texts of one length behind a cache of as many rows, (texts, tokens, vocabulary)."""
        ids = torch.tensor(texts, device=input_device(self.model))
        output: Any = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        logits: Tensor = output.logits
        return logits

    def _behind(self, cache: Any, first: Tensor, answers: Sequence[Answer]) -> list[float] | None:
        """Return the sums of answers behind a cache, which stays as it is; `None` if it does not.

        `first`, (1, vocabulary), are the logits of the last token in the cache. The last token of an answer is not
        read, as it predicts nothing.
        """
        longest = max(len(answer.ids) for answer in answers) - 1
        if not longest:
            return [_log_likelihood(first, answer.ids) for answer in answers]
        count = _affordable(cache, len(answers))
        # One by one, the right answer again at the end: the others must have left no trace.
        read = answers if count > 1 else (*answers, answers[0])
        sums = []
        for start in range(0, len(read), count):
            group = read[start : start + count]
            rows = cache
            if count > 1:
                rows = copy.deepcopy(cache)
                rows.batch_repeat_interleave(len(group))
                texts = [
                    [*each.ids[:-1], *each.ids[-1:] * (longest + 1 - len(each.ids))]
                    for each in group
                ]
            else:
                texts = [[*group[0].ids[:-1]]]
            logits = self._read(rows, texts) if texts[0] else first.new_empty(1, 0, first.shape[-1])
            for answer, row in zip(group, logits, strict=True):
                sums.append(_log_likelihood(torch.cat((first, row))[: len(answer.ids)], answer.ids))
            if count == 1 and not _crop(cache, len(texts[0])):
                return None
        if len(read) > len(answers):
            dtype = rounding_dtype(self.model)
            if not _same(sums[-1:], sums[:1], answers[:1], dtype):
                return None
        return sums[: len(answers)]

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


def _affordable(cache: Any, count: int) -> int:
    """Return how many copies of a cache, at most so many, fit into memory to spare; 1 if it is not known."""
    layers = getattr(cache, "layers", ())
    tensors: list[Any] = [getattr(layer, x, None) for layer in layers for x in ("keys", "values")]
    records = any(getattr(layer, "record_past", False) for layer in layers)
    if not tensors or records or not all(isinstance(x, Tensor) for x in tensors):
        return 1
    size, device = sum(x.nbytes for x in tensors), tensors[0].device
    spare = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else SPARE
    return max(1, min(count, int(spare // max(1, size))))


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
