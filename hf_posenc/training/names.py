"""Names that may be published: of models, files and documents, without the way to them on somebody's machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.result import PerplexityResult


def shown_name(name: str) -> str:
    """A hub name or any other text as it is, a folder or a file of one's own by its last part."""
    path = Path(name)
    own = path.is_absolute() or path.is_dir() or name.startswith((".", "~"))
    return path.expanduser().resolve().name if own else name


def without_ways(value: Any) -> Any:
    """JSON-ready values with `shown_name` in the place of every text."""
    if isinstance(value, Mapping):
        return {key: without_ways(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_ways(inner) for inner in value]
    return shown_name(str(value)) if isinstance(value, str | Path) else value


def published(scores: PerplexityResult) -> PerplexityResult:
    """Scores whose documents lose the folders that all of them are in."""
    known = [str(document["name"]) for document in scores.documents]
    names = _below_common(known + [skipped.name for skipped in scores.skipped])
    return dataclasses.replace(
        scores,
        model={**scores.model, "name": shown_name(str(scores.model["name"]))},
        documents=[{**each, "name": names[each["name"]]} for each in scores.documents],
        skipped=[dataclasses.replace(each, name=names[each.name]) for each in scores.skipped],
        records=[
            dataclasses.replace(each, document=names[each.document]) for each in scores.records
        ],
    )


def _below_common(names: Iterable[str]) -> dict[str, str]:
    """Each name, and a path below the last folder that all absolute paths share: still no two the same."""
    names = list(names)
    own = [name for name in names if Path(name).is_absolute()]
    common = os.path.commonpath([str(Path(name).parent) for name in own]) if own else ""
    return {name: str(Path(name).relative_to(common)) if name in own else name for name in names}
