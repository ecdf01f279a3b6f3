"""A small training in processes that end at a chosen moment: killed at a file operation, or told to stop."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_posenc import patch_model
from hf_posenc.errors import PosencError
from hf_posenc.training import PositionCollator, distill, unpatched_teacher
from hf_posenc.training.checkpoints import TrainingFolder, settings_of
from hf_posenc.training.parameters import choose_parameters
from hf_posenc.training.processes import partition_weights
from tests.support.file_operations import Moment, count_operations
from tests.support.fsdp_on_cpu import allow
from tests.support.processes import start
from tests.support.tiny_text import sizes

REFUSED = 3
"""Exit status of a process that ended with one line."""


class _AtStep(TrainerCallback):
    def __init__(self, moment: Moment | None) -> None:
        self._moment = moment

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._send("step", state.global_step + 1, args.process_index)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._send("evaluation", state.global_step, args.process_index)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._send("epoch", state.global_step, args.process_index)

    def _send(self, when: str, step: int, rank: int) -> None:
        moment = self._moment
        if moment is None or (moment.when, moment.step, moment.rank) != (when, step, rank):
            return
        if moment.number >= 0:
            os.kill(os.getpid(), moment.number)
        # A dataloader's worker takes a signal of its parent for an order to end.
        elif (sender := os.fork()) == 0:
            group = os.getpgrp()
            os.setpgrp()
            os.killpg(group, -moment.number)
            os._exit(0)
        else:
            os.waitpid(sender, 0)


SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
"""As `accelerate launch --config_file scripts/configs/fsdp2.yaml` sets them."""


def train(
    folder: Path,
    moment: Moment | None = None,
    *,
    kind: str = "full",
    distilled: str | None = None,
    **options: Any,
) -> None:
    """Trains a patched Llama with dropout for 12 steps of 2 x 2 examples, in epochs of 5 steps, and saves it.

    It is `distilled` by itself, with a terminal prompt, or by the unpatched model, with PoSE.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**sizes(48, 16, width=16, layers=2, heads=(2, 1)), attention_dropout=0.2)
    patched: Any = patch_model(LlamaForCausalLM(config), "yarn", scale=2)
    sharded, chosen = kind.startswith("sharded"), cast(Any, kind.removeprefix("sharded "))
    if sharded:
        os.environ.update(SHARDED)
        del os.environ["ACCELERATE_USE_CPU"]
        allow()
    teacher = unpatched_teacher(patched, chosen) if distilled == "short" else None
    model: Any = choose_parameters(patched, chosen, lora_rank=2, lora_dropout=0.2)
    collator = None
    if distilled is not None:
        positions, prompt = ("pose", ()) if teacher else ("endprompt_random", (1, 2, 3))
        collator = PositionCollator(positions, target_length=40, terminal_prompt=prompt)
        distill(model, positions=positions, teacher=teacher, chunk=8)
    ids = torch.randint(0, 48, (20 * int(os.environ.get("WORLD_SIZE", "1")), 24)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    values: dict[str, Any] = {"max_steps": 12, "per_device_train_batch_size": 2}
    values |= {"gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
    values |= {"save_steps": 3, "save_total_limit": 1, "report_to": [], "disable_tqdm": True}
    values |= {"use_cpu": not sharded, "ddp_find_unused_parameters": False}
    arguments = TrainingArguments(str(folder), **{**values, **options})
    partition_weights(model, arguments)
    with TrainingFolder(arguments, settings_of(arguments, kind=kind)) as run:
        callbacks = [_AtStep(moment), *([] if collator is None else [collator])]
        data: Any = {"train_dataset": rows, "eval_dataset": rows[:4]}
        trainer = Trainer(model, arguments, collator, **data, callbacks=callbacks)
        run.train(trainer)
        run.save(trainer.save_model)
        if arguments.process_index == 0:
            trainer.state.save_to_json(str(folder / "finished.json"))


def launch(
    folder: Path, moment: Moment | None = None, *, processes: int = 1, log: Path | None = None,
    after: float | None = None, work: Callable[..., None] = train, **options: Any,
) -> list[int]:  # fmt: skip
    """Run `work` in several processes, and return the exit status of each: negative for a signal.

    When one dies of a signal, the others are killed as a launcher would; after `after` seconds all are. `log` is a file
    for the names of the first process's operations.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        group = (processes, int(found.getsockname()[1]))
    made: list[Any] = [
        start(_in_process, work, folder, moment, rank, group, None if rank else log, options)
        for rank in range(processes)
    ]
    ends = time.monotonic() + (120 if after is None else after)
    while any(process.is_alive() for process in made):
        if time.monotonic() > ends or any(process.exitcode not in (None, 0) for process in made):
            # A launcher tells the others to stop; those that cannot are killed after its grace time.
            grace = 0.0 if any((process.exitcode or 0) < 0 for process in made) or after else 5.0
            for process in made:
                process.join(grace)
                process.kill()
        time.sleep(0.01)
    for process in made:
        process.join()
    assert after is not None or time.monotonic() < ends, "the training hangs"
    return [int(process.exitcode) for process in made]


def in_two_processes(function: Callable[[Path], None], folder: Path) -> None:
    """Call a function in two processes of one group.

    Raises:
        RuntimeError: One of them fails; the text is what they printed.
    """
    if launch(folder / "two", processes=2, work=_grouped, function=function) != [0, 0]:
        raise RuntimeError("".join(path.read_text() for path in folder.glob("two-?.out")))


def _grouped(folder: Path, moment: Moment | None, *, function: Callable[[Path], None]) -> None:
    PartialState(cpu=True)
    function(folder.parent)


def losses(folder: Path) -> list[dict[str, Any]]:
    """Every logged row of a finished run, without what depends on the clock."""
    state = json.loads((folder / "finished.json").read_text())
    rows = [row for row in state["log_history"] if "loss" in row or "eval_loss" in row]
    return [{k: v for k, v in r.items() if not k.endswith(("runtime", "per_second"))} for r in rows]


@contextlib.contextmanager
def _silent(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield


def _in_process(
    work: Callable[..., None], folder: Path, moment: Moment | None, rank: int,
    group: tuple[int, int], log: Path | None, options: dict[str, Any],
) -> None:  # fmt: skip
    os.environ["ACCELERATE_USE_CPU"] = "true"
    processes, port = group
    if processes > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
        place |= {"LOCAL_WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    status = 1
    os.setpgrp()
    gc.freeze()  # collecting what the tests have imported would copy all of its memory
    with _silent(folder.parent / f"{folder.name}-{rank}.out"):
        here = moment if moment is not None and moment.rank == rank else None
        if log is not None or (here is not None and here.operation is not None):
            count_operations(folder, here, log)
        try:
            work(folder, moment, **options)
            status = 0
        except PosencError as error:
            sys.stdout.write(f"ERROR {error}\n")
            status = REFUSED
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
