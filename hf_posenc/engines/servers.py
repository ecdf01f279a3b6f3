"""vLLM and SGLang: config.json, or its overrides on the command line.

Both make their tables from `rope_parameters`, and read other keys of it than transformers does:

- longrope takes its factor on cos and sin from `short_mscale` and `long_mscale`, never from `attention_factor`;
- SGLang's yarn has no `attention_factor` either, and multiplies its own factor by `attn_factor`;
- both multiply the length of a linear table, and the longest text, by `factor` once more.

vLLM 0.33.0: `model_executor/layers/rotary_embedding/`, `config/model.py` (`_get_and_verify_max_len`). SGLang 0.5.23:
`srt/layers/rotary_embedding/`, `srt/utils/hf_transformers/common.py` (`get_context_length`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.engines import formulas
from hf_posenc.engines.engine import Draft, Engine, entry_of, known_names
from hf_posenc.engines.formulas import Table
from hf_posenc.engines.source import Source, SourceTable
from hf_posenc.model.rotary import is_half_split, rotary_output
from hf_posenc.patch.export import config_parts


class Server(Engine):
    """What vLLM and SGLang have in common."""

    fixed_table = True
    length_flag: ClassVar[str]
    override_flag: ClassVar[str]

    def drafts(self, source: Source) -> Iterator[Draft]:
        flags = (self.length_flag, str(source.reach))
        for form, rope_parameters in source.forms().items():
            values = dict(source.lengths())
            labels = {entry.label for entry in source.tables if entry.wrapper is not None}
            told = dict(rope_parameters)
            for label in labels:
                entry = self._told(entry_of(rope_parameters, label), source, label)
                if label in rope_parameters:
                    told[label] = entry
                else:
                    told = entry
                if entry["rope_type"] == "linear" and source.patch is not None:
                    values["max_position_embeddings"] = source.original
                original = "original_max_position_embeddings"
                if _one_list(entry) and original in values:
                    values[original] = source.reach  # wins over the entry's
            notes = self._notes(told, source)
            yield Draft(form, {**values, "rope_parameters": told}, flags, notes)

    def _told(self, entry: Mapping[str, Any], source: Source, label: str) -> dict[str, Any]:
        """One table's entry in the engine's own keys."""
        told = dict(entry)
        if told["rope_type"] != "longrope":
            return told
        table = next(one for one in source.tables if one.label == label)
        original = source.original
        told["short_mscale"] = table.in_force(original).factor
        told["long_mscale"] = table.in_force(original + 1).factor
        if _one_list(told):
            # One list for every length: nothing to switch, so no position at which the switch could go wrong.
            told["original_max_position_embeddings"] = source.reach
        return told

    def _notes(self, told: Mapping[str, Any], source: Source) -> tuple[str, ...]:
        return ()

    def table(
        self,
        config: Mapping[str, Any],
        draft: Draft,
        entry: SourceTable,
        source: Source,
        length: int,
    ) -> Table | str:
        rope = entry_of(config["rope_parameters"], entry.label)
        theta, dim, kind = float(rope["rope_theta"]), entry.dim, rope["rope_type"]
        if kind in ("default", "proportional"):
            table = formulas.plain(theta, dim)
            if kind == "proportional":
                table[int(float(rope.get("partial_rotary_factor") or 1.0) * dim // 2) :] = 0
            return Table(table)
        if kind == "linear":
            return Table(formulas.plain(theta, dim) / float(rope["factor"]))
        key = "original_max_position_embeddings"
        original = int(config.get(key) or rope.get(key) or config["max_position_embeddings"])
        if kind == "llama3":
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            return Table(formulas.llama3(theta, dim, float(rope["factor"]), low, high, original))
        if kind == "yarn":
            return Table(formulas.yarn_of(rope, theta, dim, original), self._yarn_factor(rope))
        if kind == "dynamic":
            reach = float(config["max_position_embeddings"])
            return Table(self._dynamic(theta, dim, float(rope["factor"]), reach))
        if kind == "longrope":
            if "mrope_section" in rope:
                return f"its longrope knows no positions on three axes (mrope_section), and {source.path} has them"
            if _interleaved(entry):
                return "its longrope rotates half-split features only, and this model's are interleaved"
            past = self._past(source.reach, original, length)
            divisors = rope["long_factor" if past else "short_factor"]
            factor = rope.get("long_mscale" if past else "short_mscale")
            if factor is None:
                factor = formulas.longrope_factor(config["max_position_embeddings"], original)
            return Table(formulas.longrope(theta, dim, divisors), float(factor))
        return f"it has no rope_type {kind!r}"

    def _yarn_factor(self, rope: Mapping[str, Any]) -> float:
        raise NotImplementedError

    def _dynamic(self, theta: float, dim: int, factor: float, reach: float) -> Tensor:
        """The one table of its dynamic method, for texts of every length."""
        raise NotImplementedError

    def _past(self, reach: int, original: int, length: int) -> bool:
        """Whether a text of `length` tokens is given the long list."""
        raise NotImplementedError

    def overrides(self, config: Mapping[str, Any], source: Source) -> tuple[str, ...]:
        keys = (*source.lengths(), "rope_parameters")
        before = vars(dict(config_parts(source.stored))[source.text_path])
        changed: dict[str, Any] = {
            key: config[key] for key in keys if key in config and config[key] != before.get(key)
        }
        for name in reversed(source.text_path.split(".") if source.text_path else []):
            changed = {name: changed}
        return (self.override_flag, json.dumps(changed)) if changed else ()


class VLLM(Server):
    """vLLM."""

    name = "vllm"
    version = "0.33.0"
    length_flag = "--max-model-len"
    override_flag = "--hf-overrides"

    def _yarn_factor(self, rope: Mapping[str, Any]) -> float:
        return formulas.yarn_factor_of(rope)

    def _dynamic(self, theta: float, dim: int, factor: float, reach: float) -> Tensor:
        return formulas.plain(theta, dim)  # its table's length is the length that it scales from

    def _past(self, reach: int, original: int, length: int) -> bool:
        return reach > original  # by --max-model-len, for every text

    def _notes(self, told: Mapping[str, Any], source: Source) -> tuple[str, ...]:
        if source.length_dependent and told.get("rope_type") == "longrope":
            note = (
                f"With {self.length_flag} above {source.original} vLLM uses long_factor for short texts too; at or "
                "below it, short_factor for all."
            )
            return (note,)
        return ()


class SGLang(Server):
    """SGLang."""

    name = "sglang"
    version = "0.5.23"
    length_flag = "--context-length"
    override_flag = "--json-model-override-args"

    def _told(self, entry: Mapping[str, Any], source: Source, label: str) -> dict[str, Any]:
        told = super()._told(entry, source, label)
        if told["rope_type"] == "yarn":
            table = next(one for one in source.tables if one.label == label)
            wanted = table.in_force(source.reach).factor
            told.pop("attn_factor", None)
            own = self._yarn_factor(told)
            if abs(wanted / own - 1) > 1e-9:
                told["attn_factor"] = wanted / own
        return told

    def _yarn_factor(self, rope: Mapping[str, Any]) -> float:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        factor = float(rope["factor"])
        own = formulas.yarn_factor(factor)
        if mscale is not None and all_dim is not None:
            own = formulas.yarn_factor(factor, mscale) / formulas.yarn_factor(factor, all_dim)
        return own * float(rope.get("attn_factor", 1.0))

    def _dynamic(self, theta: float, dim: int, factor: float, reach: float) -> Tensor:
        growth = factor * factor - (factor - 1)
        return formulas.plain(theta * growth ** (dim / (dim - 2)), dim)

    def _past(self, reach: int, original: int, length: int) -> bool:
        return length > original

    def _notes(self, told: Mapping[str, Any], source: Source) -> tuple[str, ...]:
        if source.length_dependent and told.get("rope_type") == "longrope":
            note = (
                f"SGLang switches the whole batch to long_factor at its longest text, and rotates position "
                f"{source.original} as position 0 while that is the last one."
            )
            return (note,)
        return ()


def _one_list(entry: Mapping[str, Any]) -> bool:
    """Whether a longrope entry has one list for texts of every length."""
    return bool(entry["rope_type"] == "longrope" and entry["short_factor"] == entry["long_factor"])


def _interleaved(entry: SourceTable) -> bool:
    """Whether the rotary module itself gives cos and sin feature by feature instead of in two halves."""
    module = entry.table.module if entry.wrapper is None else entry.wrapper
    output = rotary_output(module, entry.label, torch.device("cpu"), length=4)
    if output is None:
        return False
    cos = output[0]
    pairs = cos.shape[-1] // 2
    if cos.shape[-1] != entry.dim or is_half_split(output, pairs):
        return False
    return torch.equal(cos[:, 0::2], cos[:, 1::2])


# transformers 5 and 4.57: config.json alone.


class Transformers5(Engine):
    """What `save_pretrained` wrote: the form that was proven when the model was patched."""

    name = "transformers5"
    version = "5.23.0"

    def drafts(self, source: Source) -> Iterator[Draft]:
        patch = source.patch
        if patch is not None and patch.export is None:
            return
        form = patch.export if patch is not None and patch.export else "as it is"
        told = {"rope_parameters": source.saved()} if source.tables else {}
        yield Draft(form, {**source.lengths(), **told})

    def table(
        self,
        config: Mapping[str, Any],
        draft: Draft,
        entry: SourceTable,
        source: Source,
        length: int,
    ) -> Table | str:
        rope = entry_of(config["rope_parameters"], entry.label)
        return formulas.of_transformers(rope, config, float(rope["rope_theta"]), entry.dim, length)


class Transformers4(Engine):
    """The keys that it reads, and tokenizer files that name a class of its own."""

    name = "transformers4"
    version = "4.57.1"

    def drafts(self, source: Source) -> Iterator[Draft]:
        patch = source.patch
        if not source.tables:  # its table is in its weights
            if patch is None or patch.export == "weights":
                yield Draft("weights", source.lengths())
            return
        legacy = source.adapter.legacy(source.text_config)
        saved = {} if patch is None or patch.export is None else {patch.export: source.saved()}
        for form, rope_parameters in (*saved.items(), *source.forms().items()):
            values = {**source.lengths(), "rope_parameters": rope_parameters}
            if legacy.expresses(rope_parameters):
                yield Draft(form, {**values, **legacy.values(rope_parameters)})
                # A model type that takes no factor beside its lists makes one of two lengths: 1 where they are one.
                if form == "longrope" and "original_max_position_embeddings" in values:
                    values["original_max_position_embeddings"] = source.reach
                    yield Draft(form, {**values, **legacy.values(rope_parameters)})

    def table(
        self,
        config: Mapping[str, Any],
        draft: Draft,
        entry: SourceTable,
        source: Source,
        length: int,
    ) -> Table | str:
        model_type = source.text_config.model_type
        if model_type not in known_names(self.name)["model_types"]:
            return f"transformers {self.version} does not know the model type {model_type}"
        names = source.adapter.legacy(source.text_config).names
        if entry.label == "sliding_attention":
            theta = config[names.get("rope_local_base_freq", "rope_local_base_freq")]
            return Table(formulas.plain(float(theta), entry.dim))
        theta = float(config[names.get("rope_theta", "rope_theta")])
        scaling = dict(config.get("rope_scaling") or {})
        scaling.setdefault("rope_type", scaling.get("type", "default"))
        # Its own fallbacks: the dynamic method and the switch of longrope go by the config's lengths.
        original = config.get("original_max_position_embeddings")
        if scaling["rope_type"] == "longrope":
            reach = config["max_position_embeddings"]
            scaling["original_max_position_embeddings"] = original or reach
            if original:
                scaling["factor"] = reach / original
        return formulas.of_transformers(scaling, config, theta, entry.dim, length)
