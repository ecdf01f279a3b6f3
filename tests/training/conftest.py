"""Fixtures of the tests of training."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are written without plots, which take longer than the rest of a tiny training."""
    monkeypatch.setattr("hf_posenc.training.result.available", lambda: False)
