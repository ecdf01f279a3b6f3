"""Exports of saved models for other engines: transformers 4.57 and 5, vLLM, SGLang, llama.cpp, mlx-lm; see `exports`.

Names load without torch, the rest on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc.engines.names import ENGINES as ENGINES
from hf_posenc.engines.names import WEIGHTS as WEIGHTS

if TYPE_CHECKING:
    from hf_posenc.engines.engine import TableError as TableError
    from hf_posenc.engines.exports import Export as Export
    from hf_posenc.engines.exports import Expressed as Expressed
    from hf_posenc.engines.exports import export as export
    from hf_posenc.engines.exports import export_source as export_source
    from hf_posenc.engines.exports import find_engine as find_engine
    from hf_posenc.engines.exports import measure as measure
    from hf_posenc.engines.exports import merged_dtype as merged_dtype
    from hf_posenc.engines.exports import survey as survey
    from hf_posenc.engines.exports import write_export as write_export
    from hf_posenc.engines.llama_cpp import GGUFCheck as GGUFCheck
    from hf_posenc.engines.llama_cpp import check_gguf as check_gguf
    from hf_posenc.engines.llama_cpp import write_gguf as write_gguf

_MODULES = {
    "engine": "TableError",
    "exports": "Export Expressed export export_source find_engine measure merged_dtype survey write_export",
    "llama_cpp": "GGUFCheck check_gguf write_gguf",
}
__all__ = ["ENGINES", "Export", "Expressed", "GGUFCheck", "TableError"]
__all__ += ["check_gguf", "export", "survey", "write_export", "write_gguf"]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
