"""The sections of the page for retrieval, benchmarks, sweeps and searches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import published
from hf_posenc.evaluation.bench.gpu_result import GpuResult
from hf_posenc.evaluation.grid import Field, Grid, Span, number, percent
from hf_posenc.evaluation.measuring.statistics import side_of_one
from hf_posenc.evaluation.page.collect import Source, grouped, interval_of, settings_differ
from hf_posenc.evaluation.page.perplexity import (
    missing_field,
    number_field,
    range_spans,
    ratio_field,
    ratio_span,
    row_name,
)
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.plots import CONTROL

# Retrieval. Heat maps are tables with shaded fields, so that colour alone carries no information.

ACCURACY = "share of answers that are right"
BEATEN = "share of distractors that are less probable than the answer (one half by chance)"
# Settings that select numbers, or how they are computed; they do not change the prompts.
_FREE = frozenset({"lengths", "tasks", "chunk"})


def retrieval(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the values of `sections.html`: all retrieval results, those that read the same prompts together."""
    sections = []
    groups = grouped(sources, "retrieval", _prompts)
    for group in groups:
        data = group[0].data
        tasks = dict.fromkeys(task for source in group for task in source.data["tasks"])
        noise = data["haystack"].get("kind") == "noise"
        sections.append(
            {
                "sources": group,
                "apart": settings_differ(_prompts(groups[0][0].data), _prompts(data)),
                "data": data,
                "haystack": "sentences of noise" if noise else json.dumps(data["haystack"]),
                "verdict": _found(group),
                "tasks": [_task(group, task) for task in tasks],
            }
        )
    return sections


def _found(group: Sequence[Source]) -> str:
    """Compare the method that finds most to the control, at the longest length, by McNemar's exact test."""
    right: dict[str, dict[tuple[Any, ...], tuple[bool, bool]]] = {}
    methods: dict[str, str | None] = {}
    length = max(max(source.data["settings"]["lengths"]) for source in group)
    for source in group:
        mark = f" [{source.number}]" if len(group) > 1 else ""
        methods |= {entry["label"] + mark: entry["method"] for entry in source.data["methods"]}
        for record in source.data["records"]:
            if record["length"] == length:
                key = record["task"], record["depth"], record["sample"]
                outcome = record["correct"], record["rank"] == 1
                right.setdefault(record["method"] + mark, {})[key] = outcome
    where = f"{length:,} tokens"
    control = next((label for label in right if methods[label] == CONTROL), next(iter(right), None))
    rivals = [label for label in right if methods[label] not in (None, CONTROL)]
    if control is None or not rivals:
        return f"{where}: no method has answers to compare."
    ranked = not any(correct for found in right.values() for correct, _ in found.values())
    hits = {
        label: {key for key, outcome in found.items() if outcome[ranked]} & right[control].keys()
        for label, found in right.items()
    }
    best = max(rivals, key=lambda label: len(hits[label]))
    both = right[best].keys() & right[control].keys()
    won, lost = len(hits[best] - hits[control]), len(hits[control] & both - hits[best])
    tail = sum(math.comb(won + lost, count) for count in range(min(won, lost) + 1))
    chance = min(1.0, 2 * tail / 2 ** (won + lost))
    verb = "ranks the answer first in" if ranked else "answers"
    sure = "" if chance < 0.05 else "not "
    word = "different" if sure else "better" if won > lost else "worse"
    none = "" if word == "better" else "no method is significantly better; "
    return (
        f"{where}, {control} as the control, {len(both)} prompts: {none}{best} {verb} {len(hits[best])}, {control} "
        f"{len(hits[control] & both)}; {sure}significantly {word} (exact McNemar test, p = {chance:.2g})."
    )


def _prompts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that determines the prompts and the right answers."""
    settings = {k: v for k, v in data["settings"].items() if k not in _FREE}
    model = data["model"]
    return {
        "tokenizer": model.get("tokenizer", {}).get("sha256"),
        "special tokens": model.get("bos", {}).get("token_ids"),
        "haystack": data.get("haystack"),
        **settings,
    }


def _task(group: Sequence[Source], task: str) -> dict[str, Any]:
    sources = [source for source in group if task in source.data["tasks"]]
    settings = sources[0].data["settings"]
    lengths = sorted({n for source in sources for n in source.data["settings"]["lengths"]})
    methods = [(source, method["label"]) for source in sources for method in source.data["methods"]]
    labels = [label for _, label in methods]
    names = [
        f"{label} [{source.number}]" if labels.count(label) > 1 else label
        for source, label in methods
    ]
    title = f"Retrieval, {task}"
    ranked = ""
    if settings["decode"] == "teacher-forced" and settings.get("distractors", 0):
        candidates = settings["distractors"] + 1
        ranked = f"; 1st: how often the answer is the most probable of {candidates} candidates"
    caption = (
        f"{title}. In each field: the share of right answers, with its 95 % Wilson interval{ranked}. Passes 80 %: the "
        "longest context with that accuracy (YaRN). k_max 20 %: the distance up to which at least that many are found, "
        "at the longest length (Position Interpolation)."
    )
    heads = ("method", *(f"{length:,}" for length in lengths), "passes 80 %", "k_max 20 %")
    grid = Grid.of(title, *heads, caption=caption)
    for (source, label), name in zip(methods, names, strict=True):
        data = source.data
        about = f"run {source.number}, {data['model'].get('name', '')}" if len(group) > 1 else ""
        scores = {(s["method"], s["task"]): s for s in data.get("scores", ())}
        score = scores.get((label, task), {})
        reached = (score.get("k_max") or {}).get(str(max(data["settings"]["lengths"])))
        grid.row(
            row_name(name, about),
            *(_answers(data, label, task, length) for length in lengths),
            *("-" if n is None else f"{n:,}" for n in (score.get("passing_context"), reached)),
        )
    quantity, heats = _heats(methods, names, task)
    values = {"name": task, "definition": sources[0].data["tasks"][task], "table": grid}
    return {**values, "quantity": quantity, "heats": heats}


def _answers(data: Mapping[str, Any], method: str, task: str, length: int) -> Field:
    key = (method, task, length)
    cells, failures = (
        [e for e in data[part] if (e["method"], e["task"], e["length"]) == key]
        for part in ("summary", "failures")
    )
    if not cells:
        for entry in data["left_out"]:
            if (entry["task"], entry["length"]) == (task, length):
                hint = f"the shortest prompt has {entry['needed']:,} tokens"
                return Field("-", "none", hint=hint)
        return missing_field(failures[0]["reason"] if failures else None)
    cell = cells[0]
    field = Field().add(_percent(cell["accuracy"], "value"))
    field.add(*range_spans("\n", cell["interval"], _percent))
    first, interval = cell["first"], interval_of(cell["first_interval"])
    if first is not None and interval is not None:
        field.append("\n1st ", "aside")
        field.add(_percent(first), *range_spans(" (", interval, _percent, ")"))
        if cell["chance"] is not None and interval[0] > cell["chance"]:
            field.append(" ").append("above chance", "better")
    return field


def _percent(share: float, mark: str = "aside") -> Span:
    return Span(percent(share).replace("%", "\N{NO-BREAK SPACE}%"), mark, share)


def _heats(
    methods: Sequence[tuple[Source, str]], names: Sequence[str], task: str
) -> tuple[str, list[Grid]]:
    """The quantity, which is ranks if no answer is right, and a map for every method of a task that has depths."""
    cells = {
        (name, cell["depth"], cell["length"]): cell
        for name, (source, label) in zip(names, methods, strict=True)
        for cell in source.data.get("by_depth", ())
        if (cell["method"], cell["task"]) == (label, task) and cell["depth"] is not None
    }
    ranked = all(cell["beaten"] is not None and not cell["accuracy"] for cell in cells.values())
    lengths = sorted({length for *_, length in cells})
    heats = []
    for name in names if cells else ():
        title, heads = f"{name} in {task}, by depth and length", [f"{n:,}" for n in lengths]
        grid = Grid.of(title, "depth", *heads, caption=name, kind="heat")
        for depth in sorted({depth for _, depth, _ in cells}):
            fields = []
            for length in lengths:
                cell = cells.get((name, depth, length))
                share = cell and cell["beaten" if ranked else "accuracy"]
                text = "-" if share is None else f"{100 * share:.0f}"
                fields.append(Field(text, "", share, shade=round(100 * (share or 0))))
            grid.row(_percent(depth).text, *fields)
        heats.append(grid)
    return BEATEN if ranked else ACCURACY, heats


# Benchmarks: speed, memory and published tables. Their perplexities and retrieval are in the sections above.


def bench(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the values of `sections.html` for each benchmark."""
    return [
        {
            "source": source,
            "speed": _speed(source.data["speed"]) if source.data.get("speed") else None,
            "published": [_published(name, source) for name in source.data.get("compare", ())],
        }
        for source in sources
        if source.kind == "bench"
    ]


def _speed(speed: Mapping[str, Any]) -> Grid:
    count, memory = speed.get("threads"), speed.get("memory")
    threads = f", {count} thread{'s' * (count != 1)}" if count else ""
    kind = f"; memory: {memory}" if memory else ""
    caption = (
        f"Speed and memory. One prefill of {speed['length']:,} tokens on {speed['device']}{threads}{kind}. Median of "
        "the rounds, slowest to fastest."
    )
    heads = ("tokens per second", "times as fast as the first", "peak memory", "tokens at a time")
    grid = Grid.of("Speed and memory", "method", *heads, caption=caption)
    for row in speed.get("summary", ()):
        field, rate = missing_field(row.get("failed")), row.get("tokens_per_second")
        if rate is not None:
            ends = row["lowest"], row["highest"]
            field = Field().add(_rate(rate, "value"), *range_spans("\n", ends, _rate))
        times, peak, prefill = row.get("ratio"), row.get("peak_bytes"), row.get("prefill")
        grid.row(
            row["method"],
            field,
            Field("-") if times is None else Field().add(ratio_span(times, "")),
            "-" if peak is None else f"{number(peak / 2**30, 3)} GiB",
            "all" if prefill is None else f"{prefill:,}",
        )
    return grid


def _rate(value: float, mark: str = "aside") -> Span:
    return Span(f"{value:,.0f}" if value >= 100 else number(value, 3), mark, value)


def _published(name: str, source: Source) -> dict[str, Any]:
    settings = Settings.from_dict(source.data["perplexity"]["settings"])
    try:
        table = published.get(name)
    except PosencError:  # made by another version of the package
        apart = ["this version of hf-posenc does not have it"]
        return {"title": name, "apart": apart, "table": None}
    title = f"{table.paper}, {table.table}"
    caption = f"As printed, at the lengths of this run. {' '.join(published.remarks(table))}"
    heads = ("model and method", *(f"{length:,}" for length in settings.lengths))
    grid = Grid.of(f"Published: {title}", *heads, caption=caption)
    for row, values in table.printed(settings.lengths):
        grid.row(row_name(row.method, row.model), *values)
    apart = published.differences(table, settings)
    return {"title": title, "apart": apart, "table": grid if grid.rows else None}


def gpu(sources: Sequence[Source]) -> list[tuple[Source, GpuResult]]:
    """Return the measurements of devices, which show themselves."""
    return [(s, GpuResult.from_dict(s.data)) for s in sources if s.kind == GpuResult.kind]


# Sweeps and searches: every method at the target length, and the recipe.

TITLES = {"sweep": "Sweep of methods and scales", "search": "Search of a factor for every pair"}


def tuning(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the values of `sections.html` for each sweep and search; each has its own documents."""
    return [
        {
            "source": source,
            "title": TITLES[source.kind],
            "verdict": _chosen(source.data),
            "table": _tuning(source.data, TITLES[source.kind]),
            "recipe": json.dumps(source.data["recipe"], indent=2),
        }
        for source in sources
        if source.kind in TITLES
    ]


def _chosen(data: Mapping[str, Any]) -> str:
    """Compare the best method to the control, from the control's ratio to it."""
    rows = {row["label"]: row for row in data["summary"]}
    control, compared = rows.get(CONTROL, {}), rows.get(CONTROL, {}).get("to_best")
    where = f"{data['settings']['target']:,} tokens"
    best = data.get("winner") or ("search" if data.get("best") else None)
    if best is None or compared is None:
        return f"{where}: no method has a number to compare with {CONTROL}."
    side = side_of_one(interval_of(compared["interval"]), control["documents"])
    word = "not significantly different from"
    if side:
        word = f"significantly {'better' if side > 0 else 'worse'} than"
    times = ratio_span(1 / compared["ratio"]).text
    none = "" if side > 0 else "no method is significantly better than the control; "
    return (
        f"{where}, {control['documents']} documents: {none}{best} is {word} {CONTROL}, with {times} "
        "times the control's perplexity."
    )


def _tuning(data: Mapping[str, Any], title: str) -> Grid:
    original, target = data["settings"]["original"], data["settings"]["target"]
    caption = (
        "Ratios are paired over the documents that both methods have read, with their 95 % interval: "
        "below 1 is better."
    )
    heads = (
        *("method", "documents", f"at {target:,} tokens"),
        *(f"at {original:,}, to the unpatched model", f"at {target:,}, to the best"),
    )
    grid = Grid.of(title, *heads, caption=caption)
    for row in data["summary"]:
        tail = missing_field(row["failed"])
        if row["failed"] is None and row["perplexity"] is not None:
            tail = number_field(row["perplexity"], interval_of(row["interval"]))
        best = "best" if row["label"] == data.get("winner") else ""
        ratios = [_compared(row[name], row["documents"]) for name in ("short", "to_best")]
        name = row_name(row["label"], "control" if row["control"] else best)
        grid.row(name, f"{row['documents']:,}", tail, *ratios)
    return grid


def _compared(value: Mapping[str, Any] | None, documents: int) -> Field:
    if value is None:
        return Field("-", "none", hint="not compared")
    return ratio_field(value["ratio"], interval_of(value["interval"]), documents)
