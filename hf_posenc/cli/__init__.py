"""The `hf-posenc` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hf_posenc.errors import PosencError, naming_extras


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `hf-posenc` with these arguments, or those of the process, and exit."""
    try:
        with naming_extras():
            from hf_posenc.cli.app import app

            app(args=None if arguments is None else list(arguments), prog_name="hf-posenc")
    except PosencError as error:  # the command prints its own itself
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:  # during the imports above
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
