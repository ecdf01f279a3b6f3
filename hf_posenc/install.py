"""Puts a patch into a model, makes sure of it, and takes it out again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc import export
from hf_posenc.adapters import ArchAdapter
from hf_posenc.config import PatchConfig
from hf_posenc.errors import UnsupportedModelError, VerificationError
from hf_posenc.methods import Method, RopeScaling, YaRN, seam_of
from hf_posenc.methods.yarn import mscale
from hf_posenc.seams.discovery import RotaryTable, read_spec, rotary_tables
from hf_posenc.seams.probe import computes, is_half_split, probed_length, rotary_output
from hf_posenc.seams.rotary import PosencRotary
from hf_posenc.seams.sincos import SinCosTable, sincos_table

if TYPE_CHECKING:
    from hf_posenc.install_attention import AttentionSeam

STATE = "_hf_posenc"
"""The attribute of a patched model that holds its `State`."""


@dataclass
class State:
    """What undoes a patch; kept in the model, so that a deepcopied one carries its own.

    Attributes:
        config: What was asked for, with everything resolved.
        original: The original context length, in tokens.
        extended: The context length that the patch reaches; `None` where it follows the text.
        methods: The methods, the first of which is `config.method`.
        export: How plain transformers computes the patch (`export.ConfigEdit.form`).
        configs: Every config that was written to, with what it said before.
        scalings: The attention modules whose `scaling` was changed, by path, with the old value.
        tensors: The sin-cos tables that were swapped, by path and attribute.
        attention: What was changed in attention.
    """

    config: PatchConfig
    original: int
    extended: int | None
    methods: tuple[Method, ...]
    export: str | None = None
    configs: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    scalings: dict[str, float] = field(default_factory=dict)
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    attention: AttentionSeam | None = None


def own_config(model: nn.Module) -> None:
    """Gives a model, wrappers around it included, configs of its own.

    Two models built from one config object share it, and only one of them is to be patched.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "get_text_config"):
            vars(module)["config"] = copy.deepcopy(config, memo)


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
            f"{others[0].name} computes attention itself, but {type(model).__name__} rotates and attends in code of its "
            "own. Frequency methods (yarn, ntk_by_parts, ...) work on this model."
        )
    if isinstance(scaling, RopeScaling):
        if sincos:
            install_sincos(model, state, sincos, scaling)
        else:
            install_rotary(model, state, adapter, tables, scaling)
    if others:
        from hf_posenc.install_attention import install_attention  # needs transformers at once

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
            _write_config(model, state, [])


def install_rotary(
    model: nn.Module,
    state: State,
    adapter: ArchAdapter,
    tables: Sequence[RotaryTable],
    method: RopeScaling,
) -> None:
    """Wraps the rotary modules, lets config and attention follow, and reads back what is in force.

    Raises:
        UnsupportedModelError: A rotary module that does not compute what can be checked.
        VerificationError: The patched model does not give the patched rotation.
    """
    wrappers = _wrappers(tables, method, state, adapter)
    _follow_config(model, state, adapter, wrappers, method)
    put_in_place(model, {id(wrapper.base): wrapper for wrapper in wrappers})
    _rescale_attention(model, state, tables[0], method)
    for table in tables:
        module = model.get_submodule(table.name)
        if not (isinstance(module, PosencRotary) and _gives(module, table.label, adapter)):
            raise VerificationError(
                f"{table.name} does not give the patched rotation after the patch; the model was "
                f"restored. Please report it, with the model type and method ({method.name})."
            )


def install_sincos(
    model: nn.Module, state: State, tables: Sequence[SinCosTable], method: RopeScaling
) -> None:
    """Swaps precomputed sin-cos tables for scaled ones of the extended length.

    Raises:
        UnsupportedModelError: A method whose frequencies depend on the length of the text.
        VerificationError: A table does not hold the patched rotation.
    """
    spec = read_spec(tables[0], state.original, compose=False)
    positions = max(state.extended or 0, tables[0].tensor().shape[0])
    scaled = sincos_table(method, spec, positions)
    inv_freq, factor = method.inv_freq(spec).float(), float(method.cos_sin_factor(spec))
    if torch.equal(inv_freq, tables[0].live()[0].cpu()) and factor == 1.0:
        scaled[: tables[0].tensor().shape[0]] = tables[0].tensor()  # the very bits of the model
    for table in tables:
        state.tensors[table.name, table.attribute] = table.tensor()
        table.swap(scaled)
        found, found_factor = table.live()
        if not (
            torch.allclose(found.cpu(), inv_freq, rtol=1e-2, atol=1e-6)
            and abs(found_factor - factor) < 1e-2
        ):
            raise VerificationError(
                f"{table.name} does not hold the patched table; it was restored."
            )
    values = {} if state.extended is None else {"max_position_embeddings": positions}
    if any(isinstance(table.module, nn.Embedding) for table in tables):
        # The table is among the weights (RoFormer), so any loader finds it: no block that asks for
        # a second patch.
        state.export = "weights"
        state.configs.append((tables[0].config, export.write(tables[0].config, values)))
    else:
        _write_config(model, state, [(tables[0].config, values)])


def undo(model: nn.Module, state: State) -> None:
    """Takes a patch out, whole or half done: modules, tensors, attributes and config as before."""
    if state.attention is not None:
        from hf_posenc.install_attention import remove_attention

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


def put_in_place(model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Puts modules in the place of others (by `id`), at every path where the model holds them."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in replacements:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, replacements[id(module)])


def _wrappers(
    tables: Sequence[RotaryTable], method: RopeScaling, state: State, adapter: ArchAdapter
) -> list[PosencRotary]:
    compose = state.config.compose
    by_module: dict[int, list[RotaryTable]] = {}
    for table in tables:
        by_module.setdefault(id(table.module), []).append(table)
    wrappers = []
    for group in by_module.values():
        specs = {table.label: read_spec(table, state.original, compose=compose) for table in group}
        factors = {table.label: table.live()[1] for table in group if compose}
        wrapper = PosencRotary(group[0].module, method, specs, factors)
        for table in group:
            _check_forward(wrapper, table, adapter)
        wrappers.append(wrapper)
    return wrappers


def _check_forward(wrapper: PosencRotary, table: RotaryTable, adapter: ArchAdapter) -> None:
    """Makes sure that a wrapper's output is the patched rotation, whatever the base's forward does."""
    if _gives(wrapper, table.label, adapter):
        return
    output, _ = _probed(wrapper, table.label)
    if is_half_split(output, wrapper.specs[table.label].dim // 2):
        wrapper.use_half_split_forward()  # its own makes a table anew (Phi-3.5-MoE)
        if _gives(wrapper, table.label, adapter):
            return
    raise UnsupportedModelError(
        f"{type(table.module).__name__} ({table.name}) does not compute cos and sin of position times "
        "frequency in a form that hf_posenc can check, so the patch might not be what was asked for."
    )


def _gives(wrapper: PosencRotary, label: str, adapter: ArchAdapter) -> bool:
    """Whether a wrapper gives the patched rotation."""
    output, length = _probed(wrapper, label)
    inv_freq, factor = wrapper.table(label, length)
    gain = getattr(wrapper.base, adapter.log_gain, None) if adapter.log_gain else None
    if isinstance(gain, Tensor) and not gain.is_meta:
        inv_freq = inv_freq * gain.detach().to(inv_freq).exp()
    return computes(output, inv_freq, factor)


def _probed(wrapper: PosencRotary, label: str) -> tuple[tuple[Tensor, Tensor] | None, int]:
    """What a wrapper gives on its own device, and for a text of which length."""
    length = probed_length(wrapper.specs[label].original_max_position_embeddings)
    return rotary_output(wrapper, label, wrapper.device, length=length), length


def _follow_config(
    model: nn.Module,
    state: State,
    adapter: ArchAdapter,
    wrappers: Sequence[PosencRotary],
    method: RopeScaling,
) -> None:
    wrapped = {id(wrapper.base): wrapper for wrapper in wrappers}
    by_config: dict[int, tuple[Any, list[export.PatchedTable]]] = {}
    for table in rotary_tables(model):
        wrapper = wrapped.get(id(table.module))
        if wrapper is not None and table.label in wrapper.specs and table.config is not None:
            tables = by_config.setdefault(id(table.config), (table.config, []))[1]
            tables.append(export.PatchedTable(table, wrapper))
    edits = [
        (config, export.plan_edit(config, patched, method, state.extended, adapter.legacy_keys))
        for config, patched in by_config.values()
    ]
    forms = {edit.form for _, edit in edits}
    state.export = forms.pop() if len(forms) == 1 else None
    _write_config(model, state, [(config, edit.values) for config, edit in edits])


def _write_config(
    model: nn.Module, state: State, edits: Sequence[tuple[Any, Mapping[str, Any]]]
) -> None:
    """Writes to configs, and into the outermost one the block that `from_pretrained` reads."""
    outer: Any = model.config
    paths = {id(part): path for path, part in export.config_parts(outer)}
    before = {}
    for config, values in edits:
        state.configs.append((config, export.write(config, values)))
        if id(config) in paths:
            before[paths[id(config)]] = state.configs[-1][1]
    block = {**state.config.to_dict(), "before": before}
    state.configs.append((outer, export.write(outer, {export.BLOCK: block})))


def _rescale_attention(
    model: nn.Module, state: State, table: RotaryTable, method: RopeScaling
) -> None:
    """Follows YaRN's `mscale_all_dim`, whose square DeepSeek's attention has in its `scaling`."""
    weight = table.parameters.get("mscale_all_dim") if table.scaled else None
    old = (
        float(mscale(float(table.parameters.get("factor") or 1), float(weight))) if weight else 1.0
    )
    new = old if state.config.compose else 1.0
    if isinstance(method, YaRN) and method.mscale_all_dim:
        new *= float(mscale(method.scale, method.mscale_all_dim))
    if new == old:
        return
    having = {type(module) for module in model.modules() if "scaling" in vars(module)}
    affected = tuple(kind for kind in having if _scales_by_mscale(kind))
    for path, module in model.named_modules():
        if isinstance(module, affected):
            scaling: float = vars(module)["scaling"]
            state.scalings[path] = scaling
            vars(module)["scaling"] = scaling / old**2 * new**2


def _scales_by_mscale(kind: type[nn.Module]) -> bool:
    """Whether a class takes YaRN's second temperature into account when it is built.

    Which do depends on the family and on the version of transformers; only the code says.
    """
    try:
        return "mscale" in inspect.getsource(kind.__init__)
    except (OSError, TypeError):  # no source to read
        return False
