"""How far published tables saw a method go without any training: read from the tables, not typed in here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_posenc.evaluation import published
from hf_posenc.evaluation.published import PublishedTable, Row, Value

TOLERANCE = 1.25
"""A method holds while its perplexity is at most so many times the unpatched model's at the trained length.

Our choice: the tables fall in two, a few per cent above and many times as much, and this is between the two.
"""

UNTRAINED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "pi": (
        ("pose-t6-govreport", "LLaMA-7B", "linear, no fine-tuning (16k)"),
        ("pose-t6-proof-pile", "LLaMA-7B", "linear, no fine-tuning (16k)"),
        ("ntk-exllama-118", "tulu-30B-GPTQ", "linear factor 4"),
    ),
    "ntk": (
        ("pose-t6-govreport", "LLaMA-7B", "NTK, no fine-tuning (16k)"),
        ("pose-t6-proof-pile", "LLaMA-7B", "NTK, no fine-tuning (16k)"),
        ("rerope-readme", "Llama-2-13b", "NTK-RoPE (not dynamic)"),
        ("ntk-exllama-118", "tulu-30B-GPTQ", "NTK alpha=4"),
    ),
    "yarn": (
        ("pose-t6-govreport", "LLaMA-7B", "YaRN, no fine-tuning (16k)"),
        ("pose-t6-proof-pile", "LLaMA-7B", "YaRN, no fine-tuning (16k)"),
    ),
    "dynamic_pi": (("dca-t1-pg19", "Llama-2-7b", "linear (PI), dynamic factor"),),
    "dynamic_ntk": (
        ("dca-t1-pg19", "Llama-2-7b", "NTK, dynamic factor"),
        ("ntk-chinese-llama-705", "Chinese-LLaMA-Plus-7B", "adaptive NTK"),
    ),
    "rerope": (
        ("rerope-readme", "Llama-2-13b", "ReRoPE w=1024"),
        ("dca-t1-pg19", "Llama-2-7b", "ReRoPE"),
    ),
    "dual_chunk": (
        ("dca-t1-pg19", "Llama-2-7b", "DCA (ChunkLlama)"),
        ("dca-readme-llama3", "Llama-3-8b", "DCA"),
        ("dca-readme-llama3", "Llama-3-70b", "DCA"),
    ),
}
"""For each method the table, model and row that show it on a model that was not trained for it."""


@dataclass(frozen=True)
class Seen:
    """What one published row shows of a method.

    Attributes:
        table: The table's id.
        model: The model, in the table's words.
        held: The largest multiple of the trained length at which it held; 0: not even there.
        broke: The first multiple at which it did not; `None`: nowhere in the table.
    """

    table: str
    model: str
    held: float
    broke: float | None


def seen(method: str) -> tuple[Seen, ...]:
    """What the published tables show of a method without training; empty where they show nothing."""
    return tuple(_seen(*place) for place in UNTRAINED.get(method, ()))


def verdict(shown: Sequence[Seen], factor: float) -> int:
    """1 where a table saw it hold at this multiple and none saw it break by then, -1 where one did, else 0."""
    if any(one.broke is not None and one.broke <= factor for one in shown):
        return -1
    return int(any(one.held >= factor for one in shown))


def sentence(shown: Sequence[Seen]) -> str:
    """What they show, in a few words; empty where there are none."""
    parts = []
    best = max(shown, key=lambda one: one.held, default=None)
    if best is not None and best.held > 0:
        parts.append(f"held at x{best.held:g} ({best.table}, {best.model})")
    broken = [(one.broke, one) for one in shown if one.broke is not None]
    if broken:
        factor, one = min(broken, key=lambda pair: pair[0])
        parts.append(f"not at x{factor:g} ({one.table}, {one.model})")
    return f"published, untrained: {', '.join(parts)}" if parts else ""


def _seen(id: str, model: str, method: str) -> Seen:
    table = published.get(id)
    baseline = _row(table, model, "none")
    row = _row(table, model, method)
    points = list(_points(table, baseline))
    best = min(value for _, value in points)
    trained = max(length for length, value in points if value == best)
    held, broke = 0.0, None
    for length, value in _points(table, row):
        if length < trained:
            continue
        if value > TOLERANCE * best:
            broke = length / trained
            break
        held = length / trained
    return Seen(id, model, held, broke)


def _row(table: PublishedTable, model: str, method: str) -> Row:
    return next(row for row in table.rows if (row.model, row.method) == (model, method))


def _points(table: PublishedTable, row: Row) -> Iterator[tuple[int, float]]:
    """The lengths with a perplexity; a bound counts as infinite, and `OOM` says nothing of the method."""
    for column, value in zip(table.columns, row.values, strict=True):
        known = _perplexity(table, value)
        if known is not None:
            yield int(column), known


def _perplexity(table: PublishedTable, value: Value) -> float | None:
    if isinstance(value, str):
        return math.inf if value.startswith(">") else None
    return math.exp(value) if table.metric == "loss" and value is not None else value
