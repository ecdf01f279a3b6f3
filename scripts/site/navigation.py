"""Navigation: an entry with `*` stands for the pages of a folder that no other entry names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

METHODS = "methods/*.md"


def expand(nav: list[Any], docs: Path) -> list[Any]:
    """Return the navigation with every pattern replaced by the pages that match, sorted by name.

    The pages of the methods are grouped and sorted as the registry is. A section without pages is left out.
    """
    return _expand(nav, docs, set(pages_of(nav)))


def pages_of(entry: Any) -> list[str]:
    """Return the pages of a navigation, or of a part of it, in order."""
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in pages_of(child)]


def _expand(entries: list[Any], docs: Path, named: set[str]) -> list[Any]:
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            found = [path.relative_to(docs).as_posix() for path in sorted(docs.glob(entry))]
            pages = [page for page in found if page not in named]
            result += _methods(pages) if entry == METHODS else pages
        elif isinstance(entry, dict) and isinstance(next(iter(entry.values())), list):
            ((title, children),) = entry.items()
            if pages := _expand(children, docs, named):
                result.append({title: pages})
        else:
            result.append(entry)
    return result


def _methods(pages: list[str]) -> list[Any]:
    """Return the pages of methods by kind; a page that is of no method comes first."""
    from hf_posenc.cli.inspection import kinds

    result: list[Any] = []
    left = dict.fromkeys(pages)
    for title, methods in kinds().items():
        names = [f"methods/{method.name}.md" for method in methods]
        if group := [{Path(name).stem: name} for name in names if name in left]:
            result.append({title.partition(":")[0]: group})
            for name in names:
                left.pop(name, None)
    return [*left, *result]
