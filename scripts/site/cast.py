"""Record a terminal session and draw it as an animated picture: `python -m scripts.site.cast`.

It runs `SESSION` on the embedded model and writes docs/assets/cast.svg, which plays without a script, also on GitHub.
Waits are shortened. A reader who prefers less motion sees the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console
from rich.segment import Segment
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "assets" / "cast.svg"
PYTHON = """\
from transformers import AutoModelForCausalLM
from hf_posenc import get_patch, patch_model
from hf_posenc.embedded import model_path
model = AutoModelForCausalLM.from_pretrained(model_path())
model = patch_model(model, "yarn", scale=4)
print(get_patch(model))
"""
MEASURE = "hf-posenc perplexity --lengths 256,1k,2k --limit 6 --protocol tail"
PATCHES = "--patch none --patch truncation --patch yarn --patch rerope"
SESSION = (("python", PYTHON), ("shell", f"{MEASURE} {PATCHES}"))
COLUMNS, ROWS = 100, 30
TYPED, LINE, LONGEST, REST = 0.025, 0.04, 1.0, 5.0
"""Seconds for a typed character and a printed line; the longest wait; the time that the end stays."""
WIDTH, HEIGHT, MARGIN = 7.83, 19.0, 16.0
"""Pixels of a character of 13 pixels, and of a line; the margin."""
BACKGROUND, FOREGROUND, PROMPT = "#16181d", "#e6e6e6", "#7fd1b9"


@dataclass(frozen=True)
class Line:
    """A line of the terminal: when it begins to appear, how long it is typed, and its text."""

    begin: float
    typing: float
    text: Text


def main() -> None:
    """Run the session and write the picture."""
    lines: list[Line] = []
    clock = 0.5
    with tempfile.TemporaryDirectory() as folder:
        for kind, program in SESSION:
            prompt = ">>> " if kind == "python" else "$ "
            for command in program.splitlines():
                typing = TYPED * len(command)
                text = Text.assemble((prompt, PROMPT), (command, "bold"))
                for piece in text.wrap(Console(width=COLUMNS), COLUMNS):
                    lines.append(Line(clock, typing * len(piece) / len(text), piece))
                    clock += lines[-1].typing
                clock += LINE
            for wait, printed in record(kind, program, Path(folder)):
                clock += min(max(wait, LINE), LONGEST)
                lines.append(Line(clock, 0.0, printed))
            clock += 1.0
            lines.append(Line(clock, 0.0, Text("")))
    PICTURE.write_text(svg(lines, clock + REST), encoding="utf-8")


def record(kind: str, program: str, folder: Path) -> list[tuple[float, Text]]:
    """Run a program; return the lines that it prints, each with the seconds since the one before."""
    call = ["-c", program]
    if kind == "shell":
        words = program.split()[1:]
        call = ["-c", "from hf_posenc.cli import main; main()", *words, "--output", "out"]
    environ = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    printed, before = [], time.perf_counter()
    # Progress goes to stderr, which is not recorded.
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        [sys.executable, *call], text=True, cwd=folder, env=environ, **streams
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter()
            printed.append((now - before, Text.from_ansi(line.rstrip("\n"))))
            before = now
    if process.returncode:
        raise SystemExit(f"{program} failed with status {process.returncode}.")
    return printed


def svg(lines: list[Line], total: float) -> str:
    """Return the animation: each line appears at its time, and the text moves up where it is longer than the window.

    It begins with its end, so that a reader who only glances sees the result; it plays once and stays there.
    """
    start = f"{REST - total:.1f}s"
    rules, texts = [], []
    moves = [(0.0, 0.0)]
    for row, line in enumerate(lines):
        begin = 100 * line.begin / total
        end = 100 * (line.begin + line.typing) / total + 0.01
        hidden, shown = "clip-path:inset(0 100% 0 0)", "clip-path:inset(0 0 0 0)"
        steps = f"steps({max(1, len(line.text))})" if line.typing else "step-end"
        rules.append(
            f"@keyframes k{row}{{0%,{begin:.2f}%{{{hidden}}}{end:.2f}%,100%{{{shown}}}}}"
            f"#l{row}{{animation:k{row} {total:.1f}s {steps} {start} 2 forwards}}"
        )
        y = MARGIN + HEIGHT * (row + 0.75)
        texts.append(
            f'<text id="l{row}" x="{MARGIN}" y="{y:.1f}" xml:space="preserve">{spans(line.text)}</text>'
        )
        if row >= ROWS:
            moves.append((begin, -HEIGHT * (row + 1 - ROWS)))
    last = moves[-1][1]
    frames = "".join(f"{at:.2f}%{{transform:translateY({by:.0f}px)}}" for at, by in moves)
    rules.append(
        f"@keyframes up{{{frames}100%{{transform:translateY({last:.0f}px)}}}}"
        f"#all{{animation:up {total:.1f}s step-end {start} 2 forwards}}"
        "@media (prefers-reduced-motion:reduce){*{animation:none!important}"
        f"#all{{transform:translateY({last:.0f}px)}}}}"
    )
    width, height = 2 * MARGIN + COLUMNS * WIDTH, 2 * MARGIN + ROWS * HEIGHT
    style = (
        "text{font:13px ui-monospace,'SFMono-Regular',Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        f"fill:{FOREGROUND}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        'aria-label="A terminal: a model is patched in Python, then methods are compared on the command line.">\n'
        f"<style>{style}\n{chr(10).join(rules)}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}" stroke="#3a3f4b"/>\n'
        f'<clipPath id="window"><rect x="0" y="{MARGIN:.0f}" width="100%" height="{ROWS * HEIGHT:.0f}"/></clipPath>\n'
        f'<g clip-path="url(#window)"><g id="all">\n{chr(10).join(texts)}\n</g></g>\n</svg>\n'
    )


def spans(text: Text) -> str:
    """Return a line as spans with colours and weights."""
    console = Console(width=COLUMNS, color_system="truecolor", force_terminal=True)
    parts = []
    for segment in Segment.simplify(text.render(console)):
        if not segment.text.strip("\n"):
            continue
        style, given = segment.style, []
        if style is not None and style.color is not None and not style.color.is_default:
            red, green, blue = style.color.get_truecolor(DIMMED_MONOKAI)
            given.append(f"fill:#{red:02x}{green:02x}{blue:02x}")
        if style is not None and style.bold:
            given.append("font-weight:bold")
        if style is not None and style.dim:
            given.append("opacity:.65")
        content = escape(segment.text)
        parts.append(f'<tspan style="{";".join(given)}">{content}</tspan>' if given else content)
    return "".join(parts)


if __name__ == "__main__":
    main()
