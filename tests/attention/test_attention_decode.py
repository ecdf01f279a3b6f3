"""The decode kernel against a naive float64 evaluation, row by row."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_posenc.attention.decode import decode
from tests.support.attention_cases import (
    SCALING,
    SIZES,
    TOLERANCE,
    Sizes,
    attend_naively,
    check,
    leaf,
    scores_of,
)


def _naive_decode(
    scores: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads, (rows, known) = scores.shape[1], scores.shape[2:]
    weights = torch.zeros_like(scores)
    for head in range(heads):
        for row in range(rows):
            for batch in range(scores.shape[0]):
                seen = mask.expand(scores.shape[0], 1, rows, known)[batch, 0, row]
                logits = scores[batch, head, row][seen]
                if sinks is not None:
                    logits = torch.cat((logits, sinks[head : head + 1]))
                weights[batch, head, row, seen] = logits.softmax(-1)[: int(seen.sum())]
    return weights @ value.repeat_interleave(heads // value.shape[1], 1), weights


@given(SIZES.filter(lambda sizes: sizes.known > 3), st.integers(1, 4), st.data())
def test_decode(sizes: Sizes, rows: int, data: st.DataObject) -> None:
    wanted = {
        name: data.draw(st.booleans(), name) for name in ("near", "bias", "mask", "cap", "sinks")
    }
    width = data.draw(st.integers(1, sizes.known), "width")
    batch = data.draw(st.sampled_from([1, sizes.batch]), "mask rows")
    q, q_near = (leaf(sizes.batch, sizes.heads, rows, sizes.features) for _ in range(2))
    k, v, tail = (
        sizes.key(),
        sizes.value(),
        leaf(sizes.batch, sizes.key_heads, width, sizes.features),
    )
    bias = torch.randn(1, sizes.heads, rows, sizes.known, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(sizes.heads, dtype=torch.float64, requires_grad=True)
    is_near = torch.rand(batch, 1, rows, width) < 0.6
    mask = torch.rand(batch, 1, rows, sizes.known) < 0.7
    mask[0, :, 0] = False  # a row that sees nothing

    def kernel(*inputs: Tensor) -> Tensor:
        q, q_near, k, tail, v, bias, sinks = inputs
        out, weights = decode(
            q,
            k,
            v,
            SCALING,
            near=(q_near, tail, is_near) if wanted["near"] else None,
            bias=bias if wanted["bias"] else None,
            mask=mask if wanted["mask"] else None,
            softcap=2.0 if wanted["cap"] else None,
            sinks=sinks if wanted["sinks"] else None,
        )
        return torch.cat((out, weights.to(out.dtype)), -1)

    def naive(*inputs: Tensor) -> Tensor:
        q, q_near, k, tail, v, bias, sinks = inputs
        scores = scores_of(q, k)
        if wanted["near"]:
            last = torch.where(is_near, scores_of(q_near, tail), scores[..., -width:])
            scores = torch.cat((scores[..., :-width], last), -1)
        scores = 2.0 * (scores / 2.0).tanh() if wanted["cap"] else scores
        scores = scores + bias if wanted["bias"] else scores
        seen = mask if wanted["mask"] else torch.ones_like(mask)
        return torch.cat(_naive_decode(scores, v, seen, sinks if wanted["sinks"] else None), -1)

    check(kernel, naive, [q, q_near, k, tail, v, bias, sinks])


def test_decode_in_halves_keeps_the_bias_in_float32() -> None:
    """A bias in the thousands, as ALiBi has at the far end of 16k tokens, has a step of 8 in bfloat16."""
    q, k, v = (torch.randn(1, 2, length, 16).bfloat16() for length in (1, 64, 64))
    bias = torch.randn(1, 2, 1, 64) - 2000
    expected = attend_naively(
        scores_of(q.double(), k.double()) + bias, torch.tensor(True), v.double()
    )
    actual = decode(q, k, v, SCALING, bias=bias)[0].double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_the_softmax_of_halves_is_taken_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, length, 16).bfloat16() for length in (1, 300, 300))
    out, weights = decode(q, k, v, SCALING)
    assert out.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 1), rtol=0, atol=1e-6)


def test_decode_compiles_in_one_graph() -> None:
    q, k, v, tail = (torch.randn(2, heads, n, 8) for heads, n in ((4, 1), (2, 40), (2, 40), (2, 9)))
    is_near, mask = torch.rand(1, 1, 1, 9) < 0.5, torch.rand(2, 1, 1, 40) < 0.7
    bias, sinks = torch.randn(4, 1, 40), torch.randn(4)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = (q.flip(-1), tail, is_near)
        return decode(q, k, v, SCALING, near=near, bias=bias, mask=mask, softcap=3.0, sinks=sinks)[
            0
        ]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), step(q, k, v))
