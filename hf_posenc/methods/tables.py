"""Tables with a row for each position, made longer: learned ones by their rows, formula tables by their formula.

`p_m` is the row of position m, `L` the trained length, `s` the scale. Rows are computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import Method, choice, count, number

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_WHOLE = 1e-9  # a quotient m / s this close below a whole number is one


@dataclass(frozen=True, kw_only=True)
class TableMethod(Method):
    """A method that makes a table of positions longer.

    Attributes:
        formula: True for tables whose rows are sines and cosines of the position; False for learned ones.
        keeps_short: True if the rows of the first L positions do not change.

    Args:
        scale: Target context as a multiple `s` of the original one.
    """

    kind: ClassVar[str] = "tables"
    seam: ClassVar[str] = "table"
    needs: ClassVar[str] = "fine-tuning"
    beside: ClassVar[tuple[str, ...]] = ()
    for_rotary: ClassVar[bool] = False
    formula: ClassVar[bool] = False
    keeps_short: ClassVar[bool] = False

    scale: float = field(metadata=number(1))

    @property
    def by_request(self) -> bool:
        """True if texts of at most L tokens keep the original table."""
        return False

    def check(self, trained: int, length: int) -> None:
        """Raise for a length that the method does not reach from the trained one, both in tokens."""

    def rows(self, table: Tensor, length: int) -> Tensor:
        """Return the rows of positions 0 to length - 1, shape (length, d), float64.

        Args:
            table: The rows of positions 0 to L - 1, shape (L, d), float64.
            length: The new length, in tokens.
        """
        raise NotImplementedError

    def scaled(self, length: int, device: torch.device) -> Tensor:
        """Return the positions `m / s` for m below a length, float64."""
        import torch

        return torch.arange(length, dtype=torch.float64, device=device) / self.scale


def _between(table: Tensor, places: Tensor, *, beyond: bool = False) -> Tensor:
    """Return linear interpolations of rows at real places.

    Past the last row it is repeated or, if `beyond`, the last step goes on.
    """
    import torch

    low = (places + _WHOLE).floor().long().clamp(max=len(table) - 1)
    weight = (places - low)[:, None]
    high = (low + 1).clamp(max=len(table) - 1)
    steps = table[high] - table[low]
    if beyond and len(table) > 1:
        steps = steps.where((high > low)[:, None], table[-1] - table[-2])
    return torch.where(weight > _WHOLE, table[low] + weight * steps, table[low])


@dataclass(frozen=True, kw_only=True)
class Interpolate(TableMethod):
    """Linear interpolation of a learned table: the row of m is that of position `m / s`.

    `(1 - w) p_a + w p_(a+1)` with `a = floor(m / s)` and `w = m / s - a`; past the last row it is repeated. With
    `update="request"`, texts of at most L tokens keep the original rows, as in LongEmbed (Zhu et al. 2024,
    arXiv 2404.12096).

    Args:
        update: `"static"`: one longer table for all texts, which plain transformers loads. `"request"`: the original
            table for a text of at most L tokens, the longer one for others.
    """

    name = "interpolate"
    aliases = ("linear_interpolation",)
    summary = "rows of a learned table interpolated at m/s"
    source = "Zhu et al. 2024, arXiv 2404.12096"
    needs = "nothing in encoders (fine-tuning helps), fine-tuning in decoders"

    update: str = field(default="static", metadata=choice("static", "request"))

    @property
    def by_request(self) -> bool:
        return self.update == "request"

    def rows(self, table: Tensor, length: int) -> Tensor:
        return _between(table, self.scaled(length, table.device))


@dataclass(frozen=True, kw_only=True)
class Hierarchical(TableMethod):
    """Hierarchical decomposition of a learned table: positions as two digits of base L, up to `L ** 2` tokens.

    The row of `i L + j` is `a u_i + (1 - a) u_j` with `u_i = (p_i - a p_0) / (1 - a)` (Su 2020, kexue.fm 7947), which
    is `p_j` for `i = 0`: texts of at most L tokens do not change.

    Args:
        alpha: The weight `a` of the leading digit, above 0 and below 1 but not 1/2, where digits could be swapped.
    """

    name = "hierarchical"
    summary = "positions as two digits of base L, up to L^2 tokens; the first L rows kept"
    source = "Su 2020, kexue.fm 7947; bert4keras"
    needs = "fine-tuning helps"
    keeps_short = True

    alpha: float = field(default=0.4, metadata=number(0, above=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha >= 1 or self.alpha == 0.5:
            raise PosencError(f"{self.name}: alpha={self.alpha} must be in (0, 1) and not 0.5.")

    def check(self, trained: int, length: int) -> None:
        if length > trained**2:
            raise PosencError(
                f"{self.name} writes positions as two digits of base {trained}, which reach {trained**2:,} tokens, not "
                f"{length:,}. Give a scale of at most {trained}."
            )

    def rows(self, table: Tensor, length: int) -> Tensor:
        import torch

        trained = len(table)
        self.check(trained, length)
        digits = (table - self.alpha * table[:1]) / (1 - self.alpha)
        m = torch.arange(length, device=table.device)
        new = self.alpha * digits[m // trained] + (1 - self.alpha) * digits[m % trained]
        return torch.cat((table[:length], new[trained:]))


@dataclass(frozen=True, kw_only=True)
class Group(TableMethod):
    """Grouped positions of a learned table: `p_floor(m / s)`, the same row for s neighbours.

    LongEmbed's grouped positions (Zhu et al. 2024, arXiv 2404.12096).
    """

    name = "group"
    aliases = ("grouped_positions",)
    summary = "s neighbours share a row of a learned table"
    source = "Zhu et al. 2024, arXiv 2404.12096"
    needs = "nothing in encoders (fine-tuning helps), fine-tuning in decoders"

    def rows(self, table: Tensor, length: int) -> Tensor:
        places = self.scaled(length, table.device) + _WHOLE
        return table[places.floor().long().clamp(max=len(table) - 1)]


@dataclass(frozen=True, kw_only=True)
class Tile(TableMethod):
    """A learned table repeated: `p_(m mod L)` (Longformer: Beltagy et al. 2020, arXiv 2004.05150, sec. 5).

    The first L rows do not change. The paper copied 512 trained rows eight times as the start of further training.
    """

    name = "tile"
    aliases = ("recurrent_positions",)
    summary = "a learned table repeated; the first L rows kept"
    source = "Beltagy et al. 2020, arXiv 2004.05150"
    keeps_short = True

    def rows(self, table: Tensor, length: int) -> Tensor:
        import torch

        return table[torch.arange(length, device=table.device) % len(table)]


@dataclass(frozen=True, kw_only=True)
class Stretch(TableMethod):
    """Knowledge-preserved stretching of a learned table (Long-CLIP: Zhang et al. 2024, arXiv 2403.15378).

    The first `keep` rows stay. The others are interpolated by `t = (s L - keep) / (L - keep)`, so that the table
    reaches s L tokens: the row of `keep + m` is that of position `keep + m / t`. Past the last row, its last step goes
    on, as in the authors' code. Their 77 to 248 tokens (t = 4) are `target_length=248`.

    Args:
        keep: The first rows that stay, those that were trained most.
    """

    name = "stretch"
    aliases = ("keep_and_stretch", "long_clip")
    summary = "the first rows of a learned table kept, the others interpolated"
    source = "Zhang et al. 2024, arXiv 2403.15378"

    keep: int = field(default=20, metadata=count(0))

    def rows(self, table: Tensor, length: int) -> Tensor:
        import torch

        if self.keep > len(table) - 2:
            raise PosencError(
                f"{self.name}: keep={self.keep} leaves no step between the {len(table)} positions to stretch. Give a "
                "smaller one."
            )
        rest = table[self.keep :]
        stretched = (length - self.keep) / len(rest)
        places = (
            torch.arange(length - self.keep, dtype=torch.float64, device=table.device) / stretched
        )
        return torch.cat((table[: self.keep], _between(rest, places, beyond=True)))


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(TableMethod):
    """A sinusoidal table (Vaswani et al. 2017, arXiv 1706.03762, sec. 3.5) computed anew for a longer text.

    With `by="position"` positions are divided by the scale, `sin(w_i m / s)` and `cos(w_i m / s)`, as in position
    interpolation (arXiv 2306.15595). With `by="base"`, `w_i' = w_i s^(-i / (n-1))` for n pairs: the NTK-aware base,
    which keeps the fastest pair and divides the slowest by s. Rows are never interpolated: a mean of sines is not one.

    Args:
        by: What is scaled: `"position"` or `"base"`.
    """

    name = "sinusoidal"
    aliases = ("sinusoids",)
    summary = "a sinusoidal table computed anew at m/s, or for a larger base"
    source = "Vaswani et al. 2017, arXiv 1706.03762; Chen et al. 2023, arXiv 2306.15595"
    formula = True

    by: str = field(default="position", metadata=choice("position", "base"))

    def angles(self, frequencies: Sequence[float] | Tensor, length: int, start: float) -> Tensor:
        """Return the angles of positions 0 to length - 1, shape (length, n), float64.

        Args:
            frequencies: `w_i` of the n pairs, the fastest first, in radians per token.
            length: The new length, in tokens.
            start: The number by which the formula counts position 0.
        """
        import torch

        w = torch.as_tensor(frequencies, dtype=torch.float64)
        m = torch.arange(length, dtype=torch.float64)
        if self.by == "position":
            return (start + m / self.scale)[:, None] * w
        slowing = self.scale ** -(torch.arange(len(w), dtype=torch.float64) / max(len(w) - 1, 1))
        return (start + m)[:, None] * (w * slowing)
