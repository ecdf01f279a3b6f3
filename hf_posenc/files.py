"""Files that are either complete or absent, and the folder of the cache."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError

WEIGHT_FILES = tuple(
    f"*model{name}"
    for kind in ("safetensors", "bin")
    for name in (f".{kind}", f"-*-of-*.{kind}", f".{kind}.index.json")
)
"""Patterns of the names of files with weights, and of their indexes."""


def cache_folder() -> Path:
    """Return the folder of the cache: HF_POSENC_CACHE, or `hf_posenc` in the user's cache folder (XDG_CACHE_HOME)."""
    if own := os.environ.get("HF_POSENC_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "hf_posenc"


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is complete or as it was before, also after a crash."""
    replace_atomically(path, lambda temporary: temporary.write_bytes(text.encode("utf-8")))


def replace_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by the one that `write` creates under a temporary name, once that is on the disk."""
    with disk_errors(f"{path} cannot be written"):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)  # mkstemp's own is for the owner alone
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


@contextlib.contextmanager
def disk_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Raise an `OSError` in the block as one line: the problem, the system's reason, and what to do."""
    try:
        yield
    except OSError as error:
        raise PosencError(f"{problem}: {error.strerror or error}. {advice}".rstrip()) from error


def to_json(value: Any) -> str:
    """Return readable JSON with a newline at its end; a number that is not finite becomes `null`."""
    return json.dumps(finite(value), indent=1, allow_nan=False, ensure_ascii=True) + "\n"


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a header and a line per row (RFC 4180); values that are absent or `None` are empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def finite(value: Any) -> Any:
    """Return the value with `None` for NaN and infinities, and tuples as lists."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
