"""Text into tokens that know their place in it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from hf_posenc.evaluation.documents.document import Document, TokenizedDocument
from hf_posenc.evaluation.documents.places import bytes_up_to, code_points, words_up_to


def tokenize(
    document: Document, tokenizer: Any, max_tokens: int | None = None
) -> TokenizedDocument:
    """Turns a text into tokens, without special tokens, the first `max_tokens` of them."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(
        document.text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False
    )
    ids = torch.tensor(encoded["input_ids"][:max_tokens], dtype=torch.int64)
    byte_ends = word_ends = None
    if fast and len(ids):
        offsets = np.asarray(encoded["offset_mapping"][:max_tokens], dtype=np.int64)
        # a place may run backwards, and a token takes nothing away from those in front of it
        ends = np.maximum.accumulate(offsets[:, 1])
        points = code_points(document.text)
        byte_ends = torch.from_numpy(bytes_up_to(points)[ends])
        word_ends = torch.from_numpy(words_up_to(points)[ends])
    digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).hexdigest()
    return TokenizedDocument(document.name, ids, byte_ends, digest, word_ends)
