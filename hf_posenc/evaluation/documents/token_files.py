"""Token ids in files: `.npy`, and the bare arrays of `.bin` that LongLoRA, nanoGPT and others write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hf_posenc.evaluation.documents.document import Entry, Skipped
from hf_posenc.evaluation.documents.errors import UnreadableError, one_line, reason_of
from hf_posenc.evaluation.documents.names import printable
from hf_posenc.evaluation.documents.streams import check_regular
from hf_posenc.evaluation.documents.token_ids import document_of_ids

TOKEN_DTYPES = ("uint16", "uint32", "int32", "int64")
"""What a `.bin` file may consist of, little-endian."""

MAPPED = 1 << 24
"""Bytes from which on a file is mapped instead of read."""


def read_npy(path: Path) -> Iterator[Entry]:
    """One document, or a document per row of a matrix.

    Raises:
        UnreadableError: It is no array of numbers, or cannot be read.
    """
    name, size = printable(path), check_regular(path)
    try:
        values = np.load(path, mmap_mode="c" if size >= MAPPED else None, allow_pickle=False)
    except OSError as error:
        raise UnreadableError(reason_of(error)) from error
    except Exception as error:  # the header is Python, and so are the errors of reading it
        raise UnreadableError(f"not a .npy file of numbers ({one_line(error)})") from error
    if not isinstance(values, np.ndarray):  # an archive of several arrays under this name
        values.close()
        raise UnreadableError("not a .npy file but a .npz archive")
    if values.ndim == 2 and values.size:
        for index, row in enumerate(values):
            yield document_of_ids(f"{name}#{index}", row)
    else:
        yield document_of_ids(name, values)


def read_bin(path: Path, dtype: str) -> Iterator[Entry]:
    """One document: the whole file.

    Raises:
        UnreadableError: Its size is not that of so many numbers, or it cannot be read.
    """
    name, size = printable(path), check_regular(path)
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise UnreadableError(
            f"{size:,} bytes are no whole number of {dtype} ids; --token-dtype says what it holds"
        )
    if not size:
        yield Skipped(name, "empty")
        return
    try:
        if size >= MAPPED:
            yield document_of_ids(name, np.memmap(path, kind, mode="c"))
        else:
            yield document_of_ids(name, np.fromfile(path, kind))
    except OSError as error:
        raise UnreadableError(reason_of(error)) from error
