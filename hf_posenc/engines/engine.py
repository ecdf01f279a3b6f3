"""Base class of the engines: the forms in which each gets a model's tables, and the tables that it computes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_posenc.adapters import patches_folder
from hf_posenc.engines.formulas import Table
from hf_posenc.engines.source import Source, SourceTable
from hf_posenc.gguf_file import ROPE_TENSORS as GGUF_TENSORS

# Rounding between two ways to compute the same float32 table.
_FREQUENCY_TOLERANCE = 1e-5
_FACTOR_TOLERANCE = 1e-6
_STILL = 1e-9  # radians per token: a turn in 6e9 tokens


@functools.cache
def known_names(engine: str) -> Mapping[str, frozenset[str]]:
    """Return the architectures that an engine treats alike, from `patches/engines/<engine>.json`."""
    text = (patches_folder() / "engines" / f"{engine}.json").read_text(encoding="utf-8")
    values: dict[str, Any] = json.loads(text)
    return {key: frozenset(names) for key, names in values.items() if isinstance(names, list)}


@functools.cache
def gguf_architectures() -> Mapping[str, str]:
    """Return the GGUF architecture to which llama.cpp converts a class of transformers, by the class's name."""
    text = (patches_folder() / "engines" / "llama.cpp.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["converter"])


@dataclass(frozen=True)
class Divisors:
    """A table as a GGUF file can hold it.

    Attributes:
        short: The divisor of every pair's frequency, for contexts of up to `original` tokens.
        long: The same for longer ones.
        factor: The factor on cos and sin.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    factor: float
    original: int

    @property
    def architectures(self) -> frozenset[str]:
        """The GGUF architectures that read it."""
        known = known_names("llama.cpp")
        one = known["rope_freqs"] if self.short == self.long else frozenset[str]()
        return one | known["rope_factors"]

    def tensors(self, architecture: str) -> dict[str, tuple[float, ...]]:
        """Return the tensors for an architecture, by name."""
        if self.short == self.long and architecture in known_names("llama.cpp")["rope_freqs"]:
            return {GGUF_TENSORS[0]: self.short}
        return {GGUF_TENSORS[1]: self.short, GGUF_TENSORS[2]: self.long}

    def keys(self, architecture: str) -> dict[str, Any]:
        """Return the `rope.scaling` keys beside them, without the architecture's name in front."""
        keys: dict[str, Any] = {"rope.scaling.type": "none"}
        if len(self.tensors(architecture)) > 1:
            keys["rope.scaling.type"] = "longrope"
            keys["rope.scaling.original_context_length"] = self.original
        return {**keys, "rope.scaling.attn_factor": self.factor}


@dataclass(frozen=True)
class Draft:
    """One form in which an engine can get a model's tables, with the fields of `Export`.

    The form is `"rope_parameters"` (the engine's own name for the method), `"longrope"` (a list of divisors), or an
    engine's own; the values are attributes of the text part of the config.
    """

    form: str
    values: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    divisors: Divisors | None = None


@dataclass(frozen=True, eq=False)
class Setup:
    """One table of an exported model in an engine: the text part of its config, and a text of `length` tokens."""

    config: Mapping[str, Any]
    draft: Draft
    table: SourceTable
    source: Source
    length: int


class Engine:
    """An engine, in the version whose source the formulas come from."""

    name: ClassVar[str]
    version: ClassVar[str]
    fixed_table: ClassVar[bool] = False
    """True if it makes one table at the start, for texts of every length."""
    legacy: ClassVar[bool] = False
    """True if it reads the keys of transformers 4.57, in classes of its own."""

    def drafts(self, source: Source) -> Iterator[Draft]:
        """Yield the forms for a model, best first."""
        raise NotImplementedError

    def compute(self, setup: Setup) -> Table | str:
        """Return the engine's table by its published formula, in float64, or the reason why it does not start."""
        raise NotImplementedError

    def overrides(self, config: Mapping[str, Any], source: Source) -> tuple[str, ...]:
        """Return the flags that serve the original folder instead of the exported one; empty if there are none."""
        return ()

    def plugin(self, source: Source) -> tuple[str, ...] | str | None:
        """Return the flags that serve the folder of a saved patch through our plug-in, or the reason why it does not.

        It is `None` for an engine without one.
        """
        return None


def entry_of(rope_parameters: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    """Return one table's entry of `rope_parameters`, flat or nested by layer type."""
    entry: Mapping[str, Any] = rope_parameters.get(label, rope_parameters)
    return entry


@dataclass(frozen=True)
class TableError:
    """The difference between an engine's table and the model's.

    Attributes:
        layers: The layer type; `""` where one table serves all layers.
        length: Tokens of the text.
        frequency: The largest relative difference of a frequency.
        factor: The relative difference of the factor on cos and sin.
        phase: The largest difference of an angle at the last token, in radians.
    """

    layers: str
    length: int
    frequency: float
    factor: float
    phase: float

    @property
    def small(self) -> bool:
        """True if it is rounding."""
        return self.frequency <= _FREQUENCY_TOLERANCE and self.factor <= _FACTOR_TOLERANCE

    @classmethod
    def between(cls, label: str, length: int, engine: Table, model: Table) -> TableError:
        difference = (engine.inv_freq - model.inv_freq).abs()
        relative = difference / model.inv_freq.abs().clamp(min=_STILL)
        return cls(
            label,
            length,
            float(relative.max()),
            abs(engine.factor / model.factor - 1),
            float(difference.max()) * (length - 1),
        )
