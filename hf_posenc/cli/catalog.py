"""`hf-posenc methods`, `show`, `models` and `recipes`: lists of everything that the package contains."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Annotated

import typer
from rich.markup import escape

from hf_posenc.cli.console import out
from hf_posenc.methods import METHODS, Method, get_method

KINDS = {
    "frequencies": "Frequencies: the rotary table is changed, attention stays the model's own",
    "bands": "Rotary bands: near and far keys are rotated by different positions",
    "biases": "Biases: added to the scores; the rotation is dropped unless keep_rope is set",
    "others": "Others: they change the queries and keys themselves",
}
"""Title of each kind of method."""


def kinds() -> dict[str, list[type[Method]]]:
    """Return the methods by the title of their kind."""
    return {title: [m for m in METHODS if m.kind == kind] for kind, title in KINDS.items()}


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
    from hf_posenc.evaluation.grid import Grid, to_rich

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
    grid = Grid.of("", "knob", "default", "what it is")
    for knob, default in method.knobs().items():
        shown = "must be given" if default is dataclasses.MISSING else repr(default)
        grid.row(knob, shown, meanings.get(knob, ""))
    if grid.rows:
        console.print(to_rich(grid))
    console.print(f"Source: {method.source}\nNeeds: {method.needs}", markup=False)
    required = [knob for knob, value in method.knobs().items() if value is dataclasses.MISSING]
    example = f"{method.name}:scale=8" if "scale" in required else method.name
    trial = f"hf-posenc perplexity --patch none --patch {example}"
    if set(required) - {"scale"}:  # such as lists, which the short form of --patch cannot express
        shown = ", ".join(f"{knob}=..." for knob in required if knob != "scale")
        trial = f"patch_model(model, {method.name!r}, {shown})"
    console.print(f"Try: {trial}", markup=False)


def _read_docstring(cls: type) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs of a Google-style docstring, unwrapped, and the meaning of each argument."""
    text = inspect.cleandoc(cls.__doc__ or "").replace("`", "")
    body, _, arguments = text.partition("\nArgs:\n")
    paragraphs = [" ".join(part.split()) for part in body.split("\n\n") if part.strip()]
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
    from rich.columns import Columns

    from hf_posenc import available_architectures

    names = available_architectures()
    console = out()
    console.print(Columns(names, equal=True, column_first=True))
    console.print(
        f"\n{len(names)} model types; any other RoPE model is tried by inspection, and refused if in doubt."
    )


def recipes() -> None:
    """List the published patches that `load_patch(model, NAME)` takes."""
    from hf_posenc.evaluation.grid import Grid, to_rich
    from hf_posenc.saving import available_recipes, get_recipe

    heads = ("recipe", "method", "scale", "original", "model types", "checkpoint")
    grid = Grid.of("", *heads)
    for name in available_recipes():
        values = get_recipe(name)
        about = values.get("recipe", {})
        scale, original = values.get("scale"), values.get("original_max_position_embeddings")
        grid.row(
            name,
            values["method"],
            "" if scale is None else f"{scale:g}",
            "" if original is None else f"{original:,}",
            ", ".join(about.get("model_types", ())),
            about.get("checkpoint", ""),
        )
    out().print(to_rich(grid))
