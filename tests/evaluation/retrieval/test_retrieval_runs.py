"""Whole runs: cells, failures, shards, resuming, the papers' numbers."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.execute import collected, execute
from hf_posenc.evaluation.measuring.store import ALONE, Records, Shard
from hf_posenc.evaluation.retrieval.result import RetrievalResult, wilson
from hf_posenc.evaluation.retrieval.run import RetrievalRun, measure_retrieval
from hf_posenc.evaluation.retrieval.tasks import RetrievalSettings
from hf_posenc.files import to_json
from hf_posenc.lengths import even_depths
from tests.support import zoo
from tests.support.retrieval_models import Copier
from tests.support.tiny_text import VOCABULARY, byte_tokenizer

KNOWN: dict[str, Any] = {
    "model": {"name": "m", "class": "C", "parameters": 1, "dtype": "float32", "device": "cpu", "attention": None},
    "haystack": {"kind": "noise"},
}  # fmt: skip
LENGTHS = (400, 800, 1600)


def settings(**given: Any) -> RetrievalSettings:
    return RetrievalSettings(
        **{"lengths": LENGTHS, "tasks": ("passkey",), "samples": 2, "distractors": 3, **given}
    )


def run_of(model: Any, **given: Any) -> RetrievalRun:
    none, metadata = Candidate.parse("none"), {**KNOWN, "original": 400}
    return RetrievalRun(model, byte_tokenizer(), [none], settings(**given), metadata=metadata)


def measured(run: RetrievalRun, folder: Path, shard: Shard = ALONE) -> RetrievalResult | None:
    with run.open(folder, shard) as store:
        execute(run, store, shard)
        store.refresh()
        return collected(run, store)


def whole(run: RetrievalRun, folder: Path) -> RetrievalResult:
    result = measured(run, folder)
    assert result is not None
    return result


def test_a_window_gives_the_papers_numbers(tmp_path: Path) -> None:
    """The heat map is a staircase, and both numbers follow from the distances."""
    window = 500
    result = whole(run_of(Copier(window), depths=even_depths(9)), tmp_path)
    for length in LENGTHS:
        cells = result.by_depth("none", "passkey", length)
        assert [cell.depth for cell in cells] == list(even_depths(9))
        found = [cell.accuracy for cell in cells]
        assert found == sorted(found)  # the nearer, the better
        inside = [cell.distance for cell in cells if cell.accuracy == 1.0]
        assert result.k_max("none", "passkey", length) == max(d for d in inside if d is not None)
        assert all((cell.distance or 0) > window - 120 for cell in cells if cell.accuracy == 0.0)
        assert all((cell.distance or 0) < window for cell in cells if cell.accuracy == 1.0)
    shares = [cell.accuracy for cell in result.cells]
    assert shares[0] == 1.0 > shares[1] > shares[2] > 0.2
    context, mean = result.passing("none", "passkey")
    expected = max(n for n, share in zip(LENGTHS, shares, strict=True) if share >= 0.8)
    assert context == expected
    assert mean == pytest.approx(
        sum(shares[: LENGTHS.index(expected) + 1]) / (LENGTHS.index(expected) + 1)
    )


def test_shards_give_the_same_bytes_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    model = Copier(700)
    alone = to_json(whole(run_of(model), tmp_path / "alone").to_dict())
    first, second = (Shard(index, 2) for index in range(2))
    assert measured(run_of(model), tmp_path / "shared", second) is None
    shared = measured(run_of(model), tmp_path / "shared", first)
    assert shared is not None
    assert to_json(shared.to_dict()) == alone
    model.read.clear()
    whole(run_of(model), tmp_path / "alone")
    assert not [n for n in model.read if n > 300]


@pytest.mark.usefixtures("quick_collection")
def test_what_fails_is_a_cell_and_no_crash(tmp_path: Path) -> None:
    model = Copier(most=900, error=torch.OutOfMemoryError("CUDA out of memory"))
    result = whole(run_of(model), tmp_path / "a")
    assert [cell.length for cell in result.cells] == [400, 800]
    assert [(f.length, f.reason) for f in result.failures] == [(1600, "out of memory")]
    assert len([n for n in model.read if n > 900]) == 1  # the other samples are not tried
    broken = whole(run_of(Copier(most=500)), tmp_path / "b")
    assert {f.reason for f in broken.failures} == {"RuntimeError: too long for me"}
    shards = [Shard(index, 3) for index in range(3)]
    for shard in shards:
        shared = measured(run_of(Copier(most=500)), tmp_path / "c", shard)
    assert shared is not None
    assert to_json(shared.to_dict()) == to_json(broken.to_dict())


def test_lengths_that_are_too_short_for_a_task_are_left_out(tmp_path: Path) -> None:
    result = whole(run_of(Copier(), tasks=("passkey", "vt"), lengths=(400, 1900)), tmp_path)
    (left,) = result.left_out
    assert (left.task, left.length) == ("vt", 400)
    assert result.cell("none", "vt", 400) is None
    assert result.cell("none", "vt", 1900) is not None
    fits = run_of(Copier(), tasks=("vt",), lengths=(left.needed,))
    assert not fits.left_out
    with pytest.raises(PosencError, match=r"vt needs at least [\d,]+ with this tokenizer"):
        run_of(Copier(), tasks=("vt",), lengths=(left.needed - 1,))
    alone = Candidate.parse("none")
    behind = settings(tasks=("vt",), lengths=(left.needed,))
    with pytest.raises(
        PosencError, match=f"vt needs at least {left.needed + 1:,} "
    ):  # a special token too
        RetrievalRun(Copier(), byte_tokenizer(), [alone], behind, special=[0])


@pytest.mark.parametrize(("update", "long"), [("row", 1), ("sequence", 4)])
def test_what_depends_on_the_length_is_not_read_on_from_a_cache(update: str, long: int) -> None:
    model: Any = zoo.build("llama", vocab_size=VOCABULARY, num_hidden_layers=1)
    candidate = Candidate.parse(f"dynamic_ntk:update={update}").checked(model)
    run = RetrievalRun(
        model, byte_tokenizer(), [candidate], settings(lengths=(400,), samples=1, depths=(0.5,))
    )
    read: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    execute(run, Records())
    assert len([n for n in read if n > 300]) == long


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    some: list[dict[str, Any]] = [
        {},
        {"distractors": 0},
        {"tasks": ("fwe",)},
        {"decode": "generate"},
    ]
    for number, given in enumerate(some):
        model = Copier(most=1000)
        result = whole(run_of(model, **given), tmp_path / str(number))
        values = json.loads(to_json(result.to_dict()))
        assert values["kind"] == "retrieval"
        again = RetrievalResult.from_dict(values)
        assert again == result
        assert again.to_dict() == values
        rows = list(csv.DictReader(io.StringIO(result.files()["retrieval.csv"])))
        overall = [row for row in rows if not row["depth"]]
        generated = "decode" in given  # which this model does at any length
        last = "ok" if generated else "RuntimeError: too long for me"
        first = "too short for the task" if given.get("tasks") == ("fwe",) else "ok"
        assert [row["status"] for row in overall] == [first, "ok", last]
        if generated:
            assert all(record.text is not None and record.rank is None for record in result.records)


def test_the_python_function_patches_measures_and_leaves_no_trace() -> None:
    model: Any = zoo.build("llama", vocab_size=VOCABULARY, num_hidden_layers=1)
    before = copy.deepcopy(model.state_dict())
    ids = torch.arange(100)[None]
    logits = model(ids).logits
    result = measure_retrieval(
        model,
        byte_tokenizer(),
        methods=["none", "pi", "rerope"],
        lengths=[400],
        tasks=("passkey",),
        depths=(0.5,),
        samples=1,
    )
    assert [entry.label for entry in result.candidates] == ["none", "pi (auto)", "rerope"]
    assert result.original == 64
    assert result.candidates[1].scale_at(400) == 400 / 64
    nats = [cell.nats for cell in result.cells]
    assert len(set(nats)) == 3  # three different models, for all that the same prompts say
    assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_wilson_intervals() -> None:
    """Published values: Newcombe 1998, table I, method 3."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
