"""The options with those of transformers, parsed; what of them decides the losses, and what is shown."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.integrations import integration_utils

from hf_posenc.errors import PosencError, one_line
from hf_posenc.patch.report import Patch
from hf_posenc.training.batches.blocks import Blocks
from hf_posenc.training.names import PROMPTED
from hf_posenc.training.run import options
from hf_posenc.training.run.model import Lengths, will_be_sharded
from hf_posenc.training.run.options import HELP, DataArguments, PatchArguments, RunArguments


@dataclass
class FinetuneArguments(RunArguments, TrainingArguments):
    """transformers' own options, with our defaults."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        if self.max_steps == -1 and self.num_train_epochs == 0:
            raise PosencError("--num_train_epochs 0 gives no step: give more, or --max_steps.")
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # torch warns that it has no effect there
            if self.fp16:
                raise PosencError("fp16 on a CPU computes in float32 silently: use --bf16 or none.")
        try:
            Trainer.get_optimizer_cls_and_kwargs(self)  # ImportError without its package
        except ValueError as error:
            if "model" not in str(error):  # some are built from the model, which is not loaded yet
                raise
        for tracker in integration_utils.get_reporting_integration_callbacks(self.report_to):
            tracker()  # RuntimeError or ImportError without its package, as late as in the Trainer


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise an error of one line, without the hundred options in front of it."""
        raise PosencError(f"{message}. {HELP}")


Arguments = tuple[PatchArguments, DataArguments, FinetuneArguments]


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Parse the words of a command line, and refuse what is wrong with them."""
    options.read(words)
    own: Any = TrainingArguments
    parser = _Parser(own, add_help=False, allow_abbrev=False, conflict_handler="resolve")
    parser.set_defaults(**options.DEFAULTS)
    for name in (name for name, value in options.DEFAULTS.items() if value is True):
        parser.add_argument(f"--no_{name}", action="store_false", dest=name, default=True)
    options.add_options(parser)
    values = vars(options.parse(parser, words))
    choice, data = (options.pick(kind, values) for kind in (PatchArguments, DataArguments))
    try:
        arguments: FinetuneArguments = options.pick(FinetuneArguments, values)
    except PosencError:
        raise
    except (ValueError, ImportError, RuntimeError) as error:  # mutually exclusive options
        raise PosencError(f"{one_line(error).rstrip('.')}. {HELP}") from error
    if choice.distill == "short" and will_be_sharded(arguments):
        raise PosencError(
            "--distill short: no process holds a sharded model whole: leave it out, or train without FSDP and "
            "DeepSpeed."
        )
    return choice, data, arguments


def command_line(arguments: TrainingArguments) -> str:
    """Return the command that repeats the result, without its output folder, a token and the number of processes."""
    words, kept = sys.argv[1:], []
    if words[:1] == ["finetune"]:  # behind hf-posenc
        del words[0]
    while words:
        word = words.pop(0)
        option, equals, _ = word.partition("=")
        if option.replace("-", "_") not in ("__output_dir", "__hub_token"):
            kept.append(word)
        elif not equals and words:
            words.pop(0)
    several = arguments.world_size > 1 or will_be_sharded(arguments)
    program = "accelerate launch -m hf_posenc.training" if several else "hf-posenc finetune"
    return f"{program} {shlex.join(kept)}".rstrip()


def decisive(
    options: Arguments, weights: str, patch: Patch | None, lengths: Lengths, blocks: Blocks
) -> dict[str, Any]:
    """Return everything that determines the losses of a run beside transformers' own options."""
    choice, data, _ = options
    names = ("model", "tokenizer", "patch")  # weights, tokens and patch count instead
    return {
        "weights": weights,
        "patch": None if patch is None else patch.config.to_dict(),
        "choice": {key: value for key, value in asdict(choice).items() if key not in names},
        "positions": data.positions,
        **({"terminal_prompt": data.terminal_prompt} if data.positions in PROMPTED else {}),
        "lengths": asdict(lengths),
        "blocks": blocks.counts.sha256,
    }


def prompt_ids(data: DataArguments, tokenizer: Any, block: int) -> list[int]:
    """Return the tokens of the terminal prompt, which are the last of a block; none without one."""
    if data.positions not in PROMPTED:
        return []
    ids = [*map(int, tokenizer(data.terminal_prompt, add_special_tokens=False)["input_ids"])]
    if not 0 < len(ids) <= block - 2:
        raise PosencError(
            f"--terminal_prompt has {len(ids)} tokens; between 1 and {block - 2:,} fit into a block of {block:,} with "
            "its text."
        )
    return ids


def described(data: DataArguments, lengths: Lengths, blocks: Blocks) -> dict[str, Any]:
    """Return the description of the training data for a model card."""
    counts = blocks.counts
    return {
        "positions": data.positions,
        "target_length": lengths.target,
        "block_length": lengths.block,
        **({} if lengths.curriculum is None else {"curriculum": list(lengths.curriculum)}),
        "blocks": counts.blocks,
        "documents": counts.documents,
        "tokens": counts.tokens,
    }
