"""Diagrams of docs/concepts/ as SVG: where positions enter a model, and the tables with which keys are cached.

A diagram is a white card, so that it is readable on a light and on a dark page, and narrow, so that it is on a phone.
`python -m scripts.draw_concepts` writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import torch

from hf_posenc.cli.methods import kinds
from hf_posenc.evaluation.plots import COLOURS
from hf_posenc.methods import bucket_length

INK, QUIET, LINE, FILL = "#1f2328", "#57606a", "#8c959f", "#f6f8fa"
Point = tuple[float, float]

PLACES: tuple[tuple[str, str, tuple[str, ...], int], ...] = (
    ("Tables", "longer tables", ("interpolate", "group"), 0),
    ("Frequencies", "slower turns", ("ntk", "yarn", "llama3"), 1),
    ("Others", "a factor on queries", ("log_n", "temperature"), 4),
    ("Rotary bands", "other distances for far keys", ("rerope", "self_extend"), 2),
    ("Biases", "added to the scores", ("alibi", "t5", "fire"), 3),
)
"""A kind of methods: its name, its effect, methods that belong to it, and its colour."""


class Card:
    """An SVG under construction: a white card with boxes, arrows and text."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
            f' role="img" font-family="system-ui, sans-serif"><title>{escape(title)}</title>',
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"',
            ' orient="auto-start-reverse"><path d="M0 0.5 7.5 4 0 7.5z" fill="context-stroke"/></marker></defs>',
        ]

    def box(
        self, corner: Point, size: Point, *, fill: str = FILL, edge: str = LINE, wide: float = 1
    ) -> None:
        """Add a rounded rectangle."""
        (x, y), (width, height) = corner, size
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{edge}"'
            f' stroke-width="{wide:g}"/>'
        )

    def text(
        self,
        place: Point,
        text: str,
        *,
        size: float = 14,
        ink: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Add a line of text; `place` is its anchor on the base line."""
        weight = ' font-weight="600"' if bold else ""
        family = ' font-family="ui-monospace, monospace"' if mono else ""
        self.parts.append(
            f'<text x="{place[0]:g}" y="{place[1]:g}" font-size="{size:g}" fill="{ink}" text-anchor="{anchor}"'
            f"{weight}{family}>{escape(text)}</text>"
        )

    def arrow(self, *points: Point, colour: str = LINE, wide: float = 1.4) -> None:
        """Add a line through points, with a tip at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{wide:g}" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """Return the finished file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def places() -> str:
    """Return the places of a transformer at which positions enter, and the kinds of methods that act there."""
    known = {title.partition(":")[0]: {m.name for m in group} for title, group in kinds().items()}
    card = Card(560, 668, "Where positions enter a transformer, and which methods act there")
    left, width = 36, 222
    steps = (  # the height of a box, its lines, and the kind that acts there
        (40, ("token ids",), None),
        (92, ("row of the embedding", "+ row of a table of positions"), 0),
        (186, ("q, k, v: linear maps",), None),
        (238, ("q and k turned by", "position x frequency"), 1),
        (320, ("q times a factor",), 2),
        (378, ("cache: turned keys, values",), None),
        (430, ("scores q . k of all", "earlier keys"), 3),
        (514, ("scores + a bias",), 4),
        (566, ("softmax, sum of values",), None),
        (622, ("next layer, then logits",), None),
    )
    card.box((16, 160), (262, 452), fill="#ffffff", edge="#c4cad1", wide=1.2)
    card.text((24, 176), "every layer", size=12, ink=QUIET, anchor="start")
    bottom = 0.0
    for top, lines, place in steps:
        height = 16 + 18 * len(lines)
        colour = LINE if place is None else COLOURS[PLACES[place][3]]
        if bottom:
            card.arrow((left + width / 2, bottom), (left + width / 2, top - 1))
        card.box((left, top), (width, height), edge=colour, wide=1 if place is None else 2)
        for row, line in enumerate(lines):
            card.text((left + width / 2, top + 22 + 18 * row), line)
        bottom = top + height
        if place is None:
            continue
        kind, effect, methods, _ = PLACES[place]
        assert set(methods) <= known[kind], f"{kind} are {known[kind]}"
        middle = top + height / 2
        # The boxes of methods are higher than those of the model.
        card.box((326, middle - 32), (220, 64), fill="#ffffff", edge=colour, wide=2)
        label = "Temperature" if kind == "Others" else kind
        card.text((436, middle - 13), label, bold=True)
        card.text((436, middle + 5), effect, size=12.5, ink=QUIET)
        card.text((436, middle + 23), ", ".join(methods), size=12.5, mono=True)
        card.arrow((326, middle), (left + width + 2, middle), colour=colour, wide=2)
    card.text((left + width / 2, 26), "the model", size=12.5, ink=QUIET)
    card.text((436, 26), "methods", size=12.5, ink=QUIET)
    return card.svg()


TRAINED, TEXT, BUCKET = 4, 8, 2
"""Tokens of the toy text of `cached`."""


def cached() -> str:
    """Return the tables with which the keys of a text were rotated, after 4 and after 8 tokens, in two modes."""
    card = Card(560, 400, "Tables of frequencies with which cached keys are rotated")
    rows = (
        (30, "after 4 tokens, the trained length", tables(TRAINED, "sequence"), ""),
        (
            140,
            'after 8 tokens, update="sequence"',
            tables(TEXT, "sequence"),
            "stale: the query turns slower than the keys did",
        ),
        (
            270,
            'after 8 tokens, update="row"',
            tables(TEXT, "row"),
            "all keys turned again, like the query",
        ),
    )
    for top, title, keys, remark in rows:
        card.text((20, top), title, bold=True, anchor="start")
        card.text((20, top + 20), "keys in the cache", size=12.5, ink=QUIET, anchor="start")
        card.text((498, top + 20), "query", size=12.5, ink=QUIET)
        for place, length in enumerate(keys):
            _tile(card, (20 + 52 * place, top + 28), f"N = {length}", length)
        _tile(card, (474, top + 28), f"N = {keys[-1]}", keys[-1])
        if remark:
            card.text((20, top + 88), remark, size=13, ink=QUIET, anchor="start")
    note = "N: the length of the text for which the frequencies were computed."
    card.text((20, 384), note, size=12.5, ink=QUIET, anchor="start")
    return card.svg()


def tables(length: int, update: str) -> list[int]:
    """Return the length N of the table with which each key is rotated, once the text has `length` tokens."""
    if update == "sequence":
        return [max(TRAINED, position + 1) for position in range(length)]
    return [int(bucket_length(torch.tensor(length - 1), TRAINED, BUCKET))] * length


def _tile(card: Card, corner: Point, text: str, length: int) -> None:
    share = (length - TRAINED) / (TEXT - TRAINED)
    ends = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (COLOURS[0], COLOURS[1])]
    mixed = [round(a + (b - a) * share) for a, b in zip(*ends, strict=True)]
    card.box(corner, (48, 36), fill="#{:02x}{:02x}{:02x}".format(*mixed), edge="none")
    card.text((corner[0] + 24, corner[1] + 23), text, size=12, ink="#ffffff", bold=True)


DIAGRAMS: dict[str, Callable[[], str]] = {"places": places, "cached": cached}
