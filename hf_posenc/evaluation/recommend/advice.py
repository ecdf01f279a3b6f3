"""`recommend`: from a model and a target length to a ranked list of methods, each with its reason."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text
from torch import nn

from hf_posenc.adapters import available_architectures
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.recommend.limits import (
    FAST_TURNS,
    TOLERANCE,
    CacheCost,
    RotaryLimits,
    cache_cost,
    least_base,
    rotary_limits,
)
from hf_posenc.evaluation.recommend.options import (
    AS_IT_IS,
    BESIDE,
    FINE_TUNED,
    REFUSED,
    SHORT,
    TRAINED,
    WINDOW,
    Option,
    Start,
    option_of,
    rank,
)
from hf_posenc.methods import METHODS
from hf_posenc.model.discovery import RotaryTable, original_length, read_spec, select
from hf_posenc.patch.patching import get_patch, patched
from hf_posenc.patch.request import adapter_of, tables_of, unwrap

_PER_LENGTH = ("dynamic", "longrope")  # a table that depends on the length: nothing to compose with


@dataclass(frozen=True)
class Carried:
    """What a checkpoint's config says of its positions.

    Attributes:
        rope_type: The scaling in force, in transformers' word.
        scaled: Whether there is any.
        reach: The context length that the config names, scaling included, in tokens.
        trained: The length before that scaling.
    """

    rope_type: str
    scaled: bool
    reach: int
    trained: int


@dataclass(frozen=True)
class Advice:
    """What to do for a target length.

    Attributes:
        name: The model's name, as the commands take it.
        model_class: Its class.
        model_type: The `model_type` of its text decoder.
        tested: Whether the test matrix covers that type.
        target: The target length, in tokens.
        carried: What the checkpoint carries already.
        beside: How frequency methods go on from there: `compose`, `replace`, or neither.
        limits: What the table says that frequency methods start from.
        least_base: The least base for the target, by the fit of arXiv 2405.14591.
        cache: What keys and values take at the target; `None` where that is not known.
        options: Every method, the best first.
    """

    name: str
    model_class: str
    model_type: str
    tested: bool
    target: int
    carried: Carried
    beside: dict[str, Any]
    limits: RotaryLimits
    least_base: float
    cache: CacheCost | None
    options: tuple[Option, ...]

    @property
    def needed(self) -> bool:
        """Whether the target is more than what the config names."""
        return self.target > self.carried.reach

    @property
    def factor(self) -> float:
        """The target as a multiple of the length that frequency methods start from."""
        return self.target / self.limits.original

    def best(self, works: str, count: int) -> tuple[Option, ...]:
        """The first options that work so."""
        return tuple(option for option in self.options if option.works == works)[:count]

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        values = {
            "kind": "advice",
            "format": 1,
            **dataclasses.asdict(self),
            "needed": self.needed,
            "factor": self.factor,
            "commands": list(self.commands()),
        }
        for shown, option in zip(values["options"], self.options, strict=True):
            shown.update(spec=option.spec, call=option.call)
        return values

    def commands(self) -> tuple[str, ...]:
        """What to run next, on text of one's own."""
        text = "--text 'YOUR/*.txt'"
        lengths = ",".join(map(str, sorted({min(self.carried.reach, self.target), self.target})))
        specs = ["none"]
        if self.needed:
            specs += ["sliding_window", *(str(one.spec) for one in self.best(AS_IT_IS, 3))]
        patches = " ".join(f"--patch {spec}" for spec in specs)
        made = [f"perplexity {self.name} {text} --lengths {lengths} {patches}"]
        if self.needed:
            made += [
                f"retrieval {self.name} --lengths {lengths} {patches}",
                f"sweep {self.name} {text} --target-length {self.target}",
            ]
        return tuple(f"hf-posenc {' '.join(command.split())}" for command in made)


def recommend(
    model: nn.Module,
    target_length: int,
    *,
    name: str = "MODEL",
    original: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Advice:
    """Ranks the methods for a target length. In closed form: the model is not run on any text.

    Rules of thumb are the base bound, and that it is angles not met in training that break a model. What the published
    tables show was measured on a few Llamas. The ranking says what to try first; `perplexity` says what is true.

    Args:
        model: A transformers model. On the meta device its config alone is read, and the methods that compute attention
            themselves cannot be tried; on a loaded model every method is patched in and taken out.
        target_length: In tokens.
        name: The model's name, for the commands.
        original: The length that the model was trained at, in tokens, where its config names another.
        dtype: The number format of the cache.

    Raises:
        PosencError: A length that is none, a patched model, or one without a rotary table.
    """
    if target_length < 1:
        raise PosencError(f"A target length is a number of tokens, not {target_length}.")
    inner: Any = unwrap(model)
    if get_patch(inner) is not None:
        raise PosencError(
            "This model is patched. Advice is for the checkpoint itself: unpatch_model(model) first, or name the "
            "checkpoint that it was saved from."
        )
    table = select(tables_of(inner, adapter_of(inner)), "full", whole=True)[0]
    carried = _carried(table, original)
    beside = _beside(table, carried, original)
    compose = bool(beside.get("compose"))
    spec = read_spec(table, carried.reach if compose else carried.trained, compose=compose)
    config: Any = inner.config
    model_type = config.get_text_config(decoder=True).model_type
    named = original_length(table, compose=table.scaled)
    length = {"original_max_position_embeddings": carried.reach}
    start = Start(
        spec, target_length, beside, carried.reach, length if carried.reach != named else {}
    )
    options = []
    if target_length > carried.reach:
        options = [_tried(option_of(kind, start), inner) for kind in METHODS]
    return Advice(
        name=name,
        model_class=type(inner).__name__,
        model_type=model_type,
        tested=model_type in available_architectures(),
        target=target_length,
        carried=carried,
        beside=beside,
        limits=rotary_limits(spec, target_length),
        least_base=least_base(target_length),
        cache=cache_cost(inner, target_length, dtype),
        options=tuple(rank(options, start.factor)),
    )


def _carried(table: RotaryTable, original: int | None) -> Carried:
    trained = original or original_length(table, compose=False)
    if not table.scaled:
        return Carried(table.rope_type, False, trained, trained)
    reach = original_length(table, compose=True)
    if table.rope_type not in _PER_LENGTH:  # some configs name the length before the scaling
        reach = max(reach, int(trained * float(table.parameters.get("factor") or 1)))
    return Carried(table.rope_type, True, reach, trained)


def _beside(table: RotaryTable, carried: Carried, original: int | None) -> dict[str, Any]:
    """What `patch_model` needs beside a frequency method to start from there."""
    given = {} if original is None else {"original_max_position_embeddings": original}
    if not table.scaled:
        return given
    if table.rope_type in _PER_LENGTH:
        return {"replace": True, **given}
    if carried.reach != original_length(table, compose=True):
        given = {"original_max_position_embeddings": carried.reach}
    return {"compose": True, **given}


def _tried(option: Option, model: nn.Module) -> Option:
    """The option after its trial on the model; untried where it takes weights and there are none.

    A dynamic method that the model does not take row by row is tried in the form that changes the table alone.
    """
    unloaded = any(parameter.is_meta for parameter in model.parameters())
    if option.options is None or (option.attention and unloaded):
        return option
    error = _refusal(option, model)
    instead = option.by_sequence
    if error is not None and instead is not None and _refusal(instead, model) is None:
        return instead.after(None)
    return option.after(error)


def _refusal(option: Option, model: nn.Module) -> PosencError | None:
    """Patches an option in and takes it out; why that did not work."""
    assert option.options is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a method needs, the option says
        try:
            with patched(model, option.method, **option.options):
                return None
        except PosencError as error:
            return error


# What `hf-posenc recommend` prints.


_RANKED = (AS_IT_IS, FINE_TUNED, SHORT, WINDOW, BESIDE)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def facts(advice: Advice) -> Iterator[tuple[str, str]]:
    """What is known before any method: a heading and a sentence or two each."""
    yield "checkpoint", _carried_note(advice)
    yield "turns", _turns(advice.limits)
    yield "base", _base(advice)
    yield "cache", _cache(advice.cache)
    if advice.carried.scaled and advice.needed:
        yield "already scaled", _scaled(advice)


def table(advice: Advice) -> Table:
    """The methods that say something without being trained from scratch, the best first."""
    made = Table(
        title=f"Methods for {advice.target:,} tokens, x{advice.factor:.4g}: what to try first",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("", justify="right", no_wrap=True)
    made.add_column("method", no_wrap=True)
    made.add_column("works", no_wrap=True)
    made.add_column("why", overflow="fold")
    shown = [option for option in advice.options if option.works in _RANKED]
    for place, option in enumerate(shown, 1):
        reason = option.reason + (" [*]" if _untried(option) else "")
        made.add_row(
            str(place),
            option.method,
            option.works,
            Text(reason),
            style="bold" if place == 1 else None,
        )
    return made


def notes(advice: Advice) -> Iterator[str]:
    """What a reader must know beside the table."""
    if any(_untried(option) for option in advice.options):
        covered = "covers" if advice.tested else "does not cover"
        yield (
            f"[*] computes attention itself, and is tried only on a loaded model: --weights. The test matrix {covered} "
            f"{advice.model_type} (docs/architectures.md)."
        )
    trained = [option.method for option in advice.options if option.works == TRAINED]
    if trained:
        yield f"After training only: {', '.join(trained)}."
    refused: dict[str, list[str]] = {}
    for option in advice.options:
        if option.works == REFUSED:
            refused.setdefault(option.reason, []).append(option.method)
    for reason, methods in refused.items():
        yield f"Not {', '.join(methods)}: {reason}"
    yield (
        f"Published, untrained: a perplexity within {TOLERANCE - 1:.0%} of the unpatched model's at its trained "
        "length, on the model and text of that table. It says what to try first; your text decides."
    )


def way_on(advice: Advice) -> Iterator[str]:
    """The call, and the commands to run next."""
    best = advice.best(AS_IT_IS, 1)
    if best:
        yield f"In Python: {best[0].call}"
    yield from (f"Next: {command}" for command in advice.commands())


def _carried_note(advice: Advice) -> str:
    carried = advice.carried
    text = f"{carried.reach:,} tokens by its config"
    if carried.scaled:
        text += f", by rope_type {carried.rope_type} from {carried.trained:,}"
    if not advice.needed:
        text += f": {advice.target:,} need no patch"
    return f"{text}."


def _turns(limits: RotaryLimits) -> str:
    return (
        f"{limits.full_turns} of {limits.rotated} pairs made a whole turn in {limits.original:,} tokens, "
        f"{limits.fast} of them {FAST_TURNS} or more. Past that length the other {limits.slow} reach angles that the "
        "model has not met. "
        f"Critical dimension {limits.critical_dimension} of {limits.dim} (arXiv 2310.05209)."
    )


def _base(advice: Advice) -> str:
    limits = advice.limits
    similar = "no distance up to the target"
    if limits.similar_until is not None:
        similar = f"{limits.similar_until:,} tokens"
    return (
        f"{limits.theta:,.0f}, the least to train {limits.base_context:,} tokens with; {advice.target:,} take "
        f"{advice.least_base:,.0f} (a fit, arXiv 2405.14591). The first distance at which a similar token may lose "
        f"to a random one: {similar} (the theorem behind the fit). Rules of thumb, for training."
    )


def _cache(cache: CacheCost | None) -> str:
    if cache is None:
        return "not known: this model does not run without its weights."
    kept = ""
    if cache.window_layers:
        kept = f"; {cache.window_layers} layers keep the last {cache.window:,} tokens"
    return (
        f"{_size(cache.bytes)} of keys and values in {cache.dtype} for one text of {cache.tokens:,} tokens: "
        f"{_size(cache.bytes_per_token)} a token in {cache.full_layers} layers{kept}."
    )


def _scaled(advice: Advice) -> str:
    if "replace" in advice.beside:
        return (
            f"{advice.carried.rope_type} has a table per length, with which nothing can be composed: replace=True "
            f"starts from rope_theta and {advice.limits.original:,} tokens. Weights trained with that scaling lose it."
        )
    return (
        f"compose=True scales the frequencies in force once more, from {advice.limits.original:,} tokens: right for "
        "weights that were trained with them. If the scaling was only written into the config, replace=True starts "
        f"from rope_theta and {advice.carried.trained:,} tokens."
    )


def _untried(option: Option) -> bool:
    return option.trial is None and option.options is not None


def _size(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} {_UNITS[-1]}"
