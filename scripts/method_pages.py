"""The generated parts of docs/methods/NAME.md, from the methods and the committed results, for scripts/make_readme.py.

A result that is not there yet leaves its line out, or says that nothing was measured.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas

from hf_posenc.embedded import model_path
from hf_posenc.engines import ENGINES, Expressed, survey
from hf_posenc.evaluation.grid import markdown_table, number, number_range
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, UNPATCHED
from hf_posenc.evaluation.measuring.statistics import VERDICTS, Cell
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.methods import METHODS, T5, Interpolate, LengthDependent, Method, TableFilter
from hf_posenc.methods.facts import facts, knob_rows
from hf_posenc.training.options import RECIPES, read_yaml
from scripts import evidence_page
from scripts.results import (
    BENCHMARKS,
    DATA,
    REAL_MODEL,
    SMALL_MODELS,
    at,
    passkeys,
    perplexity,
    read,
    summary,
    table,
    tails,
)

_NO_CONFIG = (
    "no config of another engine expresses it: `hf_posenc.from_pretrained`, and vLLM by [the "
    "plug-in](../vllm.md)"
)


def method_facts(method: type[Method]) -> str:
    """Return the table of facts, and that of the knobs."""
    rows = [*facts(method).items()]
    loads = loads_in(method)
    if issubclass(method, T5):
        loads = f'of a T5 model with `mode="max_distance"`: transformers. Else {loads}'
    if issubclass(method, Interpolate):
        loads = f'with `update="static"`: {loads}. Else `hf_posenc.from_pretrained`'
    rows.insert(-1, ("Saved model loads in", loads))
    table = markdown_table(["", ""], [[f"**{label}**", _cell(fact)] for label, fact in rows])
    knobs = [[f"`{k}`", _default(d), _cell(meaning)] for k, d, meaning in knob_rows(method)]
    return f"{table}\n\n{markdown_table(['knob', 'default', 'what it is'], knobs) if knobs else 'No knobs.'}"


def loads_in(method: type[Method]) -> str:
    """Return the engines that load a model saved with a method, as measured on the embedded model's config."""
    if method.kind == "tables":
        return "every engine that has the model, where the table is among its weights"
    if method.kind != "frequencies":
        return _NO_CONFIG
    engines = [engine for engine in ENGINES if expressed(engine)[method.name].form is not None]
    if not engines:
        return _NO_CONFIG
    return ", ".join(engines) + ' with update="sequence"' * ("update" in method.knobs())


def served() -> str:
    """Return the table of docs/vllm.md: who computes each method in vLLM."""
    own = [m for m in METHODS if m.kind == "frequencies" and expressed("vllm")[m.name].form]
    tables = [method for method in METHODS if method.kind == "tables"]
    rows = [
        ("vLLM itself from an exported folder, or the plug-in", own),
        ("vLLM itself, if the table is among the weights", tables),
        ("the plug-in alone", [m for m in METHODS if m not in (*own, *tables)]),
    ]
    return markdown_table(
        ["by", "methods"], [[by, ", ".join(f"`{m.name}`" for m in named)] for by, named in rows]
    )


GROUPS: dict[str, Callable[[type[Method]], bool]] = {
    "frequencies": lambda m: m.kind == "frequencies" and not issubclass(m, TableFilter),
    "filters": lambda m: issubclass(m, TableFilter),
    "query": lambda m: m.seam == "query",
    "bands": lambda m: m.kind == "bands",
    "biases": lambda m: m.kind == "biases",
    "others": lambda m: m.kind == "others" and m.seam != "query",
    "tables": lambda m: m.kind == "tables",
}
"""The groups of docs/methods.md, by what a method changes."""
COLUMNS = ("method", "year", "in one line", "needs", "cached", "short texts", "GPU", "served by")


def index(group: str) -> str:
    """Return a row for each method of a group: what a reader chooses by."""
    rows = [
        [
            *(f"[`{m.name}`](methods/{m.name}.md)", year(m), m.summary, m.needs, _cached(m)),
            *(_on_short_texts(m), _on_gpu(m), _servers(m)),
        ]
        for m in METHODS
        if GROUPS[group](m)
    ]
    return markdown_table(COLUMNS, rows)


def year(method: type[Method]) -> str:
    """Return the year of the first publication that a method names: as it is written, or that of an arXiv number."""
    found = re.search(r"\b(20\d\d)\b(?!\.)|\b(\d\d)\d\d\.\d{5}", method.source)
    assert found, f"{method.name} names no year"
    return found[1] or f"20{found[2]}"


def _cached(method: type[Method]) -> str:
    """Return whether a decode through a cache gives what one forward gives."""
    inexact = {"request": "from a request's length", "sequence": "no"}
    return inexact.get(str(method.knobs().get("update")), "exact")


def _on_short_texts(method: type[Method]) -> str:
    """Return the embedded model's perplexity at its trained length, by the unpatched model's."""
    result, cells = perplexity(file := BENCHMARKS / "methods.json"), tails(file)
    length = result.settings.lengths[0]
    alone = [label for label in _labels(result, method) if " + " not in label]
    plain = cells[result.candidates[0].label, length].perplexity
    return f"{cells[alone[0], length].perplexity / plain:.2f}" if alone else "-"


def _on_gpu(method: type[Method]) -> str:
    """Return the time of a prefill of one layer by plain attention's, with the fastest measured backend."""
    if GROUPS["frequencies"](method) and not issubclass(method, LengthDependent):
        return "1"
    if GROUPS["filters"](method) or method.kind == "tables":
        return "1"
    rows = evidence_page.prefill().query("method == @method.name")
    length = 32768 if 32768 in {*rows.length} else rows.length.max()  # at most; all methods at one
    return min(rows[rows.length == length].times, key=float, default="-")


def _servers(method: type[Method]) -> str:
    """Return who loads a saved model with a method, in few words."""
    if method.kind == "tables":
        return "all"
    engines = loads_in(method)
    if engines == _NO_CONFIG:
        return "vLLM's plug-in"
    every = engines.startswith(", ".join(ENGINES))
    return ("all" + engines.removeprefix(", ".join(ENGINES))) if every else engines


@functools.cache
def expressed(engine: str) -> dict[str, Expressed]:
    """Return the frequency methods in an engine, by name."""
    return {row.method.partition(",")[0]: row for row in survey(model_path(), engine)}


def measured(method: type[Method]) -> str:
    """Return the lines of what was measured: on the embedded model, and on a real one."""
    lines = [*_embedded(method), *_retrieval(method), *_finetuning(method), *_speed(method)]
    lines += _small_models(method)
    if not lines and method.kind == "tables":
        return (
            "- Not measured: this method needs a model with a table of positions. The embedded model and SmolLM2-135M "
            "rotate queries and keys."
        )
    lines = lines or ["**Embedded model**: not measured."]
    return "\n".join(f"- {line}" for line in [*lines, _real(method)])


def _embedded(method: type[Method]) -> Iterator[str]:
    """Tail perplexity at the trained length and at the longest, by the control's."""
    result, cells = perplexity(file := BENCHMARKS / "methods.json"), tails(file)
    if not (labels := _labels(result, method)):
        return
    short, long = result.settings.lengths[0], result.settings.lengths[-1]
    found = "; ".join(
        f"`{label}` {number(cells[label, short].perplexity)} and {_by_control(cells[label, long])}"
        for label in labels
    )
    plain = result.candidates[0].label
    before = " and ".join(number(cells[plain, length].perplexity) for length in (short, long))
    yield (
        f"**Embedded model** ({short} trained tokens), tail perplexity at {short} and {long:,} tokens: {found}; "
        f"unpatched {before}."
    )


def _retrieval(method: type[Method]) -> Iterator[str]:
    """Passkeys that are ranked first and that are answered, in the longest prompts of the embedded model."""
    longest, found = passkeys(BENCHMARKS / "retrieval.csv")
    control = found.loc[TRUNCATION]
    for keys in found.itertuples():
        if _of(keys.Index, method):
            yield (
                f"**Embedded model, passkeys** at {longest:,} tokens: {keys.ranked} of {keys.samples} ranked first "
                f"among {1 / keys.chance:.0f} candidates, {keys.answered or 'none'} answered "
                f"(truncation {control.ranked} and {control.answered or 'none'})."
            )


def _finetuning(method: type[Method]) -> Iterator[str]:
    """Tail perplexity before and after the fine-tuning of the embedded model."""
    result = read(BENCHMARKS / "finetuning.json")
    ways = {name: row for name, row in result["ways"].items() if _of(name, method)}
    for name in ([name for name in ways if name == method.name] or [*ways])[:1]:
        yield _trained(result["steps"], ways[name])  # of several, the plain way or the first
    result = read(BENCHMARKS / "conversions.json")
    for row in result["ways"].values():
        recipe = read_yaml("recipe", RECIPES / f"{row['options'][-1]}.yaml")
        if recipe["patch"] == method.name:
            yield _trained(result["steps"], row)


def _trained(steps: int, row: Mapping[str, Any]) -> str:
    """Return a line on perplexities at the longest length, before and after a training with one or several seeds."""
    before = row["before"]["tail"]
    longest = max(before, key=int)
    after = statistics.fmean(run["tail"][longest] for run in row["runs"])
    return (
        f"**Embedded model, fine-tuned**: {steps} steps bring the tail perplexity at {int(longest):,} tokens from "
        f"{number(before[longest])} to {number(after)} ([all ways](../finetuning.md))."
    )


def _speed(method: type[Method]) -> Iterator[str]:
    """Prefill of the embedded model by the unpatched one's, the median of paired rounds."""
    speed = read(BENCHMARKS / "bench.json")["speed"]
    for label in speed["methods"]:
        if _of(label, method):
            rounds = (each[label]["seconds"] / each["none"]["seconds"] for each in speed["rounds"])
            ratio = statistics.median(rounds)
            yield (
                f"**Embedded model, cost**: a prefill of {speed['length']:,} tokens takes {ratio:.2f} times as long as "
                f"unpatched ({speed['threads']} CPU thread)."
            )


def _small_models(method: type[Method]) -> Iterator[str]:
    """Perplexities of the embedded model trained on as another kind, at its trained length and the longest."""
    names = {"alibi": "ALiBi", "alibi_log": "ALiBi on logarithmic distances"}
    names["masked"] = "a masked model"
    kinds = {"alibi": ("alibi", "alibi_log"), "diffusion_ntk": ("masked",)}.get(method.name, ())
    results = read(SMALL_MODELS) if SMALL_MODELS.exists() else {}
    for kind in (kind for kind in kinds if kind in results):
        result = results[kind]
        cells = {(c["method"], c["length"]): c for c in result["cells"]}
        labels = dict.fromkeys(label for label, _ in cells if label != TRUNCATION)
        short, *_, long = dict.fromkeys(length for _, length in cells)
        found = []
        for label in labels:
            far = cells[label, long]
            ends = number_range(far["ends"])
            ratio = f"{number(far['ratio'])} times truncation's, {ends}"
            found.append(
                f"{label} {number(cells[label, short]['perplexity'])} and {number(far['perplexity'])} ({ratio})"
            )
        settings = result["settings"]
        tokens = settings["steps"] * settings["batch"] * settings["context"]
        yield (
            f"**Embedded model, trained on as {names[kind]}** for {tokens:,} tokens (`{result['command']}`), "
            f"perplexity of the same tokens at {short} and {long:,} tokens: {'; '.join(found)}."
        )


def _real(method: type[Method]) -> str:
    """Return what was measured on SmolLM2 as a table: perplexities and ratios to a control, and passkeys."""
    files = [*REAL_MODEL.glob("tail-*.json"), DATA / "evidence" / "smollm2-prose-cpu.json"]
    columns = {}
    for length, file in sorted((max(perplexity(f).settings.lengths), f) for f in files):
        records = perplexity(file).records
        control = TRUNCATION if any(r.method == TRUNCATION for r in records) else UNPATCHED
        head = f"tail of {length:,} tokens{' of prose' * ('prose' in file.name)}, / {control}"
        columns[head] = at(summary(records, control), "tail", length, "both")
    if (file := REAL_MODEL / "passkey.json").exists():
        longest, found = passkeys(file)
        counts = [f"{k.answered} of {k.samples} ({k.ranked} first)" for k in found.itertuples()]
        columns[f"passkeys in {longest:,}"] = pandas.Series(counts, found.index)
    every = dict.fromkeys(label for column in columns.values() for label in column.index)
    own = [label for label in every if _of(label, method)]
    if not own:
        return "**SmolLM2-135M**: not measured on it."
    rows = [*(label for label in every if label == TRUNCATION), *own]
    shown = {head: column for head, column in columns.items() if {*own} & {*column.index}}
    made = table({head: column.reindex(rows).dropna() for head, column in shown.items()})
    about = "perplexity, and its ratio to the control: bold if significant"
    return f"**SmolLM2-135M**, {about} ([all methods](../evidence.md)):\n\n{made}"


def _labels(result: PerplexityResult, method: type[Method]) -> list[str]:
    return [entry.label for entry in result.candidates if _of(entry.label, method)]


def _of(label: str, method: type[Method]) -> bool:
    """Return whether a label is of the method alone, or of a list that it ends."""
    *_, last = label.split(" + ")
    return re.split(r"[ ,]", last)[0] == method.name


def _by_control(cell: Cell) -> str:
    """Return a perplexity, and its ratio to truncation's with the interval and the verdict."""
    value = number(cell.perplexity)
    if cell.ratio is None or cell.ratio_interval is None:
        return value
    ends = number_range(cell.ratio_interval)
    return f"{value} ({number(cell.ratio)} times {TRUNCATION}'s, {ends}: {VERDICTS[cell.differs]})"


def _default(text: str) -> str:
    return text if text == "must be given" else f"`{text}`".replace("'", '"')


def _cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return text.replace("|", "\\|")
