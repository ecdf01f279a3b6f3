"""Perplexity: every candidate on the same tokens. Protocols and settings load without torch, the rest on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posenc.evaluation import on_first_use

if TYPE_CHECKING:
    from hf_posenc.evaluation.perplexity.protocols import make_settings as make_settings
    from hf_posenc.evaluation.perplexity.protocols import settings_of as settings_of
    from hf_posenc.evaluation.perplexity.run import PerplexityRun as PerplexityRun
    from hf_posenc.evaluation.perplexity.run import document_key as document_key
    from hf_posenc.evaluation.perplexity.run import joined as joined
    from hf_posenc.evaluation.perplexity.run import measure_perplexity as measure_perplexity
    from hf_posenc.evaluation.perplexity.run import prepare as prepare

__getattr__ = on_first_use(
    __name__,
    {
        "protocols": "make_settings settings_of",
        "run": "PerplexityRun document_key joined measure_perplexity prepare",
    },
)
