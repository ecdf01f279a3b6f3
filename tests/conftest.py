"""Settings of all tests: no network, one thread, and GPU tests only where there is a GPU."""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from hypothesis import settings

from tests.support.documents_forms import no_hanging, small  # noqa: F401 (fixtures)

# Tiny matrices are slower on many threads than on one, and xdist has its own workers.
torch.set_num_threads(1)
_log: Any = transformers.logging
_log.set_verbosity_error()

settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
