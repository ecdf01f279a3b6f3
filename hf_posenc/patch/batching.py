"""Continuous batching of a patched model: `generate_batch`, `transformers serve`.

All its ways call `init_continuous_batching`. The attention of a patched model computes each request from transformers'
pages (`model.attention`); the manager refuses its name, which it reads once.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError, UnsupportedModelError, one_line
from hf_posenc.methods import update_of
from hf_posenc.model.rotary import ENGINE
from hf_posenc.model.unwrapping import trial
from hf_posenc.patch.state import State, state_of

_START = "init_continuous_batching"
_ACCEPTED = "paged|eager"
"""A name that the manager accepts, replaces by no other, and captures no graphs for."""


def wrap_batching(model: nn.Module) -> None:
    """Let continuous batching of a model serve its patch, or refuse it before anything is generated."""
    _forget(model)
    if hasattr(type(model), _START):
        vars(model)[_START] = functools.partial(_start, model)


def unwrap_batching(model: nn.Module) -> None:
    """Undo `wrap_batching`."""
    _forget(model)
    vars(model).pop(_START, None)


def _forget(model: Any) -> None:
    """Drop a kept manager, whose pages hold keys of another patch, or of none."""
    getattr(model, "destroy_cached_continuous_batching_manager", lambda: None)()


def _start(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return transformers' manager of continuous batching; refuse a patch that is not exact there."""
    state = state_of(model)
    assert state is not None
    _refuse_lengths(state)
    start = functools.partial(getattr(type(model), _START), model, *args, **kwargs)
    if not state.in_attention:  # its attention is the model's own
        return start()
    _refuse_layers(model, state)
    from hf_posenc.model.attention import named  # imports transformers

    with named((model.config, model.config.get_text_config()), _ACCEPTED):
        manager = start()
    if any(manager.continuous_batching_config.cuda_graph_booleans):
        raise PosencError(
            f"{state.config} reads the lengths of requests on the host, which a CUDA graph cannot. Leave "
            "use_cuda_graph and the padding intervals out of the ContinuousBatchingConfig."
        )
    return manager


def _refuse_lengths(state: State) -> None:
    """Raise for a method that depends on the length of a whole text."""
    for method in state.methods:
        if (update := update_of(method)) in ("row", "static"):
            continue
        way = "Use generate()."
        if "update" in method.knobs():
            way = f'Patch with update="{"static" if method.seam == "table" else "row"}", or use generate().'
        raise PosencError(
            f'{method.name} follows the length of the whole text (update="{update}"), and continuous batching reads a '
            f"text in pieces, beside others, and in part from their pages. {way}"
        )


def _refuse_layers(model: Any, state: State) -> None:
    """Raise if attention layers read no pages, as a forward of a few tokens shows."""
    import transformers
    from transformers.generation.continuous_batching import PagedAttentionCache

    from hf_posenc.model.attention import named, recording
    from hf_posenc.model.calibration import run, trial_tokens
    from hf_posenc.model.positions import LAYER

    if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
        raise PosencError(
            f"Continuous batching of transformers {transformers.__version__} hands its pages to attention in another "
            f"form. Install transformers 5.19 to 5.24 for {state.config}, or use generate()."
        )
    pages: Any = object.__new__(PagedAttentionCache)  # which keep nothing

    def update(key: Any, value: Any, layer: int, kwargs: dict[str, Any]) -> Any:
        if key.shape[-1] != value.shape[-1]:
            raise TypeError("its pages have one size for keys and values")
        kwargs["cache"] = pages  # as a layer gets them as an argument before 5.24
        return key, value

    pages.update, ids = update, trial_tokens(model)
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    inputs = {"input_ids": ids, "position_ids": places, "write_index": places}
    configs, failed = (model.config, model.config.get_text_config()), ""
    try:  # Under this name only masks of a layer's own are numbers.
        with named(configs, ENGINE), trial(model), recording() as calls:
            run(functools.partial(model, cache=pages), inputs)
    except (TypeError, AttributeError, PosencError) as error:
        # A model takes no such arguments, asks pages for what other caches have, or has attention of its own.
        failed = f" ({one_line(error)})"
    for name, module in model.named_modules():
        own = calls.get(module, ())
        read = len(own) == 1 and {"cache", "write_index"} <= {*own[0].kwargs} and not own[0].adds
        if LAYER in vars(module) and not read:
            raise UnsupportedModelError(
                f"Continuous batching cannot compute {state.config} in {type(model).__name__}: {name} has attention of "
                f"its own, several calls of it, or a mask of its own, or calls its cache without pages{failed}. "
                "Use generate()."
            )
