"""Perplexity: every candidate on the same tokens. Protocols and settings load without torch, the rest on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.evaluation.perplexity.protocols import make_settings as make_settings
    from hf_posenc.evaluation.perplexity.protocols import settings_of as settings_of
    from hf_posenc.evaluation.perplexity.run import PerplexityRun as PerplexityRun
    from hf_posenc.evaluation.perplexity.run import document_key as document_key
    from hf_posenc.evaluation.perplexity.run import joined as joined
    from hf_posenc.evaluation.perplexity.run import measure_perplexity as measure_perplexity
    from hf_posenc.evaluation.perplexity.run import prepare as prepare

_HOMES = {
    **dict.fromkeys(("make_settings", "settings_of"), "protocols"),
    **dict.fromkeys(("PerplexityRun", "document_key", "joined"), "run"),
    **dict.fromkeys(("measure_perplexity", "prepare"), "run"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
