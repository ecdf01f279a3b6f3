"""The paths through the engine, for the tests of whole models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hf_posenc.attention import engine, prefill
from hf_posenc.model import masks
from tests.attention.test_attention import FLASH, PATHS


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """Forces the general path with written masks, or kernels with masks of size O(length); `None`: nothing."""
    if request.param is None:
        yield None
        return
    rows, dense, backend = {**PATHS, **FLASH}[request.param]
    monkeypatch.setattr(prefill, "ROWS", rows)
    monkeypatch.setattr(masks, "DENSE", dense)
    with engine.forced(backend):
        yield request.param


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    choose = engine.choose

    def noted(*arguments: Any) -> engine.Backend:
        backend = choose(*arguments)
        names.append(backend.name)
        return backend

    monkeypatch.setattr(engine, "choose", noted)
    return names
