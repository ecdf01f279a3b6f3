"""Perplexities and their intervals from sums per document."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hf_posenc.evaluation.measuring.statistics import Record, summarize


def records(
    method: str, losses: list[tuple[float, int]], length: int = 64, size: int | None = 100
) -> list[Record]:
    return [
        Record(method, "tail", length, f"d{index}", nats, tokens, size, None, nats, tokens)
        for index, (nats, tokens) in enumerate(losses)
    ]


def test_perplexity_weighs_tokens_and_not_documents() -> None:
    (cell,) = summarize(records("none", [(300.0, 100), (10.0, 10)]), seed=0)
    assert cell.perplexity == pytest.approx(math.exp(310 / 110))
    assert cell.perplexity != pytest.approx(
        (math.exp(3) + math.exp(1)) / 2
    )  # never a mean of means
    assert cell.perplexity != pytest.approx(math.exp(2))
    assert (cell.tokens, cell.bytes, cell.documents) == (110, 200, 2)
    assert cell.bits_per_byte == pytest.approx(310 / math.log(2) / 200)


def test_the_interval_is_the_bootstrap_over_documents() -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(50, 200, size=12)
    nats = tokens * rng.normal(2.5, 0.4, size=12)
    pairs = [(float(n), int(t)) for n, t in zip(nats, tokens, strict=True)]
    (cell,) = summarize(records("none", pairs), seed=1, resamples=20_000)
    again = np.random.default_rng(99)  # by drawing documents one by one, with another generator
    draws = [again.integers(0, 12, size=12) for _ in range(20_000)]
    low, high = np.quantile([nats[d].sum() / tokens[d].sum() for d in draws], [0.025, 0.975])
    assert cell.interval == pytest.approx((math.exp(low), math.exp(high)), rel=0.01)


def test_the_seed_decides_the_interval() -> None:
    rows = records("none", [(float(i * i + 50), 20) for i in range(8)])

    def interval(seed: int) -> Any:
        return summarize(rows, seed=seed, resamples=500)[0].interval

    assert interval(3) == interval(3)
    assert interval(3) != interval(4)


def test_ratios_are_paired_by_document() -> None:
    base = [(100.0 + 40 * i, 100) for i in range(6)]
    better = [(nats - 10 - 0.1 * i, 100) for i, (nats, _) in enumerate(base)]
    first, second = summarize(records("none", base) + records("yarn", better), seed=0)
    assert first.ratio == 1
    assert first.ratio_interval == (1, 1)
    assert second.ratio == pytest.approx(second.perplexity / first.perplexity)
    assert second.interval is not None
    assert first.interval is not None
    assert second.interval[1] > first.interval[0]  # unpaired, the two overlap by far
    low, high = second.ratio_interval or (0, 0)
    assert math.exp(-0.106) < low < high < math.exp(-0.099)


def test_one_document_has_no_interval() -> None:
    (cell,) = summarize(records("none", [(10.0, 5)]), seed=0)
    assert cell.interval is None
    assert cell.ratio_interval is None
    assert cell.perplexity == pytest.approx(math.exp(2))


def test_a_cell_that_lacks_a_document_is_left_out() -> None:
    rows = records("none", [(10.0, 5), (12.0, 5)]) + records("yarn", [(10.0, 5)])
    assert [cell.method for cell in summarize(rows, seed=0)] == ["none"]


def test_a_baseline_that_failed_is_not_replaced_by_the_next_method() -> None:
    rows = records("yarn", [(10.0, 5), (12.0, 5)]) + records("pi", [(11.0, 5), (12.0, 5)])
    assert [cell.ratio for cell in summarize(rows, seed=0, baseline="none")] == [None, None]
    assert summarize(rows, seed=0, baseline="pi")[1].ratio == 1


def test_bytes_that_are_not_known_give_no_bits_per_byte() -> None:
    (cell,) = summarize(records("none", [(10.0, 5), (12.0, 5)], size=None), seed=0)
    assert cell.bits_per_byte is None
    assert cell.bytes is None


@pytest.mark.parametrize(("nats", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (5e6, "inf")])
def test_losses_without_a_finite_perplexity(nats: float, shown: str) -> None:
    (cell,) = summarize(records("none", [(nats, 5), (12.0, 5)]), seed=0)
    assert str(cell.perplexity) == shown


def test_many_small_terms_add_up() -> None:
    rows = records("none", [(1e8, 1), *[(1e-8, 1)] * 1000])
    assert summarize(rows, seed=0, resamples=1)[0].nats == 1e8 + 1e-5


def test_rounding_is_no_difference() -> None:
    rows = [(100.0 + index, 50) for index in range(6)]
    lower = [(nats * (1 - 1e-6), tokens) for nats, tokens in rows]
    clearly = [(nats * 0.99, tokens) for nats, tokens in rows]
    cells = summarize(
        [*records("none", rows), *records("rounded", lower), *records("lower", clearly)], seed=0
    )
    assert [cell.differs for cell in cells] == [0, 0, -1]
    assert cells[1].ratio_interval is not None
    assert cells[1].ratio_interval[1] < 1
