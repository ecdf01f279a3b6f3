"""Every method on a device that is not the CPU, in Python: nothing stays behind, and no layer waits.

The model is patched on the CPU and moved. The paths are those of CUDA, with its flash attention emulated.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_posenc import patch_model
from hf_posenc.attention import engine
from hf_posenc.attention.fused import one_segment
from tests.attention.test_attention import apply, build
from tests.support import zoo
from tests.support.attention_llama import CASES
from tests.support.elsewhere import Distant, Elsewhere, move
from tests.support.emulated import EmulatedFlash
from tests.support.selection import late
from tests.support.zoo import CACHE

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")
IDS = zoo.tokens(45)
LIKE_CUDA = "moving", EmulatedFlash.name, "few", "exact"
GENERAL = "rerope", "dual_chunk", "dynamic_yarn_row"
"""Methods that flash attention computes, on the general path too."""
MAIN = "rerope", "dual_chunk", "alibi_keep_rope", "rope_bias", "dynamic_ntk_row"


@pytest.fixture(autouse=True)
def _no_tensors_of_other_tests() -> Iterator[None]:
    """Those on the real meta device have no numbers."""
    one_segment.cache_clear()
    yield
    one_segment.cache_clear()


def moved(model: PreTrainedModel) -> Any:
    there = copy.deepcopy(model)
    move(there)
    return there


@torch.no_grad()
def waits_of(model: PreTrainedModel) -> tuple[Counter[str], Counter[str]]:
    """The waits of a text and of a step after it, both not the first; the logits are compared with the CPU's."""
    here: Any = model
    cache = here(input_ids=IDS[:, :-1], use_cache=True)[CACHE]
    expected = [here(input_ids=IDS, use_cache=False).logits]
    expected.append(here(input_ids=IDS[:, -1:], **{CACHE: cache}).logits)
    there = moved(model)
    with Elsewhere() as device:
        ids = Distant(IDS)
        there(input_ids=ids, use_cache=False)
        device.waits.clear()
        got = [there(input_ids=ids, use_cache=False).logits]
        whole = device.waits.copy()
        cache = there(input_ids=ids[:, :-2], use_cache=True)[CACHE]
        there(input_ids=ids[:, -2:-1], **{CACHE: cache})
        device.waits.clear()
        got.append(there(input_ids=ids[:, -1:], **{CACHE: cache}).logits)
    for one, other in zip(got, expected, strict=True):
        assert isinstance(one, Distant)
        assert float((one.numbers - other).norm() / other.norm()) < 1e-5
    return whole, device.waits


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((name, LIKE_CUDA) for name in MAIN),
        (GENERAL[0], ("exact",)),
        *late(GENERAL[1:], [("exact",)]),
        *late([name for name in CASES if name not in MAIN], [LIKE_CUDA]),
    ],
)
def test_waits_are_those_of_a_forward_and_not_of_a_layer(
    name: str, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "BACKENDS", tuple(engine.backend_of(each) for each in order))
    one, two = (waits_of(apply(build(num_hidden_layers=layers), name)) for layers in (1, 2))
    assert one == two
    for waits in one:
        assert not [wait for wait in waits if wait.startswith("copy to the device")]
        own = sum(number for wait, number in waits.items() if "not of" not in wait)
        assert own <= (3 if order is LIKE_CUDA else 12)  # there, one for each block of queries


def test_axes_of_positions_are_compared_once() -> None:
    """M-RoPE: three axes, which are equal in a text."""
    counts = []
    for layers in (1, 2):
        sizes: dict[str, Any] = {"layer_types": ["full_attention"] * layers}
        model = zoo.build("qwen2_5_vl_text", num_hidden_layers=layers, **sizes)
        patch_model(model, "rerope", window=8, original_max_position_embeddings=32)
        there = moved(model)
        with torch.no_grad(), Elsewhere() as device:
            there(input_ids=Distant(IDS), use_cache=False)
        counts.append(sum(number for wait, number in device.waits.items() if "scalar" in wait))
    assert counts[0] == counts[1]


def test_the_other_device_counts_and_refuses() -> None:
    """Without which the tests above say nothing."""
    x = torch.arange(4.0)
    with Elsewhere() as device:
        y = Distant(x)
        assert y.device.type == "meta"
        z: Any = (y + 1).view(2, 2)
        assert z.numbers.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        assert device.launches == {"add": 1}
        assert not device.waits
        assert bool(z.any())
        assert z.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        x.to("meta")
        torch.tensor([1, 2], device="meta")
        y.cpu()
        y.nonzero()
        with pytest.raises(RuntimeError, match="mixes two devices"):
            y + x
    kinds = sorted(wait.split(" (")[0] for wait in device.waits.elements())
    copies = ["copy to the device", "copy to the device", "copy to the host"]
    assert kinds == ["_local_scalar_dense", *copies, "nonzero", "tolist"]
