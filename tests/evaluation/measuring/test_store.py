"""Records that survive what may happen to a process."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import time
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosencError
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
from hf_posenc.evaluation.measuring.store import (
    Key,
    Records,
    Shard,
    Store,
    current_shard,
    fingerprint_of,
)
from hf_posenc.evaluation.options import PerplexityOptions
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import PerplexityRun, prepare
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.files import to_json
from tests.support import zoo
from tests.support.selection import late
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose, tiny

SETTINGS = {"lengths": [1, 2], "dtype": "float32"}
KEYS: list[Key] = [("yarn", 4, f"d{n}") for n in range(4)]


def missing(store: Store, keys: list[Key]) -> list[Key]:
    return [key for key in keys if store.get(key) is None]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("records/*/shard-*.jsonl"))


def test_every_line_is_soon_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Store(tmp_path, SETTINGS) as store:
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor))
        (path,) = files(tmp_path)
        for number, (later, expected) in enumerate([(0, 1), (0.5, 1), (0.4, 1), (0.2, 2)]):
            now += later
            store.append(KEYS[number], {"n": number})
            entry = {"key": list(KEYS[number]), "value": {"n": number}}
            checksum = zlib.crc32(json.dumps(entry).encode()[:-1])
            assert json.loads(path.read_text().splitlines()[-1]) == {**entry, "crc32": checksum}
            assert len(synced) == expected
        store.refresh()
        assert len(synced) == 2
        store.append(("another",), {})
        store.refresh()
        assert len(synced) == 3
        store.append(("one more",), {})
    assert len(synced) == 4


def test_a_torn_last_line_is_healed_and_measured_again(tmp_path: Path) -> None:
    with Store(tmp_path, SETTINGS) as store:
        store.append(KEYS[0], {"n": 0})
        store.append(KEYS[1], {"n": 1})
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with Store(tmp_path, SETTINGS) as store:
            assert missing(store, KEYS[:2]) == KEYS[1:2]
            store.append(KEYS[1], {"n": 1})
        assert path.read_bytes() == whole


def opened(folder: Path) -> tuple[list[Key], list[str]]:
    """The keys that are missing of the first three, and the warnings; those that are there are as they were."""
    with warnings.catch_warnings(record=True) as caught, Store(folder, SETTINGS) as store:
        lacking = missing(store, KEYS[:3])
        for number, key in enumerate(KEYS[:3]):
            assert store.get(key) == (None if key in lacking else {"nats": 10.5 + number})
            if key in lacking:
                store.append(key, {"nats": 10.5 + number})
    return lacking, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("step", [3, *late([1])])
def test_a_flipped_byte_is_reported_once_and_its_record_is_new(step: int, tmp_path: Path) -> None:
    assert opened(tmp_path) == (KEYS[:3], [])
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    feeds = [at for at in range(len(whole) - 1) if whole[at] == ord("\n")]
    flips = [(at, whole[at] ^ 1) for at in (*range(0, len(whole) - 1, step), *feeds)]
    flips += [(at, new) for at in range(0, len(whole) - 1, 5 * step) for new in b"\n\r \0\xff"]
    for at, new in flips:
        if whole[at] == new:
            continue
        path.write_bytes(whole[:at] + bytes([new]) + whole[at + 1 :])
        lacking, (warning,) = opened(tmp_path)
        line = whole.count(b"\n", 0, at) + 1
        # a damaged line feed costs the lines on both sides of it
        assert lacking == KEYS[line - 1 : line + (whole[at] == ord("\n"))]
        assert warning.startswith(f"{path}: damaged, or written by an earlier version")
        assert re.search(rf": lines? ({line}|{line + 1})[.,]", warning)
        assert "Nothing of it is used; what is missing is measured again." in warning
        assert opened(tmp_path) == ([], [])
    path.write_bytes(whole[:-1] + b"x")
    assert opened(tmp_path) == (KEYS[2:3], [])  # as a kill leaves it


def test_damaged_records_and_those_without_checksums_are_not_used(tmp_path: Path) -> None:
    opened(tmp_path)
    (path,) = files(tmp_path)
    path.rename(path.with_name("shard-2-of-2.jsonl"))  # of another process, which ended
    path.write_bytes(b"\0\0\0\0\n[1]\n" + b'{"key": ["a"], "value": [3]}\n, "crc32": 0}\n' * 3)
    lacking, (warning,) = opened(tmp_path)
    assert not lacking
    assert "lines 1, 2, 3, 4, 5 and 3 more." in warning
    assert opened(tmp_path) == ([], [])


def test_other_settings_neither_read_nor_lose_what_was_measured(tmp_path: Path) -> None:
    with Store(tmp_path, SETTINGS) as store:
        store.append(KEYS[0], {"n": 0, "nan": float("nan")})
    with Store(tmp_path, {**SETTINGS, "dtype": "bfloat16"}) as store:
        assert store.get(KEYS[0]) is None
        store.append(KEYS[0], {"n": 1})
    with Store(tmp_path, dict(reversed(SETTINGS.items()))) as store:
        assert store.get(KEYS[0]) == {"n": 0, "nan": None}
    assert fingerprint_of(SETTINGS) != fingerprint_of({**SETTINGS, "lengths": [1, 3]})


def test_two_writers_of_one_shard_are_refused(tmp_path: Path) -> None:
    with (
        Store(tmp_path, SETTINGS),
        pytest.raises(PosencError, match=r"Another process is writing .*shard-1-of-1"),
    ):
        Store(tmp_path, SETTINGS)
    with Store(tmp_path, SETTINGS, Shard(0, 2)), Store(tmp_path, SETTINGS, Shard(1, 2)):
        pass


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    now, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store(tmp_path, {"a": 1}) as store:
        store.append(("one",), {"text": "x" * 1000})
        # A disk that is full in the next line; Python ignores the signal.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, most))
        try:
            with pytest.raises(PosencError) as caught:
                store.append(("two",), {"text": "x" * 1000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (now, most))
        assert store.get(("two",)) is None
        store.append(("three",), {"n": 3})  # there is room for a short one
    assert "cannot be written: File too large" in str(caught.value)
    assert "Everything measured before is kept" in str(caught.value)
    with Store(tmp_path, {"a": 1}) as store:
        assert store.get(("one",)) == {"text": "x" * 1000}
        assert store.get(("two",)) is None
        assert store.get(("three",)) == {"n": 3}


def _environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Set the variables of a launcher, and no others."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


UNSET = "unset both, or pass --shard"


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, Shard()),
        ("2/8", {"RANK": "0", "WORLD_SIZE": "4"}, Shard(1, 8)),
        (None, {"RANK": "3", "WORLD_SIZE": "4"}, Shard(3, 4, launched=True)),
        (None, {"SLURM_ARRAY_TASK_ID": "3"}, Shard()),  # tasks may measure different things
        *((text, {}, "--shard") for text in ("0/2", "3/2", "1", "a/b", "1/0", "-1/2")),
        (None, {"WORLD_SIZE": "2"}, UNSET),
        (None, {"WORLD_SIZE": "2", "RANK": "5"}, UNSET),
        (None, {"WORLD_SIZE": "2", "RANK": "a"}, UNSET),
        (None, {"WORLD_SIZE": "many", "RANK": "0"}, UNSET),
    ],
)
def test_a_process_knows_its_place_if_it_exists(
    given: str | None, environment: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _environment(monkeypatch, **environment)
    if isinstance(expected, Shard):
        assert current_shard(given) == expected
        return
    with pytest.raises(PosencError, match=expected):
        current_shard(given)


# The machine for measuring: one kind of measurement stands for all of them.

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
    result: Any = collected(Losses(("none",)), store)
    assert result[1] == {("none", (32,)): "RuntimeError: no luck with 1"}
    assert store.get(("none", 3)) == {"skipped": True}
    alone = Losses(("none",), unlucky=(1, 2))
    execute(alone, Records())
    assert alone.measured == [0, 1]  # the others are lost


def test_a_method_that_the_model_refuses_is_a_failure_and_the_others_are_measured() -> None:
    run, store = Losses(("yarn:scale=2,layers=[99]", "none")), Records()
    execute(run, store)
    result: Any = collected(run, store)
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
        measured: Any = collected(run, store)
        results.append([record.nats for record in measured.records])
    assert results[0] == results[1]


def test_processes_with_other_numbers_of_threads_give_the_same_bytes(tmp_path: Path) -> None:
    model, computed_with = tiny(), []
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
                    result: Any = run.run(tmp_path / name, Shard(index, 2))
                assert torch.get_num_threads() == number
                assert set(computed_with) == {1}
                assert len(caught) == (number == 2)
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
