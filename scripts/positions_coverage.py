"""Text models by where positions enter them: the certificate, and the methods of models without a rotary embedding."""

from __future__ import annotations

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
from hf_posenc.methods import METHODS
from hf_posenc.model.discovery import tables_of
from hf_posenc.seams.inspection import Positions
from tests.support import zoo
from tests.support.families import build_text_model, text_types

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
    return model_type, name, _sources(positions), left(positions), *methods_of(model)


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


def _sources(positions: Positions) -> str:
    shown = [f"{each.kind} `{each.where}`" for each in positions.sources]
    return "<br>".join(shown) or "-"


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
