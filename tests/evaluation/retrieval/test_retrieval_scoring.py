"""Correctness and rank of an answer, against raw logits, with and without the cache."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hf_posenc.embedded import model_path
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.candidates import parse_candidates
from hf_posenc.evaluation.measuring.execute import execute
from hf_posenc.evaluation.measuring.store import Records
from hf_posenc.evaluation.retrieval import Answer, Encoder, Prompt, answer_of
from hf_posenc.evaluation.retrieval import run as answers
from hf_posenc.evaluation.retrieval.run import AnswerScorer, RetrievalRun, generate
from hf_posenc.evaluation.retrieval.tasks import TASKS, RetrievalSettings
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.evaluation.retrieval.test_retrieval_prompts import make
from tests.support import zoo
from tests.support.retrieval_models import Copier
from tests.support.selection import late
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, tiny
from tests.support.zoo import CACHE

LENGTH = 600


def prompt_of(task: str = "passkey", length: int = LENGTH, **place: Any) -> Prompt:
    return make(task, length, **place)


def scorer_of(model: Any) -> AnswerScorer:
    return AnswerScorer(model, TokenScorer(model, torch.arange(9)))


def reference(model: Any, prompt: Prompt, answer: Answer) -> tuple[float, list[bool]]:
    """Summed log probability, and whether each token is the most probable, from full logits in float64."""
    ids = torch.cat([prompt.ids, torch.tensor(answer.ids)])
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
    rows = logits[len(prompt.ids) - 1 : -1].log_softmax(-1)
    picked = [float(row[token]) for row, token in zip(rows, answer.ids, strict=True)]
    hits = [int(row.argmax()) == token for row, token in zip(rows, answer.ids, strict=True)]
    return math.fsum(picked), hits


def forwards(model: Any) -> list[int]:
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize(
    ("spec", "task"),
    [
        ("none", "passkey"),
        ("rerope", "vt"),
        ("dynamic_ntk:update=sequence", "passkey"),
        *late(["none", "dynamic_ntk:update=sequence"], ["vt"]),
        *late(["rerope"], ["passkey"]),
        *late(["yarn", "dynamic_yarn", "alibi"], ["passkey", "vt"]),
    ],
)
def test_verdicts_are_what_full_logits_give(spec: str, task: str) -> None:
    length = {"passkey": LENGTH, "vt": 1900}[task]
    model = tiny()
    (candidate,) = (c.checked(model) for c in parse_candidates([spec]))
    scorer, prompt = scorer_of(model), prompt_of(task, length)
    with candidate.applied(model, length):
        expected, hits = reference(model, prompt, prompt.answer)
        others = [reference(model, prompt, other)[0] for other in prompt.distractors]
        assert min(abs(other - expected) for other in others) > 0.01  # no rank hangs on rounding
        for exact in (True, False):
            scorer.scorer.pieces = exact and not candidate.length_dependent
            verdict = scorer(prompt)
            assert verdict.nats == pytest.approx(-expected, abs=2e-3)
            assert verdict.rank == 1 + sum(other > expected for other in others)
            assert verdict.candidates == 1 + len(others)
            assert verdict.correct == all(hits)
            assert not verdict.correct  # a random model; those that copy are below


@pytest.mark.parametrize("adapter", [False, True])
def test_one_long_forward_per_sample(adapter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    if adapter:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).eval()
    scorer, prompt = scorer_of(model), prompt_of()
    seen = forwards(model)
    together = scorer(prompt)
    # No padding; the last token of an answer predicts nothing.
    rest = len(prompt.answer.ids) - 1
    assert seen == [LENGTH - 1, rest]
    seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(answers, "SPARE", 0)
        assert scorer(prompt) == together
    assert seen[1:] == [rest] * (1 + len(prompt.distractors))
    seen.clear()
    scorer.scorer.pieces = False
    scorer(prompt)
    assert [n for n in seen if n > rest + 1] == [LENGTH] * (1 + len(prompt.distractors))


@pytest.mark.parametrize("wrong_logits", [True, False])
@pytest.mark.parametrize("spare", [0, 2**30])
def test_a_cache_that_is_wrong_is_noticed_and_a_reading_leaves_no_trace(
    wrong_logits: bool, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SPARE", spare)
    scorer, prompt = scorer_of(model := tiny()), prompt_of()
    expected = scorer(prompt)
    forward, read = model.forward, 0

    def wrong(*args: Any, **options: Any) -> Any:
        nonlocal read
        output = forward(*args, **options)
        if options.get(CACHE) is not None:
            read += 1
            if wrong_logits:
                output.logits = output.logits * 1.02
            else:
                output[CACHE].layers[0].values *= 1.05
        return output

    model.forward = wrong
    verdict = scorer(prompt)
    assert read == (1 if spare else 1 + len(prompt.distractors))
    assert verdict == expected


def information(model: Any, prompt: Prompt) -> list[float]:
    """Pointwise mutual information of the question and every candidate, from full logits in float64."""
    candidates = (prompt.answer, *prompt.distractors)
    table = [
        [reference(model, prompt.with_question(question), c)[0] for c in candidates]
        for question in (tuple(prompt.ids[prompt.text :].tolist()), *prompt.questions)
    ]
    means = [math.fsum(map(math.exp, column)) / len(table) for column in zip(*table, strict=True)]
    return [value - math.log(mean) for value, mean in zip(table[0], means, strict=True)]


@pytest.fixture(scope="module")
def informed() -> tuple[Any, Prompt, list[float]]:
    model = tiny()
    prompt = prompt_of("babilong_qa1", 900)
    return model, prompt, information(model, prompt)


@pytest.mark.parametrize("spare", [0, 500_000, 2**30])  # copies: none, some at a time, all
def test_ranks_are_by_mutual_information_where_there_are_other_questions(
    spare: int, informed: tuple[Any, Prompt, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SPARE", spare)
    model, prompt, expected = informed
    scorer = scorer_of(model)
    plain = [reference(model, prompt, a)[0] for a in (prompt.answer, *prompt.distractors)]
    assert sorted(expected) != pytest.approx(sorted(plain), abs=1)
    with torch.inference_mode():
        assert scorer._with_cache(prompt)[1] == pytest.approx(expected, abs=2e-3)
    rank = 1 + sum(other > expected[0] for other in expected[1:])
    for exact in (True, False):
        scorer.scorer.pieces = exact
        assert scorer(prompt).rank == rank


def test_a_cache_that_differs_behind_the_text_is_noticed() -> None:
    """Answers read behind the prompt are right, and its question read again is not; nor is a window that has slid."""
    slid: Any = zoo.build("mistral", vocab_size=VOCABULARY)
    with torch.inference_mode():
        assert scorer_of(slid)._with_cache(prompt_of("babilong_qa1", 900))[1] is None
    model = tiny()
    scorer, prompt = scorer_of(model), prompt_of("babilong_qa1", 900)
    with torch.inference_mode():
        assert scorer._with_cache(prompt)[1] is not None
        forward = model.forward

        def off(*args: Any, **options: Any) -> Any:
            output = forward(*args, **options)
            if options.get(CACHE) is not None and options["input_ids"].shape[1] > 20:
                output.logits = output.logits * 1.02
            return output

        model.forward = off
        assert scorer._with_cache(prompt)[1] is None


def test_a_model_that_ignores_the_question_ranks_nothing_first() -> None:
    verdict = scorer_of(Copier(window=4))(prompt_of("babilong_qa1", 900))
    assert (verdict.rank, verdict.candidates) == (6, 6)


@pytest.mark.parametrize(
    "model_type",
    ["mistral", "bloom", "qwen3_next", "falcon_h1", *late(["deepseek_v4", "gemma2", "gpt_oss"])],
)
def test_windows_that_have_slid_are_restored(model_type: str) -> None:
    model = zoo.build(model_type, vocab_size=VOCABULARY)
    scorer, prompt = scorer_of(model), prompt_of(length=300)
    expected = [reference(model, prompt, a)[0] for a in (prompt.answer, *prompt.distractors)]
    for piece in (None, 80):
        scorer.scorer.prefill = piece
        with torch.inference_mode():
            scorer.scorer.pieces_of(300)  # tries short texts first, which are none of those below
            seen = forwards(model)
            assert scorer._with_cache(prompt)[1] == pytest.approx(expected, abs=2e-3)
        assert max(seen) <= 80 if piece else max(seen) >= 299
        assert scorer(prompt).rank == 1 + sum(other > expected[0] for other in expected[1:])


@pytest.mark.parametrize("depth", [0.0, 0.6, 1.0])
def test_a_model_that_copies_is_right_and_one_that_forgets_is_not(depth: float) -> None:
    prompt = prompt_of(depth=depth)
    assert prompt.distance is not None
    right = scorer_of(Copier())(prompt)
    assert (right.correct, right.score, right.rank, right.candidates) == (True, 1.0, 1, 6)
    # the needle must be in sight up to and with the words in front of its second number
    within = prompt.distance + len("s. Remember it. 1234512345 is the pass key.\n")
    assert scorer_of(Copier(window=within + 20))(prompt).correct
    wrong = scorer_of(Copier(window=prompt.distance - 1))(prompt)
    assert (wrong.correct, wrong.score) == (False, 0.0)
    assert wrong.rank == 6  # all answers are as probable as the right one: a tie is no find


def test_a_model_that_keeps_the_longest_text_as_state_reads_every_answer_anew() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    model = zoo.build("llama", vocab_size=VOCABULARY, rope_parameters=rope)  # trained at 64 tokens
    ids = zoo.tokens(70)[0]
    right, longer = Answer((5, 6, 7), (3,)), Answer(tuple(range(5, 45)), (40,))
    scorer = scorer_of(model)
    scorer.scorer.pieces, scorer.scorer.stateful = False, True
    scorer(Prompt(ids, longer, (), (), None))
    prompt = Prompt(ids, right, (), (), None)
    expected = reference(zoo.twin(model), prompt, right)[0]
    assert scorer(prompt).nats == pytest.approx(-expected, rel=1e-6)


def test_a_part_that_is_right_counts_for_the_score_alone() -> None:
    answer = Answer((5, 6, 7, 8), (2, 4))

    class Half(Copier):
        def _next(self, ids: list[int]) -> int:
            return {1: 5, 5: 6, 6: 7, 7: 0}.get(ids[-1], 0)

    verdict = scorer_of(Half())(Prompt(torch.tensor([3, 2, 1]), answer, (), ("a", "b"), None))
    assert (verdict.correct, verdict.score, verdict.rank) == (False, 0.5, None)


@pytest.mark.parametrize(("first", "correct"), [(5, True), (9, True), (6, False)])
def test_a_blank_in_front_of_the_answer_does_not_count(first: int, correct: bool) -> None:
    """The model continues the question by a word, but a blank by the right answer."""
    answer = Answer((5, 6, 7), (3,), blank=1)

    class Wordy(Copier):
        def _next(self, ids: list[int]) -> int:
            return {1: first, 5: 6 if correct else 0, 6: 7}.get(ids[-1], 0)

    prompt = Prompt(torch.tensor([3, 2, 1]), answer, (), ("a",), None)
    assert scorer_of(Wordy())(prompt).correct is correct


def test_the_blank_of_an_answer_is_counted_by_the_tokenizer() -> None:
    embedded = AutoTokenizer.from_pretrained(model_path())
    for tokenizer, expected in ((byte_tokenizer(), (6, 1)), (embedded, (5, 0))):
        answer = answer_of(Encoder(tokenizer), "The pass key is", ["65748"])
        assert (len(answer.ids), answer.blank) == expected


def test_logits_that_are_not_finite_are_no_verdict() -> None:
    class Broken(Copier):
        def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
            output = super().forward(input_ids)
            output.logits *= math.nan
            return output

    with pytest.raises(PosencError, match="not finite"):
        scorer_of(Broken())(prompt_of())


@pytest.mark.usefixtures("quick_collection")
def test_memory_that_runs_out_is_answered_with_smaller_pieces() -> None:
    model = tiny()
    model.set_attn_implementation("eager")  # whose scores in pieces are fewer
    prompt = prompt_of(length=900)
    expected = scorer_of(model)(prompt)
    forward, asked = model.forward, []

    def tight(*args: Any, **options: Any) -> Any:
        asked.append(options["input_ids"].shape[1])
        if asked[-1] > 600:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **options)

    scorer = scorer_of(model)
    model.forward = tight
    verdict = scorer(prompt)
    assert max(asked) > 600
    assert verdict.rank == expected.rank
    assert verdict.nats == pytest.approx(expected.nats, abs=1e-3)


@pytest.mark.parametrize("window", [10**9, 100])
def test_generating_finds_what_teacher_forcing_finds(window: int) -> None:
    model, task = Copier(window), TASKS["passkey"]
    for sample in range(3):
        prompt = prompt_of(sample=sample)
        text = generate(model, byte_tokenizer(), prompt, task.new_tokens)
        right = task.hit(text, prompt.references) == 1.0
        assert right == scorer_of(model)(prompt).correct == (window > 100)


def test_generation_is_greedy_whatever_the_checkpoint_s_own_config_says() -> None:
    model, tokenizer, prompt = tiny(), byte_tokenizer(), prompt_of()
    greedy, own = generate(model, tokenizer, prompt, 10), model.generation_config
    first = tokenizer(greedy[0]).input_ids[0]
    own.update(repetition_penalty=1.3, num_beams=2, min_new_tokens=9, suppress_tokens=[first])
    assert generate(model, tokenizer, prompt, 10) == greedy
    assert model.generation_config is own
    own.eos_token_id = first  # the end is the checkpoint's
    assert generate(model, tokenizer, prompt, 10) == greedy[0]


def test_generated_texts_are_judged_as_the_papers_do() -> None:
    passkey, vt = TASKS["passkey"], TASKS["vt"]
    assert passkey.hit("is 12345. Remember", ["12345"]) == 1.0  # YaRN: the first number
    assert passkey.hit("777 or 12345", ["12345"]) == passkey.hit("none", ["12345"]) == 0.0
    references = ["ABCDE", "FGHIJ", "KLMNO", "PQRST"]
    assert vt.hit("abcde and FGHIJ", references) == 0.5  # string_match_all


@pytest.mark.parametrize("decode", ["teacher-forced", "generate"])
def test_truncation_reads_the_end_of_the_prompt(decode: str) -> None:
    model = tiny()
    model.config.max_position_embeddings = 200
    candidates = [c.checked(model) for c in parse_candidates(["none", "truncation"])]
    settings = RetrievalSettings((LENGTH,), ("passkey",), (0.0,), 1, 6, decode=decode)
    run = RetrievalRun(model, byte_tokenizer(), candidates, settings, special=[0])
    assert [item.cost for item in run.items] == [LENGTH, 200]
    prompt = run.prompt(run.items[1].sample)
    seen = forwards(model)
    execute(run, records := Records())
    value = records.get(run.items[1].key) or {}
    if decode == "generate":
        assert [tokens for tokens in seen if tokens > 1] == [LENGTH - 10, 200 - 10]
        return  # passkey generates 10 tokens
    ids = prompt.ids[-(200 - 1 - len(prompt.answer.ids)) :]
    end = dataclasses.replace(prompt, ids=torch.cat([torch.tensor([0]), ids]))
    assert value["nats"] == pytest.approx(-reference(model, end, prompt.answer)[0], abs=2e-3)
    whole = -reference(model, prompt, prompt.answer)[0]
    assert (records.get(run.items[0].key) or {})["nats"] == pytest.approx(whole, abs=2e-3)
    assert abs(value["nats"] - whole) > 0.01
