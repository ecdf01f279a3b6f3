"""Where evaluation text comes from, and how it becomes tokens.

A document that cannot be used is never dropped in silence: every reader yields a document or a `Skipped` with the
reason, and both are counted in the result.

Readers (`files`, `datasets`, `embedded`) give texts, texts that stay in their files, or token ids; `loading` turns them
into tokens, a long text window by window (`joining`), and keeps those in memory or in a temporary file (`spool`).
"""

from __future__ import annotations

from hf_posenc.evaluation.documents.document import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    UnreadableError,
    as_entries,
    printable,
    special_prefix,
)
from hf_posenc.evaluation.documents.files import read_paths
from hf_posenc.evaluation.documents.formats import TOKEN_DTYPES, read_dataset
from hf_posenc.evaluation.documents.loading import (
    EMBEDDED_SOURCE,
    load_documents,
    read_embedded,
    tokenize,
)
from hf_posenc.evaluation.documents.storage import TokenCache

__all__ = [
    "EMBEDDED_SOURCE",
    "TOKEN_DTYPES",
    "Document",
    "Entry",
    "LongDocument",
    "Skipped",
    "TokenCache",
    "TokenizedDocument",
    "UnreadableError",
    "as_entries",
    "load_documents",
    "printable",
    "read_dataset",
    "read_embedded",
    "read_paths",
    "special_prefix",
    "tokenize",
]
