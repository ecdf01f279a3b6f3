"""Shared by the tests of documents: files packed in every way, and limits that make everything large."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import load_documents, read_paths, readers
from hf_posenc.evaluation.documents import tokens as joining
from tests.support.tiny_text import byte_tokenizer, prose

PATIENCE = 60
"""Seconds after which something hangs."""


@pytest.fixture
def no_hanging() -> Iterator[None]:
    """Ends a test that waits for something that never comes."""

    def stop(*_: object) -> None:
        raise TimeoutError("this hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


GOOD = prose(300)


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that counts as large is small."""
    monkeypatch.setattr(readers, "SMALL", 1000)
    sizes = joining.Sizes(window=3000, overlap=512, largest=1 << 14)
    monkeypatch.setattr(joining, "SIZES", sizes)


def refusal(*paths: Path, **options: Any) -> str:
    """The one error that reading these gives."""
    with pytest.raises(PosencError) as caught:
        load_documents(read_paths(map(str, paths), **options), byte_tokenizer(), min_tokens=1)
    return str(caught.value)
