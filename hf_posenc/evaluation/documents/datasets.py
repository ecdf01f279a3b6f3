"""Rows of the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.document import Document, Skipped
from hf_posenc.evaluation.documents.errors import one_line


def read_dataset(
    name: str,
    *,
    config: str | None = None,
    split: str = "test",
    column: str = "text",
    streaming: bool = True,
) -> Iterator[Document | Skipped]:
    """The rows of one split of a dataset, through the `datasets` library: a hub name or a local folder.

    Raises:
        PosencError: `datasets` is not installed, or it cannot load this dataset or split, or there is no such column.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise PosencError(
            "--dataset needs the datasets library: pip install datasets. Text files work without it (--text)."
        ) from error
    what = f"{name}{f' ({config})' if config else ''}"
    try:
        rows = iter(load_dataset(name, config, split=split, streaming=streaming))
        for index, row in enumerate(rows):
            if column not in row:
                raise PosencError(
                    f"The dataset {what} has no column {column!r}; its columns are {', '.join(row)}. Pass --column."
                )
            label, text = f"{name}[{split}]#{index}", row[column]
            good = isinstance(text, str)
            yield (
                Document(label, text)
                if good
                else Skipped(label, f"column {column!r} holds no text")
            )
    except PosencError:
        raise
    except Exception as error:  # whatever the hub, a file format or a script of the dataset raises
        raise PosencError(
            f"The split {split!r} of dataset {what} cannot be read: {one_line(error)}"
        ) from error
