"""The methods: the mathematics and nothing else. Imports torch, never transformers.

To add one, write its dataclass in a file here and name it in `METHODS`.
"""

from __future__ import annotations

from hf_posenc.errors import unknown
from hf_posenc.methods.alibi import ALiBi
from hf_posenc.methods.bands import Band, RotaryBands
from hf_posenc.methods.base import (
    Length,
    LengthDependent,
    Method,
    RopeScaling,
    Scaled,
    bucket_length,
    seam_of,
)
from hf_posenc.methods.base_change import ABF, NoPE
from hf_posenc.methods.bias import DistanceBias, RelativeKeys
from hf_posenc.methods.dual_chunk import DualChunk
from hf_posenc.methods.fire import FIRE
from hf_posenc.methods.interpolation import DynamicPI, PositionInterpolation
from hf_posenc.methods.kerple import KerpleLog, KerplePower
from hf_posenc.methods.llama3 import Llama3
from hf_posenc.methods.log_n import LogN
from hf_posenc.methods.longrope import LongRoPE
from hf_posenc.methods.ntk import DynamicNTK, NTKAware, NTKMixed
from hf_posenc.methods.partial_ntk import DynamicPartialNTK, PartialNTK
from hf_posenc.methods.relative_keys import Shaw, TransformerXL
from hf_posenc.methods.rerope import LeakyReRoPE, ReRoPE
from hf_posenc.methods.rope_bias import RopeBias
from hf_posenc.methods.sandwich import Sandwich
from hf_posenc.methods.self_extend import SelfExtend
from hf_posenc.methods.string_rope import STRING
from hf_posenc.methods.t5 import T5
from hf_posenc.methods.windows import AttentionSinks, LMInfinite, SlidingWindow
from hf_posenc.methods.xpos import XPos
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
    ReRoPE,
    LeakyReRoPE,
    SelfExtend,
    DualChunk,
    STRING,
    LMInfinite,
    AttentionSinks,
    SlidingWindow,
    LogN,
    ALiBi,
    KerpleLog,
    KerplePower,
    Sandwich,
    T5,
    FIRE,
    Shaw,
    TransformerXL,
    XPos,
    RopeBias,
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
    "FIRE",
    "METHODS",
    "STRING",
    "T5",
    "ALiBi",
    "AttentionSinks",
    "Band",
    "DistanceBias",
    "DualChunk",
    "DynamicNTK",
    "DynamicPI",
    "DynamicPartialNTK",
    "DynamicYaRN",
    "KerpleLog",
    "KerplePower",
    "LMInfinite",
    "LeakyReRoPE",
    "Length",
    "LengthDependent",
    "Llama3",
    "LogN",
    "LongRoPE",
    "Method",
    "NTKAware",
    "NTKByParts",
    "NTKMixed",
    "NoPE",
    "PartialNTK",
    "PositionInterpolation",
    "ReRoPE",
    "RelativeKeys",
    "RopeBias",
    "RopeScaling",
    "RotaryBands",
    "Sandwich",
    "Scaled",
    "SelfExtend",
    "Shaw",
    "SlidingWindow",
    "TransformerXL",
    "XPos",
    "YaRN",
    "available_methods",
    "bucket_length",
    "get_method",
    "seam_of",
]
