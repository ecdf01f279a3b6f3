"""The core does things once: rotary tables per patch, bands and windows per patch and not per forward."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_posenc import patch_model
from hf_posenc.methods import ALiBi, DualChunk, LogN, ReRoPE, RotaryBands, SelfExtend, YaRN
from hf_posenc.methods.windows import AttentionSinks
from hf_posenc.model import discovery
from hf_posenc.patch import patching
from tests.attention.test_attention import build
from tests.patch.test_attention_patching import IDS
from tests.support import zoo


@pytest.fixture
def model() -> PreTrainedModel:
    return build()


def _count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: Counter[str]) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize(
    "method", [YaRN(scale=4), ReRoPE(window=8), [YaRN(scale=4), ReRoPE(window=8)], "dynamic_yarn"]
)
def test_tables_are_discovered_once_per_patch(
    model: PreTrainedModel, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    _count(monkeypatch, discovery, "rotary_tables", calls)
    _count(monkeypatch, patching, "resolve_request", calls)
    patch_model(model, method)
    assert calls == {"rotary_tables": 1, "resolve_request": 1}


@pytest.mark.parametrize(
    "method",
    [
        ReRoPE(window=8),
        SelfExtend(window=8, group=3),
        DualChunk(chunk=10, window=6),
        AttentionSinks(window=7, sinks=3),
        [ReRoPE(window=8), ALiBi(keep_rope=True), LogN()],
    ],
    ids=["rerope", "self_extend", "dual_chunk", "attention_sinks", "list"],
)
def test_bands_are_computed_once_per_patch_and_not_in_a_forward(
    model: PreTrainedModel, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_model(model, method)
    expected = zoo.logits(model, IDS)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    copies = [copy.deepcopy(model), torch.load(stored, weights_only=False)]
    calls: Counter[str] = Counter()
    bands = method[0] if isinstance(method, list) else method
    for name in ("bands", "near_window"):
        _count(monkeypatch, next(c for c in type(bands).__mro__ if name in vars(c)), name, calls)
    _count(monkeypatch, RotaryBands, "far", calls)
    for each in (model, *copies):
        assert torch.equal(zoo.logits(each, IDS), expected)
        with torch.no_grad():
            each.generate(IDS, max_new_tokens=3, do_sample=False)
    assert not calls
