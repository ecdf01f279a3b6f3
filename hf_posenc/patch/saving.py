"""The `save_pretrained` of a patched model, which wraps that of its class while it is patched.

A folder whose patch plain transformers cannot compute is one that it refuses: names that no version knows stand for the
file of weights, the attention, the activation and the architecture, most of them a sentence on how to load it. The true
values are in the config's block. As for the Hub's custom models, an `auto_map` names a file of the folder, here one
that calls hf_posenc.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.methods import available_methods
from hf_posenc.model.unwrapping import swapped
from hf_posenc.patch import export
from hf_posenc.patch.state import BESIDE, State, state_of
from hf_posenc.seams.held import ABSENT, restore

_NAME = "save_pretrained"
_OF_TRAINER = re.compile(r"checkpoint-\d+")
_WITHHELD = "withheld"
"""The key of the config's block with the values, by part of the config, that the saved config has others for."""
_MODULE = "modeling_hf_posenc"
_CODE = '''"""Loads this model with its patch, {method}: AutoModel....from_pretrained(..., trust_remote_code=True).

Needs hf_posenc, whose own hf_posenc.from_pretrained loads the model without this file.
"""

import hf_posenc
import transformers
'''
_CLASS = """

class {name}:
    @classmethod
    def from_pretrained(cls, path, *args, **kwargs):
        return hf_posenc.from_pretrained(path, auto_class=transformers.{name}, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        pass
"""


def wrap_saving(model: nn.Module) -> None:
    """Make a model's `save_pretrained` write what the readers of the folder need; a copy of the model has its own."""
    if hasattr(type(model), _NAME):
        # A method would be pickled by its name, which is that of the class.
        vars(model)[_NAME] = functools.partial(save_pretrained, model)
    model.register_state_dict_pre_hook(_before_state_dict)


def unwrap_saving(model: nn.Module) -> None:
    """Undo `wrap_saving`, before the patch is undone."""
    vars(model).pop(_NAME, None)
    hooks, state = model._state_dict_pre_hooks, state_of(model)
    for key in [key for key, hook in hooks.items() if hook is _before_state_dict]:
        del hooks[key]
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        vars(adapter).pop(BESIDE, None)
    for adapter in state.adapters if state is not None else ():
        adapter.__class__ = adapter.__class__.__base__
        del vars(adapter)[export.BLOCK]


def _before_state_dict(model: Any, *_: Any) -> None:
    """Make adapters carry the patch: PEFT and transformers first collect weights. Warn if a larger model does."""
    if (state := state_of(model)) is None:
        return
    if getattr(model, "peft_config", None):
        from hf_posenc.patch.lora import carry_patch

        carry_patch(model, state)
    # A hook gets the prefix of the weights, which wrappers have too (PEFT, DDP); who collects them is in the calls.
    frame, whole = sys._getframe(1), model
    while frame.f_code.co_name == "state_dict" and frame.f_back is not None:
        caller, frame = frame.f_locals.get("self"), frame.f_back
        whole = caller if hasattr(type(caller), "set_attn_implementation") else whole
    if whole is not model and "part" not in state.warned:
        state.warned.add("part")
        warnings.warn(
            f"{type(model).__name__} is patched with {state.config.method}, and the {type(whole).__name__} around it "
            "is not: saved, it loses the patch or does not load. Undo it (unpatch_model), and patch the whole model.",
            stacklevel=2,
        )


def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a patched model as its class does, with a config that its readers understand or refuse."""
    state = state_of(model)
    if state is not None and state.foreign and state.export is None:
        raise PosencError(
            f"{state.config.method} starts from frequencies that were set after the model was loaded, and no reader of "
            "a saved model has them. Save the patch alone (hf_posenc.save_patch), and load it (load_patch) on a model "
            "with these frequencies."
        )
    write = functools.partial(_save_config, model)  # before the class uploads the folder
    with swapped(vars(model.config), _NAME, write):
        return getattr(type(model), _NAME)(model, save_directory, *args, **kwargs)


def _save_config(model: Any, directory: Any, **kwargs: Any) -> None:
    """Save the config as its class does, and edit what was written.

    Warns once where plain transformers cannot compute the patch, or hf_posenc cannot load it by its name. The Trainer
    reads a `checkpoint-N` to resume as a config without a model type. As such, transformers 5 fails on the
    `rope_scaling` of transformers 4, so that key is left out there.
    """
    state = state_of(model)
    assert state is not None
    del vars(model.config)[_NAME]
    model.config.save_pretrained(directory, **kwargs)
    file = Path(directory) / "config.json"
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    methods = " + ".join(name for name, _ in state.config.parts)
    autos = [*_auto_classes(model)]
    auto = max(autos or [type(model).__name__], key=lambda name: ("LM" in name, name))
    given = f"(..., auto_class={auto})" if "AutoModel" in autos else ""  # a model without a head
    advice = (
        f"{methods} needs hf_posenc. Load this model with hf_posenc.from_pretrained{given}, or with {auto} and "
        "trust_remote_code=True where hf_posenc is installed."
    )
    if state.foreign:  # hf_posenc would start from the frequencies of the config
        del values[export.BLOCK]
    if state.export is None:
        _withhold(values, model, advice)
        code, known = _CODE.format(method=methods), values.get("auto_map") or {}
        values["auto_map"] = {**known, **{name: f"{_MODULE}.{name}" for name in autos}}
        code += "".join(_CLASS.format(name=name) for name in autos)
        (file.parent / f"{_MODULE}.py").write_text(code, encoding="utf-8")
    if _OF_TRAINER.fullmatch(file.parent.name):
        values.pop("rope_scaling", None)
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    text = "" if "model" in state.warned else _warning(model, state, file.parent, methods, advice)
    if text:
        state.warned.add("model")
        warnings.warn(text, stacklevel=4)


def _warning(model: Any, state: State, folder: Path, methods: str, advice: str) -> str:
    """Return what the reader of a saved folder must know; empty where plain transformers computes the patch."""
    own = [name for name, _ in state.config.parts if name not in available_methods()]
    if own and state.export != "weights":
        return (
            f"{own[0]!r} is a method of your own that is not registered, so hf_posenc.from_pretrained cannot load this "
            f"model{'' if state.export is None else '; plain transformers can'}. Register its class before you patch: "
            "hf_posenc.register_method."
        )
    if state.export is not None:
        return ""
    plain = "refuses this folder"
    if not _is_refused(model, folder, advice):
        plain = "does not refuse this folder: it gives the model without the patch"
    call = f"{type(model).__name__}.from_pretrained({str(folder)!r})"
    return f"Plain transformers cannot compute {methods}, and {call} {plain}. {advice}"


def _is_refused(model: Any, folder: Path, advice: str) -> bool:
    """Return whether a model's class refuses a folder with the advice; it reads the config before the weights."""
    try:
        with export.quiet():
            type(model).from_pretrained(folder)
    except Exception as error:  # any other one may be due to weights that are not written yet
        return advice in str(error)
    return False


def _withhold(values: dict[str, Any], model: Any, advice: str) -> None:
    """Put into a config's JSON what plain transformers and other engines refuse, and keep the true values in its block.

    Before it builds a model, transformers reads the name of its file of weights from the config, in every family and
    whatever the caller passes; in the configs inside too, since a class of the text model alone reads only that one.
    The other values serve those who build the model from the config. They keep an activation function when they save
    the config again, which drops the rest. Tokenizers and commands read the config, so that loads.
    """
    parts = dict(export.config_parts(model.config))
    text = model.config.get_text_config(decoder=True)
    decoder = next((path for path, part in parts.items() if part is text), "")
    changes: dict[str, dict[str, Any]] = {path: {"transformers_weights": advice} for path in parts}
    names = [f"HfPosenc{name}" for name in values.get("architectures") or ("Model",)]
    changes[""] |= {"architectures": names, "attn_implementation": advice, "auto_map": None}
    changes[decoder] |= _refused(model, text, advice)
    withheld = {}
    for path, edits in changes.items():
        part = values
        for key in filter(None, path.split(".")):
            part = part.setdefault(key, {})
        withheld[path] = {key: part.get(key, ABSENT) for key in edits}
        part.update(edits)
    values[export.BLOCK][_WITHHELD] = withheld


def _refused(model: nn.Module, text: Any, advice: str) -> dict[str, Any]:
    """Return values of a decoder's config from which no model can be built, where its class takes such values."""
    from transformers.activations import ACT2FN

    used = {type(module) for module in model.modules()}
    names = {key: name for key, name in vars(text).items() if "act" in key and str(name) in ACT2FN}
    built = [key for key, name in names.items() if type(ACT2FN[name]) in used]
    activations = {key: advice for key in built if _takes(text, {key: advice})}
    rope: dict[str, Any] = dict(getattr(text, "rope_parameters", None) or {})
    if activations or not rope:
        return activations
    tables = {key: value for key, value in rope.items() if isinstance(value, dict)}
    nested: dict[str, Any] = {key: value | {"rope_type": advice} for key, value in tables.items()}
    changes = {"rope_parameters": rope | (nested or {"rope_type": advice})}
    return changes if _takes(text, changes) else {}


def _takes(config: Any, changes: dict[str, Any]) -> bool:
    """Return whether a config loads with other values: some classes validate theirs (Qwen4-Exp)."""
    try:
        with export.quiet():
            type(config).from_dict({**config.to_dict(), **changes})
    except Exception:
        return False
    return True


def _auto_classes(model: Any) -> Iterator[str]:
    from transformers.models.auto import modeling_auto

    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None) if name.startswith("AutoModel") else None
        with contextlib.suppress(ValueError):  # 5.24 names a class that it lacks (Voxtral Realtime)
            if mapping is not None and mapping.get(type(model.config), None) is type(model):
                yield name


def restore_withheld(config: Any) -> Any:
    """Give a loaded config the values that its folder withholds from plain transformers; return the config."""
    block = vars(config).get(export.BLOCK) or {}
    if not isinstance(block, dict):
        raise damaged(config.name_or_path)
    configs = dict(export.config_parts(config))
    for path, values in block.pop(_WITHHELD, {}).items():
        true = dict(values)
        ours = "hf_posenc" in str(config._attn_implementation)
        if true.pop("attn_implementation", None) and ours:
            config._attn_implementation = None  # a property; of the configs inside too
        restore(configs[path], true)
    return config


def damaged(path: Any) -> PosencError:
    """Return the error for a checkpoint whose block is not a patch."""
    return PosencError(
        f'The block "{export.BLOCK}" in the config.json of {path} is damaged: restore it, or save the model again.'
    )


def stored_config(name: Any, **options: Any) -> Any:
    """Load the config of a folder or hub name, with the values that it withholds from plain transformers."""
    from transformers import AutoConfig

    return restore_withheld(AutoConfig.from_pretrained(name, **options))
