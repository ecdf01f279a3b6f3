"""Methods as the command line and the pages describe them: lists, facts, knobs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli.command import completion
from hf_posenc.cli.console import out, print_json

if TYPE_CHECKING:
    from hf_posenc.methods import Method

KINDS = {
    "frequencies": "Frequencies: the rotary table is changed, attention stays the model's own",
    "bands": "Rotary bands: near and far keys are rotated by different positions",
    "biases": "Biases: added to the scores; the rotation is dropped unless keep_rope is set",
    "others": "Others: they change the queries and keys themselves",
    "tables": "Tables: one row for each position, of models without rotary embedding, made longer",
}
"""Title of each kind of method."""


def kinds() -> dict[str, list[type[Method]]]:
    """Return the methods by the title of their kind."""
    from hf_posenc.methods import METHODS

    return {title: [m for m in METHODS if m.kind == kind] for kind, title in KINDS.items()}


def methods() -> None:
    """List the methods by kind: name and aliases, what it does, what it needs, where it comes from."""
    from hf_posenc.evaluation.grid import Field, Grid, to_rich
    from hf_posenc.methods import METHODS, available_methods, get_method

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
        out().print(f"\n[bold]{title}[/bold]", to_rich(grid), sep="\n")


def _about(method: type[Method]) -> dict[str, Any]:
    """Return what `methods` and `show` print of a method; a knob that must be given has no default."""
    names = ("name", "aliases", "kind", "summary", "needs", "source")
    knobs = {
        knob: {} if value is dataclasses.MISSING else {"default": value}
        for knob, value in method.knobs().items()
    }
    return {**{name: getattr(method, name) for name in names}, "knobs": knobs}


def facts(method: type[Method]) -> dict[str, str]:
    """Return the facts of a method in plain words, by their labels: what `show` prints and its page has."""
    from hf_posenc.methods import LengthDependent

    found = {"Kind": KINDS[method.kind]}
    if issubclass(method, LengthDependent) and method.knobs()["update"] != "sequence":
        found["Kind"] = (
            "Frequencies: each query has the rotary table of its length, in an attention of hf_posenc; with "
            'update="sequence" attention stays the model\'s own'
        )
    if method.aliases:
        found["Also"] = ", ".join(method.aliases)
    found |= {"Needs": method.needs, "Adds parameters": "yes" if method.trainable else "no"}
    if method.length_dependent or method.follows_text:
        found["Length"] = (
            "follows the text" if method.follows_text else "two tables: up to L, past L"
        )
    elif method.takes_scale():
        optional = method.knobs()["scale"] is not dataclasses.MISSING
        found["Length"] = f"set by scale or target_length{', if given' if optional else ''}"
    else:
        found["Length"] = "set by no scale"
    found |= {"Composes with": composes_with(method), "Source": method.source}
    return found


def composes_with(method: type[Method]) -> str:
    """Return the methods that a list may have beside a method, in words."""
    from hf_posenc.methods import TableFilter

    words = {
        "rotary": "a frequency method",
        "attention": "rotary bands",
        "query": "a temperature",
        "bias": "a bias with keep_rope=True",
    }
    if method.seam == "rotary":
        later = "filters after it"
        before = "a frequency method before it, other filters"
        words["rotary"] = before if issubclass(method, TableFilter) else later
    else:
        words.pop(method.seam, None)
    kept = {*method.beside_kept} - {*method.beside}
    beside, rotating = (
        ", ".join(text for seam, text in words.items() if seam in seams)
        for seams in (method.beside, kept)
    )
    return (f"{beside}; with keep_rope=True {rotating}" if rotating else beside) or "nothing"


def knob_rows(method: type[Method]) -> list[tuple[str, str, str]]:
    """Return the knobs of a method: the name, the default as Python writes it, and what it is."""
    meanings: dict[str, str] = {}
    for base in reversed(method.__mro__):
        meanings |= _read_docstring(base)[1]
    return [
        (
            knob,
            "must be given" if default is dataclasses.MISSING else repr(default),
            meanings.get(knob, ""),
        )
        for knob, default in method.knobs().items()
    ]


def show(
    name: Annotated[
        str,
        typer.Argument(help="A method or one of its aliases.", autocompletion=completion("patch")),
    ],
) -> None:
    """Show a method: its equation, knobs with their defaults, source, and what it needs."""
    from hf_posenc.evaluation.grid import Grid, to_rich
    from hf_posenc.methods import get_method

    method = get_method(name)
    paragraphs, _ = _read_docstring(method)
    rows, about = knob_rows(method), _about(method)
    for knob, _, meaning in rows:
        about["knobs"][knob]["meaning"] = _plain(meaning)
    if print_json({**about, "facts": facts(method), "description": [*map(_plain, paragraphs)]}):
        return
    console = out()
    also = f" (also {', '.join(method.aliases)})" if method.aliases else ""
    console.print(f"{method.name}{also}", style="bold")
    for paragraph in paragraphs:
        console.print(f"\n{_plain(paragraph)}", markup=False)
    grid = Grid.of("", "knob", "default", "what it is")
    for knob, default, meaning in rows:
        grid.row(knob, default, _plain(meaning))
    if grid.rows:
        console.print(to_rich(grid))
    for label, fact in facts(method).items():
        if label != "Also":
            console.print(f"{label}: {fact}", markup=False)
    required = [knob for knob, value in method.knobs().items() if value is dataclasses.MISSING]
    example = f"{method.name}:scale=8" if "scale" in required else method.name
    trial = f"hf-posenc perplexity --patch none --patch {example}"
    if set(required) - {"scale"}:  # such as lists, which the short form of --patch cannot express
        shown = ", ".join(f"{knob}=..." for knob in required if knob != "scale")
        trial = f"patch_model(model, {method.name!r}, {shown})"
    elif not method.for_rotary:  # the embedded model has a rotary embedding
        trial = f"patch_model(model, {method.name!r}, scale=8)"
    console.print(f"Try: {trial}", markup=False)


def _plain(text: str) -> str:
    """Return a text of a docstring without the marks of code."""
    return text.replace("`", "")


def _read_docstring(cls: type) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs of a Google-style docstring, unwrapped, and the meaning of each argument."""
    text = inspect.cleandoc(cls.__doc__ or "")
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
