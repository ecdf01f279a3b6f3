"""`Result.frame` has the numbers of the CSV file, and `columns` explains every column."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from hf_posenc.evaluation import ExtendResult, SweepResult
from hf_posenc.evaluation.bench import BenchResult
from hf_posenc.evaluation.device.result import GpuResult
from hf_posenc.evaluation.grid import Result
from hf_posenc.evaluation.retrieval.result import RetrievalResult

DATA = Path(__file__).parents[2] / "docs" / "data"


def read(kind: type[Result], name: str) -> Result:
    return kind.from_dict(json.loads((DATA / name).read_text(encoding="utf-8")))


def results() -> dict[str, Result]:
    bench = read(BenchResult, "benchmarks/bench.json")
    assert isinstance(bench, BenchResult)
    retrieval = read(RetrievalResult, "real_model/passkey.json")
    gpu = read(GpuResult, "gpu/h200_model.json")
    sweep = read(SweepResult, "benchmarks/sweep.json")
    extend = read(ExtendResult, "real_model/extend.json")
    return {each.kind: each for each in (bench, bench.perplexity, retrieval, gpu, sweep, extend)}


@pytest.mark.parametrize("kind", ["bench", "perplexity", "retrieval", "gpu", "sweep", "extend"])
def test_a_frame_has_the_numbers_of_the_csv_file_and_says_what_they_are(kind: str) -> None:
    pytest.importorskip("pandas")
    result = results()[kind]
    frame = result.frame
    rows = list(csv.DictReader(io.StringIO(result.files()[f"{kind}.csv"])))
    assert list(frame.columns) == list(rows[0]) == list(result.columns)
    assert len(frame) == len(rows)
    for name, meaning in result.columns.items():
        assert meaning
        for ours, text in zip(frame[name], (row[name] for row in rows), strict=True):
            if text == "":
                assert ours is None or ours != ours or ours == ""
            else:
                assert ours == type(ours)(text)


def test_a_frame_answers_which_method_is_lowest() -> None:
    pytest.importorskip("pandas")
    result = results()["perplexity"]
    frame = result.frame
    longest = frame[(frame.protocol == "tail") & (frame.length == frame.length.max())]
    best = longest.loc[longest.perplexity.idxmin()]
    cells = [cell for cell in result.cells if cell.protocol == "tail"]  # type: ignore[attr-defined]
    assert best.perplexity == min(c.perplexity for c in cells if c.length == best.length)
