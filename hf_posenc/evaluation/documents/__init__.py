"""Where evaluation text comes from, and how it becomes tokens.

A document that cannot be used is never dropped in silence: every reader yields a document or a `Skipped` with the
reason, and both are counted in the result.

Readers (`files`, `datasets`, `embedded`) give texts, texts that stay in their files, or token ids; `loading` turns them
into tokens, a long text window by window (`joining`), and keeps those in memory or in a temporary file (`spool`).
"""

from __future__ import annotations

from hf_posenc.evaluation.documents.cache import TokenCache
from hf_posenc.evaluation.documents.datasets import read_dataset
from hf_posenc.evaluation.documents.document import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    as_entries,
)
from hf_posenc.evaluation.documents.embedded import EMBEDDED_SOURCE, read_embedded
from hf_posenc.evaluation.documents.errors import UnreadableError, one_line
from hf_posenc.evaluation.documents.files import read_paths
from hf_posenc.evaluation.documents.loading import load_documents
from hf_posenc.evaluation.documents.names import printable
from hf_posenc.evaluation.documents.special import special_prefix
from hf_posenc.evaluation.documents.token_files import TOKEN_DTYPES
from hf_posenc.evaluation.documents.tokenizing import tokenize

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
    "one_line",
    "printable",
    "read_dataset",
    "read_embedded",
    "read_paths",
    "special_prefix",
    "tokenize",
]
