"""`hf-posenc inspect`: what a checkpoint really rotates by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posenc.cli.console import out
from hf_posenc.errors import PosencError


def inspect_model(
    model: Annotated[
        str | None, typer.Argument(help="A folder or a hub name. Default: the embedded model.")
    ] = None,
    patch: Annotated[
        str | None, typer.Option(help="Show it with this patch, e.g. yarn:scale=8.")
    ] = None,
) -> None:
    """Print the rotary frequency table in force, per layer type, read back from the live model."""
    from rich import box
    from rich.table import Table

    from hf_posenc.cli.loading import embedded_model
    from hf_posenc.patching import get_patch, inspect_rope, patch_model

    name = model or embedded_model()
    live = _live(name)
    if patch is not None:
        from hf_posenc.config import parse_method

        method, options = parse_method(patch)
        patch_model(live, method, **options)
    console = out()
    console.print(f"[bold]{name}[/bold]: {type(live).__name__}")
    in_force = get_patch(live)
    if in_force is not None:
        console.print(str(in_force).splitlines()[0])
    for entry in inspect_rope(live):
        layers = entry.layer_type or "all layers"
        factor = (
            f", cos and sin x {entry.attention_factor:.6g}" if entry.attention_factor != 1 else ""
        )
        theta = "" if entry.theta is None else f", rope_theta {entry.theta:g}"
        console.print(
            f"\n{layers}: {entry.rope_type}{theta}, {entry.dim} rotary dimensions{factor}"
        )
        console.print(f"in {', '.join(entry.modules)}", style="dim")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("pair", "inv_freq (rad/token)", "wavelength (tokens)"):
            table.add_column(column, justify="right")
        for pair, frequency in enumerate(entry.inv_freq.tolist()):
            wavelength = f"{2 * math.pi / frequency:,.1f}" if frequency else "no rotation"
            table.add_row(str(pair), f"{frequency:.6g}", wavelength)
        console.print(table)


def register(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command("inspect")(inspect_model)


def _live(name: str) -> Any:
    """The model on the meta device: its rotary tables are real, its weights are never read."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from hf_posenc.cli.console import quiet_transformers
    from hf_posenc.cli.loading import check_name, load_model
    from hf_posenc.evaluation.documents import one_line
    from hf_posenc.export import BLOCK
    from hf_posenc.saving import FILE

    quiet_transformers()
    name = check_name(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # no such name, no config.json, an unknown model type
        raise PosencError(f"The config of {name} cannot be loaded: {one_line(error)}") from error
    if hasattr(config, BLOCK) or (Path(name) / FILE).is_file():
        return load_model(name, device_map="meta")  # saved with a patch
    auto: Any = (
        AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel
    )
    try:
        with torch.device("meta"):
            return auto.from_config(config)
    except Exception as error:
        raise PosencError(f"The model of {name} cannot be built: {one_line(error)}") from error
