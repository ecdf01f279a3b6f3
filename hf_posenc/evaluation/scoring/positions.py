"""The most tokens that a model has positions for: the rows of a table that ends, where it has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.decoder import evaluation_mode, input_device, input_embeddings
from hf_posenc.model.discovery import SinCosTable, tables_of
from hf_posenc.model.unwrapping import unwrap

_TOKENS = 4  # of the forward that shows which embeddings are read by position


class _Lookups(TorchFunctionMode):
    """Keeps, of every embedding that is read by position, the number of positions that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int] = []

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A parameter: tables that a model computes anew when they are too short are buffers.
        if function is F.embedding and len(args) > 1 and isinstance(args[1], nn.Parameter):
            rows = args[0].flatten().tolist()
            if rows == list(range(rows[0], rows[0] + _TOKENS)):
                self.limits.append(args[1].shape[0] - rows[0])  # OPT's first position is row 2
        return function(*args, **(kwargs or {}))


def position_limit(model: nn.Module) -> int | None:
    """Return the most tokens that a model, patched or not, has positions for; `None` where nothing ends.

    Rotations, distances and recurrences have no end. Embeddings of positions (GPT-2, OPT, BERT) and precomputed tables
    of sines and cosines (GPT-J) do. An embedding is one of positions if equal tokens read rising rows of it: that is
    tried on a few tokens, and only on a model with more embeddings than that of its tokens.
    """
    limits = [table.tensor().shape[0] for table in _sincos_tables(model)]
    tokens = input_embeddings(model)
    if any(isinstance(each, nn.Embedding) and each is not tokens for each in model.modules()):
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        ids = torch.full((1, _TOKENS), 0 if padding else 1, device=input_device(model))
        with evaluation_mode(model), torch.no_grad(), _Lookups() as lookups:
            try:
                unwrap(model, adapters=False)(input_ids=ids)
            except Exception:  # whatever it is, the measurement meets and reports it
                return min(limits, default=None)
        limits += lookups.limits
    return min(limits, default=None)


def _sincos_tables(model: nn.Module) -> list[SinCosTable]:
    try:
        return [table for table in tables_of(unwrap(model)) if isinstance(table, SinCosTable)]
    except Exception:  # a model that cannot be patched, or with a config of its own kind
        return []


def too_long(model: nn.Module, tokens: int, limit: int) -> PosencError:
    """Return the error for a text of more tokens than `position_limit`."""
    way = "No method extends position embeddings: give shorter lengths."
    if _sincos_tables(model):
        way = "Give shorter lengths, or a method that extends its table, such as yarn."
    name = type(unwrap(model)).__name__
    return PosencError(f"{tokens:,} tokens: {name} has positions for {limit:,}. {way}")
