"""Committed results in docs/data/, and how every page words them."""

from __future__ import annotations

import functools
import itertools
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas

from hf_posenc.evaluation.grid import markdown_table, number, number_range
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import TOO_FEW, Cell, Interval, Record, summarize
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.retrieval.result import RetrievalResult

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DATA = DOCS / "data"
BENCHMARKS, REAL_MODEL = DATA / "benchmarks", DATA / "real_model"
DEMO = DATA / "demo" / "perplexity.json"
TRANSCRIBED = DATA / "published.json"
EVIDENCE = ROOT / "hf_posenc" / "evaluation" / "recommend" / "evidence.json"
ATTENTION, UPDATES = BENCHMARKS / "attention_distance.json", BENCHMARKS / "updates.json"
SMALL_MODELS = BENCHMARKS / "small_models.json"


@functools.cache
def read(file: Path) -> Any:
    """Return the values of a JSON file, which its readers leave as they are."""
    return json.loads(file.read_text(encoding="utf-8"))


@functools.cache
def perplexity(file: Path) -> PerplexityResult:
    """Return a measurement of perplexity."""
    return PerplexityResult.from_dict(read(file))


@functools.cache
def retrieval(file: Path) -> RetrievalResult:
    """Return a measurement of retrieval."""
    return RetrievalResult.from_dict(read(file))


@functools.cache
def tails(file: Path, control: str = TRUNCATION) -> dict[tuple[str, int], Cell]:
    """Return the tail perplexities by method and length, and their ratios to those of a control."""
    records = [record for record in perplexity(file).records if record.protocol == "tail"]
    return {(c.method, c.length): c for c in summarize(records, baseline=control)}


def losses(records: Iterable[Record], length: int) -> Any:
    """Return a frame of the nats a token at a length: a row for each document's file name, a column for each method."""
    frame = pandas.DataFrame(vars(record) for record in records if record.length == length)
    frame["loss"] = frame.nats / frame.tokens
    frame["name"] = frame.document.map(lambda d: Path(d).name)
    wide = frame.pivot(index="name", columns="method", values="loss")
    return wide[frame.method.unique()]


def summary(records: Iterable[Record], control: str = TRUNCATION) -> Any:
    """Return a frame of the cells of records, with ratios to a control: the fields of `Cell`, and texts of tables.

    `against` is the ratio with its range, in bold if it is significant, `both` the perplexity above it, `to_tell` the
    documents that are needed.
    """
    cells = summarize(list(records), baseline=control)
    frame = pandas.DataFrame([vars(cell) | {"differs": cell.differs} for cell in cells])
    frame["against"] = [*map(_against, cells)]
    frame.loc[frame.method == control, "against"] = "1"
    shown = [f"{number(c.perplexity)} ({_range(c.interval)})" for c in cells]
    frame["both"] = [
        f"{each}<br>×{ratio}" for each, ratio in zip(shown, frame.against, strict=True)
    ]
    frame["to_tell"] = [f"{cell.needed:,}" if cell.needed else "" for cell in cells]
    return frame


def _against(cell: Cell) -> str:
    bold = "**" if cell.differs else ""
    same = cell.ratio_interval == (1.0, 1.0)
    return (
        f"{bold}{number(cell.ratio)} ({'identical' if same else _range(cell.ratio_interval)}){bold}"
    )


def _range(interval: Interval | None) -> str:
    return TOO_FEW if interval is None else number_range(interval)


def at(frame: Any, protocol: str, length: int, column: str = "against") -> Any:
    """Return a column of `summary` under a protocol at a length, by method."""
    rows = frame[(frame.protocol == protocol) & (frame.length == length)]
    return rows.set_index("method")[column]


def table(columns: Mapping[str, Any], *names: str) -> str:
    """Return series of texts, joined on their index, as a Markdown table; empty where one has no entry."""
    frame = pandas.concat(columns, axis=1, sort=False).fillna("")
    heads = [*(names or ("method",)), *columns]
    keys = (key if isinstance(key, tuple) else (key,) for key in frame.index)
    rows = [
        [*(f"`{part}`" for part in key), *map(str, row)]
        for key, row in zip(keys, frame.to_numpy(), strict=True)
    ]
    numeric = [index >= len(names or "1") for index in range(len(heads))]
    return markdown_table(heads, rows, numeric=numeric)


def passkeys(file: Path) -> tuple[int, Any]:
    """Return the length of the longest passkey prompts of a CSV or JSON file, and a frame of their counts by method.

    Of `samples` prompts, the passkey is answered in `answered` and the most probable candidate in `ranked`; `chance` is
    the share of prompts in which a random candidate is the passkey.
    """
    every = pandas.read_csv(file) if file.suffix == ".csv" else retrieval(file).frame
    rows = every.query("task == 'passkey' and depth.isna()")
    rows = rows.query("length == length.max()").set_index("method")
    answered, ranked = ((rows[share] * rows.samples).round() for share in ("accuracy", "first"))
    counts = rows.assign(answered=answered, ranked=ranked)
    return int(rows.length.max()), counts.astype({"answered": int, "ranked": int, "samples": int})


def update_mode(label: str) -> tuple[str, str, int | None]:
    """Return family, mode and bucket of a label such as `dynamic_ntk (scale 2, update row, bucket 64)`."""
    name, _, options = label.removesuffix(")").partition(" (")
    given = dict(option.rsplit(" ", 1) for option in options.split(", ") if option)
    mode, bucket = given.pop("update", ""), given.pop("bucket", None)
    rest = ", ".join(" ".join(option) for option in given.items())
    return f"{name} ({rest})" if rest else name, mode, None if bucket is None else int(bucket)


def specs(command: str) -> list[str]:
    """Return the methods that a command line names."""
    words = shlex.split(command.replace("--patch=", "--patch "))
    return [spec for flag, spec in itertools.pairwise(words) if flag == "--patch"]


def made_with(environment: Mapping[str, Any]) -> str:
    """Return the versions with which a result was measured."""
    return f"torch {environment['torch']}, transformers {environment['transformers']}"


def evidence() -> str:
    """Return how far untrained methods held in published tables, as the JSON file that `recommend` reads."""
    own = ((method, row) for method, rows in read(TRANSCRIBED)["untrained"].items() for row in rows)
    return json.dumps([[method, *row[:2], *row[3:]] for method, row in own], indent=0) + "\n"
