"""Where positions enter a model: what is found, the certificate, and what the certificate does not let pass."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ConvNextConfig, ConvNextModel, PreTrainedModel

from hf_posenc import UnsupportedModelError, get_patch, inspect_positions, patch_model
from hf_posenc.patch.patching import native_seams
from hf_posenc.seams import inspection as kinds
from hf_posenc.seams.inspection import Positions
from hf_posenc.seams.native import advice_on
from hf_posenc.seams.probes import absolute, relative
from tests.seams.test_hidden import ROWS, around, multiplied
from tests.support.families import build_text_model, text_types
from tests.support.selection import covering, late, quick
from tests.support.zoo import CACHE, logits, refused, snapshot, tokens

# Kinds and places of the sources by model type, as its modelling code has them; the certificate must be rounding.
COMPLETE = {
    "llama": {kinds.ROTARY: "model.rotary_emb"},
    "gpt_oss": {kinds.ROTARY: "model.rotary_emb", kinds.SINKS: "model.layers.*.self_attn.sinks"},
    "gptj": {
        kinds.ROTARY_TABLE: f"transformer.{'rotary_emb' if CACHE == 'cache' else 'h.*.attn'}.embed_positions"
    },
    "gpt2": {kinds.LEARNED: "transformer.wpe.weight"},
    "opt": {kinds.LEARNED: "model.decoder.embed_positions.weight"},
    "bert": {kinds.LEARNED: "bert.embeddings.position_embeddings.weight"},
    "xglm": {kinds.SINUSOIDAL: "model.embed_positions.weights"},
    "bloom": {kinds.ALIBI: "transformer.h.*(alibi)"},
    "mpt": {kinds.ALIBI: "transformer.blocks.*(position_bias)"},
    "t5": {
        kinds.BY_DISTANCE: "encoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight"
    },
    "xlnet": {kinds.ARGUMENT: "transformer.layer.*(r)"},
    "longformer": {kinds.LEARNED: "longformer.embeddings.position_embeddings.weight"},
}
# What cannot be silenced, by model type.
LEFT = {
    "mamba": {kinds.RECURRENCE: "backbone.layers.*.mixer"},
    "lfm2_moe": {kinds.CONVOLUTION: "model.layers.*.conv"},
    "fnet": {kinds.RECURRENCE: "fnet.encoder.layer.*.fourier"},
    "ministral3": {kinds.QUERIES: "model.layers.*.self_attn"},
    "prophetnet": {kinds.ENCODING: "prophetnet.decoder.layers.*.self_attn"},
}


@functools.cache
def inspected(model_type: str) -> Positions:
    """The sources of positions in a model of this type; all tests read one copy."""
    return inspect_positions(build_text_model(model_type))


@pytest.mark.parametrize("model_type", quick(COMPLETE, ("llama", "gptj", "gpt2", "bloom", "t5")))
def test_every_source_is_found(model_type: str) -> None:
    positions = inspected(model_type)
    found = {source.kind: source.where for source in reversed(positions.sources)}
    assert found == COMPLETE[model_type]
    assert positions.complete
    assert positions.certificate < 5e-6


@pytest.mark.parametrize("model_type", quick(LEFT, ("mamba", "ministral3")))
def test_what_cannot_be_silenced_is_named(model_type: str) -> None:
    positions = inspected(model_type)
    assert not positions.complete
    assert LEFT[model_type].items() <= {each.kind: each.where for each in positions.rest}.items()


@pytest.mark.parametrize(
    ("model_type", "start", "rows"),
    [("gpt2", 0, 64), ("roberta", 1, 63), ("opt", 2, 64), ("whisper", 0, 448)],
)
def test_the_first_row_is_read_from_the_trace(model_type: str, start: int, rows: int) -> None:
    source = inspected(model_type).of_kind(kinds.LEARNED)[-1]
    assert source.start == start
    assert source.facts.startswith(f"{rows} positions of ")


def test_slopes_of_alibi_are_those_of_the_paper() -> None:
    facts = inspected("bloom").sources[0].facts
    # Press et al. 2022, section 3, for 4 heads.
    slopes = [2 ** (-8 * (head + 1) / 4) for head in range(4)]
    assert facts == f"slopes {', '.join(f'{slope:.4g}' for slope in slopes)}"


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 16, **LISTS}
MOVES = "frequencies change with the length of the text, those of cached keys do not"


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "default"}, ""),
        (DYNAMIC, f", dynamic, factor 4, from 64 to 256 or from 16 to 64 tokens, {MOVES}"),
        (YARN, ", yarn, factor 4, from 16 to 64 tokens"),
        (LONGROPE, f", longrope, from 16 to 64 tokens, {MOVES}"),
        ({**LONGROPE, "long_factor": [1.0] * 8}, ", longrope, from 16 to 64 tokens"),
    ],
    ids=["default", "dynamic", "yarn", "longrope", "longrope-of-one-table"],
)
def test_a_scaling_of_the_config_is_in_its_row(rope: dict[str, Any], scaling: str) -> None:
    model = build_text_model("llama", rope_parameters={"rope_theta": 10_000.0, **rope})
    before = logits(model, tokens(96))
    (source,) = inspect_positions(model).sources
    assert source.facts == f"d 16, theta 10,000{scaling}"
    assert torch.equal(logits(model, tokens(96)), before)


# Sources that are hidden on purpose


class _HiddenBias(nn.Module):
    """Attention of one head to all tokens, with a bias by distance that no argument or tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        place = torch.arange(hidden_states.shape[1])
        scores = hidden_states @ hidden_states.mT / 8 - 0.5 * (place[:, None] - place).abs()
        return scores.softmax(-1) @ hidden_states, None


HIDDEN: dict[str, Callable[[nn.Module], object]] = {
    "table": around("transformer.wte", after=lambda out: out + ROWS[: out.shape[1]]),
    "bias": lambda model: model.set_submodule("transformer.h.2.attn", _HiddenBias()),
    # On queries, keys and values of one layer.
    "factor": around(
        "transformer.h.1.attn.c_attn", after=multiplied(lambda place: 1 + 0.2 * place.log1p())
    ),
    # A block that mixes each token with the one before it.
    "shift": around(
        "transformer.h.1", before=lambda values, kwargs: (values + 0.1 * values.roll(1, 1), kwargs)
    ),
}


def _with_hidden(source: str) -> PreTrainedModel:
    model: Any = build_text_model("gpt2")
    model.set_attn_implementation("eager")
    HIDDEN[source](model)
    return model


@pytest.mark.parametrize("source", ["table", "bias", *late(["shift", "factor"])])
def test_a_hidden_source_leaves_the_certificate_open(source: str) -> None:
    positions = inspect_positions(_with_hidden(source))
    assert not positions.complete
    assert positions.rest
    assert positions.of_kind(kinds.LEARNED)  # the one that is not hidden


@pytest.mark.parametrize(
    ("method", "source"), covering(["interpolate", "nope"], ["table", "bias", "factor"])
)
def test_a_model_with_a_hidden_source_is_refused(method: str, source: str) -> None:
    scale = 2 if method == "interpolate" else None
    words = "gets positions from a place that hf_posenc does not know"
    refused(_with_hidden(source), words, method, scale=scale)


# A model is as before


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "gpt_oss"])
def test_inspecting_leaves_the_model_as_it_was(model_type: str) -> None:
    model = build_text_model(model_type).train()
    state, weights = snapshot(model), copy.deepcopy(model.state_dict())
    inspect_positions(model)
    assert snapshot(model) == state
    for name, value in model.state_dict(keep_vars=True).items():
        assert torch.equal(value, weights[name])
        assert value.grad is None


def test_a_patch_is_suspended_and_put_back() -> None:
    model, ids = build_text_model("llama"), tokens(9)
    plain = inspect_positions(model)
    patch_model(model, "alibi", scale=2)
    before = logits(model, ids)
    positions = inspect_positions(model)
    assert positions.sources == plain.sources
    assert positions.patch is not None
    assert positions.patch.startswith("alibi(")
    assert get_patch(model) is not None
    assert torch.equal(logits(model, ids), before)


def test_a_model_without_positions_has_no_source() -> None:
    model: Any = build_text_model("gpt2")
    model.transformer.wpe.weight.data[:] = 1.0
    positions = inspect_positions(model)
    assert positions.complete
    assert not positions.sources
    assert positions.describe() == "The order of tokens does not matter to it"


# The experiments themselves


def test_the_experiments_tell_absolute_from_relative() -> None:
    table, rotation = build_text_model("gpt2"), build_text_model("llama")
    assert absolute(table)[""] > 1e-2 > 1e-5 > max(relative(table).values())
    assert max(relative(rotation).values()) > 1e-2 > 1e-5 > max(absolute(rotation).values())


def test_a_model_that_does_not_run_on_tokens_is_refused_in_one_line() -> None:
    model: Any = build_text_model("bert", "BertForMultipleChoice")  # without its head it does
    assert inspect_positions(model).sources[0].where == COMPLETE["bert"][kinds.LEARNED]
    model.bert.forward = lambda pixel_values: None
    with pytest.raises(UnsupportedModelError, match="cannot be run on a few tokens alone") as error:
        inspect_positions(model)
    assert "\n" not in str(error.value)
    with pytest.raises(UnsupportedModelError, match=r"no rotary embedding.*few tokens alone \("):
        patch_model(model, "alibi")
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match="first: no --dry-run"):
        inspect_positions(type(build_text_model("gpt2"))(build_text_model("gpt2").config))


def test_the_table_prints_in_a_terminal_and_a_notebook() -> None:
    positions = inspected("opt")
    text, page = repr(positions), positions._repr_html_()
    row = ("learned table", "model.decoder.embed_positions.weight", "from row 2")
    for words in (*row, "no source is missing.", "absolute: how far"):
        assert words in text
        assert words in page
    assert positions.to_dict()["complete"] is True


# Refusals


@pytest.mark.parametrize(
    ("model_type", "method", "words"),
    [
        ("gpt2", "yarn", "Positions come from a learned table transformer.wpe.weight"),
        ("bloom", "yarn", "Positions come from ALiBi"),
        ("mamba", "yarn", "convolution backbone.layers.*.mixer (MambaMixer). There is nothing to"),
        ("llama", "interpolate", "Methods for a rotary embedding: frequency methods (yarn"),
        ("gptj", "interpolate", "Methods for a rotary table: frequency methods (yarn"),
    ],
)
def test_a_refusal_names_what_the_model_has(model_type: str, method: str, words: str) -> None:
    refused(build_text_model(model_type), re.escape(words), method, scale=4)


@pytest.mark.parametrize(("model_type", "reads_both"), [("gpt2", False), ("bert", True)])
def test_an_encoder_is_advised_no_causal_bias(model_type: str, reads_both: bool) -> None:
    positions = inspected(model_type)
    assert positions.bidirectional == reads_both
    longer, replaced = advice_on(native_seams(), positions)
    assert longer == "Methods for a learned table: interpolate, hierarchical, group, tile, stretch."
    assert "need training: nope, alibi" in replaced
    assert ("fire" in replaced) != reads_both


# Every text type

# Types with something that no source accounts for, and why that is so.
_LEFT = {kinds.RECURRENCE, kinds.ENCODING, kinds.CONVOLUTION, kinds.COUNT, kinds.SCALING}
_LEFT |= {kinds.QUERIES, kinds.UNKNOWN}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", text_types())
def test_every_text_type_is_certified_or_says_what_is_left(model_type: str) -> None:
    try:
        model = build_text_model(model_type)
    except Exception as error:
        pytest.skip(f"not built: {error}")
    try:
        positions = inspect_positions(model)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    # A factor on the queries of far positions alone is named, and leaves nothing in a short text.
    left = [each for each in positions.rest if each.absolute or each.relative]
    assert positions.complete != bool(left)
    assert {each.kind for each in positions.rest} <= _LEFT


@pytest.mark.parametrize(
    ("model_type", "law"),
    [
        ("llama4_text", "by temperature(law=llama4, beta=0.1, L=8192)"),
        ("ministral3", "by temperature(law=ministral, beta=0.1, L=64)"),
    ],
)
def test_a_factor_on_the_queries_is_named_by_its_law(model_type: str, law: str) -> None:
    """Llama 4's is 1 within its first 8,192 tokens, where no experiment on short texts sees it."""
    model = build_text_model(model_type)
    implementation = model.config._attn_implementation
    (factor,) = (x for x in inspect_positions(model).rest if x.kind == "factor on the queries")
    assert factor.facts == law
    assert all(place.endswith("self_attn") for place in factor.places)
    assert model.config._attn_implementation == implementation


def test_a_model_that_reads_no_tokens_is_refused() -> None:
    model = ConvNextModel(ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4))
    with pytest.raises(UnsupportedModelError, match=r"attention_bias\.weight is read beyond"):
        inspect_positions(build_text_model("longt5", encoder_attention_type="transient-global"))
    with pytest.raises(UnsupportedModelError, match="ConvNextModel reads no tokens"):
        inspect_positions(model)
