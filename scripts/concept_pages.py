"""The tables of docs/concepts/, from the methods themselves."""

from __future__ import annotations

import math

import torch

from hf_posenc.cli.inspection import kinds
from hf_posenc.evaluation.grid import markdown_table
from hf_posenc.evaluation.recommend.options import met_until
from hf_posenc.methods import DistanceBias, LaMPE, Method, NoPE, RopeScaling, RotaryBands
from hf_posenc.rope import RopeSpec
from scripts.draw_concepts import stretched
from scripts.draw_methods import position_map

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


def properties() -> str:
    """The methods by their properties; methods with equal ones share a row."""
    rows: list[list[str]] = []
    for title, group in kinds().items():
        rows.append([f"**{title.partition(':')[0]}**", "", "", "", ""])
        names: dict[tuple[str, ...], list[str]] = {}
        for method in group:
            reach = "any" if method.follows_text else "s L" if method.takes_scale() else "-"
            trained = "yes" if method.trainable else "no"
            facts = (_positions(method), trained, reach, method.needs)
            names.setdefault(facts, []).append(f"[`{method.name}`](../methods/{method.name}.md)")
        rows += [[", ".join(links), *facts] for facts, links in names.items()]
    columns = ["method", "positions in the score", "parameters", "length", "needs"]
    return markdown_table(columns, rows)


def _positions(kind: type[Method]) -> str:
    """The positions on which the score of a query at m and a key at n depends."""
    if kind is NoPE:
        return "none"
    if issubclass(kind, RotaryBands):
        if kind.by_pair:
            return "m and n"
        relative = position_map(kind()).nan_to_num(-1)
        return "m - n" if torch.equal(relative[1:, 1:], relative[:-1, :-1]) else "m and n"
    if issubclass(kind, DistanceBias) and kind.of_query:
        return "m - n and m"
    if kind is LaMPE:
        return "m and n and the text's length"
    if issubclass(kind, RopeScaling):
        return "m - n and the text's length" if kind.length_dependent else "m - n"
    return {"query": "m", "attention": "m - n", "bias": "m - n", "table": "m and n"}[kind.seam]
