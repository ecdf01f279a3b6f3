"""Peers' own arithmetic: what to set to get their numbers, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import unknown

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
