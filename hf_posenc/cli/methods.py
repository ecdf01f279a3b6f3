"""`hf-posenc methods` and `show`: the methods in words."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from hf_posenc.cli.command import completion
from hf_posenc.cli.console import print_items, print_json
from hf_posenc.methods import METHODS, Method, available_methods, get_method
from hf_posenc.methods.facts import KINDS, facts, knob_rows, read_docstring


def kinds() -> dict[str, list[type[Method]]]:
    """Return the methods by the title of their kind."""
    return {title: [m for m in METHODS if m.kind == kind] for kind, title in KINDS.items()}


def methods() -> None:
    """List the methods by kind: name and aliases, what it does, what it needs, where it comes from."""
    from hf_posenc.evaluation.grid import Field, Grid

    groups = kinds()
    if own := available_methods()[len(METHODS) :]:
        groups["Of installed packages"] = [get_method(name) for name in own]
    if print_json([_about(method) for group in groups.values() for method in group]):
        return
    width = max(len(method.name) for group in groups.values() for method in group)
    for title, group in groups.items():
        grid = Grid()
        grid.column("", least=width)
        grid.column("")
        for method in group:
            also = f" Also {', '.join(method.aliases)}." if method.aliases else ""
            about = f"\nNeeds: {method.needs}. {method.source}.{also}"
            grid.row(method.name, Field(method.summary).append(about, "aside"))
        print_items("")
        print_items(title, style="bold")
        print_items(grid)


def _about(method: type[Method]) -> dict[str, Any]:
    """Return what `methods` and `show` print of a method; a knob that must be given has no default."""
    names = ("name", "aliases", "kind", "summary", "needs", "source")
    knobs = {
        knob: {} if value is dataclasses.MISSING else {"default": value}
        for knob, value in method.knobs().items()
    }
    return {**{name: getattr(method, name) for name in names}, "knobs": knobs}


def show(
    name: Annotated[
        str,
        typer.Argument(help="A method or one of its aliases.", autocompletion=completion("patch")),
    ],
) -> None:
    """Show a method: its equation, knobs with their defaults, source, and what it needs."""
    from hf_posenc.evaluation.grid import Grid

    method = get_method(name)
    paragraphs, _ = read_docstring(method)
    rows, about = knob_rows(method), _about(method)
    for knob, _, meaning in rows:
        about["knobs"][knob]["meaning"] = _plain(meaning)
    if print_json({**about, "facts": facts(method), "description": [*map(_plain, paragraphs)]}):
        return
    also = f" (also {', '.join(method.aliases)})" if method.aliases else ""
    print_items(f"{method.name}{also}", style="bold")
    print_items(*(f"\n{_plain(paragraph)}" for paragraph in paragraphs))
    if rows:
        grid = Grid.of("", "knob", "default", "what it is")
        for knob, default, meaning in rows:
            grid.row(knob, default, _plain(meaning))
        print_items(grid)
    print_items(*(f"{label}: {fact}" for label, fact in facts(method).items() if label != "Also"))
    required = [knob for knob, value in method.knobs().items() if value is dataclasses.MISSING]
    example = f"{method.name}:scale=8" if "scale" in required else method.name
    trial = f"hf-posenc perplexity --patch none --patch {example}"
    if set(required) - {"scale"}:  # such as lists, which the short form of --patch cannot express
        shown = ", ".join(f"{knob}=..." for knob in required if knob != "scale")
        trial = f"patch_model(model, {method.name!r}, {shown})"
    elif not method.for_rotary:  # the embedded model has a rotary embedding
        trial = f"patch_model(model, {method.name!r}, scale=8)"
    print_items(f"Try: {trial}")


def _plain(text: str) -> str:
    """Return a text of a docstring without the marks of code."""
    return text.replace("`", "")
