"""Methods inside attention in encoder-decoder models: both parts, one of them, and cross-attention, which stays."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_posenc import (
    PosencError,
    from_pretrained,
    inspect_rope,
    patch_model,
    unpatch_model,
)
from hf_posenc.methods import LogN, NoPE, ReRoPE
from hf_posenc.model import masks
from tests.support import zoo
from tests.support.attention_native import KEEPING, RULES, WINDOW, Rule, reference
from tests.support.selection import covering, late
from tests.support.zoo_registry import quiet

LENGTH = 20
LOG_N = 8
TOLERANCE = {"dia": 1e-2}
"""Dia does not scale its scores, which amplifies rounding."""
ALL = {**RULES, "alibi keep_rope": KEEPING, "log_n": ({}, Rule(log_n=LOG_N))}
TEXT = ("t5gemma", "t5gemma2", "dia")
"""Types whose encoder reads text."""


def patch(model: PreTrainedModel, name: str, layers: str = "all") -> PreTrainedModel:
    length = LOG_N if name == "log_n" else zoo.ORIGINAL_LENGTH
    options: dict[str, Any] = {"layers": layers, "original_max_position_embeddings": length}
    return patch_model(model, name.split()[0], **options, **ALL[name][0])


def close(model: PreTrainedModel, got: Tensor, want: Tensor) -> bool:
    return zoo.relative_difference(got, want) < TOLERANCE.get(model.config.model_type, 1e-4)


def part_of(model: PreTrainedModel, name: str) -> nn.Module:
    part: nn.Module = model.get_encoder() if name == "encoder" else model.get_decoder()
    return part


@pytest.mark.parametrize(
    ("model_type", "name"), covering(zoo.seq2seq_types(), [*RULES, "alibi keep_rope"])
)
def test_every_layer_equals_scores_made_pair_by_pair(model_type: str, name: str) -> None:
    """Both texts are of the same length: by that, cross-attention looks like self-attention."""
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    before, other = zoo.logits(model, ids), zoo.twin(model)
    part = other if model_type in TEXT else part_of(other, "decoder")
    want = reference(other, ids, ALL[name][1], part)
    patch(model, name)
    assert want is not None
    assert zoo.relative_difference(want, before) > 10 * TOLERANCE.get(model_type, 1e-5)
    assert close(model, zoo.logits(model, ids), want)
    assert torch.equal(zoo.logits(unpatch_model(model), ids), before)


CHOICES = [("decoder", "rerope"), ("decoder", "alibi"), ("decoder", "log_n"), ("encoder", "rerope")]


@pytest.mark.parametrize(("choice", "model_type"), covering([*CHOICES, ("encoder", "alibi")], TEXT))
def test_one_part_alone(choice: tuple[str, str], model_type: str) -> None:
    """The other one computes what it did, also where both texts are of other lengths."""
    part, name = choice
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    given = {} if model_type == "dia" else {"decoder_input_ids": zoo.tokens(13, seed=2)}
    other = zoo.twin(model)
    want = reference(other, ids, ALL[name][1], _full_layers(other, part), **given)
    patch(model, name, layers=part)
    assert want is not None
    assert close(model, zoo.logits(model, ids, **given), want)
    patched = zoo.in_force(model)
    assert all(f"{part}." in path for path in patched.layers)


@pytest.mark.parametrize("model_type", ["t5gemma", *late(["dia"])])
def test_a_number_of_a_dictionary_is_that_layer_of_both_parts(model_type: str) -> None:
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    before, other = zoo.logits(model, ids), zoo.twin(model)
    chosen = [m for n, m in other.named_modules() if n.endswith("layers.0")]
    assert len(chosen) == 2
    want = reference(other, ids, RULES["rerope"][1], nn.ModuleList(chosen))
    patch_model(model, {0: ReRoPE(window=WINDOW)})
    assert want is not None
    assert zoo.relative_difference(want, before) > 10 * TOLERANCE.get(model_type, 1e-5)
    got = zoo.logits(model, ids)
    assert close(model, got, want)
    assert close(model, in_steps(model, ids, [7, 1, 12]), got)
    assert torch.equal(zoo.logits(unpatch_model(model), ids), before)


@pytest.mark.parametrize(
    ("model_type", "request_", "message"),
    [
        ("t5gemma", {"decoder": ReRoPE()}, "'decoder' is no key of a dictionary.*layers='decoder'"),
        (
            "t5gemma2",
            {0: ReRoPE(), 1: NoPE()},
            "reads two texts in one softmax, where layers cannot",
        ),
        ("t5gemma", {0: LogN()}, 'layers="decoder" patches the decoder alone'),
    ],
)
def test_dictionaries_that_parts_exclude(model_type: str, request_: Any, message: str) -> None:
    zoo.refused(zoo.build(model_type), message, request_)


def _full_layers(model: PreTrainedModel, part: str) -> nn.Module:
    """The layers of a part that do not have a window, which a name of a part selects."""
    layers: Any = next(m for n, m in part_of(model, part).named_modules() if n.endswith("layers"))
    chosen = (layer for layer in layers if "sliding" not in getattr(layer, "attention_type", ""))
    return nn.ModuleList(chosen)


def test_frequencies_of_one_part() -> None:
    """That of the other part stays, in the saved config too."""
    model = zoo.build("t5gemma2")
    patch_model(model, "yarn", scale=4, layers="decoder")
    types = {table.modules[0].split(".")[1]: table.rope_type for table in inspect_rope(model)}
    assert "yarn" in str(model.config.decoder.rope_parameters)
    assert "yarn" not in str(model.config.encoder.text_config.rope_parameters)
    assert set(types) == {"encoder", "decoder"}


@pytest.mark.parametrize("layers", ["encoder", "decoder"])
def test_parts_are_named_where_there_are_parts(layers: str) -> None:
    with pytest.raises(PosencError, match="is not an encoder-decoder model"):
        patch_model(zoo.build("llama"), "rerope", layers=layers)


def test_a_part_without_rotation_of_text() -> None:
    with pytest.raises(PosencError, match="has no rotary table of text"):
        patch_model(zoo.build("moonshine"), "rerope", layers="encoder")


@pytest.mark.parametrize("name", ["log_n", "fire", *late(["t5", "xpos", "dynamic_ntk"])])
def test_causal_methods_are_for_the_decoder(name: str) -> None:
    zoo.refused(zoo.build("t5gemma"), 'layers="decoder" patches the decoder alone', name)


CACHED = {
    "rerope": RULES["rerope"][0],
    "self_extend": RULES["self_extend"][0],
    "alibi": {},
    "log_n": {},
    "fire": {},
    "dynamic_ntk": {},
}


@torch.no_grad()
def in_steps(model: PreTrainedModel, ids: Tensor, sizes: list[int], **given: Any) -> Tensor:
    """The decoder's text in pieces, with a cache, after one forward of the encoder."""
    whole = zoo._required_inputs(model.config, ids)
    encoded = whole | {k: v for k, v in given.items() if k in ("input_ids", "attention_mask")}
    mask = given.get("decoder_attention_mask")
    parts, cache, states, start = [], None, None, 0
    for size in sizes:
        text = whole["decoder_input_ids"][:, start : start + size]
        more: dict[str, Any] = {"decoder_input_ids": text, "past_key_values": cache}
        if mask is not None:
            more["decoder_attention_mask"] = mask[:, : start + size]
        if states is not None:
            known = BaseModelOutput(last_hidden_state=states)
            more["encoder_outputs"] = known
        with quiet():
            out: Any = model(**{**encoded, **more}, use_cache=True)
        cache, states, start = out.past_key_values, out.encoder_last_hidden_state, start + size
        parts.append(out.logits.double())
    return torch.cat(parts, 1)


@pytest.mark.filterwarnings("ignore:.*starts untrained")
@pytest.mark.parametrize(("name", "model_type"), covering(CACHED, TEXT))
def test_a_cache_gives_what_one_forward_gives(name: str, model_type: str) -> None:
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    options = {"layers": "decoder", "original_max_position_embeddings": 8, **CACHED[name]}
    patch_model(model, name, **options)
    full = zoo.logits(model, ids)
    assert close(model, in_steps(model, ids, [7, 1, 1, 5, 6]), full)


@pytest.mark.parametrize("model_type", ["t5gemma2", *late(["t5gemma"])])
def test_generation_chooses_the_tokens_of_whole_forwards(model_type: str) -> None:
    model, ids = zoo.build(model_type), zoo.tokens(11)
    patch(model, "self_extend")
    text = torch.tensor([[1]])
    for _ in range(6):
        logits = zoo.logits(model, ids, decoder_input_ids=text)
        text = torch.cat((text, logits[:, -1:].argmax(-1)), 1)
    with quiet():
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        got = model.generate(ids, max_new_tokens=6, decoder_start_token_id=1, **options)  # type: ignore[operator]
    assert torch.equal(got, text)


@pytest.mark.parametrize(
    ("model_type", "name", "dense"),
    [
        ("t5gemma2", "self_extend", 1),
        *late(["t5gemma", "t5gemma2"], ["self_extend", "alibi"], [1, 1 << 18]),
    ],
)
def test_padding_of_both_texts(
    model_type: str, name: str, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patch(zoo.build(model_type), name)
    monkeypatch.setattr(masks, "DENSE", dense)
    long, short = zoo.tokens(LENGTH), zoo.tokens(13, seed=3)
    first, second = zoo.tokens(15, seed=4), zoo.tokens(9, seed=5)
    alone = [
        zoo.logits(model, long, decoder_input_ids=first),
        zoo.logits(model, short, decoder_input_ids=second),
    ]
    pad = torch.zeros(1, LENGTH - 13, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long)
    for left in (False, True):
        rows = torch.cat((long, torch.cat((pad[0], short) if left else (short, pad[0]), 1)))
        texts = torch.cat((first, torch.cat((pad[1], second), 1)))
        given = {
            "attention_mask": (rows != 0).long(),
            "decoder_attention_mask": (texts != 0).long(),
        }
        got = zoo.logits(model, rows, decoder_input_ids=texts, **given)
        assert close(model, got[:1], alone[0])
        assert close(model, got[1:, 6:], alone[1])


def test_padding_is_refused_where_an_encoder_counts_it() -> None:
    """Dia's encoder takes no positions: behind a text, padding changes nothing."""
    model, rows = patch(zoo.build("dia"), "self_extend"), zoo.tokens(LENGTH, batch=2)
    alone = zoo.logits(model, rows[1:, :13])
    mask = torch.ones_like(rows)
    mask[1, 13:] = 0
    given = zoo._required_inputs(model.config, rows[:, :13]) | {"input_ids": rows}
    channels = len(alone)
    assert close(
        model,
        zoo.logits(model, rows, attention_mask=mask, decoder_input_ids=given["decoder_input_ids"])[
            channels:
        ],
        alone,
    )
    with pytest.raises(PosencError, match="counts padding before a text as tokens"):
        zoo.logits(model, rows, attention_mask=mask.flip(-1))


@pytest.mark.slow
def test_a_text_longer_than_written_masks() -> None:
    """The decoder of T5Gemma 2 joins the masks of both texts."""
    model, ids = zoo.build("t5gemma2"), zoo.tokens(600)
    short = zoo.tokens(500, seed=7)
    before = zoo.logits(model, ids, decoder_input_ids=short)
    patch_model(model, "rerope", window=10_000, layers="all")
    assert close(model, zoo.logits(model, ids, decoder_input_ids=short), before)


@pytest.mark.parametrize("model_type", ["t5gemma", *late(["t5gemma2"])])
def test_copies_and_saved_models(model_type: str, tmp_path: Path) -> None:
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    before, config = zoo.logits(model, ids), model.config.to_dict()
    unpatch_model(patch(model, "self_extend"))
    assert model.config.to_dict() == config
    patch(model, "self_extend")
    want = zoo.logits(model, ids)
    assert torch.equal(zoo.logits(copy.deepcopy(model), ids), want)
    assert torch.equal(zoo.logits(pickle.loads(pickle.dumps(model)), ids), want)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert close(model, zoo.logits(loaded, ids), want)
    assert close(model, zoo.logits(unpatch_model(loaded), ids), before)
    assert torch.equal(zoo.logits(unpatch_model(model), ids), before)
