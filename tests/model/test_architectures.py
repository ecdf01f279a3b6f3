"""Every rotary architecture of transformers: a patched live model against a freshly built native one.

The types come from transformers' registry (``tests/support/zoo.py``). Those of ``zoo.HELD`` run always; all
others with ``-m slow``.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_posenc
from hf_posenc import UnsupportedModelError, get_patch, patch_model, unpatch_model
from scripts import coverage, make_architectures
from tests.support import references, zoo
from tests.support.families import build_text_model, text_types
from tests.support.selection import covering, late, quick

LENGTH = 96
"""Tokens of a test text: half as many again as the 64 that the models are "trained" on."""

PAGE = make_architectures.PAGE.read_text(encoding="utf-8")
PAGE_IS_CURRENT = f"with transformers {transformers.__version__};" in PAGE

DECODERS = (*zoo.decoder_types(), *zoo.text_tower_types())
KNOWN = (*DECODERS, *zoo.composite_types(), *zoo.seq2seq_types())
OTHERS = [name for name in DECODERS if name not in zoo.representative()]
ALONE = [name for name in zoo.representative() if name not in zoo.HELD]
"""Types whose tables are held as those of another type are."""
FEW = ("llama", "gptj", "phimoe", "gemma3", "gemma4_text", "moshi", "deepseek_v2")
HELD = quick([*zoo.representative(), *OTHERS], FEW)
TABLES = [name for name in zoo.TABLE_TYPES if name in zoo.decoder_types()]

# A method, and the same in transformers' words.
NATIVE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"method": "linear", "scale": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": ({"method": "yarn", "scale": 4.0}, {"rope_type": "yarn", "factor": 4.0}),
    "llama3": (
        {"method": "llama3", "scale": 6.0},
        {"rope_type": "llama3", "factor": 6.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "dynamic_ntk": (
        {"method": "dynamic_ntk", "scale": 2.0, "update": "sequence"},
        {"rope_type": "dynamic", "factor": 2.0},
    ),
    "yarn_mscale": (
        {"method": "yarn", "scale": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    ),
}

OWN_YARN = "gpt_oss", "ministral3", "mistral4", "mistral_large4_text"  # their scaling, of factor 4
QUICK_SEQ2SEQ = {("t5gemma", "yarn"), ("moonshine", "linear")}
"""Two configs, both scaled; and one, for a text decoder that is and an encoder of speech that is not."""

# The same methods in the words of tests/support/references.py, for models that have no native counterpart.
REFERENCE: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("pi", {"scale": 4.0}),
    "yarn": ("yarn", {"scale": 4.0}),
    "llama3": ("llama3", {"scale": 6.0}),
    "dynamic_ntk": ("dynamic_ntk", {"scale": 2.0}),
    "yarn_mscale": ("yarn", {"scale": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}),
}

NO_NATIVE = {
    **dict.fromkeys(
        (
            *("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
            *("lfm3", "diffusion_gemma_text"),
        ),
        "another rope_type shortens the table of a proportional layer, and the model crashes",
    ),
    **dict.fromkeys(
        ("recurrent_gemma", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
        "its rotary class raises for another rope_type",
    ),
    **dict.fromkeys(("diffusion_gemma", "lfm3_vl"), "as its text decoder"),
}
"""Types that transformers itself cannot build with another ``rope_type``: checked against reference tables instead."""

WEAK = {"moonshine_streaming": 1e-4}
"""Types whose tiny models hardly read positions: the least that a method must do."""
TOLERANCE = {
    "hrm_text": 1e-2,  # recurrent, 32 calls of attention in a row: amplifies rounding
    "dia": 1e-2,  # scores that are not divided by sqrt(d): amplifies rounding
}

ACTING: dict[str, dict[str, Any]] = {
    # not 4, the scale that some types come with
    **{name: zoo.frequency_options(name, scale=5.0) for name in zoo.frequency_methods()},
    "dynamic_ntk": {"update": "sequence"},
    "longrope": {},
    "abf": {"rope_theta": 40_000_000.0},
}
"""Every method with options under which it does something."""


def patch(model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
    """Patch all layers, also of a checkpoint that comes scaled, or of one that names no length."""
    original = zoo.ORIGINAL_LENGTH if zoo.length_of(model.config) is None else None
    return patch_model(
        model, layers="all", replace=True, original_max_position_embeddings=original, **kwargs
    )


_SCALING = frozenset(
    (
        *("rope_type", "type", "factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
        *("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
        *("short_factor", "long_factor", "short_mscale", "long_mscale"),
    )
)


def natively(
    parameters: Mapping[str, Any], only: str | None = None
) -> Callable[[PretrainedConfig], None]:
    """An edit that makes transformers itself compute the method; ``only`` for one layer type."""

    def rewritten(old: Mapping[str, Any]) -> dict[str, Any]:
        same = old.get("rope_type") == parameters["rope_type"]  # its knobs are the patch's defaults
        kept = {key: value for key, value in old.items() if same or key not in _SCALING}
        new = kept | dict(parameters)
        if parameters["rope_type"] in ("yarn", "llama3"):
            new["original_max_position_embeddings"] = zoo.ORIGINAL_LENGTH
        return new

    def edit(config: PretrainedConfig) -> None:
        old: dict[str, Any] = config.rope_parameters
        labels = [key for key, value in old.items() if isinstance(value, Mapping) or value is None]
        if labels:
            config.rope_parameters = {
                key: rewritten(old[key]) if old[key] and only in (None, key) else old[key]
                for key in labels
            }
        else:
            config.rope_parameters = rewritten(old)
        if config.model_type == "phimoe":
            for_phimoe(config)
        config.max_position_embeddings = zoo.ORIGINAL_LENGTH

    return edit


def for_phimoe(config: Any) -> None:
    """Its rotary reads the factor from keys of its own, and forgets the length that a dynamic table needs."""
    rope = config.rope_parameters
    knobs = {key: rope.get(key) for key in ("mscale", "mscale_all_dim")}
    factor = (
        references.yarn(2, 2.0, 64, scale=4.0, **knobs)[1] if rope["rope_type"] == "yarn" else 1.0
    )
    rope |= {"short_mscale": factor, "long_mscale": factor}
    rope["original_max_position_embeddings"] = zoo.ORIGINAL_LENGTH
    if rope["rope_type"] == "dynamic":
        growth = rope["factor"] * LENGTH / zoo.ORIGINAL_LENGTH - (rope["factor"] - 1)
        head_dim = config.hidden_size // config.num_attention_heads
        theta = rope["rope_theta"] * growth ** (head_dim / (head_dim - 2))
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}


def with_reference_tables(
    model: PreTrainedModel, name: str, options: Mapping[str, Any]
) -> PreTrainedModel:
    """A twin whose buffers hold the reference table, in the order and with the zeros of its own table."""
    other = zoo.twin(model)
    for module in other.modules():
        for key, table in list(module.named_buffers(recurse=False)):
            if not key.endswith("inv_freq") or key.endswith("original_inv_freq"):
                continue
            label = key.removesuffix("inv_freq").removesuffix("_")
            config: Any = module.config
            parameters = config.rope_parameters[label] if label else config.rope_parameters
            dim, theta = 2 * table.numel(), parameters["rope_theta"]
            frequencies, factor = references.REFERENCES[name](
                dim, theta, zoo.ORIGINAL_LENGTH, LENGTH, **options
            )
            order = torch.argsort(torch.argsort(table, descending=True, stable=True))
            setattr(module, key, torch.tensor(frequencies)[order] * (table != 0))
            setattr(module, f"{label}_attention_scaling" if label else "attention_scaling", factor)
    return other


def expected_logits(model: PreTrainedModel, case: str, tokens: Tensor) -> Tensor:
    if model.config.model_type in NO_NATIVE:
        return zoo.logits(with_reference_tables(model, *REFERENCE[case]), tokens)
    other = zoo.twin(model, natively(NATIVE[case][1]))
    if model.config.model_type == "moonshine":  # one config for the decoder and the encoder
        other.get_submodule("model.encoder").rotary_emb = zoo.twin(model).model.encoder.rotary_emb
    want = zoo.logits(other, tokens)
    if case == "dynamic_ntk" and torch.equal(want, zoo.logits(zoo.twin(model), tokens)):
        # Some older releases forgot to update the table of M-RoPE models.
        return zoo.logits(with_reference_tables(model, *REFERENCE[case]), tokens)
    return want


@pytest.fixture
def model(model_type: str) -> PreTrainedModel:
    return zoo.build(model_type)


def rotary_layout(model: PreTrainedModel) -> list[tuple[str, str]]:
    return [(name, type(module).__qualname__) for name, module in model.named_modules()]


# The matrix


@pytest.mark.parametrize(
    ("model_type", "case"),
    [
        *covering([t for t in zoo.HELD if t not in TABLES], NATIVE),
        *late([t for t in (*ALONE, *OTHERS) if t not in TABLES], NATIVE),
        *(
            pytest.param(*one, marks=() if one in QUICK_SEQ2SEQ else pytest.mark.slow)
            for one in itertools.product(zoo.seq2seq_types(), NATIVE)
        ),
    ],
)
def test_equals_the_native_model(model: PreTrainedModel, model_type: str, case: str) -> None:
    tokens = zoo.tokens(LENGTH)
    want = expected_logits(model, case, tokens)
    unpatched = zoo.logits(model, tokens)
    patch(model, **NATIVE[case][0])
    got = zoo.logits(model, tokens)
    error = zoo.relative_difference(got, want)
    assert error < TOLERANCE.get(model_type, 1e-4)
    if case == "yarn" and model_type in OWN_YARN:
        assert torch.equal(want, unpatched)
        return
    least = WEAK.get(model_type, 1e-3)  # or the comparison says nothing
    assert zoo.relative_difference(got, unpatched) > max(least, 10 * error)


@pytest.mark.parametrize("case", ["linear", "yarn", "llama3"])
@pytest.mark.parametrize("model_type", TABLES)
def test_a_table_of_positions_is_new(model: PreTrainedModel, model_type: str, case: str) -> None:
    """Models without frequencies: the table of sines and cosines holds the method's, and is as long as it reaches."""

    def longer(config: Any) -> None:
        config.max_position_embeddings = 4 * zoo.ORIGINAL_LENGTH

    want, tokens = zoo.twin(model, longer), zoo.tokens(LENGTH)
    name, options = REFERENCE[case]
    for module in want.modules():
        held = getattr(module, "embed_positions", None)
        if held is None:
            continue
        table = held.weight.data if isinstance(held, torch.nn.Embedding) else held
        frequencies, factor = references.REFERENCES[name](
            table.shape[1], 10_000.0, zoo.ORIGINAL_LENGTH, LENGTH, **options
        )
        for position, row in enumerate(table):
            angles = torch.tensor([position * f for f in frequencies], dtype=torch.float64)
            row.copy_(torch.cat((angles.sin(), angles.cos())) * factor)
    patch(model, **NATIVE[case][0])
    assert zoo.relative_difference(zoo.logits(model, tokens), zoo.logits(want, tokens)) < 1e-4


@pytest.mark.parametrize("model_type", TABLES)
def test_a_table_refuses_dynamic_methods(model: PreTrainedModel, model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="dynamic_ntk"):
        patch_model(model, "dynamic_ntk", update="sequence")


@pytest.mark.parametrize("model_type", HELD)
def test_unpatching_restores_everything(model: PreTrainedModel, model_type: str) -> None:
    tokens = zoo.tokens(min(LENGTH, zoo.longest(model)))
    unpatched, config = zoo.logits(model, tokens), copy.deepcopy(model.config.to_dict())
    modules, state = rotary_layout(model), set(model.state_dict())
    # No checkpoint of the zoo has this factor already.
    for kwargs in ({"method": "yarn", "scale": 6.0}, {"method": "nope"}):
        patch(model, **kwargs)
        assert get_patch(model) is not None
        assert not torch.equal(zoo.logits(model, tokens), unpatched)
        assert set(model.state_dict()) == state  # a patch is no part of the weights
        unpatch_model(model)
        assert get_patch(model) is None
        assert torch.equal(zoo.logits(model, tokens), unpatched)
        assert model.config.to_dict() == config
        assert rotary_layout(model) == modules


@pytest.mark.parametrize("model_type", HELD)
def test_other_models_stay_untouched(model: PreTrainedModel, model_type: str) -> None:
    tokens = zoo.tokens(min(LENGTH, zoo.longest(model)))
    apart = zoo.twin(model)
    sharing = zoo.twin(model, share_config=True)
    before = [zoo.logits(other, tokens) for other in (apart, sharing)]
    configs = [copy.deepcopy(other.config.to_dict()) for other in (apart, sharing)]
    patch(model, method="ntk", scale=4.0)
    for other, logits, config in zip((apart, sharing), before, configs, strict=True):
        assert torch.equal(zoo.logits(other, tokens), logits)
        assert other.config.to_dict() == config
        assert get_patch(other) is None
    assert zoo.build(model_type).config.to_dict() == configs[0]


@pytest.mark.parametrize(("model_type", "method"), covering(zoo.representative(), ACTING))
def test_every_method_acts(model: PreTrainedModel, model_type: str, method: str) -> None:
    """No silent no-op: past the trained length every method changes the logits; the dynamic ones only there."""
    longest = zoo.longest(model)
    options = dict(ACTING[method])
    if method == "longrope":
        pairs = hf_posenc.inspect_rope(model)[0].dim // 2
        if len({table.dim for table in hf_posenc.inspect_rope(model)}) > 1:
            pytest.skip("one list of factors cannot fit tables of two widths")
        options |= {
            "short_factor": [1.0] * pairs,
            "long_factor": [1.0 + 2.0 * i for i in range(pairs)],
        }
    dynamic = hf_posenc.get_method(method).length_dependent
    if longest < LENGTH and dynamic:
        pytest.skip("the unpatched model cannot run past its table")
    text = zoo.tokens(min(LENGTH, longest))
    unpatched, short = zoo.logits(model, text), zoo.logits(model, text[:, : zoo.ORIGINAL_LENGTH])
    plain = zoo.is_plain(model)
    patch(model, method=method, **options)
    assert zoo.relative_difference(zoo.logits(model, text), unpatched) > 1e-4
    if dynamic and plain:
        again = zoo.logits(model, text[:, : zoo.ORIGINAL_LENGTH])
        assert zoo.relative_difference(again, short) < 1e-6


NOT_EXPORTED = {
    **dict.fromkeys(("codegen", "gptj"), "no rope_parameters, and the table is no weight"),
    **{name: NO_NATIVE[name] for name in ("recurrent_gemma", "ernie4_5_vl_moe_text")},
    "cosmos3_edge_text": "its config refuses another rope_type",
}
"""Types whose patch only hf_posenc itself can load again, with the reason."""


@pytest.mark.parametrize(
    ("model_type", "case"),
    [*covering(zoo.HELD, ["yarn", "linear"]), *late([*ALONE, *OTHERS], ["yarn", "linear"])],
)
def test_plain_transformers_loads_what_is_saved(
    model: PreTrainedModel, model_type: str, case: str, tmp_path: Path
) -> None:
    """``save_pretrained``, then the model class's own ``from_pretrained``: the same logits, with no help from here."""
    before = model.config.to_dict().keys()
    patch(model, **NATIVE[case][0])
    if zoo.in_force(model).export is None:
        if not PAGE_IS_CURRENT:
            pytest.skip("this transformers cannot load it")
        assert model_type in NOT_EXPORTED, "this type used to export"
        return
    assert model_type not in NOT_EXPORTED, "this type exports now"
    tokens = zoo.tokens(LENGTH)
    want = zoo.logits(model, tokens)
    model.save_pretrained(tmp_path)
    loaded = zoo.load(type(model), tmp_path)
    assert get_patch(loaded) is None
    limit = TOLERANCE.get(model_type, 1e-4)
    assert zoo.relative_difference(zoo.logits(loaded, tokens), want) < limit
    unpatch_model(model)
    assert model.config.to_dict().keys() == before


# Which layers, which towers


@pytest.mark.parametrize(
    "model_type", [t for t in zoo.representative() if t in ("gemma3_text", "olmo3", "gemma3")]
)
def test_sliding_layers_keep_their_table(model: PreTrainedModel, model_type: str) -> None:
    tokens = zoo.tokens(LENGTH)
    want = zoo.logits(zoo.twin(model, natively(NATIVE["linear"][1], only="full_attention")), tokens)
    before = {table.layer_type: table for table in hf_posenc.inspect_rope(model)}
    if "sliding_attention" not in before:
        pytest.skip("one table for all layers in this transformers")
    patch_model(model, "linear", scale=4.0)
    after = {table.layer_type: table for table in hf_posenc.inspect_rope(model)}
    assert zoo.relative_difference(zoo.logits(model, tokens), want) < 1e-4
    assert torch.equal(after["sliding_attention"].inv_freq, before["sliding_attention"].inv_freq)
    assert torch.equal(after["full_attention"].inv_freq * 4, before["full_attention"].inv_freq)


def with_another_rotary(model_type: str) -> Any:
    """A model whose last layer rotates by a module that is built from another type of config."""
    model: Any = zoo.build(model_type)
    model.other = copy.deepcopy(model.model.rotary_emb)
    model.other.config.model_type = "other"

    def rotate(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "position_embeddings": model.other(args[0], kwargs["position_ids"])}

    model.model.layers[-1].register_forward_pre_hook(rotate, with_kwargs=True)
    return model


@pytest.mark.parametrize(("method", "options"), [("yarn", {"scale": 4.0}), ("rerope", {})])
def test_a_rotary_module_without_a_table_is_named(method: str, options: dict[str, Any]) -> None:
    words = "other of LlamaForCausalLM rotates text too"
    zoo.refused(with_another_rotary("llama"), words, method, **options)


def test_a_rotary_module_that_cannot_be_tried_is_no_silent_half() -> None:
    model = with_another_rotary("llama")
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="could not verify that other rotates no text"):
        patch_model(model, "yarn", scale=4.0)
    assert get_patch(model) is not None


def test_a_config_that_another_part_reads_too_is_not_scaled() -> None:
    """Plain transformers would scale Moonshine's encoder of speech with its decoder."""
    model = zoo.build("moonshine")
    patch_model(model, "yarn", scale=4.0)
    state = zoo.in_force(model)
    assert state.export is None
    assert [table.modules for table in state.tables] == [("model.decoder.rotary_emb",)]
    assert model.config.rope_parameters["rope_type"] == "default"


def test_parts_of_different_lengths_have_no_common_one() -> None:
    model = zoo.build("dia")
    model.config.decoder_config.max_position_embeddings = 192
    with pytest.raises(hf_posenc.PosencError, match=r"encoder\S*: 64; \S*decoder\S*: 192"):
        patch_model(model, "yarn", scale=4.0)
    patch_model(model, "yarn", scale=4.0, original_max_position_embeddings=64)
    assert zoo.in_force(model).extended_length == 256


FEW_COMPOSITES = ("qwen2_5_vl", "evolla", "gemma3")


@pytest.mark.parametrize("model_type", quick(zoo.composite_types(), FEW_COMPOSITES))
def test_only_the_text_decoder_is_patched(model: PreTrainedModel, model_type: str) -> None:
    """Vision towers, audio codecs and protein encoders have rotaries of their own, which stay."""
    tokens = zoo.tokens(LENGTH)
    others = {
        name: buffer.clone()
        for name, buffer in model.named_buffers()
        if "inv_freq" in name and zoo.NOT_TEXT_MODULE.search(name)
    }
    want = expected_logits(model, "yarn", tokens)
    patch(model, **NATIVE["yarn"][0])
    assert zoo.relative_difference(zoo.logits(model, tokens), want) < 1e-4
    state = zoo.in_force(model)
    assert not [m for table in state.tables for m in table.modules if zoo.NOT_TEXT_MODULE.search(m)]
    for name, buffer in others.items():
        assert torch.equal(model.get_buffer(name), buffer)


# Refusals


OTHER_TOWERS = {
    # The first two have a bias in the text decoder, and RoPE in the vision tower.
    **dict.fromkeys(("inkling2", "inkling2_loop", "pixtral", "dinov3_vit"), "image"),
    **dict.fromkeys(("parakeet_encoder", "wav2vec2-conformer"), "audio"),
}
"""Types whose rotary modules are those of other towers, with what they rotate."""


@pytest.mark.parametrize("model_type", [t for t in OTHER_TOWERS if t in CONFIG_MAPPING])
def test_towers_of_images_and_sound_are_refused_by_name(model_type: str) -> None:
    rotary = {"position_embeddings_type": "rotary"} if "conformer" in model_type else {}
    model = zoo.build(model_type, **rotary)
    with pytest.raises(
        UnsupportedModelError, match=f"belongs to a part for {OTHER_TOWERS[model_type]}"
    ):
        patch_model(model, "yarn", scale=4.0)


def test_an_alibi_falcon_is_refused() -> None:
    """It owns a rotary module all the same, but never calls it."""
    model = zoo.build("falcon", alibi=True, new_decoder_architecture=False)
    with pytest.raises(UnsupportedModelError, match=r"(?i)alibi"):
        patch_model(model, "yarn", scale=4.0)


def test_the_registry_is_covered() -> None:
    """Whatever transformers registers as a rotary decoder is built here, or named with a reason."""
    assert len(zoo.decoder_types()) >= 80
    assert len(zoo.text_tower_types()) >= 10
    assert len(zoo.composite_types()) >= 30
    assert all(zoo.NOT_BUILT.values())


def test_patches_names_what_the_matrix_covers() -> None:
    """Naming a type in ``patches/`` promises that this matrix holds for it."""
    covered = {
        zoo.tiny_config(name).get_text_config(decoder=True).model_type
        for name in KNOWN
        if name not in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
    }
    named = {name for name in hf_posenc.available_architectures() if name in CONFIG_MAPPING}
    assert covered <= named
    if PAGE_IS_CURRENT:
        assert named <= covered


# `scripts.make_architectures --check` compares every row.
OF_THE_PAGE = ("llama", "afmoe", "gemma3_text", "gptj", "qwen2_5_vl", "hunyuan_v1_dense", "axk2")


@pytest.mark.parametrize(
    "model_type", quick([t for t in OF_THE_PAGE if t in CONFIG_MAPPING], OF_THE_PAGE[:1])
)
def test_the_page_of_architectures_is_not_stale(model_type: str) -> None:
    if not PAGE_IS_CURRENT:
        pytest.skip("the page was written with another transformers")
    refusals: coverage.Refusals = {}
    assert f"| {' | '.join(make_architectures.row(model_type, refusals))} |\n" in PAGE
    page = re.sub(r"(?<=[^\n])\n> ", " ", PAGE)  # the page wraps its quotations
    for messages in refusals.values():
        for message in messages:
            assert f"`{model_type}`" in page.partition(f"> {message}\n")[0].split("\n\n")[-2]
    groups = (zoo.decoder_types(), zoo.text_tower_types(), zoo.composite_types())
    for kind in (*groups, zoo.seq2seq_types()):
        assert f"({len(kind)})" in PAGE


def test_what_the_page_says_of_methods_that_compute_attention() -> None:
    """Not only that it is what the script writes: these cells are known."""
    columns = list(coverage.GROUPS)

    def cells(model_type: str) -> tuple[str, ...]:
        (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {model_type} |"))
        found = dict(zip(make_architectures.COLUMNS, line.strip("| ").split(" | "), strict=True))
        return tuple(found[column] for column in columns)

    assert cells("llama") == cells("gemma3_text") == ("all",) * 3
    bands, biases, others = cells("deepseek_v32")
    assert (bands, biases) == ("none: sparse indexer", "not alibi: sparse indexer")
    assert others == "not dynamic_ntk update=row: sparse indexer"
    bands, biases, others = cells("deepseek_v4")
    assert bands == biases == "none: merged keys"
    assert others == "not dynamic_ntk update=row: merged keys"
    assert cells("afmoe") == ('all, with layers="all"',) * 3
    bands, biases, others = cells("llama4_text")
    assert bands == biases == 'all, with layers="all"'
    assert others == "not log_n: a factor on the queries"
    assert cells("hunyuan_v1_dense") == ("all",) * 3
    bands, biases, others = cells("t5gemma2")
    assert (bands, biases) == ("all", "all")
    assert others == 'all, with layers="decoder"'


@pytest.mark.parametrize("model_type", ["gpt2", *late(["bloom", "mamba"])])
def test_the_page_of_architectures_has_models_without_rope(model_type: str) -> None:
    cells = coverage.row(model_type, text_types()[model_type], build_text_model(model_type))
    assert f"| {' | '.join(cells)} |\n" in PAGE
