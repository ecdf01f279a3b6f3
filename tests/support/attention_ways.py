"""The ways to run a text, all of which give the logits of one forward over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from tests.support import zoo
from tests.support.zoo import CACHE

Way = Callable[[PreTrainedModel, Tensor], Tensor]


def in_steps(
    model: PreTrainedModel, ids: Tensor, sizes: list[int], cache: Any = None, **more: Any
) -> Tensor:
    """Logits of a text that is run piece by piece with a cache; `more` is per token."""
    parts, start = [], 0
    for size in sizes:
        piece = slice(start, start + size)
        now = {k: v[:, : piece.stop] if "mask" in k else v[:, piece] for k, v in more.items()}
        given = now if cache is None else {**now, CACHE: cache}
        part, cache = zoo.run(model, ids[:, piece], use_cache=True, **given)
        parts.append(part)
        start = piece.stop
    return torch.cat(parts, 1)


def stepwise(total: int, *first: int) -> list[int]:
    """Sizes of pieces: `first`, eight single tokens, most of the rest at once, and four single tokens."""
    return [*first, *[1] * 8, total - sum(first) - 12, *[1] * 4]


def padded(ids: Tensor, left: int, right: int) -> dict[str, Tensor]:
    """A batch of three rows, of which row 1 is the text between `left` and `right` pads."""
    length = ids.shape[1] + left + right
    rows = zoo.tokens(length, batch=3, seed=5)
    rows[1, left : length - right] = ids
    mask = torch.ones_like(rows)
    mask[1, :left], mask[1, length - right :] = 0, 0
    mask[2, :3] = 0  # another row with another padding
    return {"ids": rows, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def token_by_token(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return in_steps(model, ids, [5] + [1] * (ids.shape[1] - 5))


def chunked(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return in_steps(model, ids, [7] * (ids.shape[1] // 7) + [ids.shape[1] % 7])


def static(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + 6)
    return in_steps(model, ids, stepwise(ids.shape[1], 11, 8), cache)


def in_batch(
    name: str, left: int, right: int, *first: int, cached: str = "", positions: bool = True
) -> Way:
    """A way to run a text between pads: at once, or after `first` in steps with a cache of a kind."""

    def run(model: PreTrainedModel, ids: Tensor) -> Tensor:
        batch, length = padded(ids, left, right), ids.shape[1]
        rows = batch.pop("ids")
        if not positions:
            del batch["position_ids"]
        if cached:
            total = length + left + right
            static = StaticCache(config=model.config, max_cache_len=total + 4)
            sizes = [total - 7, 1, 1, 5] if right else stepwise(total, *first)
            logits = in_steps(model, rows, sizes, static if cached == "static" else None, **batch)
        else:
            logits = zoo.logits(model, rows, **batch)
        return logits[1:2, left : left + length]

    run.__name__ = name
    return run


left_padded, right_padded = in_batch("left_padded", 6, 0), in_batch("right_padded", 0, 5)
left_masked = in_batch("left_masked", 6, 0, positions=False)
"""As `left_padded`, with the mask alone."""


@torch.no_grad()
def cropped(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """A draft of which the last tokens were wrong, as in assisted decoding."""
    cache, wrong = DynamicCache(config=model.config), ids.clone()
    wrong[:, 20:26] = 7
    first = model(input_ids=wrong[:, :26], **{CACHE: cache}).logits[:, :20]
    cache.crop(-6)
    rest = [model(input_ids=ids[:, 20:28], **{CACHE: cache}).logits]
    rest.append(model(input_ids=ids[:, 28:], **{CACHE: cache}).logits)
    return torch.cat((first, *rest), 1).double()


@torch.no_grad()
def packed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The text as the second of three documents in one row."""
    length = ids.shape[1]
    rows = torch.cat((zoo.tokens(9, seed=2), ids, zoo.tokens(6, seed=3)), 1)
    positions = torch.cat([torch.arange(n) for n in (9, length, 6)])[None]
    return zoo.logits(model, rows, position_ids=positions)[:, 9 : 9 + length]


@torch.no_grad()
def interleaved(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Two texts that grow in turns, each with a cache of its own."""
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    texts, parts, start = (ids, zoo.tokens(ids.shape[1], seed=8)), [], 0
    for size in stepwise(ids.shape[1], 12, 7):
        piece = slice(start, start + size)
        outs = [
            model(input_ids=text[:, piece], **{CACHE: cache}).logits
            for text, cache in zip(texts, caches, strict=True)
        ]
        parts.append(outs[0])
        start += size
    return torch.cat(parts, 1).double()


def static_again(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """A static cache that held another text of the same length, in the same memory."""
    length = ids.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length + 2)
    sizes = stepwise(length, 19)
    in_steps(model, zoo.tokens(length, seed=6), sizes, cache)
    cache.reset()
    return in_steps(model, ids, sizes, cache)


@torch.no_grad()
def chosen_rows(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """A batch whose rows change places and go, as in beam search and contrastive search."""
    rows, cache = zoo.tokens(ids.shape[1], batch=3, seed=5), DynamicCache(config=model.config)
    rows[2] = ids
    parts = [model(input_ids=rows[:, :22], **{CACHE: cache}).logits[2:]]
    parts.append(model(input_ids=rows[:, 22:23], **{CACHE: cache}).logits[2:])
    order: Any = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    rows = rows[order]
    parts.append(model(input_ids=rows[:, 23:24], **{CACHE: cache}).logits[:1])
    cache.batch_select_indices(torch.tensor([0]))
    for i in range(24, ids.shape[1]):
        parts.append(model(input_ids=rows[:1, i : i + 1], **{CACHE: cache}).logits)
    return torch.cat(parts, 1).double()


WAYS: tuple[Way, ...] = (
    *(token_by_token, chunked, static, left_padded),
    in_batch("left_padded_in_steps", 6, 0, 11, 9, cached="dynamic"),
    in_batch("left_padded_static", 6, 0, 9, cached="static"),
    left_masked,
    # The first pieces are a whole chunk of padding.
    in_batch("left_masked_in_steps", 6, 0, 4, 7, 9, cached="dynamic", positions=False),
    in_batch("left_masked_static", 6, 0, 9, cached="static", positions=False),
    in_batch("both_masked", 4, 5, positions=False),
    in_batch("both_masked_in_steps", 4, 5, cached="dynamic", positions=False),
    *(right_padded, cropped, packed, interleaved, static_again, chosen_rows),
)


def natively(model: PreTrainedModel, way: Way, ids: Tensor) -> float | None:
    """Return how far an unpatched model is off in a way to run a text; `None` if it cannot run so."""
    try:
        return zoo.relative_difference(way(model, ids), zoo.logits(model, ids))
    except Exception:
        return None
