"""Jet-Long: a near window as trained, and far positions compressed by a factor of the text's length."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import Band, GrowingBands, same
from hf_posenc.methods.base import count, real


@dataclass(frozen=True, kw_only=True)
class JetLong(GrowingBands):
    """A near window and a far factor that follows the text (arXiv 2607.07740).

    Fewer than w tokens back, the relative position is `m - n`, as trained. From there it is `w + (m - n - w) / s`. With
    N tokens, `s = max(1, (N - 1 - w) / (L - 1 - w))`: the first key has the farthest trained position for the last
    query, L - 1, and no pair has a farther one. A text of at most L tokens is read as unpatched.

    The authors published no code. Choices of this package: one factor for all pairs of frequencies, no rounding of
    positions, w half of the original context, and N by buckets of each query's own position.

    Args:
        window: w, the width of the near band in tokens; half of the original context by default.
    """

    name = "jet_long"
    summary = (
        "a near window as trained; beyond it positions divided by a factor of the text's length"
    )
    source = "arXiv 2607.07740"
    needs = "nothing"

    update: str = "row"
    window: int | None = field(default=None, metadata=count())

    def bands(self, original: int, length: int) -> tuple[Band, ...]:
        window = max(1, original // 2) if self.window is None else self.window
        if window >= original - 1:
            raise PosencError(
                f"{self.name}: window={window} leaves no trained positions for the far keys of a model of {original} "
                f"tokens. Give at most {original - 2}."
            )
        near = Band(query_position=same, key_position=same)
        if length <= original:
            return (near,)
        factor = (length - 1 - window) / (original - 1 - window)
        far = Band(
            query_position=lambda m: real(m) / factor + (window - window / factor),
            key_position=lambda n: real(n) / factor,
            least=window,
        )
        return replace(near, below=window), far
