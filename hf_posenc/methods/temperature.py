"""Temperature: a factor on the queries, by one of several published laws; most grow with the length of the text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import Method, choice, number, real
from hf_posenc.methods.yarn import mscale

if TYPE_CHECKING:
    from torch import Tensor


def log_n_factor(m: Tensor, original: int) -> Tensor:
    """Return `max(1, ln(m+1) / ln L)` for positions m, of their shape, float64 (float32 on MPS)."""
    # A trained length of one token would divide by zero and has no meaning.
    return ((real(m) + 1).log() / math.log(max(original, 2))).clamp(min=1.0)


@dataclass(frozen=True, kw_only=True)
class LogN(Method):
    """log n scaling (Su 2021, kexue.fm 8823): the query at m times `max(1, ln(m+1) / ln L)`.

    Softmax over n keys flattens as n grows; scores that grow with ln n keep the entropy of training.
    Nothing changes up to the original length L. The method has a seam of its own, beside all others but tables, and
    `shaw` and `transformer_xl` with `keep_rope`; `log_n=True` of bands and `law="log_n"` of `temperature` are the same.
    """

    name = "log_n"
    summary = "the query times max(1, ln(m+1) / ln L)"
    source = "Su 2021, kexue.fm 8823"
    needs = "nothing"
    seam = "query"
    follows_text = True

    def query_factor(self, m: Tensor, original: int) -> Tensor:
        return log_n_factor(m, original)


_KNOBS: dict[str, tuple[str, ...]] = {
    "log_n": (),
    "llama4": ("beta",),
    "ministral": ("beta",),
    "power": ("beta",),
    "yarn": ("scale",),
    "ssmax": (),
    "constant": ("factor",),
}
LAWS = tuple(_KNOBS)
"""The laws of `Temperature`."""


@dataclass(frozen=True, kw_only=True)
class Temperature(Method):
    """A factor on the query at m, which sharpens attention over more keys than in training, by a law.

    | law | factor | source |
    |---|---|---|
    | `log_n` | `max(1, ln(m+1) / ln L)` | Su 2021, kexue.fm 8823 |
    | `llama4` | `1 + beta ln(1 + floor((m+1) / L))` | Llama 4 in transformers |
    | `ministral` | `1 + beta ln(1 + floor(m / L))` | Ministral 3 and Mistral 4 in transformers |
    | `power` | `(1 + (m+1) / L)^beta` | Beam in transformers |
    | `yarn` | `max(1, 0.1 ln(N / L) + 1)` | arXiv 2309.00071, sec. 3.4; Qwen2.5-1M in vLLM |
    | `ssmax` | `s ln(m+1)`, s learned for each head | arXiv 2501.19399, eq. 4 |
    | `constant` | `factor` | arXiv 2512.12167 (DroPE) |

    The method has a seam of its own and composes as `log_n` does. A model that scales its queries already
    keeps one factor: `patch_model` refuses a second one, or puts it in the place of the first with
    `replace=True`.

    Args:
        law: The law; by default `yarn` where a scale is given, else `log_n`.
        beta: The growth of `llama4`, `ministral` and `power`; 0.1 by default.
        scale: `N / L` of the law `yarn`, the same for every query; by default N = m+1.
        factor: The factor of the law `constant`.
    """

    name = "temperature"
    aliases = ("attention_temperature",)
    summary = "the query times a factor by a law; most grow with m"
    source = "arXiv 2501.19399, 2309.00071; Llama 4; Ministral 3"
    needs = "nothing (ssmax: fine-tuning)"
    trainable_with = 'with law="ssmax"'
    seam = "query"
    follows_text = True

    law: str | None = field(default=None, metadata=choice(*LAWS))
    beta: float | None = field(default=None, metadata=number(0))
    scale: float | None = field(default=None, metadata=number(1))
    factor: float | None = field(default=None, metadata=number(0, above=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        own = _KNOBS[self.law_in_force]
        for knob in ("beta", "scale", "factor"):
            if getattr(self, knob) is not None and knob not in own:
                takes = f"Its knob is {own[0]}" if own else "It has no knob"
                raise PosencError(
                    f"{self.name}: the law {self.law_in_force} reads no {knob}. {takes}."
                )
        if self.law == "constant" and self.factor is None:
            raise PosencError(f"{self.name}: the law constant needs factor=, a number above 0.")
        if self.law == "ssmax":
            object.__setattr__(self, "trainable", True)

    @property
    def law_in_force(self) -> str:
        """The law, also where none was named."""
        return str(self.law or ("log_n" if self.scale is None else "yarn"))

    def query_factor(self, m: Tensor, original: int) -> Tensor:
        import torch

        positions = real(m)
        law = self.law_in_force
        if law == "log_n":
            return log_n_factor(m, original)
        if law == "ssmax":
            return (positions + 1).log()
        if law == "constant":
            return torch.full_like(positions, self.factor or 1.0)
        if law == "yarn":
            if self.scale is not None:
                return torch.full_like(positions, float(mscale(self.scale)))
            return (0.1 * ((positions + 1) / original).log() + 1).clamp(min=1.0)
        beta = 0.1 if self.beta is None else self.beta
        if law == "power":
            return (beta * ((positions + 1) / original).log1p()).exp()
        tokens = positions + (law == "llama4")
        return 1 + beta * (tokens / original).floor().log1p()

    def parameters_for(
        self, heads: int, key_heads: int, head_dim: int, original: int
    ) -> dict[str, Tensor]:
        """Return s of `ssmax`, shape (heads,), float32, at `L / sum_{n=1..L} ln n`: a mean factor of 1 over L tokens.

        That is 0.168 for the paper's 1,024 tokens.
        """
        import torch

        if self.law != "ssmax":
            return {}
        length = max(original, 2)
        return {"query_scale": torch.full((heads,), length / math.lgamma(length + 1))}
