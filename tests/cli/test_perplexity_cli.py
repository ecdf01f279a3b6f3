"""`hf-posenc perplexity`: presets, shares, costs, key tokens; `hf-posenc bench`: its files and its tasks."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from hf_posenc import from_pretrained, patch_model, patched
from hf_posenc.embedded import held_out_documents, model_path
from hf_posenc.evaluation import loading
from hf_posenc.evaluation.bench import BenchResult
from hf_posenc.evaluation.documents import Document, tokenize
from hf_posenc.evaluation.loading import load_model, load_tokenizer
from hf_posenc.evaluation.options import parse_tasks
from hf_posenc.evaluation.perplexity.run import key_tokens
from hf_posenc.evaluation.plots import available
from hf_posenc.evaluation.retrieval.tasks import TASKS
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.evaluation.suites import SUITES
from hf_posenc.files import to_json
from tests.cli.test_cli import read, run
from tests.support.commands import invoke, said, succeeded
from tests.support.selection import late
from tests.support.tiny_text import tiny_checkpoint


def test_the_result_of_another_run_is_kept(model: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, texts, out, "--patch", "none")
    first = (out / "perplexity.json").read_bytes()
    other = run(model, texts, out, "--patch", "yarn")
    assert f"is kept in {out / 'perplexity-1'}" in " ".join(other.stdout.split())
    assert (out / "perplexity-1" / "perplexity.json").read_bytes() == first
    assert (out / "perplexity-1" / "perplexity.csv").exists()
    # has all records of yarn's
    assert "is kept" not in run(model, texts, out, "--patch", "yarn", "--patch", "none").stdout
    assert not (out / "perplexity-2").exists()


def test_default_methods_that_a_model_cannot_take_are_named(texts: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "gpt2", "gpt2")
    given = ("--text", texts, "--lengths", "16,32", "--output", tmp_path, "--no-plot")
    done = succeeded("perplexity", model, *given)
    assert "not measured: attention_sinks, pi, " in " ".join(done.output.split())
    rows = (tmp_path / "perplexity.csv").read_text().splitlines()[1:]
    assert {row.partition(",")[0] for row in rows} == {"none", "truncation"}


@pytest.mark.slow
def test_shares_give_what_one_process_gives(model: Path, texts: Path, tmp_path: Path) -> None:
    arguments = ("--patch", "none", "--patch", "yarn")
    run(model, texts, tmp_path / "one", *arguments)
    first = run(model, texts, tmp_path / "two", *arguments, "--shard", "1/2")
    assert "Share 1 of 2 is done; 10 of 20 parts are the others'." in " ".join(first.stdout.split())
    assert not (tmp_path / "two" / "perplexity.json").exists()
    second = run(model, texts, tmp_path / "two", *arguments, "--shard", "2/2")
    assert "Wrote perplexity.json" in second.stdout
    one, two = (tmp_path / name / "perplexity.json" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    run(model, texts, tmp_path / "two", *arguments)
    assert one.read_bytes() == two.read_bytes()
    assert read(tmp_path / "one")["command"].endswith("--patch none --patch yarn")


def test_a_resumed_run_counts_its_records(model: Path, texts: Path, tmp_path: Path) -> None:
    line = r"Items taken from the records of an earlier run: (\d+); left to measure: (\d+)\."
    patches = (("--patch", "none"), ("--patch", "none", "--patch", "yarn:scale=2")) * 2
    said = [" ".join(run(model, texts, tmp_path, *each).stderr.split()) for each in patches]
    found = [re.findall(line, text) for text in said]
    assert found == [[], [("5", "5")], [("5", "0")], [("10", "0")]]


def test_a_dry_run_prints_the_cost_alone(model: Path, texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "new"
    result = run(model, texts, output, "--patch", "none", "--patch", "yarn", "--dry-run")
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    # 5 documents: the prefix of 128 tokens and tails of 32, 64 and 128; under yarn a prefix for every length
    assert rows["none"][1:3] == ["20", f"{5 * (128 + 32 + 64 + 128):,}"]
    assert rows["yarn"][2:4] == ["30", f"{5 * 2 * (32 + 64 + 128):,}"]
    assert rows["in"][2:4] == ["50", "4,000"]
    text = " ".join(result.stdout.split())
    assert re.search(r"takes about .*, at the rate measured for .*\. Nothing was run\.", text)
    assert not output.exists()


@pytest.mark.parametrize(
    "command",
    [
        "perplexity {model} --text {texts} --lengths 32,64 --patch none --patch yarn --patch rerope",
        "perplexity {model} --text {texts} --lengths 32,64 --patch none --longppl {model}@rerope",
        "retrieval {model} --tasks passkey --lengths 256 --patch none --patch yarn",
        "perplexity {model} --text {texts} --lengths 32,64 --patch fire --patch yarn:scale=2+t5:keep_rope=true",
        "perplexity {model} --text {texts} --lengths 32,64 --protocol prefix --tail-tokens 16",
        "bench {model} --text {texts} --suite smoke --lengths 64,128 --protocol prefix --tail-tokens 16",
        "sweep {model} --text {texts} --target-length 128 --patch pi --patch self_extend",
        "search {model} --text {texts} --target-length 128 --budget 8",
        pytest.param("extend {model} --target-length 512", marks=pytest.mark.slow),
    ],
)
def test_a_dry_run_reads_no_weights_and_runs_no_window(
    command: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    forward = LlamaForCausalLM.forward

    def shapes_alone(self: Any, *arguments: Any, **options: Any) -> Any:
        assert self.lm_head.weight.is_meta, "it was run"
        return forward(self, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", shapes_alone)
    words = command.format(model=folder, texts=texts).split()
    text = said(*words, "--dry-run", "--output", tmp_path / "out")
    assert re.search(r"about \d+ (s|min|h)", text)
    assert "the rate measured for one thread" in text
    assert ("evaluator of longppl needs comes on top" in text) == ("--longppl" in words)


@pytest.mark.parametrize(
    "kind", [*("rerope", "adapter", "t5"), *late(["yarn", "fire", "shaw", "rope_bias"])]
)
def test_a_dry_run_of_a_saved_patch_or_an_adapter_is_that_of_the_loaded_model(
    kind: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny")
    whole, saved = from_pretrained(folder), tmp_path / "saved"
    if kind == "adapter":
        peft = pytest.importorskip("peft")
        patch_model(whole, "yarn", scale=4)
        whole = peft.get_peft_model(whole, peft.LoraConfig(target_modules=["q_proj"]))
    else:
        knobs: dict[str, dict[str, Any]] = {"yarn": {"scale": 4}, "rerope": {"window": 16}}
        patch_model(whole, kind, **knobs.get(kind, {}))
    whole.save_pretrained(saved)
    options = f"--text {texts} --tokenizer {folder} --lengths 32,64 --dry-run --json"
    found = []
    # The one that is replaced comes last: by then the command's modules have imported it.
    for opened in (loading.open_session, loading.open_sizes):
        monkeypatch.setattr("hf_posenc.cli.frame.open_sizes", opened)
        with monkeypatch.context() as patch:
            if opened is loading.open_sizes:
                patch.setattr(loading, "open_session", None)  # which reads weights
            found.append(json.loads(invoke("perplexity", saved, *options.split()).stdout))
    assert found[0] == found[1]
    assert found[0]["weight_bytes"] > 0


def test_a_preset_sets_what_its_peer_has(model: Path, texts: Path, tmp_path: Path) -> None:
    preset = ("--preset", "longlora", "--stride", "64")
    result = run(model, texts, tmp_path, "--patch", "none", *preset)
    assert "Preset longlora: Every window scores all its tokens" in " ".join(result.stdout.split())
    values = read(tmp_path)
    assert values["protocols"] == {
        "stream": "the documents as one stream, windows of L tokens 64 apart; all tokens of every window; "
        "every batch of 32 windows weighs the same, the last and smaller one too"
    }
    assert values["settings"]["base"] == 2.71828
    assert values["model"]["bos"] == {"policy": "never", "token_ids": []}
    assert [document["name"] for document in values["documents"]] == ["stream of 5 documents"]


def test_the_trained_length_beside_longer_ones(model: Path, texts: Path, tmp_path: Path) -> None:
    far = "--protocol sliding --stride 100 --tail-tokens 20 --patch truncation"
    for flag, lengths in (("--short", [64, 128]), ("--no-short", [128]), (far, [128])):
        options = f"--lengths 128 --patch none --patch yarn:scale=2 --no-plot {flag} --output"
        text = said("perplexity", model, "--text", texts, *options.split(), tmp_path)
        assert read(tmp_path)["settings"]["lengths"] == lengths
        line = "Short texts (64 tokens, tail, against none): yarn (scale 2)"
        assert (line in text) == (flag == "--short")
        assert ("needs more than the trained 64 tokens" in text) == (flag == far)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of the embedded model's held-out documents, as files."""
    folder = tmp_path_factory.mktemp("modules")
    for name, text in itertools.islice(held_out_documents(), 2):
        (folder / name.replace("/", "_")).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_key_tokens_are_scored_alone(modules: Path, tmp_path: Path) -> None:
    options = "--lengths 256,1024 --max-doc-tokens 1024 --patch none --no-plot --bos never"
    given = ("perplexity", model_path(), "--text", modules, "--output", tmp_path)
    succeeded(*given, *options.split(), "--longppl", "self@rerope")
    values = read(tmp_path)
    evaluator = values["settings"]["evaluator"]
    assert (evaluator["short"], evaluator["patch"]) == (256, "rerope")
    live, words = load_model(str(model_path())), load_tokenizer(str(model_path()))
    records = {
        (record["document"], record["length"]): record
        for record in values["records"]
        if record["protocol"] == "longppl"
    }
    assert len(records) == 2 * 2
    total = 0
    for path in sorted(modules.iterdir()):
        ids = tokenize(Document("d", path.read_text(encoding="utf-8")), words).tokens(0, 1024)
        losses = TokenScorer(live, ids)(ids)
        with patched(live, "rerope"):
            key = key_tokens(TokenScorer(live, ids), ids, short=256, step=64)
        chosen = losses[key[1:]]
        record = records[str(path), 1024]
        assert record["tokens"] == len(chosen)
        assert record["nats"] == pytest.approx(math.fsum(chosen.tolist()), rel=1e-6)
        assert records[str(path), 256]["tokens"] == 0  # all within the short context
        total += len(chosen)
    assert total > 0
    cells = [cell for cell in values["summary"] if cell["protocol"] == "longppl"]
    assert all(cell["length"] == 1024 for cell in cells)


@pytest.mark.slow
def test_the_smoke_suite_runs_on_a_cpu_and_writes_its_files(tmp_path: Path) -> None:
    result = succeeded("bench", "--suite", "smoke", "--output", tmp_path)
    figures = {"curve.png", "heatmap.png"} if available() else set()
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert written == {"bench.json", "bench.csv", "bench_retrieval.csv", "table.md", *figures}
    text = (tmp_path / "bench.json").read_text()
    read = BenchResult.from_dict(json.loads(text))
    assert to_json(read.to_dict()) == text
    assert (tmp_path / "table.md").read_text() == read._repr_markdown_()
    suite = SUITES["smoke"]
    assert [entry.spec for entry in read.perplexity.candidates] == list(suite.methods)
    assert len(read.perplexity.documents) == suite.documents
    assert read.perplexity.settings.lengths == (256, 512)
    assert read.perplexity.command == "hf-posenc bench --suite smoke"
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert len(rows) == len(suite.methods) * 2 * 2
    assert all(row["status"] == "ok" for row in rows)
    assert read.speed is not None
    assert all(read.speed.row(name).tokens_per_second for name in read.speed.methods)
    rows = [row for row in rows if (row["protocol"], row["length"]) == ("tail", "512")]
    # the embedded model breaks past its trained length, and these methods mend it
    tail = {row["method"]: float(row["perplexity"]) for row in rows}
    assert tail["none"] > 3 * max(tail["truncation"], tail["yarn (auto)"], tail["rerope"])
    assert "Wrote bench.json, bench.csv, table.md, bench_retrieval.csv" in result.output
    assert all(s in result.output for s in ("passkey", "tokens/s", "GiB", "yarn (auto)"))
    _, end = " ".join(result.output.split()).split("seen the needle.")
    for question in ("prefix, 512 tokens", "tail, 512 tokens", "512 tokens"):
        assert f"{question}, truncation as the control" in end  # its findings are the last lines


def test_what_it_will_cost(model: Path, texts: Path, tmp_path: Path) -> None:
    options = "--lengths 64,128 --dry-run --tasks none --patch none --rounds 2 --output"
    result = succeeded(
        "bench", model, "--text", texts / "0.txt", *options.split(), tmp_path / "new"
    )
    assert "timed prefill, warm-ups included: 512 tokens" in result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "tasks"), [("all", tuple(TASKS)), ("none", ()), ("vt, fwe", ("vt", "fwe"))]
)
def test_tasks_by_name(text: str, tasks: tuple[str, ...]) -> None:
    assert parse_tasks(text) == tasks
