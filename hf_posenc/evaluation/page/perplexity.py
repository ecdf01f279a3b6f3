"""The perplexity sections of the page: a table per protocol, the price on short texts, and the figures.

Results with equal texts and equal settings of a protocol share a table.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hf_posenc.evaluation import plots
from hf_posenc.evaluation.grid import Field, Grid, Span, failure_field, number
from hf_posenc.evaluation.measuring.statistics import (
    FEW_DOCUMENTS,
    ROUNDING,
    VERDICTS,
    Cell,
    Interval,
    Record,
    side_of_one,
    summarize,
)
from hf_posenc.evaluation.page.collect import Source, grouped, model_of, settings_differ
from hf_posenc.evaluation.perplexity.protocols import READERS
from hf_posenc.evaluation.perplexity.result import record_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Comparable results.

# Settings that change the computation of a number but not its tokens, or only which numbers there are.
_FREE = frozenset(
    {
        *("lengths", "protocols", "buckets", "min_tokens"),
        *("seed", "resamples"),  # of an earlier version
        *("chunk", "prefill", "batch", "preset"),
    }
)
# Settings that matter to some protocols only.
_OF_PROTOCOL = {**READERS, "read_last": ("tail",), "evaluator": ("longppl",)}


def texts(data: Mapping[str, Any]) -> tuple[tuple[str, ...], str, str]:
    """Return each document's hash of tokens, the tokenizer's hash, and the special tokens before a window as JSON."""
    model = data["model"]
    documents = tuple(document["tokens_sha256"] for document in data["documents"])
    return documents, model["tokenizer"]["sha256"], json.dumps(model["bos"]["token_ids"])


def texts_differ(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the reasons why two results did not read the same tokens."""
    documents, tokenizer, special = texts(first)
    documents_2, tokenizer_2, special_2 = texts(other)
    reasons = []
    if tokenizer != tokenizer_2:
        reasons.append("another tokenizer, so a token is not the same piece of text")
    elif documents != documents_2:
        reasons.append(f"other documents ({_documents_differ(first, other)})")
    if special != special_2:
        reasons.append(f"other special tokens in front ({special_2} instead of {special})")
    return reasons


def _documents_differ(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    mine, theirs = ([each["text_sha256"] for each in d["documents"]] for d in (first, other))
    one, two = (set(texts(data)[0]) for data in (first, other))
    if mine == theirs and None not in mine:
        return "the same texts, cut at other lengths"
    if one == two:
        return "the same ones in another order"
    common = len(one & two)
    cut = len(set(mine) & set(theirs) - {None}) - common
    also = f", {cut} more cut at other lengths" if cut > 0 else ""
    return f"{len(theirs)} instead of {len(mine)}, {common} in common{also}"


def _decisive(data: Mapping[str, Any], protocol: str) -> dict[str, Any]:
    """The settings that give a protocol's numbers their meaning."""
    names = {n for n in data["settings"] if protocol in _OF_PROTOCOL.get(n, (protocol,))} - _FREE
    kept = {name: value for name, value in data["settings"].items() if name in names}
    if kept.get("windows_per_document") not in (None, 1):  # spread over the rest of the longest
        kept["longest length"] = max(data["settings"]["lengths"])
    return kept


@dataclass
class Line:
    """One method of one result, by length: its records, with indices as the documents' names, and its failures.

    `name` is its label in the result; in `label`, the number of the result follows if several results have the name.
    `also` are other results with the same numbers. Ratios of the `cells` refer to the row `baseline`, maybe this one.
    """

    source: Source
    name: str
    label: str
    method: str | None
    records: dict[int, list[Record]]
    failures: dict[int, str]
    also: list[Source] = field(default_factory=list)
    cells: dict[int, Cell] = field(default_factory=dict)
    baseline: str = ""

    @property
    def model(self) -> str:
        """The model of the result. A ratio between two models would not be a method's."""
        return model_of(self.source.data)


@dataclass
class Merged:
    """Comparable results of one protocol, drawn like a `PerplexityResult`; `original` and `curve` only if all agree."""

    protocol: str
    definition: str
    sources: list[Source]
    candidates: list[Line]
    settings: plots.Scope
    original: int | None
    curve: dict[str, Any] | None

    def cell(self, method: str, protocol: str, length: int, /) -> Cell | None:
        """Return the number of a row at a length."""
        return next(line.cells.get(length) for line in self.candidates if line.label == method)


def merge(sources: Sequence[Source]) -> list[Merged]:
    """Make one table per protocol and settings of it, from perplexity results that read the same tokens."""
    groups: dict[Any, list[Source]] = {}
    for source in sources:
        for protocol, definition in source.data["protocols"].items():
            decisive = json.dumps(_decisive(source.data, protocol), sort_keys=True)
            groups.setdefault((protocol, definition, decisive), []).append(source)
    return [_merged(protocol, group) for (protocol, *_), group in groups.items()]


def _merged(protocol: str, sources: list[Source]) -> Merged:
    lines: list[Line] = []
    for line in (_line(s, method, protocol) for s in sources for method in s.data["methods"]):
        twin = next((other for other in lines if _same(other, line)), None)
        if twin is None:
            lines.append(line)
        else:
            twin.also.append(line.source)
    names = [line.name for line in lines]
    for line in lines:
        if names.count(line.name) > 1:
            line.label += f" [{line.source.number}]"
    for own in _by_model(lines):
        baseline = _baseline(own)
        records = [
            replace(record, method=line.label)
            for line in own
            for record in itertools.chain(*line.records.values())
        ]
        cells = _compared(baseline, records)
        for line in own:
            line.baseline = baseline.label
            line.cells = {cell.length: cell for cell in cells if cell.method == line.label}
    settings = [source.data["settings"] for source in sources]
    lengths = sorted({length for values in settings for length in values["lengths"]})
    originals = {source.data.get("original_max_position_embeddings") for source in sources}
    return Merged(
        protocol,
        sources[0].data["protocols"][protocol],
        sources,
        lines,
        plots.Scope(tuple(lengths), (protocol,), settings[0].get("tail_tokens", 0)),
        originals.pop() if len(originals) == 1 else None,
        _curve(lines) if protocol == "prefix" else None,
    )


def _line(source: Source, method: Mapping[str, Any], protocol: str) -> Line:
    name = method["label"]
    measured, failed = (
        [e for e in source.data[part] if (e["method"], e["protocol"]) == (name, protocol)]
        for part in ("records", "failures")
    )
    documents = {document["name"]: str(i) for i, document in enumerate(source.data["documents"])}
    records: dict[int, list[Record]] = {}
    for entry in measured:
        document = documents.get(entry["document"], entry["document"])
        values = {each.name: entry[each.name] for each in fields(Record)}
        record = record_of({**values, "document": document})
        records.setdefault(record.length, []).append(record)
    failures = {entry["length"]: entry["reason"] for entry in failed}
    return Line(source, name, name, method["method"], records, failures)


def _same(one: Line, two: Line) -> bool:
    """Return whether the second line repeats the first: the same model, method and numbers, to the last bit."""
    first, second = (
        {length: repr(records) for length, records in line.records.items()} | line.failures
        for line in (one, two)
    )
    named = one.name == two.name and one.model == two.model
    return named and bool(second) and second.items() <= first.items()


def _by_model(lines: Sequence[Line]) -> list[list[Line]]:
    models: dict[str, list[Line]] = {}
    for line in lines:
        models.setdefault(line.model, []).append(line)
    return list(models.values())


def _baseline(lines: Sequence[Line]) -> Line:
    """The first method of a result, of rows of one model, preferably the model as it was loaded."""
    firsts = {line.source.number: line for line in reversed(lines)}  # of the last result first
    loaded = (line for line in reversed(firsts.values()) if line.method is None)
    return next(loaded, lines[0])


def _compared(
    baseline: Line, records: Sequence[Record], comparisons: int | None = None
) -> list[Cell]:
    """The numbers of records of a model, and their ratios to the baseline's; `comparisons` as in `summarize`."""
    settings = baseline.source.data["settings"]
    how = {name: settings.get(name) for name in ("aggregate", "base")}
    return summarize(records, **how, baseline=baseline.label, comparisons=comparisons)


def _curve(lines: Sequence[Line]) -> dict[str, Any] | None:
    """The sums by position of all rows, if their buckets are the same."""
    curves = [line.source.data["curve"] for line in lines]
    edges = curves[0]["edges"]
    if any(curve["edges"] != edges for curve in curves):
        return None
    methods = {
        line.label: curve["methods"][line.name]
        for line, curve in zip(lines, curves, strict=True)
        if line.name in curve["methods"]
    }
    return {"edges": edges, "methods": methods}


def against(
    line: Line, other: Line, length: int, other_length: int, comparisons: int
) -> tuple[float | None, Interval | None]:
    """Divide a row's perplexity by another's, with the paired interval over documents; `None` if one is missing.

    So many `comparisons` with the other row are made: their intervals hold together in 95 % of samples.
    Both have read the same documents, and under `tail` the same targets at any length.
    """
    base, rows = other.records.get(other_length, []), line.records.get(length, [])
    if not rows or len(rows) != len(base):
        return None, None
    records = [replace(record, method=other.label, length=0) for record in base]
    records += [replace(record, method="", length=0) for record in rows]
    cells = _compared(other, records, comparisons)
    cell = next((cell for cell in cells if not cell.method), None)
    return (None, None) if cell is None else (cell.ratio, cell.ratio_interval)


# Fields of the page: numbers with their exact values, ranges, and the conclusions that intervals allow.


def number_span(value: float, digits: int = 3, mark: str = "aside") -> Span:
    """Return a number with so many significant digits."""
    return Span(number(value, digits), mark, value)


def ratio_span(value: float, mark: str = "aside") -> Span:
    """Return a ratio with enough digits to distinguish it from 1, unless the difference is rounding."""
    if not 0.9 < value < 1.1 or abs(value - 1) < ROUNDING:
        return number_span(value, 3, mark)
    texts = [f"{value:.{digits}f}" for digits in (3, 4)]
    return Span(next((text for text in texts if float(text) != 1), texts[-1]), mark, value)


def range_spans(
    before: str, interval: Sequence[float] | None, span: Callable[[float], Span], after: str = ""
) -> list[Span]:
    """Return both ends of an interval between two texts; nothing without one."""
    if interval is None:
        return []
    low, high = map(span, interval)
    return [Span(before, "aside"), low, Span("–", "aside"), high, Span(after, "aside")]


def number_field(value: float, interval: Interval | None, mark: str = "value") -> Field:
    """Return a number, and its range in the line below."""
    return Field().add(number_span(value, 4, mark), *range_spans("\n", interval, number_span))


def ratio_field(ratio: float | None, interval: Interval | None, documents: int) -> Field:
    """Return a ratio of perplexities, its range and its verdict."""
    if ratio is None or not math.isfinite(ratio):
        return Field("-", "none", hint="one of the two was not measured")
    spans = _range_and_verdict(interval, documents)
    return Field("×", "value").add(ratio_span(ratio, "value"), *spans)


def missing_field(reason: str | None) -> Field:
    """Return the field of a number that is missing, with the reason if its measurement failed."""
    return Field("-", "none", hint="not measured") if reason is None else failure_field(reason)


def _range_and_verdict(interval: Interval | None, documents: int) -> list[Span]:
    """The range of a ratio; `better` or `worse` if all of it is below or above 1, given enough documents."""
    spans = range_spans(" (", interval, ratio_span, ")")
    side = side_of_one(interval, documents)
    return [*spans, Span(" "), Span(VERDICTS[side], VERDICTS[side])] if side else spans


def row_name(name: str, about: str) -> Field:
    """Return the heading of a row, with an explanation in the line below."""
    heading = Field(name)
    return heading.append("\n").append(about, "aside") if about else heading


# Sections.

WIDE = 12
"""With more lengths than this, lengths are rows and methods are columns."""
_BASELINE = Field("baseline", "none", hint="the others are relative to it")


def sections(sources: Sequence[Source], *, figures: bool) -> list[dict[str, Any]]:
    """Return the values of `sections.html`: all perplexity results, comparable ones together."""
    groups = grouped(sources, "perplexity", texts)
    return [
        {
            "sources": group,
            "apart": texts_differ(groups[0][0].data, group[0].data),
            "parts": _parts(group, figures),
        }
        for group in groups
    ]


def _parts(group: Sequence[Source], figures: bool) -> list[dict[str, Any]]:
    """One part per protocol and settings of it."""
    parts: list[dict[str, Any]] = []
    firsts: dict[str, Merged] = {}
    for merged in merge(group):
        name, apart = merged.protocol, ""
        first = firsts.setdefault(name, merged)
        if first is not merged:
            one, two = (_decisive(each.sources[0].data, name) for each in (first, merged))
            reason = ", ".join(settings_differ(one, two))
            if first.definition != merged.definition:
                reason = f"the other one is: {first.definition}"
            apart = f"Not comparable with the {name} above: {reason}."
        parts.append(
            {
                "merged": merged,
                "apart": apart,
                "verdicts": [_verdict(own, merged) for own in _by_model(merged.candidates)],
                "summary": _summary(merged),
                "pictures": pictures(merged) if figures else [],
                "table": _table(merged),
            }
        )
    return parts


def _verdict(lines: Sequence[Line], merged: Merged) -> str:
    """Compare the best method of a model to the control, at the longest length."""
    length, documents = merged.settings.lengths[-1], len(lines[0].source.data["documents"])
    baseline = next((line for line in lines if line.label == lines[0].baseline), lines[0])
    control = next((line for line in lines if line.method == plots.CONTROL), baseline)
    rivals = []
    for line in lines:
        ratio, interval = against(line, control, length, length, len(lines) - 1)
        if line.method not in (None, plots.CONTROL) and ratio is not None and math.isfinite(ratio):
            rivals.append((ratio, line.label, interval))
    where = f"{length:,} tokens, {control.label} as the control, {documents} documents"
    if not rivals:
        return f"{where}: no method has a number to compare."
    rivals.sort(key=lambda rival: rival[0])
    ratio, label, interval = rivals[0]
    times = Field().add(ratio_span(ratio), *range_spans(" (", interval, ratio_span, ")")).text
    size = f"with {times} times the control's perplexity"
    if documents < FEW_DOCUMENTS:
        return f"{where}: too few for a verdict; {label} is lowest, {size}."
    better = [label for _, label, ends in rivals if side_of_one(ends, documents) < 0]
    if better:
        also = f"; so are {', '.join(better[1:])}" if better[1:] else ""
        text = f"{label} is significantly better, {size}, the best of {len(rivals)}{also}"
    else:
        worse = "worse" if side_of_one(interval, documents) > 0 else "different"
        text = (
            f"no method is significantly better; {label} is nearest, {size}, and "
            f"{'' if worse == 'worse' else 'not '}significantly {worse}"
        )
    broken = "" if control.method else ". An unpatched model breaks down: add truncation"
    return f"{where}: {text}{broken if merged.original and length > merged.original else ''}."


def _about(line: Line, merged: Merged) -> str:
    """The results of a row, if the table has several."""
    if len(merged.sources) == 1:
        return ""
    runs = ", ".join(str(source.number) for source in (line.source, *line.also))
    about = f"run {runs}" if not line.also else f"runs {runs}, the same numbers"
    if len(_by_model(merged.candidates)) > 1:
        model = line.source.data["model"]
        about += f": {model.get('name', '')}, {model.get('dtype', '')}"
    return about


def _summary(merged: Merged) -> Grid | None:
    """Each method at the longest length within the original one, and at the longest of all."""
    original, lengths = merged.original, merged.settings.lengths
    short = max((n for n in lengths if original and n <= original), default=None)
    long = lengths[-1]
    if short is None or long == short:
        return None
    base, title = merged.candidates[0], f"Short and long texts, {merged.protocol}"
    caption = (
        f"{title}: perplexity as a multiple of another, with the paired interval over documents (all of a column hold "
        "together in 95 % of samples). The price on texts of the trained length is beside the effect on long ones."
    )
    heads = [f"{length:,} tokens, to the baseline" for length in (short, long)]
    others = [(line, long) for line in merged.candidates if line.method == plots.CONTROL][:1]
    heads += [f"{long:,} tokens, to {control.label}" for control, _ in others]
    if merged.protocol == "tail":
        heads.append(f"{long:,} tokens, to {base.label} at {short:,}")
        others.append((base, short))
    grid = Grid.of(title, "method", *heads, caption=caption, kind="numbers summary")
    for line in merged.candidates:
        fields = [_to_baseline(line, short), _to_baseline(line, long)]
        for other, length in others:
            ratio, interval = against(line, other, long, length, len(merged.candidates) - 1)
            count = len(line.source.data["documents"])
            itself = other is line and length == long
            fields.append(_BASELINE if itself else ratio_field(ratio, interval, count))
        grid.row(row_name(line.label, _about(line, merged)), *fields)
    return grid


def _to_baseline(line: Line, length: int) -> Field:
    cell = line.cells.get(length)
    if cell is None or not math.isfinite(cell.perplexity):
        return _no_number(line, length)
    if line.baseline == line.label:
        return _BASELINE
    return ratio_field(cell.ratio, cell.ratio_interval, cell.documents)


def _no_number(line: Line, length: int) -> Field:
    if length in line.cells:
        return Field("nan", "failed", hint="the loss is not a finite number")
    return missing_field(line.failures.get(length))


def _table(merged: Merged) -> Grid:
    lengths, original = merged.settings.lengths, merged.original
    baselines = ", ".join(dict.fromkeys(line.baseline for line in merged.candidates))
    title = f"Perplexity, {merged.protocol}"
    caption = (
        f"{title}. In each field: the perplexity, the lowest of its length underlined; its 95 % interval "
        f"over documents; × its ratio to {baselines} with the paired interval (all of a column hold together in "
        "95 % of samples), and better or worse where that interval excludes 1."
    )
    names = [row_name(line.label, _about(line, merged)) for line in merged.candidates]
    fields = {length: _fields(merged, length) for length in lengths}
    heads = {n: f"{n:,}\n×{n / original:.3g}" if original else f"{n:,}" for n in lengths}
    if len(lengths) > WIDE:
        methods = (name.text for name in names)
        grid = Grid.of(title, "context length L (tokens)", *methods, caption=caption)
        for length, head in heads.items():
            grid.row(row_name(*head.partition("\n")[::2]), *fields[length])
        return grid
    grid = Grid.of(title, "method", caption=caption)
    short = [length for length in lengths if original and length <= original]
    within = "trained length" if len(short) == 1 else "up to the trained length"
    for length, head in heads.items():
        group = within if length in short else "longer than trained"
        grid.column(head, group=group if 0 < len(short) < len(lengths) else "")
    for name, *row in zip(names, *fields.values(), strict=True):
        grid.row(name, *row)
    return grid


def _fields(merged: Merged, length: int) -> list[Field]:
    """The column of a length, with its lowest number marked."""
    cells = [line.cells[length] for line in merged.candidates if length in line.cells]
    values = {cell.perplexity for cell in cells if math.isfinite(cell.perplexity)}
    lowest = min(values) if len(values) > 1 else math.nan
    return [_field(line, length, lowest) for line in merged.candidates]


def _field(line: Line, length: int, lowest: float) -> Field:
    cell = line.cells.get(length)
    if cell is None or not math.isfinite(cell.perplexity):
        return _no_number(line, length)
    mark = "best" if cell.perplexity == lowest else "value"
    shown = number_field(cell.perplexity, cell.interval, mark)
    if cell.ratio is not None and math.isfinite(cell.ratio) and line.baseline != line.label:
        spans = _range_and_verdict(cell.ratio_interval, cell.documents)
        shown.append("\n×", "aside").add(ratio_span(cell.ratio), *spans)
    return shown


# Figures: SVG whose text stays text and whose colours follow the reader's light or dark mode.

VARIABLES = {
    **{colour.lower(): f"line-{index}" for index, colour in enumerate(plots.COLOURS)},
    "#000000": "ink",
    plots.BASELINE: "ink",
    "#ffffff": "paper",
    plots.GRID: "grid",
    plots.CONTROL_COLOUR: "muted",
    plots.REMARK: "muted",
}
"""The custom property of the page's style sheet for each colour of a figure."""
_TRANSPARENT: Any = {f"{part}.facecolor": "none" for part in ("figure", "axes", "savefig")}


def pictures(merged: Merged) -> list[tuple[Markup, str, str]]:
    """Draw the figures of one protocol, each with its caption and its description in words; none without a number."""
    lines, name, curve = merged.candidates, merged.protocol, merged.curve
    if not any(line.cells for line in lines):
        return []
    import matplotlib as mpl

    key = f"f{hashlib.sha256(name.encode()).hexdigest()[:6]}-{merged.sources[0].number}"
    with mpl.rc_context({**plots.STYLE, **_TRANSPARENT}):
        svg = themed(plots.figure(merged, [name]), f"{key}-length")
        caption = f"Perplexity against context length, {name}: {merged.definition}."
        ends = [[(n, line.cells[n].perplexity) for n in sorted(line.cells)] for line in lines]
        description = _ends(ends, lines, "{} at {:,} tokens to {} at {:,}")
        drawn = [(svg, caption, description)]
        if any(cell.ratio_interval for line in lines for cell in line.cells.values()):
            svg = themed(plots.ratio_figure(merged, name), f"{key}-ratio")
            caption = (
                "The same as a multiple of the baseline, with paired intervals (all at one length hold together in "
                "95 % of samples): below 1 is better, and only an interval that excludes 1 shows a difference."
            )
            drawn.append((svg, caption, "The ratios are in the table."))
        points = [plots.position_points(curve, line.label) for line in lines] if curve else []
        if curve and any(points):
            svg = themed(plots.position_figure(merged), f"{key}-position")
            caption = (
                "Perplexity of the tokens at each position of the text, each read with all tokens before it, in "
                f"windows of {curve['edges'][-1]:,} tokens. Past the dashed line texts are longer than those of the "
                "training."
            )
            description = _ends(points, lines, "{} near token {:,.0f} to {} near {:,.0f}")
            drawn.append((svg, caption, description))
    return drawn


def _ends(points: Sequence[Sequence[tuple[float, float]]], lines: Sequence[Line], text: str) -> str:
    """Describe the first and the last point of every line."""
    descriptions = []
    for line, ends in zip(lines, points, strict=True):
        if ends:
            (first, low), (last, high) = ends[0], ends[-1]
            change = text.format(number(low), first, number(high), last)
            descriptions.append(f"{line.label} goes from {change}")
    return "; ".join(descriptions) + "."


def themed(figure: Figure, key: str) -> Markup:
    """Return a figure with a transparent background as an `<svg>` element, whose ids begin with a unique key."""
    file = io.StringIO()
    plots.save(figure, file, "svg")
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r' (xmlns(:xlink)?|version)="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{key}-", text.replace("xlink:href", "href"))
    text = re.sub(r'(<text)? style="([^"]*)"', _style, text)
    return Markup(text.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1).strip())


def _style(match: re.Match[str]) -> str:
    """Use the page's colours; for text those with enough contrast, and the page's own typeface."""
    text, style = match[1] or "", match[2]
    if text:
        style = re.sub(r"font-family:[^;]*;?\s*", "", style)
        style = re.sub(r"font: (\S+) [^;]*", r"font-size: \1", style)  # older matplotlib

    def variable(colour: re.Match[str]) -> str:
        name = VARIABLES.get(colour[0].lower(), "ink" if text else "")
        return f"var(--{'text-' if text else ''}{name})" if name else colour[0]

    return f'{text} style="{re.sub(r"#[0-9a-fA-F]{6}", variable, style)}"'
