"""Settings of all tests: no network, one thread, and GPU tests only where there is a GPU."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import PurePath
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    """Set up the libraries, but not in the process that only hands the tests to xdist's workers."""
    config = session.config
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch
    import transformers
    from hypothesis import settings

    # Tiny matrices are slower on many threads than on one, and xdist has its own workers.
    torch.set_num_threads(1)
    log: Any = transformers.logging
    log.set_verbosity_error()
    settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True)
    settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would go through all modules and cases again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)  # a tiny forward makes thousands of objects, few of them in cycles
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no case that is left out by its own mark: half of all are slow."""
    if metafunc.config.option.markexpr != "not slow":
        return
    make = metafunc.parametrize

    def parametrize(names: Any, values: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        every = list(values)
        chosen = [v for v in every if not any(m.name == "slow" for m in getattr(v, "marks", ()))]
        whole = not chosen or isinstance(kwargs.get("ids"), list)  # pytest leaves the test out
        make(names, every if whole else chosen, *args, **kwargs)

    metafunc.parametrize = parametrize  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


_seconds: dict[str, float] = defaultdict(float)
"""The time of tests by room: the folder below `tests`, or the file."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    parts = PurePath(report.nodeid.partition("::")[0]).parts
    _seconds[parts[1] if len(parts) > 1 else parts[0]] += report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print where the time of a long run went, in seconds of all processes together."""
    if sum(_seconds.values()) > 60:
        rooms = sorted(_seconds.items(), key=lambda room: -room[1])
        line = ", ".join(f"{room} {seconds:.0f}" for room, seconds in rooms if seconds >= 1)
        terminalreporter.write_line(f"Seconds by room: {line}")


@pytest.fixture
def quick_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip garbage collection after an injected lack of memory: it frees nothing here and takes a second."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
