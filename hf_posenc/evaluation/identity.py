"""What a model is, as far as its numbers go."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from typing import Any

import torch
from torch import Tensor, nn

_PACKAGES = ("hf-posenc", "torch", "transformers")
_BLOCK = (
    2**24
)  # elements summed at a time, so that a large matrix needs no second copy of its own size


def model_identity(model: nn.Module, name: str) -> dict[str, Any]:
    """Everything about a loaded model that determines a number.

    Args:
        model: The model, unpatched.
        name: The name under which it was loaded.

    Returns:
        JSON-ready values: class, config, dtype, kind of device, attention backend, a hash of all weights, versions.
    """
    config: Any = model.config
    return {
        "name": name,
        "class": type(model).__name__,
        "config": config_hash(config),
        "weights": weights_hash(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": device_kind(model),
        "attention": getattr(config, "_attn_implementation", None),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Versions of the packages that compute."""
    return {name: version_of(name) for name in _PACKAGES}


def version_of(package: str) -> str | None:
    """The installed version of a package."""
    if package == "hf-posenc":
        from hf_posenc import __version__

        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_kind(model: nn.Module) -> str:
    """The name of the GPU or the architecture of the CPU: its count does not matter, its kind may."""
    device = next(model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def config_hash(config: Any) -> str:
    """A hash of a model's config, without where it was loaded from."""
    values = {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("_name_or_path", "transformers_version")
    }
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()


def weights_hash(model: nn.Module) -> str:
    """A hash of every parameter's and buffer's name, shape and bits.

    Computed where the weights are, from exact sums of integers: the bits, and the bits times their place, both modulo
    2^64. So the order of summation does not matter and no weight leaves its device.
    """
    digest = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sums(tensor)}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def _sums(tensor: Tensor) -> tuple[int, int]:
    if tensor.device.type == "meta":
        return 0, 0
    flat = tensor.detach().contiguous().view(-1)
    if not len(flat):
        return 0, 0
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(kinds[flat.element_size()])
    plain = placed = 0
    for start in range(0, len(bits), _BLOCK):
        part = bits[start : start + _BLOCK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        plain += int(part.sum())
        placed += int((part * places).sum())
    return plain % 2**64, placed % 2**64
