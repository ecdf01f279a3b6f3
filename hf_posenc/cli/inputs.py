"""What the commands are given: the arguments that need more than reading, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from hf_posenc.evaluation.documents import Entry, TokenCache


class TakesSeveral(TyperCommand):
    """Lets `--text a.txt b.txt` stand for `--text a.txt --text b.txt`, so that the shell may expand a pattern."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
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


def decide_plot(plot: bool | None) -> bool:
    """Whether to draw: as asked for, else where matplotlib is installed.

    Raises:
        PosencError: A plot was asked for, and there is no matplotlib.
    """
    from hf_posenc.evaluation.plots import available

    if plot and not available():
        raise PosencError("--plot needs matplotlib: pip install 'hf-posenc[plot]'.")
    return available() if plot is None else plot


def check_output(folder: Path) -> None:
    """Makes the folder of the results.

    Raises:
        PosencError: It cannot be made.
    """
    if folder.is_file():
        raise PosencError(f"--output {folder} is a file: give a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PosencError(
            f"--output {folder} cannot be written to: {error.strerror or error}"
        ) from error


def names_of(text: str) -> tuple[str, ...]:
    """Reads names with commas between them."""
    return tuple(part.strip() for part in text.split(","))


def tasks_of(text: str) -> tuple[str, ...]:
    """Reads `--tasks`: names, or `all`."""
    from hf_posenc.evaluation.retrieval import TASKS

    names = names_of(text)
    return tuple(TASKS) if names == ("all",) else names


def source_of(
    text: list[str] | None,
    dataset: str | None,
    config: str | None,
    split: str,
    column: str,
    streaming: bool,
    tokenized: str | None = None,
    token_dtype: str = "uint16",
) -> tuple[Iterable[Entry] | None, dict[str, Any]]:
    """The reader that was asked for, `None` for the default one, and what the result says of it.

    Raises:
        PosencError: Two sources, or a model in the place of a text.
    """
    from hf_posenc.evaluation.documents import printable, read_dataset, read_paths

    if text and dataset is not None:
        raise PosencError("--text and --dataset exclude each other: give one of them.")
    read: dict[str, Any] = {"split": split, "column": column, "tokenized": tokenized}
    if text:
        # os.path, since pathlib raises for a name that is too long
        configs = {path: os.path.join(path, "config.json") for path in text}  # noqa: PTH118
        model = next((path for path in text if os.path.isfile(configs[path])), None)  # noqa: PTH113
        if model is not None:
            raise PosencError(
                f"--text {model} is a model's folder. MODEL goes in front of the options."
            )
        read["token_dtype"] = token_dtype
        names = [printable(path) for path in text]
        return read_paths(text, **read), {"kind": "text", "paths": names, **read}
    if dataset is not None:
        options: dict[str, Any] = {"config": config, **read, "streaming": streaming}
        return read_dataset(dataset, **options), {"kind": "dataset", "name": dataset, **options}
    if tokenized is not None:
        raise PosencError("--tokenized names a column of a --dataset, or of rows in --text files.")
    return None, {}


def token_cache_of(folder: Path | None, tokenizer: Any) -> TokenCache | None:
    """The token cache that was asked for."""
    if folder is None:
        return None
    from hf_posenc.evaluation.documents import TokenCache
    from hf_posenc.evaluation.identity import tokenizer_hash

    return TokenCache(folder, tokenizer_hash(tokenizer))
