"""Windows: only near keys are read, and perhaps the first few of the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import Band, RotaryBands
from hf_posenc.methods.base import count
from hf_posenc.methods.rerope import ReRoPE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class _WithSinks(RotaryBands):
    """A window, and the first keys of the text beside it."""

    follows_text = True

    sinks: int

    def bands(self, original: int) -> tuple[Band, ...]:
        return self.near(original), self.far(original, keys=self.sinks)


@dataclass(frozen=True, kw_only=True)
class LMInfinite(_WithSinks, ReRoPE):
    """LM-Infinite (Han et al. 2023, arXiv 2308.16137): a window and the first keys, at a bounded distance.

    A key less than the window away is read at its distance, one of the first few at `min(m - n, w)`, as
    in ReRoPE. All other keys are masked.

    Args:
        window: Tokens w that are read as usual; the original context by default.
        sinks: First keys that every query reads.
    """

    name = "lm_infinite"
    summary = "a window, and the first keys at the window's distance"
    source = "Han et al. 2023, arXiv 2308.16137"

    sinks: int = field(default=10, metadata=count())

    def near_window(self, original: int) -> int:
        return original if self.window is None else self.window


@dataclass(frozen=True, kw_only=True)
class AttentionSinks(_WithSinks):
    """Attention sinks, StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): positions inside the cache.

    The text counts as its first keys followed by the last `window` ones: a near key is read at its
    distance, the first key n at the distance `min(m, sinks + window - 1) - n`.

    Args:
        window: Last keys that are read, the query's own among them; `L - sinks` by default.
        sinks: First keys that every query reads.
    """

    name = "attention_sinks"
    aliases = ("sinks", "streaming_llm")
    summary = "a window, and the first keys just before it"
    source = "Xiao et al. 2023, arXiv 2309.17453"

    sinks: int = field(default=4, metadata=count())

    def near_window(self, original: int) -> int:
        if self.window is not None:
            return self.window
        if self.sinks >= original:
            raise PosencError(
                f"{self.name}: sinks ({self.sinks}) leave no window in {original} tokens. Give fewer, or window=."
            )
        return original - self.sinks

    def query_position(self, m: Tensor, original: int) -> Tensor:
        return m.clamp(max=self.sinks + self.near_window(original) - 1)

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(RotaryBands):
    """Plain attention to the last keys only.

    It reads as far as the model was trained and can use nothing that lies farther back. A pretrained
    model may collapse once its first tokens have left the window (arXiv 2309.17453): `attention_sinks`
    keeps them.

    Args:
        window: Last keys that are read, the query's own among them; the original context by default.
    """

    name = "sliding_window"
    summary = "only the last keys are read"
    source = "Beltagy et al. 2020, arXiv 2004.05150"
    follows_text = True

    def near_window(self, original: int) -> int:
        return original if self.window is None else self.window

    def bands(self, original: int) -> tuple[Band, ...]:
        return (self.near(original),)
