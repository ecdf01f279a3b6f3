"""Measure the update modes of dynamic methods on the embedded model: docs/data/benchmarks/updates.json.

python scripts/measure_updates.py            about a quarter of an hour on one core

Two measurements, on the held-out documents of `hf-posenc perplexity`:

- whole texts: `prefix` and `tail` perplexity (docs/evaluation.md) of one forward without a cache, in the modes
  "sequence" and "row", for several scales and buckets. For one text in one forward, "request" equals "sequence"; one
  candidate confirms it.
- generation: the tail again, read through a key-value cache a few tokens at a time. Either the whole text is read so
  ("steps": a long conversation), or only the tail, after a prompt of all earlier text ("prompt"). Here "sequence" is
  the behaviour of transformers: cached keys keep the frequencies that they were computed with.

Every number comes with its ratio to "sequence" on whole texts, the published form, and the paired 95 %
interval of that ratio over documents.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.evaluation import loading
from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.evaluation.measuring.statistics import Record, summarize
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import PerplexityRun
from hf_posenc.files import to_json, write_atomically
from hf_posenc.model.forward import cache_name, cache_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from scripts.measure_attention import held_out
from scripts.results import UPDATES as RESULT

LENGTHS = (256, 384, 512, 1024, 2048, 4096)
BUCKETS = (32, 64, 128, 256, 512)
FAMILIES = (
    *(f"dynamic_ntk:scale={scale}," for scale in (1, 2, 4, 8)),
    *("dynamic_yarn:", "dynamic_partial_ntk:", "dynamic_pi:"),
)
"""Methods and scales, as the beginning of a `--patch` entry."""
CONFIRMED = "dynamic_ntk:scale=2,"
"""The candidate that runs "request" too, to confirm that it equals "sequence"."""
GENERATED = ("dynamic_ntk:scale=2,", "dynamic_ntk:scale=8,", "dynamic_yarn:")
CACHED_LENGTHS = (512, 1024, 2048)
CACHED_BUCKET = 128  # half of the trained context
STEP = 8
"""Tokens fed at once; one at a time takes eight times as long and is hardly another measurement."""


def main() -> None:
    """Measure everything, print it and write it."""
    began = time.process_time()
    loading.one_thread()
    model, documents = loading.load_model(loading.embedded_model()), held_out()
    settings = Settings(lengths=LENGTHS)

    def in_one_forward(spec: str) -> Sequence[Record]:
        candidate = Candidate.parse(spec).checked(model)
        result = PerplexityRun(model, documents, [candidate], settings).run()
        assert result is not None
        return result.records

    whole: list[dict[str, Any]] = []
    cached: list[dict[str, Any]] = []
    for family in FAMILIES:
        published = in_one_forward(f"{family}update=sequence")
        whole += _rows(published, published, settings)
        specs = [f"{family}update=row,bucket={bucket}" for bucket in BUCKETS]
        specs += [f"{family}update=request"] if family == CONFIRMED else []
        for spec in specs:
            whole += _rows(in_one_forward(spec), published, settings)
        for mode in ("sequence", "request", "row") if family in GENERATED else ():
            spec = f"{family}update={mode},bucket={CACHED_BUCKET}"
            for feed in ("steps", "prompt"):
                records = _cached(model, documents, spec, feed, settings.tail_tokens)
                rows = _rows(records, published, settings)
                cached += [{"feed": feed, **row} for row in rows]
    for baseline in ("none", "sliding_window"):
        control = in_one_forward(baseline)
        whole += _rows(control, control, settings)
    values = {
        "kind": "update modes",
        "environment": environment(),
        "settings": dataclasses.asdict(settings),
        "cached": {"lengths": CACHED_LENGTHS, "step": STEP, "bucket": CACHED_BUCKET},
        "documents": [document.to_dict() for document in documents],
        "cpu_seconds": round(time.process_time() - began),
        "whole_texts": whole,
        "generation": cached,
    }
    write_atomically(RESULT, to_json(values))


@torch.inference_mode()
def _cached(
    model: Any, documents: Sequence[TokenizedDocument], spec: str, feed: str, tail: int
) -> list[Record]:
    """Measure the tail protocol with every window read through a cache."""
    candidate = Candidate.parse(spec).checked(model)
    records = []
    with candidate.applied(model, CACHED_LENGTHS[-1]), warnings.catch_warnings():
        # "sequence" is inexact here, and that is what is measured.
        warnings.simplefilter("ignore", UserWarning)
        for length in CACHED_LENGTHS:
            for document in documents:
                at_once = length - tail if feed == "prompt" else 0
                nats = float(_losses(model, document.ids[-length:], at_once)[-tail:].sum())
                item = (candidate.label, "tail", length, document.name)
                records.append(Record(*item, nats, tail, None, None, nats, tail))
    return records


def _losses(model: Any, ids: Tensor, at_once: int) -> Tensor:
    """Nats of tokens `1 .. n-1`, float64: the first `at_once` tokens in one forward, the others in steps."""
    cache, logits = None, []
    prompt = [ids[:at_once]] if at_once else []
    for part in (*prompt, *ids[at_once:].split(STEP)):
        output = model(input_ids=part[None], **{str(cache_name(model)): cache}, use_cache=True)
        cache = cache_of(output)
        logits.append(output.logits[0])
    return F.cross_entropy(torch.cat(logits)[:-1], ids[1:], reduction="none").double()


def _rows(
    records: Sequence[Record], published: Sequence[Record], settings: Settings
) -> list[dict[str, Any]]:
    """Perplexities with their ratios to the published form, as printed and stored."""
    label = records[0].method
    # Ratios refer to the first method of a list, and two methods need two labels.
    baseline = [dataclasses.replace(record, method="published") for record in published]
    wanted = {(record.protocol, record.length) for record in records}
    cells = summarize([*(r for r in baseline if (r.protocol, r.length) in wanted), *records])
    kept = (
        *("method", "protocol", "length", "perplexity", "interval"),
        *("ratio", "ratio_interval", "nats", "tokens"),
    )
    rows = [{k: getattr(cell, k) for k in kept} for cell in cells if cell.method == label]
    for protocol in settings.protocols:
        shown = [f"{row['perplexity']:8.2f}" for row in rows if row["protocol"] == protocol]
        if shown:
            print(f"{label:48s} {protocol:7s}", *shown, flush=True)
    return rows


if __name__ == "__main__":
    main()
