"""`hf-posenc methods`, `show`, `models` and `recipes`: what there is."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hf_posenc.cli.console import out

if TYPE_CHECKING:
    from hf_posenc.methods import Method


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
    from hf_posenc.methods import get_method

    method = get_method(name)
    paragraphs, meanings = _read_docstring(inspect.cleandoc(method.__doc__ or "").replace("`", ""))
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


def _read_docstring(text: str) -> tuple[list[str], dict[str, str]]:
    """The paragraphs of a Google-style docstring, unwrapped, and what it says of each argument."""
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
    from hf_posenc.recipes import available_recipes, get_recipe

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
