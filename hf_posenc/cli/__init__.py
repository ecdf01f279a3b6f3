"""The `hf-posenc` command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `hf-posenc` with these arguments, or those of the process, and exit."""
    from hf_posenc.cli.app import app

    app(args=None if arguments is None else list(arguments), prog_name="hf-posenc")
