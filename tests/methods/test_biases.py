"""Distance biases against the papers, and against the models that have them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.kernels.biases import Operands, operands_of
from hf_posenc.errors import PosencError
from hf_posenc.methods import (
    T5,
    ALiBi,
    RelativeKeys,
    RopeBias,
    Shaw,
    TransformerXL,
    XPos,
    get_method,
)
from hf_posenc.methods.temperature import log_n_factor
from tests.support import attention_references as naive
from tests.support.attention_methods import BIASES, distance_bias, turn


@pytest.mark.parametrize(
    ("name", "knobs"),
    [(name, knobs) for name in BIASES for knobs in naive.BIAS_KNOBS.get(name, [{}])],
)
@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bias_equals_the_paper(
    name: str, knobs: dict[str, Any], heads: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads)
    length, method = 40, distance_bias(name, **knobs)
    parameters = {key: value.to(dtype) for key, value in method.initial(heads, 32).items()}
    if name == "t5":
        parameters["table"].normal_()
    for key in ("r1", "r2"):
        if key in parameters:
            parameters[key].clamp_(min=0.02)
    assert bool(parameters) is method.trainable
    values: dict[str, Any] = naive.as_numbers(parameters) | knobs
    if name == "fire":
        values = {k: v for k, v in values.items() if k not in ("multiplier", "hidden")}
        values |= {"c": float(parameters["c"]), "threshold": knobs.get("threshold", 512.0)}
    if name == "sandwich":
        values.setdefault("dim", 128)
    want = naive.bias_matrix(name, length, heads, **values)

    m = torch.arange(length, dtype=dtype)
    distance = (m[:, None] - m).clamp(min=0)
    position = torch.arange(length)[:, None] if method.of_query else None
    got = method.bias(distance, heads, parameters, position)
    assert got.dtype == dtype
    assert got.shape == (heads, length, length)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(
        got[:, causal].double(), want[:, causal], rtol=tolerance, atol=tolerance
    )
    if not method.of_query:  # a function of the distance alone
        table = method.bias(m, heads, parameters)
        torch.testing.assert_close(table[:, distance.long()], got, rtol=tolerance / 100, atol=0)


def test_a_steep_head_is_blind_far_back_and_not_on_logarithmic_distances() -> None:
    """In bfloat16, where the smallest number is e to the -92.2."""
    for heads in (8, 16):
        slope = float(ALiBi().slopes(heads)[0])
        far = torch.tensor([90 / slope, 94 / slope, 1e6], dtype=torch.float64)
        weight, logarithmic = (
            ALiBi(distance=distance).bias(far, heads, {})[0].exp().bfloat16()
            for distance in ("linear", "log")
        )
        assert (weight > 0).tolist() == [True, False, False]
        assert bool((logarithmic > 1e-5).all())


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 12, 14, 32, 40, 71])
def test_alibi_equals_bloom_and_mpt(heads: int) -> None:
    slopes = ALiBi().slopes(heads)
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(slopes.float(), bloom, rtol=1e-6, atol=0)
    mpt = build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    torch.testing.assert_close(slopes.float(), -mpt, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(32, 128), (32, 256), (64, 1024), (8, 20), (9, 64), (2, 5)]
)
def test_t5_buckets_equal_transformers(buckets: int, max_distance: int) -> None:
    distance = torch.arange(3000)
    want = T5Attention._relative_position_bucket(
        -distance, bidirectional=False, num_buckets=buckets, max_distance=max_distance
    )
    method = T5(buckets=buckets, max_distance=max_distance)
    for dtype in (torch.float32, torch.float64, torch.int64):
        assert torch.equal(method.bucket(distance.to(dtype)), want)


@pytest.mark.parametrize("mode", ["distance", "max_distance"])
def test_a_kernel_reads_the_scaled_buckets(mode: str) -> None:
    """Entries end where all distances are alike."""
    method = T5(scale=2.5, mode=mode)
    encoding = Encoding(64, heads=4, bias=method, rotates=False, parameters=method.initial(4, 64))
    index = operands_of(encoding, 0, 3000, torch.device("cpu")).second  # type: ignore[union-attr]
    assert index is not None
    distance = torch.arange(3000)
    assert torch.equal(index[distance.clamp(max=len(index) - 1)].long(), method.bucket(distance))


@pytest.mark.parametrize("name", [name for name in BIASES if name != "fire"])
def test_a_kernel_reads_the_heads_of_its_process(name: str) -> None:
    """In tensor parallelism: the parts of three processes are those of all heads, in order."""
    method = distance_bias(name)
    parameters = {key: torch.rand_like(value) for key, value in method.initial(6, 64).items()}
    whole = Encoding(64, heads=6, bias=method, rotates=False, parameters=parameters)
    shares = [replace(whole, heads=2, share=(number, 3)) for number in range(3)]
    expected, *parts = (
        cast(Operands, operands_of(each, 0, 50, torch.device("cpu"))) for each in (whole, *shares)
    )
    for operand in ("first", "second") if name.startswith("kerple") else ("first",):
        found = torch.cat([getattr(part, operand) for part in parts])
        assert torch.equal(found, getattr(expected, operand))


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power", "sandwich"])
def test_penalties_start_at_zero(name: str) -> None:
    torch.manual_seed(1)
    method, distance = distance_bias(name), torch.arange(200, dtype=torch.float64)
    bias = method.bias(distance, 8, method.initial(8, 64))
    assert torch.all(bias[:, 0] == 0)
    assert torch.all(bias[:, 1:] < 0)
    if name != "sandwich":  # which only tends downwards
        assert torch.all(bias[:, 1:] < bias[:, :-1])


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power"])
def test_nothing_counts_beyond_the_horizon(name: str) -> None:
    torch.manual_seed(2)
    method, heads = distance_bias(name), 6
    parameters = {k: v.double() for k, v in method.initial(heads, 64).items()}
    drop = torch.linspace(0.5, 12, heads, dtype=torch.float64)
    horizon = method.horizon(drop, heads, parameters)
    assert horizon is not None
    assert horizon.shape == (heads,)
    for h in range(heads):
        at = method.bias(horizon[h : h + 1], heads, parameters)[h]
        assert float(at) == pytest.approx(-float(drop[h]), rel=1e-9)
        assert torch.all(method.bias(horizon[h : h + 1] * 1.01, heads, parameters)[h] < -drop[h])
    if method.trainable:
        assert method.horizon(drop, heads) is None


@pytest.mark.parametrize("name", ["sandwich", "t5", "fire"])
def test_where_nobody_knows_the_horizon(name: str) -> None:
    method = distance_bias(name)
    assert method.horizon(torch.ones(4), 4, method.initial(4, 64)) is None


@pytest.mark.parametrize("name", [n for n in BIASES if distance_bias(n).trainable])
def test_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(3)
    method = distance_bias(name)
    parameters = {k: v.double().requires_grad_() for k, v in method.initial(4, 64).items()}
    distance = torch.arange(700, dtype=torch.float64)
    bias = method.bias(distance, 4, parameters, distance if method.of_query else None)
    (bias * torch.randn_like(bias)).sum().backward()
    for key, value in parameters.items():
        assert value.grad is not None, key
        assert torch.isfinite(value.grad).all(), key
        assert value.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
def test_kerple_stays_positive_and_can_come_back(name: str) -> None:
    """A value that training pushed out of bounds reads as the bound and still has a gradient."""
    method, distance = distance_bias(name), torch.arange(1, 50, dtype=torch.float64)
    astray = {"r1": torch.tensor([-3.0]).double(), "r2": torch.tensor([-0.5]).double()}
    bound = {"r1": torch.tensor([0.01]).double(), "r2": torch.tensor([0.01]).double()}
    learned = {k: v.clone().requires_grad_() for k, v in astray.items()}
    bias = method.bias(distance, 1, learned)
    torch.testing.assert_close(bias, method.bias(distance, 1, bound), rtol=1e-12, atol=0)
    bias.sum().backward()
    for value in learned.values():
        assert value.grad is not None
        assert value.grad.abs() > 0
    if name == "kerple_power":
        steep = method.bias(distance, 1, {"r1": bound["r1"], "r2": torch.tensor([9.0]).double()})
        torch.testing.assert_close(steep[0], -0.01 * distance**2, rtol=1e-12, atol=0)


def test_initial_values_are_the_papers() -> None:
    torch.manual_seed(0)
    log, power = (distance_bias(n).initial(4000, 64) for n in ("kerple_log", "kerple_power"))
    for values, most in ((log["r1"], 2), (log["r2"], 1), (power["r1"], 1), (power["r2"], 2)):
        assert 0 <= values.min() <= values.max() <= most
        assert float(values.mean()) == pytest.approx(most / 2, abs=0.05)
    fire = distance_bias("fire").initial(1000, 64)
    assert float(fire["c"]) == pytest.approx(0.1)
    linear = torch.nn.Linear(32, 1000)
    wide = distance_bias("fire", hidden=4000).initial(1, 64)  # many draws: one is near the bound
    assert all(0.99 < float(wide[key].abs().max()) <= 1 for key in ("weight_in", "bias_in"))
    for key, like in (("weight_out", linear.weight), ("bias_out", linear.bias)):
        assert fire[key].shape == like.shape
        assert float(fire[key].abs().max()) == pytest.approx(
            float(like.detach().abs().max()), rel=0.02
        )
    assert torch.all(distance_bias("t5").initial(4, 64)["table"] == 0)
    every = [distance_bias(n).initial(4, 64) for n in BIASES]
    assert all(v.dtype == torch.float32 for values in every for v in values.values())


def test_fire_reads_distances_as_fractions_and_survives_odd_parameters() -> None:
    method = distance_bias("fire", threshold=4.0)
    parameters = {k: v.double() for k, v in method.initial(2, 64).items()}
    with pytest.raises(PosencError, match="query_position"):
        method.bias(torch.arange(4.0), 2, parameters)
    # At the text's first token every query longer than T stands at the fraction 1.
    m = torch.tensor([10.0, 1000.0]).double()
    first = method.bias(m, 2, parameters, m)
    torch.testing.assert_close(first[:, 0], first[:, 1], rtol=1e-12, atol=1e-12)
    zero = torch.zeros((), dtype=torch.float64)
    for odd in ({"c": zero}, {"c": zero - 0.3}, {"multiplier": zero}, {"multiplier": zero - 1}):
        bias = method.bias(torch.arange(9.0).double(), 2, parameters | odd, torch.arange(9))
        assert torch.isfinite(bias).all()
    # The authors' code takes the absolute of the trained threshold.
    one = torch.ones((), dtype=torch.float64)
    both = (
        method.bias(
            torch.arange(9.0).double(), 2, parameters | {"multiplier": value}, torch.arange(9)
        )
        for value in (-one, one)
    )
    assert torch.equal(*both)


@pytest.mark.parametrize("name", ["t5", "kerple_log", "kerple_power", "transformer_xl"])
def test_shared_parameters_are_those_of_the_option(name: str) -> None:
    own, shared = (get_method(name).from_options(shared=value) for value in (False, True))
    assert own.shared_parameters == ()
    assert set(shared.shared_parameters) <= {*shared.parameters_for(4, 4, 8, 64)}
    assert shared.shared_parameters


@pytest.mark.parametrize("law", naive.TEMPERATURES)
def test_temperatures_equal_the_papers(law: str) -> None:
    method = get_method("temperature").from_options(law=law, **naive.LAW_KNOBS.get(law, {}))
    assert method.trainable == (law == "ssmax")
    m = torch.arange(300)
    want = [naive.TEMPERATURES[law](int(i), 64, **naive.LAW_KNOBS.get(law, {})) for i in m]
    got = method.query_factor(m, 64)
    assert got is not None
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)


def test_defaults_of_temperatures() -> None:
    m = torch.tensor([5])
    scaled = get_method("temperature").from_options(scale=4.0).query_factor(m, 64)
    assert scaled is not None
    assert float(scaled) == pytest.approx(0.1 * math.log(4) + 1, rel=1e-12)
    unnamed = get_method("temperature").from_options().query_factor(m + 1000, 64)
    assert unnamed is not None
    assert float(unnamed) == pytest.approx(math.log(1006) / math.log(64), rel=1e-12)
    started = get_method("temperature").from_options(law="ssmax").parameters_for(2, 2, 8, 1024)
    mean = sum(math.log(n) for n in range(1, 1025)) / 1024
    assert started["query_scale"].tolist() == pytest.approx([1 / mean] * 2, rel=1e-6)
    # A trained length of one token has no logarithm to divide by.
    assert torch.isfinite(log_n_factor(m, 1)).all()


# Relative keys, xPos and RoPE with biases against the papers.


def relative_scores(
    method: RelativeKeys, q: Tensor, k: Tensor, parameters: dict[str, Tensor]
) -> Tensor:
    """The scores that `RelativeKeys` promises, (heads, length, length), unscaled; q, k (heads, length, d)."""
    heads, length, dim = q.shape
    m = torch.arange(length, dtype=torch.float64)
    embedded = method.relative((m[:, None] - m).clamp(min=0), heads, dim, parameters)
    assert embedded.shape in ((1, length, length, dim), (heads, length, length, dim))
    u, v = method.content_bias(parameters), method.position_bias(parameters)
    content = q if u is None else q + u[:, None]
    return content @ k.mT + torch.einsum(
        "hmd,hmnd->hmn", q if v is None else q + v[:, None], embedded.expand(heads, -1, -1, -1)
    )


def test_relative_keys_equal_the_papers() -> None:
    torch.manual_seed(0)
    heads, length, dim = 3, 24, 8
    q, k = torch.randn(2, heads, length, dim, dtype=torch.float64)
    for method in (Shaw(max_distance=5), TransformerXL()):
        start = {name: v.double() for name, v in method.initial(heads, dim, 64).items()}
        learned = {name: torch.randn_like(v) for name, v in start.items()}
        got = relative_scores(method, q, k, learned)
        for h in range(heads):
            for m in range(length):
                for n in range(m + 1):
                    args = (q[h, m], k[h, n], m - n)
                    if isinstance(method, Shaw):
                        want = naive.shaw_score(*args, learned["table"])
                    else:
                        u, v, weight = (learned[name][h] for name in ("u", "v", "weight"))
                        want = naive.transformer_xl_score(*args, u, v, weight)
                    assert float(got[h, m, n]) == pytest.approx(want, abs=1e-9)
        # At first they add nothing.
        torch.testing.assert_close(relative_scores(method, q, k, start), q @ k.mT)


def test_where_relative_keys_become_constant() -> None:
    method = Shaw(max_distance=5)
    assert method.constant_from() == 5
    table = torch.randn(6, 4)
    far = method.relative(torch.tensor([5.0, 6.0, 99.0]), 2, 4, {"table": table})
    assert torch.equal(far, table[5].expand(1, 3, 4))
    assert TransformerXL().constant_from() is None
    with pytest.raises(PosencError, match="head_dim"):
        TransformerXL().initial(2, 7, 64)


@pytest.mark.parametrize("method", [Shaw(), TransformerXL()], ids=lambda method: method.name)
def test_relative_keys_can_be_trained_from_zero(method: RelativeKeys) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 20, 8, dtype=torch.float64)
    start = {n: v.double().requires_grad_() for n, v in method.initial(2, 8, 64).items()}
    scores = relative_scores(method, q, k, start)
    (scores * torch.randn_like(scores)).sum().backward()
    moved = {n for n, v in start.items() if v.grad is not None and v.grad.abs().max() > 0}
    assert moved == set(start) - {"v"}  # v meets W R_r, which is zero until W has moved


def test_xpos_decays_as_published() -> None:
    torch.manual_seed(0)
    length, frequencies = 30, [1.0, 0.3, 0.05]
    q, k = torch.randn(2, length, 6, dtype=torch.float64)
    method, position = XPos(scale_base=16), torch.arange(length)
    z = [(2 * i / 6 + 0.4) / 1.4 for i in range(3)]
    at_base = method.query_scale(torch.tensor(method.scale_base), 6, 0)
    assert at_base.tolist() == pytest.approx(z, rel=1e-12)
    for origin in (0, 13, 29):
        scales = (method.query_scale(position, 6, origin), method.key_scale(position, 6, origin))
        q_scale, k_scale = (scale.repeat(1, 2) for scale in scales)
        scaled_q = turn(q, position, frequencies) * q_scale
        scores = scaled_q @ (turn(k, position, frequencies) * k_scale).T
        for m in range(0, length, 3):
            for n in range(m + 1):
                want = naive.xpos_score(q[m], k[n], m - n, frequencies, base=16)
                assert float(scores[m, n]) == pytest.approx(want, abs=1e-9)


def test_xpos_factors_stay_finite_from_the_chunk() -> None:
    """With the origin at the first query of a chunk, half a million keys give no overflow in float32."""
    method, chunk, end = XPos(), 1024, 500_000
    queries = method.query_scale(torch.arange(end - chunk, end), 64, end - chunk)
    keys = method.key_scale(torch.arange(end), 64, end - chunk)
    most = 3.5 ** (chunk / 512)
    assert queries.max() <= 1
    assert keys.max() <= most
    assert 0 < keys[end - chunk].min() <= 1
    assert not torch.isfinite(method.key_scale(torch.tensor([end]), 64, 0).float()).all()


def test_rope_bias_starts_as_zeros() -> None:
    start = RopeBias().parameters_for(4, 2, 4, 64)
    assert start["a"].shape == (4, 4)
    assert start["b"].shape == (2, 4)
    assert not any(value.any() for value in start.values())
