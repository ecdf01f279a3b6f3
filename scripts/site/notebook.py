"""The notebook as a page: its text, code and committed outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NOTEBOOK, PAGE = "notebooks/quickstart.ipynb", "notebook.md"
"""The file in docs/, and the page of the site."""


def page(docs: Path) -> str:
    """Return the notebook as Markdown."""
    cells = json.loads((docs / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell)) + "\n"


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            picture = "".join(data["image/png"]).replace("\n", "")
            yield f'<img alt="The plot that this cell draws" src="data:image/png;base64,{picture}">'
        elif "text/html" in data:
            yield f'<div class="output">\n{"".join(data["text/html"])}\n</div>'
        elif "text/plain" in data:
            yield _printed("".join(data["text/plain"]))
    printed = "".join(text for output in cell["outputs"] for text in output.get("text", ()))
    if printed:
        yield _printed(printed)


def _printed(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
