"""What "perplexity at length L" means: the definitions, and the numbers that go with them.

One set of weights gives a different number under every definition, and methods rank differently too. So a protocol is
always named, and stored with every result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.measuring.statistics import RESAMPLES

DEFINITIONS = {
    "prefix": "the first L tokens of each document",
    "tail": "the same last {tail} tokens of each document, read with the L tokens that end there",
    "sliding": "windows of L tokens, {stride} apart; each scores the tokens that the one before it did not reach",
    "disjoint": "pieces of L tokens; every token once, read with what is in front of it in its piece",
    "longppl": "the key tokens of the first L tokens of each document, those that need far context (LongPPL)",
    "stream": "the documents as one stream, windows of L tokens {stride} apart; all tokens of every window",
}
PROTOCOLS = tuple(DEFINITIONS)
AGGREGATES = {
    "tokens": "every token weighs the same",
    "windows": "every window weighs the same, however many tokens it scores",
    "batches": "every batch of 32 windows weighs the same, the last and smaller one too",
    "documents": "every document weighs the same, however many tokens it has",
    "hf-docs": "windows weigh by their tokens, less one in every window but the first",
}
TAIL_TOKENS = 1024
STRIDE = 256
BUCKETS = 64
MIN_LENGTH = 8


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run, apart from the model, the methods and the documents.

    Attributes:
        lengths: Context lengths in tokens, special tokens in front included, ascending.
        protocols: Names from `PROTOCOLS`.
        tail_tokens: The K of `tail`, in tokens; 0: `default_tail_tokens`.
        stride: Tokens from one window of `sliding` and `stream` to the next.
        windows_per_document: Of `tail`, so many windows per document, evenly spaced, their targets never overlapping
            (by default 1). Of `sliding`, so many of the full windows after the first (by default all, and the first).
        bos_windows: Which windows of `sliding` have the special tokens in front: `"every"` or `"first"`.
        read_last: Whether the last token of a `tail` window is read too, though nothing behind it is scored. Then L
            counts the tokens with the last target; otherwise those that come before it.
        joined: Concatenate the documents first; `stream` does in any case.
        aggregate: How losses become one number, from `AGGREGATES`.
        base: What is raised to the mean loss.
        min_tokens: Documents with fewer tokens are left out; `None`: the longest length, for `sliding` too, so that
            every length reads the same documents.
        buckets: Number of equal parts of the longest prefix whose losses are kept apart, for the curve by position.
        evaluator: The model that says which tokens are key tokens for `longppl`, and how: name and numbers.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.
        prefill: Tokens that are run at a time, the earlier ones' keys and values cached; `None`: all at once.
        batch: Windows of one document that are run at once, where they have the same shape.
        seed: Seed of the bootstrap.
        resamples: Number of bootstrap resamples.
        preset: The preset that these come from.

    Raises:
        PosencError: Lengths, protocols or numbers that do not go together.
    """

    lengths: tuple[int, ...]
    protocols: tuple[str, ...] = ("prefix", "tail")
    tail_tokens: int = 0
    stride: int = STRIDE
    windows_per_document: int | None = None
    bos_windows: str = "every"
    read_last: bool = True
    joined: bool = False
    aggregate: str = "tokens"
    base: float | None = None
    min_tokens: int | None = None
    buckets: int = BUCKETS
    evaluator: dict[str, Any] | None = None
    chunk: int | None = None
    prefill: int | None = None
    batch: int = 1
    seed: int = 0
    resamples: int = RESAMPLES
    preset: str | None = None

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise PosencError(f"Lengths are ascending and different, not {list(self.lengths)}.")
        if self.lengths[0] < MIN_LENGTH:
            raise PosencError(f"A length has at least {MIN_LENGTH} tokens, not {self.lengths[0]}.")
        others = [name for name in self.protocols if name not in PROTOCOLS]
        if others or not self.protocols:
            raise PosencError(f"Unknown protocol {', '.join(others)!r}: {', '.join(PROTOCOLS)}.")
        if len(set(self.protocols)) < len(self.protocols):
            raise PosencError(f"A protocol is named twice: {', '.join(self.protocols)}.")
        if self.aggregate not in AGGREGATES:
            raise PosencError(f"Unknown aggregate {self.aggregate!r}: {', '.join(AGGREGATES)}.")
        if self.bos_windows not in ("every", "first"):
            raise PosencError(f"bos_windows is every or first, not {self.bos_windows!r}.")
        if self.tail_tokens == 0:
            object.__setattr__(self, "tail_tokens", default_tail_tokens(self.lengths))
        if "tail" in self.protocols and not 1 <= self.tail_tokens < self.lengths[0]:
            raise PosencError(
                f"The tail has {self.tail_tokens} tokens, which must be fewer than the shortest length "
                f"({self.lengths[0]}): the same tokens are scored at every length. Give longer --lengths, or "
                f"--tail-tokens {default_tail_tokens(self.lengths)}."
            )
        if "longppl" in self.protocols and self.evaluator is None:
            raise PosencError(
                "longppl needs a model that says which tokens count: --longppl EVALUATOR."
            )
        self._check_stream()
        for name in ("stride", "windows_per_document", "min_tokens", "buckets", "chunk", "prefill"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PosencError(f"{name} is at least 1, not {value}.")
        for name, least in (("batch", 1), ("resamples", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise PosencError(f"{name} is at least {least}, not {getattr(self, name)}.")

    def _check_stream(self) -> None:
        """Refuses protocols that want the documents joined beside such that want them apart, or shorter ones."""
        apart = [name for name in self.protocols if name in ("prefix", "tail", "longppl")]
        if self.streams and apart:
            joins = "this preset" if self.joined else "stream"
            raise PosencError(
                f"{joins} joins the documents, and {' and '.join(apart)} need{'s' * (len(apart) == 1)} them one by "
                "one: measure them in two runs."
            )
        if (
            self.streams
            and len(self.protocols) > 1
            and "stream" in self.protocols
            and not self.joined
        ):
            raise PosencError(
                "stream joins the documents; the others do not: measure them in two runs."
            )
        if self.min_tokens is not None and apart and self.min_tokens < self.lengths[-1]:
            raise PosencError(
                f"min_tokens {self.min_tokens}: {' and '.join(apart)} need documents of the longest length "
                f"({self.lengths[-1]}), so that every length reads the same ones."
            )

    @property
    def streams(self) -> bool:
        """Whether the documents are joined."""
        return self.joined or "stream" in self.protocols

    @property
    def shortest_document(self) -> int:
        """Tokens that a document has at least, special tokens in front included."""
        if self.streams:
            return 1
        longest = self.lengths[-1] + (0 if self.read_last else 1)
        return longest if self.min_tokens is None else self.min_tokens

    def definition(self, protocol: str) -> str:
        """What a protocol scores, in one sentence."""
        text = DEFINITIONS[protocol].format(tail=f"{self.tail_tokens:,}", stride=f"{self.stride:,}")
        if self.windows_per_document is not None and protocol in ("tail", "sliding"):
            windows = f"{self.windows_per_document:,} evenly spaced window{'s' * (self.windows_per_document > 1)}"
            text += f"; {windows} of each document" + ", the first one left out" * (
                protocol == "sliding"
            )
        if self.joined and protocol != "stream":
            text += "; the documents as one stream"
        by_tokens = protocol == "longppl" and self.aggregate != "documents"
        if self.aggregate != "tokens" and not by_tokens:  # key tokens weigh the same in any window
            text += f"; {AGGREGATES[self.aggregate]}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return {
            **dataclasses.asdict(self),
            "lengths": list(self.lengths),
            "protocols": list(self.protocols),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """Reads what `to_dict` wrote."""
        lists = {name: tuple(values[name]) for name in ("lengths", "protocols")}
        return cls(**{**values, **lists})


def default_tail_tokens(lengths: Sequence[int]) -> int:
    """K = 1024, but at most half of the shortest length, so that every target has at least so much context."""
    return min(TAIL_TOKENS, min(lengths) // 2)


def default_lengths(original: int | None) -> tuple[int, ...]:
    """The original length times 1, 2, 4, 8, 16 up to 4,096 tokens, and three of them at least.

    Raises:
        PosencError: The original length is not known.
    """
    if original is None:
        raise PosencError("The model's config names no context length: give --lengths.")
    lengths = [original * factor for factor in (1, 2, 4, 8, 16)]
    return tuple(n for index, n in enumerate(lengths) if index < 3 or n <= 4096)


# Peers' own arithmetic: what to set to get their numbers, and what is wrong with them.


E_OF_LONGLORA = 2.71828
"""LongLoRA's eval.py writes e so."""


@dataclass(frozen=True)
class Preset:
    """A peer's own arithmetic.

    Attributes:
        source: Whose, and where it is written.
        settings: What it sets of `Settings`.
        bos: Its policy for special tokens.
        remark: What a reader must know of the number.
    """

    source: str
    settings: dict[str, Any]
    bos: str
    remark: str


PRESETS = {
    "yarn": Preset(
        "jquesnelle/yarn eval/perplexity.py --truncate (tables 1, 2, 6); with --protocol sliding, without it (table 4)",
        {"protocols": ("prefix",), "aggregate": "windows", "stride": 256},
        "always",
        "The paper's caption says sliding window, but eval.sh passes --truncate: one window per document. When it "
        "slides, the mean is over windows, so a first window of L tokens weighs as much as one of 256.",
    ),
    "pi": Preset(
        "Chen et al. 2023, arXiv 2306.15595, section 3.2, after Press et al. 2022 (no code was published)",
        {"protocols": ("sliding",), "stride": 256},
        "auto",
        "Whether the paper's windows begin with BOS is not stated; --bos decides.",
    ),
    "pose": Preset(
        "dwzhu-pku/PoSE src/eval_ppl.py",
        {"protocols": ("sliding",), "stride": 1024},
        "always",
        "YaRN's windows, each with BOS in front, weighted by their tokens.",
    ),
    "longlora": Preset(
        "dvlab-research/LongLoRA eval.py, copied by ChunkLlama ppl/test_ppl.py",
        {
            "protocols": ("stream",),
            "aggregate": "batches",
            "stride": 256,
            "base": E_OF_LONGLORA,
        },
        "never",
        "Every window scores all its tokens, those of the overlap again and again, so it is the mean over contexts of "
        "1 to L and no sliding window; windows cross from one book to the next; the last window is dropped; a batch's "
        "mean counts whole, that of the smaller last one too; e is 2.71828.",
    ),
    "su": Preset(
        "bojone/rerope eval_loss.py",
        {
            "protocols": ("tail",),
            "tail_tokens": 4096,
            "aggregate": "documents",
            "read_last": False,
        },
        "never",
        "Su reports the loss in nats, the logarithm of this perplexity. A longer document loses its special tokens.",
    ),
    "lm-eval": Preset(
        "EleutherAI/lm-evaluation-harness loglikelihood_rolling",
        {"protocols": ("disjoint",), "min_tokens": 1},
        "bos-or-eos",
        "Called rolling, but the pieces are disjoint: contexts run from 1 to L, but for the last piece, which reaches "
        "back. The harness reports it per word and per byte.",
    ),
    "hf-docs": Preset(
        "transformers docs/source/en/perplexity.md",
        {"protocols": ("sliding",), "joined": True, "aggregate": "hf-docs", "stride": 512},
        "never",
        "The count of every window is one too small but for the first: a mean of means, a little off.",
    ),
}


def preset_settings(name: str | None) -> tuple[dict[str, Any], str]:
    """What a preset sets, and its policy for special tokens.

    Raises:
        PosencError: There is no such preset.
    """
    if name is None:
        return {}, "auto"
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return {**PRESETS[name].settings, "preset": name}, PRESETS[name].bos
