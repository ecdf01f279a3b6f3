"""Wrong words of every command are refused before torch and transformers are imported, which takes seconds."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.cli.app import COMMANDS
from hf_posenc.embedded import model_path

# A command line in a folder with `FOLDERS` and three files, and a part of its error. {model} is a checkpoint's folder.
WRONG = [
    ("perplexity --patch yarm", "Unknown method 'yarm'. Did you mean 'yarn'?"),
    ("perplexity --patch yarn(scale=4)", "options follow a colon, as in yarn:scale=8,beta_fast"),
    ("perplexity --patch yarn,scale=4", "options follow a colon, as in yarn:scale=8,beta_fast"),
    ("perplexity --patch 'yarn scale=4'", "options follow a colon, as in yarn:scale=8,beta_fast"),
    ("perplexity --patch mine", "Unknown method 'mine'. One of your own needs @register_method"),
    ("perplexity {model} --patch yarn:scalle=8", "Unknown option of yarn 'scalle'. Did you mean"),
    ("perplexity {model} --patch yarn:scale=-8", "--patch yarn:scale=-8: yarn: scale is a number"),
    ("perplexity --patch longrope", "--patch longrope: longrope needs short_factor"),
    ("perplexity --patch yarn:scale=2+ntk", "Two methods on one seam exclude each other: yarn, n"),
    ("perplexity --method yarn", "No such option: --method. It is called --patch here."),
    ("perplexity --methd yarn", "No such option: --methd. Did you mean --patch?"),
    ("doctor --deep", "No such option: --deep"),
    ("perplexity --lengths 2G", "'2G' is no length; give a whole number of tokens, such as 4096"),
    ("perplexity --lengths 4", "A length has at least 8 tokens, not 4."),
    ("perplexity --lengths 64 --tail-tokens 100", "which must be fewer than the shortest length"),
    ("perplexity --protocol taill", "Unknown protocol 'taill'"),
    ("perplexity --preset yarm", "Unknown preset 'yarm'"),
    ("perplexity --aggregate token", "Unknown aggregate 'token'"),
    ("perplexity --stride 8 --protocol tail", "--stride 8 is for --protocol sliding or --proto"),
    ("perplexity --longppl self@yarm", "Unknown method 'yarm'"),
    ("perplexity --longppl ./nowhere", "There is no model folder ./nowhere"),
    ("perplexity --bos maybe", "Unknown value of --bos 'maybe'. Available: always, auto, never."),
    ("perplexity ./nowhere", "There is no model folder ./nowhere"),
    ("perplexity empty.txt", "empty.txt is a file, and no GGUF file. Give the model's folder."),
    ("perplexity ./other", "has no config.json (it has notes.txt)"),
    ("perplexity ./bare", "it has neither model.safetensors nor pytorch_model.bin"),
    ("perplexity ./damaged", "model.safetensors is damaged or incomplete"),
    ("perplexity ./adapter", "There is no base model folder ./nowhere."),
    ("perplexity ./llamma", "has model type `llamma`, and transformers"),
    ("perplexity ./no.gguf", "no.gguf is not a GGUF file"),
    ("perplexity {model} --revision main", "only models on the hub have revisions"),
    ("perplexity --tokenizer ./llamma", "./llamma has no tokenizer files."),
    ("perplexity --tokenizer ./nowhere", "There is no tokenizer folder ./nowhere"),
    ("perplexity --text nowhere.txt", "No document can be used (nowhere.txt: no such file)."),
    ("perplexity --text empty.txt", "No document can be used (empty.txt: empty)."),
    ("perplexity --text rows.jsonl", "no column 'text'; its columns are a. Pass --column"),
    ("perplexity --dataset ./nowhere", "There is no folder ./nowhere."),
    ("perplexity --text . --dataset x", "--text and --dataset exclude each other"),
    ("perplexity --dtype float8", "Unknown value of --dtype 'float8'"),
    ("perplexity --device cudaa", "The device 'cudaa' cannot be used: PyTorch has none of"),
    ("perplexity --device meta", "The device 'meta' holds no weights"),
    ("perplexity --device-map autoo", "--device-map is auto, balanced,"),
    ("perplexity --attn flash", "--attn flash: transformers has no such attention."),
    ("perplexity --shard 3/2", "--shard 3/2: give one of 1/N"),
    ("perplexity --output empty.txt", "--output empty.txt is a file: give a folder."),
    ("retrieval --tasks all,passky", "Unknown task 'passky'. Did you mean 'passkey'?"),
    ("retrieval --patch yarm", "Unknown method 'yarm'"),
    ("retrieval --decode beam", "Unknown way to decode 'beam'"),
    ("retrieval --haystack nowhere.txt", "No document can be used (nowhere.txt"),
    ("retrieval --encoding latin-1", "--encoding latin-1 is for files of text"),
    ("retrieval ./nowhere", "There is no model folder ./nowhere"),
    ("bench --suite fast", "Unknown suite 'fast'"),
    ("bench --patch yarm", "Unknown method 'yarm'"),
    ("bench --tasks passky", "Unknown task 'passky'"),
    ("bench --protocol taill", "Unknown protocol 'taill'"),
    ("bench --lengths 1k --target-length 2k", "Lengths and a target length exclude each other"),
    ("bench --suite gpu --patch yarm", "Unknown method 'yarm'"),
    ("bench --suite gpu --text empty.txt", "--text has no meaning for --suite gpu"),
    ("bench --suite gpu --attn eager", "--attn has no meaning for --suite gpu"),
    ("bench --suite gpu --device cudaa", "The device 'cudaa' cannot be used"),
    ("sweep --patch yarm", "Unknown method 'yarm'"),
    ("sweep --patch none", "There is nothing to compare"),
    ("sweep --scales 0.5", "--scales 0.5: give numbers above 1"),
    ("sweep ./nowhere", "There is no model folder ./nowhere"),
    ("search --short-texts long", "Unknown value of --short-texts 'long'"),
    ("search --text nowhere.txt", "No document can be used"),
    ("extend --target-length 4x", "--target-length 4x: '4x' is no length"),
    ("extend --budget soon", "'soon' is no time"),
    ("extend ./nowhere", "There is no model folder ./nowhere"),
    ("selftest --device cudaa", "The device 'cudaa' cannot be used"),
    ("selftest nowhere/file.json", "cannot be written: give a file in a folder that exists."),
    ("finetune --methd yarn", "No such option: --methd. Did you mean --patch?"),
    ("finetune --max_stepz 3", "No such option: --max_stepz. Did you mean --max-steps?"),
    ("finetune --gradient_acumulation_steps 3", "Did you mean --gradient-accumulation-steps?"),
    ("finetune --patch yarm", "Unknown method 'yarm'. Did you mean 'yarn'?"),
    ("finetune --model ./nowhere", "There is no model folder ./nowhere"),
    ("finetune --model ./damaged --patch none", "model.safetensors is damaged or incomplete"),
    ("finetune --text nowhere.txt", "No document can be used (nowhere.txt: no such file)."),
    ("finetune --recipe lora_24g", "Unknown recipe 'lora_24g'. Did you mean 'lora_24gb'"),
    ("finetune --max_steps 1.5", "argument --max_steps/--max-steps: invalid int value: '1.5'"),
    ("finetune --learning_rate=-1", "--learning-rate -1: at least 0 and a finite number is"),
    ("finetune --seed=-1", "--seed -1: at least 0"),
    ("finetune --seed x", "argument --seed: invalid int value: 'x'"),
    ("finetune --dtype fp8", "argument --dtype: invalid choice: 'fp8'"),
    ("finetune --hub_token", "argument --hub_token/--hub-token: expected one argument."),
    ("finetune --optim adam", "argument --optim: Unknown value 'adam'. Did you mean"),
    ("finetune --report_to wandbb", "Unknown value 'wandbb'. Did you mean 'wandb'"),
    ("finetune --torch_compile_backend inductr", "Did you mean 'inductor'?"),
    ("finetune --deepspeed zero3.json", "argument --deepspeed: there is no file zero3.json."),
    ("finetune --resume_from_checkpoint no/1", "no/1: there is no such folder"),
    ("finetune --target_length 4x", "'4x' is no length"),
    ("finetune --positions pos", "argument --positions: invalid choice: 'pos'"),
    ("finetune --lora_rank 4", "--lora-rank 4 is for --train lora: leave it out."),
    ("export ./nowhere --to vllm", "There is no model folder ./nowhere"),
    ("export {model} --to vlm", "Unknown value of --to 'vlm'. Did you mean 'vllm'?"),
    ("export {model} --to vllm --patch yarm", "Unknown method 'yarm'"),
    ("export {model} --to vllm --weights move", "Unknown value of --weights 'move'"),
    ("export {model} --to vllm --output empty.txt", "cannot be written to empty.txt, a file"),
    ("export {model} --to llama.cpp --gguf nowhere.gguf", "There is no file nowhere.gguf."),
    ("inspect ./nowhere", "There is no model folder ./nowhere"),
    ("inspect --patch yarm", "Unknown method 'yarm'"),
    ("inspect --patch yarn", "yarn needs scale="),
    ("recommend --target-length 4x", "--target-length 4x: '4x' is no length"),
    ("recommend ./nowhere --target-length 4k", "There is no model folder ./nowhere"),
    ("recommend --target-length 4k --dtype int8", "Unknown value of --dtype 'int8'"),
    ("recipes ./nowhere", "There is no model folder ./nowhere"),
    ("show yarm", "Unknown method 'yarm'. Did you mean 'yarn'?"),
    ("fetch smollm3", "Unknown download 'smollm3'. Did you mean 'smollm2'?"),
    ("report nowhere", "There is no path nowhere."),
    ("methods yarn", "unexpected extra argument"),
    ("models llama", "unexpected extra argument"),
    ("perplexity --model mine", "It stands without a name here: hf-posenc perplexity MODEL. Try:"),
    ("retrieval --text a.txt", "No such option: --text. It is called --haystack here. Try:"),
    ("train", "No such command 'train'. It is called finetune here. Try:"),
    ("yarn", "No such command 'yarn'. A method is given as --patch METHOD, or to patch_model."),
    ("recipees", "No such command 'recipees'. Did you mean 'recipes'?"),
]

# What the files of a folder contain.
PLAIN = {"config.json": "{}", "tokenizer.json": "{}"}
FOLDERS = {
    "adapter": {"adapter_config.json": '{"base_model_name_or_path": "./nowhere"}'},
    "bare": PLAIN,
    "damaged": PLAIN | {"model.safetensors": "0123456789"},
    "other": {"notes.txt": ""},
    "llamma": {"config.json": '{"model_type": "llamma"}'},
}

# A command line whose last word is completed, and some of the words that a shell then offers.
COMPLETED = [
    ("hf-posenc re", {"retrieval", "recommend", "report", "recipes"}),
    ("hf-posenc bench --sh", {"--shard"}),
    ("hf-posenc perplexity --patch yarn:scale=4+lo", {"yarn:scale=4+log_n"}),
    ("hf-posenc inspect --patch rer", {"rerope"}),
    ("hf-posenc show self", {"self_extend"}),
    ("hf-posenc recipes llama-2-yarn", {"llama-2-yarn-64k", "llama-2-yarn-128k"}),
    ("hf-posenc fetch s", {"smollm2"}),
    ("hf-posenc export model --to sg", {"sglang"}),
    ("hf-posenc perplexity --protocol prefix,ta", {"prefix,tail"}),
    ("hf-posenc retrieval --tasks pass", {"passkey"}),
    ("hf-posenc bench --suite qu", {"quick"}),
    ("hf-posenc perplexity --preset lm", {"lm-eval"}),
    ("hf-posenc perplexity --dtype bf", {"bfloat16"}),
    ("hf-posenc finetune --pos", {"--positions"}),
    ("hf-posenc finetune --output_", {"--output-dir"}),
    ("hf-posenc finetune --lora_rank 4 --positions po", {"pose"}),
    ("hf-posenc finetune --lora-rank 4 --positions po", {"pose"}),
    ("hf-posenc finetune --patch rer", {"rerope"}),
]

_RUN = """
import contextlib, io, json, os, sys
from hf_posenc.cli import main

found = []
for environment, words in json.load(sys.stdin):
    os.environ.update(environment)
    said, status = io.StringIO(), None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main(words)
        except SystemExit as end:
            status = end.code
    found.append([status, said.getvalue(), [n for n in ("torch", "transformers") if n in sys.modules]])
print(json.dumps(found))
"""


def said(runs: list[tuple[dict[str, str], list[str]]], folder: Path) -> list[list[Any]]:
    """The status, the output and the heavy modules after each of some runs, all in one process."""
    options: Any = {"cwd": folder, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", _RUN], input=json.dumps(runs), **options)
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_wrong_words_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "no.gguf").write_bytes(b"no header")
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    for name, values in FOLDERS.items():
        (tmp_path / name).mkdir()
        for file, text in values.items():
            (tmp_path / name / file).write_text(text)
    lines = [line.format(model=model_path()) for line, _ in WRONG]
    found = said([({}, shlex.split(line)) for line in lines], tmp_path)
    for line, (_, error), (status, text, loaded) in zip(lines, WRONG, found, strict=True):
        assert (status, loaded) == (2, []), f"{line}: {text}"
        assert error in text, line


@pytest.mark.slow
def test_a_shell_completes_names_without_torch(tmp_path: Path) -> None:
    runs: list[tuple[dict[str, str], list[str]]] = []
    for line, _ in COMPLETED:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        runs.append(({"_HF_POSENC_COMPLETE": "complete_bash", **words}, []))
    for (line, offered), (_, text, loaded) in zip(COMPLETED, said(runs, tmp_path), strict=True):
        assert offered <= {*text.split()}, f"{line}: {text}"
        assert loaded == []


def test_every_command_has_wrong_words_here() -> None:
    assert {*COMMANDS} <= {line.split()[0] for line, _ in WRONG}
