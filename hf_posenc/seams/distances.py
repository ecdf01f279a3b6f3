"""The seam of models with trained relative position biases: distances are divided, or fewer of them share the last row.

The module that holds such a table has a function from distances of query and key to rows of the table. It is found by a
trial: the one function of the module that returns the rows at which the table is read.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, UnsupportedModelError, VerificationError
from hf_posenc.methods import T5, Method
from hf_posenc.model.calibration import trial_tokens
from hf_posenc.model.unwrapping import configs_of, swapped
from hf_posenc.seams.held import Edits, Record
from hf_posenc.seams.inspection import BY_DISTANCE, Positions
from hf_posenc.seams.native import NativeSeam
from hf_posenc.seams.traces import read_tables, rows_read

_FAR = 1 << 16  # tokens: up to this distance, rows of a native model are compared


class DividedBuckets:
    """The bucket function of a module, with distances `sign(r) floor(abs(r) / s)` instead of r.

    It stands in the module's own attributes, before the function of its class, and can be copied and pickled with it.
    """

    def __init__(self, module: nn.Module, name: str, scale: float) -> None:
        self.module, self.name, self.scale = module, name, scale
        self.static = isinstance(inspect.getattr_static(type(module), name), staticmethod)

    def __call__(self, distance: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the rows of the table for distances, of their shape."""
        function = getattr(type(self.module), self.name)
        given = () if self.static else (self.module,)
        rows: Tensor = function(*given, divided(distance, self.scale), *args, **kwargs)
        return rows


def divided(distance: Tensor, scale: float) -> Tensor:
    """Return `sign(r) floor(abs(r) / s)` of whole distances r, of their shape and dtype."""
    whole = (distance.abs().to(torch.float64) / scale).floor().to(distance.dtype)
    return distance.sign() * whole


@dataclass(frozen=True)
class Table:
    """A relative position bias."""

    path: str  # the module with the function from distances to rows
    weight: str  # the table itself
    function: str  # the name of that function
    # The attribute of the module, and of its config, with the distance from which all keys share a row; `None`: there
    # is none.
    limit: str | None


@dataclass(frozen=True, eq=False)
class DistanceSeam(NativeSeam):
    """The trained relative position biases of a model."""

    tables: tuple[Table, ...]  # all of them: those of the encoder, of the decoder, of every layer
    sources = (BY_DISTANCE,)

    @classmethod
    def takes(cls, method: type[Method], source: str) -> bool:
        return issubclass(method, T5)

    @classmethod
    def of(cls, model: nn.Module, positions: Positions) -> DistanceSeam:
        length = getattr(model.config, "n_positions", None)
        return cls(model.config, length if isinstance(length, int) else None, tuple(_tables(model)))

    def install(self, model: nn.Module, state: Record, method: Method) -> None:
        """Divide distances, or raise the distance from which all keys share a row; verify the rows."""
        assert isinstance(method, T5)
        if own := method.options().keys() - {"scale", "mode"}:
            raise PosencError(
                f"{type(model).__name__} has trained tables, to which {', '.join(sorted(own))} cannot be given: they "
                "take scale= and mode=."
            )
        dividing = method.mode == "distance"
        expected = self._far_rows(model, method.scale if dividing else 1.0)
        edits: Edits = []
        if dividing:
            for table in self.tables:
                module = model.get_submodule(table.path)
                state.set(module, {table.function: None})  # noted, so that it is undone
                vars(module)[table.function] = DividedBuckets(module, table.function, method.scale)
        else:
            edits = self._raise_limits(model, state, method)
        state.write_config(model, edits)
        if not dividing and _is_native(model, self.tables):
            state.export = "config"
        equal = map(torch.equal, self._far_rows(model, 1.0), expected)
        if not all(same == (dividing or method.scale == 1) for same in equal):
            raise VerificationError(
                f"The relative position biases of {type(model).__name__} are not read at the rows of the requested "
                "patch. The model was restored. Please report it, with the model type."
            )

    def rows(self, model: nn.Module) -> list[tuple[str, ...]]:
        """Return the tables, what distances are divided by, and the distance from which all keys share a row."""
        found: dict[tuple[str, ...], list[str]] = {}
        for table in self.tables:
            module = model.get_submodule(table.path)
            size, heads = model.get_parameter(table.weight).shape
            function = vars(module).get(table.function)
            scale = function.scale if isinstance(function, DividedBuckets) else 1
            limit = "" if table.limit is None else str(getattr(module, table.limit))
            cells = str(size), str(heads), f"{scale:g}", limit
            found.setdefault(cells, []).append(table.weight.split(".")[-2])
        heading = ("tables", "buckets", "heads", "divided by", "max distance")
        named = ((name, names, cells) for cells, names in found.items() for name in {*names})
        return [
            heading,
            *((f"{name} x{names.count(name)}", *cells) for name, names, cells in named),
        ]

    def _raise_limits(self, model: nn.Module, state: Record, method: T5) -> Edits:
        """Raise the limits in the modules, and return the edits of all configs that name them."""
        edits = []
        for name in dict.fromkeys(table.limit for table in self.tables):
            if name is None:
                raise UnsupportedModelError(
                    f"{type(model).__name__} has no setting for the distance from which all keys share a row, which "
                    'mode="max_distance" raises. mode="distance" divides distances instead.'
                )
            for each in [*model.modules(), *configs_of(model).values()]:
                if isinstance(vars(each).get(name), int):
                    value = {name: round(vars(each)[name] * method.scale)}
                    if isinstance(each, nn.Module):
                        state.set(each, value)
                    else:
                        edits.append((each, value))
        return edits

    def _far_rows(self, model: nn.Module, scale: float) -> list[Tensor]:
        """Return the rows that the live model reads at distances divided by a scale, for each table."""
        far = torch.arange(-_FAR, _FAR)
        names: dict[str, list[str]] = {}
        for table in self.tables:
            names.setdefault(table.path, []).append(table.function)
        calls = _calls(model, [table.weight for table in self.tables], names)
        return [
            calls[table.weight][table.path, table.function].of(divided(far, scale))
            for table in self.tables
        ]


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a function from distances to rows: whole tensors of one shape; and its other arguments."""

    function: Callable[..., Tensor]
    distance: Tensor
    rows: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, distance: Tensor) -> Tensor:
        """Return the rows of other distances, on the CPU."""
        return self.function(distance.to(self.distance.device), *self.args, **self.kwargs).cpu()


@contextlib.contextmanager
def _recorded(
    model: nn.Module, names: Mapping[str, Sequence[str]]
) -> Iterator[Mapping[tuple[str, str], list[_Call]]]:
    """Record calls of functions of modules, by the path of the module and the name of the function."""
    calls: dict[tuple[str, str], list[_Call]] = {}

    def watched(function: Callable[..., Any], place: tuple[str, str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            rows = function(*args, **kwargs)
            if args and _is_whole(args[0]) and _is_whole(rows) and args[0].shape == rows.shape:
                calls.setdefault(place, []).append(_Call(function, args[0], rows, args[1:], kwargs))
            return rows

        return call

    with contextlib.ExitStack() as stack:
        for path, functions in names.items():
            module = model.get_submodule(path)
            for name in functions:
                call = watched(getattr(module, name), (path, name))
                stack.enter_context(swapped(vars(module), name, call))
        yield calls


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _tables(model: nn.Module) -> Iterator[Table]:
    """Yield the relative position biases, each with the function that returns the rows at which it is read."""
    weights = [reading.name for reading in read_tables(model) if reading.first is None]
    around = {
        weight.rsplit(".", end)[0] for weight in weights for end in range(2, weight.count(".") + 1)
    }
    names: dict[str, list[str]] = {}
    for path in around:
        own = vars(type(model.get_submodule(path))).items()
        functions = [key for key, value in own if isinstance(value, FunctionType | staticmethod)]
        names[path] = [key for key in functions if key != "forward" and not key.startswith("__")]
    for weight, found in _calls(model, weights, names).items():
        if not found:
            raise UnsupportedModelError(
                f"No function of a module around {weight} of {type(model).__name__} returns the rows at which it is "
                "read, so hf_posenc cannot change them."
            )
        path, name = max(found, key=lambda place: len(place[0]))
        own = vars(model.get_submodule(path)).items()
        limits = (key for key, value in own if "max_distance" in key and isinstance(value, int))
        yield Table(path, weight, name, next(limits, None))


def _calls(
    model: nn.Module, weights: Sequence[str], names: Mapping[str, Sequence[str]]
) -> dict[str, dict[tuple[str, str], _Call]]:
    """Return by weight the calls of functions around it that return the rows at which it is read."""
    with _recorded(model, names) as calls:
        read = rows_read(model, trial_tokens(model))
    return {
        weight: {
            place: one
            for place, made in calls.items()
            for one in reversed(made)  # the first one stays
            if weight.startswith(f"{place[0]}.") and torch.equal(one.rows, read[weight][0][1])
        }
        for weight in weights
    }


def _is_native(model: Any, tables: Sequence[Table]) -> bool:
    """Return whether plain transformers builds a model with these limits from the config."""
    try:
        with torch.device("meta"):
            fresh = type(model)(type(model.config).from_dict(model.config.to_dict()))
    except Exception:  # a class with arguments of its own
        return False
    return all(
        getattr(fresh.get_submodule(table.path), table.limit or "", None)
        == getattr(model.get_submodule(table.path), table.limit or "")
        for table in tables
    )
