"""Blocks of tokens on disk: an Arrow file and what was counted, written whole or not at all, read as a dataset."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Skipped
from hf_posenc.training.packing import Block

if TYPE_CHECKING:
    from datasets import Dataset

NAMED = 100
"""So many of the documents that were not used are kept by name; the others are counted."""

_TOKENS, _COUNTS = "blocks.arrow", "blocks.json"
_ROWS = 64


@dataclass(frozen=True)
class Counts:
    """What was counted while blocks were made.

    Attributes:
        length: Tokens in a block.
        blocks: Number of blocks.
        documents: Documents that are in them.
        tokens: Tokens of documents in blocks, without the special ones in front.
        unused: Tokens of those documents that are in no block.
        largest: The largest token id.
        sha256: Hash of all blocks, documents' boundaries included: equal on every rank and in every run.
        skipped: Number of documents that were not used.
        reasons: Name and reason of the first of them.
    """

    length: int
    blocks: int
    documents: int
    tokens: int
    unused: int
    largest: int
    sha256: str
    skipped: int
    reasons: tuple[Skipped, ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Counts:
        """What `dataclasses.asdict` gave."""
        reasons = tuple(Skipped(**each) for each in values["reasons"])
        return cls(**{**values, "reasons": reasons})

    def line(self) -> str:
        """All of it in a line."""
        share = self.unused / max(self.tokens + self.unused, 1)
        return (
            f"{self.blocks:,} blocks of {self.length:,} tokens from {self.documents:,} documents "
            f"({share:.0%} of their tokens are left over); {self.skipped:,} documents not used"
        )


@dataclass(frozen=True, eq=False)
class Blocks:
    """Training data.

    Attributes:
        dataset: Column `input_ids` (length,); packed also `document_lengths`, which sum to the length. Rows are numpy
            arrays, int64.
        counts: What was counted.
    """

    dataset: Dataset
    counts: Counts

    def __len__(self) -> int:
        return self.counts.blocks


class Writer:
    """Writes blocks into a folder.

    Args:
        folder: Exists and is empty.
        packed: Whether blocks hold several documents.
    """

    def __init__(self, folder: Path, packed: bool) -> None:
        require_datasets()
        import pyarrow as pa

        numbers = pa.list_(pa.int32())
        names = ("input_ids", "document_lengths") if packed else ("input_ids",)
        self._schema = pa.schema([(name, numbers) for name in names])
        self._packed, self._folder = packed, folder
        self._hash, self.blocks, self.largest = hashlib.sha256(), 0, -1

    def write(self, blocks: Iterable[Block]) -> None:
        """All blocks, some rows at a time; on the disk when this returns."""
        import pyarrow as pa

        with (self._folder / _TOKENS).open("wb") as file:
            with pa.ipc.new_stream(file, self._schema) as stream:
                rows: list[Block] = []
                for block in blocks:
                    self._count(block)
                    rows.append(block)
                    if len(rows) == _ROWS:
                        stream.write_batch(self._batch(rows))
                        rows = []
                stream.write_batch(self._batch(rows))
            file.flush()
            os.fsync(file.fileno())

    def close(self, **counted: Any) -> None:
        """Adds what was counted elsewhere; with this the folder is complete."""
        counts = Counts(
            blocks=self.blocks,
            largest=self.largest,
            sha256=self._hash.hexdigest(),
            **counted,
        )
        with (self._folder / _COUNTS).open("w", encoding="utf-8") as file:
            json.dump(asdict(counts), file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def _count(self, block: Block) -> None:
        self.blocks += 1
        self.largest = max(self.largest, int(block.ids.max()))
        for numbers in (block.ids, np.asarray(block.documents)):
            self._hash.update(numbers.astype("<i8").tobytes())

    def _batch(self, rows: list[Block]) -> Any:
        import pyarrow as pa

        columns = [pa.array([row.ids for row in rows], self._schema.field(0).type)]
        if self._packed:
            documents = [row.documents for row in rows]
            columns.append(pa.array(documents, self._schema.field(1).type))
        return pa.record_batch(columns, schema=self._schema)


def read_blocks(folder: Path, *, in_memory: bool = False) -> Blocks:
    """What a `Writer` has written.

    Args:
        folder: Where.
        in_memory: Copy it, so that the folder may go.

    Raises:
        PosencError: The folder is damaged.
    """
    from datasets import Dataset

    try:
        counts = json.loads((folder / _COUNTS).read_text(encoding="utf-8"))
        dataset = Dataset.from_file(str(folder / _TOKENS), in_memory=in_memory)
        found = Blocks(dataset.with_format("numpy"), Counts.from_dict(counts))
        if len(dataset) != len(found):
            raise ValueError(f"{len(dataset)} blocks, {len(found)} were written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PosencError(
            f"The prepared data in {folder} are damaged: remove that folder ({error})"
        ) from error
    return found


def require_datasets() -> None:
    """Says how to get the library that holds training data.

    Raises:
        PosencError: It is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise PosencError("Training needs the datasets library: pip install 'hf-posenc[train]'.")


def is_complete(folder: Path) -> bool:
    """Whether a writer has come to its end there."""
    return (folder / _COUNTS).is_file()


def remove(folder: Path) -> None:
    """Takes away what an interrupted writer has left."""
    if folder.exists():
        shutil.rmtree(folder)
