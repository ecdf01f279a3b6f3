"""mlx-lm on Apple's machines: the keys of a config that it reads, and the table that it computes from them.

`mlx_lm/models/rope_utils.py` (`initialize_rope`) takes transformers 4's `rope_theta` and `rope_scaling`; some model
classes read `rope_parameters`. It differs from transformers:

- `type` wins over `rope_type`;
- yarn has no `attention_factor` and no `truncate`; its factor is that of `mscale` divided by that of `mscale_all_dim`;
- longrope rotates texts of every length by `long_factor`; its factor is sqrt(1 + ln(M / O) / ln O), where M is
  `max_position_embeddings` and O `original_max_position_embeddings`;
- dynamic has a base for each piece of a prompt (`prefill_step_size`).

Many model classes read less: `patches/engines/mlx.json` has those that compute each rope type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hf_posenc.engines import formulas
from hf_posenc.engines.engine import Draft, Engine, Setup, entry_of, known_names
from hf_posenc.engines.formulas import Table
from hf_posenc.engines.source import Source

_ORIGINAL = "original_max_position_embeddings"


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
