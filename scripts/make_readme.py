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

from hf_posenc.engines import ENGINES
from hf_posenc.evaluation.bench import BenchResult
from hf_posenc.evaluation.grid import markdown_table, number, number_range, to_markdown
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.tuning.results import TuningResult
from hf_posenc.evaluation.tuning.search import SearchResult
from hf_posenc.evaluation.tuning.sweep import SweepResult
from hf_posenc.methods import METHODS, get_method
from scripts import concept_pages, finetuned_page, gpu_table, method_pages, real_model_page
from scripts.method_pages import expressed
from scripts.results import (
    BENCHMARKS,
    DEMO,
    DOCS,
    EVIDENCE,
    ROOT,
    UPDATES,
    evidence,
    made_with,
    passkeys,
    perplexity,
    read,
    tails,
    update_mode,
)

PLAIN = "plain causal"
SHAPE = "heads 8/8"
"""The head layout whose rows the page shows."""


def demo() -> str:
    """Return the tail perplexities of the committed demo run, and its plot."""
    result, cells = perplexity(DEMO), tails(DEMO)
    lengths, labels = result.settings.lengths, [entry.label for entry in result.candidates]
    rows = [
        [
            label,
            *(f"{cells[label, n].perplexity:.2f}" if (label, n) in cells else "-" for n in lengths),
        ]
        for label in labels
    ]
    intro = (
        f"*Tail* perplexity by context length: that of the same {cells[labels[0], lengths[0]].tokens:,} tokens, the "
        f"ends of {len(result.documents)} held-out modules.\nThe model is a Llama trained at {result.original} tokens; "
        f"`auto` sets the scale to length / {result.original}:"
    )
    table = markdown_table(["method", *(f"{length:,}" for length in lengths)], rows, numeric=True)
    best = []
    for length in lengths[1:]:
        rivals = (c for (label, n), c in cells.items() if n == length and label != TRUNCATION)
        cell = min(rivals, key=lambda cell: cell.nats)
        assert cell.ratio is not None
        assert cell.ratio_interval is not None
        ratio, ends = number(cell.ratio, 3), number_range(cell.ratio_interval, 3)
        best.append(f"{cell.method} {ratio} ({ends}) at {length:,} tokens")
    verdict = (
        f"Perplexity of the best other method divided by that of the control, `{TRUNCATION}` (paired intervals, "
        f"which hold together in 95 % of samples for all methods): {'; '.join(best)}."
    )
    length, found = passkeys(BENCHMARKS / "retrieval.csv")
    shares = ", ".join(f"{label} {keys.first / keys.samples:.0%}" for label, keys in found.items())
    chance = found[TRUNCATION].chance
    retrieved = (
        f"Share of passkey prompts of {length:,} tokens in which the right passkey is the most probable of "
        f"{1 / chance:.0f}: {shares}; chance is {chance:.0%} ([retrieval.md](retrieval.md))."
    )
    made = f"Measured with {made_with(result.environment)}"
    link = "[data/demo/](data/demo/) has the intervals and every setting"
    plot = "![Perplexity by length](data/demo/perplexity.png)"
    return f"{intro}\n\n{table}\n\n- {verdict}\n- {retrieved}\n- {made}; {link}.\n\n{plot}"


def bench() -> str:
    """Return the table of the committed benchmark."""
    return to_markdown(BenchResult.from_dict(read(BENCHMARKS / "bench.json")).table())


def tuned(kind: type[TuningResult]) -> str:
    """Return the table and the notes of the committed sweep or search."""
    result = kind.from_dict(read(BENCHMARKS / f"{kind.kind}.json"))
    notes = "\n".join(f"- {note}" for note in result.notes())
    return f"{to_markdown(result.tables()[0])}\n\n{notes}"


def shipping() -> str:
    """Return the frequency methods by engine: how each is expressed there, on the embedded Llama."""
    served = {"sequence": 'with `update="request"`'}  # the other form is refused
    rows = [
        [
            m.name,
            *(expressed(engine)[m.name].form or "-" for engine in ENGINES),
            served.get(m.knobs().get("update"), "yes"),
        ]
        for m in METHODS
        if m.kind == "frequencies"
    ]
    return markdown_table(["method", *ENGINES, "vllm, plug-in"], rows)


def attention() -> str:
    """Return times of the attention engine as ratios to plain causal attention, and its memory."""
    runs, machine = _attention_runs()
    every = dict.fromkeys(kind for run in runs.values() for kind, _ in run)
    columns = [kind for kind in every if not kind.startswith(PLAIN)]
    rows = []
    for label, run in runs.items():
        ratios = ([f"{v['ratio']:.2f}" for kind, v in run if kind == column] for column in columns)
        rows.append([label, *(" / ".join(each) or "-" for each in ratios)])
    peaks = []
    for label in (next(iter(runs)), [label for label in runs if label.startswith("prefill")][-1]):
        own = [(kind, v["peak_mib"]) for kind, v in runs[label] if kind in (PLAIN, *columns)]
        peaks.append(f"{label}: {', '.join(f'{kind} {peak:,.0f}' for kind, peak in own)}")
    table = markdown_table(["tokens", *columns], rows, numeric=True)
    return f"{table}\n\nTwo values: frozen and trainable bias. {machine}.\nExtra memory in MiB, {'; '.join(peaks)}."


def attention_summary() -> str:
    """Return the range of those ratios, for each kind of method."""
    runs, machine = _attention_runs()

    def between(*kinds: str) -> str:
        ratios = [v["ratio"] for run in runs.values() for kind, v in run if kind in kinds]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    return (
        "Times as multiples of plain causal attention (PyTorch's fused kernel), over prefill, decode and training: "
        f"{between('two bands')} for two rotary bands (ReRoPE), {between('distance bias')} for distance biases and "
        f"{between('ALiBi')} for ALiBi (prefill only). The usual implementations build whole score or bias matrices "
        f"and take {between('two score matrices', 'materialised bias')}. {machine}."
    )


def _attention_runs() -> tuple[dict[str, list[tuple[str, dict[str, float]]]], str]:
    """Return the measured kinds of every run of `SHAPE`, and the machine."""
    result: dict[str, Any] = read(BENCHMARKS / "attention.json")
    runs = {
        label.partition(",")[0]: [(re.split(r",| \(", name)[0], v) for name, v in run.items()]
        for label, run in result["results"].items()
        if SHAPE in label
    }
    machine = result["machine"]
    return runs, f"One thread of {machine['processor_model']}, torch {machine['torch']}"


def updates() -> str:
    """Return the update modes of the dynamic methods: whole texts, buckets, generation."""
    result: dict[str, Any] = read(UPDATES)
    whole = {
        (*update_mode(row["method"]), row["protocol"], row["length"]): row
        for row in result["whole_texts"]
    }
    families = list(dict.fromkeys(key[0] for key in whole if key[1] == "row"))
    buckets = sorted({key[2] for key in whole if key[2] is not None})
    lengths, cached = result["settings"]["lengths"][1:], result["cached"]
    protocols = ("tail", "prefix")

    def both(family: str, protocol: str, length: int) -> str:
        """Return the perplexities by sequence and by row, the second bold where their difference is significant."""
        published = whole[family, "sequence", None, protocol, length]
        row = whole[family, "row", cached["bucket"], protocol, length]
        low, high = row["ratio_interval"]
        better = f"{row['perplexity']:.2f}" if low <= 1 <= high else f"**{row['perplexity']:.2f}**"
        return f"{published['perplexity']:.2f}, {better}"

    def mean(family: str, bucket: int, protocol: str) -> str:
        keys = [(family, "row", bucket, protocol, length) for length in lengths]
        return f"{statistics.geometric_mean(whole[key]['ratio'] for key in keys):.2f}"

    tables = []
    for protocol in protocols:
        rows = [[f"`{f}`", *(both(f, protocol, n) for n in lengths)] for f in families]
        tables.append(([protocol, *(f"{n:,}" for n in lengths)], rows))
    rows = []
    for family in families:
        means = ([mean(family, bucket, p) for p in protocols] for bucket in buckets)
        rows.append([f"`{family}`", *map(" / ".join, means)])
    tables.append((["bucket", *map(str, buckets)], rows))
    steps = {
        (*update_mode(r["method"])[:2], r["feed"], r["length"]): r["perplexity"]
        for r in result["generation"]
    }
    rows, places = [], [(feed, n) for feed in ("steps", "prompt") for n in cached["lengths"]]
    for family in dict.fromkeys(key[0] for key in steps):
        forward = [whole[family, "sequence", None, "tail", n]["perplexity"] for _, n in places]
        rows.append([f"`{family}`", "one forward", *(f"{value:.2f}" for value in forward)])
        for mode in dict.fromkeys(key[1] for key in steps):
            values = (steps[(family, mode, *place)] for place in places)
            rows.append(["", f"`{mode}`", *(f"{value:.2f}" for value in values)])
    feeds = {"steps": "in steps", "prompt": "after a prompt"}
    tables.append((["with a cache", "mode", *(f"{n:,} {feeds[feed]}" for feed, n in places)], rows))
    return "\n\n".join(markdown_table(*table, numeric=True) for table in tables)


def serving_cost() -> str:
    """Return the cost of a request to vLLM beside the unpatched model, as multiples and in MiB."""
    result: dict[str, Any] = read(BENCHMARKS / "serving.json")
    runs, machine = result["results"], result["machine"]
    longest = [cases for cases in runs.values() if "peak_mib" in cases["unpatched"]][-1]
    rows = [
        [f"`{name}`" if name != "unpatched again" else name]
        + [f"{cases[name]['ratio']:.2f}" for cases in runs.values()]
        + [f"{round(longest[name]['peak_mib'] - longest['unpatched']['peak_mib'])} MiB"]
        for name in longest
        if name != "unpatched"
    ]
    table = markdown_table(["", *runs, "memory more"], rows, numeric=True)
    return f"{table}\n\nOne thread of {machine['processor_model']}, torch {machine['torch']}."


Parts = Mapping[str, Callable[..., str]]
REAL_MODEL_PAGES = (
    *("README.md", "docs/real_model.md", "docs/choosing.md", "docs/extend.md"),
    *("docs/recommend.md", "docs/retrieval.md"),
)
CONCEPTS = ("cache", "extrapolation", "encodings", "rope", "scale")
METHOD_PARTS: Parts = {
    "facts": lambda name: method_pages.method_facts(get_method(name)),
    "measured": lambda name: method_pages.measured(get_method(name)),
}
PAGES: dict[Path, Parts] = {
    **{ROOT / page: vars(real_model_page) for page in REAL_MODEL_PAGES},
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
