"""The context lengths of shipped configs, which `tests/support/checkpoints.json` has with sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc import inspect_rope, patch_model, patched
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.evaluation.measuring.candidates import Candidate, checked_candidates
from hf_posenc.evaluation.recommend import recommend
from hf_posenc.model.context import Context, context_of, readings
from hf_posenc.model.discovery import PER_LENGTH, select, tables_of
from hf_posenc.model.sampled import sample_of
from hf_posenc.patch.frequencies import refuse_local
from tests.support import zoo
from tests.support.families import text_types

CHECKPOINTS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "support" / "checkpoints.json").read_text(encoding="utf-8")
)
# Published lengths that no config says, with the reason.
OTHERWISE = {
    "Qwen/Qwen2.5-7B-Instruct-1M": "dual chunk attention, which transformers does not compute",
    "Qwen/Qwen2.5-14B-Instruct-1M": "dual chunk attention, which transformers does not compute",
    "deepseek-ai/DeepSeek-V2-Lite": "its table is that of 163,840 tokens",
    "deepseek-ai/DeepSeek-V3": "its table is that of 163,840 tokens",
    "openbmb/MiniCPM4-8B (card's LongRoPE block)": "no number of its config is longer than 32,768",
    "tencent/Hunyuan-A13B-Instruct": "no number of its config is longer than 32,768",
    "mistralai/Mistral-7B-v0.1": "its config has 32,768",
    "codellama/CodeLlama-7b-hf": "trained on 16,384 tokens",
}
CASES = [pytest.param(one, id=one["checkpoint"]) for one in CHECKPOINTS]
SURE = [case for one, case in zip(CHECKPOINTS, CASES, strict=True) if len(one["reads"]) == 1]
TWO_WAYS = [case for one, case in zip(CHECKPOINTS, CASES, strict=True) if len(one["reads"]) == 2]
SCALED = [
    case
    for one, case in zip(CHECKPOINTS, CASES, strict=True)
    if len(one["reads"]) == 1 and one["reads"][0][0] < one["reads"][0][1]
]


def first_of_each_form(cases: list[Any]) -> list[Any]:
    """The checkpoints; all but the first of each kind of scaling and lengths are slow."""
    forms, found = set[tuple[Any, ...]](), []
    for case in cases:
        one: Any = case.values[0]
        scaling = one["config"].get("rope_scaling") or one["config"].get("rope_parameters") or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        original, reach, trained = one["reads"][0]
        own_code = one["model_type"] == "exaone4"
        form = (kind, original < reach, trained < reach, reach > 1 << 20, own_code)
        marks = pytest.mark.slow if form in forms else ()
        found.append(pytest.param(one, id=one["checkpoint"], marks=marks))
        forms.add(form)
    return found


def built(checkpoint: dict[str, Any]) -> PreTrainedModel:
    """A tiny model with the positions of a checkpoint; of a Llama, where its code is not in transformers."""
    kind, config = checkpoint["model_type"], dict(checkpoint["config"])
    known = kind in text_types()
    scaling = dict(config.pop("rope_scaling", None) or config.pop("rope_parameters", None) or {})
    theta = float(config.pop("rope_theta", 10_000.0))
    like = zoo.tiny_config(kind if known else "llama")
    current = dict(getattr(like, "rope_parameters", None) or {})
    nested = next((current[key] for key in ("full_attention", "compress") if key in current), None)
    entry = {
        **{key: value for key, value in (nested or current).items() if key != "rope_type"},
        "rope_theta": theta,
        "rope_type": "default",
        **scaling,
    }
    entry["rope_type"] = entry.pop("type", entry["rope_type"])
    if "short_factor" in entry:
        pairs = len(tables_of(zoo.build(like.model_type))[0].live()[0])
        entry |= {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    config["rope_parameters"] = {**current, "full_attention": entry} if nested else entry
    return zoo.build(like.model_type, **config)


def context(checkpoint: dict[str, Any]) -> Context:
    return Context(*checkpoint["reads"][0])


def test_enough_checkpoints() -> None:
    assert len(CHECKPOINTS) >= 30
    assert len(SCALED) >= 25


@pytest.mark.parametrize("checkpoint", CASES)
def test_lengths_that_are_read(checkpoint: dict[str, Any]) -> None:
    for table in tables_of(built(checkpoint)):
        assert readings(table) == tuple(Context(*each) for each in checkpoint["reads"])
    if len(checkpoint["reads"]) == 1 and checkpoint["checkpoint"] not in OTHERWISE:
        assert context(checkpoint).reach == checkpoint["published"]


@pytest.mark.parametrize("checkpoint", first_of_each_form(SCALED))
def test_a_scaled_checkpoint_is_scaled_further(checkpoint: dict[str, Any]) -> None:
    model, read = built(checkpoint), context(checkpoint)
    with pytest.raises(PosencError, match="already scaled") as raised:
        patch_model(model, "yarn", scale=2, layers="all")
    assert f"{read.original:,} tokens, to {2 * read.original:,}" in str(raised.value)
    with patched(model, "pi", scale=2, replace=True, layers="all"):
        patch = zoo.in_force(model)
        assert patch.original_max_position_embeddings == read.original
        assert patch.extended_length == 2 * read.original
    assert f"{read.reach:,} tokens, to {2 * read.reach:,}" in str(raised.value)
    with patched(model, "pi", target_length=2 * read.reach, compose=True, layers="all"):
        patch = zoo.in_force(model)
        assert patch.original_max_position_embeddings == read.reach
        assert patch.options["scale"] == 2


@pytest.mark.parametrize("checkpoint", first_of_each_form([*SCALED, *TWO_WAYS]))
def test_its_own_scaling_without_numbers_is_the_same(checkpoint: dict[str, Any]) -> None:
    model = built(checkpoint)
    before = inspect_rope(model)
    table = select(tables_of(model), "full", whole=True)[0]
    options: dict[str, Any] = {"update": "sequence"} if table.rope_type in PER_LENGTH else {}
    if table.rope_type == "linear" and len(checkpoint["reads"]) == 2:  # the length that it reaches
        options["original_max_position_embeddings"] = checkpoint["reads"][0][0]
    try:
        refuse_local(model, [table], sample_of(model))
    except UnsupportedModelError:  # whose full layers do not rotate
        options["layers"] = "all"
    with patched(model, table.rope_type, **options):
        after = inspect_rope(model)
        assert len(after) == len(before)
        for new, old in zip(after, before, strict=True):
            assert torch.allclose(new.inv_freq, old.inv_freq, rtol=1e-5)
            assert new.attention_factor == pytest.approx(old.attention_factor)


@pytest.mark.parametrize("checkpoint", first_of_each_form(SURE))
def test_what_is_recommended_and_truncated(checkpoint: dict[str, Any], monkeypatch: Any) -> None:
    # It searches for a second, and nothing below depends on it.
    monkeypatch.setattr("hf_posenc.evaluation.recommend.options.least_base", lambda *_: None)
    model, read = built(checkpoint), context(checkpoint)
    assert Candidate.parse("truncation").checked(model).original == read.reach
    on_meta: Any = cast(nn.Module, model).to("meta")
    assert not recommend(on_meta, read.reach).needed
    if read.reach > 1 << 20:
        return  # the longest target is not far beyond
    if checkpoint["model_type"] == "exaone4":  # whose full layers do not rotate
        with pytest.raises(UnsupportedModelError, match="need no patch, or log_n"):
            recommend(on_meta, 2 * read.reach)
        return
    advice = recommend(on_meta, 2 * read.reach)
    assert advice.needed
    assert (advice.carried.original, advice.carried.trained) == (read.original, read.trained)
    scaled = read.original < read.reach
    assert advice.start in ((read.original, read.reach) if scaled else (read.reach,))


@pytest.mark.parametrize("checkpoint", TWO_WAYS)
def test_two_readings_are_asked_about(checkpoint: dict[str, Any]) -> None:
    model = built(checkpoint)
    before, after = (Context(*each) for each in checkpoint["reads"])
    with pytest.raises(PosencError, match=f"{before.original} or {after.original}"):
        patch_model(model, "yarn", scale=2, replace=True)
    for read in (before, after):
        given: dict[str, Any] = {"original_max_position_embeddings": read.original}
        with patched(model, "yarn", scale=2, replace=True, **given):
            assert zoo.in_force(model).extended_length == 2 * read.original
    with pytest.raises(PosencError, match="two ways"):
        checked_candidates(model, ["truncation"])
    option = f"original_max_position_embeddings={before.original}"
    (cut, _), _ = checked_candidates(model, ["truncation", f"yarn:scale=2,replace=true,{option}"])
    assert cut.original == before.reach
    (table, *_) = tables_of(model)
    assert context_of(table, before.original).reach == before.reach


def test_another_maximum_changes_nothing_else() -> None:
    """The same weights and tables: the same start, and the same length of truncation."""
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    found = []
    for maximum in (64, 96, 256, 1024):
        parameters = {"rope_parameters": dict(scaling), "max_position_embeddings": maximum}
        model = zoo.from_config(zoo.tiny_config("llama", **parameters)).eval()
        truncated = Candidate.parse("truncation").checked(model).original
        with patched(model, "yarn", scale=8, replace=True), torch.no_grad():
            found.append((truncated, model(zoo.tokens(80)).logits))
    assert {length for length, _ in found} == {256}
    assert all(torch.equal(logits, found[0][1]) for _, logits in found)


def test_a_length_that_is_given_goes_before_what_is_known() -> None:
    gemma = next(one for one in CHECKPOINTS if one["checkpoint"] == "google/gemma-3-12b-it")
    for table in tables_of(built(gemma)):
        assert context_of(table, 16384) == Context(16384, 131072, 131072)
