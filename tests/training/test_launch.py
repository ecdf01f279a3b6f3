"""Every launch file of scripts/configs, as far as a CPU goes: one training in one process and shared out over two.

FSDP2 is accelerate's own (tests/support/fsdp_on_cpu.py replaces its choice of the backend), ZeRO-3 DeepSpeed's own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file

from hf_posenc import from_pretrained, get_patch
from hf_posenc.training import TrainingLog
from hf_posenc.training.train import finetune, parse_arguments
from tests.support.killing import launch
from tests.support.tiny_text import prose, tiny_checkpoint

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "scripts" / "configs"
MODULE = ["-m", "hf_posenc.training"]
IN_FRONT = {"fsdp2": ["tests/support/fsdp_on_cpu.py"]}
BEHIND = {"zero3": ["--ddp_backend", "gloo"]}
TRAININGS = {
    # chunks of 50 tokens: the head runs six times in a forward
    "full": "--patch yarn:scale=2 --loss_chunk 50 --gradient_checkpointing",
    "lora": "--patch rerope:window=16 --train lora --positions packed --target_length 128 --loss_chunk 50",
    "distilled": "--patch yarn:scale=2 --positions pose --target_length 128 --distill positions --loss_chunk 50",
    "encoding": "--patch kerple_log --train encoding --positions pose --target_length 128 --loss_chunk 50",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    (made / "text.txt").write_text(prose(6_000))
    return made


def command(folder: Path, output: Path, training: str, batch: int) -> list[str]:
    given = (
        f"--model {folder} --text {folder}/text.txt --output_dir {output} --no_score --report_to none --max_steps 4 "
        f"--learning_rate 5e-3 --warmup_steps 1 --gradient_accumulation_steps 2 --save_steps 2 "
        f"--per_device_train_batch_size {batch} {TRAININGS[training]}"
    )
    return given.split()


def started(config: str, script: list[str]) -> subprocess.Popen[str]:
    """A script under `accelerate launch`, from the root of the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", *config.split(), *script]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(launch, env=environment, cwd=ROOT, **pipes)


def launched(config: str, script: list[str], *, machines: int = 1) -> list[Any]:
    """Runs a script under `accelerate launch`; several machines are as many launchers on this one."""
    runs = [started(config.format(rank=rank), script) for rank in range(machines)]
    try:
        outputs = [run.communicate(timeout=600) for run in runs]
    finally:
        for run in runs:
            run.kill()
    return [
        subprocess.CompletedProcess(run.args, run.returncode, *output)
        for run, output in zip(runs, outputs, strict=True)
    ]


def numbers(output: Path, name: str) -> list[float]:
    return [entry[name] for entry in TrainingLog.read(output).log_history if "loss" in entry]


def weights(output: Path) -> dict[str, torch.Tensor]:
    (file,) = [path for path in output.glob("*model.safetensors") if path.is_file()]
    return load_file(file)


def check(config: str, training: str, folder: Path, tmp_path: Path, *options: str) -> None:
    """The training in one process, and under a launch file in two: losses, gradients and weights to rounding.

    With `options` of the launcher, the two run on two machines.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    finetune(parse_arguments([*command(folder, one, training, 2), "--use_cpu"]))
    kind = config.removesuffix("_two_nodes")
    script = [*IN_FRONT.get(kind, []), *MODULE, *command(folder, two, training, 1)]
    runs = launched(
        f"--config_file scripts/configs/{config}.yaml {' '.join(options)}",
        [*script, *BEHIND.get(kind, [])],
        machines=2 if options else 1,
    )
    assert [run.returncode for run in runs] == [0] * len(runs), [run.stderr for run in runs]
    compare(one, two, "".join(run.stdout for run in runs))


def compare(one: Path, two: Path, printed: str) -> None:
    assert printed.count("'train_loss'") == 1, "two processes that train alone, or one"
    assert numbers(two, "loss") == pytest.approx(numbers(one, "loss"), rel=1e-5)
    assert numbers(two, "grad_norm") == pytest.approx(numbers(one, "grad_norm"), rel=1e-4)
    expected, found = weights(one), weights(two)
    assert set(expected) <= set(found)
    for name, value in expected.items():
        assert torch.allclose(found[name].float(), value, atol=1e-4), name


@pytest.mark.slow
def test_two_forked_processes_equal_one(folder: Path, tmp_path: Path) -> None:
    """The script without a launcher, in processes whose environment is what one would set."""
    one, two = tmp_path / "one", tmp_path / "two"
    finetune(parse_arguments([*command(folder, one, "full", 2), "--use_cpu"]))
    assert launch(two, processes=2, work=_finetune, model=folder) == [0, 0]
    compare(one, two, "".join((tmp_path / f"two-{rank}.out").read_text() for rank in range(2)))


def _finetune(output: Path, moment: Any, *, model: Path) -> None:
    finetune(parse_arguments([*command(model, output, "full", 1), "--use_cpu"]))


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("config", ["two_cpu_processes", "fsdp2"])
def test_two_processes_equal_one(config: str, training: str, folder: Path, tmp_path: Path) -> None:
    check(config, training, folder, tmp_path)


@pytest.mark.slow
def test_shards_of_two_resume_in_four_or_become_a_model(folder: Path, tmp_path: Path) -> None:
    """In four with the same examples in a step: the losses to rounding, from Adam's averages in other shards."""
    config = "--config_file scripts/configs/fsdp2.yaml --num_processes"
    shards = tmp_path / "two" / "checkpoint-2"

    def run(output: str, processes: int, options: str) -> tuple[list[float], Any, str]:
        given = [*command(folder, tmp_path / output, "full", 1), *options.split()]
        (done,) = launched(f"{config} {processes}", [*IN_FRONT["fsdp2"], *MODULE, *given])
        assert done.returncode == 0, done.stderr
        return numbers(tmp_path / output, "loss"), weights(tmp_path / output), done.stderr

    losses, trained, _ = run("two", 2, "")
    resumed = f"--resume_from_checkpoint {shards}"
    again, found, output = run("four", 4, f"{resumed} --gradient_accumulation_steps 1")
    assert "processes.count was 2, is 4" in output
    assert again == pytest.approx(losses, rel=1e-5)
    assert all(torch.allclose(found[name], trained[name], atol=1e-5) for name in trained)

    merge_fsdp_weights(str(shards / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    _, saved, _ = run("between", 2, f"{resumed} --max_steps 2")
    merged = weights(tmp_path / "merged")
    assert all(torch.equal(saved[name], merged[name]) for name in saved)
    assert get_patch(from_pretrained(tmp_path / "between")) is not None


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
def test_weights_in_the_dtype_of_a_checkpoint_train_alike(training: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", dtype="bfloat16")
    (model / "text.txt").write_text(prose(6_000))
    found = []
    for loading in ("true", "false"):
        output = tmp_path / loading
        config = "--config_file scripts/configs/fsdp2.yaml --fsdp_cpu_ram_efficient_loading"
        script = [*IN_FRONT["fsdp2"], *MODULE, *command(model, output, training, 1)]
        (done,) = launched(f"{config} {loading}", [*script, "--bf16"])
        assert done.returncode == 0, done.stderr
        found.append((numbers(output, "loss"), weights(output)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its part for a CPU")
@pytest.mark.parametrize("training", TRAININGS)
def test_zero3_equals_one_process(training: str, folder: Path, tmp_path: Path) -> None:
    check("zero3", training, folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2_two_nodes", "zero3_two_nodes"])
def test_two_machines_equal_one_process(config: str, folder: Path, tmp_path: Path) -> None:
    """Two launchers on this machine, that know of each other by address and rank alone."""
    if config == "zero3_two_nodes":
        pytest.importorskip("deepspeed")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    place = f"--main_process_ip 127.0.0.1 --main_process_port {port} --machine_rank {{rank}}"
    check(config, "full", folder, tmp_path, "--num_processes 2", place)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--cpu --num_processes 2", "--config_file {multi_cpu}"])
def test_one_process_in_place_of_two_is_refused(options: str, folder: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((CONFIGS / "two_cpu_processes.yaml").read_text())
    several = yaml.safe_dump({**config, "distributed_type": "MULTI_CPU"})
    (tmp_path / "multi.yaml").write_text(several)
    script = ["scripts/finetune.py", *command(folder, tmp_path / "run", "full", 1)]
    (done,) = launched(options.format(multi_cpu=tmp_path / "multi.yaml"), script)
    assert done.returncode != 0
    assert "error: 2 processes were requested, and accelerate connected 1" in done.stderr


@pytest.mark.slow
def test_a_launch_file_for_gpus_on_a_cpu_and_refused_sharding(folder: Path, tmp_path: Path) -> None:
    script = ["scripts/finetune.py", *command(folder, tmp_path / "run", "full", 1)]
    (done,) = launched("--config_file scripts/configs/fsdp2.yaml", script)
    assert done.returncode != 0
    assert "error: FSDP was requested, but accelerate supports it on GPUs only" in done.stderr
    for config in ("one_process", "two_processes"):
        (done,) = launched(f"--config_file scripts/configs/{config}.yaml", [*script, "--fresh"])
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("'train_loss'") == 1
