"""Attention with a patch on vLLM's pages of keys, around the implementation that a layer has."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import Call, CausalMask
from hf_posenc.attention.encoding import GrowingPlan, MovingPlan
from hf_posenc.attention.engine import attend
from hf_posenc.engines.served import WINDOWED, plain
from hf_posenc.errors import UnsupportedModelError
from hf_posenc.model.attention import Layer
from hf_posenc.serve.requests import in_force

PAGES = {"CPUAttentionBackendImpl": "vLLM's CPU backend", "FlashAttentionImpl": "FLASH_ATTN"}
"""Implementations of attention whose pages of keys are read, and the names of their backends."""


def served_by(module: Any, layer: Layer, rows: Mapping[int, int]) -> None:
    """Let an attention layer of vLLM compute with a patch; its cache and kernels stay vLLM's own.

    Args:
        module: The layer.
        layer: Its patch, for queries and keys as the model rotates them.
        rows: The length of each request in tokens, by its row in the batch, where the patch follows it.

    Raises:
        UnsupportedModelError: A device, a cache or a kind of attention that the patch is not served on.
    """
    if plain(layer) and layer.encoding.query is None:
        return  # its rotary table is all that changed
    own = module.impl
    reason = None
    if type(own).__name__ not in PAGES:
        reason = (
            f"the plug-in reads the pages of {' and '.join(PAGES.values())}, not those of {type(own).__name__} "
            "(--attention-backend FLASH_ATTN on a GPU)"
        )
    elif own.sliding_window not in (-1, (-1, -1)) or own.alibi_slopes is not None:
        reason = f"the layer {WINDOWED}"
    if reason is not None:
        raise UnsupportedModelError(f"{module.layer_name} cannot be served with a patch: {reason}.")
    module.impl = PatchedAttention(own, layer, rows)


class PatchedAttention:
    """vLLM's implementation of one layer's attention, with a patch; all but its forward is the implementation's own.

    Args:
        own: The implementation.
        posenc: The patch, for queries and keys as the model rotates them.
        rows: As in `served_by`.
    """

    def __init__(self, own: Any, posenc: Layer, rows: Mapping[int, int]) -> None:
        self.own, self.posenc, self.rows = own, posenc, rows
        self.checked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Write the attention of a batch of requests into `output`, (tokens, heads, head_dim), and return it."""

        def native(query: Tensor) -> None:
            self.own.forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )

        if attn_metadata is None:  # vLLM tries the memory of a forward
            native(query)
            return output
        # One wait for the device. Kept from layer to layer they could be those of another draft.
        requests = attn_metadata.seq_lens, attn_metadata.query_start_loc
        lengths, starts = (
            x.tolist() for x in torch.cat(requests).cpu().split([*map(len, requests)])
        )
        rows = [row for row in range(len(lengths)) if starts[row + 1] > starts[row]]
        if plain(self.posenc):
            native(self._scaled(query, starts, lengths, rows))
            return output
        step = self.posenc.request
        tables = {row: step and in_force(self.rows[row], step) for row in rows}
        changed = [row for row in rows if not self._untouched(tables[row] or lengths[row])]
        if len(changed) < len(rows):
            native(query)
        for row in changed:
            queries, pages = slice(starts[row], starts[row + 1]), attn_metadata.block_table[row]
            found = _gathered(kv_cache, pages, lengths[row], getattr(layer, "isa", None))
            self._check(found, key[queries], value[queries])
            output[queries] = self._attend(query[queries], *found, tables[row]).view_as(
                output[queries]
            )
        return output

    def _check(self, found: tuple[Tensor, ...], *new: Tensor) -> None:
        """Raise, in the first step, unless the pages end with the keys and values that vLLM has just written there."""
        by_another = getattr(self.own, "kv_sharing_target_layer_name", None) is not None
        ends = (read[0].transpose(0, 1)[-len(x) :] for read, x in zip(found, new, strict=True))
        if not (self.checked or by_another or all(map(torch.equal, ends, new))):
            raise UnsupportedModelError(
                "vLLM's pages of keys are not as the plug-in reads them: it cannot serve a patch in this process."
            )
        self.checked = True

    def _untouched(self, length: int) -> bool:
        """True if a text of this length, or of a table for it, is computed as without the patch."""
        plan, original = self.posenc.encoding.plan, self.posenc.encoding.original
        if self.posenc.encoding.bias is not None or self.posenc.encoding.query is not None:
            return False
        if isinstance(plan, GrowingPlan):
            return len(plan.method.bands(original, length)) == 1
        if not isinstance(plan, MovingPlan) or length > original:
            return False
        return plan.table(original, torch.device("cpu")) == (None, 1.0)

    def _scaled(
        self, query: Tensor, starts: list[int], lengths: list[int], rows: list[int]
    ) -> Tensor:
        """Return queries times their factors, of all requests in one tensor."""
        positions = torch.zeros(len(query), dtype=torch.long, device=query.device)
        for row in rows:
            first, last = starts[row], starts[row + 1]
            positions[first:last] = torch.arange(
                lengths[row] - (last - first), lengths[row], device=query.device
            )
        heads = query.transpose(0, 1)[None]
        return self.posenc.encoding.scaled(heads, positions[None])[0].transpose(0, 1).contiguous()

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, table: int | None) -> Tensor:
        """Return the attention of one request's new tokens, shape (tokens, heads, head_dim).

        Keys and values, (1, key heads, length, head_dim), are those of all its tokens; `table` is the length in force.
        """
        queries, length = len(query), key.shape[2]
        query = query.transpose(0, 1)[None]
        n = torch.arange(length, device=query.device)[None]
        m = n[:, length - queries :]
        if self.posenc.turn is not None:
            query, key = self.posenc.turn(query, key, m, n)
        call = Call(
            query=query,
            key=key,
            value=value,
            query_position=m,
            key_position=n,
            mask=CausalMask(queries, length, query.device),
            scaling=self.own.scale,
            softcap=self.own.logits_soft_cap or None,
            sinks=self.own.sinks,
            lengths=None if table is None else torch.tensor([table], device=query.device),
        )
        return attend(call, self.posenc.encoding)[0][0].transpose(0, 1)


def _gathered(
    kv_cache: Tensor, pages: Tensor, length: int, isa: str | None
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a request from vLLM's pages, each (1, key heads, length, head_dim).

    A page is (key heads, tokens, 2 head_dim): of FlashAttention, a key and a value for each token; of the CPU backend
    (`isa`: its kernels' instructions), the memory of all keys, and then of all values.
    """
    _, heads, size, both = kv_cache.shape
    used = kv_cache[pages[: -(-length // size)].long()]
    if isa is None:
        keys, values = used.split(both // 2, -1)
    else:
        parts = used.view(-1, heads, 2 * size, both // 2).split(size, 2)
        orders = _orders(isa, size, both // 2, kv_cache.dtype)
        keys, values = (
            x if order is None else x.flatten(2)[..., order].unflatten(2, (size, -1))
            for x, order in zip(parts, orders, strict=True)
        )
    key, value = (x.transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (keys, values))
    return key, value


@functools.cache
def _orders(isa: str, size: int, width: int, dtype: torch.dtype) -> list[Tensor | None]:
    """Return where vLLM's kernels put the features of a page's keys and values, by the processor; `None`: in order.

    Tensors that hold their token's number, and then their feature's, are written by vLLM's operator and read back. Both
    are at most 256, which every dtype holds.
    """
    from vllm import _custom_ops as ops

    found = torch.zeros(2, size * width, dtype=torch.long)
    for number, times in ((torch.arange(size)[:, None, None], width), (torch.arange(width), 1)):
        cache = torch.zeros(1, 1, 2 * size, width, dtype=dtype)
        x = number.expand(size, 1, width).to(dtype).contiguous()
        options = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
        ops.cpu_attn_reshape_and_cache(x, x, *cache.chunk(2, 2), torch.arange(size), isa, **options)
        found += times * cache.view(2, -1).long()
    orders = found.argsort(1)
    return [
        None if bool((order == torch.arange(size * width)).all()) else order for order in orders
    ]
