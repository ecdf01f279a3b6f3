"""Parts of docs/evidence.md that are generated from committed results, for scripts/make_readme.py."""

from __future__ import annotations

import itertools
import math
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from hf_posenc.evaluation.grid import number, percent_range
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import Record
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.retrieval.result import RetrievalResult, mcnemar
from hf_posenc.training.result import TrainingLog
from scripts import results
from scripts.results import DATA, at, losses, made_with, read, summary, table

ATTENTION = DATA / "gpu" / "h200.json"
"""Times of attention, by method, phase and length."""
SECOND_HALF = "second half"
ASKED = ("code", "books", "prose")
"""Texts with a section of their own on the page."""
KINDS: dict[str, Any] = {"perplexity": PerplexityResult, "retrieval": RetrievalResult}


def result_of(name: str, kind: str) -> Any:
    """Return a result in docs/data/, or that in a benchmark, which names its processor; `None` if of another kind."""
    values = read(results.DATA / f"{name}.json")
    if values["kind"] == "bench":
        device, values = (values["speed"] or {}).get("device"), values[kind]
        if values and device:
            values = values | {"model": values["model"] | {"device": device}}
    return KINDS[kind].from_dict(values) if values and values["kind"] == kind else None


def added(kind: str, texts: str = "") -> str:
    """Return the tables of added results of a kind: of some texts, else of those that no other part of the page names.

    The verdicts follow those of perplexity.
    """
    parts = []
    for file in sorted((results.DATA / "evidence").glob("*.json")):
        name, own = f"evidence/{file.stem}", file.stem.split("-")[1]
        chosen = own == texts if texts else kind == "retrieval" or own not in ASKED
        result = result_of(name, kind) if chosen else None
        if result is not None and kind == "retrieval":
            parts.append(answers(name))
        elif result is not None:
            verdicts = (f"- {result.verdict_of(p)}" for p in result.settings.protocols)
            parts += [perplexities(name), "\n".join(verdicts)]
    return "\n\n".join(parts) or "None so far."


def perplexities(name: str, protocols: str = "", *controls: str) -> str:
    """Return perplexities and their ratios to truncation, or another control, and to others at the last length."""
    result = result_of(name, "perplexity")
    documents = ", ".join(f"`{Path(each['name']).name}`" for each in result.documents)
    chosen = protocols.split(",") if protocols else result.settings.protocols
    defined = "; ".join(f"*{each}*: {result.settings.definition(each)}" for each in chosen)
    cells = {(each.method, each.protocol, each.length) for each in result.records}
    every = {cell[1:] for cell in cells}
    whole = {e.spec for e in result.candidates if all((e.label, *each) in cells for each in every)}
    missing = set(results.specs(result.command or "")) - whole
    gone = f" Not measured to the end: {', '.join(sorted(missing))}." if missing else ""
    tables = _perplexities(result, result.records, chosen, *controls)
    return f"{_about(name, result)} {defined}.{gone} {len(result.documents)} documents: {documents}.\n\n{tables}"


def _about(name: str, result: Any) -> str:
    model = result.model
    return (
        f"**{model['name']}, {model['device']}**, {model['dtype']}, {made_with(result.environment)} "
        f"([every number](data/{name}.json))."
    )


def _perplexities(result: Any, records: list[Record], protocols: Any, *specs: str) -> str:
    """Return a table with the longest texts first; the documents that are needed are those of its first column."""
    labels = {entry.spec: entry.label for entry in result.candidates}
    first, *others = [labels[spec] for spec in specs or (TRUNCATION,)]
    cells, columns = summary(records, first), dict[str, Any]()
    for length, protocol in itertools.product(result.settings.lengths[::-1], sorted(protocols)):
        own = at(cells, protocol, length, "both")
        if not columns:
            needed, last = at(cells, protocol, length, "to_tell"), (protocol, length)
        columns |= {f"{protocol}, {length:,} tokens": own} if len(own) else {}
    columns |= {f"/ {control}": at(summary(records, control), *last) for control in others}
    return table(columns | {"documents for 1 %": needed})


def by_document(name: str, protocol: str = "tail") -> str:
    """Return the perplexities of every document at the longest length, and its scored tokens."""
    result = result_of(name, "perplexity")
    length = result.settings.lengths[-1]
    records = [r for r in result.records if (r.protocol, r.length) == (protocol, length)]
    each = np.exp(losses(records, length)).map(number)
    tokens = {Path(r.document).name: f"{r.tokens:,}" for r in records}
    columns = each.assign(**{"tokens scored": pandas.Series(tokens)}).T
    return f"{protocol}, {length:,} tokens, by document:\n\n{table(dict(columns.items()))}"


def second_half() -> str:
    """Return perplexities of the tokens that the unpatched model cannot read with all before them."""
    result = result_of("real_model/longppl-16k", "perplexity")
    return _perplexities(result, far_records(), [SECOND_HALF])


def far_records() -> list[Record]:
    """Return the records of the tokens from 8,193 to 16,384: those of all without those of the first."""
    every = result_of("real_model/longppl-16k", "perplexity").records
    own = sorted((r for r in every if r.protocol == "prefix"), key=lambda r: r.length)
    first = {(r.method, r.document): r for r in reversed(own)}
    sums = ("nats", "tokens", "weighted", "weight")
    return [
        replace(r, protocol=SECOND_HALF, **{s: getattr(r, s) - getattr(near, s) for s in sums})
        for r in own
        if (near := first[r.method, r.document]).length < r.length
    ]


def copies() -> str:
    """Return how much of each document repeats text that truncation cannot see, and the gain of a method there."""
    values, method = read(DATA / "real_model" / "copied.json"), "dual_chunk"
    shares, columns = pandas.DataFrame(values["rows"]).set_index("document"), {}
    tails = [result_of(f"real_model/tail-{n}", "perplexity").records for n in ("16k", "32k")]
    for part, records in zip(shares, [*tails, far_records()], strict=True):
        loss = losses(records, max(r.length for r in records))
        ratio = np.exp(loss[method] - loss[TRUNCATION])
        head = part.replace("whole text", SECOND_HALF)
        columns[f"{head}: copied"] = shares[part].map("{:.1%}".format)
        columns[f"{head}: `{method}` / {TRUNCATION}"] = ratio.map("{:.3f}".format)
    return (
        f"*Copied*: the token ends a run of {values['run']} tokens that also stands {values['reach']:,} tokens or more "
        f"before it, and not nearer. `{TRUNCATION}` cannot see the first one.\n\n{table(columns, 'document')}"
    )


def tuned() -> str:
    """Return perplexities before and after the fine-tuning."""
    before = result_of("real_model/tail-16k", "perplexity")
    after = result_of("real_model/finetuned-tail", "perplexity")
    log = TrainingLog.read(DATA / "real_model" / "finetuned")
    records = [r for r in before.records if r.method in (TRUNCATION, log.label)]
    records += [replace(r, method=f"{log.label}, fine-tuned") for r in after.records]
    return (
        f"{log.run['steps']} steps of {log.data['block_length']:,} tokens, {log.run['tokens_seen']:,} tokens in all, "
        f"in {log.run['seconds'] / 60:.0f} minutes of one core that other programs shared. Ratios to the model before, "
        f"and to truncation:\n\n{_perplexities(before, records, ['tail'], 'yarn:scale=2', TRUNCATION)}"
    )


def answers(name: str, like: str = "") -> str:
    """Return answers, and answers ranked first, by task, method and length; at the depths of another result alone."""
    result = result_of(name, "retrieval")
    if like:
        depths = result_of(like, "retrieval").settings.depths
        result = replace(result, records=[r for r in result.records if r.depth in depths])
    cells = pandas.DataFrame(map(vars, result.cells))
    columns = {}
    for length, rows in cells.groupby("length"):
        rows = rows.set_index(["task", "method"])
        for column, ends, head in (
            ("accuracy", "interval", "answered"),
            ("first", "first_interval", "ranked first"),
        ):
            own = rows[rows[column].notna()]
            texts = map(_count, own[column], own.samples, own[ends])
            columns[f"{length:,}: {head}"] = pandas.Series([*texts], own.index, dtype=object)
    columns = {head: each for head, each in columns.items() if len(each)}
    prompts = cells.samples.max()
    about = f"{prompts} prompts at {len({r.depth for r in result.records} - {None})} depths"
    return f"{_about(name, result)} {about}.\n\n{table(columns, 'task', 'method')}"


def _count(share: float, samples: int, interval: tuple[float, float]) -> str:
    return f"{share * samples:.0f} of {samples} ({percent_range(interval)})"


def pairs(name: str, first: str, by: str = "correct") -> str:
    """Return how a method's answers in the longest prompts differ from every other method's, prompt by prompt.

    `by` is `"correct"`, or `"rank"`: prompts in which the answer is ranked first are counted.
    """
    result = result_of(name, "retrieval")
    records = pandas.DataFrame(map(vars, result.records)).query("length == length.max()")
    records[by] = records[by] == 1
    correct = records.pivot(index=["task", "depth", "sample"], columns="method", values=by)
    gains = correct.astype(int).drop(columns=first).rsub(correct[first].astype(int), axis=0)
    counts = pandas.DataFrame({"more": (gains > 0).sum(), "fewer": (gains < 0).sum()})
    tests = math.comb(len(correct.columns), 2)
    chances = (min(1.0, tests * mcnemar(*row)) for row in counts.to_numpy().tolist())
    counts["p"] = [f"{chance:.2g}" for chance in chances]
    verb = "answers" if by == "correct" else "ranks first"
    corrected = f", corrected for all {tests} pairs of methods by Bonferroni" if tests > 1 else ""
    return (
        f"Prompt by prompt at {max(result.settings.lengths):,} tokens, `{first}` {verb} so many more and fewer than "
        f"another method (exact McNemar tests{corrected}):\n\n{table(dict(counts.items()))}"
    )


def prefill() -> Any:
    """Return a frame of the least measured time of a prefill on a GPU, in multiples of plain attention."""
    rows = pandas.DataFrame(read(ATTENTION)["rows"]).query("phase == 'prefill'").dropna(subset="ms")
    times = [min(t for k, t in ms.items() if k != "plain") / ms["plain"] for ms in rows.ms]
    options = [",".join(f"{k}={v}" for k, v in each.items()) for each in rows.options]
    specs = [":".join(filter(None, each)) for each in zip(rows.method, options, strict=True)]
    return rows.assign(times=[f"{each:.2f}" for each in times], spec=specs)


def cost() -> str:
    """Return those times by length."""
    times = prefill().groupby("length")
    return table({f"{n:,} tokens": own.set_index("spec").times for n, own in times})


def agreement() -> str:
    """Return the log likelihoods of lm-evaluation-harness beside our own."""
    values = read(DATA / "real_model" / "agreement.json")
    rows, ruler = pandas.DataFrame(values["rows"]).set_index("method"), values["ruler"]
    rows["relative difference"] = (rows.nats / rows.harness - 1).abs().map("{:.0e}".format)
    same = "the same text" if ruler["harness"] == ruler["generate"] else "another text"
    return (
        f"Nats by hf_posenc, and by the harness:\n\n{table(dict(rows.round(3).items()))}\n\n"
        f"On a prompt of {ruler['prompt_tokens']:,} tokens by the harness' own generator of RULER (`niah_single_1`), "
        f"the model with `yarn:scale=2` answers through the harness with {same} as through `generate`."
    )


def commands(machine: str = "") -> str:
    """Return the command of every result, its machine, versions and hashes, as far as its records have them."""
    lines, files = [], sorted(results.DATA.glob(f"evidence/*{machine}.json"))
    for file in files if machine else [*files, *sorted(DATA.glob("real_model/*.json"))]:
        values = read(file)
        values = values["perplexity"] if values["kind"] == "bench" else values
        if values.get("command"):
            model, versions = values["model"], made_with(values["environment"])
            hashes = model["weights_sha256"][:16], model["tokenizer"]["sha256"][:16]
            about = f"{file.stem}: {model['device']}, {model['dtype']}, {versions}"
            about += f", weights {hashes[0]}, tokenizer {hashes[1]}"
            for text, indent in ((about, ""), (values["command"], "  ")):
                lines += textwrap.wrap(text, 90, initial_indent=indent, subsequent_indent="    ")
    return "```text\n" + "\n".join(lines) + "\n```"
