"""A saved patch answers in vLLM as in transformers: run by `scripts/check_serving.sh` in an environment with vLLM."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_posenc
from hf_posenc import patch_model, save_patch, serve
from hf_posenc.engines.engine import known_names
from hf_posenc.engines.names import PLUGIN_VLLM
from hf_posenc.methods import DynamicYaRN, LogN, ReRoPE, SelfExtend, YaRN
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.serve import interfaces

pytestmark = pytest.mark.filterwarnings("ignore::hf_posenc.errors.UntrainedWarning")
vllm = pytest.importorskip("vllm", reason="scripts/check_serving.sh makes an environment with vLLM")

ORIGINAL = 64
NEW = 8
STATIC: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
STATIC["original_max_position_embeddings"] = ORIGINAL
DRAFTS = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
LISTS = {"short_factor": [1.0] * 16, "long_factor": [1 + i / 4 for i in range(16)]}
LAMPE = {"growth": 0.01, "shift": -1.0, "capacity": 60.0, "head": 8, "tail": 8}
WITHOUT_OPTIONS = (
    *("clip", "dual_chunk", "string", "lm_infinite", "attention_sinks", "sliding_window"),
    *("dynamic_yarn", "dynamic_ntk", "dynamic_pi", "dynamic_partial_ntk", "jet_long", "log_n"),
    *("sandwich", "kerple_log", "kerple_power", "t5", "fire", "shaw", "transformer_xl"),
    *("rope_bias", "xpos"),
)
GROWING = ("dynamic_yarn", "dynamic_pi", "dynamic_partial_ntk", "jet_long")
PATCHES: dict[str, dict[str, Any]] = {
    **{name: {} for name in WITHOUT_OPTIONS},
    **{
        name: {"scale": 4} for name in ("yarn", "ntk", "pi", "leaky_rerope", "self_extend", "alibi")
    },
    "rerope": {"window": 32},
    "dpe": {"factors": [1, 2, 4, 8], "window": 32},
    **{f"{name} by request": {"update": "request"} for name in GROWING},
    "dynamic_ntk by request": {"update": "request", "bucket": 1},
    **{
        f"longrope{words}": {**LISTS, "scale": 4, "short_mscale": 1.0, "update": update}
        for words, update in (("", "row"), (" by request", "request"))
    },
    "lampe by row": {**LAMPE, "update": "row"},
    "lampe by request": LAMPE,
    "temperature": {"law": "log_n"},
    "temperature ssmax": {"law": "ssmax"},
    "t5 shared": {"shared": True},
    "yarn in one layer": {"scale": 4, "layers": [1]},
    "rerope in one layer": {"window": 32, "layers": [0]},
    "fire in one layer": {"layers": [1]},
}
"""Options of `patch_model` by the method's name, and words that tell cases of one method apart."""


def tiny(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 2)
    sizes |= dict.fromkeys(("vocab_size", "intermediate_size"), 128) | {"initializer_range": 0.2}
    sizes |= {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    sizes["max_position_embeddings"] = ORIGINAL
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def patched(case: str) -> LlamaForCausalLM:
    """Return a model with the patch of a case, whose parameters, if any, have other values than at first."""
    model = patch_model(tiny(), case.split()[0], **PATCHES[case])
    for parameter in trained_parameters(model).values():
        parameter.data += 0.3 * torch.rand_like(parameter)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 128, (length,), generator=generator).tolist() for length in lengths]


@contextlib.contextmanager
def served(folder: Path, **options: Any) -> Iterator[Any]:
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 200,
        "max_num_batched_tokens": 64,  # prompts in pieces
        "max_num_seqs": 16,
    }
    llm = vllm.LLM(model=str(folder), **(defaults | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


Answer = tuple[list[int], list[float]]


def answer_of(output: Any) -> Answer:
    tokens = list(output.token_ids)
    steps = zip(tokens, output.logprobs, strict=True)
    return tokens, [step[token].logprob for token, step in steps]


def asked(
    llm: Any, texts: list[list[int]], *, lora_request: Any = None, **options: Any
) -> list[Answer]:
    """Return the greedy tokens and their log-probabilities."""
    defaults = {"max_tokens": NEW, "temperature": 0, "logprobs": 1}
    parameters = vllm.SamplingParams(ignore_eos=True, detokenize=False, **(defaults | options))
    given: list[Any] = [{"prompt_token_ids": text} for text in texts]
    outputs = llm.generate(given, parameters, use_tqdm=False, lora_request=lora_request)
    return [answer_of(answer) for output in outputs for answer in output.outputs]


def pinned(length: int, bucket: int = ORIGINAL // 2) -> int:
    """Return the length in force of a request with so many tokens to the end, by `update="request"`."""
    return max(ORIGINAL, ORIGINAL + bucket * math.ceil((length - ORIGINAL) / bucket))


@torch.no_grad()
def in_transformers(folder: Path, text: list[int], length: int = 0) -> Answer:
    """Return the same of transformers, without a cache; at a length in force by as many tokens behind the text."""
    model, tokens, numbers = hf_posenc.from_pretrained(folder).eval(), [*text], []
    for _ in range(NEW):
        row = torch.tensor([tokens + [0] * (length - len(tokens))])
        last = model(row, use_cache=False).logits[0, len(tokens) - 1].log_softmax(-1)
        tokens.append(int(last.argmax()))
        numbers.append(float(last.max()))
    return tokens[len(text) :], numbers


def check(answers: list[Answer], expected: list[Answer], tolerance: float = 1e-5) -> None:
    """Compare tokens, and log-probabilities with an absolute or relative tolerance."""
    near: dict[str, Any] = {"atol": tolerance, "rtol": tolerance}
    for (tokens, numbers), (right, logprobs) in zip(answers, expected, strict=True):
        assert tokens == right
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor(logprobs), **near)


@pytest.mark.parametrize("case", PATCHES)
def test_the_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    patched(case).save_pretrained(tmp_path)
    texts, lengths = prompts(20, 70, 150), [0, 0, 0]
    if "by request" in case:
        bucket = PATCHES[case].get("bucket", ORIGINAL // 2)
        lengths = [pinned(len(text) + NEW, bucket) for text in texts]
    expected = [in_transformers(tmp_path, *each) for each in zip(texts, lengths, strict=True)]
    with served(tmp_path) as llm:
        check(asked(llm, texts), expected)
        check(asked(llm, texts), expected)  # their prefixes are cached now


def families() -> dict[str, tuple[PreTrainedModel, Any]]:
    sizes: dict[str, Any] = {**tiny().config.to_dict(), "rope_parameters": None}
    kept = [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    ]
    sizes = {key: sizes[key] for key in (*kept, "initializer_range")}
    types = ["sliding_attention", "full_attention"] * 2
    deeper = sizes | {"num_hidden_layers": 4}
    gemma = Gemma3TextConfig(**deeper, sliding_window=16, layer_types=types)
    halves = sizes | {"num_attention_heads": 2, "num_key_value_heads": 1}
    llama3 = STATIC | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = sizes | {"max_position_embeddings": 2 * ORIGINAL, "rope_parameters": llama3}
    by_layer = {(0,): YaRN(scale=4), (1,): ReRoPE(window=32)}
    return {
        "a scaled rotation": (LlamaForCausalLM(LlamaConfig(**scaled)), SelfExtend(scale=4)),
        "another in its place": (LlamaForCausalLM(LlamaConfig(**scaled)), DynamicYaRN()),
        "sliding layers": (Gemma3ForCausalLM(gemma), SelfExtend(scale=4)),
        "sliding layers, a table": (Gemma3ForCausalLM(gemma), YaRN(scale=4)),
        "norms of queries": (Qwen3ForCausalLM(Qwen3Config(**sizes)), [YaRN(scale=4), LogN()]),
        "another method by layer": (Qwen3ForCausalLM(Qwen3Config(**sizes)), by_layer),
        "one projection": (Phi3ForCausalLM(Phi3Config(**halves, pad_token_id=0)), DynamicYaRN()),
    }


@pytest.mark.parametrize("kind", [
    "a scaled rotation", "another in its place", "sliding layers", "sliding layers, a table", "norms of queries",
    "another method by layer", "one projection",
])  # fmt: skip
def test_models_of_other_kinds(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, method = families()[kind]
    options: dict[str, Any] = {"replace": True} if kind == "another in its place" else {}
    patch_model(model.eval(), method, **options).save_pretrained(tmp_path)
    texts = prompts(20, 150)
    with served(tmp_path) as llm:
        check(asked(llm, texts), [in_transformers(tmp_path, text) for text in texts])


def test_many_requests_at_once(tmp_path: Path) -> None:
    patch_model(tiny(), "self_extend", scale=4).save_pretrained(tmp_path)
    texts = prompts(*range(5, 181, 11))
    with served(tmp_path, max_num_batched_tokens=96) as llm:
        together = asked(llm, texts)
    # Of 128 numbers, and not of 24: transformers rounds angles of up to 180 rad to float32.
    check(together, [in_transformers(tmp_path, text) for text in texts], tolerance=2e-5)


@pytest.mark.parametrize(
    "method", ["dynamic_yarn", "dynamic_yarn by request", "longrope by request", "lampe by request"]
)
def test_a_short_request_is_that_of_the_unpatched_model(method: str, tmp_path: Path) -> None:
    """To the bit, whatever else is in the batch."""
    short = prompts(20, 40)
    tiny().save_pretrained(tmp_path / "plain")
    patched = patch_model(tiny(), method.split()[0], **PATCHES[method])
    patched.save_pretrained(tmp_path / "patched")
    with served(tmp_path / "plain", max_model_len=ORIGINAL) as llm:
        expected = asked(llm, short)
    with served(tmp_path / "patched") as llm:
        assert asked(llm, [*prompts(150), *short])[1:] == expected


def by_request(folder: Path) -> None:
    patch_model(tiny(), "dynamic_yarn", update="request").save_pretrained(folder)


def test_requests_of_other_tables_share_no_prefix(tmp_path: Path) -> None:
    by_request(tmp_path)
    (long,) = prompts(150)
    # Prompt, number of its tokens that the cache has, salt, and length that the request gives itself.
    requests: list[tuple[list[int], int, str | None, int]] = [
        (long, 0, None, 1),  # 160
        (long[:40], 0, None, 1),  # the original length
        (long[:120], 0, None, 1),  # 128
        (long[:125], 96, None, 1),  # 160
        (long[:50], 32, None, 1),
        (long[:50], 32, None, 150),  # 160
        (long[:50], 0, "[160] ", 1),
        (long, 0, "mine", 1),
        (long, 128, "mine", 1),
        (long[:100], 96, None, 110),  # 128
    ]
    with served(tmp_path, block_size=32) as llm:
        for text, cached, salt, given in requests:
            prompt = {"prompt_token_ids": text} | ({"cache_salt": salt} if salt else {})
            parameters = vllm.SamplingParams(
                max_tokens=NEW,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                extra_args={"hf_posenc_length": given},
            )
            (output,) = llm.generate([prompt], parameters, use_tqdm=False)
            length = pinned(max(len(text) + NEW, given))
            assert output.num_cached_tokens == cached
            assert [*output.outputs[0].token_ids] == in_transformers(tmp_path, text, length)[0]
        with pytest.raises(Exception, match="hf_posenc_length is a number of tokens, and not 'x'"):
            asked(llm, [long], extra_args={"hf_posenc_length": "x"})


def test_a_request_keeps_its_table_when_it_is_preempted(tmp_path: Path, monkeypatch: Any) -> None:
    by_request(tmp_path)
    texts = prompts(60, 150, 50, 120, 90)
    expected = [in_transformers(tmp_path, text, pinned(len(text) + NEW)) for text in texts]
    with served(tmp_path, block_size=32, num_gpu_blocks_override=10) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        own, preempted = scheduler._preempt_request, []

        def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request)
            return own(request, *args, **kwargs)

        monkeypatch.setattr(scheduler, "_preempt_request", preempt)
        check(asked(llm, texts), expected)
        assert preempted
        twice = asked(llm, texts, n=2, temperature=1, top_k=1)
        check(twice, [answer for answer in expected for _ in range(2)])


def test_a_patch_beside_the_model(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    save_patch(patch_model(tiny(), "rerope", window=32), tmp_path)
    texts = prompts(70)
    with served(tmp_path) as llm:
        check(asked(llm, texts), [in_transformers(tmp_path, texts[0])])


def test_in_the_dtype_of_most_checkpoints(tmp_path: Path) -> None:
    patched("self_extend").bfloat16().save_pretrained(tmp_path)
    texts = prompts(20, 150)
    with served(tmp_path, dtype="auto") as llm:
        found = [numbers[0] for _, numbers in asked(llm, texts)]
    assert found == pytest.approx([in_transformers(tmp_path, x)[1][0] for x in texts], abs=0.2)


@pytest.mark.parametrize("case", ["alibi", "kerple_log", "dynamic_yarn by request"])
def test_the_heads_of_two_processes(case: str, tmp_path: Path) -> None:
    """The first two have numbers for each head."""
    patched(case).save_pretrained(tmp_path)
    texts = prompts(20, 150)
    lengths = [pinned(len(text) + NEW) if "by request" in case else 0 for text in texts]
    expected = [in_transformers(tmp_path, *each) for each in zip(texts, lengths, strict=True)]
    with served(tmp_path, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        check(asked(llm, texts), expected)


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's backend of FlashAttention, with its own pages, metadata and code, and its two kernels in PyTorch."""
    backend: Any = importlib.import_module("vllm.v1.attention.backends.flash_attn")

    def write(
        key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        slots: torch.Tensor, *quantization: Any,
    ) -> None:  # fmt: skip
        page, token = slots // keys.shape[1], slots % keys.shape[1]
        keys[page, token], values[page, token] = key[: len(slots)], value[: len(slots)]

    def attend(*, q: Any, k: Any, v: Any, out: Any, block_table: Any, **given: Any) -> None:
        starts, lengths = given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()
        for row, length in enumerate(lengths):
            queries = slice(starts[row], starts[row + 1])
            key, value = (x[block_table[row]].flatten(0, 1)[:length] for x in (k, v))
            query, key, value = (x.transpose(0, 1) for x in (q[queries], key, value))
            m = torch.arange(length - queries.stop + queries.start, length)[:, None]
            found = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=torch.arange(length) <= m,
                scale=given["softmax_scale"],
                enable_gqa=True,
            )
            out[queries] = found.transpose(0, 1)

    cpu, path = vllm.platforms.current_platform, f"{backend.__name__}.FlashAttentionBackend"
    monkeypatch.setattr(type(cpu), "get_attn_backend_cls", lambda *args, **options: path)
    monkeypatch.setattr(backend, "get_flash_attn_version", lambda **of: 2)
    monkeypatch.setattr(backend, "flash_attn_varlen_func", attend, raising=False)
    monkeypatch.setattr(backend, "reshape_and_cache_flash", write, raising=False)
    selector: Any = importlib.import_module("vllm.v1.attention.selector")
    selector._cached_get_attn_backend.cache_clear()  # for the same model it keeps the choice
    yield
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize("case", [
    "yarn", "rerope", "dual_chunk", "dynamic_yarn", "dynamic_yarn by request", "log_n", "kerple_log", "fire", "xpos",
])  # fmt: skip
def test_the_pages_of_flash_attention(case: str, tmp_path: Path) -> None:
    """The way of a GPU, as far as a CPU can go it."""
    test_the_answers_are_those_of_transformers(case, tmp_path)


@pytest.mark.usefixtures("flash_attention")
def test_pages_in_another_order_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    patched("rerope").save_pretrained(tmp_path)
    backend: Any = importlib.import_module("vllm.v1.attention.backends.flash_attn")
    own = backend.reshape_and_cache_flash
    monkeypatch.setattr(
        backend, "reshape_and_cache_flash", lambda k, v, *to: own(v, k, *to), raising=False
    )
    with served(tmp_path) as llm, pytest.raises(Exception, match="not as the plug-in reads them"):
        asked(llm, prompts(20))


def test_a_gpu_has_a_backend_whose_pages_are_read_and_no_full_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the config of an engine for a platform that calls itself CUDA."""
    engine: Any = importlib.import_module("vllm.engine.arg_utils")
    gpu = types.SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_name="cuda")
    monkeypatch.setattr("hf_posenc.serve.checkpoint.current_platform", gpu)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 200}

    def config(case: str, **changes: Any) -> Any:
        patched(case).save_pretrained(tmp_path)
        arguments = engine.EngineArgs(model=str(tmp_path), **(options | changes))
        return arguments.create_engine_config()

    full = {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
    with pytest.raises(Exception, match="leave cudagraph_mode out"):
        config("rerope", **full)
    assert config("rerope").attention_config.backend.name == "FLASH_ATTN"
    assert config("yarn", **full).attention_config.backend is None  # its table is all that changes
    gpu.is_cuda = lambda: False
    with pytest.raises(Exception, match="runs on a CPU or with CUDA, and this is cuda"):
        config("yarn")


def test_a_request_that_is_aborted_leaves_the_others_and_its_pages(tmp_path: Path) -> None:
    patched("self_extend").save_pretrained(tmp_path)
    texts = prompts(70, 150, 40)
    parameters = vllm.SamplingParams(
        max_tokens=NEW, temperature=0, ignore_eos=True, logprobs=1, detokenize=False
    )
    with served(tmp_path, enable_prefix_caching=False) as llm:
        engine, outputs = llm.llm_engine, dict[str, Any]()
        pages = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        free, freed = pages.get_num_free_blocks(), 0
        for name, text in zip("abc", texts, strict=True):
            engine.add_request(name, {"prompt_token_ids": text}, parameters)
        while engine.has_unfinished_requests():
            done = engine.step()
            outputs |= {output.request_id: output.outputs[0] for output in done}
            if "b" in outputs and not freed:
                before = pages.get_num_free_blocks()
                engine.abort_request(["b"])
                freed = pages.get_num_free_blocks() - before
        assert freed == -(-len(texts[1]) // 128)  # tokens of a page
        assert pages.get_num_free_blocks() == free
    assert len(outputs["b"].token_ids) == 1
    check(
        [answer_of(outputs[name]) for name in "ac"],
        [in_transformers(tmp_path, text) for text in (texts[0], texts[2])],
    )


@pytest.mark.parametrize("method", ["rerope", "yarn"])
def test_an_adapter_that_was_trained_in_a_patched_model(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft, request = pytest.importorskip("peft"), pytest.importorskip("vllm.lora.request")
    patched(method).save_pretrained(tmp_path / "base")
    tiny(max_position_embeddings=256).save_pretrained(tmp_path / "plain")
    base = hf_posenc.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    texts = prompts(20, 150)
    merged = model.merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    adapter = request.LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with served(tmp_path / "base", enable_lora=True, max_lora_rank=8) as llm:
        check(asked(llm, texts), [in_transformers(tmp_path / "base", text) for text in texts])
        merged_answers = [in_transformers(tmp_path / "merged", text) for text in texts]
        check(asked(llm, texts, lora_request=adapter), merged_answers)
    monkeypatch.setattr("hf_posenc.serve.checkpoint.IN_PROCESS", [])  # as in another process
    with (
        served(tmp_path / "plain", enable_lora=True, max_lora_rank=8) as llm,
        pytest.raises(Exception, match=f"trained in a model with {method}.* served with no patch"),
    ):
        llm.llm_engine.add_lora(adapter)


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "a later format": ({"format": 2}, "Install a newer hf_posenc"),
    "a later method": ({"method": "rerope3"}, "Unknown method 'rerope3'"),
    "a later option": ({"options": {"window": 32, "law": "new"}}, "law"),
    "more layers": ({"layers": [0, 1, 5]}, "this model has 2 layers"),
}
"""Changes of a saved patch, as of a newer version of the package or of another model, and words of the refusal."""


@pytest.mark.parametrize("case", EDITS)
def test_a_patch_of_a_newer_version_or_another_model_is_refused(case: str, tmp_path: Path) -> None:
    changes, words = EDITS[case]
    patched("rerope").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["hf_posenc"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # before weights are read
    with pytest.raises(Exception, match=words), served(tmp_path):
        pass


def test_trained_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    save_patch(patch_model(tiny(num_attention_heads=8), "kerple_log"), tmp_path)
    words = "does not have the parameters of this patch"
    with pytest.raises(Exception, match=words), served(tmp_path):
        pass


def test_a_version_that_has_moved_an_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interfaces.moved() == []
    for place in interfaces.INTERFACES:
        module, _, path = place.partition(":")
        if "." in path:
            continue
        with monkeypatch.context() as context:
            context.delattr(f"{module}.{path}")
            assert interfaces.moved(module)[0] == place
    name = "vllm.transformers_utils.config:with_retry"
    monkeypatch.setitem(interfaces.INTERFACES, name, "fatal_errors soft_errors")
    with pytest.warns(UserWarning, match=f"has no soft_errors of {name}"):
        serve.register()
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    with pytest.warns(UserWarning, match=f"vLLM 0.31.0 is installed, .* with {PLUGIN_VLLM[0]} and"):
        serve.register()


def test_the_architectures_are_those_of_this_vllm() -> None:
    known = vllm.ModelRegistry.models
    for name in known_names("vllm")["implemented"]:
        assert not known[name].module_name.endswith(".transformers"), name


@pytest.mark.parametrize(
    ("method", "options", "flags", "words"),
    [
        ("dynamic_yarn", {"update": "request"}, {"speculative_config": NGRAM}, "speculative"),
        ("dynamic_yarn", {"update": "request"}, {"runner": "pooling"}, "--runner pooling"),
        ("dynamic_yarn", {"update": "request"}, {"kv_transfer_config": CONNECTOR}, "fewer tokens"),
        ("rerope", {"window": 32}, {"hf_overrides": {"rope_theta": 5e4}}, "contradicts"),
        ("rerope", {"window": 32}, {"hf_overrides": {"rope_parameters": STATIC}}, "contradicts"),
        ("self_extend", {"scale": 4}, {"max_model_len": 300}, "max_model_len"),
        ("rerope", {"window": 32}, {"kv_cache_dtype": "fp8"}, "leave --kv-cache-dtype out"),
        ("rerope", {"window": 32}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size out"),
        ("yarn", {"scale": 4}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size out"),
        ("yarn", {"scale": 4}, {"speculative_config": DRAFTS}, "of ngram_gpu were not tried"),
    ],
)
def test_what_is_not_served_is_refused(
    method: str,
    options: dict[str, Any],
    flags: dict[str, Any],
    words: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    patch_model(tiny(), method, **options).save_pretrained(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # before weights are read
    with pytest.raises(Exception, match=words), served(tmp_path, **flags):
        pass
    assert "".join(capfd.readouterr()).count(words) < 2


def test_a_vllm_that_has_moved_the_requests_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    from vllm.v1.engine.core import EngineCore

    by_request(tmp_path)
    monkeypatch.delattr(EngineCore, "preprocess_add_request")
    with pytest.raises(Exception, match=r"has no .*preprocess_add_request"), served(tmp_path):
        pass


def test_a_prompt_in_pieces_is_refused(tmp_path: Path) -> None:
    from vllm.v1.engine import EngineCoreRequest

    by_request(tmp_path)
    given = dict.fromkeys(EngineCoreRequest.__struct_fields__[:9]) | {"arrival_time": 0.0}
    given |= {"request_id": "1", "prompt_token_ids": [1, 2], "resumable": True}
    with served(tmp_path) as llm, pytest.raises(hf_posenc.PosencError, match="comes in pieces"):
        llm.llm_engine.engine_core.add_request(EngineCoreRequest(**given))


def test_a_model_that_vllm_runs_by_transformers_is_refused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    config = GPTNeoXConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    model = GPTNeoXForCausalLM(config)
    patch_model(model, "rerope", window=32).save_pretrained(tmp_path)
    words = "no implementation of its own of GPTNeoX"
    with pytest.raises(Exception, match=words), served(tmp_path):
        pass


def test_a_model_without_a_patch_is_left_alone(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    text = prompts(40)
    with served(tmp_path, max_model_len=ORIGINAL) as llm:
        check(asked(llm, text), [in_transformers(tmp_path, text[0])])


def test_a_server_over_http(tmp_path: Path) -> None:
    from openai import OpenAI

    by_request(tmp_path)  # whose length goes from process to process
    (text,) = prompts(70)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [f"--model={tmp_path}", "--port=8123", "--skip-tokenizer-init"]
    command += ["--dtype=float32", "--enforce-eager", "--max-model-len=200", "--max-num-seqs=4"]
    process = subprocess.Popen(command, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen("http://127.0.0.1:8123/health", timeout=1)
                break
            assert process.poll() is None
            time.sleep(1)
        client = OpenAI(base_url="http://127.0.0.1:8123/v1", api_key="none")
        more: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        more["vllm_xargs"] = {"hf_posenc_length": 150}
        answer = client.completions.create(
            model=str(tmp_path), prompt=text, max_tokens=NEW, temperature=0, extra_body=more
        )
        tokens = json.loads(answer.model_dump_json())["choices"][0]["token_ids"]
        assert tokens == in_transformers(tmp_path, text, pinned(150))[0]
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("drafts", ["unpatched", "patched", "ngram"])
def test_drafts_change_nothing(drafts: str, tmp_path: Path) -> None:
    """Last: n-grams import numba, beside which vLLM 0.32 starts no draft model and no adapter in the same process."""
    patched("self_extend").save_pretrained(tmp_path / "longer")
    options: dict[str, Any] = {"num_speculative_tokens": 3}
    if drafts == "ngram":
        options |= {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    else:
        options |= {"method": "draft_model", "model": str(tmp_path / drafts)}
        draft = tiny(tie_word_embeddings=True)
        if drafts == "patched":
            patch_model(draft, "self_extend", scale=4)
        draft.config.max_position_embeddings = max(256, draft.config.max_position_embeddings)
        draft.save_pretrained(tmp_path / drafts)
    (text,) = prompts(10)
    texts = [text * 2, text * 7, text * 15]  # whose continuation n-grams find
    expected = [in_transformers(tmp_path / "longer", text) for text in texts]
    with served(tmp_path / "longer", speculative_config=options) as llm:
        check(asked(llm, texts), expected)
