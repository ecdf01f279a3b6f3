"""The numbers, recomputed from raw logits in float64."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc.embedded import model_path
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Document, TokenizedDocument, tokenize
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import MethodEntry
from hf_posenc.evaluation.measuring.candidates import Candidate, checked_candidates
from hf_posenc.evaluation.measuring.statistics import Failure, Record
from hf_posenc.evaluation.options import PerplexityOptions
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.perplexity.run import prepare
from hf_posenc.methods import LogN, PositionInterpolation
from tests.support import zoo
from tests.support.perplexities import measured, shared_prefix
from tests.support.selection import late
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

LENGTHS = (32, 64, 128, 256)  # of 64 trained tokens
DOCUMENTS = [
    # token i takes 1, 2, 3, 4, 1, ... bytes, so that it matters which tokens are counted
    dataclasses.replace(plain, byte_ends=torch.cumsum(torch.arange(len(plain.ids)) % 4 + 1, 0))
    for n in range(2)
    for plain in [tokenize(Document(f"d{n}", prose(260 + 41 * n, n)), byte_tokenizer())]
]


def tiny(model_type: str = "llama", **overrides: Any) -> Any:
    return zoo.build(model_type, **{"vocab_size": VOCABULARY, "num_hidden_layers": 1, **overrides})


def run(
    model: Any, specs: list[str], settings: Settings | None = None, **options: Any
) -> PerplexityResult:
    return measured(model, DOCUMENTS, specs, settings or Settings(lengths=LENGTHS), **options)


def by_cell(measurement: PerplexityResult) -> dict[tuple[str, str, int, str], Record]:
    return {(r.method, r.protocol, r.length, r.document): r for r in measurement.records}


def reference(
    model: Any,
    document: TokenizedDocument,
    protocol: str,
    length: int,
    tail: int,
    special: tuple[int, ...] = (),
) -> tuple[float, int]:
    """Total nats and tokens of one document, from one forward of exactly this window, in float64."""
    body = document.ids.tolist()
    room = length - len(special)
    body = body[:room] if protocol == "prefix" else body[-room:]
    window = torch.tensor([[*special, *body]])
    with torch.no_grad():
        log_probabilities = (
            model(input_ids=window, use_cache=False).logits[0].double().log_softmax(-1)
        )
    first = max(1, len(special)) if protocol == "prefix" else length - tail
    losses = [-float(log_probabilities[t - 1, window[0, t]]) for t in range(first, length)]
    return math.fsum(losses), len(losses)


ASKED: dict[str, tuple[str, Any]] = {
    "none": ("none", lambda scale: None),
    "yarn (scale 4)": ("yarn:scale=4", lambda scale: ("yarn", {"scale": 4})),
    "pi (auto)": ("pi", lambda scale: ("pi", {"scale": scale})),
    "dynamic_ntk (update sequence)": (
        "dynamic_ntk:update=sequence",
        lambda scale: ("dynamic_ntk", {"update": "sequence"}),
    ),
    "dynamic_ntk (update request)": (
        "dynamic_ntk:update=request",
        lambda scale: ("dynamic_ntk", {"update": "request"}),
    ),
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
def test_every_number_is_what_full_logits_give(
    special: tuple[int, ...], labels: tuple[str, ...]
) -> None:
    model, tail = tiny(), 16
    result = run(model, [ASKED[label][0] for label in labels], special=special)
    records = by_cell(result)
    assert len(records) == len(labels) * 2 * len(LENGTHS) * len(DOCUMENTS)
    assert result.head_replay == "bit-exact"
    own_forwards = {label for label, shared in shared_prefix(result).items() if not shared}
    assert own_forwards == {*labels} & {
        *("pi (auto)", "self_extend (auto)"),
        *("dynamic_ntk (update sequence)", "dynamic_ntk (update request)"),
    }

    twins: dict[str, Any] = {}
    for (label, protocol, length, name), record in records.items():
        document = next(document for document in DOCUMENTS if document.name == name)
        patch = ASKED[label][1](max(1.0, length / 64))
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
        expected["tail", length, document.name] = reference(
            model, document, "tail", most, tail, (0,)
        )[0]
        nats = reference(model, document, "prefix", most, tail, (0,))[0]
        for stop in range(
            64 + tail, length + 1, tail
        ):  # the text in front of a target, cut to 64 tokens
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
    for name in ("tail", "prefix"):
        for length in LENGTHS:
            pair = [records[m, name, length, "d0"].nats for m in ("none", "truncation")]
            assert (pair[0] == pair[1]) == (length <= 64)


def test_truncation_is_refused_where_there_is_nothing_to_truncate_to() -> None:
    model = hf_posenc.patch_model(tiny(), "yarn", scale=2)
    with pytest.raises(PosencError, match="carries a saved patch"):
        Candidate.parse("truncation").checked(model)
    with pytest.raises(PosencError, match="names no context length"):
        checked_candidates(tiny("bloom"), ["truncation"])


def test_one_forward_gives_the_prefix_of_every_length_for_static_methods_only() -> None:
    model, seen = tiny(), []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[1])
    )
    settings = Settings(lengths=LENGTHS, protocols=("prefix",))
    static = run(model, ["yarn:scale=4"], settings)
    assert shared_prefix(static) == {"yarn (scale 4)": True}
    # a probe of 9 tokens in two ways; then one forward a document, and no other
    assert [n for n in seen if n > 9] == [256] * len(DOCUMENTS)
    seen.clear()
    dynamic = run(model, ["dynamic_ntk:update=sequence"], settings)
    assert shared_prefix(dynamic) == {"dynamic_ntk (update sequence)": False}
    assert [n for n in seen if n > 9] == [*LENGTHS] * len(DOCUMENTS)
    hook.remove()


@pytest.mark.parametrize("lengths", [LENGTHS, (96, 128, 256)])
def test_a_checkpoint_that_is_dynamic_by_its_config(lengths: tuple[int, ...]) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny(rope_parameters=rope)
    measurement = run(model, ["none"], Settings(lengths=lengths, tail_tokens=16))
    assert shared_prefix(measurement) == {"none": False}
    for record in measurement.records:
        document = next(document for document in DOCUMENTS if document.name == record.document)
        # a new model has no state from before
        twin = tiny(rope_parameters=rope)
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
    settings = Settings(
        lengths=(32, 64), protocols=("tail",), tail_tokens=10, windows_per_document=3
    )
    model = tiny()
    for record in run(model, ["none"], settings).records:
        assert record.tokens == 30
        document = next(document for document in DOCUMENTS if document.name == record.document)
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


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


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


def test_truncation_takes_the_original_length_that_is_given() -> None:
    model, given = tiny(), "yarn:original_max_position_embeddings=32"
    for specs in (["truncation", given], [given, "none", "truncation"]):
        candidates, original = checked_candidates(model, specs)
        assert original == 32
        assert {candidate.most for candidate in candidates if candidate.truncates} == {32}
    other = "pi:original_max_position_embeddings=16"
    with pytest.raises(
        PosencError, match="truncation needs one original length, and options give 16, 32"
    ):
        checked_candidates(model, ["truncation", given, other])
    assert (
        checked_candidates(model, [other, given])[1] == checked_candidates(model, [given, other])[1]
    )


def test_several_windows_need_longer_documents_by_default() -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model_path()),
        AutoTokenizer.from_pretrained(model_path()),
    )
    options = PerplexityOptions(protocols=("tail",), lengths=(64,), windows_per_document=4, limit=2)
    run = prepare(model, tokenizer, Source(), options)
    assert [len(document) for document in run.documents] == [4 * 64, 4 * 64]
    assert "up to 4 evenly spaced windows of each document" in run.settings.definition("tail")
