"""Results of one model on the same texts, joined into one, whose own tables, notes and figures then show all of them.

The verdicts on them: the best method against the control, and whether the difference is significant.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring import statistics
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.result import MethodEntry
from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.perplexity.protocols import READERS
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.retrieval.result import Record, RetrievalResult, mcnemar

# Settings that select numbers, or how they are computed; they do not change the texts that a number is of.
_FREE = (
    *("lengths", "protocols", "tasks", "buckets", "min_tokens"),
    *("chunk", "prefill", "batch", "preset"),
)
# Settings that matter to some protocols only.
_OF_PROTOCOL = {**READERS, "read_last": ("tail",), "evaluator": ("longppl",)}
# What identifies a model: a ratio between two would not be a method's.
_OF_MODEL = ("weights_sha256", "config_sha256", "patch", "class", "parameters", "dtype")


@dataclass
class Group:
    """Runs of one model on the same texts, and their joined result, whose labels end with the numbers of the runs."""

    runs: list[Source]
    result: Any


@dataclass
class Line:
    """One method of some runs with the same numbers of it: its records and failures, and its curve by position."""

    entry: MethodEntry
    measured: list[Any]
    curve: Any
    runs: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The method's label with its runs in brackets."""
        return f"{self.entry.label} [{', '.join(map(str, self.runs))}]"


def groups(sources: Sequence[Source], kind: str) -> list[Group]:
    """Join the results of a kind whose numbers have one meaning, in the order of their first appearance."""
    found: dict[str, list[Source]] = {}
    for source in (source for source in sources if source.kind == kind):
        found.setdefault(_meaning(source.result), []).append(source)
    return [Group(runs, _joined(runs) if runs[1:] else runs[0].result) for runs in found.values()]


def _meaning(result: Any) -> str:
    """Return what gives the numbers of a result their meaning: its model, its texts, and the settings that matter."""
    settings, model = dataclasses.asdict(result.settings), result.model
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
    tokens = model.get("tokenizer", {}).get("sha256"), model.get("bos", {}).get("token_ids")
    identity = [model.get(name) for name in _OF_MODEL]
    identity.append(None if model.get("weights_sha256") else model.get("name"))
    haystack = getattr(result, "haystack", None)
    return json.dumps([kept, sorted(protocols), texts, haystack, *tokens, *identity])


def _joined(runs: list[Source]) -> Any:
    """Return one result with the methods of all runs, the model as loaded first.

    A method with the same numbers in several runs is one row. Documents are named by their numbers, whatever their
    folders.
    """
    found: dict[tuple[str, str], Line] = {}
    for run in runs:
        documents = getattr(run.result, "documents", ())
        numbers = {document["name"]: str(number) for number, document in enumerate(documents)}
        measured: dict[str, list[Any]] = {entry.label: [] for entry in run.result.candidates}
        for each in (*run.result.records, *run.result.failures):
            if hasattr(each, "document"):
                each = dataclasses.replace(each, document=numbers[each.document])
            measured[each.method].append(each)
        curves = getattr(run.result, "curves", {})
        for entry in run.result.candidates:
            own = Line(entry, measured[entry.label], curves.get(entry.label))
            found.setdefault((entry.label, repr(own.measured)), own).runs.append(run.number)
    lines = sorted(found.values(), key=lambda line: line.entry.method is not None)
    results = [run.result for run in runs]
    first, originals = results[0], {result.original for result in results}
    entries = [dataclasses.replace(e, method=line.label) for line in lines for e in line.measured]
    settings: dict[str, Any] = {
        "lengths": tuple(sorted({length for r in results for length in r.settings.lengths})),
        f"{first.condition}s": tuple(dict.fromkeys(c for r in results for c in r.conditions)),
    }
    details: dict[str, Any] = {}
    if isinstance(first, PerplexityResult):
        settings["min_tokens"] = None  # another longest length may be above it
        buckets = {(result.settings.lengths[-1], result.settings.buckets) for result in results}
        same = lines if len(buckets) == 1 else []
        details["curves"] = {line.label: line.curve for line in same if line.curve}
    else:
        details["left_out"] = list(dict.fromkeys(entry for r in results for entry in r.left_out))
    return dataclasses.replace(
        first,
        settings=dataclasses.replace(first.settings, **settings),
        candidates=[dataclasses.replace(line.entry, label=line.label) for line in lines],
        records=[each for each in entries if not hasattr(each, "reason")],
        failures=[each for each in entries if hasattr(each, "reason")],
        original=originals.pop() if len(originals) == 1 else None,
        **details,
    )


# Verdicts.


def against(
    result: PerplexityResult, protocol: str, line: tuple[str, int], other: tuple[str, int]
) -> statistics.Cell | None:
    """Return the number of a method at a length, with its paired ratio to another's; `None` if one is missing.

    All methods but one are compared: their intervals hold together in 95 % of samples. Both have read the same
    documents, and under `tail` the same targets at any length.
    """
    records = [
        dataclasses.replace(record, method=name, length=0)
        for name, key in (("", other), ("line", line))
        for record in result.records
        if (record.method, record.length, record.protocol) == (*key, protocol)
    ]
    cells = statistics.summarize(
        records,
        aggregate=result.settings.aggregate,
        base=result.settings.base,
        baseline="",
        comparisons=len(result.candidates) - 1,
    )
    cell = next((cell for cell in cells if cell.method), None)
    return None if cell is None or cell.ratio is None or not math.isfinite(cell.ratio) else cell


def control_of(result: Any, labels: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return truncation, else the baseline, and the methods compared to it, of these labels if any."""
    methods = {e.label: e.method for e in result.candidates if not labels or e.label in labels}
    control = next((n for n, name in methods.items() if name == TRUNCATION), next(iter(methods)))
    rivals = [n for n, name in methods.items() if name not in (None, TRUNCATION)]
    return control, [label for label in rivals if label != control]


def ratio_text(value: float) -> str:
    """Format a ratio with enough digits to distinguish it from 1, unless the difference is rounding."""
    if not 0.9 < value < 1.1 or abs(value - 1) < statistics.ROUNDING:
        return number(value, 3)
    texts = [f"{value:.{digits}f}" for digits in (3, 4)]
    return next((text for text in texts if float(text) != 1), texts[-1])


def perplexity_verdict(result: PerplexityResult, protocol: str) -> str:
    """Compare the best method to the control, at the longest length."""
    length, documents = result.settings.lengths[-1], len(result.documents)
    control, rivals = control_of(result)
    where = f"{protocol}, {length:,} tokens, {control} as the control, {documents} documents"
    compared = {
        label: cell
        for label in rivals
        if (cell := against(result, protocol, (label, length), (control, length)))
    }
    if not compared:
        return f"{where}: no method has a number to compare."
    ranked = sorted(compared, key=lambda label: compared[label].ratio or 0)
    better = [label for label in ranked if compared[label].differs < 0]
    best, *others = better or ranked[:1]
    cell = compared[best]
    interval = f" ({'-'.join(map(ratio_text, cell.ratio_interval))})" if cell.ratio_interval else ""
    verdict = f"significantly {statistics.VERDICTS[cell.differs]}"
    if not cell.differs:
        few = cell.ratio_interval is None
        needs = statistics.NEEDED.format(cell.needed or 0)
        verdict = (
            "too few documents for a verdict" if few else f"not significantly different ({needs})"
        )
    none = "" if better else "no method is significantly better; "
    also = f"; significantly better too: {', '.join(others)}" if others else ""
    patched = any(entry.label == control and entry.method for entry in result.candidates)
    broken = not patched and result.original and length > result.original
    advice = ". An unpatched model breaks down: add truncation" if broken else ""
    return (
        f"{where}: {none}{best} has {ratio_text(cell.ratio or 0)}{interval} times the control's perplexity, "
        f"{verdict}{also}{advice}."
    )


def retrieval_verdict(group: Group) -> str:
    """Compare the method that finds most to the control, at the longest common length, by McNemar's exact test.

    Its p is multiplied by the number of methods of which it is the best (Bonferroni).
    """
    result: RetrievalResult = group.result
    lengths = [set(run.result.settings.lengths) for run in group.runs]
    length = max(set.intersection(*lengths) or set.union(*lengths))
    answers: dict[str, dict[Any, Record]] = {}
    for record in (record for record in result.records if record.length == length):
        prompt = record.task, record.depth, record.sample
        answers.setdefault(record.method, {})[prompt] = record
    control, rivals = control_of(result, list(answers)) if answers else ("", [])
    if not rivals:
        return f"{length:,} tokens: no method has answers to compare."
    ranked = not any(record.correct for own in answers.values() for record in own.values())
    hits = {
        label: {prompt for prompt, r in own.items() if (r.rank == 1 if ranked else r.correct)}
        for label, own in answers.items()
    }
    best = max(rivals, key=lambda label: len(hits[label] & answers[control].keys()))
    both = answers[best].keys() & answers[control].keys()
    found, base = hits[best] & both, hits[control] & both
    won, lost = len(found - base), len(base - found)
    chance = min(1.0, len(rivals) * mcnemar(won, lost))
    side = (won > lost) - (won < lost) if chance < 0.05 else 0
    word = {1: "significantly better", 0: "not significantly different", -1: "significantly worse"}
    none = "" if side > 0 else "no method is significantly better; "
    verb = "ranks the answer first in" if ranked else "answers"
    times = f", times {len(rivals)} methods" if len(rivals) > 1 else ""
    return (
        f"{length:,} tokens, {control} as the control, {len(both)} prompts: {none}{best} {verb} {len(found)}, "
        f"{control} {len(base)}; {word[side]} (exact McNemar test{times}, p = {chance:.2g})."
    )
