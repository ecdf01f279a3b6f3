"""Options of the measurements, shared by `hf-posenc X` and the Python function X, with parsers and checks of values.

Every class is a dataclass. A field made by `option` carries its form on the command line (`Flag`); its line under
`Attributes:` is the help text. `hf_posenc.cli.app` expands such classes into the options of a command. Fields without
`option` exist in Python only. Nothing heavy is imported here, since `--help` reads this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hf_posenc.errors import PosencError, unknown
from hf_posenc.lengths import MOST_LENGTHS, even_depths, read_length

T = TypeVar("T")

MEASURED = "What is measured"
DOCUMENTS = "Documents"
MODEL = "The model"
MEMORY = "Memory and speed"
OUTPUT = "Output"
PANELS = (None, MEASURED, DOCUMENTS, MODEL, MEMORY, OUTPUT)
"""Panels of `--help`, in their order; the first has no title of its own."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A field's form on the command line; its help text is in the docstring of its class (`help_texts`).

    Attributes:
        name: Name of the parameter; `None`: the field's own.
        metavar: Placeholder of the value; `None`: by its type.
        least: Smallest number accepted; of whole numbers 1 unless given.
        choices: Values accepted.
        shown: Text shown as the default; `False` hides it.
        parse: Turns what is given, under a name for messages, into the field's value.
        kind: Type of the given value; `None`: the field's own, or text where there is a parser.
        value: Default on the command line; `...`: the field's own. A switch that is off has no `--no-` form.
        argument: A positional argument.
        rank: Options of a panel are listed by rank, then by field.
    """

    panel: str | None = MEASURED
    name: str | None = None
    metavar: str | None = None
    least: int | None = None
    choices: Sequence[str] = ()
    shown: bool | str = True
    parse: Callable[[Any, str], Any] | None = None
    kind: Any = None
    value: Any = ...
    argument: bool = False
    rank: int = 0


def option(default: Any = None, **flag: Any) -> Any:
    """Return a dataclass field that is also an option of the command line; see `Flag`."""
    return dataclasses.field(default=default, metadata={"flag": Flag(**flag)})


@functools.cache
def help_texts(kind: type) -> dict[str, str]:
    """Return what the docstring of a class, and those that it inherits from, have about each field."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        _, _, attributes = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts


plain_option = functools.partial(option, panel=None)
document_option = functools.partial(option, panel=DOCUMENTS)
model_option = functools.partial(option, panel=MODEL)
memory_option = functools.partial(option, panel=MEMORY)
output_option = functools.partial(option, panel=OUTPUT)


def with_fields(kind: type[T], options: T | None, fields: Mapping[str, Any]) -> T:
    """Return `options`, or the defaults of `kind`, with these fields replaced; raise for one that does not exist."""
    if options is not None and not isinstance(options, kind):
        raise PosencError(
            f"The options are a {kind.__name__}, not {type(options).__name__}: its fields can be given as keywords too."
        )
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in fields:
        if name not in names:
            raise unknown("setting", name, names)
    base: Any = kind() if options is None else options
    changed: T = dataclasses.replace(base, **fields)
    return changed


def refuse_others(options: Any, used: Collection[str]) -> None:
    """Raise if an option was given that the suite gpu does not use."""
    for field in dataclasses.fields(options):
        if field.name not in used and getattr(options, field.name) != field.default:
            flag = field.metadata.get("flag")
            given = ((flag and flag.name) or field.name).replace("_", "-")
            raise PosencError(
                f"--{given} has no meaning for --suite gpu, which takes --lengths, --patch, --rounds, --budget, "
                "--device, --dtype and a MODEL for its sizes: leave it out."
            )


def output_folder(output: Path | str | None, progress: Any) -> Path | None:
    """Return the folder of a Python caller's records, `None` for none; raise for what is no folder or no function."""
    if not callable(progress):
        raise PosencError(
            f"progress is a function of a label, the operations done and those in all, not {type(progress).__name__}."
        )
    if output is None:
        return None
    if not isinstance(output, str | Path) or not str(output).strip() or output == Path():
        raise PosencError(f"output: {output!r} is no folder. Give a path, or None to keep nothing.")
    if Path(output).is_file():
        raise PosencError(f"output: {output} is a file. Give a folder, or None to keep nothing.")
    return Path(output)


# Parsers of values: each takes what is given, and its name in messages, such as `--lengths 1k,2k`.


def parse_names(text: str, _: str = "") -> tuple[str, ...]:
    """Return the names in a text, separated by commas."""
    return tuple(part.strip() for part in text.split(","))


def parse_tasks(text: str, _: str = "") -> tuple[str, ...]:
    """Return the retrieval tasks in a text: names, `all`, or `none`."""
    from hf_posenc.evaluation.retrieval.tasks import TASKS

    names = () if text.strip() == "none" else parse_names(text)
    others = [task for task in TASKS if task not in names]
    return tuple(task for name in names for task in (others if name == "all" else [name]))


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def parse_dtype(text: str, _: str = "") -> str:
    """Return PyTorch's name of a number format; `bf16`, `fp16`, `half` and `fp32` are understood."""
    name = text.strip().lower().removeprefix("torch.")
    return "float16" if name == "half" else re.sub(r"^(b?)fp?(\d\d)$", r"\1float\2", name)


def parse_lengths(value: Any, name: str = "--lengths") -> tuple[int, ...]:
    """Return the lengths in `512,4k,1M` or `2k:128k:2k` (first, last, step), ascending, or those of a list.

    k is 1,024, M its square.
    """
    if not isinstance(value, str):
        given = value if isinstance(value, Iterable) else [value]
        if isinstance(value, bytes):  # an iterable of numbers
            raise PosencError(f"{name} is a list of whole numbers, not {value!r:.80}.")
        if not (lengths := tuple(read_length(length, name) for length in given)):
            raise PosencError(f"{name} is empty: give at least one, or None for the default.")
        return lengths
    found: set[int] = set()
    for part in value.split(","):
        pieces = part.split(":")
        if any(len(piece.split()) > 1 for piece in pieces):
            raise PosencError(f"{name}: separate lengths by commas, as in 512,1024,4k.")
        numbers = [read_length(piece, name) for piece in pieces]
        if len(numbers) not in (1, 3):
            raise PosencError(f"{name}: {part!r} is no range; give first:last:step.")
        first, last, step = numbers if len(numbers) == 3 else (*numbers, *numbers, 1)
        steps = range(first, last + 1, step)
        if not steps:
            raise PosencError(f"{name}: {part!r} ends before it begins.")
        if len(steps) > MOST_LENGTHS:
            raise PosencError(
                f"{name}: {part!r} is {len(steps):,} lengths, and at most {MOST_LENGTHS:,} are measured. Give "
                "a larger step."
            )
        found.update(steps)
    return tuple(sorted(found))


def parse_scales(value: Any, name: str = "--scales") -> tuple[float, ...]:
    """Return the scales in `2,4,8`, or those of a list: different numbers above 1."""
    scales: tuple[float, ...] = ()
    with contextlib.suppress(TypeError, ValueError):
        scales = tuple(map(float, value.split(",") if isinstance(value, str) else value))
    if not scales or not all(1 < scale < math.inf for scale in scales):
        raise PosencError(f"{name}: give numbers above 1, such as 2,4,8.")
    if len(set(scales)) < len(scales):
        raise PosencError(f"{name}: a scale is given twice.")
    return scales


def read_duration(value: Any, name: str) -> float:
    """Return a time in seconds: a number of them, or text such as `90s`, `30m` or `1h30m`."""
    seconds = 0.0
    if isinstance(value, str):
        number = r"([\d.]{1,9})"
        match = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s)?", value.strip())
        with contextlib.suppress(ValueError):  # 1.2.3
            parts = zip(match.groups("0") if match else (), (3600, 60, 1), strict=False)
            seconds = sum(float(part) * unit for part, unit in parts)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 < seconds < math.inf:
        raise PosencError(f"{name}: {value!r} is no time; give it as 90s, 30m or 1h30m.")
    return seconds


def duration(seconds: float) -> str:
    """Format a time in seconds with its largest two units."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 and whole < 600 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def read_whole(value: Any, name: str, least: int = 1) -> int:
    """Return a whole number of any library as Python's own; raise for what the command line would not take either."""
    number = least - 1
    with contextlib.suppress(TypeError):
        number = number if isinstance(value, bool) else operator.index(value)
    if number < least:
        raise PosencError(f"{name} is a whole number of at least {least}, not {value!r}.")
    return number


class Checked:
    """A frozen dataclass of options whose values are parsed and checked by the fields' types and flags.

    Numbers become Python's own. A Python caller may give as text what the command line takes, such as `"32k"`.
    """

    def __post_init__(self) -> None:
        """Check every field; the end of the chain of `super()` calls."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            kind, _, optional = str(field.type).partition(" | ")
            if value is not None or not optional:
                flag = field.metadata.get("flag") or Flag()
                object.__setattr__(self, field.name, _checked(field.name, value, kind, flag))


def _checked(name: str, value: Any, kind: str, flag: Flag) -> Any:
    """Return the value of a field, as it is stored."""
    if flag.parse is not None and (isinstance(value, str) or "str" not in kind):
        value = flag.parse(value, f"{name} {value}" if isinstance(value, str) else name)
    if kind == "int":
        return read_whole(value, name, 1 if flag.least is None else flag.least)
    if kind == "Sequence[int]":
        return tuple(read_whole(each, name) for each in value)
    if kind == "Sequence[str]":
        text = isinstance(value, str)
        if not text and isinstance(value, Iterable) and all(isinstance(n, str) for n in value):
            return value
        form = " as --patch takes them, such as 'none' and 'yarn:scale=8'" * (name == "methods")
        given = f"one text: write {name}=[{value!r:.80}]" if text else f"{value!r:.80}"
        raise PosencError(f"{name} is a list of texts{form}, not {given}.")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    valid, words = {
        "bool": (isinstance(value, bool), "True or False"),
        "str": (isinstance(value, str) and bool(value.strip()), "a text"),
        "float": (number, "a number"),
    }.get(kind, (True, ""))
    if valid and kind == "float" and flag.least is not None:
        valid, words = flag.least <= value < math.inf, f"a number of at least {flag.least:g}"
    if not valid:
        raise PosencError(f"{name} is {words}, not {value!r:.80}.")
    if flag.choices and value not in flag.choices:
        raise unknown(f"value of --{(flag.name or name).replace('_', '-')}", value, flag.choices)
    return value


# The second and the third are the controls: the end of the text alone, and a window behind the first tokens.
PERPLEXITY_METHODS = (
    *("none", "truncation", "attention_sinks", "pi", "ntk", "ntk_mixed", "ntk_by_parts"),
    *("llama3", "yarn", "yarn:scale=16", "dynamic_ntk:scale=2", "dynamic_yarn"),
    *("rerope", "self_extend"),
)
RETRIEVAL_METHODS = (
    *("none", "truncation", "attention_sinks", "pi", "ntk", "yarn", "dynamic_yarn", "rerope"),
)
SWEEP_METHODS = (
    *("pi", "ntk", "ntk_mixed", "ntk_by_parts", "yarn", "dynamic_ntk", "dynamic_yarn"),
    *("rerope", "self_extend"),
)
BOS_POLICIES = ("auto", "always", "never")

# Options that several commands share.


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Source of the documents.

    Attributes:
        text: Files of text (also .gz and .zst), JSON lines, parquet, folders or glob patterns; or books, code or prose:
            documents by name (docs/documents.md). May be given several times, or with several values.
        dataset: A dataset of the datasets library: hub name or folder.
        config: The dataset's configuration.
        split: The dataset's split.
        column: The column of text.
        streaming: Read the dataset row by row, without downloading it.
        tokenized: The column of token ids, read instead of a text: input_ids of emozilla/pg19-test-tokenized.
        encoding: Encoding of files of text, e.g. latin-1.
    """

    text: Sequence[str] | None = document_option(
        metavar="PATH", shown="the held-out modules of this Python's standard library"
    )
    dataset: str | None = document_option()
    config: str | None = document_option()
    split: str = document_option("test")
    column: str = document_option("text")
    streaming: bool = document_option(True)
    tokenized: str | None = document_option()
    encoding: str = document_option("utf-8")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Checked):
    """A checkpoint.

    Attributes:
        model: A folder, a GGUF file or a hub name. Default: the embedded model.
        revision: Branch, tag or commit of a model on the hub.
        trust_remote_code: Run the Python code that comes with a model or tokenizer, with all your rights: read it
            first.
        allow_missing_weights: Load a checkpoint that lacks weights; they are drawn at random, from a fixed seed.
    """

    model: str | None = model_option(metavar="[MODEL]", argument=True)
    revision: str | None = model_option(metavar="REV", rank=1)
    trust_remote_code: bool = model_option(False, rank=1)
    allow_missing_weights: bool = model_option(False, rank=1)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(CheckpointOptions):
    """The model, and options for loading it.

    Attributes:
        tokenizer: Default: the model's.
        dtype: auto (the checkpoint's own, float32 on a CPU), float32, bfloat16 or bf16, float16 or fp16, float64.
        device: cpu, cuda, cuda:1, ... Default: a GPU where there is one.
        device_map: auto spreads a large model over all GPUs.
        attn: sdpa, eager, flash_attention_2, ... Default: the model's.
    """

    tokenizer: str | None = model_option()
    dtype: str = model_option("auto", parse=parse_dtype, choices=DTYPES)
    device: str | None = model_option()
    device_map: str | None = model_option(metavar="MAP")
    attn: str | None = model_option()


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Folder and plots of the results, this process's share of the work, and a run that only estimates its cost.

    Attributes:
        output: Folder of the results.
        plot: Draw the plot. Default: where matplotlib is installed.
        shard: This process is the I-th of N that share the work, all with the same --output. Default: read from the
            environment of torchrun or accelerate.
        dry_run: Print the cost of the run, and stop.
    """

    output: Path = output_option(Path("out"))
    plot: bool | None = output_option()
    shard: str | None = output_option(metavar="I/N")
    dry_run: bool = memory_option(False, rank=1)


@dataclass(frozen=True, kw_only=True)
class CommonOptions(Checked):
    """Options of every measurement.

    Attributes:
        bos: auto (special tokens as the tokenizer puts them in front of a text), always, or never.
        prefill: Tokens that the model runs at a time, over a key-value cache: less memory, where a method allows it.
        chunk: Tokens whose logits are held at a time. Default: by the vocabulary.
    """

    bos: str | None = option(metavar="POLICY", choices=BOS_POLICIES, shown="auto", rank=1)
    prefill: int | None = memory_option(name="prefill_chunk")
    chunk: int | None = memory_option()


@dataclass(frozen=True, kw_only=True)
class MethodsOptions(CommonOptions):
    """Methods that are compared, and at which lengths.

    Attributes:
        methods: none, truncation, or method:option=value,... such as yarn:scale=8, or several joined by +, such as
            yarn:scale=4+log_n; may be given several times. Without a scale, a method that scales to a target gets
            length / original length, anew at every length.
        lengths: Context lengths in tokens, e.g. 512,1024,4k, or 2k:128k:2k (first, last, step). Default: the original
            length times 1, 2, 4, 8, 16 to 4,096 tokens, at least three; of the embedded model, `retrieval` takes three.
    """

    methods: Sequence[str] | None = option(name="patch", metavar="METHOD", rank=-1)
    lengths: Sequence[int] | None = option(metavar="L,L,...", parse=parse_lengths, rank=-1)


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(CommonOptions):
    """Options of a measurement that reads documents.

    Attributes:
        limit: Stop at so many usable documents.
        max_doc_tokens: Truncate every document to so many tokens first.
    """

    limit: int | None = document_option()
    max_doc_tokens: int | None = document_option()


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions(ReadingOptions):
    """Options of perplexity by named protocols; those without a help text are fields of `protocols.Settings`.

    Names come from `PRESETS`, `PROTOCOLS` and `AGGREGATES` of `hf_posenc.evaluation.perplexity.protocols`.

    Attributes:
        preset: A peer's own arithmetic: yarn, pi, pose, longlora, su, lm-eval or hf-docs. Other options override it.
        protocols: One or several of prefix, tail, sliding, disjoint, stream.
        tail_tokens: Tokens that `tail` scores. Default: 1024, at most half of the shortest length.
        stride: Tokens from one window of `sliding` or `stream` to the next; the text is read L / S times.
        aggregate: Units of equal weight: tokens, windows, batches or documents; or hf-docs.
    """

    preset: str | None = option()
    protocols: Sequence[str] | None = option(
        name="protocol",
        metavar="NAMES",
        parse=parse_names,
        shown="prefix,tail, or as the preset says",
    )
    tail_tokens: int | None = option(metavar="K")
    stride: int | None = option(
        metavar="S",
        shown="256, of sliding at most half of the shortest length; or as the preset says",
    )
    aggregate: str | None = option(shown="tokens, or as the preset says")
    windows_per_document: int | None = None
    buckets: int | None = None
    bos_windows: str | None = None
    min_tokens: int | None = None
    batch: int | None = None
    read_last: bool | None = None
    joined: bool | None = None
    base: float | None = None


# Options of the measurements.


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(ProtocolOptions, MethodsOptions):
    """Options of `hf-posenc perplexity` and `measure_perplexity`; the first of the methods is the baseline.

    Attributes:
        short: Also measure the original length, where every given length is longer: the price that short texts pay.
        windows_per_document: Windows in each document, evenly spaced: of `tail` (default 1), or of the full ones of
            `sliding` (default all).
        longppl: Also score the key tokens alone (LongPPL), those that this model predicts by far context: a name, or
            self for the measured one; NAME@METHOD patches it, such as self@rerope: needed past its trained length.
        longppl_short: Tokens of the evaluator's short context. Default: 4096; for shorter texts the trained length, or
            a quarter of the longest length if the trained one is not below it.
        buckets: Parts of the longest prefix for the curve by position. Default: 64.
        bos_windows: Windows of `sliding` with special tokens in front: every or first. Default: every.
        min_tokens: Leave shorter documents out. Default: the longest length, so that every length reads the same ones.
        batch: Windows of one document at once. Halved where memory runs out.
    """

    short: bool = option(False, value=True, rank=-1)
    windows_per_document: int | None = option()
    longppl: str | None = option(metavar="EVALUATOR")
    longppl_short: int | None = option(metavar="K")
    buckets: int | None = option()
    bos_windows: str | None = option(metavar="WHICH")
    min_tokens: int | None = document_option()
    batch: int | None = memory_option(name="batch_size", kind=int, value=1)


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(MethodsOptions):
    """Options of `hf-posenc retrieval` and `measure_retrieval`.

    Attributes:
        tasks: Some of passkey, niah_single_1, niah_multikey_2, niah_multikey_3, kv, mrcr, vt, fwe, and babilong_qa1 to
            babilong_qa3; or all.
        depths: Depths of the needle, evenly from the front to the back of the prompt.
        samples: Samples at every length and depth.
        distractors: Wrong answers that the right one is ranked among; 0 for no rank.
        decode: teacher-forced (one forward per sample; the same as greedy exact match) or generate.
        seed: Seed of everything that is drawn.
    """

    tasks: Sequence[str] | None = option(
        metavar="NAMES",
        parse=parse_tasks,
        shown="passkey, niah_single_1 and niah_multikey_2, the first two for the embedded model",
    )
    depths: Sequence[float] = option(even_depths(5), parse=even_depths, kind=int, value=5)
    samples: int = option(4)
    distractors: int = option(10, least=0)
    decode: str = option("teacher-forced", metavar="HOW")
    seed: int = option(0, least=0, rank=1)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ProtocolOptions, MethodsOptions):
    """Options of `hf-posenc bench` and `bench`; `None` stands for the suite's own.

    Attributes:
        suite: Amount that is measured where no other option decides: smoke (seconds), quick (10 documents, 3 lengths),
            evidence (24 documents, 3 lengths: for the project's page of evidence) or full (20 documents, every doubling
            up to the target, all retrieval tasks). gpu: a device, without documents.
        lengths: Context lengths in tokens, e.g. 512,1024,4k, or 2k:128k:2k (first, last, step).
        target_length: The longest of the suite's lengths, in tokens, e.g. 32k.
        tasks: Tasks of hf-posenc retrieval; all, or none.
        seed: Seed of everything that is drawn.
        rounds: Times that the prefill of every method is timed; 0: never.
        limit: Stop at so many usable documents.
        budget: With --suite gpu: begin no measurement after this time, e.g. 8m; the most telling come first.
    """

    suite: str = option("quick", rank=-2)
    lengths: Sequence[int] | None = option(
        metavar="L,L,...",
        parse=parse_lengths,
        shown="the suite's, as multiples of the trained length",
        rank=-1,
    )
    target_length: int | None = option(
        metavar="N", parse=read_length, shown="2, 4 or 16 times the trained length", rank=-1
    )
    tasks: Sequence[str] | None = option(metavar="NAMES", parse=parse_tasks, shown="the suite's")
    seed: int = option(0, least=0, rank=1)
    rounds: int | None = option(least=0, shown="the suite's")
    limit: int | None = document_option(shown="the suite's")
    budget: float | None = option(metavar="TIME", parse=read_duration)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None and self.suite != "gpu":
            raise PosencError("--budget has a meaning for --suite gpu alone: leave it out.")
        if self.lengths is not None and self.target_length is not None:
            raise PosencError("Lengths and a target length exclude each other: give one of them.")


@dataclass(frozen=True, kw_only=True)
class TailOptions(ReadingOptions):
    """Options that `hf-posenc sweep`, `search` and `extend` share: the objective.

    Attributes:
        target_length: The length to do well at, in tokens, e.g. 16k. Default: four times the original length.
        max_regression: Accepted growth of the perplexity of short texts, e.g. 0.02 for 2 %. Default: any.
        tail_tokens: Tokens scored at the end of a window. Default: 1024, at most half of the original length.
        windows_per_document: Tails scored in each document, evenly spaced.
    """

    target_length: int | None = option(metavar="N", parse=read_length)
    max_regression: float | None = option(metavar="FRACTION", least=0)
    tail_tokens: int = option(0, metavar="K", least=0, shown=False)
    windows_per_document: int = option(1)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TailOptions):
    """Options of `hf-posenc sweep`.

    Attributes:
        methods: method, method:option=value,... or several joined by +; may be given several times. One that takes a
            scale and is given none is tried at every one of --scales. none, truncation and attention_sinks are always
            measured.
        scales: Scales to try, e.g. 2,4,8. Default: target length / original length, and twice that.
        first_documents: Documents of the first round; every round after it has twice as many, the last one all.
    """

    methods: Sequence[str] | None = option(
        name="patch", metavar="METHOD", shown=" ".join(SWEEP_METHODS), rank=-1
    )
    scales: Sequence[float] | None = option(metavar="S,S,...", parse=parse_scales)
    first_documents: int = option(5, least=2)


@dataclass(frozen=True)
class SearchSettings(Checked):
    """Options of `hf-posenc search` beside those of the tail.

    Attributes:
        budget: Lists of factors to measure; each costs one forward per tail of every search document.
        search_documents: Documents that the search reads; it is judged on the others. Default: half of them, at most 8.
        short_texts: Texts of up to the original length are read with the same factors (safe with a cache), or native:
            unchanged (as LongRoPE switches).
        seed: Seed of everything that is drawn.
    """

    budget: int = option(400, least=8)
    search_documents: int = option(0, least=0, shown=False)
    short_texts: str = option("same", metavar="HOW", choices=("same", "native"))
    seed: int = option(0, least=0, rank=1)


@dataclass(frozen=True, kw_only=True)
class ExtendOptions(TailOptions):
    """Options of `hf-posenc extend` and `extend`.

    Attributes:
        budget: Time for the measurements, e.g. 90s, 30m or 2h. Documents, methods and prompts are fitted to it.
        max_regression: Accepted growth of perplexity, 0.02 for 2 %: on short texts, and on long ones against
            truncation.
    """

    budget: float = option(1800.0, metavar="TIME", parse=read_duration, value=None, shown="30m")
    max_regression: float = option(0.02, metavar="FRACTION", least=0)


@dataclass(frozen=True, kw_only=True)
class SelftestOptions(Checked):
    """Options of the self-test.

    Attributes:
        device: The device, e.g. cuda, cuda:1 or cpu. Default: the GPU if there is one.
        length: Tokens of the text that is timed. Default: 1024 on a CPU; 8192 on a GPU, then 32768 while there is time.
        seconds: Begin no further check after so many seconds; the report names those that are left. Timing comes after,
            and begins nothing at a second length after so many more.
        dtypes: Names of dtypes to check, of which the first is timed; `None`: bfloat16, float16 and float32, on a CPU
            float32 first.
        head_dims: Head dimensions to check, of which the first is timed.
        methods: Names of the methods to time; `None`: all that the engine computes.
    """

    device: str | None = plain_option()
    length: int | None = plain_option(least=32)
    seconds: int = plain_option(30)
    dtypes: Sequence[str] | None = None
    head_dims: Sequence[int] = (128, 64, 256)
    methods: Sequence[str] | None = None
