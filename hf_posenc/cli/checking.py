"""The command that checks and times the attention engine on a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posenc.cli.console import in_words, out, print_json, print_note
from hf_posenc.cli.early import check_device
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.options import SelftestOptions
from hf_posenc.files import to_json, write_atomically

if TYPE_CHECKING:
    from hf_posenc.evaluation.grid import Grid
    from hf_posenc.evaluation.selftest.result import SelftestResult, Timing


def selftest(
    options: SelftestOptions,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Write all findings there as JSON.")
    ] = None,
) -> None:
    """Check every attention backend on a device against float64, and time every method beside plain attention.

    The last lines say which methods are fast in a prefill, in a step and in training, which are right but slow, and
    which backends failed their check. The exit status is 1 if one did.
    `--json FILE` is what a bug report needs.
    """
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise PosencError(f"{file} cannot be written: give a file in a folder that exists.")
    check_device(options.device)
    from hf_posenc.evaluation.selftest import selftest as run

    result = run(options)
    values = result.to_dict()
    if file is not None:
        write_atomically(file, to_json(values))
        with in_words():
            _print(result)
            print_note(f"Wrote {file}.")
    elif not print_json(values):
        _print(result)
    if not result.passed:
        raise typer.Exit(1)


def _print(result: SelftestResult) -> None:
    from hf_posenc.evaluation.grid import to_rich

    console = out()
    for name, value in result.environment.items():
        console.print(f"{name}: {value or 'none'}", markup=False)
    for grid in (*_checks(result), *_times(result)):
        console.print(to_rich(grid))
    if result.device == "cpu":
        console.print("Host waits, graphs and memory are not measured on a CPU.")
    for name, claims in result.probes.items():
        broken = [f"{claim} ({kept})" for claim, kept in claims.items() if kept is not True]
        kept = f"keeps its contract, {len(claims)} claims" if not broken else "; ".join(broken)
        console.print(f"{name}: {kept}", markup=False)
    for case, reason in result.refused.items():
        console.print(f"failed: {case}: {reason}", markup=False, style="red", soft_wrap=True)
    for name, findings in result.methods.items():
        for phase, error in findings.errors.items():
            console.print(f"failed: {name}, {phase}: {error}", markup=False, style="red")
    console.print(f"{result.seconds:.0f} s", markup=False)
    console.print(result.summary, markup=False, soft_wrap=True)


def _checks(result: SelftestResult) -> Iterator[Grid]:
    """Yield a table for each dtype: the largest error of a backend and a kind, by head dimension."""
    from hf_posenc.evaluation.grid import Field, Grid

    for dtype in dict.fromkeys(case.dtype for case in result.checks):
        checks = {case: found for case, found in result.checks.items() if case.dtype == dtype}
        sizes = dict.fromkeys(case.head_dim for case in checks)
        columns = [*itertools.product(sizes, (False, True))]
        bound = max(found.bound for found in checks.values())
        grid = Grid.of(f"{dtype}: largest error relative to float64, of {bound:.1e} accepted", "")
        for head_dim, gradients in columns:
            grid.column(f"{head_dim}\n{'backward' if gradients else 'forward'}", numeric=True)
        rows = dict.fromkeys((case.backend, case.kind) for case in checks)
        for backend, kind in rows:
            fields = []
            for head_dim, gradients in columns:
                found = [
                    checks[case]
                    for case in checks
                    if (case.backend, case.kind) == (backend, kind)
                    and (case.head_dim, case.gradients) == (head_dim, gradients)
                ]
                if not found:
                    fields.append(Field("-", "none"))
                elif found[0].reason:
                    fields.append(Field("failed", "failed"))
                else:
                    fields.append(Field(f"{max(found[0].errors.values()):.1e}"))
            grid.row(f"{backend}: {kind}", *fields)
        yield grid


def _times(result: SelftestResult) -> Iterator[Grid]:
    """Yield a table for each phase: the times of all methods."""
    from hf_posenc.evaluation.grid import Grid
    from hf_posenc.evaluation.selftest.result import PHASES

    plain = result.plain
    for phase in PHASES:
        own = plain[phase]
        grid = Grid.of(
            f"{phase} at {plain['length']:,} tokens, {plain['dtype']}, {plain['heads']} heads of {plain['head_dim']}; "
            f"plain attention by {own['backend']}: {own['seconds'] * 1e3:.3g} ms",
            *("", "backend"),
        )
        for head in ("ms", "times\nplain", "host\nwaits", "graph", "MiB"):
            grid.column(head, numeric=True)
        for name, findings in result.methods.items():
            if phase in findings.phases:
                grid.row(name, *_fields(findings.phases[phase]))
        yield grid


def _fields(timing: Timing) -> tuple[str, ...]:
    graph = {None: "-", True: "yes", False: "no"}[timing.captured]
    return (
        timing.backend,
        f"{timing.seconds * 1e3:.3g}",
        f"{timing.ratio:.2f}",
        "-" if timing.waits is None else str(timing.waits),
        graph,
        "-" if timing.peak_bytes is None else f"{timing.peak_bytes / 2**20:,.0f}",
    )
