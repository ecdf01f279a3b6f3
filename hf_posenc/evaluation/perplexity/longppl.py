"""LongPPL: perplexity over the tokens that need a long context (Fang et al. 2024, arXiv 2410.23771).

An evaluator model reads every document twice: as a whole, and in pieces that begin at most K + step - 1 tokens before
the token that they predict. With the log-probabilities `l` in the long and `s` in the short context, a token is a *key
token* if

    LSD = l - s > alpha (the long-short difference)    and    LCL = l > beta (the long-context likelihood)

and LongPPL of the measured model is exp of its mean loss over these tokens. The evaluator may have a tokenizer of its
own: its key tokens become stretches of text, and the measured model's tokens within a stretch count.

Deliberate differences from the authors' package (`longppl` 0.3.0): losses are float32 whatever the dtype of the model,
which matters for tokens next to a threshold. A last piece of a single token is scored, where theirs raises. Text that a
tokenizer leaves out of all its offsets (a space in front of a word) belongs to the token behind it, so that tokenizers
with and without such gaps can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import TokenizedDocument, special_prefix
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate
from hf_posenc.evaluation.measuring.identity import model_identity, tokenizer_hash
from hf_posenc.evaluation.options import PerplexityOptions
from hf_posenc.evaluation.perplexity.protocols import SELF, Settings, parse_evaluator
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.model.context import length_of
from hf_posenc.patch.patching import get_patch

SHORT = 4096
"""K, tokens of the short context, as in the authors' code."""
STEP = 1024
"""Tokens that share one short context, as in the authors' code."""
ALPHA, BETA = 2.0, -2.0
"""The paper's thresholds, in nats."""


def key_tokens(
    scorer: Callable[[Tensor, int], Tensor],
    ids: Tensor,
    *,
    short: int = SHORT,
    step: int = STEP,
    alpha: float = ALPHA,
    beta: float = BETA,
) -> Tensor:
    """Find the tokens that an evaluator predicts well, and only in their long context.

    Args:
        scorer: The evaluator's `TokenScorer`, or a function with its signature. The evaluator must be in evaluation
            mode, and good at this length.
        ids: Token ids of one document, shape (n,), with the evaluator's special tokens in front.
        short: K, tokens of the short context; the first K tokens are never key.
        step: Tokens that share one short context. Smaller is closer to the paper's definition, and costs more: every
            step runs `short + step` tokens.
        alpha: Least long-short difference, in nats.
        beta: Least log-probability in the long context, in nats.

    Returns:
        True for key tokens, shape (n,), bool, on the CPU. False where a loss is not a number.
    """
    key = torch.zeros(len(ids), dtype=torch.bool)
    if len(ids) <= short:
        return key
    in_long = scorer(ids, short)
    # K tokens that are context only, and up to `step` tokens behind them that a piece scores.
    pieces = (ids[begin : begin + short + step] for begin in range(0, len(ids) - short, step))
    in_short = torch.cat([scorer(piece, short) for piece in pieces])
    key[short:] = (in_short - in_long > alpha) & (-in_long > beta)
    return key


def carry(mask: Tensor, evaluator_ends: Tensor, model_ends: Tensor) -> Tensor:
    """Map key tokens from the evaluator's tokens to those of the measured model.

    A token's text begins at the end of the token before it. Several tokens that split one character have the same end,
    and each stands for the whole character. A token is key if all of its text belongs to the evaluator's key tokens.

    `mask` (n,) is true for the evaluator's key tokens. Its ends (n,) and the model's (m,) are in bytes or in characters
    and never decrease. The result (m,) is true for the model's key tokens.
    """
    evaluator_ends, model_ends = (e.to("cpu", torch.int64) for e in (evaluator_ends, model_ends))
    places, index = torch.unique_consecutive(evaluator_ends, return_inverse=True)
    key = torch.bincount(index[mask], minlength=len(places)).clamp(max=1)
    key = key.repeat_interleave(places.diff(prepend=places.new_zeros(1)))  # of each byte
    ends, index = torch.unique_consecutive(model_ends, return_inverse=True)
    total = torch.zeros(1 + max([len(key), *ends[-1:].tolist()]), dtype=torch.int64)
    total[1 : 1 + len(key)] = key
    total = total.cumsum(0)  # key bytes up to each place
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    whole: Tensor = (total[ends] - total[begins] == ends - begins) & (ends > begins)
    return whole[index]


@dataclass(frozen=True)
class Evaluator:
    """A model that selects the tokens that need far context; `short`: tokens of the short context."""

    name: str
    model: nn.Module
    tokenizer: Any
    candidate: Candidate
    special: Sequence[int]
    short: int

    @property
    def step(self) -> int:
        """Tokens that share one short context: a quarter of it, as the authors' 1,024 of 4,096."""
        return max(1, self.short // 4)

    def key_tokens(self, document: TokenizedDocument, length: int) -> Tensor:
        """Return the key tokens among the first of a document, `length` with special tokens, shape (n,), bool."""
        special = torch.tensor(list(self.special), dtype=torch.int64)
        ids = torch.cat([special, document.tokens(0, length - len(special))])
        with evaluation_mode(self.model), self.candidate.applied(self.model, length):
            scorer = TokenScorer(self.model, ids)
            scorer.pieces = not self.candidate.length_dependent
            scorer.stateful = self.candidate.stateful
            key = key_tokens(scorer, ids, short=self.short, step=self.step)
        return key[len(special) :]

    def to_dict(self) -> dict[str, Any]:
        """Return everything that determines the key tokens."""
        identity = model_identity(self.model, self.name)
        return {
            "name": identity.pop("name"),
            "patch": self.candidate.spec,
            "model": identity,
            "tokenizer_sha256": tokenizer_hash(self.tokenizer),
            "special": list(self.special),
            "short": self.short,
            "step": self.step,
            "alpha": ALPHA,
            "beta": BETA,
        }


def evaluator_of(
    options: PerplexityOptions,
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    original: int | None,
    policy: str,
    load: Callable[[str], tuple[nn.Module, Any]] | None,
) -> Evaluator:
    """Return the evaluator that `NAME` or `NAME@METHOD:option=value` describes: the measured model, or one to load.

    Its short context has the paper's 4,096 tokens; for shorter texts the trained length, or a quarter of the text.

    Raises:
        PosencError: An evaluator without a method would read texts longer than it was trained for: its predictions
            there are broken, and so would be the choice of the tokens.
    """
    name, spec = parse_evaluator(options.longppl or SELF)
    if name != SELF:
        if load is None:
            raise PosencError(f"longppl={name!r}: in Python only {SELF!r}, with @METHOD or not.")
        model, tokenizer = load(name)
    short, longest = SHORT, settings.lengths[-1]
    candidate = Candidate.parse(spec or UNPATCHED).checked(model)
    trained = length_of(model, replaced=True)
    if not candidate.parts and get_patch(model) is None:
        # The tokens that it reads as it was loaded: a scaling of its config counts, but not for `original`.
        reach = length_of(model)
        if name == SELF and reach == trained and original is not None:
            reach = original
        if reach is not None and longest > reach:
            raise PosencError(
                f"--longppl {options.longppl}: an evaluator has to be good at {longest:,} tokens, and unpatched this "
                f"one is so up to its trained length, {reach:,}, at most. Give {name}@METHOD, such as {name}@rerope, "
                f"the name of a model with a longer context, or --lengths up to {reach}."
            )
    if longest <= SHORT:
        trained = trained or original
        short = trained if trained is not None and trained < longest else longest // 4
    return Evaluator(
        name=name,
        model=model,
        tokenizer=tokenizer,
        candidate=candidate,
        special=special_prefix(tokenizer, policy),
        short=options.longppl_short or short,
    )


def finder(
    evaluator: Evaluator,
    documents: Sequence[TokenizedDocument],
    tokenizer: Any,
    length: int,
    source: Source,
) -> Callable[[int], Tensor]:
    """Return a function from a document's index to its key tokens, shape (n,), bool, n up to `length`.

    `length` is the number of tokens of a document that the evaluator reads, special tokens included. If its tokenizer
    is not the measured model's, the documents of the source are read again.
    """
    same = tokenizer_hash(tokenizer) == tokenizer_hash(evaluator.tokenizer)
    by_name: dict[str, TokenizedDocument] = {}

    def find(index: int) -> Tensor:
        document = documents[index]
        if same:
            return evaluator.key_tokens(document, length)
        if not by_name:
            reloaded = source.reload(documents, evaluator.tokenizer)
            by_name.update((other.name, other) for other in reloaded)
        other = by_name.get(document.name)
        if other is None or other.byte_ends is None or document.byte_ends is None:
            raise PosencError(
                f"--longppl {evaluator.name}: {document.name} has no text to compare both tokenizers by; use "
                "an evaluator with the measured model's tokenizer, or text instead of token ids."
            )
        mask = evaluator.key_tokens(other, length)
        return carry(mask, other.byte_ends[: len(mask)], document.byte_ends)

    return find
