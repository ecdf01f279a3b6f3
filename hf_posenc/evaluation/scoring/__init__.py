"""Losses token by token, their cost, and errors that mean that memory ran out."""

from __future__ import annotations

import gc

from hf_posenc.errors import PosencError, one_line

OUT_OF_MEMORY = "out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: CUDA's, the system's, or that of PyTorch's allocator for CPUs."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    texts = ("not enough memory", OUT_OF_MEMORY, "can't allocate memory")
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)


def reason_of(error: Exception) -> str:
    """Return the reason that results and reports give for a missing number."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    message = one_line(error)
    return message if isinstance(error, PosencError) else f"{type(error).__name__}: {message}"


def release(error: Exception) -> None:
    """Free the memory of a computation that an error ended."""
    import torch

    error.__traceback__ = None  # its frames hold the tensors that are to be freed
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
