"""Tokens of a text, with the bytes and the words of the text up to the end of each."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hf_posenc.files import disk_errors

Numbers = np.ndarray[Any, np.dtype[Any]]

PART = 1 << 22
"""Most characters that are tokenized at a time: a tokenizer takes some hundred bytes for each token that it reports."""
IN_MEMORY = 1 << 20
"""Most tokens of a document that is kept in memory, 24 bytes each."""

# Every character that `str.split` splits at; none lies behind the ideographic space.
_SPACES = np.array([point for point in range(0x3001) if chr(point).isspace()], dtype=np.uint32)


def parts(chunks: Iterable[str]) -> Iterator[str]:
    """Yield a text in parts of at most `PART` characters, each but the last up to a line's end, or a word's."""
    held = ""
    for chunk in chunks:
        held += chunk
        while len(held) > PART:
            # not between two line ends, which a tokenizer may read as one token
            ends = (match.end() for match in re.finditer(r"\n(?=\S)", held[: PART + 1]))
            stop = max(ends, default=0) or max(0, held.rfind(" ", 0, PART)) or PART
            yield held[:stop]
            held = held[stop:]
    if held:
        yield held


def numbers(text: str, tokenizer: Any, before: tuple[int, int] = (0, 0)) -> Numbers:
    """Return the ids of a text's tokens, without special tokens, and the bytes and words up to the end of each.

    The shape is (n, 3), int64; (n, 1), the ids alone, if the tokenizer cannot report the places of its tokens. `before`
    are the bytes and words in front of the text.
    """
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    if not fast:
        return ids[:, None]
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    # An offset may be lower than the one before it; a token then adds no text to those in front of it.
    stops = np.maximum.accumulate(offsets[:, 1])
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    solid = ~np.isin(points, _SPACES)
    begins = solid & ~np.concatenate([[False], solid[:-1]])
    # In front of each character and behind the last.
    ends = (np.concatenate([[0], np.cumsum(x, dtype=np.int64)]) for x in (sizes, begins))
    return np.stack([ids, *(n + end[stops] for n, end in zip(before, ends, strict=True))], axis=1)


def stored(rows: Iterable[Numbers]) -> Numbers:
    """Return all rows of a document, those of `numbers`: in memory, or mapped from a nameless file if many."""
    room = "Let TMPDIR name a folder on a larger disk, or cut the documents (--max-doc-tokens)."
    columns, limit = 1, IN_MEMORY * 24
    with tempfile.SpooledTemporaryFile(max(1, limit)) as file:
        for part in rows:
            columns = part.shape[1]
            with disk_errors(f"The tokens cannot be written to {tempfile.gettempdir()}", room):
                file.write(np.ascontiguousarray(part, "<i8").tobytes())
        if file.tell() > limit:
            return np.memmap(file, "<i8", "r+").reshape(-1, columns)
        file.seek(0)
        return np.frombuffer(bytearray(file.read()), "<i8").reshape(-1, columns)
