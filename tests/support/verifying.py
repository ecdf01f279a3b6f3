"""A saved model verified in this process, by plain transformers, instead of in a clean one that takes seconds to start.

The clean process itself is tested in tests/saving/test_verification.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_posenc import verification


def verify_here(patch: pytest.MonkeyPatch) -> None:
    """Let `verify_export` load and run the saved model in this process."""
    patch.setattr(verification, "_in_a_clean_process", _in_this_process)


def _in_this_process(
    _: Path, directory: str, model: Any, probes: list[dict[str, Any]], *__: object
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    auto: Any = transformers.AutoModelForCausalLM
    saved, info = auto.from_pretrained(directory, dtype=model.dtype, output_loading_info=True)
    report = {"version": transformers.__version__, "missing": sorted(info["missing_keys"])}
    return verification._logits(saved, probes), report
