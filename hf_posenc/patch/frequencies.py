"""Installing a frequency method: in the rotary modules of a model, or in precomputed tables of sines and cosines."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError, UnsupportedModelError, VerificationError
from hf_posenc.methods import PositionInterpolation, RopeScaling
from hf_posenc.methods.contract import check_frequencies
from hf_posenc.model.discovery import (
    RotaryTable,
    SinCosTable,
    Tables,
    adapter_of,
    layer_index,
    layers_of_type,
    local_layers,
    read_spec,
    shared_configs,
)
from hf_posenc.model.rotary import PosencRotary, is_half_split
from hf_posenc.model.sampled import Sample
from hf_posenc.model.unwrapping import is_sharded
from hf_posenc.patch import export
from hf_posenc.patch.state import State, replace_modules
from hf_posenc.rope import RopeSpec
from hf_posenc.seams.held import TableEnd
from hf_posenc.seams.hidden import once
from hf_posenc.seams.traces import users_of


def install_rotary(model: nn.Module, state: State, tables: Tables, method: RopeScaling) -> None:
    """Wrap the rotary modules, let config and attention follow, and read back what is in force."""
    adapter = adapter_of(model)
    patched = _wrap(tables, method, state, adapter.log_gain)
    by_config: dict[int, list[export.PatchedTable]] = {}
    for one in patched:
        if one.table.config is not None:
            by_config.setdefault(id(one.table.config), []).append(one)
    edits: list[tuple[Any, dict[str, Any]]] = []
    forms: set[str | None] = set()
    shared = shared_configs(model, tables)
    for group in by_config.values():
        config = group[0].table.config
        if id(config) in shared:  # plain transformers would scale the other module too
            values, form = export.lengths_of(config, group, state.extended), None
        else:
            values, form = export.plan_edit(config, group, method, state.extended, adapter)
        edits.append((config, values))
        forms.add(form)
    state.export = forms.pop() if len(forms) == 1 else None
    state.write_config(model, edits)
    replace_modules(model, {id(one.table.module): one.wrapper for one in patched})
    _rescale_attention(model, state, tables[0], method)
    for one in patched:
        module = model.get_submodule(one.table.name)
        if not (isinstance(module, PosencRotary) and one.computed_by(module)):
            raise VerificationError(
                f"{one.table.name} does not give the patched rotation after the patch; the model was "
                f"restored. Please report it, with the model type and method ({method.name})."
            )


def refuse_local(model: nn.Module, tables: Tables, sample: Sample) -> None:
    """Raise if layers with a window or chunks alone rotate by one of some tables, in a model with other layers.

    The blocks of the sample are run on a few tokens; of a model without weights all blocks, on the meta device. Nothing
    is refused if that fails. The message says what the model needs.
    """
    by_config: dict[int, list[RotaryTable]] = {}
    for table in tables:
        # A label is the type of the layers.
        if not table.label and local_layers(table.config) and not isinstance(table, SinCosTable):
            by_config.setdefault(id(table.config), []).append(table)
    if not by_config or is_sharded(model):
        return
    for group in by_config.values():
        config, paths = group[0].config, [*dict.fromkeys(table.name for table in group)]
        find = functools.partial(_layers_of, model, paths, sample)
        layers = once(model, f"layers of {paths}", find)
        if not layers or not layers <= local_layers(config):
            continue
        need = "No other layer reads by attention, so a longer text needs no patch."
        with contextlib.suppress(PosencError):  # there is no full layer
            layers_of_type(config, "full")
            need = "Its full layers do not rotate and need no patch, or log_n unless it scales queries."
        raise UnsupportedModelError(
            f"Only layers of this model with a sliding window or chunks rotate by {', '.join(paths)}, and they never "
            f'read past it. {need} Pass layers="all" to patch them anyway.'
        )


def _layers_of(model: nn.Module, paths: Sequence[str], sample: Sample) -> set[int | None]:
    """Return the layers that compute with what the modules of some paths return; none where they cannot be found."""
    blocks = contextlib.nullcontext() if sample.empty else sample.only()
    with contextlib.suppress(Exception), torch.compiler.set_stance("force_eager"), blocks:
        users = users_of(model, paths)
        return {layer_index(user, model.get_submodule(user)) for user in users} - {None}
    return set()  # whatever a model raises that needs more than tokens


def keep_frequencies(model: nn.Module, state: State, tables: Tables) -> None:
    """Wrap static rotary modules that are as they were, so that no cast and nothing that fills tensors changes them."""
    left = {id(each.base) for each in model.modules() if isinstance(each, PosencRotary)}
    left |= {id(table.module) for table in tables if table.moves or isinstance(table, SinCosTable)}
    own = [table for table in tables if id(table.module) not in left]
    method, gain = PositionInterpolation(scale=1.0), adapter_of(model).log_gain
    patched = _wrap(own, method, state, gain, in_force=True)
    replace_modules(model, {id(one.table.module): one.wrapper for one in patched})


def _wrap(
    tables: Tables,
    method: RopeScaling,
    state: State,
    log_gain: str | None,
    *,
    in_force: bool = False,
) -> list[export.PatchedTable]:
    """Build one wrapper for each rotary module, which holds one table or several; verify what it computes.

    `in_force`: the method starts from the frequencies in force, whatever the patch does.
    """
    patched = []
    for module in {id(table.module): table.module for table in tables}.values():
        group = [table for table in tables if table.module is module]
        specs, factors = dict[str, RopeSpec](), dict[str, float]()
        for table in group:
            compose = state.foreign or table.scaled if in_force else state.config.compose
            spec = read_spec(table, state.original, compose=compose)
            specs[table.label] = check_frequencies(method, spec)
            if compose:
                factors[table.label] = table.composed()[1]
        wrapper = PosencRotary(module, method, specs, factors)
        patched += [export.PatchedTable(table, wrapper, log_gain) for table in group]
    for one in patched:
        _check_forward(one)
    return patched


def _check_forward(patched: export.PatchedTable) -> None:
    """Verify that a wrapper's output is the patched rotation, whatever the base's forward does."""
    wrapper, table = patched.wrapper, patched.table
    if patched.computed_by(wrapper):
        return
    if is_half_split(patched.output_of(wrapper), patched.spec.dim // 2):
        wrapper.own_forward = False  # the base's computes a table anew (Phi-3.5-MoE)
        if patched.computed_by(wrapper):
            return
    raise UnsupportedModelError(
        f"{type(table.module).__name__} ({table.name}) does not compute cos and sin of position times "
        "frequency in a form that hf_posenc can check, so the patch might not be what was asked for."
    )


def _rescale_attention(
    model: nn.Module, state: State, table: RotaryTable, method: RopeScaling
) -> None:
    """Follow YaRN's `mscale_all_dim`, whose square DeepSeek's attention has in its `scaling`."""
    old = export.temperature(table.parameters) if table.scaled else 1.0
    new = export.temperature(export.temperature_keys(table, method, compose=state.config.compose))
    if new == old:
        return
    candidates = {type(module) for module in model.modules() if "scaling" in vars(module)}
    affected = tuple(kind for kind in candidates if _scales_by_mscale(kind))
    for module in model.modules():
        if isinstance(module, affected):
            state.set(module, {"scaling": vars(module)["scaling"] / old**2 * new**2})


def _scales_by_mscale(kind: type[nn.Module]) -> bool:
    """True if a class applies YaRN's second temperature when it is built: only its source shows that."""
    try:
        return "mscale" in inspect.getsource(kind.__init__)
    except (OSError, TypeError):  # no source to read
        return False


def install_sincos(
    model: nn.Module, state: State, tables: Sequence[SinCosTable], method: RopeScaling
) -> None:
    """Replace precomputed sin-cos tables by scaled ones of the extended length, and read them back."""
    if method.length_dependent:
        raise UnsupportedModelError(
            f"{method.name} changes its frequencies with the length of the text, but this model reads them "
            'from a table made once. Use a static method (yarn, ntk, pi, ...), or update="row" or "request".'
        )
    spec = check_frequencies(method, read_spec(tables[0], state.original, compose=False))
    positions = max(state.extended or 0, tables[0].tensor().shape[0])
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * method.frequencies(spec)
    scaled = torch.cat((angles.sin(), angles.cos()), dim=-1) * method.cos_sin_factor(spec)
    scaled = scaled.float()  # shape (positions, d)
    inv_freq, factor = method.frequencies(spec).float(), float(method.cos_sin_factor(spec))
    if torch.equal(inv_freq, tables[0].live()[0].cpu()) and factor == 1.0:
        scaled[: tables[0].tensor().shape[0]] = tables[0].tensor()  # the very bits of the model
    for table in tables:
        state.swap(table, scaled)
        live, live_factor = table.live()
        close = torch.allclose(live.cpu(), inv_freq, rtol=1e-2, atol=1e-6)
        if not close or not abs(live_factor - factor) < 1e-2:
            raise VerificationError(f"{table.name} lacks the patched table; it was restored.")
    state.hooks.append(model.register_forward_pre_hook(TableEnd(positions), with_kwargs=True))
    values = {} if state.extended is None else {"max_position_embeddings": positions}
    if any(isinstance(table.module, nn.Embedding) for table in tables):
        state.export = "weights"  # RoFormer
    state.write_config(model, [(tables[0].config, values)])
