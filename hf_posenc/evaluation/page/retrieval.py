"""The retrieval section: a table and heat maps per task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.numbers import Shown, interval_of, percent
from hf_posenc.evaluation.scoring.memory import OUT_OF_MEMORY

# Heat maps as tables: the numbers stand in the fields, so that colour is not the only thing that says them.


ACCURACY = "share of answers that are right"
BEATEN = "share of distractors that are less probable than the answer (one half by chance)"


@dataclass(frozen=True)
class Field:
    """One field: its number, `None` where there is none, and how much of the colour it has, in percent."""

    value: Shown | None
    colour: int


@dataclass(frozen=True)
class Heat:
    """One method's map.

    Attributes:
        name: The method.
        value: What its numbers are.
        lengths: The columns.
        rows: Depth in percent, and the fields.
    """

    name: str
    value: str
    lengths: Sequence[int]
    rows: Sequence[tuple[str, Sequence[Field]]]


def heats(methods: Sequence[tuple[Source, str]], names: Sequence[str], task: str) -> list[Heat]:
    """A map for every method of a task that has depths.

    Args:
        methods: Methods by their result and label.
        names: What they are called.
        task: The task.

    Returns:
        The maps, all of the same quantity: accuracy, or ranks where no answer of the task is right.
    """
    found = [
        [
            cell
            for cell in source.data.get("by_depth", ())
            if (cell["method"], cell["task"]) == (label, task) and cell["depth"] is not None
        ]
        for source, label in methods
    ]
    cells = [cell for own in found for cell in own]
    if not cells:
        return []
    ranked = all(cell["beaten"] is not None for cell in cells)
    beaten = ranked and not any(cell["accuracy"] for cell in cells)
    key = "beaten" if beaten else "accuracy"
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    made = []
    for name, own in zip(names, found, strict=True):
        values = {(cell["depth"], cell["length"]): cell[key] for cell in own}
        rows = [
            (percent(depth).text, [_field(values, depth, length) for length in lengths])
            for depth in depths
        ]
        made.append(Heat(name, BEATEN if beaten else ACCURACY, lengths, rows))
    return made


def _field(own: Mapping[tuple[float, int], Any], depth: float, length: int) -> Field:
    share = own.get((depth, length))
    if share is None:
        return Field(None, 0)
    return Field(Shown(f"{100 * share:.0f}", repr(share)), round(100 * share))


Index = Mapping[tuple[str, str, int], Mapping[str, Any]]

# Which numbers there are, and how they are computed; not which prompts are read.
_FREE = frozenset({"lengths", "tasks", "chunk"})


@dataclass(frozen=True)
class Cell:
    """One field: how often the answer is right, and how often it is the most probable candidate.

    Attributes:
        accuracy: The share of samples answered right; `None` where `state` says why there is none.
        low: The lower end of its Wilson interval.
        high: The upper end.
        first: The share of samples whose answer is ranked first; `None` without distractors.
        first_low: The lower end of its interval.
        first_high: The upper end.
        above_chance: Whether that interval lies above what chance gives.
        state: `""`, `"OOM"`, `"failed"` or `"-"`.
        reason: More about it.
    """

    accuracy: Shown | None = None
    low: Shown | None = None
    high: Shown | None = None
    first: Shown | None = None
    first_low: Shown | None = None
    first_high: Shown | None = None
    above_chance: bool = False
    state: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """A method's row: its fields, and the numbers that papers give."""

    name: str
    about: str
    cells: Sequence[Cell]
    passes: str
    k_max: str


@dataclass(frozen=True)
class Table:
    """One task."""

    task: str
    definition: str
    lengths: Sequence[int]
    rows: Sequence[Row]
    heats: Sequence[Heat]


@dataclass(frozen=True)
class Section:
    """The results that read the same prompts.

    Attributes:
        sources: The results.
        apart: Why it is not part of the first section.
        decode: What counts as right, in one sentence.
        samples: Samples of a task at one length.
        ranked: Number of candidates that answers are ranked among; 0 for no ranks.
        haystack: What stands around the needles.
        tables: One per task.
    """

    sources: Sequence[Source]
    apart: Sequence[str]
    decode: str
    samples: int
    ranked: int
    haystack: str
    tables: Sequence[Table]


def sections(sources: Sequence[Source]) -> list[Section]:
    """All retrieval results, those that read the same prompts together."""
    groups: dict[str, list[Source]] = {}
    for source in sources:
        if source.kind == "retrieval":
            key = json.dumps(_prompts(source.data), sort_keys=True)
            groups.setdefault(key, []).append(source)
    ordered = list(groups.values())
    return [_section(group, ordered[0]) for group in ordered]


def _prompts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that decides what is read, and what counts as right."""
    settings = {k: v for k, v in data["settings"].items() if k not in _FREE}
    model = data["model"]
    return {
        "tokenizer": model.get("tokenizer", {}).get("sha256"),
        "special tokens": model.get("bos", {}).get("token_ids"),
        "haystack": data.get("haystack"),
        **settings,
    }


def _section(group: list[Source], first: list[Source]) -> Section:
    data = group[0].data
    settings, haystack = data["settings"], data.get("haystack") or {}
    one, two = _prompts(first[0].data), _prompts(data)
    apart = [
        f"{name} {_said(two.get(name))} instead of {_said(one.get(name))}"
        for name in dict.fromkeys([*one, *two])
        if one.get(name) != two.get(name)
    ]
    tasks = dict.fromkeys(task for source in group for task in source.data["tasks"])
    distractors = settings.get("distractors", 0)
    ranked = distractors + 1 if settings["decode"] == "teacher-forced" and distractors else 0
    return Section(
        group,
        apart,
        data["decode"],
        len(settings["depths"]) * settings["samples"],
        ranked,
        "sentences of noise" if haystack.get("kind") == "noise" else _said(haystack),
        [_table(group, task) for task in tasks],
    )


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(group: Sequence[Source], task: str) -> Table:
    sources = [source for source in group if task in source.data["tasks"]]
    lengths = sorted({n for source in sources for n in source.data["settings"]["lengths"]})
    methods = [(source, method["label"]) for source in sources for method in source.data["methods"]]
    labels = [label for _, label in methods]
    names = [
        f"{label} [{source.number}]" if labels.count(label) > 1 else label
        for source, label in methods
    ]
    rows = [
        _row(source, label, name, task, lengths, several=len(group) > 1)
        for (source, label), name in zip(methods, names, strict=True)
    ]
    definition = sources[0].data["tasks"][task]
    return Table(task, definition, lengths, rows, heats(methods, names, task))


def _row(
    source: Source, label: str, name: str, task: str, lengths: Sequence[int], *, several: bool
) -> Row:
    data = source.data
    cells = {(c["method"], c["task"], c["length"]): c for c in data["summary"]}
    scores = {(s["method"], s["task"]): s for s in data.get("scores", ())}
    score = scores.get((label, task), {})
    reached = score.get("k_max") or {}
    return Row(
        name,
        f"run {source.number}, {data['model'].get('name', '')}" if several else "",
        [_cell(data, cells, label, task, length) for length in lengths],
        _count(score.get("passing_context")),
        _count(reached.get(str(max(data["settings"]["lengths"])))),
    )


def _cell(data: Mapping[str, Any], cells: Index, method: str, task: str, length: int) -> Cell:
    cell = cells.get((method, task, length))
    if cell is None:
        return _empty(data, method, task, length)
    low, high = (percent(end) for end in cell["interval"])
    first, first_interval = cell["first"], interval_of(cell["first_interval"])
    if first is None or first_interval is None:
        return Cell(percent(cell["accuracy"]), low, high)
    chance = cell["chance"]
    return Cell(
        percent(cell["accuracy"]),
        low,
        high,
        percent(first),
        percent(first_interval[0]),
        percent(first_interval[1]),
        chance is not None and first_interval[0] > chance,
    )


def _empty(data: Mapping[str, Any], method: str, task: str, length: int) -> Cell:
    for failure in data["failures"]:
        if (failure["method"], failure["task"], failure["length"]) == (method, task, length):
            state = "OOM" if failure["reason"] == OUT_OF_MEMORY else "failed"
            return Cell(state=state, reason=failure["reason"])
    for entry in data.get("left_out", ()):
        if (entry["task"], entry["length"]) == (task, length):
            return Cell(state="-", reason=f"the shortest prompt has {entry['needed']:,} tokens")
    return Cell(state="-", reason="not measured")


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
