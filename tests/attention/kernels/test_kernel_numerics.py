"""Kernels against float64, pair by pair: in Triton's interpreter, or on the GPU where there is one.

`scripts/check_kernels.sh` runs them in an environment of their own.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.kernel_cases import RUNS

if not RUNS:
    pytest.skip(
        "needs a GPU or Triton's interpreter: scripts/check_kernels.sh", allow_module_level=True
    )

from hf_posenc.attention.kernels import decode
from hf_posenc.attention.rotation import Layout
from tests.support import attention_references as naive
from tests.support import kernel_cases
from tests.support.kernel_cases import BOUND, Case, error, reference

kernel_cases.multiply_bfloat16()

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
    monkeypatch.setattr(decode, "_splits", lambda device, programs, blocks: min(2, blocks))


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_a_step(case: Case) -> None:
    encoding = case.encoding()
    call = case.call(encoding)
    assert decode.accepts(call, encoding)
    out, weights = decode.run(call, encoding)
    assert weights is None
    assert out.dtype == case.dtype
    assert error(out, reference(case, call, encoding)) < BOUND[case.dtype]
