"""Which token's logits depend on which, found by changing one token at a time in the model as it is trained."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_flash_attention_utils import (
    _is_packed_sequence,
    prepare_fa_kwargs_from_position_ids,
)

from hf_posenc import patch_model
from hf_posenc.errors import PosencError
from hf_posenc.training.collator import POSITIONS, PositionCollator
from hf_posenc.training.dependencies import check_dependencies, dependencies
from hf_posenc.training.positions import DRAWS
from tests import zoo
from tests.attention_llama import CASES, ORIGINAL, randomise
from tests.zoo_registry import quiet

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*starts untrained"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
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
    "lfm2",
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
        case = CASES[name]
        window = {"window": WIDE[name]} if name in WIDE else {}
        options: Any = {**case.options, **window}
        patch_model(model, case.method, original_max_position_embeddings=ORIGINAL, **options)
        randomise(model)
    return model


def batch_of(positions: str, **options: Any) -> dict[str, Any]:
    """Two rows as the collator makes them; drawn positions jump in both."""
    target = {"target_length": TARGET} if positions in DRAWS else {}
    rows = [
        {"input_ids": zoo.tokens(LENGTH, seed=seed)[0], "document_lengths": lengths}
        for seed, lengths in enumerate(DOCUMENTS)
    ]
    batch = PositionCollator(positions, seed=1, **{**target, **options})(rows)
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
        moved.append(
            difference > 1e-5 * before.abs().amax()
        )  # experts are chosen per batch: sums in another order
    return torch.stack(moved, dim=-1)


def words_of(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def logits(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """As the Trainer calls a model, which turns its cache off."""
    model.config.use_cache = False
    found: Tensor = model(**inputs).logits
    return found


@pytest.fixture(params=POSITIONS)
def positions(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        (model_type, attention)
        for model_type in ARCHITECTURES
        for attention in ("eager", "sdpa")
        if (model_type, attention) != ("gptj", "sdpa")  # it has none
    ],
)
def test_architectures(model_type: str, attention: str, positions: str) -> None:
    model = tiny(model_type, attention)
    assert torch.equal(by_change(model, batch_of(positions)), expected(positions))


@pytest.mark.parametrize("positions", ["packed", "random"])
@pytest.mark.parametrize("name", [*FREQUENCIES, *CASES])
def test_patched_models(name: str, positions: str) -> None:
    assert torch.equal(by_change(patched(name), batch_of(positions)), expected(positions))


@pytest.mark.parametrize("name", ["yarn", "self_extend", "t5", "xpos"])
def test_patched_models_with_eager_attention(name: str, positions: str) -> None:
    model = patched(name, "eager")
    assert torch.equal(by_change(model, batch_of(positions)), expected(positions))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["yarn", "rerope", "alibi", "fire"])
def test_gradients_take_the_same_ways_when_layers_are_computed_again(
    name: str, reentrant: bool, positions: str
) -> None:
    """With gradient checkpointing, in train mode, by a backward like the Trainer's."""
    model = patched(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert torch.equal(by_backward(model, batch_of(positions)), expected(positions))


def by_backward(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
    rows = []
    for query in range(LENGTH):
        leaf = embedded.detach().requires_grad_()
        found = logits(model, {**inputs, "inputs_embeds": leaf})
        (found[:, query] * torch.arange(found.shape[-1])).sum().backward()
        assert leaf.grad is not None
        rows.append(leaf.grad.abs().amax(-1) > 0)
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("name", ["yarn", "rerope", "t5"])
def test_packed_documents_read_as_they_do_alone(name: str) -> None:
    """The loss of a packed batch is the mean over the tokens of its documents, each on its own."""
    model, batch = patched(name), batch_of("packed")
    losses, counted = [], 0
    for row, lengths in zip(batch["input_ids"], DOCUMENTS, strict=True):
        for ids in row.split(lengths):
            if len(ids) > 1:
                scores = logits(model, {"input_ids": ids[None]})[0, :-1].double()
                losses.append(
                    torch.nn.functional.cross_entropy(scores, ids[1:], reduction="sum").item()
                )
                counted += len(ids) - 1
    with torch.no_grad():
        together = model(**batch).loss.item()
    assert int((batch["labels"] != -100).sum()) == counted
    assert together == pytest.approx(sum(losses) / counted, rel=1e-5)


def test_documents_in_one_row_do_not_see_each_other() -> None:
    model, batch = tiny("llama", "sdpa"), batch_of("packed", flatten=True)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    rows = expected("packed")
    assert torch.equal(dependencies(model, inputs)[0], torch.block_diag(*rows.int()) > 0)


# The traps of transformers that the collator goes around; should they vanish one day, so may the collator's care


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("drawn", DRAWS)
def test_without_a_mask_parts_of_a_text_are_kept_apart(drawn: str, attention: str) -> None:
    batch = batch_of(drawn)
    del batch["attention_mask"]
    found = by_change(tiny("llama", attention), batch)
    row = batch["position_ids"][0]
    place = int((row.diff() > 1).nonzero()[0]) + 1
    assert not bool(found[0, place:, :place].any())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_with_a_mask_packed_documents_see_each_other(attention: str) -> None:
    batch = batch_of("packed")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    found = by_change(tiny("llama", attention), batch)
    assert torch.equal(found, expected("contiguous"))


# The check before training


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "phimoe", "deepseek_v3"])
def test_the_check_passes_what_works(model_type: str, positions: str) -> None:
    check_dependencies(tiny(model_type, "sdpa"), PositionCollator(positions, target_length=TARGET))


@pytest.mark.parametrize("name", [*FREQUENCIES, *CASES])
def test_the_check_passes_patched_models(name: str) -> None:
    model = patched(name)
    check_dependencies(model, PositionCollator("packed"))
    if name != "nope":  # see below
        check_dependencies(model, PositionCollator("pose", target_length=TARGET))


def test_the_check_passes_a_peft_model(positions: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    model = peft.get_peft_model(patched("yarn"), config)
    check_dependencies(model, PositionCollator(positions, target_length=TARGET))


def test_the_check_finds_the_dependencies_that_changes_find(positions: str) -> None:
    model, batch = tiny("gemma3_text", "sdpa"), batch_of(positions)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    assert torch.equal(dependencies(model, inputs), by_change(model, batch))


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "jamba", "falcon", "gpt_oss"])
def test_packing_is_refused_where_documents_see_each_other(model_type: str) -> None:
    """Layers with a state, and models that do not hand their positions on to the mask."""
    model = zoo.build(model_type)
    assert not torch.equal(by_change(model, batch_of("packed")), expected("packed"))
    with pytest.raises(PosencError, match=r"packed documents see each other.*'contiguous'"):
        check_dependencies(model, PositionCollator("packed"))
    check_dependencies(model, PositionCollator("contiguous"))


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
    with pytest.raises(PosencError, match=r"\(maskless attention\).*see each other"):
        check_dependencies(model, PositionCollator("packed"))


def test_packing_with_flash_attention_needs_one_row(
    registered: Callable[[str, Any], PreTrainedModel],
) -> None:
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
        sdpa = torch.nn.functional.scaled_dot_product_attention
        found = sdpa(query, key, value, documents, is_causal=documents is None, enable_gqa=True)
        return found.transpose(1, 2).contiguous(), None

    model = registered("flash_test", flash)
    flat, rows = batch_of("packed", flatten=True), batch_of("packed")
    del flat["labels"], rows["labels"]
    assert torch.equal(dependencies(model, rows), expected("contiguous"))  # the trap
    assert torch.equal(
        dependencies(model, flat)[0], torch.block_diag(*expected("packed").int()) > 0
    )
    with pytest.raises(PosencError, match=r"of one row only.*flatten=True"):
        check_dependencies(model, PositionCollator("packed"))
    check_dependencies(model, PositionCollator("packed", flatten=True))
    check_dependencies(model, PositionCollator("random", target_length=TARGET))


def test_an_attention_function_that_cannot_run_here_is_said_to_be_unchecked(
    registered: Callable[[str, Any], PreTrainedModel],
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("only on another device")

    with pytest.warns(UserWarning, match="Nobody has looked.*only on another device"):
        check_dependencies(registered("elsewhere", refuse), PositionCollator("packed"))


class Apart(PositionCollator):
    """As a collator is that does not know of the trap."""

    def __call__(self, examples: Any) -> dict[str, Any]:
        batch = super().__call__(examples)
        del batch["attention_mask"]
        return batch


@pytest.mark.parametrize("drawn", DRAWS)
def test_drawn_positions_are_refused_where_parts_do_not_see_each_other(drawn: str) -> None:
    with pytest.raises(PosencError, match=r"keeps the parts of a text apart.*'contiguous'"):
        check_dependencies(tiny("llama", "sdpa"), Apart(drawn, target_length=TARGET))


@pytest.mark.parametrize("drawn", DRAWS)
@pytest.mark.parametrize("how", ["roformer", "nope"])
def test_drawn_positions_are_refused_where_they_change_nothing(how: str, drawn: str) -> None:
    model = patched("nope") if how == "nope" else zoo.build(how, is_decoder=True)
    with pytest.raises(PosencError, match=r"does not read position_ids.*'contiguous'"):
        check_dependencies(model, PositionCollator(drawn, target_length=TARGET))


def test_a_model_without_positions_says_so() -> None:
    with pytest.raises(PosencError, match=r"MptForCausalLM.*'contiguous'"):
        check_dependencies(mpt(), PositionCollator("pose", target_length=TARGET))
    check_dependencies(mpt(), PositionCollator("contiguous"))


def mpt() -> PreTrainedModel:
    from transformers import MptConfig, MptForCausalLM

    with quiet():
        return MptForCausalLM(MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=64))


def test_a_model_without_a_head_says_so() -> None:
    body: Any = zoo.build("llama").get_submodule("model")
    with pytest.raises(PosencError, match=r"LlamaModel.* no causal language model"):
        check_dependencies(body, PositionCollator())


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
    check_dependencies(model, PositionCollator("packed"))
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(zoo.logits(model, zoo.tokens(8)), before)
    assert not model.get_input_embeddings()._forward_hooks


def test_weights_that_are_elsewhere_are_not_looked_at() -> None:
    with torch.device("meta"):
        model = zoo.build("llama")
    with pytest.warns(UserWarning, match="Nobody has looked.*ZeRO-3"):
        check_dependencies(model, PositionCollator("packed"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_dependencies(zoo.build("llama"), PositionCollator("packed"))
