"""What the training scripts read, from their arguments: documents to train on, and documents that are held out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hf_posenc.cli.options import source_of
from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from hf_posenc.evaluation.documents import Entry
    from hf_posenc.training.arguments import DataArguments


def training_text(data: DataArguments) -> tuple[Iterable[Entry], dict[str, Any]]:
    """The documents to train on, by default the standard library, and what a result says of them.

    Raises:
        PosencError: Two sources, or a model in the place of a text.
    """
    from hf_posenc.training.batches.blocks import STANDARD_LIBRARY, read_standard_library

    entries, source = source_of(
        data.text,
        data.dataset,
        data.dataset_config,
        data.split,
        data.column,
        data.streaming,
        data.tokenized,
    )
    if entries is None:
        return read_standard_library(), STANDARD_LIBRARY
    return entries, source


def held_out_text(data: DataArguments) -> Iterable[Entry]:
    """The documents to score: by default the modules that the standard library's training text leaves out.

    Raises:
        PosencError: There are none beside a training text of the user's own, or two sources.
    """
    from hf_posenc.evaluation.documents import read_embedded

    entries, _ = source_of(
        data.score_text,
        data.score_dataset,
        data.dataset_config,
        data.score_split,
        data.column,
        data.streaming,
        data.tokenized,
    )
    if entries is not None:
        return entries
    if data.text or data.dataset is not None:
        raise PosencError(
            "Nothing is held out to be scored: give --score_text or --score_dataset, with documents that are not "
            "trained on, or --no_score."
        )
    return read_embedded()
