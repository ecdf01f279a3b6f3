"""Puts a patch into a model, makes sure of it, and takes it out again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hf_posenc import export
from hf_posenc.adapters import ArchAdapter
from hf_posenc.errors import FREQUENCY_METHODS_WORK, PosencError, UnsupportedModelError
from hf_posenc.install.configs import write_config
from hf_posenc.install.rotary import install_rotary
from hf_posenc.install.sincos import install_sincos
from hf_posenc.install.state import STATE, State, own_config, put_in_place
from hf_posenc.methods import RopeScaling, seam_of
from hf_posenc.seams.discovery import RotaryTable
from hf_posenc.seams.rotary import PosencRotary
from hf_posenc.seams.sincos import SinCosTable


def install(
    model: nn.Module, state: State, adapter: ArchAdapter, tables: Sequence[RotaryTable]
) -> None:
    """Puts every method of a patch where it lands: frequencies first, since attention rotates by them.

    Raises:
        UnsupportedModelError: A model in which a method cannot land, with the reason.
        VerificationError: The patched model does not compute what was asked for.
    """
    config = state.config
    scaling = next((m for m in state.methods if seam_of(m) == "rotary"), None)
    others = [method for method in state.methods if method is not scaling]
    sincos = [table for table in tables if isinstance(table, SinCosTable)]
    if sincos and others:
        raise UnsupportedModelError(
            f"{others[0].name} computes attention itself, but {type(model).__name__} rotates and attends "
            f"in code of its own. {FREQUENCY_METHODS_WORK}"
        )
    dropping = next((m.name for m in others if not getattr(m, "keep_rope", True)), None)
    if scaling is not None and dropping is not None:
        raise PosencError(
            f"{dropping} drops the rotation that {scaling.name} changes. Pass keep_rope=True to {dropping} "
            "to have both."
        )
    if isinstance(scaling, RopeScaling):
        if sincos:
            install_sincos(model, state, sincos, scaling)
        else:
            install_rotary(model, state, adapter, tables, scaling)
    if others:
        from hf_posenc.install.attention import install_attention  # needs transformers at once

        state.attention = install_attention(
            model,
            tables,
            others,
            original=state.original,
            layers=config.layers,
            compose=config.compose,
        )
        state.export = None
        if scaling is None:
            write_config(model, state, [])


def undo(model: nn.Module, state: State) -> None:
    """Takes a patch out, whole or half done: modules, tensors, attributes and config as before."""
    if state.attention is not None:
        from hf_posenc.install.attention import remove_attention

        remove_attention(model, state.attention)
    put_in_place(
        model,
        {id(module): module.base for module in model.modules() if isinstance(module, PosencRotary)},
    )
    for (path, attribute), tensor in state.tensors.items():
        module = model.get_submodule(path)
        SinCosTable(path, "", module, None, "default", {}, attribute).swap(tensor)
    for path, scaling in state.scalings.items():
        vars(model.get_submodule(path))["scaling"] = scaling
    for config, before in reversed(state.configs):
        export.restore(config, before)
    delattr(model, STATE)


__all__ = ["STATE", "State", "install", "own_config", "undo"]
