"""Puts a frequency method into precomputed tables of sines and cosines, and makes sure of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hf_posenc import export
from hf_posenc.errors import VerificationError
from hf_posenc.install.configs import write_config
from hf_posenc.install.state import State
from hf_posenc.methods import RopeScaling
from hf_posenc.seams.discovery import read_spec
from hf_posenc.seams.sincos import SinCosTable, sincos_table


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
        write_config(model, state, [(tables[0].config, values)])
