"""Tables of positions that are made longer: rows, models built longer natively, undo, saving, caches, refusals."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import PosencError, UnsupportedModelError, patch_model, patched, unpatch_model
from hf_posenc.embedded import model_path
from hf_posenc.methods import METHODS, Sinusoidal, TableMethod
from hf_posenc.model.unwrapping import trial
from hf_posenc.seams import probes
from hf_posenc.seams.inspection import LEARNED, SINUSOIDAL, inspect
from hf_posenc.training import choose_parameters
from tests.support import zoo
from tests.support.attention_ways import in_steps
from tests.support.families import build_text_model, text_types
from tests.support.selection import late
from tests.support.zoo import CACHE

LEARNED_METHODS = tuple(
    m.name for m in METHODS if issubclass(m, TableMethod) and m is not Sinusoidal
)
KEPT = ("hierarchical", "tile")
"""The methods that keep the first L rows."""
LENGTH = 64
"""Positions of the tiny models."""


def ids_of(model: PreTrainedModel, length: int) -> Tensor:
    return probes.ordinary_tokens(model, 7).repeat(1, length // 7 + 1)[:, :length]


def outputs(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    with trial(model):
        return probes.forward(model, ids)


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def method_of(name: str, scale: float) -> TableMethod:
    method = hf_posenc.get_method(name).from_options(scale=scale)
    assert isinstance(method, TableMethod)
    return method


# Rows: each formula once more, one position at a time, in float64


def reference(name: str, p: Tensor, m: int, scale: float) -> Tensor:
    trained = len(p)
    if name in ("interpolate", "stretch"):
        keep = 20 if name == "stretch" else 0
        if m < keep:
            return p[m]
        factor = (scale * trained - keep) / (trained - keep)
        place = keep + (m - keep) / factor
        low = math.floor(place + 1e-9)
        weight = place - low
        if low < trained - 1:
            return (1 - weight) * p[low] + weight * p[low + 1]
        step = p[-1] - p[-2] if name == "stretch" else 0 * p[-1]
        return p[-1] + weight * step
    if name == "group":
        return p[math.floor(m / scale + 1e-9)]
    if name == "tile":
        return p[m % trained]
    high, low = divmod(m, trained)
    u_high, u_low = ((p[i] - 0.4 * p[0]) / 0.6 for i in (high, low))
    return 0.4 * u_high + 0.6 * u_low


@pytest.mark.parametrize("scale", [1.0, 2.0, 3.25])
@pytest.mark.parametrize("name", LEARNED_METHODS)
def test_rows_are_those_of_the_paper(name: str, scale: float) -> None:
    table = torch.randn(32, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = method_of(name, scale).rows(table, math.ceil(32 * scale))
    expected = torch.stack([reference(name, table, m, scale) for m in range(len(rows))])
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-12)
    if scale == 1 or name in KEPT:
        assert torch.equal(rows[:32], table)


def test_long_clip() -> None:
    """77 to 248 tokens with 20 kept, as the loops of the authors' code write them."""
    p = torch.randn(77, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    new = torch.zeros(4 * 77 - 3 * 20, 3, dtype=torch.float64)
    new[:20] = p[:20]
    for i in range(77 - 1 - 20):
        for step in range(4):
            new[4 * i + step + 20] = ((4 - step) * p[i + 20] + step * p[i + 21]) / 4
    for step in range(4):
        new[4 * 77 - 3 * 20 - 4 + step] = p[76] + step * (p[76] - p[75]) / 4
    method = hf_posenc.methods.Stretch(scale=248 / 77)
    torch.testing.assert_close(method.rows(p, 248), new, rtol=0, atol=1e-12)


def sines(model_type: str, m: Tensor, width: int) -> Tensor:
    """The formula of a type's modelling code at real positions, float64."""
    m, pairs = m.double()[:, None], width // 2
    divisor = pairs if model_type in ("marian", "ctrl") else pairs - 1
    angles = m * 10_000 ** (-torch.arange(pairs, dtype=torch.float64) / divisor)
    return torch.cat((angles.sin(), angles.cos()), -1)


@pytest.mark.parametrize(
    ("model_type", "by"),
    [("xglm", "position"), ("marian", "base"), *late(["ctrl"], ["position", "base"]),
     *late(["marian"], ["position"]), *late(["xglm"], ["base"])],
)  # fmt: skip
def test_sinusoidal_tables_are_computed_anew(model_type: str, by: str) -> None:
    model = build_text_model(model_type)
    (source,) = {each.kind: each for each in inspect(model).sources}.values()
    assert source.kind == SINUSOIDAL
    path, start = source.places[0], source.start
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = tensors[path].detach().clone()
    patch_model(model, "sinusoidal", scale=4, by=by)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    rows, width = tensors[path].detach(), before.shape[-1]
    assert rows.shape == (start + 4 * (len(before) - start), width)
    assert torch.equal(rows[:start], before[:start])
    m = torch.arange(len(rows) - start)
    if by == "position":
        expected = sines(model_type, start + m / 4, width)
    else:
        pairs = width // 2
        divisor = pairs if model_type in ("marian", "ctrl") else pairs - 1
        i = torch.arange(pairs, dtype=torch.float64)
        frequencies = 10_000 ** (-i / divisor) * 4 ** (-i / (pairs - 1))
        angles = (start + m.double())[:, None] * frequencies
        expected = torch.cat((angles.sin(), angles.cos()), -1)
    assert torch.equal(rows[start:], expected.to(rows.dtype))
    assert len(outputs(model, ids_of(model, LENGTH + 9))[0][0]) == LENGTH + 9


# Against models that are built longer


@pytest.mark.parametrize(
    ("model_type", "method"),
    [("gpt2", "interpolate"), ("bert", "hierarchical"), *late(["opt"], ["stretch"]),
     *late(["gpt_neo"], ["tile"]), *late(["bart"], ["group"])],
)  # fmt: skip
def test_a_model_built_longer_with_the_same_weights_is_equal(model_type: str, method: str) -> None:
    model = build_text_model(model_type)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    short = outputs(model, ids_of(model, 40))
    patch_model(model, method, target_length=4 * LENGTH)
    patch = zoo.in_force(model)
    assert (patch.export, patch.extended_length) == ("weights", 4 * LENGTH)
    table, before = (each[patch.places[1][0]] for each in (model.state_dict(), original))
    start = len(before) - LENGTH
    assert torch.equal(table[:start], before[:start])
    rows = method_of(method, 4).rows(before[start:].double(), 4 * LENGTH)
    assert torch.equal(table[start:], rows.float())
    longer: Any = type(model)(copy.deepcopy(model.config)).eval()
    longer.load_state_dict(model.state_dict())
    ids = ids_of(model, 4 * LENGTH)
    assert difference(outputs(model, ids), outputs(longer, ids)) == 0
    assert (difference(outputs(model, ids_of(model, 40)), short) == 0) == (method in KEPT)
    unpatch_model(model)
    assert model.state_dict().keys() == original.keys()
    assert all(torch.equal(each, original[name]) for name, each in model.state_dict().items())
    assert difference(outputs(model, ids_of(model, 40)), short) == 0


@pytest.mark.parametrize(
    ("model_type", "method", "options"),
    [
        ("gpt2", "interpolate", {"update": "request"}),
        pytest.param("xglm", "sinusoidal", {}, marks=pytest.mark.slow),
        ("marian", "sinusoidal", {}),  # a parameter that its class does not save
    ],
)
def test_what_plain_transformers_cannot_have_is_loaded_with_its_patch(
    model_type: str, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = patch_model(build_text_model(model_type), method, scale=2, **options)
    with pytest.warns(UserWarning, match="Plain transformers cannot compute"):
        model.save_pretrained(tmp_path)
    with pytest.raises((ValueError, KeyError)):
        type(model).from_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path).eval()
    patch = zoo.in_force(loaded)
    assert (patch.method, patch.export) == (method, None)
    ids = ids_of(model, 2 * LENGTH)
    assert difference(outputs(model, ids), outputs(loaded, ids)) == 0


def test_a_table_that_was_patched_inside_peft_is_in_the_merged_weights(tmp_path: Path) -> None:
    """The config builds no module of an adapter."""
    adapted: Any = choose_parameters(build_text_model("gpt2"), "lora", lora_rank=2)
    model = patch_model(adapted, "interpolate", scale=4).merge_and_unload()
    model.save_pretrained(tmp_path)
    ids = ids_of(model, 4 * LENGTH)
    for loaded in (hf_posenc.from_pretrained(tmp_path), type(model).from_pretrained(tmp_path)):
        assert difference(outputs(loaded, ids), outputs(model, ids)) == 0


@pytest.mark.parametrize(
    ("model_type", "method", "tables"), [("bert", "tile", 1), ("marian", "sinusoidal", 2)]
)
def test_weak_tables_are_found_in_bfloat16(model_type: str, method: str, tables: int) -> None:
    model: Any = build_text_model(model_type)
    patch = zoo.in_force(patch_model(model.bfloat16(), method, scale=2))
    assert len(patch.places) == tables + 1  # and a heading


def test_a_weak_rotation_is_no_learned_table() -> None:
    model: Any = build_text_model("roformer")
    assert not inspect(model.bfloat16()).of_kind(LEARNED, SINUSOIDAL)


def test_a_buffer_that_is_made_from_the_table_follows_it(tmp_path: Path) -> None:
    """I-BERT has one in its weights, of the table's shape, that is zero until the model is quantised."""
    model = patch_model(build_text_model("ibert"), "tile", scale=2)
    model.save_pretrained(tmp_path)
    table = "ibert.embeddings.position_embeddings.weight"
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_parameter(table), model.get_parameter(table))
    unpatch_model(model)
    model.get_buffer("ibert.embeddings.position_embeddings.weight_integer").fill_(1)
    with pytest.raises(UnsupportedModelError, match="weight_integer follows the length"):
        patch_model(model, "tile", scale=2)


@pytest.mark.parametrize(
    ("model_type", "method"),
    [("xglm", "sinusoidal"), ("fsmt", "sinusoidal"), ("gpt2", "tile"), ("opt", "tile"),
     ("roberta", "tile"), *late(["m2m_100", "nllb-moe", "marian"], ["sinusoidal"]),
     *late(["xglm", "fsmt", "bert"], ["nope"])],
)  # fmt: skip
def test_padding_past_the_table_is_refused_where_it_counts(model_type: str, method: str) -> None:
    model = patch_model(build_text_model(model_type), method, target_length=2 * LENGTH)
    few, mask = ids_of(model, 20), (torch.arange(140) < 100).long()[None]
    before = outputs(model, few)
    wide = ids_of(model, 140).where(mask > 0, model.config.pad_token_id or 0)
    given = {"input_ids": wide, "attention_mask": mask}
    if model_type in ("opt", "roberta"):
        padded, alone = model(**given).logits[:, :100], model(wide[:, :100]).logits
        torch.testing.assert_close(padded, alone, rtol=1e-4, atol=2e-5)
        return
    if model_type == "gpt2":  # as generate() does
        model(**given, position_ids=mask.cumsum(1) - 1)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = few
        with pytest.raises(PosencError, match=r"140 tokens: .* positions\. Patch it"):
            model(input_ids=few, decoder_input_ids=wide)
    with pytest.raises(PosencError, match=r"140 tokens: .* pad to at most 128 tokens"):
        model(**given)
    assert difference(outputs(model, few), before) == 0  # no table of the class is in force


# Texts within the trained length keep their rows


def test_by_request_short_texts_do_not_change_and_long_ones_are_interpolated() -> None:
    model: Any = build_text_model("gpt2")
    short, ids = ids_of(model, LENGTH), ids_of(model, LENGTH + 20)
    before = outputs(model, short)
    patch_model(model, "interpolate", scale=4, update="request")
    static = patch_model(build_text_model("gpt2"), "interpolate", scale=4)
    assert difference(outputs(model, short), before) == 0
    assert difference(outputs(model, ids), outputs(static, ids)) == 0
    assert difference(outputs(static, short), before) > 1e-2
    assert len(model.transformer.wpe.weight) == LENGTH
    model.transformer.wpe.weight.data.mul_(2)  # which leaves its version as it was
    assert difference(outputs(model, ids), outputs(static, ids)) > 1e-3
    model.transformer.wpe.weight.data.div_(2)
    assert difference(outputs(model, ids), outputs(static, ids)) == 0


def test_by_request_refuses_what_has_no_single_table() -> None:
    model: Any = build_text_model("gpt2")
    patch_model(model, "interpolate", scale=4, update="request")
    ids = ids_of(model, LENGTH + 4)
    with torch.no_grad():
        cache = model(ids[:, :LENGTH], use_cache=True)[CACHE]
        with pytest.raises(PosencError, match="grows past 64 tokens"):
            model(ids[:, LENGTH:], **{CACHE: cache})
        mask = torch.ones(2, LENGTH + 4, dtype=torch.long)
        mask[1, :9] = 0
        with pytest.raises(PosencError, match="texts on both sides of 64 tokens"):
            model(ids.expand(2, -1), attention_mask=mask)
        with pytest.raises(PosencError, match="have 256 positions"):
            model(ids_of(model, 257))
        assert len(model.transformer.wpe.weight) == LENGTH  # nothing is left of a failed forward
        step = model(ids[:, :1], **{CACHE: model(ids, use_cache=True)[CACHE]}).logits
    assert step.isfinite().all()


def test_by_request_the_original_rows_are_trained() -> None:
    model: Any = build_text_model("gpt2")
    patch_model(model, "interpolate", scale=4, update="request")
    ids = ids_of(model, LENGTH + 20)
    model(ids, labels=ids).loss.backward()
    gradient = model.transformer.wpe.weight.grad
    assert gradient.shape[0] == LENGTH
    assert (gradient[:21].abs().sum(1) > 0).all()
    assert not gradient[23:].any()


# A patched model among other things


def test_decoding_past_the_trained_length_equals_one_forward() -> None:
    model: Any = build_text_model("gpt2")
    patch_model(model, "hierarchical", scale=2)
    ids = ids_of(model, LENGTH + 6)
    steps = in_steps(model, ids, [LENGTH - 2, *[1] * 8])
    torch.testing.assert_close(steps, zoo.logits(model, ids), rtol=1e-4, atol=2e-5)
    model = patch_model(build_text_model("xlm"), "tile", scale=2)  # gets its cached tokens again
    options = dict.fromkeys(("max_new_tokens", "min_new_tokens"), 26) | {"pad_token_id": 0}
    assert model.generate(ids_of(model, 102), **options).shape[1] == 2 * LENGTH
    with pytest.raises(PosencError, match="129 tokens"):
        model.generate(ids_of(model, 103), **options)


def test_by_request_copies_have_patches_of_their_own() -> None:
    peft: Any = pytest.importorskip("peft")
    model = build_text_model("bert")
    before, stock = model.state_dict(), outputs(model, ids_of(model, 50))
    patch_model(model, "interpolate", scale=2, update="request")
    ids = ids_of(model, 100)
    expected = outputs(model, ids)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert difference(outputs(copied, ids), expected) == 0
        unpatch_model(copied)
        assert difference(outputs(copied, ids_of(model, 50)), stock) == 0
        assert difference(outputs(model, ids), expected) == 0
    given = {"target_modules": ["query"], "modules_to_save": ["position_embeddings"]}
    config = peft.LoraConfig(**given)  # the table is copied without its model
    adapted: Any = peft.get_peft_model(copy.deepcopy(model), config)
    assert difference(outputs(adapted.base_model.model, ids), expected) == 0
    unpatch_model(model)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_the_table_is_cast_and_trained_like_any_other() -> None:
    model: Any = build_text_model("opt")
    original = model.model.decoder.embed_positions.weight
    patch_model(model, "interpolate", scale=2)
    ids = ids_of(model, 100)
    model(ids, labels=ids).loss.backward()
    weight = model.model.decoder.embed_positions.weight
    assert weight.grad.shape == weight.shape
    model.to(torch.bfloat16)
    assert model.model.decoder.embed_positions.weight.dtype == torch.bfloat16
    unpatch_model(model)
    restored = model.model.decoder.embed_positions.weight
    assert torch.equal(restored, original.detach().to(torch.bfloat16))
    assert restored.requires_grad


@pytest.mark.parametrize("method", ["interpolate", *late(LEARNED_METHODS[1:])])
def test_scale_one_changes_nothing(method: str) -> None:
    model = build_text_model("gpt2")
    weight, before = model.transformer.wpe.weight, outputs(model, ids_of(model, LENGTH))  # type: ignore[union-attr]
    patch_model(model, method, scale=1)
    assert model.transformer.wpe.weight is weight  # type: ignore[union-attr]
    assert difference(outputs(model, ids_of(model, LENGTH)), before) == 0


def test_requests_are_repeated_replaced_and_temporary() -> None:
    model: Any = build_text_model("gpt2")
    patch_model(model, "tile", scale=2)
    weight = model.transformer.wpe.weight
    patch_model(model, "tile", target_length=2 * LENGTH)
    assert model.transformer.wpe.weight is weight
    with pytest.raises(PosencError, match="already patched with tile"):
        patch_model(model, "group", scale=2)
    with patched(model, "group", scale=4, replace=True):
        assert len(model.transformer.wpe.weight) == 4 * LENGTH
    assert model.transformer.wpe.weight is weight
    patch = zoo.in_force(model)
    assert "transformer.wpe.weight" in str(patch)
    assert "learned table" in patch._repr_html_()
    with pytest.raises(UnsupportedModelError, match="no rotary embedding"):
        hf_posenc.inspect_rope(model)


def test_trained_rows_are_not_replaced() -> None:
    model: Any = build_text_model("gpt2")
    patch_model(model, "interpolate", scale=2)
    model.to(torch.bfloat16).float()
    patch_model(model, "tile", scale=2, replace=True)
    with torch.no_grad():
        model.transformer.wpe.weight[3] += 1e-3
    patch_model(model, "tile", scale=2)  # the same
    with pytest.raises(PosencError, match=r"would be lost.*save_pretrained"):
        patch_model(model, "group", scale=2, replace=True)
    with patched(model, "group", scale=2, replace=True):
        pass
    assert zoo.in_force(model).method == "tile"


@pytest.mark.parametrize(
    ("model_type", "method"), [("gpt2", "interpolate"), *late(["marian"], ["sinusoidal"])]
)
def test_the_trainer_chooses_learned_tables_and_no_sines(model_type: str, method: str) -> None:
    model: Any = build_text_model(model_type)
    patch_model(model, method, scale=2)
    choose_parameters(model, "full")
    patch = zoo.in_force(model)
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert frozen == ({row[0] for row in patch.places[1:]} if method == "sinusoidal" else set())
    if model_type == "gpt2":
        adapted: Any = choose_parameters(model, "lora", lora_rank=2)
        assert adapted(ids_of(model, 100)).logits.shape[1] == 100


# Refusals


@pytest.mark.parametrize(
    ("model_type", "request_", "words"),
    [
        ("gpt2", ("yarn", {"scale": 2}), "Methods for a learned table: interpolate, hierarchical"),
        ("gpt2", ("sinusoidal", {"scale": 2}), "follow no formula"),
        ("xglm", ("interpolate", {"scale": 2}), "Methods for a sinusoidal table: sinusoidal"),
        ("xglm", ("interpolate", {"scale": 2}), "computed anew"),
        ("llama", ("interpolate", {"scale": 2}), "nothing that interpolate changes"),
        ("gptj", ("sinusoidal", {"scale": 2}), "nothing that sinusoidal changes"),
        ("mamba", ("tile", {"scale": 2}), "There is nothing to patch"),
        ("gpt2", ("tile", {"scale": 2, "layers": [0]}), r"layers=\[0\] chooses among rotary layers"),
        ("gpt2", ("tile", {"scale": 2, "compose": True}), "compose=True scales"),
        ("gpt2", ("hierarchical", {"scale": 65}), "two digits of base 64"),
        ("gpt2", ("tile", {"target_length": 1e9}), r"would take 256,000,016,384 bytes more, and [\d,]+ are free"),
        ("gpt2", ("nope", {"target_length": 1e9}), r"would take 256,000,016,384 bytes more"),
        ("gpt2", ("stretch", {"scale": 2, "keep": 64}), "leaves no step between the 64 positions"),
        ("gpt2", ("tile", {"scale": 2, "original_max_position_embeddings": 32}), "Leave it out"),
        ("gpt2", (["tile", "log_n"], {"scale": 2}), "one method at a time"),
        ("gpt2", ("interpolate", {"scale": 2, "update": "row"}), "static"),
    ],
)  # fmt: skip
def test_a_refused_model_is_as_it_was(
    model_type: str, request_: tuple[Any, dict[str, Any]], words: str
) -> None:
    zoo.refused(build_text_model(model_type), words, request_[0], **request_[1])


def test_a_rotation_that_is_weak_in_the_first_block_is_named() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path())  # half precision
    with pytest.raises(PosencError, match="nothing that interpolate changes"):
        patch_model(model, "interpolate", scale=2)


@pytest.mark.slow
def test_a_model_with_more_than_the_table_is_patched_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="depends on the order of tokens: .*convolution"):
        patch_model(build_text_model("convbert"), "tile", scale=2)


# Every type with a table

# Types with something read by position that is no table of positions, or with other weights of the same length.
_REFUSED = {
    "luke": "luke.entity_embeddings.position_embeddings.weight follows the length",
    "minimax": "a place that hf_posenc does not know: a relative encoding in code of its own",
    "mobilebert": "a place that hf_posenc does not know: an unknown source outside of the blocks",
    "pegasus_x": "a place that hf_posenc does not know: an unknown source outside of the blocks",
    "prophetnet": "a place that hf_posenc does not know: a relative encoding in code of its own",
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", text_types())
def test_every_table_grows(model_type: str) -> None:
    try:
        model = build_text_model(model_type)
        sources = inspect(model).of_kind(LEARNED, SINUSOIDAL)
    except Exception as error:
        pytest.skip(f"not built or not run: {error}")
    if not sources:
        pytest.skip("no table")
    learned = sources[0].kind == LEARNED
    if model_type in _REFUSED:
        with pytest.raises(UnsupportedModelError, match=_REFUSED[model_type]):
            patch_model(model, "tile", scale=4)
        return
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = ids_of(model, 40)
    short = outputs(model, ids)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*makes the table of .* longer")
        patch_model(model, "hierarchical" if learned else "sinusoidal", scale=4)
    patch = zoo.in_force(model)
    long = ids_of(model, 3 * patch.original_max_position_embeddings)
    grown = outputs(model, long)
    if learned:
        assert difference(outputs(model, ids), short) == 0
    if patch.export == "weights":
        longer: Any = type(model)(copy.deepcopy(model.config)).eval()
        longer.load_state_dict(model.state_dict())
        assert difference(outputs(longer, long), grown) == 0
    unpatch_model(model)
    assert all(torch.equal(each, original[name]) for name, each in model.state_dict().items())
    assert difference(outputs(model, ids), short) == 0


def test_a_model_with_quantized_layers_gets_a_longer_table() -> None:
    """Torch's int8 layers keep values of other kinds than tensors among their weights."""
    model: Any = torch.ao.quantization.quantize_dynamic(build_text_model("gpt2"), {torch.nn.Linear})
    patch_model(model, "interpolate", scale=2)
    assert all(bool(each.isfinite().all()) for each in outputs(model, ids_of(model, LENGTH + 20)))
