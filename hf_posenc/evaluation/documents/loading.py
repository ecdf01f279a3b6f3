"""The documents of a run: read, tokenized, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.document import Document, Skipped, TokenizedDocument
from hf_posenc.evaluation.documents.tokenizing import tokenize


def load_documents(
    source: Iterable[Document | Skipped],
    tokenizer: Any,
    *,
    min_tokens: int,
    max_tokens: int | None = None,
    limit: int | None = None,
    seen: Callable[[str], None] = lambda name: None,
) -> tuple[list[TokenizedDocument], list[Skipped]]:
    """Reads documents until `limit` usable ones are found.

    Args:
        source: A reader from this module.
        tokenizer: A transformers tokenizer.
        min_tokens: What a document must have to serve the longest length: the same documents are used for every length.
        max_tokens: Documents are cut to so many tokens.
        limit: Number of usable documents after which reading stops.
        seen: Called with each document's name, for progress.

    Returns:
        The usable documents and the skipped ones, in the order of the source.

    Raises:
        PosencError: No document is usable.
    """
    usable: list[TokenizedDocument] = []
    skipped: list[Skipped] = []
    longest = 0
    for item in source:
        seen(item.name)
        if isinstance(item, Document) and not item.text.strip():
            item = Skipped(item.name, "empty")
        if isinstance(item, Skipped):
            skipped.append(item)
            continue
        document = tokenize(item, tokenizer, max_tokens)
        longest = max(longest, len(document.ids))
        if len(document.ids) < min_tokens:
            reason = (
                f"too short: {len(document.ids):,} tokens, the longest length needs {min_tokens:,}"
            )
            skipped.append(Skipped(item.name, reason))
            continue
        usable.append(document)
        if limit is not None and len(usable) == limit:
            break
    if not usable:
        raise PosencError(_none_left(skipped, longest, min_tokens))
    return usable, skipped


def _none_left(skipped: Sequence[Skipped], longest: int, min_tokens: int) -> str:
    if not skipped:
        return "There is no document to read."
    first = f"{skipped[0].name}: {skipped[0].reason}"
    others = f"; and {len(skipped) - 1} more" if len(skipped) > 1 else ""
    advice = ""
    if longest:
        advice = f" The longest document has {longest:,} tokens, {min_tokens:,} are needed: give shorter --lengths."
    return f"No document can be used ({first}{others}).{advice}"
