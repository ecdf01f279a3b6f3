"""Tables as data, their renderings for terminals, notebooks and Markdown, and results that consist of them.

A `Grid` has columns, rows of fields and marks such as `"best"`. Whoever measures builds grids, and every renderer takes
grids and nothing else. The HTML page renders them by its own template (`page/grid.html`). A `Result` has grids, figures
and files; a `MethodsResult` is one of methods that are compared under conditions, such as protocols or tasks.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import io
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from hf_posenc.errors import naming_extras
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, Candidate
from hf_posenc.evaluation.scoring import OUT_OF_MEMORY
from hf_posenc.files import finite, to_csv, to_json, write_atomically

with naming_extras():
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

CellT = TypeVar("CellT")
ResultT = TypeVar("ResultT", bound="Result")
MARKS = {
    "best": "bold",
    "heading": "bold italic",
    "aside": "dim not bold",
    "control": "dim",
    "failed": "red",
    "none": "dim",
}
"""Every mark of a span or of a row, and its style in a terminal; HTML has a class of the same name."""


class Span(NamedTuple):
    """Text with one mark: a key of `MARKS`, a class of the HTML page, or `""`; and the exact number behind the text.

    A line feed begins a new line of the field.
    """

    text: str
    mark: str = ""
    value: float | None = None


class Field:
    """One field of a grid: spans of text. `hint` explains it, such as a failure, in a tooltip of HTML."""

    def __init__(
        self, text: str = "", mark: str = "", value: float | None = None, *, hint: str = ""
    ) -> None:
        self.spans, self.hint = [Span(text, mark, value)], hint

    def append(self, text: str, mark: str = "") -> Field:
        """Add a span and return the field."""
        self.spans.append(Span(text, mark))
        return self

    @property
    def text(self) -> str:
        """The whole text, with line feeds."""
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True)
class Column:
    """A column of a grid. A line feed in its heading begins a new line; numeric ones align right and are never wrapped.

    It may have a footer and, in a terminal, a least width in characters.
    """

    head: str
    numeric: bool = False
    footer: str = ""
    least: int | None = None


class Row(NamedTuple):
    """A row of a grid: its fields, its mark, and whether a rule precedes it."""

    fields: list[Field]
    mark: str = ""
    rule: bool = False


@dataclass
class Grid:
    """A table; its first column names the rows.

    The title is shown above it in a terminal, the caption (by default the title) in HTML.
    """

    title: str = ""
    columns: list[Column] = default(default_factory=list)
    rows: list[Row] = default(default_factory=list)
    caption: str = ""

    @classmethod
    def of(cls, title: str, *heads: str, caption: str = "") -> Grid:
        """Make a grid without rows from the headings of its columns."""
        return cls(title, [Column(head) for head in heads], [], caption)

    def column(self, head: str, *, numeric: bool = False, **options: Any) -> None:
        """Add a column; see `Column`."""
        self.columns.append(Column(head, numeric, **options))

    def row(self, *fields: Field | str, mark: str = "", rule: bool = False) -> None:
        """Add a row. Fields may be plain text; missing fields at its end stay empty."""
        made = [field if isinstance(field, Field) else Field(field) for field in fields]
        self.rows.append(Row(made, mark, rule))

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Render it for a terminal: a table, or lines under each row's name where it would break words and numbers."""
        table = _table(self)
        least = table.__rich_measure__(console, options.update(max_width=sys.maxsize)).minimum
        return iter([table]) if least <= options.max_width else _lines(self)


# Fields and numbers that several kinds of results share.


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with so many significant digits; as a power of ten from 10,000."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    if value >= 9999.5:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:#.{digits}g}".rstrip(".")


def number_range(interval: tuple[float, float], digits: int = 4) -> str:
    """Format both ends of an interval with so many significant digits."""
    return f"{number(interval[0], digits)}-{number(interval[1], digits)}"


def percent(share: float) -> str:
    """Format a share in whole percent; with one more digit where it would read 0 or 100 and is not."""
    digits = int(0 < share < 0.005 or 0.995 <= share < 1)
    return f"{share:.{digits}%}"


def percent_range(interval: tuple[float, float]) -> str:
    """Format both ends of an interval of shares, in whole percent."""
    return f"{interval[0] * 100:.0f}-{interval[1] * 100:.0f}"


def length_head(length: int, original: int | None) -> str:
    """Format a length in tokens as a heading, with its multiple of the trained length below it."""
    return f"{length:,}\nx{length / original:.3g}" if original else f"{length:,}"


def failure_field(reason: str | None) -> Field:
    """Return the field of a number that could not be measured."""
    return Field("OOM" if reason == OUT_OF_MEMORY else "failed", "failed", hint=reason or "")


def listed(lengths: Iterable[int]) -> str:
    """Format lengths, separated by commas."""
    return ", ".join(f"{length:,}" for length in lengths)


def auto_scale_note(candidates: Iterable[Any]) -> Iterator[str]:
    """Yield the explanation of `(auto)`, if any of the `MethodEntry` has an automatic scale."""
    if (auto := next((entry for entry in candidates if entry.auto_scale), None)) is not None:
        yield f"(auto): scale = length / {auto.original:,}, the original length, set anew at every length."


# Renderings.

PROSE, PROSE_WIDTH = 40, 24
"""A field with more characters than the first is prose, and its column is at least as wide as the second."""


def _texts(row: Row) -> list[Text]:
    return [
        Text.assemble(*((span.text, MARKS.get(span.mark, "")) for span in field.spans))
        for field in row.fields
    ]


def _table(grid: Grid) -> Table:
    headed = any(column.head for column in grid.columns)
    table = Table(
        title=grid.title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD if headed else None,
        show_header=headed,
        show_footer=any(column.footer for column in grid.columns),
        pad_edge=False,
        collapse_padding=headed,
    )
    for index, column in enumerate(grid.columns):
        texts = [row.fields[index].text for row in grid.rows if index < len(row.fields)]
        whole = column.least is not None and all(cell_len(text) <= column.least for text in texts)
        prose = not column.numeric and any(len(text) > PROSE for text in texts)
        table.add_column(
            Text(column.head),
            Text(column.footer),
            justify="right" if column.numeric else "left",
            no_wrap=column.numeric or whole,
            overflow="ellipsis" if column.numeric else "fold",
            min_width=max(column.least or 0, PROSE_WIDTH * prose) or None,
        )
    for row in grid.rows:
        if row.rule:
            table.add_section()
        table.add_row(*_texts(row), style=MARKS.get(row.mark))
    return table


def _lines(grid: Grid) -> Iterator[RenderableType]:
    """Yield each row's name, and below it the headings and texts of its other fields."""
    heads = [column.head.replace("-\n", "").replace("/\n", "/") for column in grid.columns]
    named = 1 + next((i for i, column in enumerate(grid.columns) if not column.numeric), 0)
    footer = [column.footer for column in grid.columns]
    yield Text(grid.title, "italic")
    for row in (*grid.rows, *([Row(list(map(Field, footer)))] if any(footer) else ())):
        texts, lines = _texts(row), Table.grid(padding=(0, 2, 0, 0))
        style = MARKS.get(row.mark, "")
        yield Text(" ", style or "bold").join(texts[:named])
        for _ in range(2 + any(heads)):
            lines.add_column(overflow="fold")
        for head, text in zip(heads[named:], texts[named:], strict=False):
            if text:
                shown = (head.replace("\n", " "), text) if any(heads) else (text,)
                lines.add_row("", *shown, style=style)
        yield lines
    yield Text()


def to_markdown(grid: Grid) -> str:
    """Render a grid as Markdown, without its title; of the marks only bold type is kept."""
    heads = ["<br>".join(map(escaped, column.head.split("\n"))) for column in grid.columns]

    def shown(field: Field) -> str:
        first, *others = field.text.split("\n")
        bold = "bold" in MARKS.get(field.spans[0].mark, "").split()
        first = f"**{escaped(first)}**" if bold and first else escaped(first)
        return "<br>".join((first, *map(escaped, others)))

    rows = [[*map(shown, row.fields), *[""] * (len(heads) - len(row.fields))] for row in grid.rows]
    return markdown_table(heads, rows, numeric=[column.numeric for column in grid.columns])


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: bool | Sequence[bool] = False
) -> str:
    """Assemble a table of fields that are Markdown already.

    `numeric` aligns columns right; a single value applies to all columns but the first.
    """
    if isinstance(numeric, bool):
        numeric = [False, *[numeric] * (len(heads) - 1)]
    rule = ["---:" if right else "---" for right in numeric]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))


def escaped(text: str) -> str:
    """Escape what Markdown would interpret in running text (underscores within words are literal)."""
    return text.translate({ord(letter): f"\\{letter}" for letter in "\\*|<>`"})


def to_notebook(grids: Iterable[Grid], lines: Iterable[str], width: int = 160) -> str:
    """Render grids, and lines below them, as HTML that looks like a terminal of this width in characters."""
    # In a notebook rich would display what it records, and the result would be shown twice.
    quiet: Any = {"file": io.StringIO(), "record": True, "force_jupyter": False}
    console = Console(width=width, highlight=False, **quiet)
    for item in (*grids, *lines):
        console.print(item, markup=False)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


# Results.


class Result(abc.ABC):
    """Data of a finished measurement, and everything that can be shown of it.

    A subclass sets its kind, which names its files; the version of its JSON file; the columns of `frame` and of its CSV
    file, each with its unit and meaning, if it has them; the formats of its figures; and the width of its tables in a
    notebook, in characters.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    columns: ClassVar[Mapping[str, str]] = {}
    formats: ClassVar[tuple[str, ...]] = ("png", "svg")
    width: ClassVar[int] = 160
    _stored: ClassVar[Sequence[str]] = ()
    """Fields that the JSON file has as they are."""
    _parts: ClassVar[Mapping[str, type[Any]]] = {}
    """Fields that are results themselves, or `None`."""
    recipe: dict[str, Any] | None = None
    """A patch as `load_patch` reads it, where the result has one to use."""

    def _values(self) -> dict[str, Any]:
        """Return what the JSON file has behind `format` and `kind`: values, dataclasses, results and lists of them."""
        return {name: getattr(self, name) for name in (*self._stored, *self._parts)}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; a number that is not finite becomes `None`."""
        values = {"format": self.version, "kind": self.kind, **self._values()}
        ready: dict[str, Any] = finite({name: plain(value) for name, value in values.items()})
        return ready

    @classmethod
    def from_dict(cls: type[ResultT], values: Mapping[str, Any]) -> ResultT:
        """Read what `to_dict` returned; everything that follows from the numbers is computed again."""
        build: Any = cls
        result: ResultT = build(**cls._fields_of(values))
        return result

    @classmethod
    def _fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that determine a result, from what `to_dict` returned."""
        parts = {n: values[n] and kind.from_dict(values[n]) for n, kind in cls._parts.items()}
        return {**{name: values[name] for name in cls._stored}, **parts}

    @abc.abstractmethod
    def tables(self) -> list[Grid]:
        """Return the tables, in the order in which they are shown."""

    @abc.abstractmethod
    def notes(self) -> Iterator[str]:
        """Yield what a reader must know beside the tables."""

    def guide(self) -> Iterator[str]:
        """Yield how the numbers are to be read."""
        return iter(())

    def findings(self) -> Iterator[str]:
        """Yield what was found, a sentence for each question: the best method against the control."""
        return iter(())

    def problems(self) -> Iterator[str]:
        """Yield one line for everything that has no number; a run with any of them has failed."""
        return iter(())

    def figures(self) -> dict[str, Figure]:
        """Draw the figures, by the names of their files. Needs matplotlib."""
        return {}

    def csv_rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of `frame` and of the CSV file."""
        return ()

    @property
    def frame(self) -> pandas.DataFrame:
        """The numbers as a table of pandas, a row for each; `columns` has the unit and the meaning of every column."""
        with naming_extras():
            import pandas

        return pandas.DataFrame(self.csv_rows(), columns=list(self.columns))

    def files(self) -> dict[str, str]:
        """Return the text files of the result, by their names."""
        files = {f"{self.kind}.json": to_json(self.to_dict())}
        if self.columns:
            files[f"{self.kind}.csv"] = to_csv(list(self.columns), self.csv_rows())
        if self.recipe is not None:  # formatted as those in the package
            text = json.dumps(self.recipe, indent=2, allow_nan=False)
            files[f"{self.kind}_recipe.json"] = f"{text}\n"
        return files

    def write_json(self, path: Path) -> None:
        """Write everything to a file."""
        write_atomically(path, to_json(self.to_dict()))

    def write(self, folder: str | Path, *, plots: bool = True) -> list[str]:
        """Write the files to a folder, and the figures if `plots`, each whole or not at all; return the files' names.

        Raises:
            PosencError: A file cannot be written, or matplotlib is not installed.
        """
        from hf_posenc.evaluation.plots import add_footer, write_figure

        files, folder, model = self.files(), Path(folder), self.measured_model
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(folder / name, text)
        written = list(files)
        for name, figure in self.figures().items() if plots else ():
            names = [f"{name}.{format}" for format in self.formats]
            add_footer(figure, str(model["name"]) if model.get("weights") else "")
            write_figure(figure, *(folder / name for name in names))
            written += names
        return written

    @property
    def measured_model(self) -> dict[str, Any]:
        """The description of the measured model; the name of a quantized one ends with its `weights`."""
        values = self.to_dict()
        return (values.get("perplexity") or values).get("model") or {}

    def __str__(self) -> str:
        """Return the tables as a terminal shows them, with their notes, and what was found."""
        console = Console(width=100, highlight=False, color_system=None, force_jupyter=False)
        with console.capture() as printed:
            for item in (*self.tables(), *self.notes(), *self.findings()):
                console.print(item, markup=False)
        return printed.get()

    def _repr_html_(self) -> str:
        return to_notebook(self.tables(), self.notes(), self.width)


@dataclass(frozen=True)
class MethodEntry:
    """A method of a result: what describes its `Candidate`, JSON-ready.

    `prefix_from_one_forward` is true if one forward at the longest length gave the prefix of every length.
    """

    label: str
    spec: str
    method: str | None
    parts: Sequence[Mapping[str, Any]]
    beside: Mapping[str, Any]
    scale: float | None
    auto_scale: bool
    original: int | None
    prefix_from_one_forward: bool = False

    @classmethod
    def of(cls, candidate: Candidate, shared: bool = False) -> MethodEntry:
        """Return the entry of a candidate; `shared` is `prefix_from_one_forward`."""
        names = ("label", "spec", "method", "scale", "auto_scale", "original")
        same: dict[str, Any] = {name: getattr(candidate, name) for name in names}
        parts = [{"method": part.method, "options": dict(part.options)} for part in candidate.parts]
        beside = dict(candidate.beside)
        return cls(**same, parts=parts, beside=beside, prefix_from_one_forward=shared)

    def scale_at(self, length: int) -> float | None:
        """Return the scale in force at a length."""
        if self.auto_scale and self.original:
            return max(1.0, length / self.original)
        return self.scale


@dataclass(repr=False, kw_only=True)
class MethodsResult(Result, Generic[CellT]):
    """Result of methods under conditions; `condition` names their field in records and their list in the settings.

    Attributes:
        settings: Conditions, lengths and the other numbers.
        candidates: The methods, in the order of the table.
        records: What was measured, a method, condition and length at a time.
        failures: Cells without a number.
        model: The measured model: name, class, dtype, attention backend, tokenizer hash, ... (`describe_model`).
        original: The context length that the model was trained on, in tokens, where it is known.
        head_replay: Outcome of the scorer's probe, which compares it with full logits.
        environment: Versions of the packages that computed.
        command: The command that reproduces this result.
        fingerprint: Hash of everything that determines a number; the records are stored under it.
        cells: The numbers of the table, computed from the records.
    """

    _stored: ClassVar[Sequence[str]] = (
        *("model", "head_replay", "environment", "command", "fingerprint"),
    )
    condition: ClassVar[str]
    _settings_type: ClassVar[type[Any]]
    _lists: ClassVar[Mapping[str, type[Any]]]
    """Fields that are lists of dataclasses."""
    intervals: ClassVar[Sequence[tuple[str, str]]]
    """Columns of the CSV file with a `_low` and a `_high`, and the attribute of a cell that holds both."""
    nothing: ClassVar[str]
    """The status of a row without a number that did not fail."""

    settings: Any
    candidates: Sequence[MethodEntry]
    records: Sequence[Any]
    failures: Sequence[Any]
    model: dict[str, Any] = default(default_factory=dict)
    original: int | None = None
    head_replay: str = "off"
    environment: dict[str, Any] = default(default_factory=dict)
    command: str | None = None
    fingerprint: str | None = None
    cells: list[CellT] = default(init=False)

    def control(self, labels: Sequence[str] = ()) -> tuple[str, list[str]]:
        """Return truncation, else the baseline, and the methods compared to it, of these labels if any."""
        methods = {e.label: e.method for e in self.candidates if not labels or e.label in labels}
        control = next((n for n, m in methods.items() if m == TRUNCATION), next(iter(methods)))
        rivals = [n for n, name in methods.items() if name not in (None, TRUNCATION)]
        return control, [label for label in rivals if label != control]

    def cell(self, method: str, condition: str, length: int) -> CellT | None:
        """Return the number of a method under a condition at a length; `None` where it could not be measured."""
        return self._by_key.get((method, condition, length))

    @functools.cached_property
    def _by_key(self) -> dict[tuple[str, str, int], CellT]:
        return {self._key(cell): cell for cell in self.cells}

    def _key(self, entry: Any) -> tuple[str, str, int]:
        return entry.method, getattr(entry, self.condition), entry.length

    def failure(self, method: str, condition: str, length: int) -> str | None:
        """Return the reason why there is no number."""
        key = (method, condition, length)
        return next((each.reason for each in self.failures if self._key(each) == key), None)

    @property
    def conditions(self) -> Sequence[str]:
        """The conditions, in the order of the tables."""
        names: Sequence[str] = getattr(self.settings, f"{self.condition}s")
        return names

    def __repr__(self) -> str:
        methods = ", ".join(entry.label for entry in self.candidates)
        return f"{type(self).__name__}({methods}; {', '.join(self.conditions)}, lengths {list(self.settings.lengths)})"

    def described(self, definitions: Mapping[str, Any], **details: Any) -> dict[str, Any]:
        """Return the `_values`; `definitions` of the conditions come before the settings."""
        return {
            "command": self.command,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "original_max_position_embeddings": self.original,
            **definitions,
            "settings": self.settings,
            "environment": self.environment,
            "head_replay": self.head_replay,
            "methods": self.candidates,
            **details,
        }

    @classmethod
    def _fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        lists = {n: [kind(**each) for each in values[n]] for n, kind in cls._lists.items()}
        return {
            **super()._fields_of(values),
            **lists,
            "original": values["original_max_position_embeddings"],
            "settings": cls._settings_type(**values["settings"]),
            "candidates": [MethodEntry(**entry) for entry in values["methods"]],
        }

    def csv_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of every method, condition and length: one per cell, or one with the reason of its absence."""
        lengths = self.settings.lengths
        for entry, name, length in itertools.product(self.candidates, self.conditions, lengths):
            key = {"method": entry.label, self.condition: name, "length": length}
            key["scale"] = entry.scale_at(length)
            if not (cells := self.cells_of(entry.label, name, length)):
                yield {**key, "status": self.failure(entry.label, name, length) or self.nothing}
            for cell in cells:
                values = dataclasses.asdict(cell)
                for column, interval in self.intervals:
                    ends = values.pop(interval) or (None, None)
                    values[f"{column}_low"], values[f"{column}_high"] = ends
                known = math.isfinite(values["nats"] or 0)
                yield {**values, **key, "status": "ok" if known else "not finite"}

    def cells_of(self, method: str, condition: str, length: int) -> list[Any]:
        """Return the cells with a row of their own in `frame`."""
        cell = self.cell(method, condition, length)
        return [] if cell is None else [cell]

    def lengths_of_failures(self, *names: str) -> dict[tuple[str, ...], str]:
        """Return the lengths at which methods failed, by these attributes of the failures."""
        lengths: dict[tuple[str, ...], set[int]] = {}
        for failure in self.failures:
            key = tuple(getattr(failure, name) for name in names)
            lengths.setdefault(key, set()).add(failure.length)
        return {key: listed(sorted(found)) for key, found in lengths.items()}


def plain(value: Any) -> Any:
    """Return results and dataclasses, also those in lists, as dictionaries; other values as they are."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        return {name: plain(inner) for name, inner in vars(value).items()}
    return value


def nan_if_none(value: float | None) -> float:
    """Return a number of a JSON file, which has no NaN."""
    return math.nan if value is None else value
