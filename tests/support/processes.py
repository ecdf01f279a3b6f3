"""Processes of tests, forked by a server that has only imported the libraries.

A fork of the process that runs the tests may hang: the threads that it has computed or compiled on exist in it alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PATIENCE = 600
"""Seconds after which a process hangs. DeepSpeed compiles for two minutes on a busy machine."""

CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("pytest", "tests.support.killing", "tests.support.zoo"),
        "deepspeed",  # half of a small training, as accelerate imports it wherever it is installed
    ]
)


def start(function: Callable[..., None], *arguments: Any) -> Any:
    """Return a new process once it has begun to call a function of a module."""
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    begun = CONTEXT.Event()
    process = CONTEXT.Process(
        target=_call, args=(begun, dict(os.environ), Path.cwd(), function, *arguments)
    )
    process.start()
    ends = time.monotonic() + PATIENCE
    while not begun.wait(0.1):
        assert process.is_alive(), "the process ended before its work"
        assert time.monotonic() < ends, "the process does not begin"
    return process


@contextlib.contextmanager
def running(function: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process that calls a function, and is killed at the end."""
    process = start(function, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.join(PATIENCE)


def _call(
    begun: Any,
    environment: dict[str, str],
    folder: Path,
    function: Callable[..., None],
    *arguments: Any,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # the default, if nobody used this server
    begun.set()
    function(*arguments)


def printed(code: str, folder: Path | str | None = None) -> str:
    """Return what Python prints that runs some code in a folder."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
