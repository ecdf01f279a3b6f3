"""Hostile inputs, as tables that anyone can extend: an input, and the one line that answers it.

`REFUSED` has command lines, `CALLS` Python expressions, `FILES` and `ZSTD` documents, `CHECKPOINTS` damaged folders.
What is refused before torch is imported is in test_early.py.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, constants
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import hf_posenc
from hf_posenc import engines, training
from hf_posenc.attention import engine
from hf_posenc.embedded import model_path
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import measure_perplexity
from hf_posenc.evaluation.bench import bench
from hf_posenc.evaluation.device.selftest import selftest
from hf_posenc.evaluation.documents import load_documents, read_dataset, read_paths, readers
from hf_posenc.evaluation.documents import source as joining
from hf_posenc.evaluation.options import BenchOptions, PerplexityOptions, SelftestOptions
from hf_posenc.evaluation.recommend import recommend
from hf_posenc.evaluation.retrieval.run import measure_retrieval
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.methods import YaRN
from hf_posenc.training import PositionCollator
from tests.support import zoo
from tests.support.commands import invoke, refused, succeeded
from tests.support.documents_forms import GOOD, PACK, refusal, zstd
from tests.support.selection import quick
from tests.support.tiny_text import byte_tokenizer, prose, text_files, tiny_checkpoint

pytestmark = pytest.mark.timeout(60)  # nothing waits for what never comes

EMPTY = "is empty. Is a shell variable unset? Give a value, or leave it out for the default."
RUN = "perplexity {model} --text {texts} --output {out}"
AT_32 = f"{RUN} --lengths 32"
SWEEP = "sweep {model} --text {texts} --output {out} --target-length"
DATASET = "perplexity {model} --dataset {data} --output {out} --lengths 32"

# A command line and a part of the one line on stderr. {model} is a checkpoint trained at 64 tokens, {texts} a folder of
# texts, {rows} a file of JSON lines with a column "body", {out} a folder for results.
REFUSED: list[tuple[str, str]] = [
    # words
    ('""', f"error: The value after hf-posenc {EMPTY}"),
    (f'{RUN} --patch ""', f"error: The value after --patch {EMPTY}"),
    ("perplexity {model} --text {texts} --output=", f"error: The value --output {EMPTY}"),
    (f"{AT_32} --chunk=1 --chunk 2", "error: --chunk is given twice, and takes one value: give it"),
    (f"{AT_32} --patch", "requires an argument. Try: hf-posenc perplexity --help"),
    ("serve {model}", "'serve'. vLLM serves a patched model: hf-posenc export FOLDER --to vllm"),
    ("perplexity MODEL", "error: There is no model folder MODEL. Give a folder that"),
    ("--banana", "error: No such option: --banana. Try: hf-posenc --help"),
    # documents
    (f"{AT_32} --split train", "error: --split train is for a --dataset, and nothing"),
    (f"{AT_32} --column body", "--column body is for rows (a --dataset, JSON lines or"),
    ("bench {model} --output {out} --column body", "and nothing here would use it: leave it out."),
    (DATASET, "has no column 'text'; its columns are body"),
    # methods
    (f"{RUN} --patch yarn:scale=8,scale=4", "scale is given twice; give it once."),
    (f"{RUN} --patch yarn:factor=8", "option of yarn 'factor'. It is called scale here."),
    (f"{RUN} --patch none+log_n", "'none' is the model as it was loaded, and not a method"),
    (f"{AT_32} --patch self_extend:window=64", "is below the original context of 64 tokens"),
    (f"{AT_32} --patch yarn:scale=1e300", "extends 64 tokens to 6.4e+301: give a sm"),
    # lengths
    (f'{RUN} --lengths "32 64"', "--lengths 32 64: separate lengths by commas, as in 512,"),
    (f"{RUN} --lengths 0", "--lengths 0: '0' is no length; give a whole number of tokens"),
    (f"{RUN} --lengths 64:32:8", "'64:32:8' ends before it begins."),
    (f"{RUN} --lengths 8:1000000000000:1", "is 999,999,999,993 lengths, and at most 1,000 are"),
    (f"{RUN} --lengths 64,4k", "No document can be used"),
    ("bench {model} --target-length 32 --output {out}", "the model was trained at 64 tokens alre"),
    # protocols and tasks
    (f"{AT_32} --protocol sliding --stride 33", "--stride 33 is more than the sh"),
    (f"{AT_32} --longppl @rerope", "--longppl @rerope: give a name or self, and a"),
    ("retrieval {model} --decode generate --distractors 5", "--distractors 5 is for --decode tea"),
    ("sweep {model} --text {texts} --patch rerope --scales 4", "--scales 4 is for methods without"),
    ("retrieval {model} --lengths 60 --output {out}", "error: No task fits into 60 tokens: pa"),
    (f"{SWEEP} 64", "trained at 64"),
    (f"{SWEEP} 128 --patch yarn --patch yarn:scale=2", "yarn (scale 2) is given twice"),
    (f"{SWEEP} 4k", "No document can be used"),
    (f"search {SWEEP[6:]} 128 --limit 1", "needs two documents"),
    (f"search {SWEEP[6:]} 128 --search-documents 3", "one at least stays held out"),
    # devices
    (f"{AT_32} --device cpu --device-map cpu", "--device and --device-map exclude"),
    (f"{AT_32} --device mps", f"PyTorch {torch.__version__} sees cpu and"),
    (f"{AT_32} --device-map meta", "weights of the model are on the device meta, which"),
    # exports and pages
    ("export {model} --to vllm --verify", "--verify loads in transformers; vllm cannot be tried"),
    ("export {model} --to vllm --gguf {rows}", "--gguf goes with --to llama.cpp, not with --to vl"),
    ("export {model} --to transformers4 --verify --packages {texts}", "Install one there: pip ins"),
    ("export {model} --to vllm --output {model}", "is where the model is. Give another folder"),
    ("report {texts} --output {rows}", "is there and no page: give another name, as report.html."),
]
ACCEPTED = [
    f'{RUN} --lengths "32, 64" --patch none --dry-run',
    f"{RUN} --patch yarn:target_length=1k --lengths 32,64 --dry-run",
    f"{RUN} --text {{rows}} --column body --lengths 32 --patch none --dry-run",
    f"{AT_32} --patch none --longppl self --longppl-short 8 --dry-run",
    f"{AT_32} --text {{texts}}/../table.csv --dry-run",
    f"{DATASET} --column body --dry-run",
    "inspect {model} --patch yarn:original_max_position_embeddings=32.0,scale=2",
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "rows.jsonl").write_text(json.dumps({"body": prose(300)}))
    (folder / "table.csv").write_text("text\n" + prose(300))
    names = {"texts": text_files(folder / "texts", 3), "data": folder / "data"}
    names["data"].mkdir()
    shutil.copy(folder / "rows.jsonl", names["data"] / "test.jsonl")
    names["rows"] = folder / "rows.jsonl"
    return {**names, "model": tiny_checkpoint(folder / "model")}


def lines_of(result: Any, kind: str = "error: ") -> list[str]:
    assert "Traceback" not in result.output
    return [line for line in result.stderr.splitlines() if line.startswith(kind)]


@pytest.mark.parametrize(
    ("command", "line"), [*REFUSED, *((one, "") for one in ACCEPTED)], ids=lambda v: str(v)[:60]
)
def test_a_command_line_is_answered_by_one_line(
    command: str, line: str, places: dict[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*shlex.split(command.format(**places, out=tmp_path / "out")))
    assert result.exit_code == (2 if line else 0), result.output
    lines = lines_of(result)
    assert len(lines) == (1 if line else 0), result.output
    assert line in "".join(lines)


NO_LENGTH = "is no length; give a whole number of tokens, such as 4096 or 32k."
NOT_A_METHOD = "A method is a name such as 'yarn' (available_methods() lists them)"

# A Python expression on a tiny Llama of 4 layers, trained at 64 tokens, and a part of the message of its PosencError.
# `{}` of a group stands for the arguments.
CALLS: dict[str, dict[str, str]] = {
    "patch_model({})": {
        "model, None": f"{NOT_A_METHOD}, a Method object, or a list of them, not None.",
        "model, ['yarn', 5], scale=2": NOT_A_METHOD,
        "model, {'method': 'yarn'}": "has no method layers. Its layers are full_attention",
        "model, []": "An empty list of methods: name at least one.",
        "model, 'yarn:scale=8'": "as in patch_model(model, 'yarn', scale=8)",
        "model, 'yarn+log_n'": "several methods are a list, as in [YaRN(",
        "model, 'yarn', max_position_embeddings=512": "It is called target_length here.",
        "model, 'yarn', target_length=math.inf": f"target_length: inf {NO_LENGTH}",
        "model, 'truncation'": "is no method, but a control of measurements",
        "pipe, 'yarn', scale=2": "Pipe is not a model: give the model that it holds",
        "'gpt2', 'yarn', scale=2": "'gpt2' is a name, not a model: load it first, as in",
    },
    "{}": {
        "unpatch_model(pipe)": "give the model that it holds, as .model.",
        "save_patch(patch_model(type(model)(model.config), 'yarn', scale=2), '')": "'' is no folder",
        "load_patch(model, {'method': 'yarn'})": "A patch is a recipe's name, a JSON file or a dir",
        "load_patch(model, model_path())": "saved with its patch is loaded by from_pretrained.",
        "load_patch(model, torn)": "/torn.json: This is not a patch in JSON: Expecting value",
        "chunk_loss(nn.Linear(1, 1))": "Linear has no transformers config: give a causal language",
        "engines.export('/gone', 'vllm')": "There is no model folder /gone. Give a folder that save",
        "engines.export(model_path(), 'vllm', banana=5)": "banana belong to a method, and none is",
    },
    "hf_posenc.from_pretrained({})": {
        "model": "by its folder or hub name, not by LlamaForCausalLM",
        "''": "There is no model folder ''. Give a folder that save_pr",
        "'no-such-model'": "no folder has this name, and it is not cached.",
        "'a b'": "There is no model a b: no folder has this name, and it is no hub",
    },
    "hf_posenc.PatchConfig.from_dict({})": {
        "dict(format=1, method='yarn', others=3)": "This is not a patch: TypeError",
        "dict(format=1, method='abf', options=[1])": "This is not a patch: TypeError",
        "dict(format=1, method='nope', compose='yes')": "of a patch are true or false",
    },
    "TokenScorer({})": {
        "nn.Linear(1, 1), ids": "Linear has no token embeddings: give a causal language model",
        "model, ids)([1, 9999]": "Token 9,999: the model has embeddings for 0 to 127.",
        "model, ids[:1]": "numbers of shape (n,) or (windows, n), n at least 2, not tensor([0]).",
    },
    "measure_perplexity({})": {
        "'gpt2', tok, texts": "'gpt2' is a name, not a model: load it first",
        "nn.DataParallel(model), tok, texts": "the model inside, its attribute .m",
        "model.to('meta'), tok, texts": "are on the device meta, which holds none",
        "model, 'gpt2', texts": "'gpt2' is no tokenizer: give the model's, as",
        "model, tok, texts, lengths=32": "The tokenizer does not belong to the mod",
        "model, tok, texts[0]": "a list of texts, not one text: write [text].",
        "model, tok, texts, {'lengths': [8]}": "a PerplexityOptions, not dict: its",
    },
    "PerplexityOptions({})": {
        "methods='yarn:scale=2'": "not one text: write methods=['yarn:scale=2'].",
        "methods=[YaRN(scale=2)]": "methods is a list of texts as --patch takes them",
        "lengths=[512, '1q']": f"lengths: '1q' {NO_LENGTH}",
        "lengths=[]": "lengths is empty: give at least one, or None for",
        "stride='8'": "stride is a whole number of at least 1, not '8'.",
    },
    "BenchOptions({})": {
        "rounds=-1": "rounds is a whole number of at least 0, not -1.",
        "target_length=512.5": f"target_length: 512.5 {NO_LENGTH}",
    },
    "SelftestOptions({})": {"head_dims=[0]": "head_dims is a whole number of at least 1, not 0."},
    "measure_retrieval(model, tok, lengths=256, {})": {
        "tasks=[]": "Give at least one of the tasks.",
        "samples=None": "samples is a whole number of at least 1, not None.",
        "sample=1": "Did you mean 'samples'?",
        "depths=(0.0, 1.5)": "Depths go from 0 to 1, not [0.0, 1.5].",
        "decode='generate', prefill=9": "--decode generate takes no --prefill-chunk, no --chunk",
        "": "The tokenizer does not belong to the mod",
    },
    "selftest({}, device='cpu')": {
        "dtypes=['float64']": "Unknown dtype 'float64'",
        "methods=['yarn']": "Unknown method of the engine 'yarn'",
    },
    "prepare_blocks({})": {
        "texts[0], tok, length=16": "The documents are a list of texts, not one text: write [text].",
        "texts, tok, length=None": f"length: None {NO_LENGTH}",
    },
    "choose_parameters(model, 'lora', {})": {
        "modules_to_save=['banana']": "modules_to_save names 'banana', and no module is called",
        "banana=5": "peft.LoraConfig does not take these options: ",
    },
    "check_run({})": {"model, positions='pakced'": "Unknown kind of positions 'pakced'. Did"},
    "distill(model, {})": {
        "positions='pse', teacher=model": "Unknown kind of positions 'pse'. Did"
    },
    "Collator({})": {
        ")([{'input_ids': []}]": "Example 0 of the batch has no tokens: leave it out.",
        "None": "Unknown kind of positions None. Available: contiguous, cream, endprompt, ",
        ")([{'input_ids': [1, 2], 'labels': [1]}]": "Example 0 of the batch has 1 labels for 2 tok",
    },
}
OPTIONS = (BenchOptions, PerplexityOptions, SelftestOptions, TokenScorer)
FUNCTIONS = (bench, measure_perplexity, measure_retrieval, recommend, selftest)
READERS = (model_path, read_dataset, read_paths)


class Pipe:
    """An object that holds a model, as a pipeline and a trainer do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def call(expression: str, model: nn.Module, torn: Path) -> Any:
    """Evaluate an expression of `CALLS`; `torn` is the file of a patch that ends in the middle."""
    torn.write_text('{"format": 1, "method":')
    names: dict[str, Any] = {name: getattr(hf_posenc, name) for name in hf_posenc.__all__}
    names |= {name: getattr(training, name) for name in training.__all__}
    names |= {"model": model, "pipe": Pipe(model), "torn": torn, "tok": byte_tokenizer()}
    names |= {"texts": [prose(300, index) for index in range(2)], "ids": torch.arange(9)}
    names |= {"engines": engines, "hf_posenc": hf_posenc, "math": math, "nn": nn}
    names |= {thing.__name__: thing for thing in (*OPTIONS, *FUNCTIONS, *READERS)}
    return eval(expression, {**names, "Collator": PositionCollator, "YaRN": YaRN})


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (function.replace("{}", arguments, 1), message)
        for function, cases in CALLS.items()
        for arguments, message in cases.items()
    ],
)
def test_a_call_is_answered_by_one_line(expression: str, message: str, tmp_path: Path) -> None:
    model = zoo.build("llama")
    with pytest.raises(PosencError) as error:
        call(expression, model, tmp_path / "torn.json")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert hf_posenc.get_patch(model) is None


@pytest.mark.parametrize(
    "length",
    quick(["1k", " 1K ", "1024", 1024.0, np.int64(1024), np.float64(1024)], [" 1K ", 1024]),
)
def test_every_form_of_a_length_is_the_integer(length: Any, tmp_path: Path) -> None:
    model = zoo.build("llama")
    hf_posenc.patch_model(model, "yarn", target_length=length)
    patch = zoo.in_force(model)
    assert patch.extended_length == 1024
    assert type(model.config.max_position_embeddings) is int
    model.save_pretrained(tmp_path)
    assert hf_posenc.get_patch(hf_posenc.from_pretrained(tmp_path)) is not None
    hf_posenc.unpatch_model(model)
    hf_posenc.patch_model(model, "yarn", scale=2, original_max_position_embeddings=length)
    patch = zoo.in_force(model)
    assert type(patch.original_max_position_embeddings) is int
    assert BenchOptions(target_length=length).target_length == 1024
    assert PerplexityOptions(lengths=[64, length]).lengths == (64, 1024)


def test_numbers_and_arrays_of_other_libraries_are_taken() -> None:
    model, tokenizer, texts = zoo.build("llama"), byte_tokenizer(), [prose(300)]
    scales: list[Any] = [np.float32(2), np.int64(2), torch.tensor(2.0)]
    for scale in scales:
        hf_posenc.patch_model(model, "yarn", scale=scale, replace=True)
        patch = zoo.in_force(model)
        assert (patch.config.scale, json.loads(patch.config.to_json())["scale"]) == (2, 2)
    hf_posenc.unpatch_model(model)
    layers: Any = np.array([0, 1])
    hf_posenc.patch_model(model, "rerope", window=np.int64(16), layers=layers)
    hf_posenc.unpatch_model(model)
    factors: dict[str, Any] = {name: np.full(8, 2.0) for name in ("short_factor", "long_factor")}
    hf_posenc.patch_model(model, "longrope", scale=2, **factors)
    model = zoo.build("llama", vocab_size=257)
    result = measure_perplexity(model, tokenizer, texts, lengths=[32], batch=np.int64(2))
    json.dumps(result.to_dict())
    ids: list[Any] = [np.arange(9), [1, 2, 3]]
    scorer = TokenScorer(model, ids[0])
    assert torch.equal(scorer(ids[1]), scorer(torch.tensor([1, 2, 3], dtype=torch.uint8)))


# The name of a file, its content, and a part of the reason why it is not read.
FILES: dict[str, tuple[bytes, str]] = {
    "empty.txt": (b"", "empty"),
    "only-bom.txt": (b"\xef\xbb\xbf", "empty"),
    "utf16.txt": (GOOD.encode("utf-16"), "UTF-16: give --encoding utf-16"),
    "paper.txt": (b"%PDF-1.4\n" + GOOD.encode(), "a PDF, not text: extract its text first"),
    "zip.txt": (b"PK\x03\x04" + GOOD.encode(), "a zip archive, as are .docx and .xlsx"),
    "latin1.txt": (b"x" * 70_000 + b"na\xefve", "(byte 0xef at offset 70002); if it is cp1252"),
    "cut.txt": ("three €".encode()[:-1], "not UTF-8 (byte 0xe2 at offset 6)"),
    "gzip.txt": (gzip.compress(GOOD.encode()), "gzip data: its name must end in .gz"),
    "text.gz": (GOOD.encode(), "not gzip data, or damaged"),
    "torn.txt.gz": (gzip.compress(os.urandom(5000).hex().encode())[:3000], "truncated: its gzip"),
    "array.jsonl": (b"[1, 2]\n", "a JSON list, not an object with columns"),
    "torn.jsonl": (b'{"text": "it ends he', "; the file ends within this line"),
    "no-column.jsonl": (b'{"body": "x"}\n', "no column 'text'; its columns are body. Pass --col"),
    "surrogate.jsonl": (b'{"text": "half \\ud83d of it"}\n', "half of a surrogate pair (\\ud83d)"),
    "text.parquet": (GOOD.encode(), "not a parquet file, or damaged"),
    "array.npy": (b"\x93NUMPY\x01\x00", "an array of numpy: write token ids as rows"),
    "odd.bin": (b"\1\0\2", "not text: a NUL byte at offset 1"),
    "text.zst": (GOOD.encode(), "not zstd data, or damaged"),
}


def test_libraries_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, library, None)
    for name, library in (("a.txt.zst", "pyarrow"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        message = refusal(tmp_path / name)
        assert f"need the {library} library: pip install 'hf-posenc[data]'" in message
    message = r"needs the datasets library: pip install 'hf-posenc\[data\]'"
    with pytest.raises(PosencError, match=message):
        list(read_dataset("anything"))


BOMB = 32 << 20


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.slow
def test_bombs_take_little(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST", 1 << 20)
    monkeypatch.setattr(joining, "PART", 1 << 16)
    pack = gzip.compress if ending == ".gz" else zstd
    (tmp_path / f"letters.txt{ending}").write_bytes(pack(b"a" * BOMB))
    (tmp_path / f"line.jsonl{ending}").write_bytes(pack(b"a" * BOMB + b'\n{"text": "end"}'))
    (tmp_path / f"zeros.txt{ending}").write_bytes(pack(b"\0" * BOMB))
    (tmp_path / f"words.txt{ending}").write_bytes(pack(b"many words " * (BOMB // 11)))
    tracemalloc.start()
    try:
        usable, skipped = load_documents(
            read_paths([str(tmp_path)]), byte_tokenizer(), min_tokens=1, max_tokens=999
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    reasons = {Path(entry.name).name: entry.reason for entry in skipped}
    assert reasons[f"line.jsonl{ending}:1"] == "a line of more than 1,048,576 bytes"
    assert reasons[f"zeros.txt{ending}"] == "not text: a NUL byte at offset 0"
    assert [len(document) for document in usable] == [999, 3, 999]
    assert peak < BOMB // 2


ENDINGS = ("txt", "txt.gz", "txt.zst", "jsonl", "jsonl.gz", "parquet")


def valid(ending: str) -> bytes:
    if ending == "parquet":
        pyarrow, parquet = (pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet"))
        file = io.BytesIO()
        parquet.write_table(pyarrow.table({"text": [GOOD]}), file)
        return file.getvalue()
    kind, *packed = ending.split(".")
    plain = {"txt": GOOD.encode(), "jsonl": json.dumps({"text": GOOD}).encode() + b"\n"}[kind]
    return PACK["." + packed[0]](plain) if packed else plain


@pytest.mark.parametrize("ending", quick(ENDINGS, ("txt.zst", "jsonl.gz", "parquet")))
@given(data=st.data())
def test_any_damage_is_a_reason_and_never_another_error(ending: str, data: st.DataObject) -> None:
    content = bytearray(valid(ending))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.none() | st.integers(0, len(content))) or len(content) :]
    content += data.draw(st.binary(max_size=20))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{ending}"
        path.write_bytes(content)
        entries = list(read_paths([str(path)]))
        assert entries
        for entry in entries:
            with contextlib.suppress(PosencError):
                load_documents([entry], byte_tokenizer(), min_tokens=1)


def test_a_run_over_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(readers, "SMALL", 1 << 12)
    folder = tmp_path / "inputs"
    folder.mkdir()
    for name, (content, _) in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "good.txt").write_text(GOOD)
    os.mkfifo(folder / "pipe.txt")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "[red]\n[").write_bytes(b"")
    model = tiny_checkpoint(tmp_path / "model")
    arguments = ["perplexity", model, "--text", folder, "--lengths", "32,64", "--patch", "none"]
    result = succeeded(*arguments, "--no-plot", "--output", tmp_path / "out")
    assert f"1 document, {len(FILES) + 3} skipped" in result.stdout
    known = json.loads((tmp_path / "out" / "perplexity.json").read_text())
    assert [Path(document["name"]).name for document in known["documents"]] == ["good.txt"]
    assert len(known["skipped"]) == len(FILES) + 3
    found = {Path(each["name"]).name.split(":")[0]: each["reason"] for each in known["skipped"]}
    for name, (content, reason) in FILES.items():
        assert reason in found[name], name
        assert "\n" not in found[name]
        assert (folder / name).read_bytes() == content
    assert len(list(folder.iterdir())) == len(FILES) + 4  # nothing was unpacked beside them
    warned = lines_of(result, "warning: skipped")
    assert len(warned) == 6  # the last one counts the others
    assert warned[0].endswith(r"[red]\n[: empty")


Damage = Callable[[Path], object]


def _edit(folder: Path, name: str = "config.json", **values: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _config(name: str = "config.json", **values: Any) -> Damage:
    return lambda folder: _edit(folder, name, **values)


def _rope(kind: str, **values: Any) -> Damage:
    return _config(rope_parameters={"rope_type": kind, "rope_theta": 1e4, **values})


def _weights(change: Callable[[str, Any], Any]) -> Damage:
    """Replace every tensor by that of its name and value, with `None` for no tensor."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = {name: change(name, value) for name, value in load_file(file).items()}
        save_file({n: t for n, t in tensors.items() if t is not None}, file, {"format": "pt"})

    return damage


def _write(name: str, content: str | None) -> Damage:
    """Write a file in place of the weights, or of itself; `None`: a folder of its name."""

    def damage(folder: Path) -> None:
        (folder / ("model.safetensors" if "model" in name else name)).unlink(missing_ok=True)
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_text(content)

    return damage


def _remove(pattern: str) -> Damage:
    def damage(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return damage


def _index(**values: Any) -> Damage:
    return _write("model.safetensors.index.json", json.dumps(values))


_no_layer = _weights(lambda name, value: None if "layers.1." in name else value)
_DEEP = '{"a":' * 3000 + "1" + "}" * 3000
_EIGHT, _LISTS = [1.0] * 8, {"factor": 2.0, "original_max_position_embeddings": 32}
_BASE = '{"peft_type": "LORA", "base_model_name_or_path": "/gone"}'
_CODE: Any = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
_OTHER_PATCH = {"format": 1, "method": "banana", "options": {}, "before": {}}

# A checkpoint's damage and the line. All of them measure without an error in plain transformers, or raise an error that
# refers to a hidden report. The first thing that is wrong is named, in this order: files that are missing, config,
# model, tokenizer, weights.
CHECKPOINTS: dict[str, tuple[Damage, str]] = {
    "no config": (_remove("config.json"), "has no config.json (it has generation_config.json, "),
    "nothing": (_remove("*"), "has no config.json (it is empty). Give the folder that save_"),
    "a folder for a config": (_write("config.json", None), "is a folder or a link that leads no"),
    "a deep config": (_write("config.json", _DEEP), "is not JSON: maximum recursion depth exceede"),
    "a wrong type": (_config(hidden_size="abc"), "Field 'hidden_size' expected int, got str (val"),
    "many layers": (_config(num_hidden_layers=10**6), "which is more layers than any model has. C"),
    "no length": (_config(max_position_embeddings=-1), "config names a context length of -1: corr"),
    "no dtype": (_config(dtype="float7"), "has dtype = 'float7', which is no dtype of torch, such"),
    "unknown type": (_config(model_type="banana"), "you are trying to load has model type `banan"),
    "not causal": (_config(model_type="clip"), "is a clip model, which is not a causal language"),
    "unknown activation": (_config(hidden_act="banana"), "hidden_act: 'banana' is unknown to tra"),
    "custom code": (_config(**_CODE), "Read that code, and pass --trust-remote-code"),
    "another shape": (_config(vocab_size=300), "lm_head.weight is (257, 64) in the checkpoint and"),
    "a patch that is none": (_config(hf_posenc="banana"), 'The block "hf_posenc" in the config.j'),
    "an unknown patch": (_config(hf_posenc=_OTHER_PATCH), "The patch in the config.json of "),
    "no tokenizer": (_remove("token*"), "has no tokenizer files. Pass --tokenizer with a "),
    "broken tokenizer": (_write("tokenizer.json", "{"), "The tokenizer of "),
    "a length in words": (_config("tokenizer_config.json", model_max_length="x"), "The tokenizer"),
    "no base": (_write("adapter_config.json", _BASE), "There is no base model folder /gone. Give"),
    "an adapter on itself": (
        lambda folder: _write("adapter_config.json", _BASE.replace("/gone", str(folder)))(folder),
        "as its base model, and that holds an adapter. Correct base_model_name_or_path",
    ),
    # weights
    "no weights": (_remove("*.safetensors"), "it has neither model.safetensors nor pytorch_model"),
    "missing weights": (_no_layer, "lacks 9 of the model's weights: model.layers.1.input_layerno"),
    "half": (lambda f: os.truncate(f / "model.safetensors", 4000), "is damaged or incomplete ("),
    "a pointer": (_write("model.safetensors", "version https://git-lfs.github.com/"), "Git LFS"),
    "damaged torch weights": (_write("pytorch_model.bin", "x"), "incomplete (not what torch.save"),
    "no shard": (_index(weight_map={"model.norm.weight": "a.safetensors"}), "which is not there"),
    "a shard elsewhere": (_index(weight_map={"a": "/etc/passwd"}), "which is not beside it"),
    "not finite": (_weights(lambda _, value: value * math.nan), "weights of the model are not fi"),
    "all zero": (_weights(lambda _, value: value * 0), "The weights of the model are all zero"),
    "whole numbers": (_weights(lambda _, value: (9 * value).int()), " as I32, which is no floati"),
    # Rotary values of which transformers only logs that they are odd, or computes with another number in silence.
    "a base of zero": (_rope("default", rope_theta=0), "= 0, which is not a number above 1. Corr"),
    "a factor in words": (_rope("linear", factor="four"), "= 'four', which is not a number above"),
    "unknown rope type": (_rope("banana"), "rope_parameters.rope_type: 'banana' is unknown to tr"),
    "no factor": (_rope("linear"), "for 'rope_type'='linear': {'factor'}"),
    "a short list": (
        _rope("longrope", short_factor=[4.0], long_factor=_EIGHT, **_LISTS),
        "cannot be used: rope_parameters: short_factor field must have length 8, got 1. Restore",
    ),
}
# These are used, with a warning.
DOUBTFUL: dict[str, tuple[Damage, str]] = {
    "fewer layers": (_config(num_hidden_layers=1), "has 9 weights that the model has no use for:"),
    "other ties": (_config(tie_word_embeddings=True), "both are present in the checkpoints with "),
    "no type": (_rope("default", factor=4.0), "for 'rope_type'='default': {'factor'}"),
    "a factor below one": (_rope("linear", factor=0.5), "must be a float or int >= 1, got 0.5."),
    "a factor beside another": (
        _rope("yarn", factor=4.0, original_max_position_embeddings=32),
        "(config.rope_parameters['factor'] = 4.0) does not match the ratio implicitly set",
    ),
}


def _perplexity(model: Path, output: Path, *more: object, status: int = 0) -> Any:
    text = output.parent / "text.txt"
    text.write_text(prose(300))
    arguments = ["perplexity", model, "--text", text, "--lengths", "32", "--patch", "none"]
    result = invoke(*arguments, "--no-plot", "--output", output, *more)
    assert result.exit_code == status, result.output
    return result


# What is wrong with a tokenizer, with values or for a measurement.
_ONLY_IN_COMMANDS = (
    *("not causal", "no tokenizer", "broken tokenizer"),
    *("not finite", "all zero", "no length", "a length in words"),
)


@pytest.mark.parametrize("name", [*CHECKPOINTS, *DOUBTFUL])
def test_a_damaged_checkpoint_is_one_line(name: str, tmp_path: Path) -> None:
    damage, line = (CHECKPOINTS | DOUBTFUL)[name]
    model = tiny_checkpoint(tmp_path / "model")
    damage(model)
    result = _perplexity(model, tmp_path / "out", status=0 if name in DOUBTFUL else 2)
    (said,) = lines_of(result, "warning: " if name in DOUBTFUL else "error: ")
    assert line in said
    if name in _ONLY_IN_COMMANDS:
        return
    if name in CHECKPOINTS:
        with pytest.raises(PosencError) as error:
            hf_posenc.from_pretrained(model)
        message = str(error.value)
    else:
        with pytest.warns(UserWarning, match=re.escape(line)) as warned:
            hf_posenc.from_pretrained(model)
        (message,) = {str(warning.message) for warning in warned}
    assert line in message or name == "custom code"  # whose way out is another in Python
    assert "\n" not in message


def test_advice_on_keys_is_no_doubt(tmp_path: Path) -> None:
    """Phi-3's own configs have no `factor`; transformers recommends one, and computes the same without it."""
    model = tiny_checkpoint(tmp_path / "model")
    lists = {"short_factor": _EIGHT, "long_factor": _EIGHT}
    _rope("longrope", **lists, original_max_position_embeddings=32)(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_posenc.from_pretrained(model)


@pytest.mark.slow
def test_a_tokenizer_with_a_known_error_is_named(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    _edit(model, model_type="mistral", transformers_version="4.50.0")
    file = model / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"] |= {f"<{n}>": n for n in range(257, 100_001)}  # as in the family
    file.write_text(json.dumps(values))
    (line,) = lines_of(_perplexity(model, tmp_path / "out"), "warning: ")
    assert "This will lead to incorrect tokenization. You should set the `fix_mistral" in line
    assert "pass the folder as --tokenizer." in line


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[]", "is a JSON list, not an object."),
        ('{"model_max_length": "x"}', "has model_max_length = 'x', which is no length."),
    ],
)
def test_an_export_names_a_damaged_tokenizer(content: str, line: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(content)
    given = ["export", model, "--to", "vllm", "--patch", "yarn:scale=2"]
    assert line in refused(*given, "--output", tmp_path / "out")


def test_a_damaged_result_is_named(places: dict[str, Path], tmp_path: Path) -> None:
    file, page = tmp_path / "out" / "perplexity.json", tmp_path / "page.html"
    _perplexity(places["model"], file.parent)
    measured = json.loads(file.read_text())
    damages: list[dict[str, Any]] = [{"records": None}, {"records": "x"}, {"model": []}]
    for damage in damages:
        file.write_text(json.dumps(measured | damage))
        error = refused("report", file.parent, "--output", page)
        assert "damaged, or written by another version" in error
    assert not page.exists()


def test_a_module_without_backends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_POSENC_EXTRA_BACKENDS", "json")
    with pytest.raises(PosencError, match="='json' names no module with a tuple BACKENDS"):
        engine._extra()


def test_a_terminal_of_no_width_shows_results() -> None:
    assert "Peng et al. 2023" in invoke("show", "yarn", columns=0).stdout


def test_missing_weights_are_the_same_at_every_run(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    _no_layer(model)
    numbers = []
    for output in ("one", "two"):
        result = _perplexity(model, tmp_path / output, "--allow-missing-weights")
        assert "They are drawn at random, from a fixed seed." in result.stderr
        known = json.loads((tmp_path / output / "perplexity.json").read_text())
        numbers.append((known["model"]["weights_sha256"], known["summary"]))
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("command", ["perplexity", "inspect"])
def test_an_unknown_name_is_one_line_without_retries(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = []

    def unreachable(*_: Any, **__: Any) -> None:
        requests.append(1)
        raise OSError("Name or service not known")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HfApi, "model_info", unreachable)
    reasons = {False: "cannot be reached (Name or service", True: "HF_HUB_OFFLINE is set"}
    for offline, reason in reasons.items():
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        result = invoke(command, "nobody/nothing")
        assert result.exit_code == 2, result.output
        assert len(result.stderr.splitlines()) == 1
        assert "There is no model nobody/nothing: no folder has this name" in result.stderr
        assert reason in result.stderr
    assert requests == [1]


def test_custom_code_runs_where_it_is_trusted(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    (model / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\nclass Mine(LlamaConfig):\n    model_type = 'mine'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Mine\n"
    )
    names = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}
    _edit(model, model_type="mine", auto_map=names)
    assert "pass --trust-remote-code" in _perplexity(model, tmp_path / "out", status=2).stderr
    _perplexity(model, tmp_path / "out", "--trust-remote-code")


@pytest.mark.parametrize(("value", "reason"), [(math.nan, "not finite"), (0.0, "all zero")])
def test_a_patch_names_damaged_weights(value: float, reason: str) -> None:
    model = zoo.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    with pytest.raises(PosencError, match=f"The weights of the model are {reason}"):
        hf_posenc.patch_model(model, "rerope", window=16)
    with pytest.warns(UserWarning, match=f"The weights of the model are {reason}"):
        hf_posenc.patch_model(model, "yarn", scale=4)
