"""`hf-posenc recommend`: which method for which length."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_posenc.cli.console import out
from hf_posenc.cli.options import ModelArgument
from hf_posenc.errors import unknown

DTYPES = ("bfloat16", "float16", "float32")


def recommend(
    target_length: Annotated[
        str, typer.Option(metavar="N", help="The length to reach, in tokens, e.g. 32768 or 32k.")
    ],
    model: ModelArgument = None,
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
    from hf_posenc.evaluation.files import to_json
    from hf_posenc.evaluation.protocols import parse_length
    from hf_posenc.evaluation.recommend import recommend as advise
    from hf_posenc.evaluation.recommend import report

    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    length = parse_length(target_length, "--target-length")
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
        console.print(report.table(advice))
        for line in report.notes(advice):
            console.print(line, markup=False)
    console.print()
    for line in report.way_on(advice):
        console.print(line, markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command("recommend")(recommend)
