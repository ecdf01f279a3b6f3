"""The methods: the mathematics and nothing else. Never imports transformers.

Functions that compute import torch themselves, since a wrong name or option is refused before that takes seconds.
Every module with methods is imported here, and a method is registered by its definition
(`Method.__init_subclass__`): a new file needs no entry anywhere. The imports below let editors and
mypy see the names; a class that is not among them can be imported from here all the same.
"""

# ruff: noqa: RUF022
from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from importlib import metadata
from typing import Any, TypeVar

from hf_posenc.errors import PosencError, unknown
from hf_posenc.methods.bands import Band, GrowingBands, RotaryBands
from hf_posenc.methods.base import (
    REGISTRY,
    Dynamic,
    Growing,
    Length,
    LengthDependent,
    Method,
    RopeScaling,
    Scaled,
    TableFilter,
    bucket_length,
    needs_no_rotation,
    seam_of,
    update_of,
)
from hf_posenc.methods.bias import DistanceBias, RelativeKeys
from hf_posenc.methods.dpe import DPE
from hf_posenc.methods.dual_chunk import STRING, DualChunk
from hf_posenc.methods.filters import Clip, PowerBasis, ResonanceRoPE, TruncatedBasis
from hf_posenc.methods.growing import JetLong, LaMPE
from hf_posenc.methods.interpolation import (
    ABF,
    DiffusionNTK,
    DynamicNTK,
    DynamicPI,
    NoPE,
    NTKAware,
    NTKMixed,
    PositionInterpolation,
)
from hf_posenc.methods.learned_biases import FIRE, T5
from hf_posenc.methods.longrope import LongRoPE
from hf_posenc.methods.penalties import ALiBi, KerpleLog, KerplePower, Sandwich
from hf_posenc.methods.queries_keys import RopeBias, XPos
from hf_posenc.methods.relative_keys import Shaw, TransformerXL
from hf_posenc.methods.rerope import LeakyReRoPE, ReRoPE, SelfExtend
from hf_posenc.methods.tables import (
    Group,
    Hierarchical,
    Interpolate,
    Sinusoidal,
    Stretch,
    TableMethod,
    Tile,
)
from hf_posenc.methods.temperature import LogN, Temperature
from hf_posenc.methods.windows import AttentionSinks, LMInfinite, SlidingWindow
from hf_posenc.methods.yarn import (
    DynamicPartialNTK,
    DynamicYaRN,
    Llama3,
    MrRoPE,
    NTKByParts,
    PartialNTK,
    YaRN,
)

__all__ = [
    "METHODS",
    "Method",
    "available_methods",
    "bucket_length",
    "get_method",
    "needs_no_rotation",
    "register_method",
    "seam_of",
    "update_of",
]
__all__ += [
    "Length",
    "RopeScaling",
    "Scaled",
    "Growing",
    "LengthDependent",
    "Dynamic",
    "TableFilter",
]
__all__ += ["Band", "RotaryBands", "GrowingBands", "DistanceBias", "RelativeKeys"]
# Methods in the order of the documentation; those that are not named here follow.
__all__ += ["PositionInterpolation", "NTKAware", "DiffusionNTK", "DynamicPI", "DynamicNTK"]
__all__ += ["PartialNTK", "NTKByParts", "YaRN", "DynamicPartialNTK", "DynamicYaRN"]
__all__ += ["NTKMixed", "MrRoPE", "Llama3", "LongRoPE", "ABF", "NoPE"]
__all__ += ["Clip", "ResonanceRoPE", "PowerBasis", "TruncatedBasis"]
__all__ += ["ReRoPE", "LeakyReRoPE", "SelfExtend", "DPE", "LaMPE", "JetLong", "DualChunk", "STRING"]
__all__ += ["LMInfinite", "AttentionSinks", "SlidingWindow", "LogN", "Temperature"]
__all__ += ["ALiBi", "KerpleLog", "KerplePower", "Sandwich", "T5", "FIRE", "Shaw", "TransformerXL"]
__all__ += ["XPos", "RopeBias"]
__all__ += ["TableMethod", "Interpolate", "Hierarchical", "Group", "Tile", "Stretch", "Sinusoidal"]

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "contract":  # checks of tensors, without a method
        importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> Any:
    """Return a method class that is registered but not imported above."""
    if name in REGISTRY:
        return REGISTRY[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


METHODS: tuple[type[Method], ...] = tuple(
    REGISTRY[name] for name in dict.fromkeys((*__all__, *REGISTRY)) if name in REGISTRY
)
"""All methods, in the order of the documentation."""

_BY_NAME = {name: method for method in METHODS for name in (method.name, *method.aliases)}
_OWN: dict[str, type[Method]] = {}
"""Methods of the user's own by name and alias."""
_GROUP = "hf_posenc.methods"
"""Entry points by which an installed package names the methods that it has."""
_TAKEN = ("none", "truncation")
"""Names of what measurements compare methods with."""
MethodT = TypeVar("MethodT", bound=Method)


def available_methods() -> tuple[str, ...]:
    """Return the canonical names of all methods, in the order of the documentation.

    Those registered since follow, then those of installed packages that no request has named yet.

    Examples:
        >>> from hf_posenc import available_methods
        >>> available_methods()[:2]
        ('pi', 'ntk')
    """
    return _available(metadata.entry_points(group=_GROUP))


def _available(installed: metadata.EntryPoints) -> tuple[str, ...]:
    others = sorted(name for name in installed.names if name not in _BY_NAME | _OWN)
    return tuple(dict.fromkeys((*(method.name for method in (*METHODS, *_OWN.values())), *others)))


def register_method(method: type[MethodT]) -> type[MethodT]:
    """Register a method of your own under its `name` and `aliases`; a decorator of its class.

    From then on, this process knows the name wherever it knows those of the package: in `patch_model`, in
    measurements, in saved models and adapters. Registering a class of the same name again replaces the first.
    An installed package registers its methods by entry points of the group `hf_posenc.methods`.

    Args:
        method: A subclass of `Method`, with `name`, `summary`, `source` and `needs`.

    Returns:
        The same class.

    Raises:
        PosencError: It is no such class, or a name is not in lower case, or belongs to another method.

    Examples:
        >>> from dataclasses import dataclass
        >>> from hf_posenc import patch_model, register_method
        >>> from hf_posenc.methods import Scaled
        >>> @register_method
        ... @dataclass(frozen=True, kw_only=True)
        ... class Halved(Scaled):
        ...     name = "halved"
        ...     summary = "the slower half of the pairs divided by the scale"
        ...     source = "this example"
        ...     needs = "nothing"
        ...
        ...     def inv_freq(self, rope, length=None):
        ...         table = rope.default_inv_freq()
        ...         table[len(table) // 2 :] /= self.scale
        ...         return table
        >>> model = patch_model(model, "halved", scale=4)
    """
    if not (inspect.isclass(method) and issubclass(method, Method)):
        raise PosencError(
            f"A method is registered by its class, a subclass of Method, not {method!r:.80}."
        )
    lacking = [a for a in ("name", "summary", "source", "needs", "seam") if not hasattr(method, a)]
    if lacking:
        raise PosencError(f"{method.__name__} lacks {', '.join(lacking)}: set it in the class.")
    hints = map(str, inspect.get_annotations(method).values())
    if "__dataclass_fields__" not in vars(method) and any("ClassVar" not in hint for hint in hints):
        raise PosencError(
            f"{method.__name__} is no dataclass, so its fields are no knobs: write @dataclass(frozen=True, "
            "kw_only=True) below @register_method."
        )
    names = (method.name, *method.aliases)
    for name in names:
        if not (isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name)) or name in _TAKEN:
            raise PosencError(
                f"{name!r} cannot name a method: use lower-case letters, digits and underscores, such as 'my_rope'."
            )
        owner = _BY_NAME.get(name) or _OWN.get(name)
        if owner is not None and not (name in _OWN and owner.name == method.name):
            raise PosencError(f"{name!r} is the name of {owner.__name__} already: choose another.")
    for name in [name for name, owner in _OWN.items() if owner.name == method.name]:
        del _OWN[name]
    _OWN.update(dict.fromkeys(names, method))
    return method


def get_method(name: str) -> type[Method]:
    """Return the class of the method of this name or alias; that of an installed package is imported and registered.

    Args:
        name: The name; hyphens count as underscores, which may be left out.

    Raises:
        PosencError: No method has this name, or the package that has it cannot be imported.

    Examples:
        >>> from hf_posenc import get_method
        >>> get_method("selfextend").name
        'self_extend'
        >>> get_method("yarn").knobs()["beta_fast"]
        32.0
    """
    if not isinstance(name, str):
        raise PosencError(
            f"A method is a name such as 'yarn' (available_methods() lists them), not {name!r}."
        )
    wanted = name.lower().replace("-", "_")
    if wanted in ("none", "truncation"):
        raise PosencError(
            f"{name!r} is no method, but a control of measurements: the unpatched model, on its last tokens."
        )
    method = _BY_NAME.get(wanted) or _OWN.get(wanted)
    if method is None:  # reading the entry points of every package takes time: once
        installed = metadata.entry_points(group=_GROUP)
        joined = {name.replace("_", ""): each for name, each in (_BY_NAME | _OWN).items()}
        method = _registered(installed, wanted) or joined.get(wanted.replace("_", ""))
        if method is None:
            own = " One of your own needs @register_method, or an entry point of its package."
            raise unknown("method", name, _available(installed), own)
    return method


def _registered(installed: metadata.EntryPoints, name: str) -> type[Method] | None:
    """Register the method that an installed package has under this name, and return it."""
    for entry in installed.select(name=name):
        try:
            method = register_method(entry.load())
            if name not in (method.name, *method.aliases):
                raise PosencError(f"the name of this class is {method.name!r}.")
        except Exception as error:
            package = "An installed package" if entry.dist is None else entry.dist.name
            raise PosencError(
                f"{package} offers {entry.value} as the method {name!r}, and it cannot be used: "
                f"{type(error).__name__}: {error}"
            ) from error
    return _OWN.get(name)
