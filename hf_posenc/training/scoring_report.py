"""What a training says of its scores: the tables, and one sentence before them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from hf_posenc.evaluation.report import notes, number, reading_guide, table
from hf_posenc.evaluation.result import PerplexityResult
from hf_posenc.training.stages import before_and_after, stages_of


def conclusion(scores: PerplexityResult) -> str:
    """What the training did, at the longest length and at the one that the model came with.

    Args:
        scores: The rows of `Scores`.

    Returns:
        One line, such as `tail perplexity at 1,024 tokens: 160.9 unpatched, 9.87 patched, 9.05 after 48 steps; ...`.
    """
    shown = before_and_after(scores)
    protocol, lengths = shown.settings.protocols[-1], shown.settings.lengths
    short = shown.original if shown.original in lengths else lengths[0]
    assert short is not None
    said = [
        f"at {length:,} tokens: {', '.join(_numbers(shown, protocol, length))}"
        for length in dict.fromkeys((lengths[-1], short))
    ]
    return f"{protocol} perplexity {'; '.join(said)}"


def _numbers(scores: PerplexityResult, protocol: str, length: int) -> Iterator[str]:
    for stage, row in zip(stages_of(scores), scores.candidates, strict=True):
        name = "unpatched" if row.method is None else "patched"
        if stage.step:
            name = f"after {stage.step:,} step{'s' * (stage.step > 1)}"
        cell = scores.cell(row.label, protocol, length)
        yield f"{number(None if cell is None else cell.perplexity)} {name}"


def report(scores: PerplexityResult) -> Iterator[Table | str]:
    """The tables before and after, and what a reader must know beside them, in the order in which they are printed."""
    shown = before_and_after(scores)
    for protocol in shown.settings.protocols:
        yield table(shown, protocol)
    yield from notes(shown)
    yield from reading_guide(shown)
    yield conclusion(shown)
