"""Parts of docs/real_model.md that are generated from docs/data/real_model/, for scripts/make_readme.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.grid import markdown_table, number
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import Interval, side_of_one, summarize
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.retrieval.result import RetrievalResult
from scripts.measure_real_model import AGREEMENT, RESULTS

_WORDS = {-1: "better", 0: "not told apart", 1: "worse"}


def tails() -> str:
    """Return tail perplexities at 8,192 and 16,384 tokens, their ratios to truncation, and those of every document."""
    result = PerplexityResult.from_dict(_read("tail-16k"))
    lengths = result.settings.lengths
    cells = {
        (cell.method, cell.length): cell for cell in summarize(result.records, baseline=TRUNCATION)
    }
    labels = [entry.label for entry in result.candidates]
    rows = []
    for label in labels:
        row = [f"`{label}`"]
        for length in lengths:
            cell = cells[label, length]
            row.append(f"{number(cell.perplexity)}{_range(cell.interval)}")
        last = cells[label, lengths[-1]]
        if label == TRUNCATION or last.ratio is None:
            row += ["", ""]
        else:
            row.append(f"{number(last.ratio)}{_range(last.ratio_interval)}")
            row.append(_WORDS[side_of_one(last.ratio_interval, last.documents)])
        rows.append(row)
    head = ["method", *(f"at {n:,} tokens" for n in lengths), "by truncation", ""]
    names = [document["name"] for document in result.documents]
    shown = [Path(name).name for name in names]
    nats = {(r.method, r.document): r for r in result.records if r.length == lengths[-1]}
    each = [
        [
            f"`{label}`",
            *(number(math.exp(nats[label, n].nats / nats[label, n].tokens)) for n in names),
        ]
        for label in labels
    ]
    model, versions = result.model, result.environment
    intro = (
        f"Tail perplexity of {model['name']}: the same last {result.settings.tail_tokens:,} tokens of "
        f"{len(names)} documents. In parentheses: 95 % intervals over documents; the ratios are paired, and their "
        "intervals hold together."
    )
    by = f"torch {versions['torch']}, transformers {versions['transformers']}, {model['dtype']}."
    return "\n\n".join(
        [
            intro,
            markdown_table(head, rows, numeric=[False, *(True for _ in lengths), True, False]),
            f"At {lengths[-1]:,} tokens, by document:",
            markdown_table(["method", *shown], each, numeric=True),
            f"{by} [tail-16k.json](data/real_model/tail-16k.json) has every number.",
        ]
    )


def agreement() -> str:
    """Return the log likelihoods of lm-evaluation-harness beside our own."""
    values = _read(AGREEMENT)
    rows = []
    for row in values["rows"]:
        difference = abs(row["nats"] / row["harness"] - 1)
        rows.append(
            [
                f"`{row['method']}`",
                f"{row['tokens']:,}",
                f"{row['nats']:.3f}",
                f"{row['harness']:.3f}",
                f"{difference:.0e}",
            ]
        )
    head = ["method", "tokens", "hf_posenc, nats", "harness, nats", "difference"]
    ruler = values["ruler"]
    same = "the same text" if ruler["harness"] == ruler["generate"] else "another text"
    prompt = (
        f"On a prompt of {ruler['prompt_tokens']:,} tokens by the harness' own generator of RULER (`niah_single_1`), "
        f"the model with `yarn:scale=2` answers through the harness with {same} as through `generate`."
    )
    return f"{markdown_table(head, rows, numeric=True)}\n\n{prompt}"


def reasoning() -> str:
    """Return how often the answers of facts about people are found, for docs/retrieval.md."""
    result = RetrievalResult.from_dict(_read("reasoning"))
    rows = []
    for cell in result.cells:
        assert cell.first is not None
        assert cell.first_interval is not None
        assert cell.chance is not None
        first, n = round(cell.first * cell.samples), cell.samples
        probability = math.fsum(
            math.comb(n, k) * cell.chance**k * (1 - cell.chance) ** (n - k)
            for k in range(first, n + 1)
        )
        low, high = cell.first_interval
        rows.append(
            [
                f"`{cell.task}`",
                f"{cell.length:,}",
                f"{cell.accuracy:.0%}",
                f"{cell.first:.0%} ({low:.0%} to {high:.0%})",
                f"{cell.chance:.0%}",
                f"{probability:.1g}",
            ]
        )
    samples = result.settings.samples * len(result.settings.depths)
    head = ["task", "tokens", "right outright", "ranked first", "by chance", "p"]
    table = markdown_table(head, rows, numeric=[False, True, True, True, True, True])
    return (
        f"{result.model['name']} without a patch, {samples} samples at {len(result.settings.depths)} depths. In "
        "parentheses: the 95 % Wilson interval. p: of at least so many by chance (binomial).\n\n"
        f"{table}\n\n[reasoning.json](data/real_model/reasoning.json) has every sample."
    )


def _read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return values


def _range(interval: Interval | None) -> str:
    return "" if interval is None else f" ({number(interval[0])}-{number(interval[1])})"
