"""The published tables, and which of them may stand beside a run."""

from __future__ import annotations

import io
import json
import math
import re
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import published
from hf_posenc.evaluation.perplexity.protocols import AGGREGATES, PROTOCOLS, Settings
from hf_posenc.evaluation.published import beside, comparable, differences, remarks


def run_of(settings: Settings) -> Any:
    """Stands for a run with one method, whose perplexity at a length is the length in thousands."""

    def cell(method: str, protocol: str, length: int) -> Any:
        assert (method, protocol) == ("none", settings.protocols[-1])
        return SimpleNamespace(perplexity=length / 1000)

    candidates = [SimpleNamespace(label="none")]
    return SimpleNamespace(settings=settings, candidates=candidates, cell=cell)


def printed(table: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(table)
    return stream.getvalue()


def test_all_tables_are_read() -> None:
    text = resources.files(published).joinpath("published.json").read_text(encoding="utf-8")
    raw = json.loads(text)["tables"]
    assert list(published.available()) == [entry["id"] for entry in raw]
    assert len(raw) == len(set(published.available())) > 40
    for entry in raw:
        table = published.get(entry["id"])
        assert [list(row.values) for row in table.rows] == [row["values"] for row in entry["rows"]]


@pytest.mark.parametrize("name", published.available())
def test_a_table_is_whole(name: str) -> None:
    table = published.get(name)
    assert table.metric in ("perplexity", "loss", "accuracy", "tokens")
    assert table.protocol.name in (None, *PROTOCOLS, "passkey", "niah", "ruler")
    assert table.protocol.aggregate in (None, *AGGREGATES)
    assert (table.protocol.stride is not None) == (table.protocol.name in ("sliding", "stream"))
    assert (table.protocol.tail_tokens is not None) == (table.protocol.name == "tail")
    assert str(table.source)
    assert table.rows
    for row in table.rows:
        assert len(row.values) == len(table.columns)
        for value in row.values:
            assert value is None or isinstance(value, int | float | str)
            if isinstance(value, str):
                assert re.fullmatch(r">1e\d|OOM|\d+k", value)
    if table.column_kind == published.LENGTHS:
        lengths = [column for column in table.columns if isinstance(column, int)]
        assert len(lengths) == len(table.columns)
        assert lengths == sorted(set(lengths))


def test_numbers_as_printed() -> None:
    table = published.get("dca-t1-pg19")
    row = next(row for row in table.rows if row.method == "ReRoPE")
    assert table.value(row, 8192) == 7.75
    assert table.value(row, 16384) == "OOM"
    assert table.value(row, 1000) is None
    assert published.get("yarn-t1").value(published.get("yarn-t1").rows[2], 10240) == 6.04


def test_a_name_that_is_close() -> None:
    with pytest.raises(PosencError, match="'yarn-t1'"):
        published.get("yarn-t-1")


STREAM = Settings((4096, 8192), ("stream",), stride=256)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("dca-t1-pg19", STREAM, None),
        ("yarn-t1", Settings((4096,), ("prefix", "tail")), None),
        ("yarn-t4-govreport", Settings((32768,), ("sliding",), aggregate="windows"), None),
        ("pi-t1-pg19", Settings((2048, 4096), ("sliding",)), None),
        ("rerope-readme", Settings((8192,), ("tail",), tail_tokens=4096), None),
        ("alibi-t5", Settings((512,), ("disjoint",)), None),
        ("dca-t1-pg19", Settings((4096,)), "protocol: stream, here prefix, tail"),
        ("dca-t1-pg19", Settings((4096,), ("stream",), stride=512), "stride: 256, here 512"),
        ("dca-t1-pg19", Settings((5000,), ("stream",)), "lengths: 4,096, 8,192"),
        ("yarn-t4-govreport", Settings((32768,), ("sliding",)), "aggregate: windows, here tokens"),
        ("longrope-t5-proofpile", Settings((4096,), ("sliding",)), "aggregate: unstated"),
        ("kerple-t3-github", Settings((512,)), "protocol: unstated"),
        ("rerope-readme", Settings((4096,)), "tail tokens: 4,096, here 1,024"),
        ("pi-t3-steps", Settings((4096,), ("sliding",)), "columns: fine-tuning steps"),
        ("ruler-readme", Settings((4096,)), "metric: accuracy"),
        (
            "pi-t1-pg19",
            Settings((4096,), ("sliding",), windows_per_document=4),
            "windows per document: all, here 4",
        ),
    ],
)
def test_a_table_of_the_same_protocol_is_comparable_and_a_difference_is_named(
    name: str, settings: Settings, said: str | None
) -> None:
    table = published.get(name)
    if said is None:
        assert differences(table, settings) == []
        comparable(table, settings)
        return
    with pytest.raises(PosencError, match=re.escape(said)) as error:
        comparable(table, settings)
    with pytest.raises(PosencError, match=re.escape(said)):
        beside(table, run_of(settings))
    if "unstated" in said or "metric" in said or "columns" in said:
        assert "To measure as it does" not in str(error.value)


def test_the_way_to_a_comparison_leads_there() -> None:
    with pytest.raises(PosencError, match="--protocol stream --stride 256, at lengths 4,096"):
        comparable(published.get("dca-t1-pg19"), Settings((4096,)))


def test_beside_a_run() -> None:
    shown = printed(beside(published.get("dca-t1-pg19"), run_of(STREAM)))
    lines = [line.split() for line in shown.splitlines()]
    assert ["this", "run", "none", "4.096", "8.192"] in lines
    assert ["Llama-2-7b", "none", "7.87", ">1e2"] in lines
    assert ["Llama-2-7b", "ReRoPE", "7.94", "7.75"] in lines
    assert "16,384" not in shown  # this run has no such length
    assert "NOT" not in shown
    assert "arXiv" in " ".join(remarks(published.get("yarn-t1")))


def test_losses_are_shown_as_perplexities() -> None:
    settings = Settings((8192,), ("tail",), tail_tokens=4096)
    shown = printed(beside(published.get("rerope-readme"), run_of(settings)))
    assert f"{math.exp(1.4267):.4g}" in shown
