"""Documents that come as token ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from hf_posenc.evaluation.documents.document import Skipped, TokenizedDocument
from hf_posenc.evaluation.documents.errors import UnreadableError
from hf_posenc.evaluation.documents.special import special_prefix


def document_of_ids(name: str, values: Any) -> TokenizedDocument | Skipped:
    """A document of ids; what text they stand for is not known. A memory-mapped array stays one.

    Args:
        name: The document's name.
        values: A list or an array of whole numbers, shape (n,).
    """
    try:
        ids = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths, numbers of 80 bits
        return Skipped(name, "holds no list of token ids")
    if not ids.size:
        return Skipped(name, "empty")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        return Skipped(name, f"holds {_kind(values, ids)}, not a list of token ids")
    if not ids.dtype.isnative:
        ids = ids.astype(ids.dtype.newbyteorder("="))
    return TokenizedDocument(name, torch.from_numpy(ids), None, None)


class Vocabulary:
    """What a tokenizer can give.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._prefix = special_prefix(tokenizer, "auto")
        self._size = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)

    def usable(
        self, document: TokenizedDocument, max_tokens: int | None = None
    ) -> TokenizedDocument:
        """A document of ids as the tokenizer would have given it: without special tokens in front, and cut.

        Raises:
            UnreadableError: An id that the tokenizer cannot give, so another one wrote them.
        """
        prefix = self._prefix
        first = len(prefix) if document.tokens(0, len(prefix)).tolist() == prefix else 0
        stop = None if max_tokens is None else first + max_tokens
        found = dataclasses.replace(document, ids=document.ids[first:stop])
        for block in found.blocks():
            least, largest = int(block.min()), int(block.max())
            if least < 0:
                raise UnreadableError(f"token {least} is negative")
            if largest >= self._size:
                raise UnreadableError(
                    f"token {largest:,} is outside the vocabulary of {self._size:,}: not this tokenizer's ids"
                )
        return found


def _kind(values: Any, found: np.ndarray[Any, Any]) -> str:
    if values is None:
        return "null"
    if found.ndim == 0:
        return type(values).__name__
    return f"an array of {found.dtype}, {found.ndim} dimension{'s' * (found.ndim != 1)}"
