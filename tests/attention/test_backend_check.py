"""The check of a backend on the user's device, here and in another process: backends broken on purpose."""

from __future__ import annotations

import json
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import set_backend
from hf_posenc.attention import engine
from hf_posenc.attention.call import Call
from hf_posenc.attention.checks import Case, isolation, verdicts
from hf_posenc.attention.checks.comparison import (
    ROWS,
    Comparison,
    call_of,
    check,
    encoding_of,
    kinds,
    methods,
    offers,
    problem,
)
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact
from hf_posenc.errors import PosencError
from hf_posenc.files import cache_folder
from hf_posenc.methods import seam_of
from tests.attention.test_attention import apply, assert_close, build
from tests.support import broken_backends, zoo
from tests.support.attention_llama import CASES, reference
from tests.support.emulated import EmulatedFlash

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    engine.restore()
    yield
    engine.restore()


def unproven(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Call, Encoding], engine.Result] = exact
) -> list[int]:
    """Put a backend ahead of the table, and return the numbers of queries of the calls that it computes."""
    rows: list[int] = []

    def counted(call: Call, encoding: Encoding) -> engine.Result:
        rows.append(call.query.shape[2])
        return run(call, encoding)

    backend = engine.Backend("new", lambda call, encoding: True, counted, proven=False)
    monkeypatch.setattr(engine, "BACKENDS", (backend, *engine.BACKENDS))
    return rows


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.double()


def window_of_one_less(call: Call, encoding: Encoding) -> engine.Result:
    """A border between two bands that is wrong by one."""
    assert encoding.method is not None
    method = replace(encoding.method, window=encoding.method.window - 1)  # type: ignore[attr-defined, call-arg]
    return exact(call, replace(encoding, method=method))


def doubled_gradients(call: Call, encoding: Encoding) -> engine.Result:
    query = call.query
    return exact(replace(call, query=query * 2 - query.detach()), encoding)


def raising(call: Call, encoding: Encoding) -> engine.Result:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    "name", ["rerope", "self_extend", "dual_chunk", "alibi", "dynamic_ntk_row"]
)
def test_one_that_is_right_is_checked_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = apply(build(), name), zoo.tokens(80)
    rows = unproven(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = logits_of(model, ids)
    assert_close(logits, reference(model, CASES[name], ids))
    assert rows[0] == ROWS < rows[1]  # the check, of a padded batch and of one text alone
    assert rows[2:] == [80, 80]  # two layers
    logits_of(model, ids)
    assert len(rows) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (window_of_one_less, "its output differs by .* from float64"),
        (raising, "it raises RuntimeError: no kernel"),
    ],
)
def test_one_that_is_wrong_is_struck_with_one_warning(
    broken: Callable[[Call, Encoding], engine.Result],
    reason: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = apply(build().to(dtype), "rerope")  # type: ignore[arg-type]
    ids = zoo.tokens(80)
    expected = logits_of(model, ids)
    rows = unproven(monkeypatch, broken)
    with pytest.warns(
        UserWarning, match=f"'new' is not used for {dtype} on cpu: {reason}"
    ) as caught:
        logits = logits_of(model, ids)
    assert len([w for w in caught if "is not used" in str(w.message)]) == 1
    assert torch.equal(logits, expected)
    assert 80 not in rows
    checks = len(rows)
    logits_of(model, ids)
    assert len(rows) == checks


def test_gradients_are_checked_where_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = apply(build(), "rerope"), zoo.tokens(80)
    rows = unproven(monkeypatch, doubled_gradients)
    logits_of(model, ids)
    assert rows.count(80) == 2  # its output is right, so it computes without gradients
    with pytest.warns(UserWarning, match="its gradient of the query differs"):
        model(input_ids=ids, use_cache=False).logits.sum().backward()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_any_tensor_may_need_a_backward(name: str) -> None:
    """As the values alone do in a first layer whose other weights are frozen."""
    outline = call_of(torch.float32, 16, torch.device("cpu"))
    backend, encoding = engine.backend_of("exact"), encoding_of(None, 16, torch.device("cpu"))
    assert not engine.case_of(backend, outline, encoding).gradients
    changed: dict[str, Any] = {name: torch.ones_like(getattr(outline, name)).requires_grad_()}
    assert engine.case_of(backend, replace(outline, **changed), encoding).gradients


def test_gradients_of_trained_parameters_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they alone are trained."""
    model, ids = apply(build(), "kerple_log"), zoo.tokens(80)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".posenc." in name)

    def wrong(call: Call, encoding: Encoding) -> engine.Result:
        given = encoding.parameters or {}
        r1 = given["r1"] * 2 - given["r1"].detach()
        return exact(call, encoding.with_parameters({"r1": r1, "r2": given["r2"]}))

    unproven(monkeypatch, wrong)
    logits_of(model, ids)
    before = {name: x.grad for name, x in model.named_parameters()}
    with pytest.warns(UserWarning, match="its gradient of the parameters differs"):
        model(input_ids=ids, use_cache=False)
    assert {name: x.grad for name, x in model.named_parameters()} == before


def test_nothing_random_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply(build(), "rerope")
    unproven(monkeypatch)
    state = torch.get_rng_state()
    logits_of(model, zoo.tokens(80))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_general_path_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = apply(build(), "rerope"), zoo.tokens(80)
    rows = unproven(monkeypatch)
    try:
        set_backend("exact")
        logits_of(model, ids)
        assert rows == []
        with pytest.raises(PosencError, match=r"Unknown backend 'cuda flsh'.*'cuda flash'"):
            set_backend("cuda flsh")
    finally:
        set_backend(None)
    logits_of(model, ids)
    assert rows.count(80) == 2


@pytest.mark.slow
def test_a_compiled_forward_uses_what_was_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = apply(build(num_hidden_layers=1), "rerope"), zoo.tokens(80)
    rows = unproven(monkeypatch)
    expected = logits_of(model, ids)
    rows.clear()
    torch.compiler.reset()
    assert_close(logits_of(torch.compile(model, backend="eager", fullgraph=True), ids), expected)
    assert rows == [80]


def test_a_compiled_forward_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = apply(build(num_hidden_layers=1), "rerope"), zoo.tokens(80)
    rows = unproven(monkeypatch)
    torch.compiler.reset()
    logits_of(torch.compile(model, backend="eager", fullgraph=True), ids)
    assert rows == []


CPU = torch.device("cpu")
PLAIN = {"causal", "bands"}
DISTANCES = {"alibi", "kerple_log", "kerple_power", "sandwich", "t5"}
COMPUTED = {
    "exact": {*kinds()},
    "prefill": {*PLAIN, *DISTANCES, "chunks", "buckets"},
    "few": {*PLAIN, *DISTANCES, "fire", "shaw", "transformer_xl"},
    "moving": {"buckets"},
    EmulatedFlash.name: {*PLAIN, "chunks", "buckets"},
}
"""Kinds of calls by backend."""


@pytest.mark.parametrize("name", COMPUTED)
def test_the_backends_pass_the_check_of_every_kind_that_they_compute(name: str) -> None:
    """Behind a cache, with a padded row, and with gradients."""
    backend = engine.backend_of(name)
    for kind in kinds():
        case = Case(name, kind, "float32", 16, gradients=True)
        found = check(backend, case, CPU)
        assert offers(backend, case, CPU) == (found is not None) == (kind in COMPUTED[name]), kind
        if found is not None:
            assert found.reason is None, kind
            assert found.rows == (1 if name in ("few", "moving") else ROWS)
            method = kinds()[kind]
            assert len(found.errors) == 4 + (method is not None and method.trainable)


# The first check, in another process: one that crashes, hangs or errs there never runs here


Table = Callable[..., list[list[Case]]]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Table]:
    """Puts broken backends ahead of the table, here and in the other process; returns the cases of each process."""
    started: list[list[Case]] = []
    compared = isolation.compared

    def noted(cases: Any, *arguments: Any) -> Any:
        started.append([*cases])
        return compared(cases, *arguments)

    def ahead(*names: str) -> list[list[Case]]:
        backends = tuple(broken_backends.EVERY[name] for name in names)
        monkeypatch.setattr(engine, "BACKENDS", (*backends, *engine.BACKENDS))
        monkeypatch.setenv(verdicts.EXTRA, broken_backends.__name__)
        monkeypatch.setenv("BROKEN", ",".join(names))
        return started

    monkeypatch.setattr(isolation, "compared", noted)
    monkeypatch.setattr(engine, "SECONDS", 0.0)
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path / "cache"))
    engine.restore()
    yield ahead
    engine.restore()


def chosen(kind: str = "bands") -> str:
    return engine.choose(call_of(torch.float32, 64, CPU), encoding_of(kinds()[kind], 64, CPU)).name


def case(name: str, kind: str = "bands") -> Case:
    return Case(name, kind, "float32", 64)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("crashing", r"it crashes the process \(SIGSEGV\)", marks=pytest.mark.slow),
        pytest.param("hanging", "it gives no result within 1 s", marks=pytest.mark.slow),
        pytest.param("wrong", "its output differs by .* from float64", marks=pytest.mark.slow),
    ],
)
def test_one_that_is_broken_is_struck_and_results_stay_right(
    name: str, reason: str, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning; the verdict holds for later processes, which start none."""
    if name == "hanging":
        monkeypatch.setattr(isolation, "HANGING", 1.0)
    model, ids = apply(build(), "rerope"), zoo.tokens(80)
    started = table(name)
    with pytest.warns(UserWarning, match=f"{name!r} is not used for .*: {reason}") as caught:
        logits = logits_of(model, ids)
    messages = [str(each.message) for each in caught if "is not used" in str(each.message)]
    assert len(messages) == 1
    assert "`hf-posenc selftest --device cpu`" in messages[0]
    assert_close(logits, reference(model, CASES["rerope"], ids))
    assert len(started) == 1
    with warnings.catch_warnings():  # of another kind, about the same backend
        warnings.simplefilter("error")
        assert chosen("causal") != name
    engine.restore()  # as a new process is
    with pytest.warns(UserWarning, match=reason):
        assert_close(logits_of(model, ids), logits)
    assert len(started) == 2


@pytest.mark.slow
def test_one_that_is_right_is_compared_here_too_and_the_rest_is_known(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further cases are checked by the same process; one of them that crashes it is struck for its own kind."""
    monkeypatch.setattr(engine, "SECONDS", 60.0)
    ran: list[int] = []

    def compare(*_: Any, **__: Any) -> Comparison:
        ran.append(1)
        return Comparison()

    monkeypatch.setattr(engine, "compare", compare)
    started = table("right")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "right"
        assert ran == [1]
        assert chosen("causal") == "right"
    with pytest.warns(UserWarning, match="SIGSEGV"):
        assert chosen("alibi") != "right"
    assert len(started) == 1
    known = verdicts.read(CPU)
    assert known[case("right")] is None
    assert "SIGSEGV" in str(known[case("right", "alibi")])


def test_a_process_that_cannot_decide_leaves_it_to_this_one(
    table: Table, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for child, python in (("raise SystemExit(3)", sys.executable), ("", str(tmp_path / "none"))):
        monkeypatch.setattr(isolation, "_CHILD", child)
        monkeypatch.setattr(sys, "executable", python)
        table("right")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chosen() == "right"
        assert verdicts.read(CPU) == {}
        engine.restore()


def test_nothing_is_started_while_compiling(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    started = table("crashing")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert chosen() != "crashing"
    monkeypatch.undo()
    assert started == []


# The cache.


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path))
    return tmp_path


def test_verdicts_are_kept_by_versions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts.write(CPU, {case("a"): None})
    verdicts.write(CPU, {case("b"): "it raises"})
    assert verdicts.read(CPU) == {case("a"): None, case("b"): "it raises"}
    assert json.loads(verdicts.path_of(CPU).read_text())["of"]["torch"] == torch.__version__
    assert [path.suffix for path in cache.iterdir()] == [".json"]
    verdicts.write(CPU, {case("c"): None}, anew=True)
    assert verdicts.read(CPU) == {case("c"): None}
    for change in ((torch, "__version__", "9.9"), (verdicts, "_source", lambda: "other")):
        with monkeypatch.context() as other:
            other.setattr(*change)
            assert verdicts.read(CPU) == {}


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"{", b"\xff\xfe", b"[]", b'{"verdicts": {}}', b'{"verdicts": [1]}'),
        b'{"verdicts": [{"backend": "a", "reason": null}]}',
    ],
)
def test_a_damaged_file_is_written_again(cache: Path, damage: bytes) -> None:
    verdicts.path_of(CPU).write_bytes(damage)
    assert verdicts.read(CPU) == {}
    verdicts.write(CPU, {case("a"): None})
    assert verdicts.read(CPU) == {case("a"): None}


def test_processes_may_write_at_once(cache: Path) -> None:
    """A reader never sees half a file, and the last writer's verdicts are there."""
    names = [str(number) for number in range(40)]

    def write(name: str) -> bool:
        verdicts.write(CPU, {case(name): None})
        return bool(verdicts.read(CPU))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write, names))
    assert {known.backend for known in verdicts.read(CPU)} <= {*names}
    assert [path.name for path in cache.iterdir()] == [verdicts.path_of(CPU).name]


def test_a_folder_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        for folder in (cache / "sub", cache / "file" / "sub"):
            monkeypatch.setenv("HF_POSENC_CACHE", str(folder))
            verdicts.write(CPU, {case("a"): None})
            assert verdicts.read(CPU).keys() <= {case("a")}  # root may write anywhere
    finally:
        cache.chmod(stat.S_IRWXU)


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_POSENC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hf_posenc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "hf_posenc"


# The samples.


def test_every_method_of_the_engine_has_a_sample_that_computes() -> None:
    """Its result also differs from plain attention's; otherwise a check with it would show nothing."""
    call = call_of(torch.float32, 64, CPU)
    for method in methods():
        assert seam_of(method) in ("attention", "bias")
        encoding = encoding_of(method, 64, CPU)
        small = problem(call, encoding, ROWS, gradients=False)
        out, plain = exact(small, encoding)[0], exact(small, encoding_of(None, 64, CPU))[0]
        assert zoo.relative_difference(out, plain) > 1e-3, method.name
        assert torch.equal(out, exact(small, encoding_of(method, 64, CPU))[0])
    assert {"causal", "bands", "chunks", "buckets", "general", "alibi"} <= {*kinds()}


def test_verdicts_and_captures_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    device, found = torch.device("cuda"), SimpleNamespace(name="One", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    before = verdicts.fingerprint(device)
    assert before["device"] == "One, compute capability 9.0"
    found.minor = 1
    assert verdicts.fingerprint(device) != before
    # Inside a captured graph nothing is tried: what was not checked before is not used.
    call: Any = SimpleNamespace(query=SimpleNamespace(device=device))
    monkeypatch.setattr(engine, "case_of", lambda *_: "new")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not engine._passes(engine.BACKENDS[0], call, None)  # type: ignore[arg-type]
