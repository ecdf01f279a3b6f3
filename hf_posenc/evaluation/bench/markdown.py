"""A benchmark as Markdown, to be pasted into a pull request or a model card."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.bench.report import notes, published, table, task_table
from hf_posenc.evaluation.bench.result import BenchResult


def to_markdown(result: BenchResult) -> str:
    """The tables, what a reader must know, and the command that gives them again."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: BenchResult) -> Iterator[str]:
    measured = result.perplexity
    model, versions = measured.model, measured.environment
    yield f"# {model['name']}, suite {result.suite}"
    yield ""
    trained = f", trained at {measured.original:,} tokens" if measured.original else ""
    yield (
        f"{model['class']}, {model['parameters'] / 1e6:,.1f} M parameters{trained}; {model['dtype']} on "
        f"{model['device']}, {model['attention']} attention; hf-posenc {versions['hf-posenc']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}."
    )
    yield ""
    yield from table_lines(table(result))
    by_task = task_table(result)
    shown = [] if by_task is None else [by_task]
    for made in (*shown, *(made for _, made in published(result))):
        yield ""
        yield f"## {made.title}"
        yield ""
        yield from table_lines(made)
    yield ""
    for line in notes(result):
        yield f"- {_escaped(line)}"
    if measured.command is not None:
        yield ""
        yield "To do it again:"
        yield ""
        yield "```bash"
        yield measured.command
        yield "```"


def table_lines(made: Table) -> Iterator[str]:
    """A table of rich as one of Markdown: lines within a field are kept, the rest of its looks but bold is not."""
    heads = [_field(column.header) for column in made.columns]
    yield _row(heads)
    yield _row(["---:" if column.justify == "right" else "---" for column in made.columns])
    for fields in zip(*(column.cells for column in made.columns), strict=True):
        yield _row([_field(field) for field in fields])


def _row(fields: list[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _field(value: object) -> str:
    plain = value.plain if isinstance(value, Text) else str(value)
    first, *others = plain.split("\n")
    shown = _escaped(first)
    if isinstance(value, Text) and "bold" in str(value.style) and first:
        shown = f"**{shown}**"
    return "<br>".join((shown, *map(_escaped, others)))


def _escaped(text: str) -> str:
    """The same text, with nothing in it that Markdown would take for its own here (underscores stand within words)."""
    for letter in "\\*|<>`":
        text = text.replace(letter, f"\\{letter}")
    return text
