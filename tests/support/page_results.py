"""Result files to make pages from, and a page read back as a browser would."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.documents import Skipped
from hf_posenc.evaluation.grid import MethodEntry
from hf_posenc.evaluation.measuring.statistics import Failure, Record
from hf_posenc.evaluation.page import collect, render
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult

LENGTHS = (128, 256, 512, 1024)
VOID = {"meta", "link", "br", "img", "hr", "input", "col"}
CURVES = {
    "none": (15.0, 14.5, 46.0, 120.0),
    "truncation": (15.0, 14.5, 14.0, 14.0),
    "yarn": (15.5, 14.7, 14.2, 15.6),
}


def result(
    curves: Mapping[str, Sequence[float]] = CURVES, *, lengths: Sequence[int] = LENGTHS,
    documents: int = 6, protocols: Sequence[str] = ("prefix", "tail"), tail: int = 64,
    failures: Sequence[dict[str, Any]] = (), **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Build a `perplexity.json`: perplexities by method and length, with documents scattered around them."""
    failed = {(f["method"], f["protocol"], f["length"]) for f in failures}
    records = []
    for place, (method, curve) in enumerate(curves.items()):
        for protocol in protocols:
            for length, value in zip(lengths, curve, strict=True):
                for index in range(documents):
                    if (method, protocol, length) in failed:
                        continue
                    spread = (index - (documents - 1) / 2) / 10 + math.sin(7 * place + index) / 50
                    nats = 100 * (math.log(value) + spread)
                    sums = (nats, 100, 400, 80, nats, 100.0)
                    records.append(Record(method, protocol, length, f"doc {index}", *sums))
    model: dict[str, Any] = {"name": "tiny", "class": "LlamaForCausalLM", "dtype": "float32"}
    model |= {"device": "cpu", "attention": "sdpa", "parameters": 1000}
    model["weights_sha256"] = "aa" * 32
    model["tokenizer"] = {"class": "T", "vocabulary": 8, "sha256": "bb" * 32}
    model["bos"] = {"policy": "auto", "token_ids": []}
    hashes = [(f"{n:064x}", f"{n + 99:064x}") for n in range(documents)]
    sizes = {"tokens": 1024, "bytes": 4096, "words": 800}
    made = PerplexityResult(
        command="hf-posenc perplexity --patch none --patch yarn",
        model=model,
        original=256,
        settings=Settings(tuple(lengths), tuple(protocols), tail_tokens=tail, buckets=4),
        environment={"torch": "2.13.0"},
        candidates=[entry(name) for name in curves],
        documents=[
            {"name": f"doc {n}", **sizes, "text_sha256": text, "tokens_sha256": tokens}
            for n, (text, tokens) in enumerate(hashes)
        ],
        skipped=[Skipped("bad.txt", "not UTF-8")],
        failures=[Failure(**failure) for failure in failures],
        curves={name: ([300.0, 310.0, 320.0, 320.0], [100] * 4) for name in curves},
        records=records,
    )
    return {**made.to_dict(), **more}


def entry(name: str) -> MethodEntry:
    return MethodEntry(name, name, None if name == "none" else name, [], {}, None, False, 256)


def write(folder: Path, data: Mapping[str, Any], kind: str = "perplexity") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{kind}.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


def page(*folders: Path, figures: bool = False) -> Page:
    return Page(render(collect(folders), figures=figures))


@functools.cache
def drawn() -> Page:
    """The report on one result with its figures, which take a second."""
    with tempfile.TemporaryDirectory() as folder:
        return page(write(Path(folder) / "one", result()), figures=True)


@dataclasses.dataclass
class Element:
    """A tag of the page."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """The elements inside it with this name and these attributes, in the order of the page."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        found = []
        for child in self.children:
            if child.tag == tag and wanted.items() <= child.attributes.items():
                found.append(child)
            found += child.all(tag, **attributes)
        return found

    @property
    def text(self) -> str:
        """All text inside it, in order, white space joined."""
        return " ".join("".join(self.texts).split())


class Page(HTMLParser):
    """The tree of a page; a tag that is not closed, or closed twice, is an error."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.root = Element("root", {})
        self._open = [self.root]
        self.feed(source)
        self.close()
        assert self._open == [self.root], f"not closed: {self._open[-1].tag}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice: <{tag} {names}>"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.texts.append(data)

    def table(self, caption: str, place: int = 0) -> dict[tuple[str, str], Element]:
        """The cells of a table by row and column heading.

        Args:
            caption: How its caption begins.
            place: Which of the tables that begin so.
        """
        tables = [
            table
            for table in self.root.all("table")
            if table.all("caption")[0].text.startswith(caption)
        ]
        table = tables[place]
        heads = [th.text for th in table.all("thead")[0].children[-1].children][1:]
        cells = {}
        for row in table.all("tbody")[0].children:
            name, *values = row.children
            assert name.attributes.get("scope") == "row"
            for head, cell in zip(heads, values, strict=True):
                cells[name.text, head] = cell
        return cells


def exact(element: Element) -> list[float]:
    """The numbers of a cell, as exact as the page has them."""
    return [float(data.attributes["value"]) for data in element.all("data")]
