"""Evaluation text: documents from files and datasets, and their tokens.

Readers (`read_paths`, `read_dataset`, `read_embedded`) yield texts, token ids, and a `Skipped` with the reason for
everything that cannot be used: no document is dropped silently. `load_documents` tokenizes them, a long text window by
window, and keeps the tokens in memory or in a temporary file.
"""

from __future__ import annotations

from hf_posenc.evaluation.documents.document import (
    Conversation,
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    UnreadableError,
    as_entries,
)
from hf_posenc.evaluation.documents.readers import read_dataset, read_paths
from hf_posenc.evaluation.documents.source import (
    Vocabulary,
    load_documents,
    read_embedded,
    special_prefix,
    tokenize,
)

__all__ = [
    "Conversation",
    "Document",
    "Entry",
    "LongDocument",
    "Skipped",
    "TokenizedDocument",
    "UnreadableError",
    "Vocabulary",
    "as_entries",
    "load_documents",
    "read_dataset",
    "read_embedded",
    "read_paths",
    "special_prefix",
    "tokenize",
]
