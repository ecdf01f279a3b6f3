"""Recommendation of a method for a length: closed formulas, published evidence, and a trial on the model.

From a model and a target length to classes of methods, each with its reason, and the cost of the cache.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from hf_posenc.adapters import available_architectures
from hf_posenc.diagnosis import check_causal
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.evaluation.grid import Grid
from hf_posenc.evaluation.recommend.options import (
    AS_IT_IS,
    REFUSED,
    TOLERANCE,
    WORKS,
    Option,
    Start,
    option_of,
    rank,
    verdict,
)
from hf_posenc.lengths import read_length
from hf_posenc.methods import METHODS, get_method
from hf_posenc.model.context import Context, context_of
from hf_posenc.model.discovery import NoRotaryError, read_spec, select, tables_of
from hf_posenc.model.forward import cache_of
from hf_posenc.model.sampled import sample_of
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.frequencies import refuse_local
from hf_posenc.patch.patching import get_patch, moving_notes
from hf_posenc.patch.request import resolve_request

__all__ = ["Advice", "CacheCost", "Carried", "Option", "recommend"]

_PROBE_TOKENS = 4
SHOWN = 4
"""Methods of one kind that the answer names in a class."""


@dataclass(frozen=True)
class Carried(Context):
    """Scaling that a checkpoint's config carries, if any, and the context lengths.

    Attributes:
        rope_type: The type of its rotary embedding, in transformers' word.
        scaled: True if it is scaled.
        note: What transformers computes wrongly with it, where its table moves with the text, and the patch that does
            not; else empty.
    """

    rope_type: str
    scaled: bool
    note: str = ""


@dataclass(frozen=True)
class CacheCost:
    """Memory of the keys and values of one text of so many tokens.

    Attributes:
        bytes_per_token: Bytes that a token takes in the `full_layers` together, which keep every token.
        window_layers: Layers that keep the last `window` tokens.
        dtype: Number format of the cache.
    """

    tokens: int
    bytes: int
    bytes_per_token: int
    full_layers: int
    window_layers: int
    window: int
    dtype: str

    def __str__(self) -> str:
        windows = f"; {self.window_layers} layers keep the last {self.window:,} tokens"
        return (
            f"{_size(self.bytes)} of keys and values in {self.dtype} for one text of {self.tokens:,} tokens: "
            f"{_size(self.bytes_per_token)} a token in {self.full_layers} layers{windows * bool(self.window_layers)}."
        )


@dataclass(frozen=True)
class Advice:
    """Advice for a target length, in tokens.

    Attributes:
        name: The model's name, as the commands take it.
        model_type: The type of its text decoder, and if the test matrix covers it (`tested`).
        carried: The scaling of the checkpoint's config, and the lengths with it and before it.
        beside: Arguments of `patch_model` that start a frequency method from it: `compose`, `replace`, or neither.
        start: The length that they start from, in tokens.
        unmeasured: The reason why the measuring commands refuse the model; empty for a causal language model.
        cache: The memory of keys and values at the target; `None` if it is unknown.
        options: Every method, by how it works at the target; within such a class the order is no finding.
    """

    name: str
    model_class: str
    model_type: str
    tested: bool
    target: int
    carried: Carried
    beside: dict[str, Any]
    start: int
    unmeasured: str
    cache: CacheCost | None
    options: tuple[Option, ...]

    @property
    def needed(self) -> bool:
        """True if the target exceeds the length of the config."""
        return self.target > self.carried.reach

    @property
    def factor(self) -> float:
        """The target as a multiple of the length that frequency methods start from."""
        return self.target / self.start

    @property
    def best(self) -> list[Option]:
        """The options that work as they are."""
        return [option for option in self.options if option.works == AS_IT_IS]

    @property
    def unrefuted(self) -> list[Option]:
        """The options that work as they are, and that no published table refutes at this factor."""
        return [o for o in self.best if verdict(o.evidence, self.factor) >= 0]

    @property
    def first(self) -> list[Option]:
        """The options to measure first: two of each kind."""
        kept = self.unrefuted
        kinds = dict.fromkeys(option.kind for option in kept)
        return [o for kind in kinds for o in [o for o in kept if o.kind == kind][:2]]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        calls = [{"spec": option.spec, "call": option.call} for option in self.options]
        values = dataclasses.asdict(self)
        values["options"] = [v | c for v, c in zip(values["options"], calls, strict=True)]
        about = {"needed": self.needed, "factor": self.factor, "commands": list(self.commands())}
        return {"kind": "advice", "format": 1, **values, **about}

    def commands(self) -> tuple[str, ...]:
        """Return the commands to run next, on the user's own text; none for a model that they refuse."""
        text = "--text 'YOUR/*.txt'"
        lengths = ",".join(map(str, sorted({min(self.carried.reach, self.target), self.target})))
        specs, own = ["none"], [str(one.spec) for one in self.first]
        if "patch_model" in self.carried.note:
            specs.append(get_method(self.carried.rope_type).name)
        if self.needed:
            named = (one for one in self.options if one.method == "attention_sinks")
            able = (str(one.spec) for one in named if one.works != REFUSED)
            specs += ["truncation", *able, *own]
        patches, swept = (
            "".join(f" --patch {spec}" for spec in each)
            for each in (specs, own if self.beside else ())  # its own methods know of neither
        )
        name = f" {self.name}" if self.name else ""
        commands = (
            f"hf-posenc perplexity{name} {text} --lengths {lengths}{patches}",
            f"hf-posenc retrieval{name} --lengths {lengths}{patches}",
            f"hf-posenc sweep{name} {text} --target-length {self.target}{swept}",
        )
        return () if self.unmeasured else commands if self.needed else commands[:1]


def recommend(
    model: nn.Module,
    target_length: int | str,
    *,
    name: str = "MODEL",
    original: int | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Advice:
    """Sort the methods into classes for a target length in closed form: the model reads no text.

    The classes say what to try, by rules of thumb and published tables of a few Llamas; within one, only measurements
    decide (`perplexity`).

    Args:
        model: A transformers model. On the meta device only its config is read, and methods that compute attention
            themselves cannot be tried; on a loaded model every method is patched in and removed again.
        target_length: In tokens, as a number or as text such as `"32k"`.
        name: The model's name, for the commands.
        original: The length that the model was trained at, in tokens, if its config names another.
        dtype: The number format of the cache.

    Raises:
        PosencError: A length below 1, a patched model, one without a rotary table, or one that needs no patch because
            none of its full layers rotates, or no layer attends past its window.

    Examples:
        >>> from hf_posenc.evaluation.recommend import recommend
        >>> advice = recommend(model, "16k")
        >>> "yarn" in {option.method for option in advice.options}
        True
    """
    target_length = read_length(target_length, "target_length")
    original = None if original is None else read_length(original, "original")
    inner: Any = unwrap(model)
    if get_patch(inner) is not None:
        raise PosencError(
            "This model is patched. Advice is for the checkpoint itself: unpatch_model(model) first, or name the "
            "checkpoint that it was saved from."
        )
    unmeasured = ""
    try:
        check_causal(inner.config, name, "the commands that measure do not take it")
    except PosencError as error:
        unmeasured = str(error)
    try:
        tables = select(tables_of(inner), "full", whole=True)
    except NoRotaryError as error:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no rotary embedding, which the advice is about. `hf-posenc inspect {name}` "
            "finds where its positions come from and names the methods for that"
            f"{'' if unmeasured else '; `hf-posenc perplexity` compares them'}."
        ) from error
    table = tables[0]
    context = context_of(table, original, argument="original= (--original)")
    (note, *_) = (*moving_notes(inner), "")
    carried = Carried(**vars(context), rope_type=table.rope_type, scaled=table.scaled, note=note)
    needed = target_length > carried.reach
    cache = cache_cost(inner, target_length, dtype)
    if needed:
        if cache and not cache.full_layers and cache.window < carried.reach:
            raise UnsupportedModelError(
                f"No layer of {type(inner).__name__} attends past its window of {cache.window + 1:,} tokens, and "
                f"{carried.reach:,} are read as trained: a longer text needs no patch."
            )
        try:
            refuse_local(inner, tables, sample_of(inner))
        except PosencError as error:
            where = "an option of patch_model, and of --patch of the commands that measure"
            raise UnsupportedModelError(f"{error} That is {where}.") from error
    beside = _beside(carried, original)
    compose = bool(beside.get("compose"))
    spec = read_spec(table, carried.start(compose=compose), compose=compose)
    beside_attention = _length(carried.reach, original)
    if carried.rope_type == "longrope":
        beside_attention["compose"] = True  # one of its two lists
    replaced = {"replace": True, **_length(carried.original, original)} if carried.scaled else {}
    start = Start(spec, target_length, beside, carried.reach, beside_attention, replaced)
    kinds = [kind for kind in METHODS if kind.for_rotary and kind.for_causal and needed]
    options = [_tried(option_of(kind, start), inner) for kind in kinds]
    model_type = inner.config.get_text_config(decoder=True).model_type
    return Advice(
        name=name,
        model_class=type(inner).__name__,
        model_type=model_type,
        tested=model_type in available_architectures(),
        target=target_length,
        carried=carried,
        beside=beside,
        start=start.original,
        unmeasured=unmeasured,
        cache=cache,
        options=tuple(rank(options, start.factor)),
    )


def _beside(carried: Carried, original: int | None) -> dict[str, Any]:
    """Return the arguments of `patch_model` that start a frequency method from this table."""
    if not carried.scaled:
        return _length(carried.original, original)
    # A table for each length cannot be composed; and weights lose no scaling that they were not trained with.
    if carried.rope_type == "dynamic" or carried.trained < carried.reach:
        return {"replace": True, **_length(carried.original, original)}
    return {"compose": True, **_length(carried.reach, original)}


def _length(start: int, original: int | None) -> dict[str, Any]:
    """Return the argument that names the length that a method starts from, if a length was given."""
    return {} if original is None else {"original_max_position_embeddings": start}


def _tried(option: Option, model: nn.Module) -> Option:
    """Return the option after its trial on the model, or as it is if the trial requires weights and there are none.

    A dynamic method that the model does not support row by row is tried in the form that changes the table alone.
    """
    if option.options is None:
        return option
    refusals = []
    if option.attention and any(parameter.is_meta for parameter in model.parameters()):
        try:
            resolve_request(tables_of(model), option.method, **option.options)
            return option
        except PosencError as refusal:
            refusals.append(refusal)
    else:
        forms = [option]
        if "update" in get_method(option.method).knobs():
            options = {**option.options, "update": "sequence"}
            forms.append(dataclasses.replace(option, options=options, attention=False))
        for form in forms:
            assert form.candidate is not None
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the option states what a method needs
                    with form.candidate.applied(model, 1):
                        return dataclasses.replace(form, trial=True)
            except PosencError as refusal:
                refusals.append(refusal)
    reason = " ".join(str(refusals[0]).split())
    return dataclasses.replace(option, works=REFUSED, reason=reason, trial=False)


def cache_cost(model: nn.Module, tokens: int, dtype: torch.dtype) -> CacheCost | None:
    """Compute the memory of the cache for one text; `None` if the model does not run on the meta device.

    A model of the same config runs a few tokens there, without computing or storing anything. Grouped heads, latent
    attention, shared and sliding-window layers are therefore counted as transformers keeps them.
    """
    config: Any = copy.deepcopy(model.config)
    text, kind = config.get_text_config(decoder=True), cast("Any", type(model))
    text.rope_parameters = _unscaled(getattr(text, "rope_parameters", None))
    try:
        # bfloat16: mixtures of experts support nothing else on this device
        with torch.device("meta"), torch.no_grad():
            twin = kind._from_config(config, dtype=torch.bfloat16).eval()
            ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64)
            layers = list(cache_of(twin(ids, use_cache=True)).layers)
    except Exception:  # a family may need values, which this device does not have
        return None
    growing = fixed = window = full = windowed = 0
    for layer in layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4:
            continue
        size = (keys[0].numel() + values[0].numel()) // _PROBE_TOKENS * dtype.itemsize
        if getattr(layer, "is_sliding", False):
            kept = min(tokens, int(layer.sliding_window) - 1)  # the next token completes the window
            fixed, window, windowed = fixed + size * kept, max(window, kept), windowed + 1
        else:
            growing, full = growing + size, full + 1
    total = growing * tokens + fixed
    name = str(dtype).removeprefix("torch.")
    return CacheCost(tokens, total, growing, full, windowed, window, name) if total else None


def _unscaled(parameters: Any) -> Any:
    """Remove the scaling, which may read the values of positions: on the meta device they have none."""
    if not isinstance(parameters, dict):
        return parameters
    if "rope_type" not in parameters:
        return {key: _unscaled(value) for key, value in parameters.items()}
    kept = ("rope_theta", "partial_rotary_factor")
    return {"rope_type": "default"} | {key: parameters[key] for key in kept if key in parameters}


def answer(advice: Advice) -> Iterator[str]:
    """Yield the answer, in nine lines at most: the lengths, what works best, the call, and the commands to run next."""
    named = dict(facts(advice))
    yield named["checkpoint"]
    yield from (
        f"{name}: {named[name]}" for name in ("in a cache", "already scaled") if name in named
    )
    if advice.needed:
        shown: dict[str, dict[str, list[str]]] = {}
        for option in advice.options:
            shown.setdefault(option.works, {}).setdefault(option.kind, []).append(option.method)
        for works, kinds in list(shown.items())[:2]:
            named_kinds = (f"{kind} {', '.join(own[:SHOWN])}" for kind, own in kinds.items())
            yield f"{works}: {'; '.join(named_kinds)}"
    yield from next_steps(advice)


def facts(advice: Advice) -> Iterator[tuple[str, str]]:
    """Yield the facts that precede any method: a heading and a sentence or two each."""
    carried, target = advice.carried, advice.target
    kind, original, reach = carried.rope_type, carried.original, carried.reach
    by = f", by rope_type {kind} from {original:,}" if carried.scaled else ""
    unneeded = "" if advice.needed else f": {target:,} need no patch"
    given = "original_max_position_embeddings" in advice.beside
    named = "the given length" if given else "its config"
    yield "checkpoint", f"{reach:,} tokens by {named}{by}{unneeded}."
    unknown = "unknown: this model does not run without its weights."
    yield "cache", unknown if advice.cache is None else str(advice.cache)
    if carried.note:
        yield "in a cache", carried.note
    if not (carried.scaled and advice.needed):
        return
    replaced = (
        f"replace=True starts from rope_theta and {original:,} tokens, x{target / original:.4g}"
    )
    long = "its long list, in texts of every length," if kind == "longrope" else ""
    composed = (
        f"compose=True scales {long or 'the frequencies in force'} once more, from {reach:,} tokens, "
        f"x{target / reach:.4g}"
    )
    if kind == "dynamic":
        scaling = (
            f"{kind} has a table for each length, which cannot be composed. {replaced}. Weights trained with that "
            "scaling lose it."
        )
    elif "replace" in advice.beside:
        scaling = (
            "the config's length does not count its scaling, so the weights were not trained with it. "
            f"{replaced}. {composed}, untrained twice."
        )
    else:
        scaling = (
            f"{composed}: right for weights that were trained with them. {replaced}: right if the scaling was only "
            "written into the config."
        )
    yield "already scaled", scaling


def table(advice: Advice) -> Grid:
    """Return every method with its class and the reason for it, in the order of the options."""
    title = f"Methods for {advice.target:,} tokens, x{advice.factor:.4g}: what to measure first"
    grid, before, kinds = Grid(title), "", [option.kind for option in advice.options]
    names = [str(o.spec) if "scale" in (o.options or ()) else o.method for o in advice.options]
    heads = {"works": WORKS, "changes": kinds, "method": names}
    for head, shown in heads.items():
        grid.column(head, least=max(map(len, shown), default=0))
    grid.column("why")
    for option, name in zip(advice.options, names, strict=True):
        works, new = option.works, option.works != before
        reason = option.reason + (" [*]" if _untried(option) else "")
        grid.row(works * new, option.kind, name, reason, rule=new)
        before = works
    return grid


def notes(advice: Advice) -> Iterator[str]:
    """Yield the notes that belong to the table."""
    if any(_untried(option) for option in advice.options):
        covered = "covers" if advice.tested else "does not cover"
        yield (
            f"[*] computes attention itself, and is tried only on a loaded model: --weights. The test matrix {covered} "
            f"{advice.model_type} (docs/architectures.md)."
        )
    yield (
        f"Published, untrained: a perplexity within {TOLERANCE - 1:.0%} of the unpatched model's at its trained "
        "length, on the model and text of that table; it says little about other models and longer texts. The classes "
        "are what the formulas tell. Within a class the order is no finding: measure two or three of each kind."
    )


def next_steps(advice: Advice) -> Iterator[str]:
    """Yield the call, and the commands to run next."""
    if advice.best:
        yield f"In Python: {advice.best[0].call}"
    yield from (f"Next: {command}" for command in advice.commands())
    yield from [advice.unmeasured] * bool(advice.unmeasured)


def _untried(option: Option) -> bool:
    return option.trial is None and option.options is not None


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
