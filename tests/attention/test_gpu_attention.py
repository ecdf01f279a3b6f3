"""Methods that compute attention themselves on a GPU: what they compute on the CPU, where the kernels are others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc import unpatch_model
from hf_posenc.attention import engine
from hf_posenc.attention.checks import comparison
from hf_posenc.attention.checks.comparison import call_of, encoding_of
from hf_posenc.methods import get_method
from hf_posenc.model import masks
from tests.attention.test_attention import apply, assert_close, build
from tests.model.test_attention_generation import CACHES, NEW, generate, prompts
from tests.support import zoo
from tests.support.attention_llama import parameters_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*starts untrained")]
DEVICE = "cuda"
TOLERANCE = 1e-3
"""Between float32 results of two devices."""
NAMES = (
    *("rerope", "self_extend", "dual_chunk", "alibi", "kerple_log", "log_n"),
    *("dynamic_ntk_row", "dynamic_yarn_row", "longrope_row", "t5_keep_rope", "shaw", "fire"),
    *("transformer_xl_keep_rope", "xpos", "rope_bias", "sandwich", "string", "attention_sinks"),
)
IDS = zoo.tokens(150)


@pytest.fixture
def model() -> PreTrainedModel:
    return build(eos_token_id=None, pad_token_id=0)


def on_gpu(model: PreTrainedModel) -> PreTrainedModel:
    moved: Any = model
    moved.to(DEVICE)
    return model


@torch.no_grad()
def gpu_logits(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    moved = {name: value.to(DEVICE) for name, value in kwargs.items()}
    out: Any = model(input_ids=ids.to(DEVICE), use_cache=False, **moved)
    assert out.logits.device.type == DEVICE
    logits: Tensor = out.logits.double().cpu()
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_patched_before_and_after_the_move(model: PreTrainedModel, name: str) -> None:
    apply(model, name)
    expected = zoo.logits(model, IDS)
    assert_close(gpu_logits(on_gpu(model), IDS), expected, tolerance=TOLERANCE)
    unpatch_model(model)
    before = gpu_logits(model, IDS)
    assert zoo.relative_difference(before, expected) > 0.02  # or the comparison says nothing
    apply(model, name)
    assert all(value.device.type == DEVICE for value in parameters_of(model).values())
    assert_close(gpu_logits(model, IDS), expected, tolerance=TOLERANCE)
    unpatch_model(model)
    assert torch.equal(gpu_logits(model, IDS), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("region", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision(
    model: PreTrainedModel, name: str, region: bool, dtype: torch.dtype
) -> None:
    """No further from float32 than three times the unpatched model is; at most a tenth."""
    native = zoo.logits(model, IDS)
    moved: Any = on_gpu(model)
    if not region:
        moved.to(dtype)
    with torch.autocast(DEVICE, dtype, enabled=region):
        rounding = zoo.relative_difference(gpu_logits(model, IDS), native)
        apply(model, name)
        got = gpu_logits(model, IDS)
    moved.to("cpu", torch.float32)  # with the weights as they were rounded
    assert_close(got, zoo.logits(model, IDS), tolerance=min(0.1, 3 * rounding))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", NAMES)
def test_generation_from_a_padded_batch(
    model: PreTrainedModel, name: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step's logits are those that the CPU gives for the whole row in one forward."""
    apply(model, name)
    monkeypatch.setattr(masks, "DENSE", 200)  # both kinds of masks in one generation
    batch = {key: value.to(DEVICE) for key, value in prompts().items()}
    found = generate(on_gpu(model), **batch, output_logits=True, **CACHES[cache])
    got = torch.stack(found.logits, 1).double().cpu()
    rows: Any = found.sequences.cpu()
    model.to("cpu")  # type: ignore[arg-type]
    for row, count in enumerate((21, 14, 5)):
        whole = zoo.logits(model, rows[row : row + 1, -count - NEW :])
        assert_close(got[row : row + 1], whole[:, -NEW - 1 : -1], cache, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", ["rerope", "alibi", "log_n"])
def test_generation_that_transformers_compiles(model: PreTrainedModel, name: str) -> None:
    """On a GPU generate() compiles the steps of a static cache of its own accord."""
    apply(model, name)
    torch._dynamo.reset()
    ids = zoo.tokens(21).to(DEVICE)
    found = generate(
        on_gpu(model), input_ids=ids, output_logits=True, cache_implementation="static"
    )
    got = torch.stack(found.logits, 1).double().cpu()
    rows: Any = found.sequences.cpu()
    model.to("cpu")  # type: ignore[arg-type]
    assert_close(got, zoo.logits(model, rows)[:, -NEW - 1 : -1], tolerance=TOLERANCE)


LONG = 700
"""Tokens of a text for which a mask is too large to be written out."""


def padded() -> dict[str, Tensor]:
    """One row of `LONG` tokens and one of 430 behind padding."""
    mask = torch.ones(2, LONG, dtype=torch.int64)
    mask[1, : LONG - 430] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def packed() -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(size) for size in (250, 101, LONG - 351)])
    return {"position_ids": positions.expand(2, -1)}


@pytest.mark.parametrize("kind", [padded, packed])
@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "alibi", "dynamic_ntk_row"])
def test_masks_of_long_texts_are_made_on_the_gpu(
    model: PreTrainedModel, name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LONG * LONG > masks.DENSE
    apply(model, name)
    ids, given = zoo.tokens(LONG, batch=2), kind()
    expected = zoo.logits(model, ids, **given)
    made: list[str] = []
    rows = masks.LazyMask.rows

    def noted(mask: masks.LazyMask, start: int, stop: int) -> Tensor | None:
        visible = rows(mask, start, stop)
        made.append("none" if visible is None else visible.device.type)
        return visible

    monkeypatch.setattr(masks.LazyMask, "rows", noted)
    got = gpu_logits(on_gpu(model), ids, **given)
    assert set(made) <= {DEVICE}  # a kernel asks for none
    tokens = given.get("attention_mask", torch.ones(2, LONG)).bool()
    assert_close(got[tokens], expected[tokens], tolerance=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(model: PreTrainedModel, name: str) -> None:
    """Those of every weight, and of what the method trains."""

    def gradients(device: str) -> dict[str, Tensor]:
        ids = IDS.to(device)
        model.zero_grad()
        out: Any = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        return {
            key: value.grad.double().cpu()
            for key, value in model.named_parameters()
            if value.grad is not None
        }

    apply(model, name)
    expected = gradients("cpu")
    on_gpu(model)
    got = gradients(DEVICE)
    assert got.keys() == expected.keys()
    largest = max(float(each.norm()) for each in expected.values())
    for key in got:
        # The exact gradient may be 0, as that of a bias that all keys share: what is left is rounding.
        error = float((got[key] - expected[key]).norm())
        assert error < 1e-2 * max(float(expected[key].norm()), 1e-4 * largest), key
    assert all(key in got for key in parameters_of(model))


@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "alibi", "dynamic_ntk_row"])
def test_memory_grows_like_the_length(model: PreTrainedModel, name: str) -> None:
    """Of methods that leave attention to the model, what that needs counts: here float32 without a fused kernel."""
    apply(model, name)
    on_gpu(model)
    peaks = []
    for length in (8192, 32768):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gpu_logits(model, zoo.tokens(length))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 6 * peaks[0]


FUSED = ("flash attention 4", "cudnn", "cuda flash, triton", "cuda flash")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rerope", "self_extend", "attention_sinks", "sliding_window"])
@pytest.mark.parametrize("backend", FUSED)
def test_bands_as_wide_as_those_of_models(
    backend: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two padded rows behind a cache, and a text alone that is no multiple of the window, with gradients."""
    window = 1100
    monkeypatch.setattr(comparison, "ROWS", 1300)
    monkeypatch.setattr(comparison, "KEYS", 1400)
    method = get_method(name).from_options(window=window)
    call = call_of(dtype, 128, torch.device(DEVICE))
    encoding = encoding_of(method, 128, torch.device(DEVICE))
    found = comparison.compare(engine.backend_of(backend), call, encoding, gradients=True)
    if found.reason == "it does not compute the problem of its check":
        pytest.skip(f"{backend} is not installed, or not for this GPU")
    assert found.reason is None, found
    assert found.rows == 1300
