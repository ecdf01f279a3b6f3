"""Rotary tables in GGUF files: what a file says, and a copy of it that says something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError

TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_PREFIXES = ("rope.", "context_length")


@dataclass(frozen=True)
class GGUFRope:
    """What a file says of its rotary table.

    Attributes:
        architecture: `general.architecture`.
        keys: The keys of rotary embedding and context, without the architecture's name in front.
        tensors: The tensors with divisors that it has.
    """

    architecture: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, Sequence[float]]


def read(path: str | Path) -> GGUFRope:
    """Reads a file's rotary table; the weights stay on the disk.

    Raises:
        PosencError: There is no such file, it is none, or the package gguf is missing.
    """
    reader = _open(path)
    architecture = str(reader.fields["general.architecture"].contents())
    keys = {
        name.removeprefix(f"{architecture}."): field.contents()
        for name, field in reader.fields.items()
        if name.removeprefix(f"{architecture}.").startswith(_PREFIXES)
    }
    tensors = {
        tensor.name: [float(value) for value in tensor.data]
        for tensor in reader.tensors
        if tensor.name in TENSORS
    }
    return GGUFRope(architecture, keys, tensors)


def write(
    path: str | Path,
    target: str | Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Sequence[float]],
) -> Path:
    """Copies a file with another rotary table.

    Args:
        path: The file.
        target: The copy; must not exist.
        keys: What replaces all `rope.scaling` keys, without the architecture's name in front.
        tensors: What replaces the tensors with divisors.

    Returns:
        The copy.

    Raises:
        PosencError: As `read`, or the copy exists.
    """
    import gguf
    import numpy as np

    reader, target = _open(path), Path(target)
    if target.exists():
        raise PosencError(f"{target} exists. Give another folder with --output, or remove it.")
    architecture = str(reader.fields["general.architecture"].contents())
    writer: Any = gguf.GGUFWriter(target, architecture, endianess=reader.endianess)
    alignment = reader.fields.get(gguf.Keys.General.ALIGNMENT)
    if alignment is not None:
        writer.data_alignment = alignment.contents()
    for name, field in reader.fields.items():
        bare = name.removeprefix(f"{architecture}.")
        if name.startswith("GGUF.") or name == gguf.Keys.General.ARCHITECTURE:
            continue  # the writer's own
        if bare.startswith("rope.scaling."):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    for name, value in keys.items():
        writer.add_key_value(f"{architecture}.{name}", value, _kind_of(value))
    data = {name: np.array(values, dtype=np.float32) for name, values in tensors.items()}
    kept = [tensor for tensor in reader.tensors if tensor.name not in TENSORS]
    for tensor in kept:
        shape, own = tensor.data.shape, tensor.data
        writer.add_tensor_info(tensor.name, shape, own.dtype, own.nbytes, tensor.tensor_type)
    for name, values in data.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in kept:
        writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
    for values in data.values():
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


def _kind_of(value: Any) -> Any:
    from gguf import GGUFValueType

    kinds = {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32, int: GGUFValueType.UINT32}
    return kinds[type(value)]
