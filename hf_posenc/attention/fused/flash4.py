"""FlashAttention-4 (package flash-attn-4), for Hopper and Blackwell GPUs: the fastest attention with windows.

Its calls are aligned to the bottom right, as those of PyTorch's flash attention; a row without keys has a log-sum-exp
of -inf. It compiles a kernel for some seconds at the first call of a form. Calls with one sequence have a batch
dimension, which is the faster form.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.fused import Attended, Gradients, Saved, Segments, Shape
from hf_posenc.attention.fused.pytorch import CudaFlash
from hf_posenc.files import cache_folder


class Flash4(CudaFlash):
    """`Fused` by FlashAttention-4."""

    name = "flash attention 4"
    softcaps = True
    largest = 128  # on both generations of GPUs

    def serves(self, device: torch.device, dtype: torch.dtype, features: int) -> bool:
        half = dtype in (torch.float16, torch.bfloat16)
        return features <= self.largest and half and device.type == "cuda" and _installed(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        tensors, options = _given((query, key, value), shape.sequences(query, key), shape)
        out, lse, *_ = interface()._flash_attn_fwd(*tensors, return_lse=True, **options)
        return out.view(query.shape), lse.view(lse.shape[-2:]), None

    def attend_backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        query, key, value, out, lse = saved
        given = (query, key, value, out, grad, lse.contiguous())
        tensors, options = _given(given, shape.sequences(query, key), shape)
        of_query, of_key, of_value, *_ = interface()._flash_attn_bwd(
            *tensors, deterministic=torch.are_deterministic_algorithms_enabled(), **options
        )
        return of_query.view_as(query), of_key.view_as(key), of_value.view_as(value)


def _given(
    tensors: tuple[Tensor, ...], segments: Segments, shape: Shape
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The tensors and options of a call."""
    window = shape.limits
    options: dict[str, Any] = {"softmax_scale": shape.scaling, "causal": window == (-1, 0)}
    if window[0] >= 0:
        options |= {"window_size_left": window[0], "window_size_right": window[1]}
    if shape.softcap is not None:
        options["softcap"] = shape.softcap
    if len(segments.queries) == 2:
        return tuple(x.unsqueeze(0) for x in tensors), options
    names = "max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"
    lengths = (*segments.longest, *segments.on(tensors[0].device))
    return tensors, options | dict(zip(names, lengths, strict=False))


@functools.cache
def interface() -> Any:
    """Return the module of FlashAttention-4's calls, which is slow to import."""
    # Else each process compiles again. What a user has set stays.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault(
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder() / "flash-attn-4")
    )
    from flash_attn.cute import interface

    return interface


@functools.cache
def _installed(device: torch.device) -> bool:
    try:
        if importlib.util.find_spec("flash_attn.cute.interface") is None:
            return False
    except ModuleNotFoundError:  # no package of that name, or another FlashAttention
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)
