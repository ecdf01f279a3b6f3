"""Results that read the same texts, joined into one, whose own tables, notes and figures then show all of them.

The verdicts on them: the best method against the control, and whether the difference is significant.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.result import MethodEntry
from hf_posenc.evaluation.measuring.statistics import (
    FEW_DOCUMENTS,
    ROUNDING,
    VERDICTS,
    Cell,
    summarize,
)
from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.perplexity.protocols import READERS
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.retrieval.result import mcnemar

# Settings that select numbers, or how they are computed; they do not change the texts that a number is of.
_FREE = frozenset(
    {
        *("lengths", "protocols", "tasks", "buckets", "min_tokens"),
        *("chunk", "prefill", "batch", "preset"),
    }
)
# Settings that matter to some protocols only.
_OF_PROTOCOL = {**READERS, "read_last": ("tail",), "evaluator": ("longppl",)}


@dataclass
class Group:
    """Runs that read the same texts, and their joined result; with several runs, labels end with their numbers.

    `models` has the labels of each model's methods, the baseline first.
    """

    runs: list[Source]
    result: Any
    models: dict[str, list[str]]


@dataclass
class Line:
    """One method of some runs with the same numbers of it: its records and failures, and its curve by position."""

    entry: MethodEntry
    runs: list[int]
    measured: list[Any]
    curve: Any

    @property
    def label(self) -> str:
        """The method's label with its runs in brackets."""
        return f"{self.entry.label} [{', '.join(map(str, self.runs))}]"


def groups(sources: Sequence[Source], kind: str) -> list[Group]:
    """Join the results of a kind whose numbers have one meaning, in the order of their first appearance."""
    found: dict[str, list[Source]] = {}
    for source in (source for source in sources if source.kind == kind):
        found.setdefault(meaning_of(source.result), []).append(source)
    return [_joined(runs) for runs in found.values()]


def meaning_of(result: Any) -> str:
    """Return what gives the numbers of a result their meaning, in one line: its texts, and the settings that matter."""
    settings = dataclasses.asdict(result.settings)
    protocols = settings.get("protocols", ())
    kept = {
        name: value
        for name, value in settings.items()
        if name not in _FREE
        if name not in _OF_PROTOCOL or set(protocols) & set(_OF_PROTOCOL[name])
    }
    if kept.get("windows_per_document") not in (None, 1):  # spread over the rest of the longest
        kept["longest length"] = settings["lengths"][-1]
    texts = [document.get("tokens_sha256") for document in getattr(result, "documents", ())]
    special = result.model.get("bos", {}).get("token_ids")
    tokenizer = result.model.get("tokenizer", {}).get("sha256")
    haystack = getattr(result, "haystack", None)
    return json.dumps([kept, sorted(protocols), texts, special, tokenizer, haystack])


def model_of(model: Mapping[str, Any]) -> str:
    """Return what identifies a model: a ratio between two would not be a method's."""
    names = ("weights_sha256", "config_sha256", "patch", "class", "parameters", "dtype")
    values = [model.get(name) for name in names]
    return json.dumps([*values, None if model.get("weights_sha256") else model.get("name")])


def _joined(runs: list[Source]) -> Group:
    """Return one result with the methods of all runs, and the labels of each model's methods."""
    results = [run.result for run in runs]
    first = results[0]
    if len(runs) == 1:
        return Group(runs, first, {model_of(first.model): [e.label for e in first.candidates]})
    models: dict[str, list[Line]] = {}
    for run in runs:
        own = models.setdefault(model_of(run.result.model), [])
        for line in _lines(run):
            twin = next((other for other in own if _repeats(line, other)), None)
            if twin is None:
                own.append(line)
            else:
                twin.runs += line.runs
    for own in models.values():  # the baseline comes first: the model as loaded, if a run has it
        own.sort(key=lambda line: line.entry.method is not None)
    lines = [line for own in models.values() for line in own]
    labels = {model: [line.label for line in own] for model, own in models.items()}
    measured = [dataclasses.replace(m, method=line.label) for line in lines for m in line.measured]
    conditions = dict.fromkeys(name for result in results for name in result.conditions)
    shared: dict[str, Any] = {
        "lengths": tuple(sorted({length for r in results for length in r.settings.lengths})),
        f"{first.condition}s": tuple(conditions),
    }
    details: dict[str, Any] = {}
    if isinstance(first, PerplexityResult):
        shared["min_tokens"] = None  # another longest length may be above it
        buckets = {(result.settings.lengths[-1], result.settings.buckets) for result in results}
        same = lines if len(buckets) == 1 else []
        details["curves"] = {line.label: line.curve for line in same if line.curve}
    else:
        details["left_out"] = list(dict.fromkeys(entry for r in results for entry in r.left_out))
    originals = {result.original for result in results}
    joined = dataclasses.replace(
        first,
        settings=dataclasses.replace(first.settings, **shared),
        candidates=[dataclasses.replace(line.entry, label=line.label) for line in lines],
        records=[entry for entry in measured if not hasattr(entry, "reason")],
        failures=[entry for entry in measured if hasattr(entry, "reason")],
        original=originals.pop() if len(originals) == 1 else None,
        **details,
    )
    if isinstance(joined, PerplexityResult):  # each model has its own baseline
        how = _arithmetic(joined)
        joined.cells = [
            cell
            for names in labels.values()
            for cell in summarize(
                [r for r in joined.records if r.method in names], **how, baseline=names[0]
            )
        ]
    return Group(runs, joined, labels)


def _lines(run: Source) -> list[Line]:
    """Return the methods of a run; documents are named by their numbers, whatever their folders."""
    result = run.result
    curves = getattr(result, "curves", {})
    lines = {e.label: Line(e, [run.number], [], curves.get(e.label)) for e in result.candidates}
    numbers = {d["name"]: str(i) for i, d in enumerate(getattr(result, "documents", ()))}
    for entry in (*result.records, *result.failures):
        document = numbers.get(getattr(entry, "document", ""))
        moved = dataclasses.replace(entry, document=document) if document else entry
        lines[entry.method].measured.append(moved)
    return list(lines.values())


def _repeats(line: Line, other: Line) -> bool:
    """Return whether a line of the same model has numbers of another one, to the last bit, and no others."""
    numbers, others = (set(map(repr, each.measured)) for each in (line, other))
    return line.entry.label == other.entry.label and numbers <= others


def _arithmetic(result: PerplexityResult) -> dict[str, Any]:
    return {"aggregate": result.settings.aggregate, "base": result.settings.base}


# Verdicts.


def against(
    result: PerplexityResult,
    protocol: str,
    line: tuple[str, int],
    other: tuple[str, int],
    comparisons: int,
) -> Cell | None:
    """Return the number of a method at a length, with its paired ratio to another's; `None` if one is missing.

    So many `comparisons` with the other one are made: their intervals hold together in 95 % of samples.
    Both have read the same documents, and under `tail` the same targets at any length.
    """
    records = [
        dataclasses.replace(record, method=name, length=0)
        for name, key in (("", other), ("line", line))
        for record in result.records
        if (record.method, record.length, record.protocol) == (*key, protocol)
    ]
    cells = summarize(records, **_arithmetic(result), baseline="", comparisons=comparisons)
    cell = next((cell for cell in cells if cell.method), None)
    return None if cell is None or cell.ratio is None or not math.isfinite(cell.ratio) else cell


def control_of(result: Any, labels: Sequence[str]) -> tuple[str, list[str]]:
    """Return truncation among a model's methods, else the baseline, and the methods that are compared to it."""
    methods = {entry.label: entry.method for entry in result.candidates}
    control = next((label for label in labels if methods[label] == TRUNCATION), labels[0])
    return control, [n for n in labels if n != control and methods[n] not in (None, TRUNCATION)]


def ratio_text(value: float) -> str:
    """Format a ratio with enough digits to distinguish it from 1, unless the difference is rounding."""
    if not 0.9 < value < 1.1 or abs(value - 1) < ROUNDING:
        return number(value, 3)
    texts = [f"{value:.{digits}f}" for digits in (3, 4)]
    return next((text for text in texts if float(text) != 1), texts[-1])


def perplexity_verdict(group: Group, model: str, protocol: str) -> str:
    """Compare the best method of a model to the control, at the longest length."""
    result, labels = group.result, group.models[model]
    length, documents = result.settings.lengths[-1], len(result.documents)
    control, rivals = control_of(result, labels)
    where = f"{protocol}, {length:,} tokens, {control} as the control, {documents} documents"
    compared = {
        label: cell
        for label in rivals
        if (cell := against(result, protocol, (label, length), (control, length), len(labels) - 1))
    }
    if not compared:
        return f"{where}: no method has a number to compare."
    ranked = sorted(compared, key=lambda label: compared[label].ratio or 0)
    better = [label for label in ranked if compared[label].differs < 0]
    best, *others = better or ranked[:1]
    cell = compared[best]
    interval = f" ({'-'.join(map(ratio_text, cell.ratio_interval))})" if cell.ratio_interval else ""
    verdict = "not significantly different"
    if documents < FEW_DOCUMENTS:
        verdict = "too few documents for a verdict"
    elif cell.differs:
        verdict = f"significantly {VERDICTS[cell.differs]}"
    none = "" if better else "no method is significantly better; "
    text = f"{none}{best} has {ratio_text(cell.ratio or 0)}{interval} times the control's perplexity, {verdict}"
    text += f"; significantly better too: {', '.join(others)}" if others else ""
    patched = any(entry.label == control and entry.method for entry in result.candidates)
    if not patched and result.original and length > result.original:
        text += ". An unpatched model breaks down: add truncation"
    return f"{where}: {text}."


def retrieval_verdict(group: Group, model: str) -> str:
    """Compare the method that finds most to the control, at the longest common length, by McNemar's exact test.

    Its p is multiplied by the number of methods of which it is the best (Bonferroni).
    """
    result, labels = group.result, group.models[model]
    own = (run.result for run in group.runs if model_of(run.result.model) == model)
    lengths = [set(measured.settings.lengths) for measured in own]
    length = max(set.intersection(*lengths) or set.union(*lengths))
    outcomes: dict[str, dict[Any, tuple[bool, bool]]] = {}
    for record in result.records:
        if record.length == length and record.method in labels:
            key = record.task, record.depth, record.sample
            outcomes.setdefault(record.method, {})[key] = record.correct, record.rank == 1
    measured = [label for label in labels if label in outcomes]
    control, rivals = control_of(result, measured) if measured else ("", [])
    if not rivals:
        return f"{length:,} tokens: no method has answers to compare."
    ranked = not any(correct for found in outcomes.values() for correct, _ in found.values())
    hits = {
        label: {key for key, outcome in found.items() if outcome[ranked]}
        for label, found in outcomes.items()
    }
    asked = outcomes[control].keys()
    best = max(rivals, key=lambda label: len(hits[label] & asked))
    both = outcomes[best].keys() & asked
    found, base = hits[best] & both, hits[control] & both
    won, lost = len(found - base), len(base - found)
    chance = min(1.0, len(rivals) * mcnemar(won, lost))
    verb = "ranks the answer first in" if ranked else "answers"
    word = "not significantly different"
    if chance < 0.05:
        word = f"significantly {'better' if won > lost else 'worse'}"
    none = "" if word == "significantly better" else "no method is significantly better; "
    times = f", times {len(rivals)} methods" if len(rivals) > 1 else ""
    return (
        f"{length:,} tokens, {control} as the control, {len(both)} prompts: {none}{best} {verb} {len(found)}, "
        f"{control} {len(base)}; {word} (exact McNemar test{times}, p = {chance:.2g})."
    )
