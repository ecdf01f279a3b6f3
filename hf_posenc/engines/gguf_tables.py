"""A converted GGUF file against the model: what llama.cpp will compute from it, and a file that is right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hf_posenc.engines import gguf
from hf_posenc.engines.exporting import TableError, table_error
from hf_posenc.engines.llama_cpp import Divisors, LlamaCpp, runtime
from hf_posenc.engines.opening import open_source
from hf_posenc.engines.source import Source, SourceTable
from hf_posenc.errors import PosencError
from hf_posenc.resolve import MethodLike


@dataclass(frozen=True)
class GGUFCheck:
    """What a file makes of the model's table.

    Attributes:
        path: The file.
        architecture: Its `general.architecture`.
        error: How far the table of llama.cpp is from the model's.
        divisors: What a file would need that has it right; `None` where no file can.
    """

    path: str
    architecture: str
    error: TableError
    divisors: Divisors | None

    @property
    def right(self) -> bool:
        """Whether llama.cpp computes what the model does."""
        return self.error.small


def check_gguf(
    file: str | Path,
    directory: str | Path,
    *,
    flags: tuple[str, ...] = (),
    method: MethodLike | None = None,
    **options: object,
) -> GGUFCheck:
    """Compares the rotary table of a GGUF file with that of the model that it was made from.

    Args:
        file: What `convert_hf_to_gguf` made.
        directory: The model, as for `export`.
        flags: The flags that llama.cpp is started with.
        method: As for `export`.
        **options: As for `export`.

    Raises:
        PosencError: Not a GGUF file, or a model without a table.
    """
    source = open_source(directory, method, **options)
    entry = _main_table(source)
    found = gguf.read(file)
    told = runtime(found.keys, found.tensors, entry.dim, source.reach, flags)
    error = table_error(entry.label, source.reach, told, entry.in_force(source.reach))
    drafts = [draft.extra.get("divisors") for draft in LlamaCpp().drafts(source)]
    divisors = next((one for one in drafts if one is not None), None)
    if divisors is not None and found.architecture not in divisors.architectures:
        divisors = None
    return GGUFCheck(str(file), found.architecture, error, divisors)


def write_gguf(check: GGUFCheck, target: str | Path) -> Path:
    """Writes a copy of a file with the model's table in it.

    Args:
        check: From `check_gguf`.
        target: The copy; must not exist.

    Raises:
        PosencError: llama.cpp reads no table for this architecture, or the copy exists.
    """
    if check.divisors is None:
        raise PosencError(
            f"llama.cpp reads no table from a GGUF file of the architecture {check.architecture}, and its own words "
            "do not say this one."
        )
    keys = check.divisors.keys(check.architecture)
    return gguf.write(check.path, target, keys, check.divisors.tensors(check.architecture))


def _main_table(source: Source) -> SourceTable:
    tables = {entry.label: entry for entry in source.tables}
    entry = tables.get("full_attention", tables.get(""))
    if entry is None:
        raise PosencError(
            f"{source.path} has no rotary table that a GGUF file could hold: methods that compute attention, and "
            "tables in the weights, stay with hf_posenc."
        )
    return entry
