"""Saved patches served by vLLM: the plug-in, which nothing else of the package imports.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. Models without a saved patch
are served as without the plug-in.
"""

from __future__ import annotations

import warnings

VERSION = "0.32"
"""The version of vLLM that the plug-in was run with."""


def register() -> None:
    """Make vLLM read saved patches and know the architectures of patched models.

    With another version than the plug-in was run with, it warns and does nothing: vLLM then refuses them.
    """
    from vllm import ModelRegistry, __version__

    if not __version__.startswith(f"{VERSION}."):
        warnings.warn(
            f"Models with a patch of hf_posenc are not served: vLLM {__version__} is installed, and the plug-in was "
            f"run with {VERSION}.",
            stacklevel=2,
        )
        return
    from hf_posenc.serve.checkpoint import PREFIX, register_parser
    from hf_posenc.serve.requests import register_configuration, watch_engine

    register_parser()
    names = [name for name in ModelRegistry.get_supported_archs() if not name.startswith(PREFIX)]
    for name in names:
        ModelRegistry.register_model(PREFIX + name, f"{__name__}.models:{PREFIX}{name}")
    register_configuration(names)
    watch_engine()
