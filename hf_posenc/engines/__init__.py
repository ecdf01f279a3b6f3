"""Exports of saved models for other engines: transformers 4.57 and 5, vLLM, SGLang, llama.cpp.

`export(folder, engine)` returns the form in which an engine gets a model's rotary tables, or the reason why there is
none, with the difference of its table from the model's by the engine's own published formula. `write_export` writes it.
"""

from __future__ import annotations

from hf_posenc.engines.engine import TableError
from hf_posenc.engines.exporting import ENGINES, Export, Expressed, export, survey, write_export
from hf_posenc.engines.llama_cpp import GGUFCheck, check_gguf, write_gguf

__all__ = ["ENGINES", "Export", "Expressed", "GGUFCheck", "TableError"]
__all__ += ["check_gguf", "export", "survey", "write_export", "write_gguf"]
