"""What scripts/finetune.py is told: three dataclasses for transformers' `HfArgumentParser`, and files of recipes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from transformers import HfArgumentParser, SchedulerType, Trainer, TrainingArguments

from hf_posenc.errors import PosencError, one_line
from hf_posenc.patch.report import Patch
from hf_posenc.training.batches.blocks import Counts
from hf_posenc.training.parameters import Trained
from hf_posenc.training.preparation import Lengths

RECIPE_OPTION = "--recipe"
_HELP = "See finetune.py --help."


def _option(default: Any, text: str) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class PatchArguments:
    """The model, what is done to its positions, and which of its parameters are trained."""

    model: str | None = _option(
        None, "Folder or hub name of a causal language model; by default the embedded Llama."
    )
    tokenizer: str | None = _option(
        None, "Folder or hub name of its tokenizer, where that is not the model's."
    )
    dtype: str = _option(
        "float32", "Of the weights that are trained; --bf16 computes in bfloat16 beside it."
    )
    attn: str | None = _option(None, "transformers' attention implementation.")
    patch: str | None = _option(
        None,
        "method:option=value,...[+method...], as for `hf-posenc perplexity`. A model that was saved with a patch keeps "
        "its own where this is left out.",
    )
    train: Trained = _option(
        "full",
        "All weights, LoRA with embeddings and norms, or the encoding's own parameters only.",
    )
    lora_rank: int = _option(16, "Rank of --train lora.")
    lora_alpha: int = _option(32, "Alpha of --train lora.")
    lora_dropout: float = _option(0.0, "Dropout of --train lora.")
    loss_chunk: int | None = _option(
        None,
        "Tokens whose logits are held at a time; by default as many as fit in 128 MiB. 0: the model's own loss.",
    )


@dataclass
class DataArguments:
    """What is read for training and for scoring, and how positions are given out."""

    text: list[str] = _option(
        [], "Text, JSONL or Parquet files or folders to train on; by default the standard library."
    )
    dataset: str | None = _option(None, "Folder or hub name of a dataset, instead of --text.")
    dataset_config: str | None = _option(None, "Configuration of --dataset.")
    split: str = _option("train", "Split of --dataset.")
    column: str = _option("text", "Column that holds the text.")
    streaming: bool = _option(False, "Read --dataset while it is downloaded.")
    tokenized: str | None = _option(None, "Column of token ids, instead of --column.")
    documents: int | None = _option(
        None, "Number of usable documents after which reading stops; by default all."
    )
    positions: Literal["contiguous", "packed", "pose", "random", "cream"] = _option(
        "contiguous",
        "contiguous: blocks of one document; packed: short documents side by side that never see each other; pose, "
        "random, cream: short blocks whose positions reach the target length.",
    )
    target_length: int | None = _option(
        None, "Context in tokens to train for; by default what the patch reaches."
    )
    block_length: int | None = _option(
        None,
        "Tokens in an example; by default the target length, and the original length for pose, random and cream.",
    )
    score_text: list[str] = _option(
        [], "Held-out documents for the perplexities, as --text; by default --score-dataset's."
    )
    score_dataset: str | None = _option(None, "As --dataset, for the held-out documents.")
    score_split: str = _option("test", "Split of --score_dataset.")
    score_documents: int = _option(8, "Number of held-out documents.")
    score_lengths: list[int] = _option(
        [], "Context lengths of the perplexities; by default the original and the target length."
    )
    tail_tokens: int | None = _option(
        None, "Tokens scored at the end of a tail window; by default as `hf-posenc perplexity`."
    )
    score: bool = _option(True, "Measure perplexities before and after.")


@dataclass
class FinetuneArguments(TrainingArguments):
    """transformers' own options, with the defaults that recipes for longer contexts agree on.

    From YaRN (arXiv 2309.00071), LongLoRA (2309.12307) and PI (2306.15595): AdamW with betas 0.9 and 0.95, no weight
    decay, 2e-5 after 20 steps of warmup, 400 to 1000 steps, gradients clipped at 1.
    """

    output_dir: str | None = _option(
        "finetuned", "Where the checkpoints, the measurements and the model go."
    )
    learning_rate: float = _option(2e-5, "Peak learning rate.")
    lr_scheduler_type: SchedulerType | str = _option("constant_with_warmup", "The schedule.")
    warmup_steps: float = _option(20, "Steps of linear warmup; a share of all steps below 1.")
    max_steps: int = _option(400, "Optimizer steps; -1: as many as --num_train_epochs has.")
    per_device_train_batch_size: int = _option(1, "Examples per device and forward.")
    adam_beta2: float = _option(0.95, "AdamW's second beta.")
    logging_steps: float = _option(1, "Steps between two lines of the log.")
    save_steps: float = _option(50, "Steps between two checkpoints.")
    save_total_limit: int | None = _option(2, "Number of checkpoints that are kept.")
    logging_nan_inf_filter: bool = _option(False, "Whether to hide a loss that is not a number.")
    dataloader_drop_last: bool = _option(
        True,
        "Leave out an epoch's last blocks where they fill no batch; else processes repeat some.",
    )
    remove_unused_columns: bool = _option(
        False, "Whether the collator sees only what the model takes."
    )
    include_num_input_tokens_seen: str | bool = _option(
        True, "Count the tokens that the model was trained on."
    )
    fresh: bool = _option(False, "Begin again where the folder holds another run's checkpoints.")
    verify_export: bool = _option(
        False, "Load the result in a process without hf_posenc and compare the logits."
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        if self.device.type == "cpu":  # torch warns of what it cannot do there
            self.dataloader_pin_memory = False
            if self.fp16:
                raise PosencError(
                    "fp16 on a CPU would compute in float32, without a word: take --bf16, or neither."
                )
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"):
            value = getattr(self, name)
            if value < 1 and (name, value) != ("max_steps", -1):
                raise PosencError(f"--{name} {value}: at least 1 is needed.")
        if not self.learning_rate >= 0:
            raise PosencError(f"--learning_rate {self.learning_rate:g}: a rate is not negative.")
        if self.train_sampling_strategy == "group_by_length":
            raise PosencError(
                "--train_sampling_strategy group_by_length: all blocks have one length; leave it out."
            )
        kind = str(self.optim).lower()  # a string, or an enum
        if any(mark in kind for mark in ("8bit", "32bit")) and "galore" not in kind:
            Trainer.get_optimizer_cls_and_kwargs(self)  # ImportError where bitsandbytes is missing
        _check_trackers(self.report_to)


def _check_trackers(names: str | Sequence[str] | None) -> None:
    """Refuses what cannot be reported to: the Trainer finds that out after everything is read and scored."""
    from transformers.integrations.integration_utils import (
        get_available_reporting_integrations,
        get_reporting_integration_callbacks,
    )

    given = [names] if isinstance(names, str) else list(names or ())
    named = [name for name in given if name not in ("none", "all")]
    get_reporting_integration_callbacks(named)  # raises ValueError for a name that there is not
    there = get_available_reporting_integrations()
    unseen = (
        "flyte",
        "azure_ml",
    )  # transformers does not list the first, nor the second beside MLflow
    if missing := [name for name in named if name not in (*there, *unseen)]:
        raise PosencError(
            f"--report_to {missing[0]}: its package is not installed; there are {', '.join(there) or 'none'}."
        )


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the hundred options in front of it."""
        raise PosencError(f"{message}. {_HELP}")


Arguments = tuple[PatchArguments, DataArguments, FinetuneArguments]


def parse_arguments(default_recipe: Path, argv: Sequence[str] | None = None) -> Arguments:
    """Reads the command line; `--recipe FILE` gives defaults from a YAML file.

    Args:
        default_recipe: The recipe of a call that names no model.
        argv: The arguments; by default those of the process.

    Raises:
        PosencError: A recipe that cannot be read or sets what there is not.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    kinds: Any = (PatchArguments, DataArguments, FinetuneArguments)
    parser: Any = _Parser(kinds, allow_abbrev=False)
    parser.add_argument(
        RECIPE_OPTION, help="A YAML file of these options; what is given beside it wins."
    )
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (RECIPE_OPTION, "--model"):
        first.add_argument(name)
    early, _ = first.parse_known_args(given)
    recipe = early.recipe or (default_recipe if early.model is None else None)
    if recipe is not None:
        parser.set_defaults(**_read_recipe(Path(recipe), parser))
    try:
        *parsed, _ = parser.parse_args_into_dataclasses(given, look_for_args_file=False)
    except PosencError:
        raise
    except (ValueError, ImportError) as error:  # unknown options, and those that exclude each other
        raise PosencError(f"{one_line(error).rstrip('.')}. {_HELP}") from error
    return cast(Arguments, tuple(parsed))


def command_line() -> str:
    """What gives the same result again: without where it goes, and how many processes there are."""
    given, kept = sys.argv[1:], []
    while given:
        argument = given.pop(0)
        option, equals, _ = argument.partition("=")
        if option.replace("-", "_") != "__output_dir":
            kept.append(argument)
        elif not equals and given:
            given.pop(0)
    return shlex.join(["accelerate", "launch", "scripts/finetune.py", *kept])


def decisive(
    given: Arguments, weights: str, patch: Patch | None, lengths: Lengths, counts: Counts
) -> dict[str, Any]:
    """What determines the losses of a run, beside transformers' own options.

    Args:
        given: The arguments.
        weights: The hash of the loaded weights.
        patch: What is patched in.
        lengths: Those of the run.
        counts: Of the training data.
    """
    choice, data, _ = given
    places = ("model", "tokenizer", "patch")  # a name may change; weights, tokens and patch count
    return {
        "weights": weights,
        "patch": None if patch is None else patch.config.to_dict(),
        "choice": {key: value for key, value in asdict(choice).items() if key not in places},
        "positions": data.positions,
        "lengths": asdict(lengths),
        "blocks": counts.sha256,
    }


def described(data: DataArguments, lengths: Lengths, counts: Counts) -> dict[str, Any]:
    """What a model card says of the training data."""
    return {
        "positions": data.positions,
        "target_length": lengths.target,
        "block_length": lengths.block,
        "blocks": counts.blocks,
        "documents": counts.documents,
        "tokens": counts.tokens,
    }


def _read_recipe(path: Path, parser: Any) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PosencError(
            f"The recipe {path} cannot be read: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(values, dict):
        raise PosencError(f"The recipe {path} is no list of `option: value` lines.")
    known = {action.dest for action in parser._actions} - {"help", "recipe"}
    for name in values:
        if str(name).startswith("no_") and name[3:] in known:
            raise PosencError(f"The recipe {path} sets {name}: write `{name[3:]}: false`.")
    if unknown := sorted(set(values) - known):
        raise PosencError(
            f"The recipe {path} sets {unknown[0]}, which is no option; see finetune.py --help."
        )
    # argparse gives the type of an option only to defaults that are strings
    return {
        key: str(value) if type(value) in (int, float) else value for key, value in values.items()
    }
