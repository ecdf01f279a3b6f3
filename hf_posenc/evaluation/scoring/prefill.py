"""A prefill in pieces, over a cache: whether it gives the numbers of one forward is tried before it is used.

In most families it does. Some keep no cache, some forget a state when more than one token follows it (Mamba, Zamba),
some count positions anew (Bamba), some take the first piece for the prompt (Unlimited-OCR). Nothing in their
interface tells.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from hf_posenc.errors import one_line
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.state import state_of

# A text in pieces: where they begin and end, and what carries the past from one to the next.


CACHES = ("past_key_values", "cache_params", "state")
"""What families call their cache, as an output and as an argument."""

LEAST = 2
"""Tokens in a piece. A single one would be a decoding step, for which some families have another formula."""


class NoCacheError(Exception):
    """A forward returned no cache."""


@dataclass(frozen=True)
class Pieces:
    """How to run a text in pieces.

    Attributes:
        size: Tokens in a piece.
        positions: Whether the model must be told where a piece stands; most find out from the cache.
        cache: Makes the cache that the first piece must be given; most models make one themselves.
    """

    size: int
    positions: bool = False
    cache: Callable[[], Cache] | None = None

    def bounds(self, tokens: int) -> list[tuple[int, int]]:
        """Where each piece begins and ends. A last token that would be alone belongs to the piece before."""
        edges = [*range(0, tokens, self.size), tokens]
        if len(edges) > 2 and edges[-1] - edges[-2] < LEAST:
            del edges[-2]
        return list(itertools.pairwise(edges))

    def arguments(self, output: Any, windows: Tensor, begin: int, end: int) -> dict[str, Any]:
        """What the forward of a piece is given beside its token ids.

        Args:
            output: What the forward of the piece before returned; `None` for the first.
            windows: Token ids, shape (windows, n).
            begin: The piece's first token.
            end: One past its last.

        Raises:
            NoCacheError: The piece before left no cache.
        """
        given: dict[str, Any] = {"use_cache": True}
        if begin:
            names = (name for name in CACHES if getattr(output, name, None) is not None)
            name = next(names, None)
            if name is None:
                raise NoCacheError
            given[name] = getattr(output, name)
        elif self.cache is not None:
            given["past_key_values"] = self.cache()
        if self.positions:
            places = torch.arange(begin, end, device=windows.device)
            given["position_ids"] = places.expand(len(windows), -1)
        return given


logger = logging.getLogger(__name__)

LEAST_PROBE = 64
LONGEST_PIECE = 1024
LONGEST_PROBE = 8192
"""Tokens of the texts that are tried, and of their pieces."""

SAME = 1e-3
SAME_HALF = 0.1
"""Nats a token, on average, by which pieces may differ from one forward: rounding, as the worst families amplify it."""

_NEAR = 4  # tokens behind a seam, where a lost state shows most
_REACH = re.compile(r"window|chunk|topk|compress|budget|local_attention|block_size")


class Prefill:
    """Finds out how a model can be run in pieces, if it can.

    A random text is read whole and in pieces, and where the config names windows or the like, a longer one in pieces of
    two sizes: no more tokens at a time than the pieces asked for, so that trying them never needs what they save.

    Args:
        model: A causal language model; it may be patched between calls.
        ids: Some token ids that the model takes, shape (n,).
        score: Gives the losses of a text, shape (n,), read in such pieces or (`None`) whole: shape (n - 1,).

    Attributes:
        refused: Why the model, as it is patched, is only run whole, if so.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Tensor,
        score: Callable[[Tensor, Pieces | None], Tensor],
    ) -> None:
        self._model, self._score = model, score
        self._alphabet = ids.unique().cpu()
        self._state: Any = None
        self._known: dict[tuple[int, int, int], Pieces | None] = {}
        self.refused: str | None = None

    def pieces(self, size: int, tokens: int) -> Pieces | None:
        """How to run a text in pieces; `None`: only whole, which is logged with the reason.

        The answer depends on the model, on what is patched in and on the two lengths, not on the text, so that all
        processes of a run come to the same.

        Args:
            size: Tokens in a piece.
            tokens: Tokens of the text.
        """
        if len(Pieces(size).bounds(tokens)) < 2:
            return None
        state = state_of(self._model)
        if state is not self._state:
            self._state, self._known, self.refused = state, {}, None
        if self.refused is not None:
            return None
        short = _at_most(tokens, max(LEAST_PROBE, min(size, LONGEST_PIECE)))
        reach = min(_reach(self._model), LONGEST_PROBE // 2)
        long = max(2 * reach, reach + 2 * min(size, LONGEST_PIECE)) if reach else short
        key = size, short, _at_most(tokens, long)
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, size: int, short: int, long: int) -> Pieces | None:
        if Candidate.parse("none").checked(self._model).moves:
            reason = "what it computes for a token depends on how much text follows"
        else:
            try:
                return self._try(size, short, long)
            except _RefusedError as error:
                reason = str(error)
        self.refused = reason
        logger.warning(
            "%s cannot be prefilled in pieces: %s. Its texts are run whole.",
            type(unwrap(self._model)).__name__,
            reason,
        )
        return None

    def _try(self, size: int, short: int, long: int) -> Pieces:
        """The first way in pieces that agrees with one forward over `short` tokens, and with itself over `long`."""
        part = max(LEAST, min(size, 2 * short // 5))
        refused: _RefusedError | None = None
        for way in self._ways():
            try:
                self._compare(short, way(part), None)
                if long > short:
                    longest = min(size, LONGEST_PIECE)
                    other = longest - longest // 3 if longest > LEAST else LEAST + 1
                    self._compare(long, way(longest), way(other))
            except _RefusedError as error:
                refused = refused or error
            else:
                return way(size)
        assert refused is not None
        raise refused

    def _ways(self) -> list[Callable[[int], Pieces]]:
        """As most models take pieces; told where they stand; given a cache."""
        model: Any = unwrap(self._model)
        taken = inspect.signature(model.forward).parameters
        ways: list[Callable[[int], Pieces]] = [Pieces]
        if "position_ids" in taken:
            ways.append(partial(Pieces, positions=True))
        if "past_key_values" in taken and _text_config(model) is not None:
            ways.append(partial(Pieces, cache=partial(DynamicCache, config=_text_config(model))))
        return ways

    def _compare(self, tokens: int, way: Pieces, other: Pieces | None) -> None:
        ids = self._text(tokens)
        try:
            losses = self._score(ids, way)
            expected = self._score(ids, other)
        except NoCacheError as error:
            raise _RefusedError("it returns no cache") from error
        except (RuntimeError, MemoryError) as error:
            if _out_of_memory(error):
                raise
            raise _RefusedError(_said(error)) from error
        except Exception as error:  # whatever a family's code raises when it meets a cache
            raise _RefusedError(_said(error)) from error
        seams = {begin for pieces in (way, other) if pieces for begin, _ in pieces.bounds(tokens)}
        off = disagreement(losses, expected, sorted(seams - {0}))
        dtype = next(self._model.parameters()).dtype
        if off > (SAME if dtype in (torch.float32, torch.float64) else SAME_HALF):
            against = "one forward" if other is None else f"pieces of {other.size:,} tokens"
            raise _RefusedError(
                f"in pieces of {way.size:,} tokens its losses are {off:.2g} nats a token off those of {against}"
            )

    def _text(self, tokens: int) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        text: Tensor = self._alphabet[torch.randint(len(self._alphabet), (tokens,), generator=draw)]
        return text


class _RefusedError(Exception):
    """A prefill in pieces is not what one forward is, for the reason that it says."""


def disagreement(pieces: Tensor, whole: Tensor, seams: list[int]) -> float:
    """How far losses in pieces are from those of one forward, in nats a token.

    Args:
        pieces: Losses of tokens 1 to n - 1, shape (n - 1,).
        whole: The same of one forward.
        seams: Tokens at which a piece other than the first begins.

    Returns:
        The larger of two means of absolute differences: over all tokens that are predicted behind the first seam, and
        a quarter of that over the few right behind each seam. Equal infinities do not differ.
    """
    off = (pieces - whole).abs()
    off[(pieces == whole) | (pieces.isnan() & whole.isnan())] = 0.0
    off = off.nan_to_num(torch.inf, torch.inf)
    # The token at index i has its loss at i - 1, and is predicted from the hidden state at i - 1.
    near = torch.cat([off[seam : seam + _NEAR] for seam in seams])
    return max(float(off[seams[0] :].mean()), float(near.mean()) / 4)


def _reach(model: nn.Module) -> int:
    """The largest window, chunk or top-k of the text config, in tokens."""
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


def _at_most(tokens: int, wanted: int) -> int:
    """The length wanted, or, of a shorter text, a power of two: so that texts of many lengths have few."""
    return wanted if wanted <= tokens else 1 << (tokens.bit_length() - 1)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _out_of_memory(error: Exception) -> bool:
    from hf_posenc.evaluation.scoring.memory import is_out_of_memory  # which imports the scorer

    return is_out_of_memory(error)
