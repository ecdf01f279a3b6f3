"""Perplexity as other projects compute it, restated window by window: references for the presets.

Each function does the arithmetic of the program that it names, its quirks included, and nothing faster. Where that
program takes the loss that transformers returns for `labels=`, so does this: float32, the mean over the labels that are
not -100 and have a prediction. Documents are lists of token ids without special tokens; `bos` stands in front where
the program puts it, `None` for a tokenizer that has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

Documents = Sequence[Sequence[int]]


def yarn(*given: Any, **options: Any) -> float:
    """The perplexity of jquesnelle/yarn `eval/perplexity.py` (b1d7076).

    Windows as in `_strided`, in every document. `exp` of the mean of the windows' mean losses: a window counts once,
    whether it scores L-1 tokens, as the first does, or 256; so a document counts by its number of windows. `truncate`
    (tables 1, 2 and 6 of the paper) leaves one window per document.
    """
    return float(torch.stack([loss for loss, _ in _strided(*given, **options)]).mean().exp())


def pose(*given: Any, **options: Any) -> float:
    """The perplexity of dwzhu-pku/PoSE `src/eval_ppl.py` (947cfb2).

    YaRN's windows; each mean loss times the number of its new tokens. Without `bos` the first token of a document has
    no prediction and is counted nevertheless.
    """
    nats, tokens = torch.zeros((), dtype=torch.float64), 0
    for loss, new in _strided(*given, **options):
        nats, tokens = nats + loss * new, tokens + new
    return float((nats / tokens).exp())


def hf_docs(model: nn.Module, documents: Documents, length: int, *, stride: int = 512) -> float:
    """The perplexity of transformers' `docs/source/en/perplexity.md` (052b1dc).

    Windows over all documents as one text, without special tokens. Every window is weighted by its new tokens less
    one, which is their number in the first window only: later ones lose nothing to the shift, unless the stride is as
    long as the window. `length` is then the number of tokens that a window holds.
    """
    nats, tokens = torch.zeros(()), 0
    for loss, new in _strided(model, [_joined(documents)], length, stride=stride):
        nats, tokens = nats + loss * (new - 1), tokens + new - 1
    return float((nats / tokens).exp())


def longlora(
    model: nn.Module, documents: Documents, length: int, *, stride: int = 256, batch: int = 32
) -> float:
    """The perplexity of dvlab-research/LongLoRA `eval.py` (4cbb61b); Dual Chunk Attention's tables use a copy.

    Windows of L tokens at every `stride` tokens of all documents as one stream, without special tokens, but for the
    last window. All L-1 targets of every window count, so that a token counts up to L / stride times, with contexts of
    every length. The mean of the batches' means, and `2.71828` to that power: the last batch counts like a full one.

    Raises:
        IndexError: A stream of at most L tokens.
    """
    stream = _joined(documents)
    starts = list(range(0, len(stream) - length, stride))
    starts.pop()
    losses = []
    for first in range(0, len(starts), batch):
        ids = torch.tensor([stream[at : at + length] for at in starts[first : first + batch]])
        losses.append(_loss(model, ids, ids))
    return 2.71828 ** float(torch.stack(losses).mean())


def su(
    model: nn.Module, documents: Documents, length: int, *, tail: int = 4096, bos: int | None = None
) -> float:
    """The loss (nats, no perplexity) of bojone/rerope `eval_loss.py` (54e6ae0).

    The last L+1 tokens of every document, `bos` counted among them: a longer document loses it. The last `tail`
    targets count, read with the L tokens in front of the document's last one; the mean of the documents' means.

    Raises:
        ValueError: A document of no more tokens than `tail`, on which the program stops.
    """
    means = []
    for document in documents:
        ids = torch.tensor([_with(bos, document)[-(length + 1) :]])
        with torch.no_grad():
            logits: Tensor = model(ids[:, :-1]).logits[:, -tail:]
        means.append(nn.functional.cross_entropy(logits[0], ids[0, -tail:]))
    return float(torch.stack(means).sum()) / len(means)


def press(
    model: nn.Module,
    documents: Documents,
    length: int,
    *,
    stride: int = 256,
    bos: int | None = None,
) -> float:
    """The sliding window of Press et al. 2022 (arXiv 2108.12409, appendix B), in every document.

    What Position Interpolation (arXiv 2306.15595, sec. 3.2) says that it reports; its code is not published, so this is
    the definition and no program: windows of L tokens, all tokens of the first and the last `stride` of each later one,
    `exp` of the mean over tokens. `bos`, where given, stands in front of the document, not of every window.
    """
    nats, tokens = 0.0, 0
    for document in documents:
        ids = torch.tensor(_with(bos, document))
        scored = 1
        while scored < len(ids):
            stop = length if scored == 1 else scored + stride
            stop = min(stop, len(ids))
            # fairseq's --context-window: every later window has L - S tokens of context, the last one too
            window = ids[0 if scored == 1 else scored + stride - length : stop]
            with torch.no_grad():
                logits: Tensor = model(window[None, :-1]).logits[0]
            new = stop - scored
            own = nn.functional.cross_entropy(logits[-new:].double(), ids[scored:stop])
            nats, tokens, scored = nats + new * float(own), tokens + new, stop
    return math.exp(nats / tokens)


def lm_eval(model: nn.Module, documents: Documents, length: int, *, prefix: int) -> list[float]:
    """The log-likelihoods in nats, one per document, of lm-evaluation-harness `loglikelihood_rolling` (0.4.13).

    A window holds L inputs. The first one is `prefix` and L-1 tokens, and predicts L. Every later one predicts the next
    L tokens, the first of them from the token before alone; the last one, if fewer are left, reaches back for as much
    text as fills it, so its targets have more context than those of any other.
    """
    sums = []
    for document in documents:
        ids = torch.tensor([prefix, *document])
        total, done = 0.0, 1  # ids[0] is not predicted
        while done < len(ids):
            stop = min(done + length, len(ids))
            begin = max(0, stop - 1 - length)
            with torch.no_grad():
                logits: Tensor = model(ids[None, begin : stop - 1]).logits[0, done - stop :]
            scores = logits.log_softmax(-1).gather(-1, ids[done:stop, None])
            total, done = total + float(scores.sum()), stop
        sums.append(total)
    return sums


def weighted_perplexity(log_likelihoods: Sequence[float], units: Sequence[int]) -> float:
    """`word_perplexity` and `byte_perplexity` of lm-evaluation-harness: units are words or UTF-8 bytes."""
    return math.exp(-sum(log_likelihoods) / sum(units))


def bits_per_byte(log_likelihoods: Sequence[float], sizes: Sequence[int]) -> float:
    """`bits_per_byte` of lm-evaluation-harness; `sizes` in UTF-8 bytes."""
    return -sum(log_likelihoods) / sum(sizes) / math.log(2)


def _strided(
    model: nn.Module, documents: Documents, length: int, *, stride: int = 256,
    bos: int | None = None, truncate: bool = False,
) -> Iterator[tuple[Tensor, int]]:  # fmt: skip
    """The mean loss and the number of new tokens of each window, as YaRN, PoSE and transformers' page cut them.

    A window starts at every `stride` tokens and holds up to L tokens, the first of them `bos`, which is put in front of
    every window anew; the windows of a document end with the first that reaches its end. New are the tokens that no
    earlier window held. They count, but for one that no token stands before.
    """
    body = length if bos is None else length - 1
    for document in documents:
        text = list(document[:body] if truncate else document)
        step, reached = (body if truncate else stride), 0
        for begin in range(0, len(text), step):
            end = min(begin + body, len(text))
            new = end - reached
            ids = torch.tensor([_with(bos, text[begin:end])])
            labels = ids.clone()
            labels[:, :-new] = -100
            yield _loss(model, ids, labels), new
            reached = end
            if end == len(text):
                break


def _loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        loss: Tensor = model(ids, labels=labels).loss
    return loss


def _with(bos: int | None, tokens: Sequence[int]) -> list[int]:
    return list(tokens) if bos is None else [bos, *tokens]


def _joined(documents: Documents) -> list[int]:
    return list(chain.from_iterable(documents))
