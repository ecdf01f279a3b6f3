"""The most tokens that a model has positions for: the rows of a table that ends, where it has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.decoder import (
    evaluation_mode,
    input_device,
    input_embeddings,
    without_cache,
)
from hf_posenc.model.discovery import SinCosTable, tables_of
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.seams.handover import tables_in_place
from hf_posenc.seams.held import TableEnd
from hf_posenc.seams.probes import TOKENS, ordinary_tokens
from hf_posenc.seams.traces import read_tables, rows_read


def position_limit(model: nn.Module) -> int | None:
    """Return the most tokens that a model, patched or not, has positions for; `None` where nothing ends.

    Rotations, distances and recurrences have no end. Embeddings of positions (GPT-2, OPT, BERT) and precomputed tables
    of sines and cosines (GPT-J, CTRL) or of distances (MPT) do. A trace of what is read by position finds them; it is
    made of a model with more embeddings than that of its tokens, or without a rotary table.
    """
    inner: Any = unwrap(model, adapters=False)
    growing, tables = tables_in_place(unwrap(model)), _tables(model)
    limits = [
        table.tensor().shape[0]
        for table in tables
        if isinstance(table, SinCosTable) and id(table.module) not in growing
    ]
    tokens = input_embeddings(model)
    others = any(isinstance(each, nn.Embedding) and each is not tokens for each in model.modules())
    if others or not tables:
        # A patched table has a hook: a short text may read it at other rows.
        hooks = (hook for module in inner.modules() for hook in module._forward_pre_hooks.values())
        patched = [hook.positions for hook in hooks if isinstance(hook, TableEnd)]
        try:
            limits += patched or _ends(inner)
        except Exception:  # whatever it is, the measurement meets and reports it
            return min(limits, default=None)
        # A bias by distance, made anew in every forward, ends where the config says (MPT).
        if not tables and (longest := _longest(inner)) is not None:
            limits.append(longest)
    return min(limits, default=None)


def _ends(model: Any) -> Iterator[int]:
    """Yield the positions of every table of positions that a model reads."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tables = [reading for reading in read_tables(model) if reading.first is not None]
    reads = rows_read(model, ordinary_tokens(model, TOKENS)) if tables else {}
    for table in tables:
        tensor, last = tensors[table.name], max(int(row.max()) for _, row in reads[table.name])
        end = tensor.shape[table.axis] - (last - TOKENS + 1)
        # A buffer may grow when it is too short.
        if isinstance(tensor, nn.Parameter) or not _runs(model, end + 1):
            yield end


def _tables(model: nn.Module) -> list[Any]:
    try:
        return list(tables_of(unwrap(model)))
    except Exception:  # a model that cannot be patched, or with a config of its own kind
        return []


def _runs(model: Any, tokens: int) -> bool:
    ids = torch.ones(1, tokens, dtype=torch.int64, device=input_device(model))
    try:
        with evaluation_mode(model), torch.no_grad():
            model(input_ids=ids, **without_cache(model))
    except (IndexError, RuntimeError):
        return False
    return True


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
