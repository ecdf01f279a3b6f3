"""A bias, or no position at all, in the place of a table of positions.

The rows of the table are read as their mean, whatever the position, and as many as a longer text needs. The parameter
itself stays, so a saved model has the rows that it was trained with, and undoing the patch restores them to the bit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from hf_posenc.errors import (
    FREQUENCY_METHODS_WORK,
    PosencError,
    UnsupportedModelError,
    UntrainedWarning,
    VerificationError,
)
from hf_posenc.methods import Method, NoPE
from hf_posenc.model.unwrapping import owner_of, trial
from hf_posenc.patch.attention import install_biases, is_pair, warn_of
from hf_posenc.patch.state import State
from hf_posenc.seams import probes
from hf_posenc.seams.held import Record, ShownTable, held
from hf_posenc.seams.tables import TablesByPosition, axis_of, run_past


class Silenced(ShownTable):
    """One row, the mean, in place of every row of a table, and of `rows` rows."""

    rows = 0

    def tensor(self, table: Tensor) -> Tensor:
        axis, start = axis_of(table), self.start
        row = self.made(table, lambda table: table.movedim(axis, 0)[start:].mean(0, keepdim=True))
        return row.expand(self.rows, *row.shape[1:]).movedim(0, axis)


@dataclass(frozen=True, eq=False)
class SilencedTable(TablesByPosition):
    """Tables that are silenced for a method that gives positions elsewhere, or nowhere."""

    in_attention = True
    has_length = True
    purpose = "Methods that replace {} and need training"

    @classmethod
    def takes(cls, method: type[Method], source: str) -> bool:
        return source in cls.sources and (method.seam == "bias" or issubclass(method, NoPE))

    def install(self, model: nn.Module, state: Record, method: Method) -> None:
        name = type(model).__name__
        if getattr(method, "keep_rope", False):
            raise PosencError(f"{method.name}: keep_rope keeps a rotation, and {name} has none.")
        length = self.length or 0
        target = state.extended = max(state.extended or 0, length)
        lengths = self.new_lengths(target, target / length)
        edits = self.grow(model, state, lengths)
        for table in self.tables:
            for module, attribute in held(model, table.path).places:
                silenced = Silenced(module, attribute, table.start)
                silenced.rows = table.start + lengths[table.path]
                state.hooks.append(silenced.install())
        with trial(model), state.sample.only():
            left = probes.absolute(model)[""]
        others = ", ".join(filter(None, (self.beside, self.rest)))
        if not others and left > probes.tolerance(model):
            raise VerificationError(
                f"With its table silenced, {name} still tells positions apart ({left:.1e}); the model was restored. "
                "Please report it, with the model type."
            )
        state.write_config(model, edits)
        if not isinstance(method, NoPE):
            self._install_biases(model, state, method)
        run_past(model, probes.ordinary_tokens(model, probes.TOKENS), self.tables, lengths)
        if others:
            warnings.warn(
                f"{name} gets positions from more than its table: {others}. That stays as it is.",
                stacklevel=4,
            )
        warn_of(model, [method], stacklevel=4)
        if not method.trainable:
            warnings.warn(
                f"{method.name} replaces the positions of {name}: the model must be trained with it before its output "
                "means anything.",
                UntrainedWarning,
                stacklevel=4,
            )

    def _install_biases(self, model: nn.Module, state: Record, method: Method) -> None:
        # An encoder and a decoder have a table each; attention from one to the other has no position.
        paths = {id(owner_of(model, table.path)): table.path for table in self.tables}
        if is_pair(model) and len(paths) < 2:
            raise UnsupportedModelError(
                f"{type(model).__name__} has an encoder and a decoder that cannot be run alone, so {method.name} "
                "cannot be tried on both. nope works on this model."
            )
        try:
            for path in paths.values():
                install_biases(model, cast(State, state), path)
        except UnsupportedModelError as error:
            reason = str(error).removesuffix(FREQUENCY_METHODS_WORK).strip()
            raise UnsupportedModelError(
                f"{reason} nope, and methods that make the table longer, work on this model."
            ) from error

    def rows(self, model: nn.Module) -> list[tuple[str, ...]]:
        rows = ((table.path, str(table.positions), "the mean row") for table in self.tables)
        return [("table", "rows", "read as"), *rows]
