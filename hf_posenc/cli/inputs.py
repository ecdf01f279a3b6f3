"""What `hf-posenc perplexity` is given: the arguments that need more than reading, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from hf_posenc.evaluation.documents import Document, Skipped, TokenizedDocument


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
    from hf_posenc.evaluation.plot import available

    if plot and not available():
        raise PosencError("--plot needs matplotlib: pip install 'hf-posenc[plot]'.")
    return available() if plot is None else plot


def check_output(folder: Path) -> None:
    """Makes the folder of the results.

    Raises:
        PosencError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PosencError(
            f"--output {folder} cannot be written to: {error.strerror or error}"
        ) from error


def source_of(
    text: list[str] | None,
    dataset: str | None,
    config: str | None,
    split: str,
    column: str,
    streaming: bool,
) -> tuple[Iterable[Document | Skipped] | None, dict[str, Any]]:
    """The reader that was asked for, `None` for the default one, and what the result says of it.

    Raises:
        PosencError: Two sources, or a model in the place of a text.
    """
    from hf_posenc.evaluation.documents import read_dataset, read_paths

    if text and dataset is not None:
        raise PosencError("--text and --dataset exclude each other: give one of them.")
    if text:
        model = next((path for path in text if (Path(path) / "config.json").is_file()), None)
        if model is not None:
            raise PosencError(
                f"--text {model} is a model's folder. MODEL goes in front of the options."
            )
        return read_paths(text), {"kind": "text", "paths": text}
    if dataset is not None:
        options = {"config": config, "split": split, "column": column, "streaming": streaming}
        rows = read_dataset(dataset, config=config, split=split, column=column, streaming=streaming)
        return rows, {"kind": "dataset", "name": dataset, **options}
    return None, {}


def check_vocabulary(model: Any, documents: list[TokenizedDocument]) -> None:
    """Makes sure that the model has an embedding for every token.

    Raises:
        PosencError: It has not.
    """
    words = model.get_input_embeddings().weight.shape[0]
    largest = max(int(document.ids.max()) for document in documents)
    if largest >= words:
        raise PosencError(
            f"The tokenizer does not belong to the model: it gives token {largest:,}, the model has {words:,}."
        )
