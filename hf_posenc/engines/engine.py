"""What an engine is to an export: how it is told of a table, and what it then computes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_posenc.adapters import patches_folder
from hf_posenc.engines.formulas import Table
from hf_posenc.engines.source import Source, SourceTable


@functools.cache
def known_names(engine: str) -> Mapping[str, frozenset[str]]:
    """The architectures that an engine treats alike, by what they have in common: `patches/engines/<engine>.json`."""
    text = (patches_folder() / "engines" / f"{engine}.json").read_text(encoding="utf-8")
    values: dict[str, list[str]] = json.loads(text)
    return {key: frozenset(names) for key, names in values.items() if key != "source"}


@dataclass(frozen=True)
class Draft:
    """One way to tell an engine of a model's tables.

    Attributes:
        form: Its name: `"rope_parameters"` (the method in the engine's own words), `"longrope"` (a list of divisors),
            or an engine's own.
        values: Attributes of the text part of the config.
        flags: What the engine's command is started with, beside the folder.
        notes: What a user must know.
        extra: What an engine's formula needs beside the config.
    """

    form: str
    values: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """An engine.

    Class attributes:
        name: As the command line takes it.
        version: The version whose source the formula was read from.
        fixed_table: Whether it makes one table at the start, whatever the length of a text.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    fixed_table: ClassVar[bool] = False

    def drafts(self, source: Source) -> Iterator[Draft]:
        """The ways to tell it, best first."""
        raise NotImplementedError

    def table(
        self,
        config: Mapping[str, Any],
        draft: Draft,
        entry: SourceTable,
        source: Source,
        length: int,
    ) -> Table | str:
        """What it computes, by its published formula, in float64; or why it does not start.

        Args:
            config: The text part of the exported config.
            draft: What it was told.
            entry: Which table.
            source: What is exported.
            length: Tokens of the text.
        """
        raise NotImplementedError

    def overrides(self, config: Mapping[str, Any], source: Source) -> tuple[str, ...]:
        """What the command needs to serve the original folder instead of the exported one; empty where it cannot."""
        return ()


def entry_of(rope_parameters: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    """One table's entry of `rope_parameters`, flat or nested by layer type."""
    found: Mapping[str, Any] = rope_parameters.get(label, rope_parameters)
    return found
