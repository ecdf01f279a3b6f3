"""Text models by where positions enter them: the certificate, and the methods of models without a rotary embedding."""

from __future__ import annotations

import warnings
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
            untried.append((model_type, _sentence(error)))
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
    works: dict[str, str] = {}
    for name in _TRIED:
        scaled: dict[str, Any] = (
            {"scale": 2.0} if get_method(name).takes_scale() and name != "alibi" else {}
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # untrained parameters, and what the certificate column says
                patch_model(model, name, **scaled)
        except PosencError:
            continue
        patch = get_patch(model)
        assert patch is not None
        works[name] = patch.export or "hf_posenc"
        unpatch_model(model)
    if not works:
        return "none", "-"
    names = [_group(name) for name in works]
    forms = dict.fromkeys(works.values())
    return ", ".join(names), ", ".join(forms)


def _group(name: str) -> str:
    """Return the methods that a tried one stands for."""
    seam = get_method(name).seam
    if name == "interpolate":
        return ", ".join(
            f"`{m.name}`" for m in METHODS if m.seam == seam and m.name != "sinusoidal"
        )
    return f"`{name}`"


def _sentence(error: Exception) -> str:
    return str(error).split(". ")[0].rstrip(".").replace("|", "\\|")
