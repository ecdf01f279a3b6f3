"""Comparison of drawn pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

DIFFERENCE = 0.2
"""The mean difference of a channel, of 255, that another release of matplotlib or its fonts may make."""


def assert_same_picture(drawn: Path, committed: Path) -> None:
    """Assert that a committed picture is the one that a script draws."""
    from PIL import Image

    new, old = (np.asarray(Image.open(path).convert("RGB"), float) for path in (drawn, committed))
    again = f"{committed.name} is out of date: run its script"
    assert new.shape == old.shape, again
    assert np.abs(new - old).mean() < DIFFERENCE, again
