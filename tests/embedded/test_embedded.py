from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_posenc import embedded
from hf_posenc.embedded import HELD_OUT, held_out_documents, held_out_files, model_path
from hf_posenc.embedded.corpus import STDLIB, Source, select
from scripts import train_tiny_llama
from scripts.train_tiny_llama import END_OF_TEXT, Batches, model_card

# --- the held-out documents -------------------------------------------------------------------------

# The held-out modules that are packages, in every supported Python.
PACKAGES: dict[tuple[int, int], set[str]] = {
    (3, 10): set(),
    (3, 11): set(),
    (3, 12): {"zipfile"},
    (3, 13): {"zipfile", "pathlib"},
    (3, 14): {"zipfile", "pathlib"},
}
MAY_BE_MISSING = {"turtle"}  # where Python was built or packaged without Tk


def test_every_held_out_module_is_a_long_document_of_this_python() -> None:
    documents = dict(held_out_documents())
    assert set(HELD_OUT) - documents.keys() <= MAY_BE_MISSING
    assert list(documents) == [name for name in HELD_OUT if name in documents]
    assert min(map(len, documents.values())) > 30_000
    assert len(set(documents.values())) == len(documents)


def test_the_forms_of_the_held_out_modules_are_pinned() -> None:
    version = sys.version_info[:2]
    if version not in PACKAGES:
        pytest.skip(f"the modules of Python {version[0]}.{version[1]} are not pinned yet")
    assert {name for name in HELD_OUT if len(held_out_files(name)) > 1} == PACKAGES[version]
    moved = version >= (3, 12)
    assert held_out_files("datetime")[0].name == ("_pydatetime.py" if moved else "datetime.py")


def test_a_package_is_read_whole_and_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "zipfile" / "_path").mkdir(parents=True)
    (tmp_path / "zipfile" / "__init__.py").write_text("one\n")
    (tmp_path / "zipfile" / "_path" / "glob.py").write_text("two\n")
    (tmp_path / "zipfile" / "zzz.py").write_text("three\n")
    (tmp_path / "zipfile" / "data.txt").write_text("no\n")
    (tmp_path / "enum.py").write_text("four\n")
    documents = [("zipfile", "one\ntwo\nthree\n"), ("enum", "four\n")]
    assert list(held_out_documents(tmp_path)) == documents


def test_a_module_that_only_re_exports_is_read_where_it_moved(tmp_path: Path) -> None:
    (tmp_path / "datetime.py").write_text("from _pydatetime import *\n")
    (tmp_path / "_pydatetime.py").write_text("class date: ...\n")
    assert list(held_out_documents(tmp_path)) == [("datetime", "class date: ...\n")]


def test_the_embedded_package_imports_nothing_heavy() -> None:
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, embedded.__file__]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "set()"


# --- the corpus -------------------------------------------------------------------------------------


def prose(name: str, lines: int = 60) -> str:
    """Return a file of distinctive lines, disjoint from those of any other name."""
    words = [blake2b(f"{name} {i}".encode(), digest_size=12).digest() for i in range(lines)]
    letters = ("".join(chr(ord("a") + byte % 26) for byte in word) for word in words)
    return "".join(f"{word} = {name}({word[::-1]})\n" for word in letters)


def digits(lines: int) -> str:
    """Return the rows of a table of numbers without a pattern."""
    return "".join(f"    {int(blake2b(str(i).encode()).hexdigest(), 16)},\n" for i in range(lines))


def mixed(a: str, b: str, share: float, lines: int = 60) -> str:
    """Return a file that shares `share` of its lines with `b`, the rest only with `a`."""
    cut = round(share * lines)
    first, rest = (prose(name, lines).splitlines(keepends=True) for name in (b, a))
    return "".join(first[:cut] + rest[cut:])


def source(root: Path, name: str, files: dict[str, str]) -> Source:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Source(name, "1.0", "MIT", root, tuple(sorted(files)))


@pytest.fixture
def stdlib(tmp_path: Path) -> Source:
    files = {
        "enum.py": prose("enum"),
        "pathlib/__init__.py": prose("pathlib"),
        "pathlib/_local.py": prose("local"),
        "heapq.py": prose("heapq"),
        "test/test_enum.py": prose("enum_tested"),
        "site-packages/stray.py": prose("stray"),
    }
    return source(tmp_path / "stdlib", STDLIB, files)


def chosen(sources: list[Source], stdlib: Source, limit: int = 10**9) -> set[str]:
    return {
        path for *_, path, _ in select(sources, bytes_per_source=limit, stdlib=stdlib.root).files
    }


def test_held_out_modules_and_their_tests_are_not_in_the_corpus(stdlib: Source) -> None:
    assert chosen([stdlib], stdlib) == {"heapq.py"}


def test_no_held_out_module_of_this_python_is_in_the_corpus() -> None:
    files = [file for name in HELD_OUT for file in held_out_files(name)]
    root = next(file.parent for file in files if file.name == "typing.py")
    paths = [file.relative_to(root).as_posix() for file in files]
    corpus = select([Source(STDLIB, "", "", root, (*paths, "heapq.py"))], bytes_per_source=10**6)
    assert [path for _, path, _ in corpus.files] == ["heapq.py"]


def test_a_file_with_lines_of_a_held_out_one_is_left_out(stdlib: Source, tmp_path: Path) -> None:
    files = {
        "backport.py": mixed("backport", "enum", 0.5),
        "borrows.py": mixed("borrows", "local", 0.15),
        "quotes.py": mixed("quotes", "enum", 0.05),
    }
    assert chosen([source(tmp_path / "site", "pkg", files)], stdlib) == {"quotes.py"}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tests/case.py", prose("a")),
        ("pkg/test_case.py", prose("a")),
        ("pkg/conftest.py", prose("a")),
        ("pkg/_vendor/six.py", prose("a")),
        ("short.py", "x = 1\n"),
        ("stamped.py", "# This file was generated by make_tables.py. Do not edit.\n" + prose("a")),
        ("numbers.py", f"TABLE = [\n{digits(400)}]\n"),
        ("repeated.py", prose("a", 1) * 300),
        ("long_line.py", prose("a") + "data = '" + "abcdefgh" * 300 + "'\n"),
    ],
)
def test_tests_vendored_copies_and_generated_tables_are_left_out(
    path: str, text: str, stdlib: Source, tmp_path: Path
) -> None:
    files = {path: text, "kept.py": prose("kept")}
    assert chosen([source(tmp_path / "site", "pkg", files)], stdlib) == {"kept.py"}


# --- training ---------------------------------------------------------------------------------------


def test_a_batch_is_a_function_of_its_step_and_an_epoch_reads_each_block_once() -> None:
    tokens = torch.arange(1000).numpy().astype("uint16")
    batches = Batches(tokens, context=10, size=7, seed=3)
    steps = batches.blocks // batches.size
    starts = [int(row[0]) for step in range(steps) for row in batches[step]]
    assert len(set(starts)) == len(starts) == steps * 7
    assert {(start - starts[0]) % 10 for start in starts} == {0}
    assert all((row[1:] == row[:-1] + 1).all() for row in batches[steps])
    assert (batches[5] == Batches(tokens, context=10, size=7, seed=3)[5]).all()
    assert (batches[0] != batches[steps]).any()
    assert (batches[0] != Batches(tokens, context=10, size=7, seed=4)[0]).any()


@pytest.fixture
def small_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the environment by the standard library's `json` and `email`, a corpus of a second."""
    root = held_out_files("typing")[0].parent
    files = [
        file.relative_to(root).as_posix()
        for folder in ("json", "email")
        for file in sorted((root / folder).glob("*.py"))
    ]

    def environment() -> Iterator[Source]:
        yield Source(STDLIB, "test", "PSF-2.0", root, tuple(files))

    monkeypatch.setattr(train_tiny_llama, "environment", environment)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon optimizer")
@pytest.mark.usefixtures("small_environment")
@pytest.mark.slow
def test_the_training_script_makes_a_checkpoint_and_goes_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tiny_llama.main(tmp_path / "whole", preset="smoke")
    log = json.loads((tmp_path / "whole" / "training_log.json").read_text())
    assert log["curve"][0]["loss"] > log["curve"][-1]["loss"]
    assert log["corpus"]["sources"][0]["name"] == STDLIB
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    ids = tokenizer("def f(x):\n    return x\n", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids=ids).logits).all()
    assert model.dtype == torch.bfloat16

    usual = train_tiny_llama.rate

    def killed(step: int, settings: train_tiny_llama.Settings) -> float:
        if step == 15:  # after a checkpoint at 12 and a report at 14
            raise KeyboardInterrupt
        return usual(step, settings)

    monkeypatch.setattr(train_tiny_llama, "rate", killed)
    with pytest.raises(KeyboardInterrupt):
        train_tiny_llama.main(tmp_path / "resumed", preset="smoke")
    assert not (tmp_path / "resumed").exists()
    monkeypatch.setattr(train_tiny_llama, "rate", usual)
    with pytest.raises(Exception, match="another run"):
        train_tiny_llama.main(tmp_path / "resumed", preset="smoke", seed=5)
    train_tiny_llama.main(tmp_path / "resumed", preset="smoke")
    resumed = json.loads((tmp_path / "resumed" / "training_log.json").read_text())
    assert resumed["curve"] == log["curve"]
    assert resumed["held_out"] == log["held_out"]
    weights = [tmp_path / name / "model.safetensors" for name in ("whole", "resumed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


# --- the checkpoint that ships ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(model_path())
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_the_checkpoint_is_small_and_plain() -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path())
    config = model.config
    assert model.dtype == torch.bfloat16
    assert (model_path() / "model.safetensors").stat().st_size <= 16 * 2**20
    assert 1e6 <= model.num_parameters() <= 8e6
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config.max_position_embeddings in {256, 512}
    with safe_open(model_path() / "model.safetensors", "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118


def test_the_model_card_is_made_from_the_log_and_names_no_machine() -> None:
    log = json.loads((model_path() / "training_log.json").read_text(encoding="utf-8"))
    assert (model_path() / "README.md").read_text(encoding="utf-8") == model_card(log)
    assert log["parameters"] == AutoModelForCausalLM.from_pretrained(model_path()).num_parameters()
    assert log["corpus"]["held_out"] == list(HELD_OUT)
    for file in model_path().glob("*"):
        if file.name not in {"model.safetensors", "tokenizer.json"}:
            text = file.read_text(encoding="utf-8")
            place = re.search(r"/(root|home|Users|work|tmp|opt|usr)\b|https?://", text)
            assert not place, file.name


@pytest.mark.slow
def test_the_perplexity_is_that_of_the_log_and_explodes(tokenizer: PreTrainedTokenizerFast) -> None:
    log = json.loads((model_path() / "training_log.json").read_text(encoding="utf-8"))
    written = {row["length"]: row["perplexity"] for row in log["held_out"]["results"]}
    context, longest = min(written), max(written)
    model = LlamaForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    target = context // 2
    windows, _ = train_tiny_llama.held_out_windows(
        tokenizer, log["settings"]["windows"], longest, target
    )
    measured = {
        length: train_tiny_llama.perplexity(model, windows, length, target)
        for length in (context, 4 * context)
    }
    assert measured[context] < 16
    assert measured[4 * context] > 2 * measured[context]
    if log["versions"]["Python"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]:
        assert measured[context] == pytest.approx(written[context], rel=0.05)
        assert measured[4 * context] == pytest.approx(written[4 * context], rel=0.05)


@settings(max_examples=20)
@given(text=st.text())
def test_decoding_gives_back_any_text(text: str, tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_decoding_gives_back_the_documents_and_no_special_token_is_added(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "def f(x):\r\n\treturn  x  # \u00e9 \U0001f600 \u2028 \x00\n\n\n"
    for sample in (text, next(held_out_documents())[1][:50_000], END_OF_TEXT):
        assert tokenizer.decode(tokenizer(sample).input_ids) == sample
    assert tokenizer(END_OF_TEXT).input_ids == [0]
    assert 0 not in tokenizer(text).input_ids
    assert tokenizer("").input_ids == []
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
