"""Float32 weights under `torch.autocast`: every method as precise as the unpatched model is, in every way of running.

The truth is float64. What counts is the error of a patched model there, beside that of the unpatched model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import DynamicCache

from hf_posenc import available_methods, get_method, patch_model
from hf_posenc.attention.call import Call, CausalMask
from hf_posenc.attention.checks.comparison import encoding_of
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.engine import attend, backend_of, case_of, forced
from hf_posenc.attention.exact import exact
from tests.attention.test_attention_precision import FEATURES, HALVES, HEADS, inputs
from tests.attention.test_attention_precision import call_of as of_inputs
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL, Case, randomise
from tests.support.emulated import EmulatedFlash
from tests.support.selection import covering, late, quick
from tests.support.zoo import CACHE

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")
IDS = zoo.tokens(80, batch=2, seed=3)
"""Of more tokens than the fused paths need."""
PIECES = (66, 1, 1, 6, 3, 1, 1, 1)
MOST = 2.0
"""The error of a patched model as a multiple of that of the unpatched one, at most. Some methods sharpen the softmax
(LongRoPE multiplies scores), which any rounding before it costs more."""
FEW = ("rerope", "dynamic_yarn_row", "kerple_log", "shaw", "xpos")
METHODS = {
    **{name: case for name, case in CASES.items() if case.law == "" and case.method == name},
    **{name: case for name, case in CASES.items() if name.endswith("_row")},
    **{name: Case(name) for name in ("dynamic_pi", "dynamic_partial_ntk")},
    "dynamic_ntk_request": Case("dynamic_ntk", {"update": "request"}),
    "rerope_log_n": CASES["rerope_log_n"],
    "xpos": Case("xpos", {"scale_base": 6}),  # factors of later keys would be beyond float16
    "lampe": Case("lampe", {"growth": 0.01, "shift": -0.5, "capacity": 80.0, "head": 6, "tail": 4}),
}


def test_every_method_that_computes_attention_is_among_them() -> None:
    computing = {
        name
        for name in available_methods()
        if get_method(name).for_rotary
        and (get_method(name).seam in ("attention", "bias") or name.startswith("dynamic_"))
    }
    assert computing <= {case.method for case in METHODS.values()}


def patched(model: Any, name: str) -> Any:
    case = METHODS[name]
    given = {"original_max_position_embeddings": ORIGINAL, **case.options}
    randomise(patch_model(model, case.method, **given))
    return model


@functools.cache
def shared(name: str | None) -> Any:
    """For all tests that leave it as it is but for gradients."""
    model = zoo.build("llama", num_hidden_layers=2)
    return model if name is None else patched(model, name)


def build(name: str | None) -> Any:
    return copy.deepcopy(shared(name))


def region(dtype: torch.dtype | None) -> Any:
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


@torch.no_grad()
def prefill(model: Any, dtype: torch.dtype | None) -> Tensor:
    with region(dtype):
        logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


@torch.no_grad()
def steps(
    model: Any, dtype: torch.dtype | None, *, after: torch.dtype | str | None = "same"
) -> Tensor:
    """`after`: in which precision the second half of the pieces is run."""
    cache, parts = DynamicCache(config=model.config), []
    for index, piece in enumerate(IDS.split(PIECES, 1)):
        late = index >= len(PIECES) // 2 and after != "same"
        with region(after if late else dtype):  # type: ignore[arg-type]
            parts.append(model(input_ids=piece, **{CACHE: cache}, use_cache=True).logits)
    return torch.cat(parts, 1)


def gradients(model: Any) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def training(model: Any, dtype: torch.dtype | None) -> Tensor:
    model.zero_grad()
    with region(dtype):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return gradients(model)


def inside(model: Any, dtype: torch.dtype | None) -> Tensor:
    with region(dtype):
        return training(model, dtype)


Run = Callable[[Any, "torch.dtype | None"], Tensor]


@functools.cache
def truth(name: str | None, run: Run) -> Tensor:
    return run(build(name).double(), None).double()


@functools.cache
def unpatched(run: Run, dtype: torch.dtype) -> float:
    return zoo_error(run(shared(None), dtype), truth(None, run))


def zoo_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def assert_precise(name: str, run: Run, dtype: torch.dtype, model: Any = None) -> None:
    got = run(shared(name) if model is None else model, dtype)
    mine, theirs = zoo_error(got, truth(name, run)), unpatched(run, dtype)
    assert mine <= MOST * theirs, f"{mine:.2e} beside {theirs:.2e}: {mine / theirs:.2f} times"


RUNS = [prefill, steps, training], [torch.bfloat16, torch.float16]
MAIN = (
    *("rerope", "dual_chunk", "attention_sinks", "alibi", "kerple_log", "t5", "shaw", "rope_bias"),
    *("xpos", "dynamic_ntk_row"),
)
"""A method for each path through the engine."""


@pytest.mark.parametrize(
    ("name", "run", "dtype"),
    [*covering(MAIN, *RUNS), *late([name for name in METHODS if name not in MAIN], *RUNS)],
)
def test_as_precise_as_the_unpatched_model(name: str, run: Run, dtype: torch.dtype) -> None:
    assert_precise(name, run, dtype)


@pytest.mark.parametrize(
    ("name", "run", "backend"),
    covering(
        ["rerope", "dual_chunk", "dynamic_yarn_row", "alibi"],
        [prefill, training],
        ["exact", EmulatedFlash.name],
    ),
)
def test_every_backend(name: str, run: Run, backend: str) -> None:
    with forced(backend):
        assert_precise(name, run, torch.bfloat16)


@pytest.mark.parametrize("name", quick(FEW, ("rerope", "kerple_log")))
def test_a_backward_inside_of_the_region(name: str) -> None:
    assert_precise(name, inside, torch.bfloat16)


@pytest.mark.parametrize(("name", "dtype"), covering(FEW, [torch.bfloat16, torch.float16]))
def test_steps_that_leave_the_region_and_enter_it(name: str, dtype: torch.dtype) -> None:
    for first, after in ((dtype, None), (None, dtype)):
        error = zoo_error(steps(shared(name), first, after=after), truth(name, steps))
        assert error <= MOST * unpatched(steps, dtype)


@pytest.mark.parametrize("name", quick(FEW, ("rerope", "kerple_log")))
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    model = build(name)
    want = training(model, torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()
    assert torch.equal(training(model, torch.bfloat16), want)


@pytest.mark.slow
def test_a_compiled_model() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(build("rerope"), backend="eager", fullgraph=True)
    assert_precise("rerope", prefill, torch.bfloat16, compiled)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("gptj", "rerope"),
        ("bloom", "alibi"),
        ("falcon", "t5"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gptj", "dynamic_yarn"),
                ("codegen", "alibi"),
                ("gemma2", "rerope"),
                ("t5", "t5"),
            )
        ),
    ],
)
def test_models_that_compute_attention_in_their_own_way(kind: str, method: str) -> None:
    """Code of their own, soft caps, an encoder-decoder."""
    ids = zoo.tokens(64, batch=2)

    def error(*methods: str) -> float:
        model = zoo.build(kind)
        for each in methods:
            patch_model(model, each)
            randomise(model)
        more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        found = []
        for dtype in (torch.bfloat16, None):
            wide: Any = model if dtype else model.double()
            with torch.no_grad(), region(dtype):
                found.append(wide(input_ids=ids, use_cache=False, **more).logits)
        return zoo_error(found[0], found[1].double())

    assert error(method) <= MOST * error()


@HALVES
@pytest.mark.parametrize("name", ["rerope", "alibi", "dynamic_yarn_row"])
def test_a_patch_inside_of_the_region_is_the_same(name: str, dtype: torch.dtype) -> None:
    with region(dtype):
        model = patched(build(None), name)
    assert torch.equal(prefill(model, None), prefill(shared(name), None))


@pytest.mark.parametrize("name", ["rerope", "alibi", "dynamic_yarn_row"])
def test_a_patch_after_accelerate_has_prepared_the_model_is_the_same(name: str) -> None:
    """Its `prepare` puts the region into the model's forward, where trials would round."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    try:
        first = prefill(patched(accelerator.prepare(build(None)), name), None)
        second = prefill(accelerator.prepare(build(name)), None)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert torch.equal(first, second)
    assert zoo_error(first, prefill(shared(name), None)) > 1e-4  # the region is in force again


# Single calls

NEVER_ROUNDED_TWICE = 1.2
"""An error beside that of PyTorch's fused attention under autocast, at most: rounding queries and keys before and
after they are turned is 1.4 times as much."""


def call_of(queries: int, spread: float, **more: Any) -> Call:
    """A call in float32, whose scores have this standard deviation."""
    given = inputs(queries, 512, spread, torch.float32, HEADS)
    return dataclasses.replace(of_inputs(*given), **more)


def in_float64(call: Call) -> Call:
    wide = {name: getattr(call, name).double() for name in ("query", "key", "value")}
    return dataclasses.replace(call, **wide)


@pytest.mark.parametrize(
    ("case", "spread", "dtype"),
    covering(
        [
            *itertools.product(
                (None, "rerope", "dual_chunk"), ("prefill", "exact", EmulatedFlash.name)
            ),
            *((None, "few"), ("rerope", "few")),
        ],
        [1, 9],
        [torch.bfloat16, torch.float16],
    ),
)
def test_one_call(case: tuple[str | None, str], spread: float, dtype: torch.dtype) -> None:
    name, backend = case
    method = None if name is None else get_method(name)()
    encoding = encoding_of(method, FEATURES, torch.device("cpu"), 256, (HEADS, HEADS))
    call = call_of(4 if backend == "few" else 512, spread)
    want = exact(in_float64(call), encoding)[0]
    with region(dtype), forced(backend):
        got, _ = attend(call, encoding)
    plain = Encoding(1, HEADS)
    with region(dtype):
        theirs = F.scaled_dot_product_attention(
            call.query, call.key, call.value, attn_mask=call.mask.rows(0, call.query.shape[2])
        )
    native = exact(in_float64(call), plain)[0]
    assert got.dtype == theirs.dtype == dtype
    assert zoo_error(got, want) <= NEVER_ROUNDED_TWICE * zoo_error(theirs, native)


@HALVES
@pytest.mark.parametrize("queries", [4, 100])
@pytest.mark.parametrize(
    "more", [{"softcap": 5.0}, {"sinks": torch.linspace(-1, 1, HEADS)}, {"weights": True}]
)
def test_soft_caps_sinks_and_weights(
    more: dict[str, Any], queries: int, dtype: torch.dtype
) -> None:
    encoding, call = Encoding(1, HEADS), call_of(queries, 4, **more)
    want = exact(in_float64(call), encoding)
    with region(dtype):
        got = attend(call, encoding)
    assert got[0].dtype == dtype
    assert zoo_error(got[0], want[0]) < 2 * torch.finfo(dtype).eps
    if call.weights:  # as eager attention returns them
        assert got[1] is not None
        assert want[1] is not None
        assert got[1].dtype == torch.float32
        assert zoo_error(got[1], want[1]) < 2 * torch.finfo(dtype).eps


@HALVES
def test_a_backend_is_checked_for_the_dtype_that_it_computes_in(dtype: torch.dtype) -> None:
    call = call_of(4, 1)
    mixed = dataclasses.replace(call, value=call.value.to(dtype))
    case = case_of(backend_of("exact"), mixed, Encoding(1, HEADS))
    assert case.dtype == str(dtype).removeprefix("torch.")
    # The same call without a region, as of a model whose rotation gives float32.
    assert attend(mixed, Encoding(1, HEADS))[0].dtype == dtype


def test_float64_and_the_meta_device_are_left_as_they_are() -> None:
    encoding, call = Encoding(1, HEADS), in_float64(call_of(100, 1))
    with region(torch.bfloat16):
        assert attend(call, encoding)[0].dtype == torch.float64
    names = ("query", "key", "value", "query_position", "key_position")
    meta: dict[str, Any] = {name: getattr(call, name).to("meta") for name in names}
    call = dataclasses.replace(call, **meta, mask=CausalMask(100, 512, torch.device("meta")))
    with region(torch.bfloat16):
        assert attend(call, encoding)[0].shape == (1, HEADS, 100, FEATURES)
