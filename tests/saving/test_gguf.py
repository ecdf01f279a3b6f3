"""GGUF files as models: weights, tokenizer, rotary embedding, the note of where the weights come from, errors."""

from __future__ import annotations

import json
import operator
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc import from_pretrained, inspect_rope, patch_model
from hf_posenc.engines.engine import empty_model
from hf_posenc.engines.llama_cpp import runtime
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.loading import load_tokenizer, open_session
from hf_posenc.evaluation.measuring.identity import model_identity
from hf_posenc.evaluation.options import ModelOptions
from hf_posenc.gguf_file import _llama3, find_gguf, loading_options, read_gguf_config
from tests.support.commands import refused, said, succeeded
from tests.support.gguf_files import header_file, model_file
from tests.support.tiny_text import sizes

gguf = pytest.importorskip("gguf")
CONTEXT = 128
IDS = torch.arange(48)[None] * 5 % 250


def llama(**values: Any) -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    own = sizes(259, CONTEXT, width=64, layers=2, heads=(4, 2)) | {"rope_parameters": rope}
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.2, **own | values)).eval()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = llama()
    return model, model_file(tmp_path_factory.mktemp("plain") / "tiny.gguf", model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


class TestWeights:
    def test_the_same_logits_as_the_model_that_was_converted(self, plain: tuple[Any, Path]) -> None:
        model, file = plain
        loaded = from_pretrained(file)
        assert torch.equal(logits(loaded), logits(model))
        assert loaded.config._name_or_path == str(file)
        assert torch.equal(logits(from_pretrained(file.parent)), logits(model))  # the only one

    @pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
    def test_quantized_weights(self, kind: str, tmp_path: Path) -> None:
        """The reference quantizes the matrices with llama.cpp's own functions, and loads them as they are."""
        model = llama(tie_word_embeddings=True)
        loaded = from_pretrained(model_file(tmp_path / "m.gguf", model, kind), dtype=torch.float32)
        own = gguf.GGMLQuantizationType[kind]
        before = logits(model)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                stored = gguf.quantize(parameter.detach().numpy(), own)
                parameter.data = torch.tensor(gguf.dequantize(stored, own), dtype=torch.float32)
        # Rows of the queries and keys change their order, which no block of a row notices.
        torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
        assert not torch.allclose(logits(loaded), before, rtol=0, atol=1e-5)
        name = model_identity(loaded, "m.gguf")["name"]
        told = {"F16": "m.gguf (F16 GGUF)"}
        assert name == told.get(kind, f"m.gguf ({kind} GGUF, dequantized to float32)")

    def test_reads_it_once(self, plain: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        model, file = plain
        read, reader = list[str](), gguf.GGUFReader

        def noted(path: Any, *more: Any) -> Any:
            read.append(str(path))
            return reader(path, *more)

        monkeypatch.setattr(gguf, "GGUFReader", noted)
        loaded, tokenizer, _ = open_session(ModelOptions(model=str(file)))
        assert read.count(str(file)) == 1
        assert gguf.GGUFReader is noted  # as it was
        assert torch.equal(logits(loaded), logits(model))
        assert tokenizer.decode(tokenizer("the end")["input_ids"]) == "the end"

    def test_saved_as_safetensors(self, tmp_path: Path) -> None:
        loaded = from_pretrained(model_file(tmp_path / "m.gguf", llama(), "Q8_0"))
        patch_model(loaded, "yarn", scale=4)
        loaded.save_pretrained(tmp_path / "saved")
        again = from_pretrained(tmp_path / "saved")
        assert torch.equal(logits(again), logits(loaded))
        assert not torch.equal(logits(again), logits(from_pretrained(tmp_path / "m.gguf")))
        by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(logits(by_transformers), logits(loaded))
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["gguf_source"]["file"] == "m.gguf"
        name = model_identity(again, "saved")["name"]
        assert name.endswith("(Q8_0 GGUF, dequantized to float32)")

    def test_trainable(self, plain: tuple[Any, Path]) -> None:
        loaded = from_pretrained(plain[1])
        assert not getattr(loaded, "is_quantized", False)
        config = loading_options(plain[1]).get("quantization_config")  # of transformers since 5.2x
        assert config is None or config.dequantize
        loaded(IDS, labels=IDS).loss.backward()
        assert loaded.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0

    def test_no_file_of_this_name_elsewhere(
        self, plain: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """transformers alone would take the file of the working directory."""
        other = llama()
        other.model.norm.weight.data *= 3.0
        model_file(tmp_path / plain[1].name, other)
        monkeypatch.chdir(tmp_path)
        assert torch.equal(logits(from_pretrained(plain[1])), logits(plain[0]))
        assert torch.equal(logits(from_pretrained(plain[1].name)), logits(other))

    def test_weights_without_a_place_are_named(self, tmp_path: Path) -> None:
        file = model_file(tmp_path / "m.gguf", llama(attention_bias=True))
        with pytest.warns(UserWarning, match=r"384 weights that LlamaForCausalLM .* no place"):
            from_pretrained(file)

    def test_tokenizer(self, plain: tuple[Any, Path]) -> None:
        tokenizer = load_tokenizer(str(plain[1]))
        tokens = tokenizer("the rest", add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(tokens) == "the rest"
        assert tokens[0] == 257
        assert tokenizer.eos_token_id == 258


YARN: dict[str, Any] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
YARN["rope.scaling.original_context_length"] = 32


def llama3(theta: float, factor: float, original: int, high: float = 4.0) -> dict[str, Any]:
    values = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
    rope = {"rope_type": "llama3", "rope_theta": theta}
    return {**rope, **values, "original_max_position_embeddings": original}


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> list[float]:
    config = LlamaConfig(rope_parameters=rope, head_dim=head_dim)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    default = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    return (default / scaled).tolist()


def config_of(file: Path) -> Any:
    try:
        return read_gguf_config(file)
    except ValueError as error:
        if "is not supported yet" in str(error):
            pytest.skip("this transformers has no such architecture")
        raise


class TestRope:
    """The table of the loaded model is what llama.cpp computes from the same keys (its formula, in float64)."""

    @pytest.mark.parametrize(
        "keys",
        [
            {},
            {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope.scaling.factor": 4.0},
            YARN,
            {**YARN, "rope.scaling.original_context_length": None},
            {**YARN, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
            {**YARN, "rope.scaling.attn_factor": 0.9},
            {**YARN, "rope.scaling.yarn_ext_factor": 1.0, "rope.freq_base": 7e4},
            {"rope.freq_base": 1e6},
        ],
        ids=lambda keys: ",".join(f"{key[5:]}={value}" for key, value in keys.items()) or "none",
    )
    def test_keys(self, keys: dict[str, Any], tmp_path: Path) -> None:
        file = model_file(tmp_path / "m.gguf", llama(), keys=keys)
        given = {"rope.freq_base": 5000.0, "context_length": CONTEXT, **keys}
        known = {key: value for key, value in given.items() if value is not None}
        flags = [
            f"--yarn-{beta}={known[key]}"
            for beta in ("beta-fast", "beta-slow")
            if (key := f"rope.scaling.yarn_{beta.replace('-', '_')}") in known
        ]
        flags = [part for flag in flags for part in flag.split("=")]
        expected = runtime(known, {}, 16, CONTEXT, flags)
        (table,) = inspect_rope(from_pretrained(file))
        torch.testing.assert_close(table.inv_freq.double(), expected.inv_freq, rtol=1e-6, atol=0)
        assert table.attention_factor == pytest.approx(expected.factor, rel=1e-6)

    def test_the_factor_of_the_checkpoint(self, tmp_path: Path) -> None:
        """The converter writes `attention_factor` of a config as yarn_attn_factor; llama.cpp does not read it."""
        keys = {**YARN, "rope.scaling.yarn_attn_factor": 1.5}
        file = model_file(tmp_path / "m.gguf", llama(), keys=keys)
        (table,) = inspect_rope(from_pretrained(file))
        assert table.attention_factor == pytest.approx(1.5)

    def test_llama3(self, tmp_path: Path) -> None:
        """Its numbers are not in a file; its divisors give them back."""
        rope = llama3(50.0, 8.0, 32)
        model = llama(rope_parameters=rope)
        file = model_file(tmp_path / "m.gguf", model, rope_freqs=llama3_divisors(rope, 16))
        loaded = from_pretrained(file)
        assert loaded.config.rope_parameters == rope
        assert torch.equal(logits(loaded), logits(model))

    @pytest.mark.parametrize(
        ("head_dim", "rope"),
        [
            (128, llama3(5e5, 8.0, 8192)),  # Llama 3.1
            (64, llama3(5e5, 32.0, 8192)),  # Llama 3.2
            (128, llama3(1e6, 4.0, 4096, high=8.0)),
        ],
    )
    def test_llama3_of_published_sizes(self, head_dim: int, rope: dict[str, Any]) -> None:
        found: Any = _llama3(llama3_divisors(rope, head_dim), rope["rope_theta"])
        assert {**found, "rope_theta": rope["rope_theta"]} == pytest.approx(rope)

    def test_divisors_of_no_formula(self, tmp_path: Path) -> None:
        divisors = [1.0, 1.0, 2.0, 1.5, 3.0, 9.0, 8.0, 8.0]
        loaded = from_pretrained(model_file(tmp_path / "m.gguf", llama(), rope_freqs=divisors))
        (table,) = inspect_rope(loaded)
        default = 5000.0 ** -(torch.arange(0, 16, 2).double() / 16)
        torch.testing.assert_close(
            table.inv_freq.double(), default / torch.tensor(divisors).double(), rtol=1e-6, atol=0
        )
        assert table.attention_factor == 1

    def test_two_lists(self, tmp_path: Path) -> None:
        keys = {"type": "longrope", "original_context_length": 64, "attn_factor": 1.19}
        keys = {f"rope.scaling.{name}": value for name, value in keys.items()}
        short, long = [1.0] * 8, [1.5, *range(2, 9)]
        lists: dict[str, Any] = {"rope_factors_short": short, "rope_factors_long": long}
        file = model_file(tmp_path / "m.gguf", llama(), keys=keys, **lists)
        rope = from_pretrained(file).config.rope_parameters
        assert (rope["short_factor"], rope["long_factor"]) == (short, long)
        assert rope["attention_factor"] == pytest.approx(1.19)
        assert rope["original_max_position_embeddings"] == 64

    @pytest.mark.parametrize(
        ("keys", "tensors", "reason"),
        [
            ({"rope.scaling.type": "spiral"}, {}, "the type 'spiral' is unknown"),
            ({**YARN, "rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor = 0.5"),
            ({**YARN, "rope.scaling.yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier = 0.1"),
            ({**YARN}, {"rope_freqs": [2.0] * 8}, "a table .* and yarn scaling"),
            ({"rope.scaling.attn_factor": 1.2}, {}, "attn_factor = 1.2 without a table"),
            ({"rope.scaling.type": "longrope"}, {}, "it has no factors"),
            ({}, {"rope_factors_long": [2.0] * 8}, "it lacks rope_factors_short"),
        ],
    )
    def test_what_no_config_can_express(
        self, keys: dict[str, Any], tensors: dict[str, Any], reason: str, tmp_path: Path
    ) -> None:
        file = model_file(tmp_path / "m.gguf", llama(), keys=keys, **tensors)
        with pytest.raises(PosencError, match=f"cannot be expressed in transformers: .*{reason}"):
            from_pretrained(file)

    @pytest.mark.parametrize(
        ("architecture", "keys", "expected"),
        [
            ("phi3", {"rope.dimension_count": 12}, {"partial_rotary_factor": 0.75}),
            ("stablelm", {"rope.dimension_count": 16}, {"partial_rotary_factor": 1.0}),
            ("starcoder2", {"rope.freq_base": 2e5}, {"rope_theta": 2e5}),
            ("gpt-oss", {"rope.freq_base": 2e5}, {"rope_type": "default", "rope_theta": 2e5}),
        ],
    )
    def test_what_transformers_does_not_read(
        self, architecture: str, keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path
    ) -> None:
        config = config_of(header_file(tmp_path / "m.gguf", architecture, **keys))
        assert config.rope_parameters.items() >= expected.items()
        assert config.vocab_size == 300
        dim = keys.get("rope.dimension_count")
        tables = (b for name, b in empty_model(config).named_buffers() if name.endswith("inv_freq"))
        assert not dim or {2 * len(table) for table in tables} == {dim}

    def test_scaling_of_the_layers_with_full_attention(self, tmp_path: Path) -> None:
        keys: dict[str, Any] = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
        keys |= {"attention.key_length": 16, "attention.sliding_window": 64}
        keys |= {"rope.freq_base": 1e6, "rope.freq_base_swa": 2e4}
        assert config_of(header_file(tmp_path / "m.gguf", "gemma3", **keys)).rope_parameters == {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }

    @pytest.mark.parametrize(("divisor", "kind"), [(1e30, "proportional"), (2.0, "longrope")])
    def test_pairs_that_do_not_rotate(self, divisor: float, kind: str, tmp_path: Path) -> None:
        """A config that has them keeps its form."""
        keys: dict[str, Any] = {"rope.freq_base": 1e6}
        divisors = [1.0] * 2 + [divisor] * 6
        config = config_of(header_file(tmp_path / "m.gguf", "gemma4", divisors, **keys))
        assert config.rope_parameters["full_attention"]["rope_type"] == kind
        assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6

    def test_a_part_of_each_head_that_the_class_does_not_have(self, tmp_path: Path) -> None:
        keys: dict[str, Any] = {"rope.dimension_count": 8}
        file = header_file(tmp_path / "m.gguf", "qwen2", **keys)
        with pytest.raises(PosencError, match="it rotates 8 of the 16 dimensions of each head"):
            read_gguf_config(file)


class TestCommands:
    def test_inspect_reads_the_header_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = model_file(tmp_path / "m.gguf", llama(), "Q8_0", keys=YARN)
        monkeypatch.setattr("hf_posenc.evaluation.loading.load_model", None)
        text = said("inspect", file, "--no-weights")
        assert re.search(r"architecture llama, weights: Q8_0 \(99\.\d%\), F32 \(0\.\d%\)", text)
        assert "rope.scaling.type yarn, rope.scaling.factor 4" in text
        assert "the same as --patch yarn:scale=4 on the unscaled model" in text
        about = json.loads(succeeded("inspect", file, "--no-weights", "--json").stdout)
        assert about["gguf"]["rope"]["rope.scaling.original_context_length"] == 32
        succeeded("recommend", file, "--target-length", "512")

    def test_perplexity_names_the_quantization(self, tmp_path: Path) -> None:
        file = model_file(tmp_path / "m.gguf", llama(), "Q4_0")
        (tmp_path / "text.txt").write_text("the rest of the text " * 40)
        options = ("--text", tmp_path / "text.txt", "--lengths", 64, "--output", tmp_path / "out")
        patches = ("--patch", "none", "--patch", "yarn:scale=2")
        result = succeeded("perplexity", file, *options, *patches)
        assert "Converting" not in result.output
        told = "m.gguf (Q4_0 GGUF, dequantized to float32)"
        assert told in " ".join(result.output.split())
        values = json.loads((tmp_path / "out" / "perplexity.json").read_text())
        assert values["model"]["name"].endswith(told)
        assert told in (tmp_path / "out" / "perplexity.svg").read_text()
        succeeded("report", tmp_path / "out", "--output", tmp_path / "page.html")
        assert told in " ".join((tmp_path / "page.html").read_text().split())

    def test_export_writes_plain_weights(self, plain: tuple[Any, Path], tmp_path: Path) -> None:
        folder = tmp_path / "out"
        options = "--to transformers5 --patch yarn:scale=4 --output"
        succeeded("export", plain[1], *options.split(), folder)
        exported = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logits(exported), logits(patch_model(llama(), "yarn", scale=4)))
        config = json.loads((folder / "config.json").read_text())
        assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
        assert load_tokenizer(str(folder)).encode("the", add_special_tokens=False) == [257]


class TestErrors:
    def test_several_files(self, plain: tuple[Any, Path], tmp_path: Path) -> None:
        for name in ("b.gguf", "a.gguf"):
            (tmp_path / name).write_bytes(plain[1].read_bytes())
        with pytest.raises(PosencError, match=r"has 2 GGUF files \(a.gguf, b.gguf\). Give one"):
            from_pretrained(tmp_path)
        (tmp_path / "config.json").write_text("{}")  # a folder with a config is no GGUF model
        assert find_gguf(tmp_path) is None

    def test_one_of_several_parts(self, tmp_path: Path) -> None:
        file = model_file(tmp_path / "m.gguf", llama(), keys={"split.count": 3})
        with pytest.raises(PosencError, match="is one of 3 parts"):
            from_pretrained(file)

    @pytest.mark.parametrize(
        ("made_of", "message"),
        [
            (lambda _: None, r"There is no file .*m\.gguf"),
            (lambda data: data.replace(b"llama", b"lloma"), "architecture lloma is not supported"),
            *(
                (operator.itemgetter(slice(n)), "is not a GGUF file")
                for n in (0, 3, 100, 5000, -40)
            ),
        ],
    )
    def test_what_is_no_whole_file(
        self, made_of: Any, message: str, plain: tuple[Any, Path], tmp_path: Path
    ) -> None:
        file, content = tmp_path / "m.gguf", made_of(plain[1].read_bytes())
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(PosencError, match=message):
            from_pretrained(file)

    def test_no_package(self, plain: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        advice = "GGUF files are read with the package gguf: pip install 'hf-posenc[gguf]'."
        assert refused("inspect", plain[1]) == f"error: {advice}"
