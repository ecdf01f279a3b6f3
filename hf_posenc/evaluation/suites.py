"""Suites of the benchmark: how much of what is measured."""

from __future__ import annotations

from dataclasses import dataclass

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.options import PERPLEXITY_METHODS, RETRIEVAL_METHODS
from hf_posenc.evaluation.retrieval.tasks import TASKS


@dataclass(frozen=True)
class Suite:
    """Extent of a benchmark."""

    methods: tuple[str, ...]  # values of `--patch`; the first is the baseline
    documents: int  # usable ones after which reading stops
    reach: int  # the longest length, as a multiple of the trained one
    lengths: int | None  # number of lengths up to there, both ends included; `None`: every doubling
    tasks: tuple[str, ...]
    samples: int = 2  # at every length and depth
    rounds: int = 3  # number of times that the prefill of every method is timed
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)


# In every suite the second method is the control: the model as loaded, which reads the end of the text alone.
SUITES = {
    # a smoke test; seconds on a CPU
    "smoke": Suite(
        methods=("none", "truncation", "yarn", "rerope"),
        documents=4,
        reach=2,
        lengths=2,
        tasks=("passkey",),
        depths=(0.0, 0.5, 1.0),
        samples=1,
    ),
    # a first table; minutes on one GPU
    "quick": Suite(
        methods=RETRIEVAL_METHODS,
        documents=10,
        reach=4,
        lengths=3,
        tasks=("passkey", "niah_single_1"),
    ),
    # an entry of docs/evidence.md, with its texts; minutes on a GPU, a night on a CPU
    "evidence": Suite(
        methods=(
            *("none", "truncation", "attention_sinks", "yarn", "dynamic_yarn"),
            *("self_extend", "rerope", "dual_chunk"),
        ),
        documents=24,
        reach=4,
        lengths=3,
        tasks=("passkey", "niah_multikey_2", "vt"),
    ),
    # a table to publish; hours, on several processes if possible
    "full": Suite(
        methods=PERPLEXITY_METHODS,
        documents=20,
        reach=16,
        lengths=None,
        tasks=tuple(TASKS),
        samples=4,
        rounds=5,
    ),
}


GPU = "gpu"
"""The suite that measures a device: `device.run`."""


def get_suite(name: str) -> Suite:
    """Return the suite of this name; refuse an unknown one."""
    if name == GPU:
        raise PosencError(
            "The suite gpu takes no model and no documents: use device.run.GpuRun(options).run()."
        )
    if name not in SUITES:
        raise unknown("suite", name, (*SUITES, GPU))
    return SUITES[name]
