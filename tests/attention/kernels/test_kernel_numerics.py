"""Kernels against float64, pair by pair: in Triton's interpreter, or on the GPU where there is one.

`scripts/check_kernels.sh` runs them in an environment of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernel_cases import RUNS

if not RUNS:
    pytest.skip(
        "needs a GPU or Triton's interpreter: scripts/check_kernels.sh", allow_module_level=True
    )

from hf_posenc.attention import engine
from hf_posenc.attention.call import Call, Run
from hf_posenc.attention.checks.comparison import compare
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact
from hf_posenc.attention.fused import EMPTY
from hf_posenc.attention.kernels import biased, decode, parts, strided
from hf_posenc.attention.kernels.biases import operands_of
from hf_posenc.attention.parts import Part
from hf_posenc.attention.rotation import Layout, Rotation
from hf_posenc.attention.toeplitz import provable_windows
from hf_posenc.methods import DistanceBias
from hf_posenc.methods.bias import Weights, per_head
from tests.support import attention_references as naive
from tests.support import kernel_cases
from tests.support.emulated import EmulatedFlash
from tests.support.kernel_cases import (
    BOUND,
    DEVICE,
    Case,
    Written,
    error,
    reference,
    reference_gradients,
)

kernel_cases.teach_bfloat16()

HALF, BF16 = torch.float16, torch.bfloat16
PAIRS = Layout(0, 16, interleaved=True)
PARTIAL = Layout(4, 8, interleaved=False, sign=-1)
LONG_CHUNKS = {"chunk": 24, "window": 8}

STEPS = [
    *(Case(name, bands.short, original=16) for name, bands in naive.BANDS.items()),
    *(Case(name, padding=(0, 9), slots=21) for name in ("rerope", "self_extend", "string")),
    *(Case(name, padding=(3, 0), slots=70) for name in ("attention_sinks", "lm_infinite")),
    Case("rerope", {"window": 9}, queries=5, layout=PAIRS),
    Case("leaky_rerope", {"window": 40, "k": 3.7}, queries=3, layout=PARTIAL),
    Case("self_extend", {"window": 11, "group": 3}, queries=8, head_dim=24),
    Case("dual_chunk", LONG_CHUNKS, queries=4, padding=(1, 0), layout=PAIRS),
    Case("rerope", head_dim=40, value_dim=24, layout=Layout(0, 40, False)),
    Case("rerope", heads=6, key_heads=1, softcap=4.0, sinks=True),
    Case("sliding_window", {"window": 8}, heads=40, key_heads=1, queries=2, sinks=True),
    Case("rerope", masked=False, length=130),
    *(Case(name, dtype=dtype) for dtype in (HALF, BF16) for name in ("rerope", "string", "alibi")),
    Case("self_extend", dtype=BF16, layout=PAIRS, queries=3, padding=(5, 0)),
    *(Case(name, padding=(0, 12), slots=10) for name in ("alibi", "kerple_log", "kerple_power")),
    Case("t5", {"buckets": 8, "max_distance": 20}, queries=3),
    Case("t5", length=150, heads=6),
    Case("sandwich", {"dim": 8}, softcap=4.0),
    Case("kerple_power", dtype=BF16, queries=2, sinks=True),
]


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "available", lambda device: True)
    monkeypatch.setattr(biased, "available", lambda device: True)
    monkeypatch.setattr(decode, "_splits", lambda device, programs, blocks: min(2, blocks))


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_a_step(case: Case) -> None:
    call, encoding = case.made()
    assert decode.accepts(call, encoding)
    out, weights = decode.run(call, encoding)
    assert weights is None
    assert out.dtype == case.dtype
    assert error(out, reference(case, call, encoding)) < BOUND[case.dtype]


TEXTS = [
    *(Case(name, queries=70) for name in ("alibi", "kerple_log", "kerple_power")),
    Case("sandwich", {"dim": 8}, queries=70),
    Case("t5", {"buckets": 8, "max_distance": 20}, queries=65, heads=6, head_dim=24),
    Case("alibi", queries=150, length=290, heads=8, value_dim=40, head_dim=40),
    Case("kerple_power", queries=20, length=133),
    Case("alibi", queries=50, length=50, padding=(0, 13)),
    *(Case("alibi", queries=140, length=140, dtype=dtype) for dtype in (HALF, BF16)),
    Case("kerple_log", queries=70, head_dim=80, dtype=BF16),
]


def in_runs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the mask of a case know its causal sequences, as masks of models do."""
    past = case.length - case.queries
    parts = []
    for row, pad in enumerate(case.padding):
        queries, keys = slice(max(0, pad - past), case.queries), slice(pad, case.length)
        parts.append(Run(slice(row, row + 1), queries, keys, max(0, past - pad)))
    monkeypatch.setattr(Written, "runs", lambda mask, positions: tuple(parts))


@pytest.mark.parametrize("case", TEXTS, ids=str)
def test_a_text(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    in_runs(case, monkeypatch)
    call, encoding = case.made()
    assert biased.accepts(call, encoding)
    out, _ = biased.run(call, encoding)
    assert out.dtype == case.dtype
    assert error(out, reference(case, call, encoding)) < BOUND[case.dtype]


SHORT = {"buckets": 8, "max_distance": 20}
TRAINED = [
    *(Case(name, queries=70) for name in ("alibi", "kerple_log", "kerple_power")),
    Case("sandwich", {"dim": 8}, queries=70),
    Case("t5", {**SHORT, "max_distance": 40}, queries=70),  # all distances are told apart
    Case("t5", SHORT, queries=65, heads=6, head_dim=24),
    Case("t5", SHORT, queries=70, length=150, key_heads=1),
    Case("kerple_log", queries=20, length=133, key_heads=4),
    Case("alibi", queries=150, length=290, heads=8, value_dim=40, head_dim=40),
    Case("kerple_power", queries=50, length=50, padding=(0, 13)),
    Case("t5", SHORT, queries=50, length=50, padding=(0, 13)),
    *(Case("alibi", queries=140, length=140, dtype=dtype) for dtype in (HALF, BF16)),
    *(Case("kerple_log", queries=70, head_dim=80, dtype=dtype) for dtype in (HALF, BF16)),
    *(Case("t5", SHORT, queries=140, length=140, dtype=dtype) for dtype in (HALF, BF16)),
    Case("kerple_power", queries=70, length=90, padding=(5,), dtype=BF16),
    Case("sandwich", {"dim": 8}, queries=70, dtype=BF16),
]


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_a_text_in_training(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of queries, keys, values and of the parameters of a bias."""
    in_runs(case, monkeypatch)
    call, encoding = case.made()
    parameters: Any = encoding.parameters
    parameters.requires_grad_(True)
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    for x in tensors.values():
        x.requires_grad_(True)
    assert biased.accepts(call, encoding)
    out, _ = biased.run(call, encoding)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    leaves = [*tensors.values(), *(parameters[name] for name in parameters)]
    found = torch.autograd.grad(out, leaves, weights)
    expected = reference_gradients(case, call, encoding, weights)
    errors = {
        name: error(gradient, expected[name])
        for name, gradient in zip([*tensors, *parameters], found, strict=True)
    }
    assert [gradient.dtype for gradient in found] == [leaf.dtype for leaf in leaves]
    assert all(errors[name] < BOUND[case.dtype] for name in tensors), errors
    # Of the same numbers, in float32: no rounding to halves is left.
    assert all(errors[name] < 2e-5 for name in parameters), errors


class Root(DistanceBias):
    """A trained bias that no kernel knows, `-a sqrt(distance)`, and that hides what is far."""

    name = "root"
    summary = source = ""

    def initial(self, heads: int, original: int) -> dict[str, Tensor]:
        return {"a": torch.linspace(0.1, 0.9, heads)}

    def bias(self, distance: Tensor, heads: int, parameters: Weights, *_: Any) -> Tensor:
        found = -per_head(parameters["a"], distance) * distance.sqrt()
        return found.masked_fill(distance > 40, -torch.inf)


def test_any_trained_bias_by_distance_and_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("alibi", queries=95, length=95)
    a = torch.linspace(0.1, 0.9, case.heads, device=DEVICE).requires_grad_()
    encoding = replace(Encoding.of([Root()], 32), heads=case.heads, parameters={"a": a})
    call = case.call(encoding)
    ends = ((0, 28), (28, 95))
    parts = [Run(slice(None), slice(*end), slice(*end), 0) for end in ends]
    monkeypatch.setattr(Written, "runs", lambda mask, positions: tuple(parts))
    position = torch.cat([torch.arange(stop - start) for start, stop in ends])[None].to(DEVICE)
    place = torch.arange(95, device=DEVICE)
    document = place >= ends[0][1]
    visible = (place <= place[:, None]) & (document == document[:, None])
    call = replace(
        call, query_position=position, key_position=position, mask=Written(visible[None, None])
    )
    for x in (call.query, call.key, call.value):
        x.requires_grad_(True)
    assert biased.accepts(call, encoding)
    leaves = [call.query, call.key, call.value, a]
    results = []
    for run, dtype in ((biased.run, torch.float32), (exact, torch.float64)):
        wide: dict[str, Any] = {n: getattr(call, n).to(dtype) for n in ("query", "key", "value")}
        out, _ = run(replace(call, **wide), encoding)
        weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(dtype)
        results.append([out, *torch.autograd.grad(out, leaves, weights)])
    for one, other in zip(*results, strict=True):
        assert error(one.detach(), other.detach().double().cpu()) < BOUND[torch.float32]


def test_gradients_are_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sum has an order that a device may choose."""
    case = Case("t5", SHORT, queries=70)
    in_runs(case, monkeypatch)
    call, encoding = case.made()
    parameters: Any = encoding.parameters
    parameters.requires_grad_(True)
    leaves = [call.query.requires_grad_(), call.key.requires_grad_(), parameters["table"]]
    found = [torch.autograd.grad(biased.run(call, encoding)[0].sum(), leaves) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_the_check_before_the_first_use_compares_gradients(name: str) -> None:
    call, encoding = Case(name, queries=70).made()
    parameters: Any = encoding.parameters
    parameters.requires_grad_(True)
    found = compare(engine.backend_of("triton biased"), call, encoding, gradients=True)
    assert found.reason is None
    names = ["output", "gradient of the query", "gradient of the key", "gradient of the value"]
    assert [*found.errors] == names + ["gradient of the parameters"] * len(parameters)


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power"])
def test_windows_are_provable_and_leave_keys_out(name: str) -> None:
    case = Case(name, queries=90, length=600, heads=8)
    encoding = case.encoding()
    if encoding.parameters:
        encoding.parameters["r1"].mul_(40)  # or a logarithm reaches all keys
    call = case.call(encoding)
    windows = windows_of(case, call, encoding)
    assert isinstance(encoding.bias, DistanceBias)
    horizon = partial(encoding.bias.horizon, heads=8, parameters=encoding.parameters)
    tight = provable_windows(call.query, call.key, horizon, call.scaling, biased.DROPPED)
    assert (windows >= tight).all()
    assert windows.min() < 300
    assert (windows <= tight * 1.3 + 2).all()


def test_all_keys_count_where_positions_do_not_count_up() -> None:
    case = Case("alibi", queries=90, length=600, heads=8)
    call, encoding = case.made()
    call.key_position[0, 400:] += 1
    assert (windows_of(case, call, encoding) == 600).all()


def windows_of(case: Case, call: Call, encoding: Encoding) -> Tensor:
    from hf_posenc.attention.kernels import biased_triton

    bias = operands_of(encoding, 0, case.length, call.query.device)
    assert bias is not None
    windows = torch.zeros(1, case.heads, dtype=torch.int32, device=call.query.device)
    tensors = (call.query, call.key, call.query_position, call.key_position)
    sizes = (case.heads // case.key_heads, case.queries, case.length, call.scaling)
    biased_triton.provable_windows[(case.heads, 1)](
        *(value for x in tensors for value in strided(x)),
        *(bias.first, bias.second, windows, *sizes, math.log(case.length / biased.DROPPED)),
        BIAS=bias.kind,
        D=case.head_dim,
        DP=case.head_dim,
        BN=64,
    )
    return windows[0].cpu()


def test_a_step_far_into_a_text_is_as_precise() -> None:
    """Near keys turn by their distance to the query, not by their position."""
    case = Case("rerope", {"window": 60}, queries=3)
    call, encoding = case.made()
    expected = reference(case, call, encoding)
    m, n = call.query_position + 1_000_000, call.key_position + 1_000_000
    far = replace(call, query_position=m, key_position=n)
    assert error(decode.run(far, encoding)[0], expected) < BOUND[torch.float32]


TURNS = [
    (Layout(0, 32, interleaved=False), 32),
    (Layout(0, 24, interleaved=True), 24),
    (Layout(4, 8, interleaved=False, sign=-1), 40),  # features before and behind stay
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BF16], ids=str)
@pytest.mark.parametrize(("layout", "features"), TURNS)
def test_a_turn_and_its_gradient(layout: Layout, features: int, dtype: torch.dtype) -> None:
    """Two turns of two rows with their own positions, against float64."""
    rotation = Rotation(100.0 ** -torch.linspace(0, 1, layout.dim // 2).to(DEVICE), layout)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 37, 9, features, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    positions = torch.randint(-60, 60, (2, 2, 37), generator=generator).to(DEVICE)
    keys = torch.randn(2, 50, 3, features, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    places = torch.randint(-60, 60, (1, 1, 50), generator=generator).to(DEVICE)
    for count in (1, 2, 3):  # in one launch, in one, in two
        every = [(x, positions), (keys, places), (x, places[:, :, :37])][:count]
        leaves = [each.clone().requires_grad_() for each, _ in every]
        pairs = zip(leaves, every, strict=True)
        turns = ((leaf, rotation.tables(at, torch.float32)) for leaf, (_, at) in pairs)
        outs = parts.turned([(rotation, *turn) for turn in turns])
        for out, leaf, (each, at) in zip(outs, leaves, every, strict=True):
            wide = each.double().requires_grad_()
            expected = torch.stack([rotation.turn(wide, one) for one in at])
            assert (out.dtype, out.transpose(2, 3).is_contiguous()) == (dtype, True)
            assert error(out.detach(), expected.detach().cpu()) < BOUND[dtype]
            weights = torch.randn(expected.shape, generator=generator).to(DEVICE)
            gradients = torch.autograd.grad(out, leaf, weights.to(dtype), retain_graph=True)
            (of_wide,) = torch.autograd.grad(expected, wide, weights.to(dtype).double())
            assert error(gradients[0], of_wide.cpu()) < BOUND[dtype]


def apart(x: Tensor, axis: int) -> Tensor:
    """Return x with entries of an axis so far apart that int32 does not count to the third."""
    far = 2**30 + 8
    entries = [far if i == axis else stride for i, stride in enumerate(x.contiguous().stride())]
    memory = x.new_empty((x.shape[axis] - 1) * far + x.numel())  # of which hardly any is touched
    return memory.as_strided(x.shape, entries).copy_(x)


@pytest.mark.parametrize("axis", [0, 2], ids=["turns", "heads"])
def test_a_turn_of_memory_that_int32_does_not_count(axis: int) -> None:
    x = torch.randn(3, 1, 3, 5, 16, device=DEVICE).to(HALF)
    cos, sin = torch.randn(2, 3, 1, 5, 8, device=DEVICE)
    far, near = ([each, cos, sin] for each in (apart(x, axis), x))
    expected = parts.turn(near * 2, 0, False)
    for given in (far + near, near + far):
        assert all(map(torch.equal, parts.turn(given, 0, False), expected))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_attention_in_memory_that_int32_does_not_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("kerple_log", heads=3, key_heads=3, dtype=HALF)
    call, encoding = case.made()
    moved: dict[str, Any] = {name: apart(getattr(call, name), 1)}
    far = replace(call, **moved)
    assert torch.equal(decode.run(far, encoding)[0], decode.run(call, encoding)[0])
    case = replace(case, queries=case.length)
    in_runs(case, monkeypatch)
    parameters: Any = encoding.parameters
    call, weights = case.call(encoding), torch.randn(16).to(DEVICE, HALF)
    found = []
    for layout in (partial(apart, axis=1), Tensor.clone):
        leaves: dict[str, Any] = {n: getattr(call, n) for n in ("query", "key", "value")}
        leaves[name] = layout(leaves[name])
        given = replace(call, **{n: x.requires_grad_() for n, x in leaves.items()})
        every = [*leaves.values(), *(parameters[n].requires_grad_() for n in parameters)]
        out = biased.run(given, encoding)[0]
        found.append([out, *torch.autograd.grad(out, every, weights.expand_as(out))])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_turn_keeps_its_schema_and_its_fake() -> None:
    x = torch.randn(2, 1, 3, 5, 16, device=DEVICE, requires_grad=True)
    cos, sin = torch.randn(2, 2, 1, 5, 8, device=DEVICE)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(parts.turn, ([x, cos, sin] * 2, 0, False), test_utils=checks)


@pytest.mark.parametrize("case", [STEPS[9], STEPS[30], TEXTS[0], TEXTS[4]], ids=str)
def test_operators_keep_their_schema_and_their_fakes(case: Case) -> None:
    """By `torch.library.opcheck`: nothing is written or aliased, and a trace sees the shapes that a call gives."""
    call, encoding = case.made()
    bias = operands_of(encoding, 0, case.length, call.query.device)
    assert bias is not None
    tensors = (call.query, call.key, call.value, call.query_position, call.key_position)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    if case in TEXTS:
        query = call.query.requires_grad_()
        torch.library.opcheck(
            biased.biased, (query, *tensors[1:], *bias, call.scaling, True), test_utils=checks
        )
        with torch.no_grad():
            results = biased.biased(*tensors, *bias, call.scaling, True)
        inputs = (results[0], *tensors, *bias, call.scaling, *results, bool(encoding.parameters))
        with torch.no_grad():
            torch.library.opcheck(biased.biased_backward, inputs, test_utils=checks[:2])
        return
    scheme = decode.prepared(encoding.plan)
    assert encoding.rotation is not None
    visible = call.mask.rows(0, case.queries)
    more = (visible, encoding.rotation.inv_freq, call.sinks, *bias, scheme, call.scaling, None)
    torch.library.opcheck(decode.decode, (*tensors, *more), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BF16])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_merge(dtype: torch.dtype, reverse: bool) -> None:
    """Two parts of one softmax; a row has no keys in the one, the other, or both, as any operator marks that."""
    torch.manual_seed(0)
    out, part = (torch.randn(1, 37, 3, 24).to(DEVICE, dtype).transpose(1, 2) for _ in range(2))
    lse, part_lse = (torch.randn(1, 37, 3).to(DEVICE).transpose(1, 2) for _ in range(2))
    lse[:, :, 1], part_lse[:, :, 2] = EMPTY, math.inf
    lse[:, :, 3], part_lse[:, :, 4] = -math.inf, EMPTY
    lse[:, :, 5], part_lse[:, :, 5] = math.inf, -math.inf
    out[:, :, 5], part[:, :, 5] = 0, 0
    pair = [(out, lse), (part, part_lse)]
    if reverse:
        part, part_lse = part.flip(2), part_lse.flip(2)
    each = [(x.double(), torch.where(y.abs() < 1e29, y.double(), EMPTY)) for x, y in pair]
    weights = torch.stack([y for _, y in each]).softmax(0)
    expected = sum(x * w[..., None] for (x, _), w in zip(each, weights, strict=True))
    total = torch.stack([y for _, y in each]).logsumexp(0)
    parts.merge(out, lse, [(Part((0, 37), (0, 37), merge=True, mirrored=reverse), part, part_lse)])
    assert error(out, expected) < BOUND[dtype]
    seen = total > -1e29
    torch.testing.assert_close(lse[seen].double(), total[seen], rtol=0, atol=1e-5)
    assert (lse[~seen] < -1e29).all()


@pytest.mark.parametrize("backend", ["emulated cudnn, triton", f"{EmulatedFlash.name}, triton"])
@pytest.mark.parametrize(
    "case",
    [
        Case("rerope", {"window": 16}, queries=64, length=64),
        Case("string", {"shift": 20, "window": 16}, queries=70, layout=PAIRS),
        Case("lm_infinite", {"window": 12, "sinks": 3}, queries=50, length=61),
        Case("attention_sinks", {"window": 16}, queries=70, padding=(0, 5), dtype=BF16),
        Case("dual_chunk", LONG_CHUNKS, queries=130, length=130),
    ],
    ids=str,
)
def test_bands_by_their_parts(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned and merged by kernels, around an emulated operator."""
    monkeypatch.setattr(parts, "available", lambda device: True)
    in_runs(case, monkeypatch)
    call, encoding = case.made()
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    for x in tensors.values():
        x.requires_grad_(True)
    with engine.forced(backend):
        assert engine.choose(call, encoding).name == backend
        out, _ = engine.attend(call, encoding)
    assert error(out, reference(case, call, encoding)) < BOUND[case.dtype]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    found = torch.autograd.grad(out, [*tensors.values()], weights)
    expected = reference_gradients(case, call, encoding, weights)
    for name, gradient in zip(tensors, found, strict=True):
        assert error(gradient, expected[name]) < 2 * BOUND[case.dtype], name
