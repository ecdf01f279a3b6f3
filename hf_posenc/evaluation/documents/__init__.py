"""Where evaluation text comes from, and how it becomes tokens.

A document that cannot be used is never dropped in silence: every reader yields either a `Document` or a `Skipped`
with the reason, and both are counted in the result.
"""

from __future__ import annotations

from hf_posenc.evaluation.documents.datasets import read_dataset
from hf_posenc.evaluation.documents.document import Document, Skipped, TokenizedDocument
from hf_posenc.evaluation.documents.embedded import read_embedded
from hf_posenc.evaluation.documents.errors import one_line
from hf_posenc.evaluation.documents.files import read_paths
from hf_posenc.evaluation.documents.loading import load_documents
from hf_posenc.evaluation.documents.special import special_prefix
from hf_posenc.evaluation.documents.tokenizing import tokenize

__all__ = [
    "Document",
    "Skipped",
    "TokenizedDocument",
    "load_documents",
    "one_line",
    "read_dataset",
    "read_embedded",
    "read_paths",
    "special_prefix",
    "tokenize",
]
