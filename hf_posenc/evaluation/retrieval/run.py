"""Retrieval: every candidate on the same prompts; `measure_retrieval`, its parts, and the scores of answers.

Answers are generated, or scored teacher-forced, in one forward per sample. If every token of the answer is the most
probable one at its position, greedy decoding would have written this answer. A blank in front of it does not count:
whether a number or another word comes next is a matter of wording.

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
import hashlib
import inspect
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import special_prefix
from hf_posenc.evaluation.grid import MethodEntry
from hf_posenc.evaluation.measuring import execute as machine
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import Candidate, checked_candidates, within_reach
from hf_posenc.evaluation.measuring.execute import Attempt, Failures, Progress, Value, silent
from hf_posenc.evaluation.measuring.store import Key
from hf_posenc.evaluation.options import RetrievalOptions, output_folder, with_fields
from hf_posenc.evaluation.perplexity.protocols import default_lengths
from hf_posenc.evaluation.retrieval import Answer, Kit, Prompt, Sample, Scene, lay_out
from hf_posenc.evaluation.retrieval.result import Failure, LeftOut, Record, RetrievalResult
from hf_posenc.evaluation.retrieval.tasks import DECODES, RetrievalSettings, get_task, settings_of
from hf_posenc.evaluation.scoring import is_out_of_memory, release
from hf_posenc.evaluation.scoring.decoder import evaluation_mode, input_device
from hf_posenc.evaluation.scoring.head_replay import Pieces, TokenScorer
from hf_posenc.model.forward import CACHES, cache_name, cache_of
from hf_posenc.model.unwrapping import swapped, unwrap
from hf_posenc.model.weights import rounding_dtype

# Scores of answers.

SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
SAME_HALF = 0.1
"""Nats per token within which an exact cache reproduces the plain forward; others differ by more."""

SPARE = 2**30
"""Bytes that copies of a cache may take on a CPU; on a GPU they may take a quarter of what is free."""

Answers = Sequence[Answer]


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
        """Score one prompt; raise if the logits are not finite."""
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
            raise PosencError("the logits are not finite")
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

    def _alone(self, prompt: Prompt, answers: Answers) -> list[float]:
        """Return the sums of answers, each from a forward of its own; those that differ in the last token share one."""
        logits: dict[tuple[int, ...], Tensor] = {}
        for answer in answers:
            if answer.ids[:-1] not in logits:
                logits[answer.ids[:-1]] = self._forward(prompt, answer)
        return [_log_likelihood(logits[answer.ids[:-1]], answer.ids) for answer in answers]

    def _with_cache(self, prompt: Prompt) -> tuple[Tensor, list[float] | None]:
        """Return the logits that predict the answer, and the sums of all answers read from the cache if it is exact."""
        text, answer = prompt.ids.tolist(), prompt.answer.ids
        candidates = (prompt.answer, *prompt.distractors)
        if (pieces := self.scorer.pieces_of(len(text))) is not None:
            output = self._in_pieces(text, pieces)
            if (cache := cache_of(output)) is None:
                return self._forward(prompt, prompt.answer), None
            predicted, sums = self._behind(cache, output.logits[0], candidates)
        else:
            output = self._read([[*text, *answer[:-1]]], logits_to_keep=len(answer))
            predicted, cache = output.logits[0], cache_of(output)
            if not _crop(cache, len(answer) - 1):
                # Behind the prompt alone; its question cannot be removed from it.
                alone = None if prompt.questions else self._read([text], logits_to_keep=1)
                cache = cache_of(alone)
            if cache is None:
                return predicted, None
            sums = self._behind(cache, predicted[:1], candidates)[1]
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

    def _from_cache(self, cache: Any, question: Sequence[int], answers: Answers) -> list[float]:
        """Return the sums of answers behind a question, both read behind a copy of a cache."""
        behind = copy.deepcopy(cache)
        first = self._read([question], behind).logits[0, -1:]
        return self._behind(behind, first, answers)[1]

    def _behind(self, cache: Any, first: Tensor, answers: Answers) -> tuple[Tensor, list[float]]:
        """Return the logits that predict the first of answers behind copies of a cache, and the sums of all.

        `first`, (1, vocabulary), are the logits of the last token in the cache. The last token of an answer is not
        read, as it predicts nothing.
        """
        rows, count = list[Tensor](), _affordable(cache, len(answers))
        for start in range(0, len(answers), count):
            group = answers[start : start + count]
            longest = max(len(answer.ids) for answer in group)
            logits = first.new_empty(len(group), 0, first.shape[-1])
            if longest > 1:
                copies = copy.deepcopy(cache)
                if count > 1:
                    copies.batch_repeat_interleave(len(group))
                ends = [answer.ids[-1:] * (longest - len(answer.ids)) for answer in group]
                texts = [(*one.ids[:-1], *end) for one, end in zip(group, ends, strict=True)]
                logits = self._read(texts, copies).logits
            for answer, row in zip(group, logits, strict=True):
                rows.append(torch.cat((first, row))[: len(answer.ids)])
        pairs = zip(rows, answers, strict=True)
        return rows[0], [_log_likelihood(row, answer.ids) for row, answer in pairs]

    def _in_pieces(self, text: Sequence[int], pieces: Pieces) -> Any:
        """Return the model's output for the last piece of a text, with the logits of its last token."""
        ids, output = torch.tensor([text], device=input_device(self.model)), None
        with pieces.attention():
            for begin, end in pieces.bounds(len(text)):
                behind = pieces.arguments(output, ids, begin, end)
                output = self.model(input_ids=ids[:, begin:end], logits_to_keep=1, **behind)
        return output

    def _read(self, texts: Sequence[Sequence[int]], cache: Any = None, **options: Any) -> Any:
        """Return the model's output for texts of one length, behind a cache if there is one."""
        ids = torch.tensor(texts, device=input_device(self.model))
        behind = {} if cache is None else {cache_name(unwrap(self.model)) or CACHES[-1]: cache}
        return self.model(input_ids=ids, use_cache=True, **behind, **options)

    def _same(self, sums: Sequence[float], others: Sequence[float], answers: Answers) -> bool:
        """Return whether the sums of these answers are others, but for rounding."""
        bound = SAME.get(rounding_dtype(self.model), SAME_HALF)
        rows = zip(sums, others, answers, strict=False)
        return all(abs(one - other) / len(answer.ids) <= bound for one, other, answer in rows)


def _crop(cache: Any, tokens: int) -> bool:
    """Remove the last tokens from a cache; return False if it cannot, such as a full sliding window."""
    with contextlib.suppress(RuntimeError, ValueError, NotImplementedError, AttributeError):
        if tokens:
            cache.crop(-tokens)
        return True
    return False


def _affordable(cache: Any, count: int) -> int:
    """Return how many copies of a cache, at most so many, fit into memory to spare; 1 if it is not known."""
    layers = getattr(cache, "layers", ())
    tensors: list[Any] = [getattr(layer, x, None) for layer in layers for x in ("keys", "values")]
    # Other layers also keep states of convolutions or compressors, which an inherited method does not repeat.
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    repeated = all("batch_repeat_interleave" in vars(kind) for kind in kinds)
    if not (tensors and repeated and all(isinstance(x, Tensor) for x in tensors)):
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


def _log_likelihood(logits: Tensor, ids: Sequence[int]) -> float:
    """Return the summed log probability of tokens, in float64, from their logits, shape (n, vocabulary)."""
    index = torch.tensor(ids, device=logits.device).unsqueeze(-1)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return float(exact.log_softmax(-1).gather(-1, index).double().sum())


_CONTROL = re.compile(r"[\x00-\x1f]")


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, prompt: Prompt, new_tokens: int) -> str:
    """Return the text of at most `new_tokens` tokens that the model generates greedily behind a prompt.

    Control characters become line ends, as in `postprocess_pred` of RULER's `scripts/eval/evaluate.py`.
    """
    ids = prompt.ids.unsqueeze(0).to(input_device(model))
    inner: Any = unwrap(model)
    # Of the checkpoint's own config only the end: its penalties and minimal lengths change what is greedy. It is
    # replaced, as transformers fills the gaps of one that is passed. Without a pad token transformers warns.
    end = inner.generation_config.eos_token_id
    greedy = GenerationConfig(eos_token_id=end, pad_token_id=tokenizer.pad_token_id or 0)
    with swapped(vars(inner), "generation_config", greedy):
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens
        )
    text: str = tokenizer.decode(output[0, len(prompt.ids) :], skip_special_tokens=True)
    return _CONTROL.sub("\n", text.strip()).strip()


# The measurement.

_SCORES = ("correct", "score", "nats", "rank", "candidates", "distance", "text")


@dataclass(frozen=True, eq=False, kw_only=True)
class Item(machine.Item):
    """One sample under one method; its cell is the task and the length."""

    sample: Sample


class RetrievalRun(machine.MethodsRun[Item, RetrievalResult]):
    """The retrieval of every candidate, each `checked` against the model, on every task, length, depth and sample.

    The token ids `special` are in front of every prompt; `haystack`, the user's own text, replaces the noise sentences.
    `metadata` has `model`, `haystack`, `original` and `command` of the result.
    """

    kind = "retrieval"
    undecided = ("lengths", "tasks", "depths", "samples")
    settings: RetrievalSettings

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        candidates: Sequence[Candidate],
        settings: RetrievalSettings,
        *,
        special: Sequence[int] = (),
        haystack: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.candidates = model, tokenizer, candidates
        self.settings, self.special, self.metadata = settings, list(special), metadata or {}
        self._kit = Kit(tokenizer, settings.distractors if settings.ranks else 0, haystack)
        fitting = list[tuple[int, str]]()
        self.left_out: list[LeftOut] = []
        for length, name in itertools.product(settings.lengths, settings.tasks):
            scenes = map(self._scene, settings.samples_of(name, length))
            needed = max(scene.shortest + length - own for scene, own in scenes) + len(self.special)
            if needed <= length:
                fitting.append((length, name))
            else:
                self.left_out.append(LeftOut(name, length, needed))
        if not fitting:
            least = min(self.left_out, key=lambda entry: entry.needed)
            raise PosencError(
                f"No task fits into {settings.lengths[-1]:,} tokens: {least.task} needs at least {least.needed:,} with "
                "this tokenizer. Give longer --lengths."
            )
        self.items = [
            Item(
                key=(candidate.key, name, length, sample.depth, sample.number),
                candidate=candidate,
                length=length,
                cost=min(length, candidate.most or length),
                cells=((name, length),),
                order=order,
                sample=sample,
            )
            for candidate, (length, name) in itertools.product(candidates, fitting)
            for order, sample in enumerate(settings.samples_of(name, length))
        ]
        ids = self.prompt(self.items[0].sample).ids
        identity.check_vocabulary(model, int(ids.max()))
        with evaluation_mode(model):
            self.scorer = TokenScorer(model, ids, chunk=settings.chunk, prefill=settings.prefill)
        self._answers = AnswerScorer(model, self.scorer)

    def prompt(self, sample: Sample) -> Prompt:
        """Return the prompt of a sample: `sample.length` tokens with its longest answer, the same in every process."""
        return lay_out(*self._scene(sample), self.special, self._kit.distractors)

    def _scene(self, sample: Sample) -> tuple[Scene, int]:
        """Return the pieces of a prompt, and its length with the longest answer, less what more may be generated."""
        task = get_task(sample.task)
        scene = task.scene(sample, self._kit)
        if self.settings.decode == "generate":
            more = max(0, task.new_tokens - max(len(scene.answer.ids), scene.longest))
            sample = replace(sample, length=sample.length - more)
            scene = task.scene(sample, self._kit)
        return scene, sample.length

    def measure(self, item: Item, attempt: Attempt) -> Value:
        """Score the answer of one sample."""
        prompt = self.prompt(item.sample)
        scores = attempt(partial(self._score, item, prompt))
        return {} if scores is None else {**scores, "distance": prompt.distance}

    def _score(self, item: Item, prompt: Prompt) -> dict[str, Any]:
        task = get_task(item.sample.task)
        forced = self.settings.decode == "teacher-forced"
        longest = max(len(answer.ids) for answer in (prompt.answer, *prompt.distractors))
        behind = longest if forced else task.new_tokens
        if item.candidate is not None and item.candidate.most is not None:
            prompt = prompt.truncated(item.candidate.most, len(self.special), behind)
        self.scorer.check_length(prompt.longest + behind)
        if forced:
            return asdict(self._answers(prompt))
        self.scorer.reset(prompt.ids)
        text = generate(self.model, self.tokenizer, prompt, task.new_tokens)
        score = task.hit(text, prompt.references)
        return {"correct": score == 1.0, "score": score, "text": text}

    @property
    def about(self) -> Mapping[str, Any]:
        haystack = {name: x for name, x in self.metadata["haystack"].items() if name != "paths"}
        return {"haystack": haystack, "right": DECODES[self.settings.decode]}

    def collect(self, values: Mapping[Key, Value]) -> RetrievalResult:
        """Return the result, without records of a cell in which any sample failed: they would not be comparable."""
        reasons, records = Failures.of(self.items, values.get).reasons(), []
        for item in self.items:
            if (item.label, item.cells[0]) not in reasons:
                s, value = item.sample, values[item.key]
                scores: dict[str, Any] = {name: value.get(name) for name in _SCORES}
                records.append(Record(item.label, s.task, s.length, s.depth, s.number, **scores))
        return RetrievalResult(
            candidates=[MethodEntry.of(candidate) for candidate in self.candidates],
            records=records,
            failures=[
                Failure(label, str(task), int(length), reason)
                for (label, (task, length)), reason in reasons.items()
            ],
            left_out=self.left_out,
            **self.described,
        )


def measure_retrieval(
    model: nn.Module,
    tokenizer: Any,
    options: RetrievalOptions | None = None,
    *,
    haystack: str | None = None,
    output: Path | str | None = None,
    progress: Progress = silent,
    **fields: Any,
) -> RetrievalResult:
    """Measure what methods find in long prompts, all in the same ones.

    Each method is patched in and undone, so the model is unchanged at the end.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        options: Methods, lengths, tasks and their numbers.
        haystack: Text that replaces the noise sentences.
        output: Folder of the records: an interrupted call, made again, resumes.
        progress: Called after every sample with the method's label, operations done and in all.
        **fields: Fields of `RetrievalOptions` that replace those of `options`, such as `methods` or `samples`.

    Returns:
        Answers and ranks by method, task and length, with intervals.

    Raises:
        PosencError: Options exclude each other, or no task has prompts of these lengths, or the haystack is empty.

    Examples:
        >>> from hf_posenc.evaluation import measure_retrieval
        >>> options = {"tasks": ["passkey"], "lengths": [512], "samples": 1}
        >>> result = measure_retrieval(model, tokenizer, methods=["none", "yarn"], **options)
        >>> [candidate.label for candidate in result.candidates]
        ['none', 'yarn (auto)']
    """
    folder = output_folder(output, progress)
    options = with_fields(RetrievalOptions, options, fields)
    run = prepare(model, tokenizer, options, haystack=haystack)
    return cast(RetrievalResult, run.run(folder, progress=progress))


def prepare(
    model: nn.Module,
    tokenizer: Any,
    options: RetrievalOptions,
    *,
    haystack: str | None = None,
    paths: Sequence[str] = (),
    name: str | None = None,
    command: str | None = None,
) -> RetrievalRun:
    """Check the methods against the model, choose lengths and tasks, and lay out the prompts.

    `haystack` replaces the noise sentences and comes from the files `paths`. `name` is the model's in results, by
    default read from its config; `command` gives this result again.
    """
    if haystack is not None and not isinstance(haystack, str):
        raise PosencError(f"The haystack is a text, not {type(haystack).__name__}.")
    if haystack is not None and not haystack.strip():
        raise PosencError("The haystack is empty. Give text, or None for the noise sentences.")
    identity.check_weights(model)
    identity.check_tokenizer(tokenizer)
    candidates, original = checked_candidates(model, options.methods)
    policy = options.bos or "auto"
    special = special_prefix(tokenizer, policy)
    requested = sorted(options.lengths or default_lengths(original))
    lengths = within_reach(model, candidates, requested, given=bool(options.lengths))
    described: dict[str, Any] = {"kind": "noise"}
    if haystack is not None:
        digest = hashlib.sha256(haystack.encode("utf-8", "surrogatepass")).hexdigest()
        described = {
            "kind": "text",
            "sha256": digest,
            "characters": len(haystack),
            "paths": [*paths],
        }
    metadata = {
        "model": identity.describe_model(name, model, tokenizer, special, policy),
        "haystack": described,
        "original": original,
        "command": command,
    }
    settings = settings_of(options, lengths)
    if haystack is not None and not any(get_task(name).noise for name in settings.tasks):
        unused = f"{', '.join(settings.tasks)} would not use it"
        raise PosencError(f"--haystack is for tasks with noise, and {unused}: leave it out.")
    texts: dict[str, Any] = {"special": special, "haystack": haystack, "metadata": metadata}
    return RetrievalRun(model, tokenizer, candidates, settings, **texts)
