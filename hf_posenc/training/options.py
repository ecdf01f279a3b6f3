"""The options of a fine-tuning, in groups, and what is wrong with their words; nothing heavy is imported here.

A field's line under `Attributes:` is its help; one of rank 1 is in `--help-all` alone. Of transformers' own options
the words are checked here, by its source: `train.py` parses them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.documents.source import check_readable, refuse_ignored, source_of
from hf_posenc.evaluation.measuring.candidates import UNPATCHED
from hf_posenc.evaluation.options import (
    DTYPES,
    DocumentOptions,
    Flag,
    help_texts,
    option,
    parse_dtype,
)
from hf_posenc.lengths import read_length

Trained = Literal["full", "lora", "encoding"]
PROMPTED = ("endprompt", "endprompt_random")
DRAWN = ("pose", "random", "cream", *PROMPTED)
POSITIONS = ("contiguous", "packed", *DRAWN)
RECIPES = Path(__file__).parent / "recipes"
_OF_EMBEDDED = ("drope", "embedded", "swan")
PROMPT = " That is the end of the text. The answer to the question about the text above is:"
HELP = "See hf-posenc finetune --help-all."
GROUPS = ("Model and patch", "Texts", "Lengths and positions", "Training", "Output")
_model, _texts, _lengths, _training, _output = (functools.partial(option, panel=g) for g in GROUPS)
_length = functools.partial(_lengths, metavar="TOKENS", parse=read_length)
# The least value of each number, and the first one above that is too large.
_LIMITS: Mapping[str, tuple[float, float]] = {
    "per_device_train_batch_size gradient_accumulation_steps max_steps": (1, math.inf),
    "learning_rate weight_decay adam_epsilon max_grad_norm warmup_steps": (0, math.inf),
    "num_train_epochs logging_steps save_steps eval_steps neftune_noise_alpha": (0, math.inf),
    "dataloader_num_workers save_total_limit": (0, math.inf),
    "adam_beta1 adam_beta2 label_smoothing_factor": (0, 1),
    "seed data_seed": (0, 2**32),
}
# What lists the words of transformers' own options in its source, where their types do not name it, and other words;
# and the files of that source.
_LISTS = {
    **dict.fromkeys(("log_level", "log_level_replica"), ("log_levels = {", "passive")),
    "fsdp": ("class FSDPOption", "true", "false"),
    "report_to": ("INTEGRATION_TO_CALLBACK", "all", "none"),
    "torch_compile_backend": ("class DynamoBackend",),
}
_PLACES = (
    "transformers training_args trainer_utils debug_utils utils/logging integrations/integration_utils",
    "accelerate utils/dataclasses",
)
# Options by the names that they have in other programs.
_ELSEWHERE = {
    **dict.fromkeys(("method", "methods"), "patch"),
    **dict.fromkeys(("length", "max_length", "context_length", "max_seq_length"), "target_length"),
    "batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "lora": "train",
    "lr": "learning_rate",
    "output": "output_dir",
}


@dataclass
class PatchArguments:
    """The model, its patch, and the parameters that are trained.

    Attributes:
        recipe: A YAML file of these options, which the command line overrides, or one that comes with the package:
            drope, embedded, lora_24gb, lora_80gb, swan. Without --model: embedded.
        model: Folder, GGUF file or hub name of a model; by default the embedded one.
        tokenizer: Folder or hub name of a tokenizer, if not the model's.
        dtype: Dtype of the trained weights; --bf16 computes in bfloat16.
        attn: transformers' attention implementation.
        patch: method:option=value,...[+method...], as for `hf-posenc perplexity`; by default the one it was saved with.
        train: full: all weights; lora: a LoRA, embeddings and norms; encoding: the patch's own parameters.
        lora_rank: Rank of --train lora.
        lora_alpha: Alpha of --train lora.
        lora_dropout: Dropout of --train lora.
        distill: Keep predictions near a teacher's: of drawn positions near those of the model's own at positions 0 to
            n - 1 (positions), or of blocks within the original length near those of the unpatched model (short).
        distill_weight: Weight of --distill beside the loss; default 1.
        loss_chunk: Tokens whose logits exist at a time; by default a quarter as many logits as the head has
            weights, or 2^23 if that is more. 0: the model's own loss.
    """

    recipe: str | None = _model()
    model: str | None = _model()
    tokenizer: str | None = _model(rank=1)
    dtype: str = _model("float32", rank=1, parse=parse_dtype, choices=DTYPES)
    attn: str | None = _model(rank=1)
    patch: str | None = _model()
    train: Trained = _training("full", kind=str, choices=get_args(Trained))
    lora_rank: int = _training(16, rank=1)
    lora_alpha: int = _training(32, rank=1)
    lora_dropout: float = _training(0.0, rank=1)
    distill: Literal["positions", "short"] | None = _training(
        kind=str, choices=("positions", "short"), rank=1
    )
    distill_weight: float | None = _training(rank=1)
    loss_chunk: int | None = _training(rank=1, least=0)


@dataclass
class DataArguments:
    """The documents for training and for scoring, and the positions of their tokens.

    Attributes:
        text: Files or folders of text, JSONL or Parquet to train on; default: standard library.
        dataset: Folder or hub name of a dataset, instead of --text.
        dataset_config: Configuration of --dataset.
        split: Split of --dataset.
        column: Column of the texts.
        encoding: Encoding of files of text, e.g. latin-1.
        streaming: Read --dataset while it is downloaded.
        tokenized: Column of token ids, instead of --column.
        documents: Usable documents to read; by default all.
        positions: contiguous: blocks of one document; packed: short documents side by side that do not attend to each
            other; pose, random, cream, endprompt, endprompt_random: short blocks whose positions reach
            the target length.
        terminal_prompt: The end of every block, of --positions endprompt and endprompt_random.
        curriculum: Rising factors on the original length, as in 1,2,4,8: positions that are drawn reach one after
            another, each in an equal share of the steps.
        target_length: Context in tokens, as 32768 or 32k; by default the patch's.
        block_length: Tokens in an example; by default the target length, and the original length where positions are
            drawn.
        score_text: Documents to score, as --text, or give --score-dataset; by default, of every tenth document to train
            on, from the second on, the first --score-documents that are long enough, or the last tenth of a single one.
        score_dataset: As --dataset, for the held-out documents.
        score_split: Split of --score-dataset.
        score_documents: Number of held-out documents.
        score_lengths: Lengths to score; by default original and target.
        tail_tokens: Tokens scored at the end of a tail window; by default as `hf-posenc perplexity`.
        score: Measure perplexities before and after the training.
    """

    text: Sequence[str] = _texts((), metavar="PATH")
    dataset: str | None = _texts(rank=1)
    dataset_config: str | None = _texts(rank=1)
    split: str = _texts("train", rank=1)
    column: str = _texts("text", rank=1)
    encoding: str = _texts("utf-8", rank=1)
    streaming: bool = _texts(False, rank=1)
    tokenized: str | None = _texts(rank=1)
    documents: int | None = _texts(rank=1)
    positions: str = _lengths("contiguous", choices=POSITIONS)
    terminal_prompt: str = _lengths(PROMPT, rank=1)
    curriculum: str | None = _lengths(rank=1)
    target_length: int | None = _length()
    block_length: int | None = _length()
    score_text: Sequence[str] = _texts((), metavar="PATH")
    score_dataset: str | None = _texts(rank=1)
    score_split: str = _texts("test", rank=1)
    score_documents: int = _texts(8, rank=1)
    score_lengths: Sequence[int] = _length((), rank=1)
    tail_tokens: int | None = _lengths(rank=1)
    score: bool = _texts(True, rank=1)

    def source(self, text: Sequence[str], dataset: str | None, split: str) -> DocumentOptions:
        """Return the options of the documents to train on, or of those to score."""
        same: dict[str, Any] = {
            "config": self.dataset_config,
            **{n: getattr(self, n) for n in ("column", "encoding", "streaming", "tokenized")},
        }
        return DocumentOptions(text=text, dataset=dataset, split=split, **same)


@dataclass
class RunArguments:
    """Options of transformers that `--help` shows, and what is beside them.

    Attributes:
        max_steps: Optimizer steps; -1: those of --num-train-epochs.
        learning_rate: Peak learning rate.
        bf16: Compute in bfloat16.
        output_dir: Folder of checkpoints, measurements and model.
        fresh: Begin again if the folder holds another run's checkpoints.
        dry_run: Print tokens, steps, memory and time; train and write nothing.
    """

    max_steps: int = _training(400, least=-1)
    learning_rate: float = _training(2e-5)
    bf16: bool = _training(False)
    output_dir: str | None = _output("finetuned", metavar="DIR")
    fresh: bool = _output(False, rank=1)
    dry_run: bool = _output(False)


# The defaults that recipes for longer contexts agree on, YaRN (arXiv 2309.00071), LongLoRA (2309.12307) and PI
# (2306.15595): AdamW with betas 0.9 and 0.95, no weight decay, 2e-5 after 20 steps of warmup, 400 to 1000 steps,
# gradients clipped at 1; and those of blocks, a log of every step, and two checkpoints.
DEFAULTS: Mapping[str, Any] = {
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 20,
    "adam_beta2": 0.95,
    "per_device_train_batch_size": 1,
    "dataloader_drop_last": True,
    "remove_unused_columns": False,
    "include_num_input_tokens_seen": True,
    "logging_nan_inf_filter": False,
    "logging_steps": 1,
    "save_steps": 50,
    "save_total_limit": 2,
    "disable_tqdm": False,
}
KINDS: tuple[Any, ...] = (PatchArguments, DataArguments, RunArguments)


@functools.cache
def listed() -> list[tuple[dataclasses.Field[Any], Any, str]]:
    """Return the fields of all options with their types and help, group by group."""
    found = [
        (each, get_type_hints(kind)[each.name], help_texts(kind).get(each.name, ""))
        for kind in KINDS
        for each in dataclasses.fields(kind)
    ]
    flags: list[Flag] = [each.metadata["flag"] for each, *_ in found]
    places = [(GROUPS.index(str(flag.panel)), flag.rank) for flag in flags]
    return [found[n] for n in sorted(range(len(found)), key=places.__getitem__)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser, in their groups."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for each, hint, text in listed():
        flag: Flag = each.metadata["flag"]
        kind = flag.kind or next(p for p in get_args(hint) or (hint,) if p is not type(None))
        given: dict[str, Any] = {"help": text.replace("%", "%%"), "default": each.default}
        if hint is bool:
            given |= {"type": _truth, "nargs": "?", "const": True}
        else:
            if get_origin(hint) is Sequence:
                given["nargs"] = "+"
            given["type"] = functools.partial(_parsed, flag.parse) if flag.parse else kind
            given["choices"] = flag.choices or None
        group = groups[str(flag.panel)]
        group.add_argument(*spellings(each.name), **given)
        if each.default is True:
            group.add_argument(*spellings(f"no_{each.name}"), action="store_false", dest=each.name)


def check_positions(name: str) -> None:
    """Raise for an unknown kind of positions."""
    if name not in POSITIONS:
        raise unknown("kind of positions", name, POSITIONS)


def spellings(name: str) -> list[str]:
    """Return an option with underscores, as transformers spells it, and with hyphens, as the other commands do."""
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def _truth(text: str) -> bool:
    words = ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0")  # as transformers
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in words[:5]


def _parsed(parse: Callable[[str, str], Any], text: str) -> Any:
    try:
        return parse(text, "the length")
    except PosencError as error:  # argparse would hide the text of a ValueError
        raise argparse.ArgumentTypeError(str(error)) from error


def pick(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return the options of one kind."""
    return kind(**{each.name: values[each.name] for each in dataclasses.fields(kind)})


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise an error of one line, without the hundred options in front of it."""
        raise PosencError(f"{message.rstrip('.')}. {HELP}")


def read(words: Sequence[str]) -> argparse.Namespace:
    """Return the values of our options; raise for wrong names, numbers and combinations.

    `--help` prints all options, and exits.
    """
    parser = Parser("hf-posenc finetune", allow_abbrev=False)
    add_options(parser)
    known = parser._option_string_actions
    for name, form in _training_arguments().items():
        if f"--{name}" not in known:
            no = spellings(f"no_{name}")
            parser.add_argument(*spellings(name), help=argparse.SUPPRESS, **form)
            parser.add_argument(*no, action="store_true", help=argparse.SUPPRESS)
    values = parse(parser, words)
    _check_numbers(vars(values))
    _check(values)
    data: DataArguments = pick(DataArguments, vars(values))
    texts = [*(data.text or ()), *(data.score_text or ())]
    every = data.source(texts, data.dataset or data.score_dataset, data.split)
    for name in ("split", "streaming"):  # whose defaults are others here
        if getattr(every, name) == getattr(DataArguments, name):
            every = dataclasses.replace(every, **{name: getattr(DocumentOptions, name)})
    refuse_ignored(every)
    for text in filter(None, (data.text, data.score_text)):
        check_readable(source_of(data.source(text, None, data.split)), text)
    return values


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse words that may name a recipe, whose words come first."""
    given, _ = parser.parse_known_args(words)
    if given.recipe or given.model is None:
        words = [*_recipe_words(given.recipe or "embedded", parser, given), *words]
    values, rest = parser.parse_known_args(words)
    for word in sorted(rest, key=lambda word: not word.startswith("--")):
        if not word.startswith("--"):
            raise PosencError(
                f"{word!r} belongs to no option. A model is given as --model NAME. {HELP}"
            )
        name = word.partition("=")[0]
        names = {action.dest: action.dest for action in parser._actions} | _ELSEWHERE
        switches = [action.dest for action in parser._actions if action.const is True]
        names |= {f"no_{switch}": f"{switch} false" for switch in switches}
        close = difflib.get_close_matches(name[2:].replace("-", "_"), names, n=1)
        meant = "".join(f" Did you mean {spellings(names[each])[-1]}?" for each in close)
        raise PosencError(f"No such option: {name}.{meant} {HELP}")
    return values


def _training_arguments() -> dict[str, dict[str, Any]]:
    """Return how a parser reads transformers' own options, from its source: importing them takes seconds."""
    tree: Any = ast.parse(_source("transformers training_args"))
    (own,) = (node for node in tree.body if getattr(node, "name", "") == "TrainingArguments")
    forms: dict[str, Any] = {"int": {"type": int}, "float": {"type": float}}
    forms["bool"], found = {"type": _truth, "nargs": "?", "const": True}, {}
    for node in (node for node in own.body if isinstance(node, ast.AnnAssign)):
        name, kind, field = (ast.unparse(part) for part in (node.target, node.annotation, node))
        count = "*" if "seen" in name or name == "fsdp" else "+" if "list" in kind else None
        word = {"type": functools.partial(_word, name, kind, field), "nargs": count}
        found[name] = forms.get(kind.partition(" ")[0], word)
    return found


def _word(name: str, kind: str, field: str, text: str) -> str:
    """Return what is given for an option of transformers; raise for what it would refuse after seconds."""
    # of a dictionary: JSON, or a file of it, or base64 of it
    if "dict" in kind and not (text.startswith(("{", "ey")) or Path(text).exists()):
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    owners = [f"class {name}" for name in re.findall(r"\b[A-Z]\w+(?= \||\])", kind)]
    owner, *words = _LISTS.get(name) or owners[:1] or [""]
    listed = rf"^{re.escape(owner)}.*?^(?=\S)" if owner else r"(?<='choices': )\[.*?\]"
    place = "".join(map(_source, _PLACES)) if owner else field
    if (block := re.search(listed, place, re.M | re.S)) is not None:
        words += {w.lower(): w for w in re.findall(r"""["'](\w+)["']""", block[0])}
        for each in text.split():
            if each.lower() not in words:
                raise argparse.ArgumentTypeError(str(unknown("value", each, words)))
    return text


def _source(place: str) -> str:
    package, *names = place.split()
    spec = importlib.util.find_spec(package)
    paths = [Path(str(spec and spec.origin)).parent / f"{name}.py" for name in names]
    return "".join(path.read_text(encoding="utf-8") for path in paths if path.exists())


def read_yaml(kind: str, path: Path) -> Any:
    """Return the values of a YAML file."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise PosencError(f"The {kind} {path} cannot be read: {reason}") from error


def recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _recipe_words(name: str, parser: argparse.ArgumentParser, given: Any) -> list[str]:
    """Return a recipe as words; for a `given` model, without the lengths of the embedded one."""
    path = Path(name)
    if not path.suffix and not path.exists():
        if name not in recipes():
            raise unknown("recipe", name, recipes())
        path = RECIPES / f"{name}.yaml"
    values, words = read_yaml("recipe", path), list[str]()
    if not isinstance(values, dict):
        raise PosencError(f"The recipe {path} is no list of `option: value` lines.")
    if given.model and path.parent == RECIPES and path.stem in _OF_EMBEDDED:
        if "layers=[" in values["patch"] and not given.patch:
            raise PosencError(
                f"The recipe {name} has layers of the embedded model, {values['patch']}: give --patch with yours."
            )
        values = {key: value for key, value in values.items() if "length" not in key}
    options = {a.dest: a.nargs for a in parser._actions if a.dest not in ("help", "recipe")}
    for key, value in values.items():
        if key not in options or value is None:
            what = "no option" if key not in options else "given no value"
            raise PosencError(f"The recipe {path} sets {key}, which is {what}. {HELP}")
        if value != []:  # transformers' own default, as is an option that is left out
            bare = value is True and options[key] in ("?", "*")  # --fsdp takes no word "True"
            given = [] if bare else value if isinstance(value, list) else [value]
            words += [f"--{key}", *(json.dumps(x) if type(x) is dict else str(x) for x in given)]
    try:
        parser.parse_known_args(words)
    except PosencError as error:
        raise PosencError(f"The recipe {path}: {error}") from error
    return words


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Raise for a number out of range."""
    for names, (least, limit) in _LIMITS.items():
        for name in names.split():
            value = values.get(name)
            if value is None or (name, value) == ("max_steps", -1) or least <= value < limit:
                continue
            below = "a finite number" if math.isinf(limit) else f"below {limit:g}"
            raise PosencError(
                f"{spellings(name)[-1]} {value:g}: at least {least:g} and {below} is needed."
            )


def _check(given: argparse.Namespace) -> None:
    """Refuse options that contradict each other, or that nothing would use."""
    kind, weight, unpatched = given.distill, given.distill_weight, (given.patch or "").strip()
    heavier, drawn = f"--distill-weight {weight or 0:g}", given.positions in DRAWN
    moving = f"--curriculum {given.curriculum}" if given.curriculum else "--distill positions"
    resumed = given.resume_from_checkpoint or "true"
    lora = [
        f"{spellings(name)[-1]} {getattr(given, name)}"
        for name in ("lora_rank", "lora_alpha", "lora_dropout")
        if given.train != "lora" and getattr(given, name) != getattr(PatchArguments, name)
    ]
    problems = (
        (lora, f"{' '.join(lora)} is for --train lora: leave it out"),
        (given.positions not in PROMPTED and given.terminal_prompt != PROMPT,
         f"--terminal-prompt is for --positions {' or '.join(PROMPTED)}"),
        (not kind and weight is not None, f"{heavier} is for --distill: leave it out"),
        (not 0 < (1 if weight is None else weight) < math.inf, f"{heavier}: a positive number is needed"),
        (kind and given.loss_chunk == 0, f"--distill {kind} is computed in chunks: leave --loss-chunk 0 out"),
        ((kind == "positions" or given.curriculum) and not drawn,
         f"{moving}: --positions {given.positions} draws none: use one of {', '.join(DRAWN)}"),
        (kind == "short" and unpatched.lower() == UNPATCHED,
         "--distill short: without a patch, the model would be its own teacher"),
        (given.output_dir == "", "--output-dir is empty: give a folder"),
        (resumed.lower() != "true" and not Path(resumed).is_dir(),
         f"--resume-from-checkpoint {resumed}: there is no such folder"),
        ("checkpoint" in str(given.hub_strategy),
         "--hub-strategy with checkpoints: only the result is pushed. Leave it out, and push one by hf upload"),
    )  # fmt: skip
    for wrong, problem in problems:
        if wrong:
            raise PosencError(f"{problem}.")
