"""A request to patch a model, parsed once: from names, objects and options to a tuple of methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.methods import Method, RopeScaling, get_method, seam_of

MethodLike = str | Method | Sequence["str | Method"]
"""A name or alias, a Method object, or a list of them on different seams."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The methods that a caller named, before the model's own context length is known.

    Attributes:
        parts: Method objects, and the classes of methods given by name.
        options: The knobs of a single method given by name.
        scale: Target context as a multiple of the original one.
        target_length: Target context in tokens.
    """

    parts: tuple[Method | type[Method], ...]
    options: Mapping[str, Any]
    scale: float | None
    target_length: int | None

    @classmethod
    def parse(
        cls,
        method: MethodLike,
        *,
        scale: float | None = None,
        target_length: int | None = None,
        options: Mapping[str, Any],
    ) -> Request:
        """Read what `patch_model` was given.

        Raises:
            PosencError: An unknown method, an empty list, two methods on one seam, or a number or option that
                could belong to several methods.
        """
        named = [method] if isinstance(method, str | Method) else method
        parts = tuple(get_method(part) if isinstance(part, str) else part for part in named)
        request = cls(parts=parts, options=options, scale=scale, target_length=target_length)
        if not parts:
            raise PosencError("An empty list of methods: name at least one.")
        if len(parts) > 1:
            request._check_list()
        return request

    def _check_list(self) -> None:
        if self.options:
            raise PosencError(
                f"Options ({', '.join(self.options)}) belong to one method: in a list, give method objects, as "
                "in [YaRN(scale=4), LogN()]."
            )
        seams = [seam_of(part) if isinstance(part, Method) else part.seam for part in self.parts]
        for seam in seams:
            names = [part.name for part, own in zip(self.parts, seams, strict=True) if own == seam]
            if len(names) > 1:
                raise PosencError(
                    f"Two methods on one seam exclude each other: {', '.join(names)} ({seam}). Pick one of them."
                )
        scaled = [part.name for part in self.parts if part.takes_scale()]
        if len(scaled) > 1 and self.scale is not None:
            raise PosencError(
                f"scale= could be that of {' or '.join(scaled)}: give method objects, as in [YaRN(scale=4), "
                "LogN()]."
            )

    @property
    def changes_frequencies(self) -> bool:
        """True if a frequency method is among them."""
        return any(
            issubclass(part if isinstance(part, type) else type(part), RopeScaling)
            for part in self.parts
        )

    def resolve(self, original: int) -> tuple[tuple[Method, ...], int | None]:
        """Return the method objects, and the context length that they reach in tokens.

        The length is `None` for methods that follow the text, and for those that name neither scale nor
        target.

        Args:
            original: The original context length, in tokens.

        Raises:
            PosencError: An unknown option, a value out of range, numbers that disagree, or methods that have
                no meaning together.
        """
        methods, reaches = [], []
        for part in self.parts:
            method, reach = self._resolve(part, original)
            methods.append(method)
            reaches.append(reach)
        for method in methods:
            method.check_beside([other for other in methods if other is not method])
        return tuple(methods), next((reach for reach in reaches if reach is not None), None)

    def _resolve(self, part: Method | type[Method], original: int) -> tuple[Method, int | None]:
        alone = len(self.parts) == 1
        scale = self.scale if alone or part.takes_scale() else None
        target = self.target_length
        if not alone and (part.follows_text or not part.takes_scale()):
            target = None
        if target is not None and target < original:
            raise PosencError(
                f"target_length={target} is below the original {original} tokens: nothing to extend."
            )
        if target is not None and part.follows_text:
            raise PosencError(f"{part.name} follows the length of the text: no target_length.")
        if isinstance(part, Method):
            if scale is not None or self.options:
                raise PosencError(
                    f"Give the knobs to {type(part).__name__}(...) itself, not beside it."
                )
            scale = getattr(part, "scale", None)
        implied = target / original if target is not None and part.takes_scale() else None
        if scale is not None and implied is not None and not math.isclose(scale, implied):
            raise PosencError(
                f"scale={scale:g} and target_length={target} disagree: {original} tokens times "
                f"{scale:g} is {original * scale:g}. Give one of them."
            )
        if not isinstance(part, Method):
            scale = implied if scale is None else scale
            if scale is not None and not part.takes_scale():
                knobs = ", ".join(part.knobs()) or "none"
                raise PosencError(
                    f"{part.name} takes no scale: {part.summary}. Its knobs: {knobs}."
                )
            part = part.from_options(**({} if scale is None else {"scale": scale}), **self.options)
        if target is None and scale is not None and not part.follows_text:
            target = math.ceil(original * scale)
        return part, target
