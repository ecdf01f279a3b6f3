"""What other engines make of a saved model: transformers 4.57 and 5, vLLM, SGLang, llama.cpp.

`export(folder, engine)` says how an engine is told of a model's rotary tables, or why it cannot be, with the difference
of its table from the model's by the engine's own published formula; `write_export` writes what it needs.
"""

from __future__ import annotations

from hf_posenc.engines.exporting import (
    ENGINES,
    Export,
    GGUFCheck,
    TableError,
    check_gguf,
    export,
    write_export,
    write_gguf,
)
from hf_posenc.engines.survey import Expressed, survey

__all__ = [
    "ENGINES",
    "Export",
    "Expressed",
    "GGUFCheck",
    "TableError",
    "check_gguf",
    "export",
    "survey",
    "write_export",
    "write_gguf",
]
