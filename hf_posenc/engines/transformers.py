"""transformers 5 and 4.57: config.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_posenc.engines import formulas
from hf_posenc.engines.engine import Draft, Engine, entry_of, known_names
from hf_posenc.engines.formulas import Table
from hf_posenc.engines.source import Source, SourceTable


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
