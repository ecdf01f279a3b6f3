"""Compile every call of FlashAttention-4 that this package makes, for Hopper and Blackwell; no GPU is needed.

    python -m scripts.compile_flash4 90        for one of them, 90 or 100
    bash scripts/check_kernels.sh              makes the environment, and runs this too

Tensors are fake: names, shapes and strides of arguments and results are checked by the library and here, no number is.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_posenc.attention.fused import Saved, Segments, Shape
from hf_posenc.attention.fused.flash4 import Flash4
from hf_posenc.attention.kernels.biased import tabled

PROCESSORS = {"90": 132, "100": 148}
"""Multiprocessors of an H100 and of a B200, by compute capability."""
HEADS, KEY_HEADS, FEATURES = 32, 8, 128
ROWS, KEYS = 1024, 1200
SHAPES = {
    "all keys": Shape(),
    "causal": Shape(causal=True),
    "a window": Shape(causal=True, window=128),
    "a window, soft cap": Shape(causal=True, window=128, softcap=50.0),
}


def empty(*sizes: int) -> Tensor:
    """Return a fake tensor of a GPU."""
    return torch.empty(*sizes, device="cuda", dtype=torch.bfloat16)


def check(shape: Shape) -> None:
    """Compile a forward and any backward, and compare the shapes of what they return."""
    query, key = empty(ROWS, HEADS, FEATURES), empty(KEYS, KEY_HEADS, FEATURES)
    flash = Flash4()
    out, lse, state = flash.attend(query, key, key, shape)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (lse.shape, lse.dtype) == ((HEADS, ROWS), torch.float32)
    if shape.segments is not None and shape.segments.counts is not None:
        return  # sequences that share keys have no backward together
    saved = Saved(query, key, key, out, lse)
    gradients = flash.attend_backward(out, saved, shape, state)
    assert [x.shape for x in gradients] == [query.shape, key.shape, key.shape]


def main() -> None:
    """Compile all calls, one by one."""
    target, processors = f"sm_{sys.argv[1]}", PROCESSORS[sys.argv[1]]
    given = {"ARCH": target, "NUM_SMS": str(processors), "CUTE_DSL_CACHE_ENABLED": "0"}
    os.environ |= {f"FLASH_ATTENTION_{name}": value for name, value in given.items()}
    os.environ["CUTE_DSL_ARCH"] = f"{target}a"  # all are read by the library's import
    import cutlass

    asked = SimpleNamespace(get_device_multiprocessor_count=lambda: processors)
    cutlass.utils.HardwareInfo = lambda: asked  # in the place of a driver
    began = time.monotonic()
    with FakeTensorMode():
        several = Segments((0, 10, 300, ROWS), (0, 10, 400, KEYS))
        starts = (torch.empty(4, dtype=torch.int32, device="cuda") for _ in range(2))
        several._tensors[torch.device("cuda", 0)] = tuple(starts)
        sharing = Segments((0, 10, 300, ROWS), (0, 0, 0, 0), (0, 400, KEYS))
        three = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (4, 4, 3))
        sharing._tensors[torch.device("cuda", 0)] = tuple(three)
        check(Shape(segments=sharing))
        check(Shape(segments=sharing, softcap=50.0))
        print(f"several that share keys: {time.monotonic() - began:.0f} s", flush=True)
        for what, segments in (("one text", Segments((0, ROWS), (0, KEYS))), ("several", several)):
            for name, shape in SHAPES.items():
                if (what, name) != ("several", "all keys"):  # no method calls it so
                    check(replace(shape, segments=segments))
                    print(f"{what}, {name}: {time.monotonic() - began:.0f} s", flush=True)
        batch = [empty(2, n, h, FEATURES).transpose(1, 2) for n, h in ((ROWS, HEADS), (KEYS, KEY_HEADS))]  # fmt: skip
        table = torch.empty(HEADS, KEYS, device="cuda")
        out = tabled(batch[0], batch[1], batch[1], table, 0.1)
        assert out.shape == batch[0].shape
    print(f"Every call of FlashAttention-4 compiles: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
