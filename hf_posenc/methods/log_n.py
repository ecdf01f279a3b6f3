"""log n scaling: attention sharpened as the text grows past the original context."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class LogN(Method):
    """log n scaling (Su 2021, kexue.fm 8823): the query at m times `max(1, ln(m+1) / ln L)`.

    Softmax over n keys flattens as n grows; scores that grow with ln n keep the entropy of training.
    Nothing changes up to the original length L. The method has a seam of its own and composes with any
    other; `log_n=True` of the rotary bands is the same.
    """

    name = "log_n"
    aliases = ("logn",)
    summary = "the query times max(1, ln(m+1) / ln L)"
    source = "Su 2021, kexue.fm 8823"
    needs = "nothing"
    seam = "query"
    follows_text = True

    @property
    def reads_rotation(self) -> bool:
        return False

    def query_factor(self, m: Tensor, original: int) -> Tensor:
        """Return the factor on the query at m, of m's shape; see `log_n_factor`."""
        return log_n_factor(m, original)


def log_n_factor(m: Tensor, original: int) -> Tensor:
    """Return `max(1, ln(m+1) / ln L)`, of m's shape, float64 (float32 on MPS).

    Args:
        m: Positions from 0, an integer tensor of any shape.
        original: The original context length L, in tokens.
    """
    # A trained length of one token would divide by zero and has no meaning.
    return ((real(m) + 1).log() / math.log(max(original, 2))).clamp(min=1.0)


def real(position: Tensor) -> Tensor:
    """Return positions as float64, which is exact for integers; as float32 on MPS, which has no float64."""
    return position.to(torch.float32 if position.device.type == "mps" else torch.float64)
