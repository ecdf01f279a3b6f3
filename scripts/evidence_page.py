"""Parts of docs/real_model.md that are generated from docs/data/real_model/, for scripts/make_readme.py."""

from __future__ import annotations

import functools
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_posenc.evaluation.extend.result import ExtendResult
from hf_posenc.evaluation.grid import (
    markdown_table,
    number,
    number_range,
    percent_range,
    to_markdown,
)
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, UNPATCHED
from hf_posenc.evaluation.measuring.statistics import VERDICTS, Cell, Interval, Record, summarize
from hf_posenc.evaluation.retrieval.result import Cell as Answers
from hf_posenc.evaluation.retrieval.result import mcnemar
from hf_posenc.evaluation.retrieval.tasks import TASKS
from hf_posenc.training.log import TrainingLog
from scripts import results
from scripts.add_result import added as added
from scripts.add_result import added_cells, bold_ratio, whole_texts
from scripts.add_result import added_needles as added_needles
from scripts.measure_real_model import ADVICE, AGREEMENT, COPIED, TUNED
from scripts.method_pages import expressed
from scripts.results import DEMO, REAL_MODEL, losses, made_with, perplexity, retrieval

RANGES = (
    "In parentheses: 95 % intervals (Student's t over documents); the ratios are paired, and their intervals are "
    "simultaneous over the methods of a column (Bonferroni)."
)
SHOWN = (TRUNCATION, "yarn", "dynamic_yarn", "self_extend", "rerope")
"""The methods in README.md: the control, and those that it recommends."""
SHORT, TAILS, LONGER = (REAL_MODEL / f"tail-{length}.json" for length in ("2k", "16k", "32k"))
WHOLE = REAL_MODEL / "longppl-16k.json"
"""The measurement of whole texts, and of their key tokens."""
PASSKEY = REAL_MODEL / "passkey.json"
H200 = results.DOCS / "data" / "gpu" / "h200.json"


# README.md and docs/choosing.md


def headline() -> str:
    """Return what README.md says below the picture of `draw_real_model`."""
    keys, (result, code) = retrieval(PASSKEY), added_cells("smollm2-code-h100")
    original, length = result.original or 0, result.settings.lengths[-1]
    longest, kinds = max(keys.settings.lengths), (("prefix", length), ("tail", length))
    whole, end, short = (
        {_method(label): bold_ratio(c) for (label, *k), c in code.items() if tuple(k) == kind}
        for kind in (*kinds, ("prefix", original))
    )
    columns = {
        f"new code of {length:,} tokens": whole,
        "its end": end,
        f"short texts, {original:,} tokens": {**short, "dynamic_yarn": "1 (as unpatched)"},
        f"passkeys in {longest:,} tokens": _answered(),
        "vLLM serves it": dict.fromkeys(SHOWN[1:], "by the plug-in")
        | {name: "itself" for name, row in expressed("vllm").items() if row.form},
        "prefill of 32,768 tokens": _prefill(32768),
    }
    best = code["self_extend (scale 2)", "prefix", length]
    assert best.differs < 0 < code["yarn (scale 2)", "prefix", length].differs
    assert code["yarn (scale 2)", "prefix", original].differs > 0
    cut = [r for r in keys.records if r.length == longest and (r.distance or 0) > original]
    answered = Counter(r.method for r in cut if r.correct)
    lost, found = (
        len([r for r in cut if r.method == TRUNCATION]),
        answered["self_extend (scale 2)"],
    )
    assert not answered[TRUNCATION]
    assert found == answered["yarn (scale 2)"]
    books = whole_texts("smollm2-books-h100", "novels", "yarn (auto)", "self_extend (auto)")
    intro = (
        f"SmolLM2-135M-Instruct has a context of {original:,} tokens. Nothing below changes its weights. **On new "
        "code at twice that length, `self_extend` is significantly better than cutting the text, by "
        f"{100 * (1 - (best.ratio or 1)):.1f} % over whole texts. It answers {found} of the {lost} passkeys that "
        "cutting loses. So does `yarn`, which makes short texts worse. On novels, cutting the text is as good.** "
        f"Perplexities are multiples of those of `{TRUNCATION}`, the unpatched model on the last {original:,} tokens: "
        "below 1 is a gain. Bold: significantly different; empty: not measured."
    )
    sources = (
        f"Code: {len(result.documents)} files that are newer than the model, on an H100. Beginnings of {books} "
        "([all tables](docs/real_model.md#new-code-and-whole-books-on-a-gpu)). Passkeys: on a CPU. Prefill: one layer "
        "of 8B size on an H200 with the best kernel, in multiples of plain attention. vLLM's plug-in runs on a CPU so "
        "far."
    )
    extended = ExtendResult.from_dict(results.read(REAL_MODEL / "extend.json"))
    advice = (
        "[`hf-posenc extend`](docs/extend.md#on-a-real-model) on ten files of new code: "
        f"{extended.lines()[0]} {_without_one(extended)}"
    )
    more = "[docs/real_model.md](docs/real_model.md) has all numbers and how they were measured."
    return f"{intro}\n\n{_by_method(columns, SHOWN)}\n\n- {sources}\n- {advice}\n\n{more}"


def _answered() -> dict[str, str]:
    """Return the passkeys that each method answers in the longest prompts."""
    found = results.passkeys(PASSKEY)[1]
    return {_method(m): f"{keys.answered} of {keys.samples}" for m, keys in found.items()}


def _prefill(length: int) -> dict[str, str]:
    """Return the least measured time of each method's prefill, as a multiple of plain attention's."""
    rows = [
        r for r in results.read(H200)["rows"] if (r["phase"], r["length"]) == ("prefill", length)
    ]
    times = {row["method"]: row["ms"] for row in rows if "ms" in row}
    return {
        "yarn": "1 (it changes a table)",
        **{
            method: f"{min(x for k, x in ms.items() if k != 'plain') / ms['plain']:.2f}"
            for method, ms in times.items()
        },
    }


def evidence() -> str:
    """Return a row for each method measured without training: on the embedded model at x4, on SmolLM2 at x2 and x4."""
    trained, original = perplexity(DEMO).original or 0, perplexity(TAILS).original
    first = f"embedded, {4 * trained:,} tokens: perplexity / {TRUNCATION}"
    columns = {first: _shares(DEMO, 4 * trained, TRUNCATION)}
    columns |= {f"SmolLM2, {head}": column for head, column in _real_columns().items()}
    methods = dict.fromkeys(method for column in columns.values() for method in column)
    intro = (
        f"The embedded model was trained at {trained:,} tokens and is extended to 4 times that; SmolLM2-135M "
        f"reads {original:,} by its config and is extended to twice and four times that ([intervals and documents]"
        "(real_model.md), [the demo](demo.md)). A ratio below 1 is a gain. Empty: not measured here. The methods' own "
        "pages have more."
    )
    ends = f"These are the ends of SmolLM2's documents. {_beyond_the_ends()}."
    return f"{intro}\n\n{_by_method(columns, methods)}\n\n{ends}"


def _by_method(columns: Mapping[str, Mapping[str, str]], methods: Iterable[str]) -> str:
    rows = [[f"`{m}`", *(column.get(m, "") for column in columns.values())] for m in methods]
    return markdown_table(["method", *columns], rows, numeric=True)


def _real_columns() -> dict[str, dict[str, str]]:
    """Return what was measured on SmolLM2 of each method: ratios of perplexities, and passkeys answered."""
    columns = {}
    for file, base in ((TAILS, TRUNCATION), (LONGER, TRUNCATION), (SHORT, UNPATCHED)):
        length = perplexity(file).settings.lengths[-1]
        columns[f"{length:,} tokens: perplexity / {base}"] = _shares(file, length, base)
    columns[f"{results.passkeys(PASSKEY)[0]:,} tokens: passkeys answered"] = _answered()
    return columns


def _shares(file: Path, length: int, baseline: str) -> dict[str, str]:
    """Return the tail perplexity of each method at a length, divided by that of a baseline."""
    scale, cells = length // (perplexity(file).original or length), results.tails(file, baseline)
    own = {label: c.perplexity for (label, n), c in cells.items() if n == length}
    shares = {_method(m, scale): number(value / own[baseline]) for m, value in own.items()}
    return {method: share for method, share in shares.items() if "(" not in method}


def _method(label: str, scale: int = 2) -> str:
    """Return a label without its scale, which is that of the length."""
    return re.sub(rf" \((auto|scale {max(2, scale)})\)", "", label)


def _beyond_the_ends() -> str:
    """Return ratios to truncation over the second half of texts, and over whole texts, with those that are worse."""
    shorter, length, whole, far = _whole_texts()

    def listed(records: Sequence[Record]) -> str:
        return ", ".join(
            f"`{cell.method}` {number(cell.ratio)}{_range(cell.ratio_interval)}"
            f"{', significantly worse' * (cell.differs > 0)}"
            for cell in summarize(records, baseline=TRUNCATION)
            if cell.method != TRUNCATION
        )

    return (
        f"For all tokens from {shorter + 1:,} to {length:,}, and not the ends alone, the ratios are nearer to 1: "
        f"{listed(far)}; for all {length:,} tokens: {listed(whole)}"
    )


@functools.cache
def _whole_texts() -> tuple[int, int, list[Record], list[Record]]:
    """Return the context length, the longest length, the records of that, and those of the tokens behind the first."""
    records = [r for r in perplexity(WHOLE).records if r.protocol == "prefix"]
    shorter, length = (end(r.length for r in records) for end in (min, max))
    first = {(r.method, r.document): r for r in records if r.length == shorter}
    whole = [r for r in records if r.length == length]
    sums = ("nats", "tokens", "weighted", "weight")
    far = [
        replace(r, **{s: getattr(r, s) - getattr(first[r.method, r.document], s) for s in sums})
        for r in whole
    ]
    return shorter, length, whole, far


# docs/real_model.md: perplexities


def tails() -> str:
    """Return tail perplexities at twice the context, and their ratios to truncation and yarn."""
    return _tails(TAILS, TRUNCATION, "yarn (scale 2)")


def longer() -> str:
    """Return tail perplexities at four times the context, and their ratios to truncation."""
    return _tails(LONGER, TRUNCATION)


def _tails(file: Path, *baselines: str) -> str:
    """Return tail perplexities of a file, their ratios to baselines, and those of every document."""
    result = perplexity(file)
    intro = (
        f"Tail perplexity of {result.model['name']}: the same last {result.settings.tail_tokens:,} tokens of "
        f"{len(result.documents)} documents. {RANGES}"
    )
    return f"{intro}\n\n{_perplexities(file, 'tail', *baselines)}"


def key_tokens() -> str:
    """Return perplexities of the tokens that need far context, and their ratios to truncation."""
    result = perplexity(WHOLE)
    evaluator, longest = result.settings.evaluator, max(result.settings.lengths)
    assert evaluator is not None
    counts = {
        Path(r.document).name: r.tokens
        for r in result.records
        if (r.protocol, r.method, r.length) == ("longppl", TRUNCATION, longest)
    }
    each = ", ".join(f"`{name}` {count}" for name, count in counts.items())
    intro = (
        f"Perplexity of the key tokens of {len(counts)} documents, all read from their beginning. The evaluator is the "
        f"same model with `{evaluator['patch']}`; its short context is {evaluator['short']:,} tokens. Key tokens: "
        f"{each}. {RANGES}"
    )
    return f"{intro}\n\n{_perplexities(WHOLE, 'longppl', TRUNCATION)}"


def _perplexities(file: Path, protocol: str, *baselines: str) -> str:
    """Return the perplexities of a file by a protocol, their ratios to baselines, and those of every document."""
    result = perplexity(file)
    lengths = result.settings.lengths
    records = [record for record in result.records if record.protocol == protocol]
    names = [Path(document["name"]).name for document in result.documents]
    labels = [entry.label for entry in result.candidates]
    loss = losses(records, lengths[-1])
    each = [[f"`{m}`", *(number(math.exp(loss[m][name])) for name in names)] for m in labels]
    by = f"{made_with(result.environment)}, {result.model['dtype']}"
    return "\n\n".join(
        [
            _compared(records, labels, lengths if protocol == "tail" else lengths[-1:], *baselines),
            f"At {lengths[-1]:,} tokens, by document:",
            markdown_table(["method", *names], each, numeric=True),
            f"{by}. [{file.name}](data/real_model/{file.name}) has every number.",
        ]
    )


def _compared(
    records: Sequence[Record], labels: Sequence[str], lengths: Sequence[int], *baselines: str
) -> str:
    """Return the table of perplexities by length, and of ratios to the baselines at the last one."""
    cells = {
        baseline: {(c.method, c.length): c for c in summarize(records, baseline=baseline)}
        for baseline in baselines
    }
    rows = []
    for label in labels:
        own = [cells[baselines[0]][label, length] for length in lengths]
        row = [f"`{label}`", *(f"{number(c.perplexity)}{_range(c.interval)}" for c in own)]
        for baseline in baselines:
            row += _ratio(cells[baseline][label, lengths[-1]], baseline)
        rows.append(row)
    head = ["method", *(f"at {n:,} tokens" for n in lengths)]
    head += [part for baseline in baselines for part in (f"/ {baseline}", "differs?")]
    numeric = [False, *[True] * len(lengths), *[True, False] * len(baselines)]
    return markdown_table(head, rows, numeric=numeric)


def whole() -> str:
    """Return perplexities of the first 16,384 tokens, and of their second half alone, and ratios to truncation."""
    shorter, length, *parts = _whole_texts()
    rows = [
        [
            f"`{c[0].method}`",
            *(f for one in c for f in (number(one.perplexity), *_ratio(one, TRUNCATION))),
        ]
        for c in zip(*(summarize(own, baseline=TRUNCATION) for own in parts), strict=True)
    ]
    head = ["method"]
    for what in (f"tokens 1 to {length:,}", f"tokens {shorter + 1:,} to {length:,}"):
        head += [what, "/ truncation", "differs?"]
    intro = (
        f"Perplexity of the first {length:,} tokens of the same {len(perplexity(WHOLE).documents)} documents "
        f"(`prefix`), and of their second half alone. `{TRUNCATION}` reads at most {shorter:,} tokens up to each. "
        "Ratios are paired, with intervals as above."
    )
    table = markdown_table(head, rows, numeric=[False, *2 * (True, True, False)])
    link = f"[{WHOLE.name}](data/real_model/{WHOLE.name}) has every number."
    return f"{intro}\n\n{table}\n\n{link}"


def copies() -> str:
    """Return what part of the scored tokens is copied from far back, beside the ratio of a method to truncation."""
    method, values = "dual_chunk", results.read(REAL_MODEL / f"{COPIED}.json")
    _, length, _, far = _whole_texts()
    loss = {
        f"tail of {n:,}": losses(perplexity(f).records, n)
        for n, f in ((16384, TAILS), (32768, LONGER))
    }
    loss["whole text"] = losses(far, length)
    parts = [part for part in values["rows"][0] if part != "document"]
    rows = []
    for row in values["rows"]:
        own = [f"`{row['document']}`"]
        for part in parts:
            gain = loss[part][method] - loss[part][TRUNCATION]
            own += [f"{100 * row[part]:.1f} %", number(math.exp(gain[row["document"]]), 3)]
        rows.append(own)
    head = ["document"]
    for part in parts:
        head += [
            f"{part.replace('whole text', 'second half')}: copied",
            f"`{method}` / {TRUNCATION}",
        ]
    intro = (
        f"*Copied*: the token ends a run of {values['run']} tokens that also stands {values['reach']:,} tokens or more "
        f"before it, and not nearer. `{TRUNCATION}` cannot see the first one."
    )
    return f"{intro}\n\n{markdown_table(head, rows, numeric=True)}"


def shorts() -> str:
    """Return what methods cost texts that the unpatched model can read: ratios at 2,048 and 8,192 tokens."""
    within, result = {2048: SHORT, 8192: TAILS}, perplexity(SHORT)
    cells = [(n, results.tails(file, UNPATCHED)) for n, file in within.items()]
    rows = [
        [f"`{label}`", *(field for n, own in cells for field in _ratio(own.get((label, n))))]
        for label in (entry.label for entry in result.candidates)
        if label != UNPATCHED
    ]
    head = ["method"]
    head += [part for length in within for part in (f"at {length:,} tokens", "differs?")]
    intro = (
        f"Perplexity divided by that of the unpatched model, on the same tokens of {len(result.documents)} documents, "
        "with paired 95 % intervals:"
    )
    return f"{intro}\n\n{markdown_table(head, rows, numeric=[False, True, False, True, False])}"


def tuned() -> str:
    """Return the fine-tuning, and perplexities and passkeys before and after it."""
    before, after = perplexity(TAILS), perplexity(REAL_MODEL / f"{TUNED}-tail.json")
    log = TrainingLog.read(REAL_MODEL / TUNED)
    assert log.label is not None
    first, last = log.label, f"{log.label}, fine-tuned"
    records = [
        *(r for r in before.records if r.method in (TRUNCATION, first)),
        *(replace(record, method=last) for record in after.records),
    ]
    run, lengths = log.run, before.settings.lengths
    intro = (
        f"{run['steps']} steps of {log.data['block_length']:,} tokens, {run['tokens_seen']:,} tokens in all, in "
        f"{run['seconds'] / 60:.0f} minutes of one core that other programs shared:"
    )
    paired = {c.length: c for c in summarize(records, baseline=first) if c.method == last}
    gains = " and ".join(
        f"{number(cell.ratio)}{_range(cell.ratio_interval)} at {length:,} tokens"
        for length in lengths
        if (cell := paired[length]).ratio is not None
    )
    kept = {c.length: _counts(c)[1] for c in retrieval(PASSKEY).cells if c.method == first}
    now = {c.length: _counts(c)[1] for c in retrieval(REAL_MODEL / f"{TUNED}-passkey.json").cells}
    keys = "; ".join(f"at {n:,} tokens {kept[n]} before and {now[n]} after" for n in now)
    command = textwrap.fill(
        f"{log.command} --output_dir {TUNED}", 110, subsequent_indent="    ", break_on_hyphens=False
    ).replace("\n", " \\\n")
    return "\n\n".join(
        [
            intro,
            f"```bash\n{command}\n```",
            _compared(records, [TRUNCATION, first, last], lengths, TRUNCATION),
            f"After by before, paired over the documents: {gains}. Passkeys ranked first of eleven: {keys}.",
        ]
    )


def agreement() -> str:
    """Return the log likelihoods of lm-evaluation-harness beside our own."""
    values = results.read(REAL_MODEL / f"{AGREEMENT}.json")
    rows = [
        [
            *(
                f"`{row['method']}`",
                f"{row['tokens']:,}",
                f"{row['nats']:.3f}",
                f"{row['harness']:.3f}",
            ),
            f"{abs(row['nats'] / row['harness'] - 1):.0e}",
        ]
        for row in values["rows"]
    ]
    head = ["method", "tokens", "hf_posenc, nats", "harness, nats", "relative difference"]
    ruler = values["ruler"]
    same = "the same text" if ruler["harness"] == ruler["generate"] else "another text"
    prompt = (
        f"On a prompt of {ruler['prompt_tokens']:,} tokens by the harness' own generator of RULER (`niah_single_1`), "
        f"the model with `yarn:scale=2` answers through the harness with {same} as through `generate`."
    )
    return f"{markdown_table(head, rows, numeric=True)}\n\n{prompt}"


# docs/real_model.md and docs/retrieval.md: retrieval


def passkeys() -> str:
    """Return the passkeys that methods answer, and those that they rank first, by length."""
    depths = len(retrieval(PASSKEY).settings.depths)
    intro = (
        f"Passkeys of five digits in filler text, one prompt at each of {depths} depths. *Answered*: every token of "
        "the key is the most probable one, given the blank in front of it. *Ranked first*: the key is the most "
        "probable of eleven (chance: one in eleven). In parentheses: 95 % intervals (Wilson), in percent."
    )
    return f"{intro}\n\n{_answers(PASSKEY)}\n\n{_pairs(PASSKEY, 'rerope')}"


def needles() -> str:
    """Return the answers of other tasks that methods give, and those that they rank first, by length."""
    result = retrieval(file := REAL_MODEL / "needles.json")
    chances = {cell.task: cell.chance for cell in result.cells if cell.chance is not None}
    each = ", ".join(f"`{task}` {100 * chance:.0f} %" for task, chance in chances.items())
    intro = (
        f"One prompt at each of {len(result.settings.depths)} depths. Chance to be ranked first: {each}. In "
        "parentheses: 95 % intervals (Wilson), in percent."
    )
    return f"{intro}\n\n{_answers(file)}"


def _answers(file: Path) -> str:
    """Return a table of the answers of each task under each method, by length."""
    result = retrieval(file)
    lengths = result.settings.lengths
    cells = {(c.task, c.method, c.length): c for c in result.cells}
    tasks = [*dict.fromkeys(cell.task for cell in result.cells)]
    rows = []
    for task in tasks:
        for label in (entry.label for entry in result.candidates):
            row = [f"`{task}`"] * (len(tasks) > 1) + [f"`{label}`"]
            for length in lengths:
                cell = cells.get((task, label, length))
                row += ["not measured"] * 2 if cell is None else [*_counts(cell)]
            rows.append(row)
    names = ["task"] * (len(tasks) > 1) + ["method"]
    counts = [f"{n:,}: {what}" for n in lengths for what in ("answered", "ranked first")]
    numeric = [False] * len(names) + [True] * len(counts)
    return markdown_table([*names, *counts], rows, numeric=numeric)


def _counts(cell: Answers) -> tuple[str, str]:
    """Return how many keys are answered, and how many are ranked first."""
    shares = ((cell.accuracy, cell.interval), (cell.first or 0.0, cell.first_interval))
    answered, first = (
        f"{share * cell.samples:.0f} of {cell.samples} ({percent_range(interval)})"
        for share, interval in shares
        if interval is not None
    )
    return answered, first


def _pairs(file: Path, first: str) -> str:
    """Return how a method's answers in the longest prompts differ from every other method's, prompt by prompt."""
    result = retrieval(file)
    length = max(result.settings.lengths)
    found: dict[str, set[object]] = {entry.label: set() for entry in result.candidates}
    for record in result.records:
        if record.length == length and record.correct:
            found[record.method].add((record.task, record.depth, record.sample))
    pairs, own = math.comb(len(found), 2), found.pop(first)
    words = [
        f"{len(own - other)} more than `{label}` and {len(other - own)} fewer "
        f"(p = {min(1.0, pairs * mcnemar(len(own - other), len(other - own))):.2g})"
        for label, other in found.items()
    ]
    return (
        f"Prompt by prompt at {length:,} tokens, `{first}` answers {'; '.join(words)}: exact McNemar tests, corrected "
        f"for all {pairs} pairs of methods (Bonferroni)."
    )


def generated() -> str:
    """Return the passkeys that methods generate, and how many of the same prompts they answer teacher-forced."""
    written = retrieval(REAL_MODEL / "generated.json")
    answered = {(r.method, r.length, r.depth): r.correct for r in retrieval(PASSKEY).records}
    rows = []
    for label in (entry.label for entry in written.candidates):
        row = [f"`{label}`"]
        for length in written.settings.lengths:
            own = [r for r in written.records if (r.method, r.length) == (label, length)]
            forced = sum(answered[label, length, r.depth] for r in own)
            row += [f"{right} of {len(own)}" for right in (sum(r.correct for r in own), forced)]
        rows.append(row)
    what = ("generated", "answered, blank given")
    head = ["method", *(f"{n:,}: {kind}" for n in written.settings.lengths for kind in what)]
    intro = (
        f"The prompts of {len(written.settings.depths)} of these depths, answered by greedy decoding of at most "
        f"{TASKS['passkey'].new_tokens} tokens; the first number in the text is taken. Beside it, how many of the same "
        "prompts are answered above."
    )
    return f"{intro}\n\n{markdown_table(head, rows, numeric=True)}"


def reasoning() -> str:
    """Return how often the answers of facts about people are found, for docs/retrieval.md."""
    result = retrieval(REAL_MODEL / "reasoning.json")
    rows = []
    for cell in result.cells:
        assert cell.first is not None
        assert cell.first_interval is not None
        assert cell.chance is not None
        first, n = round(cell.first * cell.samples), cell.samples
        probability = math.fsum(
            math.comb(n, k) * cell.chance**k * (1 - cell.chance) ** (n - k)
            for k in range(first, n + 1)
        )
        shares = f"{cell.first:.0%} ({percent_range(cell.first_interval)})", f"{cell.chance:.0%}"
        row = [f"`{cell.task}`", f"{cell.length:,}", f"{cell.accuracy:.0%}", *shares]
        rows.append([*row, f"{probability:.1g}"])
    samples = result.settings.samples * len(result.settings.depths)
    head = ["task", "tokens", "right outright", "ranked first", "by chance", "p"]
    return (
        f"{result.model['name']} without a patch, {samples} samples at {len(result.settings.depths)} depths. In "
        "parentheses: the 95 % Wilson interval. p: of at least so many by chance (binomial).\n\n"
        f"{markdown_table(head, rows, numeric=True)}\n\n"
        "[reasoning.json](data/real_model/reasoning.json) has every sample."
    )


# docs/recommend.md and docs/extend.md


def classes() -> str:
    """Return the order and the classes of `recommend`, and what was measured of each method, for docs/recommend.md."""
    result, cells = perplexity(TAILS), results.tails(TAILS)
    length = result.settings.lengths[-1]
    rows = []
    for option in results.read(REAL_MODEL / f"{ADVICE}.json")["options"]:
        own = [e for e in result.candidates if e.method == option["method"] and len(e.parts) == 1]
        if own:
            entry = next((e for e in own if e.spec == option["spec"]), own[0])
            kind = "attention" if option["attention"] else "frequencies"
            row = [f"`{option['spec']}`", option["works"], kind, f"`{entry.label}`"]
            rows.append([*row, *_ratio(cells[entry.label, length])])
    head = ["recommended", "class", "kind", "measured", f"/ truncation at {length:,}", "differs?"]
    return markdown_table(head, rows, numeric=[False, False, False, False, True, False])


def extended() -> str:
    """Return what `extend` printed about the model and ten documents, and its tables, for docs/extend.md."""
    result = ExtendResult.from_dict(results.read(REAL_MODEL / "extend.json"))
    printed = [f"$ {result.about['command']}", "", *result.lines()]
    lines = [textwrap.fill(line, 110, subsequent_indent="  ") for line in printed]
    text = "```text\n" + "\n".join(lines) + "\n```"
    tables = [f"{grid.caption}\n\n{to_markdown(grid)}" for grid in result.tables()]
    link = "[extend.json](data/real_model/extend.json) has every number."
    return "\n\n".join([text, *tables, f"{_strictness(result)} {link}"])


def _gains(result: ExtendResult) -> Any:
    """Return the winner's log ratio to truncation on each document that judged it."""
    assert result.perplexity is not None
    loss = losses(result.perplexity.records, result.lengths[1])
    return loss[result.winner] - loss[TRUNCATION]


def _without_one(result: ExtendResult) -> str:
    """Return how far the winner's ratio to truncation hangs on one of the documents that judged it."""
    gains = _gains(result)
    ratios = np.exp((gains.sum() - gains) / (len(gains) - 1))
    bound = 1 + result.bound
    return (
        f"Without `{ratios.idxmax()}` the ratio to truncation would be {ratios.max():.3f}, and the demand (at most "
        f"{bound:g}) {'' if ratios.max() <= bound else 'not '}met."
    )


def _strictness(result: ExtendResult) -> str:
    """Return how often the demand on long texts is met by a worse method, and missed by an equal one, in a sentence."""
    worse, allowed = 1.05, 1 + result.settings["max_regression"]
    logs = _gains(result)
    error = logs.std() / math.sqrt(len(logs))
    met, equal = (
        100 * statistics.NormalDist(math.log(truly), error).cdf(math.log(allowed))
        for truly in (worse, 1.0)
    )
    return (
        f"The winner's log ratios have a standard deviation of {number(logs.std(), 2)} over the documents. With that, "
        f"a method whose perplexity is truly {100 * (worse - 1):.0f} % above truncation's would have a ratio of at "
        f"most {allowed:g} in {met:.0f} % of such sets of {len(logs)} (normal distribution), and one that truly equals "
        f"truncation a ratio above it in {100 - equal:.0f} %."
    )


# Fields of tables


def _ratio(cell: Cell | None, baseline: str = "") -> list[str]:
    """Return a ratio with its interval, and its word; nothing for the baseline itself."""
    if cell is None:
        return ["not measured", ""]
    if cell.method == baseline:
        return ["", ""]
    assert cell.ratio is not None
    word = VERDICTS[cell.differs] if cell.differs else "no"
    if cell.ratio_interval == (1.0, 1.0):
        word = "identical"
    return [f"{number(cell.ratio)}{_range(cell.ratio_interval)}", word]


def _range(interval: Interval | None, digits: int = 4) -> str:
    return "" if interval is None else f" ({number_range(interval, digits)})"
