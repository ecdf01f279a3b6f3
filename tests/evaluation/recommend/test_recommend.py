"""Advice for a length: each number against a second computation, each call tried on a model."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig

from hf_posenc import PosencError, inspect_rope, patched
from hf_posenc.embedded import model_path
from hf_posenc.evaluation import recommend as room
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.perplexity.protocols import AGGREGATES, PROTOCOLS
from hf_posenc.evaluation.recommend import (
    Advice,
    cache_cost,
    facts,
    next_steps,
    notes,
    recommend,
    table,
)
from hf_posenc.evaluation.recommend.options import (
    AS_IT_IS,
    FINE_TUNED,
    FITTED,
    REFUSED,
    SHORT,
    TOLERANCE,
    WINDOW,
    Evidence,
    Option,
    evidence_of,
    least_base,
    met_until,
    summary,
    verdict,
)
from hf_posenc.methods import METHODS, NTKAware, RotaryBands, get_method
from hf_posenc.rope import RopeSpec
from scripts.results import EVIDENCE, TRANSCRIBED, evidence, read
from tests.support import zoo
from tests.support.commands import invoke, succeeded
from tests.support.selection import quick
from tests.support.tiny_text import sizes, tiny_checkpoint
from tests.support.zoo import CACHE

TRAINED = 64  # what zoo's models name
FACTOR = 8
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = TRAINED // 8


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def live() -> Any:
    return zoo.build("llama")


@pytest.fixture(scope="module")
def advice(live: Any) -> Advice:
    return recommend(live, TRAINED * FACTOR, name="some/model")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Judge these methods alone, for tests that read no other: each is tried on the model."""
    return lambda *names: monkeypatch.setattr(room, "METHODS", tuple(map(get_method, names)))


def llama(**config: Any) -> Any:
    return on_meta(zoo.tiny_config("llama", **config))


def by_name(advice: Advice) -> dict[str, Option]:
    return {option.method: option for option in advice.options}


def smallest(base: float, dim: int, length: int) -> float:
    """The least `sum_i cos(m f_i)` of arXiv 2405.14591's theorem over all distances below a length."""
    frequencies = base ** (-np.arange(0, dim, 2) / dim)
    return float(np.cos(np.outer(np.arange(length), frequencies)).sum(1).min())


@pytest.mark.parametrize(("dim", "length"), [(128, 512), (64, 900), (32, 700)])
def test_the_least_base_is_that_of_the_models_pairs(dim: int, length: int) -> None:
    spec = RopeSpec(dim, 1e4, 512)
    spec = dataclasses.replace(spec, frequencies=spec.default_inv_freq().float())  # a live model's
    found = least_base(spec, length)
    tried = [digits * 10.0**power for power in range(9) for digits in range(10, 100)]
    assert found == next(base for base in tried if smallest(base, dim, length) >= 0)


def test_half_of_the_pairs_take_a_far_larger_base(only: Callable[..., None]) -> None:
    spec = RopeSpec(64, 1e4, 2048)
    assert least_base(spec, 16_384) == 1.7e6  # the fit for 128 dimensions is 310,000
    assert smallest(3.1e5, 64, 16_384) < 0
    assert least_base(RopeSpec(4, 1e4, 64), 4096) is None  # two pairs: no base
    only("abf")
    reason = by_name(recommend(llama(head_dim=4), 4096))["abf"].reason
    assert "no base suffices for 4,096 tokens with 2 pairs" in reason


def test_where_ntk_breaks_is_where_it_was_seen_to_break() -> None:
    """PoSE's table 6: LLaMA-7B, trained at 2,048, NTK for 16,384: good at 4,096, broken at 16,384."""
    spec = RopeSpec(128, 1e4, 2048)
    slow = next(i for i in range(64) if 2048 * 1e4 ** (-2 * i / 128) < 2 * math.pi)
    naive = 2048 * 8 ** (2 * slow / 126)  # the pair's frequency is divided by s^(2i/(d-2))
    met = met_until(spec.default_inv_freq(), NTKAware(scale=8).inv_freq(spec), 2048)
    assert met == pytest.approx(naive)
    assert 4096 < met < 16384


def test_every_method_is_judged_once_and_ranked(advice: Advice) -> None:
    judged = [m.name for m in METHODS if m.for_rotary and m.for_causal]
    assert sorted(by_name(advice)) == sorted(judged)
    assert all(option.trial or option.options is None for option in advice.options)
    names = [option.method for option in advice.options]
    assert names[0] == "yarn"
    assert names.index("yarn") < names.index("dual_chunk") < names.index("ntk")
    assert names.index("ntk") < names.index("pi") < names.index("sliding_window")
    assert names.index("sliding_window") < names.index("string")  # which does not reach
    assert names.index("string") < names.index("alibi")
    reasons = {option.method: option.reason for option in advice.options}
    assert "collapse" in reasons["sliding_window"]  # which lacks the first tokens
    assert "collapse" not in reasons["attention_sinks"] + reasons["lm_infinite"]


def test_the_table_has_every_method_once_and_its_class_at_the_first(advice: Advice) -> None:
    rows = [[field.text for field in row.fields] for row in table(advice).rows]
    names = [(row[1], row[2].partition(":")[0]) for row in rows]
    assert names == [(option.kind, option.method) for option in advice.options]
    scaled = {option.spec for option in advice.options if "scale" in (option.options or ())}
    assert {row[2] for row in rows if ":" in row[2]} == scaled
    assert [row[0] for row in rows if row[0]][:4] == [AS_IT_IS, FINE_TUNED, FITTED, WINDOW]
    assert "Within a class the order is no finding" in " ".join(notes(advice))
    specs = re.findall(r"--patch (\w+)", advice.commands()[0])
    assert specs[:3] == ["none", "truncation", "attention_sinks"]
    kinds = [by_name(advice)[spec].kind for spec in specs[3:]]
    assert kinds == ["frequencies", "frequencies", "attention", "attention"]
    assert "ntk" not in specs  # a published table has it break at this factor


def test_evidence_names_its_factor_and_its_end(advice: Advice, only: Callable[..., None]) -> None:
    only("yarn", "self_extend", "ntk")
    reasons = {o.method: o.reason for o in recommend(llama(), TRAINED * 16).options}
    said = "held at x8 (LLaMA-7B, pose-t6-govreport), x16 is beyond what was measured"
    assert said in reasons["yarn"]
    assert "beyond" not in by_name(advice)["yarn"].reason  # x8
    assert "published, untrained: nothing" in reasons["self_extend"]
    assert "not at x8 (LLaMA-7B" in reasons["ntk"]
    assert "beyond" not in reasons["ntk"]  # it broke


def test_slow_pairs_stay_where_they_were_trained(live: Any, advice: Advice) -> None:
    """Read back from the patched model, for every table that is said to reach; and not for those that do not."""
    trained = inspect_rope(live)[0].inv_freq.double()
    slow = trained * TRAINED < 2 * math.pi
    assert bool(slow.any())
    target = TRAINED * FACTOR
    checked = 0
    for option in advice.options:
        if option.met is None or option.options is None or option.attention:
            continue
        with patched(live, option.method, **option.options):
            table = inspect_rope(live)[0].inv_freq.double()
        reaches = bool((target * table[slow] <= TRAINED * trained[slow] * (1 + 1e-6)).all())
        assert reaches == (option.works != SHORT), option.method
        checked += 1
    assert checked > 6


def test_the_scale_of_ntk_is_the_least_that_reaches(live: Any, advice: Advice) -> None:
    found: Any = by_name(advice)["ntk"].options
    table = inspect_rope(live)[0]
    slow = next(i for i, f in enumerate(table.inv_freq.tolist()) if TRAINED * f < 2 * math.pi)
    least = FACTOR ** ((table.dim - 2) / (2 * slow))
    assert found["scale"] == pytest.approx(least, rel=2e-3, abs=0.01)


@pytest.mark.parametrize("factor", [1.5, FACTOR])
def test_distances_of_the_bands(factor: float, only: Callable[..., None]) -> None:
    """Every pair of a text of the target length, by brute force."""
    target, near = int(TRAINED * factor), TRAINED
    only(*(kind.name for kind in METHODS if issubclass(kind, RotaryBands)))
    advice = recommend(llama(), target)
    m = torch.arange(target)[:, None].expand(target, target)
    n = m.T
    for option in advice.options:
        kind = get_method(option.method)
        if not issubclass(kind, RotaryBands) or kind.by_pair:
            continue
        method: Any = kind.from_options(**({"scale": factor} if kind.takes_scale() else {}))
        farthest, read = 0.0, torch.zeros(target, target, dtype=torch.bool)
        for band in method.bands(near):
            inside = band.contains(m, n) & (n <= m)
            distance = band.query_position(m) - band.key_position(n)
            if bool(inside.any()):
                farthest = max(farthest, float(distance[inside].max()))
            read |= inside
        all_read = bool(read[n <= m].all())
        assert (option.works == WINDOW) == (not all_read), option.method
        assert (option.works == SHORT) == (all_read and farthest > near), option.method


def test_every_call_and_spec_is_what_was_tried(advice: Advice) -> None:
    def patch_model(_: Any, *given: Any, **options: Any) -> Any:
        return (*given, options)

    every: tuple[Any, ...] = advice.options
    for option in every:
        if option.call is None or option.spec is None:
            continue
        assert option.trial
        called = eval(option.call, {"patch_model": patch_model, "model": 0})
        assert Candidate.parse(option.spec).arguments() == option.candidate.arguments() == called


def test_a_checkpoint_that_is_scaled_already(only: Callable[..., None]) -> None:
    only("pi", "abf", "yarn", "rerope", "self_extend")
    advice = recommend(llama(rope_parameters=LLAMA3), TRAINED * 2)
    assert (advice.carried.original, advice.carried.reach) == (TRAINED // 8, TRAINED)
    assert advice.beside == {"compose": True}
    assert advice.factor == 2
    found: Any = by_name(advice)
    assert found["pi"].options == {"target_length": TRAINED * 2, "compose": True}
    assert found["pi"].trial
    assert found["abf"].options["replace"] is True
    swept = next(command for command in advice.commands() if "sweep" in command)
    assert advice.first
    assert all(f"--patch {option.spec}" in swept for option in advice.first)

    model = llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(PosencError, match=r"from 64 to 128\) or after it \(from 32 to 64\)"):
        recommend(model, TRAINED * 4)
    advice = recommend(model, TRAINED * 4, original=TRAINED)
    assert advice.carried.reach == TRAINED * 2
    assert advice.beside == {"replace": True, "original_max_position_embeddings": TRAINED}
    assert by_name(advice)["yarn"].trial
    target = {"target_length": TRAINED * 4, **advice.beside}
    assert by_name(advice)["abf"].options == {"rope_theta": ANY, **target}
    assert by_name(advice)["rerope"].works == REFUSED  # also without weights
    assert "patch_model" in advice.carried.note


def test_a_moving_table_is_named_and_its_long_list_scaled(only: Callable[..., None]) -> None:
    only("yarn", "self_extend")
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **lists}
    rope["original_max_position_embeddings"] = TRAINED
    config = {"rope_parameters": rope, "max_position_embeddings": 4 * TRAINED}
    advice = recommend(zoo.build("llama", **config), TRAINED * 2)
    assert not advice.needed
    assert f"change past {TRAINED:,} tokens" in advice.carried.note
    assert dict(facts(advice))["in a cache"] == advice.carried.note
    assert advice.commands()[0].endswith("--patch none --patch longrope")
    assert "generate()" not in advice.carried.note
    phi3 = zoo.build("phi3", **config, original_max_position_embeddings=TRAINED)
    assert "(but by generate() of this class)" in recommend(phi3, 99).carried.note
    encoder = recommend(zoo.build("eurobert", **config), TRAINED * 2)
    assert "change past" in encoder.carried.note
    assert "patch_model" not in encoder.carried.note  # its text is read in both directions
    assert not encoder.commands()
    assert "is not a causal language model: the commands that" in [*next_steps(encoder)][-1]
    advice = recommend(zoo.build("llama", **config), TRAINED * 8)
    assert advice.beside == {"compose": True}
    found = by_name(advice)
    for name in ("yarn", "self_extend"):
        assert found[name].trial, found[name].reason
        assert (found[name].options or {})["compose"] is True
    one_list = {**rope, "long_factor": [1.0] * 8}
    assert not recommend(zoo.build("llama", rope_parameters=one_list), TRAINED).carried.note


def test_a_config_that_names_the_length_before_its_scaling(only: Callable[..., None]) -> None:
    """As Qwen2.5's card writes it: max_position_embeddings stays, factor says how far it reaches.

    The weights were not trained with that scaling, so another one takes its place.
    """
    only("pi")
    yarn: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn["original_max_position_embeddings"] = TRAINED
    model = llama(rope_parameters=yarn)
    assert not recommend(model, TRAINED * 4).needed
    advice = recommend(model, TRAINED * 8)
    assert advice.carried.reach == TRAINED * 4
    assert advice.beside == {"replace": True}
    assert advice.factor == 8
    pi = by_name(advice)["pi"]
    assert pi.trial, pi.reason


def test_nothing_to_do(live: Any) -> None:
    advice = recommend(live, TRAINED)
    assert not advice.needed
    assert advice.options == ()
    assert advice.commands() == (
        f"hf-posenc perplexity MODEL --text 'YOUR/*.txt' --lengths {TRAINED} --patch none",
    )


def test_another_trained_length(live: Any, only: Callable[..., None]) -> None:
    """Every kind of method is then told so."""
    half = TRAINED // 2
    kinds = ("yarn", "self_extend", "rerope", "log_n")
    only(*kinds)
    advice = recommend(llama(), TRAINED * 2, original=half)
    assert advice.factor == 4
    assert dict(facts(advice))["checkpoint"] == "32 tokens by the given length."
    assert all(f"--patch {option.spec}" in advice.commands()[-1] for option in advice.first)
    for method in kinds:
        options: Any = by_name(advice)[method].options
        assert options["original_max_position_embeddings"] == half
        with patched(live, method, **options):
            assert zoo.in_force(live).original_max_position_embeddings == half


@pytest.mark.parametrize(("theta", "above"), [(1e4, "least"), (1e7, "ntk")])
def test_another_base(theta: float, above: str, only: Callable[..., None]) -> None:
    more: dict[str, Any] = {"max_position_embeddings": 1024, "num_hidden_layers": 2}
    config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": theta}, **more)
    only("abf")
    options: Any = by_name(recommend(on_meta(config), 8192))["abf"].options
    least, found = least_base(RopeSpec(128, theta, 1024), 8192), options["rope_theta"]
    bounds = {"least": least or 0, "ntk": theta * 8 ** (128 / 126)}
    assert max(bounds, key=lambda name: bounds[name]) == above
    assert bounds[above] <= found < bounds[above] * 1.1
    assert found == float(f"{found:.1e}")


def test_what_the_architecture_does_not_take(only: Callable[..., None]) -> None:
    only("yarn", "rerope", "dynamic_yarn")
    advice = recommend(zoo.build("glm_moe_dsa"), TRAINED * 4)
    found = by_name(advice)
    assert found["yarn"].works == AS_IT_IS
    assert found["rerope"].works == REFUSED
    assert found["rerope"].trial is False
    assert found["dynamic_yarn"].spec == "dynamic_yarn:update=sequence"
    assert found["dynamic_yarn"].works == AS_IT_IS
    assert advice.tested


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_whose_full_layers_do_not_rotate_needs_no_patch(device: str) -> None:
    model: Any = zoo.build("cohere2")
    model.to(device)
    message = 'need no patch, or log_n unless .* Pass layers="all" .* an option of patch_model'
    with pytest.raises(PosencError, match=message):
        recommend(model, TRAINED * 4)
    assert not recommend(model, TRAINED).needed


def test_refusals(live: Any) -> None:
    message = r"has no rotary embedding.* `hf-posenc inspect own` .* for that"
    for kind, end in (("bloom", "; `hf-posenc perplexity` compares them."), ("t5", ".")):
        with pytest.raises(PosencError, match=f"{message}{re.escape(end)}$"):
            recommend(zoo.build(kind), 1000, name="own")
    with pytest.raises(PosencError, match="number of tokens"):
        recommend(live, 0)
    with patched(live, "yarn", scale=2), pytest.raises(PosencError, match="unpatch_model"):
        recommend(live, 1000)


def test_from_the_config_alone() -> None:
    """The numbers of four layers of Llama-2-7B, without a weight."""
    model = on_meta(LlamaConfig(max_position_embeddings=4096, num_hidden_layers=4))
    advice: Any = recommend(model, 32_768, name="llama")
    found = by_name(advice)
    assert found["yarn"].trial
    assert found["rerope"].trial is None
    assert found["rerope"].works == AS_IT_IS
    # tokens, layers, k and v, features, bytes
    assert advice.cache.bytes == 32_768 * 4 * 2 * 4096 * 2
    for kind in ("gptj", "codegen"):  # with a table of sines, made once
        assert by_name(recommend(on_meta(zoo.tiny_config(kind)), 512))["yarn"].trial


def test_the_cache_of_windows_and_grouped_heads() -> None:
    config: Any = Gemma3TextConfig(num_hidden_layers=6)  # one of them full
    kinds = config.layer_types
    cost: Any = cache_cost(on_meta(config), 100_000, torch.float32)
    assert cost.full_layers == kinds.count("full_attention")
    assert cost.window_layers == kinds.count("sliding_attention")
    size = 2 * config.num_key_value_heads * config.head_dim * 4
    kept = config.sliding_window - 1
    assert cost.bytes == size * (cost.full_layers * 100_000 + cost.window_layers * kept)
    with pytest.raises(PosencError, match="attends past its window of 16 tokens, and 64"):
        recommend(on_meta(zoo.tiny_config("mistral", sliding_window=16)), 512)


@pytest.mark.parametrize("scaling", ["default", "dynamic"])
@pytest.mark.parametrize("tokens", [10, 50])
def test_the_cache_of_a_real_forward(tokens: int, scaling: str) -> None:
    rope = {"rope_type": scaling, "rope_theta": 1e4, "factor": 1.0}
    own = sizes(99, 64, width=32, layers=3, heads=(4, 2))
    config = MistralConfig(**own, sliding_window=16, rope_parameters=rope)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=True)[CACHE]
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    cost: Any = cache_cost(model, tokens, torch.float32)
    assert cost.bytes == 4 * kept


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("scaled", quick([{}, {"rope_type": "dynamic", "factor": 2.0}], [{}]))
def test_the_command_answers_in_ten_lines(scaled: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= scaled
    (folder / "config.json").write_text(json.dumps(config))
    more = ("--original", 64) if scaled else ()
    lines = succeeded("recommend", folder, "--target-length", "1k", *more).output.splitlines()
    assert 6 < len(lines) <= 10
    assert f"{folder}: LlamaForCausalLM, " in lines[0]
    assert any(line.startswith("as it is: frequencies ") for line in lines)
    assert any(line.startswith("In Python: patch_model(model, ") for line in lines)
    assert any(line.startswith(f"Next: hf-posenc sweep {folder} ") for line in lines)
    assert lines[-1].endswith("--all")
    last = invoke("recommend", "--target-length", "1k").output.splitlines()[-1]
    assert ": the least scale that reaches 1,024 tokens. Within" in last


def test_the_command_prints_all_and_as_json(folder: Path, only: Callable[..., None]) -> None:
    given = ("recommend", folder, "--target-length", "1k", "--all")
    lines = invoke(*given).output.splitlines()
    first = next(line for line in lines if line.split()[:3] == ["as", "it", "is"])
    assert first.split()[3:5] == ["frequencies", "yarn"]
    assert "In Python: patch_model(model, 'yarn', target_length=1024)" in lines
    assert any(line.startswith(f"Next: hf-posenc sweep {folder} ") for line in lines)
    assert any("--weights" in line for line in lines)  # what it could not try
    only("yarn", "rerope")
    assert "--weights" not in invoke(*given, "--weights").output
    found = json.loads(invoke("recommend", folder, "--target-length", 1024, "--json").output)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = recommend(on_meta(model.config), 1024, name=str(folder)).to_dict()
    assert found == json.loads(json.dumps(expected))


DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((DOCS / "data/benchmarks/recommend.json").read_text())
    return values


def test_the_order_within_a_class_is_no_better_than_chance(committed: dict[str, Any]) -> None:
    """The page's count: pairs of methods that work as they are, in the order in which they are listed."""
    names = {entry["label"]: entry["method"] for entry in committed["methods"]}
    measured: dict[str, float] = {}
    for cell in (cell for cell in committed["summary"] if cell["length"] == 2048):
        name = names[cell["method"]]
        measured[name] = min(cell["perplexity"], measured.get(name, math.inf))
    model = AutoModelForCausalLM.from_pretrained(model_path())
    listed = [o.method for o in recommend(on_meta(model.config), 2048).best if o.method in measured]
    pairs = list(itertools.combinations(listed, 2))
    right = sum(measured[first] < measured[second] for first, second in pairs)
    page = (DOCS / "recommend.md").read_text(encoding="utf-8")
    assert f"{right} of {len(pairs)} pairs" in " ".join(page.split())


def test_the_page_has_the_numbers_of_the_committed_run(committed: dict[str, Any]) -> None:
    specs = {entry["label"]: entry["spec"] for entry in committed["methods"]}
    cells = {(specs[c["method"]], c["length"]): c["perplexity"] for c in committed["summary"]}
    measured = {spec: value for (spec, length), value in cells.items() if length == 2048}
    page = (DOCS / "recommend.md").read_text(encoding="utf-8")
    table = page.split("| predicted to reach 2,048 |")[1].split("\n\n")[0]
    named = re.findall(r"`([\w:=.]+)`", table)
    assert {*named, "none", "sliding_window"} == set(measured)
    for pair in re.findall(r"\| ([^|]*`[^|]*) \| ([\d., ]+) (?=\|)", table):
        methods, numbers = re.findall(r"`([\w:=.]+)`", pair[0]), pair[1].split(", ")
        for method, number in zip(methods, numbers, strict=True):
            digits = len(number.partition(".")[2])
            assert f"{measured[method]:.{digits}f}" == number.strip(), method
            named.remove(method)
    assert not named
    assert f"and {measured['none']:.0f} at 2,048" in page
    trained = f"has {cells['none', 256]:.1f} at 256, which is that of truncation at 2,048"
    assert trained in " ".join(page.split())


# The published tables, and the digest of them that comes with the package.
TABLES: dict[str, Any] = {table["id"]: table for table in read(TRANSCRIBED)["tables"]}


def printed(id: str, method: str, column: int) -> Any:
    """A number as printed, of the first row with this method."""
    row = next(row for row in TABLES[id]["rows"] if row["method"] == method)
    return row["values"][TABLES[id]["columns"].index(column)]


def test_the_tables_are_whole() -> None:
    assert len(TABLES) == len(read(TRANSCRIBED)["tables"]) > 40
    for one in TABLES.values():
        protocol, columns = one["protocol"], one["columns"]
        assert one["metric"] in ("perplexity", "loss", "accuracy", "tokens")
        assert protocol["name"] in (None, *PROTOCOLS, "passkey", "niah", "ruler")
        assert protocol.get("aggregate") in (None, *AGGREGATES)
        assert ("stride" in protocol) == (protocol["name"] in ("sliding", "stream"))
        assert ("tail_tokens" in protocol) == (protocol["name"] == "tail")
        assert one["source"].keys() & {"arxiv", "url", "repo"}
        assert {len(row["values"]) for row in one["rows"]} == {len(columns)}
        for value in (value for row in one["rows"] for value in row["values"]):
            if isinstance(value, str):
                assert re.fullmatch(r">1e\d|OOM|\d+k", value)
            assert value is None or isinstance(value, int | float | str)
        if one["column_kind"] == "context length":
            assert columns == sorted({int(column) for column in columns})


def test_numbers_as_printed() -> None:
    assert printed("dca-t1-pg19", "ReRoPE", 8192) == 7.75
    assert printed("dca-t1-pg19", "ReRoPE", 16384) == "OOM"
    assert TABLES["yarn-t1"]["rows"][2]["values"][-1] == 6.04
    for column, perplexity in ((4096, 5.61), (16384, 550.0)):
        assert printed("pose-t6-govreport", "NTK, no fine-tuning (16k)", column) == perplexity


def held_and_broke(id: str, model: str, method: str) -> list[float | None]:
    """The multiples of the trained length, where the unpatched model is best, up to which a row stays within 25 %."""
    table = TABLES[id]

    def points(label: str) -> dict[Any, float]:
        rows = (r for r in table["rows"] if (r["model"], r["method"]) == (model, label))
        values = zip(table["columns"], next(rows)["values"], strict=True)
        known = {c: v for c, v in values if v not in (None, "OOM")}  # memory proves nothing
        numbers = {c: math.inf if isinstance(v, str) else v for c, v in known.items()}
        return {c: math.exp(v) if table["metric"] == "loss" else v for c, v in numbers.items()}

    plain, held = points("none"), 0.0
    trained = max(length for length in plain if plain[length] == min(plain.values()))
    for length, value in points(method).items():
        if length >= trained and value > TOLERANCE * plain[trained]:
            return [held, length / trained]
        held = length / trained if length >= trained else held
    return [held, None]


def test_the_digest_is_what_the_tables_say() -> None:
    assert EVIDENCE.read_text(encoding="utf-8") == evidence()
    rows = read(TRANSCRIBED)["untrained"]
    assert rows == {
        get_method(method).name: [[*row[:3], *held_and_broke(*row[:3])] for row in own]
        for method, own in rows.items()
    }
    found = [(one.held, one.broke) for one in evidence_of("ntk")]
    assert found == [(4, 8), (4, 8), (4, None), (4, None)]  # 5.8 / 4.74, then 550 / 4.74


def test_a_verdict_is_for_a_multiple_of_the_trained_length() -> None:
    ntk = evidence_of("ntk")
    assert [verdict(ntk, factor) for factor in (4, 8, 6)] == [1, -1, 0]
    assert verdict((), 2) == 0
    one = Evidence("a-t1", "Llama", 4.0, None)
    assert summary([one], 2) == "published, untrained: held at x4 (Llama, a-t1)"
    assert summary([one], 5).endswith("(Llama, a-t1), x5 is beyond what was measured")
    assert "held at x4" in summary(ntk, 2)
    assert "not at x8 (LLaMA-7B, pose-t6-govreport)" in summary(ntk, 2)
    assert summary((), 2) == "published, untrained: nothing"
