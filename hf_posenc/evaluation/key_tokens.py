"""Which tokens of a run's documents are key for `longppl`, by an evaluator of the user's choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.head_replay import TokenScorer, evaluation_mode
from hf_posenc.evaluation.identity import model_identity, tokenizer_hash
from hf_posenc.evaluation.longppl import ALPHA, BETA, SHORT, carry, key_tokens
from hf_posenc.evaluation.protocols import Settings

SELF = "self"
_STEPS = 4  # of the short context: the authors' 1,024 of 4,096


@dataclass(frozen=True)
class Evaluator:
    """A model that says which tokens need far context.

    Attributes:
        name: As it was given: a model's name or `self`.
        model: The live model; for `self` the one that is measured.
        tokenizer: Its tokenizer.
        candidate: What is patched in while it evaluates.
        special: Token ids in front of its texts.
        short: Tokens of the short context.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    candidate: Candidate
    special: Sequence[int]
    short: int

    @property
    def step(self) -> int:
        """Tokens that share one short context."""
        return max(1, self.short // _STEPS)

    def to_dict(self) -> dict[str, Any]:
        """Everything that determines which tokens are key."""
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


def split_evaluator(text: str) -> tuple[str, str]:
    """Reads `NAME` or `NAME@METHOD:option=value`, such as `self@rerope`: the model's name and what is patched in."""
    name, _, spec = text.partition("@")
    return name, spec or "none"


def default_short(longest: int, original: int | None) -> int:
    """The paper's 4,096 tokens where texts are long; for shorter ones what the model was trained on, or a quarter."""
    if longest > SHORT:
        return SHORT
    return original if original is not None and original < longest else longest // 4


def finder(
    evaluator: Evaluator,
    documents: Sequence[TokenizedDocument],
    tokenizer: Any,
    length: int,
    retokenized: Callable[[], Sequence[TokenizedDocument]],
) -> Callable[[int], Tensor]:
    """What gives the key tokens of a document by its index.

    Args:
        evaluator: Who decides.
        documents: The run's documents.
        tokenizer: The measured model's.
        length: Tokens of a document that the evaluator reads, special tokens included.
        retokenized: Gives the same documents in the evaluator's tokens; called where its tokenizer is another one.

    Returns:
        A function from a document's index to its key tokens, shape (n,), bool, n up to `length`.
    """
    same = tokenizer_hash(tokenizer) == tokenizer_hash(evaluator.tokenizer)
    others: dict[str, TokenizedDocument] = {}

    def find(index: int) -> Tensor:
        document = documents[index]
        if same:
            return _mask(evaluator, document, length)
        if not others:
            others.update((other.name, other) for other in retokenized())
        other = others.get(document.name)
        if other is None or other.byte_ends is None or document.byte_ends is None:
            raise PosencError(
                f"--longppl {evaluator.name}: {document.name} has no text to compare both tokenizers by; use "
                "an evaluator with the measured model's tokenizer, or text instead of token ids."
            )
        mask = _mask(evaluator, other, length)
        return carry(mask, other.byte_ends[: len(mask)], document.byte_ends)

    return find


def _mask(evaluator: Evaluator, document: TokenizedDocument, length: int) -> Tensor:
    special = torch.tensor(list(evaluator.special), dtype=torch.int64)
    ids = torch.cat([special, document.tokens(0, length - len(special))])
    model, candidate = evaluator.model, evaluator.candidate
    with evaluation_mode(model), candidate.applied(model, length):
        scorer = TokenScorer(model, ids)

        def losses(part: Tensor, first: int) -> Tensor:
            if candidate.moves and candidate.request is None:
                scorer(part[:2])  # resets transformers' stateful dynamic RoPE
            return scorer(part, first)

        return key_tokens(losses, ids, short=evaluator.short, step=evaluator.step)[len(special) :]


def with_evaluator(settings: Settings, evaluator: Evaluator) -> Settings:
    """The settings with the protocol `longppl` and who evaluates."""
    protocols = (*settings.protocols, "longppl")
    return dataclasses.replace(settings, protocols=protocols, evaluator=evaluator.to_dict())
