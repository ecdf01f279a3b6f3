"""What stands behind the numbers: settings, methods, documents, what was left out, failures, commands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.page.collect import Source

# Each has a place of its own in the page.
_ELSEWHERE = frozenset(
    {
        *("kind", "format", "command", "summary", "records", "curve", "documents", "skipped"),
        *("failures", "methods", "protocols", "perplexity", "retrieval", "speed", "by_depth"),
        *("scores", "tasks", "recipe", "rungs", "steps", "remarks"),
    }
)
HASH = 12
"""Digits of a hash that are shown; all of them stand in its tooltip, and in the JSON."""
_HASH = re.compile(r"[0-9a-f]{40,}")
_FORWARDS = ("one for each length", "one for all lengths")


@dataclass(frozen=True)
class Setting:
    """One setting: its value in every result.

    Attributes:
        name: Where it stands in the results, e.g. `model.dtype`.
        values: As text, per result; `""` where a result does not have it.
        differs: Whether the results that have it disagree.
        same: The value that all have that have any, at least two of them; `""` otherwise.
    """

    name: str
    values: Sequence[str]
    differs: bool
    same: str


@dataclass(frozen=True)
class Failed:
    """Numbers that could not be measured, for one reason."""

    run: int
    method: str
    where: str
    reason: str


def settings(sources: Sequence[Source]) -> list[Setting]:
    """Everything that determines the numbers, one row per setting and one column per result."""
    tables = [_flat(source.data) for source in sources]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = []
    for name in names:
        values = [table.get(name, "") for table in tables]
        known = set(filter(None, values))
        shared = len(known) == 1 and sum(map(bool, values)) > 1
        rows.append(Setting(name, values, len(known) > 1, next(iter(known)) if shared else ""))
    return rows


def _flat(data: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested values under dotted names; lists of plain values joined, lists of anything else left out."""
    flat: dict[str, str] = {}
    for key, value in data.items():
        name = f"{above}{key}"
        if not above and key in _ELSEWHERE:
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif isinstance(value, list):
            if not any(isinstance(entry, dict | list) for entry in value):
                flat[name] = ", ".join(map(_said, value)) or "none"
        else:
            flat[name] = _said(value)
    return flat


def _said(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def shortened(value: str) -> str:
    """A hash by its first digits, anything else whole."""
    return f"{value[:HASH]}…" if _HASH.fullmatch(value) else value


def methods(sources: Sequence[Source]) -> list[tuple[Source, list[dict[str, str]]]]:
    """What each result compares: the entry of `--patch`, the scale in force, how the prefix was made."""
    tables = []
    for source in sources:
        rows = []
        for method in source.data.get("methods", ()):
            if not isinstance(method, dict):
                continue
            shared = method.get("prefix_from_one_forward")
            rows.append(
                {
                    "label": str(method.get("label", "")),
                    "spec": str(method.get("spec", "")),
                    "scale": _scale(method),
                    "prefix": "-" if shared is None else _FORWARDS[bool(shared)],
                }
            )
        if rows:
            tables.append((source, rows))
    return tables


def _scale(method: Mapping[str, Any]) -> str:
    scale = method.get("scale")
    if scale is None and method.get("auto_scale"):
        return f"length / {method['original']:,}, at least 1" if method.get("original") else "auto"
    return "-" if scale is None else f"{scale:g}"


def failures(sources: Sequence[Source]) -> list[Failed]:
    """What has no number and why, the same reason once with all its lengths."""
    reasons: dict[tuple[int, str, str, str], list[int]] = {}
    for source in sources:
        for failure in source.data.get("failures", ()):
            what = str(failure.get("protocol") or failure.get("task") or "")
            key = (source.number, str(failure.get("method", "")), what, str(failure.get("reason")))
            reasons.setdefault(key, []).append(failure.get("length"))
        for cell in source.data["summary"] if source.kind == "perplexity" else ():
            if cell["nats"] is None:
                key = (source.number, cell["method"], cell["protocol"], "the loss is not finite")
                reasons.setdefault(key, []).append(cell["length"])
        for row in source.data["summary"] if source.kind in ("sweep", "search") else ():
            if row["failed"] is not None:
                target = source.data["settings"]["target"]
                reasons.setdefault((source.number, row["label"], "tail", row["failed"]), []).append(
                    target
                )
    return [
        Failed(run, method, f"{what} at {_listed(lengths)}" if what else _listed(lengths), reason)
        for (run, method, what, reason), lengths in reasons.items()
    ]


def _listed(lengths: Sequence[int | None]) -> str:
    return ", ".join(f"{length:,}" for length in sorted(n for n in lengths if n is not None))


def listed(sources: Sequence[Source], name: str) -> list[tuple[Source, list[dict[str, Any]]]]:
    """The documents, or what was skipped, of each result that has any."""
    return [(source, source.data[name]) for source in sources if source.data.get(name)]


def commands(sources: Sequence[Source]) -> list[tuple[Source, str]]:
    """How each result was made, where it says so; the parts of a benchmark were made by its command."""
    made: dict[int, tuple[Source, str]] = {}
    for source in sources:
        if source.data.get("command"):
            made.setdefault(source.number, (source, str(source.data["command"])))
    return list(made.values())
