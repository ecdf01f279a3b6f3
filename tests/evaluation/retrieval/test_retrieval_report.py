"""Tables and figures of a retrieval run, and its command."""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.grid import MethodEntry, percent
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.execute import execute
from hf_posenc.evaluation.measuring.store import Records, Shard
from hf_posenc.evaluation.plots import available
from hf_posenc.evaluation.retrieval.result import (
    Failure,
    LeftOut,
    Record,
    RetrievalResult,
    mcnemar,
    summarize,
    wilson,
)
from hf_posenc.evaluation.retrieval.run import RetrievalRun, measure_retrieval
from hf_posenc.evaluation.retrieval.tasks import RetrievalSettings
from hf_posenc.files import to_json
from hf_posenc.lengths import even_depths
from tests.evaluation.retrieval.test_retrieval_scoring import forwards
from tests.support.commands import invoke, refused, succeeded
from tests.support.retrieval_models import Copier
from tests.support.selection import quick
from tests.support.sweep_cases import finished
from tests.support.tiny_text import byte_tokenizer, prose, tiny, tiny_checkpoint

LENGTHS, DEPTHS = (256, 512, 1024), (0.0, 0.5, 1.0)
MODEL = {"name": "m", "class": "C", "parameters": 1, "dtype": "float32", "device": "cpu"}
KNOWN: dict[str, Any] = {"model": {**MODEL, "attention": "sdpa"}, "haystack": {"kind": "noise"}}


def result(*, right: bool = True, rank: int = 1, ranks: bool = True) -> RetrievalResult:
    """`good` finds everything; `bad` within 256 tokens, or at the end, and has no memory for more than 512."""
    settings = RetrievalSettings(LENGTHS, ("passkey", "vt"), DEPTHS, 2, 4 if ranks else 0)
    records = [
        Record(
            method=method,
            task=task,
            length=length,
            depth=depth,
            sample=sample,
            correct=right and (method == "good (auto)" or length == 256 or depth == 1.0),
            score=1.0,
            nats=1.0,
            rank=(rank if method == "good (auto)" or length == 256 else 4) if ranks else None,
            candidates=5 if ranks else None,
            distance=int(length * (1 - (depth or 0) / 2)),
        )
        for method in ("good (auto)", "bad")
        for length in LENGTHS
        for task in ("passkey", "vt")
        for depth in (DEPTHS if task == "passkey" else (None,))
        for sample in range(2)
        if not (method == "bad" and length == 1024) and not (task == "vt" and length == 256)
    ]
    return RetrievalResult(
        **KNOWN,
        settings=settings,
        original=256,
        candidates=[
            MethodEntry(label, label, method, [], {}, None, method is not None, 256, False)
            for label, method in (("good (auto)", "yarn"), ("bad", None))
        ],
        records=records,
        failures=[Failure("bad", task, 1024, "out of memory") for task in ("passkey", "vt")],
        left_out=[LeftOut("vt", 256, 300)],
    )


@pytest.mark.parametrize("ranks", [True, False])
def test_columns_and_marks_of_a_table(ranks: bool) -> None:
    passkey, chain = result(ranks=ranks).tables()
    chance = ["first by chance", "20%", "20%", "20%", *[""] * 4] if ranks else [""] * 8
    heads = ["method", "256\nx1", "512\nx2", "1,024\nx4", "passes\n80%", "k_max\n20%"]
    assert [column.head for column in passkey.columns] == [*heads, "within\n256", "beyond\n256"]
    assert [column.footer for column in passkey.columns] == chance
    assert [column.numeric for column in passkey.columns] == [False] + [True] * 7
    assert [column.head for column in chain.columns] == heads[:-1]
    assert chain.columns[1].footer == ("-" if ranks else "")  # no prompt is as short

    def spans(row: int, place: int) -> list[tuple[str, str]]:
        return [(span.text, span.mark) for span in passkey.rows[row].fields[place].spans]

    good = [("100%", "best"), ("\n61-100", "aside")]
    bad = [("33%", ""), ("\n10-70", "aside")]
    assert spans(0, 2) == good + ([("\n1st 100%", ""), ("\n61-100", "aside")] if ranks else [])
    assert spans(1, 2) == bad + ([("\n1st 0%", "aside"), ("\n0-39", "aside")] if ranks else [])
    table, _ = result(right=False, ranks=ranks).tables()
    first, nothing = (row.fields[2].spans[0] for row in table.rows)
    assert (first.text, first.mark) == ("0%", "best" if ranks else "")  # by rank alone
    assert (nothing.text, nothing.mark) == ("0%", "")  # the best of nothing is no best


def test_needles_beyond_what_truncation_reads_are_a_column_of_their_own() -> None:
    found, original = result(), 256
    for far, count in ((False, 2), (True, 4 + 6)):  # at 512 and 1,024 tokens
        needles = found.needles("good (auto)", "passkey", far=far)
        assert len(needles) == count
        assert all(((r.distance or 0) > original) == far and r.length > 256 for r in needles)
        assert not found.needles("bad", "passkey", far=far)  # it has no number at 1,024 tokens
    for record in found.records:  # finds only what is near
        object.__setattr__(record, "correct", (record.distance or 0) <= original)
    good, bad = (row.fields[-2:] for row in found.tables()[0].rows)
    assert [field.text.split("\n")[:2] for field in good] == [["100%", "34-100"], ["0%", "0-28"]]
    assert [field.text for field in bad] == ["-", "-"]
    assert any(line.startswith("within, beyond: needles within 256") for line in found.notes())
    found.original = None
    assert len(found.tables()[0].columns) == 6


def test_notes_say_what_a_reader_must_know() -> None:
    found = result()
    object.__setattr__(found.records[0], "rank", None)
    said = "\n".join([*found.notes(), *found.guide()])
    for text in (
        "passkey at 256 tokens: no rank of 1 answers",
        "6 samples at every length (3 depths, 2 each; seed 0)",
        "most probable of 5 candidates",
        "Wilson",
        "(auto): scale = length / 256",
        "vt needs at least 300 tokens",
    ):
        assert text in said
    assert "own text" not in said
    assert "the same question about others" not in said
    others = result(ranks=False)
    others.haystack = {"kind": "text"}
    assert "own text" in (said := "\n".join(others.notes()))
    assert "most probable of" not in said
    for ranks in (True, False):
        others = result(ranks=ranks)
        others.settings = dataclasses.replace(others.settings, tasks=("passkey", "babilong_qa1"))
        ranked = [line for line in others.notes() if "are ranked by how much more" in line]
        assert [line.partition(":")[0] for line in ranked] == ["babilong_qa1"] * ranks
    others.settings = dataclasses.replace(others.settings, tasks=("fwe",))
    assert not any("k_max" in line or "beyond" in line for line in others.notes())
    assert list(result().problems()) == [
        "bad: passkey failed at length 1,024: out of memory",
        "bad: vt failed at length 1,024: out of memory",
    ]


def test_chance_is_called_chance() -> None:
    never = "\n".join(result(right=False, rank=3).guide())
    assert "passkey: no method ranks the answer first more often than chance" in never
    ranked = "\n".join(result(right=False, rank=1).guide())
    assert "passkey: the model never gives an answer outright" in ranked
    unranked = result(ranks=False, right=False)
    assert not list(unranked.guide())
    unranked.settings = dataclasses.replace(unranked.settings, lengths=(256, 512))
    assert all("good (auto) answers 0" in line for line in unranked.findings())
    both = result()
    assert not list(both.guide())
    both.cells = [c for c in both.cells if c.task == "vt"]
    assert not list(both.guide())  # where nothing is measured, nothing is known
    both.cells += [c for c in result(right=False, rank=3).cells if c.task == "passkey"]
    assert [line.partition(":")[0] for line in both.guide()] == ["passkey"]


def test_shares_are_whole_percent_but_never_lie_about_0_and_100() -> None:
    shares = (0.0, 0.001, 0.25, 0.999, 1.0)
    assert [percent(share) for share in shares] == ["0%", "0.1%", "25%", "99.9%", "100%"]


def shown_by(panel: Any) -> Any:
    """The numbers of a heat map; NaN where there is none."""
    import numpy as np

    return np.ma.filled(panel.get_images()[0].get_array(), np.nan)


@pytest.mark.parametrize(
    ("won", "lost", "as_extreme"),
    [(12, 0, 2), (0, 12, 2), (1, 0, 2), (5, 1, 14), (2, 10, 158), (6, 6, 4096), (7, 6, 8192)],
)
def test_mcnemar_counts_outcomes_as_extreme(won: int, lost: int, as_extreme: int) -> None:
    """Of 2^n equally probable outcomes, in either direction: for 2 of 12, 2 (1 + 12 + 66) = 158."""
    assert mcnemar(won, lost) == as_extreme / 2 ** (won + lost)


def answers(*ranks: int | None) -> list[Record]:
    return [
        Record("m", "passkey", 64, 0.5, sample, rank == 1, 0.5, nats, rank, candidates, distance)
        for sample, rank in enumerate(ranks)
        for candidates, nats, distance in ([(4, 2.0, 8 + sample)] if rank else [(None, None, None)])
    ]


def test_a_cell_is_of_the_samples_that_have_a_rank() -> None:
    (cell,) = summarize(answers(1, None, 3), by_depth=False)
    assert (cell.samples, cell.accuracy, cell.score) == (3, 1 / 3, 0.5)
    assert (cell.first, cell.first_interval) == (0.5, wilson(1, 2))
    assert (cell.chance, cell.rank, cell.nats, cell.distance) == (0.25, 2, 2, 10)
    assert cell.beaten == pytest.approx((3 / 3 + 1 / 3) / 2)
    assert cell.quality == (cell.accuracy, 0.5)
    assert not cell.beats_chance
    assert [each.depth for each in summarize(answers(1, 2), by_depth=True)] == [0.5]
    (sure,) = summarize(answers(*[1] * 9), by_depth=False)
    assert sure.beats_chance  # at least 0.70 of the answers, and 0.25 by chance
    (none,) = summarize(answers(None, None), by_depth=False)
    assert (none.first, none.first_interval, none.chance, none.beaten) == (None,) * 4
    assert (none.quality, none.beats_chance) == ((0, 0), False)


def test_the_papers_numbers_at_their_limits() -> None:
    """A share of exactly 20 % or 80 % is enough; behind the first distance that fails, none counts."""
    measured, (cell,) = result(), summarize(answers(1), by_depth=False)
    shares = {(64, 9): 0.8, (128, 30): 0.2, (256, 70): 0.1, (512, 99): 1.0}
    measured.depth_cells = [
        dataclasses.replace(cell, distance=distance, accuracy=share)
        for (_, distance), share in reversed(shares.items())
    ]
    found = [measured.k_max("m", "passkey", 64, success) for success in (0.2, 0.8, 0.9)]
    assert found == [30, 9, 0]
    measured.depth_cells = [dataclasses.replace(cell, distance=None)]
    assert measured.k_max("m", "passkey", 64) is None
    by_length = [
        dataclasses.replace(cell, length=length, accuracy=share)
        for (length, _), share in shares.items()
    ]
    for cells, expected in (
        (by_length[:3], (64, 0.8)),
        (by_length, (512, pytest.approx((0.8 + 0.2 + 0.1 + 1) / 4))),
        (by_length[1:3], (None, None)),
    ):
        measured.cells = cells
        assert measured.passing("m", "passkey") == expected
    assert summarize([], by_depth=True) == []


@pytest.mark.skipif(not available(), reason="needs matplotlib")
def test_heat_maps_show_every_cell_and_the_trained_length(tmp_path: Path) -> None:
    import numpy as np

    drawn = result().plot()
    panels = [axes for axes in drawn.get_axes() if axes.get_images() and axes.get_title(loc="left")]
    assert [panel.get_title(loc="left") for panel in panels] == ["good (auto)", "bad"] * 2
    good, bad, *_ = (shown_by(panel) for panel in panels)
    assert (good == 1.0).all()
    assert good.shape == (3, 3)  # depths x lengths
    assert (bad[:, 0] == 1.0).all()
    assert list(bad[:, 1]) == [0.0, 0.0, 1.0]  # the front of the prompt on top
    assert np.isnan(bad[:, 2]).all()
    assert {text.get_text() for text in panels[1].texts} == {"100", "0", "OOM"}
    assert "too short" in {text.get_text() for text in panels[2].texts}
    for panel in panels:
        (line,) = panel.get_lines()
        assert list(np.asarray(line.get_xdata())) == [0.5, 0.5]  # behind 256, the trained length
        assert panel.get_images()[0].get_clim() == (0, 1)
    assert len(drawn.get_axes()) == len(panels) + 1  # one colour bar
    hidden = result(right=False, rank=2).plot()  # accuracy is 0 everywhere: the ranks are drawn
    assert shown_by(hidden.get_axes()[0])[0, 0] == 0.75
    with pytest.raises(PosencError, match="no 'beaten'"):
        result(ranks=False).plot("beaten")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("plot", quick([False, True], [False]))
def test_a_whole_run_by_the_command(plot: bool, model: Path, tmp_path: Path) -> None:
    arguments = [model, "--lengths", "350,400", "--tasks", "passkey", "--samples", 1, "--depths", 3]
    arguments += ["--patch", "none", "--patch", "yarn", "--distractors", 2]
    quiet = () if plot else ("--no-plot",)
    made = succeeded("retrieval", *arguments, *quiet, "--output", tmp_path / "a")
    assert "Retrieval, passkey" in made.output
    assert "yarn (auto)" in made.output
    values = json.loads((tmp_path / "a" / "retrieval.json").read_text())
    assert values["settings"]["depths"] == [0.0, 0.5, 1.0]
    assert values["command"].startswith("hf-posenc retrieval ")
    assert str(tmp_path / "a") not in values["command"]
    assert len(values["records"]) == 2 * 2 * 3
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"retrieval.json", "retrieval.csv", "records"} <= names
    if plot and available():
        assert {"retrieval.png", "retrieval.svg", "retrieval_ranks.png"} <= names
    shared = ("retrieval", *arguments, "--no-plot", "--output", tmp_path / "b", "--shard")
    assert "Share 1 of 2 is done; 6 of 12 parts are the others'" in invoke(*shared, "1/2").output
    assert ("No plot: it needs matplotlib" in succeeded(*shared, "2/2").output) != available()
    files = [(tmp_path / name / "retrieval.json").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_own_text_as_a_haystack(model: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(prose(900))
    options = "--lengths 500 --samples 1 --depths 1 --patch none --no-plot --tasks niah_single_1"
    arguments = [model, *options.split(), "--output", tmp_path / "out"]
    none = ("--haystack", tmp_path / "none.txt")
    made = succeeded("retrieval", *arguments, "--haystack", tmp_path / "book.txt", *none)
    assert "skipped" in made.stderr
    assert "Haystack: your own text" in made.output
    values = json.loads((tmp_path / "out" / "retrieval.json").read_text())
    assert values["haystack"]["characters"] == 901
    assert "No document can be used" in refused("retrieval", *arguments, *none)
    arguments[arguments.index("niah_single_1") :] = ["kv,fwe", "--haystack", tmp_path / "book.txt"]
    assert "kv, fwe would not use it: leave it out" in refused("retrieval", *arguments)


def test_the_numbers_of_the_page_are_those_that_were_measured() -> None:
    docs = Path(__file__).parents[3] / "docs"
    with (docs / "data" / "benchmarks" / "retrieval.csv").open() as file:
        rows = {(r["task"], r["method"], int(r["length"])): r for r in csv.DictReader(file)}
    page = (docs / "retrieval.md").read_text(encoding="utf-8")
    block = page.split("<!-- measured: retrieval -->")[1].split("<!-- end -->")[0]
    task, seen = "", 0
    lengths: list[int] = []
    for line in block.strip().splitlines():
        first, *cells = (part.strip() for part in line.strip("|").split("|"))
        if line.startswith("| `"):
            for length, shown in zip(lengths, cells, strict=True):
                row = rows[task, first.strip("`"), length]
                low, high = (float(row[name]) * 100 for name in ("first_low", "first_high"))
                assert shown == f"{percent(float(row['first']))} ({low:.0f}-{high:.0f})"
                seen += 1
        elif cells and not cells[0].startswith("---"):
            task, lengths = first, [int(cell.replace(",", "")) for cell in cells]
    assert seen == len([row for row in rows.values() if row["status"] == "ok"])
    assert {float(row["accuracy"]) for row in rows.values()} == {0.0}


# Whole runs: cells, failures, shards, resuming, the papers' numbers.

THREE = (400, 800, 1600)


def settings(**given: Any) -> RetrievalSettings:
    usual: dict[str, Any] = {"lengths": THREE, "tasks": ("passkey",), "samples": 2}
    return RetrievalSettings(**{**usual, "distractors": 3, **given})


def run_of(model: Any, **given: Any) -> RetrievalRun:
    none, metadata = Candidate.parse("none"), {**KNOWN, "original": 400}
    return RetrievalRun(model, byte_tokenizer(), [none], settings(**given), metadata=metadata)


def test_a_window_gives_the_papers_numbers(tmp_path: Path) -> None:
    """The heat map is a staircase, and both numbers follow from the distances."""
    window = 500
    result = finished(run_of(Copier(window), depths=even_depths(9)), tmp_path)
    for length in THREE:
        cells = result.by_depth("none", "passkey", length)
        assert [cell.depth for cell in cells] == list(even_depths(9))
        found = [cell.accuracy for cell in cells]
        assert found == sorted(found)  # the nearer, the better
        inside = [cell.distance for cell in cells if cell.accuracy == 1.0]
        assert result.k_max("none", "passkey", length) == max(d for d in inside if d is not None)
        assert all((cell.distance or 0) > window - 120 for cell in cells if cell.accuracy == 0.0)
        assert all((cell.distance or 0) < window for cell in cells if cell.accuracy == 1.0)
    shares = [cell.accuracy for cell in result.cells]
    assert shares[0] == 1.0 > shares[1] > shares[2] > 0.2
    context, mean = result.passing("none", "passkey")
    passed = 1 + max(n for n, share in enumerate(shares) if share >= 0.8)
    assert context == THREE[passed - 1]
    assert mean == pytest.approx(sum(shares[:passed]) / passed)


def test_shards_give_the_same_bytes_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    model = Copier(700)
    alone = to_json(finished(run_of(model), tmp_path / "alone").to_dict())
    assert run_of(model).run(tmp_path / "shared", Shard(1, 2)) is None
    shared: Any = run_of(model).run(tmp_path / "shared", Shard(0, 2))
    assert to_json(shared.to_dict()) == alone
    model.read.clear()
    finished(run_of(model), tmp_path / "alone")
    assert not [n for n in model.read if n > 300]


@pytest.mark.usefixtures("quick_collection")
def test_what_fails_is_a_cell_and_no_crash(tmp_path: Path) -> None:
    model = Copier(most=900, error=torch.OutOfMemoryError("CUDA out of memory"))
    result = finished(run_of(model), tmp_path / "a")
    assert [cell.length for cell in result.cells] == [400, 800]
    assert [(f.length, f.reason) for f in result.failures] == [(1600, "out of memory")]
    assert len([n for n in model.read if n > 900]) == 1  # the other samples are not tried
    broken = finished(run_of(Copier(most=500)), tmp_path / "b")
    assert {f.reason for f in broken.failures} == {"RuntimeError: too long for me"}
    for index in range(3):
        shared: Any = run_of(Copier(most=500)).run(tmp_path / "c", Shard(index, 3))
    assert to_json(shared.to_dict()) == to_json(broken.to_dict())


def test_lengths_that_are_too_short_for_a_task_are_left_out(tmp_path: Path) -> None:
    result = finished(run_of(Copier(), tasks=("passkey", "vt"), lengths=(400, 1900)), tmp_path)
    (left,) = result.left_out
    assert (left.task, left.length) == ("vt", 400)
    assert result.cell("none", "vt", 400) is None
    assert result.cell("none", "vt", 1900) is not None
    assert not run_of(Copier(), tasks=("vt",), lengths=(left.needed,)).left_out
    with pytest.raises(PosencError, match=r"vt needs at least [\d,]+ with this tokenizer"):
        run_of(Copier(), tasks=("vt",), lengths=(left.needed - 1,))
    alone = Candidate.parse("none")
    behind = settings(tasks=("vt",), lengths=(left.needed,))
    message = f"vt needs at least {left.needed + 1:,} "  # a special token too
    with pytest.raises(PosencError, match=message):
        RetrievalRun(Copier(), byte_tokenizer(), [alone], behind, special=[0])


@pytest.mark.parametrize(("update", "long"), [("row", 1), ("sequence", 4)])
def test_what_depends_on_the_length_is_not_read_on_from_a_cache(update: str, long: int) -> None:
    candidate = Candidate.parse(f"dynamic_ntk:update={update}").checked(model := tiny())
    chosen = settings(lengths=(400,), samples=1, depths=(0.5,))
    run, read = RetrievalRun(model, byte_tokenizer(), [candidate], chosen), forwards(model)
    execute(run, Records())
    assert len([n for n in read if n > 300]) == long


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    some: list[Any] = [{}, {"distractors": 0}, {"tasks": ("fwe",)}, {"decode": "generate"}]
    for number, given in enumerate(some):
        result = finished(run_of(Copier(most=1000), **given), tmp_path / str(number))
        values = json.loads(to_json(result.to_dict()))
        assert values["kind"] == "retrieval"
        again = RetrievalResult.from_dict(values)
        assert again == result
        assert again.to_dict() == values
        rows = list(csv.DictReader(io.StringIO(result.files()["retrieval.csv"])))
        overall = [row for row in rows if not row["depth"]]
        generated = "decode" in given  # which this model does at any length
        last = "ok" if generated else "RuntimeError: too long for me"
        first = "too short for the task" if given.get("tasks") == ("fwe",) else "ok"
        assert [row["status"] for row in overall] == [first, "ok", last]
        if generated:
            assert all(record.text is not None and record.rank is None for record in result.records)


def test_the_python_function_patches_measures_and_leaves_no_trace() -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    ids = torch.arange(100)[None]
    logits = model(ids).logits
    options: dict[str, Any] = {"lengths": [400], "tasks": ("passkey",), "depths": (0.5,)}
    options |= {"methods": ["none", "pi", "rerope"], "samples": 1}
    result = measure_retrieval(model, byte_tokenizer(), **options)
    assert [entry.label for entry in result.candidates] == ["none", "pi (auto)", "rerope"]
    assert result.original == 64
    assert result.candidates[1].scale_at(400) == 400 / 64
    nats = [cell.nats for cell in result.cells]
    assert len(set(nats)) == 3  # three different models, for all that the same prompts say
    assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_wilson_intervals() -> None:
    """Published values: Newcombe 1998, table I, method 3."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
