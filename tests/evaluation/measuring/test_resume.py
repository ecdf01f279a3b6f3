"""Runs that are killed, continued by others, and shared: the result is always the same, byte for byte."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.evaluation.documents import Document, tokenize
from hf_posenc.evaluation.measuring.candidates import parse_candidates
from hf_posenc.evaluation.measuring.execute import collected, execute
from hf_posenc.evaluation.measuring.identity import describe_model
from hf_posenc.evaluation.measuring.store import Shard
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import PerplexityRun, joined
from hf_posenc.files import to_json
from scripts.measure_real_model import copied_share
from tests.support.processes import PATIENCE, start
from tests.support.selection import late
from tests.support.tiny_text import byte_tokenizer, prose, tiny

LENGTHS = (32, 64, 128)
SPECS = ["none", "yarn", "pi:scale=2", "rerope:window=24"]
WORDS = byte_tokenizer()


def described(model: Any) -> dict[str, Any]:
    return describe_model("tiny", model, WORDS, (), "never")


@cache
def parts() -> tuple[Any, ...]:
    """A model, its documents and candidates, and what is known about them; measuring changes none of it."""
    model = tiny()
    documents = [tokenize(Document(f"d{n}", prose(140 + 41 * n, n)), WORDS) for n in range(4)]
    candidates = [candidate.checked(model) for candidate in parse_candidates(SPECS)]
    about = {"model": described(model), "source": {}, "original": 64, "skipped": []}
    return model, documents, candidates, about


def make_run(model: Any = None, **settings: Any) -> PerplexityRun:
    shared, documents, candidates, about = parts()
    if model is not None:
        about = {**about, "model": described(model)}
    chosen = Settings(**{"lengths": LENGTHS, **settings})
    return PerplexityRun(model or shared, documents, candidates, chosen, metadata=about)


def work(folder: Path, shard: Shard, slow: float = 0.0) -> None:
    run = make_run()
    with run.open(folder, shard) as store:
        execute(run, store, shard, lambda *_: time.sleep(slow))


def result(folder: Path) -> str:
    """The finished result; whatever is missing is an error."""
    run = make_run()
    with run.open(folder, Shard(0, 99)) as store:
        made: Any = collected(run, store)
    return to_json(made.to_dict())


def lines(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("records/*/shard-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("whole")
    work(folder, Shard())
    return result(folder)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(whole: str, tmp_path: Path) -> None:
    folder, chance = tmp_path / "killed", random.Random(0)
    kills = 0
    while kills < 20:
        count = chance.choice([1, 2, 3])
        shards = [Shard(index, count) for index in range(count)]
        processes = [start(work, folder, shard, 0.01) for shard in shards]
        time.sleep(chance.uniform(0.05, 0.6))
        for process in processes:
            process.kill()
            kills += 1
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode in (-signal.SIGKILL, 0)
    work(folder, Shard())
    assert result(folder) == whole


def test_nothing_that_was_reported_is_measured_again(whole: str, tmp_path: Path) -> None:
    """A copy of the folder, made within a forward, is what a kill leaves at that moment."""
    run, killed = make_run(), tmp_path / "killed"

    def copy(*_: Any) -> None:
        if len(lines(tmp_path / "first")) == 5:
            shutil.copytree(tmp_path / "first", killed)
            raise KeyboardInterrupt

    with run.open(tmp_path / "first") as store, pytest.raises(KeyboardInterrupt):
        execute(run, store, progress=copy)
    assert len(lines(killed)) == 5 < len(run.items)
    work(killed, Shard(1, 2))
    work(killed, Shard(0, 2))
    after = [tuple(line["key"]) for line in lines(killed)]
    assert len(after) == len(set(after)) == len(run.items)
    assert result(killed) == whole


@pytest.mark.parametrize("count", [3, *late([2, 7])])
def test_shares_give_what_one_process_gives(whole: str, tmp_path: Path, count: int) -> None:
    for index in range(count):
        work(tmp_path, Shard(index, count))
    assert result(tmp_path) == whole


def test_another_text_of_the_same_tokens_is_measured_anew(tmp_path: Path) -> None:
    run = make_run()
    with run.open(tmp_path) as store:
        execute(run, store)
    others: list[Any] = [*run.documents]
    # such as a normalizer or unknown tokens make of it
    others[0] = dataclasses.replace(others[0], byte_ends=2 * others[0].byte_ends, sha256="0" * 64)
    again = PerplexityRun(run.model, others, run.candidates, run.settings, metadata=run.metadata)
    with again.open(tmp_path) as store:
        assert collected(again, store) is None
        execute(again, store)
        measured: Any = collected(again, store)
    for record in measured.records:  # a byte is a token of these texts
        if record.protocol == "tail":
            assert record.bytes == record.tokens * (2 if record.document == "d0" else 1)
    streams = [joined(documents) for documents in (run.documents, again.documents)]
    assert streams[0][0].sha256 != streams[1][0].sha256


def test_changed_settings_weights_or_backends_start_anew(tmp_path: Path) -> None:
    work(tmp_path, Shard())
    changed = tiny()
    with torch.no_grad():
        changed.lm_head.weight[3, 3] += 1e-3
    backends: list[Any] = [tiny(), tiny()]
    backends[0].config._attn_implementation = "eager"
    backends[1].config._experts_implementation = "batched_mm"
    runs = [make_run(tail_tokens=8), make_run(prefill=16), *map(make_run, (changed, *backends))]
    folders = set()
    for run in runs:
        with run.open(tmp_path) as store:
            folders.add(store.folder)
            assert collected(run, store) is None
    assert len(folders) == 5
    run = make_run(base=2.0)  # decides the summary only
    with run.open(tmp_path) as store:
        assert collected(run, store) is not None


def test_copies_count_where_truncation_has_cut_off_the_first() -> None:
    first, second, rest = range(100, 110), range(200, 212), list(range(300, 360))
    ids = [*first, *second, *rest, *second, *first]  # first again 92 tokens behind, second 72
    begin = len(ids) - 22
    # a run of 8 ends three times in the ten tokens of the first, five times in the twelve of the second
    assert copied_share(ids, begin, reach=92) == 3 / 22
    assert copied_share(ids, begin, reach=72) == 8 / 22
    assert copied_share([*ids[:begin], *first, *ids[begin:]], begin + 10, reach=92) == 0
