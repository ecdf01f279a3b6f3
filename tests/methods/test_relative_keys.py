"""Relative keys, xPos and RoPE with biases against the papers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods import RelativeKeys, RopeBias, Shaw, TransformerXL, XPos
from tests.support import attention_references as naive
from tests.support.attention_methods import turn


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
    position = q if v is None else q + v[:, None]
    return content @ k.mT + torch.einsum(
        "hmd,hmnd->hmn", position, embedded.expand(heads, -1, -1, -1)
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
        scaled_q = turn(q, position, frequencies) * method.query_scale(position, 6, origin).repeat(
            1, 2
        )
        scaled_k = turn(k, position, frequencies) * method.key_scale(position, 6, origin).repeat(
            1, 2
        )
        scores = scaled_q @ scaled_k.T
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
