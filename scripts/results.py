"""Committed results in docs/data/, and how every page words them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import Cell, Record, summarize
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.retrieval.result import RetrievalResult

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BENCHMARKS, REAL_MODEL = DOCS / "data" / "benchmarks", DOCS / "data" / "real_model"
DEMO = DOCS / "data" / "demo" / "perplexity.json"
TRANSCRIBED = DOCS / "data" / "published.json"
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
    frame["loss"], frame["name"] = (
        frame.nats / frame.tokens,
        frame.document.map(lambda d: Path(d).name),
    )
    return frame.pivot(index="name", columns="method", values="loss")


@dataclass(frozen=True)
class Passkeys:
    """So many prompts, and in how many the passkey is answered, or the most probable candidate (`first`).

    `chance` is the share of prompts in which a random candidate is the passkey.
    """

    samples: int
    answered: int
    first: int
    chance: float


def passkeys(file: Path) -> tuple[int, dict[str, Passkeys]]:
    """Return the length of the longest passkey prompts of a CSV or JSON file, and their results by method."""
    if file.suffix == ".csv":
        rows = pandas.read_csv(file).query("depth.isna()")
    else:
        rows = pandas.DataFrame(vars(cell) for cell in retrieval(file).cells)
    rows = rows[rows.task == "passkey"]
    longest = int(rows.length.max()) if len(rows) else 0
    found = {}
    for row in rows[rows.length == longest].itertuples():
        answered, first = (round(share * row.samples) for share in (row.accuracy, row.first))
        found[row.method] = Passkeys(row.samples, answered, first, row.chance)
    return longest, found


def update_mode(label: str) -> tuple[str, str, int | None]:
    """Return family, mode and bucket of a label such as `dynamic_ntk (scale 2, update row, bucket 64)`."""
    name, _, options = label.removesuffix(")").partition(" (")
    given = dict(option.rsplit(" ", 1) for option in options.split(", ") if option)
    mode, bucket = given.pop("update", ""), given.pop("bucket", None)
    rest = ", ".join(" ".join(option) for option in given.items())
    return f"{name} ({rest})" if rest else name, mode, None if bucket is None else int(bucket)


def made_with(environment: Mapping[str, Any]) -> str:
    """Return the versions with which a result was measured."""
    return f"torch {environment['torch']}, transformers {environment['transformers']}"


def evidence() -> str:
    """Return how far untrained methods held in published tables, as the JSON file that `recommend` reads."""
    own = ((method, row) for method, rows in read(TRANSCRIBED)["untrained"].items() for row in rows)
    return json.dumps([[method, *row[:2], *row[3:]] for method, row in own], indent=0) + "\n"
