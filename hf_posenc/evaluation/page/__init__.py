"""One HTML page from the results of many runs. It loads nothing, so it can be mailed, archived or printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation import published
from hf_posenc.evaluation.device.result import GpuResult
from hf_posenc.evaluation.extend.result import ExtendResult
from hf_posenc.evaluation.grid import Field, Grid, Span, listed, number, percent
from hf_posenc.evaluation.measuring.identity import version_of
from hf_posenc.evaluation.measuring.statistics import FEW_DOCUMENTS, side_of_one
from hf_posenc.evaluation.page import perplexity
from hf_posenc.evaluation.page.collect import (
    Collection,
    Source,
    Unfinished,
    collect,
    grouped,
    interval_of,
    model_of,
    settings_differ,
)
from hf_posenc.evaluation.page.perplexity import (
    missing_field,
    number_field,
    range_spans,
    ratio_field,
    ratio_span,
    row_name,
)
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.plots import CONTROL, available
from hf_posenc.evaluation.retrieval.result import mcnemar

__all__ = ["TITLE", "Collection", "Source", "Unfinished", "collect", "render"]

TITLE = "Measurements of hf-posenc"
HASH = 12
"""Digits of a hash that are shown; the tooltip and the JSON have all of them."""
_HASH = re.compile(r"[0-9a-f]{40,}")
# Parts of a result that the page shows elsewhere than under its settings.
_ELSEWHERE = frozenset(
    {
        *("kind", "format", "command", "summary", "records", "curve", "documents", "skipped"),
        *("failures", "methods", "protocols", "perplexity", "retrieval", "speed", "by_depth"),
        *("scores", "tasks", "recipe", "rungs", "steps", "remarks"),
        *("choosing", "choice", "demands", "lines", "kinds", "saved"),
    }
)


def render(collection: Collection, *, title: str = TITLE, figures: bool = True) -> str:
    """Render the results as one HTML document, with figures if matplotlib is installed.

    Raises:
        PosencError: A result is damaged in a place that the page shows; all of these are named.
    """
    try:
        return _page(collection, title, figures)
    except PosencError:
        raise
    except Exception as error:  # a value of another kind may fail anywhere
        damaged = [source.name for source in collection.files if _fails(collection, source)]
        if not damaged:
            raise
        raise PosencError(
            f"{', '.join(damaged)}: damaged, or written by another version ({one_line(error)}). Leave it out, or "
            "measure it again."
        ) from error


def _fails(collection: Collection, source: Source) -> bool:
    sources = [each for each in collection.sources if each.number == source.number]
    try:
        _page(Collection(sources), TITLE, False)
    except Exception:
        return True
    return False


def _page(collection: Collection, title: str, figures: bool) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sources = collection.sources
    commands = {s.number: s.data["command"] for s in reversed(sources) if s.data.get("command")}
    return environment.get_template("page.html").render(
        title=title,
        version=version_of("hf-posenc"),
        few=FEW_DOCUMENTS,
        collection=collection,
        runs=_runs(collection.files),
        failures=_failures(sources),
        settings=_settings(sources),
        methods=[_methods(source) for source in sources if source.data.get("methods")],
        documents=[(s, _documents(s)) for s in sources if s.data.get("documents")],
        skipped=[(s, s.data["skipped"]) for s in sources if s.data.get("skipped")],
        commands=sorted(commands.items()),
        perplexity=perplexity.sections(sources, figures=figures and available()),
        retrieval=_retrieval(sources),
        bench=_bench(sources),
        gpu=[(s, GpuResult.from_dict(s.data)) for s in sources if s.kind == GpuResult.kind],
        tuning=_tuning_sections(sources),
        extending=[(s, ExtendResult.from_dict(s.data)) for s in sources if s.kind == "extend"],
    )


def _runs(files: Sequence[Source]) -> Grid:
    heads = ("run", "folder", "kind", "model", "dtype, attention, device")
    grid = Grid.of("Runs", *heads, caption="Results in this report.", kind="words")
    for source in files:
        model = (source.data.get("perplexity") or source.data).get("model", {})
        values = (model.get("dtype"), model.get("attention"), model.get("device"))
        how = ", ".join(str(value) for value in values if value is not None)
        name = model.get("name", "-")
        grid.row(str(source.number), source.name, source.kind, name, how or "-")
    return grid


def _failures(sources: Sequence[Source]) -> Grid:
    """Missing numbers and their reasons; each reason once with all its lengths."""
    reasons: dict[tuple[str, ...], list[int]] = {}
    for source in sources:
        for *key, length in _missing(source):
            reasons.setdefault((str(source.number), *key), []).append(length)
    caption = "OOM: out of memory. nan: the loss was not a finite number. Nothing is averaged over the rest."
    heads = ("run", "method", "where", "why")
    grid = Grid.of("Missing numbers", *heads, caption=caption, kind="words")
    for (run, method, where, reason), lengths in reasons.items():
        grid.row(run, method, f"{where} at {listed(sorted(lengths))}", reason)
    return grid


def _missing(source: Source) -> Iterator[tuple[Any, ...]]:
    """Yield method, protocol or task, reason and length of every missing number."""
    data = source.data
    for entry in data.get("failures", ()):
        where = entry.get("protocol") or entry["task"]
        yield entry["method"], where, entry["reason"], entry["length"]
    for row in data["summary"] if source.kind == "perplexity" else ():
        if row["nats"] is None:
            yield row["method"], row["protocol"], "the loss is not finite", row["length"]
    for row in data["summary"] if source.kind in TITLES else ():
        if row["failed"] is not None:
            yield row["label"], "tail", row["failed"], data["settings"]["target"]


def _settings(sources: Sequence[Source]) -> Grid:
    """Everything that determines the numbers, one row per setting and one column per result."""
    numbers = [source.number for source in sources]
    several = {number for number in numbers if numbers.count(number) > 1}
    heads = [f"run {s.number}" + (f", {s.kind}" if s.number in several else "") for s in sources]
    caption = "One column per result; a single field where all that have the setting agree."
    grid = Grid.of("Settings", "setting", *heads, caption=caption, kind="words settings")
    tables = [_flat(source.data) for source in sources]
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, "") for table in tables]
        given = [value for value in values if value]
        if len(given) > 1 and len(set(given)) == 1:
            grid.row(name, _shortened(given[0], columns=len(values)))
        else:
            differs = "differs" if len(set(given)) > 1 else ""
            grid.row(name, *map(_shortened, values), mark=differs)
    return grid


def _flat(data: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested values under dotted names; lists of plain values joined, lists of anything else left out."""
    flat: dict[str, str] = {}
    for key, value in data.items():
        name, values = f"{above}{key}", value if isinstance(value, list) else [value]
        if not above and key in _ELSEWHERE:
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif not any(isinstance(entry, dict | list) for entry in values):
            known = ("none" if entry is None else entry for entry in values or [None])
            flat[name] = ", ".join(e if isinstance(e, str) else json.dumps(e) for e in known)
    return flat


def _shortened(value: str, mark: str = "", columns: int = 1) -> Field:
    """A hash by its first digits, anything else whole."""
    text = f"{value[:HASH]}…" if _HASH.fullmatch(value) else value
    return Field(text, mark, hint=value, columns=columns)


def _methods(source: Source) -> Grid:
    heads = ("method", "--patch", "scale", "forwards for prefix")
    caption = "As they were requested, and the scale in force."
    grid = Grid.of(f"Methods of run {source.number}", *heads, caption=caption, kind="words")
    forwards = {None: "-", True: "one for all lengths", False: "one for each length"}
    for method in source.data["methods"]:
        scale, original = method.get("scale"), method.get("original")
        shown = "-" if scale is None else f"{scale:g}"
        if scale is None and method.get("auto_scale"):
            shown = f"length / {original:,}, at least 1" if original else "auto"
        spec = Field(str(method.get("spec", "")), "mono")
        shared = forwards[method.get("prefix_from_one_forward")]
        grid.row(str(method["label"]), spec, shown, shared)
    return grid


def _documents(source: Source) -> Grid:
    heads = ("document", "tokens", "bytes", "text", "tokens read")
    caption = "Hashes: SHA-256 of the text and of the tokens that were read, first digits; the JSON has all of them."
    grid = Grid.of(f"Documents of run {source.number}", *heads, caption=caption, kind="words")
    for document in source.data["documents"]:
        counts = (document[name] for name in ("tokens", "bytes"))
        shown = ("-" if count is None else f"{count:,}" for count in counts)
        hashes = (document[name] or "-" for name in ("text_sha256", "tokens_sha256"))
        grid.row(document["name"], *shown, *(_shortened(text, "mono") for text in hashes))
    return grid


# Retrieval. Heat maps are tables with shaded fields, so that colour alone carries no information.

ACCURACY = "share of answers that are right"
BEATEN = "share of distractors that are less probable than the answer (one half by chance)"
# Settings that select numbers, or how they are computed; they do not change the prompts.
_FREE = frozenset({"lengths", "tasks", "chunk"})


def _retrieval(sources: Sequence[Source]) -> list[dict[str, Any]]:
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
    """Compare, for each model, the method that finds most to the control."""
    models: dict[str, list[Source]] = {}
    for source in group:
        models.setdefault(model_of(source.data), []).append(source)
    return " ".join(_found_by(own, marked=len(group) > 1) for own in models.values())


def _found_by(sources: Sequence[Source], *, marked: bool) -> str:
    """Compare the method that finds most to the control, at the longest common length, by McNemar's exact test.

    Its p is multiplied by the number of methods of which it is the best (Bonferroni).
    """
    right: dict[str, dict[tuple[Any, ...], tuple[bool, bool]]] = {}
    methods: dict[str, str | None] = {}
    lengths = [set(source.data["settings"]["lengths"]) for source in sources]
    length = max(set.intersection(*lengths) or set.union(*lengths))
    for source in sources:
        mark = f" [{source.number}]" if marked else ""
        methods |= {entry["label"] + mark: entry["method"] for entry in source.data["methods"]}
        for record in source.data["records"]:
            if record["length"] == length:
                key = record["task"], record["depth"], record["sample"]
                outcome = record["correct"], record["rank"] == 1
                right.setdefault(record["method"] + mark, {})[key] = outcome
    where = f"{length:,} tokens"
    control = next((label for label in right if methods[label] == CONTROL), next(iter(right), None))
    rivals = [label for label in right if methods[label] not in (None, CONTROL)]
    rivals = [label for label in rivals if label != control]
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
    chance = min(1.0, len(rivals) * mcnemar(won, lost))
    verb = "ranks the answer first in" if ranked else "answers"
    sure = "" if chance < 0.05 else "not "
    word = "different" if sure else "better" if won > lost else "worse"
    none = "" if word == "better" else "no method is significantly better; "
    times = f", times {len(rivals)} methods" if len(rivals) > 1 else ""
    return (
        f"{where}, {control} as the control, {len(both)} prompts: {none}{best} {verb} {len(hits[best])}, {control} "
        f"{len(hits[control] & both)}; {sure}significantly {word} (exact McNemar test{times}, p = {chance:.2g})."
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
    """Return the quantity of the heat maps, and one map for each method of a task with depths.

    The quantity is the rank of the answer if no answer is right.
    """
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


def _bench(sources: Sequence[Source]) -> list[dict[str, Any]]:
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


# Sweeps and searches: every method at the target length, and the recipe.

TITLES = {"sweep": "Sweep of methods and scales", "search": "Search of a factor for every pair"}


def _tuning_sections(sources: Sequence[Source]) -> list[dict[str, Any]]:
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
    kept = data.get("kept")
    kept = f" It is not shown to be better than {kept}: keep that." if kept else ""
    return (
        f"{where}, {control['documents']} documents: {none}{best} is {word} {CONTROL}, with {times} "
        f"times the control's perplexity.{kept}"
    )


def _tuning(data: Mapping[str, Any], title: str) -> Grid:
    original, target = data["settings"]["original"], data["settings"]["target"]
    caption = (
        "Ratios are paired over the documents that both methods have read: below 1 is better. The interval of a ratio "
        "to the best method is widened until all that the measurements could have chosen hold together in 95 % of "
        "samples."
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
