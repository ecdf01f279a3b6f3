"""Extend a checkpoint to a longer context, and prove it on the user's own documents; or say not to.

Methods are chosen by one half of the documents and judged by the other (`result.py` has choice, demands and verdict).
Here is the rest: candidates, the fit to a budget of time, the measurements, and the saved model.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_posenc.embedded import model_path
from hf_posenc.engines import ENGINES, export
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Entry
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.extend.result import ATTENTION, TABLE, Choice, ExtendResult, choose
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import CONTROLS, TRUNCATION, Candidate
from hf_posenc.evaluation.measuring.execute import Progress, silent
from hf_posenc.evaluation.measuring.statistics import FEW_DOCUMENTS
from hf_posenc.evaluation.options import (
    ExtendOptions,
    RetrievalOptions,
    duration,
    output_folder,
    with_fields,
)
from hf_posenc.evaluation.recommend import Advice, recommend
from hf_posenc.evaluation.retrieval import run as retrieval
from hf_posenc.evaluation.scoring.estimate import rate_of, run_cost
from hf_posenc.evaluation.tuning import Course, Rung, prepared, tried
from hf_posenc.evaluation.tuning.sweep import recipe
from hf_posenc.files import disk_errors, write_atomically
from hf_posenc.model.context import context_of, readings
from hf_posenc.model.discovery import rotary_tables
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.patching import get_patch
from hf_posenc.verification import require, verify_export

EACH = (2, 3)
"""Least and largest number of methods of each kind."""
HALF = 20
"""Most documents in each half."""
ENOUGH = 10
"""Documents in each half before a third method of each kind is worth more than further documents."""
DEPTHS = 8
"""Depths of passkeys: one half lies beyond the original length, the other within it."""
SAMPLES = (3, 5, 10)
"""Numbers of passkeys at every depth. Of 12 far ones, 6 that the winner alone finds are significant."""
ANSWERS = 1.25
"""Tokens of a passkey prompt are multiplied by this: eleven answers are read behind it."""


@dataclass(frozen=True)
class Plan:
    """Amounts that are measured: methods of each kind, documents in each half, passkeys at every depth; and tokens."""

    each: int
    documents: int
    samples: int
    tokens: float


@dataclass(kw_only=True)
class ExtendJob(Rung[ExtendResult]):
    """An extension whose model and documents are ready.

    The candidates of `whole` are truncation, the other controls, and the methods of `kinds` (a kind by label), the best
    of each kind first. `say` is called with lines on the course.
    """

    tokenizer: Any
    options: ExtendOptions
    name: str | None
    kinds: dict[str, str]
    say: Callable[[str], None] = silent

    @property
    def halves(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """The documents that choose, and those that report: every second one, so that an order is in both alike."""
        return self.whole.documents[0::2], self.whole.documents[1::2]

    @property
    def controls(self) -> list[Candidate]:
        """Truncation, and the other controls."""
        return [each for each in self.whole.candidates if each.label not in self.kinds]

    def methods(self, kind: str, each: int = EACH[1]) -> list[Candidate]:
        """Return so many methods of a kind, the best first."""
        own = (c for c in self.whole.candidates if self.kinds.get(c.label) == kind)
        return list(itertools.islice(own, each))

    def taken(self, each: int) -> list[Candidate]:
        """Return so many methods of each kind."""
        return self.methods(TABLE, each) + self.methods(ATTENTION, each)

    def conduct(self, course: Course) -> ExtendResult:
        """Measure, choose, report and, if the demands are met, save."""
        folder = course.folder
        stale = folder is not None and (folder / "config.json").exists()
        if folder is not None and stale and not (folder / "records").exists():
            raise PosencError(f"{folder} holds another model. Give another --output.")
        plan, rate, remarks = self.fit(course)
        course.total = int(plan.tokens)
        self.say(self._announcement(plan, rate))
        choosing_half, reporting_half = (half[: plan.documents] for half in self.halves)
        methods, controls = self.taken(plan.each), self.controls
        kinds = {candidate.label: self.kinds[candidate.label] for candidate in methods}
        remarks += self._left_out(plan)
        parts: dict[str, Any] = {}
        choosing = course(self.whole.part([controls[0], *methods], choosing_half))
        choice = choose(choosing, kinds, self.options.max_regression)
        if (chosen := next((c for c in methods if c.label == choice.winner), None)) is not None:
            parts["perplexity"] = course(self.whole.part([*controls, chosen], reporting_half))
            passkeys = RetrievalOptions(
                methods=(TRUNCATION, chosen.spec),
                lengths=self.settings.lengths,
                tasks=("passkey",),
                depths=depths(*self.settings.lengths),
                samples=plan.samples,
                bos=self.options.bos,
                chunk=self.options.chunk,
                prefill=self.options.prefill,
            )
            named = {"name": self.name, "command": self.whole.metadata["command"]}
            try:
                job = retrieval.prepare(self.whole.model, self.tokenizer, passkeys, **named)
                parts["retrieval"] = course(job)
            except PosencError as error:
                remarks.append(f"No retrieval: {error}")
        for part in (choosing, *parts.values()):
            remarks += [f"{f.method} gave no number: {f.reason}" for f in part.failures]
        options, (original, target) = self.options, self.settings.lengths
        about = {name: self.whole.metadata[name] for name in ("model", "source", "command")}
        settings = {"original": original, "target": target, "budget": options.budget}
        result = ExtendResult(
            about={**about, "environment": identity.environment()},
            settings={**settings, "max_regression": options.max_regression},
            plan={**asdict(plan), "seconds_per_token": rate, "measured": course.seconds},
            kinds=kinds,
            remarks=list(dict.fromkeys(remarks)),
            choosing=choosing,
            training=self.training(choice, kinds),
            **parts,
        )
        if result.extended and chosen is not None and course.shard.index == 0:
            self._save(result, chosen, folder)
        elif stale:
            result.remarks.append(
                f"{folder} holds the model that an earlier run saved, and this one does not confirm it: remove it."
            )
        return result

    # The fit to the budget.

    def fit(self, course: Course) -> tuple[Plan, float, list[str]]:
        """Return the largest plan that fits the budget, the seconds per token of one timed window, and remarks.

        The window is the first that the choice needs, so that its record serves both.

        Raises:
            PosencError: The least sensible plan takes longer, or no method gives a number.
        """
        # the slower kind first
        first = [c for kind in (ATTENTION, TABLE) for c in self.methods(kind, 1)]
        remarks: list[str] = []
        for candidate in first:
            run = self.whole.part([candidate], self.halves[0][:1])
            value = next(iter(course.values(run).values()))
            if not value.get("failed"):
                rate = float(value["seconds"]) / run.forwarded
                return self._fitted(rate), rate, remarks
            remarks.append(f"{candidate.spec} gave no number: {value['failed'][0][-1]}")
        specs = " nor ".join(each.spec for each in first)
        raise PosencError(
            f"Neither {specs} gives a number at {self.settings.lengths[1]:,} tokens: nothing can be chosen. `hf-posenc "
            "perplexity` shows why."
        )

    def _fitted(self, rate: float) -> Plan:
        """Return the largest plan that fits the budget at so many seconds per token."""
        costs: Counter[str] = Counter()
        for item in self.whole.items:
            costs[item.label] += item.cost * (item.order == 0)
        budget, most, plans = self.options.budget, min(HALF, len(self.halves[1])), []
        original, target = self.settings.lengths
        prompt = ANSWERS * (original + target + 2 * original)
        for each, samples in itertools.product(EACH, SAMPLES):
            labels = [candidate.label for candidate in self.taken(each)]
            # both halves have the controls that they need, the reporting one the dearest method that can win
            measured = [*labels, max(labels, key=costs.__getitem__), TRUNCATION]
            tokens = sum(costs[label] for label in (*measured, *(c.label for c in self.controls)))
            # fewer documents than `FEW_DOCUMENTS` only if there are no more
            for documents in range(min(FEW_DOCUMENTS, most), most + 1):
                total = tokens * documents + DEPTHS * samples * prompt
                plans.append(Plan(each, documents, samples, total))
        if not (fitting := [plan for plan in plans if plan.tokens * rate <= budget]):
            least = min(plans, key=lambda plan: plan.tokens)
            needed = least.tokens * rate
            raise PosencError(
                f"--budget {duration(budget)} is too short: the least that makes sense, {self._amounts(least)}, takes "
                f"about {duration(needed)} here ({duration(rate * target)} a window of {target:,} tokens). Give "
                f"--budget {math.ceil(needed / 60)}m, or a shorter --target-length. --output keeps what was measured."
            )

        def worth(plan: Plan) -> tuple[int, ...]:
            return min(plan.documents, ENOUGH), plan.each, plan.samples, plan.documents

        return max(fitting, key=worth)

    def _amounts(self, plan: Plan) -> str:
        methods, documents = len(self.taken(plan.each)), plan.documents
        return f"{methods} methods, {documents} + {documents} documents and {DEPTHS * plan.samples} passkeys"

    def _announcement(self, plan: Plan, rate: float) -> str:
        takes, budget = duration(plan.tokens * rate), duration(self.options.budget)
        return f"{self._amounts(plan)}: about {takes} of {budget}."

    def estimate(self, device: torch.device) -> dict[str, Any]:
        """Return the plan that fits the budget by the rate of a device; a run fits its own to one timed window."""
        operations, source = rate_of(device)
        if operations is None:
            raise PosencError(f"Unknown time: {source}. Without --dry-run one window is timed.")
        target = self.settings.lengths[1]
        rate = run_cost(self.whole.model, [(target, 1)]).flops / target / operations
        plan = self._fitted(rate)
        line = f"{self._announcement(plan, rate)} That is {source}; a run times one window first."
        return {**asdict(plan), "seconds": plan.tokens * rate, "cost": line}

    def _left_out(self, plan: Plan) -> Iterator[str]:
        """Yield what the budget leaves out, and what too few documents leave unsaid."""
        taken = self.taken(plan.each)
        rest = [each.spec for each in self.taken(EACH[1]) if each not in taken]
        unread = min(HALF, len(self.halves[1])) - plan.documents
        unasked = DEPTHS * (SAMPLES[-1] - plan.samples)
        amounts = {
            f"the methods {', '.join(rest)}": len(rest),
            f"{2 * unread} documents": unread,
            f"{unasked} passkeys": unasked,
        }
        if left := "; ".join(name for name, count in amounts.items() if count):
            yield f"The budget of {duration(self.options.budget)} leaves out {left}."
        documents, needed = len(self.whole.documents), 2 * FEW_DOCUMENTS
        if documents < needed:
            yield (
                f"{documents} documents are long enough, {needed} are needed: with fewer than {FEW_DOCUMENTS} in each "
                "half no difference is called significant. The verdict cannot say that the method is no worse, only "
                "that its ratio is within the bound."
            )

    # The end: the saved model, or the training that is advised instead.

    def _save(self, result: ExtendResult, chosen: Candidate, folder: Path | None) -> None:
        """Write the recipe into the result; with a folder, save the patched model and verify what was saved."""
        model: Any = self.whole.model
        source = "hf-posenc extend: chosen on one half of the documents, judged on the other"
        about = str(result.about["model"]["name"]), source, " ".join(result.lines()[1:4])
        result.recipe = recipe(chosen, model, result.kind, *about)
        if folder is None:
            return
        with chosen.applied(model, 1):
            with disk_errors(f"The model cannot be saved to {folder}"):
                model.save_pretrained(folder)
                self.tokenizer.save_pretrained(folder)
            patch = get_patch(model)
            assert patch is not None
            plain = patch.export is not None
            verified = verify_export(folder, model, plain=plain)
            require(verified)
            target, reach = self.settings.lengths[1], patch.extended_length or 0
        if reach > target:
            named = f"The saved config.json names {reach:,} tokens, by the method's scale"
            result.remarks.append(f"{named}; only {target:,} are judged: serve no more than these.")
        exports = {}
        for engine in ENGINES:
            made = export(folder, engine)
            exports[engine] = f"yes: hf-posenc export PATH --to {engine}"
            if engine == "transformers5":
                exports[engine] = "yes, as it is"
            if made.plugin is not None:
                exports[engine] = f"yes, by our plug-in: hf-posenc export PATH --to {engine}"
            elif not made.possible:  # empty where nothing is known
                exports[engine] = made.reason and f"no: {made.reason}"
        result.saved = {
            "folder": str(folder),
            "verified": str(verified).replace(str(folder), "The saved model", 1),
            "exports": exports,
        }
        write_atomically(folder / "README.md", result.card(plain, patch.methods))

    def training(self, choice: Choice, kinds: Mapping[str, str]) -> str:
        """Return the command that fine-tunes the model with the best table, or with yarn."""
        tables = [label for label in choice.ranked if kinds[label] == TABLE]
        specs = {candidate.label: candidate.spec for candidate in self.methods(TABLE)}
        spec = specs[tables[0]] if tables else f"yarn:target_length={self.settings.lengths[1]}"
        target = str(self.settings.lengths[1])
        command = ["hf-posenc", "finetune", "--patch", spec, "--target-length", target]
        if name := _argument(self.whole.model, self.name):
            command += ["--model", name]
        source = self.whole.metadata["source"]
        default = Source().about["kind"]  # held out from the training's default text
        if source["kind"] != default:
            command += ["--text", "YOUR_TRAINING_TEXT", "--score-text"]
            command += source.get("paths") or ["OTHER_TEXT"]
        return shlex.join(command)


def _argument(model: Any, name: str | None) -> str:
    path = getattr(model.config, "_name_or_path", "")
    return "" if path == str(model_path()) else name or path or "MODEL"


def depths(original: int, target: int) -> tuple[float, ...]:
    """Return depths of needles: half farther back than the original length, half not, with room to spare."""
    seen, last = original / target, DEPTHS // 2 - 1
    steps = [0.75 * index / last for index in range(last + 1)]
    far = [(1 - seen) * step for step in steps]
    near = [1 - seen * step for step in reversed(steps)]
    return tuple(round(depth, 4) for depth in (*far, *near))


def extend(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Entry] | None = None,
    options: ExtendOptions | None = None,
    *,
    output: Path | str | None = None,
    progress: Progress = silent,
    **fields: Any,
) -> ExtendResult:
    """Find a method that extends a model to a longer context, and prove it, or say not to.

    Args:
        model: A causal language model of transformers, unchanged at the end.
        tokenizer: Its tokenizer.
        documents: Texts, or the entries of a reader of `hf_posenc.evaluation.documents`, of at least the target length;
            by default the held-out modules of the standard library.
        options: Target length, budget, accepted regression and how documents are read.
        output: Folder of the records and, where the verdict is to extend, of the saved model. An interrupted call, made
            again, resumes.
        progress: Called after every forward with the method's label, operations done and in all.
        **fields: Fields of `ExtendOptions` that replace those of `options`, such as `budget="30m"`.

    Returns:
        The verdict (`extended`), the demands with their numbers, and the method that was chosen.

    Raises:
        PosencError: The model is long enough, scaled or patched already; there are too few documents; or the budget is
            too short for the least sensible amount.
    """
    folder = output_folder(output, progress)
    options = with_fields(ExtendOptions, options, fields)
    source = Source() if documents is None else Source.of(documents)
    result = prepare(model, tokenizer, source, options).run(folder, progress=progress)
    assert result is not None
    if folder is not None:
        result.write(folder, plots=False)
        write_page(folder)
    return result


def prepare(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: ExtendOptions,
    *,
    name: str | None = None,
    command: str | None = None,
) -> ExtendJob:
    """Refuse what needs no extension, find candidates, and read documents of at least the target length."""
    identity.check_weights(model)
    identity.check_tokenizer(tokenizer)
    advice = _advice(model, options, name)
    original, target = advice.carried.trained, advice.target
    specs = {TABLE: list[str](), ATTENTION: list[str]()}
    for option in advice.unrefuted:
        specs[ATTENTION if option.attention else TABLE].append(str(option.spec))
    kinds = {spec: kind for kind, own in specs.items() for spec in own[: EACH[1]]}
    if not kinds:
        raise PosencError(
            f"No method works as it is at {target:,} tokens on this model: `hf-posenc recommend {advice.name} "
            f"--target-length {target}` says why, and which work after fine-tuning."
        )
    controls = dict.fromkeys((TRUNCATION, *CONTROLS))
    parsed = [(Candidate.parse(spec), spec in controls) for spec in (*controls, *kinds)]
    candidates = [candidate for candidate, _ in tried(model, parsed, original)]
    read = replace(options, target_length=target, limit=options.limit or 2 * HALF)
    about: dict[str, Any] = {"candidates": candidates, "name": name, "command": command}
    whole = prepared(model, tokenizer, source, read, original, embedded_limit=2 * HALF, **about)
    if len(whole.documents) < 4:
        raise PosencError(
            f"{len(whole.documents)} of the documents have {target:,} tokens; 4 are needed, two to choose a method and "
            f"two to judge it, and with {2 * FEW_DOCUMENTS} differences can be told from chance. One document is not "
            "split: its halves are not independent. Give more --text, or a shorter --target-length."
        )
    labels = (candidate.label for candidate in candidates[len(controls) :])
    named = dict(zip(labels, kinds.values(), strict=True))
    return ExtendJob(whole=whole, tokenizer=tokenizer, options=options, name=name, kinds=named)


def _advice(model: Any, options: ExtendOptions, name: str | None) -> Advice:
    """Return the ranked methods; raise for a model that is patched, scaled or long enough already."""
    target, patch = options.target_length, get_patch(model)
    argument = _argument(model, name)
    named, measure = name or argument or "The model", f"`hf-posenc perplexity {argument}".rstrip()
    if patch is not None:
        raise PosencError(
            f"{named} is extended already: it carries a saved patch ({str(patch).splitlines()[0]}). Measure it as it "
            f"is ({measure} --patch none`), or extend the checkpoint that it was made from."
        )
    for table in rotary_tables(unwrap(model)):
        if len(read := readings(table)) > 1:
            raise _scaled(named, argument, table.rope_type, " or ".join(map(str, read)), target)
        context_of(table, argument="max_position_embeddings in config.json")  # no option names it
    carried = recommend(model, 1, name=argument).carried  # tries no method
    target = target or 4 * carried.trained
    if target <= carried.reach:
        by = f" by its rope_type {carried.rope_type}" if carried.scaled else ""
        raise PosencError(
            f"{named} reads {carried.reach:,} tokens{by}, and --target-length {target:,} is no more: it is long enough "
            f"as it is. {measure} --lengths {target}` measures it there."
        )
    if carried.scaled:
        raise _scaled(named, argument, carried.rope_type, str(carried), target)
    return recommend(model, target, name=argument)


def _scaled(named: str, argument: str, kind: str, lengths: str, target: int | None) -> PosencError:
    return PosencError(
        f"{named} is scaled already, by rope_type {kind} {lengths} tokens. Extend the checkpoint without that scaling. "
        f"To scale a scaled one once more: `hf-posenc recommend {argument} --target-length {target or 'N'}` names the "
        "calls, `hf-posenc sweep` compares."
    )


def write_page(folder: Path) -> Path:
    """Write the report page of a folder's `extend.json`, the verdict first."""
    from hf_posenc.evaluation.page import collect, render  # shows results of this room

    page = folder / "report.html"
    title = "Extending a checkpoint"
    write_atomically(page, render(collect([folder / "extend.json"]), title=title))
    return page
