"""The check of a backend on the user's device, with backends that are broken on purpose."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import set_backend
from hf_posenc.attention import engine
from hf_posenc.attention.call import Call
from hf_posenc.attention.checks.comparison import ROWS, call_of, encoding_of
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact
from hf_posenc.errors import PosencError
from tests.attention.test_attention import apply, assert_close, build
from tests.support import zoo
from tests.support.attention_llama import CASES, reference

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
        with pytest.raises(PosencError, match="Unknown backend 'fast'"):
            set_backend("fast")
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
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(logits_of(compiled, ids), expected)
    assert rows == [80]


def test_a_compiled_forward_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = apply(build(num_hidden_layers=1), "rerope"), zoo.tokens(80)
    rows = unproven(monkeypatch)
    torch.compiler.reset()
    logits_of(torch.compile(model, backend="eager", fullgraph=True), ids)
    assert rows == []
