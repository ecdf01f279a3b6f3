"""The cells of docs/architectures.md: methods that a model supports, tried one by one, and the refusals of the others.

The first part is about methods inside attention, the second about text models by where positions enter them.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from hf_posenc import (
    PosencError,
    UnsupportedModelError,
    get_method,
    get_patch,
    inspect_positions,
    patch_model,
    unpatch_model,
)
from hf_posenc.methods import METHODS, RopeScaling
from hf_posenc.model.discovery import tables_of
from hf_posenc.seams.inspection import Positions
from tests.support import zoo
from tests.support.families import build_text_model, text_types

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
Refusals = dict[str, dict[str, list[str]]]
"""Refused model types by short name and full message, without names of modules and methods."""


def refused(refusals: Refusals) -> str:
    """Format all refusals in Markdown: a heading for each short name, and each message in full."""
    parts = []
    for short in dict.fromkeys((*REASONS, *refusals)):
        if short not in refusals:
            continue
        parts.append(f"### {short[0].upper()}{short[1:]}")
        for message, types in sorted(refusals[short].items(), key=lambda item: item[1]):
            names = textwrap.fill(", ".join(f"`{name}`" for name in types), 119)
            quote = textwrap.fill(message, 118, break_on_hyphens=False)
            parts.append(f"{names}:\n\n{textwrap.indent(quote, '> ')}")
    return "\n\n".join(parts)


def attention_methods() -> str:
    """List the methods inside attention that are tried, in Markdown."""
    labels = [f"`{_label(*case)}`" for cases in GROUPS.values() for case in cases]
    return f"{', '.join(labels[:-1])} and {labels[-1]}"


def attention_cells(
    model_type: str, model: PreTrainedModel, original: int | None, refusals: Refusals
) -> list[str]:
    """Return one cell per column: the methods that work in the full-attention layers, or else in all layers.

    Args:
        model_type: Name of the type in the page.
        model: An unpatched model; it is unchanged afterwards.
        original: The original context length, for models that name none.
        refusals: Collects the refusals.
    """
    cells = []
    for cases in GROUPS.values():
        works: dict[str, list[str]] = {}
        fails: dict[str, list[str]] = {}
        for name, options in cases:
            # The layers to try, and the refusals after which the next ones are tried.
            for layers, others in (
                ("full", (LOCAL, DECODER)),
                ("all", (DECODER,)),
                ("decoder", ()),
            ):
                try:
                    _patch(model, name, options, original, layers)
                except PosencError as error:
                    short, message = _short(error), _generic(str(error), model, name)
                    types = refusals.setdefault(short, {}).setdefault(message, [])
                    types += [] if model_type in types else [model_type]
                    if short in others:
                        continue
                    fails.setdefault(short, []).append(_label(name, options))
                else:
                    works.setdefault(layers, []).append(name)
                break
        if not fails:
            cells.append("all" + "".join(f', with layers="{e}"' for e in works if e != "full"))
        elif not works and len(fails) == 1:
            cells.append(f"none: {next(iter(fails))}")
        else:
            not_in = (f"not {' and '.join(labels)}: {short}" for short, labels in fails.items())
            cells.append("; ".join(not_in))
    return cells


def _patch(
    model: PreTrainedModel, name: str, options: Mapping[str, Any], original: int | None, layers: str
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


# Text models without a rotary embedding.

COLUMNS = ("model type", "class", "positions come from", "certificate", "methods", "saved as")
# One method stands for those of a table, of a formula, of the model's own bias, and in the place of a table.
_TRIED = ("interpolate", "sinusoidal", "alibi", "t5", "nope")


def rotates(model: PreTrainedModel) -> bool:
    """Return whether the model has a rotary table of text, which has a row in another section."""
    try:
        return bool(tables_of(model))
    except UnsupportedModelError:
        return False


def rotary_encoders() -> list[str]:
    """Return the types of encoders with a rotary embedding, which no other section has."""
    found = []
    for model_type, name in text_types().items():
        if "ForMaskedLM" in name and model_type not in zoo.decoder_types():
            try:
                model = build_text_model(model_type)
            except Exception:  # listed as not tried
                continue
            if rotates(model):
                found.append(model_type)
    return found


def rows() -> tuple[list[tuple[str, ...]], list[tuple[str, str]]]:
    """Return the rows of `COLUMNS`, and the types that were not tried, with the reason."""
    found, untried = [], []
    rotary = {*zoo.decoder_types(), *zoo.composite_types(), *zoo.seq2seq_types(), *zoo.NOT_BUILT}
    for model_type, name in text_types().items():
        if model_type in rotary:
            continue
        try:
            model = build_text_model(model_type)
            if rotates(model):
                continue
            found.append(row(model_type, name, model))
        except UnsupportedModelError as error:
            untried.append((model_type, first_sentence(error)))
        except Exception as error:  # whatever a configuration class raises for unsupported sizes
            untried.append((model_type, f"no tiny model could be built ({type(error).__name__})"))
    return found, untried


def row(model_type: str, name: str, model: PreTrainedModel) -> tuple[str, ...]:
    """Return the cells of `COLUMNS`."""
    positions = inspect_positions(model)
    sources = "<br>".join(f"{each.kind} `{each.where}`" for each in positions.sources)
    return model_type, name, sources or "-", left(positions), *methods_of(model)


def left(positions: Positions) -> str:
    """Return the kinds of what the certificate leaves; `"complete"` if that is rounding."""
    if positions.complete:
        return "complete"
    return ", ".join(dict.fromkeys(each.kind for each in positions.rest))


def certificate(model: PreTrainedModel) -> str:
    """Return `left` of a model; `"-"` if it cannot be tried."""
    try:
        return left(inspect_positions(model))
    except UnsupportedModelError:
        return "-"


def methods_of(model: Any) -> tuple[str, str]:
    """Return the methods that work, one of each seam tried, and how they are saved."""
    scaled = {"scale": 2.0}
    takes = {name for name in _TRIED if get_method(name).takes_scale() and name != "alibi"}
    works, _ = tried(model, [(name, scaled if name in takes else {}) for name in _TRIED])
    if not works:
        return "none", "-"
    shown = [f"`{name}`" for name in works if name != "interpolate"]
    if "interpolate" in works:  # it stands for all methods of a table
        seam = get_method("interpolate").seam
        tables = [m.name for m in METHODS if m.seam == seam and m.name != "sinusoidal"]
        shown = [*(f"`{name}`" for name in tables), *shown]
    return ", ".join(shown), ", ".join(dict.fromkeys(works.values()))


def tried(
    model: Any, cases: Iterable[tuple[str, Mapping[str, Any]]]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return how each method that works is saved, and the others by the reason of the refusal."""
    works: dict[str, str] = {}
    fails: dict[str, list[str]] = {}
    for name, options in cases:
        try:
            with warnings.catch_warnings():
                # Untrained parameters, and what the column of the certificate says.
                warnings.simplefilter("ignore")
                patch_model(model, name, **options)
        except PosencError as error:
            reason = first_sentence(error).removeprefix(name).lstrip(": ")
            fails.setdefault(reason, []).append(name)
            continue
        patch = get_patch(model)
        assert patch is not None
        works[name] = patch.export or "hf_posenc"
        unpatch_model(model)
    return works, fails


def first_sentence(error: Exception) -> str:
    """Return the reason of a refusal without the advice."""
    return str(error).split(". ")[0].rstrip(".").replace("|", "\\|")
