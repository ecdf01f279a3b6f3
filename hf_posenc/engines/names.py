"""Names that the command line takes."""

from __future__ import annotations

ENGINES = ("transformers4", "transformers5", "vllm", "sglang", "llama.cpp")
"""The engines."""
WEIGHTS = ("link", "copy", "none")
"""Ways to treat the files beside the config: hard links (copies where the file system has none), copies, nothing."""
