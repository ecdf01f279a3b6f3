"""Heads and parameters shared out over two processes: every method with numbers for each head computes as in one.

All cases run in one pair of processes, by tensor parallelism and by FSDP2.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc import from_pretrained, load_patch, patch_model, save_patch
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.methods import (
    METHODS,
    ALiBi,
    DistanceBias,
    LogN,
    Method,
    RelativeKeys,
    Temperature,
    TransformerXL,
    YaRN,
)
from hf_posenc.model.parameters import trained_parameters
from tests.support.families import build_text_model
from tests.support.killing import in_two_processes
from tests.support.tiny_text import sizes

HEADS, LENGTH, RATE = 6, 24, 0.5


@dataclass(frozen=True, kw_only=True)
class Own(DistanceBias):
    """A method of a user's own, whose bias no head shares with another."""

    name = "own_bias"
    summary = "a bias for each head"
    source = needs = "nothing"

    def bias(self, distance: Tensor, heads: int, *_: Any) -> Tensor:
        return torch.stack([(distance * (head + 1)).sin() for head in range(heads)])


def cases() -> dict[str, list[Method]]:
    """Every method with a number for each head, or trained by the heads together, and some without."""
    found: dict[str, list[Method]] = {
        "own_bias": [Own()],
        "ssmax": [Temperature(law="ssmax")],
        "list": [YaRN(scale=2), ALiBi(keep_rope=True), LogN()],
        "transformer_xl_kept": [TransformerXL(keep_rope=True)],
    }
    for method in METHODS:
        per_head = issubclass(method, DistanceBias | RelativeKeys) or method.trainable
        if per_head or method.name in ("rerope", "dynamic_ntk", "log_n"):
            found[method.name] = [method.from_options()]
            if "shared" in method.knobs():
                found[f"{method.name}_shared"] = [method.from_options(shared=True)]
    return found


CASES = cases()
TRAINED = [name for name, methods in CASES.items() if any(each.trainable for each in methods)]


def batch(step: int) -> Tensor:
    return torch.randint(96, (2, LENGTH), generator=torch.Generator().manual_seed(step))


def gradients(model: Any, ids: Tensor) -> None:
    """Accumulate those of each text, as two micro-batches."""
    for row in ids:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        (nn.functional.cross_entropy(logits, row[1:]) / len(ids)).backward()


def trained(model: Any, batches: Callable[[int], Tensor] = batch) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), RATE, foreach=False)
    for step in range(2):
        optimizer.zero_grad()
        gradients(model, batches(step))
        optimizer.step()
    return model


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=batch(9), use_cache=False).logits
    return logits


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trained_parameters(model).items()
    }


def findings(
    model: Any, methods: list[Method], train: Callable[[Any], Any] = trained, seed: int = 0
) -> dict[str, Any]:
    torch.manual_seed(seed)
    patch_model(model, copy.copy(methods))
    found: dict[str, Any] = {"patched": logits_of(model)}
    if any(method.trainable for method in methods):
        train(model)
        found |= {"trained": logits_of(model), "parameters": parameters_of(model)}
    return found


def split(rank: int, folder: Path) -> dict[str, Any]:
    """Tensor parallelism: trained, saved and loaded, with other random numbers in each process."""

    def load() -> Any:  # a copy would run the modules of the original
        return AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()

    results = {}
    for case in CASES:
        methods, model, target = CASES[case], load(), folder / case
        found = results[case] = findings(model, methods, seed=rank)
        if "parameters" not in found:
            continue
        model.save_pretrained(target)
        if rank == 0:
            save_patch(model, target / "patch")
        distributed.barrier()
        found["loaded"] = logits_of(from_pretrained(target, tp_plan="auto").eval())
        if case in ("t5", "t5_shared"):
            found["patch"] = parameters_of(load_patch(load(), target / "patch"))
    return results


def sharded(rank: int, folder: Path) -> dict[str, Any]:
    """FSDP2 of a patched model, with a text for each process."""

    def train(model: Any) -> None:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        trained(model, lambda step: batch(step)[rank : rank + 1])

    whole = AutoModelForCausalLM.from_pretrained(folder / "model")
    return {case: findings(copy.deepcopy(whole), CASES[case], train) for case in TRAINED}


PARTS: dict[str, Method] = {
    "yarn": YaRN(scale=2),
    "log_n": LogN(),
    "ssmax": Temperature(law="ssmax"),
}


def exchanging(module: nn.Module, query: Tensor, *pair: Tensor, **options: Any) -> Any:
    """Attention of this process's part of a text, with the keys and values of both parts."""
    length = query.shape[2]

    def gathered(own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(2)]
        distributed.all_gather(parts, own.contiguous())
        return torch.cat(parts, 2)

    key, value = map(gathered, pair[:2])
    visible = torch.ones(length, 2 * length, dtype=torch.bool).tril(length * distributed.get_rank())
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=options["scaling"], enable_gqa=True
    ).transpose(1, 2), None


exchanging.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"


def parts_of_texts(rank: int, folder: Path) -> dict[str, Tensor]:
    """Sequence parallelism: each process runs half of the tokens."""
    half = slice(rank * LENGTH // 2, (rank + 1) * LENGTH // 2)
    found, places = {}, torch.arange(LENGTH)[None]
    for case, method in PARTS.items():
        model = patch_model(AutoModelForCausalLM.from_pretrained(folder / "model").eval(), method)
        with torch.no_grad(), patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa=exchanging):
            given = {"input_ids": batch(9)[:, half], "position_ids": places[:, half]}
            found[case] = model(**given, use_cache=False).logits
    return found


def refused(folder: Path) -> dict[str, str]:
    """The messages where the heads or the text of a process cannot be those of the method."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    whole: Any = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())

    def patched_before() -> None:
        model = patch_model(copy.deepcopy(whole), "alibi")
        for layer in model.model.layers:
            parallelize_module(layer.self_attn, mesh, {**columns, "o_proj": RowwiseParallel()})
        logits_of(model)

    def part_of_a_text(method: str, model: Any = whole, **options: Any) -> None:
        model = patch_model(copy.deepcopy(model), method, **options)
        ids, places = batch(0), torch.arange(LENGTH)[None].clone()
        with torch.no_grad(), context_parallel(mesh, buffers=[ids, places], buffer_seq_dims=[1, 1]):
            model(input_ids=ids, position_ids=places, use_cache=False)

    def sharded_before() -> None:
        model = copy.deepcopy(whole)
        fully_shard(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="FSDP")
            patch_model(model, "kerple_log")

    trials: dict[str, Callable[[], None]] = {
        "sharded before": sharded_before,
        "patched before": patched_before,
        "bands": partial(part_of_a_text, "rerope"),
        "dynamic": partial(part_of_a_text, "dynamic_ntk", update="sequence"),
        "table": partial(
            part_of_a_text, "interpolate", build_text_model("gpt2"), scale=2, update="request"
        ),
    }
    messages = {}
    for name, trial in trials.items():
        try:
            trial()
            messages[name] = "it ran"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def work(folder: Path) -> None:
    warnings.simplefilter("ignore")
    rank = distributed.get_rank()
    found = {"split": split(rank, folder), "sharded": sharded(rank, folder)}
    found |= {"parts": parts_of_texts(rank, folder), "refused": refused(folder)}
    torch.save(found, folder / f"found-{rank}.pt")


@pytest.fixture
def model() -> PreTrainedModel:
    return built().eval()


def built() -> LlamaForCausalLM:
    torch.manual_seed(0)
    own = sizes(96, 12, width=HEADS * 4, layers=2, heads=(HEADS, 2))  # the width of one process too
    return LlamaForCausalLM(LlamaConfig(**own, head_dim=8, initializer_range=0.2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of both processes, which all workers of xdist share."""
    root = tmp_path_factory.getbasetemp()
    made = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "processes"
    with FileLock(f"{made}.lock"):
        if not (made / "found-1.pt").is_file():
            prepare(made)
    return made


def prepare(made: Path) -> None:
    made.mkdir(exist_ok=True)
    built().save_pretrained(made / "model")
    in_two_processes(work, made)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def results(folder: Path, way: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"found-{rank}.pt")[way] for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in TRAINED])
def test_two_processes_equal_one(folder: Path, case: str) -> None:
    expected = findings(AutoModelForCausalLM.from_pretrained(folder / "model"), CASES[case])
    for found in (rank[case] for rank in results(folder, "split")):
        assert_near(found["patched"], expected["patched"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*starts untrained")
@pytest.mark.parametrize("case", TRAINED)
def test_two_processes_train_as_one(folder: Path, case: str) -> None:
    expected = findings(AutoModelForCausalLM.from_pretrained(folder / "model"), CASES[case])
    assert (expected["trained"] - expected["patched"]).abs().max() > 0.1
    for found in (rank[case] for way in ("split", "sharded") for rank in results(folder, way)):
        assert_near(found["patched"], expected["patched"])
        assert_near(found["trained"], expected["trained"])
        assert found["parameters"].keys() == expected["parameters"].keys()
        for name, value in expected["parameters"].items():
            assert_near(found["parameters"][name], value)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_what_two_processes_trained_is_saved_whole(folder: Path, case: str) -> None:
    found, other = (each[case] for each in results(folder, "split"))
    stored = load_file(folder / case / "patch" / "posenc.safetensors")
    assert stored.keys() == found["parameters"].keys()
    for name, value in stored.items():
        for process in (found, other):
            assert torch.equal(process["parameters"][name], value)
            assert torch.equal(process.get("patch", stored)[name], value)
    assert_near(found["loaded"], found["trained"])
    assert_near(logits_of(from_pretrained(folder / case)), found["trained"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("patched before", "computes 3 heads and computed 6 when it was patched"),
        ("sharded before", "UserWarning: FSDP does not manage the parameters that kerple_log adds"),
        ("bands", "gives each process a part of the text, and a method that computes attention"),
        ("dynamic", "gives each process a part of the text, and dynamic_ntk with update="),
        ("table", "gives each process a part of the text, and interpolate with update="),
    ],
)
def test_what_a_process_cannot_compute_is_refused(folder: Path, case: str, message: str) -> None:
    assert all(message in messages[case] for messages in results(folder, "refused"))


def test_heads_that_DeepSpeed_has_shared_out_are_refused(model: PreTrainedModel) -> None:
    """It marks the weights that it cut, and no matrix shows which heads are left."""
    model.get_parameter("model.layers.1.self_attn.q_proj.weight").tensor_model_parallel = True  # type: ignore[attr-defined]
    before = logits_of(model)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn is split over several"):
        patch_model(model, "alibi")
    assert torch.equal(logits_of(model), before)
    patch_model(model, "rerope")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*starts untrained")
@pytest.mark.parametrize("case", PARTS)
def test_scaled_queries_of_parts_of_texts(folder: Path, model: PreTrainedModel, case: str) -> None:
    expected = logits_of(patch_model(model, PARTS[case]))
    assert_near(torch.cat([parts[case] for parts in results(folder, "parts")], 1), expected)


def test_bands_of_parts_of_a_text_are_refused(model: PreTrainedModel) -> None:
    patch_model(model, "rerope")
    with (
        patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa=exchanging),
        pytest.raises(PosencError, match="Context or sequence parallelism gives each process"),
    ):
        logits_of(model)
