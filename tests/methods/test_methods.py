"""The methods against the published formulas and against transformers' own functions."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc.methods as methods
from hf_posenc.errors import PosencError
from hf_posenc.methods import Growing, RopeScaling, available_methods, bucket_length, get_method
from hf_posenc.methods.contract import check_frequencies
from hf_posenc.rope import RopeSpec
from tests.support.references import DYNAMIC, KNOBS, REFERENCES, REQUIRED, default
from tests.support.zoo import frequency_methods, promising

FREQUENCY = frequency_methods()
"""The methods that this file is about; those on other seams: tests/methods/test_rotary_bands.py and its like."""


def test_who_declines_a_contract() -> None:
    """A new method that declines one is no change here; today's methods keep their promises."""
    assert {"abf", "nope", "longrope"}.isdisjoint(promising("identity_at_scale_one"))
    assert {"nope", "longrope"}.isdisjoint(promising("only_lowers_frequencies"))
    kept = {*DYNAMIC, *DYNAMIC.values(), "ntk_by_parts", "ntk_mixed", "llama3"}
    assert kept <= {*promising("identity_at_scale_one", "only_lowers_frequencies")}
    assert "abf" in promising("only_lowers_frequencies")


def build(name: str, **options: Any) -> RopeScaling:
    method = get_method(name).from_options(**options)
    assert isinstance(method, RopeScaling)
    return method


def example(name: str, dim: int = 64, scale: float = 8.0) -> RopeScaling:
    options: dict[str, Any] = {"scale": scale} if get_method(name).takes_scale() else {}
    return build(name, **options, **(REQUIRED[name](dim // 2) if name in REQUIRED else {}))


def assert_close(got: Tensor, want: list[float]) -> None:
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)


CLIPS: tuple[dict[str, Any], ...] = (
    {},
    *({"soft": soft} for soft in (1, 2, 20, 99)),
    *({"pairs": pairs} for pairs in (1, 3, 99)),
    *({"share": share} for share in (0.0, 0.25, 0.29, 1.0)),
    *({"turns": turns} for turns in (0.5, 1.0, 8.0)),
)
thetas = st.floats(1e3, 1e7)
dims = st.integers(2, 64).map(lambda pairs: 2 * pairs)
trained_lengths = st.integers(64, 1 << 17)
scales = st.floats(1.0, 128.0)


def test_every_method_has_a_reference() -> None:
    assert set(REFERENCES) == set(FREQUENCY)


@pytest.mark.parametrize("name", sorted(REFERENCES))
@settings(max_examples=30)
@given(data=st.data())
def test_equals_the_published_formula(name: str, data: st.DataObject) -> None:
    dim, theta = data.draw(dims), data.draw(thetas)
    trained, ratio = data.draw(trained_lengths), data.draw(st.floats(0.1, 64.0))
    length = data.draw(st.sampled_from([None, trained, trained + 1, math.ceil(trained * ratio)]))
    knobs = REQUIRED[name](dim // 2) if name in REQUIRED else {}
    knobs |= {k: data.draw(st.sampled_from(v), k) for k, v in KNOBS.get(name, {}).items()}
    if get_method(name).takes_scale():
        knobs["scale"] = data.draw(scales)
    if name == "abf":
        knobs["rope_theta"] = data.draw(thetas)
    if name == "clip":
        knobs = data.draw(st.sampled_from(CLIPS))
    if name == "longrope":
        divisors = st.lists(st.floats(0.5, 80.0), min_size=dim // 2, max_size=dim // 2)
        knobs |= {"short_factor": data.draw(divisors), "long_factor": data.draw(divisors)}
        knobs["attention_factor"] = data.draw(st.sampled_from([None, 1.19]))
        knobs["long_mscale"] = data.draw(st.sampled_from([None, 1.25]))

    method = build(name, **knobs)
    frequencies, factor = REFERENCES[name](dim, theta, trained, length, **knobs)
    rope = RopeSpec(dim, theta, trained)
    assert_close(method.inv_freq(rope, length), frequencies)
    assert float(method.cos_sin_factor(rope, length)) == pytest.approx(factor, rel=1e-6)

    as_tensor = None if length is None else torch.tensor(length)
    assert_close(method.inv_freq(rope, as_tensor), frequencies)
    assert float(method.cos_sin_factor(rope, as_tensor)) == pytest.approx(factor, rel=1e-6)


@given(dim=dims, theta=thetas, trained=trained_lengths)
def test_the_default_table_is_rope_itself(dim: int, theta: float, trained: int) -> None:
    assert_close(RopeSpec(dim, theta, trained).default_inv_freq(), default(dim, theta, trained)[0])


# ------------------------------------------------------------------------------------------
# Against transformers


def native(dim: int, theta: float, trained: int, parameters: dict[str, Any]) -> LlamaConfig:
    rope = {"rope_theta": theta} | parameters
    return LlamaConfig(head_dim=dim, max_position_embeddings=trained, rope_parameters=rope)


NATIVE: list[tuple[str, str, dict[str, Any]]] = [
    ("pi", "linear", {}),
    ("dynamic_ntk", "dynamic", {}),
    ("yarn", "yarn", {}),
    ("yarn", "yarn", {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}),
    # With 64 trained tokens, the ramp has no length: its ends are the same pair.
    ("yarn", "yarn", {"beta_fast": 32.0, "beta_slow": 11.0}),
    ("yarn", "yarn", {"beta_fast": 4.0, "beta_slow": 4.0}),
    ("yarn", "yarn", {"attention_factor": 1.3}),
    ("yarn", "yarn", {"mscale": 1.0, "mscale_all_dim": 0.707}),
    ("yarn", "yarn", {"mscale": 0.707}),
    ("llama3", "llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ("llama3", "llama3", {"low_freq_factor": 1.0, "high_freq_factor": 1.0}),  # Llama 4 Scout
    ("longrope", "longrope", {}),
    ("longrope", "longrope", {"attention_factor": 1.19}),
]


@pytest.mark.parametrize(("name", "rope_type", "options"), NATIVE)
@pytest.mark.parametrize(
    "table",
    [(128, 5e5, 8192), (64, 1e4, 2048), (16, 1e4, 64), (16, 10.0, 8192)],  # a ramp that ends behind
)
@pytest.mark.parametrize("ratio", [0.5, 1.0, 4.3])
def test_equals_transformers(
    name: str, rope_type: str, options: dict[str, Any], table: tuple[int, float, int], ratio: float
) -> None:
    dim, _, trained = table
    if name == "longrope":
        options = options | {
            "short_factor": [1.0 + 0.01 * i for i in range(dim // 2)],
            "long_factor": [1.0 + 0.3 * i for i in range(dim // 2)],
        }
    parameters = {"rope_type": rope_type, "factor": 8.0} | options
    if rope_type in ("yarn", "llama3", "longrope"):
        parameters["original_max_position_embeddings"] = trained
    config = native(*table, parameters)
    length = int(ratio * trained)
    want, want_factor = ROPE_INIT_FUNCTIONS[rope_type](config, device="cpu", seq_len=length)

    method = build(name, scale=8.0, **options)
    rope = RopeSpec(*table)
    got = method.inv_freq(rope, length)
    # transformers computes in float32: its power alone is off by some 1e-6
    torch.testing.assert_close(got, want.double(), rtol=3e-6, atol=0)
    assert float(method.cos_sin_factor(rope, length)) == pytest.approx(want_factor, rel=1e-6)


@pytest.mark.parametrize("name", FREQUENCY)
def test_native_parameters_say_the_same(name: str) -> None:
    """The ``rope_parameters`` of a method give the same table in transformers."""
    method = example(name)
    rope = RopeSpec(64, 10_000.0, 2048)
    parameters = method.rope_parameters(rope)
    if parameters is None:
        return
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        want = torch.tensor(default(64, parameters["rope_theta"], 2048)[0], dtype=torch.float64)
        want_factor = 1.0
    else:
        config = native(64, rope.theta, 2048, parameters)
        want, want_factor = ROPE_INIT_FUNCTIONS[rope_type](config, device="cpu", seq_len=9000)
    torch.testing.assert_close(method.inv_freq(rope, 9000), want.double(), rtol=3e-6, atol=0)
    assert float(method.cos_sin_factor(rope, 9000)) == pytest.approx(want_factor, rel=1e-6)


# ------------------------------------------------------------------------------------------
# What holds for every method


def trained_tables() -> list[Tensor]:
    exponents = torch.arange(0, 64, 2, dtype=torch.float32) / 64
    # Most pairs of the last one do not rotate at all.
    proportional = (1.0 / 1e6**exponents) * (torch.arange(32) < 8)
    return [1.0 / 1e4**exponents, (1.0 / 5e5**exponents), proportional]


NEUTRAL: dict[str, dict[str, Any]] = {
    "abf": {"rope_theta": 1e4},
    "longrope": {"short_factor": [1.0] * 32, "long_factor": [1.0] * 32},
}
"""Options that change nothing, of methods that decline the contract of a scale of 1."""


@pytest.mark.parametrize("name", [*promising("identity_at_scale_one"), *NEUTRAL])
@pytest.mark.parametrize("table", trained_tables(), ids=["1e4", "5e5", "proportional"])
def test_neutral_options_change_no_bit(name: str, table: Tensor) -> None:
    """Given the model's own float32 table, a scale of 1 gives back the same float32 bits."""
    rope = RopeSpec(64, 1e4, 2048, frequencies=table)
    method = build(name, **NEUTRAL[name]) if name in NEUTRAL else example(name, scale=1.0)
    for length in (None, 1, 2048, torch.tensor(2048), *([9000] if name in NEUTRAL else [])):
        assert torch.equal(method.inv_freq(rope, length).float(), table)
        assert float(method.cos_sin_factor(rope, length)) == 1.0


@pytest.mark.parametrize("name", FREQUENCY)
def test_pairs_that_do_not_rotate_stay_so(name: str) -> None:
    """A proportional table (Gemma 4) has zeros at its end; no method may make them turn."""
    table = trained_tables()[-1]
    changed = example(name).inv_freq(RopeSpec(64, 1e6, 2048, frequencies=table), 9000)
    assert changed.shape == table.shape
    assert torch.all(changed[8:] == 0)


@pytest.mark.parametrize(("dynamic", "static"), DYNAMIC.items())
@given(trained=trained_lengths, ratio=st.floats(0.01, 64.0), theta=thetas)
def test_dynamic_equals_static_at_the_needed_scale(
    dynamic: str, static: str, trained: int, ratio: float, theta: float
) -> None:
    length = max(1, int(trained * ratio))
    rope = RopeSpec(64, theta, trained)
    still = build(static, scale=max(1.0, length / trained))
    for current in (length, torch.tensor(length), torch.tensor(length, dtype=torch.int32)):
        moving = build(dynamic)
        torch.testing.assert_close(moving.inv_freq(rope, current), still.inv_freq(rope))
        factor = moving.cos_sin_factor(rope, current)
        assert float(factor) == pytest.approx(float(still.cos_sin_factor(rope)))


@pytest.mark.parametrize("name", FREQUENCY)
def test_only_length_dependent_methods_look_at_the_length(name: str) -> None:
    method = example(name)
    rope = RopeSpec(64, 1e4, 2048)
    same = torch.equal(method.inv_freq(rope, 2048), method.inv_freq(rope, 20_000))
    assert same is not get_method(name).length_dependent


@pytest.mark.parametrize("name", promising("only_lowers_frequencies"))
@given(scale=st.floats(1.01, 64.0), theta=thetas, dim=dims)
@settings(max_examples=30)
def test_frequencies_only_fall_in_order(name: str, scale: float, theta: float, dim: int) -> None:
    rope = RopeSpec(dim, theta, 2048)
    method = build("abf", rope_theta=theta * scale) if name == "abf" else example(name, dim, scale)
    table = method.inv_freq(rope, math.ceil(2048 * scale))
    unscaled = rope.default_inv_freq()
    assert torch.all(table[1:] <= table[:-1])
    assert torch.all(table <= unscaled * (1 + 1e-12))
    longest = scale * scale if name == "dynamic_ntk" else scale * (1 + 1 / 2048)
    assert torch.all(table >= unscaled / longest * (1 - 1e-9))


@pytest.mark.parametrize("name", promising("identity_at_scale_one", "only_lowers_frequencies"))
def test_more_scale_lowers_more(name: str) -> None:
    rope = RopeSpec(64, 1e4, 2048)
    little, much = (example(name, scale=s).inv_freq(rope, int(2048 * s)) for s in (2.0, 8.0))
    assert torch.all(much <= little)
    assert (much / little).min() < 0.5


def test_the_radix_family_divides_by_powers_of_the_scale() -> None:
    """`f_i / s^e_i`: the e_i on the page of mrrope; only yarn's and partial_ntk's depend on s."""
    rope, pairs = RopeSpec(128, 1e4, 4096), torch.arange(64, dtype=torch.float64)
    low, high = 20, 46  # the pairs of 32 turns and of one
    between = ((pairs - low) / (high - low)).clamp(0, 1)
    steps = between * (high - low)
    expected = {
        ("pi", ()): torch.ones(64, dtype=torch.float64),
        ("ntk", ()): pairs / 63,
        ("ntk_mixed", ()): ((pairs + 1) / 64) ** 0.75,
        ("mrrope", ()): between,
        ("mrrope", (("ramp", "progressive"),)): steps * (steps + 1) / (26 * 27),
    }
    for (name, knobs), exponents in expected.items():
        for scale in (2.0, 16.0):
            table = build(name, scale=scale, **dict(knobs)).inv_freq(rope)
            got = (rope.default_inv_freq() / table).log() / math.log(scale)
            torch.testing.assert_close(got, exponents, rtol=1e-9, atol=1e-12)
    slow = 4096 / (2 * math.pi * 1e4 ** (63 / 64))
    wide = build("mrrope", scale=8.0, beta_fast=1e9, beta_slow=slow, truncate=False)
    torch.testing.assert_close(wide.inv_freq(rope), build("ntk", scale=8.0).inv_freq(rope))


def test_the_base_of_diffusion_models_as_published() -> None:
    """LLaDA (4,096 tokens, base 500,000, heads of 128): critical dimensions 64 and 70; LongLLaDA's 14 and 55."""
    rope = RopeSpec(128, 5e5, 4096)
    for scale, factor in ((4, 14), (8, 55)):
        table = build("diffusion_ntk", scale=scale, both_sides=False).inv_freq(rope)
        assert round(float(table[1] ** -64) / 5e5 + 0.45) == factor
    for both, (met, critical) in {False: (4096, 64), True: (8192, 70)}.items():
        table = build("diffusion_ntk", scale=32, both_sides=both).inv_freq(rope)
        turns = float(table[1] ** (critical / 2)) * 32 * met / (2 * math.pi)
        assert turns == pytest.approx(1.0)  # the critical pair turns once over the longer text


# ------------------------------------------------------------------------------------------
# Names, options, refusals


def test_names_and_aliases() -> None:
    assert get_method("linear") is get_method("pi")
    assert get_method("dynamic") is get_method("dynamic_ntk")
    assert get_method("dynamic_linear") is get_method("dynamic_pi")
    assert get_method("YaRN") is get_method("yarn")
    assert get_method("ntk-by-parts") is get_method("ntk_by_parts")
    names = [n for m in methods.METHODS for n in (m.name, *m.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", available_methods())
def test_every_method_says_what_it_is(name: str) -> None:
    method = get_method(name)
    assert method.summary
    assert method.source
    assert method.needs
    assert method.__doc__
    for field in dataclasses.fields(method):
        assert any(f" {field.name}: " in (base.__doc__ or "") for base in method.__mro__)


def test_a_method_is_registered_by_its_definition() -> None:
    """In a module of `hf_posenc.methods`; a user's own class, whatever its name, is not."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class YaRN(methods.YaRN):
        name: ClassVar[str] = "yarn"

    assert get_method("yarn") is methods.YaRN is not YaRN
    folder = Path(methods.__file__).parent
    defined = re.findall(
        r"^class ([A-Z]\w*)\([^)]*\):(?:(?!^class )[\s\S])*?^    name = \"(\w+)\"",
        "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))),
        flags=re.MULTILINE,
    )
    assert {name for _, name in defined} == set(available_methods())
    assert all(getattr(methods, cls) is get_method(name) for cls, name in defined)
    with pytest.raises(ImportError, match="NoSuchMethod"):
        exec("from hf_posenc.methods import NoSuchMethod")


@pytest.mark.parametrize("name", FREQUENCY)
def test_unknown_options_are_refused(name: str) -> None:
    options = example(name).options()
    with pytest.raises(PosencError, match="sclae"):
        get_method(name).from_options(**options, sclae=2.0)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("pi", {}, "scale"),
        ("pi", {"scale": 0.5}, "scale"),
        ("pi", {"scale": math.nan}, "scale"),
        ("pi", {"scale": math.inf}, "scale"),
        ("pi", {"scale": "8"}, "scale"),
        ("pi", {"scale": True}, "scale"),
        ("yarn", {"scale": 8, "beta_fast": 0}, "beta_fast"),
        ("yarn", {"scale": 8, "beta_slow": -1}, "beta_slow"),
        ("yarn", {"scale": 8, "beta_fast": 1, "beta_slow": 32}, "beta_fast"),
        ("yarn", {"scale": 8, "beta_fast": 4, "beta_slow": 4, "ramp": "rotations"}, "beta_fast"),
        ("yarn", {"scale": 8, "ramp": "cubic"}, "ramp"),
        ("yarn", {"scale": 8, "attention_factor": 0}, "attention_factor"),
        ("yarn", {"scale": 8, "mscale": -1}, "mscale"),
        ("yarn", {"scale": 8, "truncate": "no"}, "truncate"),
        ("ntk_by_parts", {"scale": 8, "attention_factor": 1.2}, "attention_factor"),
        ("partial_ntk", {"scale": 8, "beta_0": 0}, "beta_0"),
        ("partial_ntk", {"scale": 8, "beta_0": 0.5}, "beta_0 .0.5. must be at least beta_1"),
        ("dynamic_partial_ntk", {"gamma_1": 20}, "gamma_0 .16. must be at least gamma_1 .20."),
        ("partial_ntk", {"scale": 8, "ntk_factor": 1.5}, "ntk_factor is a number .* at most 1"),
        ("llama3", {"scale": 8, "high_freq_factor": math.inf}, "high_freq_factor"),
        ("longrope", {"short_factor": [1], "long_factor": [2], "long_mscale": -1}, "long_mscale"),
        ("dynamic_pi", {"scale": 4}, "scale"),
        ("dynamic_ntk", {"scale": 0.5}, "scale"),
        ("dynamic_ntk", {"update": "rows"}, "update"),
        ("dynamic_ntk", {"update": "row", "bucket": 0}, "bucket"),
        ("dynamic_pi", {"bucket": 256.5}, "bucket"),
        ("longrope", {"short_factor": [1.0], "long_factor": [1.0], "update": "batch"}, "update"),
        ("ntk_mixed", {"scale": 8, "q": 0}, "q"),
        ("llama3", {"scale": 8, "low_freq_factor": 0}, "low_freq_factor"),
        ("llama3", {"scale": 8, "low_freq_factor": 4, "high_freq_factor": 3}, "high_freq_factor"),
        ("longrope", {"scale": 8}, "short_factor"),
        ("longrope", {"short_factor": [], "long_factor": [1.0]}, "short_factor"),
        ("longrope", {"short_factor": [1.0], "long_factor": [0.0]}, "long_factor"),
        ("longrope", {"short_factor": [1.0], "long_factor": ["x"]}, "long_factor"),
        ("longrope", {"short_factor": 1.0, "long_factor": [1.0]}, "short_factor"),
        ("abf", {}, "rope_theta"),
        ("abf", {"rope_theta": 1.0}, "rope_theta"),
        ("abf", {"rope_theta": 1e6, "scale": 4}, "scale"),
        ("nope", {"scale": 4}, "scale"),
        ("rerope", {"window": 0}, "window is a whole number of at least 1"),
        ("rerope", {"window": 2**31}, "window is .* at most 2,147,483,647"),
        ("pi", {"scale": 10**400}, "scale is a number of at least 1"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(PosencError, match=named):
        get_method(name).from_options(**options)


@pytest.mark.parametrize("pairs", range(2, 65))
def test_clip_stops_the_authors_share_of_any_number_of_pairs(pairs: int) -> None:
    frequencies, _ = REFERENCES["clip"](2 * pairs, 1e4, 64, None)
    assert_close(build("clip").inv_freq(RopeSpec(2 * pairs, 1e4, 64)), frequencies)


def test_truncated_keeps_a_pair_at_the_cutoff() -> None:
    method = build("truncated_basis", wavelength=2 * math.pi)
    assert float(method.inv_freq(RopeSpec(64, 1e4, 64))[0]) == 1.0


def test_a_pair_that_underflows_is_stopped() -> None:
    rope = RopeSpec(16, 1e4, 64)
    assert check_frequencies(build("power_basis", power=60.0), rope) is rope


def test_a_ramp_ends_within_the_head_where_few_pairs_turn_little() -> None:
    """L / (2 pi) is above theta squared: both ends of YaRN's ramp lie past the last feature."""
    knobs: dict[str, Any] = {"scale": 4.0, "beta_fast": 600.0, "beta_slow": 1.0}
    frequencies, _ = REFERENCES["yarn"](8, 10.0, 4096, None, **knobs)
    assert_close(build("yarn", **knobs).inv_freq(RopeSpec(8, 10.0, 4096)), frequencies)


def test_transformers_yarn_has_the_ramp_by_index_alone() -> None:
    rope = RopeSpec(64, 1e4, 2048)
    assert build("yarn", scale=4.0, ramp="index").rope_parameters(rope) is not None
    assert build("yarn", scale=4.0, ramp="rotations").rope_parameters(rope) is None


def test_longrope_depends_on_the_length_by_a_list_or_a_factor() -> None:
    same: dict[str, Any] = {"short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]}
    assert not build("longrope", **same).length_dependent
    assert build("longrope", **same, long_mscale=1.2).length_dependent
    other = build("longrope", **{**same, "long_factor": [1.0, 3.0]}, attention_factor=1.19)
    assert other.length_dependent
    native = other.rope_parameters(RopeSpec(4, 1e4, 64))
    assert native is not None
    assert native["attention_factor"] == 1.19


@pytest.mark.parametrize("name", FREQUENCY)
def test_a_method_can_be_a_key_of_a_dictionary(name: str) -> None:
    assert {example(name): name}[example(name)] == name


def test_angles_of_sinusoids_are_float64_from_a_list() -> None:
    w, m = [1.0, 0.3, 0.07], torch.arange(5, dtype=torch.float64)[:, None]
    for by, slowing in (("position", (9, 9, 9)), ("base", (1, 3, 9))):
        method = methods.Sinusoidal(scale=9.0, by=by)
        slowed = torch.tensor([a / s for a, s in zip(w, slowing, strict=True)], dtype=torch.float64)
        torch.testing.assert_close(method.angles(w, 5, 0.0), m * slowed, rtol=1e-14, atol=0)


def test_values_at_their_limits_are_taken() -> None:
    for name, options in (
        ("rerope", {"window": 2**31 - 1}),
        ("pi", {"scale": 1.0}),
        ("abf", {"rope_theta": 3_580_165_449}),  # of a Llama 3 with a million tokens
    ):
        assert get_method(name).from_options(**options).options() == options


def test_defaults_of_base_classes() -> None:
    assert build("abf", rope_theta=1e6).scale_at(RopeSpec(64, 1e4, 64), 99) == 1.0
    hierarchical = methods.Hierarchical(scale=4.0)
    hierarchical.check(4, 16)
    with pytest.raises(PosencError, match="which reach 16 tokens, not 17"):
        hierarchical.check(4, 17)
    growing = build("dynamic_ntk", update="row")
    assert isinstance(growing, Growing)
    assert growing.bucket_size(64) == 32


@pytest.mark.parametrize("name", [name for name in FREQUENCY if get_method(name).length_dependent])
@pytest.mark.parametrize("update", ["sequence", "request", "row"])
def test_every_length_dependent_method_has_three_modes(name: str, update: str) -> None:
    options = example(name).options() | {"update": update, "bucket": 64}
    method = build(name, **options)
    default = get_method(name).knobs()["update"]
    assert method.options() == {k: v for k, v in options.items() if (k, v) != ("update", default)}


def test_the_length_in_force_moves_on_by_buckets() -> None:
    m = torch.arange(12)
    assert bucket_length(m, 4, 3).tolist() == [4, 4, 4, 4, 7, 7, 7, 10, 10, 10, 13, 13]
    assert bucket_length(m, 4, 1).tolist() == [4, 4, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@given(m=st.integers(0, 1 << 40), trained=st.integers(1, 1 << 20), bucket=st.integers(1, 1 << 16))
def test_a_bucket_holds_its_positions(m: int, trained: int, bucket: int) -> None:
    length = int(bucket_length(torch.tensor(m), trained, bucket))
    assert (length == trained) == (m < trained)
    assert length >= m + 1 or m < trained
    assert (length - trained) % bucket == 0
    assert length - bucket < m + 1 or length == trained


@pytest.mark.parametrize(
    ("table", "named"),
    [
        *(((7, 1e4, 2048), None), ((0, 1e4, 2048), None), ((64, 1.0, 2048), None)),
        *(((64, math.inf, 2048), None), ((64, 1e4, 0), None)),
        ((64, 1e4, 2048, torch.ones(16)), "frequencies"),
    ],
)
def test_impossible_tables_are_refused(table: tuple[Any, ...], named: str | None) -> None:
    with pytest.raises(PosencError, match=named):
        RopeSpec(*table)


# ------------------------------------------------------------------------------------------
# The page that describes them


OUTLINE = ["When to use it, and when it fails", "Example", "Facts and knobs"]
OUTLINE += ["Equation", "Measured", "Source"]
DOCS = Path(__file__).parents[2] / "docs"
DESCRIBED = {page.stem for page in (DOCS / "methods").glob("*.md")}


@pytest.mark.parametrize("name", sorted({*available_methods(), *DESCRIBED}))
def test_every_method_has_a_page_with_all_parts(name: str) -> None:
    method, text = get_method(name), (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    start, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    assert re.match(rf"# `{name}`\n\n[A-Z].+?\.\n", start, flags=re.DOTALL)
    parts = dict(section.split("\n", 1) for section in sections)
    assert list(parts) == OUTLINE
    use, example, facts, equation, measured, source = parts.values()
    assert re.search(rf"facts {name} -->\n\| (?!.*rotary bands(?!, xpos))", facts, re.DOTALL)
    assert re.search(r"^\$\$\n.+\n\$\$$", equation, flags=re.MULTILINE)
    alternative, picture = re.findall(r"^!\[(.+?)\]\((.+?)\)$", equation, flags=re.MULTILINE)[0]
    assert len(alternative) > 20
    assert picture == f"pictures/{name}.png"
    assert 2_000 < (DOCS / "methods" / picture).stat().st_size < 40_000
    assert "- **Use it** " in use
    assert "- **It fails** " in use
    assert f"<!-- generated: measured {name} -->\n- " in measured
    code = re.findall(r"^```python\n(.+?)^```$", example, flags=re.MULTILINE | re.DOTALL)[0]
    assert f'patch_model(model, "{name}"' in code or f"{method.__name__}(" in code
    assert all(paper in source for paper in re.findall(r"\d{4}\.\d{5}", method.source))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("fire", "t5"), id="axes that are not linear"),
        pytest.param(None, id="all", marks=pytest.mark.slow),
    ],
)
def test_tick_labels_have_no_markup(names: tuple[str, ...] | None) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from hf_posenc.evaluation.plots import STYLE
    from scripts.draw_methods import PICTURES

    for name in names or PICTURES:
        with rc_context(STYLE):  # it prints dollars as they are
            PICTURES[name](figure := Figure())
            axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
            ticks = [text for axis in axes for text in axis.get_ticklabels(which="both")]
            labels = [text.get_text() for text in ticks]
        assert labels
        assert not [label for label in labels if "$" in label], name
