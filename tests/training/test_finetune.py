"""Fine-tuning from its arguments to a folder that loads, and what it says when it cannot."""

from __future__ import annotations

import argparse
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_posenc import PosencError, from_pretrained, get_patch
from hf_posenc.embedded import held_out_documents, model_path
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.training import TrainingLog, options, result
from hf_posenc.training.__main__ import main
from hf_posenc.training.collator import PositionCollator
from hf_posenc.training.train import apply_patch, finetune, parse_arguments, resolve_lengths
from tests.support import zoo
from tests.support.selection import late
from tests.support.tiny_text import byte_tokenizer, tiny_checkpoint

pytestmark = pytest.mark.usefixtures("no_plots")  # test_model_card.py has them
Texts = dict[str, Path]
Capture = pytest.CaptureFixture[str]
NAMES = ("_pydecimal", "typing", "argparse", "tarfile")
QUICK = (
    *("--max_steps", "2", "--per_device_train_batch_size", "1", "--save_steps", "1"),
    *("--eval_strategy", "no", "--score_lengths", "64", "128", "--block_length", "64"),
    *("--warmup_steps", "0", "--use_cpu"),
)
RANDOM = ("--positions", "random", "--curriculum")
LONG = ("--patch", "none", "--target_length", "128", "--block_length", "128")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four modules as files: three to train on, one to score."""
    folder = tmp_path_factory.mktemp("texts")
    found = dict(held_out_documents())
    for name in NAMES:
        (folder / f"{name}.txt").write_text(found[name][:5_000], encoding="utf-8")
    return {name: folder / f"{name}.txt" for name in NAMES}


def run(tmp_path: Path, texts: Texts, *more: str, name: str = "run") -> Path:
    output = tmp_path / name
    given = ["--output_dir", str(output), *QUICK]
    if "--text" not in more:
        given += ["--text", *(str(texts[name]) for name in NAMES[:3])]
    if not {"--score_text", "--no_score"} & set(more):
        given += ["--score_text", str(texts[NAMES[3]])]
    finetune(parse_arguments([*given, *more]))
    return output


def losses(output: Path) -> list[float]:
    return [entry["loss"] for entry in TrainingLog.read(output).log_history if "loss" in entry]


def test_from_the_embedded_llama_to_a_folder_that_plain_transformers_loads(
    tmp_path: Path, texts: Texts, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pushed = list[Any]()
    monkeypatch.setattr(result, "create_repository", lambda _: "me/it")
    monkeypatch.setattr(result, "push", lambda *given: pushed.append(given[:2]))
    output = run(tmp_path, texts, "--push_to_hub")  # which the Trainer itself does not do
    assert pushed == [(output, "me/it")]
    assert '.from_pretrained("me/it")' in (output / "README.md").read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert "'train_loss'" in shown
    assert "after 2 steps" in shown
    scores = PerplexityResult.from_dict(json.loads((output / "perplexity.json").read_text()))
    assert [row.method for row in scores.candidates] == [None, "yarn", "yarn"]
    assert {(cell.protocol, cell.length) for cell in scores.cells} == {
        (protocol, length) for protocol in ("prefix", "tail") for length in (64, 128)
    }
    assert "after 2 steps" in (output / "README.md").read_text(encoding="utf-8")
    ids = torch.arange(200, 264).unsqueeze(0)
    plain = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    assert plain.config.rope_parameters["rope_type"] == "yarn"
    ours = from_pretrained(output, dtype=torch.float32)
    assert torch.allclose(plain(ids).logits, ours(ids).logits, atol=1e-3)
    base = from_pretrained(model_path(), dtype=torch.float32)
    pairs = zip(ours.parameters(), base.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs), "it has learned something"


@pytest.mark.parametrize("positions", ["endprompt", *late(["pose", "packed", "random", "cream"])])
def test_every_way_of_giving_positions_trains(
    tmp_path: Path, texts: Texts, positions: str, capsys: Capture
) -> None:
    distilled = () if positions == "packed" else ("--distill", "positions")
    output = run(tmp_path, texts, "--positions", positions, "--no_score", *distilled)
    assert f"its card are in {output}" in capsys.readouterr().out  # without scores
    assert len(losses(output)) == 2
    assert TrainingLog.read(output).data["positions"] == positions


def test_a_curriculum_and_a_choice_of_layers_from_the_command_line(
    tmp_path: Path, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[int] = []
    of_stage = PositionCollator._of_stage

    def recorded(self: Any, batch: Any) -> dict[str, Any]:
        found = of_stage(self, batch)
        reached.append(len(self.curriculum) and int(found["position_ids"].max()))
        return found

    monkeypatch.setattr(PositionCollator, "_of_stage", recorded)
    given = [*RANDOM[:2], "--no_score", "--patch", "nope:layers=[1,3]", "--target_length", "1024"]
    given += ["--per_device_train_batch_size", "4", "--curriculum"]
    with pytest.warns(UserWarning, match="ends at 256 tokens: .*1,024. End with a factor of 4"):
        output = run(tmp_path, texts, *given, "0.5,1")
    assert len(reached) == 2
    assert 64 <= reached[0] < 128 <= reached[1] < 256
    data = TrainingLog.read(output).data
    assert (data["curriculum"], data["target_length"]) == ([128, 256], 1024)
    assert "first up to 128, then 256" in (output / "README.md").read_text(encoding="utf-8")
    patch = zoo.in_force(from_pretrained(output))
    assert (patch.methods, patch.config.layers) == (("nope",), (1, 3))
    with pytest.raises(PosencError, match=r"lengths.curriculum was \[128, 256\], is \[128, 1024\]"):
        run(tmp_path, texts, *given, "0.5,4")


@pytest.mark.parametrize(
    ("recipe", "layers", "target"), [("drope", "full", 256), ("swan", (1, 3), 1024)]
)
def test_recipes_drop_the_embedded_rotation(recipe: str, layers: Any, target: int) -> None:
    choice, data, _ = parse_arguments(["--recipe", recipe, "--use_cpu"])
    model = from_pretrained(model_path(), dtype=torch.float32)
    apply_patch(model, choice.patch, data.target_length)
    patch = zoo.in_force(model)
    assert (patch.methods, patch.config.layers) == (("nope",), layers)
    lengths = resolve_lengths(model, data.positions, data.target_length, data.block_length)
    assert (lengths.target, lengths.block) == (target, target)


def test_a_recipe_of_the_embedded_model_gives_no_other_one_its_lengths_and_layers() -> None:
    given = ("--model", str(model_path()), "--use_cpu")
    _, data, _ = parse_arguments(["--recipe", "drope", *given])
    assert (data.target_length, *data.score_lengths) == (None,)
    with pytest.raises(PosencError, match=r"layers of the embedded model, nope:layers=\[1,3\]"):
        parse_arguments(["--recipe", "swan", *given])
    choice, _, _ = parse_arguments(["--recipe", "swan", *given, "--patch", "nope:layers=full"])
    assert choice.patch == "nope:layers=full"


@pytest.mark.slow
def test_an_adapter_and_an_encoding_by_itself(tmp_path: Path, texts: Texts) -> None:
    adapter = run(tmp_path, texts, "--train", "lora", "--lora_dropout", "0.1", name="adapter")
    assert (adapter / "adapter_config.json").is_file()
    assert get_patch(from_pretrained(adapter)) is not None
    own = ("--patch", "kerple_log", "--train", "encoding", "--target_length", "128")
    output = run(tmp_path, texts, "--no_score", *own, name="own")
    trained, base = from_pretrained(output), from_pretrained(model_path(), dtype=torch.float32)
    kept, now = dict(base.named_parameters()), trained.named_parameters()
    moved = [name for name, p in now if name not in kept or not p.equal(kept[name])]
    assert moved
    assert all(".posenc." in name for name in moved)


@pytest.mark.slow
def test_a_patched_model_is_trained_further(tmp_path: Path, texts: Texts) -> None:
    first = run(tmp_path, texts, "--no_score")
    with pytest.raises(PosencError, match=r"was saved with yarn.*Leave --patch out.*replace=true"):
        run(tmp_path, texts, "--model", str(first), "--patch", "pi:scale=4", name="second")
    with pytest.raises(PosencError, match=r"was saved with yarn.*Leave --patch out.*as it is\.$"):
        run(tmp_path, texts, "--model", str(first), "--patch", "none", name="second")
    second = run(tmp_path, texts, "--no_score", "--model", str(first), name="second")
    assert zoo.in_force(from_pretrained(second)).options == {"scale": 4.0}
    other = ("--model", str(first), "--patch", "yarn:scale=8,replace=true")
    third = run(tmp_path, texts, "--no_score", *other, name="third")
    assert zoo.in_force(from_pretrained(third)).extended_length == 2048


@pytest.mark.parametrize(("patch", "reach"), [("yarn:scale=8", 512), ("self_extend:scale=4", 512)])
def test_a_saved_patch_of_a_scaled_checkpoint_is_replaced(patch: str, reach: int) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    model = zoo.build(
        "llama", max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, **yarn}
    )
    apply_patch(model, "yarn:replace=true", 256)
    apply_patch(model, f"{patch},replace=true")
    assert zoo.in_force(model).extended_length == reach


@pytest.mark.slow
def test_a_resumed_run_is_described_as_a_whole(tmp_path: Path, texts: Texts, capsys: Any) -> None:
    first = TrainingLog.read(run(tmp_path, texts, "--no_score"))
    shown = capsys.readouterr()
    assert not re.search("Nothing is left|it/s", shown.err)  # lines alone, without a terminal
    assert shown.out.count("'loss'") == 2
    log = TrainingLog.read(run(tmp_path, texts, "--no_score"))  # resumes after the last step
    assert "Nothing is left to train: step 2 was the last." in capsys.readouterr().err
    last = log.log_history[-1]
    seconds = [entry["seconds"] for entry in first.log_history]
    assert seconds == sorted(seconds)
    assert log.run["seconds"] == last["train_runtime"] > seconds[-2]
    assert "train_loss" not in last
    # A folder of an earlier version has these too, and is refused when one is missing.
    kept = json.loads((tmp_path / "run" / "settings.json").read_text())["settings"]
    assert {*kept["lengths"]} == {"original", "target", "block", "drawn", "curriculum"}
    assert {*kept} == {
        "arguments", "processes", "weights", "patch", "choice", "positions", "lengths", "blocks",
    }  # fmt: skip


@pytest.mark.slow
def test_the_best_model_is_shown_as_what_it_is(tmp_path: Path, texts: Texts, capsys: Any) -> None:
    best = ("--eval_strategy", "steps", "--eval_steps", "1", "--load_best_model_at_end")
    tail = ("--metric_for_best_model", "eval_tail_perplexity_128", "--greater_is_better", "false")
    worse = ("--max_steps", "3", "--warmup_steps", "1", "--learning_rate", "0.5")  # but for step 1
    output = run(tmp_path, texts, *best, *tail, *worse)
    scores = PerplexityResult.from_dict(json.loads((output / "perplexity.json").read_text()))
    assert [stage["step"] for stage in scores.source["stages"]] == [0, 0, 1]
    assert "after 1 step" in capsys.readouterr().out
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "after 1 step" in card
    assert "after 3 steps" not in card


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "no patch": (("--model", str(model_path())), "carries no patch: give --patch"),
    "no length": (("--patch", "none"), "give --target-length"),
    "no scale": (("--patch", "yarn"), "give a scale"),
    "nothing to train": (("--patch", "truncation"), "truncation"),
    "an option of another program": (("--batch-size", "3"), "Did you mean --per-device-train-batch-size"),
    "an option turned off": (("--no-gradient-checkpointing",), "Did you mean --gradient-checkpointing false[?]"),
    "a best model of no scores": (("--load_best_model_at_end",), "Evaluation strategy: .*, Save strategy: .*[.] See"),
    "a word of its own": (("--max_steps", "3", "4"), "'4' belongs to no option. A model is given as --model"),
    "a column of a text": (("--text", __file__, "--column", "body"), "nothing here would use it"),
    "a checkpoint to push": (("--hub_strategy", "all_checkpoints"), "only the result is pushed"),
    "a block that is too long": (("--block_length", "2000"), "2 to 1,024 tokens"),
    "a block that is too short": (("--block_length", "1"), "2 to 1,024 tokens"),
    "an encoding without parameters": (("--train", "encoding"), "yarn has no parameters"),
    "a curriculum of no draws": (("--curriculum", "1,2"), "--curriculum 1,2: --positions contiguous draws none"),
    "a curriculum of words": ((*RANDOM, "1,two"), "--curriculum 1,two: give rising factors"),
    "a curriculum of parts of tokens": ((*RANDOM, "1,1.3"), "--curriculum 1,1.3: give rising factors"),
    "a falling curriculum": ((*RANDOM, "4,2"), "--curriculum 4,2: give rising factors"),
    "a curriculum below a block": ((*RANDOM, "0.125,1"), "32 positions are too few for a block of 64"),
    "a prompt for other positions": (("--terminal_prompt", "Now:"), "for --positions endprompt or endprompt_random"),
    "a prompt of no tokens": (
        ("--positions", "endprompt", "--terminal_prompt", ""),
        "--terminal-prompt has 0 tokens; between 1 and 62 fit into a block of 64",
    ),
    "a weight of nothing": (("--distill_weight", "2"), "--distill-weight 2 is for --distill"),
    "a weight below zero": (("--distill", "short", "--distill_weight=-1"), "--distill-weight -1: a positive number"),
    "a distillation of whole logits": (("--distill", "short", "--loss_chunk", "0"), "leave --loss-chunk 0 out"),
    "a view of the same positions": (("--distill", "positions"), "--positions contiguous draws none: use one of pose"),
    "a model that is its own teacher": (("--distill", "short", "--patch", "none"), "would be its own teacher"),
    "a teacher beyond its length": (
        ("--distill", "short", "--block_length", "512"),
        "blocks of 512 tokens are longer than the 256 .* Give --block-length 256",
    ),
    "a block of no tokens": (("--block_length", "0"), r"--block-length.*'0' is no length.*32k\. See"),
    "no documents": (("--documents", "0"), "limit is a whole number of at least 1, not 0"),
    "no folder": (("--output_dir", ""), "--output-dir is empty"),
    "no rank": (("--train", "lora", "--lora_rank", "0"), "`r` should be a positive integer"),
    "no probability": (("--train", "lora", "--lora_dropout", "2"), "dropout probability has to be between 0 and 1"),
    "no examples": (("--per_device_train_batch_size", "0"), "batch-size 0: at least 1"),
    "half precision on a CPU": (("--fp16",), "fp16 on a CPU computes in float32 silently"),
    "an optimizer that is not installed": (("--optim", "adamw_8bit"), "install `bitsandbytes`"),
    "an optimizer by its full name": (("--optim", "adamw_bnb_8bit"), "install `bitsandbytes`"),
    "a beta of 1": (("--adam_beta1", "1"), "--adam-beta1 1: at least 0 and below 1"),
    "clipping at no number": (("--max_grad_norm", "nan"), "--max-grad-norm nan: at least 0 and a finite"),
    "a warmup below zero": (("--warmup_steps", "-1"), "--warmup-steps -1: at least 0"),
    "no epochs": (("--max_steps", "-1", "--num_train_epochs", "0"), "num-train-epochs 0 gives no step"),
    "a tracker that is not installed": (("--report_to", "comet_ml"), "comet"),
    "fewer blocks than a batch": (("--per_device_train_batch_size", "100000"), "a batch over all processes"),
    "scored texts that are too short": (("--score_lengths", "16k"), r"too short.*documents\. Or train with --no-score"),
    "a tail of all tokens": (
        ("--tail_tokens", "64"), r"Give longer --score-lengths, or --tail-tokens 32\. Or train with --no-score"
    ),
    "positions past a table": (("--model", "gpt2", *LONG), "128 tokens: GPT2LMHeadModel has positions for 64. Give"),
    "a target past a table": (("--model", "gpt2", *LONG, "--block_length", "64"), "128 tokens: GPT2LMHeadModel has"),
    "an encoder-decoder": (("--model", "t5", *LONG), "is a t5 model, which is not a causal language model"),
    "an adapter": (("--model", "llama", *LONG), "lora is an adapter.*`hf-posenc export .*lora --to transf"),
    "no recipe": (("--recipe", "nowhere.yaml"), "nowhere.yaml cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, texts: Texts, case: str) -> None:
    given, message = WRONG[case]
    if "optimizer" in case and find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed")
    for kind in (word for word in given if word in ("gpt2", "t5", "llama")):
        model = tiny_checkpoint(tmp_path / "model", kind)
        if kind == "llama":
            adapted = get_peft_model(from_pretrained(model), LoraConfig(target_modules=["q_proj"]))
            adapted.save_pretrained(f"{tmp_path}/lora")
            byte_tokenizer().save_pretrained(model := tmp_path / "lora")
        given = tuple(str(model) if word == kind else word for word in given)
    with pytest.raises(PosencError, match=message) as raised:
        run(tmp_path, texts, *given)
    assert "\n" not in str(raised.value)


def test_every_word_of_an_option_of_transformers_is_one_here() -> None:
    forms = options._training_arguments()
    listed = {a.dest: a.choices for a in HfArgumentParser(TrainingArguments)._actions if a.choices}  # type: ignore[arg-type]
    assert len(listed) >= 10
    for name, words in {**listed, "report_to": [*INTEGRATION_TO_CALLBACK, "all", "none"]}.items():
        assert [forms[name]["type"](str(word)) for word in words] == [str(word) for word in words]
        with pytest.raises(argparse.ArgumentTypeError, match="Unknown value 'foo'"):
            forms[name]["type"]("foo")


def test_what_is_scored_is_held_out_of_the_texts(tmp_path: Path, texts: Texts, capsys: Any) -> None:
    paths = [str(path) for path in texts.values()]
    finetune(parse_arguments(["--output_dir", str(tmp_path / "run"), *QUICK, "--text", *paths]))
    assert f"Held out to be scored: {paths[1]}\n" in capsys.readouterr().out
    assert f"without what was scored ({NAMES[1]}.txt)" in (tmp_path / "run/README.md").read_text()
    (counts,) = tmp_path.glob("run/blocks/*/blocks.json")
    assert json.loads(counts.read_text())["documents"] == len(paths) - 1
    scores = json.loads((tmp_path / "run/scores/perplexity.json").read_text())
    assert [document["name"] for document in scores["documents"]] == [paths[1]]


def test_a_run_that_cannot_score_is_refused_early(tmp_path: Path, texts: Texts) -> None:
    given = ["--output_dir", str(tmp_path / "run"), *QUICK, "--text", str(texts[NAMES[0]])]
    with pytest.raises(PosencError, match=r"last tenth: too short.*--score-text.*--no-score"):
        finetune(parse_arguments([*given, "--score_lengths", "16k"]))
    assert not list(tmp_path.rglob("blocks"))


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, texts: Texts) -> None:
    wild = ("--learning_rate", "1e30", "--max_grad_norm", "0", "--max_steps", "6")
    with pytest.raises(PosencError, match="is nan at step"):
        run(tmp_path, texts, *wild, "--save_steps", "5", "--no_score")
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert not list(tmp_path.glob("run/checkpoint-*"))


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupted(given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_posenc.training.train.finetune", interrupted)
    monkeypatch.setattr("sys.argv", ["finetune.py", "--use_cpu"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 130
    assert "The same command resumes" in capsys.readouterr().err


def test_a_terminal_shows_the_loss_and_the_time_left_in_one_bar(
    tmp_path: Path, texts: Texts, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    evaluated = ("--eval_strategy", "steps", "--eval_steps", "2", "--score_lengths", "64")
    first, last = losses(run(tmp_path, texts, *evaluated))
    shown = capsys.readouterr()
    bar = f"100%|██████████| step 2 of 2, loss {last:.4g}, 00:00 left"
    assert bar in shown.err.replace(" |", "|")
    assert f"loss {first:.4g}" in shown.err
    line = r"^step 2: prefix perplexity 64: [\d.]+, tail perplexity 64: "
    assert re.search(line, shown.out, re.MULTILINE)
    assert "'loss'" not in shown.out + shown.err


def test_lengths_may_be_given_in_thousands() -> None:
    given = ["--target_length", "2k", "--block_length", "512", "--score_lengths", "256", "1k"]
    _, data, _ = parse_arguments([*given, "--use_cpu"])
    assert (data.target_length, data.block_length, data.score_lengths) == (2048, 512, [256, 1024])


def test_a_recipe_sets_what_the_command_line_does_not(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"

    def parsed(content: str, *given: str) -> Any:
        recipe.write_text(content, encoding="utf-8")
        return parse_arguments(["--recipe", str(recipe), "--use_cpu", *given])

    content = "patch: pi:scale=2\nmax_steps: 7\nbf16: true\nscore: false\nfsdp: true\n"
    choice, data, arguments = parsed(content, "--max_steps", "9")
    assert (choice.patch, arguments.max_steps) == ("pi:scale=2", 9)
    assert (arguments.bf16, arguments.fsdp) == (True, True)
    assert not data.score
    (tmp_path / "text").write_text("a few words", encoding="utf-8")
    # a string is one file, not one for each letter
    for text in (tmp_path / "text", [str(tmp_path / "text")]):
        _, data, arguments = parsed(f"text: {text}\nreport_to: none\n")
        assert (data.text, arguments.report_to) == ([str(tmp_path / "text")], [])
    content = "lr_scheduler_kwargs: {num_cycles: 2, last: null}\ntext: []\nreport_to: []\n"
    _, data, arguments = parsed(content)
    assert arguments.lr_scheduler_kwargs == {"num_cycles": 2, "last": None}
    assert (*data.text, *arguments.report_to) == ()
    wrong = {"patches: pi": "sets patches, which is no option", "- pi": "no list of"}
    wrong["no_score: true"] = "no_score, which is no option"
    wrong["score_lengths: [64, 4x]"] = "recipe.yaml: argument --score_lengths.*'4x' is no length"
    for content, message in wrong.items():
        with pytest.raises(PosencError, match=message):
            parsed(content)


def test_a_model_that_is_named_gets_the_defaults_of_the_field(monkeypatch: Any) -> None:
    choice, _, arguments = parse_arguments(["--model", str(model_path()), "--use_cpu"])
    assert choice.patch is None
    if not torch.accelerator.is_available():  # transformers alone refuses it without --use_cpu
        assert parse_arguments(["--bf16"])[2].device.type == "cpu"
        monkeypatch.setattr("hf_posenc.training.train.is_torch_xla_available", lambda: True)
        with pytest.raises(PosencError, match="bf16/gpu"):  # no TPU is left for the CPU
            parse_arguments(["--bf16"])
    assert (arguments.learning_rate, arguments.max_steps, arguments.adam_beta2) == (2e-5, 400, 0.95)
