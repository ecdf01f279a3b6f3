"""transformers, vLLM, SGLang and mlx-lm: engines that read config.json.

vLLM and SGLang make their tables from `rope_parameters`, and read other keys of it than transformers does:

- longrope takes its factor on cos and sin from `short_mscale` and `long_mscale`, never from `attention_factor`;
- SGLang's yarn has no `attention_factor` either, and multiplies its own factor by `attn_factor`;
- both multiply the length of a linear table, and the longest text, by `factor` once more;
- both refuse a length flag above the longest text that they derive, where `factor` times a length is rounded down.

vLLM 0.33.0: `model_executor/layers/rotary_embedding/`, `config/model.py` (`_get_and_verify_max_len`). SGLang 0.5.23:
`srt/layers/rotary_embedding/`, `srt/utils/hf_transformers/common.py` (`get_context_length`).

mlx-lm on Apple's machines, `mlx_lm/models/rope_utils.py` (`initialize_rope`), takes transformers 4's `rope_theta` and
`rope_scaling`; some model classes read `rope_parameters`. It differs from transformers:

- `type` wins over `rope_type`;
- yarn has no `attention_factor` and no `truncate`; its factor is that of `mscale` divided by that of `mscale_all_dim`;
- longrope rotates texts of every length by `long_factor`; its factor is sqrt(1 + ln(M / O) / ln O), where M is
  `max_position_embeddings` and O `original_max_position_embeddings`;
- dynamic has a base for each piece of a prompt (`prefill_step_size`).

Many of its model classes read less: `patches/engines/mlx.json` has those that compute each rope type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.diagnosis import read_json
from hf_posenc.engines import formulas
from hf_posenc.engines.engine import (
    Draft,
    Engine,
    Setup,
    Source,
    SourceTable,
    entry_of,
    known_names,
)
from hf_posenc.engines.formulas import Table
from hf_posenc.engines.names import PLUGIN_VLLM
from hf_posenc.engines.served import PREFIX, served_layers
from hf_posenc.errors import PosencError
from hf_posenc.model.rotary import is_half_split, rotary_output
from hf_posenc.patch.export import config_parts

_ORIGINAL = "original_max_position_embeddings"
_LENGTH = "max_position_embeddings"
# Other names of it that some configs have, in the order in which SGLang reads them.
_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")


class Transformers5(Engine):
    """transformers 5: the form that `save_pretrained` wrote, which was proven when the model was patched."""

    name = "transformers5"
    version = "5.24.0"

    def drafts(self, source: Source) -> Iterator[Draft]:
        patch = source.patch
        if patch is not None and patch.export is None:
            return
        form = patch.export if patch is not None and patch.export else "as it is"
        entries = {"rope_parameters": source.saved()} if source.tables else {}
        yield Draft(form, {**source.lengths(), **entries})

    def compute(self, setup: Setup) -> Table | str:
        rope = entry_of(setup.config["rope_parameters"], setup.table.label)
        theta, dim = float(rope["rope_theta"]), setup.table.dim
        return formulas.of_transformers(rope, setup.config, theta, dim, setup.length)


class Transformers4(Engine):
    """transformers 4.57: the keys that it reads, and tokenizer files that name a class of its own."""

    name = "transformers4"
    version = "4.57.1"
    legacy = True

    def drafts(self, source: Source) -> Iterator[Draft]:
        patch = source.patch
        if not source.tables:  # its table is in its weights
            if patch is None or patch.export == "weights":
                yield Draft("weights", source.lengths())
            return
        legacy = source.legacy
        saved = {} if patch is None or patch.export is None else {patch.export: source.saved()}
        for form, rope_parameters in (*saved.items(), *source.forms().items()):
            if not legacy.expresses(rope_parameters):
                continue
            values = {**source.lengths(), "rope_parameters": rope_parameters}
            yield Draft(form, {**values, **legacy.values(rope_parameters)})
            # A model type that takes no factor beside its lists makes one of two lengths: 1 where they are one.
            if form == "longrope" and _ORIGINAL in values:
                values[_ORIGINAL] = source.reach
                yield Draft(form, {**values, **legacy.values(rope_parameters)})

    def compute(self, setup: Setup) -> Table | str:
        config, source, dim = setup.config, setup.source, setup.table.dim
        model_type = source.text_config.model_type
        if model_type not in known_names(self.name)["model_types"]:
            return f"transformers {self.version} has no model type {model_type}"
        names = source.legacy.names
        if setup.table.label == "sliding_attention":
            theta = config[names.get("rope_local_base_freq", "rope_local_base_freq")]
            return Table(formulas.plain(float(theta), dim))
        theta = float(config[names.get("rope_theta", "rope_theta")])
        scaling = dict(config.get("rope_scaling") or {})
        scaling.setdefault("rope_type", scaling.get("type", "default"))
        if scaling["rope_type"] == "longrope":
            # Its own fallbacks: the switch and the factor go by the config's lengths.
            reach, original = config["max_position_embeddings"], config.get(_ORIGINAL)
            scaling[_ORIGINAL] = original or reach
            if original:
                scaling["factor"] = reach / original
        return formulas.of_transformers(scaling, config, theta, dim, setup.length)


class VLLM(Engine):
    """vLLM."""

    name = "vllm"
    version = "0.33.0"
    fixed_table = True
    length_flag = "--max-model-len"
    override_flag = "--hf-overrides"
    switches_by_text = False  # --max-model-len chooses between longrope's two lists, for every text
    switch_note = (
        "With {flag} above {original} vLLM uses long_factor for all texts, else short_factor."
    )

    def drafts(self, source: Source) -> Iterator[Draft]:
        stored = {**vars(source.text_config), "model_type": source.text_config.model_type}
        for form, rope_parameters in source.forms().items():
            values, result = dict(source.lengths()), dict(rope_parameters)
            for table in source.tables:
                if table.wrapper is None:
                    continue
                entry = self._entry(entry_of(rope_parameters, table.label), source, table)
                result = {**result, table.label: entry} if table.label in result else entry
                multiplied = result is entry and not _without_factor(stored)
                if multiplied and entry["rope_type"] == "linear":
                    values[_LENGTH] = source.original
                if _one_list(entry) and _ORIGINAL in values:
                    values[_ORIGINAL] = source.reach  # wins over the entry's
            if result.get("rope_type") == "yarn":
                values[_LENGTH] = source.reach  # no factor multiplies it
            lists = result.get("rope_type") == "longrope" and not _one_list(result)
            switches = source.length_dependent and lists
            note = self.switch_note.format(flag=self.length_flag, original=source.original)
            notes = (note,) if switches else ()
            others = [key for key in _LENGTHS if stored.get(key) and _LENGTH in values]
            values |= dict.fromkeys(others, values.get(_LENGTH))
            longest = self._longest({**stored, **values, "rope_parameters": result})
            flags = (self.length_flag, str(min(source.reach, longest)))
            yield Draft(form, {**values, "rope_parameters": result}, flags, notes)

    def _entry(self, rope: Mapping[str, Any], source: Source, table: SourceTable) -> dict[str, Any]:
        """Return a patched table's entry in the engine's own keys."""
        entry = dict(rope)
        if entry["rope_type"] == "longrope":
            entry["short_mscale"] = table.in_force(source.original).factor
            entry["long_mscale"] = table.in_force(source.original + 1).factor
            # The engine reads another list past this length, which a single list does not need. The attention of
            # Ministral reads the same key.
            if _one_list(entry) and not entry.get("llama_4_scaling_beta"):
                entry[_ORIGINAL] = source.reach
        return entry

    def compute(self, setup: Setup) -> Table | str:
        config, table = setup.config, setup.table
        rope = entry_of(config["rope_parameters"], table.label)
        theta, dim, kind = float(rope["rope_theta"]), table.dim, rope["rope_type"]
        own_yarn = setup.source.text_config.model_type in known_names("vllm")["own_yarn"]
        if own_yarn and kind != "default" and (kind != "yarn" or "attention_factor" in rope):
            return (
                "its class for this model computes every scaling as YaRN with a factor of its own"
            )
        if kind == "dynamic":
            return Table(self._dynamic(theta, dim, float(rope["factor"])))
        original = int(config.get(_ORIGINAL) or rope.get(_ORIGINAL) or config.get(_LENGTH, 0))
        if kind == "yarn":
            return Table(formulas.yarn_of(rope, theta, dim, original), self._yarn_factor(rope))
        if kind != "longrope":
            # As in transformers, but that a proportional table has no factor.
            own = {"factor": None} if kind == "proportional" else {}
            same = {**rope, _ORIGINAL: original, **own}
            return formulas.of_transformers(same, config, theta, dim, setup.length)
        if "mrope_section" in rope:
            axes = "positions on three axes (mrope_section)"
            return f"its longrope has no {axes}, which {setup.source.path} has"
        if _interleaved(table):
            return "its longrope rotates half-split features only, and this model's are interleaved"
        past = (setup.length if self.switches_by_text else setup.source.reach) > original
        if (factor := rope.get("long_mscale" if past else "short_mscale")) is None:
            factor = formulas.longrope_factor(config["max_position_embeddings"], original)
        divisors = rope["long_factor" if past else "short_factor"]
        return Table(formulas.longrope(theta, dim, divisors), float(factor))

    def _longest(self, config: Mapping[str, Any], tokenizer: float = math.inf) -> int:
        """Return the longest text that the engine accepts: `_get_and_verify_max_len`."""
        longest = min(config[key] for key in (_LENGTH, *_LENGTHS) if config.get(key))
        longest, factor = min(longest, tokenizer), 1.0
        rope = config["rope_parameters"]
        for entry in () if _without_factor(config) else (rope, *rope.values()):
            kind = entry.get("rope_type") if isinstance(entry, Mapping) else None
            if kind not in (None, "llama3", "longrope", "yarn"):
                factor = entry.get("factor") or factor
        return int(longest * factor)

    def _yarn_factor(self, rope: Mapping[str, Any]) -> float:
        return formulas.yarn_factor_of(rope)

    def _dynamic(self, theta: float, dim: int, factor: float) -> Tensor:
        """Return the one table of the dynamic method, for texts of every length."""
        return formulas.plain(theta, dim)  # its table's length is the length that it scales from

    def overrides(self, config: Mapping[str, Any], source: Source) -> tuple[str, ...]:
        if source.request is not None and type(self).plugin is not Engine.plugin:
            return ()  # beside the folder's own patch, the plug-in refuses them
        config = {**config, "model_type": source.text_config.model_type}
        if self._longest(config, tokenizer_length(source.base)) < self._longest(config):
            return ()
        keys = (*source.lengths(), *_LENGTHS, "rope_parameters")
        before = vars(dict(config_parts(source.stored))[source.text_path])
        changed = {k: config[k] for k in keys if k in config and config[k] != before.get(k)}
        for name in reversed(source.text_path.split(".") if source.text_path and changed else []):
            changed = {name: changed}
        return (self.override_flag, json.dumps(changed)) if changed else ()

    def plugin(self, source: Source) -> tuple[str, ...] | str | None:
        if source.request is not None and source.path != source.base:
            return "the plug-in serves no adapter: merge it into its base, and save that"
        if source.request is None:
            return "the plug-in serves folders that were saved with a patch which it can compute"
        name = (source.stored.architectures or [""])[0].removeprefix(PREFIX)
        if name not in known_names(self.name)["implemented"]:
            return f"the plug-in needs an implementation of vLLM's own, and {PLUGIN_VLLM[0]} has none of {name}"
        try:
            _, reach = served_layers(source.config, source.request, source.path)
        except PosencError as error:
            return f"the plug-in refuses it: {error}".rstrip(".")
        own = int(source.config.get_text_config(decoder=True).max_position_embeddings)
        return self.length_flag, str(max(own, reach or 0))


def tokenizer_length(folder: str | Path) -> float:
    """Return the longest text by a tokenizer's config; infinity where a folder has none."""
    file = Path(folder) / "tokenizer_config.json"
    if not file.is_file():
        return math.inf
    length = read_json(file, folder).get("model_max_length") or math.inf
    if not isinstance(length, int | float):
        raise PosencError(
            f"The {file.name} of {folder} has model_max_length = {length!r:.80}, which is no length. Correct it there."
        )
    return float(length)


class SGLang(VLLM):
    """SGLang, whose rotary code began as vLLM's."""

    name = "sglang"
    version = "0.5.23"
    plugin = Engine.plugin
    length_flag = "--context-length"
    override_flag = "--json-model-override-args"
    switches_by_text = True
    switch_note = (
        "SGLang switches the whole batch to long_factor at its longest text, and rotates position {original} as "
        "position 0 while that is the last one."
    )

    def _entry(self, rope: Mapping[str, Any], source: Source, table: SourceTable) -> dict[str, Any]:
        entry = super()._entry(rope, source, table)
        if entry["rope_type"] == "yarn":
            entry.pop("attn_factor", None)
            ratio = table.in_force(source.reach).factor / self._yarn_factor(entry)
            if abs(ratio - 1) > 1e-9:
                entry["attn_factor"] = ratio
        return entry

    def _yarn_factor(self, rope: Mapping[str, Any]) -> float:
        mscale, all_dim, factor = rope.get("mscale"), rope.get("mscale_all_dim"), rope["factor"]
        own = formulas.yarn_factor(factor)
        if mscale is not None and all_dim is not None:
            own = formulas.yarn_factor(factor, mscale) / formulas.yarn_factor(factor, all_dim)
        return own * float(rope.get("attn_factor", 1.0))

    def _dynamic(self, theta: float, dim: int, factor: float) -> Tensor:
        growth = factor * factor - (factor - 1)
        return formulas.plain(theta * growth ** (dim / (dim - 2)), dim)

    def _longest(self, config: Mapping[str, Any], tokenizer: float = math.inf) -> int:
        """Return the longest text that the engine accepts: `get_context_length`."""
        longest = next(config[key] for key in (*_LENGTHS, _LENGTH) if config.get(key))
        rope = config["rope_parameters"]  # it reads no entries by layer type
        scaled = rope.get("rope_type") != "llama3" and _ORIGINAL not in rope
        return int(longest * (rope.get("factor") or 1)) if scaled else int(longest)


def _without_factor(config: Mapping[str, Any]) -> bool:
    """Return whether the engines do not multiply the length of this model type by the factor of its RoPE."""
    return config.get("model_type") in known_names("vllm")["without_factor"]


def _one_list(entry: Mapping[str, Any]) -> bool:
    return bool(entry["rope_type"] == "longrope" and entry["short_factor"] == entry["long_factor"])


def _interleaved(table: SourceTable) -> bool:
    """Return whether the rotary module itself makes cos and sin feature by feature, not in two halves."""
    module = table.table.module if table.wrapper is None else table.wrapper
    output = rotary_output(module, table.label, torch.device("cpu"), length=4)
    if output is None or output[0].shape[-1] != table.dim or is_half_split(output, table.dim // 2):
        return False
    return torch.equal(output[0][:, 0::2], output[0][:, 1::2])


class MLX(Engine):
    """mlx-lm."""

    name = "mlx"
    version = "0.32.2"
    fixed_table = True
    legacy = True

    def drafts(self, source: Source) -> Iterator[Draft]:
        if source.main_table is None:
            return
        factor = source.main_table.in_force(source.reach).factor
        for form, rope_parameters in source.forms().items():
            if not (legacy := source.legacy.values(rope_parameters)):
                continue
            values = {**source.lengths(), **legacy}
            entry: dict[str, Any] = dict(entry_of(rope_parameters, "full_attention"))
            kind = entry["type"] = entry["rope_type"]
            notes: tuple[str, ...] = ()
            if kind == "yarn" and entry["factor"] > 1 and not entry.get("mscale_all_dim"):
                entry["mscale"] = (factor - 1) / (0.1 * math.log(entry["factor"]))
            elif kind == "longrope":
                # The original length from which it computes the factor; it is read for nothing else.
                entry[_ORIGINAL] = source.reach ** (1 / factor**2) if factor != 1 else source.reach
                if _ORIGINAL in values:
                    values[_ORIGINAL] = entry[_ORIGINAL]  # Phi-3 reads it here
                if entry["short_factor"] != entry["long_factor"]:
                    notes = ("mlx-lm uses long_factor for texts of every length.",)
            values["rope_scaling"] = None if kind == "default" else entry
            nested = {**rope_parameters, "full_attention": entry}
            values["rope_parameters"] = nested if "full_attention" in rope_parameters else entry
            yield Draft(form, values, notes=notes)

    def compute(self, setup: Setup) -> Table | str:
        config, dim, source = setup.config, setup.table.dim, setup.source
        rope = config["rope_scaling"] or {"rope_type": "default"}
        kind, model_type = rope["rope_type"], source.config.model_type
        if kind == "dynamic":
            return "its dynamic gives each piece of a prompt a table of its own"
        if model_type not in known_names(self.name).get(kind, ()):
            return (
                f"mlx-lm {self.version} is not known to compute rope_type {kind} for {model_type}"
            )
        local = setup.table.label == "sliding_attention"
        key = "rope_local_base_freq" if local else "rope_theta"
        theta = float(config[source.legacy.names.get(key, key)])
        if local:  # never scaled
            return Table(formulas.plain(theta, dim))
        if kind == "yarn":
            inv_freq = formulas.yarn_of({**rope, "truncate": True}, theta, dim, rope[_ORIGINAL])
            scale, all_dim = rope["factor"], rope.get("mscale_all_dim", 0.0)
            own = formulas.yarn_factor(scale, rope.get("mscale", 1.0))
            return Table(inv_freq, own / formulas.yarn_factor(scale, all_dim))
        if kind == "longrope":
            factor = formulas.longrope_factor(config["max_position_embeddings"], rope[_ORIGINAL])
            return Table(formulas.longrope(theta, dim, rope["long_factor"]), factor)
        return formulas.of_transformers(rope, config, theta, dim, setup.length)
