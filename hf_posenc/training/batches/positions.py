"""Positions that reach a long context from short examples, drawn anew for every example and epoch.

Each draw takes the number of tokens n, the target length L and a random generator, and returns n rising positions
within 0 .. L - 1, shape (n,).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Draw = Callable[[int, int, np.random.Generator], Numbers]

CREAM_SIGMA = 3.0
"""Standard deviation of CREAM's Gaussian, in halves of the trained length (the default of the authors' code)."""


def generator(seed: int, epoch: int, ids: Numbers) -> np.random.Generator:
    """Return the random generator of one example in one epoch.

    Args:
        seed: The seed of the run.
        epoch: The epoch, counted from 0.
        ids: The example's tokens, shape (n,). They identify the example, wherever it is in the dataset.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{seed} {epoch} ".encode())
    digest.update(np.ascontiguousarray(ids, dtype="<i8").data)
    return np.random.default_rng(int.from_bytes(digest.digest(), "little"))


def pose(length: int, target: int, random: np.random.Generator) -> Numbers:
    """PoSE (Zhu et al. 2023, arXiv 2309.10400, section 3.2) with two chunks and continuous text (`v_i = 0`).

    The first chunk has 1 .. ceil(n / 2) tokens and keeps its positions. The second chunk is moved by a skip of
    0 .. L - n. Both draws are uniform, as in the authors' code, whose first chunk always begins at 0.
    """
    first = int(random.integers(1, (length + 1) // 2, endpoint=True))
    skip = int(random.integers(0, target - length, endpoint=True))
    positions = np.arange(length, dtype=np.int64)
    positions[first:] += skip
    return positions


def randomized(length: int, target: int, random: np.random.Generator) -> Numbers:
    """Randomized positions (Ruoss et al. 2023, arXiv 2305.16843, section 3): n of L without repetition, in order."""
    chosen = random.choice(target, size=length, replace=False, shuffle=False)
    return np.sort(chosen).astype(np.int64)


def cream(length: int, target: int, random: np.random.Generator) -> Numbers:
    """CREAM (Wu et al. 2024, arXiv 2406.07138): a head at 0, a tail that ends at L, a middle in between.

    As in the authors' code, head and tail have k tokens each: k = n / 3 or k = 4 L / n with even odds (the paper's
    relativity and continuity). x is drawn from a Gaussian of mean 1 + L / n, clipped to [2, 2 L / n], and rounded down
    to alpha. The last position of the middle's m = n - 2k tokens is uniform from k + (m - 1) alpha / 2 to
    n alpha / 2 - k - 1. The clipped mass of the Gaussian lies on the two ends, as in the interpolation of the authors'
    code. Without it, alpha = 2 L / n would never be drawn and the positions in front of the tail would never be used.

    Differences: k is drawn for every example, not once for 3,000; L / n need not be whole; k is at most n / 3, so that
    short examples have a middle; the text is continuous, as in `pose`.
    """
    scale, third = target / length, length // 3
    edge = third if random.random() < 0.5 else min(int(4 * scale), third)
    middle = length - 2 * edge
    x = min(max(random.normal(1 + scale, CREAM_SIGMA), 2.0), 2 * scale)
    alpha = math.floor(x)
    least = int(edge + (middle - 1) * alpha / 2)
    most = int(length * alpha / 2) - edge - 1
    last = int(random.integers(least, most, endpoint=True))
    head, tail = np.arange(edge), np.arange(target - edge, target)
    between = np.arange(last - middle + 1, last + 1)
    return np.concatenate([head, between, tail]).astype(np.int64)


DRAWS: dict[str, Draw] = {"pose": pose, "random": randomized, "cream": cream}
"""The draws, by the collator's name for them."""
