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
