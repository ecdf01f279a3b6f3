"""The findings about one device: which backends are right there, and how long methods take.

`hf-posenc selftest` checks backends and times layers at one length; `hf-posenc bench --suite gpu` times layers and a
whole model at many. The timed prefill of `bench` has the same rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_posenc.attention.checks import Case
from hf_posenc.attention.checks.comparison import Comparison
from hf_posenc.evaluation.grid import (
    Field,
    Grid,
    Result,
    escaped,
    failure_field,
    number,
    to_markdown,
)
from hf_posenc.evaluation.scoring import OUT_OF_MEMORY

FAST = 3.0
"""A phase of a method is fast if it takes at most so many times as long as plain attention."""
PLAIN = "plain attention"
PHASES = {
    "prefill": "Prefill",
    "step": "Decode, one token",
    "training": "Training, forward and backward",
}
"""The phases of a layer, and their titles."""
PERPLEXITY, GENERATION, COMPILED = "perplexity", "generation", "compiled generation"
WHOLE = {
    PERPLEXITY: "Perplexity, every token scored",
    GENERATION: "Generation, one text",
    COMPILED: "Generation, compiled with a static cache, one text",
}
"""The phases of a whole model, and their titles."""
PEERS_NOTE = "Two score matrices, bias as a mask: as the authors of these methods publish them."


@dataclass(frozen=True)
class Row:
    """One method in one phase at one length.

    Attributes:
        phase: One of `PHASES` or `WHOLE`.
        method: The method, with the name of its formulation if that is another's.
        length: Tokens of the text; of a generation, of the prompt.
        backend: The backends that computed it, and what was run in pieces since memory ran out.
        seconds: Times of a call, round by round.
        plain: Those of plain attention, or of the unpatched model, in the same rounds.
        peak_bytes: Memory at the peak, of a layer that beyond its inputs; `None`: not measured.
        estimate_bytes: The estimate of the whole model's memory at the peak.
        waits: Times that the host waited for a GPU in a layer; `None`: not measured.
        captured: True if a CUDA graph can be captured of it and replayed; `None`: not measured.
        failed: The reason if there is no time.
    """

    phase: str
    method: str
    length: int
    backend: str = ""
    seconds: Sequence[float] = ()
    plain: Sequence[float] = ()
    peak_bytes: int | None = None
    estimate_bytes: int | None = None
    waits: int | None = None
    captured: bool | None = None
    failed: str | None = None

    @property
    def milliseconds(self) -> float | None:
        """Median time of a call."""
        return 1e3 * statistics.median(self.seconds) if self.seconds else None

    @property
    def ratio(self) -> float | None:
        """Times as long as plain attention: the median over the rounds."""
        pairs = zip(self.seconds, self.plain, strict=False)
        return statistics.median(own / base for own, base in pairs) if self.plain else None

    @property
    def speedup(self) -> float | None:
        """Times as fast as plain: the median over the rounds."""
        pairs = zip(self.seconds, self.plain, strict=False)
        return statistics.median(base / own for own, base in pairs) if self.plain else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the text by the median time; of a generation, new ones."""
        tokens = 1 if self.phase in (GENERATION, COMPILED) else self.length
        return tokens / statistics.median(self.seconds) if self.seconds else None

    @property
    def status(self) -> str:
        """The reason of a failure, else `"ok"`."""
        return self.failed or "ok"


@dataclass(repr=False, kw_only=True)
class GpuResult(Result):
    """Result of `hf-posenc bench --suite gpu` and of `hf-posenc selftest`.

    Attributes:
        records: All rows, in the order of the tables.
        model: Whose sizes were measured: name, class, parameters, dtype, device, attention.
        sizes: Heads, heads of keys and features of a head of the layers.
        machine: Name of the device, and threads of a CPU.
        memory: Meaning of the whole model's peak.
        rounds: The most rounds.
        environment: Versions of the packages that computed.
        missing: Rows for which there was no time.
        checks: By case, what the comparison with float64 found.
        not_reached: Cases for which there was no time.
        seconds: Duration of a self-test; `None`: nothing was checked.
    """

    kind = "gpu"
    columns: ClassVar[Mapping[str, str]] = {
        "phase": "what was timed",
        "method": "label of the method",
        "length": "tokens of the text",
        "backend": "what computed the attention",
        "milliseconds": "median time",
        "ratio": "times as long as plain attention",
        "tokens_per_second": "tokens by that time",
        "peak_bytes": "most memory, in bytes",
        "estimate_bytes": "the memory that was estimated before, in bytes",
        "status": "ok, or the reason why there is no number",
    }

    records: Sequence[Row]
    model: Mapping[str, Any]
    sizes: Mapping[str, int]
    machine: Mapping[str, Any]
    memory: str | None
    rounds: int
    environment: Mapping[str, Any]
    command: str | None = None
    fingerprint: str | None = None
    missing: int = 0
    checks: Mapping[Case, Comparison] = field(default_factory=dict)
    not_reached: Sequence[Case] = ()
    seconds: float | None = None

    def __repr__(self) -> str:
        return f"GpuResult({self.machine['device']}, {len(self.records)} rows)"

    @property
    def device(self) -> str:
        """The device, as PyTorch names it."""
        return str(self.model["device"])

    @property
    def refused(self) -> dict[Case, str]:
        """The cases that failed, with the reason."""
        return {case: found.reason for case, found in self.checks.items() if found.reason}

    @property
    def passed(self) -> bool:
        """True if no backend failed a check and every method was computed."""
        return not self.refused and not any(row.failed for row in self.records)

    @property
    def verdicts(self) -> dict[str, dict[str, list[str]]]:
        """By phase of a layer, at the first length, the methods that are fast, right but slow, and not possible."""
        found: dict[str, dict[str, list[str]]] = {
            phase: {"fast": [], "slow": [], "not possible": []} for phase in PHASES
        }
        for row in self.records:
            first = row.length == self.records[0].length
            if row.phase in PHASES and row.method != PLAIN and first:
                fast = row.ratio is not None and row.ratio <= FAST
                answer = "not possible" if row.failed else "fast" if fast else "slow"
                found[row.phase][answer].append(row.method)
        return found

    @property
    def summary(self) -> str:
        """Return a line for each phase, and one for the backends that failed, for which the next ones compute."""
        lines = []
        for phase, answers in self.verdicts.items():
            parts = [f"{title}: {', '.join(names)}" for title, names in answers.items() if names]
            lines.append(f"{self.device}, {phase}: {'; '.join(parts) or 'no method was timed'}")
        broken: dict[str, dict[str, None]] = {}
        for case in self.refused:
            kind = f"{case.kind} in training" if case.gradients else case.kind
            broken.setdefault(case.backend, {})[kind] = None
        failed = [f"{name} ({', '.join(kinds)})" for name, kinds in broken.items()]
        lines.append(f"Not used, since its check failed: {'; '.join(failed) or 'none'}.")
        if left := len(self.not_reached):
            first = f"first {self.not_reached[0]}"
            lines[-1] += f" {left:,} cases had no time, {first}: give more --seconds."
        return "\n".join(lines)

    def _values(self) -> dict[str, Any]:
        """Return the values of the JSON file; what only a self-test finds is left out elsewhere."""
        values = dict(vars(self))
        unmeasured = {"waits": None, "captured": None}.items()
        values["records"] = [
            {name: x for name, x in vars(row).items() if (name, x) not in unmeasured}
            for row in self.records
        ]
        if self.seconds is None:
            for name in ("checks", "not_reached", "seconds"):
                del values[name]
        else:
            values["checks"] = [vars(case) | vars(x) for case, x in self.checks.items()]
            values |= {"device": self.device, "passed": self.passed, "summary": self.summary}
        return values

    @classmethod
    def _fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        given = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        given["records"] = [Row(**record) for record in values["records"]]
        given["checks"] = {}
        for check in map(dict, values.get("checks", ())):
            case = Case(**{f.name: check.pop(f.name) for f in dataclasses.fields(Case)})
            given["checks"][case] = Comparison(**check)
        given["not_reached"] = [Case(**case) for case in values.get("not_reached", ())]
        return given

    def csv_rows(self) -> Iterator[Mapping[str, Any]]:
        for row in self.records:
            yield {name: getattr(row, name) for name in self.columns}

    def files(self) -> dict[str, str]:
        return {**super().files(), f"{self.kind}.md": self._repr_markdown_()}

    def tables(self) -> list[Grid]:
        """Return the checks by dtype, and a table for each phase that was measured."""
        by_phase: dict[str, list[Row]] = {}
        for row in self.records:
            by_phase.setdefault(row.phase, []).append(row)
        phases = (phase for phase in (*WHOLE, *PHASES) if phase in by_phase)
        return [*self._checks(), *(self._times(phase, by_phase[phase]) for phase in phases)]

    def _checks(self) -> Iterator[Grid]:
        """Yield a table for each dtype: the largest error of a backend and a kind, by head dimension."""
        for dtype in dict.fromkeys(case.dtype for case in self.checks):
            checks = {case: found for case, found in self.checks.items() if case.dtype == dtype}
            sizes = dict.fromkeys(case.head_dim for case in checks)
            columns = [*itertools.product(sizes, (False, True))]
            bound = max(found.bound for found in checks.values())
            grid = Grid.of(
                f"{dtype}: largest error relative to float64, of {bound:.1e} accepted", ""
            )
            for head_dim, gradients in columns:
                head = f"{head_dim}\n{'backward' if gradients else 'forward'}"
                grid.column(head, numeric=True)
            for backend, kind in dict.fromkeys((case.backend, case.kind) for case in checks):
                cases = [Case(backend, kind, dtype, *column) for column in columns]
                grid.row(f"{backend}: {kind}", *(_checked(checks.get(case)) for case in cases))
            yield grid

    def _times(self, phase: str, records: Sequence[Row]) -> Grid:
        """Return the table of a phase: methods, and at every length speed, slowdown and memory."""
        by_method: dict[str, dict[int, Row]] = {}
        for row in records:
            by_method.setdefault(row.method, {})[row.length] = row
        lengths = sorted({length for rows in by_method.values() for length in rows})
        host = any(row.waits is not None for row in records)
        sizes, model, layer = self.sizes, self.model, phase in PHASES
        if layer:
            heads = ["ms", "times\nplain", "MiB"]
            about = f"one layer, {sizes['heads']} heads of {sizes['head_dim']} features, {sizes['key_heads']} of keys"
        else:
            heads = ["tokens/s", "times\nunpatched", "GiB at\nthe peak"]
            heads += ["GiB\nestimated"] * (phase == PERPLEXITY)
            about = f"{model['name']}, {model['parameters'] / 1e6:,.1f} M parameters"
        title = f"{(PHASES | WHOLE)[phase]}: {about}, {model['dtype']}"
        grid = Grid.of(title, "method", "attention by")
        for length in lengths:
            for place, head in enumerate(heads):
                grid.column(head if place else f"{length:,}\n{head}", numeric=True)
        for head in ("host\nwaits", "graph") if host else ():
            grid.column(head, numeric=True)
        for method, rows in by_method.items():
            fields = []
            for length in lengths:
                base = by_method.get("none", {}).get(length)
                fields += _fields(rows.get(length), base, layer)[: len(heads)]
            if host:
                last = rows[max(rows)]
                graph = {None: "-", True: "yes", False: "no"}[last.captured]
                fields += [Field("-" if last.waits is None else str(last.waits)), Field(graph)]
            chosen = dict.fromkeys(row.backend for row in rows.values() if row.backend)
            grid.row(method, ", ".join(chosen) or "-", *fields)
        return grid

    def notes(self) -> Iterator[str]:
        versions, count = self.environment, self.machine["threads"]
        measured = {row.phase for row in self.records}
        threads = f", {count} thread{'s' * (count != 1)}" if count else ""
        yield (
            f"{self.machine['device']}{threads}; hf-posenc {versions['hf-posenc']}, torch {versions['torch']}, "
            f"transformers {versions['transformers']}, Python {versions['python']}, {versions['system']}."
        )
        if measured & {*PHASES}:
            peers = any(", " in row.method for row in self.records)
            yield (
                "Layers: random queries, keys and values, of a model that was trained at a quarter of the length "
                f"(automatic scales are 4). ms: median of up to {self.rounds} rounds, in which the method and plain "
                "attention alternate, after calls that are not counted. Times plain: median of the ratios within a "
                f"round; for {PLAIN}, of two equal runs. MiB: allocated on the GPU beyond the inputs."
                f"{' ' + PEERS_NOTE if peers else ''}"
            )
        if PERPLEXITY in measured:
            peak = f" GiB at the peak: {self.memory}." if self.memory else ""
            yield (
                "Perplexity: one forward that scores every token, timed once after one that is not. Weights and tokens "
                f"are random, so its value means nothing and is left out.{peak}"
            )
        if GENERATION in measured:
            yield (
                "Generation: the time of one new token after a prompt of so many, the median of the later half of "
                "them, in up to three rounds in which the unpatched model alternates; compiled, one of each. "
                "Times unpatched: how much longer the same takes than in the unpatched model."
            )
        if self.missing:
            yield (
                f"{self.missing} of {self.missing + len(self.records)} measurements were not begun in time: the same "
                "command goes on with them."
            )
        lost = sum(row.failed == OUT_OF_MEMORY for row in self.records)
        if lost:
            yield f"OOM: out of memory, {lost} of {len(self.records)} rows."

    def problems(self) -> Iterator[str]:
        yield from (f"{case}: {reason}" for case, reason in self.refused.items())
        for row in self.records:
            if row.failed is not None and row.failed != OUT_OF_MEMORY:
                yield f"{row.method}, {row.phase} at {row.length:,} tokens: {row.failed}"

    def _repr_markdown_(self) -> str:
        lines = (*self.notes(), *self.problems())
        return to_page(f"# {self.machine['device']}", self.tables(), lines, self.command)


def to_page(head: str, grids: Iterable[Grid], lines: Iterable[str], command: str | None) -> str:
    """Render tables, lines below them and the command that reproduces them as a page of Markdown."""
    parts = [f"{head}\n", *(f"## {grid.title}\n\n{to_markdown(grid)}\n" for grid in grids)]
    parts += [f"- {escaped(line)}" for line in lines]
    if command is not None:
        parts.append(f"\nTo reproduce it:\n\n```bash\n{command}\n```")
    return "\n".join(parts) + "\n"


def _fields(row: Row | None, base: Row | None, layer: bool) -> list[Field]:
    """Return speed, slowdown, memory and its estimate; `None`: not measured."""
    if row is None or row.milliseconds is None:
        return [Field("-") if row is None else failure_field(row.failed)] * 4
    rate, ratio = row.tokens_per_second or 0.0, row.ratio
    if ratio is None and base is not None and base.milliseconds:  # not in alternation
        ratio = row.milliseconds / base.milliseconds
    speed = number(row.milliseconds, 3) if layer else number(rate, 3)
    if not layer and rate >= 100:
        speed = f"{rate:,.0f}"
    unit = 2 ** (20 if layer else 30)
    sizes = (row.peak_bytes, row.estimate_bytes)
    memory = ("-" if size is None else number(size / unit, 3) for size in sizes)
    return [Field(speed), Field("-" if ratio is None else f"{ratio:.2f}"), *map(Field, memory)]


def _checked(found: Comparison | None) -> Field:
    if found is None:
        return Field("-", "none")
    if found.reason:
        return Field("failed", "failed", hint=found.reason)
    return Field(f"{max(found.errors.values()):.1e}")
