"""The `hf-posenc` command, a file per group of subcommands."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; the entry point of `hf-posenc`.

    Args:
        arguments: Instead of `sys.argv[1:]`.
    """
    from hf_posenc.cli.app import app

    app(args=None if arguments is None else list(arguments), prog_name="hf-posenc")
