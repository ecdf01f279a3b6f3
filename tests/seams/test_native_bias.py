"""Models that have ALiBi or T5's tables from the start: exact, scaled, in every way to run a text, saved and undone."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Pop2PianoConfig, Pop2PianoForConditionalGeneration, StaticCache

from hf_posenc import (
    UnsupportedModelError,
    VerificationError,
    get_patch,
    inspect_positions,
    patch_model,
    unpatch_model,
)
from hf_posenc.attention import engine
from hf_posenc.attention.exact import score_bias
from hf_posenc.methods import ALiBi
from hf_posenc.model import attention, masks
from hf_posenc.seams import bias as bias_seam
from hf_posenc.seams import distances
from hf_posenc.seams import inspection as kinds
from hf_posenc.seams.handover import handed_over
from tests.support import zoo
from tests.support.alibi_models import BUILDERS, build_alibi_model, reference_logits, slopes_of
from tests.support.attention_ways import WAYS, Way, in_steps, packed
from tests.support.families import build_text_model
from tests.support.selection import covering, late
from tests.support.zoo import CACHE, _ready, in_force, logits, relative_difference, tokens

EXACT = 3e-6  # of float32
TABLES = ("t5", "mt5", "umt5", "switch_transformers", "longt5", "pop2piano")


def build_table_model(name: str) -> Any:
    """Build a tiny model with relative position biases that matter."""
    if name != "pop2piano":
        layers = dict.fromkeys(("num_layers", "num_decoder_layers"), 2)
        model: Any = build_text_model(name, **layers)  # type: ignore[arg-type]
    else:
        config = Pop2PianoConfig(
            vocab_size=128, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _ready(Pop2PianoForConditionalGeneration(config))
    generator = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        if "relative_attention_bias" in path:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def outputs(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of an encoder-decoder that reads the same tokens on both sides."""
    with torch.no_grad():
        final: Tensor = model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        return final


def slowly(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


# ALiBi as an argument


@cache
def scaled(name: str) -> Any:
    """Return a patched model, which tests share and leave as it is."""
    return patch_model(build_alibi_model(name), "alibi", scale=4)


@pytest.mark.parametrize("name", ["falcon_eager", *late(["bloom", "mpt", "falcon"])])
def test_scale_1_is_the_model_itself(name: str) -> None:
    """Falcon's eager attention adds the biases twice; patched, it is its sdpa attention."""
    ids = tokens(40, batch=2)
    stock = logits(build_alibi_model(name.partition("_")[0]), ids)
    model = patch_model(build_alibi_model(name), "alibi")
    assert relative_difference(logits(model, ids), stock) < EXACT


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    ("distance", "heads", "scale"),
    [
        *(("linear", 4, 4.0), ("log", 4, 2.0)),
        *late(["linear"], (4, 6), (1.0, 2.5)),
        *late(["linear"], (6,), (4.0,)),
    ],
)
def test_a_scale_divides_the_slopes(name: str, distance: str, heads: int, scale: float) -> None:
    ids = tokens(90)  # longer than any of them was trained on
    model, log = build_alibi_model(name, heads), distance == "log"
    expected = reference_logits(model, ids, scale, log)
    others = {
        "twice the scale": reference_logits(model, ids, 2 * scale, log),
        "the other distance": reference_logits(model, ids, scale, not log),
    }
    assert min(relative_difference(expected, other) for other in others.values()) > 1e-3
    patch_model(model, "alibi", scale=scale, distance=distance)
    assert relative_difference(logits(model, ids), expected) < EXACT


@cache
def expected_of(name: str) -> Tensor:
    return reference_logits(build_alibi_model(name), tokens(90), 4.0)


@pytest.mark.parametrize(
    ("name", "way", "dense"),
    covering(BUILDERS, [way for way in WAYS if way is not packed], (0, masks.DENSE)),
)
def test_every_way_to_run_a_text_has_the_biases_of_the_paper(
    name: str, way: Way, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed by the engine, and with masks that are written. These models take no packed texts."""
    monkeypatch.setattr(masks, "DENSE", dense)
    assert relative_difference(way(scaled(name), tokens(90)), expected_of(name)) < EXACT


@pytest.mark.parametrize("name", ["bloom", *late(["falcon"])])
def test_tokens_that_a_mask_hides_inside_a_text_are_not_counted(name: str) -> None:
    """As these models count; an argument without a row for each text cannot tell them apart."""
    model, ids, mask = build_alibi_model(name), tokens(30), torch.ones(1, 30, dtype=torch.long)
    mask[0, 8:14] = 0
    stock = logits(model, ids, attention_mask=mask)
    patch_model(model, "alibi")
    shown = mask[0].bool()
    ours = logits(model, ids, attention_mask=mask)
    assert relative_difference(ours[:, shown], stock[:, shown]) < EXACT


def far_biases(name: str) -> Tensor:
    """Return the biases of the last of 700 tokens at scale 4, in float64; with four heads they are exact in float32."""
    factor = 16**-0.5 if name.startswith("falcon") else 1.0
    slopes = torch.tensor(slopes_of(4), dtype=torch.float64) * factor / 4
    return -slopes[:, None] * torch.arange(699, -1, -1)


@pytest.mark.parametrize("name", ["bloom", *late(["falcon", "mpt", "falcon_eager"])])
def test_half_precision_gets_biases_that_are_exact_for_far_texts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(scaled(name)).bfloat16()
    calls: list[tuple[Any, Any]] = []
    original = engine.attend

    def attend(call: Any, encoding: Any) -> Any:
        calls.append((call, encoding))
        return original(call, encoding)

    monkeypatch.setattr(attention, "attend", attend)
    logits(model, tokens(700))
    assert len(calls) in (2, 4)  # layers
    for call, encoding in calls:
        bias = score_bias(call, encoding, call.query[:, :, 699:], 699)
        assert bias.dtype == torch.float32
        assert torch.equal(bias[0, :, 0].double(), far_biases(name))


@pytest.fixture
def not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the search for attention that can be handed over end in an error."""

    def search(*_: Any) -> None:
        raise UnsupportedModelError("nothing is found")

    monkeypatch.setattr(bias_seam, "search", search)


@pytest.mark.usefixtures("not_handed_over")
@pytest.mark.parametrize("name", ["falcon", *late(["bloom", "mpt", "falcon_eager"])])
def test_attention_that_is_not_handed_over_gets_exact_biases_as_an_argument(name: str) -> None:
    model, ids = build_alibi_model(name), tokens(90)
    implementation = model.config._attn_implementation
    want = reference_logits(model, ids, 4)
    patch_model(model, "alibi", scale=4)
    assert model.config._attn_implementation == implementation
    assert not handed_over(model)
    assert relative_difference(logits(model, ids), want) < EXACT
    pieces = in_steps(model, ids, [40, 30, 1, 19], StaticCache(model.config, 100))
    assert relative_difference(pieces, want) < EXACT
    model.bfloat16()
    seen: dict[str, Any] = {}
    block = next(m for path, m in model.named_modules() if path.endswith(("h.1", "blocks.1")))
    block.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    logits(model, tokens(700))
    place = next(
        k
        for k in ("attention_mask", "position_bias")
        if seen[k].shape[-2:] == (700, 700) and seen[k].dtype != torch.bool
    )
    last = seen[place].reshape(-1, 700, 700)[:, -1].double()
    assert seen[place].dtype == torch.float32
    assert torch.equal(last, far_biases(name))


@pytest.fixture
def by_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine compute short texts too."""
    monkeypatch.setattr(masks, "DENSE", 0)


@pytest.mark.usefixtures("by_engine")
def test_another_implementation_is_followed() -> None:
    """One that is chosen after the patch; its code then gets the biases as an argument."""
    model: Any = patch_model(build_alibi_model("falcon"), "alibi", scale=4)
    ids = tokens(60)
    full = logits(model, ids)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "sdpa"
    assert relative_difference(logits(model, ids), full) < EXACT


@pytest.mark.slow
@pytest.mark.usefixtures("by_engine")
@pytest.mark.parametrize("name", BUILDERS)
def test_weights_are_returned_where_they_are_requested(name: str) -> None:
    model, ids = patch_model(build_alibi_model(name), "alibi", scale=4), tokens(30)
    with torch.no_grad():
        found: Any = model(ids, output_attentions=True).attentions
        plain = model(ids)
    assert plain.attentions is None
    assert len(found) == model.config.num_hidden_layers
    distance = (torch.arange(30)[:, None] - torch.arange(30)).double()
    for weights in found:
        assert weights.shape == (1, 4, 30, 30)
        assert torch.allclose(weights.sum(-1), torch.ones(1, 4, 30))
        assert not weights[..., distance < 0].any()


@pytest.mark.slow
@pytest.mark.usefixtures("by_engine")
@pytest.mark.parametrize("name", BUILDERS)
def test_a_compiled_graph_holds_the_biases_as_an_argument(name: str) -> None:
    model, ids = patch_model(build_alibi_model(name), "alibi", scale=4), tokens(30)
    full = logits(model, ids)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        out = compiled(ids, use_cache=False).logits
    assert relative_difference(out, full) < EXACT
    assert relative_difference(logits(model, ids), full) == 0.0


@pytest.mark.slow
def test_a_long_text_in_bfloat16_is_near_that_in_float32() -> None:
    """Biases that transformers rounds relative to the first key are far off at 2,048 tokens."""
    ids = tokens(2048)
    exact = logits(build_alibi_model("bloom"), ids)
    model = build_alibi_model("bloom").bfloat16()
    assert relative_difference(logits(model, ids), exact) > 0.3
    assert relative_difference(logits(patch_model(model, "alibi"), ids), exact) < 0.05


def test_a_weak_bias_is_found_in_bfloat16() -> None:
    """Its effect on this model's outputs is less than their rounding, but it is an argument all the same."""
    model = patch_model(build_alibi_model("falcon").bfloat16(), "alibi", scale=2)
    assert get_patch(model).places[1][2:] == ("4", "0.03125", "0.000488281")  # type: ignore[union-attr]


def test_slopes_that_bfloat16_rounded_are_those_of_the_paper() -> None:
    """Falcon makes them in bfloat16 in any dtype."""
    model = patch_model(build_alibi_model("falcon", heads=16), "alibi", scale=2)
    rows = get_patch(model).places  # type: ignore[union-attr]
    slopes = [slope / 2 / math.sqrt(16) for slope in slopes_of(16)]
    assert rows[1][-2:] == (f"{max(slopes):.6g}", f"{min(slopes):.6g}")


# Relative position biases


def bucket_of(r: int, buckets: int, longest: int, both: bool) -> int:
    """Return T5's bucket of a distance, key minus query (Raffel et al. 2020, appendix of the code's docstring)."""
    first = 0
    if both:
        buckets //= 2
        first = buckets if r > 0 else 0
        r = abs(r)
    else:
        r = max(0, -r)
    exact = buckets // 2
    if r < exact:
        return first + r
    grown = math.log(r / exact) / math.log(longest / exact) * (buckets - exact)
    return first + min(buckets - 1, exact + int(grown + 1e-6))


class _Reference(nn.Module):
    """A relative position bias that reads the row of each pair by `bucket_of`, for texts without a cache."""

    def __init__(self, table: Tensor, longest: int, both: bool, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.double())
        self.longest, self.both, self.scale = longest, both, scale

    def forward(self, rows: Tensor) -> Tensor:
        queries, keys = rows.shape
        index = [[self._row(n - m) for n in range(keys)] for m in range(queries)]
        return self.weight[torch.tensor(index)]

    def _row(self, r: int) -> int:
        near = math.floor(abs(r) / self.scale) * (1 if r > 0 else -1)
        return bucket_of(near, len(self.weight), self.longest, self.both)


@pytest.mark.parametrize("name", ["t5", pytest.param("umt5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scale", [4.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_distances_are_divided_before_they_are_bucketed(name: str, scale: float) -> None:
    model, ids = build_table_model(name), tokens(50)
    reference = copy.deepcopy(model).double()
    for path, module in list(reference.named_modules()):
        if path.endswith("relative_attention_bias"):
            table = _Reference(module.weight.data, 128, path.startswith("encoder"), scale)
            reference.get_submodule(path.rpartition(".")[0]).relative_attention_bias = table
    plain = outputs(model, ids)
    patch_model(model, "t5", scale=scale)
    patched = outputs(model, ids)
    assert relative_difference(patched, plain) > 1e-3
    assert relative_difference(patched, outputs(reference, ids)) < 2e-5


@pytest.mark.parametrize("name", ["t5", *late(TABLES[1:])])
def test_a_raised_max_distance_is_a_native_config(name: str) -> None:
    """Plain transformers builds it; at scale 1, both modes read the rows of the model itself."""
    model, ids = build_table_model(name), tokens(90)
    plain = outputs(model, ids)
    config = copy.deepcopy(model.config)
    config.relative_attention_max_distance *= 4
    native = type(model)(config).eval()
    native.load_state_dict(model.state_dict())
    for mode in ("distance", "max_distance"):
        assert torch.equal(outputs(patch_model(model, "t5", mode=mode), ids), plain)
        unpatch_model(model)
    patched = outputs(patch_model(model, "t5", scale=4, mode="max_distance"), ids)
    assert relative_difference(patched, plain) > 1e-3
    assert torch.equal(patched, outputs(native, ids))
    assert in_force(model).export == "config"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["distance", "max_distance"])
def test_a_decoder_in_steps_reads_the_rows_of_one_forward(mode: str) -> None:
    model, ids = patch_model(build_table_model("t5"), "t5", scale=4, mode=mode), tokens(60)
    whole = outputs(model, ids)
    with torch.no_grad():
        encoded = model.get_encoder()(ids)
        cache, parts = None, []
        for start, end in ((0, 40), (40, 41), (41, 60)):
            out = model(
                encoder_outputs=encoded, decoder_input_ids=ids[:, start:end], **{CACHE: cache}
            )
            cache = out[CACHE]
            parts.append(out.logits)
    assert relative_difference(torch.cat(parts, 1), whole) < EXACT


@pytest.mark.slow
def test_what_is_in_force_is_read_back() -> None:
    model = patch_model(build_alibi_model("mpt"), "alibi", scale=4)
    patch = in_force(model)
    assert (patch.original_max_position_embeddings, patch.extended_length) == (64, 256)
    numbers = ("4", "0.0625", "0.000976562")
    assert patch.places[1] == ("transformer.blocks.*", "position_bias", *numbers)
    positions = inspect_positions(model)
    assert [source.kind for source in positions.sources] == [kinds.ALIBI]
    assert positions.patch == "alibi(scale=4)"
    model = patch_model(build_table_model("t5"), "t5", scale=2, mode="max_distance")
    patch = in_force(model)
    assert patch.places[1:] == (("relative_attention_bias x2", "32", "4", "1", "256"),)
    assert max(map(len, repr(patch).splitlines())) <= 80
    assert inspect_positions(model).patch == "t5(scale=2, mode='max_distance')"


@pytest.mark.parametrize(
    ("name", "method", "options", "message"),
    [
        ("bloom", "yarn", {"scale": 2}, "Methods for ALiBi: alibi"),
        *slowly(
            ("falcon", "rerope", {"window": 8}, "Methods for ALiBi: alibi"),
            ("t5", "alibi", {}, "Methods for a relative position bias: t5"),
            ("bloom", "alibi", {"keep_rope": True}, "no rotation"),
            ("bloom", "alibi", {"target_length": 4096}, "Give scale="),
            ("t5", "t5", {"buckets": 64}, "trained tables, to which buckets"),
            ("t5", "t5", {"mode": "all"}, "distance"),
            ("mpnet", "t5", {"mode": "max_distance"}, 'mode="distance"'),
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_way_out(
    name: str, method: str, options: dict[str, Any], message: str
) -> None:
    model: Any = build_alibi_model(name) if name in BUILDERS else build_text_model(name)
    zoo.refused(model, message, method, **options)


@pytest.mark.parametrize(("name", "method"), [("bloom", "alibi"), ("t5", "t5")])
def test_a_model_without_weights_is_refused_for_that_reason(name: str, method: str) -> None:
    model: Any = build_text_model(name)
    with pytest.raises(UnsupportedModelError, match=r"on the meta device.*first: no --dry-run"):
        patch_model(model.to("meta"), method)


@pytest.mark.slow
def test_a_model_whose_biases_do_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_alibi_model("bloom")
    original = bias_seam.ExactBias.biases
    monkeypatch.setattr(
        bias_seam.ExactBias, "biases", lambda self, values: 1.1 * original(self, values)
    )
    zoo.refused(model, "is another one", "alibi")
    monkeypatch.undo()
    monkeypatch.setattr(distances, "divided", lambda distance, scale: distance)
    model = build_table_model("t5")
    monkeypatch.setattr(distances.DividedBuckets, "__call__", lambda self, r, *a, **k: r.abs() % 2)
    with pytest.raises(VerificationError):
        patch_model(model, "t5", scale=4)


def test_slopes_are_read_off_the_model() -> None:
    """A model with slopes of its own keeps them, divided by the scale."""
    model: Any = build_alibi_model("mpt")
    own = model.transformer.build_mpt_alibi_tensor
    model.transformer.build_mpt_alibi_tensor = lambda *args, **kwargs: 3 * own(*args, **kwargs)
    ids = tokens(30)
    stock = logits(model, ids)
    patch_model(model, ALiBi(scale=1))
    assert relative_difference(logits(model, ids), stock) < EXACT
