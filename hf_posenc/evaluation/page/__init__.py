"""One HTML page from the results of many runs. It loads nothing, so it can be mailed, archived or printed.

`collect` finds the results in run folders, `sections` brings every kind of result into one form, by its own tables,
notes and figures, and `render` makes the page. It opens with verdicts: the best method against the control, and whether
the difference is significant.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hf_posenc import evaluation
from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation import plots
from hf_posenc.evaluation.grid import Field, Grid, Result, number
from hf_posenc.evaluation.measuring.identity import version_of
from hf_posenc.evaluation.measuring.statistics import TOO_FEW, VERDICTS, Cell
from hf_posenc.evaluation.perplexity.result import PerplexityResult, ratio_text
from hf_posenc.evaluation.plots import available

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("perplexity", "retrieval")
"""Attributes of a benchmark or an extension that are results themselves."""
_NAMES = ("Perplexity", "Retrieval", "Bench", "Extend", "Gpu", "Sweep", "Search")
KINDS: Mapping[str, type[Result]] = {
    name.lower(): getattr(evaluation, f"{name}Result") for name in _NAMES
}
RECORDS = "records"


@dataclass(frozen=True)
class Source:
    """One result: a file, or a part of one; the parts have the file's number, which begins at 1.

    `data` is the JSON that the result was read from.
    """

    number: int
    name: str
    kind: str
    data: dict[str, Any]
    result: Any
    part: bool = False


@dataclass
class Collection:
    """Results, each once, with their parts behind them; runs that have not finished, and why files are left out."""

    sources: list[Source] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Source]:
        """The results that are whole files."""
        return [source for source in self.sources if not source.part]


def collect(paths: Sequence[Path]) -> Collection:
    """Read the results in files or below folders, in the order of the paths; one that occurs twice is taken once.

    Raises:
        PosencError: A path does not exist, or there is nothing to report in any of them.
    """
    collection, seen, order = Collection(), dict[str, Path](), list(KINDS)
    for path in paths:
        if not path.exists():
            raise PosencError(f"There is no path {path}. Give the --output folder of a run.")
        files, unfinished = [path], list[str]()
        if path.is_dir():
            inside = (file for file in path.rglob("*.json") if file.stem in KINDS)
            found = (file for file in inside if RECORDS not in file.relative_to(path).parts)
            files = sorted(found, key=lambda file: (file.parent, order.index(file.stem)))
            unfinished = _unfinished_in(path, {file.parent for file in files})
        for file in files:
            try:
                _add(collection, file, file.parent if path.is_dir() else file, seen)
            except PosencError as reason:
                collection.remarks.append(f"{file}: {reason}.")
        collection.remarks += unfinished
        if not files and not unfinished:
            collection.remarks.append(f"{path}: no result in it.")
    if not collection.sources:
        names = ", ".join(f"{kind}.json" for kind in KINDS)
        reasons = " ".join(collection.remarks)
        raise PosencError(f"There is nothing to report. {reasons} A run's folder has {names}.")
    return collection


def _add(collection: Collection, file: Path, name: Path, seen: dict[str, Path]) -> None:
    """Add the result of a file and its parts; raise the reason if it is left out."""
    try:
        text = file.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, OSError) else "no JSON, or damaged"
        raise PosencError(f"cannot be read ({why})") from error
    kind = str(data.get("kind")) if isinstance(data, dict) else ""
    if kind not in KINDS:
        raise PosencError("not a result of hf-posenc")
    try:
        result = KINDS[kind].from_dict(data)
        for shown in (result.tables, result.notes, result.guide, result.problems):
            list(shown())
    except Exception as error:  # a value of another kind may fail anywhere
        lacks = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else one_line(error)
        raise PosencError(f"damaged, or written by another version: {lacks}") from error
    if (first := seen.setdefault(hashlib.sha256(text).hexdigest(), file)) is not file:
        raise PosencError(f"the same result as {first}")
    about = len(collection.files) + 1, name.as_posix()
    collection.sources.append(Source(*about, kind, data, result))
    for part in PARTS:
        if (inside := getattr(result, part, None)) is not None:
            collection.sources.append(Source(*about, part, data[part], inside, part=True))


def _unfinished_in(folder: Path, finished: set[Path]) -> list[str]:
    """Return a line for each run with records and no result, with the command of the one that stored most."""
    lines = []
    folders = {path.parents[2] for path in folder.rglob(f"{RECORDS}/*/*.jsonl")}
    for run in sorted(folders - finished):
        counts: dict[Path, list[int]] = {}
        for file in sorted((run / RECORDS).glob("*/*.jsonl")):
            counts.setdefault(file.parent, []).append(file.read_bytes().count(b"\n"))
        store = max(counts, key=lambda store: sum(counts[store]))
        command = ""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            command = json.loads((store / "settings.json").read_bytes()).get("command") or ""
        lines.append(
            f"{run.as_posix()}: unfinished, with {sum(counts[store]):,} values; the same command resumes it. {command}"
        )
    return lines


ORDER = ("extend", "perplexity", "retrieval")
"""Kinds that come first on the page."""
_MAP = "by depth of the needle in the prompt, from its front to its end, and by the tokens of the prompt."
CAPTIONS = {
    "retrieval": f"Answers right, {_MAP}",
    "retrieval_ranks": f"Distractors less probable than the answer (by chance 50 %), {_MAP}",
    "sweep": "Every method with its interval over documents; vertical lines: the controls.",
    "search": "Left: the path of the search. Right: the factors found, beside those it began with.",
}
Drawing = tuple[Markup, str, str]
"""A figure as an `<svg>` element, its caption, and its lines in words."""


@dataclass
class Part:
    """A part of a section: tables, and figures below them."""

    grids: Sequence[Grid]
    figures: Sequence[Drawing] = ()
    heading: str = ""


@dataclass
class Section:
    """A section of the page; its verdicts are at the top of the page."""

    id: str
    title: str
    verdicts: list[str]
    notes: list[str]
    parts: list[Part]
    recipe: str = ""


def sections(sources: Sequence[Source], *, figures: bool) -> list[Section]:
    """Return a section for each result: extensions first, then perplexity and retrieval, then the others."""
    ordered = sorted(sources, key=lambda source: (*ORDER, source.kind).index(source.kind))
    return [_section(source, figures) for source in ordered]


def _section(source: Source, figures: bool) -> Section:
    result, kind, key = source.result, source.kind, f"{source.kind}-{source.number}"
    title, verdicts, notes = kind.capitalize(), list(result.findings()), list(result.notes())
    parts = list[Part]()
    if kind not in ("perplexity", "bench"):
        drawn = result.figures().items() if figures and kind in CAPTIONS else ()
        captioned = [_drawn(figure, f"{key}-{name}", CAPTIONS[name]) for name, figure in drawn]
        parts = [Part(result.tables(), captioned)]
    if kind == "extend":
        title = f"Extending {source.data['model']['name']} to {result.lengths[1]:,} tokens"
        verdicts = result.lines()
        demands = [
            f"{'Met' if demand.met else 'Not met'}: {demand.name}. {demand.numbers}."
            for demand in result.demands
        ]
        notes = [*demands, *(note for note in notes if note not in verdicts)]
    elif kind == "perplexity":
        verdicts = verdicts or ["no method has a number to compare."]
        for name, grid in zip(result.conditions, result.tables(), strict=True):
            curves = list(_figures(result, name, f"{key}-{name}")) if figures else []
            parts.append(Part([grid, *_ratios(result, name)], curves, name))
        notes += result.guide()
    elif kind == "retrieval":
        verdicts = verdicts or ["no method has answers to compare."]
        notes += result.guide()
    elif kind == "bench":
        title, verdicts = f"Benchmark, suite {result.suite}", []
        notes = list(result.remarks)
        if result.speed is not None:  # its other parts have sections of their own
            parts, notes = [Part(result.speed.tables())], [*notes, *result.speed.notes()]
    elif kind == "gpu":
        title = result.machine["device"]
        verdicts = ["times and memory, which do not measure quality."]
    else:  # a sweep or a search: what follows the note on its course is about the best method
        notes, verdicts = notes[:1], [" ".join(notes[1:])]
    return Section(
        key,
        f"{title} (run {source.number})",
        verdicts,
        notes,
        parts,
        recipe=json.dumps(result.recipe, indent=2) if result.recipe else "",
    )


# Perplexity.


def _ratios(result: PerplexityResult, protocol: str) -> Iterator[Grid]:
    """Yield the table of ratios to the baseline, at the longest length to the control too; none of a single method.

    Under `tail`, the gain too: the same tokens with the longest context, by those with the longest trained one.
    """
    lengths, labels = result.settings.lengths, [entry.label for entry in result.candidates]
    if len(labels) < 2:
        return
    base, control, last = labels[0], result.control()[0], lengths[-1]
    short = [length for length in lengths if result.original and length <= result.original]
    grid = Grid(
        f"Ratios, {protocol}",
        caption=(
            f"Ratios, {protocol}: perplexity as a multiple of another, with the paired interval over documents; better "
            "or worse where it excludes 1 (all of a column hold together in 95 % of samples)."
        ),
    )
    grid.column("method")
    for length in lengths:
        grid.column(f"{length:,}\nto the baseline", numeric=True)
    grid.column(f"{last:,}\nto the control", numeric=True)
    others = [(control, last)]
    if protocol == "tail" and 0 < len(short) < len(lengths):
        grid.column(f"{last:,}, to the\nbaseline at {short[-1]:,}", numeric=True)
        others.append((base, short[-1]))
    for label in labels:
        cells = (result.cell(label, protocol, length) for length in lengths)
        fields = [_ratio(cell, "baseline" * (label == base)) for cell in cells]
        for other in others:
            itself = "control" * (other == (label, last))
            fields.append(_ratio(result.against(protocol, (label, last), other), itself))
        grid.row(label, *fields)
    yield grid


def _ratio(cell: Cell | None, itself: str) -> Field:
    """Return a ratio, its range and its verdict; the name of the method that is compared with itself."""
    if cell is None or cell.ratio is None or not plots.positive(cell.ratio):
        return Field("-", "none", hint="one of the two was not measured")
    if itself:
        return Field(itself, "none")
    shown = Field(f"×{ratio_text(cell.ratio)}", "value", cell.ratio)
    ends = cell.ratio_interval
    shown.append(f"\n{'-'.join(map(ratio_text, ends)) if ends else TOO_FEW}", "aside")
    if cell.differs:
        shown.append("\n").append(VERDICTS[cell.differs], VERDICTS[cell.differs])
    return shown


def _figures(result: PerplexityResult, protocol: str, key: str) -> Iterator[Drawing]:
    """Draw perplexity against length, as ratios, and by position; nothing without a number."""
    cells, curve = [cell for cell in result.cells if cell.protocol == protocol], result.curve
    if not cells:
        return
    definition = result.settings.definition(protocol)
    caption = f"Perplexity against context length, {protocol}: {definition}."
    yield _drawn(plots.figure(result, [protocol]), key, caption)
    if any(cell.ratio_interval for cell in cells):
        caption = (
            "The same as a multiple of the baseline, with paired intervals (all at one length hold together in 95 % of "
            "samples): below 1 is better, and only an interval that excludes 1 shows a difference."
        )
        yield _drawn(plots.ratio_figure(result, protocol), f"{key}-ratio", caption)
    if protocol == "prefix" and any(plots.position_points(curve, x) for x in curve["methods"]):
        caption = (
            "Perplexity of the tokens at each position of the text, each read with all tokens before it, in windows of "
            f"{curve['edges'][-1]:,} tokens. Past the dashed line texts are longer than those of the training."
        )
        yield _drawn(plots.position_figure(result), f"{key}-position", caption)


# Figures: SVG whose text stays text. The page's style sheet replaces the colours, except those of a heat map.


def _drawn(figure: Figure, key: str, caption: str) -> Drawing:
    """Return a figure with ids of its own."""
    import matplotlib as mpl

    file, metadata = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    how: dict[str, Any] = {"format": "svg", "bbox_inches": "tight", "metadata": metadata}
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": key}):
        figure.savefig(file, transparent=not any(axes.get_images() for axes in figure.axes), **how)
    svg = file.getvalue()
    svg = re.sub(r' id="[\w.]+_\d{1,4}"', "", svg[svg.index("<svg") :])  # groups', which repeat
    lines: list[Any] = [line for axes in figure.axes for line in axes.get_lines()]
    described = [
        f"{label} goes from {number(y[0])} at {x[0]:,.0f} to {number(y[-1])} at {x[-1]:,.0f}"
        for label, x, y in ((str(n.get_label()), n.get_xdata(), n.get_ydata()) for n in lines)
        if len(x) and not label.startswith("_")
    ]
    return Markup(svg), caption, "; ".join(described)


__all__ = ["TITLE", "Collection", "Source", "collect", "render"]

TITLE = "Measurements of hf-posenc"
HASH = 12
"""Digits of a hash that are shown; the tooltip and the JSON have all of them."""
_HASH = re.compile(r"[0-9a-f]{40,}")
# Parts of a result that the page shows elsewhere than under its settings, or that are results themselves.
_ELSEWHERE = (
    *("kind", "format", "command", "curve", "methods", "protocols", "perplexity", "retrieval"),
    *("speed", "tasks", "recipe", "remarks", "choosing", "choice", "demands", "lines", "kinds"),
    "saved",
)
_COLOURS = {
    **{colour.lower(): f"line-{index}" for index, colour in enumerate(plots.COLOURS)},
    **dict.fromkeys(("#000000", plots.BASELINE), "ink"),
    **dict.fromkeys((plots.CONTROL_COLOUR, plots.REMARK), "muted"),
    "#ffffff": "paper",
    plots.GRID: "grid",
}
"""The custom property of the page's style sheet for each colour of a figure."""


def render(collection: Collection, *, title: str = TITLE, figures: bool = True) -> str:
    """Render the results as one HTML document, with figures if matplotlib is installed."""
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
    problems = ((s.number, problem) for s in sources for problem in s.result.problems())
    return environment.get_template("page.html").render(
        title=title,
        version=version_of("hf-posenc"),
        colours=_COLOURS,
        collection=collection,
        sections=sections(sources, figures=figures and available()),
        runs=_runs(collection.files),
        problems=dict.fromkeys(problems),
        settings=_settings(sources),
        documents=[(s, _documents(s)) for s in sources if s.data.get("documents")],
        skipped=[(s, s.data["skipped"]) for s in sources if s.data.get("skipped")],
        commands=sorted(commands.items()),
    )


def _runs(files: Sequence[Source]) -> Grid:
    heads = ("run", "folder", "kind", "model", "dtype, attention, device")
    grid = Grid.of("Results in this report", *heads)
    for source in files:
        model = (source.data.get("perplexity") or source.data).get("model", {})
        how = [str(model[n]) for n in ("dtype", "attention", "device") if model.get(n) is not None]
        shown = model.get("name", "-"), ", ".join(how) or "-"
        grid.row(str(source.number), source.name, source.kind, *shown)
    return grid


def _settings(sources: Sequence[Source]) -> list[Grid]:
    """Everything that determines the numbers: what differs, with a column per result, then what all have in common."""
    numbers = [source.number for source in sources]
    heads = [f"run {s.number}" + f", {s.kind}" * (numbers.count(s.number) > 1) for s in sources]
    tables = [_flat(source.data) for source in sources]
    differ = Grid.of("Settings that differ", "setting", *heads)
    shared = Grid.of("Settings of all results that have them", "setting", "value")
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, "") for table in tables]
        if len(given := {value for value in values if value}) > 1:
            differ.row(name, *map(_shortened, values))
        else:
            shared.row(name, _shortened("".join(given)))
    return [grid for grid in (differ, shared) if grid.rows]


def _flat(data: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested values under dotted names; lists of plain values joined, lists of anything else left out."""
    flat: dict[str, str] = {}
    for key, value in data.items():
        name, values = f"{above}{key}", value if isinstance(value, list) else [value]
        if not above and (key in _ELSEWHERE or value == []):
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif not any(isinstance(entry, dict | list) for entry in values):
            known = ("none" if entry is None else entry for entry in values or [None])
            flat[name] = ", ".join(e if isinstance(e, str) else json.dumps(e) for e in known)
    return flat


def _shortened(value: str, mark: str = "") -> Field:
    return Field(f"{value[:HASH]}…" if _HASH.fullmatch(value) else value, mark, hint=value)


def _documents(source: Source) -> Grid:
    caption = "Hashes: SHA-256 of the text and of the tokens that were read, first digits; the JSON has all of them."
    grid = Grid.of(f"Documents of run {source.number}", "document", caption=caption)
    grid.column("tokens", numeric=True)
    grid.column("bytes", numeric=True)
    grid.column("text")
    grid.column("tokens read")
    for document in source.data["documents"]:
        counts = (document.get(name) for name in ("tokens", "bytes"))
        hashes = (document.get(name) or "-" for name in ("text_sha256", "tokens_sha256"))
        shown = ("-" if count is None else f"{count:,}" for count in counts)
        grid.row(document["name"], *shown, *(_shortened(text, "mono") for text in hashes))
    return grid
