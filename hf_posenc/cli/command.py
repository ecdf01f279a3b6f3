"""Commands made of functions whose parameters are option classes (`hf_posenc.evaluation.options`)."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from hf_posenc.cli.console import TerminalOptions, terminal
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.flags import PANELS, Flag, help_texts

_METAVARS = {int: "N", str: "NAME", Path: "DIR"}
ARGUMENTS = "hf_posenc.arguments"
_WITH_A_VALUE = ("--output", "--shard")
_SHOWN = ("--plot", "--no-plot", "--json", "--quiet", "--verbose")
TERMINAL = "terminal"


def expand(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command with every option of its option classes as a parameter of its own, for typer.

    A parameter that is annotated with an option class gets an instance of it. Every command has `TerminalOptions` too.
    """
    hints = get_type_hints(function, include_extras=True) | {TERMINAL: TerminalOptions}
    classes: Any = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    options = [
        (name, field)
        for name, kind in classes.items()
        for field in dataclasses.fields(kind)
        if "flag" in field.metadata
    ]
    listed = sorted(options, key=lambda option: _place(option[1].metadata["flag"]))
    texts = {name: help_texts(kind) for name, kind in classes.items()}  # none under python -OO
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name])
        for p in inspect.signature(function).parameters.values()
        if p.name not in classes
    ] + [
        parameter(field, _hints(classes[name])[field.name], texts[name].get(field.name, ""))
        for name, field in listed
    ]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        fields: dict[str, dict[str, Any]] = {name: {} for name in classes}
        for name, field in options:
            flag: Flag = field.metadata["flag"]
            value = values.pop(own := flag.name or field.name)
            if value is None or value == []:
                continue  # the field's own default
            if flag.parse is not None:
                value = flag.parse(value, f"--{own.replace('_', '-')} {value}")
            fields[name][field.name] = value
        given = {name: kind(**fields[name]) for name, kind in classes.items()}
        with terminal(given.pop(TERMINAL)):
            function(**values, **given)

    return signed(command, function.__doc__, parameters)


def signed(
    command: Callable[..., None], about: str | None, parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Return a function with the help and the parameters that typer shall find."""
    # typer keeps the line breaks of a paragraph, which are not those of the terminal.
    paragraphs = inspect.cleandoc(about or "").split("\n\n")
    command.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


_hints = functools.cache(get_type_hints)  # several commands share an option class


def _place(flag: Flag) -> tuple[int, int]:
    """Arguments come first, then the panels in their order."""
    return (0, 0) if flag.argument else (PANELS.index(flag.panel) + 1, flag.rank)


def parameter(field: dataclasses.Field[Any], hint: Any, text: str) -> inspect.Parameter:
    """Return an option for typer."""
    flag: Flag = field.metadata["flag"]
    name = flag.name or field.name
    kind = flag.kind or (str | None if flag.parse else hint)
    parts = (kind, *get_args(kind))
    many = any(get_origin(part) is Sequence for part in parts)
    default = field.default if flag.value is ... else flag.value
    metavar = flag.metavar or next((_METAVARS[part] for part in parts if part in _METAVARS), None)
    if many:
        kind, default = list[str] | None, None
    if flag.argument:
        info = typer.Argument(metavar=metavar, help=text)
    else:
        names = (f"--{name.replace('_', '-')}",) if default is False else ()
        info = typer.Option(
            *names,
            metavar=metavar,
            help=text,
            min=(1 if flag.least is None else flag.least) if int in parts else None,
            show_default=flag.shown,
            rich_help_panel=flag.panel,
            autocompletion=completion(name, flag.choices),
        )
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


_NAMES = {
    "patch": ("hf_posenc.methods", "available_methods"),
    "recipe": ("hf_posenc.adapters", "available_recipes"),
    "download": ("hf_posenc.catalog", "downloads"),
    "preset": ("hf_posenc.evaluation.perplexity.protocols", "PRESETS"),
    "protocol": ("hf_posenc.evaluation.perplexity.protocols", "PROTOCOLS"),
    "aggregate": ("hf_posenc.evaluation.perplexity.protocols", "AGGREGATES"),
    "tasks": ("hf_posenc.evaluation.retrieval.tasks", "TASKS"),
    "suite": ("hf_posenc.evaluation.suites", "SUITES"),
}
"""The names that a shell offers for an option or an argument: module and name of a table, or of a function."""


def completion(kind: str, choices: Sequence[str] = ()) -> Callable[[str], list[str]] | None:
    """Return what completes a name of `choices`, else of `_NAMES`, or the last of several joined by "," or "+"."""
    if not choices and kind not in _NAMES:
        return None

    def complete(incomplete: str) -> list[str]:
        names: Any = choices
        if not choices:
            module, table = _NAMES[kind]
            names = getattr(importlib.import_module(module), table)
        last = re.split("[,+]", incomplete)[-1]
        front = incomplete.removesuffix(last)
        return [
            f"{front}{n}" for n in (names() if callable(names) else names) if n.startswith(last)
        ]

    return complete


def check_arguments(arguments: Sequence[str], command: Any) -> None:
    """Refuse an empty argument, and a second value for an option that takes one; `command` may be unknown: `None`."""
    options = [p for p in getattr(command, "params", ()) if p.param_type_name == "option"]
    single = {name for o in options if not (o.multiple or o.is_flag) for name in o.opts}
    before, seen = "hf-posenc", set()
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if not argument.strip() or (option.startswith("--") and equals and not value.strip()):
            place = f"after {before}" if not option.strip() else option
            raise PosencError(
                f"The value {place} is empty. Is a shell variable unset? Give a value, or leave it out for the default."
            )
        if option in single and option in seen:
            raise PosencError(f"{option} is given twice, and takes one value: give it once.")
        seen.add(option)
        before = argument


class Command(TyperCommand):
    """A command that stores its arguments, and whose `--text` takes several values.

    `--text a.txt b.txt` stands for `--text a.txt --text b.txt`, so that the shell may expand a pattern.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        spread: list[str] = []
        values: int | None = None  # of the `--text` that is open
        for argument in args:
            option, equals, _ = argument.partition("=")
            if option == "--text":
                values = 1 if equals else 0
            elif argument.startswith("-"):
                values = None
            elif values is not None:
                spread += ["--text"] if values else []
                values += 1
            spread.append(argument)
        return super().parse_args(ctx, spread)


def command_line(context: Any) -> str:
    """Return the command that gives the same result again, without its output folder and its share."""
    given, kept = list(context.meta.get(ARGUMENTS, ())), []
    while given:
        argument = given.pop(0)
        option, equals, _ = argument.partition("=")
        if option not in (*_WITH_A_VALUE, *_SHOWN):
            kept.append(argument)
        elif option in _WITH_A_VALUE and not equals and given:
            given.pop(0)
    return shlex.join(["hf-posenc", context.info_name, *kept])
