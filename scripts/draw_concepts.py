"""Draw the pictures of docs/concepts/ in docs/concepts/pictures/, from the methods and from committed measurements.

    python -m scripts.draw_concepts                 # all of them
    python -m scripts.draw_concepts dials clocks    # some

The diagrams beside them (*.svg) are drawn by hand. Needs matplotlib (`pip install 'hf-posenc[plot]'`).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Arc, Circle, Patch, Rectangle, Wedge

from hf_posenc.evaluation.plots import BASELINE, COLOURS, DASHES, REMARK, position_points
from hf_posenc.methods import Llama3, NTKAware, PositionInterpolation, YaRN, get_method
from hf_posenc.rope import RopeSpec
from scripts.concept_pages import ORIGINAL, TEXT, mean_shares, position_map, stretched
from scripts.draw_methods import SHOWN
from scripts.drawing import SMALL, Draw, main
from scripts.results import ATTENTION, DEMO, DOCS, perplexity, read

FOLDER = DOCS / "concepts" / "pictures"

# The layouts of a head: the name, the rotated ones of 8 features, and whether pairs are split into halves.
LAYOUTS = (("interleaved", 8, False), ("half-split", 8, True), ("half-split, partial", 4, True))
DIGITS = ("ones", "tens", "hundreds", "thousands")
PAIRS, GREY = (*COLOURS[:3], COLOURS[6]), "#dddddd"
SEEN, UNSEEN = "#a5c8e1", "#e4e4e4"
BANDS = ("rerope", "self_extend", "dual_chunk", "dpe", "lampe", "jet_long")
PLACES = ((5, 2), (105, 102))
"""Positions of a query and a key that are drawn as hands; both have the same distance."""


def clocks(figure: Figure) -> None:
    """Plot three pairs as clocks, with the hands of a query and a key at two places and one distance."""
    frequencies = RopeSpec(8, 1e4, 1000).default_inv_freq()[:3].tolist()
    for row, (query, key) in zip(figure.subplots(2, 3), PLACES, strict=True):
        for panel, frequency in zip(row, frequencies, strict=True):
            panel.set_axis_off()
            panel.set(xlim=(-1.12, 1.12), ylim=(-1.5, 1.12), aspect="equal")
            panel.add_patch(Circle((0, 0), 1, facecolor="#f4f4f4", edgecolor="#bbbbbb"))
            for position, colour in ((key, COLOURS[1]), (query, COLOURS[0])):
                angle = frequency * position
                tip = (0.9 * math.sin(angle), 0.9 * math.cos(angle))
                arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkB": 0}
                panel.annotate("", tip, (0, 0), arrowprops={**arrow, "shrinkA": 0})
            first, last = (90 - math.degrees(frequency * position) for position in (query, key))
            panel.add_patch(Arc((0, 0), 0.9, 0.9, theta1=first, theta2=last, color=BASELINE))
            apart = f"{frequency * (query - key):.2g} radians apart"
            panel.text(0, -1.3, apart, fontsize=10, color=REMARK, ha="center", va="center")
            if row[0] is panel:
                label = f"query at {query},\nkey at {key}"
                panel.text(-1.25, 0, label, fontsize=10, ha="right", va="center")
            if query == PLACES[0][0]:
                turn = f"{2 * math.pi / frequency:,.0f} tokens a turn"
                panel.set_title(f"pair {frequencies.index(frequency)}:\n{turn}", fontsize=10)
    names = ("query", "key")
    hands = [Line2D([], [], color=COLOURS[i], label=name) for i, name in enumerate(names)]
    figure.legend(handles=hands, loc="outside lower center", ncols=2)


def layouts(figure: Figure) -> None:
    """Plot the features of one head in every layout, in the colours of their pairs, and the permutation between two."""
    panel, features = figure.subplots(), 8
    panel.set_axis_off()
    panel.set(xlim=(-2.3, features), ylim=(-3.9, 0.8))
    tops = (0.0, -1.0, -2.6, -3.6)
    captions = ("complex", *(caption for caption, *_ in LAYOUTS))
    for top, caption in zip(tops, captions, strict=True):
        panel.text(-2.3, top + 0.34, caption, fontsize=10, va="center")
    for pair in range(features // 2):
        name = f"z{pair} = x{2 * pair} + j x{2 * pair + 1}"
        _box(panel, (2 * pair, 0), 2, name, PAIRS[pair])
    orders = [order(features, rotated, split=split) for _, rotated, split in LAYOUTS]
    for top, places, (_, rotated, _) in zip(tops[1:], orders, LAYOUTS, strict=True):
        for place, feature in enumerate(places):
            colour = PAIRS[feature // 2] if feature < rotated else GREY
            _box(panel, (place, top), 1, f"x{feature}", colour)
    for place, feature in enumerate(orders[1]):
        ends = ([orders[0].index(feature) + 0.5, place + 0.5], [tops[1] - 0.05, tops[2] + 0.75])
        panel.plot(*ends, color=PAIRS[feature // 2], linewidth=1.2)


def order(features: int, rotated: int, *, split: bool) -> list[int]:
    """Return the feature of the complex form at each place of a head whose first features are rotated."""
    pairs = torch.arange(rotated).view(-1, 2)
    turned = (pairs.T if split else pairs).flatten().tolist()
    return [*turned, *range(rotated, features)]


def _box(panel: Axes, corner: tuple[float, float], width: float, text: str, colour: str) -> None:
    x, y = corner
    panel.add_patch(Rectangle((x + 0.04, y), width - 0.08, 0.7, facecolor=colour))
    ink = "#444444" if colour == GREY else "white"
    panel.text(x + width / 2, y + 0.34, text, color=ink, ha="center", va="center", fontsize=10)


def scale(figure: Figure) -> None:
    """Plot the divisor and the wavelength of each pair of a head of Llama 2, by method, at a scale of 8."""
    rope, factor = RopeSpec(128, 1e4, 4096), 8
    trained, default = rope.original_max_position_embeddings, rope.default_inv_freq()
    methods = (PositionInterpolation, NTKAware, YaRN, Llama3)
    above, below = figure.subplots(2, sharex=True, height_ratios=(1, 1.3))
    below.plot(2 * math.pi / default / trained, color=BASELINE, linewidth=1, label="unscaled")
    for index, kind in enumerate(methods):
        table = kind(scale=factor).inv_freq(rope)
        look = {"color": COLOURS[index], "linestyle": DASHES[index % len(DASHES)]}
        name = "ntk_by_parts, yarn" if kind is YaRN else kind.name
        above.plot(default / table, **look)
        below.plot(2 * math.pi / table / trained, label=name, **look)
    for panel in (above, below):
        panel.axvspan(rope.pair_index(1), 63, color="#ececec", linewidth=0)
    below.text(62, 0.004, "no full turn\nin training", fontsize=SMALL, color=REMARK, ha="right")
    for level, name in ((1, "L"), (factor, f"{factor} L")):
        below.axhline(level, color=REMARK, linewidth=0.8, linestyle="--")
        below.text(1, level * 1.2, name, fontsize=SMALL, color=REMARK)
    above.set_yscale("log", base=2)
    above.yaxis.set_major_formatter("{x:g}")
    above.set(ylabel="frequency divided by")
    below.set_yscale("log")
    below.set(xlabel="pair of features, the fastest first", ylabel="tokens per turn / L")
    below.yaxis.set_major_formatter("{x:g}")
    below.set(xlim=(0, 63))
    figure.legend(loc="outside lower center", ncols=5)


def extrapolation(figure: Figure) -> None:
    """Plot the loss by position in the demo, and the attention by distance, inside and past the trained length."""
    left, right = figure.subplots(2)
    demo = perplexity(DEMO)
    assert demo.curve is not None
    assert demo.original is not None
    scale = max(demo.settings.lengths) / demo.original  # that of a method with an automatic one
    looks = {
        "none": ("unpatched", BASELINE),
        "yarn (auto)": (f"yarn, scale {scale:g}", COLOURS[0]),
        "rerope": ("rerope", COLOURS[2]),
    }
    for label, (name, colour) in looks.items():
        x, y = zip(*position_points(demo.curve, label), strict=True)
        left.plot(x, [math.log(value) for value in y], color=colour, label=name)
    left.axvline(demo.original, color=REMARK, linewidth=0.8, linestyle="--")
    left.set_xscale("log", base=2)
    ticks = (64, 256, 1024, 4096)
    left.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    left.set_xlabel("position of the token; dashed: the trained length")
    left.set_ylabel("loss (nats a token)")
    left.legend()
    measured = read(ATTENTION)
    edges, queries = measured["settings"]["edges"], measured["settings"]["queries"]
    lines = (
        ("none", 192, BASELINE, "-"),
        ("none", 960, COLOURS[1], "-"),
        ("yarn", 960, COLOURS[0], DASHES[1]),
    )
    for label, place, colour, style in lines:
        shares = mean_shares(measured["rows"], label, place)
        last = next(k for k, edge in enumerate(edges) if edge >= place + queries)
        request = measured["settings"]["methods"][label]
        name = f"{label}, scale {request['scale']:g}" if request else "unpatched"
        text = f"{name}, queries at {place:,} to {place + queries - 1:,}"
        look = {"color": colour, "linestyle": style, "marker": "o", "markersize": 3}
        right.plot(range(last), shares[:last], label=text, **look)
    names = ["0", *(str(a) if b == a + 1 else f"{a:,}-{b - 1:,}" for a, b in pairwise(edges[1:]))]
    right.set_xticks(range(len(names) - 1), names[:-1], rotation=40, ha="right", fontsize=SMALL)
    right.yaxis.set_major_formatter("{x:.0%}")
    right.set(xlabel="distance from query to key (tokens)", ylabel="share of attention")
    right.set_ylim(0, None)
    right.legend()


def dials(figure: Figure) -> None:
    """Plot four pairs as dials: the angles of the trained length, and those of a text four times as long."""
    rope, scale = RopeSpec(8, 1e4, 1000), 4
    trained = rope.original_max_position_embeddings
    tables = stretched(rope, scale)
    grid = figure.subplots(len(tables), rope.dim // 2)
    for row, (name, table) in zip(grid, tables.items(), strict=True):
        row[0].text(-1.25, 0, name, fontsize=10.5, ha="right", va="center")
        for pair, panel in enumerate(row):
            default, frequency = tables["unscaled"][pair].item(), table[pair].item()
            seen = min(360.0, math.degrees(default * (trained - 1)))
            reached = min(360.0, math.degrees(frequency * (scale * trained - 1)))
            _sector(panel, 0.68, 0.68, (0, 360), UNSEEN)
            _sector(panel, 0.68, 0.68, (0, seen), SEEN)
            _sector(panel, 1.0, 0.22, (0, min(seen, reached)), COLOURS[0])
            _sector(panel, 1.0, 0.22, (seen, max(seen, reached)), COLOURS[1])
            for token in (0, 1):
                tip = (0.64 * math.sin(frequency * token), 0.64 * math.cos(frequency * token))
                panel.plot((0, tip[0]), (0, tip[1]), color=BASELINE, linewidth=1)
            panel.set_axis_off()
            panel.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal")
            if name == "unscaled":
                turn = f"{2 * math.pi / default:,.0f} tokens/turn"
                panel.set_title(f"{DIGITS[pair]}\npair {pair}\n{turn}", fontsize=SMALL)
            else:
                label = f"÷ {default / frequency:.3g}"
                panel.text(0, -1.45, label, fontsize=SMALL, color=REMARK, ha="center")
    meanings = {
        SEEN: "inside: angles of the training",
        UNSEEN: "inside: angles never seen",
        COLOURS[0]: f"ring: angles at {scale} L, seen",
        COLOURS[1]: f"ring: angles at {scale} L, never seen",
    }
    patches = [Patch(color=colour, label=meaning) for colour, meaning in meanings.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2)


def _sector(
    panel: Axes, radius: float, width: float, turn: tuple[float, float], colour: str
) -> None:
    """Fill a sector between two angles in degrees, clockwise from the top."""
    first, last = turn
    if last > first:
        ends = 90 - last, 90 - first
        panel.add_patch(Wedge((0, 0), radius, *ends, width=width, facecolor=colour))


def bands(figure: Figure) -> None:
    """Plot the distance at which each query of a text of twice the trained length sees each key, by method."""
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    look: Any = {"cmap": "viridis", "interpolation": "nearest", "vmin": 0, "vmax": ORIGINAL - 1}
    marks = ([0, ORIGINAL, TEXT - 1], ["0", "L", "2L"])
    for panel, name in zip(panels.flat, BANDS, strict=True):
        method: Any = get_method(name).from_options(**SHOWN.get(name, {}))
        seen = position_map(method)
        assert seen.nan_to_num().max() < ORIGINAL, f"{name} shows distances that are new"
        image = panel.imshow(seen.numpy(), **look)
        panel.grid(visible=False)
        panel.set_title(name)
        panel.set_xticks(*marks)
        panel.set_yticks(*marks)
    figure.supxlabel("key n", fontsize=10.5)
    figure.supylabel("query m", fontsize=10.5)
    bar = figure.colorbar(image, ax=panels, ticks=[0, ORIGINAL - 1], fraction=0.04)
    bar.ax.set_yticklabels(["0", "L - 1"])
    bar.set_label("distance that the pair sees", labelpad=-16)


DRAWN = (bands, clocks, dials, extrapolation, layouts, scale)
PICTURES: dict[str, Draw] = {f.__name__: f for f in DRAWN}
SIZES = {
    "bands": (6.6, 4.8),
    "clocks": (6.0, 4.8),
    "dials": (6.0, 7.4),
    "extrapolation": (6.0, 6.6),
    "layouts": (7.0, 3.1),
    "scale": (6.0, 5.8),
}


if __name__ == "__main__":
    main(__doc__, PICTURES, SIZES, FOLDER)
