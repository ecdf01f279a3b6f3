"""Draw the pictures of docs/methods/ from the methods themselves: docs/methods/pictures/*.png.

    python -m scripts.draw_methods                 # all of them
    python -m scripts.draw_methods rerope alibi    # some

Needs matplotlib (`pip install 'hf-posenc[plot]'`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from hf_posenc import methods
from hf_posenc.adapters import get_recipe
from hf_posenc.evaluation.plots import BASELINE, COLOURS, DASHES, GRID, REMARK
from hf_posenc.methods import METHODS, Method, RopeScaling, RotaryBands, TableMethod, get_method
from hf_posenc.methods.temperature import LAWS
from hf_posenc.rope import RopeSpec
from scripts.concept_pages import ORIGINAL, TEXT, position_map
from scripts.drawing import SMALL, Draw, main
from scripts.results import DOCS

Curves = Mapping[str, tuple[Any, Any]]
"""Values of x and y by the label of their line."""
PAIR, RATIO = "pair of features, the fastest first", "frequency / the model's own"
FOLDER = DOCS / "methods" / "pictures"
HEADS, REACH = 8, 512
ROPE, PAIRS = RopeSpec(128, 1e4, 4096), torch.arange(64)

# Knobs that show what a method does at the size of a picture.
SHOWN: dict[str, dict[str, Any]] = {
    "rerope": {"window": 32},
    "leaky_rerope": {"window": 32, "k": 4.0},
    "self_extend": {"window": 32, "group": 4},
    "dpe": {"factors": (1, 2, 4, 8), "window": 32},
    "lampe": {"growth": 0.004, "shift": -1.0, "capacity": 60.0, "head": 24, "tail": 16},
    "string": {"shift": 48, "window": 8},
    "lm_infinite": {"window": 64, "sinks": 10},
    "attention_sinks": {"window": 60, "sinks": 4},
    "sliding_window": {"window": 64},
    "stretch": {"keep": 6},
}

# Knobs of the frequency methods, by label where there are several; a scale of `SCALE` for the others.
SCALE = 4
ROTATED: dict[str, list[dict[str, Any]]] = {
    "mrrope": [{"scale": SCALE, "ramp": ramp} for ramp in ("uniform", "progressive")],
    "dynamic_ntk": [{"scale": 2}],
    "abf": [{"rope_theta": 1e5}, {"rope_theta": 5e5}, {"rope_theta": 1e6}],
}
LISTS = "phi-3.5-mini-128k"
"""The recipe whose lists are drawn for `longrope`."""
ROWS = 16  # of the tables of positions that are drawn

# Knobs of the filters that are drawn together.
FILTERED: dict[str, list[dict[str, Any]]] = {
    "clip": [{"soft": 20}, {"pairs": 20}, {"share": 0.25}, {"turns": 4}],
    "resonance": [{}],
    "power_basis": [{"power": 0.1}, {"power": 0.5}, {"power": 2.0}],
    "truncated_basis": [{"wavelength": 1000}, {"wavelength": 4000}],
}


def lines(
    figure: Figure, curves: Curves, xlabel: str, ylabel: str, *, dashed: bool = False, **axes: Any
) -> Axes:
    """Draw a line for each label, maybe in styles of their own, and the axes."""
    panel = figure.subplots()
    for index, (label, (x, y)) in enumerate(curves.items()):
        style: Any = DASHES[index % len(DASHES)] if dashed else "-"
        panel.plot(x, y, color=COLOURS[index % len(COLOURS)], linestyle=style, label=label)
    panel.set(xlabel=xlabel, ylabel=ylabel, **axes)
    return panel


def bands(figure: Figure, name: str) -> None:
    """Plot the map of relative positions, and beside it the distances of the last query."""
    method = get_method(name).from_options(**SHOWN.get(name, {}))
    assert isinstance(method, RotaryBands)
    relative = position_map(method)
    field, row = figure.subplots(1, 2, width_ratios=(1.2, 1))
    field.grid(visible=False)
    colours = colormaps["viridis"].with_extremes(over=COLOURS[1])
    image = field.imshow(
        relative.numpy(), cmap=colours, vmin=0, vmax=ORIGINAL - 1, interpolation="nearest"
    )
    bar = figure.colorbar(image, ax=field, ticks=[0, ORIGINAL - 1], extend="max", fraction=0.046)
    bar.ax.set_yticklabels(["0", "L - 1"])
    bar.set_label("relative position", labelpad=-16)
    marks = ([0, ORIGINAL, TEXT - 1], ["0", "L", "2L"])
    field.set_xticks(*marks)
    field.set_yticks(*marks)
    field.set(xlabel="key n", ylabel="query m", title="every query")
    distance = torch.arange(TEXT).flip(0)
    row.plot(distance, distance, color=REMARK, linewidth=1.2, linestyle=":", label="unpatched")
    row.plot(distance, relative[-1], color=COLOURS[0], linewidth=2.2, label=name)
    row.axhline(ORIGINAL - 1, color=COLOURS[1], linewidth=1.2, linestyle="--", label="L - 1")
    row.set_xticks(*marks)
    row.set_yticks(*marks)
    knobs = ", ".join(f"{knob}={value}" for knob, value in method.options().items())
    row.set(xlabel="distance m - n", ylabel="relative position", ylim=(-5, TEXT))
    row.set_title("the last query")
    figure.suptitle(f"{name}: {knobs or 'by default'}, L = {ORIGINAL}", fontsize=10.5)
    figure.legend(loc="outside lower center", ncols=3)


def dpe(figure: Figure) -> None:
    """Plot the distances of the last query, a line for each part of the pairs."""
    distance, query = torch.arange(TEXT), torch.tensor(TEXT - 1)
    near, far = methods.DPE(**SHOWN["dpe"]).bands(ORIGINAL)
    positions = far.query_position(query) - far.key_position(query - distance)
    inside = near.contains(query, query - distance)
    parts = [torch.where(inside, distance, part) for part in positions.T]
    curves = {
        f"g = {g}": (distance, part) for g, part in zip(SHOWN["dpe"]["factors"], parts, strict=True)
    }
    _of_last_query(lines(figure, curves, "distance m - n of the last query", "relative position"))


def growing(figure: Figure, name: str) -> None:
    """Plot the distances of the last query of texts of 1, 2, 4 and 8 times the original length, as shares of theirs."""
    method: Any = get_method(name).from_options(**SHOWN.get(name, {}))
    curves = {
        f"N = {ratio} L": (torch.arange(n) / n, position_map(method, n)[-1].flip(0))
        for ratio, n in ((ratio, ratio * ORIGINAL) for ratio in (1, 2, 4, 8))
    }
    share = "distance m - n of the last query, as a share of N"
    _of_last_query(lines(figure, curves, share, "relative position"))


def _of_last_query(panel: Axes) -> None:
    panel.axhline(ORIGINAL - 1, color=BASELINE, linewidth=0.8, linestyle="--", label="L - 1")
    panel.legend()


def biases(figure: Figure, name: str) -> None:
    """Plot the bias against the distance, a line for every head."""
    method = get_method(name).from_options()
    assert isinstance(method, methods.DistanceBias)
    distance = torch.arange(REACH, dtype=torch.float64)
    torch.manual_seed(0)
    parameters = {k: v.double() for k, v in method.initial(HEADS, ORIGINAL).items()}
    # Trained values differ: evenly spread over the range of the initial ones.
    spread = (torch.arange(HEADS, dtype=torch.float64) + 0.5) / HEADS
    ranges = {"kerple_log": {"r1": 2.0, "r2": 1.0}, "kerple_power": {"r1": 1.0, "r2": 2.0}}
    for key, most in ranges.get(name, {}).items():
        parameters[key] = most * (spread if key == "r1" else spread.flip(0))
    values = method.bias(distance, HEADS, parameters, torch.tensor(REACH))
    panel = figure.subplots()
    for head, line in enumerate(values):
        colour = colormaps["viridis"](0.85 * head / (HEADS - 1))  # violet to green
        panel.plot(distance, line, color=colour, label=f"head {head}")
    lowest = max(-40.0, 1.05 * float(values.min()))
    panel.set(xlabel="distance m - n", ylabel="added to the score", ylim=(lowest, -lowest / 40))
    figure.legend(loc="outside right center")


def t5(figure: Figure) -> None:
    """The bucket of each distance."""
    distance = torch.arange(1, 300)
    panel = figure.subplots()
    panel.step(distance, methods.T5().bucket(distance), where="post", color=COLOURS[0])
    for mark, level, meaning in (
        (16, 1, "up to 16: a bucket\nfor each distance"),
        (128, 12, "from 128:\none bucket"),
    ):
        panel.axvline(mark, color=COLOURS[1], linewidth=1.2, linestyle="--")
        panel.text(1.08 * mark, level, meaning, fontsize=SMALL, color=REMARK)
    panel.set_xscale("log", base=2)
    panel.set_xticks([1, 4, 16, 64, 128, 256], ["1", "4", "16", "64", "128", "256"])
    panel.set(xlabel="distance m - n", ylabel="bucket (row of the table)")


def fire(figure: Figure) -> None:
    """Plot the input of the network, shown by a network that is the identity on positive numbers."""
    method, one = methods.FIRE(hidden=1), torch.ones(1, 1, dtype=torch.float64)
    parameters = {"c": torch.tensor(method.c).double(), "multiplier": torch.tensor(1.0).double()}
    parameters |= dict.fromkeys(("weight_in", "weight_out"), one)
    parameters |= dict.fromkeys(("bias_in", "bias_out"), 0 * one[0])
    curves, queries = {}, (64, 512, 2048, 8192)
    for m in queries:
        distance = torch.arange(m + 1, dtype=torch.float64)
        read = method.bias(distance, 1, parameters, torch.tensor(m))[0]
        curves[f"query at {m:,}"] = (distance, read)
    panel = lines(figure, curves, "distance m - n", "input of the network", xscale="symlog")
    for m, line in zip(queries, panel.lines, strict=True):
        line.set_linewidth(4 if m < method.threshold else 1.5)  # the next one runs over it
    panel.set_xticks([0, 1, 10, 100, 1000, 8192], ["0", "1", "10", "100", "1,000", "8,192"])
    panel.legend()


def shaw(figure: Figure) -> None:
    """The row of the table that each distance reads."""
    distance = torch.arange(48.0)
    rows = torch.arange(17.0)[:, None]  # a table whose rows are their own numbers
    panel = figure.subplots()
    read = methods.Shaw().relative(distance, 1, 1, {"table": rows})[0, :, 0]
    panel.step(distance, read, where="post", color=COLOURS[0])
    panel.set(xlabel="distance m - n", ylabel="row of the table E", yticks=range(0, 17, 4))


def transformer_xl(figure: Figure) -> None:
    """Plot the sinusoidal embeddings, before the learned map."""
    identity = {"weight": torch.eye(64, dtype=torch.float64)[None]}
    embedded = methods.TransformerXL().relative(torch.arange(256.0), 1, 64, identity)[0]
    panel = _image(figure, embedded, "value", cmap="RdBu")
    panel.set(xlabel="distance m - n", ylabel="feature of R", title="with W the identity")


def _image(
    figure: Figure, values: Tensor, label: str, ticks: Sequence[int] | None = None, **look: Any
) -> Axes:
    """Draw columns of values as colours, with a bar that explains them."""
    panel = figure.subplots()
    panel.grid(visible=False)
    image = panel.imshow(values.T.numpy(), aspect="auto", interpolation="nearest", **look)
    figure.colorbar(image, ax=panel, label=label, ticks=ticks)
    return panel


def xpos(figure: Figure) -> None:
    """Plot the decay of a few pairs of features."""
    distance = torch.arange(2049)
    decay = methods.XPos().query_scale(distance, 64, 0)
    curves = {f"pair {i}": (distance, decay[:, i]) for i in (0, 7, 15, 23, 31)}
    lines(figure, curves, "distance m - n", "factor on the pair", ylim=(0, 1.02)).legend()


def rope_bias(figure: Figure) -> None:
    """Plot `a R b` with all of a and b one: the part of a score that the biases alone add."""
    dim, distance = 64, torch.arange(REACH, dtype=torch.float64)
    start = methods.RopeBias().parameters_for(1, 1, dim, ORIGINAL)
    a, b = (start[name].double()[0] + 1 for name in ("a", "b"))
    angles = distance[:, None] * RopeSpec(dim, 1e4, REACH).default_inv_freq()
    half = dim // 2
    products = a[:half] * b[:half] + a[half:] * b[half:]
    added = (angles.cos() * products).sum(-1) / math.sqrt(dim)
    lines(figure, {"": (distance, added)}, "distance m - n", "added to the score, all of a, b = 1")


def log_n(figure: Figure) -> None:
    """Plot the factor for three original contexts."""
    m = torch.arange(0, 65_536, 64)
    curves = {f"L = {n:,}": (m, methods.LogN().query_factor(m, n)) for n in (2048, 4096, 8192)}
    panel = lines(figure, curves, "position m of the query", "factor on the query")
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.legend()


def temperature(figure: Figure) -> None:
    """Plot the factor of every law for an original context of 4,096; `constant` is a horizontal line."""
    m, curves = torch.arange(0, 65_536, 64), {}
    for law in (law for law in LAWS if law not in ("constant", "llama4")):
        method = methods.Temperature(law=law)
        factor = method.query_factor(m, 4096)
        for start in method.parameters_for(1, 1, 64, 4096).values():
            factor = factor * start[0]
        curves["llama4, ministral" if law == "ministral" else law] = (m, factor)
    names = ("position m of the query", "factor on the query")
    panel = lines(figure, curves, *names, dashed=True, ylim=(0.95, 1.6))
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.legend(ncols=3, loc="upper left")


def frequencies(figure: Figure) -> None:
    """Plot the divisor of each pair's frequency at a scale of 8, by static method; equal lines once."""
    tables: dict[str, Tensor] = {}
    for kind in METHODS:
        if not issubclass(kind, RopeScaling) or kind.length_dependent:
            continue
        if not kind.only_lowers_frequencies:
            continue
        options: dict[str, Any] = {"rope_theta": 8e4} if kind is methods.ABF else {"scale": 8}
        table = kind(**options).inv_freq(ROPE)
        if not any(torch.equal(table, other) for other in tables.values()):  # yarn, ntk_by_parts
            tables["abf, 80,000" if kind is methods.ABF else kind.name] = table
    curves = {name: (PAIRS, ROPE.default_inv_freq() / table) for name, table in tables.items()}
    lines(figure, curves, PAIR, "frequency divided by", dashed=True)
    figure.legend(loc="outside lower center", ncols=4)


def rotation(figure: Figure, name: str) -> None:
    """Plot each pair's frequency divided by its own; of a length-dependent method, for several lengths."""
    kind, rope, panel = get_method(name), RopeSpec(128, 1e4, 4096), figure.subplots()
    assert issubclass(kind, RopeScaling)
    knobs = ROTATED.get(name, [{"scale": SCALE}] if kind.takes_scale() else [{}])
    if kind is methods.LongRoPE:
        recipe = get_recipe(LISTS)
        knobs = [recipe["options"]]
        rope = RopeSpec(2 * len(recipe["options"]["long_factor"]), 1e4, 4096)
    trained, default = rope.original_max_position_embeddings, rope.default_inv_freq()
    ratios = (1, 2, 4, 8) if kind.follows_text else (1, 2) if kind.length_dependent else (0,)
    lines = [(values, ratio) for values in knobs for ratio in ratios]
    panel.axvspan(rope.pair_index(1), len(default) - 1, color="#f0f0f0", linewidth=0)
    middle, remark = (rope.pair_index(1) + len(default) - 1) / 2, "no full turn\nin training"
    panel.text(middle, 0.97, remark, fontsize=SMALL, color=REMARK, ha="center", va="top")
    panel.axhline(1, color=BASELINE, linewidth=0.8, linestyle=":")
    if kind.takes_scale() and not kind.length_dependent:
        panel.axhline(1 / SCALE, color=BASELINE, linewidth=0.8, linestyle=":")
        panel.text(0, 1 / SCALE + 0.02, f"1/{SCALE}", fontsize=SMALL, color=REMARK)
    for index, (values, ratio) in enumerate(lines):
        method = kind(**values)
        table = method.inv_freq(rope, ratio * trained or None)
        label = f"N {'>' if ratio > 1 else '<='} L"
        if kind.follows_text:
            label = f"N = {ratio} L".replace(" 1", "")
        elif not ratio:
            label = ", ".join(
                f"{knob}={value if isinstance(value, str) else f'{value:,.0f}'}"
                for knob, value in values.items()
                if len(lines) == 1 or knob != "scale"
            )
            factor = method.cos_sin_factor(rope)
            label += "" if factor == 1 else f"; cos, sin x {factor:.2f}"
        panel.plot(table / default, color=COLOURS[index], label=label)
    panel.set(xlabel=PAIR, ylabel=RATIO, ylim=(-0.03, 1.12), xlim=(-0.5, len(default) - 0.5))
    turns = panel.secondary_xaxis("top")
    marks = (256, 32, 4, 1, 0.25)
    turns.set_xticks([rope.pair_index(mark) for mark in marks], [f"{mark:g}" for mark in marks])
    turns.set_xlabel("turns of the pair in training")
    turns.tick_params(labelsize=SMALL)
    if len(lines) > 1:
        columns = min(4, len(lines))
        figure.legend(loc="outside lower center", ncols=columns, columnspacing=1, handlelength=1.3)
    else:
        figure.suptitle(f"{name}: {label}" if label else name, fontsize=10.5)


def rows(figure: Figure, name: str) -> None:
    """Plot the weights of the old rows in each new row: the new table of one whose rows are unit vectors."""
    method = get_method(name).from_options(scale=SCALE, **SHOWN.get(name, {}))
    assert isinstance(method, TableMethod)
    weights = method.rows(torch.eye(ROWS, dtype=torch.float64), SCALE * ROWS)
    least = -1 if weights.min() < 0 else 0
    look: dict[str, Any] = {"cmap": "RdBu" if least else "Blues", "vmin": least, "vmax": 1}
    panel = _image(figure, weights, "weight of the old row", range(least, 2), **look)
    marks = [ROWS * times - 0.5 for times in range(SCALE + 1)]
    panel.vlines(marks[1:-1], -0.5, ROWS - 0.5, color=GRID, linewidth=0.8)
    panel.set_xticks(marks, ["0", "L", *(f"{n} L" for n in range(2, SCALE + 1))])
    panel.set(xlabel=f"row of the new table (L = {ROWS})", ylabel="row of the old table")
    panel.set_title(f"{name}: {', '.join(f'{k}={v}' for k, v in method.options().items())}")


def sinusoidal(figure: Figure) -> None:
    """Plot the frequencies of a sinusoidal table divided by their own, scaled by position and by base."""
    own, curves = 1e4 ** -(PAIRS.double() / len(PAIRS)), {}
    for by in ("position", "base"):
        angles = methods.Sinusoidal(scale=SCALE, by=by).angles(own, 2, 0.0)
        curves[f'scale={SCALE}, by="{by}"'] = (PAIRS, angles[1] / own)
    panel = lines(figure, curves, PAIR, RATIO, ylim=(-0.03, 1.08))
    panel.axhline(1, color=BASELINE, linewidth=0.8, linestyle=":")
    panel.legend(loc="lower left")


def filtered(figure: Figure, name: str) -> None:
    """Plot each pair's frequency divided by its own, for several values of the knobs; equal lines once."""
    curves = {}
    for knobs in FILTERED[name]:
        method = get_method(name).from_options(**knobs)
        assert isinstance(method, RopeScaling)
        label = ", ".join(f"{knob}={value:,}" for knob, value in knobs.items())
        curves[label] = (PAIRS, method.inv_freq(ROPE) / ROPE.default_inv_freq())
    panel = lines(figure, curves, PAIR, RATIO, dashed=True)
    if any(FILTERED[name]):
        panel.legend()


def _of(kind: type[Method], draw: Callable[..., None]) -> dict[str, Draw]:
    """Return the pictures of the methods of a kind that `draw` draws."""
    return {m.name: partial(draw, name=m.name) for m in METHODS if issubclass(m, kind)}


PICTURES: dict[str, Draw] = {"frequencies": frequencies}
PICTURES |= _of(RotaryBands, bands) | _of(methods.DistanceBias, biases) | _of(RopeScaling, rotation)
PICTURES |= _of(methods.TableFilter, filtered) | _of(TableMethod, rows)
PICTURES |= _of(methods.GrowingBands, growing)
OWN = (sinusoidal, dpe, log_n, temperature, t5, fire, shaw, transformer_xl, xpos, rope_bias)
PICTURES |= {draw.__name__: draw for draw in OWN}
"""Pictures by name; those of a method alone replace those of its kind."""
MAPS = tuple(m.name for m in METHODS if issubclass(m, RotaryBands) and not m.by_pair)
SIZES = dict.fromkeys(MAPS, (6.6, 3.7))


if __name__ == "__main__":
    main(__doc__, PICTURES, SIZES, FOLDER)
