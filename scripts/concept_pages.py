"""The tables of docs/concepts/, from the methods themselves and from committed measurements."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from hf_posenc import methods
from hf_posenc.cli.inspection import kinds
from hf_posenc.embedded import model_path
from hf_posenc.evaluation.grid import markdown_table
from hf_posenc.evaluation.recommend.options import met_until
from hf_posenc.rope import RopeSpec
from scripts.results import ATTENTION, DEMO, UPDATES, read, tails, update_mode

TEXT, ORIGINAL = 192, 96
"""Tokens of the maps of relative positions: a text of twice the original context."""
NUMERALS = (  # by the method that writes positions so: the divisor, and the bases of the digits, the ones first
    ("no scaling: a fourth digit", 1, (10, 10, 10, 10)),
    ("`pi`: the number halved", 2, (10, 10, 10)),
    ("`ntk`: a larger base, 13", 1, (13, 13, 13)),
    ("`ntk_mixed`: bases 14, 13, 11 from the right", 1, (14, 13, 11)),
)


def digits() -> str:
    """Three positions as digits, the ones last."""
    positions = (999, 1000, 1999)
    rows = []
    for label, divisor, bases in NUMERALS:
        cells = []
        for position in positions:
            rest, numeral = position / divisor, ""
            for base in bases:
                rest, digit = divmod(rest, base)
                numeral = f"{digit:g} {numeral}"
            assert rest == 0, f"{position} takes more digits of the bases {bases}"
            cells.append(f"`{numeral.strip()}`")
        rows.append([label, *cells])
    return markdown_table(["position", *(f"{position:,}" for position in positions)], rows)


def divisors() -> str:
    """The divisors of some pairs at one scale, and the length up to which slow pairs stay at angles of the training."""
    rope, scale, pairs = RopeSpec(128, 1e4, 4096), 8, (0, 16, 32, 48, 63)
    tables = stretched(rope, scale)
    default, trained = tables["unscaled"], rope.original_max_position_embeddings
    rows = []
    for name, table in tables.items():
        longest = math.floor(met_until(default, table, trained))
        rows.append([name, *(f"{default[i] / table[i]:.2f}" for i in pairs), f"{longest:,}"])
    columns = ["divisor of", *(f"pair {i}" for i in pairs), "trained angles up to"]
    return markdown_table(columns, rows, numeric=True)


def unfinished() -> str:
    """The pairs of the embedded Llama that made no full turn, and what a method changes that slows them."""
    config = read(model_path() / "config.json")
    theta, trained = config["rope_parameters"]["rope_theta"], config["max_position_embeddings"]
    rope = RopeSpec(config["head_dim"], theta, trained)
    turns = rope.default_inv_freq() * trained / (2 * math.pi)
    measured = read(ATTENTION)
    before, after = measured["tails"]
    length, slowed = before["length"], after["patch"]
    cut = tails(DEMO)["truncation", length].perplexity
    slow = int((turns < 1).sum())
    return (
        f"The embedded Llama was trained on {trained} tokens. Each of its heads has {len(turns)} pairs, and {slow} of "
        f"them made no full turn; the slowest made {float(turns[-1]):.3f} of one. If these {slow} pairs alone are made "
        f"{slowed['scale']:g} times slower, the tail perplexity at {length:,} tokens falls from "
        f"{before['perplexity']:.1f} to {after['perplexity']:.1f}. It is {cut:.1f} if the model reads the last "
        f"{trained} tokens only."
    )


def attention() -> str:
    """The attention to near tokens and the number of keys read, by method and place."""
    measured = read(ATTENTION)
    edges, queries = measured["settings"]["edges"], measured["settings"]["queries"]
    near = edges.index(16)
    places = sorted({row["first_query"] for row in measured["rows"]})
    rows = []
    for label, request in measured["settings"]["methods"].items():
        cells = []
        for place in places:
            own = [r for r in measured["rows"] if (r["method"], r["first_query"]) == (label, place)]
            share = sum(mean_shares(own, label, place)[:near])
            keys = statistics.geometric_mean(row["keys_read"] for row in own)
            cells.append(f"{share:.0%}, {keys:.0f} keys")
        name = f"`{label}`, scale {request['scale']}" if request else "unpatched"
        rows.append([name, *cells])
    columns = [f"queries {place:,} to {place + queries - 1:,}" for place in places]
    return markdown_table(["", *columns], rows, numeric=True)


def stale() -> str:
    """The perplexities of dynamic YaRN in one forward and through a cache."""
    measured = read(UPDATES)
    lengths = measured["cached"]["lengths"]
    cached = [row for row in measured["generation"] if row["feed"] == "steps"]
    whole = [row for row in measured["whole_texts"] if row["protocol"] == "tail"]
    rows = []
    for label, mode, measurements in (
        ("one forward, as published", "sequence", whole),
        ('with a cache, `update="sequence"`', "sequence", cached),
        ('with a cache, `update="row"`', "row", cached),
    ):
        found = {
            row["length"]: row["perplexity"]
            for row in measurements
            if update_mode(row["method"])[:2] == ("dynamic_yarn", mode)
        }
        rows.append([label, *(f"{found[n]:.2f}" for n in lengths)])
    return markdown_table(["", *(f"{n:,}" for n in lengths)], rows, numeric=True)


def properties() -> str:
    """The methods by their properties; methods with equal ones share a row."""
    rows: list[list[str]] = []
    for title, group in kinds().items():
        rows.append([f"**{title.partition(':')[0]}**", "", "", "", ""])
        names: dict[tuple[str, ...], list[str]] = {}
        for method in group:
            reach = "any" if method.follows_text else "s L" if method.takes_scale() else "-"
            trained = "yes" if method.trainable else method.trainable_with or "no"
            facts = (_positions(method), trained, reach, method.needs)
            names.setdefault(facts, []).append(f"[`{method.name}`](../methods/{method.name}.md)")
        rows += [[", ".join(links), *facts] for facts, links in names.items()]
    columns = ["method", "positions in the score", "parameters", "length", "needs"]
    return markdown_table(columns, rows)


def _positions(kind: type[methods.Method]) -> str:
    """The positions on which the score of a query at m and a key at n depends."""
    if kind is methods.NoPE:
        return "none"
    if issubclass(kind, methods.RotaryBands):
        if kind.by_pair:
            return "m and n"
        relative = position_map(kind()).nan_to_num(-1)
        return "m - n" if torch.equal(relative[1:, 1:], relative[:-1, :-1]) else "m and n"
    if issubclass(kind, methods.DistanceBias) and kind.of_query:
        return "m - n and m"
    if issubclass(kind, methods.GrowingBands):
        return f"{'m - n' if kind is methods.JetLong else 'm and n'} and the text's length"
    if issubclass(kind, methods.RopeScaling):
        return "m - n and the text's length" if kind.length_dependent else "m - n"
    return {"query": "m", "attention": "m - n", "bias": "m - n", "table": "m and n"}[kind.seam]


def stretched(rope: RopeSpec, scale: float) -> dict[str, Tensor]:
    """Return the frequencies of the methods of the pictures, the unscaled ones first."""
    kinds = (methods.PositionInterpolation, methods.NTKAware, methods.NTKMixed, methods.YaRN)
    scaled = {kind.name: kind(scale=scale).inv_freq(rope) for kind in kinds}
    return {"unscaled": rope.default_inv_freq(), **scaled}


def mean_shares(rows: list[dict[str, Any]], method: str, place: int) -> list[float]:
    """Return the share of attention in each bin of distances, a mean over the layers."""
    own = (row for row in rows if (row["method"], row["first_query"]) == (method, place))
    layers = [row["share_by_distance"] for row in own]
    return [sum(shares) / len(layers) for shares in zip(*layers, strict=True)]


def position_map(method: methods.RotaryBands | methods.GrowingBands, length: int = TEXT) -> Tensor:
    """`P[m, n]` of a text, shape (length, length), NaN where the pair is masked; of `dpe`, of its slowest pairs."""
    position = torch.arange(length)
    relative = torch.full((length, length), math.nan, dtype=torch.float64)
    given = (ORIGINAL, length) if isinstance(method, methods.GrowingBands) else (ORIGINAL,)
    for band in method.bands(*given):
        inside = band.contains(position[:, None], position) & (position <= position[:, None])
        query, key = band.query_position(position), band.key_position(position)
        if query.dim() > 1:
            query, key = query[:, -1], key[:, -1]
        distance = query[:, None] - key
        relative[inside] = distance.double()[inside]
    return relative
