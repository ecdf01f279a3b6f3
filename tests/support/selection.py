"""The cases of a product that always run; the others run with `-m slow`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable
from typing import Any

import pytest


def late(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes as parameters, all of it marked `slow`."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(*axes)]


def quick(values: Iterable[Any], always: Container[Any]) -> list[Any]:
    """The values as parameters; those not in `always` are marked `slow`."""
    return [pytest.param(v, marks=() if v in always else pytest.mark.slow) for v in values]


def covering(*axes: Iterable[Any], rounds: int = 1) -> list[Any]:
    """The product of the axes as parameters, all of it but a covering selection marked `slow`.

    Every value of the longest axis always runs with `rounds` combinations of the others' values. They take turns, so
    every value of every axis always runs too.

    Args:
        *axes: The values of each parameter.
        rounds: Cases for each value of the longest axis.

    Returns:
        The parameters of `pytest.mark.parametrize`, in the order of the product.
    """
    values = [list(axis) for axis in axes]
    sizes = [len(axis) for axis in values]
    longest = sizes.index(max(sizes))
    others = [n for n in range(len(values)) if n != longest]
    turns = math.prod(sizes[n] for n in others)
    assert turns <= rounds * sizes[longest], "some values would have no turn"
    cases = []
    for places in itertools.product(*map(range, sizes)):
        turn, unit = 0, 1
        for n in others:
            turn += places[n] * unit
            unit *= sizes[n]
        late = (turn - places[longest] * rounds) % turns
        marks = () if late < rounds else pytest.mark.slow
        case = [axis[place] for axis, place in zip(values, places, strict=True)]
        cases.append(pytest.param(*case, marks=marks))
    return cases
