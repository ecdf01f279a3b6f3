"""Models whose positions end: the limit that is found, and lengths past it, refused in one line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import measure_perplexity, measure_retrieval
from hf_posenc.evaluation.bench import bench
from hf_posenc.evaluation.scoring.decoder import position_limit, too_long
from tests.support import zoo
from tests.support.families import build_text_model
from tests.support.selection import quick
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose
from tests.support.zoo import CACHE

TEXTS = [prose(400, index) for index in range(2)]

# Positions from row 0, from row 2, behind the padding's row, of a table of sines and cosines in a buffer and in an
# embedding; then tables that grow, distances, and rotations.
LIMITS: dict[str, int | None] = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gpt_bigcode", "openai-gpt", "bert"), 64),
    **dict.fromkeys(("opt", "biogpt", "bart", "roberta"), 64),
    **dict.fromkeys(("gptj", "codegen", "roformer"), 64),
    **dict.fromkeys(("ctrl", "mpt"), 64),
    **dict.fromkeys(("xglm", "bloom", "llama", "gemma3_text", "mamba"), None),
}


# One for each of the lines above, and two without a limit.
FAST = ("gpt2", "roberta", "gptj", "mpt", "bloom", "llama")


@pytest.mark.parametrize("family", quick(LIMITS, FAST))
def test_the_limit_is_found_and_is_the_model_s_own(family: str) -> None:
    limit = LIMITS[family]
    lengths = dict.fromkeys(("n_positions", "max_seq_len", "max_position_embeddings"), 64)
    lengths["max_position_embeddings"] += family == "roberta"
    known = vars(zoo.tiny_config(family))
    model = zoo.build(family, **{name: n for name, n in lengths.items() if name in known}).eval()
    assert position_limit(model) == limit
    ids = torch.full((1, 66 if limit is None else limit + 1), 5)
    with torch.no_grad():
        model(input_ids=ids[:, :-1])
        if limit is not None:
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=ids)


@pytest.mark.filterwarnings("ignore::hf_posenc.errors.UntrainedWarning")
@pytest.mark.parametrize(
    ("method", "options"),
    [("interpolate", {"update": "request"}), ("tile", {}), ("alibi", {}), ("nope", None)],
)
def test_the_limit_of_a_patched_table_is_that_of_the_patch(method: str, options: Any) -> None:
    """Of a table that short texts read as it was, and of one in whose place something else is read, too."""
    scale = {} if options is None else {"scale": 2, **options}
    model = hf_posenc.patch_model(build_text_model("gpt2", n_layer=1), method, **scale)
    assert position_limit(model) == (128 if scale else 64)
    if method == "alibi":
        assert str(too_long(model, 200, 128)).endswith(", or alibi with target_length=200.")


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_lengths_past_trained_positions_are_refused_before_measuring(family: str) -> None:
    model, tokenizer = zoo.build(family, vocab_size=VOCABULARY), byte_tokenizer()
    line = f"100 tokens: {type(model).__name__} has positions for 64. .* such as interpolate"
    with pytest.raises(PosencError, match=line):
        measure_perplexity(model, tokenizer, TEXTS, lengths=[32, 100])
    with pytest.raises(PosencError, match=line):
        measure_retrieval(model, tokenizer, lengths=[100])
    with pytest.raises(PosencError, match=line):
        bench(model, tokenizer, TEXTS, methods=["none"], target_length=100)
    result = measure_perplexity(model, tokenizer, TEXTS)
    assert (result.settings.lengths, result.failures) == ((64,), [])


def test_the_bias_of_mpt_is_as_long_as_its_config_says() -> None:
    model = zoo.build("mpt", vocab_size=VOCABULARY, max_seq_len=64)
    line = r"100 tokens: MptForCausalLM has positions for 64. .* model.config.max_seq_len = 100"
    with pytest.raises(PosencError, match=line):
        measure_perplexity(model, byte_tokenizer(), TEXTS, lengths=[100])
    model.config.max_seq_len = 100
    assert not measure_perplexity(model, byte_tokenizer(), TEXTS, lengths=[100]).failures
    assert position_limit(hf_posenc.patch_model(model, "alibi", scale=2)) is None


def test_a_method_that_extends_the_table_is_measured_and_the_others_are_refused() -> None:
    model, tokenizer = zoo.build("gptj", vocab_size=VOCABULARY), byte_tokenizer()
    methods = ["none", "yarn", "yarn:scale=2"]
    result = measure_perplexity(model, tokenizer, TEXTS, methods=methods, lengths=[32, 200])
    way = "Give shorter lengths, or a method that extends its table, such as yarn."
    assert {failure.method: failure.reason for failure in result.failures} == {
        "none": f"200 tokens: GPTJForCausalLM has positions for 64. {way}",
        "yarn (scale 2)": f"200 tokens: GPTJForCausalLM has positions for 128. {way}",
    }


def test_generated_tokens_count() -> None:
    model = zoo.build("gpt2", vocab_size=VOCABULARY, n_positions=256)
    options: dict[str, Any] = {"tasks": ["passkey"], "samples": 1, "lengths": [256]}
    options["depths"] = (0.5,)
    result = measure_retrieval(model, byte_tokenizer(), decode="generate", **options)
    assert (result.settings.lengths, result.failures) == ((256,), [])  # the prompt leaves room


def test_the_longest_candidate_counts() -> None:
    """Places have 4 to 11 bytes: a prompt of as many tokens as the table has rows leaves room for each of them."""
    model = zoo.build("gpt2", vocab_size=VOCABULARY, n_positions=1200)
    options: dict[str, Any] = {"tasks": ["babilong_qa1"], "samples": 6, "lengths": [1200, 1300]}
    patches = ["none", "truncation"]
    result = measure_retrieval(model, byte_tokenizer(), methods=patches, depths=(0.5,), **options)
    assert [(x.method, x.length) for x in result.failures] == [("none", 1300)]
    assert {record.candidates for record in result.records} == {6}


@pytest.mark.parametrize("family", ["gptj", "roformer"])
def test_a_forward_past_the_patched_table_is_one_line(family: str) -> None:
    model = zoo.build(family).eval()
    own = {name for name, value in vars(model).items() if value}
    hf_posenc.patch_model(model, "yarn", scale=2)
    line = "129 tokens: the patched tables of .* have 128 positions. Patch it with a target_length"
    with torch.no_grad():
        model(input_ids=torch.full((1, 128), 5))
        for one in (model, copy.deepcopy(model)):
            with pytest.raises(PosencError, match=line):
                one(input_ids=torch.full((1, 129), 5))
        hf_posenc.patch_model(model, "yarn", scale=4, replace=True)
        model(input_ids=torch.full((1, 200), 5))
    hf_posenc.unpatch_model(model)
    assert {name for name, value in vars(model).items() if value} == own


def test_a_forward_through_a_cache_counts_what_is_in_it() -> None:
    model = zoo.build("gptj").eval()
    hf_posenc.patch_model(model, "yarn", scale=2)
    with torch.no_grad():
        cache = model(input_ids=torch.full((1, 120), 5), use_cache=True)[CACHE]
        with pytest.raises(PosencError, match="130 tokens"):
            model(input_ids=torch.full((1, 10), 5), **{CACHE: cache})
