"""Rates by which `--dry-run` turns operations into seconds, without running anything."""

from __future__ import annotations

import torch

from hf_posenc.evaluation.flags import duration

PER_THREAD = 6.0e10
"""Operations per second of one thread in float32: 2,048 tokens, unpatched (docs/data/benchmarks/model.json, EPYC)."""
SHARE = 0.4
"""Share of a GPU's peak that a forward is taken to reach: a guess, not a measurement."""
PEAKS = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "4090": 1.65e14,
}
"""The makers' dense peaks in bfloat16, operations per second, by a part of the device's name."""


def rate_of(device: torch.device) -> tuple[float | None, str]:
    """Return the operations per second of a device, and where the number comes from; `None` if nothing is known."""
    if device.type == "cpu":
        count = torch.get_num_threads()
        return PER_THREAD * count, (
            f"at the rate measured for one thread of an AMD EPYC, times {count}: a guess for another CPU"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    if peak is None:
        return None, f"no rate of {name} is known"
    return SHARE * peak, f"a guess: {SHARE:.0%} of the bfloat16 peak of {name}"


def estimated(flops: float, device: torch.device) -> tuple[float | None, str]:
    """Return the seconds that so many operations take on a device, and a sentence with the source of the number."""
    rate, source = rate_of(device)
    if rate is None:
        return None, f"The time is unknown: {source}."
    return flops / rate, f"All of it takes about {duration(flops / rate)}, {source}."
