"""The source of a run's documents: the options' files or dataset, a caller's texts, or the held-out modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.document import (
    Entry,
    Skipped,
    TokenizedDocument,
    as_entries,
    printable,
)
from hf_posenc.evaluation.documents.loading import EMBEDDED_SOURCE, load_documents, read_embedded
from hf_posenc.evaluation.documents.readers import read_dataset, read_paths
from hf_posenc.evaluation.documents.storage import TokenCache
from hf_posenc.evaluation.options import DocumentOptions, ReadingOptions


@dataclass(frozen=True)
class Source:
    """A reader of documents that can be restarted.

    Attributes:
        read: Return the reader, from its first document.
        about: Description stored in results, JSON-ready.
        embedded: True for the held-out modules of the standard library, the default.
        token_cache: Folder that keeps the documents' tokens from run to run; `None`: no cache.
        seen: Called with the name of every document that is read.
    """

    read: Callable[[], Iterable[Entry]] = read_embedded
    about: dict[str, Any] = field(default_factory=lambda: EMBEDDED_SOURCE)
    embedded: bool = True
    token_cache: Path | None = None
    seen: Callable[[str], None] = lambda name: None

    @classmethod
    def of(cls, documents: Iterable[str | Entry]) -> Source:
        """Return the source of texts or entries that a Python caller passes."""
        return cls(lambda: as_entries(documents), {"kind": "python"}, embedded=False)

    def load(
        self,
        tokenizer: Any,
        options: ReadingOptions,
        *,
        min_tokens: int,
        embedded_limit: int | None = None,
        embedded_tokens: int | None = None,
    ) -> tuple[list[TokenizedDocument], list[Skipped], dict[str, Any]]:
        """Read and tokenize the documents.

        Args:
            tokenizer: A transformers tokenizer.
            options: Number of documents, and tokens of each.
            min_tokens: Documents with fewer tokens are skipped.
            embedded_limit: Default number of the held-out modules.
            embedded_tokens: Default number of tokens of each held-out module.

        Returns:
            The usable documents, the skipped ones, and the description stored in results.

        Raises:
            PosencError: No document can be used.
        """
        limit, max_tokens = options.limit, options.max_doc_tokens
        if self.embedded:
            limit, max_tokens = limit or embedded_limit, max_tokens or embedded_tokens
        documents, skipped = load_documents(
            self.read(),
            tokenizer,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            limit=limit,
            seen=self.seen,
            cache=token_cache(self.token_cache, tokenizer),
        )
        return documents, skipped, {**self.about, "limit": limit, "max_doc_tokens": max_tokens}

    def reload(
        self, documents: Iterable[TokenizedDocument], tokenizer: Any
    ) -> list[TokenizedDocument]:
        """Return the same documents in another tokenizer's tokens; reading stops after the last of them."""
        names = {document.name for document in documents}

        def same() -> Iterable[Entry]:
            for entry in self.read():
                if entry.name in names:
                    names.discard(entry.name)
                    yield entry
                if not names:
                    return

        return load_documents(same(), tokenizer, min_tokens=1)[0]


def source_of(options: DocumentOptions) -> Source:
    """Return the source that the options name; by default the held-out modules.

    Raises:
        PosencError: Two sources, or a model instead of a text.
    """
    if options.text and options.dataset is not None:
        raise PosencError("--text and --dataset exclude each other: give one of them.")
    cache = options.token_cache
    reading: dict[str, Any] = {
        "split": options.split,
        "column": options.column,
        "tokenized": options.tokenized,
    }
    if options.text:
        paths = list(options.text)
        # os.path, since pathlib raises for a name that is too long
        configs = {path: os.path.join(path, "config.json") for path in paths}  # noqa: PTH118
        model = next((path for path in paths if os.path.isfile(configs[path])), None)  # noqa: PTH113
        if model is not None:
            raise PosencError(
                f"--text {model} is a model's folder. MODEL goes in front of the options."
            )
        reading["token_dtype"] = options.token_dtype
        about = {"kind": "text", "paths": [printable(path) for path in paths], **reading}
        return Source(lambda: read_paths(paths, **reading), about, False, cache)
    if options.dataset is not None:
        name = options.dataset
        reading = {"config": options.config, **reading, "streaming": options.streaming}
        about = {"kind": "dataset", "name": name, **reading}
        return Source(lambda: read_dataset(name, **reading), about, False, cache)
    if options.tokenized is not None:
        raise PosencError("--tokenized names a column of a --dataset, or of rows in --text files.")
    return Source(token_cache=cache)


def token_cache(folder: Path | None, tokenizer: Any) -> TokenCache | None:
    """Return the cache of a tokenizer's tokens in a folder; `None` without a folder."""
    if folder is None:
        return None
    from hf_posenc.evaluation.measuring.identity import tokenizer_hash

    return TokenCache(folder, tokenizer_hash(tokenizer))
