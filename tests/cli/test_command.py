"""Option classes become commands: names, defaults, parsers, and what is not given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.testing import CliRunner

from hf_posenc.cli.app import app as main_app
from hf_posenc.cli.app import expand
from hf_posenc.evaluation.options import MODEL, help_texts, option, parse_lengths
from hf_posenc.lengths import even_depths

RUNNER = CliRunner()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Some options.

    Attributes:
        methods: Methods, whose text is
            on two lines.
        lengths: Lengths.
        depths: Depths.
        short: Short.
        count: A number.
        replace: Replace.
    """

    methods: Sequence[str] | None = option(name="patch")
    lengths: Sequence[int] | None = option(parse=parse_lengths)
    depths: Sequence[float] = option((0.0,), parse=even_depths, kind=int, value=3)
    short: bool = option(False, value=True)
    count: int = option(4, panel=MODEL)
    replace: bool = option(False)
    python_only: int = 7


@dataclass(frozen=True, kw_only=True)
class Other:
    """A name.

    Attributes:
        name: A name.
    """

    name: str | None = option(argument=True)


class Nearer(Options):
    """Other options.

    Attributes:
        count: Another number.
    """


def test_a_help_text_is_that_of_the_nearest_class() -> None:
    texts = help_texts(Nearer)
    assert texts["methods"] == "Methods, whose text is on two lines."
    assert (texts["count"], texts["short"]) == ("Another number.", "Short.")


def test_every_option_has_a_help_text() -> None:
    for command in typer.main.get_group(main_app).commands.values():
        for parameter in command.params:
            assert getattr(parameter, "help", ""), (command.name, parameter.name)


def invoke(*arguments: str) -> tuple[Any, list[Any]]:
    seen: list[Any] = []

    def command(options: Options, other: Other) -> None:
        """Do something."""
        seen.extend((options, other))

    app = typer.Typer()
    app.command()(expand(command))
    return RUNNER.invoke(app, list(arguments)), seen


def test_values_are_parsed_into_their_classes() -> None:
    result, (options, other) = invoke()
    assert result.exit_code == 0, result.output
    assert (options, other) == (Options(depths=(0.0, 0.5, 1.0), short=True), Other())
    arguments = "--patch a --patch b --lengths 1k,64 --depths 2 --no-short --count 5 --replace x"
    result, (options, other) = invoke(*arguments.split())
    assert result.exit_code == 0, result.output
    given: dict[str, Any] = {"methods": ["a", "b"], "lengths": (64, 1024), "depths": (0.0, 1.0)}
    assert options == Options(**given, count=5, replace=True)
    assert (other.name, options.python_only) == ("x", 7)


def test_refused_values_and_unknown_options() -> None:
    for arguments in ("--count 0", "--no-replace", "--python-only 1", "--methods a"):
        assert invoke(*arguments.split())[0].exit_code == 2


def test_help_is_wrapped_to_the_terminal_and_nowhere_else() -> None:
    result = RUNNER.invoke(main_app, ["perplexity", "--help"], env={"COLUMNS": "100"})
    lines = [line.strip() for line in result.output.splitlines()]
    first = next(index for index, line in enumerate(lines) if line.startswith("Without arguments"))
    last = next(index for index in range(first, len(lines)) if not lines[index])
    assert all(len(line) > 70 for line in lines[first : last - 1])
