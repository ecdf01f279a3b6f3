"""Tokens on disk, so that several processes, and the next run, need not tokenize the same books again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.document import BLOCK
from hf_posenc.evaluation.documents.spool import COLUMNS
from hf_posenc.evaluation.documents.window import Tokens

FORMAT = 1


class TokenCache:
    """A folder with one folder per document and tokenizer, each written beside its place and renamed into it.

    So any number of processes may read and write at once: an entry is there whole or not at all, and whoever comes
    second to write it throws his own away.

    Args:
        folder: Made where it is missing.
        tokenizer_sha256: What decides how a text becomes tokens (`identity.tokenizer_hash`).
    """

    def __init__(self, folder: Path, tokenizer_sha256: str) -> None:
        import tokenizers

        self.folder = folder
        self._prefix = f"{FORMAT}/{tokenizers.__version__}/{tokenizer_sha256}"

    def through(
        self, text_sha256: str, max_tokens: int | None, parts: Iterable[Tokens]
    ) -> Iterator[Tokens]:
        """The tokens of a text: from the cache, else from `parts`, which is then written to it.

        Raises:
            PosencError: The folder cannot be written to.
        """
        key = f"{self._prefix}/{text_sha256}/{max_tokens}"
        entry = self.folder / hashlib.sha256(key.encode()).hexdigest()
        if entry.is_dir():
            yield from _read(entry)
        else:
            yield from self._written(entry, parts)

    def _written(self, entry: Path, parts: Iterable[Tokens]) -> Iterator[Tokens]:
        unfinished: Path | None = None
        try:
            with _as_posenc_error(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=self.folder))
            for part in parts:
                with _as_posenc_error(self.folder):
                    _append(unfinished, part)
                yield part
            with contextlib.suppress(OSError):  # somebody else was first
                unfinished.rename(entry)
        finally:
            if unfinished is not None:
                shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _as_posenc_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PosencError(
            f"The token cache {folder} cannot be written to: {error.strerror or error}"
        ) from error


def _append(folder: Path, part: Tokens) -> None:
    for name, kind in COLUMNS.items():
        values = getattr(part, name)
        if values is not None:
            with (folder / name).open("ab") as file:
                file.write(np.ascontiguousarray(values, dtype=kind).data)
                file.flush()
                os.fsync(file.fileno())


def _read(entry: Path) -> Iterator[Tokens]:
    try:
        with contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context((entry / name).open("rb"))
                for name in COLUMNS
                if (entry / name).exists()
            }
            while True:
                block = {n: np.fromfile(file, COLUMNS[n], BLOCK) for n, file in files.items()}
                if len({len(values) for values in block.values()}) != 1:
                    raise EOFError("not as many ends as tokens")
                tokens = Tokens(
                    block["ids"].astype(np.int64), block.get("byte_ends"), block.get("word_ends")
                )
                yield tokens
                if len(tokens) < BLOCK:
                    return
    except (OSError, EOFError, KeyError) as error:
        raise PosencError(
            f"The token cache {entry} is damaged: remove that folder ({error})"
        ) from error
