"""`recommend`: from a model and a target length to a ranked list of methods, each with its reason."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_posenc.adapters import available_architectures
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.recommend.cache import CacheCost, cache_cost
from hf_posenc.evaluation.recommend.limits import RotaryLimits, least_base, rotary_limits
from hf_posenc.evaluation.recommend.options import (
    AS_IT_IS,
    Option,
    Start,
    option_of,
    rank,
)
from hf_posenc.methods import METHODS
from hf_posenc.patching import get_patch, patched
from hf_posenc.resolve import adapter_of, tables_of, unwrap
from hf_posenc.seams.discovery import RotaryTable, original_length, read_spec
from hf_posenc.seams.layers import select

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
