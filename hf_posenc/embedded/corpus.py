"""Training corpus of the embedded model: Python source of the running environment.

Files are selected by rules that a reader can check:

1. The corpus contains the standard library; that of the embedded model (`scripts/train_tiny_llama.py`) also every
   installed distribution with a permissive licence in its metadata.
2. It contains no tests, no vendored copies (which have other licences) and no generated tables.
3. It contains no held-out module, and no file that shares more than `HELD_OUT_SHARE` of its distinctive lines with them
   (backports, forks, type-checker plugins that quote them).
4. It contains no duplicates, exact or near: a file is left out if more than `DUPLICATE_SHARE` of its distinctive lines
   are in the files before it.
5. It contains a limited number of bytes of each distribution, so that none dominates. The standard library, which the
   held-out modules are from, is included whole.

The order is fixed: standard library first, then distributions by name, files by path. Under the limit of rule 5, a hash
of their paths decides which files of a distribution are included.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hf_posenc.embedded import HELD_OUT, held_out_documents, held_out_files

HELD_OUT_SHARE = 0.10
DUPLICATE_SHARE = 0.50
MIN_BYTES, MAX_BYTES = 512, 400_000
STDLIB = "python"  # the source that holds the standard library
MIN_LINE = 24  # characters; a shorter line ("return self", "else:") may come from anywhere

_SKIPPED_FOLDERS = {
    *("test", "tests", "testing", "idle_test", "__pycache__"),
    *("_vendor", "vendor", "vendored", "extern", "third_party"),
    *("site-packages", "dist-packages", "ensurepip", "pydoc_data", "encodings"),
}
_TEST_FILE = re.compile(r"(test_.*|.*_tests?|tests?|conftest)\.py")
_GENERATED = re.compile(
    r"(?i)(auto-?|automatically |this file (is|was) )generated|generated (by|from|using|with)|do not edit"
)
_RULES = (
    *("test or vendored", "too short or too long", "not UTF-8", "generated", "held out"),
    *("shares lines with a held-out module", "duplicate", "limit of its distribution"),
)
_IMPORT = re.compile(r"(from\s+\S+\s+)?import\s")


@dataclass(frozen=True)
class Source:
    """One distribution, or the standard library, whose `.py` files, relative to `root`, may enter the corpus."""

    name: str
    version: str
    licence: str
    root: Path
    files: tuple[str, ...]


@dataclass
class Corpus:
    """The selected files in corpus order: source name, relative path, text.

    `composition` has a row per source with at least one file, `left_out` the number of files that each rule left out.
    """

    files: list[tuple[str, str, str]] = field(default_factory=list)
    composition: list[dict[str, str | int]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def standard_library() -> Source:
    """Return the standard library of the running Python."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = sorted(file.relative_to(stdlib).as_posix() for file in _modules(stdlib))
    return Source(STDLIB, platform.python_version(), "PSF-2.0", stdlib, tuple(files))


def select(
    sources: Iterable[Source], *, bytes_per_source: int, stdlib: Path | None = None
) -> Corpus:
    """Select the corpus by the rules at the top of this module.

    The held-out modules are those of `stdlib`, by default the running standard library.
    """
    held_out_paths = {file.resolve() for name in HELD_OUT for file in held_out_files(name, stdlib)}
    held_out_lines: set[bytes] = set()
    for _, text in held_out_documents(stdlib):
        held_out_lines |= distinctive_lines(text)
    seen: set[bytes] = set()
    corpus = Corpus(left_out=dict.fromkeys(_RULES, 0))
    for source in sources:
        chosen: list[tuple[str, str, str]] = []
        taken = 0
        for path in sorted(source.files, key=lambda path: _digest(f"{source.name}/{path}")):
            if taken >= bytes_per_source and source.name != STDLIB:
                corpus.left_out["limit of its distribution"] += 1
                continue
            text = _read(source.root / path)
            reason, lines = _reason(path, text), set[bytes]()
            if reason is None:
                lines = distinctive_lines(text)
                if (source.root / path).resolve() in held_out_paths:
                    reason = "held out"
                elif _share(lines, held_out_lines) > HELD_OUT_SHARE:
                    reason = "shares lines with a held-out module"
                elif _share(lines, seen) > DUPLICATE_SHARE:
                    reason = "duplicate"
            if reason is not None:
                corpus.left_out[reason] += 1
                continue
            seen |= lines
            chosen.append((source.name, path, text))
            taken += len(text.encode())
        if chosen:
            corpus.files += sorted(chosen)
            row = {"name": source.name, "version": source.version, "licence": source.licence}
            corpus.composition.append({**row, "files": len(chosen), "bytes": taken})
    return corpus


def distinctive_lines(text: str) -> set[bytes]:
    """Return the hashes of the lines that identify the origin of a text: long enough, and not an import."""
    lines = {line.strip() for line in text.splitlines()}
    return {_digest(line) for line in lines if len(line) >= MIN_LINE and not _IMPORT.match(line)}


def _reason(path: str, text: str) -> str | None:
    """Return the rule that leaves out a file whatever else is in the corpus, or None."""
    *folders, name = path.split("/")
    if _SKIPPED_FOLDERS.intersection(folders) or _TEST_FILE.fullmatch(name):
        return "test or vendored"
    if "\ufffd" in text:
        return "not UTF-8"
    if not MIN_BYTES <= len(text) <= MAX_BYTES:
        return "too short or too long"
    return "generated" if _generated(text) else None


def _generated(text: str) -> bool:
    """Return whether a file is a generated table, by a comment at its head or by its statistics."""
    head = text[:1000]
    if _GENERATED.search(head):
        return True
    letters = sum(map(str.isalpha, text[:50_000])) / len("".join(text[:50_000].split()) or " ")
    longest = max(map(len, text.splitlines()), default=0)
    packed = len(zlib.compress(text.encode(), 1)) / len(text.encode())
    if letters < 0.5 or longest > 1000 or packed < 0.12:
        return True
    return not head.isascii() and sum(not char.isascii() for char in text) > 0.1 * len(text)


def _share(lines: set[bytes], others: set[bytes]) -> float:
    return len(lines & others) / len(lines) if lines else 1.0


def _modules(folder: Path) -> Iterator[Path]:
    """Yield the `.py` files below a folder, without a walk through skipped folders such as site-packages."""
    for root, folders, names in os.walk(folder):
        folders[:] = {*folders} - _SKIPPED_FOLDERS
        yield from (Path(root, name) for name in names if name.endswith(".py"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return "\ufffd"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
