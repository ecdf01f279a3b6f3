"""Fills the generated parts of README.md: the demo's table and the table of methods.

python scripts/make_readme.py            write them
python scripts/make_readme.py --check    fail where they are not what they should be
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_posenc.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DEMO = ROOT / "docs" / "demo"


def demo() -> str:
    """The tail perplexities of the committed demo run, and its plot."""
    result: dict[str, Any] = json.loads((DEMO / "perplexity.json").read_text(encoding="utf-8"))
    lengths = result["settings"]["lengths"]
    cells = {(c["method"], c["protocol"], c["length"]): c for c in result["summary"]}
    rows = [
        [label, *(_number(cells.get((label, "tail", length))) for length in lengths)]
        for label in (method["label"] for method in result["methods"])
    ]
    original = result["original_max_position_embeddings"]
    documents = len(result["documents"])
    scored = cells[rows[0][0], "tail", lengths[0]]["tokens"]
    intro = (
        f"Perplexity of the same {scored:,} tokens (the ends of {documents} held-out modules) by the "
        f"length of the text\nread with them, for a Llama trained at {original} tokens; `auto` is a "
        f"scale of length / {original}:"
    )
    table = _table(["method", *(f"{length:,}" for length in lengths)], rows, right=True)
    verdict = _verdict(cells, [row[0] for row in rows], lengths)
    plot = "![Perplexity by length](docs/demo/perplexity.png)"
    versions = result["environment"]
    made = f"Measured with torch {versions['torch']}, transformers {versions['transformers']}"
    link = "[docs/demo/](docs/demo/) has the intervals and every setting"
    return f"{intro}\n\n{table}\n\n{verdict}\n\n{plot}\n\n{made}; {link}."


def methods() -> str:
    """A row per method: what it computes, what it needs, where it was published."""
    rows = [
        [", ".join(f"`{name}`" for name in (m.name, *m.aliases)), m.summary, m.needs, m.source]
        for m in METHODS
    ]
    return _table(["method", "what it does", "needs", "source"], rows)


def _verdict(cells: dict[Any, dict[str, Any]], labels: list[str], lengths: list[int]) -> str:
    """Each method's ratio to the unpatched model at the length it was trained at, the best first."""
    original = lengths[0]
    baseline = cells["none", "tail", original]["perplexity"]
    lines = [f"As multiples of {baseline:.2f}, the unpatched model's at its trained length:", ""]
    for length in (lengths[2], lengths[-1]):
        ratios = {label: cells[label, "tail", length]["perplexity"] / baseline for label in labels}
        ranked = sorted(labels, key=lambda label: ratios[label])
        said = ", ".join(f"{label} {ratios[label]:.2g}" for label in ranked)
        lines.append(f"- at {length:,} tokens, {length // original} times as many: {said}.")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {"demo": demo, "methods": methods}


def filled(text: str) -> str:
    """README.md with its generated parts made anew."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"README.md has {count} parts named {name!r}, not 1.")
    return text


def _number(cell: dict[str, Any] | None) -> str:
    return "-" if cell is None else f"{cell['perplexity']:.2f}"


def _table(header: list[str], rows: list[list[str]], *, right: bool = False) -> str:
    rule = ["---", *(["---:" if right else "---"] * (len(header) - 1))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8")
    after = filled(before)
    if "--check" in sys.argv[1:]:
        sys.exit(
            0 if before == after else "README.md is not up to date: run scripts/make_readme.py."
        )
    README.write_text(after, encoding="utf-8")
