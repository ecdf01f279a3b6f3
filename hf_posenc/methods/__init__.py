"""The methods: the mathematics and nothing else. Imports torch, never transformers.

To add one, write its dataclass in a file here and name it in `METHODS`.
"""

from __future__ import annotations

from hf_posenc.errors import unknown
from hf_posenc.methods.base import Length, LengthDependent, Method, RopeScaling, Scaled
from hf_posenc.methods.base_change import ABF, NoPE
from hf_posenc.methods.interpolation import DynamicPI, PositionInterpolation
from hf_posenc.methods.llama3 import Llama3
from hf_posenc.methods.longrope import LongRoPE
from hf_posenc.methods.ntk import DynamicNTK, NTKAware, NTKMixed
from hf_posenc.methods.partial_ntk import DynamicPartialNTK, PartialNTK
from hf_posenc.methods.yarn import DynamicYaRN, NTKByParts, YaRN

METHODS: tuple[type[Method], ...] = (
    PositionInterpolation,
    NTKAware,
    DynamicPI,
    DynamicNTK,
    PartialNTK,
    NTKByParts,
    YaRN,
    DynamicPartialNTK,
    DynamicYaRN,
    NTKMixed,
    Llama3,
    LongRoPE,
    ABF,
    NoPE,
)

_BY_NAME: dict[str, type[Method]] = {
    name: method for method in METHODS for name in (method.name, *method.aliases)
}


def available_methods() -> tuple[str, ...]:
    """The canonical names of all methods, in the order of the documentation."""
    return tuple(method.name for method in METHODS)


def get_method(name: str) -> type[Method]:
    """The method of this name or alias; hyphens count as underscores.

    Raises:
        PosencError: No method has this name.
    """
    method = _BY_NAME.get(name.lower().replace("-", "_"))
    if method is None:
        raise unknown("method", name, available_methods())
    return method


__all__ = [
    "ABF",
    "METHODS",
    "DynamicNTK",
    "DynamicPI",
    "DynamicPartialNTK",
    "DynamicYaRN",
    "Length",
    "LengthDependent",
    "Llama3",
    "LongRoPE",
    "Method",
    "NTKAware",
    "NTKByParts",
    "NTKMixed",
    "NoPE",
    "PartialNTK",
    "PositionInterpolation",
    "RopeScaling",
    "Scaled",
    "YaRN",
    "available_methods",
    "get_method",
]
