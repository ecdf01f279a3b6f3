"""Scores of answers: teacher-forced, in one forward per sample, or generated.

If every token of the answer is the most probable one at its position, greedy decoding would have written this answer.
A blank in front of it does not count: whether a number or another word comes next is a matter of wording.
For the rank, its summed log probability is compared with those of the distractors, all read behind copies of the
prompt's cache, as many at a time as fit into memory. If the right answer reproduces the forward's own value there, the
cache is exact and the sums count. Otherwise every distractor gets a forward of its own. A full sliding window or a
recurrent state cannot be cropped back to the prompt, which is then read once more.

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
        answer, candidates = prompt.answer.ids, (prompt.answer, *prompt.distractors)
        output = self._read([[*prompt.ids.tolist(), *answer[:-1]]], logits_to_keep=len(answer))
        predicted, cache = output.logits[0], getattr(output, "past_key_values", None)
        if not _crop(cache, len(answer) - 1):
            # Behind the prompt alone; its question cannot be removed from it.
            alone = (
                None if prompt.questions else self._read([prompt.ids.tolist()], logits_to_keep=1)
            )
            cache = getattr(alone, "past_key_values", None)
        if cache is None:
            return predicted, None
        sums = self._behind(cache, predicted[:1], candidates)
        if not self._same([_log_likelihood(predicted, answer)], sums, candidates[:1]):
            return predicted, None
        if prompt.questions:
            own = tuple(prompt.ids[prompt.text :].tolist())
            if not _crop(cache, len(own)):
                return predicted, None
            rows = [self._from_cache(cache, own, candidates)]
            if not self._same(rows[0], sums, candidates):
                return predicted, None
            rows += [self._from_cache(cache, other, candidates) for other in prompt.questions]
            sums = calibrated([sums, *rows[1:]])
        return predicted, sums

    def _from_cache(
        self, cache: Any, question: Sequence[int], answers: Sequence[Answer]
    ) -> list[float]:
        """Return the sums of answers behind a question, both read behind a copy of a cache."""
        behind = copy.deepcopy(cache)
        first = self._read([question], past_key_values=behind).logits[0, -1:]
        return self._behind(behind, first, answers)

    def _behind(self, cache: Any, first: Tensor, answers: Sequence[Answer]) -> list[float]:
        """Return the sums of answers behind copies of a cache.

        `first`, (1, vocabulary), are the logits of the last token in the cache. The last token of an answer is not
        read, as it predicts nothing.
        """
        sums, count = list[float](), _affordable(cache, len(answers))
        for start in range(0, len(answers), count):
            group = answers[start : start + count]
            longest = max(len(answer.ids) for answer in group)
            logits = first.new_empty(len(group), 0, first.shape[-1])
            if longest > 1:
                rows = copy.deepcopy(cache)
                if count > 1:
                    rows.batch_repeat_interleave(len(group))
                ends = [answer.ids[-1:] * (longest - len(answer.ids)) for answer in group]
                texts = [(*one.ids[:-1], *end) for one, end in zip(group, ends, strict=True)]
                logits = self._read(texts, past_key_values=rows).logits
            for answer, row in zip(group, logits, strict=True):
                sums.append(_log_likelihood(torch.cat((first, row))[: len(answer.ids)], answer.ids))
        return sums

    def _read(self, texts: Sequence[Sequence[int]], **options: Any) -> Any:
        """Return the model's output for texts of one length."""
        ids = torch.tensor(texts, device=input_device(self.model))
        return self.model(input_ids=ids, use_cache=True, **options)

    def _same(
        self, sums: Sequence[float], others: Sequence[float], answers: Sequence[Answer]
    ) -> bool:
        """Return whether the sums of these answers are others, but for rounding."""
        bound = SAME.get(rounding_dtype(self.model), SAME_HALF)
        rows = zip(sums, others, answers, strict=False)
        return all(abs(one - other) / len(answer.ids) <= bound for one, other, answer in rows)


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
    if not tensors or not all(isinstance(x, Tensor) for x in tensors):
        return 1
    size, device = sum(x.nbytes for x in tensors), tensors[0].device
    spare = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else SPARE
    return max(1, min(count, int(spare // max(1, size))))


def calibrated(sums: Sequence[Sequence[float]]) -> list[float]:
    """Return the first row of log probabilities, shape (questions, answers), over their mean of all rows, in nats.

    That is the pointwise mutual information of a question and each answer, if all questions are as frequent; after the
    domain-conditional one of Holtzman et al. (arXiv 2104.08315). What makes an answer probable behind every question,
    such as its place in the text, is divided out.
    """
    rows = torch.tensor(sums, dtype=torch.float64)
    information = rows[0] - rows.logsumexp(0) + math.log(len(rows))
    # Equal rows are a tie, whatever the rounding.
    return [round(float(value), 9) for value in information]


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
