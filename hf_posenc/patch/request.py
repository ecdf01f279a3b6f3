"""From a request to what will be done: which model, tables and method, from which length to which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_posenc.adapters import ArchAdapter, get_adapter
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.methods import Method, RopeScaling, get_method, seam_of
from hf_posenc.model.discovery import RotaryTable, rotary_tables
from hf_posenc.model.sincos import sincos_tables

MethodLike = str | Method | Sequence["str | Method"]
"""A name or alias, a Method object, or a list of them on different seams."""


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside `torch.compile`, DDP, DataParallel and PEFT."""
    while True:
        inner: Any = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(
            model, nn.parallel.DistributedDataParallel | nn.DataParallel
        ):
            inner = model.module
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()  # type: ignore[operator]
        if inner is None or inner is model:
            return model
        model = inner


def check_wrappers(model: Any) -> None:
    """Refuses a model whose cache PEFT fills with keys that stand at no position.

    Raises:
        UnsupportedModelError: Prefix tuning, and prompts learned in other ways.
    """
    for config in (getattr(model, "peft_config", None) or {}).values():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{config.peft_type} puts learned keys or tokens before the text, which stand at no position. Patch "
                "the model without that adapter."
            )


def adapter_of(model: nn.Module) -> ArchAdapter:
    """The adapter of a model's text decoder.

    Raises:
        UnsupportedModelError: Not a transformers model, or a family that cannot be patched.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no transformers config. patch_model takes a transformers "
            "model (PreTrainedModel), or one wrapped by PEFT, DDP or torch.compile."
        )
    text = config.get_text_config(decoder=True)
    adapter = get_adapter(text.model_type)
    adapter.check(text)
    return adapter


def tables_of(model: nn.Module, adapter: ArchAdapter) -> tuple[RotaryTable, ...]:
    """Every rotary table of a model's text decoder.

    Raises:
        UnsupportedModelError: The model has none.
    """
    name = adapter.sincos_table
    tables = rotary_tables(model) if name is None else sincos_tables(model, name)
    if not tables:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no rotary embedding: no module holds an inv_freq table. This "
            "version patches models with RoPE and no others."
        )
    return tables


def changes_frequencies(method: MethodLike) -> bool:
    """Whether a request names a frequency method."""
    parts = [method] if isinstance(method, str | Method) else method
    kinds = [get_method(part) if isinstance(part, str) else type(part) for part in parts]
    return any(issubclass(kind, RopeScaling) for kind in kinds)


def check_scaled(
    tables: Sequence[RotaryTable], *, compose: bool, replace: bool, attention_only: bool
) -> None:
    """Refuses a checkpoint that is scaled already, unless the request says what to do with that.

    Raises:
        PosencError: With the scaling that is there and the two ways on.
    """
    for table in tables:
        if not table.scaled or replace or attention_only:
            continue
        if not compose:
            raise PosencError(
                f"This checkpoint is already scaled: {table.name} has rope_type="
                f"{table.rope_type!r} ({_summary(table)}). Pass replace=True to start from its "
                "rope_theta and original length, or compose=True to scale the frequencies in force "
                "once more."
            )
        if table.rope_type in ("dynamic", "longrope"):
            raise PosencError(
                f"compose=True needs one table, but {table.name} has rope_type={table.rope_type!r}, "
                "whose table depends on the length. Pass replace=True."
            )


def resolve_methods(
    method: MethodLike,
    *,
    scale: float | None,
    target_length: int | None,
    original: int,
    options: dict[str, Any],
) -> tuple[tuple[Method, ...], int | None]:
    """The method objects, and the context length that they reach in tokens.

    The length is `None` for methods that follow the text, and for those that name neither scale nor
    target.

    Raises:
        PosencError: An unknown method or option, a value out of range, numbers that disagree, or two
            methods on one seam.
    """
    if not isinstance(method, str | Method) and len(method) == 1:
        (method,) = method
    if isinstance(method, str | Method):
        found, reach = _resolved(
            method, scale=scale, target_length=target_length, original=original, options=options
        )
        return (found,), reach
    if not method:
        raise PosencError("An empty list of methods: name at least one.")
    if options:
        raise PosencError(
            f"Options ({', '.join(options)}) belong to one method: in a list, give method objects, as "
            "in [YaRN(scale=4), LogN()]."
        )
    kinds = [get_method(part) if isinstance(part, str) else type(part) for part in method]
    seams = [
        seam_of(part) if isinstance(part, Method) else get_method(part).seam for part in method
    ]
    twice = next((seam for seam in seams if seams.count(seam) > 1), None)
    if twice is not None:
        names = [kind.name for kind, seam in zip(kinds, seams, strict=True) if seam == twice]
        raise PosencError(
            f"Two methods on one seam exclude each other: {', '.join(names)} ({twice}). Pick one of them."
        )
    scaled = [kind.name for kind in kinds if kind.takes_scale()]
    if len(scaled) > 1 and scale is not None:
        raise PosencError(
            f"scale= could be that of {' or '.join(scaled)}: give method objects, as in [YaRN(scale=4), "
            "LogN()]."
        )
    parts, reaches = [], []
    for part, kind in zip(method, kinds, strict=True):
        found, reach = _resolved(
            part,
            scale=scale if kind.takes_scale() else None,
            target_length=target_length if kind.takes_scale() and not kind.follows_text else None,
            original=original,
            options={},
        )
        parts.append(found)
        reaches.append(reach)
    return tuple(parts), next((reach for reach in reaches if reach is not None), None)


def _resolved(
    method: str | Method,
    *,
    scale: float | None,
    target_length: int | None,
    original: int,
    options: dict[str, Any],
) -> tuple[Method, int | None]:
    kind = get_method(method) if isinstance(method, str) else type(method)
    if target_length is not None:
        if target_length < original:
            raise PosencError(
                f"target_length={target_length} is below the original {original} tokens: nothing to "
                "extend."
            )
        if kind.follows_text:
            raise PosencError(f"{kind.name} follows the length of the text: no target_length.")
    wanted = None if target_length is None or not kind.takes_scale() else target_length / original

    if isinstance(method, Method):
        if scale is not None or options:
            raise PosencError(f"Give the knobs to {kind.__name__}(...) itself, not beside it.")
        found, scale = method, getattr(method, "scale", None)
    if scale is not None and wanted is not None and not math.isclose(scale, wanted):
        raise PosencError(
            f"scale={scale:g} and target_length={target_length} disagree: {original} tokens times "
            f"{scale:g} is {original * scale:g}. Give one of them."
        )
    if isinstance(method, str):
        scale = wanted if scale is None else scale
        if scale is not None and not kind.takes_scale():
            knobs = ", ".join(kind.knobs()) or "none"
            raise PosencError(f"{kind.name} takes no scale: {kind.summary}. Its knobs: {knobs}.")
        found = kind.from_options(**({} if scale is None else {"scale": scale}), **options)
    if target_length is None and scale is not None and not kind.follows_text:
        target_length = math.ceil(original * scale)
    return found, target_length


def _summary(table: RotaryTable) -> str:
    shown = {k: v for k, v in table.parameters.items() if not isinstance(v, list | dict)}
    return ", ".join(f"{k}={v}" for k, v in shown.items() if k not in ("rope_type", "type"))
