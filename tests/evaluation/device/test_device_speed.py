"""The timed prefill: what is timed, in which order, and what the numbers are."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.evaluation.device import ON_CPU, Clock
from hf_posenc.evaluation.device.run import SpeedResult, SpeedRun, window_of
from hf_posenc.evaluation.documents import Document, tokenize
from hf_posenc.evaluation.measuring.candidates import parse_candidates
from hf_posenc.evaluation.measuring.execute import collected, execute
from hf_posenc.evaluation.measuring.store import Records
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.patch.patching import get_patch
from tests.support.bench_cases import METHODS, tiny
from tests.support.tiny_text import byte_tokenizer, prose

WINDOW = torch.arange(1, 129) % 250


def speed_run(model: Any, rounds: int = 2, methods: tuple[str, ...] = METHODS) -> SpeedRun:
    candidates = [candidate.checked(model) for candidate in parse_candidates(methods)]
    metadata = {"model": {"name": "tiny"}}
    return SpeedRun(model, WINDOW, candidates, rounds=rounds, metadata=metadata)


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
    turn = [None, "sliding_window", "yarn"]
    each = [[("forward", m), ("clock", m), ("forward", m)] for m in turn]
    assert events == [event for _ in range(2) for events_of in each for event in events_of]
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
    assert events == [
        *("reset_peak_memory_stats", "synchronize", "clock"),
        *("work", "synchronize", "clock", "peak"),
    ]


def test_the_memory_of_a_cpu_is_the_peak_of_this_piece_of_work() -> None:
    clock = Clock(tiny())
    if clock.memory is None:
        pytest.skip("this system does not say")
    assert clock.memory == ON_CPU
    size = 200 * 2**20
    _, before = clock.time(lambda: None)
    _, large = clock.time(lambda: torch.ones(size, dtype=torch.uint8))
    _, after = clock.time(lambda: None)
    assert before is not None
    assert large is not None
    assert after is not None
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

    run, store = speed_run(model, rounds=3), Records()
    model.register_forward_pre_hook(fail, with_kwargs=True)
    execute(run, store)
    result = collected(run, store)
    assert result is not None
    assert len(calls) == 1
    assert result.row("yarn (auto)").failed == "RuntimeError: no kernel"
    assert result.row("yarn (auto)").tokens_per_second is None
    assert result.row("none").failed is None


def test_a_round_is_stored_whole_and_other_methods_make_another_run(tmp_path: Path) -> None:
    model = tiny()
    run = speed_run(model, rounds=2)
    with pytest.raises(KeyboardInterrupt), run.open(tmp_path) as store:
        execute(run, store, progress=_stop_at(4))  # the first method of the second round
    with run.open(tmp_path) as store:
        assert store.get(("round", 0)) is not None
        assert store.get(("round", 1)) is None
        first = store.fingerprint
    fewer = speed_run(model, methods=METHODS[:2])
    with fewer.open(tmp_path) as other:
        assert other.fingerprint != first


def _stop_at(calls: int) -> Any:
    left = iter(range(calls - 1))

    def progress(label: str, done: int, total: int) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return progress


def test_the_window_is_text_with_special_tokens_in_front() -> None:
    documents = [tokenize(Document(f"d{n}", prose(20, n)), byte_tokenizer()) for n in range(2)]
    window = window_of(documents, 50, torch.tensor([0]))
    texts = [document.ids.tolist() for document in documents]
    assert window.tolist() == [0, *texts[0], *texts[1], *texts[0][:9]]
    assert window_of(documents, 7, torch.tensor([0])).tolist() == [0, *texts[0][:6]]


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_that_of_pytorch_and_the_forward_is_in_the_time() -> None:
    run, store = speed_run(tiny().to("cuda")), Records()
    execute(run, store)
    result = collected(run, store)
    assert result is not None
    assert result.threads is None
    assert torch.cuda.get_device_name() in result.device
    for cell in map(result.row, result.methods):
        assert cell.peak_bytes is not None
        assert 0 < cell.peak_bytes <= torch.cuda.get_device_properties(0).total_memory
        assert cell.tokens_per_second is not None
