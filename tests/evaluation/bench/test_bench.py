"""`bench`: its numbers are those of the parts, its table says what they are, and nothing is lost."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.bench import BenchJob, BenchResult, bench, prepare, suite_lengths
from hf_posenc.evaluation.device import ON_CPU, Clock
from hf_posenc.evaluation.device.run import SpeedResult, SpeedRun, window_of
from hf_posenc.evaluation.documents import Document, tokenize
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.candidates import parse_candidates
from hf_posenc.evaluation.measuring.execute import execute
from hf_posenc.evaluation.measuring.store import Records, Shard
from hf_posenc.evaluation.options import BenchOptions
from hf_posenc.evaluation.perplexity.run import measure_perplexity
from hf_posenc.evaluation.retrieval.run import measure_retrieval
from hf_posenc.evaluation.retrieval.tasks import get_task
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.evaluation.suites import SUITES, get_suite
from hf_posenc.files import to_json
from hf_posenc.patch.patching import get_patch
from tests.support.sweep_cases import finished
from tests.support.tiny_text import byte_tokenizer, prose, tiny

LENGTHS = (64, 640)  # of 64 trained tokens; passkey's shortest prompt is in between
METHODS = ("none", "sliding_window", "yarn")
TEXTS = [prose(700 + 13 * n, n) for n in range(3)]
PASSKEY: dict[str, Any] = {"suite": "smoke", "lengths": LENGTHS, "tasks": ("passkey",)}


def measured(model: Any = None, **options: Any) -> BenchResult:
    given = {"methods": METHODS, **PASSKEY, "rounds": 1, **options}
    texts = given.pop("documents", TEXTS)
    return bench(tiny() if model is None else model, byte_tokenizer(), texts, **given)


def without_speed(result: BenchResult) -> str:
    """All that must be the same whenever the same is measured again, as it is written."""
    values = result.to_dict()
    del values["speed"]
    return to_json(values)


def edited(result: BenchResult, **changes: Any) -> BenchResult:
    return BenchResult.from_dict({**json.loads(to_json(result.to_dict())), **changes})


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
    same = [{k: v for k, v in each.items() if k not in known} for each in (ours, theirs)]
    assert same[0] == same[1]
    retrieval: Any = result.retrieval
    options: dict[str, Any] = {"lengths": LENGTHS, "tasks": ("passkey",)}
    options |= {name: getattr(retrieval.settings, name) for name in ("depths", "samples")}
    found = measure_retrieval(model, words, methods=METHODS, **options)
    assert found.to_dict() == retrieval.to_dict()


def test_a_result_comes_back_from_its_json(result: BenchResult) -> None:
    titles = [grid.title.split(":")[0] for grid in result.tables()]
    assert titles[:2] == ["Perplexity, prefix", "Perplexity, tail"]
    assert titles[2:] == ["Retrieval, passkey", "Prefill of 640 tokens"]
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
        patch, ids = get_patch(model), kwargs.get("input_ids")
        if patch and patch.method == "yarn" and ids is not None and ids.shape[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(check, with_kwargs=True)


@pytest.mark.usefixtures("quick_collection")
def test_what_does_not_fit_is_a_field_and_the_rest_is_measured() -> None:
    model = tiny()
    hungry(model, 100)
    result: Any = measured(model)
    fields = rows(result)["yarn (auto)"]
    assert fields[0] not in ("OOM", "")
    assert fields[1:] == ["OOM"] * 4
    assert "OOM" in [field.text for field in result.tables()[2].rows[2].fields]
    assert "OOM" not in rows(result)["none"] + rows(result)["sliding_window"]
    said = list(result.problems())
    assert len(said) == 3
    assert all("yarn (auto)" in line and "out of memory" in line for line in said)
    assert result.speed.row("none").tokens_per_second is not None


@pytest.mark.usefixtures("quick_collection")
def test_speed_is_timed_in_pieces_where_the_whole_does_not_fit() -> None:
    model = tiny()
    model.set_attn_implementation("eager")  # whose scores in pieces are fewer
    hungry(model, 600)
    result = measured(model, tasks=(), rounds=2)
    speed: Any = result.speed
    assert speed.row("yarn (auto)").failed is None
    assert speed.pieces("yarn (auto)") == 512
    assert speed.pieces("none") is None
    assert any("yarn (auto): prefill in pieces of 512 tokens" in line for line in result.notes())


def work(model: Any, **changes: Any) -> BenchJob:
    texts = (Document(f"#{index}", text) for index, text in enumerate(TEXTS))
    given = {"methods": METHODS, "lengths": LENGTHS, "tasks": ("passkey",), "rounds": 1, **changes}
    options = BenchOptions(suite="smoke", **given)
    return prepare(model, byte_tokenizer(), Source.of(texts), options, name="tiny")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return without_speed(finished(work(tiny()), tmp_path_factory.mktemp("whole")))


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
    made: Any = work(tiny()).run(tmp_path, Shard(1, 2))
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
    given = ("truncation", "yarn:original_max_position_embeddings=32")
    assert work(model, lengths=None, methods=given).perplexity.settings.lengths == (32, 64)
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


# The timed prefill: what is timed, in which order, and what the numbers are.

WINDOW = torch.arange(1, 129) % 250


def speed_run(model: Any, rounds: int = 2, methods: tuple[str, ...] = METHODS) -> SpeedRun:
    candidates = [candidate.checked(model) for candidate in parse_candidates(methods)]
    return SpeedRun(model, WINDOW, candidates, rounds=rounds, metadata={"model": {"name": "tiny"}})


def test_methods_take_turns_after_a_forward_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    run = speed_run(model)
    events: list[tuple[str, str | None]] = []
    forward, timed = TokenScorer.__call__, Clock.time

    def method() -> str | None:
        patch = get_patch(model)
        return None if patch is None else patch.method

    def spy(self: Any, ids: Any, first: int = 1, **options: Any) -> Any:
        assert torch.equal(ids, WINDOW)
        assert first == len(WINDOW) - 1  # the logits of the last token alone
        assert not model.training
        events.append(("forward", method()))
        return forward(self, ids, first, **options)

    def watch(self: Any, work: Any) -> Any:
        events.append(("clock", method()))
        return timed(self, work)

    monkeypatch.setattr(TokenScorer, "__call__", spy)
    monkeypatch.setattr(Clock, "time", watch)
    execute(run, Records())
    turn, parts = (None, "sliding_window", "yarn"), ("forward", "clock", "forward")
    assert events == [(part, method) for method in turn for part in parts] * 2
    assert get_patch(model) is None


def test_the_clock_is_read_when_the_devices_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, events = Clock(tiny()), []
    gpu = torch.device("cuda", 0)
    times = iter((1.0, 3.5))

    def logs(name: str, value: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            events.append(name)
            return value()

        return call

    monkeypatch.setattr(clock, "_devices", [gpu])
    monkeypatch.setattr(clock, "_gpus", [gpu])
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, logs(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", logs("peak", lambda: 7))
    monkeypatch.setattr(time, "perf_counter", logs("clock", lambda: next(times)))
    assert clock.time(logs("work")) == (2.5, 7)
    monkeypatch.undo()
    before = ["reset_peak_memory_stats", "synchronize", "clock"]
    assert events == [*before, "work", "synchronize", "clock", "peak"]


def test_the_memory_of_a_cpu_is_the_peak_of_this_piece_of_work() -> None:
    clock = Clock(tiny())
    if clock.memory is None:
        pytest.skip("this system does not say")
    assert clock.memory == ON_CPU
    size = 200 * 2**20

    def peak(work: Callable[[], object]) -> Any:
        return clock.time(work)[1]

    before = peak(lambda: None)
    large = peak(lambda: torch.ones(size, dtype=torch.uint8))
    after = peak(lambda: None)
    assert size * 0.95 < large - before < size * 1.2
    assert after < before + size / 4  # set back


def test_the_numbers_are_medians_and_ratios_of_the_same_round() -> None:
    def timed(seconds: float, peak: int | None = 10) -> dict[str, Any]:
        return {"seconds": seconds, "peak_bytes": peak, "prefill": None}

    rounds = [
        {"none": timed(1.0), "yarn": timed(2.0, 30)},
        {"none": timed(10.0), "yarn": timed(8.0, 20)},  # a slow moment: both methods were in it
        {"none": timed(2.0), "yarn": timed(4.0, 20)},
    ]
    result = SpeedResult(1000, "cpu", 1, None, ["none", "yarn"], rounds)
    yarn = result.row("yarn")
    assert yarn.tokens_per_second == 1000 / 4
    assert yarn.speedup == 0.5  # of 0.5, 1.25 and 0.5
    assert result.row("none").tokens_per_second == 500
    assert yarn.peak_bytes == 30
    other = [{"none": timed(1.0), "yarn": timed(0.5)}, *rounds[1:]]
    ratios = SpeedResult(1000, "cpu", 1, None, ["none", "yarn"], other).row("yarn").speedup
    assert ratios == 1.25  # of 2, 1.25 and 0.5, where the medians would say 0.5
    assert SpeedResult.from_dict(result.to_dict()).to_dict() == result.to_dict()


def test_a_method_that_failed_is_not_run_again_and_not_averaged() -> None:
    model, calls = tiny(), []

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        patch = get_patch(model)
        if patch is not None and patch.method == "yarn":
            calls.append(1)
            raise RuntimeError("no kernel\nmore of it")

    run = speed_run(model, rounds=3)
    model.register_forward_pre_hook(fail, with_kwargs=True)
    result = finished(run)
    assert len(calls) == 1
    assert result.row("yarn (auto)").failed == "RuntimeError: no kernel"
    assert result.row("yarn (auto)").tokens_per_second is None
    assert result.row("none").failed is None


def test_a_round_is_stored_whole_and_other_methods_make_another_run(tmp_path: Path) -> None:
    model = tiny()
    run = speed_run(model, rounds=2)
    calls = iter(range(3))

    def stop(label: str, done: int, total: int) -> None:
        if next(calls, None) is None:  # the first method of the second round
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), run.open(tmp_path) as store:
        execute(run, store, progress=stop)
    with run.open(tmp_path) as store:
        assert store.get(("round", 0)) is not None
        assert store.get(("round", 1)) is None
        first = store.fingerprint
    with speed_run(model, methods=METHODS[:2]).open(tmp_path) as other:
        assert other.fingerprint != first


def test_the_window_is_text_with_special_tokens_in_front() -> None:
    documents = [tokenize(Document(f"d{n}", prose(20, n)), byte_tokenizer()) for n in range(2)]
    window = window_of(documents, 50, torch.tensor([0]))
    texts = [document.ids.tolist() for document in documents]
    assert window.tolist() == [0, *texts[0], *texts[1], *texts[0][:9]]
    assert window_of(documents, 7, torch.tensor([0])).tolist() == [0, *texts[0][:6]]


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_that_of_pytorch_and_the_forward_is_in_the_time() -> None:
    result = finished(speed_run(tiny().to("cuda")))
    assert result.threads is None
    assert torch.cuda.get_device_name() in result.device
    for cell in map(result.row, result.methods):
        assert 0 < (cell.peak_bytes or 0) <= torch.cuda.get_device_properties(0).total_memory
        assert cell.tokens_per_second is not None
