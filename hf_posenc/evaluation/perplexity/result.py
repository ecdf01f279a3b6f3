"""The result of a perplexity run, with everything that decides whether two results are comparable."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hf_posenc.evaluation.documents import Skipped
from hf_posenc.evaluation.grid import (
    Field,
    Grid,
    MethodsResult,
    auto_scale_note,
    failure_field,
    length_head,
    listed,
    nan_if_none,
    number,
    number_range,
)
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, UNPATCHED
from hf_posenc.evaluation.measuring.statistics import (
    CLAIM,
    FEW_NOTE,
    NEEDED,
    POWER,
    ROUNDING,
    VERDICTS,
    Cell,
    Failure,
    Record,
    edges,
    summarize,
)
from hf_posenc.evaluation.perplexity.protocols import PRESETS, Settings
from hf_posenc.evaluation.plots import figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = {
    "method": "label of the method",
    "protocol": "definition of the perplexity",
    "length": "tokens of context, special tokens included",
    "scale": "scale in force at this length",
    "perplexity": "exp of the mean loss over all documents",
    "perplexity_low": "lower end of its 95 % interval over documents",
    "perplexity_high": "upper end",
    "ratio": "perplexity divided by the first method's",
    "ratio_low": "lower end of its interval, paired by document; all of a column hold together in 95 % of samples",
    "ratio_high": "upper end",
    "bits_per_byte": "loss in bits per UTF-8 byte of the scored text",
    "word_perplexity": "exp of the loss per word of the scored text",
    "nats": "sum of the negative log-likelihoods, in nats",
    "tokens": "tokens that were scored",
    "bytes": "their UTF-8 bytes",
    "words": "words that begin in them",
    "documents": "documents with scored tokens",
    "needed": "documents with which a ratio of 1.01 would be significant in 80 % of samples, by the measured spread",
    "status": "ok, not finite, or the reason why there is no number",
}
"""The columns of the CSV file and of `frame`, with unit and meaning."""
SAME_RATIO = 0.0005
"""Ratios that are closer to 1 differ by less than what is shown: 0.1 %."""
PROTOCOL_NOTES = {
    "prefix": "prefix averages over contexts of 1 to L tokens and hides a failure at the far end",
    "tail": "tail scores the same tokens at every L, so context is all that changes",
    "sliding": "sliding scores tokens with nearly L tokens before them, and other tokens at every L",
    "disjoint": "disjoint averages over contexts of 1 to L tokens, in pieces all through the text",
    "longppl": "longppl scores the tokens that an evaluator predicts by far context alone",
    "stream": "stream averages over contexts of 1 to L tokens, across the ends of documents",
}


@dataclass(repr=False, kw_only=True)
class PerplexityResult(MethodsResult[Cell]):
    """Perplexities measured by `hf-posenc perplexity`.

    Attributes:
        source: The requested source of the documents.
        documents: The documents, each with its hashes and its number of tokens, bytes and words.
        skipped: Documents that were not used, with the reason.
        records: Sums per method, protocol, length and document.
        curves: For each method's label, nats and tokens of every bucket of the longest prefix.

    Examples:
        >>> from hf_posenc.evaluation import PerplexityResult, measure_perplexity
        >>> methods = ["truncation", "yarn:scale=4"]
        >>> result = measure_perplexity(model, tokenizer, texts, methods=methods, lengths=[64, 128])
        >>> cell = result.cell("yarn (scale 4)", "tail", 128)
        >>> cell.tokens, cell.documents  # beside cell.perplexity, cell.interval, cell.ratio, ...
        (64, 2)
        >>> paths = result.write("runs/own")  # JSON, CSV and plots; PerplexityResult.from_dict reads the JSON
    """

    kind = "perplexity"
    condition = "protocol"
    version = 2
    columns = COLUMNS
    nothing = "nothing to score"
    intervals = (("perplexity", "interval"), ("ratio", "ratio_interval"))
    _stored: ClassVar[Sequence[str]] = (*MethodsResult._stored, "source", "documents")
    _settings_type = Settings
    _lists: ClassVar[Mapping[str, type[Any]]] = {"skipped": Skipped, "failures": Failure}

    settings: Settings
    documents: Sequence[Mapping[str, Any]]
    records: Sequence[Record]
    failures: Sequence[Failure]
    source: dict[str, Any] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    curves: dict[str, tuple[list[float], list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cells = summarize(
            self.records,
            aggregate=self.settings.aggregate,
            base=self.settings.base,
            baseline=self.candidates[0].label if self.candidates else None,
        )

    @property
    def curve(self) -> dict[str, Any]:
        """Losses by position in the longest prefix: the edges of the buckets, and each method's sums."""
        curves = self.curves.items()
        methods = {label: {"nats": nats, "tokens": tokens} for label, (nats, tokens) in curves}
        bounds = edges(self.settings.lengths[-1], self.settings.buckets)
        return {"edges": bounds, "methods": methods}

    def _values(self) -> dict[str, Any]:
        return self.described(
            {"protocols": {name: self.settings.definition(name) for name in self.conditions}},
            source=self.source,
            documents=self.documents,
            skipped=self.skipped,
            summary=self.cells,
            failures=self.failures,
            curve=self.curve,
            records=self.records,
        )

    @classmethod
    def _fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        curves = {
            label: ([nan_if_none(loss) for loss in curve["nats"]], list(curve["tokens"]))
            for label, curve in values["curve"]["methods"].items()
        }
        records = [
            Record(**{**entry, **{name: nan_if_none(entry[name]) for name in ("nats", "weighted")}})
            for entry in values["records"]
        ]
        return {**super()._fields_of(values), "records": records, "curves": curves}

    def figures(self) -> dict[str, Figure]:
        return {self.kind: self.plot()}

    def plot(self) -> Figure:
        """Draw perplexity against context length, one panel per protocol. Needs matplotlib."""
        return figure(self)

    def tables(self) -> list[Grid]:
        """Return one table per protocol."""
        return [self.table(protocol) for protocol in self.settings.protocols]

    def table(self, protocol: str) -> Grid:
        """Return perplexity by method and length under one protocol, with ranges; the lowest of a column is marked.

        An arrow marks a number that is significantly lower or higher than the baseline's.
        """
        settings, lengths = self.settings, self.settings.lengths
        grid = Grid(f"Perplexity, {protocol}: {settings.definition(protocol)}")
        grid.column("method", footer="tokens scored")
        lowest = dict[int, float]()
        for length in lengths:
            cells = [c for c in self.cells if (c.protocol, c.length) == (protocol, length)]
            finite = (cell.perplexity for cell in cells if math.isfinite(cell.perplexity))
            lowest[length] = min(finite, default=math.nan)
            footer = f"{cells[0].tokens:,}" if cells else "-"
            grid.column(length_head(length, self.original), numeric=True, footer=footer)
        grid.column("bits/\nbyte", numeric=True)
        for entry in self.candidates:
            fields = [self._field(entry.label, protocol, n, lowest[n]) for n in lengths]
            last = self.cell(entry.label, protocol, lengths[-1])
            grid.row(entry.label, *fields, number(last.bits_per_byte if last else None))
        return grid

    def _field(self, method: str, protocol: str, length: int, lowest: float) -> Field:
        if (cell := self.cell(method, protocol, length)) is None:
            reason = self.failure(method, protocol, length)
            return Field("-") if reason is None else failure_field(reason)  # no token to score
        arrow = {-1: " ↓", 0: "", 1: " ↑"}[cell.differs]
        mark = "best" if cell.perplexity == lowest else ""
        text = Field(number(cell.perplexity) + arrow, mark, cell.perplexity)
        if cell.interval is not None and not math.isnan(cell.perplexity):
            text.append(f"\n{number_range(cell.interval, 3)}", "aside")
        return text

    def notes(self) -> Iterator[str]:
        settings, count = self.settings, len(self.documents)
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        texts = "One stream" if settings.streams else f"{count} document{'s' * (count != 1)}"
        told = any(cell.interval for cell in self.cells)
        ranges = "ranges: 95 % intervals over documents; " * told
        yield f"{texts}{skipped}; {ranges}bits/byte at {settings.lengths[-1]:,} tokens."
        if any(cell.differs for cell in self.cells):
            yield (
                f"↓ ↑: significantly lower or higher than {self._baseline} (paired intervals of the ratios; all of a "
                "column hold together in 95 % of samples: Bonferroni); no arrow: the difference may be chance."
            )
        yield from self.sample_sizes()
        special = len(self.model.get("bos", {}).get("token_ids", ()))
        sizes, ends = [each["tokens"] for each in self.documents], {"prefix", "tail"}
        most = (settings.lengths[-1] - special) * len(ends & {*settings.protocols})
        read, more = sum(min(size, most) for size in sizes), settings.windows_per_document
        if {*settings.protocols} <= ends and read < sum(sizes) and not more:
            places = {"prefix": "the beginning", "tail": "the end"}
            place = "both ends" if settings.protocols[1:] else places[settings.protocols[0]]
            yield (
                f"{read:,} of {sum(sizes):,} tokens are read, at {place} of each text. hf-posenc perplexity "
                "--protocol tail --windows-per-document 8 reads more of it."
            )
        short = [length for length in settings.lengths if length - special < settings.stride]
        if "stream" in settings.protocols and short:
            yield (
                f"Windows of {listed(short)} tokens lie {settings.stride:,} apart: the text between them is not read, "
                "and all that is in them is scored; --stride sets another distance."
            )
        if "longppl" in settings.protocols and not any(c.protocol == "longppl" for c in self.cells):
            yield "longppl: the evaluator found no key token in these texts, so there is nothing to score."
        yield from self._short_texts()
        yield from auto_scale_note(self.candidates)

    def sample_sizes(self) -> Iterator[str]:
        """Note too few documents, and how many a difference of 1 % from truncation, else the baseline, would need."""
        few = [c for c in self.cells if c.interval is None and math.isfinite(c.perplexity)]
        if few and self.settings.streams:
            yield "One stream has no ranges and no verdicts."
        elif few:
            told = {cell.protocol for cell in self.cells if cell.interval}
            where = dict.fromkeys(
                f"{c.protocol} at {c.length:,} tokens" if c.protocol in told else c.protocol
                for c in few
            )
            yield f"{', '.join(where)}: {FEW_NOTE}" if told else FEW_NOTE
        labels, length = [entry.label for entry in self.candidates], self.settings.lengths[-1]
        control = TRUNCATION if TRUNCATION in labels else self._baseline
        protocol = self._last_protocol(length)
        records = [r for r in self.records if (r.protocol, r.length) == (protocol, length)]
        about: dict[str, Any] = {"aggregate": self.settings.aggregate, "base": self.settings.base}
        cells = summarize(records, baseline=control, **about)
        needed = ", ".join(f"{cell.method} {cell.needed:,}" for cell in cells if cell.needed)
        if needed:
            yield (
                f"Documents with which a difference of {100 * CLAIM:g} % from {control} would be significant in "
                f"{100 * POWER:g} % of samples, by the measured spread ({protocol}, {length:,} tokens): {needed}."
            )

    @property
    def _baseline(self) -> str:
        return self.candidates[0].label

    def _last_protocol(self, length: int) -> str:
        """The last protocol that has a number for the baseline at this length."""
        names = self.settings.protocols
        measured = (n for n in reversed(names) if self.cell(self._baseline, n, length))
        return next(measured, names[-1])

    def _short_texts(self) -> Iterator[str]:
        """Note the change of perplexity within the trained length, in percent of the baseline's."""
        lengths = self.settings.lengths
        short = [length for length in lengths if self.original and length <= self.original]
        if not short or len(lengths) == len(short):
            return
        protocol, changes, same = self._last_protocol(short[-1]), [], False
        for entry in self.candidates[1:]:
            cell = self.cell(entry.label, protocol, short[-1])
            if cell is None or cell.ratio is None or not math.isfinite(cell.ratio):
                continue
            if abs(cell.ratio - 1) < SAME_RATIO:
                same = True
                continue
            ends = cell.ratio_interval and [
                f"{(bound - 1) * 100:+.1f}" for bound in cell.ratio_interval
            ]
            interval = f" ({ends[0]} to {ends[1]})" if ends else ""
            changes.append(f"{entry.label} {(cell.ratio - 1) * 100:+.1f} %{interval}")
        if same:
            changes.append(f"{'the others' if changes else 'all'} as {self._baseline}")
        if changes:
            yield (
                f"Short texts ({short[-1]:,} tokens, {protocol}, against {self._baseline}): {'; '.join(changes)}."
            )

    def findings(self) -> Iterator[str]:
        return map(self.verdict_of, self.conditions if self.control()[1] else ())

    def verdict_of(self, protocol: str) -> str:
        """Compare the best method to the control, at the longest length."""
        length, documents = self.settings.lengths[-1], len(self.documents)
        control, rivals = self.control()
        where = f"{protocol}, {length:,} tokens, {control} as the control, "
        where += f"{documents} document{'s' * (documents != 1)}"
        compared = {
            label: cell
            for label in rivals
            if (cell := self.against(protocol, (label, length), (control, length)))
        }
        if not compared:
            measured = self.cell(control, protocol, length)
            lacking = "no method has a" if measured else f"{control} has no"
            return f"{where}: {lacking} number to compare."
        ranked = sorted(compared, key=lambda label: compared[label].ratio or 0)
        better = [label for label in ranked if compared[label].differs < 0]
        best, *others = better or ranked[:1]
        cell, interval = compared[best], ""
        if cell.ratio_interval:
            interval = f" ({'-'.join(map(ratio_text, cell.ratio_interval))})"
        verdict = f"significantly {VERDICTS[cell.differs]}"
        if not cell.differs and cell.ratio_interval is None:
            verdict = "too few documents for a verdict"
        elif not cell.differs:
            verdict = f"not significantly different ({NEEDED.format(cell.needed or 0)})"
        none = "" if better else "no method is significantly better; "
        also = f"; significantly better too: {', '.join(others)}" if others else ""
        patched = any(entry.label == control and entry.method for entry in self.candidates)
        broken = not patched and self.original and length > self.original
        advice = ". An unpatched model breaks down: add truncation" if broken else ""
        return (
            f"{where}: {none}{best} has {ratio_text(cell.ratio or 0)}{interval} times the control's perplexity, "
            f"{verdict}{also}{advice}."
        )

    def against(self, protocol: str, line: tuple[str, int], other: tuple[str, int]) -> Cell | None:
        """Return the number of a method at a length, with its paired ratio to another's; `None` if one is missing.

        All methods but one are compared: their intervals hold together in 95 % of samples. Both have read the same
        documents, and under `tail` the same targets at any length.
        """
        records = [
            replace(record, method=name, length=0)
            for name, key in (("", other), ("line", line))
            for record in self.records
            if (record.method, record.length, record.protocol) == (*key, protocol)
        ]
        about: dict[str, Any] = {"aggregate": self.settings.aggregate, "base": self.settings.base}
        cells = summarize(records, baseline="", comparisons=len(self.candidates) - 1, **about)
        cell = next((cell for cell in cells if cell.method), None)
        return None if cell is None or cell.ratio is None or not math.isfinite(cell.ratio) else cell

    def guide(self) -> Iterator[str]:
        """Yield the number to compare with, and the meaning of each protocol."""
        settings = self.settings
        length = next((n for n in settings.lengths if n == self.original), settings.lengths[0])
        protocol = self._last_protocol(length)
        cell = self.cell(self._baseline, protocol, length)
        value = f" ({number(cell.perplexity)})" if cell else ""
        trained = ", its original length" if length == self.original else ""
        saved = (
            "the model as saved, with its patch,"
            if self.model.get("patch") and "stages" not in self.source
            else "the unpatched model"
        )
        baseline = saved if self._baseline == UNPATCHED else self._baseline
        yield (
            f"Baseline: {baseline} at {length:,} tokens{trained}{value}. A method holds where its perplexity "
            f"({protocol}) stays at or below that as the context grows."
        )
        meanings = "; ".join(PROTOCOL_NOTES[name] for name in settings.protocols)
        yield f"Protocol: {meanings}. Compare numbers of one protocol only."
        if settings.preset is not None:
            yield f"Preset {settings.preset}: {PRESETS[settings.preset]['remark']}"

    def problems(self) -> Iterator[str]:
        more_digits = str(self.model.get("dtype")) not in ("float32", "float64")
        advice = "; try --dtype float32" if more_digits else ""
        failed = self.lengths_of_failures("method", "reason")
        for label in (entry.label for entry in self.candidates):
            own = (cell for cell in self.cells if cell.method == label)
            if lengths := {cell.length for cell in own if not math.isfinite(cell.nats)}:
                at = listed(sorted(lengths))
                yield f"{label}: the loss is not a finite number at length {at}{advice}."
            for (method, reason), at in failed.items():
                if method == label:
                    yield f"{label}: failed at length {at}: {reason}"


def ratio_text(value: float) -> str:
    """Format a ratio with enough digits to distinguish it from 1, unless the difference is rounding."""
    if not 0.9 < value < 1.1 or abs(value - 1) < ROUNDING:
        return number(value, 3)
    texts = [f"{value:.{digits}f}" for digits in (3, 4)]
    return next((text for text in texts if float(text) != 1), texts[-1])
