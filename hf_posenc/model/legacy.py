"""The names that transformers 4 and older servers give what `rope_parameters` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""What transformers 4.57 computes (`ROPE_INIT_FUNCTIONS`)."""

# What stands outside `rope_scaling` there.
_OUTSIDE = frozenset({"rope_type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True)
class LegacyKeys:
    """How transformers 4.57 reads the rotary embedding of one model type.

    Attributes:
        names: Other names than `rope_theta`, `partial_rotary_factor` and `rope_local_base_freq`, where it has such.
        rope_types: The rope types that it computes for this model type.
        fields: The keys that `rope_scaling` must have, no more and no fewer; `None`: any.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ROPE_TYPES
    fields: tuple[str, ...] | None = None

    def expresses(self, rope_parameters: Mapping[str, Any]) -> bool:
        """Whether transformers 4.57 computes what `values` says.

        Args:
            rope_parameters: As transformers 5 has it: flat, or nested by layer type.
        """
        full = _full(rope_parameters)
        return bool(self.values(rope_parameters)) and full["rope_type"] in self.rope_types

    def values(self, rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The same in the config attributes of transformers 4.57.

        Also where it does not compute them for this model type: most of those that do not then refuse the config,
        and would compute something else in silence without.

        Args:
            rope_parameters: As transformers 5 has it: flat, or nested by layer type.

        Returns:
            The attributes; empty where there are no words for it.
        """
        full = _full(rope_parameters)
        if "rope_theta" not in full or full["rope_type"] not in ROPE_TYPES:
            return {}
        legacy = {"rope_theta": full["rope_theta"]}
        beside = set(full) - _OUTSIDE if self.fields is None else ()
        if full["rope_type"] != "default" or beside:
            legacy["rope_scaling"] = self._scaling(full)
        if full["rope_type"] == "longrope" and full["short_factor"] != full["long_factor"]:
            # There the switch from the one list to the other is at this attribute, else at max_position_embeddings.
            original = full["original_max_position_embeddings"]
            legacy["original_max_position_embeddings"] = original
        if "partial_rotary_factor" in full:
            legacy["partial_rotary_factor"] = full["partial_rotary_factor"]
        named = {self.names.get(key, key): value for key, value in legacy.items()}
        sliding = rope_parameters.get("sliding_attention")
        if sliding:
            name = self.names.get("rope_local_base_freq", "rope_local_base_freq")
            if named.setdefault(name, sliding["rope_theta"]) != sliding["rope_theta"]:
                return {}  # one theta for all layers (OLMo 3)
        return named

    def variants(self, rope_parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What to write beside `rope_parameters`, best first: transformers 5 does not agree with every one.

        Args:
            rope_parameters: As transformers 5 has it: flat, or nested by layer type.
        """
        values = self.values(rope_parameters)
        yield values
        if self.fields is not None and "rope_scaling" in values:
            yield {**values, "rope_scaling": dict(_full(rope_parameters))}  # refused by 4.57
        yield {}

    def _scaling(self, full: Mapping[str, Any]) -> dict[str, Any]:
        if self.fields is None or full["rope_type"] not in self.rope_types:
            return dict(full)
        spelt = {"type": full["rope_type"], **full}
        return {key: spelt[key] for key in self.fields}


def _full(rope_parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of the layers with full attention: the only one that 4.57 can scale."""
    entry: Mapping[str, Any] | None = rope_parameters.get("full_attention", rope_parameters)
    return entry or {}
