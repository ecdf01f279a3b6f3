"""Retrieval: every candidate on the same prompts; `measure_retrieval`, and its parts that the command shares."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

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
from hf_posenc.evaluation.retrieval.answers import AnswerScorer, generate
from hf_posenc.evaluation.retrieval.prompts import Kit, Prompt, Sample, lay_out
from hf_posenc.evaluation.retrieval.result import Failure, LeftOut, Record, RetrievalResult
from hf_posenc.evaluation.retrieval.tasks import (
    DECODES,
    RetrievalSettings,
    get_task,
    settings_of,
)
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.head_replay import TokenScorer

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
            scenes = (get_task(name).scene(s, self._kit) for s in settings.samples_of(name, length))
            needed = max(scene.shortest for scene in scenes) + len(self.special)
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
            self.scorer = TokenScorer(model, ids, chunk=settings.chunk)
        self._answers = AnswerScorer(model, self.scorer)

    def prompt(self, sample: Sample) -> Prompt:
        """Return the prompt of a sample: with its answer of `sample.length` tokens, the same in every process."""
        scene = get_task(sample.task).scene(sample, self._kit)
        return lay_out(scene, sample.length, self.special, self._kit.distractors)

    def measure(self, item: Item, attempt: Attempt) -> Value:
        """Score the answer of one sample."""
        prompt = self.prompt(item.sample)
        scores = attempt(partial(self._score, item, prompt))
        return {} if scores is None else {**scores, "distance": prompt.distance}

    def _score(self, item: Item, prompt: Prompt) -> dict[str, Any]:
        task = get_task(item.sample.task)
        forced = self.settings.decode == "teacher-forced"
        behind = len(prompt.answer.ids) if forced else task.new_tokens
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
    result = run.run(folder, progress=progress)
    assert result is not None
    return result


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
        described = {"kind": "text", "sha256": digest, "characters": len(haystack)}
        described["paths"] = list(paths)
    metadata = {
        "model": identity.describe_model(name, model, tokenizer, special, policy),
        "haystack": described,
        "original": original,
        "command": command,
    }
    texts: dict[str, Any] = {"special": special, "haystack": haystack, "metadata": metadata}
    return RetrievalRun(model, tokenizer, candidates, settings_of(options, lengths), **texts)
