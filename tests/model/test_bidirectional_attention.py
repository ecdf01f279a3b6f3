"""Methods inside attention on encoders, which read keys on both sides of a query, and in encoder-decoder models.

The references are float64, pair by pair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_posenc import PosencError, inspect_rope, patch_model, unpatch_model
from hf_posenc.attention import exact
from hf_posenc.methods import LogN, NoPE, ReRoPE
from hf_posenc.model import masks
from tests.support import zoo
from tests.support.attention_native import GROUP, KEEPING, RULES, WINDOW, Rule, reference
from tests.support.families import build_text_model, text_types
from tests.support.references import diffusion_ntk
from tests.support.selection import covering, late
from tests.support.zoo import CACHE
from tests.support.zoo_registry import quiet

LENGTH, SLOWNESS = 40, 4.0
CASES: dict[str, tuple[dict[str, Any], Rule]] = {
    **RULES,
    "leaky_rerope": (
        {"window": WINDOW, "k": SLOWNESS},
        Rule(query=lambda m: WINDOW + (m - WINDOW) / SLOWNESS, key=lambda n: n / SLOWNESS),
    ),
}


def _reference(model: PreTrainedModel, rule: Rule, ids: Tensor) -> Tensor:
    """Logits with the rotation of the layers that read the whole text by a rule; others keep RoPE."""
    other = zoo.twin(model)
    kinds = getattr(model.config, "layer_types", None)
    layers = next(each for name, each in other.named_modules() if name.endswith("layers"))
    chosen = [
        layer
        for index, layer in enumerate(layers.children())
        if not kinds or not kinds[index].startswith("sliding")
    ]
    found = reference(other, ids, rule, nn.ModuleList(chosen))
    assert found is not None
    return found


def _run(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits.double()


@pytest.mark.parametrize("method", CASES)
@pytest.mark.parametrize("model_type", ["eurobert", "modernbert"])
def test_a_pair_is_scored_by_its_signed_distance(model_type: str, method: str) -> None:
    options, rule = CASES[method]
    model, ids = build_text_model(model_type), zoo.tokens(LENGTH)
    expected = _reference(model, rule, ids)
    assert zoo.relative_difference(_reference(model, Rule(), ids), _run(model, ids)) < 1e-5
    patch_model(model, method, **options)
    assert zoo.relative_difference(_run(model, ids), expected) < 1e-5


@pytest.mark.parametrize("model_type", ["eurobert", "modernbert"])
def test_the_base_for_both_sides_is_another_rope_theta(model_type: str, tmp_path: Path) -> None:
    """That of the paper's equation, which plain transformers reads from the saved config; undone, nothing is left."""
    model, ids = build_text_model(model_type), zoo.tokens(LENGTH)
    stock, config = _run(model, ids), model.config

    def theta(config: Any) -> float:
        parameters = config.rope_parameters
        return float(parameters.get("full_attention", parameters)["rope_theta"])

    width = config.hidden_size // config.num_attention_heads
    table, _ = diffusion_ntk(width, theta(config), config.max_position_embeddings, scale=16)
    patch_model(model, "diffusion_ntk", scale=16)
    assert theta(model.config) == pytest.approx(table[1] ** (-width / 2))
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    assert zoo.relative_difference(_run(plain, ids), _run(model, ids)) < 1e-5
    assert zoo.relative_difference(_run(model, ids), stock) > 1e-2
    assert torch.equal(_run(unpatch_model(model), ids), stock)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", CASES)
def test_padding_changes_nothing(method: str, side: str) -> None:
    options, rule = CASES[method]
    model, ids = build_text_model("eurobert"), zoo.tokens(LENGTH, batch=2)
    short = 25
    mask, shown = torch.ones_like(ids), slice(0, short)
    if side == "left":
        mask[1, : LENGTH - short] = 0
        ids[1, LENGTH - short :] = ids[1, :short].clone()
        shown = slice(LENGTH - short, LENGTH)
    else:
        mask[1, short:] = 0
    expected = [_reference(model, rule, row)[0] for row in (ids[:1], ids[1:, shown])]
    patch_model(model, method, **options)
    out = _run(model, ids, mask)
    assert zoo.relative_difference(out[0], expected[0]) < 1e-5
    assert zoo.relative_difference(out[1, shown], expected[1]) < 1e-5


def test_far_more_tokens_than_a_written_mask_holds() -> None:
    # Handles of masks from 512 x 512 pairs on.
    model, ids = build_text_model("eurobert"), zoo.tokens(520, batch=2)
    mask = torch.ones_like(ids)
    mask[1, 300:] = 0
    patch_model(model, "rerope", original_max_position_embeddings=2 * WINDOW)
    short = _run(model, ids[1:, :300])
    assert zoo.relative_difference(_run(model, ids, mask)[1, :300], short[0]) < 1e-5


def test_gradients_are_those_of_the_reference() -> None:
    model, ids = build_text_model("eurobert"), zoo.tokens(LENGTH)
    torch.manual_seed(0)
    patch_model(model, "kerple_log").double()
    model(input_ids=ids).logits.square().sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if "r1" in name or "r2" in name}
    assert trained
    name = next(iter(trained))
    parameter = dict(model.named_parameters())[name]
    with torch.no_grad():
        values = []
        for step in (2**-10, -(2**-10)):  # the parameters stay in float32
            parameter[0] += step
            values.append(_run(model, ids).square().sum())
            parameter[0] -= step
    slope = (values[0] - values[1]) / 2**-9
    grad = trained[name]
    assert grad is not None
    assert abs(float(slope - grad[0])) < 2e-3 * abs(float(slope))


@pytest.mark.parametrize("method", ["log_n", "fire", "t5", "shaw", "xpos", "dynamic_ntk"])
def test_methods_of_causal_texts_are_refused(method: str) -> None:
    words = f"in both directions, and {method} is defined for keys that come before the query. Defined for both: "
    zoo.refused(build_text_model("eurobert"), words, method)


def test_what_counts_the_past_is_refused() -> None:
    with pytest.raises(PosencError, match="log_n counts the keys before a query"):
        patch_model(build_text_model("eurobert"), "rerope", log_n=True)


ROTARY = (
    *("eurobert", "gte", "jina_embeddings_v3", "modernbert", "modernvbert", "nomic_bert"),
    *("ultrabert", "ultravbert"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [name for name, kind in text_types().items() if "MaskedLM" in kind and name in ROTARY],
)
def test_every_rotary_encoder_takes_bands_and_biases(model_type: str) -> None:
    model, ids = build_text_model(model_type), zoo.tokens(LENGTH)
    before = _run(model, ids)
    for method, options, changes in (
        ("rerope", {"window": 500}, False),
        ("self_extend", {"window": WINDOW, "group": GROUP}, True),
        ("alibi", {}, True),
    ):
        patch_model(model, method, layers="all", **options)  # type: ignore[arg-type]
        difference = zoo.relative_difference(_run(model, ids), before)
        assert difference > 1e-2 if changes else difference < 1e-5, method
        assert torch.equal(_run(unpatch_model(model), ids), before)


# Encoder-decoder models: both parts, one of them, and cross-attention, which stays


TOKENS = 20
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
def test_every_layer_equals_scores_made_pair_by_pair(
    model_type: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both texts are of the same length: by that, cross-attention looks like self-attention."""
    model, ids = zoo.build(model_type), zoo.tokens(TOKENS)
    before, other = zoo.logits(model, ids), zoo.twin(model)
    part = other if model_type in TEXT else part_of(other, "decoder")
    want = reference(other, ids, ALL[name][1], part)
    patch(model, name)
    assert want is not None
    assert zoo.relative_difference(want, before) > 10 * TOLERANCE.get(model_type, 1e-5)
    assert close(model, zoo.logits(model, ids), want)
    monkeypatch.setattr(exact, "SCRATCH", 1)  # 16 queries at a time, and the rest
    assert close(model, zoo.logits(model, ids), want)
    assert torch.equal(zoo.logits(unpatch_model(model), ids), before)


CHOICES = [("decoder", "rerope"), ("decoder", "alibi"), ("decoder", "log_n"), ("encoder", "rerope")]


@pytest.mark.parametrize(("choice", "model_type"), covering([*CHOICES, ("encoder", "alibi")], TEXT))
def test_one_part_alone(choice: tuple[str, str], model_type: str) -> None:
    """The other one computes what it did, also where both texts are of other lengths."""
    part, name = choice
    model, ids = zoo.build(model_type), zoo.tokens(TOKENS)
    given = {} if model_type == "dia" else {"decoder_input_ids": zoo.tokens(13, seed=2)}
    other = zoo.twin(model)
    want = reference(other, ids, ALL[name][1], _full_layers(other, part), **given)
    patch(model, name, layers=part)
    assert want is not None
    assert close(model, zoo.logits(model, ids, **given), want)
    assert all(f"{part}." in path for path in zoo.in_force(model).layers)


@pytest.mark.parametrize("model_type", ["t5gemma", *late(["dia"])])
def test_a_number_of_a_dictionary_is_that_layer_of_both_parts(model_type: str) -> None:
    model, ids = zoo.build(model_type), zoo.tokens(TOKENS)
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


DECODER = 'layers="decoder" patches the decoder alone'


@pytest.mark.parametrize(
    ("model_type", "request_", "options", "message"),
    [
        ("llama", "rerope", {"layers": "encoder"}, "is not an encoder-d"),
        ("llama", "rerope", {"layers": "decoder"}, "is not an encoder-d"),
        ("moonshine", "rerope", {"layers": "encoder"}, "has no rotary table of text"),
        ("t5gemma", "log_n", {}, DECODER),
        ("t5gemma", "fire", {}, DECODER),
        *late(["t5gemma"], ["t5", "xpos", "dynamic_ntk"], [{}], [DECODER]),
        ("t5gemma", {0: LogN()}, {}, DECODER),
        ("t5gemma", {"decoder": ReRoPE()}, {}, "'decoder' is no key of a dict.*layers='decoder'"),
        ("t5gemma2", {0: ReRoPE(), 1: NoPE()}, {}, "reads two texts in one softmax, where layers"),
    ],
)
def test_exclusions(model_type: str, request_: Any, options: dict[str, Any], message: str) -> None:
    zoo.refused(zoo.build(model_type), message, request_, **options)


CACHED = {
    **{name: RULES[name][0] for name in ("rerope", "self_extend")},
    **{name: {} for name in ("alibi", "log_n", "fire", "dynamic_ntk")},
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
        more: dict[str, Any] = {"decoder_input_ids": text, CACHE: cache}
        if mask is not None:
            more["decoder_attention_mask"] = mask[:, : start + size]
        if states is not None:
            more["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
        with quiet():
            out: Any = model(**{**encoded, **more}, use_cache=True)
        cache, states, start = out[CACHE], out.encoder_last_hidden_state, start + size
        parts.append(out.logits.double())
    return torch.cat(parts, 1)


@pytest.mark.filterwarnings("ignore:.*starts untrained")
@pytest.mark.parametrize(("name", "model_type"), covering(CACHED, TEXT))
def test_a_cache_gives_what_one_forward_gives(name: str, model_type: str) -> None:
    model, ids = zoo.build(model_type), zoo.tokens(TOKENS)
    options = {"layers": "decoder", "original_max_position_embeddings": 8, **CACHED[name]}
    patch_model(model, name, **options)
    assert close(model, in_steps(model, ids, [7, 1, 1, 5, 6]), zoo.logits(model, ids))


@pytest.mark.parametrize(
    ("model_type", "name", "dense"),
    [
        ("t5gemma2", "self_extend", 1),
        *late(["t5gemma", "t5gemma2"], ["self_extend", "alibi"], [1, 1 << 18]),
    ],
)
def test_padding_of_both_texts(model_type: str, name: str, dense: int, monkeypatch: Any) -> None:
    model = patch(zoo.build(model_type), name)
    monkeypatch.setattr(masks, "DENSE", dense)
    long, short = zoo.tokens(TOKENS), zoo.tokens(13, seed=3)
    first, second = zoo.tokens(15, seed=4), zoo.tokens(9, seed=5)
    alone = [
        zoo.logits(model, long, decoder_input_ids=first),
        zoo.logits(model, short, decoder_input_ids=second),
    ]
    pad = torch.zeros(1, TOKENS - 13, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long)
    for left in (False, True):
        rows = torch.cat((long, torch.cat((pad[0], short) if left else (short, pad[0]), 1)))
        texts = torch.cat((first, torch.cat((pad[1], second), 1)))
        given = {"attention_mask": (rows != 0).long()}
        given["decoder_attention_mask"] = (texts != 0).long()
        got = zoo.logits(model, rows, decoder_input_ids=texts, **given)
        assert close(model, got[:1], alone[0])
        assert close(model, got[1:, 6:], alone[1])


def test_padding_is_refused_where_an_encoder_counts_it() -> None:
    """Dia's encoder takes no positions: behind a text, padding changes nothing."""
    model, rows = patch(zoo.build("dia"), "self_extend"), zoo.tokens(TOKENS, batch=2)
    alone = zoo.logits(model, rows[1:, :13])
    mask = torch.ones_like(rows)
    mask[1, 13:] = 0
    given = zoo._required_inputs(model.config, rows[:, :13]) | {"input_ids": rows}
    channels = len(alone)
    texts = given["decoder_input_ids"]
    found = zoo.logits(model, rows, attention_mask=mask, decoder_input_ids=texts)
    assert close(model, found[channels:], alone)
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
