"""Rows of the `datasets` library: a hub name, a folder that it can load, or one that `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.document import Entry, Skipped
from hf_posenc.evaluation.documents.errors import one_line
from hf_posenc.evaluation.documents.fields import Field
from hf_posenc.evaluation.documents.names import printable

_SAVED = ("state.json", "dataset_info.json")
_SAVED_SPLITS = "dataset_dict.json"


def read_dataset(
    name: str,
    *,
    config: str | None = None,
    split: str = "test",
    column: str = "text",
    streaming: bool = True,
    tokenized: str | None = None,
) -> Iterator[Entry]:
    """The rows of one split of a dataset.

    Args:
        name: A hub name, or a folder.
        config: The dataset's configuration.
        split: The part of the dataset.
        column: The column of texts.
        streaming: Read row by row, without downloading all of it.
        tokenized: The column of token ids, read instead of a text: `input_ids` of `emozilla/pg19-test-tokenized`.

    Raises:
        PosencError: `datasets` is not installed, or it cannot load this dataset or split, or there is no such column.
    """
    field = Field(column, tokenized)
    if is_saved(Path(name)):
        yield from read_saved(Path(name), split, field)
        return
    library = _library()

    def load() -> Any:
        return library.load_dataset(name, config, split=split, streaming=streaming)

    what = f"{name}{f' ({config})' if config else ''}"
    yield from _rows(load, name, what, split, field)


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of the datasets library wrote a folder."""
    splits, one = folder / _SAVED_SPLITS, [folder / name for name in _SAVED]
    return splits.is_file() or all(path.is_file() for path in one)


def read_saved(folder: Path, split: str, field: Field) -> Iterator[Entry]:
    """The rows of a dataset in a folder that `save_to_disk` wrote.

    Raises:
        PosencError: As `read_dataset`.
    """
    library = _library()

    def load() -> Any:
        found = library.load_from_disk(str(folder))
        if isinstance(found, library.DatasetDict):
            if split not in found:
                raise PosencError(
                    f"The dataset {name} has no split {split!r}; it has {', '.join(found)}. Pass --split."
                )
            return found[split]
        return found

    name = printable(folder)
    yield from _rows(load, name, name, split, field)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise PosencError(
            "A dataset needs the datasets library: pip install 'hf-posenc[data]'. Text files work without it (--text)."
        ) from error
    return datasets


def _rows(
    load: Callable[[], Any], name: str, what: str, split: str, field: Field
) -> Iterator[Entry]:
    index = -1
    try:
        for index, row in enumerate(load()):
            if field.name not in row:
                raise PosencError(f"The dataset {what} has {field.missing(row)}.")
            yield field.entry(f"{name}[{split}]#{index}", row)
    except PosencError:
        raise
    except Exception as error:  # whatever the hub, a file format or a script of the dataset raises
        raise PosencError(
            f"The split {split!r} of dataset {what} cannot be read: {one_line(error)}"
        ) from error
    if index < 0:
        yield Skipped(f"{name}[{split}]", "a split without rows")
