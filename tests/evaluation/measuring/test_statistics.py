"""Perplexities and their intervals from sums per document."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hf_posenc.evaluation.measuring.statistics import (
    FEW_DOCUMENTS,
    Interval,
    Record,
    _student,
    curve,
    edges,
    estimate,
    side_of_one,
    summarize,
)
from tests.support.selection import covering


def records(
    method: str, losses: list[tuple[float, int]], length: int = 64, size: int | None = 100
) -> list[Record]:
    return [
        Record(method, "tail", length, f"d{index}", nats, tokens, size, None, nats, tokens)
        for index, (nats, tokens) in enumerate(losses)
    ]


def test_perplexity_weighs_tokens_and_not_documents() -> None:
    (cell,) = summarize(records("none", [(300.0, 100), (10.0, 10)]))
    assert cell.perplexity == pytest.approx(math.exp(310 / 110))
    for mean_of_means in ((math.exp(3) + math.exp(1)) / 2, math.exp(2)):
        assert cell.perplexity != pytest.approx(mean_of_means)
    assert (cell.tokens, cell.bytes, cell.documents) == (110, 200, 2)
    assert cell.bits_per_byte == pytest.approx(310 / math.log(2) / 200)
    (cell,) = summarize(records("none", [(10.0, 5), (12.0, 5)], size=None))  # of unknown bytes
    assert (cell.bits_per_byte, cell.bytes) == (None, None)


def test_each_document_or_another_base_or_each_word() -> None:
    """A document without scored tokens has no part in a mean over documents."""
    rows = records("none", [(300.0, 100), (10.0, 10), (0.0, 0)])
    (cell,) = summarize(rows, aggregate="documents")
    assert cell.perplexity == pytest.approx(math.exp((3 + 1) / 2))
    assert cell.documents == 2
    assert cell.word_perplexity is None
    (cell,) = summarize([dataclasses.replace(row, words=20) for row in rows], base=2.0)
    assert cell.perplexity == pytest.approx(2 ** (310 / 110))
    assert cell.word_perplexity == pytest.approx(math.exp(310 / 60))
    assert summarize(records("none", [(0.0, 0), (0.0, 0)])) == summarize([]) == []


def test_parts_of_a_prefix_are_equal_and_of_whole_tokens() -> None:
    assert edges(10, 4) == [0, 2, 5, 7, 10]
    assert edges(3, 8) == [0, 1, 2, 3]
    found = curve(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]), 3, 10, 4)
    assert found == {"nats": [0.0, 3.0, 12.0, 112.0], "tokens": [0, 2, 2, 3]}


def test_the_interval_of_equal_documents_is_students() -> None:
    nats = [210.0, 250.0, 230.0, 270.0, 240.0, 300.0]
    (cell,) = summarize(records("none", [(value, 100) for value in nats]))
    half = 2.5706 * statistics.stdev(nats) / 100 / math.sqrt(6)  # of 5 degrees of freedom
    assert cell.interval == pytest.approx((math.exp(2.5 - half), math.exp(2.5 + half)), rel=1e-4)


def test_unequal_documents_are_left_out_one_at_a_time_and_worth_fewer() -> None:
    sums, weights = [30.0, 50.0, 400.0, 90.0], [10.0, 20.0, 180.0, 40.0]
    others = [28.0, 61.0, 390.0, 95.0]
    kept = [[index for index in range(4) if index != out] for out in range(4)]
    means = [sum(sums[i] - others[i] for i in k) / sum(weights[i] for i in k) for k in kept]
    mean, interval = estimate(sums, weights, (others, weights))
    assert mean == pytest.approx(-4 / 250)
    error = math.sqrt(3 / 4 * sum((each - mean) ** 2 for each in means))
    # worth 250^2 / (10^2 + 20^2 + 180^2 + 40^2) = 1.81 documents: the least degree of freedom
    assert interval == pytest.approx((mean - 12.7062 * error, mean + 12.7062 * error), rel=1e-4)
    empty = estimate([*sums, 0.0], [*weights, 0.0], ([*others, 0.0], [*weights, 0.0]))
    assert empty == (mean, interval)  # a document without scored tokens


@pytest.mark.parametrize("comparisons", [1, 12, 459, 20_000])
def test_quantiles_of_many_comparisons(comparisons: int) -> None:
    """Closed forms of Student's t with 1, 2 and 4 degrees of freedom, and the normal one."""
    p = 0.025 / comparisons
    a = 4 * p * (1 - p)
    q = math.cos(math.acos(math.sqrt(a)) / 3) / math.sqrt(a)
    closed = {
        1: 1 / math.tan(math.pi * p),
        2: (1 - 2 * p) * math.sqrt(2 / a),
        4: 2 * math.sqrt(q - 1),
        1_000_000: statistics.NormalDist().inv_cdf(1 - p),
    }
    for freedom, expected in closed.items():
        assert _student(freedom, comparisons) == pytest.approx(expected, rel=2e-3)


def columns_with_an_arrow(
    runs: int, methods: int, documents: int, gain: float = 0.0
) -> np.ndarray[Any, Any]:
    """For each simulated table, the arrows of methods that differ by noise; the first is better by `gain` nats."""
    rng = np.random.default_rng([methods, documents])
    arrows = []
    for _ in range(runs):
        losses = rng.normal(3, 0.3, documents) + rng.normal(0, 0.03, (methods + 1, documents))
        losses[1] -= gain
        rows = [records(f"m{n}", [(100 * v, 100) for v in row]) for n, row in enumerate(losses)]
        arrows.append([cell.differs for cell in summarize([r for part in rows for r in part])[1:]])
    return np.array(arrows)


@pytest.mark.parametrize(
    ("runs", "methods", "documents"),
    [
        (150, 12, 12),
        pytest.param(4000, 12, 12, marks=pytest.mark.slow),
        pytest.param(4000, 12, 5, marks=pytest.mark.slow),
    ],
)
def test_equal_methods_hardly_ever_have_an_arrow(runs: int, methods: int, documents: int) -> None:
    share = columns_with_an_arrow(runs, methods, documents).any(1).mean()
    assert share <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)


def test_a_real_difference_has_its_arrow() -> None:
    arrows = columns_with_an_arrow(40, 12, 12, gain=0.06)  # 6 %, noise of 3 %
    assert (arrows[:, 0] == -1).mean() > 0.8


# Coverage: the documents' losses per token deviate by these from a true mean of zero. The per-document differences of
# the committed demo are as skewed as samples of the first are; the third is far more so.
SHAPES: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda rng, size: rng.normal(size=size),
    "skewed": lambda rng, size: rng.lognormal(0, 0.5, size) - math.exp(0.125),
    "very skewed": lambda rng, size: rng.lognormal(0, 1, size) - math.exp(0.5),
}
LENGTHS: dict[str, float] = {"equal": 0, "unequal": 0.5, "very unequal": 1}
"""Standard deviation of the logarithm of the documents' lengths."""
BOUNDS = {"normal": (0.93, 0.99), "skewed": (0.90, 0.985), "very skewed": (0.80, 0.97)}


def simulated(
    shape: str, lengths: str, documents: int, draws: int = 1000
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng([len(shape), len(lengths), documents])
    weights = rng.lognormal(0, LENGTHS[lengths], (draws, documents))
    return SHAPES[shape](rng, (draws, documents)) * weights, weights


@pytest.mark.parametrize(
    ("shape", "lengths", "documents"), covering(SHAPES, LENGTHS, [2, 3, 5, 8, 12, 30], rounds=2)
)
def test_intervals_cover_the_truth(shape: str, lengths: str, documents: int) -> None:
    inside = []
    for sums, weights in zip(*simulated(shape, lengths, documents), strict=True):
        interval: Any = estimate(sums.tolist(), weights.tolist())[1]
        inside.append(interval[0] <= 0 <= interval[1])
    least, most = BOUNDS[shape]
    assert least <= np.mean(inside) <= most


@pytest.mark.parametrize(
    ("interval", "side"),
    [
        *((None, 0), ((0.5, 1.5), 0), ((1.0002, 1.5), 1), ((0.5, 0.9998), -1)),
        *(((1.00005, 1.5), 0), ((0.5, 0.99995), 0)),
    ],
)
def test_a_side_is_that_of_the_whole_interval(interval: Interval | None, side: int) -> None:
    assert side_of_one(interval) == side


def test_a_named_family_of_comparisons_widens_the_interval() -> None:
    base = [(100.0 + index, 50) for index in range(6)]
    other = [(nats * (1 - 0.01 * index), 50) for index, (nats, _) in enumerate(base)]
    rows = records("none", base) + records("other", other)
    sums = [[nats for nats, _ in each] for each in (other, base)]
    for comparisons in (1, 7):
        interval = estimate(sums[0], [50] * 6, (sums[1], [50] * 6), comparisons)[1] or (0, 0)
        found = summarize(rows, comparisons=comparisons)[1].ratio_interval
        assert found == pytest.approx([math.exp(end) for end in interval])


def test_ratios_are_paired_by_document() -> None:
    base = [(100.0 + 40 * i, 100) for i in range(6)]
    better = [(nats - 10 - 0.1 * i, 100) for i, (nats, _) in enumerate(base)]
    first, second = summarize(records("none", base) + records("yarn", better))
    intervals: Any = (first.interval, second.interval)
    assert first.ratio == 1
    assert first.ratio_interval == (1, 1)
    assert second.ratio == pytest.approx(second.perplexity / first.perplexity)
    assert intervals[1][1] > intervals[0][0]  # unpaired, the two overlap by far
    low, high = second.ratio_interval or (0, 0)
    assert math.exp(-0.106) < low < high < math.exp(-0.099)


def test_an_empty_cell_ends_no_table() -> None:
    """At 8 a document failed, at 16 there are no key tokens; at 32 one comparison is a family of its own."""
    own, other = [30.0, 50.0, 80.0, 90.0, 160.0], [28.0, 61.0, 70.0, 99.0, 140.0]
    rows = [
        *records("none", [(60.0, 10)], 8),
        *records("none", [(0.0, 0)] * 5, 16),
        *records("none", [(other[n], 10 * n + 10) for n in range(5)], 32),
        *records("pi", [(own[n], 10 * n + 10) for n in range(5)], 32),
    ]
    cells = summarize([dataclasses.replace(row, words=5) for row in rows], aggregate="documents")
    named = [(cell.method, cell.protocol, cell.length, cell.words) for cell in cells]
    assert named == [("none", "tail", 32, 25), ("pi", "tail", 32, 25)]
    gaps = [(own[n] - other[n]) / (10 * n + 10) for n in range(5)]
    mean, half = sum(gaps) / 5, 2.7764 * statistics.stdev(gaps) / math.sqrt(5)
    assert cells[1].ratio == pytest.approx(math.exp(mean))
    expected = (math.exp(mean - half), math.exp(mean + half))
    assert cells[1].ratio_interval == pytest.approx(expected, rel=1e-4)
    rows = records("yarn", [(10.0, 5), (12.0, 5)]) + records("pi", [(11.0, 5), (12.0, 5)])
    assert [cell.ratio for cell in summarize(rows, baseline="none")] == [None, None]
    assert summarize(rows, baseline="pi")[1].ratio == 1


@pytest.mark.parametrize(("nats", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (5e6, "inf")])
def test_losses_without_a_finite_perplexity(nats: float, shown: str) -> None:
    (cell,) = summarize(records("none", [(nats, 5), *[(12.0, 5)] * 4]))
    assert str(cell.perplexity) == shown
    assert (cell.interval is None) == (not math.isfinite(nats))


@pytest.mark.parametrize("count", range(1, FEW_DOCUMENTS + 1))
def test_too_few_documents_have_no_interval(count: int) -> None:
    """They have fewer than five, whose interval is as wide as the documents lie apart."""
    few, rng = count < FEW_DOCUMENTS, np.random.default_rng(count)
    losses = [(10.0 + index, 5) for index in range(count)]
    others = [(nats**1.1, tokens) for nats, tokens in losses]
    cells = summarize([*records("none", losses), *records("pi", others)])
    assert [cell.interval is None for cell in cells] == [few, few]
    assert [cell.ratio_interval is None for cell in cells] == [few, few]
    assert [cell.needed is None for cell in cells] == [True, few]
    assert cells[0].perplexity == pytest.approx(math.exp(sum(n for n, _ in losses) / 5 / count))
    if count > 1:
        draws = rng.normal(size=(2000, count))
        ends = [estimate(row.tolist(), [1.0] * count)[1] or (0, 0) for row in draws]
        widths, ranges = np.diff(ends), np.ptp(draws, axis=1)
        assert widths.mean() / ranges.mean() > 1.3 if few else widths.mean() / ranges.mean() < 1.03


@pytest.mark.parametrize(
    ("spread", "documents", "comparisons", "base"),
    [(0.02, 8, 1, None), (0.02, 21, 5, None), (0.01, 14, 12, 2.0), (0.03, 40, 3, 10.0)],
)
def test_as_many_documents_as_are_needed_show_one_percent(
    spread: float, documents: int, comparisons: int, base: float | None
) -> None:
    """Samples of the needed number have a significant difference in about 80 %, those of two thirds in far fewer."""
    rng, unit = np.random.default_rng(documents), math.log(base or math.e)
    first = rng.normal(size=documents)
    first = 3 + spread / unit * (first - first.mean()) / first.std(ddof=1)
    rows = [
        records(name, [(100 * loss, 100) for loss in losses])
        for name, losses in (("none", [3.0] * documents), ("other", first.tolist()))
    ]
    cell: Any = summarize([*rows[0], *rows[1]], base=base, comparisons=comparisons)[1]
    powers = []
    for count in (cell.needed, cell.needed * 2 // 3):
        draws = rng.normal(math.log(1.01) / spread, 1, (4000, count))
        error = draws.std(axis=1, ddof=1) / math.sqrt(count)
        powers.append((draws.mean(axis=1) > _student(count - 1, comparisons) * error).mean())
    assert powers[0] == pytest.approx(0.8, abs=0.03)
    assert powers[1] < 0.7


def test_many_small_terms_add_up() -> None:
    (cell,) = summarize(records("none", [(1e8, 1), *[(1e-8, 1)] * 1000]))
    assert (cell.nats, cell.documents) == (1e8 + 1e-5, 1001)
