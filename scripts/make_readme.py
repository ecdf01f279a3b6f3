"""Fill the generated parts of README.md and of pages in docs/ from the committed results and the methods.

python -m scripts.make_readme            write them
python -m scripts.make_readme --check    fail where they are not what they should be

The part between `<!-- generated: NAME WORDS -->` and `<!-- end -->` is what the function NAME of `PAGES` returns. The
evidence that `recommend` prints is written too.
"""

from __future__ import annotations

import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas

from hf_posenc.engines import ENGINES
from hf_posenc.evaluation.bench import BenchResult
from hf_posenc.evaluation.grid import markdown_table, number, number_range, to_markdown
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.tuning.search import SearchResult
from hf_posenc.evaluation.tuning.sweep import SweepResult, TuningResult
from hf_posenc.methods import METHODS, get_method
from scripts import concept_pages, evidence_page, finetuned_page, gpu_table, headline, method_pages
from scripts.method_pages import expressed
from scripts.results import (
    BENCHMARKS,
    DEMO,
    DOCS,
    EVIDENCE,
    ROOT,
    UPDATES,
    at,
    evidence,
    made_with,
    passkeys,
    perplexity,
    read,
    summary,
    table,
    update_mode,
)

PLAIN = "plain causal"
SHAPE = "heads 8/8"
"""The head layout whose rows the page shows."""


def demo() -> str:
    """Return the tail perplexities of the committed demo run, and its plot."""
    result = perplexity(DEMO)
    cells = summary(record for record in result.records if record.protocol == "tail")
    intro = (
        f"*Tail* perplexity by context length: that of the same {cells.tokens[0]:,} tokens, the ends of "
        f"{len(result.documents)} held-out modules.\nThe model is a Llama trained at {result.original} tokens; `auto` "
        f"sets the scale to length / {result.original}:"
    )
    columns = {
        f"{n:,}": at(cells, "tail", n, "perplexity").map("{:.2f}".format)
        for n in result.settings.lengths
    }
    rivals = cells[(cells.method != TRUNCATION) & (cells.length > result.original)]
    best = [
        f"{c.method} {number(c.ratio, 3)} ({number_range(c.ratio_interval, 3)}) at {c.length:,} tokens"
        for c in rivals.loc[rivals.groupby("length").nats.idxmin()].itertuples()
    ]
    verdict = (
        f"Perplexity of the best other method divided by that of the control, `{TRUNCATION}` (paired intervals, "
        f"which hold together in 95 % of samples for all methods): {'; '.join(best)}."
    )
    length, found = passkeys(BENCHMARKS / "retrieval.csv")
    shares = ", ".join(
        f"{keys.Index} {keys.ranked / keys.samples:.0%}" for keys in found.itertuples()
    )
    chance = found.chance[TRUNCATION]
    retrieved = (
        f"Share of passkey prompts of {length:,} tokens in which the right passkey is the most probable of "
        f"{1 / chance:.0f}: {shares}; chance is {chance:.0%} ([retrieval.md](retrieval.md))."
    )
    made = f"Measured with {made_with(result.environment)}"
    link = "[data/demo/](data/demo/) has the intervals and every setting"
    plot = "![Perplexity by length](data/demo/perplexity.png)"
    return f"{intro}\n\n{table(columns)}\n\n- {verdict}\n- {retrieved}\n- {made}; {link}.\n\n{plot}"


def bench() -> str:
    """Return the tables of the committed benchmark."""
    grids = BenchResult.from_dict(read(BENCHMARKS / "bench.json")).tables()
    return "\n\n".join(f"{grid.title}:\n\n{to_markdown(grid)}" for grid in grids)


def tuned(kind: type[TuningResult]) -> str:
    """Return the table and the notes of the committed sweep or search."""
    result = kind.from_dict(read(BENCHMARKS / f"{kind.kind}.json"))
    notes = "\n".join(f"- {note}" for note in result.notes())
    return f"{to_markdown(result.tables()[0])}\n\n{notes}"


def shipping() -> str:
    """Return the frequency methods by engine: how each is expressed there, on the embedded Llama."""
    served = {"sequence": 'with `update="row"` or `"request"`'}  # "sequence" is refused
    rows = []
    for m in (m for m in METHODS if m.kind == "frequencies"):
        forms = (expressed(engine)[m.name].form or "-" for engine in ENGINES)
        rows.append([m.name, *forms, served.get(str(m.knobs().get("update")), "yes")])
    return markdown_table(["method", *ENGINES, "vllm, plug-in"], rows)


def attention() -> str:
    """Return times of the attention engine as ratios to plain causal attention, and its memory."""
    runs, machine = _attention_runs()
    kinds = [kind for kind in runs.kind.unique() if not kind.startswith(PLAIN)]
    ratios = runs.ratio.map("{:.2f}".format).groupby([runs.run, runs.kind], sort=False)
    wide = ratios.agg(" / ".join).unstack(sort=False)[kinds].fillna("-")
    peaks = []
    for label in (runs.run[0], [label for label in wide.index if label.startswith("prefill")][-1]):
        own = runs[(runs.run == label) & runs.kind.isin([PLAIN, *kinds])]
        each = ", ".join(f"{row.kind} {row.peak_mib:,.0f}" for row in own.itertuples())
        peaks.append(f"{label}: {each}")
    rows = markdown_table(
        ["tokens", *kinds], [[n, *r] for n, *r in wide.itertuples()], numeric=True
    )
    return f"{rows}\n\nTwo values: frozen and trainable bias. {machine}.\nExtra memory in MiB, {'; '.join(peaks)}."


def attention_summary() -> str:
    """Return the range of those ratios, for each kind of method."""
    runs, machine = _attention_runs()

    def between(*kinds: str) -> str:
        ratios = runs.ratio[runs.kind.isin(kinds)]
        return f"{ratios.min():.2f} to {ratios.max():.2f}"

    return (
        "Times as multiples of plain causal attention (PyTorch's fused kernel), over prefill, decode and training: "
        f"{between('two bands')} for two rotary bands (ReRoPE), {between('distance bias')} for distance biases and "
        f"{between('ALiBi')} for ALiBi (prefill only). The usual implementations build whole score or bias matrices "
        f"and take {between('two score matrices', 'materialised bias')}. {machine}."
    )


def _attention_runs() -> tuple[Any, str]:
    """Return a frame of the measured kinds of every run of `SHAPE`, and the machine."""
    result: dict[str, Any] = read(BENCHMARKS / "attention.json")
    rows = [
        {"run": label.partition(",")[0], "kind": re.split(r",| \(", name)[0], **values}
        for label, run in result["results"].items()
        if SHAPE in label
        for name, values in run.items()
    ]
    return pandas.DataFrame(rows), _machine(result["machine"])


def _machine(machine: Mapping[str, str]) -> str:
    return f"One thread of {machine['processor_model']}, torch {machine['torch']}"


def updates() -> str:
    """Return the update modes of the dynamic methods: whole texts, buckets, generation."""
    result: dict[str, Any] = read(UPDATES)
    whole, steps = (pandas.DataFrame(result[name]) for name in ("whole_texts", "generation"))
    for frame in (whole, steps):
        frame[["family", "mode", "bucket"]] = [update_mode(label) for label in frame.method]
        frame["shown"] = frame.perplexity.map("{:.2f}".format)
    key, cached = ["protocol", "length", "family"], result["cached"]
    plain = whole[(whole["mode"] == "sequence") & whole.bucket.isna()].set_index(key).shown
    rows = whole[(whole["mode"] == "row") & (whole.length > whole.length.min())]
    best = rows[rows.bucket == cached["bucket"]].set_index(key)
    bold = best.ratio_interval.map(lambda ends: "" if ends[0] <= 1 <= ends[1] else "**")
    both = plain[best.index] + ", " + bold + best.shown + bold
    parts = [
        table({f"{n:,}": own.xs((p, n), level=key[:2]) for n, own in both.groupby("length")}, p)
        for p in ("tail", "prefix")
    ]
    means = rows.groupby(["protocol", "bucket", "family"], sort=False).ratio
    texts = means.agg(statistics.geometric_mean).map("{:.2f}".format)
    buckets = sorted(rows.bucket.unique())
    tail, prefix = (texts.xs(protocol, level="protocol") for protocol in ("tail", "prefix"))
    each = tail + " / " + prefix
    parts.append(table({f"{b:g}": each.xs(b, level="bucket") for b in buckets}, "bucket"))
    columns = {}
    for feed, words in (("steps", "in steps"), ("prompt", "after a prompt")):
        for length in cached["lengths"]:
            own = steps[(steps.feed == feed) & (steps.length == length)]
            forward = plain.xs(("tail", length), level=key[:2])[own.family.unique()]
            modes = own.pivot(index="family", columns="mode", values="shown")
            wide = modes.assign(**{"one forward": forward})[["one forward", *own["mode"].unique()]]
            columns[f"{length:,} {words}"] = wide.loc[forward.index].stack()
    return "\n\n".join([*parts, table(columns, "with a cache", "mode")])


def serving_cost() -> str:
    """Return the cost of a request to vLLM beside the unpatched model, as multiples and in MiB."""
    result: dict[str, Any] = read(BENCHMARKS / "serving.json")
    runs = {name: pandas.DataFrame(cases).T for name, cases in result["results"].items()}
    columns = {name: run.ratio.drop("unpatched").map("{:.2f}".format) for name, run in runs.items()}
    peaks = [run.peak_mib for run in runs.values() if "peak_mib" in run][-1]
    more = (peaks - peaks["unpatched"]).drop("unpatched").astype(float)
    columns["memory more"] = (more.round() + 0).map("{:.0f} MiB".format)
    return f"{table(columns, 'method')}\n\n{_machine(result['machine'])}."


Parts = Mapping[str, Callable[..., str]]
QUOTING = ("choosing", "extend", "recommend", "retrieval")
CONCEPTS = ("cache", "extrapolation", "encodings", "rope", "scale")
METHOD_PARTS: Parts = {
    "facts": lambda name: method_pages.method_facts(get_method(name)),
    "measured": lambda name: method_pages.measured(get_method(name)),
}
PAGES: dict[Path, Parts] = {
    ROOT / "README.md": {"headline": headline.headline},
    ROOT / "CONTRIBUTING.md": {"commands": evidence_page.commands},
    DOCS / "evidence.md": vars(evidence_page),
    **{DOCS / f"{name}.md": vars(evidence_page) | vars(headline) for name in QUOTING},
    DOCS / "demo.md": {"demo": demo},
    DOCS / "bench.md": {"bench": bench},
    DOCS / "sweep.md": {kind.kind: partial(tuned, kind) for kind in (SweepResult, SearchResult)},
    DOCS / "methods.md": {"index": method_pages.index},
    DOCS / "shipping.md": {"shipping": shipping},
    DOCS / "finetuning.md": vars(finetuned_page),
    DOCS / "patching.md": {"attention_summary": attention_summary, "attention": attention},
    DOCS / "gpu.md": {"backends": gpu_table.table, "measured": gpu_table.measured},
    DOCS / "updates.md": {"updates": updates},
    DOCS / "vllm.md": {"served": method_pages.served, "serving_cost": serving_cost},
    **{DOCS / "concepts" / f"{name}.md": vars(concept_pages) for name in CONCEPTS},
    **{DOCS / "methods" / f"{m.name}.md": METHOD_PARTS for m in METHODS},
}
"""The pages with generated parts, and the functions that make them."""
PART = re.compile(r"(<!-- generated: (?P<call>[^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: Path) -> str:
    """Return a page with its generated parts made anew."""

    def made(match: re.Match[str]) -> str:
        name, *words = match["call"].split()
        return f"{match[1]}{wrapped(PAGES[page][name](*words))}\n{match[3]}"

    text, count = PART.subn(made, page.read_text(encoding="utf-8"))
    if not count:
        raise SystemExit(f"{page.name} has no generated part.")
    return text


def wrapped(text: str) -> str:
    """Wrap paragraphs at 120 characters; tables and code keep their lines."""
    lines, code = [], False
    for line in text.split("\n"):
        code ^= line.startswith("```")
        keep = code or len(line) <= 120 or line.startswith(("|", "!", "```"))
        lines += [line] if keep else textwrap.wrap(line, 120, break_on_hyphens=False)
    return "\n".join(lines)


if __name__ == "__main__":
    for file in (*PAGES, EVIDENCE):
        before = file.read_text(encoding="utf-8")
        after = filled(file) if file in PAGES else evidence()
        if "--check" not in sys.argv[1:]:
            file.write_text(after, encoding="utf-8")
        elif before != after:
            sys.exit(f"{file.name} is not up to date: run python -m scripts.make_readme.")
