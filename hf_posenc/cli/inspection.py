"""`hf-posenc inspect`: what a checkpoint really rotates by."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posenc.cli.console import out
from hf_posenc.methods import Method, get_method

if TYPE_CHECKING:
    from hf_posenc.evaluation.requests import Request


def inspect_model(
    model: Annotated[
        str | None, typer.Argument(help="A folder or a hub name. Default: the embedded model.")
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option(help="Show it with this patch, e.g. yarn:scale=8 or yarn:scale=4+log_n."),
    ] = None,
) -> None:
    """Print the rotary frequency table in force, per layer type, read back from the live model.

    With a method that computes attention itself, also at which rotary distance each key lies.
    """
    from rich import box
    from rich.table import Table

    from hf_posenc.cli.loading import embedded_model, live_model
    from hf_posenc.patching import get_patch, inspect_rope, patch_model

    name = model or embedded_model()
    request = None if patch is None else _given_scale(patch)
    live = live_model(name, whole=request is not None and request.changes_attention)
    if request is not None:
        method, options = request.arguments()
        patch_model(live, method, **options)
    console = out()
    console.print(f"[bold]{name}[/bold]: {type(live).__name__}")
    in_force = get_patch(live)
    if in_force is not None:
        console.print("\n".join(str(in_force).splitlines()[:2]), markup=False)
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
    if in_force is not None:
        for method in in_force.config.build():
            _print_distances(method, in_force.original_max_position_embeddings)


def register(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command("inspect")(inspect_model)


def _given_scale(patch: str) -> Request:
    """Reads the patch; there is no text here whose length could set an automatic scale."""
    from hf_posenc.evaluation.requests import Request

    request = Request.parse(patch)
    for part in request.parts:
        if part.auto:
            get_method(part.method).from_options(
                **part.options
            )  # a scale that it cannot do without
    return dataclasses.replace(
        request, parts=tuple(dataclasses.replace(part, auto=False) for part in request.parts)
    )


def _print_distances(method: Method, original: int) -> None:
    """At which rotary distance the last query of a text of 8 times the original length sees its keys."""
    import torch
    from rich import box
    from rich.table import Table

    from hf_posenc.methods import RotaryBands

    if not isinstance(method, RotaryBands):
        return
    last = 8 * original - 1
    query = torch.tensor(last)
    bands = method.bands(original)
    limits = (limit for band in bands if band.chunk is None for limit in (band.least, band.below))
    edges = {limit for limit in limits if limit}
    distances = {0, 1, *(edge + step for edge in edges for step in (-1, 0)), last}
    distances |= {original * factor for factor in (1, 2, 4)} | {original // 2}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("tokens back", "rotary distance"):
        table.add_column(column, justify="right")
    for distance in sorted(d for d in distances if d <= last):
        key = query - distance
        band = next((band for band in bands if bool(band.contains(query, key))), None)
        seen = "not read"
        if band is not None:
            seen = f"{float(band.query_position(query) - band.key_position(key)):,.6g}"
        table.add_row(f"{distance:,}", seen)
    out().print(f"\n{method.name}: the query at position {last:,} sees its keys")
    out().print(table)
