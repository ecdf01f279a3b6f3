"""The examples of docstrings run, on a tiny Llama that stands for the reader's model of 4,096 tokens."""

from __future__ import annotations

import contextlib
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_posenc import methods
from tests.support import zoo
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

MODULES = (
    *("hf_posenc", "hf_posenc.methods", "hf_posenc.training", "hf_posenc.evaluation"),
    *("hf_posenc.evaluation.recommend", "hf_posenc.evaluation.documents", "hf_posenc.embedded"),
    "hf_posenc.engines",
)
IMPORTANT = {
    *("patch_model", "unpatch_model", "patched", "get_patch", "inspect_rope", "inspect_positions"),
    *("save_patch", "load_patch", "from_pretrained", "get_method", "chunk_loss", "recommend"),
    *("PositionCollator", "measure_perplexity", "measure_retrieval"),
}
"""Names that must have an example."""

SECONDS = {
    *("from_pretrained", "measure_retrieval", "recommend"),
    *("PerplexityResult", "RetrievalResult", "TrainingFolder"),
}
"""Names whose example takes seconds."""
DEEPSPEED = {
    *SECONDS,
    *("export", "write_export", "load_adapter", "write_card", "PerplexityCallback"),
}
"""Names whose example may import deepspeed."""


def examples() -> Iterator[Any]:
    """The public objects whose docstring has an example, each once."""
    finder = doctest.DocTestFinder(recurse=False)
    found: dict[str, doctest.DocTest] = {}
    for module in map(importlib.import_module, MODULES):
        for name in getattr(module, "__all__", vars(module)):
            for test in finder.find(getattr(module, name), name, globs={}):
                if test.examples:
                    found[name] = test
    for name, test in found.items():
        yield pytest.param(test, id=name, marks=pytest.mark.slow if name in SECONDS else ())


EXAMPLES = list(examples())


@pytest.mark.parametrize("test", EXAMPLES)
@pytest.mark.filterwarnings("ignore:Plain transformers cannot")
def test_examples(test: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(methods, "_OWN", {})  # what an example registers
    sizes = {"max_position_embeddings": 4096, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
    test.globs |= {"model": zoo.build("llama", **sizes), "tokenizer": byte_tokenizer()}
    test.globs["texts"] = [prose(400, seed) for seed in range(2)]
    if test.name in DEEPSPEED:  # where it is installed, its import prints a line
        with contextlib.suppress(ImportError):
            importlib.import_module("deepspeed")
    printed: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert result.failed == 0, "".join(printed)


def test_the_important_functions_have_an_example() -> None:
    assert {param.id for param in EXAMPLES} >= IMPORTANT
