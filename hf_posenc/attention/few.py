"""The fast path for a step of generation: few queries over all cached keys, of which only the near ones are turned."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.attention.branches import BandBranch
from hf_posenc.attention.call import Call
from hf_posenc.attention.decode import decode
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import score_bias

QUERIES = 8
"""More queries than this are left to other paths."""


def accepts(call: Call, encoding: Encoding) -> bool:
    """Whether this path computes the call."""
    if call.query.shape[2] > QUERIES or call.dropout or not encoding.shares_keys:
        return False
    branches = encoding.branches()
    if len(branches) == 1:
        return branches[0].shares_cache
    return (
        len(branches) == 2
        and branches[1].shares_cache
        and _window(encoding) is not None
        and _ends_with_the_text(call)
    )


def few(call: Call, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    """Attention by one product with the cached keys, in which the scores of the last ones are replaced."""
    m, n = call.query_position, call.key_position
    query = encoding.scaled(call.query, m)
    branches, nowhere = encoding.branches(), m.new_zeros(())
    pairs = m[:, None, :, None], n[:, None, None, :]
    visible = call.mask.rows(0, query.shape[2])
    near = None
    if len(branches) == 2:
        window = _window(encoding)
        assert window is not None
        width = min(call.key.shape[2], window + query.shape[2] - 1)
        tail = n[:, n.shape[1] - width :]
        near_key = branches[0].key(call.key[:, :, call.key.shape[2] - width :], tail, nowhere)
        inside = branches[0].contains(pairs[0], tail[:, None, None, :])
        assert inside is not None
        near = branches[0].query(query, m, nowhere), near_key, inside
    covered = [branch.contains(*pairs) for branch in branches]
    if covered[0] is not None:
        inside = torch.stack([part for part in covered if part is not None]).any(0)
        visible = inside if visible is None else visible & inside
    bias = call.mask.added(0, query.shape[2])
    if encoding.bias is not None:
        own = score_bias(encoding, query, call.key, m, n, call.scaling)
        bias = own if bias is None else bias + own
    out, weights = decode(
        branches[-1].query(query, m, nowhere),
        call.key,
        call.value,
        call.scaling,
        near=near,
        bias=bias,
        mask=visible,
        softcap=call.softcap,
        sinks=call.sinks,
        weights=True,
    )
    return out, weights.to(call.value.dtype) if call.weights else None


def _window(encoding: Encoding) -> int | None:
    """The width of the near band, if distance alone tells the bands apart."""
    first = encoding.branches()[0]
    if not isinstance(first, BandBranch):
        return None
    return first.band.below if first.band.chunk is None and not first.band.least else None


def _ends_with_the_text(call: Call) -> bool:
    """Whether the last keys are the last tokens, and not slots of a static cache that are still empty."""
    queries = call.query.shape[2]
    visible = call.mask.rows(queries - 1, queries)
    if visible is None:
        return True
    if torch.compiler.is_compiling():
        return False  # a tensor's value decides
    return bool(visible[..., -1].all())
