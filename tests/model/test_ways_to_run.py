"""Whatever runs unpatched runs patched, as precisely, or is refused: the table of `tests/support/ways_to_run.py`."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import PosencError
from tests.support.ways_to_run import (
    ELSEWHERE,
    KINDS,
    LENGTHS_DIFFER,
    PAGE,
    PLAIN,
    REFUSED,
    UNPATCHED,
    WAYS,
    Run,
    Way,
    page,
)

ROOT = Path(__file__).parents[2]
TIMES = 4.0
"""The error of a patched model as a multiple of that of the unpatched one, at most."""
ROUNDING = 1e-4
"""An error that the order of float32 operations may cause, as a share of the largest value."""


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one process, for the ways that need one."""
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@functools.cache
def shared(name: str, patched: bool) -> Any:
    kind = KINDS[name]
    return kind.patch(kind.build()) if patched else kind.build()


@functools.cache
def truth(name: str, plain: Run, patched: bool) -> Tensor:
    kind = KINDS[name]
    model = kind.build().double()
    return plain(kind.patch(model) if patched else model, kind)


def found(way: Way, name: str, run: Run, folder: Path, *, patched: bool) -> Tensor:
    folder.mkdir()
    kind = KINDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way.before is Way.before:
            model = copy.deepcopy(shared(name, patched))
        else:
            model = way.before(kind.build(), folder)
            model = kind.patch(model) if patched else model
        model = way.after(model, folder)
        with way.within():
            return run(model, kind)


def error(values: Tensor, expected: Tensor) -> float:
    return float((values - expected).abs().max() / expected.abs().max())


CELLS = [(way, kind) for way in WAYS for kind in KINDS if WAYS[way].pairs(KINDS[kind])]


# Left out of the fast suite. Graphs are traced for seconds, and the others are a numeric type or a
# place of weights that is like another one here.
ONLY_SLOW = (
    *("torch.compile", "torch.export", "threads", "pickle", "float32", "float64", "float16"),
    *("autocast bfloat16", "deterministic", "disk offload", "offload after", "meta device"),
)


TRACED = ("torch.compile", "torch.export")
"""Ways whose cells take longest, of which CI runs a few kinds and the weekly job all."""
TRACED_IN_CI = ("bands", "bias", "dynamic by row", "static frequencies")


def cells() -> list[Any]:
    """Every cell; a way runs with one kind in the fast suite or with none, and each kind with several ways."""
    fast, count = set[tuple[str, str]](), dict.fromkeys(KINDS, 0)
    for way in WAYS:
        kinds = sorted((kind for name, kind in CELLS if name == way), key=lambda kind: count[kind])
        for kind in kinds[: 0 if way in ONLY_SLOW else 1]:
            count[kind] += 1
            fast.add((way, kind))

    def marks(way: str, kind: str) -> list[Any]:
        weekly = way in TRACED and kind not in TRACED_IN_CI
        late = [] if (way, kind) in fast else [pytest.mark.slow]
        return [*late, pytest.mark.weekly] if weekly else late

    return [pytest.param(*cell, marks=marks(*cell), id="-".join(cell)) for cell in CELLS]


@pytest.mark.parametrize(("way_name", "kind_name"), cells())
def test_a_cell(way_name: str, kind_name: str, tmp_path: Path) -> None:
    way, kind, cell = WAYS[way_name], KINDS[kind_name], (way_name, kind_name)
    for name, (run, plain) in way.pairs(kind).items():
        folder = tmp_path / name
        folder.mkdir()
        if cell in UNPATCHED:
            with pytest.raises(Exception, match=UNPATCHED[cell]):
                found(way, kind_name, run, folder / "unpatched", patched=False)
            continue
        control = found(way, kind_name, run, folder / "unpatched", patched=False)
        if cell in REFUSED:
            with pytest.raises(PosencError, match=REFUSED[cell]):
                found(way, kind_name, run, folder / "patched", patched=True)
            continue
        limit = TIMES * error(control, truth(kind_name, plain, False)) + ROUNDING
        assert limit < 1, "the control is wrong itself"
        values = found(way, kind_name, run, folder / "patched", patched=True)
        expected = truth(kind_name, run if cell in LENGTHS_DIFFER else plain, True)
        assert error(values, expected) <= limit, name


@pytest.mark.parametrize("kind_name", KINDS)
def test_a_patch_that_is_lost_would_be_seen(kind_name: str) -> None:
    """The patch moves each result by at least 100 times the rounding that a cell allows."""
    for name in KINDS[kind_name].runs:
        unpatched, patched = (truth(kind_name, PLAIN[name], on) for on in (False, True))
        assert unpatched.shape != patched.shape or error(unpatched, patched) > 100 * ROUNDING, name


def test_the_page_of_the_documentation_is_this_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.support.ways_to_run"
    assert not [tests for _, tests in ELSEWHERE if not (ROOT / tests).is_file()]
