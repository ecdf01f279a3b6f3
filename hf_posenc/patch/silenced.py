"""A bias, or no position at all, in the place of a table of positions.

The rows of the table are read as their mean, whatever the position. The parameter itself stays, so a saved model has
the rows that it was trained with, and undoing the patch restores them to the bit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from hf_posenc.errors import (
    FREQUENCY_METHODS_WORK,
    PosencError,
    UnsupportedModelError,
    VerificationError,
)
from hf_posenc.methods import Method, NoPE
from hf_posenc.model.unwrapping import trial
from hf_posenc.patch.attention import install_biases, owner_of
from hf_posenc.patch.state import State
from hf_posenc.seams import probes
from hf_posenc.seams.held import InPlace, TableEnd, held
from hf_posenc.seams.inspection import LEARNED, SINUSOIDAL, Positions
from hf_posenc.seams.native import NativeSeam, Undo


class Silenced(InPlace):
    """One row, the mean, in place of every row of a table."""

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the mean row in place."""
        self.after(model, args, None)  # a forward that was interrupted may have left it
        row = self.made(lambda table: table[self.start :].mean(0, keepdim=True))
        self.show(row.expand_as(self.table.tensor()))


@dataclass(frozen=True, eq=False)
class SilencedTable(NativeSeam):
    """Tables that are read by position, silenced for a method that gives positions elsewhere, or nowhere.

    Attributes:
        tables: The path of each table, and the row of position 0.
        others: What else gives the model positions, in words; empty if nothing does.
    """

    tables: tuple[tuple[str, int], ...] = ()
    others: str = ""
    sources = (LEARNED, SINUSOIDAL)
    in_attention = True
    purpose = "Methods that replace {} and need training"

    @classmethod
    def takes(cls, method: type[Method], source: str) -> bool:
        return source in cls.sources and (method.seam == "bias" or issubclass(method, NoPE))

    @classmethod
    def of(cls, model: nn.Module, positions: Positions) -> SilencedTable:
        sources = positions.of_kind(*cls.sources)
        tables = tuple((path, each.start) for each in sources for path in each.places)
        for path, _ in tables:
            if (tensor := held(model, path).tensor()).dim() != 2:
                raise UnsupportedModelError(
                    f"{path} of shape {tuple(tensor.shape)} is no table of rows."
                )
        lengths = [len(held(model, path).tensor()) - start for path, start in tables]
        others = [each for each in positions.sources if each.kind not in cls.sources]
        config: Any = model.config
        return cls(config, min(lengths), tables, ", ".join(map(str, (*others, *positions.rest))))

    def install(self, model: nn.Module, state: Undo, method: Method) -> None:
        if getattr(method, "keep_rope", False):
            raise PosencError(
                f"{method.name}: keep_rope keeps a rotation, and {type(model).__name__} has none."
            )
        for path, start in self.tables:
            table, owner = held(model, path), owner_of(model, path)
            end = TableEnd(len(table.tensor()) - start, silenced=True)
            state.hooks.append(owner.register_forward_pre_hook(end, with_kwargs=True))
            state.hooks += Silenced(table, start).around(owner)
        with trial(model):
            left = probes.absolute(model)[""]
        if not self.others and left > probes.tolerance(model):
            raise VerificationError(
                f"With its table silenced, {type(model).__name__} still tells positions apart ({left:.1e}); the model "
                "was restored. Please report it, with the model type."
            )
        if self.others:
            warnings.warn(
                f"{type(model).__name__} gets positions from more than its table: {self.others}. That stays as it is.",
                stacklevel=5,
            )
        if (state.extended or 0) > (self.length or 0):
            warnings.warn(
                f"{method.name} with a longer target: {type(model).__name__} still reads no more than the "
                f"{self.length} tokens of its table. For more, lengthen the table first (interpolate, ...), save the "
                "model, load it and patch it then.",
                stacklevel=5,
            )
        state.extended = self.length
        state.write_config(model, [])
        if not isinstance(method, NoPE):
            # An encoder and a decoder have a table each; attention from one to the other has no position.
            paths = {id(owner_of(model, path)): path for path, _ in self.tables}
            if getattr(model.config, "is_encoder_decoder", False) and len(paths) < 2:
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
        heading = ("table", "positions", "read as")
        return [heading, *((path, str(self.length), "the mean row") for path, _ in self.tables)]
