"""Every recipe against the published configuration it stands for, as transformers itself reads it.

`PUBLISHED` repeats what bears on positions in each checkpoint's own `config.json`. From it
transformers builds a native model; the recipe is loaded into the same weights without any scaling.
Tables and logits must agree.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_posenc import (
    available_recipes,
    get_method,
    inspect_rope,
    load_patch,
    save_patch,
    unpatch_model,
)
from hf_posenc.methods import LaMPE, RotaryBands
from hf_posenc.patch.config import PatchConfig
from tests.support import zoo
from tests.support.selection import quick

FOLDER = Path(__file__).parents[2] / "patches" / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Published:
    """A checkpoint's own configuration: the part that bears on positions."""

    model_type: str
    head_dim: int
    theta: float
    max_position_embeddings: int
    scaling: dict[str, Any] | None = None
    base_theta: float | None = None  # before the training on long texts, where that changed it
    # max_position_embeddings of the base model, where not the original length
    base_length: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)  # rope parameters with and without scaling


def _linear(factor: float) -> dict[str, Any]:
    return {"type": "linear", "factor": factor}


def _yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}


def _llama3(factor: float) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
    return {**rope, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _phi_factors() -> dict[str, Any]:
    options = json.loads((FOLDER / "phi-3.5-mini-128k.json").read_text())["options"]
    return {"type": "longrope", **options}


_DEEPSEEK_YARN = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
_GPT_OSS_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_QWEN3_5_ROPE: dict[str, Any] = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
_QWEN3_5_ROPE["partial_rotary_factor"] = 0.25
_QWEN3_VL_ROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}

PUBLISHED = {
    "apertus-64k": Published("apertus", 128, 12e6, 65536, _llama3(8.0)),
    "codellama": Published("llama", 128, 1e6, 16384, base_theta=1e4),
    "deepseek-coder-16k": Published("llama", 128, 1e5, 16384, _linear(4.0)),
    "deepseek-v3": Published("deepseek_v3", 64, 1e4, 163840, _yarn(40, 4096, **_DEEPSEEK_YARN)),
    "deepseek-v4-1m": Published(
        "deepseek_v4", 128, 1e4, 1048576, _yarn(16.0, 65536, beta_fast=32, beta_slow=1)
    ),
    "gemma-3-128k": Published(
        "gemma3_text", 256, 1e6, 131072, _linear(8.0), more={"rope_local_base_freq": 1e4}
    ),
    "giraffe-32k": Published("llama", 128, 1e4, 32768, _linear(8.0)),
    "gpt-oss-128k": Published("gpt_oss", 64, 150e3, 131072, _yarn(32.0, 4096, **_GPT_OSS_YARN)),
    "gradient-1048k": Published("llama", 128, 3580165449.0, 1048576, base_theta=5e5),
    "gradient-262k": Published("llama", 128, 283461213.0, 262144, base_theta=5e5),
    "hunyuan-ntk-alpha": Published(
        "hunyuan_v1_moe", 128, 1e4, 32768, {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    ),
    "kimi-k2-128k": Published(
        "deepseek_v3", 64, 5e4, 131072, _yarn(32.0, 4096, **{**_DEEPSEEK_YARN, "beta_fast": 1.0})
    ),
    "kimi-k2.5-256k": Published("deepseek_v3", 64, 5e4, 262144, _yarn(64, 4096, **_DEEPSEEK_YARN)),
    "llama-2-yarn-128k": Published("llama", 128, 1e4, 131072, _yarn(32.0, 4096)),
    "llama-2-yarn-64k": Published("llama", 128, 1e4, 65536, _yarn(16.0, 4096)),
    "llama-3.1-128k": Published("llama", 128, 5e5, 131072, _llama3(8.0)),
    "llama-3.2-128k": Published("llama", 64, 5e5, 131072, _llama3(32.0)),
    "longchat-16k": Published("llama", 128, 1e4, 2048, _linear(8.0)),
    "longchat-32k": Published("llama", 128, 1e4, 4096, _linear(8.0)),
    "longlora-100k": Published("llama", 128, 1e4, 4096, _linear(25.0)),
    "ministral-3-256k": Published(
        *("ministral3", 128, 1e6, 262144, _yarn(16.0, 16384, **_DEEPSEEK_YARN)),
        rope={"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384},
    ),
    "mistral-large-4-1m": Published(
        *("mistral_large4_text", 64, 1e4, 1048576, _yarn(2048.0, 512, attention_factor=1.0)),
        more={"index_head_dim": 64},
    ),
    "mistral-small-4-1m": Published(
        *("mistral4", 64, 1e4, 1048576, _yarn(128.0, 8192, **_DEEPSEEK_YARN)),
        more={"qk_nope_head_dim": 64},
        rope={"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192},
    ),
    "mistral-yarn-128k": Published("mistral", 128, 1e4, 32768, _yarn(16.0, 8192)),
    "mistral-yarn-64k": Published("mistral", 128, 1e4, 32768, _yarn(8.0, 8192)),
    "olmo-3-64k": Published(
        "olmo3", 128, 5e5, 65536, _yarn(8.0, 8192, attention_factor=1.2079441541679836)
    ),
    "phi-3.5-mini-128k": Published(
        *("phi3", 96, 1e4, 131072, _phi_factors()),
        more={"original_max_position_embeddings": 4096, "hidden_size": 384},
    ),
    "prolong-512k": Published("llama", 128, 128e6, 524288, base_theta=5e5),
    "qwen2.5-yarn-128k": Published("qwen2", 128, 1e6, 32768, _yarn(4.0, 32768)),
    "qwen3-yarn-128k": Published("qwen3", 128, 1e6, 40960, _yarn(4.0, 32768), base_length=40960),
    "qwen3-vl-yarn-1m": Published(
        "qwen3_vl_text", 128, 5e6, 262144, _yarn(3.0, 262144), rope=_QWEN3_VL_ROPE
    ),
    "qwen3.5-yarn-1m": Published(
        "qwen3_5_text", 256, 1e7, 262144, _yarn(4.0, 262144), rope=_QWEN3_5_ROPE
    ),
    "smollm3-yarn-128k": Published("smollm3", 128, 5e6, 65536, _yarn(2.0, 65536)),
    "smollm3-yarn-256k": Published("smollm3", 128, 5e6, 65536, _yarn(4.0, 65536)),
    "superhot-8k": Published("llama", 128, 1e4, 8192, _linear(4.0)),
    "together-32k": Published("llama", 128, 1e4, 32768, _linear(8.0)),
    "vicuna-16k": Published("llama", 128, 1e4, 4096, _linear(4.0)),
}

FEW = (
    *("codellama", "longchat-16k", "llama-2-yarn-64k", "llama-3.1-128k", "deepseek-v3"),
    *("gemma-3-128k", "gpt-oss-128k", "hunyuan-ntk-alpha", "mistral-small-4-1m", "olmo-3-64k"),
    *("mistral-large-4-1m", "phi-3.5-mini-128k", "qwen3.5-yarn-1m", "smollm3-yarn-256k"),
)
"""One of each kind of scaling and of each family that reads it in a way of its own."""

OF_ENGINES = ("qwen2.5-1m",)
OF_LAMPE = {
    "lampe-llama-2": (1380, 10_000),
    "lampe-llama-3-8b": (1210, 10_000),
    "lampe-llama-3.1-8b": (80_831, 150_000),
    "lampe-mistral-7b": (17_829, 32_768),
}
"""Positions of the authors' `remap_uselen` at a length."""
OF_DPE = {
    "dpe-llama-3-8b": ([2, 8, 2, 8, 32, 32, 32, 4], 8192),
    "dpe-llama-3.1-8b": ([2, 32, 32, 2, 2, 2, 2, 1], 131072),
    "dpe-mistral-7b-v0.2": ([4, 16, 2, 16, 32, 16, 16, 2], 32768),
    "dpe-qwen2.5-7b": ([2, 16, 8, 8, 32, 8, 2, 4], 32768),
}
"""Recipes that no class of transformers computes; each has a test of its own."""


def _recipe(name: str) -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return recipe


def _model(
    published: Published, theta: float, length: int, scaling: dict[str, Any] | None
) -> PreTrainedModel:
    """A tiny model with the published rotary dimension; all that is not about positions is small."""
    sizes: dict[str, Any] = {"initializer_range": 0.2, "max_position_embeddings": length}
    sizes |= {"head_dim": published.head_dim, **published.more}
    if published.model_type in ("deepseek_v3", "mistral4", "mistral_large4_text"):
        sizes["qk_rope_head_dim"] = published.head_dim
    if published.model_type == "mistral4" and scaling is not None:
        sizes["head_dim"] *= 2  # rotated and not; transformers' unscaled table covers head_dim
    rope = {"rope_theta": theta, **published.rope, **(scaling or {"rope_type": "default"})}
    if published.model_type in ("olmo3", "gemma3_text"):  # kept by layer type
        local = theta if published.model_type == "olmo3" else 1e4
        plain = {"rope_type": "default", "rope_theta": local}
        rope = {"full_attention": rope, "sliding_attention": plain}
    return zoo.build(published.model_type, **sizes, rope_parameters=rope)


def _native(name: str) -> PreTrainedModel:
    """The checkpoint's architecture and published scaling, as transformers reads them; tiny random weights."""
    published = PUBLISHED[name]
    return _model(published, published.theta, published.max_position_embeddings, published.scaling)


def _base(name: str, weights: PreTrainedModel) -> PreTrainedModel:
    """The model that the checkpoint was made from: the same weights, no scaling, the original length."""
    published = PUBLISHED[name]
    length = published.base_length or _recipe(name)["original_max_position_embeddings"]
    model = _model(published, published.base_theta or published.theta, length, None)
    model.load_state_dict(weights.state_dict())
    return model


@torch.no_grad()
def _logits(model: torch.nn.Module, positions: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(positions.numel())[None] % 61 + 3
    # With a mask transformers does not take the jump in the positions for the start of another document.
    output = model(input_ids=ids, position_ids=positions[None], attention_mask=torch.ones_like(ids))
    logits = getattr(output, "logits", None)
    return torch.as_tensor(output.last_hidden_state if logits is None else logits)


def test_every_recipe_has_a_published_configuration_to_hold_it_against() -> None:
    assert len(NAMES) >= 10
    assert sorted([*PUBLISHED, *OF_ENGINES, *OF_DPE, *OF_LAMPE]) == NAMES
    assert sorted(available_recipes()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_complete(name: str) -> None:
    recipe = _recipe(name)
    about = recipe.pop("recipe")
    assert about.pop("name") == name
    model_types, unscaled = about.pop("model_types"), about.pop("unscaled", None)
    published: Any = PUBLISHED.get(name)
    assert published is None or published.model_type in model_types
    if unscaled is not None and published is not None:
        length = published.base_length or published.max_position_embeddings
        assert unscaled == {"max_position_embeddings": length, "rope_theta": published.theta}
    if (scaled := about.pop("scaled", None)) is not None:
        scaling: Any = published.scaling
        known = {"rope_type": scaling["type"], "factor": scaling["factor"]}
        known["max_position_embeddings"] = published.max_position_embeddings
        assert scaled == {**known, "rope_theta": published.theta} or scaled == known
        assert about.pop("reach", None) in (None, published.max_position_embeddings)
    assert set(about) == {"checkpoint", "source", "description"}
    assert all(isinstance(value, str) and value for value in about.values())
    others = recipe.pop("others", [])
    assert all(get_method(other["method"]).name == other["method"] for other in others)
    keys = "format method options scale original_max_position_embeddings layers compose replace"
    assert set(recipe) == {*keys.split()}
    method = get_method(recipe["method"])
    assert method.name == recipe["method"], "a recipe uses the canonical name, not an alias"
    assert (recipe["scale"] is not None) == method.takes_scale()


@pytest.mark.parametrize("name", quick(sorted(PUBLISHED), FEW))
def test_a_recipe_gives_the_published_checkpoints_table_and_logits(name: str) -> None:
    native = _native(name)
    base, tables = _base(name, native), inspect_rope(native)
    # Past the 4096 tokens where the only length-dependent recipe changes its table.
    positions = torch.cat([torch.arange(24), 4200 + torch.arange(24)])
    published, unscaled = _logits(native, positions), _logits(base, positions)
    load_patch(base, name)
    for our, their in zip(inspect_rope(base), tables, strict=True):
        assert (our.layer_type, our.dim) == (their.layer_type, their.dim)
        torch.testing.assert_close(our.inv_freq, their.inv_freq, atol=0, rtol=1e-6)
        assert float(our.attention_factor) == pytest.approx(float(their.attention_factor), rel=1e-6)

    near = torch.arange(24)
    torch.testing.assert_close(_logits(base, near), _logits(native, near), atol=2e-4, rtol=1e-4)
    # The last bit of a float32 frequency is 5e-4 radians at position 4200, so the bound is relative to the effect.
    effect = (unscaled - published).abs().max()
    assert effect > 0.1
    assert (_logits(base, positions) - published).abs().max() < effect / 500

    unpatch_model(base)
    assert torch.equal(_logits(base, positions), unscaled)


def test_the_long_lists_are_copied_digit_by_digit() -> None:
    """There is no second copy to hold them against, but every number of the original is a float32 in full."""
    options = _recipe("phi-3.5-mini-128k")["options"]
    for factors in (options["short_factor"], options["long_factor"]):
        assert len(factors) == PUBLISHED["phi-3.5-mini-128k"].head_dim // 2
        assert factors == sorted(factors)
        assert torch.tensor(factors, dtype=torch.float32).tolist() == factors


def test_a_recipe_is_what_save_patch_writes(tmp_path: Path) -> None:
    name = "llama-2-yarn-64k"
    save_patch(load_patch(_base(name, _native(name)), name), tmp_path)
    saved = json.loads((tmp_path / "posenc_config.json").read_text())
    recipe = _recipe(name)
    for key in ("format", "method", "scale", "original_max_position_embeddings", "layers"):
        assert saved[key] == recipe[key], key


def test_dual_chunk_is_that_of_vllm() -> None:
    """`DualChunkRotaryEmbedding` of vLLM with the config of Qwen2.5-1M, from reading it, at the real lengths."""
    chunk_size, local_size, trained = 262144, 8192, 262144
    recipe = PatchConfig.from_dict(_recipe("qwen2.5-1m"))
    dual_chunk, temperature = recipe.build()
    assert isinstance(dual_chunk, RotaryBands)
    chunk = chunk_size - local_size
    length = recipe.original_max_position_embeddings
    assert length == trained
    queries = torch.tensor([0, chunk - 1, chunk, chunk + local_size - 1, 2 * chunk - 1, 1_000_000])
    keys = torch.tensor([0, 1, chunk - 1, chunk, chunk + 77, 2 * chunk - 2, 999_999])
    same = queries % chunk
    bridged = (queries % chunk + chunk).clamp(max=chunk_size)
    far = torch.full_like(queries, chunk_size)
    for query, *positions in zip(queries, same, bridged, far, strict=True):
        for key in keys[keys <= query]:
            expected = positions[min(int(query // chunk - key // chunk), 2)] - key % chunk
            band = next(b for b in dual_chunk.bands(length) if bool(b.contains(query, key)))
            ours = band.query_position(query) - band.key_position(key)
            # Its distant queries lie at chunk_size, the first position that was never trained.
            assert ours == expected - int(positions[2] in (expected + key % chunk,))
    factors = temperature.query_factor(queries, length)
    expected_factors = (0.1 * ((queries + 1) / trained).double().log() + 1).clamp(min=1)
    assert factors is not None
    torch.testing.assert_close(factors.double(), expected_factors, atol=0, rtol=1e-6)


@pytest.mark.parametrize("name", OF_DPE)
def test_dpe_has_the_sizes_of_its_authors(name: str) -> None:
    """`scale_factors` of config/dpe_config.yaml, for `dimension_groups_range` 0, 8, ..., 64 and a window of 1,024."""
    factors, original = OF_DPE[name]
    config = PatchConfig.from_dict(_recipe(name))
    (method,) = config.build()
    assert isinstance(method, RotaryBands)
    assert config.original_max_position_embeddings == original
    near, far = method.bands(original)
    assert near.below == far.least == 1024
    query, key = torch.tensor(original - 1), torch.tensor(777)
    distances = far.query_position(query) - far.key_position(key)
    last = original - 1
    assert distances.tolist() == [last // g + 1024 - 1024 // g - 777 // g for g in factors]


@pytest.mark.parametrize("name", OF_LAMPE)
def test_lampe_has_the_room_of_its_authors(name: str) -> None:
    room, length = OF_LAMPE[name]
    (method,) = PatchConfig.from_dict(_recipe(name)).build()
    assert isinstance(method, LaMPE)
    assert method.room(length) == room
    assert (method.head, method.tail) == (512, 200)


def test_hunyuans_alpha_is_a_base() -> None:
    """The base is computed and not a published number."""
    assert _recipe("hunyuan-ntk-alpha")["options"]["rope_theta"] == 1e4 * 1000 ** (128 / 126)


def test_a_recipe_for_another_base_warns() -> None:
    for own, warns in ((1e7, True), (PUBLISHED["qwen2.5-yarn-128k"].theta, False)):
        model = _model(PUBLISHED["qwen2.5-yarn-128k"], own, 32768, None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_patch(model, "qwen2.5-yarn-128k")
        assert any("rope_theta is 1e+06" in str(each.message) for each in caught) == warns
