"""`--dry_run` of a fine-tuning: the formulas against what PyTorch counts, what it prints, and that recipes fit."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from hf_posenc.embedded import held_out_documents, model_path
from hf_posenc.engines.engine import empty_model
from hf_posenc.evaluation.device.run import LLAMA_8B
from hf_posenc.evaluation.documents import Document
from hf_posenc.evaluation.loading import load_tokenizer
from hf_posenc.evaluation.scoring.decoder import mark_sizes_alone
from hf_posenc.evaluation.scoring.estimate import read_shape, run_cost
from hf_posenc.training import choose_parameters, chunk_loss, prepare_blocks, train
from hf_posenc.training.chunked_loss import default_chunk
from hf_posenc.training.estimate import Step, step_cost
from hf_posenc.training.options import Trained
from hf_posenc.training.train import finetune, parse_arguments, resolve_lengths
from tests.support import zoo
from tests.support.live_bytes import LiveBytes
from tests.support.selection import late
from tests.support.tiny_text import VOCABULARY, byte_tokenizer

TOKENS, CHUNK = 512, 64
DTYPES = (torch.float32, torch.bfloat16)
LEAST, MOST = 0.85, 2.1  # as the module and the last line of a dry run say
SIZES = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 4, "vocab_size": 512}


def build(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = zoo.build(model_type, **SIZES, num_attention_heads=4, max_position_embeddings=1024)
    return model.to(dtype)


def trained(model: Any, train: Trained, checkpointing: bool, **options: int) -> Any:
    model = choose_parameters(model, train, **options)
    chunk_loss(model, CHUNK)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("model_type", "dtype", "train", "checkpointing"),
    [
        ("llama", torch.bfloat16, "lora", True),
        ("llama", torch.float32, "full", False),
        *late(["llama", "gpt2", "qwen3"], DTYPES, ["full", "lora"], [False, True]),
    ],
)
def test_memory_is_near_the_tensors_of_a_step(
    model_type: str, dtype: torch.dtype, train: Trained, checkpointing: bool
) -> None:
    """In bfloat16 under autocast, as the recipes have it."""
    mixed, model = dtype == torch.bfloat16, build(model_type, dtype)
    shape = read_shape(model)
    model = trained(model, train, checkpointing)
    ids = zoo.tokens(TOKENS)
    live: Any = LiveBytes(model)
    autocast = torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext()
    with live:
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    ways: dict[str, Any] = {"train": train, "mixed": mixed, "checkpointing": checkpointing}
    cost = step_cost(shape, [*model.parameters()], tokens=TOKENS, chunk=CHUNK, **ways)
    held = sum(each.numel() * each.itemsize for each in model.parameters())
    ratio = (cost.total - cost.optimizer - held) / live.peak
    assert LEAST < ratio < MOST, f"{ratio:.2f}: {cost} for {live.peak:,} bytes"
    optimizer = torch.optim.AdamW(each for each in model.parameters() if each.requires_grad)
    optimizer.step()
    names, states = ("exp_avg", "exp_avg_sq"), optimizer.state.values()
    averages = [state[name] for state in states for name in names]
    assert cost.optimizer == sum(each.numel() * each.itemsize for each in averages)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("train", "checkpointing"),
    [("full", True), ("lora", False), *late(["full"], [False]), *late(["lora"], [True])],
)
def test_operations_are_those_that_pytorch_counts(train: Trained, checkpointing: bool) -> None:
    model = build("llama")
    model.set_attn_implementation("eager")  # the counter sees no fused attention on a CPU
    shape = read_shape(model)
    model = trained(model, train, checkpointing, lora_rank=1)
    counted, computed = list[float](), list[float]()
    for tokens in (2 * CHUNK, 4 * CHUNK):
        ids = zoo.tokens(tokens)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        counted.append(counter.get_total_flops())
        options: dict[str, Any] = {"train": train, "checkpointing": checkpointing}
        cost = step_cost(shape, [*model.parameters()], tokens=tokens, chunk=CHUNK, **options)
        computed.append(cost.flops)
    # What grows with the square of the tokens; eager attention computes the hidden half of the pairs too.
    pairs, whole = (flops[1] - 2 * flops[0] for flops in (computed, counted))
    assert pairs == pytest.approx(whole / 2, rel=0.02)
    maps, others = (2 * flops[0] - flops[1] / 2 for flops in (computed, counted))
    # a recomputed layer stops before its last product
    assert maps == pytest.approx(others, rel=0.1)


@pytest.mark.slow
def test_a_dry_run_prints_the_cost_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(dict(held_out_documents())["typing"][:20_000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    given = ["--text", "text.txt", "--no_score", "--block_length", "64", "--use_cpu"]
    more = ["--max_steps", "-1", "--num_train_epochs", "2", "--gradient_accumulation_steps", "3"]
    finetune(parse_arguments([*given, *more, "--dry-run"]))
    shown = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [text]
    tokenizer = load_tokenizer(str(model_path()))
    counts = prepare_blocks([text.read_text()], tokenizer, length=64).counts
    tokens = len(tokenizer(text.read_text())["input_ids"])
    batches = counts.blocks // 2
    steps = 2 * math.ceil(batches / 3)  # two epochs, in steps of 3 batches at most
    assert batches % 3
    assert f"{counts.blocks:,} blocks of 64 tokens" in shown
    assert re.search(rf"texts:  ({tokens:,}|{tokens + 1:,}) tokens", shown)  # with the end
    assert f"steps:  {steps} of 384 tokens (6 blocks): {4 * batches * 64:,} tokens" in shown
    assert re.search(r"memory: about 0\.\d+ GiB .*GiB are free on cpu", shown)
    assert re.search(r"time:   about \S+ s a step, .* in all", shown)


def test_a_scored_text_leaves_the_default_training_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [Document(name, text[:20_000]) for name, text in held_out_documents()][:3]
    monkeypatch.setattr(train, "read_standard_library", lambda: iter(texts))
    (tmp_path / "mine").write_text(texts[1].text, encoding="utf-8")
    given = ["--score_text", str(tmp_path / "mine"), "--score_lengths", "64", "--block_length"]
    finetune(parse_arguments([*given, "64", "--use_cpu", "--dry-run"]))
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"1 document not used .*{texts[1].name}: begins as \S*mine, which", shown)


def test_a_dry_run_of_a_table_of_positions(tmp_path: Path) -> None:
    """Without values, a table is none of sines."""
    for part in (zoo.build("gpt2", vocab_size=VOCABULARY), byte_tokenizer()):
        part.save_pretrained(tmp_path)
    given = ["--model", str(tmp_path), "--text", __file__, "--patch", "none", "--no-score"]
    finetune(parse_arguments([*given, "--dry-run", "--target-length", "32"]))


# Recipes for one GPU. No GPU has run them: what follows is the formula, on a model without weights.

CARDS = {"lora_24gb": 24e9, "lora_80gb": 80e9}
RESERVED = 1.2e9
"""Bytes for a CUDA context, workspaces and fragmentation."""


def cost_of(recipe: str, *more: str) -> tuple[Step, float]:
    """The cost of a recipe for an 8B model, and the bytes that scoring its longest length takes beside the weights."""
    given = ["--recipe", recipe, "--model", str(model_path()), "--use_cpu", *more]
    choice, data, arguments = parse_arguments(given)
    assert data.target_length is not None
    model = empty_model(LlamaConfig(**LLAMA_8B, dtype=getattr(torch, choice.dtype)))
    mark_sizes_alone(model, torch.device("cpu"))
    shape, chunk = read_shape(model), default_chunk(model)
    assert sum(each.numel() for each in model.parameters()) == 8_030_261_248  # Llama 3 8B
    lengths = resolve_lengths(model, data.positions, data.target_length, data.block_length)
    longest = max(data.score_lengths)
    scoring = run_cost(model, [(longest, longest)]).beside_weights
    model = choose_parameters(model, choice.train, lora_rank=choice.lora_rank)
    adapters = [each for name, each in model.named_parameters() if "lora_" in name]
    per_layer = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))  # q and o, k and v
    assert sum(each.numel() for each in adapters) == 32 * per_layer
    cost = step_cost(
        shape,
        [*model.parameters()],
        tokens=lengths.block,
        chunk=chunk,
        batch=arguments.train_batch_size,
        train=choice.train,
        mixed=arguments.bf16,
        checkpointing=bool(arguments.gradient_checkpointing),
        optimizer=str(arguments.optim),
    )
    return cost, scoring


@pytest.mark.parametrize("target", ["32k", "128k"])
@pytest.mark.parametrize("recipe", CARDS)
def test_a_recipe_fits_on_its_card(recipe: str, target: str) -> None:
    block = ("--block_length", "32k") if (recipe, target) == ("lora_80gb", "32k") else ()
    cost, scoring = cost_of(recipe, "--target_length", target, *block)
    room = CARDS[recipe] - RESERVED
    assert cost.total < room
    assert cost.weights + cost.optimizer + scoring < room
    # Each part, by hand: base and a copy of the embeddings in bfloat16, adapters in float32.
    embeddings, adapters = 128256 * 4096, 32 * 16 * 2 * (8192 + 5120)
    assert cost.gradients == pytest.approx(2 * embeddings + 4 * adapters, rel=1e-3)
    assert cost.optimizer == 2 * cost.gradients
    assert cost.weights == pytest.approx(2 * (8_030_261_248 + embeddings) + 6 * adapters, rel=1e-3)


@pytest.mark.parametrize("recipe", CARDS)
def test_the_table_of_the_page_is_the_formula(recipe: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| \[{recipe}\].*$", page, re.MULTILINE)
    cost, _ = cost_of(recipe)
    beside = cost.activations + cost.working
    values = (cost.weights, cost.gradients, cost.optimizer, beside, cost.total)
    assert re.findall(r"([\d.]+) GB", row) == [f"{value / 1e9:.1f}" for value in values]


def test_what_the_recipes_say_of_other_blocks() -> None:
    """Whole blocks of 32k fit on 80 GB, as the recipe says; neither they nor float32 fit on 24 GB."""
    whole = ("--positions", "contiguous", "--target_length", "32k", "--block_length", "32k")
    assert cost_of("lora_80gb", *whole)[0].total < CARDS["lora_80gb"] - RESERVED
    assert cost_of("lora_24gb", *whole)[0].total > CARDS["lora_24gb"]
    assert cost_of("lora_24gb", "--dtype", "float32")[0].total > CARDS["lora_24gb"]
