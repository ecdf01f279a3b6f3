"""LongPPL: perplexity over the tokens that need a long context (Fang et al. 2024, arXiv 2410.23771).

An evaluator model reads every document twice: as a whole, and in pieces that begin at most K + step - 1 tokens ahead of
the token that they predict. With the log-probabilities `l` in the long and `s` in the short context, a token is a *key
token* where

    LSD = l - s > alpha (the long-short difference)    and    LCL = l > beta (the long-context likelihood)

and LongPPL of the measured model is exp of its mean loss over these tokens. The evaluator may have a tokenizer of its
own: its key tokens become stretches of text, and those tokens of the measured model that lie within a stretch count.

Where this differs from the authors' package (`longppl` 0.3.0), on purpose: losses are float32 whatever the dtype of the
model, which decides tokens next to a threshold; a last piece of a single token is scored, where theirs raises; and text
that a tokenizer leaves out of all its offsets (a space in front of a word) belongs to the token behind it, so that
tokenizers with and without such gaps can be compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_posenc.errors import PosencError

SHORT = 4096
"""K, tokens of the short context, as in the authors' code."""
STEP = 1024
"""Tokens that share one short context, as in the authors' code."""
ALPHA, BETA = 2.0, -2.0
"""The paper's thresholds, in nats."""


def short_windows(tokens: int, *, short: int = SHORT, step: int = STEP) -> list[tuple[int, int]]:
    """The pieces that are run beside the whole document.

    Args:
        tokens: Tokens of the document.
        short: K: in every piece so many tokens are context alone.
        step: Tokens that a piece scores behind them, at the most.

    Returns:
        First token and end of every piece; together they score the tokens `short .. tokens-1`, each once.

    Raises:
        PosencError: `short` or `step` is not positive.
    """
    for name, value in (("short", short), ("step", step)):
        if value < 1:
            raise PosencError(f"LongPPL's {name} context has 1 token or more, not {value}.")
    starts = range(0, tokens - short, step)
    return [(start, min(start + short + step, tokens)) for start in starts]


def key_tokens(
    scorer: Callable[[Tensor, int], Tensor],
    ids: Tensor,
    *,
    short: int = SHORT,
    step: int = STEP,
    alpha: float = ALPHA,
    beta: float = BETA,
) -> Tensor:
    """Finds the tokens that an evaluator predicts well, and only in their long context.

    Args:
        scorer: The evaluator's `TokenScorer`, or what calls it; the evaluator is to be in evaluation mode and good at
            this length.
        ids: Token ids of one document, shape (n,), with what special tokens the evaluator wants in front.
        short: K, tokens of the short context; the first K tokens are never key.
        step: Tokens that share one short context. Smaller is closer to the paper's definition, and dearer: every step
            runs `short + step` tokens.
        alpha: Least long-short difference, in nats.
        beta: Least log-probability in the long context, in nats.

    Returns:
        Which tokens are key, shape (n,), bool, on the CPU. None is where the document has no more than `short` tokens,
        or where a loss is not a number.

    Raises:
        PosencError: `short` or `step` is not positive.
    """
    key = torch.zeros(len(ids), dtype=torch.bool)
    windows = short_windows(len(ids), short=short, step=step)
    if not windows:
        return key
    in_long = scorer(ids, short)
    in_short = torch.cat([scorer(ids[begin:end], short) for begin, end in windows])
    key[short:] = (in_short - in_long > alpha) & (-in_long > beta)
    return key


def carry(mask: Tensor, evaluator_ends: Tensor, model_ends: Tensor) -> Tensor:
    """Carries key tokens from the evaluator's tokens to those of the measured model.

    A token's text goes from the end of the one before it to its own end; where a character is split over several
    tokens, which then have one end, all of them stand for the whole character. Neighbouring key tokens make one stretch
    of text, and a token is key if all of its text lies within one stretch.

    Args:
        mask: Which of the evaluator's tokens are key, shape (n,), bool.
        evaluator_ends: Where each of them ends in the text, shape (n,), never falling; in bytes or in characters.
        model_ends: The same for the measured model's tokens, in the same unit, shape (m,).

    Returns:
        Which of the model's tokens are key, shape (m,), bool.

    Raises:
        PosencError: There are not as many ends as tokens.
    """
    if mask.shape != evaluator_ends.shape:
        raise PosencError(
            f"{len(mask)} tokens have {len(evaluator_ends)} ends; leave out the special tokens of both."
        )
    begins, ends = (bounds[mask] for bounds in _bounds(evaluator_ends))
    apart = begins[1:] > ends[:-1]
    stretch = torch.ones(len(begins), dtype=torch.bool)
    stretch[1:] = apart
    last = torch.ones(len(ends), dtype=torch.bool)
    last[:-1] = apart
    begins, ends = begins[stretch], ends[last]
    if not len(begins):
        return torch.zeros(len(model_ends), dtype=torch.bool)
    begin, end = _bounds(model_ends)
    index = torch.searchsorted(begins, begin, right=True) - 1
    within = end <= ends[index.clamp(min=0)]
    return (index >= 0) & within & (end > begin)


def _bounds(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Where the text of every token begins and ends."""
    ends = ends.to("cpu", torch.int64)
    different, which = torch.unique_consecutive(ends, return_inverse=True)
    return torch.cat([different.new_zeros(1), different[:-1]])[which], ends
