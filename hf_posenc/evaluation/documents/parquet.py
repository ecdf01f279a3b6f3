"""Parquet files: a document per row, a few rows in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hf_posenc.evaluation.documents.document import Entry, Skipped
from hf_posenc.evaluation.documents.errors import UnreadableError, one_line
from hf_posenc.evaluation.documents.fields import Field
from hf_posenc.evaluation.documents.names import printable
from hf_posenc.evaluation.documents.streams import check_regular

_ROWS = 8


def read_parquet(path: Path, field: Field) -> Iterator[Entry]:
    """The rows of a file; only the column that is asked for is read.

    Raises:
        UnreadableError: The file cannot be read, has no such column, or there is no pyarrow.
    """
    check_regular(path)
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UnreadableError(
            ".parquet files need the pyarrow library: pip install 'hf-posenc[data]'"
        ) from error
    try:
        with ParquetFile(path) as file:
            if field.name not in file.schema_arrow.names:
                raise UnreadableError(field.missing(file.schema_arrow.names))
            announced, index = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=[field.name]):
                for row in batch.to_pylist():
                    yield field.entry(f"{printable(path)}#{index}", row)
                    index += 1
            if index != announced:
                raise UnreadableError(f"damaged: it has {index:,} rows and announces {announced:,}")
            if not index:
                yield Skipped(printable(path), "a parquet file without rows")
    except UnreadableError:
        raise
    except Exception as error:  # those of Arrow, of the disk, and of text that is no UTF-8
        raise UnreadableError(f"not a parquet file, or damaged ({one_line(error)})") from error
