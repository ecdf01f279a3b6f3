"""The options that several commands share: one name, one meaning, one help text."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from hf_posenc.evaluation.documents import Entry, TokenCache

DOCUMENTS = "Documents"
MEASURED = "What is measured"
MODEL = "The model"
AT_ONCE = "Memory and speed"
OUTPUT = "Output"

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="A folder or a hub name. Default: the embedded model."),
]
PatchOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METHOD",
        help="none, or method:option=value,... such as yarn:scale=8, or several joined by +, such as "
        "yarn:scale=4+log_n; may be given several times. Without a scale, a method that scales to a target gets "
        "length / original length, anew at every length.",
        rich_help_panel=MEASURED,
    ),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        metavar="L,L,...",
        help="Context lengths in tokens, e.g. 512,1024,4k, or 2k:128k:2k (first, last, step). Default: the original "
        "length times 1, 2, 4, 8, 16 up to 4,096 tokens, and three of them at least.",
        rich_help_panel=MEASURED,
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A peer's own arithmetic: yarn, pi, pose, longlora, su, lm-eval or hf-docs. Other options win.",
        rich_help_panel=MEASURED,
    ),
]
ProtocolOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="One or several of prefix, tail, sliding, disjoint, stream.",
        show_default="prefix,tail, or as the preset says",
        rich_help_panel=MEASURED,
    ),
]
TailTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        min=1,
        help="Tokens that `tail` scores. Default: 1024, at most half of the shortest length.",
        rich_help_panel=MEASURED,
    ),
]
StrideOption = Annotated[
    int | None,
    typer.Option(
        metavar="S",
        min=1,
        help="Tokens from one window of `sliding` or `stream` to the next; the text is read L / S times.",
        show_default="256, or as the preset says",
        rich_help_panel=MEASURED,
    ),
]
AggregateOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What weighs the same: tokens, windows, batches or documents; or hf-docs.",
        show_default="tokens, or as the preset says",
        rich_help_panel=MEASURED,
    ),
]
CompareOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID",
        help="A published table to print beside; refused where its protocol is another one.",
        rich_help_panel=MEASURED,
    ),
]
BosOption = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="auto (special tokens as the tokenizer puts them in front of a text), always, or never.",
        show_default="auto; as the preset says where there is one",
        rich_help_panel=MEASURED,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Seed of all that is drawn.", rich_help_panel=MEASURED),
]
TextOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="Files of text (UTF-8, also .gz and .zst), JSON lines, parquet, folders or glob patterns; may be given "
        "several times, or with several values.",
        show_default="the held-out modules of this Python's standard library",
        rich_help_panel=DOCUMENTS,
    ),
]
DatasetOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A dataset of the datasets library: hub name or folder.",
        rich_help_panel=DOCUMENTS,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The dataset's configuration.", rich_help_panel=DOCUMENTS),
]
SplitOption = Annotated[
    str, typer.Option(metavar="NAME", help="The dataset's split.", rich_help_panel=DOCUMENTS)
]
ColumnOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="The column of text.", rich_help_panel=DOCUMENTS),
]
StreamingOption = Annotated[
    bool,
    typer.Option(
        help="Read the dataset row by row, without downloading it.", rich_help_panel=DOCUMENTS
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Stop at so many usable documents.",
        rich_help_panel=DOCUMENTS,
    ),
]
MaxDocTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Cut every document to so many tokens first.",
        rich_help_panel=DOCUMENTS,
    ),
]
TokenizedOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The column of token ids, read instead of a text: input_ids of emozilla/pg19-test-tokenized.",
        rich_help_panel=DOCUMENTS,
    ),
]
TokenDtypeOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What a .bin file of token ids consists of: uint16, uint32, int32, int64.",
        rich_help_panel=DOCUMENTS,
    ),
]
TokenCacheOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep the documents' tokens in this folder; several processes and later runs then tokenize only once.",
        rich_help_panel=DOCUMENTS,
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Default: the model's.", rich_help_panel=MODEL),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto (the checkpoint's own, float32 on a CPU), float32, bfloat16, float16, float64.",
        rich_help_panel=MODEL,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="cpu, cuda, cuda:1, ... Default: a GPU where there is one.",
        rich_help_panel=MODEL,
    ),
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        metavar="MAP", help="auto spreads a large model over all GPUs.", rich_help_panel=MODEL
    ),
]
AttnOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="sdpa, eager, flash_attention_2, ... Default: the model's.",
        rich_help_panel=MODEL,
    ),
]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Tokens that the model runs at a time, over a key-value cache: less memory, where a method allows it.",
        rich_help_panel=AT_ONCE,
    ),
]
ChunkOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Tokens whose logits are held at a time. Default: by the vocabulary.",
        rich_help_panel=AT_ONCE,
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what it will cost, and stop.", rich_help_panel=AT_ONCE),
]
OutputOption = Annotated[
    Path,
    typer.Option(metavar="DIR", help="Folder of the results.", rich_help_panel=OUTPUT),
]
PlotOption = Annotated[
    bool | None,
    typer.Option(
        help="Draw the plot. Default: where matplotlib is installed.", rich_help_panel=OUTPUT
    ),
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="This process is the I-th of N that share the work, all with the same --output. Default: as torchrun, "
        "accelerate or a Slurm array says.",
        rich_help_panel=OUTPUT,
    ),
]


# What the commands are given: the arguments that need more than reading, checked before anything runs.


class TakesSeveral(TyperCommand):
    """Lets `--text a.txt b.txt` stand for `--text a.txt --text b.txt`, so that the shell may expand a pattern."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        values: int | None = None  # of the `--text` that is open
        for argument in args:
            option, equals, _ = argument.partition("=")
            if option == "--text":
                values = 1 if equals else 0
            elif argument.startswith("-"):
                values = None
            elif values is not None:
                spread += ["--text"] if values else []
                values += 1
            spread.append(argument)
        return super().parse_args(ctx, spread)


def decide_plot(plot: bool | None) -> bool:
    """Whether to draw: as asked for, else where matplotlib is installed.

    Raises:
        PosencError: A plot was asked for, and there is no matplotlib.
    """
    from hf_posenc.evaluation.plots import available

    if plot and not available():
        raise PosencError("--plot needs matplotlib: pip install 'hf-posenc[plot]'.")
    return available() if plot is None else plot


def check_output(folder: Path) -> None:
    """Makes the folder of the results.

    Raises:
        PosencError: It cannot be made.
    """
    if folder.is_file():
        raise PosencError(f"--output {folder} is a file: give a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PosencError(
            f"--output {folder} cannot be written to: {error.strerror or error}"
        ) from error


def names_of(text: str) -> tuple[str, ...]:
    """Reads names with commas between them."""
    return tuple(part.strip() for part in text.split(","))


def tasks_of(text: str) -> tuple[str, ...]:
    """Reads `--tasks`: names, or `all`."""
    from hf_posenc.evaluation.retrieval import TASKS

    names = names_of(text)
    return tuple(TASKS) if names == ("all",) else names


def source_of(
    text: list[str] | None,
    dataset: str | None,
    config: str | None,
    split: str,
    column: str,
    streaming: bool,
    tokenized: str | None = None,
    token_dtype: str = "uint16",
) -> tuple[Iterable[Entry] | None, dict[str, Any]]:
    """The reader that was asked for, `None` for the default one, and what the result says of it.

    Raises:
        PosencError: Two sources, or a model in the place of a text.
    """
    from hf_posenc.evaluation.documents import printable, read_dataset, read_paths

    if text and dataset is not None:
        raise PosencError("--text and --dataset exclude each other: give one of them.")
    read: dict[str, Any] = {"split": split, "column": column, "tokenized": tokenized}
    if text:
        # os.path, since pathlib raises for a name that is too long
        configs = {path: os.path.join(path, "config.json") for path in text}  # noqa: PTH118
        model = next((path for path in text if os.path.isfile(configs[path])), None)  # noqa: PTH113
        if model is not None:
            raise PosencError(
                f"--text {model} is a model's folder. MODEL goes in front of the options."
            )
        read["token_dtype"] = token_dtype
        names = [printable(path) for path in text]
        return read_paths(text, **read), {"kind": "text", "paths": names, **read}
    if dataset is not None:
        options: dict[str, Any] = {"config": config, **read, "streaming": streaming}
        return read_dataset(dataset, **options), {"kind": "dataset", "name": dataset, **options}
    if tokenized is not None:
        raise PosencError("--tokenized names a column of a --dataset, or of rows in --text files.")
    return None, {}


def token_cache_of(folder: Path | None, tokenizer: Any) -> TokenCache | None:
    """The token cache that was asked for."""
    if folder is None:
        return None
    from hf_posenc.evaluation.documents import TokenCache
    from hf_posenc.evaluation.measuring.identity import tokenizer_hash

    return TokenCache(folder, tokenizer_hash(tokenizer))
