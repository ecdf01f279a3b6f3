"""Which methods an engine can have, found out by exporting every one of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.engines.exporting import export_source, find_engine
from hf_posenc.engines.source import Source, open_plain
from hf_posenc.errors import PosencError
from hf_posenc.methods import METHODS, LengthDependent, Method

_SCALE = 4.0


@dataclass(frozen=True)
class Expressed:
    """What an engine makes of one method.

    Attributes:
        method: Its name, with the options that were tried.
        form: How the engine is told; `None` where it cannot be.
        reason: Why it cannot be; empty where it can.
    """

    method: str
    form: str | None
    reason: str


def survey(directory: str | Path, engine: str) -> tuple[Expressed, ...]:
    """Tries every method on a model's config.

    Args:
        directory: A saved model: a folder or a hub name. A patch of its own is left out.
        engine: One of `ENGINES`.

    Raises:
        PosencError: An unknown engine, or no config.
    """
    find_engine(engine)
    plain = open_plain(directory)
    pairs = max((entry.dim // 2 for entry in plain.tables), default=1)
    return tuple(_tried(kind, directory, engine, pairs) for kind in METHODS)


def _tried(kind: type[Method], directory: str | Path, engine: str, pairs: int) -> Expressed:
    options = _options(kind, pairs)
    shown = {key: value for key, value in options.items() if isinstance(value, str)}
    name = ", ".join([kind.name, *(f"{key}={value}" for key, value in shown.items())])
    source: Source | None = None
    reason = ""
    for beside in ({}, {"replace": True}):  # a checkpoint that is scaled already
        try:
            source = open_plain(directory, kind.name, **options, **beside)
            break
        except PosencError as error:
            reason = " ".join(str(error).split())
    if source is None:
        return Expressed(name, None, reason)
    found = export_source(source, engine)
    return Expressed(name, found.form, found.reason)


def _options(kind: type[Method], pairs: int) -> dict[str, Any]:
    """Values for the knobs that have none, a scale, and the update mode that other engines could have."""
    missing = [k for k, default in kind.knobs().items() if default is dataclasses.MISSING]
    options: dict[str, Any] = {knob: 1e6 for knob in missing if knob == "rope_theta"}
    options |= {
        knob: [1.0 + step / pairs for step in range(pairs)] for knob in missing if "_factor" in knob
    }
    if options.get("long_factor"):
        options["long_factor"] = [2 * value for value in options["long_factor"]]
    if kind.takes_scale():
        options["scale"] = _SCALE
    if issubclass(kind, LengthDependent):
        options["update"] = "sequence"
    return options
