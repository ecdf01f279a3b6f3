"""Installing a frequency method: in the rotary modules of a model, or in precomputed tables of sines and cosines."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.adapters import ArchAdapter
from hf_posenc.errors import UnsupportedModelError, VerificationError
from hf_posenc.methods import RopeScaling, YaRN
from hf_posenc.methods.yarn import mscale
from hf_posenc.model.discovery import RotaryTable, SinCosTable, adapter_of, read_spec
from hf_posenc.model.rotary import (
    PosencRotary,
    computes,
    is_half_split,
    probed_length,
    rotary_output,
)
from hf_posenc.patch import export
from hf_posenc.patch.state import State, replace_modules, write_config
from hf_posenc.rope import RopeSpec


def install_rotary(
    model: nn.Module, state: State, tables: Sequence[RotaryTable], method: RopeScaling
) -> None:
    """Wrap the rotary modules, let config and attention follow, and read back what is in force.

    Raises:
        UnsupportedModelError: A rotary module whose output cannot be checked.
        VerificationError: The patched model does not give the patched rotation.
    """
    adapter = adapter_of(model)
    wrappers = _wrappers(tables, method, state, adapter)
    _follow_config(model, state, adapter, tables, wrappers, method)
    replace_modules(model, {id(wrapper.base): wrapper for wrapper in wrappers.values()})
    _rescale_attention(model, state, tables[0], method)
    for table in tables:
        module = model.get_submodule(table.name)
        if not (isinstance(module, PosencRotary) and _gives(module, table.label, adapter)):
            raise VerificationError(
                f"{table.name} does not give the patched rotation after the patch; the model was "
                f"restored. Please report it, with the model type and method ({method.name})."
            )


def _wrappers(
    tables: Sequence[RotaryTable], method: RopeScaling, state: State, adapter: ArchAdapter
) -> dict[int, PosencRotary]:
    """A wrapper for each rotary module, by the module's `id`."""
    compose = state.config.compose
    by_module: dict[int, list[RotaryTable]] = {}
    for table in tables:
        by_module.setdefault(id(table.module), []).append(table)
    wrappers = {}
    for key, group in by_module.items():
        specs = {table.label: read_spec(table, state.original, compose=compose) for table in group}
        factors = {table.label: table.live()[1] for table in group if compose}
        wrappers[key] = PosencRotary(group[0].module, method, specs, factors)
        for table in group:
            _check_forward(wrappers[key], table, adapter)
    return wrappers


def _check_forward(wrapper: PosencRotary, table: RotaryTable, adapter: ArchAdapter) -> None:
    """Verify that a wrapper's output is the patched rotation, whatever the base's forward does."""
    if _gives(wrapper, table.label, adapter):
        return
    output, _ = _probed(wrapper, table.label)
    if is_half_split(output, wrapper.specs[table.label].dim // 2):
        wrapper.use_half_split_forward()  # its own computes a table anew (Phi-3.5-MoE)
        if _gives(wrapper, table.label, adapter):
            return
    raise UnsupportedModelError(
        f"{type(table.module).__name__} ({table.name}) does not compute cos and sin of position times "
        "frequency in a form that hf_posenc can check, so the patch might not be what was asked for."
    )


def _gives(wrapper: PosencRotary, label: str, adapter: ArchAdapter) -> bool:
    """True if a wrapper's output is the patched rotation."""
    output, length = _probed(wrapper, label)
    inv_freq, factor = wrapper.table(label, length)
    gain = getattr(wrapper.base, adapter.log_gain, None) if adapter.log_gain else None
    if isinstance(gain, Tensor) and not gain.is_meta:
        inv_freq = inv_freq * gain.detach().to(inv_freq).exp()
    return computes(output, inv_freq, factor)


def _probed(wrapper: PosencRotary, label: str) -> tuple[tuple[Tensor, Tensor] | None, int]:
    """The output of a wrapper on its own device, and the length of the probe in tokens."""
    length = probed_length(wrapper.specs[label].original_max_position_embeddings)
    return rotary_output(wrapper, label, wrapper.device, length=length), length


def _follow_config(
    model: nn.Module,
    state: State,
    adapter: ArchAdapter,
    tables: Sequence[RotaryTable],
    wrappers: dict[int, PosencRotary],
    method: RopeScaling,
) -> None:
    by_config: dict[int, list[export.PatchedTable]] = {}
    for table in tables:
        if table.config is not None:
            patched = export.PatchedTable(table, wrappers[id(table.module)])
            by_config.setdefault(id(table.config), []).append(patched)
    edits = []
    for group in by_config.values():
        config = group[0].table.config
        edit = export.plan_edit(config, group, method, state.extended, adapter.legacy(config))
        edits.append((config, edit))
    forms = {edit.form for _, edit in edits}
    state.export = forms.pop() if len(forms) == 1 else None
    write_config(model, state, [(config, edit.values) for config, edit in edits])


def _rescale_attention(
    model: nn.Module, state: State, table: RotaryTable, method: RopeScaling
) -> None:
    """Follow YaRN's `mscale_all_dim`, whose square DeepSeek's attention has in its `scaling`."""
    weight = table.parameters.get("mscale_all_dim") if table.scaled else None
    old = (
        float(mscale(float(table.parameters.get("factor") or 1), float(weight))) if weight else 1.0
    )
    new = old if state.config.compose else 1.0
    if isinstance(method, YaRN) and method.mscale_all_dim:
        new *= float(mscale(method.scale, method.mscale_all_dim))
    if new == old:
        return
    candidates = {type(module) for module in model.modules() if "scaling" in vars(module)}
    affected = tuple(kind for kind in candidates if _scales_by_mscale(kind))
    for path, module in model.named_modules():
        if isinstance(module, affected):
            scaling: float = vars(module)["scaling"]
            state.scalings[path] = scaling
            vars(module)["scaling"] = scaling / old**2 * new**2


def _scales_by_mscale(kind: type[nn.Module]) -> bool:
    """True if a class applies YaRN's second temperature when it is built: only its source shows that."""
    try:
        return "mscale" in inspect.getsource(kind.__init__)
    except (OSError, TypeError):  # no source to read
        return False


def install_sincos(
    model: nn.Module, state: State, tables: Sequence[SinCosTable], method: RopeScaling
) -> None:
    """Replace precomputed sin-cos tables by scaled ones of the extended length.

    Raises:
        UnsupportedModelError: A method whose frequencies depend on the length of the text.
        VerificationError: A table does not hold the patched rotation.
    """
    spec = read_spec(tables[0], state.original, compose=False)
    positions = max(state.extended or 0, tables[0].tensor().shape[0])
    scaled = _sincos(method, spec, positions)
    inv_freq, factor = method.inv_freq(spec).float(), float(method.cos_sin_factor(spec))
    if torch.equal(inv_freq, tables[0].live()[0].cpu()) and factor == 1.0:
        scaled[: tables[0].tensor().shape[0]] = tables[0].tensor()  # the very bits of the model
    for table in tables:
        state.tensors[table.name, table.attribute] = table.tensor()
        table.swap(scaled)
        live, live_factor = table.live()
        if not (
            torch.allclose(live.cpu(), inv_freq, rtol=1e-2, atol=1e-6)
            and abs(live_factor - factor) < 1e-2
        ):
            raise VerificationError(
                f"{table.name} does not hold the patched table; it was restored."
            )
    values: dict[str, Any] = (
        {} if state.extended is None else {"max_position_embeddings": positions}
    )
    if any(isinstance(table.module, nn.Embedding) for table in tables):
        # The table is among the weights (RoFormer), so any loader finds it: no block that asks for
        # a second patch.
        state.export = "weights"
        state.configs.append((tables[0].config, export.write(tables[0].config, values)))
    else:
        write_config(model, state, [(tables[0].config, values)])


def _sincos(method: RopeScaling, spec: RopeSpec, positions: int) -> Tensor:
    """The table of a static method, shape (positions, d), float32, computed in float64."""
    if method.length_dependent:
        raise UnsupportedModelError(
            f"{method.name} changes its frequencies with the length of the text, but this model reads them "
            "from a table made once. Use a static method (yarn, ntk_by_parts, ntk, pi, ...)."
        )
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * method.inv_freq(spec)
    return (torch.cat((angles.sin(), angles.cos()), dim=-1) * method.cos_sin_factor(spec)).float()
