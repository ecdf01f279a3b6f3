"""Hooks of a method of one's own that raise or return what cannot be meant: refused, and the model is as before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_posenc import PosencError, get_patch, patch_model, unpatch_model
from hf_posenc.methods import (
    METHODS,
    Band,
    DistanceBias,
    Dynamic,
    GrowingBands,
    Interpolate,
    Method,
    NoPE,
    PositionInterpolation,
    RelativeKeys,
    ResonanceRoPE,
    RopeBias,
    RopeScaling,
    RotaryBands,
    Scaled,
    TableFilter,
    TableMethod,
    XPos,
    YaRN,
)
from tests.attention.test_attention import build
from tests.support import zoo

NAMES = {"name": "mine", "summary": "a test", "source": "here", "needs": "nothing"}


def raising(self: Any, *_: Any) -> Any:
    raise RuntimeError("my mistake")


def table(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    return lambda self, rope, length=None: change(rope.default_inv_freq())


def returning(value: Any) -> Callable[..., Any]:
    return lambda self, *_, **__: value


def scaled(factor: float) -> Callable[..., Any]:
    """A table of which the slowest frequency is multiplied."""

    def change(frequencies: torch.Tensor) -> torch.Tensor:
        return torch.cat((frequencies[:-1], frequencies[-1:] * factor))

    return table(change)


FREQUENCIES: dict[str, dict[str, Any]] = {"inv_freq": table(lambda f: f / 2)}  # type: ignore[dict-item]
BANDS: dict[str, Any] = {"query_position": lambda self, m, original: m // 2 + 8}
BANDS["key_position"] = lambda self, n, original: n // 2
BIAS = {"bias": lambda self, d, heads, *_: -d.expand(heads, *d.shape)}
KEYS = {
    "initial": lambda self, heads, head_dim, original: {"w": torch.zeros(head_dim)},
    "relative": lambda self, d, heads, head_dim, w: w["w"].expand(1, *d.shape, head_dim),
}
ALL = Band(query_position=lambda m: m, key_position=lambda n: n)
QUERY = {"seam": "query", "query_factor": lambda self, m, original: m + 1.0}
MIXED = {"a": torch.zeros(2), "b": torch.full((2,), float("nan"))}

RIGHT: dict[type[Method], dict[str, Any]] = {
    **dict.fromkeys((Scaled, Dynamic), FREQUENCIES),
    RotaryBands: BANDS,
    DistanceBias: BIAS,
    RelativeKeys: KEYS,
    Method: QUERY,
}
"""What is right about a method of a base class."""
# By base class: the hook that is wrong, and words of the message.
WRONG: dict[type[Method], list[tuple[str, Any, str]]] = {
    Scaled: [
        ("inv_freq", scaled(float("nan")), "float64 of shape (8,) on cpu with nan"),
        ("inv_freq", scaled(float("inf")), "with inf"),
        ("inv_freq", scaled(1e300), "float32"),
        ("inv_freq", scaled(-1), "from -"),
        ("inv_freq", scaled(0), "from 0 to 1. It has to return numbers above 0"),
        ("inv_freq", table(lambda f: f[:-1]), "shape (7,)"),
        ("inv_freq", table(lambda f: f[None]), "shape (1, 8)"),
        ("inv_freq", table(lambda f: f.float()), "returned float32"),
        ("inv_freq", table(lambda f: f.to("meta")), "on meta"),
        ("inv_freq", table(lambda f: f.tolist()), "returned [1.0"),
        ("inv_freq", returning(None), "returned None"),
        ("inv_freq", raising, "RuntimeError: my mistake"),
        ("cos_sin_factor", returning(float("nan")), "returned nan"),
        ("cos_sin_factor", returning(0.0), "returned 0.0"),
        ("cos_sin_factor", returning(torch.ones(2)), "shape (2,)"),
        ("scale_at", returning(-1.0), "returned -1.0"),
        ("rope_parameters", returning({"factor": 2.0}), "{'factor': 2.0}"),
        ("rope_parameters", raising, "my mistake"),
        ("check_beside", raising, "my mistake"),
    ],
    Dynamic: [
        ("inv_freq", lambda _, rope, n=None: rope.default_inv_freq() - (n or 0), "from -"),
        ("bucket_size", returning(0), "returned 0"),
        ("scale_at", raising, "my mistake"),
    ],
    TableFilter: [("filtered", lambda _, f, rope: f * float("nan"), "with nan, nan, nan")],
    RotaryBands: [
        ("query_position", lambda _, m, original: (-m).double().log(), "with nan"),
        ("query_position", lambda _, m, original: m / 2, "float32"),
        ("key_position", lambda _, n, original: n.double().log(), "with -inf"),
        ("key_position", lambda _, n, original: 0, "returned 0"),
        ("key_position", raising, "my mistake"),
        ("bands", returning(()), "returned ()"),
        ("bands", returning((ALL, ALL)), "bands of which a pair is in one at most"),
        ("key_position", RotaryBands.key_position, "key_position of band 1 is needed, and not"),
        ("near_window", raising, "bands raised RuntimeError: my mistake"),
    ],
    GrowingBands: [
        ("bands", returning([1]), "returned [1]"),
        ("bands", lambda self, original, length: raising(self), "my mistake"),
    ],
    DistanceBias: [
        ("bias", lambda _, d, heads, *__: -d.log().expand(heads, *d.shape), "finite at distance 0"),
        ("bias", lambda _, d, heads, *__: -d, "float32 of shape (2, 3)"),
        ("bias", lambda _, d, heads, *__: (0 * d).int().expand(heads, *d.shape), "int32"),
        ("bias", raising, "my mistake"),
        ("initial", returning(None), "returned None"),
        ("initial", returning(MIXED), "initial (b) returned float32 of shape (2,) on cpu with nan"),
        ("horizon", lambda _, drop, heads, *__: -drop, "from -64 to -64"),
        ("horizon", lambda _, drop, heads, *__: drop / 4, "below -drop"),
        ("shared_parameters", property(lambda _: ("w",)), "('w',). It has to return names of its"),
    ],
    RelativeKeys: [
        ("relative", lambda _, d, *__: d, "float32 of shape (6,)"),
        ("initial", raising, "my mistake"),
        ("content_bias", returning(torch.zeros(3)), "shape (3,)"),
        ("position_bias", lambda _, w: 0.0, "returned 0.0"),
        ("constant_from", returning(-1), "returned -1"),
    ],
    Method: [
        ("query_factor", lambda _, m, original: m.double().log(), "with -inf"),
        ("query_factor", lambda _, m, original: 2.0, "returned 2.0"),
    ],
    XPos: [("query_scale", lambda _, m, dim, origin: m[:, None] * 1.0, "shape (3, 1)")],
    RopeBias: [("parameters_for", lambda _, *__: {"a": torch.zeros(2).double()}, "float64")],
    TableMethod: [
        ("rows", lambda _, rows, n: rows, "It has to return finite numbers, float64, of shape"),
        ("rows", lambda _, rows, n: (rows[:1] * float("nan")).expand(n, -1), "with nan"),
        ("rows", raising, "my mistake"),
    ],
    Interpolate: [("check", raising, "my mistake")],
}
CASES = [
    pytest.param(base, *case, id=f"{base.__name__}-{case[0]}-{number}")
    for base, cases in WRONG.items()
    for number, case in enumerate(cases)
]


def mine(base: type[Method], right: dict[str, Any], hook: str = "", wrong: Any = None) -> Any:
    hooks = {**NAMES, **right} | ({hook: wrong} if hook else {})
    kind: Any = dataclasses.dataclass(frozen=True, kw_only=True)(type("Mine", (base,), hooks))
    return kind(**({"scale": 2.0} if kind.knobs().get("scale") is dataclasses.MISSING else {}))


def refused(model: PreTrainedModel, method: Any, hook: str, words: str) -> None:
    with zoo.unchanged(model), pytest.raises(PosencError) as error:
        patch_model(model, method)
    message = str(error.value)
    assert message.startswith("mine: ")
    assert (hook if hook != "near_window" else "bands") in message
    assert words in message
    assert get_patch(model) is None


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build()


@pytest.fixture(scope="module")
def gpt2() -> PreTrainedModel:
    return zoo.build("gpt2")


@pytest.mark.parametrize(("base", "hook", "wrong", "words"), CASES)
def test_a_wrong_hook(
    llama: PreTrainedModel, gpt2: PreTrainedModel, base: Any, hook: str, wrong: Any, words: str
) -> None:
    model = gpt2 if issubclass(base, TableMethod) else llama
    refused(model, mine(base, RIGHT.get(base, {}), hook, wrong), hook, words)


def test_after_all_of_them_good_methods_work(llama: PreTrainedModel, gpt2: PreTrainedModel) -> None:
    ids = zoo.tokens(30)
    for model, method, like in (
        (llama, mine(Scaled, FREQUENCIES), PositionInterpolation(scale=2)),
        (llama, mine(RotaryBands, BANDS), None),
        (llama, mine(DistanceBias, BIAS), None),
        (llama, mine(Scaled, {"inv_freq": scaled(0), "stops_pairs": True}), None),
        (gpt2, mine(Interpolate, {}), Interpolate(scale=2)),
    ):
        patched = zoo.logits(patch_model(model, method), ids)
        if like is not None:
            want = zoo.logits(patch_model(model, like, replace=True), ids)
            torch.testing.assert_close(patched, want)
        unpatch_model(model)


def test_a_wrong_filter_in_a_list_and_a_wrong_method_of_some_layers(llama: PreTrainedModel) -> None:
    wrong = mine(TableFilter, {}, "filtered", lambda self, f, rope: -f)
    refused(llama, [YaRN(scale=2), ResonanceRoPE(), wrong], "filtered", "from -")
    wrong = mine(Scaled, FREQUENCIES, "inv_freq", scaled(float("nan")))
    refused(llama, {0: wrong, 1: YaRN(scale=2)}, "inv_freq", "with nan")


def test_an_error_of_the_method_s_own_is_its_message(llama: PreTrainedModel) -> None:
    def own(self: Any, rope: Any, length: Any = None) -> Any:
        raise PosencError("Give a smaller power.")

    zoo.refused(llama, r"^Give a smaller power\.$", mine(Scaled, {}, "inv_freq", own))


def test_probing_draws_no_random_numbers(llama: PreTrainedModel) -> None:
    def drawn(self: Any, heads: int, original: int) -> dict[str, torch.Tensor]:
        return {"w": torch.rand(heads)}

    torch.manual_seed(0)
    want = torch.rand(4)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="starts untrained"):
        patch_model(llama, mine(DistanceBias, BIAS | {"trainable": True}, "initial", drawn))
    weights = dict(llama.named_parameters())
    assert torch.equal(next(w for n, w in weights.items() if n.endswith("posenc.w")), want)


def test_only_methods_that_say_so_stop_pairs() -> None:
    stopping = {m.name for m in METHODS if issubclass(m, RopeScaling) and m.stops_pairs}
    assert stopping == {"nope", *(m.name for m in METHODS if issubclass(m, TableFilter))}
    assert NoPE.stops_pairs
