"""Dependencies between tokens, found by changing one token at a time, and the check that refuses wrong ones."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, MptConfig, MptForCausalLM, PreTrainedModel
from transformers.modeling_flash_attention_utils import (
    _is_packed_sequence,
    prepare_fa_kwargs_from_position_ids,
)

from hf_posenc import patch_model
from hf_posenc.errors import PosencError
from hf_posenc.training.checks import check_dependencies
from hf_posenc.training.collator import DRAWS, PositionCollator
from hf_posenc.training.options import POSITIONS, PROMPTED
from tests.support import zoo
from tests.support.attention_llama import CASES, FORMS, ORIGINAL, randomise
from tests.support.selection import covering, late
from tests.support.zoo_registry import quiet

LENGTH = 10
DOCUMENTS = ((4, 1, 5), (7, 3))
TARGET = 40

ARCHITECTURES = (
    "llama",
    "cohere",  # interleaved
    "gpt_neox",  # partial
    "gptj",  # a table in every layer
    "gemma3_text",  # sliding windows, a table per layer type
    "olmo3",
    "phimoe",  # experts
    "deepseek_v3",  # latent attention
    "qwen3",
    "llama4_text",  # chunks, layers without positions
    "apertus",
    "ministral3",
)
FREQUENCIES: dict[str, dict[str, Any]] = {
    "yarn": {"scale": 4.0},
    "pi": {"scale": 4.0},
    "dynamic_ntk": {"scale": 2.0, "update": "sequence"},
    "llama3": {"scale": 4.0},
    "nope": {},
}
WIDE = {"lm_infinite": 64, "attention_sinks": 64, "sliding_window": 64}
"""Windows that take in all of the long context: what they hide by distance is not in question here."""


@functools.cache
def tiny(model_type: str, attention: str) -> PreTrainedModel:
    model = zoo.build(model_type)
    with quiet():
        model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    return model


def patched(name: str, attention: str = "sdpa") -> PreTrainedModel:
    with quiet():
        model = zoo.build("llama", num_hidden_layers=2)
        model.set_attn_implementation(attention)
    if name in FREQUENCIES:
        patch_model(model, name, **FREQUENCIES[name])
    else:
        case, window = CASES[name], ({"window": WIDE[name]} if name in WIDE else {})
        options: Any = {**case.options, **window}
        patch_model(model, case.method, original_max_position_embeddings=ORIGINAL, **options)
        randomise(model)
    return model


def given_of(positions: str) -> dict[str, Any]:
    """What the collator needs for these positions."""
    prompt = {"terminal_prompt": [3, 4]} if positions in PROMPTED else {}
    return {"target_length": TARGET, **prompt} if positions in DRAWS else {}


def batch_of(positions: str, **options: Any) -> dict[str, Any]:
    """Two rows as the collator makes them; drawn positions jump in both."""
    given = {**given_of(positions), **options}
    text = LENGTH - len(given.get("terminal_prompt", ()))
    rows = [
        {"input_ids": zoo.tokens(LENGTH, seed=seed)[0][:text], "document_lengths": lengths}
        for seed, lengths in enumerate(DOCUMENTS)
    ]
    batch = PositionCollator(positions, seed=1, **given)(rows)
    if positions in DRAWS:
        assert all(int(row.diff().max()) > 1 for row in batch["position_ids"])
    return batch


def expected(positions: str) -> Tensor:
    """Each token depends on itself and those in front of it; packed, on those of its own document only."""
    rows = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool).tril()
    if positions == "packed":
        for row, lengths in zip(rows, DOCUMENTS, strict=True):
            document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            row &= document[:, None] == document[None, :]
    return rows


@torch.no_grad()
def by_change(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    """Bool (b, n, n): whether the logits of a query move when a key's token is another; the whole batch goes along."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    before = logits(model, inputs)
    moved = []
    for key in range(LENGTH):
        ids = inputs["input_ids"].clone()
        ids[:, key] = (ids[:, key] + 17) % words_of(model)
        difference = (logits(model, {**inputs, "input_ids": ids}) - before).abs().amax(-1)
        # Experts are chosen per batch: sums in another order.
        moved.append(difference > 1e-5 * before.abs().amax())
    return torch.stack(moved, dim=-1)


def words_of(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def logits(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """As the Trainer calls a model, which turns its cache off."""
    model.config.use_cache = False
    found: Tensor = model(**inputs).logits
    return found


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*starts untrained"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
MODELS = [
    (model_type, attention)
    for model_type in ARCHITECTURES
    for attention in ("eager", "sdpa")
    if (model_type, attention) != ("gptj", "sdpa")  # it has none
]


def check(model: Any, positions: str, **options: Any) -> None:
    given = {"target_length": TARGET, **given_of(positions), **options}
    check_dependencies(model, PositionCollator(positions, **given))


@pytest.mark.parametrize(("model", "positions"), covering(MODELS, POSITIONS), ids=str)
def test_architectures(model: tuple[str, str], positions: str) -> None:
    assert torch.equal(by_change(tiny(*model), batch_of(positions)), expected(positions))
    check(tiny(*model), positions)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        *covering([*FREQUENCIES, *FORMS], ["packed", "random"]),
        *late([name for name in CASES if name not in FORMS], ["packed", "random"]),
    ],
)
def test_patched_models(name: str, positions: str) -> None:
    model = patched(name)
    assert torch.equal(by_change(model, batch_of(positions)), expected(positions))
    if (name, positions) != ("nope", "random"):  # which has no effect: refused below
        check(model, positions)


@pytest.mark.parametrize("name", ["yarn", "rerope", "t5"])
def test_packed_documents_read_as_they_do_alone(name: str) -> None:
    """The loss of a packed batch is the mean over the tokens of its documents, each on its own."""
    model, batch = patched(name), batch_of("packed")
    losses, counted = [], 0
    for row, lengths in zip(batch["input_ids"], DOCUMENTS, strict=True):
        for ids in row.split(lengths):
            if len(ids) > 1:
                scores = logits(model, {"input_ids": ids[None]})[0, :-1].double()
                losses.append(F.cross_entropy(scores, ids[1:], reduction="sum").item())
                counted += len(ids) - 1
    with torch.no_grad():
        together = model(**batch).loss.item()
    assert int((batch["labels"] != -100).sum()) == counted
    assert together == pytest.approx(sum(losses) / counted, rel=1e-5)


# A trap of transformers that the collator goes around; should it vanish one day, so may the collator's care
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_with_a_mask_packed_documents_see_each_other(attention: str) -> None:
    batch = batch_of("packed")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    assert torch.equal(by_change(tiny("llama", attention), batch), expected("contiguous"))


@pytest.mark.parametrize(
    "model_type", ["recurrent_gemma", "lfm2", "bloom", *late(["jamba", "gpt_oss"])]
)
def test_packing_is_refused_where_documents_see_each_other(model_type: str) -> None:
    """Layers with a state or a convolution, and models that do not hand their positions on to the mask."""
    model = zoo.build(model_type)
    assert not torch.equal(by_change(model, batch_of("packed")), expected("packed"))
    with pytest.raises(
        PosencError, match=r"packed documents attend to each other.*--positions cont"
    ):
        check(model, "packed")
    check(model, "contiguous")


@pytest.fixture
def registered() -> Iterator[Callable[[str, Any], PreTrainedModel]]:
    """Makes models with an attention function that has no mask function beside it, so that it is given no mask."""
    names = []

    def model_with(name: str, function: Any) -> PreTrainedModel:
        AttentionInterface.register(name, function)
        names.append(name)
        model = zoo.build("llama")
        model.config._attn_implementation = name
        return model

    yield model_with
    for name in names:
        AttentionInterface._global_mapping.pop(name)


def test_packing_is_refused_with_an_attention_function_without_a_mask(
    registered: Callable[[str, Any], PreTrainedModel],
) -> None:
    model = registered("maskless", AttentionInterface()["sdpa"])
    with pytest.raises(PosencError, match=r"\(maskless attention\).*attend to each other"):
        check(model, "packed")


def test_flash_packing_needs_one_row(registered: Callable[[str, Any], PreTrainedModel]) -> None:
    """transformers' flash path reads documents from `position_ids` where the batch has one row, else not at all."""

    def flash(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        positions = kwargs["position_ids"]
        documents = None
        if _is_packed_sequence(positions, query.shape[0]):
            (ends, _), _ = prepare_fa_kwargs_from_position_ids(positions)
            lengths = ends.diff()
            number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            documents = (number[:, None] == number[None, :]).tril()
        options: Any = {"is_causal": documents is None, "enable_gqa": True}
        found = F.scaled_dot_product_attention(query, key, value, documents, **options)
        return found.transpose(1, 2).contiguous(), None

    model = registered("flash_test", flash)
    assert torch.equal(by_change(model, batch_of("packed")), expected("contiguous"))  # the trap
    with pytest.raises(PosencError, match=r"only in batches of one row.*flatten=True"):
        check(model, "packed")
    for each in (model, tiny("llama", "sdpa")):
        check_dependencies(each, PositionCollator("packed", flatten=True))
    check(model, "random")


def test_an_attention_function_that_cannot_run_here_is_said_to_be_unchecked(
    registered: Callable[[str, Any], PreTrainedModel],
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("only on another device")

    model = registered("elsewhere", refuse)
    for positions in ("packed", "contiguous", "pose"):
        with pytest.warns(UserWarning, match="Could not verify that .*only on another device"):
            check(model, positions)


class Apart(PositionCollator):
    """As a collator is that does not know of the trap."""

    def __call__(self, examples: Any) -> dict[str, Any]:
        batch = super().__call__(examples)
        del batch["attention_mask"]
        return batch


@pytest.mark.parametrize("drawn", DRAWS)
def test_drawn_positions_are_refused_where_parts_do_not_see_each_other(drawn: str) -> None:
    with pytest.raises(PosencError, match=r"separates the parts of a text.*--positions cont"):
        check_dependencies(tiny("llama", "sdpa"), Apart(drawn, **given_of(drawn)))


@pytest.mark.parametrize(("how", "drawn"), covering(["roformer", "nope"], DRAWS))
def test_drawn_positions_are_refused_where_they_change_nothing(how: str, drawn: str) -> None:
    model = patched("nope") if how == "nope" else zoo.build(how, is_decoder=True)
    with pytest.raises(PosencError, match=r"does not read position_ids.*--positions cont"):
        check(model, drawn)


@pytest.mark.parametrize("method", ["t5", "shaw", "transformer_xl"])
def test_new_biases_of_zeros_have_an_effect_once_they_are_trained(method: str) -> None:
    with quiet():
        model = patch_model(zoo.build("llama"), method)
    check(model, "pose")
    assert not any(value.any() for name, value in model.named_parameters() if "posenc" in name)


def test_a_model_without_positions_or_without_a_head_says_so() -> None:
    with quiet():
        mpt = MptForCausalLM(MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=64))
    check(mpt, "contiguous")
    with pytest.raises(PosencError, match=r"MptForCausalLM.*--positions cont"):
        check(mpt, "pose")
    with pytest.raises(PosencError, match=r"LlamaModel.* no causal language model"):
        check(zoo.build("llama").get_submodule("model"), "contiguous")


def test_another_tokenizers_ids_are_refused() -> None:
    model = tiny("llama", "sdpa")
    words = words_of(model)
    check_dependencies(model, PositionCollator(), largest=words - 1)
    with pytest.raises(PosencError, match=f"gives token {words}, the model has {words}"):
        check_dependencies(model, PositionCollator(), largest=words)


def test_broken_weights_are_refused() -> None:
    model = zoo.build("llama")
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data[0, 0] = torch.nan
    with pytest.raises(PosencError, match=r"LlamaForCausalLM.*not finite"):
        check_dependencies(model, PositionCollator())


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = zoo.build("llama")
    model.train()
    model.get_submodule("model.layers.0").eval()
    modes = [module.training for module in model.modules()]
    before, state = zoo.logits(model, zoo.tokens(8)), torch.get_rng_state()
    check(model, "packed")
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(zoo.logits(model, zoo.tokens(8)), before)
    assert not model.get_input_embeddings()._forward_hooks


def test_weights_that_are_elsewhere_are_not_looked_at() -> None:
    with torch.device("meta"):
        model = zoo.build("llama")
    with pytest.warns(UserWarning, match="Could not verify that .*ZeRO-3"):
        check(model, "packed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(zoo.build("llama"), "packed")
