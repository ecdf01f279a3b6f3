"""Where evaluation text comes from, and how it becomes tokens.

A document that cannot be used is never dropped in silence: every reader yields either a `Document` or a `Skipped`
with the reason, and both are counted in the result.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc.errors import PosencError


@dataclass(frozen=True)
class Document:
    """A text and the name that reports show for it."""

    name: str
    text: str


@dataclass(frozen=True)
class Skipped:
    """A document that could not be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """A document as token ids, without special tokens.

    Attributes:
        name: The document's name.
        ids: Token ids, shape (n,), int64.
        byte_ends: For each token, the number of UTF-8 bytes of the text up to its end, shape (n,), int64. A character
            that is split over several tokens counts with the first of them. `None` where the tokenizer does not say
            which text a token came from.
        sha256: Hash of the whole text, as UTF-8, before any cut.
    """

    name: str
    ids: Tensor
    byte_ends: Tensor | None
    sha256: str

    def bytes_between(self, first: int, stop: int) -> int | None:
        """UTF-8 bytes of the text of tokens `first .. stop-1`."""
        if self.byte_ends is None:
            return None
        before = int(self.byte_ends[first - 1]) if first else 0
        return int(self.byte_ends[stop - 1]) - before

    def to_dict(self) -> dict[str, Any]:
        """What a result stores of it: enough to tell whether two results read the same tokens."""
        tokens = hashlib.sha256(self.ids.numpy().astype("<i8").tobytes()).hexdigest()
        size = self.bytes_between(0, len(self.ids))
        return {
            "name": self.name,
            "tokens": len(self.ids),
            "bytes": size,
            "text_sha256": self.sha256,
            "tokens_sha256": tokens,
        }


def read_embedded() -> Iterator[Document]:
    """The held-out modules of the user's own Python: text that the embedded model was not trained on."""
    from hf_posenc.embedded import held_out_documents

    for name, text in held_out_documents():
        yield Document(name, text)


def read_paths(paths: Iterable[str]) -> Iterator[Document | Skipped]:
    """Text files, folders (every file below them, hidden ones left out) and glob patterns, each file once."""
    seen: set[Path] = set()
    for given in paths:
        files = _files(given)
        if not files:
            empty = Path(given).is_dir()
            yield Skipped(given, "a folder without files" if empty else "no such file")
        for path in files:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield _read(path)


def _files(given: str) -> list[Path]:
    path = Path(given).expanduser()
    if path.is_dir():
        below = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        return [
            path / file
            for file in sorted(below)
            if not any(part.startswith(".") for part in file.parts)
        ]
    if path.exists():
        return [path]
    found = glob.glob(str(path), recursive=True)  # noqa: PTH207 (pathlib's takes no absolute pattern)
    return [Path(file) for file in sorted(found) if Path(file).is_file()]


def _read(path: Path) -> Document | Skipped:
    try:
        return Document(str(path), path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return Skipped(str(path), f"not UTF-8 (byte 0x{byte:02x} at offset {error.start})")
    except OSError as error:
        return Skipped(str(path), f"cannot be read ({error.strerror or error})")


def read_dataset(
    name: str,
    *,
    config: str | None = None,
    split: str = "test",
    column: str = "text",
    streaming: bool = True,
) -> Iterator[Document | Skipped]:
    """The rows of one split of a dataset, through the `datasets` library: a hub name or a local folder.

    Raises:
        PosencError: `datasets` is not installed, or it cannot load this dataset or split, or there is no such column.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise PosencError(
            "--dataset needs the datasets library: pip install datasets. Text files work without it (--text)."
        ) from error
    what = f"{name}{f' ({config})' if config else ''}"
    try:
        rows = iter(load_dataset(name, config, split=split, streaming=streaming))
        for index, row in enumerate(rows):
            if column not in row:
                raise PosencError(
                    f"The dataset {what} has no column {column!r}; its columns are {', '.join(row)}. Pass --column."
                )
            label, text = f"{name}[{split}]#{index}", row[column]
            good = isinstance(text, str)
            yield (
                Document(label, text)
                if good
                else Skipped(label, f"column {column!r} holds no text")
            )
    except PosencError:
        raise
    except Exception as error:  # whatever the hub, a file format or a script of the dataset raises
        raise PosencError(
            f"The split {split!r} of dataset {what} cannot be read: {one_line(error)}"
        ) from error


def special_prefix(tokenizer: Any, policy: str) -> list[int]:
    """The special tokens that go in front of every window.

    Args:
        tokenizer: A transformers tokenizer.
        policy: `"auto"`, what the tokenizer itself puts in front of a text; `"always"`, its BOS token; `"never"`.

    Raises:
        PosencError: An unknown policy, or `"always"` with a tokenizer that has no BOS token.
    """
    if policy == "never":
        return []
    if policy == "always":
        if tokenizer.bos_token_id is None:
            raise PosencError(
                "--bos always: this tokenizer has no BOS token; use --bos auto or --bos never."
            )
        return [int(tokenizer.bos_token_id)]
    if policy != "auto":
        raise PosencError(f"Unknown BOS policy {policy!r}: auto, always or never.")
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return [int(token) for token in special[:start]]
    return []


def tokenize(
    document: Document, tokenizer: Any, max_tokens: int | None = None
) -> TokenizedDocument:
    """Turns a text into tokens, without special tokens, the first `max_tokens` of them."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(
        document.text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False
    )
    ids = torch.tensor(encoded["input_ids"][:max_tokens], dtype=torch.int64)
    ends = None
    if fast and len(ids):
        offsets = np.asarray(encoded["offset_mapping"][:max_tokens], dtype=np.int64)
        ends = torch.from_numpy(_byte_ends(document.text, offsets[:, 1]))
    digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).hexdigest()
    return TokenizedDocument(document.name, ids, ends, digest)


def _byte_ends(text: str, char_ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Turns ends in characters into ends in UTF-8 bytes."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    up_to = np.concatenate([[0], np.cumsum(sizes)])
    return np.asarray(up_to[np.maximum.accumulate(char_ends)], dtype=np.int64)


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


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
