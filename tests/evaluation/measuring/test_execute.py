"""The machine for measuring: one kind of measurement stands for all of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.evaluation.documents import Document, tokenize
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.execute import (
    Attempt,
    Failures,
    Item,
    Measurement,
    Value,
    collected,
    execute,
)
from hf_posenc.evaluation.measuring.store import Key, Records, Shard
from hf_posenc.evaluation.options import PerplexityOptions
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import PerplexityRun, prepare
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.files import to_json
from tests.support import zoo
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
Sums = dict[Key, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Text(Item):
    """A text of one length."""

    ids: torch.Tensor


class Losses(Measurement[Text, tuple[Sums, dict[Any, str]]]):
    """The loss of random texts; those of `unlucky` numbers fail."""

    scorer: TokenScorer

    def __init__(self, specs: tuple[str, ...], unlucky: tuple[int, ...] = ()) -> None:
        self.model = zoo.build("llama")
        self.scorer = TokenScorer(self.model, zoo.tokens(16)[0])
        self.unlucky, self.measured = unlucky, list[int]()
        self.items = [
            Text(
                key=(spec, number),
                candidate=Candidate.parse(spec),
                length=32,
                cost=32,
                cells=((32,),),
                order=number,
                ids=zoo.tokens(32, seed=number)[0],
            )
            for spec, number in itertools.product(specs, range(4))
        ]

    def measure(self, item: Text, attempt: Attempt) -> Value:
        def score() -> float:
            self.measured.append(item.order)
            if item.order in self.unlucky:
                raise RuntimeError(f"no luck with {item.order}")
            return float(self.scorer(item.ids).sum())

        loss = attempt(score)
        return {} if loss is None else {"loss": loss}

    def collect(self, values: Mapping[Key, Value]) -> tuple[Sums, dict[Any, str]]:
        losses = {key: value["loss"] for key, value in values.items() if "loss" in value}
        return losses, Failures.of(self.items, values.get).reasons()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_first_failure_of_a_cell_decides_whoever_measures_it(order: tuple[int, int]) -> None:
    store = Records()
    for index in order:
        execute(Losses(("none",), unlucky=(1, 2)), store, Shard(index, 2))
    run = Losses(("none",))
    result = collected(run, store)
    assert result is not None
    assert result[1] == {("none", (32,)): "RuntimeError: no luck with 1"}
    assert store.get(("none", 3)) == {"skipped": True}
    alone = Losses(("none",), unlucky=(1, 2))
    execute(alone, Records())
    assert alone.measured == [0, 1]  # the others are lost


def test_a_method_that_the_model_refuses_is_a_failure_and_the_others_are_measured() -> None:
    run, store = Losses(("yarn:scale=2,layers=[99]", "none")), Records()
    execute(run, store)
    result = collected(run, store)
    assert result is not None
    losses, failures = result
    assert len(losses) == 4
    assert [label for label, _ in failures] == [run.items[0].label]
    with pytest.raises(Exception, match=r".") as raised:
        execute(Losses((run.items[0].candidate.spec,)), Records(), strict=True)  # type: ignore[union-attr]
    assert str(raised.value) in next(iter(failures.values()))


def test_strict_raises_and_stores_nothing() -> None:
    store = Records()
    with pytest.raises(RuntimeError, match="no luck with 1"):
        execute(Losses(("none",), unlucky=(1,)), store, strict=True)
    assert store.get(("none", 0)) is not None
    assert store.get(("none", 1)) is None


@pytest.mark.parametrize("spec", ["none", "log_n:original_max_position_embeddings=64"])
def test_a_dynamic_table_of_the_model_is_reset_whatever_is_patched_in_beside_it(spec: str) -> None:
    """A method that leaves the model's own table alone leaves its state, too."""
    results = []
    for count in (1, 3):
        model = zoo.build("llama", vocab_size=VOCABULARY, rope_parameters=DYNAMIC)
        documents = [tokenize(Document(f"d{n}", prose(300, n)), byte_tokenizer()) for n in range(3)]
        candidate = Candidate.parse(spec).checked(model)
        assert candidate.moves
        assert candidate.stateful
        settings = Settings(lengths=(96, 160), protocols=("tail",), tail_tokens=8)
        store = Records()
        for index in range(count):
            run = PerplexityRun(model, documents, [candidate], settings)
            execute(run, store, Shard(index, count))
        measured = collected(run, store)
        assert measured is not None
        results.append([record.nats for record in measured.records])
    assert results[0] == results[1]


def test_processes_with_other_numbers_of_threads_give_the_same_bytes(tmp_path: Path) -> None:
    model, computed_with = zoo.build("llama", vocab_size=VOCABULARY, num_hidden_layers=1), []
    model.register_forward_pre_hook(lambda *_: computed_with.append(torch.get_num_threads()))
    texts = [prose(300, seed) for seed in range(4)]
    options = PerplexityOptions(methods=["none"], lengths=[64, 256])
    own, results = torch.get_num_threads(), []
    try:
        for name, numbers in (("one", (1, 1)), ("two", (1, 2))):
            for index, number in enumerate(numbers):
                torch.set_num_threads(number)
                run = prepare(model, byte_tokenizer(), Source.of(texts), options)
                computed_with.clear()
                with warnings.catch_warnings(record=True) as caught:
                    result = run.run(tmp_path / name, Shard(index, 2))
                assert torch.get_num_threads() == number
                assert set(computed_with) == {1}
                assert len(caught) == (number == 2)
            assert result is not None
            results.append(to_json(result.to_dict()))
        assert "begun with 1 threads; the others are computed with as many, not with 2" in str(
            caught[0].message
        )
    finally:
        torch.set_num_threads(own)
    assert results[0] == results[1]
    (path,) = tmp_path.glob("two/records/*/threads.json")
    path.write_text(path.read_text().replace("1", "2", 1))
    with pytest.warns(UserWarning, match=r"threads.json is damaged, and written anew"):
        run.run(tmp_path / "two")
