"""Model cards: every number is the one that was measured, every promise of what loads the model is kept."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_posenc import from_pretrained, patch_model, unpatch_model
from hf_posenc.engines import ENGINES, export_source
from hf_posenc.engines.engine import open_source
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Document
from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.training.parameters import choose_parameters
from hf_posenc.training.result import (
    CARD,
    LOG,
    PLOT,
    TrainingLog,
    create_repository,
    print_report,
    published,
    push,
    shown_name,
    write_card,
)
from hf_posenc.training.scoring import FILE as SCORES
from hf_posenc.training.scoring import conclusion, score
from hf_posenc.training.train import command_line
from tests.support import zoo
from tests.support.tiny_text import byte_tokenizer, prose
from tests.training.test_training_scoring import make_scores, make_trainer, tiny_model

TOKEN = "hf_test"


@dataclass
class FakeHub:
    """A hub; a context manager. Everything is uploaded as regular files.

    Attributes:
        files: The content of each repository's files.
        commits: The message of every commit.
        created: What was asked for when a repository was made.
        requests: Every request's method and path.
        fails: Parts of paths that it refuses.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    fails: tuple[str, ...] = ()

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            hub_of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """Its address, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"


class _Handler(BaseHTTPRequestHandler):
    hub_of: FakeHub

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        """Knows who a token's user is, and nothing else."""
        self._read()
        if self._refused():
            return
        if self.path == "/api/whoami-v2":
            self._answer({"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}})
        else:
            self._answer({"error": f"unknown: {self.path}"}, 404)

    def _refused(self) -> bool:
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not known:
            self._answer({"error": "Invalid credentials"}, 401)
        return not known

    def do_POST(self) -> None:
        """Makes a repository, says how files are sent, or takes a commit."""
        body, hub = self._read(), self.hub_of
        if self._refused():
            return None
        if any(part in self.path for part in hub.fails):
            return self._answer({"error": "no room"}, 403)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            hub.created.append(asked)
            hub.files.setdefault(name, {})
            return self._answer({"url": f"{hub.endpoint}/{name}", "name": name})
        if self.path == "/api/validate-yaml":
            content = json.loads(body)["content"]
            errors = [] if content.startswith("---\n") else [{"message": "no metadata"}]
            return self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        if "/branch/" in self.path:
            return self._answer({})
        if "/preupload/" in self.path:
            how, files = {"uploadMode": "regular", "shouldIgnore": False}, json.loads(body)["files"]
            return self._answer({"files": [{"path": file["path"], **how} for file in files]})
        if "/commit/" in self.path:
            return self._answer(self._commit(body))
        return self._answer({"error": f"unknown: {self.path}"}, 404)

    def _commit(self, body: bytes) -> dict[str, Any]:
        name = "/".join(self.path.split("/")[3:5])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.hub_of.commits.append(value["summary"])
            elif entry["key"] == "file":
                self.hub_of.files[name][value["path"]] = base64.b64decode(value["content"])
        number = len(self.hub_of.commits)
        url = f"{self.hub_of.endpoint}/{name}/commit/{number:040x}"
        return {"success": True, "commitOid": f"{number:040x}", "commitUrl": url}

    def _read(self) -> bytes:
        self.hub_of.requests.append(f"{self.command} {self.path}")
        length = self.headers.get("Content-Length")
        if length is not None:
            return self.rfile.read(int(length))
        parts = []  # a body of unknown length comes in chunks
        while "chunked" in self.headers.get("Transfer-Encoding", ""):
            size = int(self.rfile.readline(), 16)
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            if not size:
                break
        return b"".join(parts)

    def _answer(self, value: Any, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


DATA: dict[str, Any] = {"documents": 16, "tokens": 1024, "blocks": 16, "block_length": 64}
DATA |= {"positions": "pose", "target_length": 128}
DATA["source"] = {"kind": "files", "paths": ["/home/someone/secret/book.txt"]}


def fine_tuned(
    folder: Path, method: str = "yarn", train: Any = "full", types: Any = None, **options: Any
) -> tuple[TrainingLog, PerplexityResult]:
    """Trains for a few steps, measures, and saves: what a card is made of."""
    base = folder / "base"
    tiny_model().save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    model: Any = from_pretrained(base)
    if types is not None:
        model.config.gguf_source = {"file": "base.gguf", "tensor_types": types}
    scores = make_scores()
    scores.measure(model)
    model = choose_parameters(patch_model(model, method, **options), train)
    scores.measure(model)
    trainer = make_trainer(model, folder / "run", include_num_input_tokens_seen="all")
    trainer.train()
    table = scores.measure(model, trainer.state.global_step)
    model.save_pretrained(folder / "made")
    byte_tokenizer().save_pretrained(folder / "made")
    return TrainingLog.of(trainer, base=str(base), train=train, data=DATA), table


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingLog, PerplexityResult]:
    folder = tmp_path_factory.mktemp("card")
    log, table = fine_tuned(folder, scale=2)
    write_card(folder / "made", log, table, licence="mit", name="me/it")
    return folder / "made", log, table


Made = tuple[Path, TrainingLog, PerplexityResult]


def test_the_numbers_are_those_of_the_table(made: Made) -> None:
    folder, log, table = made
    text = (folder / CARD).read_text()
    rows = [line for line in text.splitlines() if line.startswith("| yarn (scale 2), after 4")]
    assert len(rows) == len(table.settings.protocols)
    for row, protocol in zip(rows, table.settings.protocols, strict=True):
        for shown, length in zip(row.split("|")[2:], table.settings.lengths, strict=False):
            cell: Any = table.cell("yarn (scale 2), after 4 steps", protocol, length)
            assert shown.split("<br>")[0].strip(" *").split()[0] == number(cell.perplexity)
    assert f"| steps | 4 of 2 sequences, {4 * 2 * 64:,} tokens, 0.50 epochs |" in text
    assert f"all weights: {sum(p.numel() for p in tiny_model().parameters()):,} parameters" in text
    assert "learning rate 0.003 (linear, 0 steps of warmup)" in text
    assert "trained at 64 tokens, taken to 128 with yarn (scale 2)" in text
    assert "PoSE (Zhu et al. 2023, arXiv 2309.10400), up to 128" in text
    assert log.run["steps"] == 4


def test_the_metadata_are_the_hubs_and_the_data_behind_the_card_lie_beside_it(made: Made) -> None:
    folder, log, table = made
    data: Any = ModelCard.load(folder / CARD).data
    assert (data.license, data.library_name) == ("mit", "transformers")
    assert data.pipeline_tag == "text-generation"
    assert "yarn" in (data.tags or [])
    assert data.base_model is None  # a folder is no name on the hub
    assert TrainingLog.read(folder).to_dict() == log.to_dict()
    assert json.loads((folder / SCORES).read_text()) == published(table).to_dict()
    assert published(table).cells == table.cells
    assert (folder / PLOT).read_bytes().startswith(b"\x89PNG")
    assert f"]({PLOT})" in (folder / CARD).read_text()


def test_nobodys_directories_are_published(made: Made) -> None:
    folder = made[0]
    for name in (CARD, LOG, SCORES):
        text = (folder / name).read_text()
        assert str(folder.parent) not in text, name
        assert "someone" not in text, name
    assert "book.txt" in (folder / CARD).read_text()


def test_what_the_card_says_of_loading_is_so(made: Made) -> None:
    folder, text = made[0], (made[0] / CARD).read_text()
    assert 'AutoModelForCausalLM.from_pretrained("me/it")' in text
    assert "| transformers4 (4.57.1) | yes, weights and config as they are |" in text
    plain, ours = AutoModelForCausalLM.from_pretrained(folder), from_pretrained(folder)
    ids = zoo.tokens(100)
    torch.testing.assert_close(
        plain(input_ids=ids).logits, ours(input_ids=ids).logits, rtol=1e-4, atol=1e-4
    )
    unpatched = unpatch_model(ours)(input_ids=ids).logits
    assert not torch.allclose(plain(input_ids=ids).logits, unpatched, atol=1e-2)


@pytest.mark.usefixtures("no_plots")
def test_a_config_that_an_engine_does_not_read_is_exported(made: Made, tmp_path: Path) -> None:
    log, table = made[1:]
    folder = shutil.copytree(made[0], tmp_path / "made")
    exports = [export_source(open_source(folder), engine) for engine in ENGINES]
    config = json.loads((folder / "config.json").read_text())
    whole = write_card(folder, log, table, exports).read_text()
    del config["rope_scaling"]  # what transformers 4 reads
    (folder / "config.json").write_text(json.dumps(config))
    assert "| transformers4 (4.57.1) | yes, weights and config as they are |" in whole
    without = write_card(folder, log, table, exports).read_text()
    assert "| transformers4 (4.57.1) | yes: `hf-posenc export PATH --to transformers4` |" in without
    assert "| transformers5 (5.24.0) | yes, weights and config as they are |" in without


@pytest.mark.usefixtures("no_plots")
def test_a_method_inside_attention_is_for_hf_posenc_only(tmp_path: Path) -> None:
    log, table = fine_tuned(tmp_path, "rerope", window=24)
    text = write_card(tmp_path / "made", log, table).read_text()
    assert "Only hf_posenc loads it." in text
    assert 'from_pretrained("PATH")' in text
    assert "AutoModel" not in text
    assert "| transformers5 (5.24.0) | no: rerope changes attention" in text
    assert "library_name: hf_posenc" in text


def test_a_model_without_a_rotary_table_has_a_card_too(made: Made, tmp_path: Path) -> None:
    patch_model(zoo.build("gpt2"), "interpolate", scale=2).save_pretrained(tmp_path)
    text = write_card(tmp_path, made[1]).read_text()
    assert "AutoModelForCausalLM.from_pretrained" in text
    assert "| engine |" not in text


@pytest.mark.usefixtures("no_plots")
def test_an_adapter_says_what_it_is(tmp_path: Path) -> None:
    log, table = fine_tuned(tmp_path, "yarn", "lora", scale=2)
    text = write_card(tmp_path / "made", log, table).read_text()
    assert "This is an adapter" in text
    assert "merged into its base: `hf-posenc export PATH --to vllm`" in text
    assert 0 < log.model["trained"] < log.model["parameters"]
    assert "library_name: hf_posenc" in text


@pytest.mark.usefixtures("no_plots")
def test_without_scores_and_from_a_quantized_file_the_card_says_so(tmp_path: Path) -> None:
    log, _ = fine_tuned(tmp_path, types={"Q4_0": 99, "F32": 1}, scale=2)
    text = write_card(tmp_path / "made", log, exports=[]).read_text()
    assert " parameters, weights from Q4_0 GGUF, dequantized to float32), trained at" in text
    assert "No perplexity was measured." in text
    assert PLOT not in text
    assert not (tmp_path / "made" / SCORES).exists()


def test_the_report_before_and_after(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    table = made[2]
    first, last = table.candidates[0].label, table.candidates[-1].label
    cells = [table.cell(label, "tail", length) for length in (64, 32) for label in (first, last)]
    numbers = [number(cell.perplexity) for cell in cells if cell is not None]
    line = conclusion(table)
    assert line.startswith(f"tail perplexity at 64 tokens: {numbers[0]} unpatched, ")
    assert f" patched, {numbers[1]} after 4 steps" in line
    print_report(table, made[0])
    shown = capsys.readouterr().out
    assert shown.count("yarn (scale 2), after 4 steps") == 2  # a row of each protocol
    assert line in " ".join(shown.split())


def test_documents_lose_the_folders_that_all_of_them_are_in(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt"]
    documents = [Document(str(path), prose(150, n)) for n, path in enumerate(paths)]
    short = Document(str(tmp_path / "a" / "short.txt"), "too short")
    table = score(tiny_model(), byte_tokenizer(), [*documents, short], lengths=[32, 64])
    shown = published(table)
    assert [document["name"] for document in shown.documents] == ["a/x.txt", "b/x.txt"]
    assert {record.document for record in shown.records} == {"a/x.txt", "b/x.txt"}
    assert [skipped.name for skipped in shown.skipped] == ["a/short.txt"]
    assert shown.cells == table.cells


def test_a_folders_name_goes_without_the_way_to_it(tmp_path: Path) -> None:
    names = {"meta-llama/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf", "./mine": "mine"}
    names[str(tmp_path / "models" / "mine")] = "mine"
    assert {name: shown_name(name) for name in names} == names


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pushes to the hub that a test started on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def push_to(hub: FakeHub, folder: Path, **options: Any) -> str:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        given = {"hub_token": TOKEN, **{f"hub_{name}": each for name, each in options.items()}}
        arguments = TrainingArguments(str(folder), hub_model_id="it", use_cpu=True, **given)
        return push(folder, create_repository(arguments), arguments)

    return push_to


def test_the_result_is_pushed_and_nothing_else(made: Made, pushed: Any) -> None:
    folder = made[0]
    (folder / "checkpoint-4").mkdir()
    (folder / "checkpoint-4" / "model.safetensors").write_bytes(b"old")
    torch.save({"hub_token": TOKEN}, folder / "training_args.bin")
    with FakeHub() as hub:
        assert pushed(hub, folder, private_repo=True).endswith(f"/me/it/commit/{1:040}")
        private = {"checkpoint-4", "training_args.bin"}
        expected = {path.name: path for path in folder.iterdir() if path.name not in private}
        assert {CARD, LOG, SCORES, PLOT, "model.safetensors", "tokenizer.json"} <= set(expected)
        assert hub.files == {"me/it": {n: path.read_bytes() for n, path in expected.items()}}
        asked = hub.created[0]  # older versions of huggingface_hub say `private`
        assert asked.get("visibility") == "private" or asked.get("private") is True
        assert "POST /api/validate-yaml" in hub.requests
        pushed(hub, folder, revision="dev")
        assert any("/branch/dev" in request for request in hub.requests)
        assert any("/commit/dev" in request for request in hub.requests)
        with pytest.raises(PosencError, match="hf auth login"):
            pushed(hub, folder, token="wrong")
        assert len(hub.commits) == 2


def test_a_hub_that_fails_is_said_in_one_line(made: Made, pushed: Any) -> None:
    with FakeHub(fails=("/commit/",)) as hub:
        with pytest.raises(PosencError, match="is complete in") as error:
            pushed(hub, made[0])
        assert "\n" not in str(error.value)
        assert not hub.commits


PROGRAMS = {1: "hf-posenc finetune", 2: "accelerate launch -m hf_posenc.training"}
ALONE: dict[str, Any] = {"fsdp": [], "deepspeed_plugin": None}


def test_the_command_is_shown_without_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (["--output_dir", "/home/someone/x"], ["--output-dir=/x", "--hub_token", "hf_"]):
        argv = ["--patch", "yarn:scale=4", *place, "--bf16"]
        for words in (["finetune.py", *argv], ["hf-posenc", "finetune", *argv]):
            monkeypatch.setattr("sys.argv", words)
            for world_size, program in PROGRAMS.items():
                found = command_line(SimpleNamespace(world_size=world_size, **ALONE))  # type: ignore[arg-type]
                assert found == f"{program} --patch yarn:scale=4 --bf16"
