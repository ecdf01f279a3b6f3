"""Root of the command. An error is one line without traceback, exit status 2; a warning is one line too."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from hf_posenc.cli import checking, export, inspection, measure, methods
from hf_posenc.cli.command import check_arguments, expand
from hf_posenc.cli.console import is_verbose, one_line_warnings, prepare_terminal, print_error
from hf_posenc.errors import PosencError

_ARGUMENTS = "hf_posenc.arguments"
# Options by the names that they have in Python or in other programs.
_NAMES_ELSEWHERE = {
    **dict.fromkeys(("--method", "--methods"), "--patch"),
    **dict.fromkeys(("--length", "--context-length", "--max-length"), "--lengths"),
}


class OneLineErrors(TyperGroup):
    """Prints the errors of commands as one line on stderr."""

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
        ctx.meta[_ARGUMENTS] = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if not ctx.meta[_ARGUMENTS]:  # the help
                raise
            _print_usage_error(error, ctx)
            raise typer.Exit(2) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            arguments = ctx.meta[_ARGUMENTS]
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
    here = _NAMES_ELSEWHERE.get(given)
    if here is not None and any(here in option.opts for option in context.command.params):
        message = f"No such option: {given}. It is called {here} here."
    print_error(f"{message} Try: {path} --help")


app = typer.Typer(
    cls=OneLineErrors,
    name="hf-posenc",
    help="Change how a Hugging Face model encodes position, and see what that does to long documents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
measure.register(app)
COMMANDS: tuple[Callable[..., None], ...] = (
    *(inspection.recommend, measure.report, export.export, checking.selftest),
    *(inspection.fetch, methods.methods, methods.show, inspection.models, inspection.recipes),
)
for command in COMMANDS:
    app.command()(expand(command))
app.command("inspect", cls=inspection.InspectCommand)(expand(inspection.inspect_model))


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True
    ),
) -> None:
    """Options of the command itself."""
    if version:
        from hf_posenc import __version__

        Console().print(f"hf-posenc {__version__}", highlight=False)
        raise typer.Exit
