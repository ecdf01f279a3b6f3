"""extend: refusals, the fit to the budget, the choice on one half, every demand on the other, saving and resuming.

Losses and answers are planted at the boundary of the measuring, so that every verdict is known beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_posenc import from_pretrained, get_patch, patch_model
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import extend as room
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.extend import ExtendJob, Plan, depths, extend, prepare
from hf_posenc.evaluation.extend.result import ExtendResult
from hf_posenc.evaluation.measuring import execute
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.store import Shard
from hf_posenc.evaluation.options import ExtendOptions, SweepOptions, duration, read_duration
from hf_posenc.evaluation.perplexity.run import PerplexityRun
from hf_posenc.evaluation.recommend import Advice, recommend
from hf_posenc.evaluation.retrieval.run import RetrievalRun
from hf_posenc.evaluation.tuning import Course
from hf_posenc.evaluation.tuning.search import rope_of
from hf_posenc.evaluation.tuning.sweep import prepare_sweep
from tests.support import zoo
from tests.support.commands import invoke, succeeded
from tests.support.sweep_cases import finished
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose, tiny, tiny_checkpoint

ORIGINAL, TARGET = 64, 512
LEAST = 4.5
"""Seconds that 4 methods, 5 + 5 documents and 24 passkeys take at the planted speed."""
WORDS = byte_tokenizer()
TEXTS = [prose(TARGET + 8, seed) for seed in range(24)]
Loss = Callable[[str, int, int], float]
Finds = Callable[[str, int, bool], bool]
CONTROLS = ("truncation", "attention_sinks", "none")


def job_of(model: Any, texts: Any = TEXTS, **options: Any) -> ExtendJob:
    given: dict[str, Any] = {"target_length": TARGET, "budget": LEAST, **options}
    return prepare(model, WORDS, Source.of(texts), ExtendOptions(**given), command="hf-posenc test")


@pytest.fixture(scope="module")
def advise() -> Callable[..., Advice]:
    """`recommend` that does not try every method on the model once more, which takes a second."""
    known = recommend(tiny(), TARGET, name="")

    def advise(model: Any, target: int, **_: Any) -> Advice:
        return recommend(model, 1) if target == 1 else dataclasses.replace(known, target=target)

    return advise


@pytest.fixture
def advised(advise: Callable[..., Advice], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no figures either, which takes seconds."""
    monkeypatch.setattr("hf_posenc.evaluation.page.available", lambda: False)
    monkeypatch.setattr(room, "recommend", advise)


@pytest.fixture(scope="module")
def prepared(advise: Callable[..., Advice]) -> ExtendJob:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "recommend", advise)
        return job_of(tiny(), chunk=48, prefill=32)


def with_budget(job: ExtendJob, budget: Any) -> ExtendJob:
    return dataclasses.replace(job, options=dataclasses.replace(job.options, budget=budget))


def fitted(job: ExtendJob, budget: Any = None) -> Plan:
    with Course() as course:
        return (job if budget is None else with_budget(job, budget)).fit(course)[0]


@pytest.fixture
def job(prepared: ExtendJob) -> ExtendJob:
    return with_budget(prepared, LEAST)


def wobble(document: int) -> float:
    """A difference between documents that two halves have alike."""
    return 0.001 * (document // 2 % 3)


def good(label: str, length: int, document: int) -> float:
    """Tables and attention are a little better than the controls, and the same on short texts."""
    if length == ORIGINAL:
        return 2.0
    return (5.0 if label == "none" else 2.0) - 0.01 * (label not in CONTROLS) + wobble(document)


def only_methods(label: str, order: int, far: bool) -> bool:
    """Return True if a method ranks the needle of a sample first; truncation does where it sees the needle."""
    return label != "truncation" or not far


def nobody(label: str, order: int, far: bool) -> bool:
    return False


def few_far_ones(label: str, order: int, far: bool) -> bool:
    return not far or (label != "truncation" and order < 5)


def near_ones_lost(lost: int) -> Finds:
    """Methods find every needle but some of the near ones, truncation every near one."""
    return lambda label, order, far: not far if label == "truncation" else far or order >= 12 + lost


@dataclasses.dataclass
class Planted:
    """Plants losses by label, length and document, and finds; counts what is measured."""

    loss: Loss = good
    finds: Finds = only_methods
    seconds: float = 1e-4  # a token
    stop_after: int | None = None
    count: int = 0

    def install(self, patch: pytest.MonkeyPatch) -> Planted:
        # Nothing reads the model, so it is not patched either.
        patch.setattr(execute, "patched_in", lambda *_: contextlib.nullcontext())
        patch.setattr(PerplexityRun, "measure", lambda _, item, attempt: self.losses(item, attempt))
        patch.setattr(RetrievalRun, "measure", lambda _, item, attempt: self.answer(item, attempt))
        return self

    def _spend(self, item: Any, attempt: Any) -> None:
        if self.count == self.stop_after:
            raise KeyboardInterrupt
        self.count += 1
        attempt._seconds = self.seconds * item.cost

    def losses(self, item: Any, attempt: Any) -> dict[str, Any]:
        self._spend(item, attempt)
        sums = []
        for span in (span for window in item.windows for span in window.spans):
            tokens, document = span.stop - span.first, int(re.findall(r"\d+", item.document)[-1])
            nats = self.loss(item.label, span.length, document) * tokens
            sums.append([*span.cell, nats, tokens, None, None, nats, float(tokens)])
        return {"sums": sums, "curve": None, "forwarded": item.cost}

    def answer(self, item: Any, attempt: Any) -> dict[str, Any]:
        self._spend(item, attempt)
        distance = round((1 - item.sample.depth) * item.length)
        found = self.finds(item.label, item.order, distance > ORIGINAL)
        values = {"correct": found, "score": float(found), "nats": 1.0, "rank": 1 if found else 5}
        return {**values, "candidates": 11, "distance": distance}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted().install(monkeypatch)


@pytest.fixture(scope="module")
def plain(prepared: ExtendJob) -> ExtendResult:
    """The result of good methods, for tests that change a copy."""
    with pytest.MonkeyPatch.context() as patch:
        Planted().install(patch)
        return finished(with_budget(prepared, LEAST))


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
YARN = {**LINEAR, "rope_type": "yarn", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("target", "rope", "message"),
    [
        (64, None, "reads 64 tokens, and --target-length 64 is no more: it is long"),
        (100, YARN, "reads 128 tokens by its rope_type yarn, and --target-length 100 is no more"),
        (TARGET, YARN, "is scaled already, by rope_type yarn from 64 to 128 tokens. Extend the ch"),
        (TARGET, LINEAR, "scaled already, by rope_type linear from 64 to 128 or from 32 to 64 to"),
        (700, None, "No document can be used"),
    ],
)
@pytest.mark.usefixtures("advised")
def test_a_target_that_needs_no_extension_or_cannot_be_judged_is_refused(
    target: int, rope: dict[str, Any] | None, message: str
) -> None:
    config = {} if rope is None else {"rope_parameters": rope}
    with pytest.raises(PosencError, match=re.escape(message)):
        job_of(tiny(**config), target_length=target)


def test_a_patched_model_is_refused_and_one_without_a_length() -> None:
    model = patch_model(tiny(), "yarn", scale=2)
    with pytest.raises(PosencError, match="is extended already: it carries a saved patch"):
        job_of(model)
    assert get_patch(model) is not None
    for refuses in (job_of, rope_of):
        with pytest.raises(PosencError, match=r"Give max_position_embeddings in config\.json, the"):
            refuses(zoo.build("recurrent_gemma"))


@pytest.mark.usefixtures("advised")
def test_too_few_documents_are_refused_and_few_are_named(planted: Planted) -> None:
    with pytest.raises(PosencError, match="3 of the documents have 512 tokens; 4 are needed"):
        job_of(tiny(), TEXTS[:3])
    result = finished(job_of(tiny(), TEXTS[:6]))
    assert result.extended
    assert [line for line in result.remarks if "6 documents are long enough, 10 are needed" in line]


def test_what_the_options_cannot_be() -> None:
    assert [read_duration(text, "t") for text in ("90s", "30m", "1h30m", 7)] == [90, 1800, 5400, 7]
    shown = ["1 s", "59 s", "1 min 30 s", "10 min", "1 h 30 min"]
    assert [duration(s) for s in (0.2, 59, 90, 600, 5400)] == shown
    for budget in ("", "30", "m", "1.2.3s", -1, True):
        with pytest.raises(PosencError, match="is no time; give it as 90s, 30m or 1h30m"):
            ExtendOptions(budget=budget)  # type: ignore[arg-type]
    with pytest.raises(PosencError, match="max_regression is a number of at least 0"):
        ExtendOptions(max_regression=-0.1)


def test_another_model_in_a_folder_stays(job: ExtendJob, planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PosencError, match=r"holds another model\. Give another --output"):
        job.run(tmp_path)
    assert planted.count == 0


@pytest.mark.parametrize("budget", [5, 8, 11, 100])
def test_the_plan_fits_the_budget_and_says_what_it_leaves_out(
    budget: int, job: ExtendJob, planted: Planted
) -> None:
    small = with_budget(job, budget)
    plan, rate = fitted(small), 1e-4
    assert plan.tokens * rate <= budget
    result: Any = finished(small)
    assert result.plan["seconds_per_token"] == pytest.approx(rate)
    # the estimate covers what is measured; the answers of passkeys come on top of the planted cost
    assert 0.7 * plan.tokens * rate < result.plan["measured"] <= plan.tokens * rate
    assert len(result.choosing.documents) == plan.documents
    assert len(result.kinds) == 2 * plan.each
    assert len(result.perplexity.documents) == plan.documents
    left = [line for line in result.remarks if "leaves out" in line]
    assert bool(left) == (budget < 100)
    if budget == 5:
        assert "the methods" in left[0]
        assert "documents" in left[0]


@pytest.mark.usefixtures("planted")
def test_a_larger_budget_never_takes_less(job: ExtendJob) -> None:
    plans = [fitted(job, budget) for budget in (5, 6, 7, 8, 9, 11, 100)]
    kept = [(min(plan.documents, 10), plan.each, plan.samples) for plan in plans]
    assert kept == sorted(kept)
    assert len(set(kept)) > 3
    assert (plans[-1].documents, plans[-1].each, plans[-1].samples) == (12, 3, 10)


def test_a_short_budget_names_the_time(job: ExtendJob, monkeypatch: pytest.MonkeyPatch) -> None:
    Planted(seconds=1.0).install(monkeypatch)
    with pytest.raises(PosencError, match="--budget 1 h is too short") as caught:
        with_budget(job, "1h").run()
    minutes = int(re.findall(r"--budget (\d+)m,", str(caught.value))[0])
    assert fitted(job, f"{minutes}m").documents == 5
    with pytest.raises(PosencError, match="is too short"):
        fitted(job, f"{minutes - 1}m")


def test_all_demands_met_saves_a_model_with_the_same_logits(
    job: ExtendJob, planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def verified(folder: Path, model: Any, *, plain: bool) -> str:
        asked.append(plain)
        ids = torch.arange(200)[None] % VOCABULARY
        with torch.no_grad():
            torch.testing.assert_close(from_pretrained(folder)(ids).logits, model(ids).logits)
        return "verified"

    monkeypatch.setattr(room, "verify_export", verified)
    monkeypatch.setattr(room, "require", lambda _: None)
    result = finished(job, tmp_path)
    assert result.extended
    assert all(demand.met for demand in result.demands)
    assert result.lines()[0].startswith("Extend to 512 tokens: ")
    assert len(result.lines()) == 5
    read: Any = result.retrieval  # the passkeys in pieces of the same sizes
    assert (read.settings.chunk, read.settings.prefill) == (48, 32)
    assert result.kinds[str(result.winner)] == "table"
    assert asked == [True]
    patch = zoo.in_force(from_pretrained(tmp_path))
    recipe = dict(result.recipe or {})
    assert recipe.pop("recipe")
    assert patch.config.to_dict() == recipe
    assert get_patch(job.whole.model) is None
    card = (tmp_path / "README.md").read_text()
    assert result.lines()[1] in card
    assert "| vllm | yes: hf-posenc export PATH --to vllm |" in card
    far = Candidate.parse("ntk:scale=9").checked(job.whole.model)  # the least scale that reaches
    job._save(result, far, tmp_path / "ntk")
    assert "names 576 tokens, by the method's scale; only 512 are" in result.remarks[-1]
    monkeypatch.setattr(room, "export", lambda *_: SimpleNamespace(plugin=(), possible=False))
    job._save(result, far, tmp_path / "ntk")
    assert "yes, by our plug-in: hf-posenc export" in (tmp_path / "ntk/README.md").read_text()


def losing_to(control: str, ratio: float = 0.03) -> Loss:
    def loss(label: str, length: int, document: int) -> float:
        return good(label, length, document) - ratio * (label == control and length == TARGET)

    return loss


def slightly_worse(label: str, length: int, document: int) -> float:
    """All methods are 1 % worse than truncation in every document: within the tolerance, and significant."""
    worse = 0.01 * (label not in CONTROLS) + 0.01
    return good(label, length, document) + worse * (length == TARGET and label not in CONTROLS)


def short_texts_suffer(label: str, length: int, document: int) -> float:
    return good(label, length, document) + 0.05 * (label not in CONTROLS and length == ORIGINAL)


LONG = ["long texts against truncation", "long texts against attention_sinks"]


@pytest.mark.parametrize(
    ("loss", "finds", "failed"),
    [
        (losing_to("truncation", 0.05), only_methods, LONG[:1]),
        (losing_to("attention_sinks", 0.05), only_methods, LONG[1:]),
        (slightly_worse, only_methods, LONG),
        (good, lambda *_: True, ["needles beyond 64 tokens"]),
        (good, few_far_ones, ["needles beyond 64 tokens"]),
        (good, near_ones_lost(6), ["needles within 64 tokens"]),
        (short_texts_suffer, only_methods, ["short texts"]),
    ],
)
def test_one_demand_that_is_not_met_is_enough(
    loss: Loss, finds: Finds, failed: list[str], job: ExtendJob, planted: Planted, tmp_path: Path
) -> None:
    planted.loss, planted.finds = loss, finds
    result = finished(job, tmp_path)
    assert not result.extended
    assert [demand.name for demand in result.demands if not demand.met] == failed
    first = result.lines()[0]
    assert first.startswith("Do not extend to 512 tokens: ")
    assert all(name in first for name in failed)
    assert "Truncate texts to the last 64 tokens, or fine-tune: hf-posenc finetune" in first
    assert "NOT MET: " in "".join(result.lines()[1:4])
    assert not (tmp_path / "config.json").exists()
    assert result.recipe is None


def noisy(label: str, length: int, document: int) -> float:
    """Methods are 1 % worse than truncation on average, and 10 % better or worse in every document."""
    noise = 0.1 * (-1) ** (document // 2) * (label not in CONTROLS and length == TARGET)
    return good(label, length, document) + noise + 0.02 * bool(noise)


NEAR = "within 64 tokens: ranks the key first of 11 in 7 (32-81 %) of 12, truncation 12 (76-100 %); p = 0.062"


@pytest.mark.parametrize(
    ("loss", "finds", "budget", "line", "said"),
    [(noisy, only_methods, 100, 1, "1.01"), (good, near_ones_lost(5), LEAST, 2, NEAR)],
)
def test_a_difference_within_the_tolerance_that_may_be_chance_is_no_loss(
    loss: Loss, finds: Finds, budget: float, line: int, said: str, job: ExtendJob, planted: Planted
) -> None:
    planted.loss, planted.finds = loss, finds
    result = finished(with_budget(job, budget))
    assert result.extended
    assert said in result.lines()[line]


def test_a_result_without_near_needles_has_no_demand_on_them(plain: ExtendResult) -> None:
    values = plain.to_dict()
    rows = values["retrieval"]["records"]
    values["retrieval"]["records"] = [row for row in rows if (row["distance"] or 0) > ORIGINAL]
    result = ExtendResult.from_dict(values)
    assert result.extended
    assert "within" not in result.lines()[2]


def test_methods_that_fail_are_an_answer(job: ExtendJob, planted: Planted, tmp_path: Path) -> None:
    planted.loss = lambda label, *key: good(label, *key) if label in CONTROLS else float("nan")
    result = finished(job, tmp_path)
    assert result.winner is None
    assert result.lines()[0].startswith("Do not extend to 512 tokens: no method gave numbers.")
    read = ExtendResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert read.lines() == result.lines()


def best_is(kind: str, job: ExtendJob, gain: float) -> Loss:
    """The first method of a kind is better than all others by this much, in every document alike."""
    label = job.methods(kind)[0].label
    return lambda *key: good(*key) - gain * (key[0] == label and key[1] == TARGET)


def table_within_noise(label: str, length: int, document: int, job: ExtendJob) -> float:
    """Attention is the best by a hair, with more noise than that."""
    one = best_is("attention", job, 0.005)(label, length, document)
    noise = {0: -0.03, 1: 0.02, 2: 0.005}[document // 2 % 3]
    return one + noise * (job.kinds.get(label) == "attention")


def tables_far_worse(label: str, length: int, document: int, job: ExtendJob) -> float:
    """Tables are 5 % worse, and 100 % here and there: no interval tells them apart."""
    far = length == TARGET and job.kinds.get(label) == "table"
    return good(label, length, document) + far * (0.05 + 0.7 * (-1) ** (document // 2))


def best_attention(label: str, length: int, document: int, job: ExtendJob) -> float:
    return best_is("attention", job, 0.012)(label, length, document)


@pytest.mark.parametrize(
    ("loss", "budget", "kind"),
    [
        (table_within_noise, 100, "table"),  # equal, and a table costs nothing
        (tables_far_worse, 100, "attention"),  # few documents do not make them equal
        (best_attention, LEAST, "attention"),
    ],
)
def test_among_equals_a_table_comes_before_attention(
    loss: Any, budget: float, kind: str, job: ExtendJob, planted: Planted
) -> None:
    planted.loss = lambda *key: loss(*key, job)
    result = finished(with_budget(job, budget))
    assert result.kinds[result.choice.ranked[0]] == "attention"
    assert result.kinds[str(result.winner)] == kind
    if loss is best_attention:
        assert result.choice.equal == (result.winner,)


def test_the_reporting_half_does_not_choose(job: ExtendJob, planted: Planted) -> None:
    """Every method but the chosen one is far better in the documents that report."""
    table = best_is("table", job, 0.1)
    chosen = job.methods("table")[0].label

    def loss(label: str, length: int, document: int) -> float:
        if document % 2 == 0 or label in CONTROLS:
            return table(label, length, document)
        worse = 0.2 if label == chosen else -0.5
        return good(label, length, document) + worse * (length == TARGET)

    planted.loss = loss
    result = finished(job)
    assert result.winner == chosen
    assert not result.extended
    parts: Any = (result.choosing, result.perplexity)
    names = [{document["name"] for document in part.documents} for part in parts]
    assert names[0] == {f"#{n}" for n in range(0, 10, 2)}
    assert names[1] == {f"#{n}" for n in range(1, 10, 2)}


def test_a_killed_run_resumes_and_another_budget_reuses_its_records(
    job: ExtendJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = Planted(finds=nobody).install(monkeypatch)
    job = with_budget(job, 5)
    expected = finished(job, tmp_path / "whole")
    for stop in (3, whole.count // 2, whole.count - 2):
        Planted(finds=nobody, stop_after=stop).install(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            job.run(tmp_path / str(stop))
        rest = Planted(finds=nobody).install(monkeypatch)
        assert finished(job, tmp_path / str(stop)).to_dict() == expected.to_dict()
        assert rest.count == whole.count - stop
    again = Planted(seconds=9.0, finds=nobody).install(monkeypatch)
    result = finished(with_budget(job, LEAST), tmp_path / "whole")
    assert again.count == 0
    assert len(result.choosing.documents) < len(expected.choosing.documents)


@pytest.mark.parametrize(
    "tail", [{}, {"tail_tokens": 16, "windows_per_document": 2, "bos": "never"}]
)
@pytest.mark.usefixtures("advised")
def test_what_a_sweep_has_measured_is_not_measured_again(
    tail: dict[str, Any], planted: Planted, tmp_path: Path
) -> None:
    """A method by its target length is that by its scale; both commands take the options of the tail."""
    planted.finds = nobody  # nothing is saved
    job = job_of(tiny(), budget=100, **tail)
    methods = [str(candidate.method) for candidate in job.taken(3)]
    given: dict[str, Any] = {"target_length": TARGET, "scales": (8.0,), "first_documents": 24}
    options = SweepOptions(methods=methods, **given, **tail)
    prepare_sweep(job.whole.model, WORDS, Source.of(TEXTS), options).run(tmp_path)
    planted.count = 0
    finished(job, tmp_path)
    left, planted.count = planted.count, 0
    finished(job)
    # all windows of all methods are the sweep's, and the passkeys are left
    assert (left, planted.count) == (2 * 8 * 10, 2 * 8 * 10 + 12 * (7 + 4))


@pytest.mark.slow
def test_two_processes_share_the_measurements_and_the_first_has_the_verdict(
    job: ExtendJob, planted: Planted, tmp_path: Path
) -> None:
    planted.finds = nobody  # nothing is saved
    expected, alone = finished(job, tmp_path / "alone"), planted.count
    planted.count = 0

    def second() -> None:
        result = with_budget(job, LEAST).run(tmp_path / "shared", Shard(1, 2))
        (tmp_path / "second").write_text(f"{result} {planted.count}")

    process = multiprocessing.get_context("fork").Process(target=second)  # what is planted stays
    process.start()
    first: Any = with_budget(job, LEAST).run(tmp_path / "shared", Shard(0, 2))
    process.join(60)
    assert first.to_dict() == expected.to_dict()
    result, count = (tmp_path / "second").read_text().split()
    assert result == "None"
    assert int(count) > 0
    assert planted.count + int(count) == alone


def test_an_earlier_verdict_is_named(job: ExtendJob, planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "config.json").write_text("{}")
    planted.finds = nobody
    said = finished(job, tmp_path).remarks[-1]
    assert "an earlier run saved, and this one does not confirm it" in said


def test_exact_answers_count_where_the_model_can_write_them(plain: ExtendResult) -> None:
    assert not plain.answers  # a passkey does not fit into 64 tokens
    retrieval: Any = plain.retrieval
    own = [r for r in retrieval.records if r.method == "truncation"]
    short = [dataclasses.replace(r, length=ORIGINAL, correct=True) for r in own]
    changed = [dataclasses.replace(r, correct=False) for r in retrieval.records]
    able = dataclasses.replace(retrieval, records=[*changed, *short])
    judged = dataclasses.replace(plain, retrieval=able)
    assert judged.answers
    assert not judged.extended  # ranked first, never written out
    assert judged.demands[2].numbers.startswith("answers 0 (0-24 %) of 12")


@pytest.mark.parametrize("target", [80, 128, 512, 4096])
def test_half_of_the_depths_are_farther_back_than_the_original_length(target: int) -> None:
    places = depths(64, target)
    assert sorted(set(places)) == list(places)
    distances = [(1 - depth) * target for depth in places]
    assert distances[0] == target
    assert [distance > 64 for distance in distances] == 4 * [True] + 4 * [False]
    assert distances[-1] == 0


@pytest.mark.usefixtures("advised")
def test_in_python_files_are_written_verdict_first(planted: Planted, tmp_path: Path) -> None:
    planted.finds = nobody
    model = tiny()
    result = extend(model, WORDS, TEXTS, output=tmp_path, target_length=TARGET, budget=LEAST)
    values = json.loads((tmp_path / "extend.json").read_text())
    assert ExtendResult.from_dict(values).to_dict() == result.to_dict()
    assert values["verdict"] == "do not extend"
    page = (tmp_path / "report.html").read_text()
    main = page[page.index('<h2 id="verdict">') :]
    assert main.index("Do not extend to 512 tokens") < main.index("Perplexity (run 1)</a>")
    assert "Not met: needles beyond 64 tokens" in page
    assert get_patch(model) is None


@pytest.mark.usefixtures("advised")
def test_the_command_ends_with_the_verdict_and_status_0(planted: Planted, tmp_path: Path) -> None:
    planted.finds = nobody
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=1)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:02}.txt").write_text(text)
    out = tmp_path / "out"
    given = [str(folder), "--text", str(tmp_path), "--target-length", "512"]
    given += ["--budget", f"{LEAST}s"]
    text = " ".join(succeeded("extend", *given, "--no-plot", "--output", out).output.split())
    assert "Do not extend to 512 tokens: " in text
    assert "or fine-tune: hf-posenc finetune" in text
    assert f"--model {folder} --text YOUR_TRAINING_TEXT --score-text {tmp_path}" in text
    assert (out / "report.html").is_file()
    assert invoke("extend", folder, "--target-length", "32").exit_code == 2
    dry = invoke("extend", *given, "--dry-run")
    assert "model.safetensors: not text" in dry.stderr
    planned = r"\d+ methods, \d+ \+ \d+ documents and \d+ passkeys: about \d+ s of 4 s\. That is at the rate"
    assert re.search(planned, " ".join(dry.output.split()))


@pytest.mark.slow
def test_the_embedded_model_from_end_to_end(tmp_path: Path) -> None:
    """Twice the trained length: saved, verified in a process of its own, exported; and once more from the records."""
    given = ["extend", "--target-length", "512", "--budget", "10m", "--max-regression", "0.2"]
    succeeded(*(given := [*given, "--no-plot", "--output", str(tmp_path)]))
    values = json.loads((tmp_path / "extend.json").read_text())
    assert values["verdict"] == "extend", values["lines"]
    assert "the same model" in values["saved"]["verified"]
    assert get_patch(from_pretrained(tmp_path)) is not None
    succeeded(*given)
    assert json.loads((tmp_path / "extend.json").read_text()) == values
