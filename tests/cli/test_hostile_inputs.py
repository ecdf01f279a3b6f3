"""Hostile inputs, as tables that anyone can extend: an input, the line that answers it, and the exit status.

`COMMANDS` has command lines, `CALLS` Python expressions, `FILES` and `ZSTD` documents: each of these is counted with a
reason, and none stops the run.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import pickle
import re
import shlex
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
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import engines, training
from hf_posenc.cli.app import app
from hf_posenc.embedded import model_path
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import measure_perplexity
from hf_posenc.evaluation.bench.run import bench
from hf_posenc.evaluation.documents import load_documents, read_dataset, read_paths, readers
from hf_posenc.evaluation.documents import tokens as joining
from hf_posenc.evaluation.options import BenchOptions, PerplexityOptions, SelftestOptions
from hf_posenc.evaluation.recommend import recommend
from hf_posenc.evaluation.retrieval import measure_retrieval
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.evaluation.selftest import selftest
from hf_posenc.methods import YaRN
from hf_posenc.patch.config import parse_method
from hf_posenc.training import PositionCollator
from tests.support import zoo
from tests.support.documents_forms import GOOD, PACK, refusal, zstd
from tests.support.selection import quick
from tests.support.tiny_text import byte_tokenizer, prose, tiny_checkpoint

pytestmark = pytest.mark.timeout(60)  # nothing waits for what never comes

EMPTY = "is empty. Is a shell variable unset? Give a value, or leave it out for the default."
RUN = "perplexity {model} --text {texts} --output {out}"
TWICE = "is given twice, and takes one value: give it once."

# A command line, a part of the one line on stderr, and the exit status. {model} is a checkpoint trained at 64 tokens,
# {texts} a folder of texts, {rows} a file of JSON lines with a column "body", {out} a folder for results. A line of ""
# stands for none.
COMMANDS: list[tuple[str, str, int]] = [
    ('perplexity ""', f"error: The value after perplexity {EMPTY}", 2),
    ('perplexity "  "', f"error: The value after perplexity {EMPTY}", 2),
    ('inspect ""', f"error: The value after inspect {EMPTY}", 2),
    ('recommend "" --target-length 4k', f"error: The value after recommend {EMPTY}", 2),
    ('export "" --to vllm', f"error: The value after export {EMPTY}", 2),
    (
        "export {model} --to vllm --verify",
        "--verify loads in transformers; vllm cannot be tried",
        2,
    ),
    (
        "export {model} --to transformers4 --packages {out}",
        "Only --verify reads --packages: add",
        2,
    ),
    (
        "export {model} --to transformers4 --verify --packages {texts}",
        "the folder of --packages. Install one there: pip install --target",
        2,
    ),
    ('report ""', f"error: The value after report {EMPTY}", 2),
    ('show ""', f"error: The value after show {EMPTY}", 2),
    ('""', f"error: The value after hf-posenc {EMPTY}", 2),
    (
        'perplexity {model} --text {texts} --output ""',
        f"error: The value after --output {EMPTY}",
        2,
    ),
    ("perplexity {model} --text {texts} --output=", f"error: The value --output {EMPTY}", 2),
    ('perplexity {model} --text "" --output {out}', f"error: The value after --text {EMPTY}", 2),
    (RUN + ' --tokenizer ""', f"error: The value after --tokenizer {EMPTY}", 2),
    (RUN + ' --patch ""', f"error: The value after --patch {EMPTY}", 2),
    (RUN + " --lengths 32 --lengths 64", f"error: --lengths {TWICE}", 2),
    (RUN + " --chunk=1 --chunk 2 --lengths 32", f"error: --chunk {TWICE}", 2),
    (RUN + " --tokenized input_ids --lengths 32", "and --tokenized names one: leave it out", 2),
    (
        RUN + " --lengths 32 --split train",
        "error: --split train is for a --dataset, and nothing",
        2,
    ),
    (RUN + " --lengths 32 --config en", "--config en is for a --dataset on the hub, and noth", 2),
    (RUN + " --lengths 32 --no-streaming", "--no-streaming is for a --dataset on the hub, and", 2),
    (
        RUN + " --lengths 32 --column body",
        "--column body is for rows (a --dataset, JSON lines or",
        2,
    ),
    (
        RUN + " --lengths 32 --token-dtype int32",
        "--token-dtype int32 is for a .bin file in --text",
        2,
    ),
    ("perplexity {model} --output {out} --split train", "--split train is for a --dataset, and", 2),
    (
        "bench {model} --output {out} --column body",
        "and nothing here would use it: leave it out.",
        2,
    ),
    ("sweep {model} --output {out} --config en", "and nothing here would use it: leave it out.", 2),
    ("search {model} --output {out} --token-dtype int64", "nothing here would use it: leave it", 2),
    (RUN + " --text {rows} --column body --lengths 32 --patch none --dry-run", "", 0),
    (
        RUN + " --text {rows} --column body --tokenized ids",
        "without --tokenized, and nothing here",
        2,
    ),
    (RUN + " --patch yarn:scale=8,scale=4", "scale is given twice; give it once.", 2),
    (RUN + " --patch yarn:scale=8,scale=8", "scale is given twice; give it once.", 2),
    (RUN + " --patch yarn:scale=", "'scale=' is not option=value", 2),
    (RUN + " --patch yarn:factor=8", "option of yarn 'factor'. It is called scale here.", 2),
    (RUN + " --patch yarn:target_length=1.5k", "target_length: '1.5k' is no length", 2),
    (RUN + " --patch yarn:target_length=512.5", "target_length: 512.5 is no length", 2),
    (RUN + " --patch yarn:scale=2,compose=no", "compose is True or False, not 'no'.", 2),
    (RUN + " --patch none+log_n", "'none' is the model as it was loaded, and not a method", 2),
    (RUN + " --patch yarn:target_length=1k --lengths 32,64 --dry-run", "", 0),
    ("inspect {model} --patch yarn:target_length=1k", "", 0),
    ("inspect {model} --patch yarn:original_max_position_embeddings=32.0,scale=2", "", 0),
    ("inspect {model} --patch none", "'none' is the model as it was loaded, and not a method", 2),
    (RUN + ' --lengths "32 64"', "--lengths 32 64: separate lengths by commas, as in 512,", 2),
    (RUN + ' --lengths "32, 64" --patch none --dry-run', "", 0),
    (RUN + " --lengths 0", "--lengths 0: '0' is no length; give a whole number of tokens", 2),
    (RUN + " --lengths 32:64:0", "'0' is no length", 2),
    (RUN + " --lengths 64:32:8", "'64:32:8' ends before it begins.", 2),
    (RUN + " --lengths 8:1000000000000:1", "is 999,999,999,993 lengths, and at most 1,000 are", 2),
    (RUN + " --lengths " + "9" * 5000, "is no length", 2),
    (RUN + " --protocol sliding --lengths 32,64 --stride 33", "--stride 33 is more than the sh", 2),
    (RUN + " --protocol sliding --lengths 32 --bos always --stride 32", "Give --stride 31 or", 2),
    (RUN + " --protocol sliding --lengths 32,64 --patch none --dry-run", "", 0),
    (
        "bench {model} --text {texts} --target-length 32 --output {out}",
        "--target-length 32: the model was trained at 64 tokens already. Give a longer one, or",
        2,
    ),
    ("bench {model} --target-length 1k,2k --output {out}", "'1k,2k' is no length; give a", 2),
    ("recommend {model} --target-length 4k --original 1k", "", 0),
    ("recommend {model} --target-length 4k --original x", "--original: 'x' is no length; give", 2),
    ("--banana", "error: No such option: --banana Try: hf-posenc --help", 2),
    (RUN + " --lengths 32 --device meta", "The device 'meta' holds no weights: give cpu, or", 2),
    (RUN + " --lengths 32 --device cpu --device-map cpu", "--device and --device-map exclude", 2),
    (
        RUN + " --lengths 32 --stride 8",
        "--stride 8 is for --protocol sliding or stream, and this run measures prefix and tail",
        2,
    ),
    (
        RUN + " --lengths 32 --protocol prefix --tail-tokens 8",
        "is for --protocol tail, and this",
        2,
    ),
    (RUN + " --lengths 32 --bos-windows first", "--bos-windows first is for --protocol sliding", 2),
    (RUN + " --lengths 32 --protocol tail --buckets 4", "--buckets 4 is for --protocol prefix", 2),
    (RUN + " --lengths 32 --longppl-short 8", "--longppl-short 8 is for --longppl, and this", 2),
    (
        "bench {model} --text {texts} --stride 8 --lengths 32,64 --output {out}",
        "--stride 8 is for --protocol sliding or stream, and this run measures",
        2,
    ),
    (
        RUN + " --lengths 32 --protocol disjoint --windows-per-document 2",
        "--windows-per-document 2 is for --protocol tail or sliding, and",
        2,
    ),
    (RUN + " --lengths 32 --patch none --longppl self --longppl-short 8 --dry-run", "", 0),
    (
        "retrieval {model} --tasks vt,vt --lengths 64 --output {out}",
        "Give at least one of the tasks, each once, not ['vt', 'vt'].",
        2,
    ),
    (
        "retrieval {model} --decode generate --distractors 5 --lengths 300 --output {out}",
        "--distractors 5 is for --decode teacher-forced, and generated answers have no rank",
        2,
    ),
    (
        "sweep {model} --text {texts} --patch rerope --scales 4 --target-length 128 --output {out}",
        "--scales 4 is for methods without a scale of their own, and no --patch here takes one",
        2,
    ),
    (RUN + " --lengths 32 --longppl @rerope", "--longppl @rerope: give a name or self, and a", 2),
    (RUN + " --lengths 32 --longppl self@", "--longppl self@: give a name or self, and a meth", 2),
    (RUN + " --lengths 32 --device mps", "PyTorch {torch} sees cpu and", 2),
    (RUN + " --lengths 32 --device CPU", "PyTorch has none of this name.", 2),
    (
        RUN + " --lengths 32 --device-map meta",
        "weights of the model are on the device meta, which",
        2,
    ),
    (RUN + " --lengths 32 --patch", "requires an argument. Try: hf-posenc perplexity --help", 2),
    (RUN + " --lengths 32,", "--lengths 32,: '' is no length; give a whole number of tokens", 2),
    (RUN + " --lengths ²5", "'²5' is no length; give a whole number of tokens", 2),
    (RUN + " --lengths 32 --shard 3/2", "--shard 3/2: give one of 1/N ... N/N, such as 2/8", 2),
    (RUN + " --lengths 32 --patch yarn:scale=1e300", "extends 64 tokens to 6.4e+301: give a sm", 2),
    (RUN + " --lengths 32 --text {texts}/../table.csv --dry-run", "", 0),
    ("retrieval {model} --depths 100000000 --output {out}", "at most 1,000 depths are measured", 2),
    (
        "retrieval {model} --samples 1000000 --lengths 256 --output {out}",
        "are 5,000,000 prompts of a task and length, and at most 100,000 are measured.",
        2,
    ),
    (
        "retrieval {model} --distractors 99999999999999999999 --lengths 256 --output {out}",
        "distractors is at most 10,000, not 99,999,999,999,999,999,999.",
        2,
    ),
    (
        "bench {model} --text {texts} --rounds 99999999999999999999 --output {out}",
        "rounds is at most 1,000, not 99,999,999,999,999,999,999.",
        2,
    ),
    (
        "recommend {model} --target-length 999999999999999",
        "advice is for at most 33,554,432 tokens",
        2,
    ),
    ("export {model} --to vllm --methods --patch yarn:scale=2", "every method: leave --patch o", 2),
    (
        "export {model} --to transformers5 --verify --dry-run",
        "and --dry-run writes nothing: giv",
        2,
    ),
    ("export {model} --to vllm --weights banana --dry-run", "Unknown value of --weights 'banan", 2),
    (
        "export {model} --to vllm --patch yarn:scale=2 --output {rows}",
        "The export cannot be written to ",
        2,
    ),
    ("export {texts} --to vllm", "has no config.json (it has 0.txt, 1.txt, 2.txt). Give the", 2),
    ("report {texts} --output {texts}", "cannot be written: give a file in a folder that exist", 2),
    (
        "report {texts} --output {out}/page.html",
        "cannot be written: give a file in a folder tha",
        2,
    ),
    (RUN + " --patch yarn:scale=2,", "'' is not option=value, as in scale=8,beta_fast=16.", 2),
    (RUN + " --patch yarn:", "'yarn:': '' is not option=value, as in scale=8,beta_fast=16.", 2),
    (RUN + " --patch yarn:scale=2,,beta_fast=3", "'' is not option=value, as in scale=8", 2),
    (
        RUN + " --lengths 32 --patch rerope:window=99999999999999999999",
        "rerope: window is at most 2,147,483,647, not 99999999999999999999.",
        2,
    ),
    (
        RUN + " --lengths 32 --patch yarn:beta_fast=-" + "9" * 400,
        "beta_fast is at most 2,147,483,647, not -9999999999999999999.",
        2,
    ),
    (RUN + " --lengths 32 --patch yarn:scale=" + "9" * 5000, "scale is a number of at least 1", 2),
    (RUN + " --lengths 32 --patch yarn:scale=" + "[" * 9000, "scale is a number of at least 1", 2),
    (
        "report {texts} --output {rows}",
        "is there and no page: give another name, as report.html.",
        2,
    ),
    ("selftest {texts}", "cannot be written: give a file in a folder that exists.", 2),
    ("selftest --length 16", "Input should be greater than or equal to 32", 2),
    (
        "sweep {model} --text {texts} --patch yarn:scale=4 --scales 8 --output {out}",
        "--scales 8 is for methods without a scale of their own",
        2,
    ),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "texts").mkdir()
    for index in range(3):
        (folder / "texts" / f"{index}.txt").write_text(prose(300, index))
    (folder / "rows.jsonl").write_text(json.dumps({"body": prose(300)}))
    (folder / "table.csv").write_text("text\n" + prose(300))
    model = tiny_checkpoint(folder / "model")
    return {"model": model, "texts": folder / "texts", "rows": folder / "rows.jsonl"}


@pytest.mark.parametrize(("command", "line", "status"), COMMANDS, ids=lambda v: str(v)[:60])
def test_a_command_line_is_answered_by_one_line(
    command: str,
    line: str,
    status: int,
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command.format(**places, out=tmp_path / "out"))
    line = line.replace("{torch}", torch.__version__)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    lines = [one for one in result.stderr.splitlines() if one.startswith("error: ")]
    assert len(lines) == (1 if line else 0), result.output
    assert line in "".join(lines)
    assert "Traceback" not in result.output


NO_LENGTH = "is no length; give a whole number of tokens, such as 4096 or 32k."
NOT_A_METHOD = "A method is a name such as 'yarn' (available_methods() lists them)"

# A Python expression on a tiny Llama of 4 layers, trained at 64 tokens, and a part of the message of its PosencError.
CALLS: list[tuple[str, str]] = [
    ("measure_retrieval(model, None, haystack='')", "The haystack is empty. Give text, or None"),
    ("measure_retrieval(model, None, haystack=' ')", "The haystack is empty. Give text, or None"),
    (
        "save_patch(patch_model(type(model)(model.config), 'yarn', scale=2), '')",
        "'' is no folder to save the patch to",
    ),
    (
        "save_patch(patch_model(type(model)(model.config), 'yarn', scale=2), None)",
        "None is no folder to save the patch to",
    ),
    (
        "save_patch(patch_model(type(model)(model.config), 'yarn', scale=2), '/dev/null/x')",
        "to /dev/null/x: Not a directory",
    ),
    ("patch_model(model, None)", f"{NOT_A_METHOD}, a Method object, or a list of them, not None."),
    ("patch_model(model, 5)", NOT_A_METHOD),
    ("patch_model(model, ['yarn', 5], scale=2)", NOT_A_METHOD),
    (
        "patch_model(model, {'method': 'yarn'})",
        "has no method layers. Its layers are full_attention",
    ),
    ("patch_model(model, {0: 'yarn'})", "yarn needs scale="),
    ("patch_model(model, {0: 5})", NOT_A_METHOD),
    ("patch_model(model, {(0, 'a'): 'nope'})", "A key of the dictionary is"),
    ("patch_model(model, {-1: 'nope'})", "numbered from 0 to"),
    ("patch_model(model, {range(0): 'nope'})", "layers is empty"),
    ("patch_model(model, [])", "An empty list of methods: name at least one."),
    ("patch_model(model, YaRN)", "YaRN is a class: give an object, as in YaRN(...), or the name"),
    ("patch_model(model, 'none')", "'none' is the model as it was loaded, and not a method"),
    ("patch_model(model, 'yarn:scale=8')", "as in patch_model(model, 'yarn', scale=8)"),
    ("patch_model(model, 'yarn+log_n')", "several methods are a list, as in [YaRN("),
    ("patch_model(model, 'yarn', factor=8)", "Unknown option of yarn 'factor'. It is called scale"),
    ("patch_model(model, 'yarn', max_position_embeddings=512)", "It is called target_length here."),
    ("patch_model(model, 'rerope', factor=8)", "Unknown option of rerope 'factor'. Available: "),
    ("patch_model(model, 'yarn', scale='8')", "scale is a number of at least 1, not '8'."),
    ("patch_model(model, 'yarn', scale='8', target_length=512)", "scale is a number of at least"),
    ("patch_model(model, 'yarn', scale=True)", "scale is a number of at least 1, not True."),
    ("patch_model(model, 'yarn', scale=2, compose='no')", "compose is True or False, not 'no'."),
    ("patch_model(model, 'yarn', target_length=1024.5)", f"target_length: 1024.5 {NO_LENGTH}"),
    ("patch_model(model, 'yarn', target_length='32q')", f"target_length: '32q' {NO_LENGTH}"),
    ("patch_model(model, 'yarn', target_length=True)", f"target_length: True {NO_LENGTH}"),
    ("patch_model(model, 'yarn', target_length=math.inf)", f"target_length: inf {NO_LENGTH}"),
    ("patch_model(model, 'yarn', target_length=[512])", f"target_length: [512] {NO_LENGTH}"),
    (
        "patch_model(model, 'yarn', scale=2, original_max_position_embeddings=0)",
        f"original_max_position_embeddings: 0 {NO_LENGTH}",
    ),
    (
        "patch_model(model, 'yarn', scale=2, layers=[99])",
        "this model has 4 layers, numbered from 0",
    ),
    (
        "patch_model(model, 'rerope', layers=[0, -1])",
        "this model has 4 layers, numbered from 0 to 3",
    ),
    ("patch_model(model, 'rerope', layers=[True])", "numbered from 0 to 3"),
    ("patch_model(model, 'rerope', layers=['0'])", "\"all\" or a list of layer indices, not ('0',"),
    (
        "patch_model(model.config, 'yarn', scale=2)",
        "LlamaConfig is not a model: give a transformers",
    ),
    ("unpatch_model(pipe)", "give the model that it holds, its attribute .model."),
    ("patch_model(model, 'rerope', layers=[])", "layers is empty: name at least one layer"),
    ("patch_model(model, 'yarn', scale=2, layers=0)", 'layers is "full", "all" or a list'),
    ("patch_model(pipe, 'yarn', scale=2)", "Pipe is not a model: give the model that it holds"),
    ("get_patch(pipe)", "give the model that it holds, its attribute .model."),
    ("inspect_rope(pipe)", "give the model that it holds, its attribute .model."),
    ("patch_model('gpt2', 'yarn', scale=2)", "'gpt2' is a name, not a model: load it first, as in"),
    ("patch_model(None, 'yarn', scale=2)", "NoneType is not a model"),
    ("get_method(5)", "A method is a name such as 'yarn'"),
    (
        "load_patch(model, {'method': 'yarn'})",
        "A patch is a recipe's name, a JSON file or a directory",
    ),
    ("load_patch(model, torn)", "/torn.json: This is not a patch in JSON: Expecting value"),
    *(
        (f"TokenScorer({given})", message)
        for given, message in {
            "None, ids": "NoneType is not a model: give a transformers model",
            "nn.Linear(1, 1), ids": "Linear has no token embeddings: give a causal language model",
            "model, None": "Token ids are whole numbers of shape (n,) or (windows, n), not None.",
            "model, ids[:1]": "The probe is a list of at least 2 token ids, not one of shape (1,).",
            "model, ids.float()": "Token ids are whole numbers of shape (n,) or (windows, n), not te",
            "model, ids, chunk='8'": "A chunk has at least 1 token, not '8'.",
            "model, [1, 2, 3])([1.5, 2.5]": "Token ids are whole numbers of shape (n,) or (windows",
            "model, ids)(None": "Token ids are whole numbers of shape (n,) or (windows, n), not None.",
            "model, ids)([1, 9999]": "Token 9,999: the model has embeddings for 0 to 127.",
            "model, ids)([1, -5]": "Token -5: the model has embeddings for 0 to 127.",
            "model, ids)(ids, '1'": "A window of 9 tokens cannot be scored from token '1'.",
        }.items()
    ),
    *(
        (f"measure_perplexity(model, tok, texts, lengths=32, {given})", message)
        for given, message in {
            "longppl=5": "longppl is a text, not 5.",
            "longppl=''": "longppl is a text, not ''.",
            "aggregate=['tokens']": "aggregate is a text, not ['tokens'].",
            "short='no'": "short is True or False, not 'no'.",
            "base=1": "base is a number above 0 and not 1, not 1.",
            "methods='yarn:scale=2'": "not one text: write methods=['yarn:scale=2'].",
            "protocols='prefix'": "not one text: write protocols=['prefix'].",
        }.items()
    ),
    ("PerplexityOptions(lengths=b'32')", "lengths is a list of whole numbers, not b'32'."),
    ("measure_perplexity(model, tok, texts[0])", "a list of texts, not one text: write [text]."),
    (
        "measure_perplexity(nn.DataParallel(model), tok, texts)",
        "the model inside, its attribute .m",
    ),
    (
        "measure_perplexity(model.to('meta'), tok, texts)",
        "are on the device meta, which holds none",
    ),
    ("measure_perplexity(model, tok, read_paths(None))", "a list of paths, not NoneType."),
    ("measure_perplexity(model, tok, read_paths([5]))", "A file is given by its path, not by int"),
    ("measure_perplexity(model, tok, read_dataset(None))", "its hub name or folder, not by None."),
    *(
        (f"measure_retrieval(model, tok, lengths=256, {given})", message)
        for given, message in {
            "depths=0.5": "depths is a list, not 0.5.",
            "depths=['a']": "depths is a list of numbers, not ['a'].",
            "depths=[math.nan]": "depths is a list of numbers, not [nan].",
            "samples=None": "samples is a whole number of at least 1, not None.",
            "haystack=5": "The haystack is a text, not int.",
        }.items()
    ),
    ("recommend(model, 512, dtype='bfloat16')", "such as torch.bfloat16, not 'bfloat16'."),
    ("recommend(model, 10**12)", "advice is for at most 33,554,432 tokens."),
    ("bench(None, tok, texts)", "NoneType is not a model: give a transformers model"),
    ("SelftestOptions(dtypes=[])", "dtypes is empty: name at least one, or None for all."),
    ("SelftestOptions(head_dims=[0])", "A head dimension is a whole number of at least 1, not 0."),
    ("SelftestOptions(length=5)", "length is a whole number of at least 32, not 5."),
    ("selftest(methods=['banana'])", "Unknown method of the engine 'banana'."),
    (
        "mix_blocks(None)",
        "A mixture is a list of pairs, blocks of prepare_blocks and their weight; None",
    ),
    (
        "mix_blocks([(None, 1.0)])",
        "A mixture is a list of pairs, blocks of prepare_blocks and their",
    ),
    ("mix_blocks([])", "A mixture needs positive weights; these are []."),
    *(
        (f"prepare_blocks({given})", message)
        for given, message in {
            "None, tok, length=16": "The documents are a list or a reader, not NoneType.",
            "texts[0], tok, length=16": "The documents are a list or a reader, not str.",
            "[5], tok, length=16": "Document 0 is int, not a text.",
            "texts, 'gpt2', length=16": "'gpt2' is no tokenizer: give the model's, as Auto",
            "texts, tok, length=None": f"length: None {NO_LENGTH}",
            "texts, tok, length=16, limit='3'": "limit is a whole number of at least 1, not '3'.",
            "texts, tok, length=16, workers=None": "workers is a whole number of at least 1, not No",
            "texts, tok, length=16, cache=5, source={}": "cache: 5 is no folder. Give its path.",
        }.items()
    ),
    *(
        (f"choose_parameters(model, 'lora', {given})", message)
        for given, message in {
            "lora_rank='8'": "lora_rank='8', lora_alpha=32, lora_dropout=0.0: a rank is at least 1,",
            "lora_alpha=math.nan": "lora_alpha=nan, lora_dropout=0.0: a rank is at least 1, alpha",
            "target_modules=['banana']": "The LoRA cannot be added: No modules were targeted",
            "modules_to_save=['banana']": "modules_to_save names 'banana', and no module is called",
            "banana=5": "peft.LoraConfig does not take these options: ",
        }.items()
    ),
    ("chunk_loss(model, 'x')", "A chunk has at least 1 token, not 'x'."),
    ("chunk_loss(nn.Linear(1, 1))", "Linear has no transformers config: give a causal language"),
    ("check_dependencies(model, None)", "The collator is a PositionCollator, not NoneType."),
    ("Scores(tok, texts, lengths=None)", "lengths is a list of whole numbers, not None."),
    ("Scores(tok, texts, lengths=[32], limit='x')", "limit is a whole number of at least 1, not"),
    ("Scores(tok, texts, lengths=[32], output=5)", "output: 5 is no folder. Give its path, or"),
    ("Scores(tok, texts, lengths=[32], tail_tokens='x')", "tail_tokens is a whole number of at le"),
    ("Scores('gpt2', texts, lengths=[32])", "'gpt2' is no tokenizer: give the model's, as Auto"),
    (
        "engines.export(None, 'vllm')",
        "A model is given by its folder or hub name, not by NoneType.",
    ),
    ("engines.export('/gone', 'vllm')", "There is no model folder /gone. Give a folder that save"),
    (
        "engines.check_gguf(None, model_path())",
        "There is no file None. Give a GGUF file of convert",
    ),
    (
        "engines.export(model_path(), 'vllm', banana=5)",
        "banana belong to a method, and none is giv",
    ),
    (
        "engines.write_export(engines.export(model_path(), 'vllm'), '')",
        "'' is no folder to write the export to. Give its path.",
    ),
    ("hf_posenc.from_pretrained(model_path(), config=5)", "config is one of transformers, not 5."),
    (
        "hf_posenc.from_pretrained(model_path(), auto_class='AutoModel')",
        "auto_class is a class of transformers, such as AutoModelForImageTextToText, not 'AutoModel'",
    ),
    (
        "hf_posenc.load_adapter(model, None)",
        "An adapter is given by its folder or hub name, not by",
    ),
    (
        "patch_model(model, 'yarn', scale=1e300)",
        "extends 64 tokens to 6.4e+301: give a smaller one",
    ),
    ("hf_posenc.from_pretrained('')", "There is no model folder ''. Give a folder that save_pr"),
    ("hf_posenc.from_pretrained('/no/such')", "There is no model folder /no/such. Give a folder"),
    (
        "hf_posenc.from_pretrained('no-such-model')",
        "no folder has this name, and it is not cached.",
    ),
    (
        "hf_posenc.from_pretrained('a b')",
        "There is no model a b: no folder has this name, and it is no hub",
    ),
    ("hf_posenc.load_adapter(model, 'no-such')", "There is no adapter no-such: no folder has this"),
    ("hf_posenc.from_pretrained(model)", "by its folder or hub name, not by LlamaForCausalLM"),
    ("hf_posenc.load_adapter(model, './absent')", "There is no adapter folder ./absent. Give a"),
    ("parse_method('yarn:scale=8,scale=4')", "scale is given twice"),
    ("recommend(model, '4q')", f"target_length: '4q' {NO_LENGTH}"),
    ("bench(model, tok, ['text'], target_length=32)", "--target-length 32: the model was trained"),
    ("BenchOptions(target_length=512.5)", f"target_length: 512.5 {NO_LENGTH}"),
    ("PerplexityOptions(lengths=[512, '1q'])", f"lengths: '1q' {NO_LENGTH}"),
    ("PerplexityOptions(lengths=0)", f"lengths: 0 {NO_LENGTH}"),
    ("PerplexityOptions(lengths=1.5)", f"lengths: 1.5 {NO_LENGTH}"),
    ("PerplexityOptions(lengths='banana')", "lengths banana: 'banana' is no length"),
    ("PerplexityOptions(lengths=[])", "lengths is empty: give at least one, or None for"),
    (
        "PerplexityOptions(methods=[YaRN(scale=2)])",
        "methods is a list of texts as --patch takes them",
    ),
    ("PerplexityOptions(methods=5)", "such as 'none' and 'yarn:scale=8', not 5."),
    ("PerplexityOptions(protocols=[None])", "protocols is a list of texts, not [None]."),
    ("PerplexityOptions(tail_tokens=0)", "tail_tokens is a whole number of at least 1, not 0."),
    ("PerplexityOptions(tail_tokens=1.5)", "tail_tokens is a whole number of at least 1, not 1.5"),
    ("PerplexityOptions(stride='8')", "stride is a whole number of at least 1, not '8'."),
    ("PerplexityOptions(stride=0)", "stride is a whole number of at least 1, not 0."),
    ("PerplexityOptions(limit=-1)", "limit is a whole number of at least 1, not -1."),
    ("PerplexityOptions(batch=True)", "batch is a whole number of at least 1, not True."),
    ("PerplexityOptions(base=-2)", "base is a number above 0 and not 1, not -2."),
    ("BenchOptions(rounds='2')", "rounds is a whole number of at least 0, not '2'."),
    ("measure_perplexity(None, tok, texts)", "NoneType is not a model: give a transformers model"),
    ("measure_perplexity('gpt2', tok, texts)", "'gpt2' is a name, not a model: load it first"),
    (
        "measure_perplexity(nn.Linear(1, 1), tok, texts)",
        "Linear has no transformers config: give a",
    ),
    ("measure_perplexity(model, None, texts)", "NoneType is no tokenizer: give the model's, as"),
    ("measure_perplexity(model, 'gpt2', texts)", "'gpt2' is no tokenizer: give the model's, as"),
    (
        "measure_perplexity(model, tok, texts, lengths=32)",
        "The tokenizer does not belong to the mod",
    ),
    ("measure_perplexity(model, tok, [], lengths=32)", "There is no document to read."),
    ("measure_perplexity(model, tok, 5)", "The documents are a list of texts, not int."),
    ("measure_perplexity(model, tok, {'a': 'b'})", "The documents are a list of texts, not dict."),
    ("measure_perplexity(model, tok, ['a', b'b'], lengths=32)", "Document 1 is bytes, not a text."),
    (
        "measure_perplexity(model, tok, [None])",
        "Document 0 is NoneType, not a text. Give strings, or",
    ),
    (
        "measure_perplexity(model, tok, texts, 'yarn')",
        "The options are a PerplexityOptions, not str:",
    ),
    (
        "measure_perplexity(model, tok, texts, {'lengths': [8]})",
        "a PerplexityOptions, not dict: its",
    ),
    ("measure_perplexity(model, tok, texts, lengths=64, methods=['ba'])", "Unknown method 'ba'."),
    (
        "measure_perplexity(model, tok, texts, output='')",
        "output: '' is no folder. Give its path, or",
    ),
    (
        "measure_perplexity(model, tok, texts, output=5)",
        "output: 5 is no folder. Give its path, or",
    ),
    (
        "measure_perplexity(model, tok, texts, output=torn)",
        "/torn.json is a file. Give a folder, or",
    ),
    (
        "measure_perplexity(model, tok, texts, progress=5)",
        "progress is a function of a label, the to",
    ),
    ("bench(model, None, texts, lengths=32)", "NoneType is no tokenizer: give the model's, as"),
    ("bench(model, tok, texts, progress='bar')", "progress is a function of a label, the tokens"),
    ("measure_retrieval(model, None)", "NoneType is no tokenizer: give the model's, as Auto"),
    ("measure_retrieval(model, tok, lengths=[])", "lengths is empty: give at least one, or None"),
    (
        "Collator(None)",
        "Unknown kind of positions None. Available: contiguous, cream, packed, pose",
    ),
    ("Collator('pose', target_length='4q')", f"target_length: '4q' {NO_LENGTH}"),
    ("Collator(seed='a')", "seed is a whole number, not 'a'."),
    ("Collator(pad_token_id=None)", "pad_token_id is a whole number of at least 0, not None."),
    ("Collator().set_epoch(None)", "The epoch is a whole number of at least 0, not None."),
    ("Collator()([])", "A batch is a list of examples, of at least one, not []."),
    ("Collator()(None)", "A batch is a list of examples, of at least one, not None."),
    (
        "Collator()([5])",
        "Example 0 of the batch is int: it needs the column input_ids, a list of numb",
    ),
    ("Collator()([{'labels': [1]}])", "is the columns labels: it needs the column input_ids"),
    ("Collator()([{'input_ids': []}])", "has input_ids []: give one list of token ids, not empty."),
    ("Collator()([{'input_ids': 'abc'}])", "has input_ids 'abc': give one list of token ids"),
    ("Collator()([{'input_ids': [1.5]}])", "has input_ids [1.5]: give one list of token ids"),
    ("Collator()([{'input_ids': [[1], [2]]}])", "has input_ids [[1], [2]]: give one list of tok"),
    ("Collator()([{'input_ids': [3, -1]}])", "has input_ids [3, -1]: give one list of token ids"),
    (
        "Collator()([{'input_ids': [1, 2], 'labels': [1]}])",
        "Example 0 of the batch has 1 labels for 2 tokens: give one each, -100 where there is no",
    ),
    (
        "Collator('packed')([{'input_ids': [1, 2], 'document_lengths': None}])",
        "An example has document_lengths None: give one list of whole numbers, not empty.",
    ),
]


class Pipe:
    """An object that holds a model, as a pipeline and a trainer do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def call(expression: str, model: nn.Module, torn: Path) -> Any:
    """Evaluate an expression of `CALLS`; `torn` is the file of a patch that ends in the middle."""
    torn.write_text('{"format": 1, "method":')
    names: dict[str, Any] = {"hf_posenc": hf_posenc, "torn": torn}
    names |= {"model": model, "pipe": Pipe(model), "math": math, "YaRN": YaRN, "bench": bench}
    options = {"BenchOptions": BenchOptions, "PerplexityOptions": PerplexityOptions}
    functions: dict[str, Any] = {"parse_method": parse_method, "recommend": recommend}
    functions |= {"measure_retrieval": measure_retrieval, "Collator": PositionCollator, "nn": nn}
    functions |= {"measure_perplexity": measure_perplexity, "tok": byte_tokenizer()}
    functions |= {"texts": [prose(300, index) for index in range(2)], "ids": torch.arange(9)}
    functions |= {"read_paths": read_paths, "read_dataset": read_dataset, "engines": engines}
    functions |= {"model_path": model_path, "TokenScorer": TokenScorer, "selftest": selftest}
    functions |= {"SelftestOptions": SelftestOptions}
    functions |= {name: getattr(training, name) for name in training.__all__}
    # Imported when they are asked for.
    public = {name: getattr(hf_posenc, name) for name in hf_posenc.__all__}
    return eval(expression, {**public, **names, **options, **functions})


@pytest.mark.parametrize(("expression", "message"), CALLS)
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
    patch = hf_posenc.get_patch(model)
    assert patch is not None
    assert patch.extended_length == 1024
    assert type(model.config.max_position_embeddings) is int
    model.save_pretrained(tmp_path)
    assert hf_posenc.get_patch(hf_posenc.from_pretrained(tmp_path)) is not None
    hf_posenc.unpatch_model(model)
    hf_posenc.patch_model(model, "yarn", scale=2, original_max_position_embeddings=length)
    patch = hf_posenc.get_patch(model)
    assert patch is not None
    assert type(patch.original_max_position_embeddings) is int
    assert BenchOptions(target_length=length).target_length == 1024
    assert PerplexityOptions(lengths=[64, length]).lengths == (64, 1024)


def test_numbers_and_arrays_of_other_libraries_are_taken() -> None:
    model, tokenizer, texts = zoo.build("llama"), byte_tokenizer(), [prose(300)]
    scales: list[Any] = [np.float32(2), np.int64(2), torch.tensor(2.0)]
    for scale in scales:
        hf_posenc.patch_model(model, "yarn", scale=scale, replace=True)
        patch = hf_posenc.get_patch(model)
        assert patch is not None
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


def test_one_path_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(GOOD)
    assert [entry.name for entry in read_paths("a.txt")] == ["a.txt"]
    assert [entry.name for entry in read_paths(Path("a.txt"))] == ["a.txt"]


def npy(values: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.arange(3))
    return file.getvalue()


def damaged(data: bytes) -> bytes:
    return data[:-8] + bytes(byte ^ 0xFF for byte in data[-8:])


class Evil:
    """An object that must never be unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("unpickled",)


# The name of a file, its content, and a part of the reason why it is not read.
FILES: dict[str, tuple[bytes, str]] = {
    "empty.txt": (b"", "empty"),
    "blank.txt": (b" \n\t\r\n \xe3\x80\x80", "empty"),
    "only-bom.txt": (b"\xef\xbb\xbf", "empty"),
    "utf16.txt": (GOOD.encode("utf-16"), "UTF-16 (or UTF-32), not UTF-8: convert it with iconv"),
    "utf16-be.txt": (b"\xfe\xff" + GOOD.encode("utf-16-be"), "UTF-16, not UTF-8"),
    "utf16-bare.txt": (GOOD.encode("utf-16-le"), "not text: a NUL byte at offset 1"),
    "paper.txt": (b"%PDF-1.4\n" + GOOD.encode(), "a PDF, not text: extract its text first"),
    "zip.txt": (b"PK\x03\x04" + GOOD.encode(), "a zip archive, as are .docx and .xlsx"),
    "bzip2.txt": (b"BZh91AY&SY", "bzip2 data: decompress it first"),
    "latin1.txt": (
        b"x" * 70_000 + "naïve".encode("latin-1"),
        "not UTF-8 (byte 0xef at offset 70002)",
    ),
    "cut.txt": ("three €".encode()[:-1], "not UTF-8 (byte 0xe2 at offset 6)"),
    "nul.txt": (b"a" * 70_000 + b"\0b", "not text: a NUL byte at offset 70,000"),
    "binary.txt": (bytes(range(256)) * 50, "not text: a NUL byte at offset 0"),
    "picture.txt": (b"\x89PNG\r\n\x1a\n", "not UTF-8 (byte 0x89 at offset 0)"),
    "gzip.txt": (gzip.compress(GOOD.encode()), "gzip data: its name must end in .gz"),
    "text.gz": (GOOD.encode(), "not gzip data, or damaged"),
    "torn.txt.gz": (
        gzip.compress(os.urandom(5000).hex().encode())[:3000],
        "truncated: its gzip data",
    ),
    "damaged.txt.gz": (damaged(gzip.compress(GOOD.encode())), "not gzip data, or damaged"),
    "empty.txt.gz": (gzip.compress(b""), "empty"),
    "binary.txt.gz": (gzip.compress(b"\xff" * 100), "not UTF-8"),
    "array.jsonl": (b"[1, 2]\n", "a JSON list, not an object with columns"),
    "number.jsonl": (b"3\n", "a JSON int, not an object with columns"),
    "torn.jsonl": (b'{"text": "it ends he', "; the file ends within this line"),
    "no-column.jsonl": (
        b'{"body": "x"}\n',
        "no column 'text'; its columns are body. Pass --column",
    ),
    "no-columns.jsonl": (b"{}\n", "no column 'text'; its columns are none"),
    "null.jsonl": (b'{"text": null}\n', "column 'text' holds null, not text"),
    "seven.jsonl": (b'{"text": 7}\n', "column 'text' holds int, not text"),
    "surrogate.jsonl": (b'{"text": "half \\ud83d of it"}\n', "half of a surrogate pair (\\ud83d)"),
    "latin1.jsonl": (b'{"text": "na\xefve"}\n', "not UTF-8 (byte 0xef)"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "JSON beyond the limits of Python's parser"),
    "digits.jsonl": (
        b'{"text": ' + b"7" * 9000 + b"}\n",
        "JSON beyond the limits of Python's parser",
    ),
    "blank.jsonl": (b"\n \n\n", "empty"),
    "empty.jsonl": (b"", "empty"),
    "text.parquet": (GOOD.encode(), "not a parquet file, or damaged"),
    "empty.parquet": (b"", "not a parquet file, or damaged"),
    "rows.parquet.gz": (gzip.compress(b"PAR1"), "decompress it first"),
    "object.npy": (npy(np.array([Evil()]), allow_pickle=True), "not a .npy file of numbers"),
    "pickle.npy": (pickle.dumps([1, 2]), "not a .npy file of numbers"),
    "float.npy": (
        npy(np.ones(9)),
        "holds an array of float64, 1 dimension, not a list of token ids",
    ),
    "cube.npy": (npy(np.ones((2, 2, 2), int)), "3 dimensions, not a list of token ids"),
    "one.npy": (npy(np.array(7)), "not a list of token ids"),
    "none.npy": (npy(np.zeros(0, int)), "empty"),
    "torn.npy": (npy(np.arange(999))[:500], "not a .npy file of numbers"),
    "empty.npy": (b"", "not a .npy file of numbers"),
    "archive.npy": (npz(), "not a .npy file but a .npz archive"),
    "negative.npy": (npy(np.array([1, -2, 3])), "token -2 is negative"),
    "outside.npy": (npy(np.array([1, 257])), "token 257 is outside the vocabulary of 257"),
    "huge.npy": (npy(np.array([1, 2**63 + 5], np.uint64)), "is negative"),
    "odd.bin": (b"\1\0\2", "3 bytes are not a whole number of uint16 ids; set --token-dtype"),
    "empty.bin": (b"", "empty"),
    "outside.bin": (b"\xff\xff" * 9, "token 65,535 is outside the vocabulary of 257"),
}


ZSTD: dict[str, tuple[Callable[[], bytes], str]] = {
    "text.zst": (lambda: GOOD.encode(), "not zstd data, or damaged"),
    "torn.txt.zst": (
        lambda: zstd(os.urandom(5000).hex().encode())[:3000],
        "truncated: its zstd data",
    ),
    "damaged.txt.zst": (lambda: zstd(b"x" * 9)[:5] + b"\xff" * 20, "not zstd data, or damaged"),
    "zstd.txt": (lambda: zstd(b"abc"), "zstd data: its name must end in .zst"),
}


@pytest.mark.parametrize("name", FILES)
def test_each_is_refused_with_its_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    content, reason = FILES[name]
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert message.startswith(f"No document can be used ({tmp_path / name}")
    assert reason in message
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == [
        name
    ]  # nothing was executed, nothing is left


@pytest.mark.parametrize("name", ZSTD)
def test_zstd_garbage(name: str, tmp_path: Path) -> None:
    content, reason = ZSTD[name]
    (tmp_path / name).write_bytes(content())
    assert reason in refusal(tmp_path / name)


def test_libraries_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, library, None)
    for name, library in (("a.txt.zst", "pyarrow"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        message = refusal(tmp_path / name)
        assert f"need the {library} library: pip install 'hf-posenc[data]'" in message
    with pytest.raises(
        PosencError, match=r"needs the datasets library: pip install 'hf-posenc\[data\]'"
    ):
        list(read_dataset("anything"))


BOMB = 32 << 20


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.slow
def test_bombs_take_little_memory(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST", 1 << 20)
    sizes = joining.Sizes(window=1 << 14, overlap=1 << 9, largest=1 << 16)
    monkeypatch.setattr(joining, "SIZES", sizes)
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
    assert "no place to cut its text" in reasons[f"letters.txt{ending}"]
    assert reasons[f"line.jsonl{ending}:1"] == "a line of more than 1,048,576 bytes"
    assert reasons[f"zeros.txt{ending}"] == "not text: a NUL byte at offset 0"
    assert [len(document) for document in usable] == [3, 999]
    assert peak < BOMB // 2


ENDINGS = ("txt", "txt.gz", "txt.zst", "jsonl", "jsonl.gz", "parquet", "npy", "bin")


def valid(ending: str) -> bytes:
    """A good file of a kind."""
    if ending == "parquet":
        pyarrow, parquet = (
            pytest.importorskip("pyarrow"),
            pytest.importorskip("pyarrow.parquet"),
        )
        file = io.BytesIO()
        parquet.write_table(pyarrow.table({"text": [GOOD]}), file)
        return file.getvalue()
    kind, *packed = ending.split(".")
    plain = {
        "txt": GOOD.encode(),
        "jsonl": json.dumps({"text": GOOD}).encode() + b"\n",
        "npy": npy(np.arange(99)),
        "bin": np.arange(99, dtype="<u2").tobytes(),
    }[kind]
    return PACK["." + packed[0]](plain) if packed else plain


@pytest.mark.parametrize("ending", quick(ENDINGS, ("txt.zst", "jsonl.gz", "parquet", "npy")))
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
    result = CliRunner().invoke(
        app, [*map(str, arguments), "--no-plot", "--output", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    known = json.loads((tmp_path / "out" / "perplexity.json").read_text())
    assert [Path(document["name"]).name for document in known["documents"]] == ["good.txt"]
    assert len(known["skipped"]) == len(FILES) + 3


def _edit_weights(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def _edit_config(folder: Path, name: str = "config.json", **values: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _without_layer(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}


# A checkpoint's damage, the line, and the exit status. All of them measure without an error in plain transformers,
# or raise an error that refers to a hidden report.
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "missing weights": (
        lambda folder: _edit_weights(folder, _without_layer),
        "lacks 9 of the model's weights: model.layers.1.input_layernorm.weight, ",
        2,
    ),
    "no layers": (
        lambda folder: _edit_config(folder, num_hidden_layers=0),
        "has num_hidden_layers 0: a model needs at least 1 layer",
        2,
    ),
    "fewer layers": (
        lambda folder: _edit_config(folder, num_hidden_layers=1),
        "has 9 weights that the model has no use for: model.layers.1.input_layernorm.weight, ",
        0,
    ),
    "another shape": (
        lambda folder: _edit_config(folder, vocab_size=300),
        "lm_head.weight is (257, 64) in the checkpoint and (300, 64) in the model",
        2,
    ),
}


def _index(values: dict[str, Any]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(values))

    return write


def _rope(kind: str, **values: Any) -> Callable[[Path], object]:
    rope = {"rope_type": kind, "rope_theta": 1e4, **values}
    return lambda folder: _edit_config(folder, rope_parameters=rope)


def _write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def _folder(name: str) -> Callable[[Path], object]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return replace


def _remove(pattern: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return remove


def _unknown_activation(folder: Path) -> None:
    _edit_config(folder, hidden_act="banana")
    _write("tokenizer.json", "{")(folder)


def _with_infinity(tensors: dict[str, Any]) -> dict[str, Any]:
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = math.inf
    return tensors


# The first thing that is wrong is named, in this order: files that are missing, config, model, tokenizer, weights.
CHECKPOINTS |= {
    "no config": (_remove("config.json"), "has no config.json (it has generation_config.json, ", 2),
    "broken config": (_write("config.json", "{"), "The config.json of ", 2),
    "a list": (_write("config.json", "[1]"), "is a JSON list, not an object.", 2),
    "a wrong type": (
        lambda folder: _edit_config(folder, hidden_size="abc"),
        "Field 'hidden_size' expected int, got str (value: 'abc')",
        2,
    ),
    "unknown type": (
        lambda folder: _edit_config(folder, model_type="banana"),
        "cannot be read: The checkpoint you are trying to load has model type `banana`",
        2,
    ),
    "unknown activation": (
        _unknown_activation,
        "cannot be built from its config.json: hidden_act: 'banana' is unknown to transformers",
        2,
    ),
    "custom code": (
        lambda folder: _edit_config(
            folder, model_type="mine", auto_map={"AutoConfig": "configuration_mine.Mine"}
        ),
        "it needs the Python code that comes with it. Read that code, and pass --trust-remote-code",
        2,
    ),
    "not causal": (
        lambda folder: _edit_config(folder, model_type="clip"),
        "is a clip model, which is not a causal language model",
        2,
    ),
    "no tokenizer": (_remove("token*"), "has no tokenizer files. Pass --tokenizer with a ", 2),
    "broken tokenizer": (_write("tokenizer.json", "{"), "The tokenizer of ", 2),
    "not finite": (
        lambda folder: _edit_weights(
            folder, lambda tensors: {name: value * math.nan for name, value in tensors.items()}
        ),
        "The weights of the model are not finite: ",
        2,
    ),
    "one infinity": (
        lambda folder: _edit_weights(folder, _with_infinity),
        "not finite: model.layers.1.mlp.up_proj.weight has NaN or infinity",
        2,
    ),
    "all zero": (
        lambda folder: _edit_weights(
            folder, lambda tensors: {name: value * 0 for name, value in tensors.items()}
        ),
        "The weights of the model are all zero",
        2,
    ),
    "half of the weights": (
        lambda folder: os.truncate(folder / "model.safetensors", 4000),
        "cannot be loaded: model.safetensors is damaged or incomplete (",
        2,
    ),
    "a pointer": (
        _write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors is a Git LFS pointer and not the weights: run `git lfs pull` there.",
        2,
    ),
    "a base of zero": (
        _rope("default", rope_theta=0),
        "has rope_parameters.rope_theta = 0, which is not a number above 1. Correct it there",
        2,
    ),
    "a factor in words": (
        _rope("linear", factor="four"),
        "has rope_parameters.factor = 'four', which is not a number above 0. Correct it there",
        2,
    ),
    "unknown rope type": (
        lambda folder: _edit_config(folder, rope_parameters={"rope_type": "banana"}),
        "from its config.json: rope_parameters.rope_type: 'banana' is unknown to transformers",
        2,
    ),
    "no length": (
        lambda folder: _edit_config(folder, max_position_embeddings=-1),
        "The model's config names a context length of -1: correct it there.",
        2,
    ),
    "a patch that is none": (
        lambda folder: _edit_config(folder, hf_posenc="banana"),
        'The block "hf_posenc" in the config.json of ',
        2,
    ),
    "half a patch": (
        lambda folder: _edit_config(folder, hf_posenc={"format": 1}),
        'The block "hf_posenc" in the config.json of ',
        2,
    ),
    "no weights": (
        _remove("*.safetensors"),
        "cannot be loaded: it has neither model.safetensors nor pytorch_model.bin",
        2,
    ),
    "nothing": (_remove("*"), "has no config.json (it is empty). Give the folder that save_", 2),
    "a byte order mark": (
        lambda folder: (folder / "config.json").write_bytes(b"\xef\xbb\xbf{}"),
        "is not JSON: Unexpected UTF-8 BOM",
        2,
    ),
    "a number of layers in words": (
        lambda folder: _edit_config(folder, num_hidden_layers="two"),
        "Field 'num_hidden_layers' expected int, got str (value: 'two')",
        2,
    ),
    "a length in words": (
        lambda folder: _edit_config(folder, max_position_embeddings="4k"),
        "Field 'max_position_embeddings' expected int, got str (value: '4k')",
        2,
    ),
    "a dtype that is none": (
        lambda folder: _edit_config(folder, dtype="float7"),
        "has dtype = 'float7', which is no dtype of torch, such as bfloat16. Correct it there.",
        2,
    ),
    "a shard that is absent": (
        _index({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}),
        "model.safetensors.index.json names model-00001-of-00002.safetensors, which is not there",
        2,
    ),
    "a folder for weights": (
        _folder("model.safetensors"),
        "model.safetensors is a folder or a link that leads nowhere: download it again.",
        2,
    ),
    "a folder for a config": (
        _folder("config.json"),
        "is a folder or a link that leads nowhere. Download it again.",
        2,
    ),
    "damaged torch weights": (
        lambda folder: (_remove("*.safetensors")(folder), _write("pytorch_model.bin", "x")(folder)),
        "pytorch_model.bin is damaged or incomplete (not what torch.save writes): download it",
        2,
    ),
    "whole numbers": (
        lambda folder: _edit_weights(
            folder, lambda tensors: {n: (100 * value).int() for n, value in tensors.items()}
        ),
        " as I32, which is no floating-point weight. If it was quantized, restore the quantiz",
        2,
    ),
    "other names": (
        lambda folder: _edit_weights(
            folder, lambda tensors: {f"module.{n}": value for n, value in tensors.items()}
        ),
        "It has 21 others: module.lm_head.weight, module.model.embed_tokens.weight and 19 more.",
        2,
    ),
    "a shard elsewhere": (
        _index({"weight_map": {"model.norm.weight": "/etc/passwd"}}),
        "model.safetensors.index.json names '/etc/passwd', which is no file beside it",
        2,
    ),
    "no heads": (
        lambda folder: _edit_config(folder, num_attention_heads=0),
        "has num_attention_heads = 0, which is not a whole number above 0. Correct it there.",
        2,
    ),
    "a negative ramp": (
        _rope("yarn", factor=2.0, beta_fast=-1),
        "has rope_parameters.beta_fast = -1, which is not a number above 0. Correct it there.",
        2,
    ),
    "a factor that is a text": (
        _rope("yarn", factor=2.0, attention_factor="x"),
        "has rope_parameters.attention_factor = 'x', which is not a number above 0. Correct it there.",
        2,
    ),
    "lists that are texts": (
        _rope("longrope", short_factor="a", long_factor="b"),
        "has rope_parameters.short_factor = 'a', which is not a list of numbers above 0.",
        2,
    ),
    "a patch by another version": (
        lambda folder: _edit_config(
            folder, hf_posenc={"format": 1, "method": "banana", "options": {}, "before": {}}
        ),
        "The patch in the config.json of ",
        2,
    ),
    "an adapter on itself": (
        lambda folder: _write(
            "adapter_config.json",
            json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)}),
        )(folder),
        "as its base model, and that holds an adapter. Correct base_model_name_or_path",
        2,
    ),
    "an adapter without its base": (
        _write("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "/gone"}'),
        "There is no base model folder /gone. Give a folder that save_pretrained wrote, or a hub",
        2,
    ),
    "a length of a tokenizer in words": (
        lambda folder: _edit_config(folder, "tokenizer_config.json", model_max_length="x"),
        "The tokenizer of ",
        2,
    ),
    "a list for a tokenizer": (
        _write("tokenizer.json", "[]"),
        "The tokenizer.json of ",
        2,
    ),
    "an index of nothing": (
        _index({}),
        "model.safetensors.index.json is not the index of its weights: download it again.",
        2,
    ),
}


_DEEP = '{"a":' * 3000 + "1" + "}" * 3000
_EIGHT, _LISTS = [1.0] * 8, {"factor": 2.0, "original_max_position_embeddings": 32}

# Rotary values of which transformers only logs that they are odd, or computes with another number in silence.
CHECKPOINTS |= {
    "a short list": (
        _rope("longrope", short_factor=[4.0], long_factor=_EIGHT, **_LISTS),
        "cannot be used: rope_parameters: short_factor field must have length 8, got 1. Restore",
        2,
    ),
    "a short list for long texts": (
        _rope("longrope", short_factor=_EIGHT, long_factor=_EIGHT[1:], **_LISTS),
        "cannot be used: rope_parameters: long_factor field must have length 8, got 7. Restore",
        2,
    ),
    "a list with a zero": (
        _rope("longrope", short_factor=[0.0, *_EIGHT[1:]], long_factor=_EIGHT, **_LISTS),
        "which is not a list of numbers above 0. Correct it there.",
        2,
    ),
    "no list": (
        _rope("longrope", short_factor=_EIGHT, **_LISTS),
        "Missing required keys in `rope_parameters` for 'rope_type'='longrope': {'long_factor'}",
        2,
    ),
    "no factor": (
        _rope("linear"),
        "Missing required keys in `rope_parameters` for 'rope_type'='linear': {'factor'}",
        2,
    ),
    "a factor without a type": (
        _rope("default", factor=4.0),
        "as it is: Unrecognized keys in `rope_parameters` for 'rope_type'='default': {'factor'}",
        0,
    ),
    "a misspelt knob": (
        _rope("yarn", factor=2.0, beta_fsat=16),
        "as it is: Unrecognized keys in `rope_parameters` for 'rope_type'='yarn': {'beta_fsat'}",
        0,
    ),
    "a factor below one": (
        _rope("linear", factor=0.5),
        "as it is: rope_parameters: factor field must be a float or int >= 1, got 0.5.",
        0,
    ),
    "a factor beside another": (
        _rope("yarn", factor=4.0, original_max_position_embeddings=32),
        "(config.rope_parameters['factor'] = 4.0) does not match the ratio implicitly set",
        0,
    ),
    "a ramp that ends before it begins": (
        _rope("yarn", factor=2.0, beta_fast=1, beta_slow=32),
        "as it is: rope_parameters: beta_fast field must be greater than beta_slow, got beta_f",
        0,
    ),
    "a blend that ends before it begins": (
        _rope("llama3", low_freq_factor=4.0, high_freq_factor=1.0, **_LISTS),
        "high_freq_factor field must be greater than low_freq_factor, got high_freq_factor=1.0",
        0,
    ),
    "a temperature of zero": (
        _rope("yarn", factor=2.0, attention_factor=0.0),
        "has rope_parameters.attention_factor = 0.0, which is not a number above 0. Correct it",
        2,
    ),
    "an original length of zero": (
        _rope("llama3", **{**_LISTS, "original_max_position_embeddings": 0}),
        "has rope_parameters.original_max_position_embeddings = 0, which is not a number above 0.",
        2,
    ),
    "a temperature in words": (
        _rope("yarn", factor=2.0, mscale="a", mscale_all_dim=1.0),
        "has rope_parameters.mscale = 'a', which is not a number. Correct it there.",
        2,
    ),
    "twice the head": (
        _rope("default", partial_rotary_factor=2.0),
        "has rope_parameters.partial_rotary_factor = 2.0, which is not a number from 0 to 1.",
        2,
    ),
    "no in words": (
        _rope("yarn", factor=2.0, truncate="no"),
        "has rope_parameters.truncate = 'no', which is not true or false. Correct it there.",
        2,
    ),
    "more layers than any model": (
        lambda folder: _edit_config(folder, num_hidden_layers=10**6),
        "has num_hidden_layers = 1000000, which is more layers than any model has. Correct it",
        2,
    ),
    "code that is no object": (
        lambda folder: _edit_config(folder, auto_map=5),
        "has auto_map = 5, which is not an object. Correct it there.",
        2,
    ),
    "a deep config": (
        _write("config.json", _DEEP),
        "is not JSON: maximum recursion depth exceede",
        2,
    ),
    "a deep patch": (
        _write("posenc_config.json", _DEEP),
        "This is not a patch in JSON: maximum rec",
        2,
    ),
    "a deep adapter": (_write("adapter_config.json", _DEEP), "maximum recursion depth exceeded", 2),
    "a list for generation": (
        _write("generation_config.json", "[]"),
        "The generation_config.json of ",
        2,
    ),
    "half a config for generation": (
        _write("generation_config.json", "{"),
        "The generation_config.json of ",
        2,
    ),
    "ties that the weights lack": (
        lambda folder: _edit_config(folder, tie_word_embeddings=True),
        "to lm_head.weight, but both are present in the checkpoints with different values, so we w",
        0,
    ),
}


def _perplexity(model: Path, output: Path, *more: str) -> Any:
    from typer.testing import CliRunner

    from hf_posenc.cli.app import app

    text = output.parent / "text.txt"
    text.write_text(prose(300))
    arguments = ["perplexity", model, "--text", text, "--lengths", "32", "--patch", "none"]
    return CliRunner().invoke(
        app, [*map(str, arguments), "--no-plot", "--output", str(output), *more]
    )


# What is wrong with a tokenizer, with values or for a measurement; and what Python meets only when it loads.
_ONLY_IN_COMMANDS = (
    *("not causal", "no tokenizer", "broken tokenizer"),
    *("not finite", "one infinity", "all zero", "no length"),
    *("a length of a tokenizer in words", "a list for a tokenizer"),
)


# transformers judges these as it judges others that are here.
JUDGED_ALIKE = {
    *("a misspelt knob", "a factor beside another", "a blend that ends before it begins"),
    "a ramp that ends before it begins",
}


@pytest.mark.parametrize("name", quick(CHECKPOINTS, {*CHECKPOINTS} - JUDGED_ALIKE))
def test_a_damaged_checkpoint_is_one_line(name: str, tmp_path: Path) -> None:
    damage, line, status = CHECKPOINTS[name]
    model = tiny_checkpoint(tmp_path / "model")
    damage(model)
    result = _perplexity(model, tmp_path / "out")
    assert result.exit_code == status, result.output
    kind = "error: " if status else "warning: "
    lines = [row for row in result.stderr.splitlines() if row.startswith(kind)]
    assert len(lines) == 1, result.output
    assert line in lines[0]
    assert "Traceback" not in result.output
    if name in _ONLY_IN_COMMANDS:
        return
    if status:
        with pytest.raises(PosencError) as error:
            hf_posenc.from_pretrained(model)
        message = str(error.value)
    else:
        with pytest.warns(UserWarning, match=re.escape(line)) as warned:
            hf_posenc.from_pretrained(model)
        (message,) = {str(warning.message) for warning in warned}
    assert line.rpartition("from its config.json: ")[2] in message
    assert "\n" not in message


def test_advice_on_keys_is_no_doubt(tmp_path: Path) -> None:
    """Phi-3's own configs have no `factor`; transformers recommends one, and computes the same without it."""
    model = tiny_checkpoint(tmp_path / "model")
    _rope("longrope", short_factor=_EIGHT, long_factor=_EIGHT, original_max_position_embeddings=32)(
        model
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_posenc.from_pretrained(model)


@pytest.mark.slow
def test_a_tokenizer_with_a_known_error_is_named(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    _edit_config(model, model_type="mistral", transformers_version="4.50.0")
    file = model / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"] |= {f"<{n}>": n for n in range(257, 100_001)}  # as in the family
    file.write_text(json.dumps(values))
    result = _perplexity(model, tmp_path / "out")
    assert result.exit_code == 0, result.output
    (line,) = (row for row in result.stderr.splitlines() if row.startswith("warning: "))
    assert "This will lead to incorrect tokenization. You should set the `fix_mistral" in line
    assert "pass the folder as --tokenizer." in line


@pytest.mark.parametrize(
    ("engine", "content", "line"),
    [
        ("vllm", "{", "The tokenizer_config.json of "),
        ("transformers4", "[]", "is a JSON list, not an object."),
        ("vllm", '{"model_max_length": "x"}', "has model_max_length = 'x', which is no length."),
        ("vllm", _DEEP, "is not JSON: maximum recursion depth exceeded"),
    ],
    ids=["half", "a list", "a length in words", "deep"],
)
def test_an_export_names_a_damaged_tokenizer(
    engine: str, content: str, line: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(content)
    given = ["export", str(model), "--to", engine, "--patch", "yarn:scale=2"]
    result = CliRunner().invoke(app, [*given, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    (error,) = (row for row in result.stderr.splitlines() if row.startswith("error: "))
    assert line in error


# Damage to a result: a report leaves it out, or names it.
RESULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no summary": lambda values: values.pop("summary"),
    "a summary that is none": lambda values: values.update(summary="x"),
    "rows that are none": lambda values: values.update(summary=[1]),
    "a model that is none": lambda values: values.update(model=[]),
    "a curve that is none": lambda values: values.update(curve=[5]),
    "settings that are none": lambda values: values.update(settings=[]),
}


@pytest.fixture(scope="module")
def measured(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("measured")
    result = _perplexity(places["model"], folder / "out")
    assert result.exit_code == 0, result.output
    return dict(json.loads((folder / "out" / "perplexity.json").read_text()))


@pytest.mark.parametrize("name", RESULTS)
def test_a_damaged_result_is_named(name: str, measured: dict[str, Any], tmp_path: Path) -> None:
    values = json.loads(json.dumps(measured))
    RESULTS[name](values)
    file = tmp_path / "perplexity.json"
    file.write_text(json.dumps(values))
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(page)])
    assert result.exit_code == 2, result.output
    (error,) = (row for row in result.stderr.splitlines() if row.startswith("error: "))
    assert f"{tmp_path}" in error
    assert "damaged, or written by another version" in error
    assert not page.exists()


@pytest.mark.parametrize("module", ["no.such.module", "json", ".relative"])
def test_a_module_without_backends_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posenc.attention import engine

    monkeypatch.setenv("HF_POSENC_EXTRA_BACKENDS", module)
    with pytest.raises(PosencError, match=f"={module!r} names no module with a tuple BACKENDS"):
        engine._extra()


def test_a_terminal_of_no_width_shows_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "Peng et al. 2023" in CliRunner().invoke(app, ["show", "yarn"]).stdout


def test_missing_weights_are_the_same_at_every_run(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    _edit_weights(model, _without_layer)
    numbers = []
    for output in ("one", "two"):
        result = _perplexity(model, tmp_path / output, "--allow-missing-weights")
        assert result.exit_code == 0, result.output
        assert "They are drawn at random, from a fixed seed." in result.stderr
        known = json.loads((tmp_path / output / "perplexity.json").read_text())
        numbers.append((known["model"]["weights_sha256"], known["summary"]))
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    "command",
    [
        "inspect {model} --patch rerope",
        pytest.param("recommend {model} --target-length 1k --weights", marks=pytest.mark.slow),
    ],
)
def test_commands_that_load_weights_take_missing_ones_on_demand(
    command: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    _edit_weights(model, _without_layer)
    arguments = command.format(model=model).split()
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "lacks 9 of the model's weights" in refused.stderr
    loaded = CliRunner().invoke(app, [*arguments, "--allow-missing-weights"])
    assert loaded.exit_code == 0, loaded.output
    assert "They are drawn at random, from a fixed seed." in loaded.stderr


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    import warnings

    import hf_posenc

    model = tiny_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_posenc.from_pretrained(model)


@pytest.mark.parametrize("command", ["perplexity", "inspect"])
def test_an_unknown_name_is_one_line_without_retries(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import HfApi, constants
    from typer.testing import CliRunner

    from hf_posenc.cli.app import app

    requests = []

    def unreachable(*_: Any, **__: Any) -> None:
        requests.append(1)
        raise OSError("Name or service not known")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HfApi, "model_info", unreachable)
    for offline, reason in (
        (False, "cannot be reached (Name or service not known)"),
        (True, "HF_HUB_OFFLINE is set"),
    ):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        result = CliRunner().invoke(app, [command, "nobody/nothing"])
        assert result.exit_code == 2, result.output
        assert len(result.stderr.splitlines()) == 1
        assert "There is no model nobody/nothing: no folder has this name" in result.stderr
        assert reason in result.stderr
    assert requests == [1]


def test_a_folder_has_no_revisions_and_a_tokenizer_is_called_one(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    result = _perplexity(model, tmp_path / "out", "--revision", "main")
    assert "only models on the hub have revisions" in result.stderr
    result = _perplexity(model, tmp_path / "out", "--tokenizer", str(tmp_path / "absent"))
    assert f"There is no tokenizer folder {tmp_path / 'absent'}. " in result.stderr


def test_custom_code_runs_where_it_is_trusted(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    (model / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Mine(LlamaConfig):\n    model_type = 'mine'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Mine\n"
    )
    names = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}
    _edit_config(model, model_type="mine", auto_map=names)
    assert "pass --trust-remote-code" in _perplexity(model, tmp_path / "out").stderr
    result = _perplexity(model, tmp_path / "out", "--trust-remote-code")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("value", "reason"), [(math.nan, "not finite"), (0.0, "all zero")])
def test_a_patch_names_damaged_weights(value: float, reason: str) -> None:
    import torch

    from hf_posenc import patch_model
    from tests.support import zoo

    model = zoo.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    with pytest.raises(PosencError, match=f"The weights of the model are {reason}"):
        patch_model(model, "rerope", window=16)
    with pytest.warns(UserWarning, match=f"The weights of the model are {reason}"):
        patch_model(model, "yarn", scale=4)
