"""Identity of a model: everything about it that determines a number."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.decoder import sizes_alone
from hf_posenc.gguf_file import origin_of
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.model.weights import damaged_weights, plain_parts, stored
from hf_posenc.patch.patching import get_patch

_PACKAGES = ("hf-posenc", "torch", "transformers", "tokenizers", "numpy")
_BLOCK = 2**24
"""Elements summed at a time, so that a large matrix is never copied whole."""


def model_identity(model: nn.Module, name: str) -> dict[str, Any]:
    """Return everything about a loaded model that determines a number, and its size; JSON-ready.

    The name of a model whose weights come from a GGUF file ends with their quantization.
    """
    config: Any = model.config
    parameters = list(model.parameters())
    device = parameters[0].device  # the kind of the GPU may matter, their number does not
    patch, dtype = get_patch(model), str(parameters[0].dtype).removeprefix("torch.")
    origin = origin_of(config, dtype)
    return {
        "name": f"{name} ({origin})" if origin else name,
        **({"weights": origin} if origin else {}),
        "class": type(model).__name__,
        "model_type": getattr(config, "model_type", None),
        "revision": getattr(config, "_commit_hash", None),
        "parameters": sum(global_shape(parameter).numel() for parameter in parameters),
        "dtype": dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        "config_sha256": config_hash(config),
        "weights_sha256": weights_hash(model),
        "patch": None if patch is None else patch.config.to_dict(),
    }


def describe_model(
    name: str | None, model: nn.Module, tokenizer: Any, special: Sequence[int], bos: str
) -> dict[str, Any]:
    """Return the description of a model and its tokenizer that a result stores.

    Without a name it is the one that the model was loaded from, else its class.
    """
    loaded_from = getattr(model.config, "_name_or_path", "")
    return {
        **model_identity(model, name or loaded_from or type(model).__name__),
        "tokenizer": {
            "class": type(tokenizer).__name__,
            "vocabulary": len(tokenizer),
            "sha256": tokenizer_hash(tokenizer),
        },
        "bos": {"policy": bos, "token_ids": list(special)},
    }


def check_tokenizer(tokenizer: Any) -> None:
    """Raise for what cannot turn text into tokens."""
    if not callable(tokenizer):
        given = repr(tokenizer) if isinstance(tokenizer, str) else type(tokenizer).__name__
        raise PosencError(
            f"{given} is no tokenizer: give the model's, as AutoTokenizer.from_pretrained(...) loads it."
        )


def check_weights(model: nn.Module) -> None:
    """Raise for what is no model, and if weights are not finite, or all of them zero."""
    inner: Any = unwrap(model)
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        wrapped = hasattr(getattr(inner, "config", None), "get_text_config")
        way = "the model inside, its attribute .module" if wrapped else "a causal language model"
        raise PosencError(
            f"{type(model).__name__} has no transformers config: give {way} of transformers."
        )
    if sizes_alone(model) is not None:
        return
    names = {name for name, _ in model.named_parameters()}
    tensors = [(name.lstrip("."), tensor) for name, tensor in _tensors(model)]
    absent = next((name for name, tensor in tensors if name in names and tensor.is_meta), None)
    if absent is not None:
        raise PosencError(
            f"The weights of the model are on the device meta, which holds none ({absent}): load them on another one."
        )
    damage = damaged_weights((name, tensor) for name, tensor in tensors if name in names)
    if damage is not None:
        raise PosencError(damage)


def check_vocabulary(model: Any, largest: int) -> None:
    """Raise if the model has no embedding for the largest token id of its input."""
    vocabulary = global_shape(model.get_input_embeddings().weight)[0]
    if largest >= vocabulary:
        raise PosencError(
            f"The tokenizer does not belong to the model: it gives token {largest:,}, the model has {vocabulary:,}."
        )


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a hash of everything that determines the tokens of a text."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return _hash(json.dumps(sorted(tokenizer.get_vocab().items())))
    return _hash(backend.to_str())


def environment() -> dict[str, Any]:
    """Return the versions of Python and packages, and the platform."""
    system = f"{platform.system()} {platform.machine()}"
    versions = {package: version_of(package) for package in _PACKAGES}
    return {"python": platform.python_version(), "system": system, **versions}


@functools.cache  # reading the metadata of an installed package takes a millisecond
def version_of(package: str) -> str | None:
    """Return the installed version of a package; for this package that of the source."""
    if package == "hf-posenc":
        return str(sys.modules["hf_posenc"].__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def config_hash(config: Any) -> str:
    """Return a hash of a model's config, independent of where it was loaded from."""
    origin = ("_name_or_path", "transformers_version")
    values = {name: value for name, value in config.to_dict().items() if name not in origin}
    return _hash(json.dumps(values, sort_keys=True, default=repr))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def weights_hash(model: nn.Module) -> str:
    """Return a hash of the name, shape and bits of every parameter and buffer, of its plain parts if it is not whole.

    Computed on the weights' device, from exact sums of integers: the bits, and the bits times their index, both modulo
    2^64. So the order of summation does not matter, and no weight leaves its device.
    """
    lines = (
        f"{name} {tuple(part.shape)} {part.dtype} {_sums(part)}\n"
        for name, tensor in _tensors(model)
        for part in plain_parts(tensor)
    )
    return _hash("".join(lines))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer once, by name, loaded if it is offloaded."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{path}.{name}", stored(module, name)


def global_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a whole parameter, which ZeRO-3 leaves empty outside its layer's forward."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@torch.no_grad()
def _sums(tensor: Tensor) -> tuple[int, int]:
    flat = tensor.contiguous().view(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(kinds[flat.element_size()])
    plain = weighted = 0
    for start in range(0, len(bits), _BLOCK):
        part = bits[start : start + _BLOCK].to(torch.int64)
        index = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        plain += int(part.sum())
        weighted += int((part * index).sum())
    return plain % 2**64, weighted % 2**64
