"""Properties of all methods except frequency methods: names, options, refusals, pages; and log n."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosencError
from hf_posenc.methods import METHODS, LogN, get_method
from tests.support import attention_references as naive
from tests.support.attention_methods import BANDS, BIASES, OTHERS, SEAMS, assert_same, bands
from tests.support.pictures import assert_same_picture


def test_every_method_has_a_reference() -> None:
    assert set(naive.RELATIVE) == set(BANDS)
    assert set(naive.BIAS) == set(BIASES)
    for seam, names in SEAMS.items():
        assert {m.name for m in METHODS if m.seam == seam} == names


def test_log_n_is_one_up_to_the_original_context() -> None:
    m = torch.tensor([0, 1, 30, 62, 63, 64, 127, 4095, 10**6])
    factor = LogN().query_factor(m, 64)
    want = [max(1.0, math.log(int(i) + 1) / math.log(64)) for i in m]
    assert factor.tolist() == pytest.approx(want, rel=1e-12)
    assert torch.all(factor[:5] == 1)
    assert float(factor[-2]) == 2.0  # 64 squared
    assert factor.dtype == torch.float64


@pytest.mark.parametrize("name", BANDS)
def test_log_n_is_an_option_of_every_band(name: str) -> None:
    m = torch.arange(300)
    assert bands(name).query_factor(m, 64) is None
    factor = bands(name, log_n=True).query_factor(m, 64)
    assert factor is not None
    assert torch.equal(factor, LogN().query_factor(m, 64))


SAVED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OTHERS if name not in ("dpe", "lampe")),
    ("dpe", {"factors": [2, 4], "window": 512}),
    ("lampe", {"growth": 1e-4, "shift": -2.5, "capacity": 6204.4, "head": 256}),
    ("rerope", {"window": 512, "log_n": True}),
    ("leaky_rerope", {"scale": 8.0, "window": 512}),
    ("leaky_rerope", {"k": 4.0}),
    ("self_extend", {"group": 4, "window": 1024}),
    ("self_extend", {"scale": 4.0, "log_n": True}),
    ("dual_chunk", {"chunk": 1000, "window": 24}),
    ("string", {"shift": 900, "window": 64}),
    ("lm_infinite", {"sinks": 100}),
    ("attention_sinks", {"sinks": 1, "window": 7}),
    ("alibi", {"scale": 2.0, "keep_rope": True}),
    ("t5", {"buckets": 64, "max_distance": 512}),
    ("t5", {"scale": 4.0, "mode": "max_distance"}),
    ("sandwich", {"dim": 64}),
    ("fire", {"hidden": 16, "threshold": 64.0, "c": 0.5}),
    ("shaw", {"max_distance": 64}),
    ("xpos", {"scale_base": 1024}),
]


@pytest.mark.parametrize(("name", "options"), SAVED)
def test_options_travel_as_json(name: str, options: dict[str, Any]) -> None:
    method = get_method(name).from_options(**options)
    saved = json.loads(json.dumps(method.options()))
    assert saved == options
    again = get_method(name).from_options(**saved)
    assert again == method
    assert hash(again) == hash(method)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        *((name, {"window": 0}, "window") for name in BANDS),
        *((name, {"window": 64.5}, "window") for name in BANDS),
        *((name, {"log_n": "yes"}, "log_n") for name in BANDS),
        *((name, {"keep_rope": 1}, "keep_rope") for name in sorted(SEAMS["bias"])),
        *((name, {"sclae": 1}, "sclae") for name in OTHERS),
        ("rerope", {"scale": 4.0}, "scale"),
        ("leaky_rerope", {"k": 0.5}, "k "),
        ("leaky_rerope", {"scale": 0.5}, "scale"),
        ("leaky_rerope", {"scale": 4.0, "k": 4.0}, "scale and k"),
        ("self_extend", {"group": 0}, "group"),
        ("self_extend", {"group": 2.5}, "group"),
        ("self_extend", {"scale": math.nan}, "scale"),
        ("self_extend", {"scale": 4.0, "group": 4}, "scale and group"),
        ("dual_chunk", {"chunk": 0}, "chunk"),
        ("dual_chunk", {"chunk": True}, "chunk"),
        ("string", {"shift": -1}, "shift"),
        ("lm_infinite", {"sinks": 0}, "sinks"),
        ("attention_sinks", {"sinks": "4"}, "sinks"),
        ("alibi", {"scale": 0.0}, "scale"),
        ("sandwich", {"dim": 7}, "dim"),
        ("sandwich", {"first": 2}, "first"),
        ("t5", {"buckets": 1}, "buckets"),
        ("t5", {"max_distance": 16}, "max_distance"),
        ("fire", {"hidden": 0}, "hidden"),
        ("fire", {"threshold": 0}, "threshold"),
        ("fire", {"c": -0.1}, r"\bc\b"),
        ("shaw", {"max_distance": 0}, "max_distance"),
        ("xpos", {"scale_base": 0}, "scale_base"),
        ("log_n", {"original": 64}, "original"),
        ("temperature", {"law": "log_n", "beta": 0.2}, "log_n reads no beta. It has no knob"),
        ("temperature", {"law": "llama4", "scale": 4}, "reads no scale. Its knob is beta"),
        ("temperature", {"law": "yarn", "scale": 0.5}, "scale is a number of at least 1"),
        ("temperature", {"law": "constant"}, "needs factor"),
        ("temperature", {"law": "lamma4"}, "law of temperature.*llama4"),
        ("sinusoidal", {"scale": 2, "by": "rows"}, "by of sinusoidal"),
        ("clip", {"pairs": 2, "share": 0.5}, "clip"),
        *(("dpe", {"factors": bad}, "factors") for bad in ([], [0], [True], [1.5], 8)),
        *(("hierarchical", {"scale": 2, "alpha": bad}, "alpha") for bad in (0, 0.5, 1.0, 1.5)),
    ],
)
def test_bad_values_are_refused_by_name(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(PosencError, match=named):
        get_method(name).from_options(**options)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("leaky_rerope", {"scale": 4.0, "window": 64}, "window.*64"),
        ("self_extend", {"scale": 4.0, "window": 100}, "window.*64"),
        ("dual_chunk", {"chunk": 64}, "chunk.*64"),
        ("dual_chunk", {"chunk": 50, "window": 16}, "chunk.*64"),
        ("string", {"shift": 8, "window": 9}, "window.*8"),
        ("string", {"window": 30}, "window.*21"),
        ("attention_sinks", {"sinks": 64}, "sinks.*64"),
    ],
)
def test_knobs_that_do_not_fit_the_model_are_refused(
    name: str, options: dict[str, Any], named: str
) -> None:
    method = bands(name, **options)
    with pytest.raises(PosencError, match=named):
        [band.query_position(torch.arange(3)) for band in method.bands(64)]


def test_the_shortest_longest_distance_of_t5_is_taken() -> None:
    assert get_method("t5").from_options(max_distance=17).options() == {"max_distance": 17}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["rerope", "shaw"], id="two"),
        pytest.param(None, id="all", marks=pytest.mark.slow),
    ],
)
def test_pictures_are_drawn_from_the_methods(tmp_path: Path, names: list[str] | None) -> None:
    pytest.importorskip("matplotlib")
    from scripts.concept_pages import position_map
    from scripts.draw_methods import FOLDER, PICTURES, SIZES
    from scripts.drawing import draw

    assert {method.name for method in METHODS} < set(PICTURES)
    assert {path.stem for path in FOLDER.iterdir()} == set(PICTURES)
    for path in draw(names or list(PICTURES), tmp_path, PICTURES, SIZES):
        assert_same_picture(path, FOLDER / path.name)
    drawn = position_map(bands("self_extend", window=32, group=4))
    assert_same(drawn, naive.position_map("self_extend", len(drawn), window=32, group=4))
