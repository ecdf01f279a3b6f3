"""The axis of perplexities: enough ticks, and not too many."""

from __future__ import annotations

import pytest

from hf_posenc.evaluation import plots

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("low", "high"), [(9.0, 10.5), (1.0, 1.001), (99.0, 101.0), (3.0, 900.0)])
def test_an_axis_has_enough_ticks_and_not_too_many(low: float, high: float) -> None:
    with plots.styled_panels(3, 3) as (_, (panel,)):
        panel.set_ylim(low, high)
        plots.value_axis(panel)
        ticks = [value for value in panel.get_yticks() if low <= value <= high]
    assert 3 <= len(ticks) <= 8
    assert len({f"{value:g}" for value in ticks}) == len(ticks)  # as the axis writes them
