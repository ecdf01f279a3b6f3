"""The factor that a model itself puts on its queries, found by trial and named by its law.

While attention is recorded, hidden states depend on no position, and a rotation keeps norms. So the norm of a query
far into a text, over its norm at the start, is the factor.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_posenc.errors import UnsupportedModelError
from hf_posenc.methods import Temperature
from hf_posenc.model.attention import Recorded, named, recording, register
from hf_posenc.model.calibration import trial_tokens
from hf_posenc.model.forward import CACHES, cache_name
from hf_posenc.model.rotary import ENGINE
from hf_posenc.model.unwrapping import owner_of, trial
from hf_posenc.model.weights import rounding_dtype

_FAR = 1 << 22  # tokens: past the trained length of any model whose factor could still be 1
_PAST = (0, 1000, 1 << 13, 1 << 16, 1 << 19)
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_HALF = 0.02


@dataclass(frozen=True)
class OwnTemperature:
    """The factor of a model's own on its queries."""

    method: Temperature
    original: int  # the length L of the law, in tokens

    def factor(self, m: Tensor) -> Tensor:
        """Return the factor on the query at m, of m's shape, float64."""
        return self.method.query_factor(m, self.original)

    def __str__(self) -> str:
        options = {**self.method.options(), "L": self.original}
        return f"temperature({', '.join(f'{knob}={value}' for knob, value in options.items())})"


def temperatures_of(model: nn.Module, places: Iterable[str]) -> dict[str, OwnTemperature | None]:
    """Return the attention modules, by path, that scale their queries, of the parts around some paths.

    The model's attention implementation is as before afterwards.
    """
    owners = {id(owner): owner for owner in (owner_of(model, place) for place in places)}
    found: dict[nn.Module, OwnTemperature | None] = {}
    for owner in owners.values():
        found |= _tried(model, owner)
    return {name: found[module] for name, module in model.named_modules() if module in found}


def _tried(model: nn.Module, owner: Any) -> dict[nn.Module, OwnTemperature | None]:
    held = (vars(module).get("config") for module in owner.modules())
    configs = [config for config in held if config is not None]
    register()
    # It may not run on a few tokens alone, or attend in code of its own.
    with (
        contextlib.suppress(Exception),
        trial(model),
        named(configs, ENGINE),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return own_temperatures(owner, trial_tokens(owner))
    return {}


class _Past(DynamicCache):
    """A cache that counts tokens which it does not hold."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        # transformers before 5.4 gives the positions.
        count = len(query_length) if isinstance(query_length, Tensor) else query_length
        return count, self.tokens

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return key, value

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return indexer_key_states


def own_temperatures(owner: Any, ids: Tensor) -> dict[nn.Module, OwnTemperature | None]:
    """Return the attention modules that scale their queries by position, and their law; `None`: an unknown one.

    There are none where the decoder cannot be run after tokens that are not there.
    """
    tolerance = _TOLERANCE.get(rounding_dtype(owner), _HALF)
    with recording() as start:
        owner(input_ids=ids, use_cache=False)
    near = {module: _norms(calls) for module, calls in start.items()}

    def norms(past: int) -> dict[nn.Module, Tensor]:
        with recording() as far:
            owner(input_ids=ids, **{cache_name(owner) or CACHES[0]: _Past(past)})
        return {module: _norms(calls) for module, calls in far.items()}

    def factors(past: int) -> dict[nn.Module, Tensor]:
        """The factor of every module whose heads have one, at each token after so many, shape (tokens,)."""
        ratios = {module: each / near[module] for module, each in norms(past).items()}
        return {m: ratio.mean(0) for m, ratio in ratios.items() if _alike(ratio, 0, tolerance)}

    try:
        found = factors(_FAR)
        far, half = norms(_FAR), norms(_FAR // 2)
    except Exception:  # a recurrent state, a convolution's past
        return {}
    # Between two far texts a factor of each head is the same for all tokens; a norm after the rotation is not.
    by_head = {m: far[m] / half[m] for m in far if m not in found}
    moved = [m for m, r in by_head.items() if bool(((r - 1).abs() > tolerance).any())]
    unnamed = dict.fromkeys(m for m in moved if _alike(by_head[m], 1, tolerance))
    changed = {
        m: ratio for m, ratio in found.items() if bool(((ratio - 1).abs() > tolerance).any())
    }
    if not changed:
        return {**unnamed}
    measured = {past: factors(past) for past in _PAST} | {_FAR: found}

    def follows(law: OwnTemperature, past: int, module: nn.Module) -> bool:
        ratio, positions = measured[past].get(module), torch.arange(ids.shape[1])
        expected = law.factor(positions + past) / law.factor(positions)
        return ratio is not None and bool(((ratio - expected).abs() <= tolerance * expected).all())

    laws: dict[nn.Module, OwnTemperature | None] = dict.fromkeys((*changed, *unnamed))
    for module, ratio in changed.items():
        known = [law for law in laws.values() if law is not None]
        for law in (*known, *_candidates(owner.config, float(ratio[0]))):
            if not all(follows(law, past, module) for past in measured):
                continue
            edge = law.original - ids.shape[1] // 2  # tokens on both sides of the first step
            if edge not in measured:
                measured[edge] = factors(edge)
            if follows(law, edge, module):
                laws[module] = law
                break
    return laws


def _norms(calls: Sequence[Recorded]) -> Tensor:
    """Return the norms of the queries of a module's first call, shape (heads, tokens)."""
    norms: Tensor = calls[0].query.float().norm(dim=-1)[0].cpu()
    return norms


def _alike(ratio: Tensor, axis: int, tolerance: float) -> bool:
    most = ratio.amax(axis)
    return bool((most - ratio.amin(axis) <= tolerance * most).all())


def _candidates(config: Any, ratio: float) -> Iterator[OwnTemperature]:
    """Yield laws that may explain the factor of the token at `_FAR`; their lengths stand in a config, or are round."""
    named = (int(value) for value in _numbers(config.to_dict()) if value > 1)
    for length in dict.fromkeys((*named, *(1 << power for power in range(8, 21)))):
        for law in ("llama4", "ministral", "power"):
            unit = OwnTemperature(Temperature(law=law, beta=1.0), length)
            growth = float(unit.factor(torch.tensor(_FAR)))
            beta = (
                math.log(ratio) / math.log(growth) if law == "power" else (ratio - 1) / (growth - 1)
            )
            if beta > 0:
                yield OwnTemperature(Temperature(law=law, beta=float(f"{beta:.3g}")), length)
        yield OwnTemperature(Temperature(law="log_n"), length)
        yield OwnTemperature(Temperature(law="yarn"), length)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 31:
        yield value


def refuse_own(own: Mapping[str, OwnTemperature | None], *, replace: bool) -> None:
    """Raise for layers, by name, whose queries the model scales itself, unless that factor can be replaced."""
    if not own:
        return
    names = ", ".join([*own][:3]) + (", ..." if len(own) > 3 else "")
    if None in own.values():
        raise UnsupportedModelError(
            f"{names}: the model scales its queries already, by no law that hf_posenc knows, and a second factor would "
            "multiply the first. Choose other layers with layers=, or leave this method out."
        )
    if not replace:
        laws = ", ".join(dict.fromkeys(str(law) for law in own.values()))
        raise UnsupportedModelError(
            f"{names}: the model scales its queries already, by {laws}, and a second factor would multiply the first. "
            "Pass replace=True to put this method in its place, or leave it out."
        )
