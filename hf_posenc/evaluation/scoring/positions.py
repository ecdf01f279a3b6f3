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
from hf_posenc.seams.handover import tables_in_place
from hf_posenc.seams.held import TableEnd

_TOKENS = 4  # of the forward that shows which embeddings are read by position


class _Lookups(TorchFunctionMode):
    """Keeps the number of positions of everything that is read by position.

    Attributes:
        embeddings: Of embeddings that are parameters.
        tables: Of other tables that are indexed; some of them grow when they are too short.
        ends: Of tensors whose last `_TOKENS` elements are taken, such as biases by distance; likewise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.tables, self.ends = list[int](), list[int](), list[int]()

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.embedding and len(args) > 1 and isinstance(args[1], nn.Parameter):
            if (first := _first_row(args[0])) is not None:
                self.embeddings.append(args[1].shape[0] - first)  # OPT's first position is row 2
        elif function is torch.Tensor.__getitem__ and args[0].is_floating_point():
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if isinstance(index[0], torch.Tensor) and (first := _first_row(index[0])) is not None:
                self.tables.append(args[0].shape[0] - first)
            size = args[0].shape[-1] if args[0].dim() else 0
            last = index[-1] if len(index) == args[0].dim() else None
            if isinstance(last, slice) and last == slice(size - _TOKENS, None):
                self.ends.append(size)
        return function(*args, **(kwargs or {}))


def _first_row(index: torch.Tensor) -> int | None:
    """Return the first of `_TOKENS` rising numbers; `None` for other numbers."""
    if index.numel() != _TOKENS or index.is_floating_point() or index.dtype == torch.bool:
        return None
    rows: list[int] = index.flatten().tolist()
    return rows[0] if rows == list(range(rows[0], rows[0] + _TOKENS)) else None


def position_limit(model: nn.Module) -> int | None:
    """Return the most tokens that a model, patched or not, has positions for; `None` where nothing ends.

    Rotations, distances and recurrences have no end. Embeddings of positions (GPT-2, OPT, BERT) and precomputed tables
    of sines and cosines (GPT-J, CTRL) or of distances (MPT) do. An embedding is one of positions if equal tokens read
    rising rows of it: that is tried on a few tokens, and only on a model with more embeddings than that of its tokens,
    or without a rotary table. Any other table is tried just past its end, since some grow.
    """
    growing, tables = tables_in_place(unwrap(model)), _tables(model)
    limits = [
        table.tensor().shape[0]
        for table in tables
        if isinstance(table, SinCosTable) and id(table.module) not in growing
    ]
    tokens, inner = input_embeddings(model), unwrap(model, adapters=False)
    others = any(isinstance(each, nn.Embedding) and each is not tokens for each in model.modules())
    if others or not tables:
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        ids = torch.full((1, _TOKENS), 0 if padding else 1, device=input_device(model))
        with evaluation_mode(model), torch.no_grad():
            try:
                with _Lookups() as lookups:
                    inner(input_ids=ids)
            except Exception:  # whatever it is, the measurement meets and reports it
                return min(limits, default=None)
            limits += _patched_ends(inner) or lookups.embeddings
            limits += [size for size in {*lookups.tables} if _ends_at(inner, ids[:, :1], size)]
            # A bias by distance, made anew in every forward, ends where the config says (MPT).
            limits += [size for size in {*lookups.ends} if size == _longest(inner)]
    return min(limits, default=None)


def _patched_ends(model: nn.Module) -> list[int]:
    """Return the positions of patched tables, which a short text may read at other rows."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return [hook.positions for hook in hooks if isinstance(hook, TableEnd)]


def _tables(model: nn.Module) -> list[Any]:
    try:
        return list(tables_of(unwrap(model)))
    except Exception:  # a model that cannot be patched, or with a config of its own kind
        return []


def _ends_at(model: nn.Module, ids: torch.Tensor, position: int) -> bool:
    """Return whether a token at this position is refused, and the one before it is not."""
    try:
        for place in (position - 1, position):
            model(input_ids=ids, position_ids=torch.full_like(ids, place))
    except IndexError:
        return place == position
    except Exception:  # it takes no positions
        return False
    return False


def _longest(model: Any) -> int | None:
    length: int | None = getattr(model.config, "max_seq_len", None)
    return length


def too_long(model: nn.Module, tokens: int, limit: int) -> PosencError:
    """Return the error for a text of more tokens than `position_limit`."""
    way = "Give shorter lengths, or a method that makes its table longer, such as interpolate."
    if any(isinstance(table, SinCosTable) for table in _tables(model)):
        way = "Give shorter lengths, or a method that extends its table, such as yarn."
    inner: Any = unwrap(model)
    if _longest(inner) == limit:
        way = f"Give shorter lengths, or raise max_seq_len in its config: model.config.max_seq_len = {tokens}."
    name = type(inner).__name__
    return PosencError(f"{tokens:,} tokens: {name} has positions for {limit:,}. {way}")
