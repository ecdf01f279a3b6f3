"""Settings and fixtures of the tests of the command line."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from tests.support.tiny_text import prose, tiny_checkpoint

# Once for all tests: making the commands from their functions takes longer than most of them run.
_testing: Any = typer.testing
_testing._get_command = functools.cache(_testing._get_command)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was trained at 64 tokens."""
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for index in range(5):
        (folder / f"{index}.txt").write_text(prose(300 + index, index))
    return folder
