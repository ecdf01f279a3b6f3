"""What `hf-posenc recommend` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.recommend.advice import Advice
from hf_posenc.evaluation.recommend.cache import CacheCost
from hf_posenc.evaluation.recommend.evidence import TOLERANCE
from hf_posenc.evaluation.recommend.limits import FAST_TURNS, RotaryLimits
from hf_posenc.evaluation.recommend.options import (
    AS_IT_IS,
    BESIDE,
    FINE_TUNED,
    REFUSED,
    SHORT,
    TRAINED,
    WINDOW,
    Option,
)

_RANKED = (AS_IT_IS, FINE_TUNED, SHORT, WINDOW, BESIDE)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def facts(advice: Advice) -> Iterator[tuple[str, str]]:
    """What is known before any method: a heading and a sentence or two each."""
    yield "checkpoint", _carried(advice)
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


def _carried(advice: Advice) -> str:
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
