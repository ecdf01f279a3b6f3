"""Root of the command, and its commands, made of functions whose parameters are option classes.

An error is one line without traceback, exit status 2; a warning is one line too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import functools
import importlib
import inspect
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from hf_posenc.cli.console import (
    TerminalOptions,
    is_verbose,
    one_line_warnings,
    out,
    prepare_terminal,
    print_error,
    terminal,
)
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.options import PANELS, Flag, ModelOptions, help_texts

# From functions to commands.

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

    def place(option: tuple[str, Any]) -> tuple[int, int]:
        """Arguments come first, then the panels in their order."""
        flag: Flag = option[1].metadata["flag"]
        return (0, 0) if flag.argument else (PANELS.index(flag.panel) + 1, flag.rank)

    texts = {name: help_texts(kind) for name, kind in classes.items()}  # none under python -OO
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name])
        for p in inspect.signature(function).parameters.values()
        if p.name not in classes
    ]
    for name, field in sorted(options, key=place):
        hint = _hints(classes[name])[field.name]
        parameters.append(parameter(field, hint, texts[name].get(field.name, "")))

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


def parameter(field: dataclasses.Field[Any], hint: Any, text: str) -> inspect.Parameter:
    """Return an option for typer."""
    flag: Flag = field.metadata["flag"]
    name = flag.name or field.name
    kind = flag.kind or (str | None if flag.parse else hint)
    parts = (kind, *get_args(kind))
    default = field.default if flag.value is ... else flag.value
    metavar = flag.metavar or next((_METAVARS[part] for part in parts if part in _METAVARS), None)
    if any(get_origin(part) is Sequence for part in parts):
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
    """A command whose `--text` takes several values; `ctx.obj` is the command line that gives its result again.

    `--text a.txt b.txt` stands for `--text a.txt --text b.txt`, so that the shell may expand a pattern. The command
    line has neither the output folder nor the share.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, kept = iter(args), ["hf-posenc", ctx.info_name]
        for argument in given:
            option, equals, _ = argument.partition("=")
            if option not in (*_WITH_A_VALUE, *_SHOWN):
                kept.append(argument)
            elif option in _WITH_A_VALUE and not equals:
                next(given, None)
        ctx.obj = shlex.join(kept)
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


# A command whose words `hf_posenc.training` reads; typer shows and completes its options.

ALL = "--help-all"
REST = f"{ALL} shows the rest."
EPILOG = "Every option of transformers' TrainingArguments works too: --gradient-checkpointing, --report-to, ..."


def finetune() -> Callable[..., None]:
    """Return the command, whose options take a fifth of a second to import."""
    from hf_posenc.cli.frame import check_methods, check_model
    from hf_posenc.evaluation.measuring.candidates import UNPATCHED
    from hf_posenc.training import options
    from hf_posenc.training.__main__ import run

    def command(context: typer.Context, **_: Any) -> None:
        """Fine-tune a model for a longer context, and measure it before and after.

        Without arguments: the embedded model, from 256 to 1,024 tokens, in one to three minutes. The same command
        resumes an interrupted run. For several processes: accelerate launch -m hf_posenc.training, with the same
        options.
        """
        given = options.read(context.args)
        if given.patch is not None and given.patch.strip().lower() != UNPATCHED:
            check_methods([given.patch], own=given.model is not None)
        model = ModelOptions(model=given.model, tokenizer=given.tokenizer, attn=given.attn)
        check_model(model, weights=not given.dry_run)
        run(context.args)

    first = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    return signed(command, command.__doc__, [first, *(parameter(*o) for o in options.listed())])


class Finetune(TyperCommand):
    """The command `finetune`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell asks for names
            return super().parse_args(ctx, args)
        if {"--help", "-h", ALL} & {*args}:
            from hf_posenc.training import options

            rest = {field.name for field, *_ in options.listed() if field.metadata["flag"].rank}
            for each in self.params:
                vars(each)["hidden"] = ALL not in args and each.name in rest
            self.epilog = EPILOG if ALL in args else f"{REST} {EPILOG}"
            return super().parse_args(ctx, ["--help"])
        ctx.args = list(args)
        return list(args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete an option with underscores by that with hyphens."""
        return super().shell_complete(ctx, incomplete.replace("_", "-"))


# The root.

# Options, and commands, by the names that they have in Python, in other commands or in other programs.
_NAMES_ELSEWHERE = {
    **dict.fromkeys(("--method", "--methods"), "--patch"),
    **dict.fromkeys(("--length", "--context-length", "--max-length", "--seq-len"), "--lengths"),
    "--text": "--haystack",
    "--model": "model",  # an argument
}
_COMMANDS_ELSEWHERE = {
    **dict.fromkeys(("ppl", "eval", "evaluate"), "It is called perplexity here."),
    **dict.fromkeys(("passkey", "needle", "niah"), "It is called retrieval here."),
    "train": "It is called finetune here.",
    "patch": "A method is given as --patch METHOD, or to patch_model.",
    "serve": "vLLM serves a patched model: hf-posenc export FOLDER --to vllm prints how.",
}


class OneLineErrors(TyperGroup):
    """Prints the errors of commands as one line on stderr."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "commands": Commands()})

    def main(self, *args: Any, **options: Any) -> Any:
        prepare_terminal()
        try:
            try:
                return super().main(*args, **options)
            finally:
                with contextlib.suppress(BrokenPipeError):
                    sys.stdout.flush()
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            # A full disk behind stdout; the files of a result were written before. Python flushes stdout at its end.
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            print_error(f"stdout cannot be written: {error.strerror or error}")
            raise SystemExit(2) from error
        except SystemExit as end:
            if end.code == 130:  # typer's own for a KeyboardInterrupt
                print_error("interrupted")
            raise

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if not ctx.meta[ARGUMENTS]:  # the help
                raise
            _print_usage_error(error, ctx)
            raise typer.Exit(2) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            arguments = ctx.meta[ARGUMENTS]
            check_arguments(arguments, self.get_command(ctx, arguments[0]) if arguments else None)
            with one_line_warnings():
                return super().invoke(ctx)
        except PosencError as error:
            if is_verbose():
                traceback.print_exc()
            print_error(str(error))
        except Exception as error:
            _print_usage_error(error, ctx)
        raise typer.Exit(2)


def _print_usage_error(error: Exception, ctx: Any) -> None:
    """Print a wrong option, value or subcommand; raise any other error again."""
    # typer's own errors, whose module moved between its versions
    if not hasattr(error, "format_message"):
        raise error
    context = getattr(error, "ctx", None) or ctx
    path = context.command_path
    if context is ctx and ctx.invoked_subcommand:  # an option without its value
        path += f" {ctx.invoked_subcommand}"
    message = error.format_message()
    given = getattr(error, "option_name", "")
    options = {name for option in context.command.params for name in option.opts}
    elsewhere = {name: here for name, here in _NAMES_ELSEWHERE.items() if here in options}
    names = [name for name in (*options, *elsewhere) if name.startswith("--")]
    close = difflib.get_close_matches(given, names, n=1) if hasattr(error, "possibilities") else ()
    if elsewhere.get(given) == "model":
        message = f"No such option: --model. It stands without a name here: {path} MODEL."
    elif given in elsewhere:
        message = f"No such option: {given}. It is called {elsewhere[given]} here."
    elif close:
        message = f"No such option: {given}. Did you mean {elsewhere.get(close[0], close[0])}?"
    if message.startswith("No such command"):
        word = ctx.meta[ARGUMENTS][0]
        methods = importlib.import_module("hf_posenc.methods").available_methods()
        if hint := _COMMANDS_ELSEWHERE.get("patch" if word in methods else word):
            message = f"No such command '{word}'. {hint}"
    print_error(f"{message}{'' if message[-1] in '.?' else '.'} Try: {path} --help")


COMMANDS = {
    "inspect": ("Look", "inspection"),
    "methods": ("Look", "inspection"),
    "show": ("Look", "inspection"),
    "models": ("Look", "inspection"),
    "recommend": ("Choose", "inspection"),
    "recipes": ("Choose", "inspection"),
    "extend": ("Choose", "measure"),
    **dict.fromkeys(
        ("perplexity", "retrieval", "bench", "sweep", "search", "report"), ("Measure", "measure")
    ),
    "finetune": ("Train", "app"),
    "export": ("Ship", "export"),
    "fetch": ("Set up", "inspection"),
    "selftest": ("Set up", "measure"),
    "doctor": ("Set up", "inspection"),
}
"""The panel of the help that has each command, and the module of its function."""


class Commands(Mapping[str, TyperCommand]):
    """The commands by name. Each is made when it is first used: all of them would take most of a wrong word's time."""

    def __getitem__(self, name: str) -> TyperCommand:
        return _made(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@functools.cache
def _made(name: str) -> TyperCommand:
    (panel, place), alone = COMMANDS[name], typer.Typer(add_completion=False)
    how: dict[str, Any] = {"cls": Command, "rich_help_panel": panel}
    if name == "finetune":
        how |= {"cls": Finetune, "epilog": EPILOG}
        command = finetune()
    else:
        command = expand(getattr(importlib.import_module(f"hf_posenc.cli.{place}"), name))
    alone.command(name, **how)(command)
    made = get_command(alone)
    assert isinstance(made, TyperCommand)
    return made


app = typer.Typer(
    cls=OneLineErrors,
    name="hf-posenc",
    help="Change how a Hugging Face model encodes position, and see what that does to long documents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True
    ),
) -> None:
    """Options of the command itself."""
    if version:
        from hf_posenc import __version__

        out().print(f"hf-posenc {__version__}")
        raise typer.Exit
