"""Documents of a run: where they come from, and their tokens, checked and counted."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.document import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    UnreadableError,
    as_entries,
    printable,
)
from hf_posenc.evaluation.documents.named import NAMED, is_name
from hf_posenc.evaluation.documents.readers import files_of, is_saved, read_dataset, read_paths
from hf_posenc.evaluation.options import DocumentOptions, ReadingOptions
from hf_posenc.files import disk_errors

if TYPE_CHECKING:  # a wrong word is refused without numpy and torch
    import numpy as np

    Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

PART = 1 << 22
"""Most characters that are tokenized at a time: a tokenizer takes some hundred bytes for each token that it reports."""
IN_MEMORY = 1 << 20
"""Most tokens of a document that is kept in memory, 24 bytes each."""

# Every character that `str.split` splits at; none lies behind the ideographic space.
_SPACES = [point for point in range(0x3001) if chr(point).isspace()]
_ROWS = re.compile(r"\.(jsonl|ndjson|parquet)")


def read_embedded() -> Iterator[Document]:
    """Return the held-out modules of the running Python: text that the embedded model was not trained on."""
    from hf_posenc.embedded import held_out_documents

    return itertools.starmap(Document, held_out_documents())


@dataclass(frozen=True)
class Source:
    """A reader of documents that can be restarted, and its description in results.

    `embedded` is True for the held-out modules of the standard library, the default. `seen` is called with the name of
    every document that is read.
    """

    read: Callable[[], Iterable[Entry]] = read_embedded
    about: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"kind": "held-out modules of the standard library"}
    )
    embedded: bool = True
    seen: Callable[[str], None] = lambda name: None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.read())

    @classmethod
    def of(cls, documents: Iterable[str | Entry]) -> Source:
        """Return the source of texts or entries that a Python caller passes, or of documents by their name."""
        if isinstance(documents, str) and documents in NAMED:
            return source_of(DocumentOptions(text=[documents]))
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
        """Return the usable documents, the skipped ones, and the description stored in results.

        `embedded_limit` and `embedded_tokens` are the options' defaults for the held-out modules.
        """
        limit, max_tokens = options.limit, options.max_doc_tokens
        if self.embedded:
            limit, max_tokens = limit or embedded_limit, max_tokens or embedded_tokens
        load = functools.partial(load_documents, self.read(), tokenizer, seen=self.seen)
        documents, skipped = load(min_tokens=min_tokens, max_tokens=max_tokens, limit=limit)
        return documents, skipped, {**self.about, "limit": limit, "max_doc_tokens": max_tokens}


def source_of(options: DocumentOptions) -> Source:
    """Return the source that the options name; by default the held-out modules."""
    if options.text and options.dataset is not None:
        raise PosencError("--text and --dataset exclude each other: give one of them.")
    reading = {name: getattr(options, name) for name in ("split", "column", "tokenized")}
    if options.text:
        paths = list(options.text)
        for path in paths:  # os.path, since pathlib raises for a name that is too long
            if os.path.isfile(os.path.join(path, "config.json")):  # noqa: PTH113, PTH118
                raise PosencError(f"{path} is a model's folder. MODEL goes before the options.")
        reading["encoding"] = options.encoding
        about = {"kind": "text", "paths": [printable(path) for path in paths], **reading}
        if any(map(is_name, paths)):
            about["transformers"] = metadata.version("transformers")  # `code` is a part of it
        return Source(lambda: read_paths(paths, **reading), about, False)
    if options.dataset is not None:
        name = options.dataset
        reading = {"config": options.config, **reading, "streaming": options.streaming}
        about = {"kind": "dataset", "name": name, **reading}
        return Source(lambda: read_dataset(name, **reading), about, False)
    if options.tokenized is not None:
        raise PosencError("--tokenized names a column of a --dataset, or of rows in --text files.")
    return Source()


def refuse_ignored(options: DocumentOptions) -> None:
    """Raise if an option was given that nothing in these documents would use."""
    paths, hub = [Path(path).expanduser() for path in options.text or ()], options.dataset
    saved = any(map(is_saved, paths if hub is None else (*paths, Path(hub))))
    on_hub, rows = hub is not None and not saved, hub is not None or saved
    texts = (str(path) for path in paths if not is_name(str(path)))
    files = (file for text in texts for file in files_of(text))
    with_rows, others = itertools.tee(bool(_ROWS.search(file.name)) for file in files)
    column = "rows (a --dataset, JSON lines or parquet) without --tokenized"
    users: dict[str, tuple[str, Iterable[bool]]] = {
        "config": ("a --dataset on the hub", [on_hub]),
        "split": ("a --dataset", [rows]),
        "streaming": ("a --dataset on the hub", [on_hub]),
        "column": (column, itertools.chain([rows], with_rows) if options.tokenized is None else ()),
        "encoding": ("files of text", (not each for each in others)),
    }
    for name, (user, uses) in users.items():
        value = getattr(options, name)
        if value != getattr(DocumentOptions, name) and not any(uses):
            given = f"--{name.replace('_', '-')} {value}"
            given = "--no-streaming" if name == "streaming" else given
            reason = "and nothing here would use it: leave it out."
            raise PosencError(f"{given} is for {user}, {reason}")


def check_readable(source: Source, paths: Sequence[str]) -> None:
    """Raise if none of these files, folders and patterns has a document; reading stops at the first."""
    for name in NAMED.keys() & {path for path in paths if os.path.lexists(path)}:
        kept = f"{name} is the one in this folder, not the documents of that name."
        warnings.warn(kept, stacklevel=2)
    skipped: list[Skipped] = []
    for entry in source.read() if paths and not any(map(is_saved, map(Path, paths))) else ():
        if isinstance(entry, Document) and not entry.text.strip():
            entry = Skipped(entry.name, "empty")
        if not isinstance(entry, Skipped):
            return
        skipped.append(entry)
    if skipped:
        raise PosencError(_none_left(skipped, 0, 0, None))


def load_documents(
    source: Iterable[Entry],
    tokenizer: Any,
    *,
    min_tokens: int,
    max_tokens: int | None = None,
    limit: int | None = None,
    seen: Callable[[str], None] = lambda name: None,
) -> tuple[list[TokenizedDocument], list[Skipped]]:
    """Read and tokenize documents until `limit` usable ones are found.

    Args:
        source: A reader of this package.
        tokenizer: A transformers tokenizer.
        min_tokens: Tokens that the longest length requires; the same documents serve every length.
        max_tokens: Documents are cut to so many tokens; a file is read no further than that takes.
        limit: Number of usable documents after which reading stops.
        seen: Called with each document's name, for progress.

    Returns:
        The usable documents and the skipped ones, in the order of the source, no two of the same name. A copy is
        skipped: intervals take documents as independent, and what is chosen on one must not be judged on its copy.

    Raises:
        PosencError: No document is usable.
    """
    usable: dict[str, TokenizedDocument] = {}  # by name
    skipped: list[Skipped] = []
    names: dict[str, str] = {}  # by content
    vocabulary, longest = functools.cache(lambda: Vocabulary(tokenizer)), 0
    for entry in source:
        seen(entry.name)
        if isinstance(entry, Skipped):
            skipped.append(entry)
            continue
        try:
            if isinstance(entry, TokenizedDocument):
                document = vocabulary().usable(entry, max_tokens)
            else:
                document = tokenize(entry, tokenizer, max_tokens)
            longest = max(longest, size := len(document))
            if size < min_tokens:
                raise UnreadableError(f"too short: {size:,} tokens, {min_tokens:,} are needed")
            content = document.sha256 or document.content
            if content in names:
                raise UnreadableError(f"the same text as {names[content]}")
        except UnreadableError as error:
            skipped.append(Skipped(entry.name, str(error)))
            continue
        names[content] = entry.name
        # A result stores documents by name: those of the same name are numbered.
        numbered = (f"{document.name} ({number})" for number in itertools.count(2))
        name = next(n for n in itertools.chain([document.name], numbered) if n not in usable)
        usable[name] = dataclasses.replace(document, name=name)
        if len(usable) == limit:
            break
    if not usable:
        raise PosencError(_none_left(skipped, longest, min_tokens, max_tokens))
    return list(usable.values()), skipped


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
    import numpy as np

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
    import numpy as np

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


def tokenize(
    document: Document | LongDocument, tokenizer: Any, max_tokens: int | None = None
) -> TokenizedDocument:
    """Convert a text to tokens, without special tokens, the first `max_tokens` of them.

    Args:
        document: The text. One of more than four million characters is tokenized part by part, cut at line ends.
        tokenizer: A tokenizer of transformers.
        max_tokens: Number of tokens to keep; `None`: all.

    Returns:
        The token ids with the document's name, hashes and sizes.

    Raises:
        PosencError: The text is blank, or cannot be read or tokenized.
    """
    import torch

    digest, ends, hashed, blank = hashlib.sha256(), ["", ""], None, True

    def rows() -> Iterator[Numbers]:
        nonlocal hashed, blank
        size = words = count = 0
        for text in parts(document.chunks()):
            if count == max_tokens:  # and there is more text
                hashed = size
                return
            try:
                data = text.encode()
            except UnicodeEncodeError as error:
                half = error.object[error.start].encode("ascii", "backslashreplace").decode()
                reason = f"holds half of a surrogate pair ({half}), which is not a character"
                raise UnreadableError(reason) from error
            digest.update(data)
            blank = blank and not text.strip()
            ends[:] = ends[0] or text[0], text[-1]
            own = numbers(text, tokenizer, (size, words))
            own = own[: None if max_tokens is None else max_tokens - count]
            size, words, count = size + len(data), words + len(text.split()), count + len(own)
            yield own

    table = stored(rows())
    if blank:
        raise UnreadableError("empty")
    columns = torch.from_numpy(table).T
    ids, *counts = columns if len(table) > IN_MEMORY else columns.contiguous()
    byte_ends, word_ends = counts or (None, None)
    about = (digest.hexdigest(), word_ends, hashed, sum(end.isspace() for end in ends))
    return TokenizedDocument(document.name, ids, byte_ends, *about)


def special_prefix(tokenizer: Any, policy: str) -> list[int]:
    """Return the special tokens in front of every window.

    The policy is `"auto"` (those that the tokenizer itself puts first), `"always"` (its BOS token), `"never"`, or
    `"bos-or-eos"`, as lm-evaluation-harness does.
    """
    if policy == "never":
        return []
    if policy in ("always", "bos-or-eos"):
        bos, eos = tokenizer.bos_token_id, getattr(tokenizer, "eos_token_id", None)
        if (token := eos if bos is None and policy == "bos-or-eos" else bos) is not None:
            return [int(token)]
        raise PosencError(
            "--bos always: this tokenizer has no BOS token; use --bos auto or --bos never."
            if policy == "always"
            else "--preset lm-eval puts BOS or EOS first; this tokenizer has neither."
        )
    if policy != "auto":
        raise PosencError(f"Unknown BOS policy {policy!r}: auto, always or never.")
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return [int(token) for token in special[:start]]
    return []


class Vocabulary:
    """The token ids that a transformers tokenizer can produce."""

    def __init__(self, tokenizer: Any) -> None:
        self._prefix = special_prefix(tokenizer, "auto")
        self.size = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)

    def usable(self, document: TokenizedDocument, most: int | None = None) -> TokenizedDocument:
        """Return a document of ids as the tokenizer would produce it: without special tokens in front, and cut."""
        prefix = self._prefix
        first = len(prefix) if document.tokens(0, len(prefix)).tolist() == prefix else 0
        stop = None if most is None else first + most
        cut = dataclasses.replace(document, ids=document.ids[first:stop])
        for block in cut.blocks():
            least, largest = int(block.min()), int(block.max())
            if least < 0:
                raise UnreadableError(f"token {least} is negative")
            if largest >= self.size:
                outside = f"token {largest:,} is outside the vocabulary of {self.size:,}"
                raise UnreadableError(f"{outside}: not this tokenizer's ids")
        return cut


def _none_left(skipped: Sequence[Skipped], longest: int, needed: int, cut: int | None) -> str:
    if not skipped:
        return "There is no document to read."
    others = f"; and {len(skipped) - 1} more" if len(skipped) > 1 else ""
    advice = (
        f" The longest document has {longest:,} tokens, {needed:,} are needed: give shorter lengths, or "
        f"{'a larger --max-doc-tokens' if (cut or needed) < needed else 'longer documents'}."
    )
    return f"No document can be used ({skipped[0].name}: {skipped[0].reason}{others}).{advice if longest else ''}"
