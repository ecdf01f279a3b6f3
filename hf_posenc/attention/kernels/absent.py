"""In the place of Triton where it is not installed, so that every module can be imported; no kernel is ever called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class triton:  # noqa: N801
    """The decorator of kernels, which leaves them as they are."""

    @staticmethod
    def jit(kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return the kernel."""
        return kernel


class tl:  # noqa: N801
    """The type of constants."""

    constexpr = staticmethod(lambda value: value)
