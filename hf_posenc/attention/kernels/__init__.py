"""Triton kernels for attention that no library's kernel computes. Optional: nothing here imports Triton to be imported.

**A step of a generation** (`decode`) reads every cached key once and is bound by memory. Two launches do it:
`decode_share`, whose programs share the keys of one key head, each for the queries of all heads of the group (flash
decoding), and `merge_shares`, which weighs their parts of a query by log-sum-exps, with the sinks of GPT-OSS.

Keys are cached as the *last* band has them. A pair's band follows from its two positions, which are read beside the
keys (8 bytes a key beside 512 of key and value), as is the mask: the result is exact for any padding, cache, crop or
beam, and no parameter of a launch depends on a value on the device, so that a CUDA graph can replay it. A block without
a visible pair costs its positions and mask only.

Near keys are turned inside the kernel, from the position at which they are cached to that of the near band. Both sides
of a pair are turned less the shift of the first query, which changes no score: the angles are those of distances within
the window, and small, so float32 is precise at any length. `bands` reads the shifts off the position maps of a method,
by probing, as `min(top, start + slope * x + step * (x // group))`: of this form are ReRoPE (slope 1), Leaky ReRoPE
(slope 1 - 1/k), Self-Extend (slope 1, step -1 a group), STRING (start), attention sinks (slope -1 from the end of the
window on, so top 0) and dual chunk attention (a sawtooth). A method with another map is not accepted.

Biases (`biases`) are closed forms of the distance, from the trained parameters themselves, or tables by distance.

**A whole text under a bias** (`biased`) is flash attention with a bias in registers. For ALiBi and KERPLE a first
launch finds the distance of each head beyond which all keys together have at most a share of 1e-8, provably from the
norms of queries and keys, and writes it where the second launch reads it.

**Its backward** computes each tile of weights again from the log-sum-exps: over blocks of queries, then over blocks of
keys for all heads of a group. Gradients of trained parameters are summed in a fixed order, without atomic additions, so
that runs are alike: those of KERPLE's closed forms beside those of the queries, those of a table by a third launch
along the diagonals of the score matrix, where a distance has the same place in every tile. FIRE, which reads the
query's position too, is left to the general path.

**Around fused attentions** (`parts`), which take queries and keys turned, one launch turns both by tables that all
layers of a forward share, and one merges the parts of a softmax.

CONTRIBUTING.md says how they are proven without a GPU. `attention/engine.py` chooses among them.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding

FEATURES = 256
"""Most features of a head: a tile of keys and one of values have to fit into registers."""


@functools.lru_cache(maxsize=1)
def _installed() -> bool:
    """True if there is a Triton; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def available(device: torch.device) -> bool:
    """True if kernels run on a device: NVIDIA's, and Triton is installed."""
    return device.type == "cuda" and torch.version.hip is None and _installed()


def takes(call: Call, encoding: Encoding) -> bool:
    """True if the tensors of a call are such as kernels read, and no weights or dropout are requested."""
    if call.dropout or call.weights or not encoding.plan.shares_keys or encoding.bidirectional:
        return False
    if any(x.stride(-1) != 1 for x in (call.query, call.key, call.value)):
        return False
    if call.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    return max(call.query.shape[-1], call.value.shape[-1]) <= FEATURES


def trains_bias(encoding: Encoding) -> bool:
    """True if parameters of the encoding get gradients."""
    parameters = encoding.parameters or {}  # a module in a model
    return torch.is_grad_enabled() and any(parameters[name].requires_grad for name in parameters)


def trains(call: Call, encoding: Encoding) -> bool:
    """True if a tensor of the call, or a parameter of the encoding, gets gradients."""
    tensors = (call.query, call.key, call.value)
    given = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return given or trains_bias(encoding)


def unwatched(x: Tensor) -> bool:
    """True if no compiler, mode or gradient has to see an operator on a tensor of a GPU.

    Its function is then called as it is: PyTorch's wrapper of an operator that is written in Python costs the host
    about as much as the function.
    """
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and type(x) is Tensor
        and not (x.requires_grad and torch.is_grad_enabled())
        and _get_current_dispatch_mode() is None
    )


def output_like(query: Tensor, value: Tensor) -> Tensor:
    """Return an empty output (batch, heads, queries, value_dim) in the memory layout of transformers."""
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)


def strided(x: Tensor | None) -> tuple[Tensor | None, tuple[int, ...] | None]:
    """Return a tensor and its strides, as kernels take them."""
    return x, None if x is None else x.stride()


def padded(count: int) -> int:
    """Return the size of a tile for that many features or rows: a power of two, at least 16 for a product; 0 for 0."""
    return max(16, 1 << (count - 1).bit_length()) if count else 0


def precision(dtype: torch.dtype) -> str:
    """Return the precision of products: that of float32 is not lowered to TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"
