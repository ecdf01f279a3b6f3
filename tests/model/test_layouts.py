"""Every layout of RoPE is one rotation: with its rows permuted, a weight gives the same scores in all of them.

The reference is the complex form of Llama's authors in float64: features 2i and 2i + 1 of a head are the number z_i,
which a position m multiplies by `exp(i m f)`. The modules compared are transformers' own. At the end: what
docs/concepts/ shows of it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from operator import lt, mul
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import available_methods, patch_model
from tests.support import zoo
from tests.support.references import REFERENCES, default, yarn

HEADS, HEAD_DIM, WIDTH, LENGTH, THETA, SCALE = 4, 16, 64, 48, 10_000.0, 4.0
PROJECTIONS = (("q_proj", "k_proj"), ("query", "key"))  # by the names of their modules
ROPE = {"rope_type": "default", "rope_theta": THETA}


@dataclass(frozen=True)
class Layout:
    """A model type of transformers, and the features that it rotates: the first `rotated` of each head."""

    model_type: str
    interleaved: bool = False
    rotated: int = HEAD_DIM
    fields: dict[str, Any] = field(default_factory=dict)


ALL_HEADS = {"num_key_value_heads": HEADS, "rope_parameters": ROPE, "num_hidden_layers": 1}
LAYOUTS = [
    Layout("llama", fields=ALL_HEADS),
    Layout("cohere", interleaved=True, fields=ALL_HEADS),
    Layout(
        "llama4_text",  # in complex numbers
        interleaved=True,
        fields={"num_key_value_heads": HEADS, "rope_parameters": ROPE, "use_qk_norm": False},
    ),
    Layout("roformer", interleaved=True, fields={"num_hidden_layers": 1}),
    Layout(
        "gpt_neox",
        rotated=8,
        fields={"num_hidden_layers": 1, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    ),
    Layout("gptj", interleaved=True, rotated=8, fields={"n_layer": 1, "rotary_dim": 8}),
]


def reordered(rows: Tensor, layout: Layout, *, to_complex: bool) -> Tensor:
    """Permute rows of each head, (heads, head_dim, ...), from a layout to the pairs of the complex form, or back."""
    if layout.interleaved:
        return rows
    half = layout.rotated // 2
    pairs = rows[:, : layout.rotated].unflatten(1, (2, half) if to_complex else (half, 2))
    return torch.cat((pairs.transpose(1, 2).flatten(1, 2), rows[:, layout.rotated :]), 1)


def attention_of(model: nn.Module) -> nn.Module:
    names = [q for q, _ in PROJECTIONS] + ["query_key_value"]
    return next(m for m in model.modules() if any(hasattr(m, name) for name in names))


def projections(attention: nn.Module) -> tuple[Tensor, Tensor]:
    """Return views of the weights of queries and keys, (heads, head_dim, width); their biases become zero."""
    linears = [m for m in attention.children() if isinstance(m, nn.Linear) and m.bias is not None]
    for linear in linears:
        linear.bias.detach().zero_()
    if isinstance(fused := getattr(attention, "query_key_value", None), nn.Linear):
        query, key, _ = fused.weight.detach().view(HEADS, 3, HEAD_DIM, WIDTH).unbind(1)
        return query, key
    names = next(pair for pair in PROJECTIONS if hasattr(attention, pair[0]))
    query, key = (attention.get_parameter(f"{name}.weight").detach() for name in names)
    return query.view(HEADS, HEAD_DIM, WIDTH), key.view(HEADS, HEAD_DIM, WIDTH)


def probabilities(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The attention probabilities of the first layer, (heads, length, length), if it gets these hidden states."""

    def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (hidden, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": hidden}

    caught: list[Tensor] = []
    attention = attention_of(model)
    hooks = [
        attention.register_forward_pre_hook(replace, with_kwargs=True),
        attention.register_forward_hook(lambda _, inputs, output: caught.append(output[1])),
    ]
    zoo.logits(model, zoo.tokens(LENGTH))
    for hook in hooks:
        hook.remove()
    return caught[0][0].double()


def complex_form(query: Tensor, key: Tensor, hidden: Tensor, rotated: int, patched: bool) -> Tensor:
    """Llama's original rotation, in float64; features that do not rotate are multiplied by 1."""
    table = (rotated, THETA, zoo.ORIGINAL_LENGTH)
    frequencies, factor = yarn(*table, scale=SCALE) if patched else default(*table)
    angles = torch.arange(LENGTH)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    turns = torch.ones(LENGTH, HEAD_DIM // 2, dtype=torch.complex128)
    turns[:, : rotated // 2] = torch.polar(torch.full_like(angles, factor), angles)
    rows = (hidden[0].double() @ weight.double().mT for weight in (query, key))
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns for x in rows)
    scores = (q @ k.conj().mT).real / HEAD_DIM**0.5
    return scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.parametrize("patched", [False, True], ids=["native", "yarn"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model_type)
def test_a_layout_gives_the_scores_of_the_complex_form(layout: Layout, patched: bool) -> None:
    model = zoo.build(layout.model_type, **layout.fields)
    model.set_attn_implementation("eager")
    if patched:
        patch_model(model, "yarn", scale=SCALE, layers="all")
    weights = projections(attention_of(model))
    random = torch.Generator().manual_seed(0)
    hidden, *shared = (
        deviation * torch.randn(shape, generator=random)
        for deviation, shape in ((1.0, (1, LENGTH, WIDTH)), *[(0.2, (HEADS, HEAD_DIM, WIDTH))] * 2)
    )

    # From the layout to the complex form: the model's own weights.
    own = [reordered(rows, layout, to_complex=True) for rows in weights]
    expected = complex_form(own[0], own[1], hidden, layout.rotated, patched)
    torch.testing.assert_close(probabilities(model, hidden), expected, atol=5e-6, rtol=0)

    # And back: the same weights in every layout.
    for rows, pairs in zip(weights, shared, strict=True):
        rows.copy_(reordered(pairs, layout, to_complex=False))
        assert torch.equal(reordered(rows, layout, to_complex=True), pairs)
    expected = complex_form(shared[0], shared[1], hidden, layout.rotated, patched)
    torch.testing.assert_close(probabilities(model, hidden), expected, atol=5e-6, rtol=0)
    # Without the conversion nothing is raised, and the scores are others.
    if not layout.interleaved:
        for rows, pairs in zip(weights, shared, strict=True):
            rows.copy_(pairs)
        assert float((probabilities(model, hidden) - expected).abs().max()) > 0.05


SAME: dict[str, Any] = {"rope_parameters": ROPE, "num_hidden_layers": 2, "rms_norm_eps": 1e-6}
SAME["tie_word_embeddings"] = False
PATCHES: dict[str, dict[str, Any]] = {"none": {}, "yarn": {"scale": SCALE}, "rerope": {"window": 8}}


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("types", [("llama", "ernie4_5"), ("ernie4_5", "llama")])
def test_models_of_another_layout_have_the_same_logits(types: tuple[str, str], patch: str) -> None:
    """Ernie 4.5 is a Llama with interleaved pairs."""
    source, target = (zoo.build(name, **SAME) for name in types)
    state = source.state_dict()
    for name in state:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = state[name].unflatten(0, (-1, HEAD_DIM))
            moved = reordered(rows, Layout("llama"), to_complex=types[0] == "llama")
            state[name] = moved.flatten(0, 1)
    target.load_state_dict(state)
    for model in (source, target):
        if options := PATCHES[patch]:
            patch_model(model, patch, **options)
    ids = zoo.tokens(LENGTH)
    expected, found = (zoo.logits(model, ids) for model in (source, target))
    assert zoo.relative_difference(found, expected) < 1e-5


def test_the_picture_of_the_layouts_shows_the_conversion() -> None:
    """Each layout of the picture, as the rows of one head that count the features of the complex form."""
    pytest.importorskip("matplotlib")
    from scripts.draw_concepts import LAYOUTS as DRAWN
    from scripts.draw_concepts import order

    for name, rotated, split in DRAWN:
        rows = torch.arange(8)[None]
        layout = Layout(name, interleaved=not split, rotated=rotated)
        expected = reordered(rows, layout, to_complex=False)[0].tolist()
        assert order(8, rotated, split=split) == expected


def test_digits_of_the_page_are_those_of_the_position() -> None:
    from scripts.concept_pages import NUMERALS, digits

    for (_, divisor, bases), row in zip(NUMERALS, digits().splitlines()[2:], strict=True):
        places = [math.prod(bases[:place]) for place in range(len(bases))]
        numerals = re.findall("`([^`]+)`", row)[-3:]
        for position, numeral in zip((999, 1000, 1999), numerals, strict=True):
            digit = [float(text) for text in reversed(numeral.split())]
            assert all(map(lt, digit, bases))
            assert divisor * sum(map(mul, digit, places)) == position


def test_divisors_of_the_page_are_those_of_the_papers() -> None:
    from scripts.concept_pages import divisors

    plain, slow = default(128, 1e4, 4096)[0], 46  # the first pair without a full turn
    assert 4096 * plain[slow] < 2 * math.pi < 4096 * plain[slow - 1]
    rows = [line.strip("| ").split(" | ") for line in divisors().splitlines()[2:]]
    assert [name for name, *_ in rows] == ["unscaled", "pi", "ntk", "ntk_mixed", "yarn"]
    for name, *values, longest in rows[1:]:
        table = REFERENCES[name](128, 1e4, 4096, scale=8)[0]
        ratios = [one / other for one, other in zip(plain, table, strict=True)]
        assert values == [f"{ratios[i]:.2f}" for i in (0, 16, 32, 48, 63)]
        assert int(longest.replace(",", "")) == math.floor(4096 * min(ratios[slow:]) + 1e-6)


def test_properties_of_the_page_are_those_of_the_papers() -> None:
    from scripts.concept_pages import properties

    facts = {
        name: row.strip("| ").split(" | ")[1:3]
        for row in properties().splitlines()
        for name in re.findall(r"\[`(\w+)`\]", row)
    }
    assert set(facts) == {*available_methods()}
    for names, positions, trained in (
        (("yarn", "rerope", "string", "alibi", "sandwich", "xpos"), "m - n", "no"),
        (("t5", "shaw", "kerple_log", "transformer_xl", "rope_bias"), "m - n", "yes"),
        (("self_extend", "dual_chunk", "attention_sinks", "lm_infinite"), "m and n", "no"),
        (("dynamic_ntk", "longrope"), "m - n and the text's length", "no"),
        (("fire",), "m - n and m", "yes"),
        (("log_n",), "m", "no"),
        (("nope",), "none", "no"),
    ):
        for name in names:
            assert facts[name] == [positions, trained], name
