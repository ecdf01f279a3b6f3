"""Documents of every file format and kind of dataset."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import (
    Document,
    Skipped,
    TokenizedDocument,
    load_documents,
    named,
    read_dataset,
    read_paths,
)
from hf_posenc.evaluation.documents.named import is_name
from hf_posenc.evaluation.documents.source import Source, refuse_ignored, source_of
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.options import DocumentOptions
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import PerplexityRun
from tests.evaluation.documents.test_documents import write
from tests.support.documents_forms import GOOD, PACK, json_lines, refusal
from tests.support.tiny_text import byte_tokenizer, prose, sizes

ROWS = [{"text": prose(80, row), "input_ids": [5 + row, 6, 7], "n": row} for row in range(3)]
TEXTS = [str(row["text"]) for row in ROWS]


def texts(entries: Any) -> list[str]:
    return ["".join(entry.chunks()) for entry in entries]


def ids(entries: Any) -> list[list[int]]:
    return [entry.tokens(0, len(entry)).tolist() for entry in entries]


@pytest.mark.parametrize("ending", PACK)
def test_text_and_json_lines_compressed_or_not(ending: str, tmp_path: Path) -> None:
    text = write(tmp_path / f"a.txt{ending}", PACK[ending]("\ufeffnaïve\r\n".encode()))
    assert list(read_paths([str(text)])) == [Document(str(text), "naïve\r\n")]
    lines = write(tmp_path / f"b.jsonl{ending}", PACK[ending](json_lines(ROWS)))
    found = list(read_paths([str(lines)]))
    assert texts(found) == TEXTS
    assert [entry.name for entry in found] == [f"{lines}:{number}" for number in (1, 2, 3)]
    # Frames and members that follow each other.
    parts = b"".join(PACK[ending](part.encode()) for part in ("one ", "two ", "three"))
    assert texts(read_paths([str(write(tmp_path / f"c.txt{ending}", parts))])) == ["one two three"]


@pytest.mark.parametrize("size", [90, 1 << 21])
def test_text_in_other_encodings(size: int, tmp_path: Path) -> None:
    for words, encoding, guess in (
        ("Brunetière, the local café. ", "latin-1", "cp1252"),
        ("a word, and one with an accent at the end: ", "latin-1", "cp1252"),
        ("“quotes” of Windows – ", "cp1252", "cp1252"),
        ("naïve words of a text\x8d ", "latin-1", "latin-1"),
        ("Привет, как дела? Сегодня хорошая погода. ", "koi8-r", "koi8_r"),
        ("naïve € ", "utf-16", "utf-16"),
    ):
        path, end = tmp_path / "a.txt", "café" * (encoding != "koi8-r")
        text = words * (size // len(words)) + end
        path.write_bytes(text.encode(encoding))
        (entry,) = read_paths([path], encoding=encoding)
        assert texts([entry]) == [text]
        source = [*read_paths([path]), Document("b", prose(99))]
        usable, (skipped, *_) = load_documents(source, byte_tokenizer(), min_tokens=9)
        assert [each.name for each in usable] == ["b"]
        if guess != "koi8_r" or importlib.util.find_spec("charset_normalizer"):
            assert skipped.reason.endswith(f"--encoding {guess}"), skipped
    (refused,) = read_paths([path], encoding="ascii")
    assert str(getattr(refused, "reason", "")) == "UTF-16: give --encoding utf-16"
    with pytest.raises(PosencError, match="--encoding rot13: Python has no such encoding of text"):
        list(read_paths([path], encoding="rot13"))
    for text in ("code", "a.jsonl"):
        with pytest.raises(PosencError, match="--encoding ascii is for files of text"):
            refuse_ignored(DocumentOptions(text=[text], encoding="ascii"))
    refuse_ignored(DocumentOptions(text=["*.txt"], encoding="ascii"))


def test_the_rule_that_picks_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(name: str, count: int) -> str:
        return "".join(f"{name}_value_{row} = computed({row})\n" for row in range(count))

    def model(name: str, year: str, **files: str) -> None:
        folder = tmp_path / "models" / name
        for kind, text in files.items():
            write(folder / f"{kind}_{name}.py", f"# Copyright {year} The Team\n{text}")
        write(folder / "__init__.py", lines("init", 9))

    monkeypatch.setattr("transformers.__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr("transformers.__version__", "9.9")
    old, new, other = lines("old", 3000), lines("new", 3000), lines("other", 2500)
    model("old", "2024 to 2026", modeling=old)
    model("a_new", "2025", modeling=new, configuration="size = 1\n", modular=old)
    model("b_copy", "2026", modeling=old + lines("copy", 1800))  # 5 of 8 lines are old
    model("c_twin", "2026", modeling=new[:-9000] + lines("twin", 200))  # of a longer document
    model("d_other", "2026", modeling=other + old[: len(other)])  # half of it is old
    model("e_short", "2026", modeling=lines("short", 1000))
    model("f_part", "2026", configuration=lines("part", 4000))  # no model of its own
    (tmp_path / "models" / "g_mixed").mkdir()
    for year in (2023, 2026):
        file = tmp_path / f"models/g_mixed/modeling_{year}.py"
        write(file, f"# Copyright {year}\n{lines('m', 4000)}")
    documents = {entry.name: "".join(entry.chunks()) for entry in named.code.__wrapped__()}
    assert list(documents) == ["transformers==9.9/d_other", "transformers==9.9/a_new"]
    head = "# Copyright 2025 The Team\n"
    assert documents["transformers==9.9/a_new"] == f"{head}size = 1\n{head}{new}"


@pytest.mark.slow
def test_the_code_of_the_installed_transformers_is_new_long_and_enough() -> None:
    assert is_name("code")
    lengths = [len(text) for text in texts(read_paths("code"))]
    assert len(lengths) >= 24
    assert min(lengths) >= 3.6 * 16384  # characters of a token of SmolLM2 and Gemma 3
    assert sum(length >= 3.6 * 32768 for length in lengths) >= 12
    about = source_of(DocumentOptions(text=["code"])).about
    assert about["transformers"] == transformers.__version__


@pytest.fixture
def data(tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(tmp_path / "rows.parquet")
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=made.select([0]), test=made).save_to_disk(tmp_path / "splits")
    write(tmp_path / "rows.jsonl", json_lines(ROWS))
    write(tmp_path / "loaded" / "test.jsonl", json_lines([*ROWS, {**ROWS[0], "text": None}]))
    return tmp_path


NO_BODY = "no column 'body'; its columns are text, input_ids, n"


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "saved", "splits"])
def test_rows_of_texts_and_of_tokens(data: Path, name: str) -> None:
    path = str(data / name)
    assert texts(read_paths([path])) == TEXTS
    assert ids(read_paths([path], tokenized="input_ids")) == [[5, 6, 7], [6, 6, 7], [7, 6, 7]]
    if name.startswith("s"):
        assert texts(read_dataset(path)) == TEXTS
        assert ids(read_dataset(path, tokenized="input_ids"))[2] == [7, 6, 7]
    else:
        (entry, *_) = read_paths([path], column="body")
        assert getattr(entry, "reason", "") == f"{NO_BODY}. Pass --column"
        (entry, *_) = read_paths([path], tokenized="n")
        assert getattr(entry, "reason", "") == "holds int, not a list of token ids"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("splits", {"split": "dev"}, r"no split 'dev'; it has train, test\. Pass --split"),
        ("saved", {"column": "body"}, rf"{NO_BODY}\. Pass"),
        ("loaded", {"column": "body"}, rf"{NO_BODY}\. Pass"),
        ("loaded", {"split": "train"}, "split 'train'"),
        ("absent", {}, "cannot be read"),
    ],
)
def test_a_dataset_without_the_column_split_or_name(
    data: Path, name: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PosencError, match=reason):
        list(read_dataset(str(data / name), **options))
    assert texts(read_paths([str(data / "splits")], split="train")) == TEXTS[:1]


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_of_a_dataset(data: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", data / "cache")
    name = str(data / "loaded")
    assert list(read_dataset(name, streaming=streaming)) == [
        *(Document(f"{name}[test]#{row}", text) for row, text in enumerate(TEXTS)),
        Skipped(f"{name}[test]#3", "column 'text' holds null, not text"),
    ]


def test_token_documents_lose_their_special_tokens_and_know_no_text() -> None:
    entry = TokenizedDocument("t", torch.tensor([0, 5, 6, 7], dtype=torch.int32), None, None)
    (plain,), _ = load_documents([entry], byte_tokenizer(), min_tokens=2)
    (without,), _ = load_documents([entry], byte_tokenizer(bos=True), min_tokens=2, max_tokens=2)
    assert (plain.ids.tolist(), without.ids.tolist()) == ([0, 5, 6, 7], [5, 6])
    known = without.to_dict()
    assert [known[key] for key in ("tokens", "bytes", "words")] == [2, None, None]
    assert known["text_sha256"] is known["text_sha256_of"] is None


def test_documents_of_one_name_are_numbered() -> None:
    source = [Document(name, prose(80, row)) for row, name in enumerate(("a", "a", "a (2)", "a"))]
    usable, _ = load_documents(source, byte_tokenizer(), min_tokens=64)
    assert [document.name for document in usable] == ["a", "a (2)", "a (2) (2)", "a (3)"]


def test_what_the_command_line_asks_for(data: Path) -> None:
    asked: dict[str, Any] = {"text": [str(data / "saved")], "dataset": str(data / "saved")}
    for kind, value in asked.items():
        source = source_of(DocumentOptions(**{kind: value}, tokenized="input_ids"))
        assert ids(source.read()) == [[5, 6, 7], [6, 6, 7], [7, 6, 7]]
        assert (source.about["kind"], source.about["tokenized"]) == (kind, "input_ids")
    assert source.about["streaming"] is True
    assert source_of(DocumentOptions()) == Source()
    assert Source().embedded
    with pytest.raises(PosencError, match="--tokenized names a column"):
        source_of(DocumentOptions(tokenized="input_ids"))


def test_a_model_has_an_embedding_for_every_token() -> None:
    own = sizes(50, 64, width=2, layers=2, heads=(2, 2))
    model = LlamaForCausalLM(LlamaConfig(**own, head_dim=2))
    settings, plain = Settings(lengths=(8, 16)), Candidate.parse("none").checked(model)
    fits = TokenizedDocument("a", torch.full((16,), 49, dtype=torch.uint16), None, None)
    too_large = TokenizedDocument("b", torch.arange(35, 51), None, None)
    PerplexityRun(model, [fits], [plain], settings)

    with pytest.raises(PosencError, match="gives token 50, the model has 50"):
        PerplexityRun(model, [fits, too_large], [plain], settings)


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
    nothing = pyarrow.table({"text": pyarrow.array([], "string")})
    parquet.write_table(nothing, tmp_path / "a.parquet")
    assert "a parquet file without rows" in refusal(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "b.parquet")
    assert list(read_paths([str(tmp_path / "b.parquet")])) == [
        Document(f"{tmp_path}/b.parquet#0", "a"),
        Skipped(f"{tmp_path}/b.parquet#1", "column 'text' holds null, not text"),
    ]


def test_datasets_that_are_damaged_or_empty(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": ["a"]})
    (tmp_path / "data").mkdir()
    one.select([]).to_parquet(tmp_path / "data" / "test.parquet")
    (entry,) = read_dataset(str(tmp_path / "data"))
    assert entry == Skipped(f"{tmp_path}/data[test]", "a split without rows")
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
    assert "of dataset" in refusal(tmp_path / "empty")
    one.save_to_disk(tmp_path / "damaged")
    for path in (tmp_path / "damaged").glob("*.arrow"):
        path.write_bytes(b"garbage")
    assert "of dataset" in refusal(tmp_path / "damaged")
    (tmp_path / "damaged" / "state.json").write_text("{")
    assert "cannot be read" in refusal(tmp_path / "damaged")
