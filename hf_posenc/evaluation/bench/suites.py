"""The suites: how much a benchmark measures where nothing else is said. All of it is data."""

from __future__ import annotations

from dataclasses import dataclass

from hf_posenc.errors import PosencError, unknown


@dataclass(frozen=True)
class Suite:
    """How much is measured.

    Attributes:
        methods: As `--patch` takes them; the first is the baseline.
        documents: Usable documents after which reading stops.
        reach: The longest length, as a multiple of the trained one.
        lengths: How many lengths up to there, both ends included; `None`: every doubling.
        tasks: Retrieval tasks.
        depths: Depths of the needle.
        samples: Samples at every length and depth.
        rounds: Times that the prefill of every method is timed.
    """

    methods: tuple[str, ...]
    documents: int
    reach: int
    lengths: int | None
    tasks: tuple[str, ...]
    depths: tuple[float, ...]
    samples: int
    rounds: int


# In every suite the second method is the control: plain attention to as many tokens as the model was trained at.
SUITES = {
    # whether everything runs; seconds on a CPU
    "smoke": Suite(
        methods=("none", "sliding_window", "yarn", "rerope"),
        documents=4,
        reach=2,
        lengths=2,
        tasks=("passkey",),
        depths=(0.0, 0.5, 1.0),
        samples=1,
        rounds=3,
    ),
    # a first table; minutes on one GPU
    "quick": Suite(
        methods=("none", "sliding_window", "pi", "ntk", "yarn", "dynamic_yarn", "rerope"),
        documents=10,
        reach=4,
        lengths=3,
        tasks=("passkey", "niah_single_1"),
        depths=(0.0, 0.25, 0.5, 0.75, 1.0),
        samples=2,
        rounds=3,
    ),
    # a table to publish; hours, by several processes if you like
    "full": Suite(
        methods=(
            *("none", "sliding_window", "pi", "ntk", "ntk_mixed", "ntk_by_parts", "llama3"),
            *("yarn", "yarn:scale=16", "dynamic_ntk:scale=2", "dynamic_yarn", "rerope"),
            "self_extend",
        ),
        documents=20,
        reach=16,
        lengths=None,
        tasks=(*("passkey", "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "fwe"),),
        depths=(0.0, 0.25, 0.5, 0.75, 1.0),
        samples=4,
        rounds=5,
    ),
}


def get_suite(name: str) -> Suite:
    """The suite of this name.

    Raises:
        PosencError: There is none.
    """
    if name not in SUITES:
        raise unknown("suite", name, tuple(SUITES))
    return SUITES[name]


def suite_lengths(suite: Suite, original: int | None, target: int | None = None) -> tuple[int, ...]:
    """The lengths of a suite for a model: doublings of the trained length, the target last.

    Args:
        suite: How many of them.
        original: The model's trained length in tokens.
        target: The longest length in tokens, in the place of the suite's multiple of the trained one.

    Raises:
        PosencError: The trained length is not known.
    """
    if original is None:
        raise PosencError("The model's config names no context length: give --lengths.")
    last = original * suite.reach if target is None else target
    doublings = [original]
    while doublings[-1] * 2 < last:
        doublings.append(doublings[-1] * 2)
    every = [length for length in doublings if length < last] + [last]
    count = len(every) if suite.lengths is None else min(suite.lengths, len(every))
    step = (len(every) - 1) / max(1, count - 1)
    return tuple(every[len(every) - 1 - round(index * step)] for index in reversed(range(count)))
