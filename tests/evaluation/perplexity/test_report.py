"""Tables, notes and files of a run."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import plots
from hf_posenc.evaluation.documents import Skipped, TokenizedDocument
from hf_posenc.evaluation.grid import Column, Grid, MethodEntry, number, to_notebook
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.evaluation.measuring.statistics import Failure, Record
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import COLUMNS, PerplexityResult

LENGTHS = (256, 512, 1024)


def example(
    curves: Mapping[str, tuple[float, ...]], *failures: Failure, documents: int = 6
) -> PerplexityResult:
    """A result with these perplexities under both protocols; documents scatter around them."""
    candidates = [dataclasses.replace(Candidate.parse(spec), original=256) for spec in curves]
    failed = {(failure.method, failure.protocol, failure.length) for failure in failures}
    records = [
        Record(candidate.label, protocol, length, f"d{index}", nats, 100, 400, 50, nats, 100)
        for candidate, curve in zip(candidates, curves.values(), strict=True)
        for protocol in ("prefix", "tail")
        for length, value in zip(LENGTHS, curve, strict=True)
        if (candidate.label, protocol, length) not in failed
        for index in range(documents)
        for nats in [100 * (math.log(value) + (index - (documents - 1) / 2) / 10)]
    ]
    return PerplexityResult(
        records=records,
        failures=[*failures],
        curves={candidate.label: ([1.0] * 64, [16] * 64) for candidate in candidates},
        candidates=[MethodEntry.of(each, not each.auto_scale) for each in candidates],
        head_replay="bit-exact",
        model={"name": "tiny"},
        source={"kind": "text"},
        settings=Settings(lengths=LENGTHS),
        original=256,
        documents=[
            TokenizedDocument(f"d{n}", torch.arange(9), None, "").to_dict()
            for n in range(documents)
        ],
        environment=environment(),
        skipped=[Skipped("bad.txt", "not UTF-8")],
    )


CURVES = {"none": (14.55, 46.46, 12345.6), "yarn": (14.55, 14.21, 15.66)}
CURVES["pi:scale=4"] = (20.0, 19.5, 17.25)


def shown(result: PerplexityResult, protocol: str = "tail", width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(result.table(protocol))
    return str(cast(Any, console.file).getvalue())


def test_the_table_has_every_number_its_range_and_the_tokens() -> None:
    result = example(CURVES)
    text = shown(result)
    assert "tail: the same last 128 tokens of each document" in " ".join(text.split())
    rows = {
        line.split("  ")[0].strip(): [word for word in line.split() if word not in "↓↑"]
        for line in text.splitlines()
        if line.strip()
    }
    assert rows["none"][-4:-1] == ["14.55", "46.46", "1.2e4"]
    assert rows["yarn (auto)"][-4:-1] == ["14.55", "14.21", "15.66"]
    assert rows["yarn (auto)"][-1] == f"{math.log2(15.66) / 4:.4g}"  # 4 bytes a token
    assert rows["pi (scale 4)"][-2] == "17.25"
    assert rows["tokens scored"][-3:] == ["600", "600", "600"]
    assert rows["method"][1:4] == ["x1", "x2", "x4"]
    cell: Any = result.cell("yarn (auto)", "tail", 512)
    low, high = cell.interval or (0, 0)
    # the mean of 6 documents, whose losses have the standard deviation 0.187: Student's t of 5 degrees of freedom
    assert math.log(high / low) == pytest.approx(2 * 2.571 * 0.187 / math.sqrt(6), rel=0.01)
    assert f"{low:.3g}-{high:.3g}" in text
    assert max(map(len, shown(result, width=60).splitlines())) <= 60
    fields = zip(*(row.fields[1:4] for row in result.table("tail").rows), strict=True)
    bold = [[field.spans[0].mark == "best" for field in column] for column in fields]
    assert bold == [[True, True, False], [False, True, False], [False, True, False]]


def test_arrows_stand_where_the_paired_interval_says_so() -> None:
    result = example({"none": (14.55, 46.46, 20.0), "yarn": (14.55, 14.21, 30.0)})
    # the documents differ alike under both methods, so that every difference is certain, and equal is equal
    lines = [line for line in shown(result).splitlines() if line]
    rows = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert rows["yarn (auto)"][2:-1] == ["14.55", "14.21", "↓", "30.00", "↑"]
    assert rows["none"][1:-1] == ["14.55", "46.46", "20.00"]
    scattered = []
    for record in result.records:
        more = 0 if record.method == "none" else 800 * (int(record.document[1:]) % 2) - 400
        nats = record.nats + more
        scattered.append(dataclasses.replace(record, nats=nats, weighted=nats))
    assert "↓" not in shown(dataclasses.replace(result, records=scattered))


def test_short_texts_stand_beside_the_long_ones() -> None:
    curves = {"none": (10.0, 20.0, 40.0), "yarn": (10.0, 11.0, 12.0), "yarn:scale=4": (12.0,) * 3}
    notes = " ".join(example(curves).notes())
    worse = "yarn (scale 4) +20.0 % (+20.0 to +20.0)"
    assert f"Short texts (256 tokens, tail, against none): {worse}; " in notes
    assert "the others as none." in notes


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    curves = {**CURVES, "pi:scale=4": (20.0, 19.0, math.nan)}
    result = example(curves, Failure("none", "tail", 1024, "out of memory"))
    result.write_json(tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    values = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert values["protocols"]["tail"].startswith("the same last 128 tokens")
    assert values["skipped"] == [{"name": "bad.txt", "reason": "not UTF-8"}]
    from_one = [method["prefix_from_one_forward"] for method in values["methods"]]
    assert from_one == [True, False, True]
    assert len(values["records"]) == 6 * (3 * 3 * 2 - 1)
    assert values["records"][-1]["nats"] is values["summary"][-1]["perplexity"] is None
    again = PerplexityResult.from_dict(values)
    again.write_json(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "r.json").read_bytes()
    assert shown(again) == shown(result)
    assert "<pre>" in again._repr_html_()
    assert "tokens scored" in str(again)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((14.554, "14.55"), (3.0, "3.000"), (999.96, "1000"), (1361.4, "1361"), (None, "-")),
        *((9999.4, "9999"), (12345.6, "1.2e4"), (3.2e12, "3.2e12")),
        *((math.nan, "nan"), (math.inf, "inf")),
    ],
)
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_missing_numbers_are_shown_and_explained() -> None:
    failures = [
        Failure("none", "tail", 1024, "out of memory"),
        Failure("yarn (auto)", "tail", 512, "IndexError: index out of range"),
    ]
    result = example({**CURVES, "pi:scale=4": (20.0, math.nan, math.nan)}, *failures)
    text = shown(result)
    assert all(word in text for word in ("OOM", "failed", "nan"))
    assert list(result.problems()) == [
        "none: failed at length 1,024: out of memory",
        "yarn (auto): failed at length 512: IndexError: index out of range",
        "pi (scale 4): the loss is not a finite number at length 512, 1,024; try --dtype float32.",
    ]
    assert not list(example(CURVES).problems())


def test_a_model_that_gives_nothing_finite_is_equal_to_nothing() -> None:
    result = example({"none": (math.nan,) * 3, "pi:scale=4": (math.nan,) * 3})
    result = dataclasses.replace(result, model={"name": "tiny", "dtype": "float32"})
    assert "nan-nan" not in shown(result)
    assert "Short texts" not in " ".join(result.notes())
    assert "--dtype" not in " ".join(result.problems())  # it is float32 already


def test_without_key_tokens_the_text_says_so_and_speaks_of_the_other_protocols() -> None:
    result = example({"none": (10.0, 20.0, 40.0), "yarn:scale=4": (12.0, 12.0, 12.0)})
    protocols = ("prefix", "tail", "longppl")
    settings = dataclasses.replace(result.settings, protocols=protocols, evaluator={"name": "self"})
    result = dataclasses.replace(result, settings=settings)
    notes = " ".join(result.notes())
    assert "no key token" in notes
    assert "Short texts (256 tokens, tail" in notes
    assert "(10.00). A method holds where its perplexity (tail)" in next(result.guide())


FEW = "Too few documents for ranges"
GAPS = "the text between them is not read"


@pytest.mark.parametrize(
    ("documents", "stride", "special", "noted", "unsaid"),
    [
        (1, None, [], "1 document, 1 skipped; bits/byte", "ranges: 95 %"),
        (1, 128, [], "One stream, 1 skipped; bits/byte", GAPS),
        (1, 128, [], "One stream has no ranges", "Too few"),
        (6, 512, [], f"Windows of 256 tokens lie 512 apart: {GAPS}", "Too few"),
        (6, 256, [], "One stream", GAPS),
        (6, 256, [0], GAPS, "Too few"),
        (4, None, [], FEW, "ranges: 95 %"),
    ],
)
def test_notes_on_documents_and_windows(
    documents: int, stride: int | None, special: list[int], noted: str, unsaid: str
) -> None:
    result = example(CURVES, documents=documents)
    if stride is not None:
        settings = dataclasses.replace(result.settings, protocols=("stream",), stride=stride)
        result = dataclasses.replace(result, settings=settings)
    notes = " ".join(dataclasses.replace(result, model={"bos": {"token_ids": special}}).notes())
    assert noted in notes
    assert unsaid not in notes


def test_without_a_number_for_the_baseline_there_are_no_ratios() -> None:
    failures = [Failure("none", p, n, "no luck") for p in ("prefix", "tail") for n in LENGTHS]
    result = example(CURVES, *failures)
    assert {cell.method for cell in result.cells} == {"yarn (auto)", "pi (scale 4)"}
    assert all(cell.ratio is None and not cell.differs for cell in result.cells)
    assert ", 6 documents: none has no number to compare." in next(iter(result.findings()))


def test_notes_and_guide() -> None:
    notes = str(example(CURVES))
    assert "6 documents, 1 skipped" in notes
    assert "are read" not in notes
    empty: dict[str, Any] = {"tokens": 0, "nats": 0.0, "weighted": 0.0, "weight": 0.0}
    own = [
        dataclasses.replace(r, **(empty if r.document > "d3" and r.length >= least else {}))
        for r in example(CURVES).records
        for least in [256 if r.protocol == "prefix" else 512]
    ]
    noted = list(dataclasses.replace(example(CURVES), records=own).notes())
    assert f"prefix, tail at 512 tokens, tail at 1,024 tokens: {FEW}" in " ".join(noted)
    book = dataclasses.replace(example(CURVES), documents=[{"name": "book", "tokens": 5000}])
    assert "2,048 of 5,000 tokens are read, at both ends of each text." in " ".join(book.notes())
    assert "(auto): scale = length / 256" in notes
    baseline, protocol = example(CURVES).guide()
    unpatched = "Baseline: the unpatched model at 256"
    assert baseline.startswith(f"{unpatched} tokens, its original length (14.55).")
    assert "prefix averages" in protocol
    assert "tail scores the same tokens" in protocol
    saved = dataclasses.replace(example(CURVES), model={"patch": {"method": "yarn"}})
    assert next(saved.guide()).startswith("Baseline: the model as saved, with its patch, at 256")
    trained = dataclasses.replace(saved, source={"stages": []})  # `none` was measured without it
    assert next(trained.guide()).startswith(unpatched)


def test_csv_has_a_row_for_every_cell() -> None:
    result = example(CURVES, Failure("none", "tail", 1024, "out of memory"))
    reader = csv.DictReader(io.StringIO(result.files()["perplexity.csv"]))
    rows = {(row["method"], row["protocol"], int(row["length"])): row for row in reader}
    assert tuple(reader.fieldnames or ()) == tuple(COLUMNS)
    assert len(rows) == 3 * 2 * 3
    row = rows["yarn (auto)", "prefix", 512]
    assert float(row["perplexity"]) == pytest.approx(14.21)
    assert float(row["perplexity_low"]) < 14.21 < float(row["perplexity_high"])
    # the documents differ alike under both
    assert float(row["ratio_low"]) == pytest.approx(14.21 / 46.46)
    some = {"scale": "2.0", "tokens": "600", "bytes": "2400", "documents": "6", "status": "ok"}
    assert row.items() >= some.items()
    failed = rows["none", "tail", 1024]
    assert (failed["perplexity"], failed["status"]) == ("", "out of memory")


def test_panels_lines_and_axes() -> None:
    pytest.importorskip("matplotlib")
    curves = {**CURVES, "ntk": (14.55, math.nan, 30.0), "yarn:scale=4": (16.0, 15.0, 14.0)}
    prefix, tail = plots.figure(example(curves)).axes
    titles = [panel.get_title(loc="left").split()[0] for panel in (prefix, tail)]
    assert titles == ["prefix", "tail"]
    assert (prefix.get_xscale(), prefix.get_yscale()) == ("log", "log")
    assert prefix.get_ylim() == tail.get_ylim()
    lines: dict[str, Any] = {str(line.get_label()): line for line in tail.get_lines()}
    assert list(lines["yarn (auto)"].get_ydata()) == pytest.approx([14.55, 14.21, 15.66])
    assert list(lines["ntk (auto)"].get_xdata()) == [256, 1024]  # nan is no point
    assert 256 in [line.get_xdata()[0] for label, line in lines.items() if label.startswith("_")]
    low, high = prefix.get_ylim()
    assert 3 <= len([tick for tick in prefix.get_yticks() if low <= tick <= high]) <= 8
    names = {text.get_text(): text for text in tail.get_legend().get_texts()}  # type: ignore[union-attr]
    named = {label: line for label, line in lines.items() if not label.startswith("_")}
    assert list(names) == sorted(named, key=lambda label: -named[label].get_ydata()[-1])
    assert all(names[label].get_color() == named[label].get_color() for label in names)


def test_a_method_has_one_colour_and_the_control_is_grey() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb

    specs = ("none", "truncation", "yarn", "yarn:scale=4", "dynamic_yarn", "rerope")
    figure = plots.figure(example(dict.fromkeys(specs, (9.0,) * 3)))
    lines = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
    for other in ("dynamic_yarn", "yarn (scale 4)"):
        assert lines[other].get_color() == lines["yarn (auto)"].get_color()
        assert lines[other].get_linestyle() != lines["yarn (auto)"].get_linestyle()
    red, green, blue = to_rgb(lines["truncation"].get_color())
    assert red == green == blue
    assert len({line.get_color() for label, line in lines.items() if label[0] != "_"}) == 4


def test_without_matplotlib_a_plot_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PosencError, match=r"pip install 'hf-posenc\[plot\]'"):
        plots.write_figure(plots.figure(example(CURVES)), tmp_path / "a.png")


def test_a_notebook_shows_a_result_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *given: shown.append(given))
    page = to_notebook([Grid("one table", [Column("a column")])], ["one line"])
    assert "one table" in page
    assert page.count("one line") == 1
    assert not shown
