"""Fields of options: their form on the command line, and the parsers and checks of their values.

Nothing heavy is imported here, since `--help` reads this module.
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
from hf_posenc.lengths import MOST_LENGTHS, read_length

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
            f"progress is a function of a label, the tokens done and those in all, not {type(progress).__name__}."
        )
    if output is None:
        return None
    if not isinstance(output, str | Path) or not str(output).strip() or output == Path():
        raise PosencError(
            f"output: {output!r} is no folder. Give its path, or None to keep nothing."
        )
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
        return _check_texts(value, name)
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


def _check_texts(values: Any, name: str) -> Any:
    text = isinstance(values, str)
    if not text and isinstance(values, Iterable) and all(isinstance(n, str) for n in values):
        return values
    form = " as --patch takes them, such as 'none' and 'yarn:scale=8'" if name == "methods" else ""
    given = f"one text: write {name}=[{values!r:.80}]" if text else f"{values!r:.80}"
    raise PosencError(f"{name} is a list of texts{form}, not {given}.")
