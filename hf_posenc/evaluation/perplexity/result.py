"""The result of a perplexity run, with everything that is needed to tell whether two results may be compared."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.documents import Skipped
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate
from hf_posenc.evaluation.measuring.statistics import Cell, Record, summarize
from hf_posenc.evaluation.perplexity.measurement import Failure, Measurement, edges
from hf_posenc.evaluation.perplexity.protocols import PRESETS, Settings
from hf_posenc.evaluation.scoring.memory import OUT_OF_MEMORY
from hf_posenc.files import finite, to_csv, to_json, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 2
COLUMNS = (
    *("method", "protocol", "length", "scale"),
    *("perplexity", "perplexity_low", "perplexity_high", "ratio", "ratio_low", "ratio_high"),
    *(
        "bits_per_byte",
        "word_perplexity",
        "nats",
        "tokens",
        "bytes",
        "words",
        "documents",
        "status",
    ),
)
"""The columns of the CSV."""


@dataclass(frozen=True)
class MethodEntry:
    """A candidate as a result knows it.

    Attributes:
        label: As reports show it.
        spec: As it was given to `--patch`.
        method: Its method's name, several joined by `+`; `None` for the model as loaded.
        parts: Each method with its options.
        beside: What `patch_model` got beside them.
        scale: As given; `None` for none.
        auto_scale: Whether the scale is length / original length, anew at every length.
        original: The original length in tokens that a scale refers to.
        prefix_from_one_forward: Whether one forward at the longest length gave the prefix of every length.
    """

    label: str
    spec: str
    method: str | None
    parts: Sequence[Mapping[str, Any]]
    beside: Mapping[str, Any]
    scale: float | None
    auto_scale: bool
    original: int | None
    prefix_from_one_forward: bool

    @classmethod
    def of(cls, candidate: Candidate, shared: bool) -> MethodEntry:
        """What a result keeps of a candidate."""
        parts = () if candidate.request is None else candidate.request.parts
        return cls(
            candidate.label,
            candidate.spec,
            candidate.method,
            [{"method": part.method, "options": dict(part.options)} for part in parts],
            {} if candidate.request is None else dict(candidate.request.beside),
            candidate.scale,
            candidate.auto_scale,
            candidate.original,
            shared,
        )

    def scale_at(self, length: int) -> float | None:
        """The scale in force at a length."""
        if self.auto_scale and self.original:
            return max(1.0, length / self.original)
        return self.scale


@dataclass(repr=False)
class PerplexityResult:
    """What `hf-posenc perplexity` measured.

    Attributes:
        model: What was measured: name, class, dtype, attention backend, tokenizer hash, ... (`describe_model`).
        source: Where the documents came from, as it was asked for.
        settings: Protocols, lengths and the other numbers.
        original: The context length that the model was trained on, in tokens, where it is known.
        candidates: The methods, in the order of the table.
        documents: The documents that were used, each with its hashes and its number of tokens, bytes and words.
        skipped: Those that were not, and why.
        records: Sums per method, protocol, length and document.
        failures: Cells without a number.
        curves: For each method's label, nats and tokens of every bucket of the longest prefix.
        head_replay: How the scorer's probe compared with full logits.
        environment: Versions of the packages that computed.
        command: What gives this result again.
        fingerprint: Of everything that determines a number; the records lie under it.
        cells: The numbers of the table, made from the records.
    """

    model: dict[str, Any]
    source: dict[str, Any]
    settings: Settings
    original: int | None
    candidates: Sequence[MethodEntry]
    documents: Sequence[Mapping[str, Any]]
    skipped: Sequence[Skipped]
    records: Sequence[Record]
    failures: Sequence[Failure]
    curves: dict[str, tuple[list[float], list[int]]] = field(default_factory=dict)
    head_replay: str = "off"
    environment: dict[str, Any] = field(default_factory=dict)
    command: str | None = None
    fingerprint: str | None = None
    cells: list[Cell] = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.cells = summarize(
            self.records,
            seed=settings.seed,
            resamples=settings.resamples,
            aggregate=settings.aggregate,
            base=settings.base,
            baseline=self.candidates[0].label if self.candidates else None,
        )
        self._by_key = {(c.method, c.protocol, c.length): c for c in self.cells}

    @classmethod
    def of(
        cls, measured: Measurement, candidates: Sequence[Candidate], **known: Any
    ) -> PerplexityResult:
        """Puts a measurement together with what is known about it.

        Args:
            measured: The numbers.
            candidates: The methods.
            **known: The other fields.
        """
        return cls(
            candidates=[MethodEntry.of(c, measured.shared_prefix[c.label]) for c in candidates],
            records=measured.records,
            failures=measured.failures,
            curves=measured.curves,
            head_replay=measured.head_replay,
            **known,
        )

    def cell(self, method: str, protocol: str, length: int) -> Cell | None:
        """The number of a method under a protocol at a length; `None` where it could not be measured."""
        return self._by_key.get((method, protocol, length))

    def failure(self, method: str, protocol: str, length: int) -> str | None:
        """Why there is no number."""
        key = (method, protocol, length)
        found = (f.reason for f in self.failures if (f.method, f.protocol, f.length) == key)
        return next(found, None)

    def not_finite(self) -> list[Cell]:
        """The cells whose loss was not a finite number."""
        return [cell for cell in self.cells if not math.isfinite(cell.nats)]

    def __repr__(self) -> str:
        methods = ", ".join(entry.label for entry in self.candidates)
        return f"PerplexityResult({methods}; {len(self.documents)} documents, lengths {list(self.settings.lengths)})"

    @property
    def curve(self) -> dict[str, Any]:
        """Losses by position in the longest prefix: where the buckets begin and end, and each method's sums."""
        methods = {
            label: {"nats": nats, "tokens": tokens} for label, (nats, tokens) in self.curves.items()
        }
        return {
            "edges": edges(self.settings.lengths[-1], self.settings.buckets),
            "methods": methods,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values; a number that is not finite becomes `None`."""
        settings = self.settings
        values = {
            "format": FORMAT,
            "kind": "perplexity",
            "command": self.command,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "original_max_position_embeddings": self.original,
            "protocols": {name: settings.definition(name) for name in settings.protocols},
            "settings": settings.to_dict(),
            "environment": self.environment,
            "head_replay": self.head_replay,
            "methods": [dataclasses.asdict(entry) for entry in self.candidates],
            "source": self.source,
            "documents": list(self.documents),
            "skipped": [dataclasses.asdict(skipped) for skipped in self.skipped],
            "summary": [dataclasses.asdict(cell) for cell in self.cells],
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "curve": self.curve,
            "records": [dataclasses.asdict(record) for record in self.records],
        }
        made: dict[str, Any] = finite(values)
        return made

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PerplexityResult:
        """Reads what `to_dict` wrote; the summary is made anew from the records."""
        curves = {
            label: ([_number(loss) for loss in curve["nats"]], list(curve["tokens"]))
            for label, curve in values["curve"]["methods"].items()
        }
        return cls(
            model=dict(values["model"]),
            source=dict(values["source"]),
            settings=Settings.from_dict(values["settings"]),
            original=values["original_max_position_embeddings"],
            candidates=[MethodEntry(**entry) for entry in values["methods"]],
            documents=list(values["documents"]),
            skipped=[Skipped(**entry) for entry in values["skipped"]],
            records=[
                Record(
                    **{
                        **entry,
                        "nats": _number(entry["nats"]),
                        "weighted": _number(entry["weighted"]),
                    }
                )
                for entry in values["records"]
            ],
            failures=[Failure(**entry) for entry in values["failures"]],
            curves=curves,
            head_replay=values["head_replay"],
            environment=dict(values["environment"]),
            command=values["command"],
            fingerprint=values["fingerprint"],
        )

    def plot(self) -> Figure:
        """Perplexity against context length, one panel per protocol; needs matplotlib."""
        from hf_posenc.evaluation.plots import figure

        return figure(self)

    def _repr_html_(self) -> str:

        return to_html(self)

    def write_json(self, path: Path) -> None:
        """Writes everything."""
        write_atomically(path, to_json(self.to_dict()))

    def write_csv(self, path: Path) -> None:
        """Writes one row per cell of the table; a cell that could not be measured has a `status` and no numbers."""
        rows = (
            self._row(entry, protocol, length)
            for entry in self.candidates
            for protocol in self.settings.protocols
            for length in self.settings.lengths
        )
        write_atomically(path, to_csv(COLUMNS, rows))

    def _row(self, entry: MethodEntry, protocol: str, length: int) -> dict[str, Any]:
        row = {
            "method": entry.label,
            "protocol": protocol,
            "length": length,
            "scale": entry.scale_at(length),
        }
        cell = self.cell(entry.label, protocol, length)
        if cell is None:
            reason = self.failure(entry.label, protocol, length)
            return {**row, "status": reason or "nothing to score"}
        values = dataclasses.asdict(cell)
        for name, interval in (("perplexity", cell.interval), ("ratio", cell.ratio_interval)):
            values[f"{name}_low"], values[f"{name}_high"] = interval or (None, None)
        del values["interval"], values["ratio_interval"]
        status = "ok" if math.isfinite(cell.nats) else "not finite"
        return {**values, **row, "status": status}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


# The tables that a run prints, and what a reader must know beside them.


FEW_DOCUMENTS = 5
SAME_RATIO = 0.0005
"""A difference below 0.1 % is rounding of what is shown."""
SAYS = {
    "prefix": "prefix averages over contexts of 1 to L tokens and hides a failure at the far end",
    "tail": "tail scores the same tokens at every L, so context is all that changes",
    "sliding": "sliding scores tokens with nearly L tokens in front of them, and every L scores others too",
    "disjoint": "disjoint averages over contexts of 1 to L tokens, in pieces all through the text",
    "longppl": "longppl scores the tokens that an evaluator predicts by far context alone",
    "stream": "stream averages over contexts of 1 to L tokens, across the ends of documents",
}


def number(value: float | None, digits: int = 4) -> str:
    """So many significant digits; powers of ten from 10,000."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    if value >= 9999.5:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:#.{digits}g}".rstrip(".")


def table(result: PerplexityResult, protocol: str) -> Table:
    """Perplexity by method and length under one protocol, each with its range; the lowest of a column in bold.

    An arrow says where a number is lower or higher than the baseline's by more than chance.
    """
    lengths, settings = result.settings.lengths, result.settings
    made = Table(
        title=f"Perplexity, {protocol}: {settings.definition(protocol)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=True,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column(
        "method", footer="tokens scored", overflow="fold"
    )  # what gives way on a narrow terminal
    for length in lengths:
        counts = {c.tokens for c in result.cells if (c.protocol, c.length) == (protocol, length)}
        footer = f"{counts.pop():,}" if counts else "-"
        made.add_column(heading(length, result.original), footer, justify="right", no_wrap=True)
    made.add_column("bits/\nbyte", justify="right", no_wrap=True)
    lowest = {length: _lowest(result, protocol, length) for length in lengths}
    for candidate in result.candidates:
        cells = [result.cell(candidate.label, protocol, length) for length in lengths]
        shown = [
            _cell_text(cell, lowest[length])
            if cell
            else _failure_text(result, candidate.label, protocol, length)
            for cell, length in zip(cells, lengths, strict=True)
        ]
        made.add_row(
            candidate.label, *shown, number(cells[-1].bits_per_byte if cells[-1] else None)
        )
    return made


def heading(length: int, original: int | None) -> str:
    """A length above its column, and below it how many times the trained length that is."""
    return f"{length:,}\nx{length / original:.3g}" if original else f"{length:,}"


def failed(reason: str | None) -> Text:
    """A field without a number."""
    return Text("OOM" if reason == OUT_OF_MEMORY else "failed", style="red")


def _lowest(result: PerplexityResult, protocol: str, length: int) -> float:
    values = [c.perplexity for c in result.cells if (c.protocol, c.length) == (protocol, length)]
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _cell_text(cell: Cell, lowest: float) -> Text:
    arrow = {-1: " ↓", 0: "", 1: " ↑"}[cell.differs]
    text = Text(number(cell.perplexity) + arrow, style="bold" if cell.perplexity == lowest else "")
    if cell.interval is not None and not math.isnan(cell.perplexity):
        low, high = cell.interval
        text.append(f"\n{number(low, 3)}-{number(high, 3)}", style="dim not bold")
    return text


def _failure_text(result: PerplexityResult, method: str, protocol: str, length: int) -> Text:
    reason = result.failure(method, protocol, length)
    return Text("-") if reason is None else failed(reason)  # none: no token to score


def notes(result: PerplexityResult) -> Iterator[str]:
    """What a reader must know beside the table: documents, scales, and what could not be measured."""
    settings, count = result.settings, len(result.documents)
    skipped = f", {len(result.skipped)} skipped" if result.skipped else ""
    what = "One stream" if settings.streams else f"{count} document{'s' * (count != 1)}"
    ranges = f"ranges: 95 % bootstrap over documents, seed {settings.seed}"
    yield (
        f"{what}{skipped}; {ranges if count > 1 else 'no ranges, which need several documents'}; "
        f"bits/byte at {settings.lengths[-1]:,} tokens."
    )
    baseline = result.candidates[0].label
    if any(cell.differs for cell in result.cells):
        yield (
            f"↓ ↑: lower or higher than {baseline} by more than chance (paired 95 % interval of the ratio); no arrow: "
            "it may be chance."
        )
    if 1 < count < FEW_DOCUMENTS:
        yield f"Fewer than {FEW_DOCUMENTS} documents: the ranges say little."
    yield from _gaps(result)
    if "longppl" in settings.protocols and not any(c.protocol == "longppl" for c in result.cells):
        yield "longppl: the evaluator found no key token in these texts, so there is nothing to score."
    yield from _short_texts(result)
    yield from _orders(result)
    auto = next((candidate for candidate in result.candidates if candidate.auto_scale), None)
    if auto is not None:
        yield f"(auto): scale = length / {auto.original:,}, the original length, set anew at every length."


def _gaps(result: PerplexityResult) -> Iterator[str]:
    """Windows that are farther apart than they are long leave text unread between them."""
    settings = result.settings
    slid = [name for name in settings.protocols if name in ("sliding", "stream")]
    every = settings.bos_windows == "every" or "stream" in slid
    special = len(result.model.get("bos", {}).get("token_ids", ())) if every else 0
    short = [length for length in settings.lengths if length - special < settings.stride]
    if slid and short:
        yield (
            f"Windows of {_listed(short)} tokens lie {settings.stride:,} apart: the text between them is not read, and "
            "all that is in them is scored; --stride sets another distance."
        )


def _telling(result: PerplexityResult, length: int) -> str:
    """The last protocol that has a number for the baseline at this length."""
    label, names = result.candidates[0].label, result.settings.protocols
    return next((name for name in reversed(names) if result.cell(label, name, length)), names[-1])


def _short_texts(result: PerplexityResult) -> Iterator[str]:
    """What texts within the trained length pay, in percent of the baseline's perplexity."""
    baseline = result.candidates[0].label
    short = [n for n in result.settings.lengths if result.original and n <= result.original]
    if not short or len(result.settings.lengths) == len(short):
        return
    protocol = _telling(result, short[-1])
    cells = [result.cell(entry.label, protocol, short[-1]) for entry in result.candidates[1:]]
    ratios = [
        (cell, cell.ratio)
        for cell in cells
        if cell is not None and cell.ratio is not None and math.isfinite(cell.ratio)
    ]
    said = [
        f"{cell.method} {_percent(cell)}" for cell, ratio in ratios if abs(ratio - 1) >= SAME_RATIO
    ]
    if len(said) < len(ratios):
        said.append(f"the others as {baseline}" if said else f"all as {baseline}")
    if said:
        yield f"Short texts ({short[-1]:,} tokens, {protocol}, against {baseline}): {'; '.join(said)}."


def _percent(cell: Cell) -> str:
    assert cell.ratio is not None
    text = f"{(cell.ratio - 1) * 100:+.1f} %"
    if cell.ratio_interval is not None:
        low, high = ((bound - 1) * 100 for bound in cell.ratio_interval)
        text += f" ({low:+.1f} to {high:+.1f})"
    return text


def _orders(result: PerplexityResult) -> Iterator[str]:
    """Whether the protocols put the methods in the same order; they often do not."""
    length = result.settings.lengths[-1]
    orders: dict[str, list[str]] = {}
    for protocol in result.settings.protocols:
        cells = [result.cell(entry.label, protocol, length) for entry in result.candidates]
        ranked = sorted(
            (c.perplexity, c.method) for c in cells if c is not None and math.isfinite(c.perplexity)
        )
        orders[protocol] = [method for _, method in ranked]
    (first, order), *others = orders.items()
    for protocol, other in others:
        if order != other and set(order) == set(other):
            swapped = next((a, b) for a, b in zip(order, other, strict=True) if a != b)
            yield (
                f"The order of methods at {length:,} tokens depends on the protocol: {first} has {swapped[0]} in a "
                f"place that {protocol} gives to {swapped[1]}."
            )
            return


def to_html(result: PerplexityResult) -> str:
    """The tables and notes, for a notebook."""
    return as_html(
        (table(result, protocol) for protocol in result.settings.protocols), notes(result)
    )


def as_html(tables: Iterable[Table], lines: Iterable[str], width: int = 160) -> str:
    """Tables and the sentences below them as HTML.

    Args:
        tables: As the terminal shows them.
        lines: Sentences.
        width: Of the tables, in characters.
    """
    # In a notebook rich would display what it records, and the result then stood there twice.
    console = Console(
        file=io.StringIO(), record=True, width=width, highlight=False, force_jupyter=False
    )
    for made in tables:
        console.print(made)
    for line in lines:
        console.print(line, markup=False)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def problems(result: PerplexityResult) -> Iterator[str]:
    """One line for every method that gave something else than numbers; with any of them a run has failed."""
    for candidate in result.candidates:
        label = candidate.label
        lengths = sorted({cell.length for cell in result.not_finite() if cell.method == label})
        if lengths:
            yield f"{label}: the loss is not a finite number at length {_listed(lengths)}{_advice(result)}."
        reasons: dict[str, set[int]] = {}
        for failure in result.failures:
            if failure.method == label:
                reasons.setdefault(failure.reason, set()).add(failure.length)
        for reason, where in reasons.items():
            yield f"{label}: failed at length {_listed(sorted(where))}: {reason}"


def _advice(result: PerplexityResult) -> str:
    """More digits help only where there were few."""
    enough = str(result.model.get("dtype")) in ("float32", "float64")
    return "" if enough else "; try --dtype float32"


def reading_guide(result: PerplexityResult) -> Iterator[str]:
    """Two lines: what to compare with, and what the protocols say."""
    settings = result.settings
    baseline = result.candidates[0].label
    length = next((n for n in settings.lengths if n == result.original), settings.lengths[0])
    protocol = _telling(result, length)
    cell = result.cell(baseline, protocol, length)
    value = f" ({number(cell.perplexity)})" if cell else ""
    trained = ", the length it was trained at" if length == result.original else ""
    what = "the unpatched model" if baseline == UNPATCHED else baseline
    yield (
        f"Baseline: {what} at {length:,} tokens{trained}{value}. A method holds where its perplexity ({protocol}) "
        "stays at or below that as the context grows."
    )
    shown = "; ".join(SAYS[name] for name in settings.protocols)
    yield f"Protocol: {shown}. Compare numbers of one protocol only."
    if settings.preset is not None:
        yield f"Preset {settings.preset}: {PRESETS[settings.preset].remark}"


def _listed(lengths: list[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)
