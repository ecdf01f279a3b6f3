"""The price of a patch: it is tried on one block of each kind, and finds what a trial of all blocks finds."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_posenc import UnsupportedModelError, get_patch, patch_model, patched, unpatch_model
from hf_posenc.errors import PosencError
from hf_posenc.methods import ALiBi, DualChunk, LogN, ReRoPE, RotaryBands, SelfExtend, YaRN
from hf_posenc.methods.windows import AttentionSinks
from hf_posenc.model import discovery
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.model.sampled import sample_of
from hf_posenc.patch import patching
from tests.attention.test_attention import build
from tests.patch.test_attention_patching import IDS
from tests.support import zoo
from tests.support.selection import covering
from tests.support.tiny_text import sizes

pytestmark = pytest.mark.filterwarnings("ignore::hf_posenc.errors.UntrainedWarning")
METHODS: list[tuple[Any, dict[str, Any]]] = [("yarn", {"scale": 4}), ("rerope", {"window": 16})]
METHODS += [("alibi", {}), (["yarn", "log_n"], {"scale": 4}), ("dynamic_yarn", {})]
DEPTH = 8


def _calls(model: nn.Module, blocks: Any, *args: Any, **options: Any) -> list[int]:
    """Return how often a patch runs the attention of each block."""
    inner = [next(m for m in block.modules() if "ttention" in type(m).__name__) for block in blocks]
    calls: Counter[nn.Module] = Counter()

    def count(module: nn.Module, _: Any) -> None:
        calls[module] += 1

    hooks = [module.register_forward_pre_hook(count) for module in inner]
    patch_model(model, *args, **options)
    for hook in hooks:
        hook.remove()
    return [calls[module] for module in inner]


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    own = sizes(128, 64, width=64, layers=DEPTH, heads=(4, 4)) | options
    return LlamaForCausalLM(LlamaConfig(**own, initializer_range=0.2)).eval()


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_a_patch_runs_one_block_of_each_kind(method: Any, options: dict[str, Any]) -> None:
    model = llama()
    first, *others = _calls(model, model.model.layers, method, **options)
    assert first
    assert not any(others)


def test_the_blocks_of_a_model_without_rotation_too() -> None:
    model: Any = zoo.build("bloom", n_layer=DEPTH)
    first, *others = _calls(model, model.transformer.h, "alibi", scale=2)
    assert first > 5 * max(others)  # code of its own is searched in every block


def test_verify_full_runs_all() -> None:
    model = llama()
    calls = _calls(model, model.model.layers, "rerope", window=16, verify="full")
    assert len({*calls}) == 1
    assert calls[0]
    with pytest.raises(PosencError, match='"sample" or "full"'):
        patch_model(model, "rerope", window=16, verify="half")


@pytest.mark.parametrize(
    ("model_type", "method"),
    covering(
        ["llama", "gemma3_text", "qwen3", "gptj", "deepseek_v3", "qwen3_next", "gpt_oss"],
        ["rerope", "alibi"],
    ),
)
def test_the_patch_is_that_of_a_trial_of_all_blocks(model_type: str, method: str) -> None:
    model, ids = zoo.build(model_type), zoo.tokens(40)
    options: dict[str, Any] = {"window": 16} if method == "rerope" else {}
    outputs: list[tuple[Tensor, object]] = []
    for verify in ("sample", "full"):
        try:
            with patched(model, method, verify=verify, **options):
                outputs.append((zoo.logits(model, ids), get_patch(model)))
        except UnsupportedModelError as error:
            outputs.append((torch.zeros(()), str(error)))
    (one, report), (other, expected) = outputs
    assert torch.equal(one, other)
    assert str(report) == str(expected)


def _by_row(values: Tensor) -> Tensor:
    return values * (1 + 0.3 * torch.arange(values.shape[-2])[:, None])


class _Rows(nn.Module):
    """A projection that adds something by position."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: Tensor) -> Any:
        return _by_row(self.inner(values))


def _wrapped(layer: Any) -> None:
    layer.mlp.up_proj = _Rows(layer.mlp.up_proj)


def _new_forward(layer: Any) -> None:
    mlp, native = layer.mlp, layer.mlp.forward
    mlp.forward = lambda values: native(_by_row(values))


def _hooked(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda _, args, output: _by_row(output))


@pytest.mark.parametrize(
    ("change", "method"), covering([_wrapped, _new_forward, _hooked], ["pi", "rerope"])
)
def test_one_block_that_was_changed_by_hand_is_found_at_any_depth(change: Any, method: str) -> None:
    model = llama()
    change(model.model.layers[5])
    options: dict[str, Any] = {"window": 16} if method == "rerope" else {"scale": 4}
    with pytest.raises(UnsupportedModelError, match="more than its rotary embedding"):
        patch_model(model, method, **options)


def test_a_class_that_was_changed_by_hand_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    unpatch_model(patch_model(llama(), "pi", scale=4))
    other = llama()
    kind = type(other.model.layers[0].mlp)
    native = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: _by_row(native(self, x)))
    with pytest.raises(UnsupportedModelError, match="more than its rotary embedding"):
        patch_model(other, "pi", scale=4)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.self_attn, "scaling", 3.0),
        lambda layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
        lambda layer: layer.register_buffer("rows", torch.zeros(3)),
        lambda layer: layer.double(),
    ],
)
def test_blocks_that_differ_are_of_several_kinds(change: Any) -> None:
    model = llama()
    assert [len(each) for each in sample_of(model).twins.values()] == [DEPTH - 1]
    change(model.model.layers[5])
    assert [len(each) for each in sample_of(model).twins.values()] == [DEPTH - 2]


@pytest.mark.parametrize(
    ("model_type", "chosen"),
    covering(["llama", "qwen3", "gpt_neox", "deepseek_v3", "qwen3_moe"], METHODS),
)
def test_a_model_is_patched_on_meta(model_type: str, chosen: tuple[Any, dict[str, Any]]) -> None:
    method, options = chosen
    model, ids = zoo.build(model_type), zoo.tokens(40)
    with patched(model, method, **options):
        expected = zoo.logits(model, ids)
    with torch.device("meta"):
        empty: Any = type(model)(copy.deepcopy(model.config)).eval()
        patch_model(empty, method, **options)
    assert all(each.is_meta for each in empty.parameters())
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for name, buffer in empty.named_buffers():
            buffer.fill_(7)  # what `to_empty` leaves there may be anything
            if "inv_freq" not in name:
                buffer.copy_(model.get_buffer(name))
    empty.load_state_dict(model.state_dict())
    assert torch.equal(zoo.logits(empty, ids), expected)


def test_a_scaled_rotation_that_has_values_needs_no_weights() -> None:
    from accelerate import init_empty_weights

    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    model, ids = zoo.build("llama", rope_parameters=scaling), zoo.tokens(80)
    with patched(model, "self_extend", scale=2):
        expected = zoo.logits(model, ids)
    with init_empty_weights():  # its buffers are real
        empty: Any = type(model)(copy.deepcopy(model.config)).eval()
    patch_model(empty, "self_extend", scale=2).load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(zoo.logits(empty, ids), expected)
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    with pytest.raises(UnsupportedModelError, match="scaled already"):
        patch_model(empty, "self_extend", scale=2)


def test_positions_beside_the_rotation_are_found_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = llama()
    _wrapped(model.model.layers[5])
    with pytest.raises(UnsupportedModelError, match="more than its rotary embedding"):
        patch_model(model, "rerope", window=16)
    assert all(each.is_meta for each in model.parameters())


def test_what_needs_weights_is_refused_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = llama()
        with pytest.raises(UnsupportedModelError, match="needs the weights"):
            patch_model(model, "rerope", window=16, verify="full")
    assert get_patch(model) is None


@pytest.mark.parametrize("method", ["fire", "kerple_log"])
def test_parameters_have_their_first_values_before_the_weights(method: str) -> None:
    whole = llama()
    with torch.device("meta"):
        empty = llama()
    for model in (whole, empty):
        torch.manual_seed(0)
        patch_model(model, method)
    expected = trained_parameters(whole)
    found = trained_parameters(empty.to_empty(device="cpu").half())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_of_offloaded_blocks_one_is_run() -> None:
    from accelerate import cpu_offload

    model, ids = llama(), zoo.tokens(40)
    with patched(model, "rerope", window=16):
        expected = zoo.logits(model, ids)
    for layer in model.model.layers:
        cpu_offload(layer, execution_device=torch.device("cpu"))
    first, *others = _calls(model, model.model.layers, "rerope", window=16)
    assert first
    assert not any(others)
    assert torch.equal(zoo.logits(model, ids), expected)


# The core does things once: rotary tables per patch, bands and windows per patch and not per forward.
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
