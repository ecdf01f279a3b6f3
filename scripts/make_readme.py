"""Fill the generated parts of README.md and of pages in docs/ from the committed results and the methods.

python -m scripts.make_readme            write them
python -m scripts.make_readme --check    fail where they are not what they should be
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_posenc.engines import ENGINES
from hf_posenc.evaluation.bench import BenchResult
from hf_posenc.evaluation.grid import markdown_table, number, number_range, to_markdown
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import Record, summarize
from hf_posenc.evaluation.tuning.results import TuningResult
from hf_posenc.evaluation.tuning.search import SearchResult
from hf_posenc.evaluation.tuning.sweep import SweepResult
from hf_posenc.methods import METHODS
from scripts import results
from scripts.concept_pages import attention as attention_by_distance
from scripts.concept_pages import digits, divisors, properties, stale, unfinished
from scripts.finetuned_page import conversions, example, positions, ways
from scripts.gpu_table import measured, table
from scripts.method_pages import expressed
from scripts.method_pages import pages as method_pages
from scripts.real_model_page import (
    agreement,
    classes,
    copies,
    evidence,
    extended,
    generated,
    headline,
    key_tokens,
    longer,
    needles,
    passkeys,
    reasoning,
    shorts,
    tails,
    tuned,
    whole,
)
from scripts.results import BENCHMARKS, DEMO, DOCS, ROOT, UPDATES, made_with, read

CONCEPTS = DOCS / "concepts"
PLAIN = "plain causal"
SHAPE = "heads 8/8"
"""The head layout whose rows the README shows."""


def demo() -> str:
    """The tail perplexities of the committed demo run, and its plot."""
    result: dict[str, Any] = read(DEMO)
    lengths = result["settings"]["lengths"]
    cells = {(c["method"], c["protocol"], c["length"]): c for c in result["summary"]}
    rows = [
        [label, *(_number(cells.get((label, "tail", length))) for length in lengths)]
        for label in (method["label"] for method in result["methods"])
    ]
    original = result["original_max_position_embeddings"]
    documents = len(result["documents"])
    scored = cells[rows[0][0], "tail", lengths[0]]["tokens"]
    intro = (
        f"*Tail* perplexity by context length: that of the same {scored:,} tokens, the ends of {documents} held-out "
        f"modules.\nThe model is a Llama trained at {original} tokens; `auto` sets the scale to length / {original}:"
    )
    table = markdown_table(["method", *(f"{length:,}" for length in lengths)], rows, numeric=True)
    verdict = _verdict(result, lengths)
    plot = "![Perplexity by length](data/demo/perplexity.png)"
    made = f"Measured with {made_with(result['environment'])}"
    link = "[data/demo/](data/demo/) has the intervals and every setting"
    return f"{intro}\n\n{table}\n\n- {verdict}\n- {_passkey()}\n- {made}; {link}.\n\n{plot}"


def _passkey() -> str:
    """The share of right passkeys that methods rank first, in the longest prompts of the committed run."""
    length, found = results.passkeys(BENCHMARKS / "retrieval.csv")
    shares = ", ".join(f"{label} {keys.first / keys.samples:.0%}" for label, keys in found.items())
    chance = found[TRUNCATION].chance
    return (
        f"Share of passkey prompts of {length:,} tokens in which the right passkey is the most probable of "
        f"{1 / chance:.0f}: {shares}; chance is {chance:.0%} ([retrieval.md](retrieval.md))."
    )


def bench() -> str:
    """The table of the committed benchmark."""
    result = BenchResult.from_dict(read(BENCHMARKS / "bench.json"))
    return to_markdown(result.table())


def sweep() -> str:
    """The table and the notes of the committed sweep."""
    return _tuned(SweepResult)


def search() -> str:
    """The table and the notes of the committed search."""
    return _tuned(SearchResult)


def _tuned(kind: type[TuningResult]) -> str:
    result = kind.from_dict(read(BENCHMARKS / f"{kind.kind}.json"))
    notes = "\n".join(f"- {note}" for note in result.notes())
    return f"{to_markdown(result.tables()[0])}\n\n{notes}"


def index() -> str:
    """A row per method, with a link to its section."""
    rows = [
        [
            f"[`{m.name}`](methods/{m.name}.md)",
            m.summary,
            m.needs,
            ", ".join(f"`{a}`" for a in m.aliases),
        ]
        for m in METHODS
    ]
    return markdown_table(["method", "in one line", "needs", "alias"], rows)


def shipping() -> str:
    """The frequency methods by engine: how each is expressed there, on the embedded Llama."""
    rows = [
        [m.name, *(expressed(engine)[m.name].form or "-" for engine in ENGINES)]
        for m in METHODS
        if m.kind == "frequencies"
    ]
    return markdown_table(["method", *ENGINES], rows)


def attention() -> str:
    """Times of the attention engine as ratios to plain causal attention, and its memory."""
    runs, machine = _attention_runs()
    kinds_of_runs = dict.fromkeys(kind for run in runs.values() for kind, _ in run)
    columns = [kind for kind in kinds_of_runs if not kind.startswith(PLAIN)]
    rows = []
    for label, run in runs.items():
        cells = [
            " / ".join(f"{values['ratio']:.2f}" for kind, values in run if kind == column)
            for column in columns
        ]
        rows.append([label, *(cell or "-" for cell in cells)])
    table = markdown_table(["tokens", *columns], rows, numeric=True)
    peaks = []
    for label in (next(iter(runs)), [label for label in runs if label.startswith("prefill")][-1]):
        extra = ", ".join(
            f"{kind} {values['peak_mib']:,.0f}"
            for kind, values in runs[label]
            if kind == PLAIN or not kind.startswith(PLAIN)
        )
        peaks.append(f"{label}: {extra}")
    return f"{table}\n\nTwo values: frozen and trainable bias. {machine}.\nExtra memory in MiB, {'; '.join(peaks)}."


def attention_summary() -> str:
    """The range of those ratios, for each kind of method."""
    runs, machine = _attention_runs()
    ratios: dict[str, list[float]] = {}
    for kind, values in (row for run in runs.values() for row in run):
        ratios.setdefault(kind, []).append(values["ratio"])

    def between(*kinds: str) -> str:
        every = [ratio for kind in kinds for ratio in ratios[kind]]
        return f"{min(every):.2f} to {max(every):.2f}"

    return (
        "Times as multiples of plain causal attention (PyTorch's fused kernel), over prefill, decode and training: "
        f"{between('two bands')} for two rotary bands (ReRoPE), {between('distance bias')} for distance biases and "
        f"{between('ALiBi')} for ALiBi (prefill only). The usual implementations build whole score or bias matrices "
        f"and take {between('two score matrices', 'materialised bias')}. {machine}."
    )


def _attention_runs() -> tuple[dict[str, list[tuple[str, dict[str, float]]]], str]:
    """The measured kinds of every run of `SHAPE`, and the machine."""
    result: dict[str, Any] = read(BENCHMARKS / "attention.json")
    runs = {
        label.partition(",")[0]: [
            (re.split(r",| \(", name)[0], values) for name, values in run.items()
        ]
        for label, run in result["results"].items()
        if SHAPE in label
    }
    machine = result["machine"]
    return runs, f"One thread of {machine['processor_model']}, torch {machine['torch']}"


def _verdict(result: dict[str, Any], lengths: list[int]) -> str:
    """The best method against the control at every length past the trained one."""
    records = [Record(**record) for record in result["records"] if record["protocol"] == "tail"]
    control = [record for record in records if record.method == TRUNCATION]
    others = [record for record in records if record.method != TRUNCATION]
    cells = summarize([*control, *others])
    sentences = []
    for length in lengths[1:]:
        rivals = [cell for cell in cells if cell.length == length and cell.method != TRUNCATION]
        best = min(rivals, key=lambda cell: cell.nats)
        assert best.ratio is not None
        assert best.ratio_interval is not None
        ratio, ends = number(best.ratio, 3), number_range(best.ratio_interval, 3)
        sentences.append(f"{best.method} {ratio} ({ends}) at {length:,} tokens")
    return (
        f"Perplexity of the best other method divided by that of the control, `{TRUNCATION}` (paired intervals, "
        f"which hold together in 95 % of samples for all methods): {'; '.join(sentences)}."
    )


def updates() -> str:
    """The update modes of the dynamic methods: whole texts, buckets, generation."""
    result: dict[str, Any] = read(UPDATES)
    whole = {(*_mode(row), row["protocol"], row["length"]): row for row in result["whole_texts"]}
    families = list(dict.fromkeys(key[0] for key in whole if key[1] == "row"))
    buckets = sorted({key[2] for key in whole if key[2] is not None})
    lengths = result["settings"]["lengths"][1:]
    chosen = result["cached"]["bucket"]
    parts = []
    for protocol in ("tail", "prefix"):
        rows = [
            [f"`{family}`", *(_pair(whole, family, chosen, protocol, length) for length in lengths)]
            for family in families
        ]
        parts.append(
            markdown_table([protocol, *(f"{length:,}" for length in lengths)], rows, numeric=True)
        )
    rows = []
    for family in families:
        cells = []
        for bucket in buckets:
            means = [
                math.exp(statistics.fmean(math.log(whole[key]["ratio"]) for key in keys))
                for protocol in ("tail", "prefix")
                for keys in [[(family, "row", bucket, protocol, length) for length in lengths]]
            ]
            cells.append(" / ".join(f"{mean:.2f}" for mean in means))
        rows.append([f"`{family}`", *cells])
    parts.append(markdown_table(["bucket", *map(str, buckets)], rows, numeric=True))
    return "\n\n".join([*parts, _generation(result, whole)])


def _pair(whole: dict[Any, Any], family: str, bucket: int, protocol: str, length: int) -> str:
    """Perplexity in the modes "sequence" and "row"; bold where their difference is beyond chance."""
    published = whole[family, "sequence", None, protocol, length]
    row = whole[family, "row", bucket, protocol, length]
    low, high = row["ratio_interval"]
    better = f"{row['perplexity']:.2f}"
    return f"{published['perplexity']:.2f}, {better if low <= 1 <= high else f'**{better}**'}"


def _generation(result: dict[str, Any], whole: dict[Any, Any]) -> str:
    cached = {
        (*_mode(row)[:2], row["feed"], row["length"]): row["perplexity"]
        for row in result["generation"]
    }
    lengths = result["cached"]["lengths"]
    rows = []
    for family in dict.fromkeys(key[0] for key in cached):
        forward = [whole[family, "sequence", None, "tail", n]["perplexity"] for n in lengths]
        rows.append(
            [f"`{family}`", "one forward", *(f"{value:.2f}" for value in (*forward, *forward))]
        )
        for mode in dict.fromkeys(key[1] for key in cached):
            values = [
                cached[family, mode, feed, n] for feed in ("steps", "prompt") for n in lengths
            ]
            rows.append(["", f"`{mode}`", *(f"{value:.2f}" for value in values)])
    columns = [f"{n:,} {feed}" for feed in ("in steps", "after a prompt") for n in lengths]
    return markdown_table(["with a cache", "mode", *columns], rows, numeric=True)


def _mode(row: dict[str, Any]) -> tuple[str, str, int | None]:
    """Family, update mode and bucket from a label such as `dynamic_ntk (scale 2, update row, bucket 64)`."""
    found = re.fullmatch(r"(\w+)(?: \((.*)\))?", row["method"])
    assert found is not None
    options = dict(part.rsplit(" ", 1) for part in filter(None, (found[2] or "").split(", ")))
    mode, bucket = options.pop("update", ""), options.pop("bucket", None)
    rest = ", ".join(" ".join(option) for option in options.items())
    return (
        f"{found[1]} ({rest})" if rest else found[1],
        mode,
        None if bucket is None else int(bucket),
    )


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"headline": headline},
    DOCS / "demo.md": {"demo": demo},
    DOCS / "choosing.md": {"evidence": evidence},
    DOCS / "bench.md": {"bench": bench},
    DOCS / "sweep.md": {"sweep": sweep, "search": search},
    DOCS / "methods.md": {"index": index},
    DOCS / "shipping.md": {"shipping": shipping},
    DOCS / "extend.md": {"extended": extended},
    DOCS / "finetuning.md": {
        "example": example,
        "ways": ways,
        "positions": positions,
        "conversions": conversions,
    },
    DOCS / "patching.md": {"attention_summary": attention_summary, "attention": attention},
    DOCS / "gpu.md": {"backends": table, "measured": measured},
    DOCS / "real_model.md": {
        "tails": tails,
        "whole": whole,
        "copies": copies,
        "longer": longer,
        "key_tokens": key_tokens,
        "shorts": shorts,
        "passkeys": passkeys,
        "generated": generated,
        "needles": needles,
        "tuned": tuned,
        "agreement": agreement,
    },
    DOCS / "recommend.md": {"classes": classes},
    DOCS / "retrieval.md": {"reasoning": reasoning},
    CONCEPTS / "cache.md": {"stale": stale},
    CONCEPTS / "extrapolation.md": {"unfinished": unfinished, "attention": attention_by_distance},
    CONCEPTS / "encodings.md": {"properties": properties},
    CONCEPTS / "rope.md": {"digits": digits},
    CONCEPTS / "scale.md": {"divisors": divisors},
    DOCS / "updates.md": {"updates": updates},
    **method_pages(),
}


def filled(page: Path) -> str:
    """A page with its generated parts made anew."""
    text = page.read_text(encoding="utf-8")
    for name, make in PAGES[page].items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        part = wrapped(make())
        text, count = pattern.subn(lambda m, part=part: f"{m[1]}{part}\n{m[2]}", text)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{page.name} has {count} parts named {name!r}, not 1.")
    return text


def wrapped(text: str) -> str:
    """Wrap paragraphs at 120 characters; tables and code keep their lines."""
    lines, code = [], False
    for line in text.split("\n"):
        code ^= line.startswith("```")
        keep = code or len(line) <= 120 or line.startswith(("|", "!", "```"))
        lines += [line] if keep else textwrap.wrap(line, 120, break_on_hyphens=False)
    return "\n".join(lines)


def _number(cell: dict[str, Any] | None) -> str:
    return "-" if cell is None else f"{cell['perplexity']:.2f}"


if __name__ == "__main__":
    for page in PAGES:
        before, after = page.read_text(encoding="utf-8"), filled(page)
        if "--check" not in sys.argv[1:]:
            page.write_text(after, encoding="utf-8")
        elif before != after:
            sys.exit(f"{page.name} is not up to date: run python -m scripts.make_readme.")
