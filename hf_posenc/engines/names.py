"""Names that the command line takes."""

from __future__ import annotations

HOMES = {
    "transformers4": ("servers", "Transformers4"),
    "transformers5": ("servers", "Transformers5"),
    "vllm": ("servers", "VLLM"),
    "sglang": ("servers", "SGLang"),
    "llama.cpp": ("llama_cpp", "LlamaCpp"),
    "mlx": ("servers", "MLX"),
}
"""The file in this folder of each engine, and its subclass of `Engine`; a new engine is a file and a row."""
ENGINES = tuple(HOMES)
WEIGHTS = ("link", "copy", "none")
"""Ways to treat the files beside the config: weights hard linked (or copied) and others copied, copies, nothing."""
PLUGIN_VLLM = ("0.32", "0.33")
"""Versions of vLLM that the plug-in (`hf_posenc/serve/`) was run with, which serves what vLLM itself cannot have."""
SERVED = {
    "vllm": "vllm serve",
    "sglang": "python -m sglang.launch_server --model-path",
    "llama.cpp": "llama-server -m",
    "mlx": "mlx_lm.server --model",
}
"""Commands that serve a folder, or a GGUF file, without its name and the flags."""
CPU_VLLM = "python -m vllm.entrypoints.openai.api_server --model"
"""The same for vLLM's build for CPUs, whose own command fails."""
