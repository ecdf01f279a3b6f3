"""The text that is always there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_posenc.evaluation.documents.document import Document

EMBEDDED_SOURCE: dict[str, Any] = {"kind": "held-out modules of the standard library"}
"""What a result says of `read_embedded`."""


def read_embedded() -> Iterator[Document]:
    """The held-out modules of the user's own Python: text that the embedded model was not trained on."""
    from hf_posenc.embedded import held_out_documents

    for name, text in held_out_documents():
        yield Document(name, text)
