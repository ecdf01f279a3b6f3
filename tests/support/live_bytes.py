"""Every tensor that a forward makes, watched, so that estimates of memory can be held against it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posenc.evaluation.scoring.estimate import Attention, Cost, read_shape, run_cost
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.support import zoo

LEAST, MOST = 0.6, 1.7
"""What an estimate of memory may be of the peak, as its docstring and docs/evaluation.md say."""
_DispatchMode: Any = TorchDispatchMode
_BASIC: set[Any] = set()
"""Operations that are made of no others: asking one takes as long as running it."""


class LiveBytes(_DispatchMode):  # type: ignore[misc]
    """The most bytes that the tensors made under it had at once; exact and the same in every run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        tensors = [*model.parameters(), *model.buffers()]
        self.known = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = NotImplemented
        if func not in _BASIC:
            with self:  # operations that are made of others: what the others make counts too
                output = func.decompose(*args, **(kwargs or {}))
        if output is NotImplemented:
            _BASIC.add(func)
            output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, Tensor):
                self.made(value.untyped_storage())
        return output

    def made(self, storage: Any) -> None:
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def check(
    model: Any, length: int, *, chunk: int = 16, windows: int = 1, full_logits: bool = False,
    prefill: int | None = None,
) -> Cost:  # fmt: skip
    """Return the estimate for windows of one length, which is near the peak of scoring them."""
    scorer = TokenScorer(model, zoo.tokens(9)[0], chunk=chunk, prefill=prefill)
    assert scorer.replays
    scorer.replays = not full_logits
    ids = zoo.tokens(length)
    live: Any = LiveBytes(model)
    with live:
        scorer(ids[0] if windows == 1 else ids.expand(windows, -1))
    assert scorer.refused is None
    options: dict[str, Any] = {"chunk": chunk, "prefill_chunk": prefill, "full_logits": full_logits}
    cost = forward_cost(model, length, windows=windows, **options)
    ratio = cost.beside_weights / live.peak
    assert LEAST < ratio < MOST, f"{ratio:.3f}: {cost} for {live.peak:,} bytes"
    return cost


def build(model_type: str, **sizes: Any) -> Any:
    """A tiny model with an MLP as wide as large models have it, of two layers where these are alike."""
    wide = {"intermediate_size": 208, "max_position_embeddings": 2048}
    if not getattr(zoo.tiny_config(model_type), "layer_types", None):
        wide["num_hidden_layers"] = 2
    return zoo.build(model_type, **{**wide, **sizes})


def attentions(model: nn.Module) -> tuple[Attention, ...]:
    return read_shape(model).attentions


def forward_cost(
    model: nn.Module, length: int, *, scored: int | None = None, windows: int = 1, **options: Any
) -> Cost:
    """Return the estimate for one forward over windows of one length."""
    window = (length, length - 1 if scored is None else scored)
    return run_cost(model, [window] * max(1, windows), batch=windows, **options)
