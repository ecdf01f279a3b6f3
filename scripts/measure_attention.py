"""Measure how far back the embedded model's attention looks: docs/data/benchmarks/attention_distance.json.

    python -m scripts.measure_attention            a few minutes on one core

The first 2,048 tokens of the held-out documents of `hf-posenc perplexity` are read in one forward, as loaded and with
methods. For queries at several places, every layer and every distance, the result has the attention that these queries
pay to keys at this distance, as a mean over queries, heads and documents. Distances are binned by powers of two.

A second measurement shows which pairs of features fail: the tail perplexity at four times the trained length, as loaded
and with those pairs alone slowed that made no full turn in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_posenc import patched
from hf_posenc.evaluation import loading
from hf_posenc.evaluation.documents import TokenizedDocument, load_documents, read_embedded
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.files import to_json, write_atomically
from scripts.results import ATTENTION

LENGTH, DOCUMENTS, QUERIES = 2048, 12, 64
PLACES = (192, 448, 960, 1984)
"""Positions of the first of `QUERIES` queries, which end at 256 (the trained length), 512, 1,024 and 2,048 tokens."""
EDGES = (0, *(2**k for k in range(12)))
"""Bin k holds the distances from `EDGES[k]` to `EDGES[k + 1] - 1`."""
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "pi": {"method": "pi", "scale": 8},
    "yarn": {"method": "yarn", "scale": 8},
}

SLOWED: dict[str, Any] = {"method": "ntk_by_parts", "scale": 4, "beta_fast": 1.0, "beta_slow": 1.0}
"""Divides the frequencies of the pairs without a full turn by the scale, and keeps all others as they are."""
TAIL_LENGTH, TAIL = 1024, 128


def by_distance(attention: Tensor, first: int) -> Tensor:
    """Return the share of attention in each bin of distances, a mean over heads and queries.

    Args:
        attention: Probabilities of consecutive queries, shape (heads, queries, keys); the keys start at position 0.
        first: Position of the first query.

    Returns:
        Shape (bins,), float64. The shares add up to 1.
    """
    queries, keys = attention.shape[1:]
    distance = first + torch.arange(queries)[:, None] - torch.arange(keys)
    bins = torch.bucketize(distance.clamp_min(0), torch.tensor(EDGES[1:]), right=True)
    shares = torch.zeros(len(EDGES) - 1, dtype=torch.float64)
    shares.index_add_(0, bins.flatten(), attention.double().mean(0).flatten())
    return shares / queries


def keys_read(attention: Tensor) -> float:
    """Return the effective number of keys of a query: e to the entropy of its attention, averaged as an entropy."""
    entropy = torch.special.entr(attention.double()).sum(-1).mean()
    return math.exp(float(entropy))


@torch.inference_mode()
def measure(documents: Sequence[TokenizedDocument]) -> list[dict[str, Any]]:
    """Return a row for each method, place and layer."""
    model = loading.load_model(loading.embedded_model(), attn="eager")
    sums: dict[tuple[str, int, int], tuple[Tensor, list[float]]] = {}
    for label, request in METHODS.items():
        with patched(model, **request) if request else nullcontext():
            for document in documents:
                ids = document.ids[:LENGTH][None]
                output = model(input_ids=ids, output_attentions=True, use_cache=False)
                for layer, attention in enumerate(output.attentions):
                    for place in PLACES:
                        rows = attention[0, :, place : place + QUERIES]
                        shares, keys = sums.setdefault(
                            (label, place, layer), (torch.zeros(len(EDGES) - 1).double(), [])
                        )
                        shares += by_distance(rows, place) / len(documents)
                        keys.append(keys_read(rows))
    return [
        {
            "method": label,
            "first_query": place,
            "layer": layer,
            "keys_read": round(math.exp(sum(map(math.log, keys)) / len(keys)), 4),
            "share_by_distance": [round(share, 8) for share in shares.tolist()],
        }
        for (label, place, layer), (shares, keys) in sums.items()
    ]


@torch.inference_mode()
def tails(documents: Sequence[TokenizedDocument]) -> list[dict[str, Any]]:
    """Return the tail perplexity as loaded and with `SLOWED`, over all documents."""
    model, rows = loading.load_model(loading.embedded_model()), []
    for request in ({}, SLOWED):
        nats = 0.0
        with patched(model, **request) if request else nullcontext():
            for document in documents:
                ids = document.ids[-TAIL_LENGTH:]
                logits = model(input_ids=ids[None], use_cache=False).logits[0, -TAIL - 1 : -1]
                nats += float(cross_entropy(logits.double(), ids[-TAIL:], reduction="sum"))
        perplexity = math.exp(nats / (TAIL * len(documents)))
        rows.append({"patch": request or None, "length": TAIL_LENGTH, "perplexity": perplexity})
    return rows


def held_out() -> list[TokenizedDocument]:
    """Return the documents of the demo, each cut to twice `LENGTH` tokens."""
    tokenizer = loading.load_tokenizer(loading.embedded_model())
    return load_documents(
        read_embedded(), tokenizer, min_tokens=2 * LENGTH, max_tokens=2 * LENGTH, limit=DOCUMENTS
    )[0]


def main() -> None:
    """Measure, and write."""
    loading.one_thread()
    documents = held_out()
    values: dict[str, Any] = {
        "kind": "attention by distance",
        "environment": environment(),
        "settings": {"length": LENGTH, "queries": QUERIES, "edges": EDGES, "methods": METHODS},
        "documents": [document.to_dict() for document in documents],
        "rows": measure(documents),
        "tails": tails(documents),
    }
    write_atomically(ATTENTION, to_json(values))


if __name__ == "__main__":
    main()
