"""Settings and fixtures of the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_text import text_files, tiny_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was trained at 64 tokens."""
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_files(tmp_path_factory.mktemp("texts"), 5, step=1)
