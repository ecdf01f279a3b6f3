"""Commands in the test's own process."""

from __future__ import annotations

import functools
from typing import Any

import typer.testing

from hf_posenc.cli.app import app

# Once for all tests: making the commands from their functions takes longer than most of them run.
_testing: Any = typer.testing
_testing._get_command = functools.cache(_testing._get_command)


def invoke(*arguments: object, columns: int = 160) -> Any:
    """The result of a command; what it does not expect fails the test with its own traceback."""
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    words = [str(argument) for argument in arguments]
    return _testing.CliRunner().invoke(app, words, env=environment, catch_exceptions=False)


def succeeded(*arguments: object, columns: int = 160) -> Any:
    """The result of a command whose exit status is 0."""
    result = invoke(*arguments, columns=columns)
    assert result.exit_code == 0, result.output
    return result


def said(*arguments: object) -> str:
    """The output of a command that succeeds, on one line."""
    return " ".join(succeeded(*arguments).stdout.split())


def refused(*arguments: object) -> str:
    """The one line of a command that must be refused, warnings aside."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, result.output
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.output
    return str(lines[0])
