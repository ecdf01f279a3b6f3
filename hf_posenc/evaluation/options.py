"""Options of the measurements, shared by `hf-posenc X` and the Python function X.

Every class is a dataclass. A field made by `option` carries its name, help text and parser on the command line;
`hf_posenc.cli.command` expands such classes into the options of a command. Fields without it exist in Python only.
Nothing heavy is imported here, since `--help` reads this module.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hf_posenc.errors import PosencError, unknown

T = TypeVar("T")

MEASURED = "What is measured"
DOCUMENTS = "Documents"
MODEL = "The model"
MEMORY = "Memory and speed"
OUTPUT = "Output"
PANELS = (MEASURED, DOCUMENTS, MODEL, MEMORY, OUTPUT)
"""Panels of `--help`, in their order."""

# The second is the control: plain attention to as many tokens as the model was trained at.
PERPLEXITY_METHODS = (
    *("none", "sliding_window", "pi", "ntk", "ntk_mixed", "ntk_by_parts", "llama3"),
    *("yarn", "yarn:scale=16", "dynamic_ntk:scale=2", "dynamic_yarn", "rerope", "self_extend"),
)
RETRIEVAL_METHODS = ("none", "sliding_window", "pi", "ntk", "yarn", "dynamic_yarn", "rerope")
SWEEP_METHODS = (
    *("pi", "ntk", "ntk_mixed", "ntk_by_parts", "yarn", "dynamic_ntk", "dynamic_yarn"),
    *("rerope", "self_extend"),
)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A field's form on the command line.

    Attributes:
        help: Help text.
        panel: Panel of `--help`, from `PANELS`.
        name: Name of the parameter; `None`: the field's own.
        metavar: Placeholder of the value; `None` for a switch.
        least: Smallest number accepted.
        shown: Text shown as the default; `False` hides it.
        parse: Turns the given value into the field's.
        kind: Type of the given value; `None`: the field's own, or text where there is a parser.
        default: Default on the command line; `...`: the field's own.
        argument: A positional argument.
        negatable: A switch has a `--no-` form.
        rank: Options of a panel are listed by rank, then by field.
    """

    help: str
    panel: str = MEASURED
    name: str | None = None
    metavar: str | None = None
    least: int | None = None
    shown: bool | str = True
    parse: Callable[[Any], Any] | None = None
    kind: Any = None
    default: Any = ...
    argument: bool = False
    negatable: bool = True
    rank: int = 0


def option(value: Any, help: str, **flag: Any) -> Any:
    """Return a dataclass field with this default that is also an option of the command line; see `Flag`."""
    return dataclasses.field(default=value, metadata={"flag": Flag(help=help, **flag)})


def with_fields(kind: type[T], options: T | None, fields: Mapping[str, Any]) -> T:
    """Return options with these fields replaced, as the Python functions take them.

    Args:
        kind: The class of the options.
        options: Options to start from; `None`: the defaults.
        fields: Fields by name.

    Raises:
        PosencError: A field does not exist; the closest name is suggested.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in fields:
        if name not in names:
            raise unknown("setting", name, names)
    base: Any = kind() if options is None else options
    changed: T = dataclasses.replace(base, **fields)
    return changed


# Parsers of values.


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in a text, separated by commas."""
    return tuple(part.strip() for part in text.split(","))


def parse_tasks(text: str) -> tuple[str, ...]:
    """Return the retrieval tasks in a text: names, or `all`."""
    from hf_posenc.evaluation.retrieval.tasks import TASKS

    names = parse_names(text)
    return tuple(TASKS) if names == ("all",) else names


def parse_tasks_or_none(text: str) -> tuple[str, ...]:
    """Return the retrieval tasks in a text: names, `all`, or `none`."""
    return () if text.strip() == "none" else parse_tasks(text)


def parse_target(text: str) -> int:
    """Return the length given to `--target-length`."""
    return parse_length(text, "--target-length")


def parse_length(text: str, option: str) -> int:
    """Return one length in tokens, such as `512` or `4k`.

    Args:
        text: The text.
        option: The option that it was given to, for the error.

    Raises:
        PosencError: The text is not one positive number.
    """
    lengths = parse_lengths(text, option)
    if len(lengths) != 1:
        raise PosencError(f"{option} {text}: one length is wanted, such as 32k.")
    return lengths[0]


def parse_lengths(text: str, option: str = "--lengths") -> tuple[int, ...]:
    """Return the lengths in `512,1024,4k` or `2k:128k:2k` (first, last, step), ascending; k is 1,024.

    Args:
        text: The text.
        option: The option that it was given to, for the error.

    Raises:
        PosencError: The text contains something else than positive numbers.
    """
    lengths: set[int] = set()
    for part in text.lower().replace(" ", "").split(","):
        numbers = [_tokens(piece, f"{option} {text}") for piece in part.split(":")]
        if len(numbers) == 1:
            lengths.add(numbers[0])
        elif len(numbers) == 3 and numbers[2] > 0:
            if numbers[1] < numbers[0]:
                raise PosencError(f"{option} {text}: {part!r} ends before it begins.")
            lengths.update(range(numbers[0], numbers[1] + 1, numbers[2]))
        else:
            raise PosencError(f"{option} {text}: {part!r} is no range; give first:last:step.")
    return tuple(sorted(lengths))


def _tokens(text: str, given: str) -> int:
    digits, factor = (text[:-1], 1024) if text.endswith("k") else (text, 1)
    if not digits.isdecimal():
        raise PosencError(f"{given}: {text!r} is no length; give tokens as in 512,1024,4k.")
    return int(digits) * factor


def even_depths(count: int) -> tuple[float, ...]:
    """Return so many depths from 0 to 1 at equal distances; a single one lies in the middle."""
    return tuple(index / (count - 1) for index in range(count)) if count > 1 else (0.5,)


def parse_scales(text: str) -> tuple[float, ...]:
    """Return the scales in `2,4,8`.

    Raises:
        PosencError: The text contains something else than different numbers above 1.
    """
    try:
        scales = tuple(float(part) for part in text.split(","))
    except ValueError:
        scales = ()
    if not scales or not all(1 < scale < math.inf for scale in scales):
        raise PosencError(f"--scales {text}: give numbers above 1, such as 2,4,8.")
    if len(set(scales)) < len(scales):
        raise PosencError(f"--scales {text}: a scale is given twice.")
    return scales


# Options that several commands share.


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Source of the documents."""

    text: Sequence[str] | None = option(
        None,
        "Files of text (UTF-8, also .gz and .zst), JSON lines, parquet, folders or glob patterns; may be given "
        "several times, or with several values.",
        panel=DOCUMENTS,
        metavar="PATH",
        shown="the held-out modules of this Python's standard library",
    )
    dataset: str | None = option(
        None,
        "A dataset of the datasets library: hub name or folder.",
        panel=DOCUMENTS,
        metavar="NAME",
    )
    config: str | None = option(
        None, "The dataset's configuration.", panel=DOCUMENTS, metavar="NAME"
    )
    split: str = option("test", "The dataset's split.", panel=DOCUMENTS, metavar="NAME")
    column: str = option("text", "The column of text.", panel=DOCUMENTS, metavar="NAME")
    streaming: bool = option(
        True, "Read the dataset row by row, without downloading it.", panel=DOCUMENTS
    )
    tokenized: str | None = option(
        None,
        "The column of token ids, read instead of a text: input_ids of emozilla/pg19-test-tokenized.",
        panel=DOCUMENTS,
        metavar="NAME",
    )
    token_dtype: str = option(
        "uint16",
        "Number format of a .bin file of token ids: uint16, uint32, int32, int64.",
        panel=DOCUMENTS,
        metavar="NAME",
    )
    token_cache: Path | None = option(
        None,
        "Keep the documents' tokens in this folder; several processes and later runs then tokenize only once.",
        panel=DOCUMENTS,
        metavar="DIR",
    )

    @property
    def is_given(self) -> bool:
        """True if documents were given; otherwise the held-out modules are read."""
        return bool(self.text) or self.dataset is not None


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, and options for loading it."""

    model: str | None = option(
        None,
        "A folder or a hub name. Default: the embedded model.",
        metavar="[MODEL]",
        argument=True,
    )
    tokenizer: str | None = option(None, "Default: the model's.", panel=MODEL, metavar="NAME")
    dtype: str = option(
        "auto",
        "auto (the checkpoint's own, float32 on a CPU), float32, bfloat16, float16, float64.",
        panel=MODEL,
        metavar="NAME",
    )
    device: str | None = option(
        None,
        "cpu, cuda, cuda:1, ... Default: a GPU where there is one.",
        panel=MODEL,
        metavar="NAME",
    )
    device_map: str | None = option(
        None, "auto spreads a large model over all GPUs.", panel=MODEL, metavar="MAP"
    )
    attn: str | None = option(
        None,
        "sdpa, eager, flash_attention_2, ... Default: the model's.",
        panel=MODEL,
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Folder and plots of the results, and this process's share of the work."""

    output: Path = option(Path("out"), "Folder of the results.", panel=OUTPUT, metavar="DIR")
    plot: bool | None = option(
        None, "Draw the plot. Default: where matplotlib is installed.", panel=OUTPUT
    )
    shard: str | None = option(
        None,
        "This process is the I-th of N that share the work, all with the same --output. Default: read from the "
        "environment of torchrun, accelerate or a Slurm array.",
        panel=OUTPUT,
        metavar="I/N",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(OutputOptions):
    """Output, and a run that only estimates its cost."""

    dry_run: bool = option(
        False, "Print the cost of the run, and stop.", panel=MEMORY, negatable=False, rank=1
    )


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every measurement.

    Attributes:
        bos: Policy for special tokens: `"auto"`, `"always"` or `"never"`.
        seed: Seed of everything that is drawn.
    """

    bos: str | None = option(
        None,
        "auto (special tokens as the tokenizer puts them in front of a text), always, or never.",
        metavar="POLICY",
        shown="auto; as the preset says where there is one",
        rank=1,
    )
    seed: int = option(0, "Seed of everything that is drawn.", metavar="N", least=0, rank=1)


_METHODS: dict[str, Any] = {
    "name": "patch",
    "metavar": "METHOD",
    "rank": -1,
    "help": "none, or method:option=value,... such as yarn:scale=8, or several joined by +, such as "
    "yarn:scale=4+log_n; may be given several times. Without a scale, a method that scales to a target gets "
    "length / original length, anew at every length.",
}
_LENGTHS: dict[str, Any] = {
    "rank": -1,
    "metavar": "L,L,...",
    "parse": parse_lengths,
    "help": "Context lengths in tokens, e.g. 512,1024,4k, or 2k:128k:2k (first, last, step). Default: the original "
    "length times 1, 2, 4, 8, 16 up to 4,096 tokens, and three of them at least.",
}


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(CommonOptions):
    """Options of a measurement that reads documents.

    Attributes:
        limit: Number of usable documents after which reading stops.
        max_doc_tokens: Documents are truncated to so many tokens first.
        prefill: Tokens that the model runs at a time, over a key-value cache; `None`: all at once.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.
    """

    limit: int | None = option(
        None, "Stop at so many usable documents.", panel=DOCUMENTS, metavar="N", least=1
    )
    max_doc_tokens: int | None = option(
        None,
        "Truncate every document to so many tokens first.",
        panel=DOCUMENTS,
        metavar="N",
        least=1,
    )
    prefill: int | None = option(
        None,
        "Tokens that the model runs at a time, over a key-value cache: less memory, where a method allows it.",
        panel=MEMORY,
        name="prefill_chunk",
        metavar="N",
        least=1,
    )
    chunk: int | None = option(
        None,
        "Tokens whose logits are held at a time. Default: by the vocabulary.",
        panel=MEMORY,
        metavar="N",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions(ReadingOptions):
    """Options of perplexity by named protocols.

    Attributes:
        preset: A peer's own arithmetic, from `protocols.PRESETS`; other options override it.
        protocols: Names from `protocols.PROTOCOLS`.
        tail_tokens: Tokens that `tail` scores.
        stride: Tokens from one window of `sliding` and `stream` to the next.
        aggregate: How losses become one number, from `protocols.AGGREGATES`.
        compare: Names of published tables to show beside the result.
        windows_per_document: As in `protocols.Settings`, as are the others below.
    """

    preset: str | None = option(
        None,
        "A peer's own arithmetic: yarn, pi, pose, longlora, su, lm-eval or hf-docs. Other options override it.",
        metavar="NAME",
    )
    protocols: Sequence[str] | None = option(
        None,
        "One or several of prefix, tail, sliding, disjoint, stream.",
        name="protocol",
        metavar="NAMES",
        parse=parse_names,
        shown="prefix,tail, or as the preset says",
    )
    tail_tokens: int | None = option(
        None,
        "Tokens that `tail` scores. Default: 1024, at most half of the shortest length.",
        metavar="K",
        least=1,
    )
    stride: int | None = option(
        None,
        "Tokens from one window of `sliding` or `stream` to the next; the text is read L / S times.",
        metavar="S",
        least=1,
        shown="256, or as the preset says",
    )
    aggregate: str | None = option(
        None,
        "Units of equal weight: tokens, windows, batches or documents; or hf-docs.",
        metavar="NAME",
        shown="tokens, or as the preset says",
    )
    compare: Sequence[str] = option(
        (),
        "A published table to print beside; refused where its protocol is another one.",
        metavar="ID",
        rank=1,
    )
    windows_per_document: int | None = None
    buckets: int | None = None
    bos_windows: str | None = None
    min_tokens: int | None = None
    batch: int | None = None
    read_last: bool | None = None
    joined: bool | None = None
    base: float | None = None
    resamples: int | None = None


# Options of the measurements.


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(ProtocolOptions):
    """Options of `hf-posenc perplexity` and `measure_perplexity`.

    Attributes:
        methods: As `--patch` takes them: `"none"`, `"yarn"`, `"yarn:scale=8"`, `"pi:scale=4+log_n"`, ...; the first is
            the baseline. Default: the unpatched model alone.
        lengths: Context lengths in tokens. Default: the original length times 1, 2, 4, ...
        short: Measure the original length too, where every length is longer.
        windows_per_document: Windows in each document, of `tail` or `sliding`.
        longppl: The evaluator of LongPPL: `"self"` or a model's name, either with `@METHOD` behind it.
        longppl_short: Tokens of the evaluator's short context.
        buckets: Parts of the longest prefix for the curve by position.
        bos_windows: Windows of `sliding` with special tokens in front: `"every"` or `"first"`.
        min_tokens: Documents with fewer tokens are left out.
        batch: Windows of one document at once.
    """

    methods: Sequence[str] | None = option(None, **_METHODS)
    lengths: Sequence[int] | None = option(None, **_LENGTHS)
    short: bool = option(
        False,
        "Also measure the original length, where every given length is longer: the price that short texts pay.",
        default=True,
        rank=-1,
    )
    windows_per_document: int | None = option(
        None,
        "Windows in each document, evenly spaced: of `tail` (default 1), or of the full ones of `sliding` "
        "(default all).",
        metavar="N",
        least=1,
    )
    longppl: str | None = option(
        None,
        "Also score the key tokens alone (LongPPL), those that this model predicts by far context: a name, or "
        "self for the measured one; NAME@METHOD patches it, such as self@rerope.",
        metavar="EVALUATOR",
    )
    longppl_short: int | None = option(
        None,
        "Tokens of the evaluator's short context. Default: 4096; for shorter texts the trained length.",
        metavar="K",
        least=1,
    )
    buckets: int | None = option(
        None,
        "Parts of the longest prefix for the curve by position. Default: 64.",
        metavar="N",
        least=1,
    )
    bos_windows: str | None = option(
        None,
        "Windows of `sliding` with special tokens in front: every or first. Default: every.",
        metavar="WHICH",
    )
    min_tokens: int | None = option(
        None,
        "Leave shorter documents out. Default: the longest length, so that every length reads the same ones.",
        panel=DOCUMENTS,
        metavar="N",
        least=1,
    )
    batch: int | None = option(
        None,
        "Windows of one document at once. Halved where memory runs out.",
        panel=MEMORY,
        name="batch_size",
        metavar="N",
        least=1,
        kind=int,
        default=1,
    )


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(CommonOptions):
    """Options of `hf-posenc retrieval` and `measure_retrieval`.

    Attributes:
        methods: As in `PerplexityOptions`.
        lengths: Tokens of prompt and answer. Default: the original length times 1, 2, 4, ...
        tasks: Names from `retrieval.TASKS`. Default: passkey, niah_single_1 and niah_multikey_2.
        depths: Depths of the needle from 0 (front) to 1 (back), ascending.
        samples: Samples at every length and depth.
        distractors: Wrong answers that the right one is ranked among; 0 for no rank.
        decode: `"teacher-forced"` or `"generate"`.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.
    """

    methods: Sequence[str] | None = option(None, **_METHODS)
    lengths: Sequence[int] | None = option(None, **_LENGTHS)
    tasks: Sequence[str] | None = option(
        None,
        "Some of passkey, niah_single_1, niah_multikey_2, niah_multikey_3, vt, fwe; or all.",
        shown="passkey, niah_single_1 and niah_multikey_2, the first two for the embedded model",
        metavar="NAMES",
        parse=parse_tasks,
    )
    depths: Sequence[float] = option(
        even_depths(5),
        "Depths of the needle, evenly from the front to the back of the prompt.",
        metavar="N",
        least=1,
        parse=even_depths,
        kind=int,
        default=5,
    )
    samples: int = option(4, "Samples at every length and depth.", metavar="N", least=1)
    distractors: int = option(
        10,
        "Wrong answers that the right one is ranked among; 0 for no rank.",
        metavar="N",
        least=0,
    )
    decode: str = option(
        "teacher-forced",
        "teacher-forced (one forward per sample; the same as greedy exact match) or generate.",
        metavar="HOW",
    )
    chunk: int | None = None


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ProtocolOptions):
    """Options of `hf-posenc bench` and `bench`; `None` stands for the suite's own.

    Attributes:
        suite: `"smoke"`, `"quick"` or `"full"`: how much is measured where no other option decides.
        methods: As in `PerplexityOptions`.
        lengths: Context lengths in tokens.
        target_length: The longest of the suite's lengths, in tokens.
        tasks: Retrieval tasks; empty: no retrieval.
        rounds: Times that the prefill of every method is timed; 0: never.
    """

    suite: str = option(
        "quick",
        "Amount that is measured where no other option decides: smoke (seconds), quick (10 documents, 3 lengths) or "
        "full (20 documents, every doubling up to the target, all retrieval tasks).",
        metavar="NAME",
        rank=-2,
    )
    methods: Sequence[str] | None = option(None, **_METHODS)
    lengths: Sequence[int] | None = option(
        None,
        "Context lengths in tokens, e.g. 512,1024,4k, or 2k:128k:2k (first, last, step).",
        metavar="L,L,...",
        parse=parse_lengths,
        rank=-1,
        shown="the suite's, as multiples of the trained length",
    )
    target_length: int | None = option(
        None,
        "The longest of the suite's lengths, in tokens, e.g. 32k.",
        metavar="N",
        parse=parse_target,
        shown="2, 4 or 16 times the trained length",
        rank=-1,
    )
    tasks: Sequence[str] | None = option(
        None,
        "Some of passkey, niah_single_1, niah_multikey_2, niah_multikey_3, vt, fwe; or all, or none.",
        shown="the suite's",
        metavar="NAMES",
        parse=parse_tasks_or_none,
    )
    rounds: int | None = option(
        None,
        "Times that the prefill of every method is timed; 0: never.",
        metavar="N",
        least=0,
        shown="the suite's",
    )
    limit: int | None = option(
        None,
        "Stop at so many usable documents.",
        panel=DOCUMENTS,
        metavar="N",
        least=1,
        shown="the suite's",
    )


@dataclass(frozen=True, kw_only=True)
class TailOptions(ReadingOptions):
    """Options that `hf-posenc sweep` and `hf-posenc search` share: the objective.

    Attributes:
        target_length: The length to do well at, in tokens. Default: four times the original length.
        max_regression: Accepted growth of the perplexity of short texts, as a fraction; `None`: any.
        tail_tokens: Tokens scored at the end of a window; 0: 1,024, at most half of the original length.
        windows_per_document: Tails scored in each document, evenly spaced.
    """

    target_length: int | None = option(
        None,
        "The length to do well at, in tokens, e.g. 16k. Default: four times the original length.",
        metavar="N",
        parse=parse_target,
    )
    max_regression: float | None = option(
        None,
        "Accepted growth of the perplexity of short texts, e.g. 0.02 for 2 %. Default: any.",
        metavar="FRACTION",
    )
    tail_tokens: int = option(
        0,
        "Tokens scored at the end of a window. Default: 1024, at most half of the original length.",
        metavar="K",
        least=0,
        shown=False,
    )
    windows_per_document: int = option(
        1, "Tails scored in each document, evenly spaced.", metavar="N", least=1
    )


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TailOptions):
    """Options of `hf-posenc sweep`.

    Attributes:
        methods: As `--patch` takes them. Default: `SWEEP_METHODS`.
        scales: Scales to try. Default: target length / original length, and twice that.
        first_documents: Documents of the first round.
    """

    methods: Sequence[str] | None = option(
        None,
        "method, method:option=value,... or several joined by +; may be given several times. One that takes a "
        "scale and is given none is tried at every one of --scales. none and sliding_window are always measured.",
        name="patch",
        metavar="METHOD",
        shown=" ".join(SWEEP_METHODS),
        rank=-1,
    )
    scales: Sequence[float] | None = option(
        None,
        "Scales to try, e.g. 2,4,8. Default: target length / original length, and twice that.",
        metavar="S,S,...",
        parse=parse_scales,
    )
    first_documents: int = option(
        5,
        "Documents of the first round; every round after it has twice as many, the last one all.",
        metavar="N",
        least=2,
    )


@dataclass(frozen=True)
class SearchSettings:
    """Options of `hf-posenc search` beside the objective.

    Attributes:
        budget: Lists of factors to score; each costs a forward per tail of every search document.
        search_documents: Documents that the search reads; the others are held out. 0: half of them, at most 8.
        short_texts: Factors for texts of up to the original length: `"same"`, or `"native"`, none.
        attention_factor: The factor on cos and sin; `None`: it is searched too.
        replace: On a checkpoint that is scaled already: drop its scaling.

    Raises:
        PosencError: A budget below 8, an unknown `short_texts`, or a factor that is not positive.
    """

    budget: int = option(
        400,
        "Lists of factors to measure; each costs one forward per tail of every search document.",
        metavar="N",
        least=8,
    )
    search_documents: int = option(
        0,
        "Documents that the search reads; it is judged on the others. Default: half of them, at most 8.",
        metavar="N",
        least=0,
        shown=False,
    )
    short_texts: str = option(
        "same",
        "Texts of up to the original length are read with the same factors (safe with a cache), or native: "
        "unchanged (as LongRoPE switches).",
        metavar="HOW",
    )
    attention_factor: float | None = option(
        None, "The factor on cos and sin. Default: it is searched too.", metavar="F"
    )
    replace: bool = option(
        False, "On a checkpoint that is scaled already: drop its scaling first.", negatable=False
    )

    def __post_init__(self) -> None:
        from hf_posenc.evaluation.tuning.evolution import SHORT_TEXTS, Plan

        Plan.of(self.budget)
        if self.short_texts not in SHORT_TEXTS:
            raise PosencError(
                f"--short-texts is {' or '.join(SHORT_TEXTS)}, not {self.short_texts!r}."
            )
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise PosencError(
                f"--attention-factor is a number above 0, not {self.attention_factor}."
            )
