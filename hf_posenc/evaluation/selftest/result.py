"""The findings of a self-test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.attention.checks.comparison import Comparison
from hf_posenc.attention.checks.samples import Case

FAST = 3.0
"""A method is fast if its prefill and its step take at most so many times as long as plain attention."""


@dataclass(frozen=True)
class Timing:
    """One phase of one method, beside plain attention of the same shape.

    Attributes:
        backend: The backend that computed it.
        seconds: Least time of a call.
        ratio: That time divided by plain attention's.
        waits: Times that the host waited for the device; `None`: not measured.
        captured: True if a CUDA graph can be captured of it and replayed; `None`: not measured.
        peak_bytes: Memory beyond the inputs; `None`: not measured.
    """

    backend: str
    seconds: float
    ratio: float
    waits: int | None = None
    captured: bool | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class MethodFindings:
    """The times of a method.

    Attributes:
        kind: Its kind of computation, of which the checks speak.
        phases: Its timings, by `"prefill"` and `"step"`.
        error: The error that its computation raised; `None`: none.
    """

    kind: str
    phases: Mapping[str, Timing]
    error: str | None = None


@dataclass(frozen=True)
class SelftestResult:
    """The findings of a self-test on one device.

    Attributes:
        device: The device.
        environment: Versions, driver and names, as verdicts are kept by.
        checks: By case, what the comparison with float64 found.
        not_reached: Cases for which there was no time.
        probes: By operator, the claims of its contract and whether it keeps them, or the error that it raised.
        plain: Dtype, head dimension, heads, length, and plain attention's seconds and PyTorch backend by phase.
        methods: By name, the times.
        seconds: Duration of all of it.
    """

    device: str
    environment: Mapping[str, str]
    checks: Mapping[Case, Comparison]
    not_reached: Sequence[Case]
    probes: Mapping[str, Mapping[str, bool | str]]
    plain: Mapping[str, Any]
    methods: Mapping[str, MethodFindings]
    seconds: float

    @property
    def refused(self) -> dict[Case, str]:
        """The cases that failed, with the reason."""
        return {case: found.reason for case, found in self.checks.items() if found.reason}

    @property
    def passed(self) -> bool:
        """True if no backend failed a check, no probe failed and every method was computed."""
        probes = all(kept is True for claims in self.probes.values() for kept in claims.values())
        errors = any(findings.error for findings in self.methods.values())
        return not self.refused and probes and not errors

    @property
    def verdicts(self) -> dict[str, list[str]]:
        """The methods that are fast, slow (correct, but slow), and refused, with the backends that failed."""
        found: dict[str, list[str]] = {"fast": [], "slow": [], "refused": []}
        for name, findings in self.methods.items():
            broken = {case.backend for case in self.refused if case.kind == findings.kind}
            if findings.error:
                broken.add("error")
            if broken:
                found["refused"].append(f"{name} ({', '.join(sorted(broken))})")
            else:
                fast = all(phase.ratio <= FAST for phase in findings.phases.values())
                found["fast" if fast else "slow"].append(name)
        return found

    @property
    def summary(self) -> str:
        """One line: the methods that are fast, correct but slow, or refused on this device, and what is unchecked."""
        titles = {"fast": "fast", "slow": "correct but slow", "refused": "refused"}
        parts = [
            f"{titles[key]}: {', '.join(names) or 'none'}" for key, names in self.verdicts.items()
        ]
        left = len(self.not_reached)
        more = (
            f" {left:,} cases had no time, first {self.not_reached[0]}: give more --seconds."
            if left
            else ""
        )
        return f"{self.device}: {'; '.join(parts)}.{more}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        return {
            "device": self.device,
            "environment": dict(self.environment),
            "passed": self.passed,
            "summary": self.summary,
            "checks": [
                {**dataclasses.asdict(case), **dataclasses.asdict(found)}
                for case, found in self.checks.items()
            ],
            "not_reached": [dataclasses.asdict(case) for case in self.not_reached],
            "probes": {name: dict(claims) for name, claims in self.probes.items()},
            "plain": dict(self.plain),
            "methods": {name: dataclasses.asdict(found) for name, found in self.methods.items()},
            "seconds": self.seconds,
        }
