"""Tables and sentences of README.md and the guides on the committed evidence, for scripts/make_readme.py."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from hf_posenc.evaluation.extend.result import ExtendResult
from hf_posenc.evaluation.grid import markdown_table, number, to_markdown
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, UNPATCHED
from hf_posenc.methods import get_method
from scripts import evidence_page, results
from scripts.method_pages import expressed
from scripts.results import DATA, DEMO, REAL_MODEL, at, perplexity, read, retrieval, summary, table

SHOWN = (TRUNCATION, "yarn", "dynamic_yarn", "self_extend", "rerope")
"""The methods in README.md: the control, and those that it recommends."""
CODE, BOOKS = (DATA / "evidence" / f"smollm2-{texts}-h100.json" for texts in ("code", "books"))
SHORT, TAILS, LONGER = (REAL_MODEL / f"tail-{length}.json" for length in ("2k", "16k", "32k"))
WHOLE, PASSKEY = REAL_MODEL / "longppl-16k.json", REAL_MODEL / "passkey.json"
DYNAMIC = REAL_MODEL / "passkey-dynamic.json"
FARTHER, GEMMA = (REAL_MODEL / f"passkey-{name}.json" for name in ("32k", "gemma3"))


def headline() -> str:
    """Return what README.md says below the picture of `draw_real_model`."""
    keys, code, novels = retrieval(PASSKEY), perplexity(CODE), perplexity(BOOKS)
    cells, books = summary(code.records), summary(novels.records)
    original, length = code.original or 0, code.settings.lengths[-1]
    longest = max(keys.settings.lengths)
    served = {m: "itself" if r.form else "by the plug-in" for m, r in expressed("vllm").items()}
    prefills = evidence_page.prefill().set_index("method")
    columns = {
        f"new code of {length:,} tokens": _named(at(cells, "prefix", length)),
        f"its last {code.settings.tail_tokens:,} tokens": _named(at(cells, "tail", length)),
        f"books of {length:,} tokens": _named(at(books, "prefix", length)),
        f"code of {original:,} tokens": _named(at(cells, "prefix", original))
        | {"dynamic_yarn": "1 (as unpatched)"},
        f"passkeys in {longest:,} tokens": _answered(),
        "vLLM serves it": {m: served.get(m, "by the plug-in") for m in SHOWN[1:]},
    }
    for size in (32_768, 131_072):
        times = prefills.query("length == @size").times
        columns[f"prefill of {size:,} tokens"] = {"yarn": "1 (it changes a table)", **times}
    short, whole, end = (
        at(cells, *of, "differs")
        for of in (("prefix", original), ("prefix", length), ("tail", length))
    )
    novel = at(books, "prefix", length, "differs")
    ends = perplexity(LONGER)
    times = at(books, "prefix", ends.settings.lengths[-1])["yarn (auto)"]
    assert not at(summary(ends.records), "tail", ends.settings.lengths[-1], "differs").any()
    assert [*whole.index[whole < 0]] == ["self_extend (scale 2)"]
    assert {short["yarn (scale 2)"], whole["yarn (scale 2)"], novel["yarn (auto)"]} == {1}
    assert {*end, *novel} == {0, 1}
    records = pandas.DataFrame(map(vars, keys.records))
    beyond = records.query("length == @longest and distance > @original")
    found = _named(beyond.groupby("method").correct.sum())
    lost = len(beyond) // beyond.method.nunique()
    assert (found[TRUNCATION], found["yarn"], found["self_extend"]) == (0, lost, lost)
    gain = 100 * (1 - _named(at(cells, "prefix", length, "ratio"))["self_extend"])
    extended = ExtendResult.from_dict(read(REAL_MODEL / "extend.json"))
    return (
        f"SmolLM2-135M-Instruct has a context of {original:,} tokens. Its weights are those of a file of 4 and 8 bits, "
        "dequantized, and nothing below changes them. **On new code at twice that length, `self_extend` is "
        f"significantly better than cutting the text, by {gain:.1f} % over whole texts. It answers {lost} of the "
        f"{lost} passkeys (numbers hidden in a text) that cutting loses. So does `yarn`, which makes short texts "
        "worse. On books, cutting the text is as good.** Perplexities are multiples of those of "
        f"`{TRUNCATION}`, the unpatched model on the last {original:,} tokens: below 1 is a gain. Bold: significantly "
        f"different; empty: not measured.\n\n{_joined(columns, SHOWN)}\n\n"
        f"- Code: {len(code.documents)} files that are newer than the model; books: the beginnings of "
        f"{len(novels.documents)}; both on an H100. Passkeys: on a CPU. Prefill: one layer of 8B size on an H200 with "
        "the best kernel, in multiples of plain attention. vLLM's plug-in was tried on a CPU so far.\n"
        f"- At four times the context, in {_hits(FARTHER, 'correct', 'answers {} passkeys')}. On books of that length "
        f"`yarn` has {times.strip('*')} times truncation's perplexity. At the ends of {len(ends.documents)} texts of "
        "code and reference, no method differs significantly from truncation.\n"
        f"- On Gemma 3 270M, at twice its context, in {_hits(GEMMA, 'rank', 'ranks {} passkeys first')}.\n"
        "- [`hf-posenc extend`](docs/extend.md#on-a-real-model) on ten files of new code: "
        f"*{extended.lines()[0]}* {_without_one(extended)}\n\n"
        "[docs/evidence.md](docs/evidence.md) has all numbers, and the commands that repeat them."
    )


def _hits(file: Path, by: str, verb: str) -> str:
    """Return the passkeys that `rerope` and truncation find in the longest prompts, in words."""
    records = pandas.DataFrame(map(vars, retrieval(file).records)).query("length == length.max()")
    found = (records[by] == 1).groupby(records.method).agg(["sum", "size"])
    (own, all_), (cut, _) = (found.loc[name] for name in ("rerope", TRUNCATION))
    return f"{records.length.max():,} tokens `rerope` {verb.format(f'{own} of {all_}')}, truncation {cut}"


def _joined(columns: dict[str, Any], methods: tuple[str, ...] | None = None) -> str:
    """Return columns by the name of a method as a table, with all methods or some."""
    series = {head: pandas.Series(column, dtype=object) for head, column in columns.items()}
    order = methods or dict.fromkeys(method for each in series.values() for method in each.index)
    return table({head: each.reindex([*order]) for head, each in series.items()})


def _named(column: Any, scale: int = 2) -> dict[str, Any]:
    """Return a column of labels by the names of methods: those without options but the length's own scale."""
    own = re.compile(rf" \((auto|scale {scale})\)")
    named = {own.sub("", label): value for label, value in column.items()}
    return {name: value for name, value in named.items() if "(" not in name}


def _answered() -> dict[str, str]:
    """Return the passkeys that each method answers in the longest prompts."""
    found = pandas.concat([results.passkeys(file)[1] for file in (PASSKEY, DYNAMIC)]).itertuples()
    return _named({keys.Index: f"{keys.answered} of {keys.samples}" for keys in found})


# docs/choosing.md


def evidence() -> str:
    """Return a row for each method measured without training: on the embedded model at x4, on SmolLM2 at x2 and x4."""
    columns = {}
    for file in (DEMO, TAILS, LONGER, SHORT, WHOLE):
        result, control = perplexity(file), UNPATCHED if file == SHORT else TRUNCATION
        trained, length = result.original or 0, result.settings.lengths[-1]
        name, length = ("embedded", 4 * trained) if file == DEMO else ("SmolLM2", length)
        protocol, whole = ("prefix", "whole texts of ") if file == WHOLE else ("tail", "")
        ratios = at(summary(result.records, control), protocol, length, "ratio").map(number)
        head = f"{name}, {whole}{length:,} tokens: perplexity / {control}"
        columns[head] = _named(ratios, max(2, length // trained))
    columns[f"SmolLM2, {results.passkeys(PASSKEY)[0]:,} tokens: passkeys answered"] = _answered()
    return (
        f"The embedded model was trained at {perplexity(DEMO).original:,} tokens, SmolLM2-135M reads {trained:,} by "
        "its config ([intervals and documents](evidence.md), [the demo](demo.md)). A ratio below 1 is a gain. "
        "Perplexities are those of the ends of texts, where the column does not say whole texts. Empty: not "
        f"measured here. The methods' own pages have more.\n\n{_joined(columns)}"
    )


def verdicts() -> str:
    """Return what the added results of code and of books say over whole texts."""
    kinds = (("New code", CODE), ("Novels", BOOKS))
    return "\n".join(f"- {kind}: {perplexity(file).verdict_of('prefix')}" for kind, file in kinds)


# docs/recommend.md and docs/extend.md


def classes() -> str:
    """Return the order and the classes of `recommend`, and what was measured of each method."""
    result = perplexity(TAILS)
    length = result.settings.lengths[-1]
    ratios, rows = at(summary(result.records), "tail", length), []
    for name, option in ((o["method"], o) for o in read(REAL_MODEL / "recommend.json")["options"]):
        if own := [e for e in result.candidates if e.method == name and len(e.parts) == 1]:
            label = next((e.label for e in own if e.spec == option["spec"]), own[0].label)
            kind = "frequencies" if get_method(name).kind == "frequencies" else "attention"
            rows.append([f"`{option['spec']}`", option["works"], kind, f"`{label}`", ratios[label]])
    head = ["recommended", "class", "kind", "measured", f"/ truncation at {length:,}"]
    return markdown_table(head, rows, numeric=[False, False, False, False, True])


def extended() -> str:
    """Return what `extend` printed about the model and ten documents, and its tables."""
    result = ExtendResult.from_dict(read(REAL_MODEL / "extend.json"))
    printed = [f"$ {result.about['command']}", "", *result.lines()]
    lines = [textwrap.fill(line, 110, subsequent_indent="  ") for line in printed]
    text = "```text\n" + "\n".join(lines) + "\n```"
    tables = [f"{grid.caption}\n\n{to_markdown(grid)}" for grid in result.tables()]
    link = "[extend.json](data/real_model/extend.json) has every number."
    return "\n\n".join([text, *tables, link])


def _without_one(result: ExtendResult) -> str:
    """Return how far the winner's ratio to truncation hangs on one of the documents that judged it."""
    assert result.perplexity is not None
    loss, bound = results.losses(result.perplexity.records, result.lengths[1]), 1 + result.bound
    gains = loss[result.winner] - loss[TRUNCATION]
    ratios = np.exp((gains.sum() - gains) / (len(gains) - 1))
    return (
        f"Without `{ratios.idxmax()}` the ratio to truncation would be {ratios.max():.3f}, and the demand (at most "
        f"{bound:g}) {'' if ratios.max() <= bound else 'not '}met."
    )
