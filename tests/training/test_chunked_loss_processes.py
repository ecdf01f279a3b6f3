"""The loss in chunks in two processes, with weights whole (DDP) and sharded (FSDP2, ZeRO-3), against one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_posenc.training.chunked_loss import ChunkedLoss, chunk_loss
from tests.support import zoo
from tests.support.processes import PATIENCE, start

WORLD, STEPS, RATE = 2, 3, 0.1
CHUNK = 16
Trained = tuple[list[float], dict[str, Tensor]]


def batch(step: int, rank: int | None = None) -> dict[str, Tensor]:
    ids = zoo.tokens(40, batch=2 * WORLD, seed=step)
    ids = ids if rank is None else ids[2 * rank : 2 * rank + 2]
    return {"input_ids": ids, "labels": ids}


def trained(model: Any, rank: int | None = None) -> Trained:
    """Losses, averaged over processes, and the weights after some steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for step in range(STEPS):
        loss = model(**batch(step, rank), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(averaged(loss, rank))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return losses, {name: getattr(w, "full_tensor", w.clone)() for name, w in weights.items()}


def averaged(loss: Tensor, rank: int | None) -> float:
    value = loss.detach().clone()
    if rank is not None:
        distributed.all_reduce(value)
        value /= WORLD
    return value.item()


def build(tied: bool) -> Any:
    return zoo.build("llama", tie_word_embeddings=tied).train()


def ddp(rank: int, tied: bool, *, late: bool = False) -> tuple[Trained, ChunkedLoss]:
    """Whole weights, in chunks before or after the wrapper."""
    model = build(tied)
    handle = None if late else chunk_loss(model, CHUNK)
    wrapped = DistributedDataParallel(model)
    if handle is None:
        handle = chunk_loss(wrapped, CHUNK)
    return trained(wrapped, rank), handle


def fsdp(
    rank: int, tied: bool, *, late: bool = False, head: bool = False, tail: bool = False
) -> tuple[Trained, ChunkedLoss]:
    """Every layer sharded, then the rest, which is put away after the forward as the layers are."""
    model = build(tied)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    handle = None if late else chunk_loss(model, CHUNK)
    mesh = init_device_mesh("cpu", (WORLD,))
    for part in [*model.model.layers, *([model.model, model.lm_head] if head else [])]:
        fully_shard(part, mesh=mesh)
    if tail:  # as accelerate does it
        last = [model.model.norm, *([model.model.embed_tokens] if tied else []), model.lm_head]
        fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    if handle is None:
        handle = chunk_loss(model, CHUNK)
        assert handle.exact is None
    return trained(model, rank), handle


def zero3(rank: int, tied: bool) -> tuple[Trained, ChunkedLoss]:
    import deepspeed

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    deepspeed.init_distributed("gloo")
    model = build(tied)
    handle = chunk_loss(model, CHUNK)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1e9,  # it is 1 by default
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )
    losses = []
    for step in range(STEPS):
        loss = engine(**batch(step, rank), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(averaged(loss, rank))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: w.detach().clone() for name, w in model.named_parameters()}
    return (losses, weights), handle


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ddp": (ddp, {"tied": False}),
    "fsdp_tied": (fsdp, {"tied": True, "late": False}),
    "fsdp_of_accelerate": (fsdp, {"tied": False, "tail": True}),
}
MORE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ddp_wrapped_before": (ddp, {"tied": True, "late": True}),
    "fsdp": (fsdp, {"tied": False, "late": False}),
    "fsdp_late": (fsdp, {"tied": True, "late": True}),
    "fsdp_of_accelerate_tied": (fsdp, {"tied": True, "tail": True}),
    "fsdp_of_accelerate_late": (fsdp, {"tied": True, "tail": True, "late": True}),
    "fsdp_of_every_part": (fsdp, {"tied": False, "late": False, "head": True}),
}
ZERO3 = {"zero3": (zero3, {"tied": False}), "zero3_tied": (zero3, {"tied": True})}


def work(rank: int, cases: dict[str, Any], folder: Path) -> None:
    warnings.simplefilter("ignore")
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    found = {}
    for name, (run, options) in cases.items():
        (losses, weights), handle = run(rank, **options)
        weights = {key.removeprefix("module."): value for key, value in weights.items()}
        found[name] = losses, weights, handle.exact, "logits" in handle.model(**batch(0, rank))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def check(cases: dict[str, Any], folder: Path) -> None:
    ranks = [start(work, rank, cases, folder) for rank in range(WORLD)]
    for process in ranks:
        process.join(PATIENCE)
    assert [process.exitcode for process in ranks] == [0] * WORLD
    found = torch.load(folder / "found.pt")
    expected = {tied: trained(build(tied)) for tied in (False, True)}
    assert found.keys() == cases.keys()
    for name, (losses, weights, exact, has_logits) in found.items():
        assert exact, name
        assert not has_logits, name
        plain_losses, plain = expected[cases[name][1]["tied"]]
        torch.testing.assert_close(losses, plain_losses, rtol=1e-6, atol=0)
        assert weights.keys() == plain.keys()
        for key, weight in plain.items():
            assert (weights[key] - weight).abs().max() <= 2e-6 * weight.abs().max(), (name, key)
    started = dict(build(False).named_parameters())
    plain = expected[False][1]
    assert all((plain[key] - weight).abs().max() > 1e-3 for key, weight in started.items())


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, MORE], ids=len)
def test_two_processes_equal_one(cases: dict[str, Any], tmp_path: Path) -> None:
    check(cases, tmp_path)


@pytest.mark.slow
def test_zero_3(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    check(ZERO3, tmp_path)
