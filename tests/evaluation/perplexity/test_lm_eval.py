"""A patched model in lm-evaluation-harness: HFLM takes the live object, and the patch stays in force."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_posenc import PosencError, patch_model, patched, unpatch_model
from hf_posenc.embedded import held_out_documents, model_path
from hf_posenc.evaluation import measure_perplexity
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.support import peers
from tests.support.selection import quick
from tests.support.tiny_text import sizes

pytest.importorskip("lm_eval", reason="lm-evaluation-harness comes with the dev extra")

TRAINED = 64
SCALE = 4
YARN: dict[str, Any] = {"method": "yarn", "scale": SCALE}
SELF_EXTEND: dict[str, Any] = {"method": "self_extend", "group": 8}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Three pieces of Python: shorter than one window, a few windows, and many."""
    _, text = next(held_out_documents())
    return [text[:90], text[:700], text[700:2500]]


@pytest.fixture
def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    own = sizes(len(tokenizer), TRAINED, width=32, layers=2, heads=(4, 4))
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    made: Any = LlamaForCausalLM(LlamaConfig(**own, **ends)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)  # far from uniform attention, so that positions matter
    return made


def harness(model: Any, tokenizer: Any, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, **options)


def rolling(lm: Any, texts: list[str]) -> list[float]:
    from lm_eval.api.instance import Instance

    requests = [
        Instance("loglikelihood_rolling", doc={}, arguments=(text,), idx=index)
        for index, text in enumerate(texts)
    ]
    found: list[float] = lm.loglikelihood_rolling(requests, disable_tqdm=True)
    return found


@pytest.mark.parametrize("patch", quick([None, YARN, SELF_EXTEND], [None, SELF_EXTEND]))
def test_rolling_log_likelihoods_are_our_sums(
    model: Any, tokenizer: Any, texts: list[str], patch: dict[str, Any] | None
) -> None:
    length = TRAINED if patch is None else TRAINED * SCALE
    unpatched = rolling(harness(model, tokenizer, max_length=length), texts)
    if patch is not None:
        patch_model(model, **patch)
    lm = harness(model, tokenizer, max_length=length)
    found = rolling(lm, texts)

    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert len(tokens[0]) < length < len(tokens[2])
    prefix = tokenizer.bos_token_id
    assert found == pytest.approx(peers.lm_eval(model, tokens, length, prefix=prefix), rel=1e-5)

    one_window = torch.tensor([prefix, *tokens[0]])  # --bos always, in our words
    with evaluation_mode(model):
        nats = TokenScorer(model, one_window)(one_window, 1).double().sum()
    assert -found[0] == pytest.approx(float(nats), rel=1e-5)

    if patch is not None:
        assert abs(found[2] / unpatched[2] - 1) > 1e-4
        unpatch_model(model)
        assert rolling(lm, texts) == unpatched


def test_the_length_is_read_from_the_config(model: Any, tokenizer: Any) -> None:
    """A method with a scale writes what it reaches; one that follows the text needs `max_length=`."""
    assert harness(model, tokenizer).max_length == TRAINED
    with patched(model, **YARN):
        assert harness(model, tokenizer).max_length == TRAINED * SCALE
    with patched(model, "rerope"):
        assert harness(model, tokenizer).max_length == TRAINED
        assert harness(model, tokenizer, max_length=500).max_length == 500


@pytest.mark.parametrize("patch", quick([YARN, SELF_EXTEND], [YARN]))
def test_generation_is_the_patched_model_s(
    model: Any, tokenizer: Any, texts: list[str], patch: dict[str, Any]
) -> None:
    """The request type of RULER and LongBench."""
    from lm_eval.api.instance import Instance

    prompt = texts[1][:450]

    def generated() -> str:
        options = {"do_sample": False, "max_gen_toks": 12, "until": ["no such text"]}
        request = Instance("generate_until", doc={}, arguments=(prompt, options), idx=0)
        found: str = lm.generate_until([request], disable_tqdm=True)[0]
        return found

    lm = harness(model, tokenizer, max_length=TRAINED * SCALE)
    plain = generated()
    patch_model(model, **patch)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert TRAINED < ids.shape[1] < TRAINED * SCALE - 12
    new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert generated() == tokenizer.decode(new, skip_special_tokens=True)
    assert generated() != plain


@pytest.fixture
def checkpoint(model: Any, tokenizer: Any, tmp_path: Path) -> str:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("given", "method", "reach"),
    [
        ({"patch": "none"}, None, TRAINED),
        ({"patch": f"yarn:scale={SCALE}"}, YARN, TRAINED * SCALE),
        ({"patch": "yarn", "max_length": TRAINED * SCALE}, YARN, TRAINED * SCALE),
        ({"patch": "self_extend:group=8", "max_length": 100}, SELF_EXTEND, 100),
    ],
)
def test_a_model_of_the_harness_is_patched_by_name(
    model: Any,
    tokenizer: Any,
    texts: list[str],
    checkpoint: str,
    given: dict[str, Any],
    method: dict[str, Any] | None,
    reach: int,
) -> None:
    lm = harness_model(checkpoint, **given)
    assert lm.max_length == reach
    with patched(model, **method) if method else contextlib.nullcontext():
        assert rolling(lm, texts) == rolling(harness(model, tokenizer, max_length=reach), texts)


def test_a_saved_patch_and_the_adapter_s_come_back(
    model: Any, tokenizer: Any, texts: list[str], checkpoint: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    patch_model(model, **SELF_EXTEND).save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    expected = rolling(harness(model, tokenizer, max_length=200), texts)
    assert rolling(harness_model(str(tmp_path / "saved"), max_length=200), texts) == expected
    with pytest.raises(PosencError, match="as in scale=4, and replace=true"):
        harness_model(str(tmp_path / "saved"), patch="yarn:replace=true", max_length=200)

    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, lora).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    lm = harness_model(checkpoint, peft=str(tmp_path / "adapter"), max_length=200)
    assert rolling(lm, texts) == rolling(harness(tuned, tokenizer, max_length=200), texts)
    assert rolling(lm, texts) != expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"patch": "yarm"}, "Did you mean 'yarn'"),
        ({"patch": "yarn"}, "give a scale, as in scale=4, or max_length"),
        ({"patch": "dynamic_yarn:update=sequence", "batch_size": 2}, "give batch_size=1"),
    ],
)
def test_what_the_harness_refuses(checkpoint: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(PosencError, match=message):
        harness_model(checkpoint, **given)


def test_a_loaded_model_is_not_patched_by_name(model: Any, tokenizer: Any) -> None:
    with pytest.raises(PosencError, match="loaded by name"):
        harness_model(model, tokenizer=tokenizer, patch="rerope")


def harness_model(pretrained: Any, **options: Any) -> Any:
    from lm_eval.api.registry import get_model

    importlib.import_module("hf_posenc.evaluation.harness")
    return get_model("hf-posenc")(pretrained=pretrained, device="cpu", **options)


@pytest.mark.parametrize("text", ["one two", " one two", "one  two\n", "\n one\ttwo \n"])
def test_word_perplexity_is_that_of_the_harness(model: Any, tokenizer: Any, text: str) -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results

    options: dict[str, Any] = {"methods": ["none"], "lengths": [TRAINED], "preset": "lm-eval"}
    (cell,) = measure_perplexity(model, tokenizer, [text], **options).cells
    nats, words = process_results({"page": text}, (-cell.nats,))["word_perplexity"]
    assert cell.words == words
    assert cell.word_perplexity == pytest.approx(peers.weighted_perplexity([nats], [words]))


@pytest.mark.slow
def test_a_task_of_ruler() -> None:
    """Its passkey task, the one whose text is not downloaded, on the embedded model at eight times its length."""
    pytest.importorskip("wonderwords", reason="it comes with lm-eval[ruler]")
    from lm_eval import simple_evaluate

    name, length = str(model_path()), 2048
    model: Any = patch_model(LlamaForCausalLM.from_pretrained(name), "yarn", target_length=length)
    lm = harness(model, AutoTokenizer.from_pretrained(name), max_length=length)
    about = {"tokenizer": name, "max_seq_lengths": [length]}
    results = simple_evaluate(model=lm, tasks=["niah_single_1"], metadata=about, limit=1)
    sample = results["samples"]["niah_single_1"][0]
    ids = torch.tensor([lm.tok_encode(sample["arguments"][0][0])])
    assert length // 2 < ids.shape[1] < length
    new = model.generate(ids, max_new_tokens=128, do_sample=False)[0, ids.shape[1] :]
    assert sample["resps"][0][0] == lm.tokenizer.decode(new, skip_special_tokens=True)
    assert f"{length},none" in results["results"]["niah_single_1"]
