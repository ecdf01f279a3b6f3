"""Biases: methods that add to the attention scores a function of the distance of query and key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import Method, seam_of, switch

if TYPE_CHECKING:
    from torch import Tensor

Weights = Mapping[str, "Tensor"]
"""The parameters of a method by name, as `initial` returns them, trained or not."""


@dataclass(frozen=True, kw_only=True)
class _Bias(Method):
    """A method that acts on the scores and replaces the model's rotation unless `keep_rope`."""

    kind = "biases"
    seam = "bias"
    needs = "training"
    follows_text = True
    beside = ("query",)
    beside_kept: ClassVar[tuple[str, ...]] = ("rotary", "attention", "query")

    keep_rope: bool = field(default=False, metadata=switch())

    @property
    def reads_rotation(self) -> bool:
        return False

    def check_beside(self, others: Sequence[Method]) -> None:
        turning = [other.name for other in others if seam_of(other) not in self.beside]
        if turning and not self.keep_rope:
            way = "name one of them"
            if all(seam_of(each) in self.beside_kept and "bias" in each.beside for each in others):
                way = "keep_rope=True gives both"
            raise PosencError(
                f"{self.name} drops the rotation that {', '.join(turning)} changes: {way}."
            )


@dataclass(frozen=True, kw_only=True)
class DistanceBias(_Bias):
    """A bias per head, added to `q.k * scaling` before the softmax; the model's rotation is dropped.

    To write one, override `bias`, and `initial` if there is something to train.

    In an encoder (`bidirectional`), the distance is `|m - n|`.

    Attributes:
        trainable: True if `initial` returns parameters to train.
        of_query: True if the bias depends on the query's position too, and not on the distance alone.

    Args:
        keep_rope: Keep the model's rotation beside the bias. A factor that the model has on cos and sin (YaRN's)
            stays in either case.
    """

    of_query: ClassVar[bool] = False

    def parameters_for(
        self, heads: int, key_heads: int, head_dim: int, original: int
    ) -> dict[str, Tensor]:
        return self.initial(heads, original)

    def initial(self, heads: int, original: int) -> dict[str, Tensor]:
        """Return the parameters to train, float32, at the paper's own initial values; none by default.

        Random ones come from torch's global generator, as those of `torch.nn` do.

        Args:
            heads: Query heads H.
            original: The original context length L, in tokens.
        """
        return {}

    def bias(
        self,
        distance: Tensor,
        heads: int,
        parameters: Weights,
        query_position: Tensor | None = None,
    ) -> Tensor:
        """Return the bias, shape (heads, *distance.shape), of the dtype of `distance` or of the parameters.

        Args:
            distance: `m - n >= 0`, a floating tensor of any shape.
            heads: Query heads H.
            parameters: Those that `initial` returned, trained or not.
            query_position: The position m, of a shape that broadcasts with `distance`; only where `of_query`.
        """
        raise NotImplementedError

    def horizon(self, drop: Tensor, heads: int, parameters: Weights | None = None) -> Tensor | None:
        """Return the distance beyond which the bias lies below `-drop`, per head; `None` if unknown.

        The engine leaves out keys whose share of the softmax is then provably nothing.

        Args:
            drop: Shape (heads,), at least 0.
            heads: Query heads H.
            parameters: Those of `bias`; `None` for a method that has none.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class RelativeKeys(_Bias):
    """A learned embedding `E_r` per distance, beside the keys: `((q + u).k + (q + v).E_r) * scaling`.

    Unlike a `DistanceBias` it depends on the query's content. To write one, override `initial` and
    `relative`, and `content_bias` and `position_bias` where there are u and v.

    Args:
        keep_rope: Keep the model's rotation beside the embeddings.
    """

    trainable = True
    beside_kept = ("rotary",)

    @property
    def reads_rotation(self) -> bool:
        return self.keep_rope  # the embeddings meet the query as it was before the rotation

    def check_beside(self, others: Sequence[Method]) -> None:
        super().check_beside(others)
        if self.keep_rope and any(seam_of(other) not in self.beside_kept for other in others):
            raise PosencError(
                f"{self.name} with keep_rope=True takes a static frequency method (yarn, ...) beside it, and no other."
            )

    def parameters_for(
        self, heads: int, key_heads: int, head_dim: int, original: int
    ) -> dict[str, Tensor]:
        return self.initial(heads, head_dim, original)

    def initial(self, heads: int, head_dim: int, original: int) -> dict[str, Tensor]:
        """Return the parameters to train, float32; at their initial values they add nothing to the scores.

        Args:
            heads: Query heads H.
            head_dim: Width of a head, in features.
            original: The original context length L, in tokens.
        """
        raise NotImplementedError

    def relative(self, distance: Tensor, heads: int, head_dim: int, parameters: Weights) -> Tensor:
        """Return the embeddings `E_r`, shape (heads, *distance.shape, head_dim), or 1 for heads that share.

        Args:
            distance: `r = m - n >= 0`, a floating tensor of any shape.
            heads: Query heads H.
            head_dim: Width of a head, in features.
            parameters: Those that `initial` returned, trained or not.
        """
        raise NotImplementedError

    def content_bias(self, parameters: Weights) -> Tensor | None:
        """Return u, shape (heads, head_dim), added to the query that meets the key; or `None`."""
        return None

    def position_bias(self, parameters: Weights) -> Tensor | None:
        """Return v, shape (heads, head_dim), added to the query that meets `E_r`; or `None`."""
        return None

    def constant_from(self) -> int | None:
        """Return the distance from which all embeddings are the same; `None`: there is none."""
        return None


def per_head(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per head, shape (heads,), as (heads, 1, ..., 1) to broadcast with (heads, *like.shape)."""
    return values.reshape(-1, *(1,) * like.dim())
