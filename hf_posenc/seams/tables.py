"""The table seam: a row for each position, in the same parameter or buffer, for a longer text.

What else hangs on the length (causal masks, `position_ids`, plain numbers) is built by the model's own class from the
longer config, with weights on the meta device, and never extrapolated.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, UnsupportedModelError, VerificationError, one_line
from hf_posenc.methods import Method, Sinusoidal, TableMethod
from hf_posenc.methods.contract import check_table
from hf_posenc.model.forward import Entering, running
from hf_posenc.model.positions import refuse_drafts, refuse_packed
from hf_posenc.model.unwrapping import configs_of, hooked, owner_of, trial
from hf_posenc.model.weights import free_memory, refuse_parts_of_texts
from hf_posenc.seams import probes
from hf_posenc.seams.held import (
    Edits,
    Held,
    Record,
    ShownTable,
    TableEnd,
    held,
    length_of,
    tokens_of_rows,
)
from hf_posenc.seams.inspection import LEARNED, SINUSOIDAL, Positions
from hf_posenc.seams.native import NativeSeam

_LENGTH = re.compile(
    r"^(?!.*relative).*(position|n_ctx|context_length|max_seq)"
)  # of positions, not of distances
_APART = 2  # rows that a class may have beside those that a config names
_BASE = 10_000.0  # of every sinusoidal table since Vaswani et al. 2017
_FORMULA = 1e-3  # a table of sines in float32, whose angles were float32 too; 16 bits: `_ROUNDED`
_ROUNDED = 2e-2


@dataclass(frozen=True)
class Table:
    """A table of positions: the path of its tensor, the row of position 0, and whether rows are a formula."""

    path: str
    start: int
    positions: int
    formula: bool


@dataclass(eq=False)
class LongText(Entering):
    """Hooks of a model that enter `True` for a text that needs the longer table of `update="request"`."""

    trained: int  # the positions of the original table
    method: TableMethod  # the method that makes the longer one
    breaks = True

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the length of a text; raise for texts on both sides of the trained length."""
        if (length := length_of(args, kwargs)) is None:
            return
        refuse_parts_of_texts(f"{self.method.name} with update='request'")
        (new, past), trained = length, self.trained
        if new + past <= trained:
            return
        refuse_packed(kwargs.get("position_ids"), kwargs.get("attention_mask"))
        if 0 < past <= trained:
            raise PosencError(
                f"The text grows past {trained:,} tokens, up to which {self.method.name} with update='request' keeps "
                f"the original table: {past:,} tokens are in the cache and {new:,} follow. Run it again without the "
                "cache, or patch with update='static'."
            )
        rows = tokens_of_rows(kwargs.get("attention_mask"))
        if rows is not None and min(rows) <= trained:
            raise PosencError(
                f"A batch with texts on both sides of {trained:,} tokens, or padded past it, has no table with "
                f"update='request': its texts have {min(rows):,} to {max(rows):,} tokens. Batch texts by length, or "
                "patch with update='static'."
            )
        self.enter(True)


class ByRequest(ShownTable):
    """A longer table in place of a learned one, for texts that need it.

    The parameter is the original one, so gradients reach it through the rows of a longer text too.
    """

    def __init__(
        self, module: nn.Module, name: str, start: int, positions: int, texts: Sequence[LongText]
    ) -> None:
        super().__init__(module, name, start)
        self.positions, self.texts = positions, tuple(texts)

    def tensor(self, table: Tensor) -> Tensor | None:
        """Return the longer table; the last one if the original has not changed and needs no gradient."""

        def grown(table: Tensor) -> Tensor:
            return _grown(table, self.start, self.positions, self.texts[0].method)

        if not any(map(running, self.texts)):
            return None
        trained = torch.is_grad_enabled() and table.requires_grad
        return grown(table) if trained else self.made(table, grown)


def _grown(table: Tensor, start: int, positions: int, method: TableMethod) -> Tensor:
    """Return a table for more positions; the rows before position 0 stay."""
    axis = axis_of(table)
    rows = table.movedim(axis, 0)
    shape = rows.shape[1:]
    if method.scale == 1:
        return table
    if isinstance(method, Sinusoidal):
        waves = _waves(rows.detach().flatten(1), start)
        angles = method.angles(waves.frequencies, positions, start if waves.shifted else 0)
        new = waves.columns(angles.to(table.device))
    else:
        new = method.rows(rows[start:].flatten(1).double(), positions)
    new = new.reshape(positions, *shape).to(table.dtype)
    return torch.cat((rows[:start], new)).movedim(0, axis)


def axis_of(table: Tensor) -> int:
    """Return the axis of positions: the first one with more than one entry."""
    return next((axis for axis, size in enumerate(table.shape) if size > 1), 0)


@dataclass(frozen=True)
class _Waves:
    """The formula of a sinusoidal table."""

    frequencies: Tensor  # shape (n,), float64, in radians per token
    # True if rows are counted from that of the padding before position 0, as fairseq does.
    shifted: bool
    alternating: bool  # True if sines and cosines take turns; False if all sines come first
    width: int  # number of columns; those past the 2 n columns of the formula are 0

    def columns(self, angles: Tensor) -> Tensor:
        """Return the rows for angles of shape (positions, n)."""
        pairs = (angles.sin(), angles.cos())
        waves = torch.stack(pairs, -1).flatten(1) if self.alternating else torch.cat(pairs, -1)
        return nn.functional.pad(waves, (0, self.width - waves.shape[1]))


def _waves(rows: Tensor, start: int) -> _Waves:
    """Return the formula that gives the rows of a table, those before position 0 included; raise if none does."""
    known = rows[start:].double().cpu()
    pairs, width = known.shape[1] // 2, known.shape[1]
    tolerance = _FORMULA if rows.dtype in (torch.float32, torch.float64) else _ROUNDED
    index = torch.arange(pairs, dtype=torch.float64)
    best: tuple[float, _Waves | None] = (math.inf, None)
    for divisor in dict.fromkeys((pairs, max(pairs - 1, 1))):  # Vaswani et al.; tensor2tensor
        for shifted in dict.fromkeys((False, start > 0)):
            first = start if shifted else 0
            angles = (first + torch.arange(len(known), dtype=torch.float64))[:, None]
            for alternating in (False, True):
                waves = _Waves(_BASE ** (-index / divisor), shifted, alternating, width)
                error = float((waves.columns(angles * waves.frequencies) - known).abs().max())
                best = min(best, (error, waves), key=lambda each: each[0])
    if best[1] is None or best[0] > tolerance:
        raise UnsupportedModelError(
            f"The inner products of the rows depend on the distance alone, as those of sines and cosines do, but they "
            f"are not sin and cos of 10000^(-2i/d) in a known order (difference {best[0]:.1e}), so there is no formula "
            "to compute them from."
        )
    return best[1]


@dataclass(frozen=True, eq=False)
class TablesByPosition(NativeSeam):
    """Tables that are read by position, learned or sinusoidal."""

    tables: tuple[Table, ...] = ()
    # What else gives the model positions, in words, and stays as it is; empty if nothing does.
    beside: str = ""
    # What depends on order besides all known sources, in words; empty if the certificate is rounding.
    rest: str = ""
    sources = (LEARNED, SINUSOIDAL)

    @classmethod
    def of(cls, model: nn.Module, positions: Positions) -> TablesByPosition:
        tables = []
        for source in positions.of_kind(*cls.sources):
            for path in source.places:
                tensor = held(model, path).tensor()
                axis = axis_of(tensor)
                if tensor.dim() - axis < 2:
                    raise UnsupportedModelError(f"{path}, of shape {[*tensor.shape]}, has no rows.")
                size = tensor.shape[axis] - source.start
                tables.append(Table(path, source.start, size, source.kind == SINUSOIDAL))
        others = [str(each) for each in positions.sources if each.kind not in cls.sources]
        rest = "" if positions.complete else ", ".join(map(str, positions.rest)) or "unknown"
        length = min(table.positions for table in tables)
        return cls(model.config, length, tuple(tables), ", ".join(others), rest)

    def new_lengths(self, target: int, scale: float) -> dict[str, int]:
        """Return the new positions of tables by path: the target in the shortest, `scale` times as many in others."""
        return {
            table.path: target
            if table.positions == self.length
            else math.ceil(table.positions * scale - 1e-6)
            for table in self.tables
        }

    def grow(self, model: nn.Module, state: Record, lengths: Mapping[str, int]) -> Edits:
        """Give a model all that hangs on the length, but the tables themselves; refuse texts past the new ends.

        Returns the edits of configs, which are yet to be written.
        """
        for table in self.tables:
            end = TableEnd(lengths[table.path])
            for owner in owners_of(model, held(model, table.path)):
                state.hooks.append(owner.register_forward_pre_hook(end, with_kwargs=True))
        if all(lengths[table.path] == table.positions for table in self.tables):
            return []
        return take_over_lengths(model, state, self.tables, lengths)


@dataclass(frozen=True, eq=False)
class TableSeam(TablesByPosition):
    """Tables that are made longer; those of an encoder and a decoder grow alike."""

    @classmethod
    def takes(cls, method: type[Method], source: str) -> bool:
        return issubclass(method, TableMethod) and method.formula == (source == SINUSOIDAL)

    @classmethod
    def reason(cls, method: type[Method], source: str) -> str:
        if not issubclass(method, TableMethod) or cls.takes(method, source):
            return ""
        if method.formula:
            return "The rows of a learned table follow no formula that could be computed anew."
        return "Rows that are sines and cosines are computed anew: interpolated or copied ones would be none."

    def rows(self, model: nn.Module) -> list[tuple[str, ...]]:
        heading = ("table", "kind", "positions", "features", "from row")
        cells = []
        for table in self.tables:
            tensor = held(model, table.path).tensor()
            axis = axis_of(tensor)
            kind = SINUSOIDAL if table.formula else LEARNED
            sizes = tensor.shape[axis] - table.start, tensor.shape[-1], table.start
            cells.append((table.path, kind, *map(str, sizes)))
        return [heading, *cells]

    def install(self, model: nn.Module, state: Record, method: Method) -> None:
        assert isinstance(method, TableMethod)
        self._check(state, method)
        target = state.extended or math.ceil((self.length or 0) * method.scale - 1e-6)
        lengths = self.new_lengths(target, method.scale)
        places = {table.path: held(model, table.path) for table in self.tables}
        for table in self.tables:
            tensor = places[table.path].tensor()
            width = tensor.numel() // tensor.shape[axis_of(tensor)]
            check_table(method, table.positions, width, lengths[table.path])
        ids = probes.ordinary_tokens(model, min(probes.TOKENS, self.length or 1))
        with state.sample.only():
            before = _outputs(model, ids)
        edits = self.grow(model, state, lengths)
        if method.by_request:
            state.hooks.append(model.register_forward_pre_hook(refuse_drafts, with_kwargs=True))
        for table in self.tables:
            place, positions = places[table.path], lengths[table.path]
            grown = _grown(place.tensor().detach(), table.start, positions, method)
            if method.by_request:
                owners = owners_of(model, place)
                texts = [LongText(table.positions, method) for _ in owners]
                for text, owner in zip(texts, owners, strict=True):
                    state.hooks += text.around(owner)
                for module, name in place.places:
                    shown = ByRequest(module, name, table.start, positions, texts)
                    state.hooks.append(shown.install())
            elif method.scale != 1:
                state.swap(place, grown)
                for module, _ in place.places:
                    if isinstance(module, nn.Embedding):
                        state.set(module, {"num_embeddings": grown.shape[0]})
                if not torch.equal(place.tensor(), grown):
                    raise VerificationError(
                        f"{table.path} does not hold the patched rows after the patch; the model was restored."
                    )
        # A class may leave a table out of the weights that it saves, and compute it when it is built.
        unsaved: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
        stored = places.keys() <= model.state_dict().keys() - {*unsaved}
        if stored and not method.by_request:  # modules that the config does not build stay beside
            state.export = "weights"
        state.write_config(model, edits)
        if method.keeps_short or method.by_request or method.scale == 1:
            with state.sample.only():
                after = _outputs(model, ids)
            if not all(map(torch.equal, after, before)):
                raise VerificationError(
                    f"{method.name} changes the outputs of a short text of {type(model).__name__}, whose rows it "
                    "keeps; the model was restored. Please report it, with the model type."
                )
        run_past(model, ids, self.tables, lengths)
        if self.beside or self.rest:
            stays = f"{self.beside} stays as it is. " if self.beside else ""
            reads = "Something besides its known sources depends on the order of tokens"
            rest = f"{reads}: {self.rest}. " if self.rest else ""
            warnings.warn(
                f"{method.name} makes the table of {type(model).__name__} longer. {stays}{rest}Measure the patched "
                "model on long texts.",
                stacklevel=4,
            )

    def trained(self, model: nn.Module, state: Record, method: Method) -> bool:
        assert isinstance(method, TableMethod)
        for table in self.tables:
            place = held(model, table.path)
            rows = place.tensor()
            originals = (
                old
                for swapped, old in state.tensors
                if isinstance(swapped, Held) and swapped.places == place.places
            )
            if (original := next(originals, None)) is None:
                continue
            positions = rows.shape[axis_of(rows)] - table.start
            grown = _grown(original.detach(), table.start, positions, method).to(rows.device)
            # A cast and back rounds, and is no training.
            forms = (grown, grown.bfloat16(), grown.half())
            if not any(torch.equal(rows, form.to(rows.dtype)) for form in forms):
                return True
        return False

    def _check(self, state: Record, method: TableMethod) -> None:
        if state.original != self.length:
            listing = ", ".join(f"{table.path}: {table.positions:,}" for table in self.tables)
            raise PosencError(
                f"original_max_position_embeddings={state.original}: the rows of a table are as many as the positions "
                f"that the model was trained on ({listing}). Leave it out."
            )
        if wrong := [table.path for table in self.tables if table.formula != method.formula]:
            raise UnsupportedModelError(
                f"{method.name} does not patch {', '.join(wrong)}: a model with both learned and sinusoidal tables "
                "takes no table method."
            )


def owners_of(model: nn.Module, place: Held) -> list[nn.Module]:
    """Return the innermost models of transformers around the modules that hold a tensor."""
    holders = {module for module, _ in place.places}
    paths = (p for p, each in model.named_modules(remove_duplicate=False) if each in holders)
    return list(dict.fromkeys(owner_of(model, f"{path}.") for path in paths))


# What hangs on the length


def take_over_lengths(
    model: nn.Module, state: Record, tables: Sequence[Table], lengths: Mapping[str, int]
) -> Edits:
    """Give a model the buffers and numbers of its class for tables of new lengths; the tables themselves stay.

    Returns the edits of configs, which are yet to be written.
    """
    # Old lengths and numbers of rows with the new ones; configs may count a few rows less or more.
    growth: dict[int, int] = {}
    for table in sorted(tables, key=lambda one: one.positions):
        more = lengths[table.path] - table.positions
        near = range(table.positions - _APART, table.positions + table.start + 1)
        growth |= {number: number + more for number in near}
    growth |= {table.positions: lengths[table.path] for table in tables}  # its own comes first
    edits = []
    for config in configs_of(model).values():
        values = {
            key: growth[value]
            for key, value in vars(config).items()
            if type(value) is int and value in growth and _LENGTH.search(key)
        }
        edits += [(config, values)] if values else []
    places = {table.path for table in tables}
    _check_memory(model, edits, lengths)
    twin = _twin(model, edits)
    others = dict(twin.named_parameters(remove_duplicate=False))
    if moved := sorted(
        name
        for name, weight in model.named_parameters(remove_duplicate=False)
        if name not in places and name in others and others[name].shape != weight.shape
    ):
        raise UnsupportedModelError(
            f"The size of {', '.join(moved)} follows the length of {type(model).__name__}, and it is no table of "
            "positions that could be made longer in the same way."
        )
    for table in tables:
        try:
            longer = held(twin, table.path).tensor()
        except AttributeError as error:
            raise UnsupportedModelError(
                f"{table.path} is a copy of the table that an adapter trains. Patch the model, then add the adapter."
            ) from error
        rows = longer.shape[axis_of(longer)]
        if rows != table.start + lengths[table.path]:
            raise UnsupportedModelError(
                f"{table.path} has {lengths[table.path]:,} positions in no {type(model).__name__} that its config "
                f"can describe ({rows:,} rows where the length is that): its rows may mean something else."
            )
    _follow(model, twin, state, growth, places)
    return edits


def _twin(model: nn.Module, edits: Edits) -> nn.Module:
    """Build a model of the same class from the longer config: buffers with values, weights on the meta device."""
    from accelerate import init_empty_weights

    no_init: Any = contextlib.nullcontext
    with contextlib.suppress(ImportError):  # it saves time
        from transformers.initialization import no_init_weights as no_init

    copies: dict[int, Any] = {}
    config: Any = copy.deepcopy(model.config, copies)
    for part, values in edits:
        if id(part) in copies:
            vars(copies[id(part)]).update(values)
    make: Any = type(model)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            no_init(),
            init_empty_weights(include_buffers=False),
        ):
            twin: nn.Module = make(config)
        return twin
    except Exception as error:
        raise UnsupportedModelError(
            f"{make.__name__} cannot be built from its config with a longer length ({one_line(error)}), so it is "
            "unknown what depends on that."
        ) from error


def _check_memory(model: nn.Module, edits: Edits, lengths: Mapping[str, int]) -> None:
    """Raise for tables, masks and the like that do not fit into memory, before they are allocated."""
    more = 0
    with contextlib.suppress(Exception), torch.device("meta"):  # some classes cannot be built there
        longer, own = (
            sum(each.nbytes for each in (*one.parameters(), *one.buffers()))
            for one in (_twin(model, edits), model)
        )
        more = longer - own
    free = free_memory("cpu")
    if free is not None and more > free:
        raise PosencError(
            f"{max(lengths.values()):,} positions: the tables of {type(model).__name__}, and what depends on their "
            f"length, would take {more:,} bytes more, and {free:,} are free. Give a smaller target_length."
        )


def _follow(
    model: nn.Module, twin: nn.Module, state: Record, growth: Mapping[int, int], tables: set[str]
) -> None:
    """Take over the buffers and numbers of a model built for the longer length."""
    others = dict(twin.named_modules(remove_duplicate=False))
    for path, module in model.named_modules():
        other = others.get(path)
        if other is None:  # a module that another library put there
            continue
        for name, buffer in list(module._buffers.items()):
            longer = other._buffers.get(name)
            if buffer is None or longer is None or f"{path}.{name}".lstrip(".") in tables:
                continue
            if buffer.shape == longer.shape:
                continue
            if longer.is_meta and bool(buffer.any()):
                raise UnsupportedModelError(
                    f"The size of {path}.{name} follows the length of {type(model).__name__}, and its values are not "
                    "those of a new model: there is no longer one."
                )
            # One without values on the meta device is made from weights, later; until then it is zero.
            new = torch.zeros(longer.shape) if longer.is_meta else longer
            state.swap(Held(((module, name),)), new)
        moved = {
            key: new
            for key, value in vars(module).items()
            if type(value) is int
            and value in growth
            and not key.startswith("_")
            and type(new := vars(other).get(key)) is int
            and new != value
        }
        if isinstance(module, nn.Embedding):  # its weight decides that
            moved.pop("num_embeddings", None)
        if moved:
            state.set(module, moved)


def _outputs(model: nn.Module, ids: Tensor) -> list[Tensor]:
    with trial(model):
        return probes.forward(model, ids)


class _ReachedError(Exception):
    """Ends a forward that has run far enough."""


def run_past(model: Any, ids: Tensor, tables: Sequence[Table], lengths: Mapping[str, int]) -> None:
    """Verify that a text past the old length runs through the first block, on each side of an encoder-decoder."""
    longest = min(lengths.values())
    if longest <= min(table.positions for table in tables):
        return
    tokens = min(longest, max(table.positions for table in tables) + 1)
    long = ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]
    sides: list[dict[str, Any]] = [{"input_ids": long}]
    if model.config.is_encoder_decoder:
        sides = [
            {"input_ids": long, "decoder_input_ids": ids},
            {"input_ids": ids, "decoder_input_ids": long},
        ]

    def stop(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hidden = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if hidden is not None and hidden.dim() == 3 and max(hidden.shape[:2]) >= tokens:
            raise _ReachedError

    blocks = [block for path, block in probes.block_modules(model) if probes.is_block(path)]
    with hooked(block.register_forward_hook(stop, with_kwargs=True) for block in blocks):
        for inputs in sides:
            try:
                with trial(model):
                    model(**inputs)
            except _ReachedError:
                continue
            except Exception as error:
                raise VerificationError(
                    f"{type(model).__name__} does not run on {tokens:,} tokens after the patch ({one_line(error)}); "
                    "the model was restored. Please report it, with the model type."
                ) from error
