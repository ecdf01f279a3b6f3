"""Rows of JSON lines, parquet files and datasets that are invalid or very large."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from hf_posenc.evaluation.documents import (
    Document,
    LongDocument,
    Skipped,
    load_documents,
    read_dataset,
    read_paths,
)
from tests.support.documents_forms import GOOD, refusal
from tests.support.tiny_text import byte_tokenizer, prose

pytestmark = pytest.mark.timeout(60)  # nothing waits for what never comes


def test_rows_that_are_no_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"text": GOOD}), "", "[]", json.dumps({"text": 1.5}), '{"text": "to']
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + "\n".join(lines))
    good, *others = read_paths([str(path)])
    assert good == Document(f"{path}:1", GOOD)
    assert [entry.name for entry in others] == [f"{path}:{number}" for number in (3, 4, 5)]
    torn = tmp_path / "b.jsonl.gz"
    torn.write_bytes(gzip.compress(f"{lines[0]}\n{os.urandom(200_000).hex()}".encode())[:99_000])
    good, end = read_paths([str(torn)])
    assert (good.name, end.name) == (f"{torn}:1", str(torn))
    assert isinstance(end, Skipped)
    assert end.reason == "truncated: its gzip data ends too early"


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "a.parquet"
    )
    assert "a parquet file without rows" in refusal(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "b.parquet")
    assert list(read_paths([str(tmp_path / "b.parquet")])) == [
        Document(f"{tmp_path}/b.parquet#0", "a"),
        Skipped(f"{tmp_path}/b.parquet#1", "column 'text' holds null, not text"),
    ]
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(whole[:-20])
    assert "not a parquet file, or damaged" in refusal(tmp_path / "c.parquet")


def test_a_dataset_without_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"text": ["a"]}).select([]).to_parquet(
        tmp_path / "data" / "test.parquet"
    )
    (entry,) = read_dataset(str(tmp_path / "data"))
    assert entry == Skipped(f"{tmp_path}/data[test]", "a split without rows")


def test_datasets_that_are_damaged_or_empty(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
    assert "of dataset" in refusal(tmp_path / "empty")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "damaged")
    for path in (tmp_path / "damaged").glob("*.arrow"):
        path.write_bytes(b"garbage")
    assert "of dataset" in refusal(tmp_path / "damaged")
    (tmp_path / "damaged" / "state.json").write_text("{")
    assert "cannot be read" in refusal(tmp_path / "damaged")


def test_a_line_of_several_megabytes(tmp_path: Path) -> None:
    text = prose(1000).replace("\n", " ") * 3000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "b.txt").write_text(text)
    row, file = read_paths([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    assert row == Document(f"{tmp_path}/a.jsonl:1", text)
    assert isinstance(file, LongDocument)
    usable, _ = load_documents([row, file], byte_tokenizer(), min_tokens=9, max_tokens=5000)
    assert [len(document) for document in usable] == [5000, 5000]
    assert usable[0].ids.tolist() == usable[1].ids.tolist()
