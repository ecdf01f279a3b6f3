"""Saved patches served by vLLM: the plug-in, which nothing else of the package imports.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. Models without a saved patch
are served as without the plug-in.
"""

from __future__ import annotations

import warnings

from hf_posenc.engines.names import PLUGIN_VLLM
from hf_posenc.serve.interfaces import READING, moved


def register() -> None:
    """Make vLLM read saved patches and know the architectures of patched models.

    With another version than the plug-in was run with, it warns and does nothing: vLLM then refuses those whose config
    it cannot read.
    """
    from vllm import ModelRegistry, __version__

    reason = ""
    if not __version__.startswith(tuple(f"{version}." for version in PLUGIN_VLLM)):
        reason = f"and the plug-in was run with {' and '.join(PLUGIN_VLLM)}"
    elif gone := moved(*READING):
        reason = f"which has no {', no '.join(gone)}"
    if reason:
        warnings.warn(
            f"Models with a patch of hf_posenc are not served: vLLM {__version__} is installed, {reason}.",
            stacklevel=2,
        )
        return
    from hf_posenc.engines.served import PREFIX
    from hf_posenc.serve.checkpoint import register_reader
    from hf_posenc.serve.requests import register_configuration, watch_engine

    own = [name for name in ModelRegistry.get_supported_archs() if not name.startswith(PREFIX)]
    register_reader(own)
    register_configuration(own)
    watch_engine()
    for name in own:
        ModelRegistry.register_model(PREFIX + name, f"{__name__}.models:{PREFIX}{name}")
