"""Backends that are broken on purpose, which another process finds by HF_POSENC_EXTRA_BACKENDS."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from hf_posenc.attention.call import Call
from hf_posenc.attention.checks import Backend, Result
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact

DELAY = 1000


def crashing(call: Call, encoding: Encoding) -> Result:
    assert "pytest" not in sys.modules, "it ran in this process"
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("unreachable")


def hanging(call: Call, encoding: Encoding) -> Result:
    assert "pytest" not in sys.modules, "it ran in this process"
    time.sleep(DELAY)
    raise AssertionError("unreachable")


def wrong(call: Call, encoding: Encoding) -> Result:
    assert "pytest" not in sys.modules, "it ran in this process"
    return exact(replace(call, scaling=call.scaling * 1.1), encoding)


def right(call: Call, encoding: Encoding) -> Result:
    if encoding.kind == "alibi":  # an error in what nobody asked for
        return crashing(call, encoding)
    return exact(call, encoding)


def _backend(run: Callable[[Call, Encoding], Result]) -> Backend:
    return Backend(run.__name__, lambda call, encoding: True, run, proven=False, may_crash=True)


EVERY = {run.__name__: _backend(run) for run in (crashing, hanging, wrong, right)}
BACKENDS = tuple(EVERY[name] for name in os.environ.get("BROKEN", "").split(",") if name)
