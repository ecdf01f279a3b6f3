"""`bench`: its numbers are those of the parts, its table says what they are, and nothing is lost."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.bench import BenchJob, BenchResult, prepare, suite_lengths
from hf_posenc.evaluation.documents import Document
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.candidates import parse_candidates
from hf_posenc.evaluation.measuring.store import Shard
from hf_posenc.evaluation.options import BenchOptions
from hf_posenc.evaluation.perplexity.run import measure_perplexity
from hf_posenc.evaluation.retrieval.run import measure_retrieval
from hf_posenc.evaluation.retrieval.tasks import get_task
from hf_posenc.evaluation.suites import SUITES, get_suite
from hf_posenc.files import to_json
from hf_posenc.patch.patching import get_patch
from tests.support.bench_cases import LENGTHS, METHODS, TEXTS, edited, measured, tiny, without_speed
from tests.support.tiny_text import byte_tokenizer


@pytest.fixture(scope="module")
def result() -> BenchResult:
    return measured()


def rows(result: BenchResult) -> dict[str, list[str]]:
    """The fields of the first table (perplexity, prefix) and of the last one (speed), method by method."""
    first, *_, last = result.tables()
    return {
        row.fields[0].text: [
            field.text for field in (*row.fields[1 : 1 + len(LENGTHS)], *timed.fields[1:])
        ]
        for row, timed in zip(first.rows, last.rows, strict=True)
    }


def test_its_numbers_are_those_of_the_parts(result: BenchResult) -> None:
    model, words = tiny(), byte_tokenizer()
    alone = measure_perplexity(model, words, TEXTS, methods=METHODS, lengths=LENGTHS)
    known = {"source", "fingerprint"}
    theirs, ours = alone.to_dict(), result.perplexity.to_dict()
    assert {k: v for k, v in ours.items() if k not in known} == {
        k: v for k, v in theirs.items() if k not in known
    }
    assert result.retrieval is not None
    settings = result.retrieval.settings
    found = measure_retrieval(
        model, words, methods=METHODS, lengths=LENGTHS, tasks=("passkey",),
        depths=settings.depths, samples=settings.samples,
    )  # fmt: skip
    assert found.to_dict() == result.retrieval.to_dict()


def test_a_result_comes_back_from_its_json(result: BenchResult) -> None:
    titles = [grid.title.split(":")[0] for grid in result.tables()]
    assert titles == [
        *("Perplexity, prefix", "Perplexity, tail", "Retrieval, passkey", "Prefill of 640 tokens")
    ]
    assert set(titles[:2]) == {grid.title.split(":")[0] for grid in result.perplexity.tables()}
    assert "seconds" not in without_speed(result)
    text = to_json(result.to_dict())
    again = BenchResult.from_dict(json.loads(text))
    assert to_json(again.to_dict()) == text
    assert again._repr_markdown_() == result._repr_markdown_()
    assert again._repr_html_() == result._repr_html_()


def test_a_loss_that_is_no_number_is_shown_as_nan(result: BenchResult) -> None:
    values = json.loads(to_json(result.to_dict()))["perplexity"]
    record = next(r for r in values["records"] if r["method"] == "yarn (auto)")
    record["nats"] = record["weighted"] = None
    broken = edited(result, perplexity=values)
    assert rows(broken)["yarn (auto)"][0] == "nan"
    assert any("not a finite number" in line for line in broken.problems())
    lines = list(csv.DictReader(broken.files()["bench.csv"].splitlines()))
    yarn = [row["status"] for row in lines if row["method"] == "yarn (auto)"]
    assert yarn == ["not finite", "ok", "ok", "ok"]


def hungry(model: Any, most: int) -> None:
    """Lets memory run out where more tokens than that are run at once under a patch other than the control."""

    def check(module: Any, args: Any, kwargs: Any) -> None:
        patch = get_patch(model)
        ids = kwargs.get("input_ids")
        if (
            patch is not None
            and patch.method == "yarn"
            and ids is not None
            and ids.shape[-1] > most
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(check, with_kwargs=True)


@pytest.mark.usefixtures("quick_collection")
def test_what_does_not_fit_is_a_field_and_the_rest_is_measured() -> None:
    model = tiny()
    hungry(model, 100)
    result = measured(model)
    fields = rows(result)["yarn (auto)"]
    assert fields[0] not in ("OOM", "")
    assert fields[1:] == ["OOM"] * 4
    assert "OOM" in [field.text for field in result.tables()[2].rows[2].fields]
    assert "OOM" not in rows(result)["none"] + rows(result)["sliding_window"]
    said = list(result.problems())
    assert len(said) == 3
    assert all("yarn (auto)" in line and "out of memory" in line for line in said)
    assert result.speed is not None
    assert result.speed.row("none").tokens_per_second is not None


@pytest.mark.usefixtures("quick_collection")
def test_speed_is_timed_in_pieces_where_the_whole_does_not_fit() -> None:
    model = tiny()
    model.set_attn_implementation("eager")  # whose scores in pieces are fewer
    hungry(model, 600)
    result = measured(model, tasks=(), rounds=2)
    assert result.speed is not None
    assert result.speed.row("yarn (auto)").failed is None
    assert result.speed.pieces("yarn (auto)") == 512
    assert result.speed.pieces("none") is None
    assert any("yarn (auto): prefill in pieces of 512 tokens" in line for line in result.notes())


def work(model: Any, **changes: Any) -> BenchJob:
    texts = (Document(f"#{index}", text) for index, text in enumerate(TEXTS))
    given = {"methods": METHODS, "lengths": LENGTHS, "tasks": ("passkey",), "rounds": 1, **changes}
    options = BenchOptions(suite="smoke", **given)
    return prepare(model, byte_tokenizer(), Source.of(texts), options, name="tiny")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = work(tiny()).run(tmp_path_factory.mktemp("whole"))
    assert made is not None
    return without_speed(made)


def test_what_the_other_commands_measured_is_not_measured_again(tmp_path: Path) -> None:
    model, words = tiny(), byte_tokenizer()
    measure_perplexity(model, words, TEXTS, methods=METHODS, lengths=LENGTHS, output=tmp_path)
    parts: list[str] = []
    options: dict[str, Any] = {"output": tmp_path, "rounds": 0}
    options["progress"] = lambda label, done, total: parts.append(label)
    measured(model, **options)
    assert parts
    assert all(part.startswith("retrieval") for part in parts)


def test_two_processes_give_what_one_gives(whole: str, tmp_path: Path) -> None:
    first = work(tiny())
    assert first.run(tmp_path, Shard(0, 2)) is None
    assert first.missing > 0
    second = work(tiny())
    made = second.run(tmp_path, Shard(1, 2))
    assert made is not None
    assert without_speed(made) == whole
    assert made.speed is not None


@pytest.mark.parametrize("found", ["nothing", "all but speed"])
def test_progress_is_that_of_the_whole_benchmark(found: str, tmp_path: Path) -> None:
    if found == "all but speed":
        work(tiny(), rounds=0).run(tmp_path)
    calls: list[tuple[str, int, int]] = []
    work(tiny()).run(tmp_path, progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert {call[2] for call in calls} == {done[-1]}
    parts = list(dict.fromkeys(label.split(",")[0] for label, *_ in calls))
    assert parts == (["perplexity", "retrieval", "speed"] if found == "nothing" else ["speed"])


def test_prompts_that_are_too_short_are_said_and_left_out() -> None:
    result = measured(lengths=(64, 128), rounds=0)
    assert result.retrieval is None
    assert any("No retrieval: No task fits into 128 tokens" in line for line in result.notes())
    assert result.speed is None
    assert len(result.tables()) == 2


@pytest.mark.parametrize("protocol", ["tail", "stream"])
def test_fewer_documents_than_the_suite_asks_for_are_said(protocol: str) -> None:
    job = work(tiny(), protocols=(protocol,), tasks=())
    assert job.about["remarks"] == ("3 documents are long enough; 4 were requested.",)


def test_the_suites_are_what_they_say() -> None:
    model = tiny()
    for suite in SUITES.values():
        candidates = [c.checked(model) for c in parse_candidates(suite.methods)]
        assert [c.label for c in candidates[:2]] == ["none", "truncation"]
        assert all(get_task(name) for name in suite.tasks)
        assert suite.rounds >= 3
    assert SUITES["quick"].documents == 10
    assert SUITES["full"].documents >= 20
    with pytest.raises(PosencError, match=r"Unknown suite 'ful'.*Did you mean 'full'"):
        get_suite("ful")


@pytest.mark.parametrize(
    ("suite", "target", "expected"),
    [
        ("smoke", None, (256, 512)),
        ("quick", None, (256, 512, 1024)),
        ("quick", 4096, (256, 1024, 4096)),
        ("full", None, (256, 512, 1024, 2048, 4096)),
        ("full", 3000, (256, 512, 1024, 2048, 3000)),
        ("full", 256, (256,)),
    ],
)
def test_the_lengths_of_a_suite(suite: str, target: int | None, expected: tuple[int, ...]) -> None:
    assert suite_lengths(get_suite(suite), 256, target) == expected
    with pytest.raises(PosencError, match=r"--target-length 200: the model was trained at 256 tok"):
        suite_lengths(get_suite(suite), 256, 200)


def test_the_page_shows_the_command_of_its_json() -> None:
    docs = Path(__file__).parents[3] / "docs"
    values = json.loads((docs / "data" / "benchmarks" / "bench.json").read_text())
    text = (docs / "bench.md").read_text()  # its table: tests/test_readme.py
    assert f"```bash\n{values['perplexity']['command']}\n" in text.replace(" \\\n    ", " ")
