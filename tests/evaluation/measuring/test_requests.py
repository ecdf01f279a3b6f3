"""The entries of `--patch`: how they are read, which get an automatic scale, what they ask `patch_model` for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.grid import MethodEntry
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.methods import METHODS, LengthDependent, LogN, ReRoPE, YaRN
from tests.support import zoo
from tests.support.references import REQUIRED

NEEDS_MORE: dict[str, str | None] = {
    **{
        name: ",".join(f"{knob}={value}" for knob, value in required(8).items())
        for name, required in REQUIRED.items()
    },
    **dict.fromkeys(("longrope", "dpe")),  # lists have no short form
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return zoo.build("llama", num_hidden_layers=1)


@pytest.mark.parametrize(
    "name", [m.name for m in METHODS if m.for_rotary and NEEDS_MORE.get(m.name, "") is not None]
)
@pytest.mark.filterwarnings("ignore:.*starts untrained")
def test_every_method_is_patched_in_by_its_name_alone(name: str, llama: Any) -> None:
    spec = f"{name}:{NEEDS_MORE[name]}" if name in NEEDS_MORE else name
    candidate = Candidate.parse(spec).checked(llama)
    assert hf_posenc.get_patch(llama) is None
    with candidate.applied(llama, 256):
        patch = zoo.in_force(llama)
        assert patch.method == name
        own = getattr(patch.config.build()[0], "scale", None)
        assert patch.config.scale == (4.0 if candidate.scale_at(256) else own)
    assert hf_posenc.get_patch(llama) is None


def test_which_methods_scale_automatically() -> None:
    alone = [method.name for method in METHODS if method.name not in NEEDS_MORE]
    automatic = {name for name in alone if Candidate.parse(name).auto_scale}
    required = {m.name for m in METHODS if m.knobs().get("scale") is dataclasses.MISSING}
    assert automatic == required | {"self_extend", "leaky_rerope"}
    for given in ("self_extend:group=4", "leaky_rerope:k=8", "self_extend:scale=4", "dynamic_ntk"):
        assert not Candidate.parse(given).auto_scale, given
    assert Candidate.parse("self_extend:window=16").auto_scale
    # beside a scale that is required, one that can be left out is left out
    yarn, extend = Candidate.parse("yarn+self_extend").parts
    assert (yarn.auto, extend.auto) == (True, False)
    assert Candidate.parse("self_extend+log_n").parts[0].auto
    assert not Candidate.parse("yarn:scale=4+self_extend").auto_scale


@pytest.mark.parametrize(
    ("spec", "label", "method", "options"),
    [
        ("rerope:window=12,log_n=true", "rerope (window 12, log_n)", "rerope", {"window": 12, "log_n": True}),
        ("self_extend", "self_extend (auto)", "self_extend", {"scale": 4.0}),
        ("linear", "pi (auto)", "pi", {"scale": 4.0}),
        ("yarn:scale=2.5", "yarn (scale 2.5)", "yarn", {"scale": 2.5}),
        ("yarn:scale=4+log_n", "yarn (scale 4) + log_n", [YaRN(scale=4), LogN()], {}),
        ("yarn + rerope:window=9", "yarn (auto) + rerope (window 9)", [YaRN(scale=4.0), ReRoPE(window=9)], {}),
        ("yarn:replace=true+log_n", "yarn (auto, replace) + log_n", [YaRN(scale=4.0), LogN()], {"replace": True}),
        ("abf:rope_theta=1e+6", "abf (rope_theta 1e+06)", "abf", {"rope_theta": 1e6}),
        ("ntk:target_length=512", "ntk (target_length 512)", "ntk", {"target_length": 512}),
    ],
)  # fmt: skip
def test_what_is_asked_for(spec: str, label: str, method: Any, options: dict[str, Any]) -> None:
    request = Candidate.parse(spec)
    assert request.label == label
    assert request.arguments(4.0) == (method, options)


@pytest.mark.parametrize("name", [m.name for m in METHODS if issubclass(m, LengthDependent)])
def test_only_the_row_mode_leaves_a_prefix_alone(name: str) -> None:
    modes = [Candidate.parse(f"{name}:update={mode}") for mode in ("sequence", "request", "row")]
    assert [mode.parts[0].length_dependent for mode in modes] == [True, True, False]
    assert [mode.changes_attention for mode in modes] == [False, True, True]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rerpe", "Unknown method 'rerpe'. Did you mean 'rerope'"),
        ("yarn:scale=4+rerpe", "Unknown method 'rerpe'"),
        ("yarn+", "Unknown method 'yarn+'"),
        ("truncation:window=4", "--patch truncation:window=4: truncation takes no options."),
        ("yarn:target_length=512+log_n", "target_length belongs to one method"),
        ("yarn:layers=all+log_n:layers=full", "layers is given twice, with different values"),
        ("yarn:target_length=1.5k", "target_length: '1.5k' is no length; give a whole number"),
    ],
)
def test_what_cannot_be_read(spec: str, message: str) -> None:
    with pytest.raises(PosencError, match=message.replace("+", r"\+")):
        Candidate.parse(spec)


def test_a_composition_is_stored_with_all_its_parts() -> None:
    candidate = Candidate.parse("yarn:scale=4,layers=all+log_n").checked(zoo.build("llama"))
    stored = MethodEntry.of(candidate, shared=True)
    assert stored.method == "yarn+log_n"
    parts = [(part["method"], part["options"]) for part in stored.parts]
    assert parts == [("yarn", {"scale": 4}), ("log_n", {})]
    assert stored.beside == {"layers": "all"}
    assert (stored.scale, stored.auto_scale) == (4, False)
