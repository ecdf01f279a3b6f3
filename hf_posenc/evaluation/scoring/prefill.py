"""Prefill in pieces, over a cache: tried on a short text before it is used, since it may change the numbers.

In most families it does not. Some keep no cache, some lose a state when more than one token follows it (Mamba, Zamba),
some restart their positions (Bamba), some take the first piece for the prompt (Unlimited-OCR). Nothing in a model's
interface reveals this.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from hf_posenc.errors import one_line
from hf_posenc.evaluation.measuring.candidates import movement
from hf_posenc.evaluation.scoring.decoder import replaced
from hf_posenc.evaluation.scoring.memory import is_out_of_memory
from hf_posenc.model import masks
from hf_posenc.model.attention import IMPLEMENTATION, native_implementation, register
from hf_posenc.model.rotary import ENGINE
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.model.weights import rounding_dtype
from hf_posenc.patch.state import state_of

logger = logging.getLogger(__name__)

# Names of the cache in different families, as an output and as an argument.
CACHES = ("past_key_values", "cache_params", "state")
# Tokens in a piece. A single one would be a decoding step, for which some families have another formula.
LEAST = 2
# Tokens of the texts that are tried, and of their pieces.
LEAST_PROBE, LONGEST_PIECE, LONGEST_PROBE = 64, 1024, 8192

SAME = 1e-3
SAME_HALF = 0.1
"""Nats a token, on average, by which pieces may differ from one forward: rounding, as the worst families amplify it."""

_NEAR = 4  # tokens behind a seam, where a lost state shows most
_REACH = re.compile(r"window|chunk|topk|compress|budget|local_attention|block_size")


class _RefusedError(Exception):
    """A prefill in pieces differs from one forward; the message is the reason."""


@dataclass(frozen=True)
class Pieces:
    """Settings to run a text in pieces of `size` tokens.

    Some models need the positions of a piece, which most derive from the cache; some need a cache for the first one.
    A piece behind others has a mask of its tokens times all tokens before them, unless the engine computes attention:
    `config` is that of a text decoder for which it can.
    """

    size: int
    positions: bool = False
    cache: Callable[[], Cache] | None = None
    config: Any = field(default=None, repr=False)

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Let the engine compute attention inside a `with` block, where it can: no mask is then a matrix."""
        with contextlib.ExitStack() as stack:
            if self.config is not None:
                register()
                stack.enter_context(replaced(self.config, IMPLEMENTATION, ENGINE))
                stack.enter_context(
                    replaced(masks, "DENSE", 0)
                )  # of the short texts of a trial too
            yield

    def bounds(self, tokens: int) -> list[tuple[int, int]]:
        """Return the begin and end of each piece; a last token that would be alone belongs to the piece before."""
        edges = [*range(0, tokens, self.size), tokens]
        if len(edges) > 2 and edges[-1] - edges[-2] < LEAST:
            del edges[-2]
        return list(itertools.pairwise(edges))

    def arguments(self, output: Any, windows: Tensor, begin: int, end: int) -> dict[str, Any]:
        """Return the arguments for tokens `begin .. end-1` of windows (k, n), after the output of a piece."""
        arguments: dict[str, Any] = {"use_cache": True}
        if begin:
            names = (name for name in CACHES if getattr(output, name, None) is not None)
            name = next(names, None)
            if name is None:
                raise _RefusedError("it returns no cache")
            arguments[name] = getattr(output, name)
        elif self.cache is not None:
            arguments["past_key_values"] = self.cache()
        if self.positions:
            positions = torch.arange(begin, end, device=windows.device)
            arguments["position_ids"] = positions.expand(len(windows), -1)
        return arguments


class Prefill:
    """Finds settings with which a model runs texts in pieces, if there are any.

    A random text is read whole and in pieces. If the config names windows or the like, a longer text is read in pieces
    of two sizes, with no more tokens at a time than requested, so that a trial never needs the memory that pieces save.
    The model may be patched between calls; `refused` is the reason that it is only run whole with its current patch.
    `score` returns the losses of a text of shape (n,), read in such pieces or (`None`) whole: shape (n - 1,).
    """

    def __init__(
        self, model: nn.Module, ids: Tensor, score: Callable[[Tensor, Pieces | None], Tensor]
    ) -> None:
        self._model, self._score = model, score
        self._alphabet = ids.unique().cpu()
        self._state: Any = None
        self._trials: dict[tuple[int, int, int], Pieces | None] = {}
        self.refused: str | None = None

    def pieces(self, size: int, tokens: int) -> Pieces | None:
        """Return the settings for a text of so many tokens; `None`: only whole, which is logged with the reason.

        They depend on the model, its patch and the two lengths alone, so that all processes of a run agree.
        """
        if len(Pieces(size).bounds(tokens)) < 2:
            return None
        state = state_of(self._model)
        if state is not self._state:
            self._state, self._trials, self.refused = state, {}, None
        if self.refused is not None:
            return None
        short = _at_most(tokens, max(LEAST_PROBE, min(size, LONGEST_PIECE)))
        reach = min(_reach(self._model), LONGEST_PROBE // 2)
        long = max(2 * reach, reach + 2 * min(size, LONGEST_PIECE)) if reach else short
        key = size, short, _at_most(tokens, long)
        if key not in self._trials:
            self._trials[key] = self._find(*key)
        return self._trials[key]

    def _find(self, size: int, short: int, long: int) -> Pieces | None:
        """Return the first settings that agree with one forward over `short` tokens, and with others over `long`."""
        part = max(LEAST, min(size, 2 * short // 5))
        longest = min(size, LONGEST_PIECE)
        other = longest - longest // 3 if longest > LEAST else LEAST + 1
        moving = "what it computes for a token depends on how much text follows"
        refused = moving if movement(self._model)[0] else ""
        for settings in () if refused else self._settings():
            try:
                self._compare(short, Pieces(part, **settings), None)
                if long > short:
                    self._compare(long, Pieces(longest, **settings), Pieces(other, **settings))
            except _RefusedError as error:
                refused = refused or str(error)
            else:
                return Pieces(size, **settings)
        self.refused = refused
        logger.warning(
            "%s cannot be prefilled in pieces: %s. Its texts are run whole.",
            type(unwrap(self._model)).__name__,
            refused,
        )
        return None

    def _settings(self) -> list[dict[str, Any]]:
        """Return the settings to try: those of most models, with positions, with a cache; first without masks."""
        model: Any = unwrap(self._model)
        parameters, config = inspect.signature(model.forward).parameters, _text_config(model)
        settings: list[dict[str, Any]] = [{}]
        if "position_ids" in parameters:
            settings.append({"positions": True})
        if "past_key_values" in parameters and config is not None:
            settings.append({"cache": partial(DynamicCache, config=config)})
        name = getattr(config, "_attn_implementation", None) or "eager"
        if native_implementation(name) != "sdpa":
            return settings
        return [*({**each, "config": config} for each in settings), *settings]

    def _compare(self, tokens: int, pieces: Pieces, other: Pieces | None) -> None:
        draw = torch.Generator().manual_seed(0)
        ids: Tensor = self._alphabet[torch.randint(len(self._alphabet), (tokens,), generator=draw)]
        try:
            losses = self._score(ids, pieces)
            expected = self._score(ids, other)
        except _RefusedError:
            raise
        except Exception as error:  # whatever a family's code raises when it meets a cache
            if is_out_of_memory(error):
                raise
            raise _RefusedError(f"{type(error).__name__}: {one_line(error)}") from error
        seams = {begin for each in (pieces, other) if each for begin, _ in each.bounds(tokens)}
        off = disagreement(losses, expected, sorted(seams - {0}))
        dtype = rounding_dtype(self._model)
        if off > (SAME if dtype in (torch.float32, torch.float64) else SAME_HALF):
            against = "one forward" if other is None else f"pieces of {other.size:,} tokens"
            raise _RefusedError(
                f"in pieces of {pieces.size:,} tokens its losses are {off:.2g} nats a token off those of {against}"
            )


def disagreement(pieces: Tensor, whole: Tensor, seams: list[int]) -> float:
    """Return how far losses in pieces are from those of one forward, shape (n - 1,), in nats a token.

    The larger of two means of absolute differences: over all tokens that are predicted behind the first seam (a token
    at which a piece begins), and a quarter of that over the few right behind each seam. Equal infinities do not differ.
    """
    off = (pieces - whole).abs()
    off[(pieces == whole) | (pieces.isnan() & whole.isnan())] = 0.0
    off = off.nan_to_num(torch.inf, torch.inf)
    # The token at index i has its loss at i - 1, and is predicted from the hidden state at i - 1.
    near = torch.cat([off[seam : seam + _NEAR] for seam in seams])
    return max(float(off[seams[0] :].mean()), float(near.mean()) / 4)


def _reach(model: nn.Module) -> int:
    """Return the largest window, chunk or top-k of the text config, in tokens."""
    config = _text_config(unwrap(model))
    fields = {} if config is None else config.to_dict()
    values = [
        number
        for name, value in fields.items()
        if _REACH.search(name)
        for number in (value if isinstance(value, list | tuple) else [value])
    ]
    return max((number for number in values if type(number) is int), default=0)


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None


def _at_most(tokens: int, requested: int) -> int:
    """Return the requested length, or, for a shorter text, a power of two: many lengths then share few trials."""
    return requested if requested <= tokens else 1 << (tokens.bit_length() - 1)
