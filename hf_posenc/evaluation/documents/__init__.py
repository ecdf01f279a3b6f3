"""Evaluation text: documents from files and datasets, and their tokens.

Readers (`read_paths`, `read_dataset`, `read_embedded`) yield texts, token ids, and a `Skipped` with the reason for
everything that cannot be used: no document is dropped silently. `load_documents` tokenizes them, a long text window by
window, and keeps the tokens in memory or in a temporary file.
"""

from __future__ import annotations

from hf_posenc.evaluation.documents.document import Document as Document
from hf_posenc.evaluation.documents.document import Entry as Entry
from hf_posenc.evaluation.documents.document import LongDocument as LongDocument
from hf_posenc.evaluation.documents.document import Skipped as Skipped
from hf_posenc.evaluation.documents.document import TokenizedDocument as TokenizedDocument
from hf_posenc.evaluation.documents.document import UnreadableError as UnreadableError
from hf_posenc.evaluation.documents.document import as_entries as as_entries
from hf_posenc.evaluation.documents.readers import read_dataset as read_dataset
from hf_posenc.evaluation.documents.readers import read_paths as read_paths
from hf_posenc.evaluation.documents.source import Vocabulary as Vocabulary
from hf_posenc.evaluation.documents.source import load_documents as load_documents
from hf_posenc.evaluation.documents.source import read_embedded as read_embedded
from hf_posenc.evaluation.documents.source import special_prefix as special_prefix
from hf_posenc.evaluation.documents.source import tokenize as tokenize
