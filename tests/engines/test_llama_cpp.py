"""llama.cpp: its words, its flags, and tables in GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hf_posenc import PosencError
from hf_posenc.engines import check_gguf, export, formulas, write_gguf
from hf_posenc.engines.engine import open_source
from hf_posenc.engines.llama_cpp import converted, runtime
from tests.patch.test_patching import OPTIONS
from tests.support import zoo
from tests.support.gguf_files import converted_file
from tests.support.selection import late


class TestLlamaCpp:
    @pytest.mark.parametrize(
        ("method", "form"),
        [
            *(("yarn", "rope_parameters"), ("pi", "rope_parameters"), ("ntk", "rope_parameters")),
            *(("abf", "rope_parameters"), ("llama3", "rope_parameters")),
            *(("ntk_by_parts", "tensors"), ("ntk_mixed", "tensors"), ("nope", "tensors")),
            ("longrope", "tensors"),
        ],
    )
    def test_words_or_tensors(self, llama: Path, method: str, form: str) -> None:
        assert export(llama, "llama.cpp", method=method, **OPTIONS[method]).form == form

    @pytest.mark.parametrize(
        ("model_type", "method", "form"),
        [
            ("granite", "longrope", "tensors"),
            ("qwen2", "longrope", "a frequency differs by 2 "),
            ("qwen2", "ntk_mixed", "reads no table from a GGUF file of the architecture qwen2"),
            ("smollm3", "llama3", "a frequency differs by 3 "),  # its tensor is written, not read
            ("phi3", "longrope", "rope_parameters"),
            ("falcon", None, "rope_parameters"),  # the default base, without a key
            ("gemma2", "yarn", "flags"),
            ("cohere", "ntk", "rope_parameters"),
            ("zaya", "pi", "convert_hf_to_gguf has no Zaya"),  # no layer type of its table is full
            *late(["mistral"], ["llama3"], ["rope_parameters"]),
            *late(["qwen2"], ["yarn"], ["rope_parameters"]),
            *late(["qwen2"], ["llama3"], ["a frequency differs by 3 "]),
            *late(["phi3"], ["pi"], ["tensors"]),
            *late(["falcon"], ["ntk"], ["flags"]),
            *late(["gpt_neox", "cohere", "dbrx"], ["pi"], ["flags"]),
        ],
    )
    def test_what_the_converter_does_for_an_architecture(
        self, tmp_path: Path, model_type: str, method: str | None, form: str
    ) -> None:
        zoo.build(model_type).save_pretrained(tmp_path)
        options = {} if method is None else {"method": method, **OPTIONS[method]}
        found = export(tmp_path, "llama.cpp", **options)
        assert found.form == form or (found.form is None and form in found.reason), found

    def test_longrope_says_when_it_switches(self, llama: Path, tmp_path: Path) -> None:
        found = export(llama, "llama.cpp", method="longrope", **OPTIONS["longrope"])
        (note,) = (note for note in found.notes if "long list for all texts" in note)
        assert note.startswith("With -c above 64 ")
        lists = {"short_factor": [1.1] * 8, "long_factor": [3.0] * 8}
        rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **lists}
        lengths = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
        zoo.build("phi3", rope_parameters=rope, **lengths).save_pretrained(tmp_path)
        found = export(tmp_path, "llama.cpp")  # as the checkpoint has it
        assert found.form == "rope_parameters", found.reason
        assert found.notes[0] == note.replace("64", "16")
        assert found.notes[1:] == (
            "There is no patch: this is the encoding of the model's own config.",
        )

    def test_the_ends_of_the_ramp_are_flags(self, llama: Path) -> None:
        found = export(llama, "llama.cpp", method="yarn", scale=4, beta_fast=8, beta_slow=2)
        assert found.flags[2:] == ("--yarn-beta-fast", "8", "--yarn-beta-slow", "2")
        keys, tensors = converted(found.config, 16, "LlamaForCausalLM")
        source = open_source(llama, "yarn", scale=4, beta_fast=8, beta_slow=2)
        meant = source.tables[0].in_force(256)
        with_flags = runtime(keys, tensors, 16, 256, found.flags)
        torch.testing.assert_close(with_flags.inv_freq, meant.inv_freq, rtol=1e-6, atol=0)
        assert (runtime(keys, tensors, 16, 256).inv_freq / meant.inv_freq - 1).abs().max() > 0.1

    @pytest.mark.parametrize("method", ["yarn", "pi", "ntk"])
    def test_the_flags_for_a_file_from_before_the_patch(self, llama: Path, method: str) -> None:
        found = export(llama, "llama.cpp", method=method, **OPTIONS[method])
        line = found.notes[0].split(": ", 1)[1].split()
        keys, tensors = converted(vars(AutoConfig.from_pretrained(llama)), 16, "LlamaForCausalLM")
        told = runtime(keys, tensors, 16, 256, line)
        meant = open_source(llama, method, **OPTIONS[method]).tables[0].in_force(256)
        torch.testing.assert_close(told.inv_freq, meant.inv_freq, rtol=1e-6, atol=0)
        assert told.factor == pytest.approx(meant.factor)

    def test_its_yarn_has_no_factor_of_its_own(self) -> None:
        keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 64}
        given = {**keys, "rope.scaling.yarn_attn_factor": 1.0}
        assert runtime(given, {}, 16, 256).factor == pytest.approx(formulas.yarn_factor(4.0))


class TestGGUF:
    """A file as the converter makes it, checked and mended."""

    @pytest.mark.parametrize("method", ["ntk_mixed", "ntk_by_parts", "longrope"])
    def test_a_table_goes_into_the_file(self, llama: Path, tmp_path: Path, method: str) -> None:
        gguf = pytest.importorskip("gguf")
        options = OPTIONS[method]
        config = {**export(llama, "llama.cpp").config, "max_position_embeddings": 256}
        file = converted_file(tmp_path / "m.gguf", config)
        check = check_gguf(file, llama, method=method, **options)
        assert not check.right
        target = write_gguf(check, tmp_path / "new.gguf")
        again = check_gguf(target, llama, method=method, **options)
        assert again.right
        assert again.error.frequency < 1e-6
        before, after = gguf.GGUFReader(file), gguf.GGUFReader(target)
        lists = {"rope_factors_short.weight", "rope_factors_long.weight"}
        assert {tensor.name for tensor in after.tensors} == {"blk.0.attn_q.weight"} | (
            lists if method == "longrope" else {"rope_freqs.weight"}
        )
        assert (after.tensors[0].data == before.tensors[0].data).all()
        assert after.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
        with pytest.raises(PosencError, match="exists"):
            write_gguf(check, target)

    def test_right_as_it_is_and_a_model_without_a_table(self, llama: Path, tmp_path: Path) -> None:
        config = export(llama, "llama.cpp", method="yarn", scale=4).config
        file = converted_file(tmp_path / "right.gguf", config)
        assert check_gguf(file, llama, method="yarn", scale=4).right
        config = {**export(llama, "llama.cpp").config, "max_position_embeddings": 256}
        file = converted_file(tmp_path / "qwen2.gguf", config, "qwen2")
        with pytest.raises(PosencError, match="qwen2"):
            write_gguf(check_gguf(file, llama, method="ntk_mixed", scale=4), tmp_path / "new.gguf")

    def test_no_gguf_file(self, llama: Path, tmp_path: Path) -> None:
        pytest.importorskip("gguf")
        (tmp_path / "m.gguf").write_bytes(b"not a model at all")
        with pytest.raises(PosencError, match="not a GGUF file"):
            check_gguf(tmp_path / "m.gguf", llama)
        with pytest.raises(PosencError, match="no file"):
            check_gguf(tmp_path / "missing.gguf", llama)
