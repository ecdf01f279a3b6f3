"""The places where positions enter a live model, found by experiment, and the certificate that none is missing.

Every place that is found is silenced, which leaves it without positions, and the experiments of `probes` are run again.
The certificate is what is left: zero, up to rounding, means that all places are known.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedModelError
from hf_posenc.model.context import readings
from hf_posenc.model.discovery import UNSCALED, RotaryTable, foreign_frequencies, tables_of
from hf_posenc.model.rotary import moves_with_length, table_labels
from hf_posenc.model.unwrapping import hooked
from hf_posenc.seams import probes, traces
from hf_posenc.seams.held import held
from hf_posenc.seams.traces import Reading, flattened, read_arguments, read_tables

ROTARY = "rotary embedding"
ROTARY_TABLE = "rotary table"
LEARNED = "learned table"
SINUSOIDAL = "sinusoidal table"
BY_DISTANCE = "relative position bias"
ALIBI = "ALiBi"
ARGUMENT = "position argument"
SINKS = "attention sinks"
SCALING = "function of position_ids"
QUERIES = "factor on the queries"
RECURRENCE = "recurrence or long convolution"
ENCODING = "relative encoding in code of its own"
CONVOLUTION = "convolution or short window"
COUNT = "count of keys"
UNKNOWN = "unknown source"

OUTSIDE = "outside of the blocks"
"""The facts of a source that has no path."""

_FORMULA = 1e-3  # relative: a table of sines whose inner products depend on the distance alone
_COARSE = 1e-3  # a rounding that may hide what a source does: that of half precision
_LEGEND = (
    "absolute: how far outputs for one repeated token differ by position. relative: how far a block's last output "
    "moves if the tokens before it change places. Both with all other sources silenced, as a share of the largest "
    "output (0: rounding)."
)
_NO_SINK = -1e3  # a logit whose weight is 0; larger ones would hide what else a parameter does
_DIGITS = re.compile(r"(?<=\.)\d+(?=[.(]|$)")


def summary(places: Iterable[str]) -> str:
    """Return paths in a few words, numbers of layers as `*`."""
    first, *more = dict.fromkeys(_DIGITS.sub("*", place) for place in places)
    return first + (f" (+{len(more)})" if more else "")


def with_article(kind: str) -> str:
    """Return a kind of source as it stands in a sentence."""
    return ("" if kind in (ALIBI, SINKS) else "an " if kind == UNKNOWN else "a ") + kind


Rows = Sequence[Sequence[str]]
"""The cells of a table, its heading first."""


def text_table(rows: Rows) -> str:
    """Return a table as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def html_table(rows: Rows) -> str:
    """Return a table as HTML."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    heading, *body = rows
    lines = "".join(cells("td", row) for row in body)
    return f"<table><thead>{cells('th', heading)}</thead><tbody>{lines}</tbody></table>"


class Shown:
    """What a terminal and a notebook show as a table and lines below it."""

    def rows(self) -> Rows:
        """Return the cells of the table, its heading first."""
        raise NotImplementedError

    def notes(self) -> Sequence[str]:
        """Return the lines below the table."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join((text_table(self.rows()), *self.notes()))

    def _repr_html_(self) -> str:
        return html_table(self.rows()) + "<br>".join(map(html.escape, self.notes()))


@dataclass(frozen=True)
class Source:
    """One place, or the same place in several layers, where positions enter a model.

    Attributes:
        kind: One of the constants of this module: `"rotary embedding"`, `"learned table"`, ...
        places: The paths of the parameters, buffers or modules.
        facts: Sizes and values in words.
        absolute: How far rows of the output differ for one repeated token, with all other sources silenced; relative to
            the largest entry.
        relative: How far the last row of a block moves if the rows before it change places, in the same way.
        start: The row of position 0 in a table; else 0.
    """

    kind: str
    places: tuple[str, ...]
    facts: str = ""
    absolute: float = 0.0
    relative: float = 0.0
    start: int = 0

    @property
    def where(self) -> str:
        """The places in a few words, numbers of layers as `*`."""
        return summary(self.places)

    def __str__(self) -> str:
        facts = f"({self.facts})" if self.facts and self.where else self.facts
        return " ".join(filter(None, (with_article(self.kind), self.where, facts)))


@dataclass(frozen=True, repr=False)
class Positions(Shown):
    """Every place where a model gets positions from.

    Attributes:
        model: The class of the model.
        sources: The places that were found and can be silenced.
        rest: What moves outputs once these are silenced: a recurrence, a convolution, something unknown.
        certificate: How far outputs still depend on order then, relative to the largest entry.
        tolerance: The rounding of the model's dtype; a certificate below it means that every source is known.
        patch: The patch in force, in short, which was suspended meanwhile; `None` without one.
        bidirectional: True if the first token reads later ones, as in an encoder.
    """

    model: str
    sources: tuple[Source, ...]
    rest: tuple[Source, ...]
    certificate: float
    tolerance: float
    patch: str | None = None
    bidirectional: bool = False

    @property
    def complete(self) -> bool:
        """True if the sources are all there are."""
        return self.certificate <= self.tolerance

    @property
    def hidden(self) -> tuple[Source, ...]:
        """The unnamed part of `rest`: no recurrence, no convolution and no function of `position_ids`."""
        named = (RECURRENCE, CONVOLUTION, SCALING, QUERIES)
        return tuple(source for source in self.rest if source.kind not in named)

    @property
    def verdict(self) -> str:
        """The certificate in a sentence."""
        rounding = f"{self.tolerance:.0e}"
        if self.complete:
            return (
                "Certificate: with all sources silenced, the order of tokens moves the output by "
                f"{self.certificate:.1e}. That is rounding (below {rounding}): no source is missing."
            )
        left = ", ".join(dict.fromkeys(with_article(each.kind) for each in self.rest))
        return (
            "Certificate: with all sources silenced that can be, the order of tokens still moves the output by "
            f"{self.certificate:.2g} (rounding: below {rounding}). It enters through {left or 'an unknown source'}."
        )

    def of_kind(self, *kinds: str) -> tuple[Source, ...]:
        """Return the sources of some kinds."""
        return tuple(source for source in self.sources if source.kind in kinds)

    def notes(self) -> list[str]:
        """Return the lines below the table: its columns, the verdict, and the patch that was suspended."""
        patch = f"Patched with {self.patch}; these are the sources of the model without the patch."
        return [_LEGEND, self.verdict, *([patch] if self.patch else [])]

    def describe(self) -> str:
        """Return the sources in a sentence, as the reason of a refusal."""
        listed = [str(source) for source in (*self.sources, *self.rest)]
        if not listed:
            return "The order of tokens does not matter to it"
        parts = filter(None, (", ".join(listed[:-1]), listed[-1]))
        return "Positions come from " + " and ".join(parts)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, its heading first."""

        def cell(value: float) -> str:
            return f"{value:.2g}" if value > self.tolerance else "0"

        heading = ("source", "where", "details", "absolute", "relative")
        every = (*self.sources, *self.rest)
        cells = ((each, cell(each.absolute), cell(each.relative)) for each in every)
        return [heading, *((each.kind, each.where, each.facts, *moved) for each, *moved in cells)]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON has it."""
        listed = {key: [*map(vars, getattr(self, key))] for key in ("sources", "rest")}
        return {**vars(self), **listed, "complete": self.complete}


Found = tuple[Source, Callable[[], AbstractContextManager[None]]]
"""A source that is yet to be measured, and the way to silence it."""


def inspect(model: nn.Module) -> Positions:
    """Find every place where an unpatched model without wrappers gets positions from.

    A model is run about a dozen times on a few tokens; it is as before afterwards.

    Raises:
        UnsupportedModelError: A model that cannot be run on a few tokens alone.
    """
    limit = probes.tolerance(model)
    found = list(_tables(model))
    if rotaries := _rotary_modules(model):  # one source: silenced, all tokens stand at position 0
        rotation = Source(ROTARY, tuple(rotaries), _rotary_facts(model))
        found.insert(0, (rotation, lambda: unrotated(model)))
    with silenced(found):
        absolute, relative = probes.absolute(model), probes.relative(model)
        if _largest(absolute, relative) > limit or limit > _COARSE:
            found += _arguments(model)
    with silenced(found):
        sinks = sinks_of(model, probes.innermost(probes.absolute(model), limit))
        with silenced(sinks):  # modules count their keys: the count ends without sinks
            if sinks and max(probes.absolute(model).values()) <= limit:
                found += sinks
    with silenced(found):
        absolute, relative = probes.absolute(model), probes.relative(model)
        beyond = probes.shifted(model)
        rest = list(_rest(model, absolute, relative, limit))
        scaled = list(_scaled_queries(model, found, beyond))
        if beyond > limit and not scaled:
            rest.append(Source(SCALING, ("position_ids",), "beside the encodings", beyond))
        rest += scaled
    certificate = max(_largest(absolute, relative), beyond)
    if certificate <= limit:
        with silenced(found):  # sharpening by position moves no equal rows, and no mean
            doubled = probes.twice(model)
        for path in ([""] if doubled[""] > limit else []) + probes.innermost(doubled, limit):
            kind = type(model.get_submodule(path)).__name__ if path else OUTSIDE
            rest.append(Source(UNKNOWN, (path,), kind, 0.0, doubled[path]))
            certificate = max(certificate, doubled[path])
    sources = [source for each in found if (source := _measured(model, each, found, limit))]
    return Positions(
        type(model).__name__,
        tuple(sources),
        tuple(rest),
        certificate,
        limit,
        bidirectional=probes.bidirectional(model),
    )


def _scaled_queries(model: nn.Module, found: Sequence[Found], beyond: float) -> Iterator[Source]:
    """Yield the attention modules that multiply their queries by position, by law."""
    rotary = next((source for source, _ in found if source.kind == ROTARY), None)
    if rotary is None:
        return
    from hf_posenc.model.temperature import temperatures_of  # imports transformers

    by_law: dict[str, list[str]] = {}
    for name, law in temperatures_of(model, rotary.places).items():
        by_law.setdefault("by an unknown law" if law is None else f"by {law}", []).append(name)
    for law_in_words, places in by_law.items():
        yield Source(QUERIES, tuple(places), law_in_words, beyond)


def _largest(*moved: Mapping[str, float]) -> float:
    return max(value for each in moved for value in each.values())


def _measured(model: nn.Module, one: Found, found: Sequence[Found], limit: float) -> Source | None:
    """Return a source with what it does alone; `None` if that is nothing."""
    with silenced([other for other in found if other is not one]):
        absolute, relative = probes.absolute(model)[""], max(probes.relative(model).values())
    source, kind = one[0], one[0].kind
    # Half precision may round by more than a source does; a rotation does less to equal tokens than a quarter of that.
    added = kind in (LEARNED, SINUSOIDAL) and absolute > max(relative, limit / 4)
    weak = limit >= _COARSE and (added or kind in (ALIBI, BY_DISTANCE))
    if max(absolute, relative) <= limit and not weak:
        return None
    if kind in (LEARNED, SINUSOIDAL) and absolute <= limit and not weak:
        kind = ROTARY_TABLE  # a rotation alone leaves equal values equal
    return Source(kind, source.places, source.facts, absolute, relative, source.start)


@contextlib.contextmanager
def silenced(found: Iterable[Found]) -> Iterator[None]:
    """Silence every one of some sources."""
    with contextlib.ExitStack() as stack:
        for _, silence in found:
            stack.enter_context(silence())
        yield


# What is found, and how it is silenced


def _rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if table_labels(module)}


@contextlib.contextmanager
def unrotated(model: nn.Module) -> Iterator[None]:
    """Put all tokens at position 0 of every rotary embedding."""

    def zero(value: Any) -> Any:
        whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        return torch.zeros_like(value) if whole else value

    def at_zero(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(map(zero, args)), {key: zero(value) for key, value in kwargs.items()}

    rotaries = _rotary_modules(model).values()
    with hooked(m.register_forward_pre_hook(at_zero, with_kwargs=True) for m in rotaries):
        yield


def _rotary_facts(model: nn.Module) -> str:
    try:
        tables = tables_of(model)
    except UnsupportedModelError:  # it does not rotate, or is refused for another reason
        return ""
    described = ((table.label, _describe(model, table)) for table in tables)
    facts = (f"{label}: {words}" if label else words for label, words in described)
    return "; ".join(dict.fromkeys(facts))


def _describe(model: nn.Module, table: RotaryTable) -> str:
    """Return the size and base of a rotary table, the scaling of its module, and the lengths before and after it."""
    words, parameters = [f"d {2 * len(table.live()[0])}"], table.parameters
    if theta := parameters.get("rope_theta"):
        words.append(f"theta {theta:,.0f}")
    if table.rope_type != "default":
        words.append(table.rope_type)
        if factor := parameters.get("factor"):
            words.append(f"factor {factor:g}")
    if table.rope_type not in UNSCALED:
        if lengths := " or ".join(map(str, readings(table))):
            words.append(f"{lengths} tokens")
        # The copy is called, since a call changes the table of a dynamic module.
        if moves_with_length(copy.deepcopy(table.module), table.label, table.live()[0].device):
            words.append(
                "frequencies change with the length of the text, those of cached keys do not"
            )
    if foreign_frequencies(model, table):
        words.append("not the frequencies of its config")
    return ", ".join(words)


def _tables(model: nn.Module) -> Iterator[Found]:
    """Yield the tables that are read by position, those of all layers as one source."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    groups: dict[tuple[Any, ...], list[Reading]] = {}
    for reading in read_tables(model):
        tensor = tensors[reading.name]
        pattern = _DIGITS.sub("*", reading.name)
        groups.setdefault((pattern, tensor.shape, reading.first is None), []).append(reading)
    for group in groups.values():
        first, names = group[0], tuple(reading.name for reading in group)
        tensor = tensors[first.name]
        rows, size = tensor.shape[first.axis], tensor.shape[-1]
        if first.first is None:
            source = Source(BY_DISTANCE, names, f"{rows} buckets, {size} heads")
        else:
            kind = SINUSOIDAL if is_formula(tensor, first.axis, first.first) else LEARNED
            facts = f"{rows - first.first} positions of {size} features"
            facts += f", from row {first.first}" if first.first else ""
            source = Source(kind, names, facts, start=first.first)
        read = [(tensors[reading.name], reading.axis) for reading in group]
        yield source, functools.partial(constant, model, read)


def is_formula(table: Tensor, axis: int = 0, start: int = 0) -> bool:
    """Return whether inner products of rows from `start` on depend on the distance alone; False on the meta device."""
    rows = table.detach().movedim(axis, 0).flatten(1).double()[start:][:64]
    if table.is_meta or len(rows) < 3:
        return False
    products = rows @ rows.T
    uneven = (products[1:, 1:] - products[:-1, :-1]).abs().max()
    largest = float(products.abs().max())
    return largest > 0 and float(uneven) <= _FORMULA * largest


@contextlib.contextmanager
def constant(
    model: nn.Module, tables: Sequence[tuple[Tensor, int]], fill: float | None = None
) -> Iterator[None]:
    """Replace tensors by others whose rows along an axis are all the same: the middle one, or a number.

    Every module that holds one of the tensors gets the replacement, and the very tensor back.
    """
    replaced = [(held(model, tensor), tensor) for tensor, _ in tables]
    try:
        for (place, tensor), (_, axis) in zip(replaced, tables, strict=True):
            row = tensor.detach().narrow(axis, tensor.shape[axis] // 2, 1)
            # A clone, since a parameter of inference mode's tensors takes no gradient outside of it.
            flat = row.expand_as(tensor).clone() if fill is None else torch.full_like(tensor, fill)
            place.swap(flat)
        yield
    finally:
        for place, tensor in replaced:
            place.swap(tensor)


def _arguments(model: nn.Module) -> Iterator[Found]:
    """Yield the arguments that carry positions: linear ones as ALiBi, all others as one source."""
    arguments = read_arguments(model)
    linear = [each for each in arguments if each.slopes is not None]
    others = [each for each in arguments if each.slopes is None]
    for kind, group in ((ALIBI, linear), (ARGUMENT, others)):
        if not group:
            continue
        paths = {each.path for each in group}
        outer = [x for x in group if not any(x.path.startswith(f"{path}.") for path in paths)]
        places = tuple(f"{each.path}({each.key})" for each in outer)
        slopes = max((each.slopes or () for each in group), key=len)
        first = ", ".join(f"{slope:.4g}" for slope in slopes[:4]) + ", ..." * (len(slopes) > 4)
        facts = f"slopes {first}" if slopes else ""
        yield Source(kind, places, facts), functools.partial(flattened, model, group)


def sinks_of(model: nn.Module, culprits: Iterable[str]) -> list[Found]:
    """Return the vectors among the parameters of modules that count their keys: attention sinks, as one source.

    Only the first of these modules may have equal rows to read, so the parameters of that name in all layers are taken.
    """
    own = {
        _DIGITS.sub("*", f"{path}.{name}")
        for path in culprits
        for name, tensor in model.get_submodule(path).named_parameters(recurse=False)
        if tensor.dim() == 1
    }
    sinks = {name: each for name, each in model.named_parameters() if _DIGITS.sub("*", name) in own}
    if not sinks:
        return []
    vectors = [(each, 0) for each in sinks.values()]
    source = Source(SINKS, tuple(sinks), "let attention count keys")
    return [(source, functools.partial(constant, model, vectors, _NO_SINK))]


def _rest(
    model: nn.Module, absolute: Mapping[str, float], relative: Mapping[str, float], limit: float
) -> Iterator[Source]:
    """Yield what still reads order, by the innermost modules that do."""
    moving = probes.innermost(relative, limit)
    places = dict.fromkeys((*moving, *probes.innermost(absolute, limit)))
    far = probes.relative(model, probes.FAR_ROWS) if moving else {}
    weighing = traces.weighing(model, places) if places else set()
    near = probes.relative(model, first=probes.FAR_ROWS, paths=weighing) if weighing else {}
    groups: dict[tuple[str, bool], list[str]] = {}
    for path in places:
        group = type(model.get_submodule(path)).__name__, path in weighing
        groups.setdefault(group, []).append(path)
    for (name, weighs), paths in groups.items():
        alone, moved, remote, close = (
            max(each.get(path, 0.0) for path in paths) for each in (absolute, relative, far, near)
        )
        if all(map(probes.is_block, paths)):
            kind = UNKNOWN
        elif moved <= limit:
            kind = COUNT if weighs else UNKNOWN
        elif remote <= limit and close <= limit:  # attention in a window reads it as a set
            kind = CONVOLUTION
        else:  # a state grows while one token is repeated, and attention does not
            kind = RECURRENCE if alone > limit and not weighs else ENCODING
        yield Source(kind, tuple(paths), name, alone, moved)
    if not groups and absolute[""] > limit:
        yield Source(UNKNOWN, ("",), OUTSIDE, absolute[""])
