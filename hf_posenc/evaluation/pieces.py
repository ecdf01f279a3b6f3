"""A text in pieces: where they begin and end, and what carries the past from one to the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

CACHES = ("past_key_values", "cache_params", "state")
"""What families call their cache, as an output and as an argument."""

LEAST = 2
"""Tokens in a piece. A single one would be a decoding step, for which some families have another formula."""


class NoCacheError(Exception):
    """A forward returned no cache."""


@dataclass(frozen=True)
class Pieces:
    """How to run a text in pieces.

    Attributes:
        size: Tokens in a piece.
        positions: Whether the model must be told where a piece stands; most find out from the cache.
        cache: Makes the cache that the first piece must be given; most models make one themselves.
    """

    size: int
    positions: bool = False
    cache: Callable[[], Cache] | None = None

    def bounds(self, tokens: int) -> list[tuple[int, int]]:
        """Where each piece begins and ends. A last token that would be alone belongs to the piece before."""
        edges = [*range(0, tokens, self.size), tokens]
        if len(edges) > 2 and edges[-1] - edges[-2] < LEAST:
            del edges[-2]
        return list(itertools.pairwise(edges))

    def arguments(self, output: Any, windows: Tensor, begin: int, end: int) -> dict[str, Any]:
        """What the forward of a piece is given beside its token ids.

        Args:
            output: What the forward of the piece before returned; `None` for the first.
            windows: Token ids, shape (windows, n).
            begin: The piece's first token.
            end: One past its last.

        Raises:
            NoCacheError: The piece before left no cache.
        """
        given: dict[str, Any] = {"use_cache": True}
        if begin:
            names = (name for name in CACHES if getattr(output, name, None) is not None)
            name = next(names, None)
            if name is None:
                raise NoCacheError
            given[name] = getattr(output, name)
        elif self.cache is not None:
            given["past_key_values"] = self.cache()
        if self.positions:
            places = torch.arange(begin, end, device=windows.device)
            given["position_ids"] = places.expand(len(windows), -1)
        return given
