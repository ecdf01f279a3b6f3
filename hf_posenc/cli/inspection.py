"""`hf-posenc inspect` and `recommend`: the rotary tables of a checkpoint, and the methods for a length."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from hf_posenc.cli.console import out
from hf_posenc.errors import unknown
from hf_posenc.methods import RotaryBands


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
    from hf_posenc.cli.loading import embedded_model, live_model, parse_patch
    from hf_posenc.evaluation.grid import Grid, to_rich
    from hf_posenc.patch.patching import get_patch, inspect_rope, patch_model

    name = model or embedded_model()
    candidate = None if patch is None else parse_patch(patch)
    live = live_model(name, whole=candidate is not None and candidate.changes_attention)
    if candidate is not None:
        method, options = candidate.arguments()
        patch_model(live, method, **options)
    console = out()
    console.print(f"[bold]{name}[/bold]: {type(live).__name__}")
    in_force = get_patch(live)
    if in_force is not None:
        console.print("\n".join(str(in_force).splitlines()[:2]), markup=False)
    for table in inspect_rope(live):
        layers, factor = table.layer_type or "all layers", table.attention_factor
        cos_sin = f", cos and sin x {factor:.6g}" if factor != 1 else ""
        theta = "" if table.theta is None else f", rope_theta {table.theta:g}"
        console.print(
            f"\n{layers}: {table.rope_type}{theta}, {table.dim} rotary dimensions{cos_sin}"
        )
        console.print(f"in {', '.join(table.modules)}", style="dim")
        grid = Grid()
        for head in ("pair", "inv_freq (rad/token)", "wavelength (tokens)"):
            grid.column(head, numeric=True)
        for pair, frequency in enumerate(table.inv_freq.tolist()):
            wavelength = f"{2 * math.pi / frequency:,.1f}" if frequency else "no rotation"
            grid.row(str(pair), f"{frequency:.6g}", wavelength)
        console.print(to_rich(grid))
    if in_force is not None:
        for built in in_force.config.build():
            if isinstance(built, RotaryBands):
                _print_distances(built, in_force.original_max_position_embeddings)


def _print_distances(method: RotaryBands, original: int) -> None:
    """Print the rotary distances between the last query of a text of 8 times the original length and its keys."""
    import torch

    from hf_posenc.evaluation.grid import Grid, to_rich

    last = 8 * original - 1
    query = torch.tensor(last)
    bands = method.bands(original)
    limits = (limit for band in bands if band.chunk is None for limit in (band.least, band.below))
    edges = {limit for limit in limits if limit}
    distances = {0, 1, *(edge + step for edge in edges for step in (-1, 0)), last}
    distances |= {original * factor for factor in (1, 2, 4)} | {original // 2}
    grid = Grid()
    for head in ("tokens back", "rotary distance"):
        grid.column(head, numeric=True)
    for distance in sorted(d for d in distances if d <= last):
        key = query - distance
        band = next((band for band in bands if bool(band.contains(query, key))), None)
        rotary = "not read"
        if band is not None:
            rotary = f"{float(band.query_position(query) - band.key_position(key)):,.6g}"
        grid.row(f"{distance:,}", rotary)
    out().print(f"\n{method.name}: the query at position {last:,} sees its keys")
    out().print(to_rich(grid))


DTYPES = ("bfloat16", "float16", "float32")


def recommend(
    target_length: Annotated[
        str, typer.Option(metavar="N", help="The length to reach, in tokens, e.g. 32768 or 32k.")
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A folder or a hub name. Default: the embedded model."
        ),
    ] = None,
    original: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="The length that the model was trained at, where its config names another.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Number format of the cache: bfloat16, float16, float32."
        ),
    ] = "bfloat16",
    weights: Annotated[
        bool,
        typer.Option("--weights", help="Load the weights, and try every method on the model too."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rank the methods for a length, with reasons: from the config alone, nothing is measured."""
    import torch

    from hf_posenc.cli.loading import embedded_model, live_model
    from hf_posenc.evaluation.grid import to_rich
    from hf_posenc.evaluation.options import parse_target
    from hf_posenc.evaluation.recommend import advice as report
    from hf_posenc.evaluation.recommend import recommend as advise
    from hf_posenc.files import to_json

    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    length = parse_target(target_length)
    live = live_model(model or embedded_model(), whole=weights)
    advice = advise(
        live,
        length,
        name=model or "",
        original=original,
        dtype=getattr(torch, dtype),
    )
    if json:
        typer.echo(to_json(advice.to_dict()), nl=False)
        return
    console = out()
    console.print(f"[bold]{model or 'the embedded model'}[/bold]: {advice.model_class}")
    for heading, text in report.facts(advice):
        console.print(f"{heading}: {text}", markup=False)
    if advice.options:
        console.print(to_rich(report.table(advice)))
        for line in report.notes(advice):
            console.print(line, markup=False)
    console.print()
    for line in report.next_steps(advice):
        console.print(line, markup=False, soft_wrap=True)
