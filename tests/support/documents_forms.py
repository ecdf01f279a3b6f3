"""Shared by the tests of documents: files packed in every way."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import load_documents, read_paths
from tests.support.tiny_text import byte_tokenizer, prose

GOOD = prose(300)


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def refusal(*paths: Path, **options: Any) -> str:
    with pytest.raises(PosencError) as caught:
        load_documents(read_paths(map(str, paths), **options), byte_tokenizer(), min_tokens=1)
    return str(caught.value)
