"""Rotary tables in GGUF files: read from a file, compared with a model, and replaced in a copy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.engines.engine import GGUF_TENSORS, Divisors, TableError
from hf_posenc.engines.llama_cpp import LlamaCpp, runtime
from hf_posenc.engines.source import open_source
from hf_posenc.errors import PosencError
from hf_posenc.patch.request import MethodLike

_PREFIXES = ("rope.", "context_length")


@dataclass(frozen=True)
class GGUFCheck:
    """A file's table against the model's.

    Attributes:
        path: The file.
        architecture: Its `general.architecture`.
        error: The difference of llama.cpp's table from the model's.
        divisors: The table for a correct file; `None` if no file can have it.
    """

    path: str
    architecture: str
    error: TableError
    divisors: Divisors | None

    @property
    def right(self) -> bool:
        """True if llama.cpp computes the same as the model."""
        return self.error.small


def check_gguf(
    file: str | Path,
    directory: str | Path,
    *,
    flags: tuple[str, ...] = (),
    method: MethodLike | None = None,
    **options: Any,
) -> GGUFCheck:
    """Compare the rotary table of a GGUF file with that of the model that it was made from.

    Args:
        file: A file that `convert_hf_to_gguf` made.
        directory: The model, as for `export`.
        flags: The flags that llama.cpp is started with.
        method: As for `export`.
        **options: As for `export`.

    Raises:
        PosencError: Not a GGUF file, or a model without a table.
    """
    source = open_source(directory, method, **options)
    table = source.main_table
    if table is None:
        raise PosencError(
            f"{source.path} has no rotary table that a GGUF file could hold: methods that compute attention, and "
            "tables in the weights, stay with hf_posenc."
        )
    reader = _open(file)
    architecture = str(reader.fields["general.architecture"].contents())
    fields = {name.removeprefix(f"{architecture}."): f for name, f in reader.fields.items()}
    keys = {name: f.contents() for name, f in fields.items() if name.startswith(_PREFIXES)}
    tensors = {t.name: [float(v) for v in t.data] for t in reader.tensors if t.name in GGUF_TENSORS}
    computed = runtime(keys, tensors, table.dim, source.reach, flags)
    error = TableError.between(table.label, source.reach, computed, table.in_force(source.reach))
    every = (draft.divisors for draft in LlamaCpp().drafts(source))
    divisors = next((one for one in every if one is not None), None)
    if divisors is not None and architecture not in divisors.architectures:
        divisors = None
    return GGUFCheck(str(file), architecture, error, divisors)


def write_gguf(check: GGUFCheck, target: str | Path) -> Path:
    """Write a copy of a file with the model's table in it.

    Args:
        check: From `check_gguf`.
        target: The copy; must not exist.

    Raises:
        PosencError: llama.cpp reads no table for this architecture, or the copy exists.
    """
    architecture, divisors = check.architecture, check.divisors
    if divisors is None:
        raise PosencError(
            f"llama.cpp reads no table from a GGUF file of the architecture {architecture}, and its own keys cannot "
            "express this one."
        )
    reader, target = _open(check.path), Path(target)
    if target.exists():
        raise PosencError(f"{target} exists. Give another folder with --output, or remove it.")
    import gguf
    import numpy as np

    writer: Any = gguf.GGUFWriter(target, architecture, endianess=reader.endianess)
    alignment = reader.fields.get(gguf.Keys.General.ALIGNMENT)
    if alignment is not None:
        writer.data_alignment = alignment.contents()
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == gguf.Keys.General.ARCHITECTURE:
            continue  # the writer's own
        if name.removeprefix(f"{architecture}.").startswith("rope.scaling."):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    types = gguf.GGUFValueType
    kinds = {str: types.STRING, float: types.FLOAT32, int: types.UINT32}
    for name, value in divisors.keys(architecture).items():
        writer.add_key_value(f"{architecture}.{name}", value, kinds[type(value)])
    kept = [tensor for tensor in reader.tensors if tensor.name not in GGUF_TENSORS]
    for tensor in kept:
        shape, data = tensor.data.shape, tensor.data
        writer.add_tensor_info(tensor.name, shape, data.dtype, data.nbytes, tensor.tensor_type)
    tensors = divisors.tensors(architecture).items()
    added = {name: np.array(values, dtype=np.float32) for name, values in tensors}
    for name, values in added.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in kept:
        writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
    for values in added.values():
        writer.write_tensor_data(values)
    writer.close()
    return target


def _open(path: str | Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise PosencError(
            "GGUF files are read with the package gguf: pip install 'hf-posenc[gguf]'."
        ) from error
    if not Path(path).is_file():
        raise PosencError(
            f"There is no file {path}. Give a GGUF file that convert_hf_to_gguf made."
        )
    try:
        return gguf.GGUFReader(path)
    except ValueError as error:
        raise PosencError(f"{path} is not a GGUF file: {error}") from error
