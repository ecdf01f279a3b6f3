"""The `hf-posenc` command: what it prints and writes; errors are one line with exit status 2 and no traceback."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli.app import app, expand
from hf_posenc.embedded import HELD_OUT, model_path
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.options import MODEL, help_texts, option, parse_lengths
from hf_posenc.lengths import even_depths
from hf_posenc.methods import METHODS, ALiBi, Clip, DynamicPI, LogN, Method, NoPE, ReRoPE, YaRN
from hf_posenc.methods.facts import composes_with, facts
from hf_posenc.model.discovery import tables_of
from hf_posenc.patch.request import resolve_request
from tests.support import zoo
from tests.support.commands import invoke, refused, said, succeeded
from tests.support.processes import printed
from tests.support.references import REQUIRED
from tests.support.tiny_text import byte_tokenizer, tiny_checkpoint

ROOT = Path(__file__).parents[2]


def run(model: Path, texts: object, output: Path, *more: object, status: int = 0) -> Any:
    given = ["perplexity", model, "--text", texts, "--lengths", "32,64,128", "--output", output]
    given += [*(more or ("--patch", "none")), "--no-plot"]
    result = invoke(*given)
    assert result.exit_code == status, result.output
    return result


def read(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "perplexity.json").read_text())
    return values


def test_text_takes_several_values_and_patterns(model: Path, texts: Path, tmp_path: Path) -> None:
    out = ("--output", tmp_path, "--lengths", "32,64", "--no-plot")
    one, two = texts / "0.txt", texts / "1.txt"
    for given in ([one, two], [one, "--text", two], [f"--text={one}", two]):
        first = () if str(given[0]).startswith("--text=") else ("--text",)
        succeeded("perplexity", model, *first, *given, "--patch", "none", *out)
        names = [Path(document["name"]).name for document in read(tmp_path)["documents"]]
        assert names == ["0.txt", "1.txt"]
    result = invoke("perplexity", model, "--text", f"{texts}/[34].txt", "--patch", "none", *out)
    assert "2 documents" in result.stdout


def test_the_settings_reach_the_result(model: Path, texts: Path, tmp_path: Path) -> None:
    options = (
        "--patch none --limit 2 --max-doc-tokens 200 --protocol tail --tail-tokens 10 --bos always "
        "--windows-per-document 2 --chunk 8 --dtype bfloat16 --attn eager"
    )
    result, values = run(model, texts, tmp_path, *options.split()), read(tmp_path)
    expected = {"lengths": [32, 64, 128], "protocols": ["tail"], "tail_tokens": 10, "chunk": 8}
    expected |= {"windows_per_document": 2}
    assert values["settings"].items() >= expected.items()
    assert [document["tokens"] for document in values["documents"]] == [200, 200]
    assert (values["model"]["dtype"], values["model"]["attention"]) == ("bfloat16", "eager")
    assert values["model"]["bos"] == {"policy": "always", "token_ids": [0]}
    assert {record["tokens"] for record in values["records"]} == {20}
    assert "prefix:" not in result.stdout
    assert not (tmp_path / "perplexity.png").exists()


def test_a_loss_that_is_not_a_number(model: Path, texts: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"].mul_(1e38)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    result = run(broken, texts, tmp_path / "out", status=1)
    assert "nan" in result.stdout
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: none: the loss is not a finite number at length 32, 64, 128")
    assert (tmp_path / "out" / "perplexity.json").is_file()


def test_half_precision_is_measured_in_float32(model: Path, texts: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(model, half)
    file = half / "model.safetensors"
    weights = {name: value.bfloat16() for name, value in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    run(half, texts, tmp_path / "out", "--patch", "none", "--device", "cpu")
    assert read(tmp_path / "out")["model"]["dtype"] == "float32"


def test_a_saved_patch_is_measured_as_it_is_and_shown(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    live = hf_posenc.patch_model(zoo.load(type(zoo.build("llama")), model), "ntk_mixed", scale=4)
    live.save_pretrained(tmp_path / "patched")
    byte_tokenizer().save_pretrained(tmp_path / "patched")
    plain, patched = (run(path, texts, tmp_path / "out") for path in (model, tmp_path / "patched"))
    assert plain.stdout.splitlines()[5:12] != patched.stdout.splitlines()[5:12]
    error = refused("perplexity", tmp_path / "patched", "--text", texts, "--patch", "yarn")
    assert "--patch yarn: this model carries a saved patch (ntk_mixed(scale=4))" in error
    found = json.loads(invoke("inspect", tmp_path / "patched", "--json").stdout)
    assert found["patch"]["method"] == "ntk_mixed"
    assert "ntk_mixed(scale=4)" in invoke("inspect", tmp_path / "patched").stdout


def test_models_and_tokenizers_that_are_refused(model: Path, texts: Path, tmp_path: Path) -> None:
    assert "is a model's folder" in refused("perplexity", "--text", texts, model)
    wordless = tiny_checkpoint(tmp_path / "wordless", tokenizer=False)
    run(wordless, texts, tmp_path, "--tokenizer", model, "--patch", "none")
    nothing = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=nothing, unk_token="<unk>").save_pretrained(wordless)
    error = refused("perplexity", wordless, "--text", texts)
    assert f"The tokenizer of {wordless} turns text into nothing. Pass --tokenizer." in error


def test_the_plot_needs_matplotlib(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_posenc.evaluation.plots.available", lambda: False)
    given = ("perplexity", model, "--text", texts, "--lengths", "32,64,128", "--patch", "none")
    words = said(*given, "--output", tmp_path)
    assert "No plot: it needs matplotlib (pip install 'hf-posenc[plot]')" in words
    assert "pip install" in refused("perplexity", model, "--text", texts, "--plot")


def test_methods_lists_every_method() -> None:
    result = succeeded("methods")
    text = " ".join(result.stdout.split())
    for method in METHODS:
        assert f" {method.name} {method.summary} Needs: {method.needs}. {method.source}." in text
    titles = [line.split(":")[0] for line in result.stdout.splitlines() if line[:1].isupper()]
    assert titles == ["Frequencies", "Rotary bands", "Biases", "Others", "Tables"]
    place = {name: text.index(f" {name} ") for name in ("yarn", "rerope", "alibi", "xpos")}
    assert list(place) == sorted(place, key=lambda name: place[name])
    assert f"Also {', '.join(next(m for m in METHODS if m.name == 'pi').aliases)}." in text


@pytest.mark.parametrize("name", [method.name for method in METHODS])
def test_show_gives_equation_knobs_source_and_needs(name: str) -> None:
    method, text = next(method for method in METHODS if method.name == name), said("show", name)
    assert all(knob in text for knob in method.knobs())
    assert method.source in text
    assert all(f"{key}: {fact}" in text for key, fact in facts(method).items() if key != "Also")
    assert " ".join((method.__doc__ or "").replace("`", "").split("Args:")[0].split()) in text


LISTED: dict[str, Method] = {
    "a frequency method": DynamicPI(),
    "frequency method": YaRN(scale=2),
    "filters after it": Clip(pairs=1),
    "other filters": Clip(pairs=1),
    "rotary bands": ReRoPE(),
    "log_n or temperature": LogN(),
    "a bias with keep_rope=True": ALiBi(keep_rope=True),
}


def test_what_a_method_composes_with_is_accepted_and_what_not_is_refused() -> None:
    tables = tables_of(zoo.build("llama"))
    for kind in METHODS:
        pairs = 8  # of the heads of the zoo
        options = REQUIRED[kind.name](pairs) if kind.name in REQUIRED else {}
        options |= {"scale": 2} if kind.knobs().get("scale") is dataclasses.MISSING else {}
        named = [other for text, other in LISTED.items() if text in composes_with(kind)]
        assert named or kind.seam == "table"
        for other in named:
            rotates = other.seam in ("rotary", "attention")
            beside = {"keep_rope": rotates} if "keep_rope" in kind.knobs() else {}
            pair = [other, kind.from_options(**options, **beside)]
            resolve_request(tables, pair if isinstance(other, YaRN | DynamicPI) else pair[::-1])
    for other in (ReRoPE(), Clip(pairs=1), ALiBi(keep_rope=True)):
        message = f"nope drops the rotation that {other.name} changes or keeps"
        with pytest.raises(PosencError, match=message):
            resolve_request(tables, [NoPE(), other])


@pytest.mark.slow
def test_show_ends_with_something_that_works(model: Path) -> None:
    for method in METHODS:
        *_, last = invoke("show", method.name).stdout.strip().splitlines()
        if "--patch" in last:
            succeeded("inspect", model, "--patch", last.split()[-1])
        else:
            assert last.startswith(f"Try: patch_model(model, {method.name!r}, ")


def test_version_models_recipes_and_aliases() -> None:
    assert invoke("--version").stdout == f"hf-posenc {hf_posenc.__version__}\n"
    assert "also linear" in invoke("show", "linear").stdout
    models, recipes = succeeded("models").stdout, succeeded("recipes").stdout
    assert {"llama", "gemma3_text"} <= set(models.split())
    assert f"{len(hf_posenc.available_architectures())} model types" in models
    assert all(name in recipes for name in hf_posenc.available_recipes())


def test_inspect_reads_the_table_in_force(model: Path, tmp_path: Path) -> None:
    text = said("inspect", model)
    length = AutoConfig.from_pretrained(model).max_position_embeddings
    assert f"LlamaForCausalLM, {length} tokens of context" in text
    head_dim = 16
    for pair in range(head_dim // 2):
        frequency = 10000.0 ** (-2 * pair / head_dim)
        assert f"{frequency:.6g}" in text
        assert f"{2 * math.pi / frequency:,.1f}" in text
    patched = invoke("inspect", model, "--patch", "yarn:scale=8")
    assert "yarn" in patched.stdout
    assert f"cos and sin x {0.1 * math.log(8) + 1:.6g}" in patched.stdout
    gemma = tiny_checkpoint(tmp_path / "gemma", "gemma3_text", num_hidden_layers=4)
    layers = invoke("inspect", gemma).stdout
    assert "sliding_attention: default" in layers
    assert "full_attention: default" in layers


def test_recipes_of_a_checkpoint(tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}

    def folder(name: str) -> Path:
        sizes: dict[str, Any] = {"max_position_embeddings": 40960, "num_hidden_layers": 4}
        return tiny_checkpoint(tmp_path / name, "qwen3", **sizes, rope_parameters=rope)

    plain = folder("plain")
    text = said("recipes", plain)
    assert "makers tell you to add yarn(scale=4) past 32,768 tokens; nothing has been" in text
    assert "qwen3-yarn-128k" in text
    assert "codellama" not in text
    assert "nothing has been added" in said("inspect", "--no-weights", plain)
    rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaled = folder("scaled")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "its config has yarn(scale=4)" in said("recipes", scaled)
        text = said("inspect", "--no-weights", scaled)
    assert "the same as --patch yarn:scale=4 on the unscaled model" in text
    native = tiny_checkpoint(tmp_path / "native", "seed_oss")
    assert "Seed-OSS was trained on long texts" in invoke("recipes", native).stdout
    text = said("recipes") + said("recipes", tiny_checkpoint(tmp_path / "llama"))
    assert "is meant for this checkpoint" in text


def test_inspect_says_what_a_table_that_moves_gets_wrong(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    folder = tiny_checkpoint(tmp_path, "llama", rope_parameters=rope)
    text = said("inspect", folder)
    assert "cached keys keep those of their own step" in text
    assert 'patch_model(model, "dynamic_ntk"), without numbers, makes both exact' in text
    notes = json.loads(invoke("inspect", "--json", folder).stdout)["scaling"]["notes"]
    assert any("cached keys" in note for note in notes)
    assert "their own step" not in invoke("inspect", folder, "--patch", "dynamic_ntk").stdout


_LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "rope",
    [{}, {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", **_LISTS}],
    ids=str,
)
@pytest.mark.parametrize("target", [64, 256])
def test_the_commands_that_recommend_prints_can_be_run(
    rope: dict[str, Any], target: int, texts: Path, tmp_path: Path
) -> None:
    block = {"rope_theta": 1e4, "original_max_position_embeddings": 32, **rope}
    more: dict[str, Any] = {"rope_parameters": block} if rope else {}
    folder = tiny_checkpoint(tmp_path / "tiny", **more)
    told = json.loads(invoke("recommend", "--json", folder, "--target-length", target).stdout)
    for command in told["commands"][::2]:  # none of retrieval's prompts is as short
        words = shlex.split(command.replace("'YOUR/*.txt'", str(texts)))[1:]
        succeeded(*words, "--dry-run", "--output", tmp_path / "out")


def test_inspect_names_the_patch_of_a_scaling(model: Path, tmp_path: Path) -> None:
    block = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    block |= {"original_max_position_embeddings": 256}
    scaled = tiny_checkpoint(tmp_path / "scaled", "llama", rope_parameters=block)
    text = said("inspect", scaled)
    assert "the same as --patch yarn:scale=4 on the unscaled model" in text
    assert f"cos and sin x {0.1 * math.log(4) + 1:.6g}" in text
    found = json.loads(invoke("inspect", "--json", scaled).stdout)["scaling"]
    assert (found["option"], found["patch"]["method"]) == ("yarn:scale=4", "yarn")
    assert "No such option: --patsh" in refused("inspect", model, "--patsh", "yarn")


def test_inspect_names_every_source_of_positions(model: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "gpt2", "gpt2")
    text = said("inspect", folder)
    assert "learned table" in text
    assert "no source is missing. Methods for a learned table: interp" in text
    longer = invoke("inspect", folder, "--patch", "tile:scale=4").stdout
    assert re.search(r"transformer.wpe.weight +learned table +256 ", longer)
    found = json.loads(invoke("inspect", folder, "--json").stdout)
    assert found["positions"]["complete"]
    assert found["positions"]["sources"][0]["places"] == ["transformer.wpe.weight"]
    assert found["tables"] == []
    assert "no rotary embedding" in refused("inspect", folder, "--no-weights")
    patched = said("inspect", model, "--patch", "yarn:scale=8")
    assert "these are the sources of the model without the patch" in patched


def test_inspect_shows_a_patch_that_computes_attention(model: Path) -> None:
    text = succeeded("inspect", model, "--patch", "self_extend:window=16,group=4").stdout
    assert "self_extend(window=16, group=4)" in text
    assert "all layers: yarn" in invoke("inspect", model, "--patch", "yarn:scale=4+rerope").stdout
    error = refused("inspect", model, "--patch", "yarn+log_n")
    assert "yarn needs scale=" in error  # no text here, whose length could set it


def test_an_untrained_method_is_named_in_one_line(model: Path, texts: Path, tmp_path: Path) -> None:
    patches = ("--patch", "none", "--patch", "shaw", "--patch", "shaw:keep_rope=true")
    composed = ("--patch", "yarn:scale=4+kerple_log:keep_rope=true")
    result = run(model, texts, tmp_path, "--limit", 1, *patches, *composed)
    warned = [line.split()[:2] for line in result.stderr.splitlines() if "untrained" in line]
    assert warned == [["warning:", "shaw"], ["warning:", "kerple_log"]]
    assert "UserWarning" not in result.output
    assert "yarn (scale 4) + kerple_log" in " ".join(result.stdout.split())


def test_inspect_reads_no_weights_if_asked_so(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "config.json", tmp_path)
    succeeded("inspect", tmp_path, "--no-weights")
    assert "weights" in refused("inspect", tmp_path)


@pytest.mark.slow
def test_help_and_the_catalog_start_without_transformers() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from hf_posenc.cli.app import app\n"
        "for line in ('--help', 'perplexity --help', 'export --help'):\n"
        "    assert CliRunner().invoke(app, line.split()).exit_code == 0, line\n"
        "assert 'torch' not in sys.modules\n"
        "for line in ('methods', 'show yarn', 'models', 'recipes'):\n"
        "    assert CliRunner().invoke(app, line.split()).exit_code == 0, line\n"
        "slow = {'transformers', 'datasets', 'matplotlib', 'accelerate'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    printed(code, ROOT)


def test_without_a_model_and_documents_the_embedded_ones_are_measured(tmp_path: Path) -> None:
    options = "--patch none --patch yarn --limit 2 --lengths 256,1k --no-plot --output"
    succeeded("perplexity", *options.split(), tmp_path)
    values = read(tmp_path)
    assert [document["name"] for document in values["documents"]] == list(HELD_OUT[:2])
    assert {document["tokens"] for document in values["documents"]} == {1024}
    # a committed result holds no path of the machine
    assert str(model_path()) not in json.dumps(values)
    key = ("method", "protocol", "length")
    ppl = {tuple(cell[name] for name in key): cell["perplexity"] for cell in values["summary"]}
    for protocol in ("prefix", "tail"):
        assert ppl["none", protocol, 1024] > 2 * ppl["yarn (auto)", protocol, 1024]
    assert ppl["none", "tail", 1024] > 2 * ppl["none", "tail", 256]


def test_doctor_names_what_an_extra_would_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` contains `report`, which contains `cli`."""
    from hf_posenc.evaluation.measuring import identity

    version_of = identity.version_of
    monkeypatch.setattr(
        identity, "version_of", lambda name: None if name in ("rich", "peft") else version_of(name)
    )
    values = json.loads(invoke("doctor", "--json").stdout)
    missing = {extra: names for extra, names in values["missing"].items() if "rich" in names}
    assert missing == {"cli": ["rich"], "report": ["rich"], "train": ["rich", "peft"]}
    assert values["versions"]["torch"] == torch.__version__
    assert values["devices"][0] == "cpu"


# Option classes become commands: names, defaults, parsers, and what is not given.
@dataclass(frozen=True, kw_only=True)
class Options:
    """Some options.

    Attributes:
        methods: Methods, whose text is
            on two lines.
        lengths: Lengths.
        depths: Depths.
        short: Short.
        count: A number.
        replace: Replace.
    """

    methods: Sequence[str] | None = option(name="patch")
    lengths: Sequence[int] | None = option(parse=parse_lengths)
    depths: Sequence[float] = option((0.0,), parse=even_depths, kind=int, value=3)
    short: bool = option(False, value=True)
    count: int = option(4, panel=MODEL)
    replace: bool = option(False)
    python_only: int = 7


@dataclass(frozen=True, kw_only=True)
class Other:
    """A name.

    Attributes:
        name: A name.
    """

    name: str | None = option(argument=True)


class Nearer(Options):
    """Other options.

    Attributes:
        count: Another number.
    """


def test_every_option_has_a_help_text_that_of_the_nearest_class() -> None:
    texts = help_texts(Nearer)
    assert texts["methods"] == "Methods, whose text is on two lines."
    assert (texts["count"], texts["short"]) == ("Another number.", "Short.")
    for command in typer.main.get_group(app).commands.values():
        for parameter in command.params:
            assert getattr(parameter, "help", ""), (command.name, parameter.name)


def made(*arguments: str) -> tuple[Any, list[Any]]:
    seen: list[Any] = []

    def command(options: Options, other: Other) -> None:
        """Do something."""
        seen.extend((options, other))

    own = typer.Typer()
    own.command()(expand(command))
    return CliRunner().invoke(own, list(arguments)), seen


def test_values_are_parsed_into_their_classes_or_refused() -> None:
    result, (options, other) = made()
    assert result.exit_code == 0, result.output
    assert (options, other) == (Options(depths=(0.0, 0.5, 1.0), short=True), Other())
    arguments = "--patch a --patch b --lengths 1k,64 --depths 2 --no-short --count 5 --replace x"
    result, (options, other) = made(*arguments.split())
    assert result.exit_code == 0, result.output
    given: dict[str, Any] = {"methods": ["a", "b"], "lengths": (64, 1024), "depths": (0.0, 1.0)}
    assert options == Options(**given, count=5, replace=True)
    assert (other.name, options.python_only) == ("x", 7)
    for arguments in ("--count 0", "--no-replace", "--python-only 1", "--methods a"):
        assert made(*arguments.split())[0].exit_code == 2


def test_help_is_wrapped_to_the_terminal_and_nowhere_else() -> None:
    result = invoke("perplexity", "--help", columns=100)
    lines = [line.strip() for line in result.output.splitlines()]
    first = next(index for index, line in enumerate(lines) if line.startswith("Without arguments"))
    last = next(index for index in range(first, len(lines)) if not lines[index])
    assert all(len(line) > 70 for line in lines[first : last - 1])
