"""Methods inside attention that a model supports, tried one by one, and the refusals of the others."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from hf_posenc import PosencError, get_method, get_patch, patch_model, unpatch_model
from hf_posenc.methods import RopeScaling

Case = tuple[str, Mapping[str, Any]]
GROUPS: dict[str, tuple[Case, ...]] = {
    "rotary bands": (("rerope", {}), ("self_extend", {})),
    "biases": (("alibi", {}), ("alibi", {"keep_rope": True})),
    'log_n, update="row"': (("log_n", {}), ("dynamic_ntk", {"update": "row"})),
}
"""The columns, and the methods that stand for all of their kind: those that must know how a layer rotates, and those
that need not."""
LOCAL = "only sliding layers rotate"
DECODER = "encoder beside a decoder"
REASONS = {
    "sparse indexer": r"chooses the keys of a query by a",
    "attention in its own code": r"(rotates and attends|computes attention) in (its own code|code of its own)",
    "a factor on the queries": r"scales its queries already",
    "not runnable on tokens alone": r"cannot be run on a few tokens alone",
    "unknown rotation": r"is not a rotation in a known layout",
    "merged keys": r"merges several tokens into one key",
    DECODER: r"patches the decoder alone",
    "both directions": r"reads the text in both directions",
    "rotation read elsewhere": r"something besides attention reads the rotation",
    LOCAL: r"Only the layers of type .* rotate|No layer that rotates is among",
}
"""Short names of refusals, by what their messages say."""
ANY_NAME = "(...)"


@dataclass
class Refusals:
    """Refused model types by short name and full message, without names of modules and methods."""

    found: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def add(self, model_type: str, short: str, message: str) -> None:
        """Add one refusal."""
        types = self.found.setdefault(short, {}).setdefault(message, [])
        if model_type not in types:
            types.append(model_type)

    def section(self) -> str:
        """Format all refusals in Markdown: a heading for each short name, and each message in full."""
        parts = []
        for short in dict.fromkeys((*REASONS, *self.found)):
            if short not in self.found:
                continue
            parts.append(f"### {short[0].upper()}{short[1:]}")
            for message, types in sorted(self.found[short].items(), key=lambda item: item[1]):
                names = textwrap.fill(", ".join(f"`{name}`" for name in types), 119)
                quote = textwrap.fill(message, 118, break_on_hyphens=False)
                parts.append(f"{names}:\n\n{textwrap.indent(quote, '> ')}")
        return "\n\n".join(parts)


def tried() -> str:
    """List the methods that are tried, in Markdown."""
    labels = [f"`{_label(*case)}`" for cases in GROUPS.values() for case in cases]
    return f"{', '.join(labels[:-1])} and {labels[-1]}"


def cells(
    model_type: str, model: PreTrainedModel, original: int | None, refusals: Refusals
) -> tuple[str, ...]:
    """Return one cell per column: the methods that work in the full-attention layers, or else in all layers.

    Args:
        model_type: Name of the type in the page.
        model: An unpatched model; it is unchanged afterwards.
        original: The original context length, for models that name none.
        refusals: Collects the refusals.
    """
    found = []
    for cases in GROUPS.values():
        cell, refused = _cell(model, original, cases)
        found.append(cell)
        for short, message in refused:
            refusals.add(model_type, short, message)
    return tuple(found)


def _cell(
    model: PreTrainedModel, original: int | None, cases: tuple[Case, ...]
) -> tuple[str, list[tuple[str, str]]]:
    """Return the cell, and every refusal as its short name and its message."""
    refused: list[tuple[str, str]] = []
    works: dict[str, list[str]] = {}
    fails: dict[str, list[str]] = {}
    for name, options in cases:
        label = _label(name, options)
        for layers in ("full", "all", "decoder"):
            try:
                _patch(model, name, options, original, layers)
            except PosencError as error:
                short = _short(error)
                refused.append((short, _generic(str(error), model, name)))
                again = {"full": (LOCAL, DECODER), "all": (DECODER,)}
                if short not in again.get(layers, ()):
                    fails.setdefault(short, []).append(label)
                    break
            else:
                works.setdefault(layers, []).append(label)
                break
    if not fails:
        others = [layers for layers in works if layers != "full"]
        return ("".join(["all", *(f', with layers="{each}"' for each in others)])), refused
    if not works and len(fails) == 1:
        return f"none: {next(iter(fails))}", refused
    cell = "; ".join(f"not {' and '.join(labels)}: {short}" for short, labels in fails.items())
    return cell, refused


def _patch(
    model: PreTrainedModel,
    name: str,
    options: Mapping[str, Any],
    original: int | None,
    layers: str,
) -> None:
    """Patch, verify that at least one layer has the method, and unpatch."""
    patch_model(
        model,
        name,
        layers=layers,
        original_max_position_embeddings=original,
        replace=issubclass(get_method(name), RopeScaling),
        **options,
    )
    state = get_patch(model)
    assert state is not None
    assert state.layers, name
    unpatch_model(model)


def _label(name: str, options: Mapping[str, Any]) -> str:
    return name + "".join(f" {key}={value}" for key, value in options.items())


def _short(error: Exception) -> str:
    message = str(error)
    found = (short for short, pattern in REASONS.items() if re.search(pattern, message))
    return next(found, message.split(". ")[0])


def _generic(message: str, model: PreTrainedModel, method: str) -> str:
    """Return a message without module names and measured numbers, so that equal reasons are grouped."""
    message = re.sub(r" \(relative difference \S+\)", "", message)
    paths = {name for name, _ in model.named_modules() if "." in name}
    kinds = {type(module).__name__ for module in model.modules()}
    for name in sorted({method, *paths, *kinds}, key=len, reverse=True):
        message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)", ANY_NAME, message)
    return message
