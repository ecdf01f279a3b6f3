"""Kernels' operators where no kernel can run: what they accept, launch and return, eager and traced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posenc.attention import engine
from hf_posenc.attention.call import Call, CausalMask
from hf_posenc.attention.checks.comparison import ROWS, call_of, compare, encoding_of
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.fused.flash4 import Flash4
from hf_posenc.attention.kernels import biased, decode
from hf_posenc.attention.kernels.biases import operands_of
from hf_posenc.attention.softmax import grouped_scores, weighted_values
from hf_posenc.methods import get_method
from tests.support.elsewhere import VIEWS
from tests.support.kernel_cases import Case, Written
from tests.support.selection import late

BANDS = (
    *("rerope", "leaky_rerope", "self_extend", "dual_chunk", "string"),
    *("lm_infinite", "attention_sinks", "sliding_window"),
)
BIASES = ("alibi", "kerple_log", "kerple_power", "t5", "sandwich")
LAUNCHES = {
    "hf_posenc::decode": 2,  # the shares, and their merge
    "hf_posenc::biased": 2,  # windows of closed forms, and attention
    "hf_posenc::biased_backward": 2,  # queries, and keys with values; that of a table makes a third
}


@pytest.fixture(autouse=True)
def _available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "available", lambda device: True)
    monkeypatch.setattr(biased, "available", lambda device: True)


def on_meta(case: Case) -> tuple[Call, Encoding]:
    """A call whose tensors have no data: whatever waits for a value raises."""
    call, encoding = case.made()

    def moved(x: Any) -> Any:
        return x.to("meta") if isinstance(x, Tensor) else x

    rotation = encoding.rotation
    assert rotation is not None
    assert isinstance(call.mask, Written)
    parameters: Any = encoding.parameters
    encoding = replace(
        encoding,
        rotation=replace(rotation, inv_freq=moved(rotation.inv_freq)),
        parameters=parameters.to("meta"),
    )
    values = {name: moved(value) for name, value in vars(call).items()}
    return Call(**{**values, "mask": Written(moved(call.mask.visible))}), encoding


class Launches(TorchDispatchMode):
    """Counts what a GPU would be given to do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.removeprefix("aten::") not in VIEWS:
            self.names += [name] * LAUNCHES.get(name, 1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padding", [(0,), (0, 9)], ids=str)
@pytest.mark.parametrize("name", [*BANDS, *BIASES])
def test_a_step_is_two_launches_and_no_wait(name: str, padding: tuple[int, ...]) -> None:
    call, encoding = on_meta(Case(name, padding=padding, slots=10))
    assert engine.choose(call, encoding).name == "triton decode"
    engine.attend(call, encoding)  # tables are made once
    with Launches() as launches:
        out, weights = engine.attend(call, encoding)
    assert out.shape == (len(padding), 4, 1, 16)
    assert weights is None
    assert launches.names == ["hf_posenc::decode"] * 2


@pytest.mark.parametrize("length", [70, 90])
@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power", "t5"])
def test_a_text_is_two_launches_and_no_wait(name: str, length: int) -> None:
    call, encoding = on_meta(Case(name, queries=70, length=length))
    call = replace(call, mask=CausalMask(70, length, torch.device("meta")))
    assert engine.choose(call, encoding).name == "triton biased"
    engine.attend(call, encoding)
    with Launches() as launches:
        out, weights = engine.attend(call, encoding)
    assert out.shape == (1, 4, 70, 16)
    assert weights is None
    assert launches.names == ["hf_posenc::biased"] * 2


def in_training(name: str) -> tuple[Call, Encoding, list[Tensor]]:
    """A text on the device without values, and the tensors and parameters that get gradients."""
    knobs = {"buckets": 8, "max_distance": 20} if name == "t5" else {}
    call, encoding = on_meta(Case(name, knobs, queries=70))
    parameters: Any = encoding.parameters
    parameters.requires_grad_(True)
    leaves = [call.query, call.key, call.value]
    for x in leaves:
        x.requires_grad_(True)
    mask = CountsUp(70, 70, torch.device("meta"))
    return replace(call, mask=mask), encoding, [*leaves, *(parameters[x] for x in parameters)]


class CountsUp(CausalMask):
    """Plain causal attention of positions that count up, which no value tells here."""

    def decided(self, question: Any, answer: Any) -> Any:
        return True if question == ("count up", False) else super().decided(question, answer)


TRAINING = {"alibi": 4, "sandwich": 3, "kerple_log": 5, "kerple_power": 5, "t5": 15}
"""Launches of a layer, forward and backward."""


@pytest.mark.parametrize("name", TRAINING)
def test_launches_of_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of both operators, one by one: their own code runs, on tensors without values and with noted kernels."""
    with Launches() as launches:
        noted = Noted(launches.names)
        monkeypatch.setitem(sys.modules, "hf_posenc.attention.kernels.biased_triton", noted)
        call, encoding, leaves = in_training(name)
        operands = operands_of(encoding, 0, 70, torch.device("meta"))
        assert operands is not None
        launches.names.clear()
        tensors = (call.query, call.key, call.value, call.query_position, call.key_position)
        inputs = (*tensors, *operands, call.scaling)
        with torch.no_grad():
            results = biased.biased._init_fn(*inputs, True)
            biased.biased_backward._init_fn(results[0], *inputs, *results, len(leaves) > 3)
    kernels = ["biased_forward", "gradients_of_queries", "gradients_of_keys"]
    if name in ("alibi", "kerple_log", "kerple_power"):
        kernels.insert(0, "provable_windows")
    if name == "t5":
        kernels.append("gradients_of_distances")
    assert [each for each in launches.names if "::" not in each] == kernels
    assert len(launches.names) == TRAINING[name], launches.names


def test_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setitem(sys.modules, "hf_posenc.attention.kernels.decode_triton", Noted(launched))
    call, encoding = on_meta(Case("alibi", queries=2))
    decode.decode._init_fn(
        *(call.query, call.key, call.value, call.query_position, call.key_position),
        *(call.mask.rows(0, 2), None, None),
        *(operands_of(encoding, 2, 70, torch.device("meta")) or ()),
        *(decode.prepared(encoding.plan), call.scaling, None),
    )
    assert launched == ["decode_share", "merge_shares"]
    assert len(launched) == LAUNCHES["hf_posenc::decode"]


class Noted:
    """A module of kernels whose launches are noted and compute nothing, and each of its kernels."""

    def __init__(self, names: list[str], kernel: str = "") -> None:
        self.names, self.kernel = names, kernel

    def __getattr__(self, kernel: str) -> Noted:
        return Noted(self.names, kernel)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        self.names.append(self.kernel)
        return lambda *arguments, **constants: None


@pytest.mark.parametrize("name", TRAINING)
def test_training_launches_nothing_around_the_operators(name: str) -> None:
    call, encoding, leaves = in_training(name)
    assert engine.choose(call, encoding).name == "triton biased"
    engine.attend(call, encoding)  # tables are made once
    with Launches() as launches:
        out, _ = engine.attend(call, encoding)
        found = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in leaves]
    assert launches.names == ["hf_posenc::biased"] * 2 + ["hf_posenc::biased_backward"] * 2


def causal(case: Case) -> tuple[Call, Encoding]:
    """A text without padding."""
    call, encoding = case.made()
    return replace(call, mask=CausalMask(70, 70, torch.device("cpu"))), encoding


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("a text", {"softcap": 3.0}),
    ("a text", {"sinks": torch.zeros(4)}),
    ("a text", {"query": torch.zeros(1, 4, 8, 16)}),  # a step
    ("a text", {"mask": Written(torch.ones(1, 1, 70, 70, dtype=torch.bool))}),  # of no runs
    ("a step", {"dropout": 0.1}),
    ("a step", {"weights": True}),
    ("a step", {"query": torch.zeros(1, 4, 9, 16)}),
    ("a step", dict.fromkeys(("query", "key", "value"), torch.zeros(1, 4, 1, 16).double())),
    ("a step", {"query": torch.zeros(1, 4, 1, 512)}),  # wide heads
    ("a step", {"value": torch.zeros(1, 2, 16, 70).mT}),  # strided features
    ("a step", {"query": torch.zeros(1, 4, 1, 16, requires_grad=True)}),
]


@pytest.mark.parametrize(("what", "change"), REFUSED)
def test_what_is_not_accepted(what: str, change: dict[str, Any]) -> None:
    module: Any = biased if what == "a text" else decode
    text, step = causal(Case("alibi", queries=70)), Case("rerope").made()
    call, encoding = text if module is biased else step
    assert module.accepts(call, encoding)
    assert not module.accepts(replace(call, **change), encoding)


def test_a_table_is_read_where_positions_have_no_gaps() -> None:
    call, encoding = causal(Case("sandwich", queries=70))
    assert biased.accepts(call, encoding)
    call.key_position[0, 30:] += 1
    assert not biased.accepts(replace(call, mask=CausalMask(70, 70, torch.device("cpu"))), encoding)


def test_a_table_is_trained_where_positions_have_no_gaps() -> None:
    """Its gradient is summed by place."""
    call, encoding = causal(Case("t5", queries=70))
    call.key_position[0, 30:] += 1
    assert biased.accepts(call, encoding)
    parameters: Any = encoding.parameters
    parameters.requires_grad_(True)
    assert not biased.accepts(call, encoding)
    call.key_position[0, 30:] -= 1
    assert biased.accepts(replace(call, mask=CausalMask(70, 70, torch.device("cpu"))), encoding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_fake_output_has_the_layout_of_transformers(dtype: torch.dtype) -> None:
    call, encoding = on_meta(Case("alibi", queries=3, padding=(0, 1), value_dim=24, dtype=dtype))
    out, _ = decode.run(call, encoding)
    assert (out.shape, out.dtype) == ((2, 4, 3, 24), dtype)
    assert out.transpose(1, 2).is_contiguous()


def test_parameters_that_are_trained_are_not_accepted() -> None:
    call, encoding = Case("kerple_log").made()
    assert decode.accepts(call, encoding)
    parameters: Any = encoding.parameters
    parameters.requires_grad_(True)
    assert not decode.accepts(call, encoding)
    with torch.no_grad():
        assert decode.accepts(call, encoding)


@pytest.mark.parametrize("name", ["fire", "shaw", "xpos", "rope_bias", "dynamic_ntk"])
def test_methods_of_other_forms_are_not_accepted(name: str) -> None:
    options = {"update": "row"} if name == "dynamic_ntk" else {}
    method: Any = get_method(name)
    encoding = Encoding.of([method(**options)], 32)
    call, _ = Case("alibi").made()
    assert not decode.accepts(call, replace(encoding, heads=4))


def test_a_table_is_not_read_beyond_the_distances_of_a_cache() -> None:
    """Without a cache, positions may have gaps, and a distance may exceed the number of keys."""
    assert not decode.accepts(*Case("sandwich", queries=4, length=4).made())


def test_a_mask_that_adds_to_the_scores_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    call, encoding = Case("alibi").made()
    monkeypatch.setattr(Written, "added", lambda mask, start, stop: mask.visible.float())
    assert not decode.accepts(call, encoding)


def test_without_triton_or_off_cuda_nothing_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posenc.attention import kernels

    assert not kernels.available(torch.device("cpu"))
    monkeypatch.setattr(kernels, "_installed", lambda: True)
    assert kernels.available(torch.device("cuda"))
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    assert not kernels.available(torch.device("cuda"))


@pytest.mark.slow
def test_the_engine_does_not_import_triton() -> None:
    code = "import sys, hf_posenc.attention.engine as _; print('triton' in sys.modules, end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False"


@pytest.mark.parametrize("name", ["rerope", "alibi", *late(["t5", "sandwich"])])
def test_a_step_is_traced_in_one_graph(name: str) -> None:
    prefill, encoding = on_meta(Case(name, queries=70, slots=10))
    assert not decode.accepts(prefill, encoding)  # the first eager call prepares the steps
    call, _ = on_meta(Case(name, slots=10))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return engine.attend(replace(call, query=query, key=key, value=value), encoding)[0]

    assert step(call.query, call.key, call.value).shape == call.query.shape
    assert len(graphs) == 1
    assert "hf_posenc.decode" in str(graphs[0].graph)


@pytest.mark.parametrize("name", ["kerple_log", *late(["alibi"])])
def test_training_is_traced_in_one_graph_each_way(name: str) -> None:
    call, encoding, leaves = in_training(name)
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=kept))
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return engine.attend(replace(call, query=query, key=key, value=value), encoding)[0]

    out = attention(call.query, call.key, call.value)
    found = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [x.shape for x in found] == [x.shape for x in leaves]
    assert [str(graph.graph).count("hf_posenc.biased") for graph in graphs] == [1, 1]
    assert "hf_posenc.biased_backward" in str(graphs[1].graph)


@pytest.mark.parametrize("name", ["kerple_log", "t5", "sandwich"])
def test_a_table_for_flash_attention_4(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the call itself: a padded batch behind a cache, and a text alone, against float64."""

    def tabled(query: Tensor, key: Tensor, value: Tensor, table: Tensor, scaling: float) -> Tensor:
        rows, keys = query.shape[2], key.shape[2]
        distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
        scores = grouped_scores(query, key, scaling) + table[:, distance.clamp(min=0)]
        return weighted_values(scores, value, distance >= 0)[0]

    monkeypatch.setattr(biased, "tabled", tabled)
    monkeypatch.setattr(Flash4, "serves", lambda *_: True)
    backend, cpu = engine.backend_of("flash attention 4, table"), torch.device("cpu")
    call = call_of(torch.float32, 16, cpu)
    encoding = encoding_of(get_method(name).from_options(), 16, cpu)
    found = compare(backend, call, encoding, gradients=False)
    assert found.reason is None, found
    assert found.rows == ROWS
    with torch.enable_grad():  # it has no backward
        trained = compare(backend, call, encoding, gradients=True)
    assert trained.reason == "it does not compute the problem of its check"


def test_the_shares_of_a_step_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four programs for each of 132 processors, at most 64 shares and one for each block of keys."""
    found = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    shares = ((8, 1000), (100, 1000), (600, 1000), (8, 3))
    assert [decode._splits(torch.device("cuda"), *each) for each in shares] == [64, 8, 1, 4]
