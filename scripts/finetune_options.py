"""The options of scripts/finetune.py: three dataclasses for transformers' `HfArgumentParser`, and recipes in YAML."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from transformers import HfArgumentParser, SchedulerType, Trainer, TrainingArguments
from transformers.integrations import integration_utils

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.measuring.candidates import UNPATCHED
from hf_posenc.lengths import read_length
from hf_posenc.patch.report import Patch
from hf_posenc.training.batches.blocks import Blocks
from hf_posenc.training.batches.collator import DRAWS, POSITIONS, PROMPTED
from hf_posenc.training.parameters import Trained
from scripts.finetune_model import Lengths, will_be_sharded

_HELP = "See finetune.py --help."
PROMPT = " That is the end of the text. The answer to the question about the text above is:"
# The least value of each number, and the first one above that is too large.
_LIMITS: Mapping[str, tuple[float, float]] = {
    "per_device_train_batch_size gradient_accumulation_steps max_steps": (1, math.inf),
    "learning_rate weight_decay adam_epsilon max_grad_norm warmup_steps": (0, math.inf),
    "num_train_epochs logging_steps save_steps eval_steps neftune_noise_alpha": (0, math.inf),
    "dataloader_num_workers save_total_limit": (0, math.inf),
    "adam_beta1 adam_beta2 label_smoothing_factor": (0, 1),
    "seed data_seed": (0, 2**32),
}


def _option(default: Any, text: str, **more: Any) -> Any:
    metadata = {"help": text, **more}  # for `ArgumentParser.add_argument`
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Length(int):
    """A length on the command line: 32768, or 32k."""

    def __new__(cls, text: str) -> Length:
        try:
            return super().__new__(cls, read_length(text, "length"))
        except PosencError as error:
            raise argparse.ArgumentTypeError(str(error)) from error


@dataclass
class PatchArguments:
    """The model, its patch, and the parameters that are trained."""

    model: str | None = _option(
        None, "Folder, GGUF file or hub name of a model; by default the embedded one."
    )
    tokenizer: str | None = _option(None, "Folder or hub name of a tokenizer, if not the model's.")
    dtype: str = _option("float32", "Dtype of the trained weights; --bf16 computes in bfloat16.")
    attn: str | None = _option(None, "transformers' attention implementation.")
    patch: str | None = _option(
        None,
        "method:option=value,...[+method...], as for `hf-posenc perplexity`; by default the one it was saved with.",
    )
    train: Trained = _option(
        "full", "All weights, LoRA with embeddings and norms, or the encoding."
    )
    lora_rank: int = _option(16, "Rank of --train lora.")
    lora_alpha: int = _option(32, "Alpha of --train lora.")
    lora_dropout: float = _option(0.0, "Dropout of --train lora.")
    distill: Literal["positions", "short"] | None = _option(
        None,
        "Keep predictions near a teacher's: of drawn positions near those of the model's own at positions 0 to n - 1 "
        "(positions), or of blocks within the original length near those of the unpatched model (short).",
    )
    distill_weight: float | None = _option(None, "Weight of --distill beside the loss; default 1.")
    loss_chunk: int | None = _option(
        None,
        "Tokens whose logits exist at a time; by default as many as fit in 128 MiB. 0: the model's own loss.",
    )


@dataclass
class DataArguments:
    """The documents for training and for scoring, and the positions of their tokens."""

    text: list[str] = _option([], "Text, JSONL or Parquet to train on; default: standard library.")
    dataset: str | None = _option(None, "Folder or hub name of a dataset, instead of --text.")
    dataset_config: str | None = _option(None, "Configuration of --dataset.")
    split: str = _option("train", "Split of --dataset.")
    column: str = _option(
        "text",
        "Column of the texts, or of conversations (lists of messages with role and content): of these only the "
        "assistant's tokens have a loss.",
    )
    streaming: bool = _option(False, "Read --dataset while it is downloaded.")
    tokenized: str | None = _option(None, "Column of token ids, instead of --column.")
    documents: int | None = _option(None, "Usable documents to read; by default all.")
    mixture: str | None = _option(
        None,
        "A YAML file with a list of sources, instead of --text: a weight (its share of the blocks) and these options.",
    )
    stream_blocks: bool = _option(False, "Cut documents while training, instead of before it.")
    preprocessing_num_workers: int = _option(1, "Processes that tokenize.")
    positions: str = _option(
        "contiguous",
        "contiguous: blocks of one document; packed: short documents side by side that do not attend to each other; "
        "all others: short blocks whose positions reach the target length.",
        choices=POSITIONS,
    )
    terminal_prompt: str = _option(PROMPT, "The end of every block, of --positions endprompt.")
    curriculum: str | None = _option(
        None,
        "Rising factors on the original length, as in 1,2,4,8: positions that are drawn reach one after another, each "
        "in an equal share of the steps.",
    )
    target_length: Length | None = _option(None, "Context in tokens; by default the patch's.")
    block_length: Length | None = _option(
        None,
        "Tokens in an example; by default the target length, and the original length where positions are drawn.",
    )
    score_text: list[str] = _option(
        [],
        "Documents to score, as --text, or give --score_dataset; by default every tenth document to train on, from the "
        "second on, or the last tenth of a single one: it is not trained on.",
    )
    score_dataset: str | None = _option(None, "As --dataset, for the held-out documents.")
    score_split: str = _option("test", "Split of --score_dataset.")
    score_documents: int = _option(8, "Number of held-out documents.")
    score_lengths: list[Length] = _option([], "Lengths to score; by default original and target.")
    tail_tokens: int | None = _option(
        None, "Tokens scored at the end of a tail window; by default as `hf-posenc perplexity`."
    )
    score: bool = _option(True, "Measure perplexities before and after the training.")


@dataclass
class FinetuneArguments(TrainingArguments):
    """transformers' own options, with the defaults that recipes for longer contexts agree on.

    From YaRN (arXiv 2309.00071), LongLoRA (2309.12307) and PI (2306.15595): AdamW with betas 0.9 and 0.95, no weight
    decay, 2e-5 after 20 steps of warmup, 400 to 1000 steps, gradients clipped at 1.
    """

    output_dir: str | None = _option("finetuned", "Folder of checkpoints, measurements and model.")
    learning_rate: float = _option(2e-5, "Peak learning rate.")
    lr_scheduler_type: SchedulerType | str = _option("constant_with_warmup", "The schedule.")
    warmup_steps: float = _option(20, "Steps of linear warmup; a share of all steps below 1.")
    max_steps: int = _option(400, "Optimizer steps; -1: those of --num_train_epochs.")
    per_device_train_batch_size: int = _option(1, "Examples per device and forward.")
    adam_beta2: float = _option(0.95, "AdamW's second beta.")
    logging_steps: float = _option(1, "Steps between two lines of the log.")
    save_steps: float = _option(50, "Steps between two checkpoints.")
    save_total_limit: int | None = _option(2, "Number of checkpoints to keep.")
    logging_nan_inf_filter: bool = _option(False, "Hide losses that are not finite.")
    dataloader_drop_last: bool = _option(
        True,
        "Drop the last blocks of an epoch if they fill no batch; otherwise processes repeat some.",
    )
    remove_unused_columns: bool = _option(False, "Keep only the columns that forward accepts.")
    include_num_input_tokens_seen: str | bool = _option(True, "Count the tokens of the training.")
    fresh: bool = _option(False, "Begin again if the folder holds another run's checkpoints.")
    verify_export: bool = _option(False, "Load the result without hf_posenc and compare logits.")

    def __post_init__(self) -> None:
        for names, (least, limit) in _LIMITS.items():
            for name in names.split():
                value = getattr(self, name)
                if value is None or (name, value) == ("max_steps", -1) or least <= value < limit:
                    continue
                below = "a finite number" if math.isinf(limit) else f"below {limit:g}"
                raise PosencError(f"--{name} {value:g}: at least {least:g} and {below} is needed.")
        super().__post_init__()  # type: ignore[no-untyped-call]
        if self.max_steps == -1 and self.num_train_epochs == 0:
            raise PosencError("--num_train_epochs 0 gives no step: give more, or --max_steps.")
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # torch warns that it has no effect there
            if self.fp16:
                raise PosencError("fp16 on a CPU computes in float32 silently: use --bf16 or none.")
        if self.train_sampling_strategy == "group_by_length":
            raise PosencError(
                "--train_sampling_strategy group_by_length: all blocks have one length; leave it out."
            )
        try:
            Trainer.get_optimizer_cls_and_kwargs(self)  # ImportError without its package
        except ValueError as error:
            if "model" not in str(error):  # some are built from the model, which is not loaded yet
                raise
        _check_trackers(self.report_to)


def _check(choice: PatchArguments, data: DataArguments, arguments: FinetuneArguments) -> None:
    """Refuse options that nothing would use, and workers that a stream cannot have."""
    for name in ("lora_rank", "lora_alpha", "lora_dropout"):
        value = getattr(choice, name)
        if choice.train != "lora" and value != getattr(PatchArguments, name):
            raise PosencError(f"--{name} {value} is for --train lora: leave it out.")
    context = arguments.dataloader_multiprocessing_context or multiprocessing.get_start_method()
    if data.stream_blocks and arguments.dataloader_num_workers and context != "fork":
        raise PosencError(
            f"--stream_blocks: a worker that is started by {context} cannot read the documents. Give "
            "--dataloader_num_workers 0, or leave --stream_blocks out."
        )
    if data.positions not in PROMPTED and data.terminal_prompt != PROMPT:
        raise PosencError(f"--terminal_prompt is for --positions {' or '.join(PROMPTED)}.")
    _check_distillation(choice, data, arguments)
    if arguments.output_dir == "":
        raise PosencError("--output_dir is empty: give a folder.")


def _check_distillation(
    choice: PatchArguments, data: DataArguments, arguments: FinetuneArguments
) -> None:
    kind, weight = choice.distill, choice.distill_weight
    given, unpatched = f"--distill_weight {weight or 0:g}", (choice.patch or "").strip().lower()
    problems = (
        (not kind and weight is not None, f"{given} is for --distill: leave it out"),
        (not 0 < (1 if weight is None else weight) < math.inf, f"{given}: a positive number is needed"),
        (kind and choice.loss_chunk == 0, f"--distill {kind} is computed in chunks: leave --loss_chunk 0 out"),
        (kind == "positions" and data.positions not in DRAWS,
         f"--distill positions: --positions {data.positions} draws none: use one of {', '.join(DRAWS)}"),
        (kind == "short" and unpatched == UNPATCHED,
         "--distill short: without a patch, the model would be its own teacher"),
        (kind == "short" and will_be_sharded(arguments),
         "--distill short: no process holds a sharded model whole: leave it out, or train without FSDP and DeepSpeed"),
    )  # fmt: skip
    for wrong, problem in problems:
        if wrong:
            raise PosencError(f"{problem}.")


def _check_resumption(choice: PatchArguments, arguments: FinetuneArguments) -> None:
    """Refuse a checkpoint of other parameters: the Trainer would refuse it after everything is read and scored."""
    checkpoint = Path(arguments.resume_from_checkpoint or "true")
    if not (checkpoint / "trainer_state.json").is_file():
        return  # the last one of the folder, or none, which `TrainingFolder` refuses
    file, adapter = checkpoint / "adapter_config.json", None
    if file.is_file():
        adapter = json.loads(file.read_text(encoding="utf-8")).get("r")
    requested = choice.lora_rank if choice.train == "lora" else None
    if adapter != requested:
        held = "the whole weights" if adapter is None else f"a LoRA of rank {adapter}"
        way = "--train full" if adapter is None else f"--train lora --lora_rank {adapter}"
        raise PosencError(
            f"--resume_from_checkpoint {checkpoint}: it holds {held}, which --train {choice.train} cannot resume. "
            f"Give {way}, or leave --resume_from_checkpoint out."
        )


def _check_trackers(report_to: str | Sequence[str] | None) -> None:
    """Refuse missing trackers now: the Trainer would refuse them after everything is read and scored."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for name in names if name not in ("none", "all")]
    integration_utils.get_reporting_integration_callbacks(names)  # ValueError if unknown
    installed = integration_utils.get_available_reporting_integrations()
    # transformers does not list the first, nor the second beside MLflow.
    unlisted = ("flyte", "azure_ml")
    if missing := [name for name in names if name not in (*installed, *unlisted)]:
        raise PosencError(
            f"--report_to {missing[0]}: its package is not installed; there are {', '.join(installed) or 'none'}."
        )


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise an error of one line, without the hundred options in front of it."""
        raise PosencError(f"{message}. {_HELP}")


Arguments = tuple[PatchArguments, DataArguments, FinetuneArguments]


def parse_arguments(default_recipe: Path, argv: Sequence[str] | None = None) -> Arguments:
    """Parse the command line; `--recipe FILE` reads defaults from a YAML file, by default one if no model is named."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    kinds: Any = (PatchArguments, DataArguments, FinetuneArguments)
    parser: Any = _Parser(kinds, allow_abbrev=False)
    parser.add_argument("--recipe", help="A YAML file of these options; the command line wins.")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--recipe", "--model"):
        first.add_argument(name)
    early, _ = first.parse_known_args(arguments)
    recipe = early.recipe or (default_recipe if early.model is None else None)
    if recipe is not None:
        parser.set_defaults(**_read_recipe(Path(recipe), parser))
    try:
        *parsed, _ = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    except PosencError:
        raise
    except (ValueError, ImportError) as error:  # unknown or mutually exclusive options
        raise PosencError(f"{one_line(error).rstrip('.')}. {_HELP}") from error
    _check(*parsed)
    _check_resumption(parsed[0], parsed[2])
    return cast(Arguments, tuple(parsed))


def read_yaml(kind: str, path: Path) -> Any:
    """Return the values of a YAML file."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise PosencError(f"The {kind} {path} cannot be read: {reason}") from error


def _read_recipe(path: Path, parser: Any) -> dict[str, Any]:
    values = read_yaml("recipe", path)
    if not isinstance(values, dict):
        raise PosencError(f"The recipe {path} is no list of `option: value` lines.")
    options = {action.dest for action in parser._actions} - {"help", "recipe"}
    for name, value in values.items():
        if name not in options or value is None:
            what = "no option" if name not in options else "given no value"
            raise PosencError(f"The recipe {path} sets {name}, which is {what}. {_HELP}")
    lists = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    # argparse converts only defaults that are strings, and makes no list of one value.
    values = {
        k: str(value) if type(value) in (int, float) else value for k, value in values.items()
    }
    return {k: [v] if k in lists and isinstance(v, str) else v for k, v in values.items()}


def command_line() -> str:
    """Return the command that repeats the result, without its output folder and the number of processes."""
    arguments, kept = sys.argv[1:], []
    while arguments:
        argument = arguments.pop(0)
        option, equals, _ = argument.partition("=")
        if option.replace("-", "_") != "__output_dir":
            kept.append(argument)
        elif not equals and arguments:
            arguments.pop(0)
    return shlex.join(["accelerate", "launch", "scripts/finetune.py", *kept])


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
    known = {"blocks": counts.blocks, "documents": counts.documents, "tokens": counts.tokens}
    return {
        "positions": data.positions,
        "target_length": lengths.target,
        "block_length": lengths.block,
        **({} if lengths.curriculum is None else {"curriculum": list(lengths.curriculum)}),
        **({} if blocks.streamed else known),
    }
