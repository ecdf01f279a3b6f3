"""mlx-lm: its tables recomputed from the written config, its own classes where it is installed, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_posenc import get_method, inspect_rope, patch_model
from hf_posenc.engines import export, write_export
from hf_posenc.engines.engine import known_names
from tests.support import zoo

STATIC = [name for name in zoo.frequency_methods() if not get_method(name).length_dependent]
FORMS: list[tuple[str, dict[str, Any]]] = [
    *((name, zoo.frequency_options(name)) for name in STATIC),
    ("yarn", {"scale": 4.0, "truncate": False}),  # a list with a factor
    ("yarn", {"scale": 4.0, "attention_factor": 1.3}),
]
LISTS = ("default", "linear", "yarn", "llama3", "longrope")
WHOLE = frozenset.intersection(*(known_names("mlx")[kind] for kind in LISTS)) - {"gemma3_text"}
"""Types that compute every form; Gemma 3 needs the layers of a larger model."""
READS = {"llama": ("linear", "yarn", "llama3", "longrope"), "phi3": ("longrope",)}


def initialize_rope(config: dict[str, Any], dim: int) -> tuple[np.ndarray, float]:
    """Return the frequencies and the factor of `mlx_lm/models/rope_utils.py` in float64, from reading it."""
    base, scaling = float(config["rope_theta"]), config["rope_scaling"] or {}
    periods = base ** (np.arange(0, dim, 2) / dim)
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    if kind == "default":
        return 1 / periods, 1.0
    if kind == "linear":
        return 1 / periods / scaling["factor"], 1.0
    original = scaling["original_max_position_embeddings"]
    if kind == "longrope":
        factor = config["max_position_embeddings"] / original
        mscale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return 1 / (np.array(scaling["long_factor"]) * periods), mscale
    factor = scaling["factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        waves = 2 * math.pi * periods
        smooth = (original / waves - low) / (high - low)
        medium = periods / ((1 - smooth) / factor + smooth)
        slowed = np.where(waves > original / low, periods * factor, periods)
        between = (waves > original / high) & (waves < original / low)
        return 1 / np.where(between, medium, slowed), 1.0
    assert kind == "yarn"
    ends = [
        dim * math.log(original / (scaling.get(name, turns) * 2 * math.pi)) / (2 * math.log(base))
        for name, turns in (("beta_fast", 32), ("beta_slow", 1))
    ]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
    mask = 1 - np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    scaled = factor * periods
    mscale, all_dim = (
        0.1 * scaling.get(name, default) * math.log(factor) + 1 if factor > 1 else 1.0
        for name, default in (("mscale", 1), ("mscale_all_dim", 0))
    )
    return (scaled * mask + periods * (1 - mask)) / (scaled * periods), mscale / all_dim


def written(folder: Path, method: str | None, options: dict[str, Any]) -> dict[str, Any]:
    found = export(folder / "model", "mlx", method=method, **options)
    assert found.possible, found.reason
    write_export(found, folder / "out", weights="copy")
    config: dict[str, Any] = json.loads((folder / "out" / "config.json").read_text())
    return config


@pytest.mark.parametrize("model_type", READS)
@pytest.mark.parametrize(("method", "options"), FORMS)
def test_the_written_config_gives_the_table(
    tmp_path: Path, model_type: str, method: str, options: dict[str, Any]
) -> None:
    model = zoo.build(model_type)
    model.save_pretrained(tmp_path / "model")
    config = written(tmp_path, method, options)
    (table,) = inspect_rope(patch_model(model, method, **options))
    inv_freq, factor = initialize_rope(config, 2 * len(table.inv_freq))
    np.testing.assert_allclose(inv_freq, table.inv_freq.double(), rtol=2e-6, atol=1e-12)
    assert factor == pytest.approx(table.attention_factor, rel=1e-7)
    if config["rope_scaling"]:
        assert config["rope_scaling"]["type"] in READS[model_type]
        if method in ("yarn", "ntk_by_parts") and model_type == "llama":
            own = "yarn" if options.get("truncate", True) else "longrope"
            assert config["rope_scaling"]["type"] == own
    if model_type == "phi3":  # reads this one, not the entry's
        own = (config["rope_scaling"] or config)["original_max_position_embeddings"]
        assert config["original_max_position_embeddings"] == pytest.approx(own)


def test_what_it_cannot_have(tmp_path: Path) -> None:
    for model_type in ("llama", "mixtral"):
        zoo.build(model_type).save_pretrained(tmp_path / model_type)
    yarn: dict[str, Any] = {"method": "yarn", "scale": 4.0}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("mixtral", yarn, "not known to compute rope_type yarn for mixtral"),
        ("llama", {**yarn, "attention_factor": 0.9, "truncate": False}, "the factor by 0.11"),
        ("llama", {"method": "dynamic_ntk", "scale": 2, "update": "sequence"}, "each piece"),
        ("llama", {"method": "rerope"}, "changes attention"),
    ]
    for model_type, patch, reason in cases:
        assert reason in export(tmp_path / model_type, "mlx", **patch).reason
    assert export(tmp_path / "mixtral", "mlx", method="abf", rope_theta=1e6).possible
    lists = {"short_factor": [1.1] * 8, "long_factor": [3.0] * 8}
    assert "every length" in export(tmp_path / "llama", "mlx", method="longrope", **lists).notes[0]


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("model_type", sorted(WHOLE))
def test_in_mlx_lm_itself(tmp_path: Path, model_type: str) -> None:
    """Compare with mlx-lm itself, if it is installed: pip install "mlx[cpu]" mlx-lm."""
    utils: Any = pytest.importorskip("mlx_lm.utils")
    import mlx.core as mx  # type: ignore[import-not-found]

    overrides = {"sliding_window": None} if model_type == "mistral" else {}  # it has no window
    zoo.build(model_type, **overrides).save_pretrained(tmp_path / "model")
    ids = zoo.tokens(200)
    for method, options in FORMS:
        written(tmp_path, method, options)
        logits = utils.load_model(tmp_path / "out")[0](mx.array(ids.numpy()))
        model = patch_model(zoo.build(model_type, **overrides), method, **options)
        got = torch.tensor(np.array(logits)).double()
        assert zoo.relative_difference(got, zoo.logits(model, ids)) < 1e-3, (method, options)
