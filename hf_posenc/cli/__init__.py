"""The `hf-posenc` command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; the entry point of `hf-posenc`.

    Args:
        arguments: Arguments that replace `sys.argv[1:]`.
    """
    from hf_posenc.cli.app import app

    app(args=None if arguments is None else list(arguments), prog_name="hf-posenc")
