"""Verdicts on a result: the best method against the control, and whether the difference is significant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring import statistics
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.retrieval.result import Record, RetrievalResult, mcnemar


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


def retrieval_verdict(result: RetrievalResult) -> str:
    """Compare the method that finds most to the control, at the longest length, by McNemar's exact test.

    Its p is multiplied by the number of methods of which it is the best (Bonferroni).
    """
    length = result.settings.lengths[-1]
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
