"""transformers' continuous batching of patched models: as the float64 reference, or refused before anything runs."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import cache, initialization, offloading_manager

from hf_posenc import PosencError, patch_model, unpatch_model
from hf_posenc.methods import LogN, ReRoPE, SelfExtend, YaRN
from tests.attention.test_attention import build
from tests.support import zoo
from tests.support.attention_llama import CASES, FORMS, ORIGINAL, randomise, reference
from tests.support.families import build_text_model
from tests.support.selection import quick

NEW = 6
SMALL: dict[str, Any] = {"num_blocks": 90, "page_size": 4, "max_batch_tokens": 32}
"""Prompts are read in pieces, and their prefixes shared."""
LENGTHS = 5, 21, 75, 90
LIMIT = 2e-5
"""Of log-probabilities, absolute or relative: float32 beside float64."""
Answer = tuple[list[int], list[float]]

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")


def texts(*lengths: int) -> list[list[int]]:
    """Texts of these lengths, of which longer ones begin alike."""
    own = [zoo.tokens(length, seed=length)[0].tolist() for length in lengths]
    prefix = zoo.tokens(max(lengths), seed=1)[0].tolist()
    return [
        [*prefix[: length // 2], *text[length // 2 :]]
        for length, text in zip(lengths, own, strict=True)
    ]


def settings(new: int = NEW, **options: Any) -> dict[str, Any]:
    greedy = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1)
    config = ContinuousBatchingConfig(**{**SMALL, "return_logprobs": True, **options})
    return {"generation_config": greedy, "continuous_batching_config": config}


def served(
    model: Any, prompts: Sequence[list[int]], persistent_manager: bool = False, **options: Any
) -> list[Answer]:
    """Return the greedy tokens of each prompt and their log-probabilities."""
    given = settings(**options) | {"persistent_manager": persistent_manager}
    outputs = model.generate_batch(prompts, **given).values()
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [(output.generated_tokens, output.logprobs) for output in outputs]


def check(
    answers: Sequence[Answer], prompts: Sequence[list[int]], logits: Callable[[Tensor], Tensor]
) -> None:
    for (tokens, logprobs), prompt in zip(answers, prompts, strict=True):
        assert tokens
        whole = logits(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
        most, best = whole.double().log_softmax(-1).max(-1)
        assert tokens == best.tolist()
        torch.testing.assert_close(torch.tensor(logprobs).double(), most, atol=LIMIT, rtol=LIMIT)


def of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The logits of a model without a cache, one text at a time."""
    return lambda ids: zoo.logits(model, ids)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Counts of what transformers did: tokens of shared prefixes, requests evicted, requests copied away."""
    found: list[tuple[str, int]] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            found.append((name, len(result) if isinstance(result, set) else int(result)))
            return result

        monkeypatch.setattr(owner, name, method)

    noted(cache.PagedAttentionCache, "search_prefix_match")
    noted(offloading_manager.OffloadingManager, "offload_requests")
    noted(offloading_manager.OffloadingManager, "_offload_to_cpu")
    return found


@functools.cache
def unpatched_tokens() -> list[list[int]]:
    return [tokens for tokens, _ in served(build(), texts(*LENGTHS))]


@pytest.mark.parametrize("name", quick([n for n in CASES if not n.startswith("lampe")], FORMS[::3]))
def test_every_method_that_computes_attention(name: str, events: list[tuple[str, int]]) -> None:
    case, model = CASES[name], build()
    patch_model(model, case.method, original_max_position_embeddings=ORIGINAL, **case.options)
    randomise(model)
    prompts = texts(*LENGTHS)
    answers = served(model, prompts)
    check(answers, prompts, lambda ids: reference(model, case, ids))
    assert max(shared for event, shared in events if event == "search_prefix_match") >= 36
    assert [tokens for tokens, _ in answers] != unpatched_tokens()


STATIC = [name for name in zoo.frequency_methods() if not name.startswith("dynamic")]


@pytest.mark.parametrize("name", quick(STATIC, ("yarn", "clip", "longrope")))
def test_frequencies(name: str) -> None:
    """transformers' own attention, which reads the table of the patch."""
    options = zoo.frequency_options(name)
    options |= {knob: options["long_factor"] for knob in options if knob == "short_factor"}
    model = patch_model(build(), name, **options)
    prompts = texts(21, 90)
    check(served(model, prompts), prompts, of(model))


KINDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sliding layers": ("gemma3_text", SelfExtend(scale=4), {}),
    "sliding layers too": ("gemma3_text", SelfExtend(scale=4), {"layers": "all"}),
    "sinks": ("gpt_oss", ReRoPE(window=24), {}),
    "soft caps": ("gemma2", LogN(), {}),
    "queries and frequencies": ("qwen3", [YaRN(scale=4), LogN()], {}),
    "another method by layer": ("llama", {(0, 1): YaRN(scale=4), (2,): ReRoPE(window=24)}, {}),
    "a text tower": ("gemma3", SelfExtend(scale=4), {}),
    "no rotation": ("gpt2", "alibi", {}),
    "a longer table": ("gpt2", "interpolate", {"scale": 2}),
}
"""A model type, a method, and options of the patch."""


def made(model_type: str) -> Any:
    return (
        zoo.build(model_type) if model_type in zoo.decoder_types() else build_text_model(model_type)
    )


@pytest.mark.parametrize(
    "kind", quick(KINDS, ("sliding layers too", "another method by layer", "no rotation"))
)
def test_models_of_other_kinds(kind: str) -> None:
    model_type, method, options = KINDS[kind]
    model, prompts = patch_model(made(model_type), method, **options), texts(12, 40, 56)
    check(served(model, prompts), prompts, of(model))


@pytest.mark.parametrize("space", [0.0, 0.01], ids=["read again", "swapped"])
def test_requests_that_are_evicted(
    space: float, events: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty  # without a GPU, memory cannot be pinned, and need not be
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **given: empty(*size, **given)
    )
    model, prompts = patch_model(build(), "dynamic_ntk"), texts(12, 16, 20, 24)
    answers = served(model, prompts, new=60, num_blocks=26, cpu_offload_space=space)
    check(answers, prompts, of(model))
    assert ("offload_requests", True) in events
    assert any(event == "_offload_to_cpu" and count for event, count in events) is bool(space)


def test_requests_that_arrive_while_others_run() -> None:
    model: Any = patch_model(build(), "self_extend", scale=4)
    prompts = texts(21, 90, 40)
    (alone,) = (of(model)(torch.tensor([text])) for text in prompts[:1])
    waiting, found = list(enumerate(prompts))[1:], dict[str, Any]()
    with model.continuous_batching_context_manager(**settings()) as manager:
        manager.add_request(prompts[0], "0", max_new_tokens=30, streaming=True)
        while len(found) < len(prompts):
            output = manager.get_result(timeout=60)
            assert output is not None
            assert output.error is None
            if waiting:
                number, prompt = waiting.pop()
                manager.add_request(prompt, str(number), max_new_tokens=NEW)
                assert torch.equal(of(model)(torch.tensor(prompts[:1])), alone)  # as ever meanwhile
            if output.is_finished():
                found[output.request_id] = output
    first, *later = (found[str(number)] for number in range(len(prompts)))
    assert all(first.lifespan[0] < output.lifespan[0] < first.lifespan[1] for output in later)
    check([(each.generated_tokens, each.logprobs) for each in (first, *later)], prompts, of(model))


def test_several_answers_to_a_prompt() -> None:
    model: Any = patch_model(build(), "dual_chunk", original_max_position_embeddings=ORIGINAL)
    prompts = texts(50)
    given = settings()
    given["generation_config"].num_return_sequences = 3
    outputs = model.generate_batch(prompts, **given).values()
    check([(each.generated_tokens, each.logprobs) for each in outputs], prompts * 3, of(model))


def with_adapter(model: PreTrainedModel) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj"]))


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), with_adapter]
)
def test_copies_and_wrappers(way: Callable[[Any], Any]) -> None:
    model, prompts = patch_model(build(), "rerope", window=24), texts(20, 70)
    logits = of(copy.deepcopy(model))
    found = way(model)
    if way is not with_adapter:
        for parameter in model.parameters():
            parameter.data.zero_()
    check(served(found, prompts), prompts, logits)


@pytest.mark.slow
def test_a_manager_that_is_kept_is_of_one_patch() -> None:
    """The next one shares no prefix with it."""
    model, prompts = build(), texts(60, 75)
    patches: list[dict[str, Any]] = [
        {"method": "rerope", "window": 24}, {"method": "dynamic_ntk"}, {"method": "yarn", "scale": 4}, {}
    ]  # fmt: skip
    for patch in patches:
        served(model, prompts, persistent_manager=True)
        if patch:
            patch_model(model, **patch, replace=True)
        else:
            unpatch_model(model)
        for _ in range(2):
            check(served(model, prompts, persistent_manager=True), prompts, of(model))
    assert "init_continuous_batching" not in vars(model)


@pytest.mark.slow
def test_a_compiled_forward() -> None:
    """It pads the batch."""
    model, prompts = patch_model(build(), "self_extend", scale=4), texts(20, 70)
    compiled = CompileConfig(fullgraph=False, dynamic=True, backend="eager", mode="default")
    check(served(model, prompts, varlen_compile_config=compiled), prompts, of(model))


_LAMPE = {"growth": 0.01, "shift": -1.0, "capacity": 32.0, "head": 8, "tail": 8}
_LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "scale": 4}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("llama", "dynamic_ntk", {"update": "request"}, 'update="row"'),
    ("llama", "dynamic_ntk", {"update": "sequence"}, 'update="row"'),
    ("llama", "longrope", _LISTS, 'update="row"'),
    ("llama", "lampe", _LAMPE, r"se generate\(\)"),
    ("gpt2", "interpolate", {"scale": 2, "update": "request"}, 'update="static"'),
    ("falcon", "self_extend", {"scale": 4}, "attention of its own"),
    ("doge", "log_n", {}, "a mask of its own"),
    ("diffllama", "alibi", {}, "several calls"),
    ("nemotron", "rerope", {"window": 24}, "attention of its own"),
    ("deepseek_v3", "log_n", {}, "one size for keys and values"),
]


@pytest.mark.parametrize(("model_type", "method", "options", "words"), REFUSED)
def test_inexact_refused(model_type: str, method: str, options: dict[str, Any], words: str) -> None:
    model = patch_model(made(model_type), method, **options)
    before = zoo.snapshot(model)
    with pytest.raises(PosencError, match=words):
        model.generate_batch(texts(5), **settings())
    assert zoo.snapshot(model) == before


def test_settings_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build(), "rerope", window=24)
    with monkeypatch.context() as patch:
        patch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
        with pytest.raises(PosencError, match="a CUDA graph cannot"):
            served(model, texts(5), use_cuda_graph=True)
        check(served(model, texts(5)), texts(5), of(model))  # none is chosen unasked
    monkeypatch.setattr(
        cache.PagedAttentionCache, "update", lambda key, value, layer, read, write: None
    )
    with pytest.raises(PosencError, match=r"Install transformers 5\.19"):
        served(model, texts(5))
