"""The figures by position and of paired ratios: what is drawn, and where."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import plots
from hf_posenc.evaluation.plots import MAX_LABEL, SPAN, position_points, thinned

mpl = pytest.importorskip("matplotlib")

LENGTHS = (128, 256, 512)


@dataclasses.dataclass
class Shown:
    """The attributes that a figure needs, and nothing else."""

    candidates: list[Any]
    cells: Mapping[tuple[str, int], Any]
    curve: dict[str, Any] | None = None
    original: int | None = 256
    settings: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(
            lengths=LENGTHS, protocols=("prefix", "tail"), tail_tokens=64
        )
    )

    def cell(self, method: str, protocol: str, length: int, /) -> Any:
        assert protocol in self.settings.protocols
        return self.cells.get((method, length))


def example() -> Any:
    names = {"none": None, "yarn": "yarn", "pi": "pi"}
    ratios = {"none": (1.0, 1.0, 1.0), "yarn": (1.1, 1.0, 0.5), "pi": (1.2, 1.1, math.nan)}
    cells = {
        (name, length): SimpleNamespace(
            length=length,
            perplexity=10 * ratio,
            interval=(9 * ratio, 11 * ratio),
            ratio=ratio,
            ratio_interval=(1.0, 1.0) if name == "none" else (ratio * 0.9, ratio * 1.2),
        )
        for name, row in ratios.items()
        for length, ratio in zip(LENGTHS, row, strict=True)
    }
    curve = {
        "edges": list(range(0, 513, 8)),
        "methods": {
            name: {"nats": [8 * math.log(10 * (place + 1))] * 64, "tokens": [8] * 64}
            for place, name in enumerate(names)
        },
    }
    candidates = [SimpleNamespace(label=label, method=method) for label, method in names.items()]
    return Shown(candidates, cells, curve)


def lines(panel: Any) -> dict[str, Any]:
    return {str(line.get_label()): line for line in panel.get_lines()}


def test_ratios_stand_at_their_lengths_with_their_intervals_and_the_baseline_at_one() -> None:
    (panel,) = plots.figure(example(), ["tail"]).axes
    assert list(lines(panel)["yarn"].get_ydata()) == [11.0, 10.0, 5.0]
    (panel,) = plots.ratio_figure(example(), "tail").axes
    named = lines(panel)
    assert "none" not in named
    assert list(named["yarn"].get_ydata()) == [1.1, 1.0, 0.5]
    assert list(named["pi"].get_ydata()) == [1.2, 1.1]  # nan is no point
    places = list(named["yarn"].get_xdata())
    assert places == pytest.approx(LENGTHS, rel=0.1)
    assert all(map(operator.ne, places, named["pi"].get_xdata()))
    assert any(list(line.get_ydata()) == [1.0, 1.0] for line in lines(panel).values())
    drawn_intervals = [
        (segment[0][1], segment[1][1])
        for collection in panel.collections
        for segment in getattr(collection, "get_segments")()  # noqa: B009
    ]
    for interval in [(1.1 * 0.9, 1.1 * 1.2), (0.9, 1.2), (0.45, 0.6), (1.2 * 0.9, 1.2 * 1.2)]:
        assert any(interval == pytest.approx((float(a), float(b))) for a, b in drawn_intervals)
    single = plots.ratio_figure(example(), "prefix").axes
    assert len(single) == 1
    assert list(lines(single[0])["yarn"].get_ydata()) == [1.1, 1.0, 0.5]


def test_the_figure_by_position_marks_the_trained_length() -> None:
    panel = plots.position_figure(example()).axes[0]
    named = lines(panel)
    for place, name in enumerate(("none", "yarn", "pi")):
        values = list(named[name].get_ydata())
        assert values == pytest.approx([10 * (place + 1)] * len(values))
    assert panel.get_xscale() == "log"
    marks = [line for label, line in named.items() if label.startswith("_")]
    assert [list(line.get_xdata()) for line in marks] == [[256, 256]]
    assert "trained length" in {text.get_text() for text in panel.texts}
    assert {"64", "256", "512"} <= {text.get_text() for text in panel.get_xticklabels()}
    unknown = example()
    unknown.original = None
    assert not [label for label in lines(plots.position_figure(unknown).axes[0]) if label[0] == "_"]


def test_buckets_are_pooled_to_even_steps_and_no_token_is_lost() -> None:
    edges = list(range(0, 4097, 8))
    counts = [3] * 511 + [1]
    nats = [count * math.log(20.0 + index) for index, count in enumerate(counts)]

    def pooled(sums: list[float]) -> Any:
        methods = {"m": {"nats": sums, "tokens": counts}}
        return position_points({"edges": edges, "methods": methods}, "m")

    points = pooled(nats)
    places = [place for place, _ in points]
    assert places == sorted(places)
    assert max([b / a for a, b in itertools.pairwise(places[8:-1])]) < SPAN * 1.35
    assert len(points) < 70
    assert points[0] == pytest.approx((4.0, 20.0))
    last = [value for _, value in points][-1]
    assert 20 + 440 < last < 20 + 511
    same = pooled([math.log(7.0) * count for count in counts])
    assert [value for _, value in same] == pytest.approx([7.0] * len(same))
    assert position_points({"edges": edges, "methods": {}}, "m") == []


def test_what_is_not_finite_or_empty_leaves_a_gap() -> None:
    nats: list[Any] = [10.0, None, 0.0, math.inf, 8.0, 8000.0]
    sums = {"nats": nats, "tokens": [10, 10, 0, 10, 10, 10]}
    curve = {"edges": [0, 8, 16, 32, 64, 128, 256], "methods": {"m": sums}}
    assert [place for place, _ in position_points(curve, "m")] == [4.0, 96.0]


def test_without_a_curve_the_figure_says_what_to_measure() -> None:
    for curve in (None, {"edges": [0, 8], "methods": {}}):
        shown = example()
        shown.curve = curve
        with pytest.raises(PosencError, match="--protocol prefix"):
            plots.position_figure(shown)


def test_many_lengths_have_few_ticks_and_long_names_leave_room() -> None:
    assert thinned([1, 2, 4]) == [1, 2, 4]
    many = [2048 * step for step in range(1, 65)]
    ticks = thinned(many)
    assert ticks[-1] == many[-1]
    assert 4 <= len(ticks) <= 9
    assert set(ticks) <= set(many)
    shown, cells = example(), dict(example().cells)
    shown.candidates[1].label = "x" * 100
    shown.cells = cells | {("x" * 100, n): cells["yarn", n] for n in LENGTHS}
    figure = plots.figure(shown)
    names = {text.get_text() for text in figure.axes[-1].get_legend().get_texts()}  # type: ignore[union-attr]
    assert names == {"none", "pi", "x" * (MAX_LABEL - 1) + "…"}


@pytest.mark.parametrize(("low", "high"), [(9.0, 10.5), (1.0, 1.001), (99.0, 101.0), (3.0, 900.0)])
def test_an_axis_has_enough_ticks_and_not_too_many(low: float, high: float) -> None:
    with plots.styled_panels(3, 3) as (_, (panel,)):
        panel.set_ylim(low, high)
        plots.value_axis(panel)
        ticks = [value for value in panel.get_yticks() if low <= value <= high]
    assert 3 <= len(ticks) <= 8
    assert len({f"{value:g}" for value in ticks}) == len(ticks)  # as the axis writes them
