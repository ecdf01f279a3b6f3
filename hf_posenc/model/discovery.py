"""The rotary tables of a live model, found by inspection with no model family known by name."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_posenc.adapters import ArchAdapter, get_adapter
from hf_posenc.attention.call import shared
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.rotation import by_pair
from hf_posenc.errors import LOAD_FIRST, PosencError, UnsupportedModelError
from hf_posenc.model.rotary import (
    FREQUENCIES,
    RotaryWrapper,
    attribute,
    native_rotary,
    table_labels,
)
from hf_posenc.rope import RopeSpec

# Values of rope_type whose table is plain `theta ** (-2i/d)`, `proportional` with zeros at its end.
UNSCALED = ("default", "proportional")
PER_LENGTH = ("dynamic", "longrope")
"""Scalings with a table for each length."""
LENGTH_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
    "seq_length",
)
"""Names that configs have for the context length, in tokens."""
PARTS = ("encoder", "decoder")
"""Choices of layers in an encoder-decoder model."""
_EXACT = 2e-6  # two ways of evaluating theta ** (-2i/d) in float32
_ROUNDED = 1e-2  # a table that was cast to bfloat16
_LEAST = 2.0**-25  # half of the smallest float16
_TEXT = "text"  # among the modalities of a model
# Starts of the types of sliding-window and chunked layers, and parts of those of layers with a softmax.
_LOCAL = ("sliding", "chunked", "local", "hybrid_sliding")
_ATTENDS = ("attention", "hybrid", "sparse")
_LAYER_INDEX = re.compile(r"\blayers?\.(\d+)\.")
# The base that models with precomputed tables have in their code; `read_spec` checks it against the table.
_SINCOS_PARAMETERS = {"rope_theta": 10_000.0}


def is_scaled(rope_type: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether a type, in transformers' word, and an entry of `rope_parameters` scale frequencies."""
    return rope_type not in UNSCALED or parameters.get("factor") not in (None, 1)


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """One rotary table of a live model."""

    name: str  # the module's path in the model
    label: str  # the layer type that the table belongs to; `""` where one table serves all layers
    module: nn.Module  # the rotary module (the original one, where the model is patched)
    config: Any  # the config that the module was built from
    rope_type: str  # the scaling of the live module, in transformers' word
    parameters: Mapping[str, Any]  # the entry of `config.rope_parameters` for this table, copied
    # `"encoder"` or `"decoder"` in a model that has both; else `""`.
    part: str = field(default="", kw_only=True)

    @property
    def scaled(self) -> bool:
        """True if the checkpoint itself is already scaled."""
        return is_scaled(self.rope_type, self.parameters)

    @property
    def moves(self) -> bool:
        """True if transformers changes its frequencies, or its factor, with the length of the text."""
        short, long = (
            [self.parameters.get(f"{length}_{knob}") for knob in ("factor", "mscale")]
            for length in ("short", "long")
        )
        return self.rope_type == "dynamic" or (self.rope_type == "longrope" and short != long)

    def built(self) -> nn.Module:
        """Return another module of the same class on the CPU, built from the config."""
        make: Any = type(self.module)
        with torch.device("cpu"):
            module: nn.Module = make(self.config)
        return module

    @functools.cached_property
    def _twin(self) -> nn.Module:
        return self.built()

    def live(self) -> tuple[Tensor, float]:
        """Return the module's own table, of texts within the original length, shape (d/2,), and its factor."""
        inv_freq = self.held_by(self.module)
        # As its class builds the module from the config; also while a trial has random values in place of missing ones.
        if inv_freq.is_meta or "_twin" in vars(self):
            try:
                inv_freq = self.held_by(self._twin)
            except Exception as error:
                raise UnsupportedModelError(
                    f"{self.name} is on the meta device and {type(self.module).__name__} cannot be built from its "
                    f"config alone ({error}). {LOAD_FIRST}"
                ) from error
        factor = getattr(self.module, attribute(self.label, "attention_scaling"), None)
        if factor is None:  # some classes keep one factor for all labels
            factor = getattr(self.module, "attention_scaling", None)
        return inv_freq, 1.0 if factor is None else float(factor)

    def held_by(self, module: nn.Module) -> Tensor:
        """Return this table in a module of its class: the one for texts within the original length."""
        name = attribute(self.label, f"original_{FREQUENCIES}")
        if self.rope_type not in PER_LENGTH or not hasattr(module, name):
            name = attribute(self.label, FREQUENCIES)
        tensor: Tensor = getattr(module, name)
        return tensor

    def composed(self) -> tuple[Tensor, float]:
        """Return the table that a method scales once more, as `live`: of `longrope` the one for long texts."""
        inv_freq, factor = self.live()
        if self.rope_type == "longrope":
            exponents = torch.arange(len(inv_freq), dtype=torch.float32) / len(inv_freq)
            divisors = torch.tensor(self.parameters["long_factor"], dtype=torch.float32)
            inv_freq = 1 / (divisors * self.parameters["rope_theta"] ** exponents)
            factor = self.parameters.get("long_mscale") or factor
        return inv_freq, factor


Tables = Sequence[RotaryTable]


class CutTableError(PosencError):
    """A choice of layers that share a rotary table with others."""


INSPECT = "inspect_positions(model), or hf-posenc inspect, finds where its positions come from."


class NoRotaryError(UnsupportedModelError):
    """The text decoder has no rotary table: positions enter it elsewhere, or not at all."""


@dataclass(frozen=True, eq=False)
class SinCosTable(RotaryTable):
    """A precomputed table `[sin | cos]` of shape (positions, d), in older models: a buffer or an embedding's weight."""

    attribute: str  # of the module

    def live(self) -> tuple[Tensor, float]:
        """Return the frequencies and the factor, read from the rows of positions 1, 2, 4, ..., each more exact."""
        if self.tensor().is_meta:
            raise UnsupportedModelError(
                f"{self.name}.{self.attribute} is on the meta device, without values. {LOAD_FIRST}"
            )
        sin, cos = self.tensor()[1].detach().double().chunk(2)
        frequencies, factor = torch.atan2(sin, cos), float(torch.hypot(sin, cos).mean())
        if self.tensor().dtype != torch.float32:  # a row of halves is too coarse for far positions
            row = 2
            while row < len(self.tensor()):
                sin, cos = self.tensor()[row].detach().double().chunk(2)
                turns = (frequencies * row - torch.atan2(sin, cos)) / math.tau
                frequencies = (torch.atan2(sin, cos) + math.tau * turns.round()) / row
                row *= 2
        return frequencies.float(), factor

    def tensor(self) -> Tensor:
        """Return the table; in place of one on the meta device that which its class builds from the config."""
        tensor: Tensor = getattr(self.module, self.attribute)
        if tensor.is_meta:
            with contextlib.suppress(Exception):  # RoFormer's takes more
                tensor = getattr(self._twin, self.attribute)
        return tensor

    def swap(self, tensor: Tensor) -> None:
        """Replace the table; device and dtype stay."""
        tensor = tensor.to(self.tensor().device, self.tensor().dtype)
        if isinstance(self.tensor(), nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        setattr(self.module, self.attribute, tensor)
        if isinstance(self.module, nn.Embedding):
            self.module.num_embeddings = tensor.shape[0]


class RepositionedTable:
    """A sin-cos table whose rows are those of the positions at which an encoding caches keys; its module reads them."""

    def __init__(self, table: SinCosTable, labels: Collection[str]) -> None:
        self.table = table
        self.base = table.module
        self.labels = frozenset(labels)
        self.encoding: Encoding | None = None  # as of `RepositionedRotary`
        self._kept: tuple[Tensor, Encoding | None, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def rows(self, positions: Tensor | None) -> Tensor:
        """Return a table with a row for each of these positions, and at least as many as the model's own."""
        native, needed = self.table.tensor(), 0
        if positions is not None:
            needed = shared(positions, "rows", lambda: int(positions.max()) + 1)
        count = max(needed, len(native))
        kept = self._kept  # once, for the threads
        if kept is not None:
            of, encoding, rows = kept
            if of is native and encoding is self.encoding and len(rows) >= count:
                return rows
        # Twice as many at a time: a generation needs another row in each step.
        count = count if count <= len(native) else 2 * count
        every = torch.arange(count, device=native.device)
        if self.encoding is not None:
            every = self.encoding.cached_position(every)
        frequencies, factor = self.table.live()
        angles = by_pair(every.double(), 1, len(frequencies)) * frequencies.double()
        rows = (torch.cat((angles.sin(), angles.cos()), -1) * factor).to(native.dtype)
        if every.dim() == 1:
            own = (every == every.long()) & (every < len(native))
            rows[own] = native.detach()[every[own].long()]
        self._kept = native, self.encoding, rows
        return rows


def adapter_of(model: nn.Module) -> ArchAdapter:
    """Return the adapter of a model's text decoder; raise for a family that cannot be patched."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no transformers config. patch_model takes a transformers "
            "model (PreTrainedModel), or one wrapped by PEFT, DDP or torch.compile."
        )
    text = config.get_text_config(decoder=True)
    adapter = get_adapter(text.model_type)
    try:
        adapter.check(text)
    except UnsupportedModelError as error:
        raise NoRotaryError(str(error)) from None
    return adapter


def tables_of(model: nn.Module) -> tuple[RotaryTable, ...]:
    """Return every rotary table of the text decoder, whatever form it has, of a model without wrappers (`unwrap`)."""
    name = adapter_of(model).sincos_table
    tables = rotary_tables(model) if name is None else tuple(_sincos_tables(model, name))
    if tables:
        return tables
    others = {rotary.name: rotary.modalities for rotary in _rotaries(model)}
    if others:
        kinds = " and ".join(dict.fromkeys(kind for kinds in others.values() for kind in kinds))
        raise UnsupportedModelError(
            f"{type(model).__name__} has no rotary embedding of text: {', '.join(others)} belongs to a part for "
            f"{kinds}. hf_posenc patches the positions of text."
        )
    raise NoRotaryError(
        f"{type(model).__name__} has no rotary embedding: no module holds an inv_freq table. {INSPECT}"
    )


def rotary_tables(model: nn.Module) -> tuple[RotaryTable, ...]:
    """Return every `inv_freq` table of the text decoder, in the order of the modules; empty where there is none."""
    whole: Any = getattr(model, "config", None)
    text, decoder = whole.get_text_config(decoder=True), _text_decoder(model)
    rotaries = [rotary for rotary in _rotaries(model) if _TEXT in rotary.modalities]
    if decoder is None:
        # Modules whose config is the text decoder's own, where there are any: a protein encoder reads text too.
        # Otherwise all, if one config covers the whole model: BLT has one more for each of its parts.
        own = [r for r in rotaries if getattr(r.config, "model_type", None) == text.model_type]
        rotaries = own or (rotaries if text is whole else [])
    inside = set() if decoder is None else {*decoder.modules()}
    tables = []
    for each in rotaries:
        part = "" if decoder is None else "decoder" if each.module in inside else "encoder"
        for label in table_labels(each.module):
            described = each.config, *_scaling_of(each.module, each.config, label)
            tables.append(RotaryTable(each.name, label, each.module, *described, part=part))
    return tuple(tables)


def _sincos_tables(model: nn.Module, attribute: str) -> Iterator[SinCosTable]:
    config: Any = getattr(model, "config", None)
    described = (config, "default", _SINCOS_PARAMETERS)
    for name, module in model.named_modules():
        held = getattr(module, attribute, None)
        if isinstance(held, nn.Embedding):
            path = f"{name}.{attribute}".lstrip(".")
            yield SinCosTable(path, "", held, *described, "weight")
        elif isinstance(held, Tensor):
            yield SinCosTable(name, "", module, *described, attribute)


@dataclass(frozen=True, eq=False)
class _Rotary:
    """A rotary module, without wrappers, and what the part of the model that it belongs to takes or writes."""

    name: str
    module: nn.Module
    config: Any
    modalities: tuple[str, ...]


def _rotaries(model: nn.Module) -> Iterator[_Rotary]:
    """Yield every rotary module, those of vision towers and audio codecs too."""
    owners: dict[str, Any] = {}  # the transformers models inside, by path
    wrapped: list[str] = []
    decoder = _text_decoder(model)
    for name, module in model.named_modules():
        if hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            owners[name] = module
        if any(name.startswith(f"{outer}.") for outer in wrapped):
            continue
        if isinstance(module, RotaryWrapper):
            wrapped.append(name)
            module = native_rotary(module)
        if not table_labels(module):
            continue
        around = [path for path in owners if not path or name.startswith(f"{path}.")]
        owner = owners[max(around, key=len)] if around else None
        config = vars(module).get("config") or (owner and owner.config.get_text_config())
        kinds = getattr(owner, "input_modalities", _TEXT)
        if decoder is not None and any(owners[path] is decoder for path in around):
            kinds = _TEXT
        yield _Rotary(name, module, config, (kinds,) if isinstance(kinds, str) else tuple(kinds))


def _text_decoder(model: Any) -> nn.Module | None:
    """The decoder of an encoder-decoder model, which writes text whatever the encoder reads (speech)."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    decoder: nn.Module = model.get_decoder()
    return None if decoder is model else decoder


def uncertain_rotaries(model: nn.Module, tables: Tables) -> dict[str, nn.Module]:
    """Return the rotary modules, by path, that are none of these tables', although their part may read text."""
    known = {id(table.module) for table in tables}
    return {
        each.name: each.module
        for each in _rotaries(model)
        if _TEXT in each.modalities and id(each.module) not in known
    }


def shared_configs(model: nn.Module, tables: Tables) -> set[int]:
    """Return the `id` of every config from which a rotary module that is none of these tables' is built too."""
    known = {id(table.module) for table in tables}
    return {id(each.config) for each in _rotaries(model) if id(each.module) not in known}


def _scaling_of(module: nn.Module, config: Any, label: str) -> tuple[str, Mapping[str, Any]]:
    import transformers  # `hf-posenc recipes` does without it

    parameters = getattr(config, "rope_parameters", None) or {}
    if label and isinstance(parameters.get(label), Mapping):
        parameters = parameters[label]
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, Mapping):
        rope_type = rope_type.get(label)
    version = transformers.__version__
    if "dynamic" in (rope_type or "") and tuple(map(int, version.split(".")[:2])) < (5, 13):
        raise UnsupportedModelError(
            f"This checkpoint has a RoPE of type {rope_type}. In transformers {version} its table does not shrink "
            "after a long text, so shorter texts after it are computed wrongly. Install transformers 5.13 or newer."
        )
    return rope_type or "default", dict(parameters)


def foreign_frequencies(model: nn.Module, table: RotaryTable) -> str:
    """Return how the frequencies of a module differ from those of its config, in a sentence; `""` if they do not.

    Rounding to 16 bits is no difference, nor is what the code of the model computes when it is built. Nothing is
    returned if the module or the model cannot be built from the config.
    """
    if isinstance(table, SinCosTable):
        return ""
    try:
        live, built = _start_of(table.module, table), table.built()
        meant = _start_of(built, table)
        if live.is_meta or _same(live, meant, table, built):
            return ""
        if is_table(live):  # the code around the module may have set it
            with _Weightless(), torch.random.fork_rng(devices=[]):
                whole: Any = type(model)(copy.deepcopy(model.config))
            module = native_rotary(whole.get_submodule(table.name))
            if _same(live, _start_of(module, table), table, module):
                return ""
    except Exception:  # arguments beside the config, a value that its class refuses
        return ""
    rope = (f"{k}={v}" for k, v in table.parameters.items() if not isinstance(v, list | dict))
    return (
        f"{table.name} does not have the frequencies of its config ({', '.join(rope)}), which are {_ends(meant)} "
        f"rad/token. Its own are in force: {_ends(live)}, rope_type={table.rope_type!r}."
    )


class _Weightless(TorchFunctionMode):
    """Puts the weights of modules that are built on the meta device, and no table that is computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.rand, torch.randn):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _start_of(module: nn.Module, table: RotaryTable) -> Tensor:
    """Return the table of a module for short texts, on the CPU."""
    tensor = table.held_by(module).detach()
    return tensor if tensor.is_meta else tensor.double().cpu()


def _same(live: Tensor, other: Tensor, table: RotaryTable, module: nn.Module) -> bool:
    """Return whether a module has the frequencies of a live table, and its type of scaling."""
    kind = _scaling_of(module, table.config, table.label)[0]
    if live.shape != other.shape or kind != table.rope_type:
        return False
    return torch.allclose(live, other, rtol=_ROUNDED, atol=_LEAST)


def _ends(frequencies: Tensor) -> str:
    return f"{float(frequencies[0]):.6g} to {float(frequencies[-1]):.6g}"


def is_table(frequencies: Tensor) -> bool:
    """Return whether frequencies may be set on purpose: finite and decreasing, the last of them may be 0."""
    values = frequencies[: int((frequencies != 0).sum())]
    finite = len(values) > 0 and bool(torch.isfinite(frequencies).all())
    return finite and bool((values > 0).all() & (values.diff() < 0).all())


def read_spec(table: RotaryTable, original: int, *, compose: bool) -> RopeSpec:
    """Return the frequencies that a method starts from: those of `rope_theta`, or for `compose` those in force."""
    live = table.composed()[0] if compose else table.live()[0]
    live = live.detach().to("cpu", torch.float32).clone()
    dim = 2 * len(live)
    theta: Any = table.parameters.get("rope_theta") or getattr(table.config, "rope_theta", None)
    if theta is None and (compose or table.scaled):
        raise UnsupportedModelError(f"The config of {table.name} has no rope_theta. Set it there.")
    if compose:
        return RopeSpec(dim, float(theta), original, live)
    rotated = len(live)
    if table.rope_type == "proportional":
        rotated = int(float(table.parameters.get("partial_rotary_factor") or 1.0) * dim // 2)
    if table.scaled:
        spec = RopeSpec(dim, float(theta), original)
        return spec if rotated == len(live) else replace(spec, frequencies=_plain(spec, rotated))

    by_speed = live.argsort(descending=True, stable=True)
    order = None if bool((by_speed == torch.arange(len(live))).all()) else by_speed.argsort()
    live = live[by_speed]
    bases, last = [theta] if theta is not None else [], rotated - 1
    if last > 0 and 0 < float(live[last]) < 1:  # the base of a geometric table with this last pair
        bases.append(math.exp(-math.log(float(live[last])) * dim / (2 * last)))
    for base in bases:
        spec = RopeSpec(dim, float(base), original, order=order)
        plain = _plain(spec, rotated)
        if torch.allclose(live.double(), plain, rtol=_ROUNDED, atol=0):
            exact = torch.allclose(live.double(), plain, rtol=_EXACT, atol=0)
            # exact: the very bits of the model
            return replace(spec, frequencies=live if exact else plain)
    way = " Use compose=True to scale them as they are." if theta is not None else ""
    raise UnsupportedModelError(
        f"{table.name} ({type(table.module).__name__}) holds frequencies that are not theta ** (-2i/d) "
        f"for any theta, so no method defines scaled ones.{way}"
    )


def _plain(spec: RopeSpec, rotated: int) -> Tensor:
    """`theta ** (-2i/d)` for the rotated pairs, and zeros after them."""
    table = spec.theta ** -spec.exponents()
    table[rotated:] = 0
    return table


def select(
    tables: Tables, layers: str | Sequence[int], *, whole: bool, rotated: bool = True
) -> tuple[RotaryTable, ...]:
    """Return the tables that serve the chosen layers; those of `"full"` are neither sliding-window nor chunked ones.

    `"encoder"` and `"decoder"` are the same of one part of a model that has both. If `whole`, the name of a block of
    `rope_parameters` selects its tables.

    If `whole`, the tables themselves are to be changed, so indices must be exactly those of one or more tables. If not
    `rotated`, the layers are chosen whether they rotate or not: all tables.
    """
    if isinstance(layers, str) and layers in PARTS:
        if not any(table.part for table in tables):
            raise PosencError(
                'layers="encoder" and layers="decoder" are for models that have both, and this one is not an '
                'encoder-decoder model. layers is "full", "all" or a list of layer indices.'
            )
        tables, layers = [table for table in tables if table.part == layers], "full"
        if not tables:
            raise PosencError("The part that layers= names has no rotary table of text.")
    if layers == "all" or (layers == "full" and not rotated):
        return tuple(tables)
    if whole and (named := tuple(table for table in tables if table.label == layers)):
        return named
    if layers == "full":
        chosen = tuple(table for table in tables if not table.label.startswith(_LOCAL))
        if not chosen:
            raise UnsupportedModelError(
                f"Only the layers of type {', '.join(table.label for table in tables)} of this model "
                'rotate, and they never read past their window. Pass layers="all" to patch them anyway.'
            )
        return chosen
    if (
        isinstance(layers, str)
        or not isinstance(layers, Iterable)
        or not all(isinstance(layer, int) for layer in layers)
    ):
        raise PosencError(
            f'layers is "full", "all" or a list of layer indices, not {layers!r}. An encoder-decoder model also has '
            'layers="encoder" and layers="decoder".'
        )
    if not rotated:
        return tuple(tables)
    requested = set(layers)
    groups = [(table, _layers_of(table)) for table in tables]
    labels = {table.label: table.config for table in tables if table.label}
    by_type = (label in (getattr(c, "layer_types", None) or ()) for label, c in labels.items())
    if whole and labels and not any(by_type):
        names = [*labels]
        raise PosencError(
            f"layers={sorted(requested)}: the tables of this model, {' and '.join(names)}, are not those of layer "
            f"types, and a layer may read several. Name one, as in layers={names[-1]!r}."
        )
    rotating = frozenset[int]().union(*(served for _, served in groups))
    if unserved := sorted(requested - rotating):
        raise PosencError(
            f"layers={sorted(requested)}: no rotary table serves layer {', '.join(map(str, unserved))}. Layers that "
            f"have one: {', '.join(map(str, sorted(rotating))) or 'unknown'}."
        )
    matching = [
        (table, served)
        for table, served in groups
        if served & requested and (served <= requested or not whole)
    ]
    covered = {layer for _, served in matching for layer in served & requested}
    if covered != requested:
        raise CutTableError(f"layers={sorted(requested)} share a rotary table with other layers.")
    return tuple(table for table, _ in matching)


def layers_of_type(config: Any, kind: str) -> tuple[int, ...]:
    """Return the layers of `"full"` attention, `"sliding"` windows or chunks, `"all"`, or a config's own type."""
    count = range(getattr(config, "num_hidden_layers", None) or 0)
    types = list(getattr(config, "layer_types", None) or ["full_attention" for _ in count])
    softmax = {each for each in types if any(part in each for part in _ATTENDS)}
    attends = [n for n in count if types[n] in softmax and "linear" not in types[n]]
    local = [layer for layer in attends if types[layer].startswith(_LOCAL)]
    named = [layer for layer in count if types[layer] == kind]
    choices = {"all": attends, "sliding": local, "full": [x for x in attends if x not in local]}
    found = choices.get(kind, named)
    if not found:
        raise PosencError(
            f"This model has no {kind} layers. Its layers are {', '.join(dict.fromkeys(types)) or 'not numbered'}; a "
            'key is "full", "sliding", "all", one of these types, a layer\'s number, or a range.'
        )
    return tuple(found)


def _layers_of(table: RotaryTable) -> frozenset[int]:
    if own := _LAYER_INDEX.search(f"{table.name}."):
        return frozenset({int(own[1])})
    count = range(getattr(table.config, "num_hidden_layers", 0))
    if not table.label:
        return frozenset(count)
    types = getattr(table.config, "layer_types", None) or []
    return frozenset(layer for layer in count if layer < len(types) and types[layer] == table.label)


def attends_locally(module: nn.Module, config: Any) -> bool:
    """True for an attention module with a window or chunks in a model that has other layers too."""
    kinds = {*(getattr(config, "layer_types", None) or [])}
    return len(kinds) > 1 and layer_type(module, config).startswith(_LOCAL)


def local_layers(config: Any) -> frozenset[int]:
    """Return the layers with a window or chunks of a model that has other layers too."""
    kinds = list(getattr(config, "layer_types", None) or [])
    local = frozenset(layer for layer, kind in enumerate(kinds) if kind.startswith(_LOCAL))
    return local if len({*kinds}) > 1 else frozenset()


def layer_type(module: nn.Module, config: Any) -> str:
    """Return the layer type of an attention module, as the config names it; `""` where it does not."""
    kinds = getattr(config, "layer_types", None) or []
    index = layer_index("", module)
    own = getattr(module, "layer_type", None)
    return str(own or (kinds[index] if index is not None and index < len(kinds) else ""))


def layer_index(name: str, module: nn.Module) -> int | None:
    """Return the number of the layer that an attention module belongs to."""
    own = getattr(module, "layer_idx", None)
    if isinstance(own, int):
        return own
    match = _LAYER_INDEX.search(f"{name}.")
    return int(match[1]) if match else None
