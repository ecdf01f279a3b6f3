"""Settings of the tests of the command line."""

from __future__ import annotations

import functools
from typing import Any

import typer.testing

# Once for all tests: making the commands from their functions takes longer than most of them run.
_testing: Any = typer.testing
_testing._get_command = functools.cache(_testing._get_command)
