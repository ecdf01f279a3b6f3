"""Key tokens against a float64 reference from full logits, and evaluators that are refused."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc.embedded import held_out_documents, model_path
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Document, tokenize
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.store import fingerprint_of
from hf_posenc.evaluation.options import PerplexityOptions
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import Evaluator, evaluator_of, key_tokens
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.support import zoo
from tests.support.selection import late
from tests.support.tiny_text import byte_tokenizer, prose

SHORT, STEP = 48, 20


@cache
def evaluator() -> tuple[Any, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(model_path())


@cache
def text() -> str:
    return next(text for name, text in held_out_documents() if name == "argparse")[4000:5500]


def document_ids() -> Tensor:
    return tokenize(Document("text", text()), evaluator()[1]).ids


@cache
def reference_losses() -> tuple[Tensor, Tensor]:
    """Loss of every token from `SHORT` on, in the whole text and in its piece: float64, from full logits.

    Retyped from the description of the authors' `find_key_token`: pieces start every STEP tokens, have SHORT + STEP
    tokens, the last one fewer, and their last STEP tokens are scored.
    """
    ids = document_ids()
    model = copy.deepcopy(evaluator()[0]).double()

    @torch.no_grad()
    def log_probabilities(part: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=part[None], use_cache=False).logits[0]
        return logits - logits.logsumexp(-1, keepdim=True)

    whole = log_probabilities(ids)
    long, short = [], []
    for target in range(SHORT, len(ids)):
        long.append(-whole[target - 1, ids[target]])
        begin = (target - SHORT) // STEP * STEP
        piece = ids[begin : min(begin + SHORT + STEP, len(ids))]
        if (target - SHORT) % STEP == 0:
            predicted = log_probabilities(piece)
        short.append(-predicted[target - begin - 1, ids[target]])
    return torch.stack(long), torch.stack(short)


@pytest.mark.parametrize(
    ("alpha", "beta"), [(2.0, -2.0), (-1.0, -0.5), *late([0.5], [-4.0]), *late([0.25], [-1.0])]
)
def test_key_tokens_are_those_of_the_reference(alpha: float, beta: float) -> None:
    long, short = reference_losses()
    expected = torch.zeros(len(document_ids()), dtype=torch.bool)
    for index, (in_long, in_short) in enumerate(zip(long.tolist(), short.tolist(), strict=True)):
        if in_short - in_long > alpha and in_long < -beta:
            expected[SHORT + index] = True
    margin = torch.minimum((short - long - alpha).abs(), (long + beta).abs())
    clear = torch.cat([torch.ones(SHORT, dtype=torch.bool), margin > 1e-4])  # the others may round
    assert clear.float().mean() > 0.98
    assert 2 < expected.sum() < len(expected) - SHORT
    model, _ = evaluator()
    with evaluation_mode(model):
        scorer = TokenScorer(model, document_ids(), chunk=64)
        found = key_tokens(scorer, document_ids(), short=SHORT, step=STEP, alpha=alpha, beta=beta)
    assert torch.equal(found[clear], expected[clear])
    if (alpha, beta) == (2.0, -2.0):  # the paper's
        default = key_tokens(scorer, document_ids(), short=SHORT, step=STEP)
        assert torch.equal(default, found)


def test_what_decides_the_key_tokens_is_told_apart() -> None:
    model, _ = evaluator()

    def told(spec: str = "none", special: tuple[int, ...] = (), short: int = SHORT) -> str:
        candidate = Candidate.parse(spec).checked(model)
        made = Evaluator("self", model, byte_tokenizer(), candidate, special, short)
        return fingerprint_of(made.to_dict())

    seen = {told(), told("rerope:window=8"), told(special=(0,)), told(short=SHORT + 1)}
    eps = model.config.rms_norm_eps
    model.config.rms_norm_eps = 2 * eps  # the weights are the same
    seen.add(told())
    model.config.rms_norm_eps = eps
    assert len(seen) == 5
    assert told() in seen


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_an_evaluator_that_keeps_the_longest_text_as_state_reads_every_piece_anew(
    rope_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lenient = partial(key_tokens, alpha=0.01, beta=-9.0)  # the weights are random
    monkeypatch.setattr("hf_posenc.evaluation.perplexity.run.key_tokens", lenient)
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 8.0}
    model = zoo.build("llama", vocab_size=257, rope_parameters=rope)  # trained at 64 tokens
    document = tokenize(Document("d", prose(200)), byte_tokenizer())
    candidate = Candidate.parse("none").checked(model)
    found = Evaluator("self", model, byte_tokenizer(), candidate, (), 80).key_tokens(document, 200)

    def losses(part: Tensor, first: int) -> Tensor:
        with torch.no_grad():
            logits = zoo.twin(model)(input_ids=part[None], use_cache=False).logits[0].double()
        return -logits.log_softmax(-1)[:-1].gather(1, part[1:, None])[first - 1 :, 0]

    expected = lenient(losses, document.tokens(0, 200), short=80, step=20)
    assert 0 < expected.sum() < 120
    assert torch.equal(found, expected)


class Calls:
    """A scorer that gives one loss in texts of `tokens`, another in shorter pieces."""

    def __init__(self, tokens: int, whole: float, piece: float) -> None:
        self.tokens, self.whole, self.piece = tokens, whole, piece
        self.windows: list[tuple[int, int, int]] = []

    def __call__(self, ids: Tensor, first: int) -> Tensor:
        self.windows.append((int(ids[0]), len(ids), first))
        value = self.whole if len(ids) == self.tokens else self.piece
        return torch.full((len(ids) - first,), value, dtype=torch.float64)


def test_thresholds_are_strict_and_of_both_kinds() -> None:
    ids = torch.arange(12)

    def found(whole: float, piece: float) -> Tensor:
        scorer: Any = Calls(12, whole, piece)
        return key_tokens(scorer, ids, short=4, step=3)

    assert found(1.0, 3.5).tolist() == [False] * 4 + [True] * 8
    assert not found(1.0, 3.0).any()  # a difference of alpha itself
    assert not found(2.0, 9.0).any()  # a log-probability of beta itself
    assert not found(float("nan"), 9.0).any()
    assert not found(1.0, float("nan")).any()


def test_pieces_score_every_later_token_once_even_a_single_last_one() -> None:
    scorer: Any = Calls(11, 0.0, 9.0)
    assert key_tokens(scorer, torch.arange(11), short=4, step=3).sum() == 7
    # (first token, tokens, first scored): the whole text, then pieces; the last one scores one token
    assert scorer.windows == [(0, 11, 4), (0, 7, 4), (3, 7, 4), (6, 5, 4)]
    for tokens in (5, 17, 40, 41):
        scorer = Calls(tokens, 0.0, 9.0)
        key_tokens(scorer, torch.arange(tokens), short=4, step=3)
        scored = [
            begin + t for begin, size, first in scorer.windows[1:] for t in range(first, size)
        ]
        assert scored == list(range(4, tokens))
    scorer = Calls(4, 0.0, 9.0)  # within the short context
    assert key_tokens(scorer, torch.arange(4), short=4, step=3).tolist() == [False] * 4
    assert not scorer.windows


def evaluator_for(longest: int, longppl: str, model: Any, load: Any = None) -> Evaluator:
    options = PerplexityOptions(longppl=longppl)
    settings = Settings((32, longest), ("prefix",))
    return evaluator_of(options, settings, model, byte_tokenizer(), 64, "never", load)


def test_an_evaluator_that_would_be_broken_is_refused() -> None:
    model = zoo.build("llama")  # trained at 64 tokens
    assert evaluator_for(64, "self", model).candidate.parts == ()
    with pytest.raises(
        PosencError, match=r"--longppl self: .*up to its trained length, 64.*self@rerope"
    ):
        evaluator_for(65, "self", model)
    assert evaluator_for(256, "self@rerope", model).candidate.spec == "rerope"
    scaled: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    scaled["original_max_position_embeddings"] = 64
    longer = zoo.build(
        "llama", rope_parameters=scaled
    )  # its config names 64, its scaling reaches 256
    assert evaluator_for(256, "self", longer).short == 64
    assert (
        evaluator_for(256, "other", model, lambda name: (longer, byte_tokenizer())).name == "other"
    )
    for name, loaded in (("self", longer), ("other", longer)):
        with pytest.raises(PosencError, match=rf"length, 256.*{name}@rerope"):
            evaluator_for(257, name, loaded, lambda name: (longer, byte_tokenizer()))
    with pytest.raises(
        PosencError, match=r"other: its tokenizer is not the measured model's.*self@"
    ):
        evaluator_for(64, "other", model, lambda name: evaluator())
