"""`hf-posenc methods`, `show`, `models` and `recipes`: what there is."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hf_posenc.cli.console import out, print_warning
from hf_posenc.errors import unknown
from hf_posenc.methods import Method, get_method

if TYPE_CHECKING:
    from hf_posenc.evaluation.measuring.candidates import Candidate


def kinds() -> dict[str, list[type[Method]]]:
    """The methods by what they change, each kind with the sentence that says so."""
    from hf_posenc.methods import METHODS, DistanceBias, RelativeKeys, RopeScaling, RotaryBands

    said: dict[str, tuple[type[Method], ...]] = {
        "Frequencies: the rotary table is changed, attention stays the model's own": (RopeScaling,),
        "Rotary bands: near and far keys are rotated by different positions": (RotaryBands,),
        "Biases: added to the scores; the rotation is dropped unless keep_rope is set": (
            DistanceBias,
            RelativeKeys,
        ),
    }
    found = {title: [m for m in METHODS if issubclass(m, bases)] for title, bases in said.items()}
    rest = [m for m in METHODS if not any(m in group for group in found.values())]
    return {**found, "Others: they change the queries and keys themselves": rest}


def methods() -> None:
    """List the methods by kind: name and aliases, what it does, what it needs, where it comes from."""
    from rich.table import Table

    console = out()
    groups = kinds()
    width = max(len(method.name) for group in groups.values() for method in group)
    for title, group in groups.items():
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=width, no_wrap=True)
        table.add_column(overflow="fold")
        for method in group:
            also = f" Also {', '.join(method.aliases)}." if method.aliases else ""
            table.add_row(method.name, escape(method.summary))
            about = escape(f"Needs: {method.needs}. {method.source}.{also}")
            table.add_row("", f"[dim]{about}[/dim]")
        console.print(f"\n[bold]{title}[/bold]")
        console.print(table)


def show(name: Annotated[str, typer.Argument(help="A method or one of its aliases.")]) -> None:
    """Show a method: its equation, knobs with their defaults, source, and what it needs."""
    method = get_method(name)
    paragraphs, _ = _read_docstring(method)
    meanings = {
        k: v for base in reversed(method.__mro__) for k, v in _read_docstring(base)[1].items()
    }
    console = out()
    also = f" (also {', '.join(method.aliases)})" if method.aliases else ""
    console.print(f"{method.name}{also}", style="bold")
    for paragraph in paragraphs:
        console.print(f"\n{paragraph}", markup=False)
    table = _table("knob", "default", "what it is")
    for knob, default in method.knobs().items():
        shown = "must be given" if default is dataclasses.MISSING else repr(default)
        table.add_row(knob, shown, meanings.get(knob, ""))
    if table.rows:
        console.print(table)
    console.print(f"Source: {method.source}\nNeeds: {method.needs}", markup=False)
    required = [k for k, v in method.knobs().items() if v is dataclasses.MISSING and k != "scale"]
    if required:  # lists among them, which the short form of --patch has no place for
        shown = ", ".join(f"{knob}=..." for knob in required)
        console.print(f"Try: patch_model(model, {method.name!r}, {shown})", markup=False)
        return
    needs_scale = method.knobs().get("scale") is dataclasses.MISSING
    example = f"{method.name}:scale=8" if needs_scale else method.name
    console.print(f"Try: hf-posenc perplexity --patch none --patch {example}", markup=False)


def _read_docstring(cls: type) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs of a Google-style docstring, unwrapped, and the meaning of each argument."""
    text = inspect.cleandoc(cls.__doc__ or "").replace("`", "")
    body, _, arguments = text.partition("\nArgs:\n")
    paragraphs = [
        " ".join(paragraph.split()) for paragraph in body.split("\n\n") if paragraph.strip()
    ]
    meanings: dict[str, str] = {}
    for line in arguments.splitlines():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            meanings[start[1]] = start[2]
        elif meanings and line.startswith("        "):
            last = next(reversed(meanings))
            meanings[last] += f" {line.strip()}"
    return paragraphs, meanings


def models() -> None:
    """List the model types that the test matrix covers."""
    from hf_posenc import available_architectures

    names = available_architectures()
    console = out()
    from rich.columns import Columns

    console.print(Columns(names, equal=True, column_first=True))
    console.print(
        f"\n{len(names)} model types; any other RoPE model is tried by inspection, and refused if in doubt."
    )


def recipes() -> None:
    """List the published patches that `load_patch(model, NAME)` takes."""
    from hf_posenc.saving import available_recipes, get_recipe

    table = _table("recipe", "method", "scale", "original", "model types", "checkpoint")
    for name in available_recipes():
        values = get_recipe(name)
        about = values.get("recipe", {})
        scale, original = values.get("scale"), values.get("original_max_position_embeddings")
        table.add_row(
            name,
            values["method"],
            "" if scale is None else f"{scale:g}",
            "" if original is None else f"{original:,}",
            ", ".join(about.get("model_types", ())),
            about.get("checkpoint", ""),
        )
    out().print(table)


def register(app: typer.Typer) -> None:
    """Adds the subcommands of this file."""
    for command in (methods, show, models, recipes):
        app.command()(command)


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold")
    return table


# `hf-posenc inspect`: what a checkpoint really rotates by.


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
    from hf_posenc.patch.patching import get_patch, inspect_rope, patch_model

    name = model or embedded_model()
    candidate = None if patch is None else _given_scale(patch)
    live = live_model(name, whole=candidate is not None and candidate.changes_attention)
    if candidate is not None:
        method, options = candidate.arguments()
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


def register_inspect(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command("inspect")(inspect_model)


def _given_scale(patch: str) -> Candidate:
    """Read the patch; there is no text here whose length could set an automatic scale."""
    from hf_posenc.evaluation.measuring.candidates import Candidate

    return Candidate.parse(patch, unpatched=False).without_automatic_scale()


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


# `hf-posenc recommend`: which method for which length.


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


def register_recommend(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command("recommend")(recommend)


# `hf-posenc report`: one HTML page from the results of many runs.


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Output folders of perplexity, retrieval, bench or sweep, folders of such folders, or result files.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page that is written.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="The page's heading.")] = None,
) -> None:
    """Put the results of many runs and machines into one HTML page: tables, plots, settings, how to do it again.

    Needs no model and no network. The page loads nothing and opens from a file. Results that may not be compared (other
    protocol, documents or tokenizer) stand in separate tables, with the reason. Of an unfinished run it says so.
    """
    from hf_posenc.evaluation import plots
    from hf_posenc.evaluation.page import TITLE, collect, render
    from hf_posenc.files import write_atomically

    found = collect(runs)
    for remark in found.remarks:
        print_warning(remark)
    if not plots.available():
        print_warning("no plots: they need matplotlib (pip install 'hf-posenc[plot]').")
    write_atomically(output, render(found, title=title or TITLE))
    count, waiting = len(found.sources), len(found.unfinished)
    also = f" and {waiting} unfinished run{'s' * (waiting != 1)}" if waiting else ""
    results = f"{count} result{'s' * (count != 1)}"
    out().print(f"Wrote {output}: {results}{also}", markup=False)


def register_report(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command()(report)
