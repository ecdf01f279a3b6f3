"""The collator: what a batch holds, and that drawn positions follow the papers' distributions."""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerState

from hf_posenc.errors import PosencError
from hf_posenc.training.collator import (
    DRAWS,
    Draw,
    PositionCollator,
    cream,
    endprompt_random,
    generator,
    pose,
    randomized,
)
from hf_posenc.training.options import DRAWN as NAMES
from hf_posenc.training.options import PROMPTED
from tests.support import zoo

DRAWN = tuple(name for name in DRAWS if name not in PROMPTED)
PROMPT = [7, 8, 9]


def test_every_name_has_a_draw() -> None:
    assert tuple(DRAWS) == NAMES


def example(length: int, seed: int = 0) -> dict[str, Any]:
    return {"input_ids": np.random.default_rng(seed).integers(1, 1000, length)}


def examples(count: int, length: int = 16) -> list[dict[str, Any]]:
    return [example(length, seed) for seed in range(count)]


def small(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"] % 32} for row in examples(count)]


def collator(positions: str, **options: Any) -> PositionCollator:
    target: dict[str, Any] = {"target_length": 64} if positions in DRAWS else {}
    if positions in PROMPTED:
        target["terminal_prompt"] = PROMPT
    return PositionCollator(positions, **{**target, **options})


def test_contiguous_batches_need_nothing_but_tokens() -> None:
    rows = examples(3)
    batch = collator("contiguous")(rows)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [row["input_ids"].tolist() for row in rows]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])
    # So that the labels count what is predicted.
    assert batch["labels"][:, 0].tolist() == [-100] * 3


def test_shorter_examples_are_masked_behind_their_end() -> None:
    batch = collator("contiguous", pad_token_id=7)([example(5), example(3)])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["input_ids"][1, 3:].tolist() == [7, 7]
    assert batch["labels"][1, 3:].tolist() == [-100, -100]


def test_labels_are_their_own_or_the_tokens() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [8, -100, 9]}, {"input_ids": [1, 2], "labels": []}]
    batch = collator("contiguous", seed=-3)(rows)
    assert batch["labels"].tolist() == [[-100, -100, 9], [-100, 2, -100]]


def test_packed_batches_restart_positions_and_have_no_mask_and_no_cache() -> None:
    rows = [{**example(7), "document_lengths": [3, 4]}, {**example(5, 1), "document_lengths": [5]}]
    batch = collator("packed")(rows)
    assert set(batch) == {"input_ids", "labels", "position_ids", "use_cache"}
    assert batch["use_cache"] is False
    # what is padded is one more document, which nobody learns from
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 0]]
    ignored = (batch["labels"] == -100).tolist()
    assert ignored == [[p in (0, 3) for p in range(7)], [p in (0, 5, 6) for p in range(7)]]


def test_packed_batches_may_be_one_row() -> None:
    rows = [{**example(4), "document_lengths": [1, 3]}, {**example(4, 1), "document_lengths": [4]}]
    plain, flat = collator("packed")(rows), collator("packed", flatten=True)(rows)
    for name in ("input_ids", "labels", "position_ids"):
        assert flat[name].shape == (1, 8)
        assert flat[name].flatten().tolist() == plain[name].flatten().tolist()
    assert flat["use_cache"] is False


@pytest.mark.parametrize("positions", DRAWN)
def test_drawn_batches_come_with_a_mask_of_ones(positions: str) -> None:
    batch = collator(positions)([example(16), example(9, seed=1)])
    assert set(batch) == {"input_ids", "labels", "position_ids", "attention_mask"}
    assert batch["attention_mask"].sum(-1).tolist() == [16, 9]
    for row, length in zip(batch["position_ids"], (16, 9), strict=True):
        assert bool((row[:length].diff() >= 1).all())
        assert int(row[0]) >= 0
        assert int(row[length - 1]) < 64


def test_a_terminal_prompt_ends_the_target_length_and_has_a_loss() -> None:
    """As the authors' code computes it: positions 0 .. n - 1, then final - k + 1 .. final; every token is a label."""
    rows = [example(16), {**example(9, seed=1), "labels": [-100] * 6 + [1, 2, 3]}]
    batch = collator("endprompt")(rows)
    final, k = 64 - 1, len(PROMPT)
    for number, (row, n) in enumerate(zip(rows, (16, 9), strict=True)):
        ids, labels, positions, mask = (
            batch[name][number].tolist()
            for name in ("input_ids", "labels", "position_ids", "attention_mask")
        )
        assert positions[: n + k] == [*range(n), *range(final - k + 1, final + 1)]
        assert ids[: n + k] == [*row["input_ids"].tolist(), *PROMPT]
        assert labels[n : n + k] == PROMPT
        assert labels[1:n] == [*row.get("labels", row["input_ids"])][1:]
        assert (labels[n + k :], mask) == ([-100] * (16 - n), [1] * (n + k) + [0] * (16 - n))


def packed(*lengths: int) -> dict[str, Any]:
    return {**example(6), "document_lengths": lengths}


@pytest.mark.parametrize(
    ("positions", "options", "row", "message"),
    [
        ("possé", {}, None, "Unknown kind of positions.*'possé'.*pose"),
        ("pose", {"target_length": None}, None, "give target_length, in tokens"),
        ("packed", {"curriculum": [8, 16]}, None, "bounds positions that are drawn.*'packed'"),
        ("random", {"curriculum": [16, 16]}, None, r"rising lengths.*\[16, 16\]"),
        ("random", {"curriculum": [16, 32, 128]}, None, "ends at 128 tokens, beyond.*=64"),
        ("random", {"curriculum": [8, 64]}, example(9), "9 tokens, more than the curriculum's first 8"),
        ("cream", {}, example(65), "65 tokens, more than target_length=64"),
        ("endprompt", {}, example(62), "65 tokens, more than target_length=64"),
        ("endprompt", {"terminal_prompt": []}, None, "prompt of 0 tokens and positions='endprompt'"),
        ("pose", {"terminal_prompt": [1]}, None, "of 1 tokens and positions='pose'"),
        ("packed", {}, example(6), "remove_unused_columns=False"),
        ("packed", {}, packed(2, 3), "sum to 5; the example has 6 tokens"),
        ("packed", {}, packed(6, 0), "at least one token"),
    ],
)  # fmt: skip
def test_errors(positions: str, options: dict[str, Any], row: Any, message: str) -> None:
    with pytest.raises(PosencError, match=message):
        collator(positions, **options)([row])


# The draws, against the papers: references that enumerate every outcome with its probability
def pose_outcomes(n: int, target: int) -> dict[tuple[int, ...], float]:
    """PoSE, section 3.2, two chunks: l_0 in 1 .. ceil(n/2), u_1 in 0 .. L - n, both uniform."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    firsts, skips = range(1, math.ceil(n / 2) + 1), range(target - n + 1)
    for first, skip in itertools.product(firsts, skips):
        row = (*range(first), *(i + skip for i in range(first, n)))
        found[row] += 1 / len(firsts) / len(skips)
    return found


def random_outcomes(n: int, target: int) -> dict[tuple[int, ...], float]:
    """Randomized positions, section 3: every subset of n, in order."""
    rows = list(itertools.combinations(range(target), n))
    return dict.fromkeys(rows, 1 / len(rows))


def cream_outcomes(n: int, target: int) -> dict[tuple[int, ...], float]:
    """CREAM as its authors' train.py has it: numpy's interpolation in the Gaussian's table, both kinds of edges."""
    factor = target // n
    x = np.linspace(2, factor * 2, 1000)
    cdf = np.array([0.5 * (1 + math.erf((v - (1 + factor)) / (3.0 * math.sqrt(2)))) for v in x])
    grid = (np.arange(200_000) + 0.5) / 200_000  # their np.random.rand()
    alphas = Counter(np.interp(grid, cdf, x).astype(int).tolist())
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for edge in (n // 3, 4 * factor):
        middle = n - 2 * edge
        for alpha, times in alphas.items():
            low = int(edge + (middle - 1) * (alpha / 2))
            high = int(alpha / 2 * n) - edge - 1
            for end in range(low, high + 1):
                head, tail = range(edge), range(factor * n - edge, factor * n)
                row = (*head, *range(end - middle + 1, end + 1), *tail)
                found[row] += 0.5 * times / 200_000 / (high - low + 1)
    return found


def endprompt_outcomes(n: int, target: int) -> dict[tuple[int, ...], float]:
    """The authors' random collator: a suffix of 2 tokens that begins at n - 2 .. L - 2, uniformly."""
    rows = [(*range(n - 2), *range(start, start + 2)) for start in range(n - 2, target - 2 + 1)]
    return dict.fromkeys(rows, 1 / len(rows))


@pytest.mark.parametrize(
    ("draw", "outcomes", "n", "target"),
    [
        (partial(endprompt_random, prompt=2), endprompt_outcomes, 5, 9),
        (pose, pose_outcomes, 5, 9),
        (pose, pose_outcomes, 6, 6),
        pytest.param(pose, pose_outcomes, 6, 8, marks=pytest.mark.slow),
        (randomized, random_outcomes, 3, 6),
        (cream, cream_outcomes, 24, 48),  # both edges are 8
        pytest.param(cream, cream_outcomes, 72, 144, marks=pytest.mark.slow),  # 24 and 8
        (cream, cream_outcomes, 39, 117),  # 13 and 12, and halves
    ],
)
def test_draws_have_the_probabilities_of_the_paper(
    draw: Draw, outcomes: Callable[[int, int], dict[tuple[int, ...], float]], n: int, target: int
) -> None:
    expected, times = outcomes(n, target), 20_000
    assert sum(expected.values()) == pytest.approx(1)
    random = np.random.default_rng(0)
    found = Counter(tuple(draw(n, target, random).tolist()) for _ in range(times))
    assert set(found) <= set(expected)
    common = [row for row, share in expected.items() if share * times >= 5]
    chi = sum((found[r] - expected[r] * times) ** 2 / (expected[r] * times) for r in common)
    freedom = len(common) - 1
    assert chi < freedom + 4 * math.sqrt(2 * max(freedom, 1))  # mean and deviation of chi squared


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(("n", "target"), [(1, 1), (1, 9), (2, 8), (7, 7), (64, 1000), (100, 250)])
def test_positions_rise_within_the_long_context(draw: Draw, n: int, target: int) -> None:
    for seed in range(200):
        row = draw(n, target, np.random.default_rng(seed))
        assert row.shape == (n,)
        assert row.dtype == np.int64
        assert (np.diff(row) >= 1).all()
        assert 0 <= row[0] <= row[-1] <= target - 1


@pytest.mark.parametrize("draw", [DRAWS[name] for name in DRAWN], ids=DRAWN)
def test_together_the_draws_reach_every_position_of_the_long_context(draw: Draw) -> None:
    rows = [draw(24, 96, np.random.default_rng(seed)) for seed in range(3000)]
    assert {round(p) for row in rows for p in row.tolist()} == set(range(96))


@pytest.mark.parametrize("positions", DRAWS)
def test_a_batch_holds_the_draws_of_every_length_of_the_curriculum(positions: str) -> None:
    rows, lengths = examples(3), (20, 32, 64)
    made = collator(positions, curriculum=lengths, target_length=None, seed=2)
    assert made.target_length == 64
    batch = made(rows)
    assert batch["position_ids"].shape[:2] == (3, 3)
    for stage, length in enumerate(lengths):
        alone = collator(positions, target_length=length, seed=2)(rows)
        assert torch.equal(batch["position_ids"][:, stage], alone["position_ids"])
        assert torch.equal(batch["attention_mask"], alone["attention_mask"])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (8, [16, 16, 32, 32, 48, 48, 64, 64]),
        (10, [16, 16, 16, 32, 32, 48, 48, 48, 64, 64]),
        (4, [16, 32, 48, 64]),
        (1, [16]),
    ],
)
def test_steps_share_the_lengths_of_a_curriculum_equally(steps: int, expected: list[int]) -> None:
    rows = examples(40)
    made = PositionCollator("random", curriculum=[16, 32, 48, 64])
    batch = made(rows)
    at = [made.at_step(batch, step, steps)["position_ids"] for step in range(steps)]
    assert [int(rows.max()) + 1 for rows in at] == expected  # of 40 rows, some reach the end
    assert made.at_step(batch, steps, steps)["position_ids"].dim() == 2  # behind the last step
    plain = collator("random")(rows)
    assert collator("random").at_step(plain, 0, steps) == plain
    for others in ({}, plain, collator("random", curriculum=[32, 64])(rows)):
        assert made.at_step(others, 0, steps) == others  # not of this collator


def test_positions_are_chosen_by_the_callback_and_its_copies_have_no_model() -> None:
    model, made = zoo.build("llama"), PositionCollator("random", curriculum=[16, 64])
    seen: list[int] = []
    made.on_train_begin(None, TrainerState(), None, model=model)
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    batch = pickle.loads(pickle.dumps(made))(small(2))
    for step in (1, 2):
        state: Any = TrainerState(global_step=step, max_steps=4)
        made.on_step_begin(None, state, None)
        model(**batch)
    assert seen[0] == 15
    assert 15 < seen[1] < 64
    text = torch.arange(3)[None].expand(2, -1)  # as scoring passes them
    model(input_ids=text, position_ids=text)
    made.on_train_end()
    with pytest.raises(RuntimeError):
        model(**batch)


def drawn(made: PositionCollator, rows: Iterable[dict[str, Any]]) -> list[list[int]]:
    found: list[list[int]] = made(list(rows))["position_ids"].tolist()
    return found


@pytest.mark.parametrize("positions", DRAWN)
def test_epochs_and_seeds_differ_and_come_again(positions: str) -> None:
    rows, made = examples(4), collator(positions)
    first = drawn(made, rows)
    made.set_epoch(1)
    assert all(a != b for a, b in zip(first, drawn(made, rows), strict=True))
    made.set_epoch(0)
    assert drawn(made, rows) == first
    assert drawn(collator(positions, seed=1), rows) != first
    assert len(set(map(tuple, first))) == 4  # examples differ too


def test_draws_are_those_of_every_version() -> None:
    """Seed, epoch and tokens give the generator, so that a run resumes with the positions that it began with."""
    tokens: Any = np.array([5, 1, 7, 3], dtype=np.int32)
    digest = hashlib.blake2b(b"3 2 " + struct.pack("<4q", 5, 1, 7, 3), digest_size=16).digest()
    expected = np.random.default_rng(int.from_bytes(digest, "little")).integers(1 << 40, size=5)
    assert generator(3, 2, tokens).integers(1 << 40, size=5).tolist() == expected.tolist()


@pytest.mark.parametrize("context", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_live_on_learn_of_the_epoch(context: str | None) -> None:
    rows: Any = examples(8)
    made, workers = collator("pose"), 2 if context else 0
    options: Any = {"num_workers": workers, "persistent_workers": bool(context)}
    options |= {"batch_size": 2, "multiprocessing_context": context}
    loader: Any = DataLoader(rows, collate_fn=made, **options)
    for epoch in range(2):
        made.set_epoch(epoch)
        seen = [row for batch in loader for row in batch["position_ids"].tolist()]
        alone = collator("pose")
        alone.set_epoch(epoch)
        assert seen == drawn(alone, rows)


def test_the_trainer_tells_the_epoch() -> None:
    made = collator("pose")
    state: Any = TrainerState()
    for state.epoch, epoch in ((None, 0), (0.0, 0), (0.97, 0), (1.0, 1), (2.5, 2)):
        made.on_epoch_begin(None, state, None)
        assert made.epoch == epoch
