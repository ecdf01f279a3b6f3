"""`hf-posenc export`: a saved model for another engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli.console import err, out, print_error, quiet_transformers
from hf_posenc.cli.loading import check_name, parse_patch
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.options import OUTPUT

if TYPE_CHECKING:
    from hf_posenc.engines import Export, GGUFCheck


def export(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="A saved model, patched or not, or an adapter.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="ENGINE",
            help="transformers4, transformers5, vllm, sglang or llama.cpp.",
        ),
    ],
    patch: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD", help="Patch a model that is not patched, e.g. yarn:scale=8."
        ),
    ] = None,
    methods: Annotated[
        bool, typer.Option("--methods", help="Which methods the engine can have; write nothing.")
    ] = False,
    gguf: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --to llama.cpp: check the file that convert_hf_to_gguf made, and write one that is right into "
            "--output where it is not.",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="What to do with the other files: link, copy or none.",
            rich_help_panel=OUTPUT,
        ),
    ] = "link",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the export. Default: DIR-ENGINE, here.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Load the export in a clean process without hf_posenc and compare logits (transformers only).",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    packages: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --verify: packages that come first there, as pip install --target DIR transformers==4.57.1 made "
            "them.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Write the config or the flags with which another engine computes what a saved model computes.

    And say how far its rotary table is from the model's, by the engine's own published formula. Exit status 1 where
    the engine cannot have the method.
    """
    from hf_posenc import engines

    quiet_transformers()
    name = check_name(model)
    if methods:
        _print_methods(name, to)
        return
    if gguf is not None:
        _check_file(gguf, name, to, patch, output)
        return
    method, options = _patch(patch)
    exported = engines.export(name, to, method=method, **options)
    _show(exported)
    if not exported.possible:
        print_error(f"{to} cannot have {name}: {exported.reason}. See --methods")
        raise typer.Exit(1)
    folder = output or Path(f"{Path(name).resolve().name}-{to}")
    written = engines.write_export(exported, folder, weights=weights)
    out().print(f"Wrote {', '.join(path.name for path in written)} to {folder}", markup=False)
    if verify:
        _verify(exported, folder, packages, patch)


def _patch(patch: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the method and the options of `--patch`."""
    return (None, {}) if patch is None else parse_patch(patch).arguments()


def _show(exported: Export) -> None:
    """Print the form of the export, and the remaining difference."""
    console = out()
    console.print(f"[bold]{exported.engine}[/bold] {exported.version}: {exported.path}")
    if not exported.possible:
        return
    console.print(f"told as {exported.form}", markup=False)
    for error in exported.errors:
        layers = f"{error.layers}, " if error.layers else ""
        console.print(
            f"  {layers}{error.length:,} tokens: frequencies within {error.frequency:.1e} of the model's, factor "
            f"within {error.factor:.1e}, angle of the last token within {error.phase:.1e} rad",
            markup=False,
        )
    for flag, value in zip(exported.flags[::2], exported.flags[1::2], strict=True):
        console.print(f"flag: {flag} {value}", markup=False, soft_wrap=True)
    if exported.overrides:
        option, value = exported.overrides
        console.print(
            f"or, on the original folder: {option} '{value}'", markup=False, soft_wrap=True
        )
    for note in exported.notes:
        console.print(note, style="dim", markup=False)


def _print_methods(name: str, engine: str) -> None:
    from hf_posenc.engines import survey
    from hf_posenc.evaluation.grid import Grid, to_rich

    grid = Grid()
    for head in ("method", "told as", "why not"):
        grid.column(head)
    with err().status("Trying every method"):
        rows = survey(name, engine)
    for row in rows:
        grid.row(row.method, row.form or "-", row.reason)
    out().print(to_rich(grid))


def _check_file(file: Path, name: str, engine: str, patch: str | None, output: Path | None) -> None:
    """Print the difference between llama.cpp's reading of a file and the model; if there is one, write a right file."""
    from hf_posenc import engines

    if engine != "llama.cpp":
        raise PosencError(f"--gguf goes with --to llama.cpp, not with --to {engine}.")
    method, options = _patch(patch)
    result = engines.export(name, engine, method=method, **options)
    flags = result.flags if result.divisors is None else ()
    check = engines.check_gguf(file, name, flags=flags, method=method, **options)
    console = out()
    console.print(_file_line(check), markup=False)
    if check.right:
        with_flags = f", with {' '.join(flags)}" if len(flags) > 2 else ""
        console.print(f"It is right as it is{with_flags}.", markup=False)
        return
    folder = output or Path()
    folder.mkdir(parents=True, exist_ok=True)
    target = engines.write_gguf(check, folder / f"{file.stem}-posenc.gguf")
    console.print(f"Wrote {target}", markup=False)
    console.print(
        _file_line(engines.check_gguf(target, name, method=method, **options)), markup=False
    )


def _file_line(check: GGUFCheck) -> str:
    return (
        f"{check.path} ({check.architecture}): llama.cpp computes frequencies within {check.error.frequency:.1e} of "
        f"the model's, factor within {check.error.factor:.1e}"
    )


def _verify(exported: Export, folder: Path, packages: Path | None, patch: str | None) -> None:
    from hf_posenc.engines.exporting import merged_dtype
    from hf_posenc.patch.patching import patch_model
    from hf_posenc.saving import from_pretrained
    from hf_posenc.verification import require, verify_export

    if not exported.engine.startswith("transformers"):
        raise PosencError(
            f"--verify loads in transformers; {exported.engine} cannot be tried here."
        )
    import torch

    if exported.is_adapter:  # merged in the precision of what was written
        dtype = merged_dtype(exported.path)
        model = from_pretrained(exported.path, dtype=dtype).merge_and_unload().float()
    else:
        model = from_pretrained(exported.path, dtype=torch.float32)
    method, options = _patch(patch)
    if method is not None:
        patch_model(model, method, **options)
    result = verify_export(folder, model, packages=packages)
    require(result)
    out().print(str(result), markup=False)
