"""The findings of a self-test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.attention.checks.comparison import Comparison
from hf_posenc.attention.checks.samples import Case

FAST = 3.0
"""A phase of a method is fast if it takes at most so many times as long as plain attention."""
PHASES = ("prefill", "step", "training")


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
        phases: Its timings, by phase.
        errors: By phase, the error that its computation raised.
    """

    kind: str
    phases: Mapping[str, Timing]
    errors: Mapping[str, str]


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
        errors = any(findings.errors for findings in self.methods.values())
        return not self.refused and probes and not errors

    @property
    def verdicts(self) -> dict[str, dict[str, list[str]]]:
        """By phase, the methods that are fast, those that are right but slow, and those that raise an error."""
        found: dict[str, dict[str, list[str]]] = {}
        for phase in PHASES:
            of_phase = found[phase] = {"fast": [], "slow": [], "not possible": []}
            for name, findings in self.methods.items():
                if phase in findings.errors:
                    of_phase["not possible"].append(name)
                elif phase in findings.phases:
                    fast = findings.phases[phase].ratio <= FAST
                    of_phase["fast" if fast else "slow"].append(name)
        return found

    @property
    def summary(self) -> str:
        """Return a line for each phase, and one for the backends that failed, for which the next ones compute."""
        lines = []
        for phase, answers in self.verdicts.items():
            parts = [f"{title}: {', '.join(names)}" for title, names in answers.items() if names]
            lines.append(f"{self.device}, {phase}: {'; '.join(parts) or 'no method was timed'}")
        broken: dict[str, dict[str, None]] = {}
        for case in self.refused:
            what = f"{case.kind} in training" if case.gradients else case.kind
            broken.setdefault(case.backend, {})[what] = None
        failed = [f"{name} ({', '.join(kinds)})" for name, kinds in broken.items()]
        lines.append(f"Not used, since its check failed: {'; '.join(failed) or 'none'}.")
        if left := len(self.not_reached):
            lines[-1] += (
                f" {left:,} cases had no time, first {self.not_reached[0]}: give more --seconds."
            )
        return "\n".join(lines)

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
