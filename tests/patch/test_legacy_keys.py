"""The keys that transformers 4.57 reads, by model type. Whether it reads them: tests/saving/test_transformers4.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_posenc import patch_model
from hf_posenc.adapters import LegacyKeys, get_adapter
from tests.support import zoo

LISTS = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}


def saved(model_type: str, path: Path, method: str, **options: Any) -> dict[str, Any]:
    patch_model(zoo.build(model_type), method, **options).save_pretrained(path)
    values: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return values


def test_two_lists_switch_at_an_attribute_of_the_config() -> None:
    two = LegacyKeys().values({**LISTS, "short_factor": [1.0], "long_factor": [2.0]})
    assert two["original_max_position_embeddings"] == 64
    one = LegacyKeys().values({**LISTS, "short_factor": [2.0], "long_factor": [2.0]})
    assert "original_max_position_embeddings" not in one


def test_what_stands_beside_the_type_travels_too() -> None:
    """Qwen3-VL's positions on three axes."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    assert LegacyKeys().values(rope)["rope_scaling"] == rope
    assert LegacyKeys().values({"rope_type": "default", "rope_theta": 1e4}) == {"rope_theta": 1e4}


def test_a_type_that_it_has_not() -> None:
    assert LegacyKeys().values({"rope_type": "proportional", "rope_theta": 1e4}) == {}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4}
    assert not LegacyKeys(rope_types=("default",)).expresses(yarn)


def test_olmo3_has_one_theta_for_all_layers(tmp_path: Path) -> None:
    config = saved("olmo3", tmp_path, "ntk", scale=4)
    rope = config["rope_parameters"]
    full, sliding = rope["full_attention"], rope["sliding_attention"]
    assert full["rope_type"] == "longrope"  # as another theta, 4.57 could not have it
    assert config["rope_theta"] == full["rope_theta"] == sliding["rope_theta"]


@pytest.mark.parametrize("model_type", ["olmo", "olmo2"])
def test_olmo_takes_two_keys_or_refuses(model_type: str, tmp_path: Path) -> None:
    config = saved(model_type, tmp_path / "pi", "pi", scale=4)
    assert config["rope_scaling"] == {"type": "linear", "factor": 4.0}
    assert config["rope_parameters"]["rope_type"] == "linear"
    config = saved(model_type, tmp_path / "yarn", "yarn", scale=4)
    assert len(config["rope_scaling"]) > 2  # an error there, not a model without its scaling
    config = saved(model_type, tmp_path / "ntk", "ntk", scale=4)
    assert "rope_scaling" not in config


def test_phi3_takes_lists_alone() -> None:
    legacy = get_adapter("phi3").legacy(zoo.tiny_config("phi3"))
    rope = {**LISTS, "short_factor": [1.0], "long_factor": [2.0], "attention_factor": 1.5}
    told = legacy.values(rope)["rope_scaling"]
    assert told == {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    assert [len(one.get("rope_scaling", ())) for one in legacy.variants(rope)] == [3, len(rope), 0]
