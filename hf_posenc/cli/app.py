"""Root of the command. An error is one line without traceback, exit status 2; a warning is one line too."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from hf_posenc.cli.command import ARGUMENTS, Command, check_arguments, expand
from hf_posenc.cli.console import is_verbose, one_line_warnings, out, prepare_terminal, print_error
from hf_posenc.errors import PosencError

# Options by the names that they have in Python or in other programs.
_NAMES_ELSEWHERE = {
    **dict.fromkeys(("--method", "--methods"), "--patch"),
    **dict.fromkeys(("--length", "--context-length", "--max-length"), "--lengths"),
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
            command = self.get_command(ctx, arguments[0]) if arguments else None
            check_arguments(arguments, command)
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
    if given in elsewhere:
        message = f"No such option: {given}. It is called {elsewhere[given]} here."
    elif close:
        message = f"No such option: {given}. Did you mean {elsewhere.get(close[0], close[0])}?"
    print_error(f"{message} Try: {path} --help")


# The module that has each command's function, by the panels of the help.
PANELS = {
    "Look": {
        "inspect": "inspection",
        "methods": "methods",
        "show": "methods",
        "models": "inspection",
    },
    "Choose": {"recommend": "inspection", "recipes": "inspection", "extend": "measure"},
    "Measure": dict.fromkeys(
        ("perplexity", "retrieval", "bench", "sweep", "search", "report"), "measure"
    ),
    "Train": {"finetune": "finetune"},
    "Ship": {"export": "export"},
    "Set up": {"fetch": "inspection", "selftest": "measure", "doctor": "inspection"},
}
COMMANDS = {name: module for commands in PANELS.values() for name, module in commands.items()}


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
    module = importlib.import_module(f"hf_posenc.cli.{COMMANDS[name]}")
    alone = typer.Typer(add_completion=False)
    panel = next(panel for panel, commands in PANELS.items() if name in commands)
    command, own = getattr(module, name), getattr(module, "OWN", {})  # what parses its own words
    options = own or {"cls": Command}
    alone.command(name, rich_help_panel=panel, **options)(command if own else expand(command))
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
