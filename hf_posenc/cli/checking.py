"""The command that checks and times the attention engine on a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posenc.cli.console import in_words, out, print_json, print_note
from hf_posenc.cli.early import check_device
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.options import SelftestOptions
from hf_posenc.files import to_json, write_atomically

if TYPE_CHECKING:
    from hf_posenc.evaluation.device.result import GpuResult


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


def _print(result: GpuResult) -> None:
    from hf_posenc.evaluation.grid import to_rich

    console = out()
    for name, value in result.environment.items():
        console.print(f"{name}: {value or 'none'}", markup=False)
    for grid in result.tables():
        console.print(to_rich(grid))
    for line in result.notes():
        console.print(line, markup=False)
    if result.device == "cpu":
        console.print("Host waits, graphs and memory are not measured on a CPU.")
    for line in result.problems():
        console.print(f"failed: {line}", markup=False, style="red", soft_wrap=True)
    console.print(f"{result.seconds:.0f} s", markup=False)
    console.print(result.summary, markup=False, soft_wrap=True)
