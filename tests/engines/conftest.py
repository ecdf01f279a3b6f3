"""Saved models for the tests of the engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_posenc import patch_model
from tests.support import zoo


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that is not patched: 64 trained positions, heads of 16."""
    folder = tmp_path_factory.mktemp("llama")
    zoo.build("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, patched with a table that has no name anywhere else."""
    folder = tmp_path_factory.mktemp("patched")
    patch_model(zoo.build("llama"), "ntk_mixed", scale=4).save_pretrained(folder)
    return folder
