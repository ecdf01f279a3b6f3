"""Models with a rotary embedding and a second source of positions: `patch_model` refuses them, and nothing else."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from hf_posenc import UnsupportedModelError, patch_model, patched, unpatch_model
from hf_posenc.model.discovery import tables_of
from hf_posenc.model.sampled import sample_of
from hf_posenc.seams import hidden, probes
from hf_posenc.seams.hidden import refuse_hidden
from scripts.coverage import rotary_encoders
from tests.patch.test_sampled import llama
from tests.support import zoo
from tests.support.families import build_text_model

METHODS: dict[str, Any] = {"pi": {"scale": 4}, "alibi": {}, "nope": {}, "rerope": {"window": 16}}


def places(values: Tensor) -> Tensor:
    """Return the positions of rows, shape (tokens, 1)."""
    return torch.arange(values.shape[-2], dtype=values.dtype)[:, None]


class _Around(nn.Module):
    """A module with something before or after it that reads positions, and perhaps with trained rows by position."""

    def __init__(self, inner: Any, before: Any, after: Any, rows: float | None) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after
        self.rows = None if rows is None else nn.Parameter(torch.randn(64, 64) * rows)

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            values, kwargs = self.before(values, kwargs)
        output = self.inner(values, *args, **kwargs)
        if self.rows is not None:
            output = output + self.rows[: output.shape[1]].to(output.dtype)
        return output if self.after is None else self.after(output)


def around(
    *paths: str, before: Any = None, after: Any = None, rows: float | None = None
) -> Callable[[nn.Module], None]:
    """Return a function that puts the same thing around some modules of a model."""

    def hide(model: nn.Module) -> None:
        for path in paths:
            model.set_submodule(path, _Around(model.get_submodule(path), before, after, rows))

    return hide


def multiplied(factor: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that multiplies rows by a function of their positions."""
    return lambda output: output * factor(places(output))


def _biased(values: Tensor, slopes: Tensor) -> Tensor:
    """Return a causal mask with a bias by distance, of the slopes' first axes."""
    place = places(values)
    bias = -slopes.to(values.dtype) * (place - place.T).abs()
    return bias + torch.full_like(bias, torch.finfo(bias.dtype).min).triu(1)


def _bias_in_the_attention(model: Any) -> None:
    """Slopes that are parameters of an attention module, as sinks are, and that end with them too."""
    attention = model.model.layers[1].self_attn
    attention.log_slopes, native = nn.Parameter(torch.zeros(4)), attention.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = _biased(hidden_states, 0.5 * attention.log_slopes.exp()[:, None, None])[None]
        return native(hidden_states, *args, **{**kwargs, "attention_mask": mask})

    attention.forward = forward


def _turned(output: Tensor) -> Tensor:
    heads = output.unflatten(-1, (4, 16))
    angles = (places(output) * 100.0 ** -(torch.arange(8) / 8)).to(output.dtype)[:, None]
    one, other = heads.chunk(2, -1)
    both = one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()
    return torch.cat(both, -1).flatten(-2)


FIRST, EMBEDDING = "model.layers.0.self_attn", "model.embed_tokens"
ROWS = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.1
HIDDEN: dict[str, tuple[Callable[[Any], None], str]] = {
    "learned table": (around(EMBEDDING, rows=0.1), "a learned table model.embed_tokens.rows"),
    "list of rows": (
        around(EMBEDDING, after=lambda output: output + ROWS[: output.shape[1]].to(output.dtype)),
        "an unknown source outside of the blocks",
    ),
    "bias in the mask": (
        around(
            "model.layers.1",
            before=lambda values, kwargs: (
                values,
                {**kwargs, "attention_mask": _biased(values, torch.tensor(0.3))[None, None]},
            ),
        ),
        "ALiBi model.layers",
    ),
    "bias in the attention": (_bias_in_the_attention, "a relative encoding in code of its own"),
    "scaled layers": (
        around(
            *(f"model.layers.{index}" for index in range(3)),
            before=lambda values, kwargs: (values * (1 + 0.05 * places(values)), kwargs),
        ),
        "an unknown source model.layers",
    ),
    "rows in a layer": (around("model.layers.2", rows=0.1), "a learned table model.layers.*.rows"),
    "positions in values": (
        around(
            "model.layers.2.self_attn.v_proj",
            after=lambda output: (
                output + 0.3 * torch.sin(places(output) * torch.arange(1, 65)).to(output.dtype)
            ),
        ),
        "a relative encoding in code of its own",
    ),
    "second rotation": (
        around(f"{FIRST}.q_proj", f"{FIRST}.k_proj", after=_turned),
        "a relative encoding in code of its own",
    ),
    # Rows that a set of rows shown twice, three rows apart, would have in common.
    "every third row": (
        around(EMBEDDING, after=lambda output: output + 0.1 * (places(output) % 3)),
        "an unknown source outside of the blocks",
    ),
    "first row": (
        around("model.layers.1.mlp", after=multiplied(lambda place: 1 + 2 * (place == 0))),
        "an unknown source model.layers",
    ),
    # Attention stays a mean of equal rows for one repeated token.
    "sharper queries": (
        around(f"{FIRST}.q_proj", after=multiplied(lambda place: 1 + 0.2 * place.log1p())),
        "an unknown source model.layers",
    ),
    "before the head": (
        around("model.norm", after=multiplied(lambda place: 1 + 0.1 * place)),
        "an unknown source outside of the blocks",
    ),
}
"""What is put into a model, and the words of the refusal."""


def _llama() -> LlamaForCausalLM:
    return llama(num_hidden_layers=3)


FEW = [("learned table", method) for method in METHODS] + [
    (source, "pi")
    for source in ("bias in the mask", "positions in values", "second rotation", "before the head")
]


@pytest.mark.parametrize(
    ("source", "method"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
        for case in itertools.product(HIDDEN, METHODS)
    ],
)
def test_a_hidden_source_is_refused_by_every_method(source: str, method: str) -> None:
    model, (hide, words) = _llama(), HIDDEN[source]
    hide(model)
    message = f"more than its rotary embedding: .*{re.escape(words)}.*hf-posenc inspect MODEL"
    zoo.refused(model, message, method, **METHODS[method])
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hides_nothing_large_and_accuses_nobody(dtype: torch.dtype) -> None:
    clean: Any = _llama()
    other: Any = _llama()
    patch_model(clean.to(dtype), "pi", scale=4)
    HIDDEN["learned table"][0](other)
    with pytest.raises(UnsupportedModelError, match="a learned table model"):
        patch_model(other.to(dtype), "pi", scale=4)


# Cost: one forward, and none for a model that was tried


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    for module, name in ((probes, "forward"), (hidden, "inspect")):
        native = getattr(module, name)

        def counted(*args: Any, name: str = name, native: Any = native, **kwargs: Any) -> Any:
            names.append(name)
            return native(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return names


def test_an_ordinary_model_is_run_twice(trials: list[str]) -> None:
    model = _llama()
    patch_model(model, "pi", scale=4)
    assert trials == ["forward", "forward"]
    patch_model(model, "yarn", scale=4, replace=True)
    unpatch_model(model)
    with patched(model, "rerope", window=16):
        pass
    assert trials == ["forward", "forward"]


def test_a_model_whose_weights_or_modules_have_changed_is_tried_again(trials: list[str]) -> None:
    model: Any = _llama()
    around(EMBEDDING, rows=0.0)(model)
    with patched(model, "pi", scale=4):  # rows of zeros cannot be seen
        pass
    with torch.no_grad():
        model.model.embed_tokens.rows.normal_()
    with pytest.raises(UnsupportedModelError, match="a learned table"):
        patch_model(model, "pi", scale=4)
    model.model.embed_tokens = model.model.embed_tokens.inner
    patch_model(model, "pi", scale=4)
    assert trials.count("inspect") == 1
    unpatch_model(model)
    HIDDEN["list of rows"][0](model)
    with pytest.raises(UnsupportedModelError, match="outside of the blocks"):
        patch_model(model, "pi", scale=4)


@pytest.mark.parametrize(("family", "forwards"), [("gpt_oss", 6), ("qwen3_next", 5), ("lfm2", 5)])
def test_known_reasons_are_reused(trials: list[str], family: str, forwards: int) -> None:
    model = zoo.build(family)
    trials.clear()
    patch_model(model, "pi", scale=4, replace=True)
    assert trials == ["forward"] * len(trials)
    assert len(trials) <= forwards


@pytest.mark.parametrize(
    ("model_type", "source"),
    [
        ("gpt_oss", "before the head"),
        ("qwen3_next", "scaled layers"),
        pytest.param("gpt_oss", "scaled layers", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "before the head", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "list of rows", marks=pytest.mark.slow),
    ],
)
def test_known_reasons_excuse_nothing_else(model_type: str, source: str) -> None:
    model = zoo.build(model_type)
    HIDDEN[source][0](model)
    with pytest.raises(UnsupportedModelError, match="more than its rotary embedding"):
        patch_model(model, "pi", scale=4, replace=True)


# Models that cannot be tried, and those that are taken with what they have


def test_a_model_that_is_not_whole_or_needs_more_than_tokens(trials: list[str]) -> None:
    with torch.device("meta"):
        patch_model(_llama(), "pi", scale=4)
    sharded: Any = _llama()
    sharded.lm_head.weight.ds_tensor = sharded.lm_head.weight.data
    patch_model(sharded, "pi", scale=4)
    assert not trials
    model: Any = _llama()
    model.forward = lambda pixel_values: None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(model, "pi", scale=4)


def test_compiled_parts_are_not_compiled_for_the_trial() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model: Any = _llama()
    model.model.layers[0].mlp.compile(backend=backend)
    patch_model(model, "pi", scale=4)
    assert not graphs
    model(zoo.tokens(9))
    assert graphs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model_type",
    [*zoo.decoder_types(), *zoo.text_tower_types(), *zoo.composite_types(), *zoo.seq2seq_types()],
)
def test_no_rotary_type_is_refused(model_type: str, dtype: torch.dtype) -> None:
    model: Any = zoo.build(model_type)
    model.to(dtype)
    refuse_hidden(model, tables_of(model), "pi", sample_of(model))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_rotary_encoder_is_refused(dtype: torch.dtype) -> None:
    for model_type in rotary_encoders():
        model: Any = build_text_model(model_type)
        model.to(dtype)
        refuse_hidden(model, tables_of(model), "pi", sample_of(model))
