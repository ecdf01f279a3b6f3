"""The numbers, recomputed from raw logits in float64."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc.embedded import held_out_documents, model_path
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Document, TokenizedDocument, tokenize
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import MethodEntry
from hf_posenc.evaluation.measuring.candidates import Candidate, checked_candidates
from hf_posenc.evaluation.measuring.statistics import Failure, Record
from hf_posenc.evaluation.measuring.store import fingerprint_of
from hf_posenc.evaluation.options import PerplexityOptions
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.perplexity.run import (
    Evaluator,
    PerplexityRun,
    evaluator_of,
    key_tokens,
    measure_perplexity,
    prepare,
)
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.methods import LogN, PositionInterpolation
from tests.support import zoo
from tests.support.perplexities import measured, reference, shared_prefix
from tests.support.selection import late
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose, tiny

LENGTHS = (32, 64, 128, 256)  # of 64 trained tokens
DOCUMENTS = [
    # token i takes 1, 2, 3, 4, 1, ... bytes, so that it matters which tokens are counted
    dataclasses.replace(plain, byte_ends=torch.cumsum(torch.arange(len(plain.ids)) % 4 + 1, 0))
    for n in range(2)
    for plain in [tokenize(Document(f"d{n}", prose(260 + 41 * n, n)), byte_tokenizer())]
]


BY_NAME = {document.name: document for document in DOCUMENTS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def run(model: Any, specs: list[str], *given: Settings, **options: Any) -> PerplexityResult:
    """At four lengths, unless other settings are given."""
    return measured(model, DOCUMENTS, specs, *(given or (Settings(lengths=LENGTHS),)), **options)


def by_cell(measurement: PerplexityResult) -> dict[tuple[str, str, int, str], Record]:
    return {(r.method, r.protocol, r.length, r.document): r for r in measurement.records}


ASKED: dict[str, tuple[str, Any]] = {
    "none": ("none", lambda scale: None),
    "yarn (scale 4)": ("yarn:scale=4", lambda scale: ("yarn", {"scale": 4})),
    "pi (auto)": ("pi", lambda scale: ("pi", {"scale": scale})),
    **{
        f"dynamic_ntk (update {update})": (
            f"dynamic_ntk:update={update}",
            lambda scale, update=update: ("dynamic_ntk", {"update": update}),
        )
        for update in ("sequence", "request")
    },
    "dynamic_yarn (update row, bucket 16)": (
        "dynamic_yarn:update=row,bucket=16",
        lambda scale: ("dynamic_yarn", {"update": "row", "bucket": 16}),
    ),
    "rerope (window 24)": ("rerope:window=24", lambda scale: ("rerope", {"window": 24})),
    "self_extend (auto)": ("self_extend", lambda scale: ("self_extend", {"scale": scale})),
    "alibi": ("alibi", lambda scale: ("alibi", {})),
    "pi (scale 2) + log_n": (
        "pi:scale=2+log_n",
        lambda scale: ([PositionInterpolation(scale=2), LogN()], {}),
    ),
}
"""By its label, the text of `--patch` and the arguments of `patch_model` at an automatic scale."""
FEW = tuple(label for label in ASKED if not label.startswith(("yarn", "self_extend")))


@pytest.mark.parametrize(("special", "labels"), [((0,), FEW), *late([(0,), ()], [tuple(ASKED)])])
def test_numbers_are_of_full_logits(special: tuple[int, ...], labels: tuple[str, ...]) -> None:
    model, tail = tiny(), 16
    result = run(model, [ASKED[label][0] for label in labels], special=special)
    records = by_cell(result)
    assert len(records) == len(labels) * 2 * len(LENGTHS) * len(DOCUMENTS)
    assert result.head_replay == "bit-exact"
    assert {label for label, shared in shared_prefix(result).items() if not shared} == {*labels} & {
        *("pi (auto)", "self_extend (auto)"),
        *("dynamic_ntk (update sequence)", "dynamic_ntk (update request)"),
    }

    twins: dict[str, Any] = {}
    for (label, protocol, length, name), record in records.items():
        document, patch = BY_NAME[name], ASKED[label][1](max(1.0, length / 64))
        if (known := f"{label} {patch}") not in twins:
            twins[known] = tiny()
            if patch is not None:
                hf_posenc.patch_model(twins[known], patch[0], **patch[1])
        # a copy has no state from before
        twin = copy.deepcopy(twins[known]) if "dynamic" in label else twins[known]
        nats, tokens = reference(twin, document, protocol, length, tail, special)
        assert record.tokens == tokens
        assert record.nats == pytest.approx(nats, rel=2e-6)
        stop = length - len(special) if protocol == "prefix" else len(document.ids)
        assert record.bytes == sum(i % 4 + 1 for i in range(stop - tokens, stop))


def test_truncation_reads_the_last_trained_tokens_in_front_of_each_target() -> None:
    model, tail = tiny(), 16
    result = run(model, ["none", "truncation"], special=(0,))
    records = by_cell(result)
    expected: dict[tuple[str, int, str], float] = {}
    for document, length in itertools.product(DOCUMENTS, LENGTHS):
        most = min(length, 64)
        nats, _ = reference(model, document, "tail", most, tail, (0,))
        expected["tail", length, document.name] = nats
        nats = reference(model, document, "prefix", most, tail, (0,))[0]
        for stop in range(64 + tail, length + 1, tail):  # text in front of a target, 64 tokens
            part = dataclasses.replace(document, ids=document.ids[: stop - 1])
            nats += reference(model, part, "tail", 64, tail, (0,))[0]
        expected["prefix", length, document.name] = nats
    for key, nats in expected.items():
        assert records[("truncation", *key)].nats == pytest.approx(nats, rel=2e-6)
    longest = [records["truncation", "prefix", 256, d.name] for d in DOCUMENTS]
    sums, tokens = result.curves["truncation"]
    assert math.fsum(sums) == pytest.approx(math.fsum(r.nats for r in longest))
    assert tokens == result.curves["none"][1]
    # It differs from what the model gives past its trained length, and not within it.
    for name, length in itertools.product(("tail", "prefix"), LENGTHS):
        pair = [records[m, name, length, "d0"].nats for m in ("none", "truncation")]
        assert (pair[0] == pair[1]) == (length <= 64)
    # A tail as long as what it reads leaves half of that as context.
    both = (Settings(lengths=(256,), protocols=("prefix",), tail_tokens=n) for n in (128, 32))
    long, half = ([r.nats for r in run(model, ["truncation"], s).records] for s in both)
    assert long == half


def test_truncation_is_refused_where_there_is_nothing_to_truncate_to() -> None:
    model = hf_posenc.patch_model(tiny(), "yarn", scale=2)
    with pytest.raises(PosencError, match="carries a saved patch"):
        Candidate.parse("truncation").checked(model)
    with pytest.raises(PosencError, match="names no context length"):
        checked_candidates(zoo.build("bloom"), ["truncation"])


def test_one_forward_gives_the_prefix_of_every_length_for_static_methods_only() -> None:
    model, seen = tiny(), []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[1])
    )
    settings = Settings(lengths=LENGTHS, protocols=("prefix",))
    assert shared_prefix(run(model, ["yarn:scale=4"], settings)) == {"yarn (scale 4)": True}
    # a probe of 9 tokens in two ways; then one forward a document, and no other
    assert [n for n in seen if n > 9] == [256] * len(DOCUMENTS)
    seen.clear()
    dynamic = run(model, ["dynamic_ntk:update=sequence"], settings)
    assert shared_prefix(dynamic) == {"dynamic_ntk (update sequence)": False}
    assert [n for n in seen if n > 9] == [*LENGTHS] * len(DOCUMENTS)
    hook.remove()


@pytest.mark.parametrize("lengths", [LENGTHS, (96, 128, 256)])
def test_a_checkpoint_that_is_dynamic_by_its_config(lengths: tuple[int, ...]) -> None:
    settings = Settings(lengths=lengths, tail_tokens=16)
    measurement = run(tiny(rope_parameters=DYNAMIC), ["none"], settings)
    assert shared_prefix(measurement) == {"none": False}
    for record in measurement.records:
        twin, document = tiny(rope_parameters=DYNAMIC), BY_NAME[record.document]  # without a state
        nats, _ = reference(twin, document, record.protocol, record.length, 16)
        assert record.nats == pytest.approx(nats, rel=2e-6)


def test_the_scale_follows_the_length_and_never_shrinks_a_text() -> None:
    candidate = Candidate.parse("yarn").checked(tiny())
    assert candidate.label == "yarn (auto)"
    assert [candidate.scale_at(length) for length in LENGTHS] == [1.0, 1.0, 2.0, 4.0]
    stored = MethodEntry.of(candidate, shared=False)
    assert [stored.scale_at(length) for length in LENGTHS] == [1.0, 1.0, 2.0, 4.0]
    assert (stored.scale, stored.auto_scale, stored.original) == (None, True, 64)
    own = Candidate.parse("yarn:original_max_position_embeddings=32").checked(tiny())
    assert [own.scale_at(length) for length in LENGTHS] == [1.0, 2.0, 4.0, 8.0]


def test_several_tail_windows_add_up() -> None:
    options: dict[str, Any] = {"tail_tokens": 10, "windows_per_document": 3}
    model, settings = tiny(), Settings(lengths=(32, 64), protocols=("tail",), **options)
    for record in run(model, ["none"], settings).records:
        assert record.tokens == 30
        document = BY_NAME[record.document]
        size = len(document.ids)
        ends = [64, 64 + round((size - 64) / 2), size]
        parts = [TokenizedDocument("part", document.ids[:end], None, "") for end in ends]
        expected = sum(reference(model, part, "tail", record.length, 10)[0] for part in parts)
        assert record.nats == pytest.approx(expected, rel=2e-6)


def test_a_length_that_fails_for_one_document_has_no_records_of_the_others() -> None:
    model, last = tiny(), DOCUMENTS[1].ids[:128]

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if torch.equal(kwargs["input_ids"][0], last):
            raise RuntimeError("no luck")

    model.model.register_forward_pre_hook(refuse, with_kwargs=True)
    measurement = run(model, ["yarn"])
    assert measurement.failures == [Failure("yarn (auto)", "prefix", 128, "RuntimeError: no luck")]
    assert {r.length for r in measurement.records if r.protocol == "prefix"} == {32, 64, 256}
    assert {r.length for r in measurement.records if r.protocol == "tail"} == set(LENGTHS)


@pytest.mark.parametrize(
    ("more", "specs", "labels"),
    [
        ({}, ["none", "yarn"], ["none", "yarn (auto)"]),
        ({"rope_parameters": DYNAMIC}, ["none"], ["none"]),  # more than one forward for all lengths
    ],
)
def test_progress_counts_the_operations_of_the_run(
    more: dict[str, Any], specs: list[str], labels: list[str]
) -> None:
    calls: list[tuple[str, int, int]] = []
    run(tiny(**more), specs, progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert {call[2] for call in calls} == {done[-1]}
    assert list(dict.fromkeys(label for label, *_ in calls)) == labels


def test_the_operations_of_a_method_are_those_of_the_windows_that_it_reads() -> None:
    """The time left follows from them: at 4 times its length, truncation reads no text of that length."""

    def work(spec: str, *lengths: int) -> int:
        model = tiny()
        (candidate,) = checked_candidates(model, [spec])[0]
        settings = Settings(lengths=lengths, protocols=("tail",), tail_tokens=16)
        measurement = PerplexityRun(model, DOCUMENTS[:1], [candidate], settings)
        return sum(measurement.work(measurement.items).values())

    assert work("truncation", 256) == work("none", 64) < work("none", 256) / 4
    assert work("none", 64, 256) == pytest.approx(work("none", 64) + work("none", 256), abs=2)


def test_truncation_takes_the_original_length_that_is_given() -> None:
    model, given = tiny(), "yarn:original_max_position_embeddings=32"
    for specs in (["truncation", given], [given, "none", "truncation"]):
        candidates, original = checked_candidates(model, specs)
        assert original == 32
        assert {candidate.most for candidate in candidates if candidate.truncates} == {32}
    other = "pi:original_max_position_embeddings=16"
    message = "truncation needs one original length, and options give 16, 32"
    with pytest.raises(PosencError, match=message):
        checked_candidates(model, ["truncation", given, other])
    orders = ([other, given], [given, other])
    assert len({checked_candidates(model, specs)[1] for specs in orders}) == 1


def test_several_windows_need_longer_documents_by_default() -> None:
    options = PerplexityOptions(protocols=("tail",), lengths=(64,), windows_per_document=4, limit=2)
    run = prepare(*evaluator(), Source(), options)
    assert [len(document) for document in run.documents] == [4 * 64, 4 * 64]
    assert "up to 4 evenly spaced windows of each document" in run.settings.definition("tail")


# Key tokens against a float64 reference from full logits, and evaluators that are refused.

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
        assert torch.equal(key_tokens(scorer, document_ids(), short=SHORT, step=STEP), found)


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
        pieces = scorer.windows[1:]
        scored = [begin + t for begin, size, first in pieces for t in range(first, size)]
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
    message = r"--longppl self: .*up to its trained length, 64.*self@rerope"
    with pytest.raises(PosencError, match=message):
        evaluator_for(65, "self", model)
    assert evaluator_for(256, "self@rerope", model).candidate.spec == "rerope"
    scaled: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    scaled["original_max_position_embeddings"] = 64
    longer = zoo.build("llama", rope_parameters=scaled)  # config: 64, its scaling reaches 256
    assert evaluator_for(256, "self", longer).short == 64

    def load(name: str) -> tuple[Any, Any]:
        return longer, byte_tokenizer()

    assert evaluator_for(256, "other", model, load).name == "other"
    for name in ("self", "other"):
        with pytest.raises(PosencError, match=rf"length, 256.*{name}@rerope"):
            evaluator_for(257, name, longer, load)
    message = r"other: its tokenizer is not the measured model's.*self@"
    with pytest.raises(PosencError, match=message):
        evaluator_for(64, "other", model, lambda name: evaluator())


def test_a_table_that_a_request_makes_longer_is_measured_length_by_length() -> None:
    """A prefix within the trained length is read with the original table, as by the unpatched model."""
    model, tokenizer = zoo.build("gpt2", vocab_size=VOCABULARY), byte_tokenizer()
    methods, documents = ["none", "interpolate:scale=2,update=request"], [prose(200)]
    options: dict[str, Any] = {"methods": methods, "lengths": [64, 128]}
    result = measure_perplexity(model, tokenizer, documents, protocols=["prefix"], **options)
    none, patched = (cell.perplexity for cell in result.cells if cell.length == 64)
    assert patched == none
    result = measure_perplexity(
        model, tokenizer, documents, protocols=["tail"], prefill=32, **options
    )
    assert [failure.method for failure in result.failures] == ["none"]  # which has no position 64


def test_parameters_that_are_drawn_are_the_same_in_each_run() -> None:
    model, tokenizer, found = tiny(), byte_tokenizer(), list[Any]()
    for seed, methods in enumerate((["none", "kerple_log"], ["none", "fire", "kerple_log"])):
        torch.manual_seed(seed)  # as another process would have it
        result = measure_perplexity(model, tokenizer, [prose(200)], methods=methods, lengths=[64])
        found.append([c.perplexity for c in result.cells if c.method == "kerple_log"])
    assert found[0] == found[1]
