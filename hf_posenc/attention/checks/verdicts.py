"""The verdicts of first checks, kept in the user's cache folder by versions and device.

A file that is damaged, or that cannot be written, is as one that does not exist: the check is then made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch

from hf_posenc.attention.checks import Case
from hf_posenc.errors import PosencError
from hf_posenc.files import cache_folder, to_json, write_atomically

Verdicts = dict[Case, str | None]
"""By case, the reason not to use its backend; `None`: it may be used."""
EXTRA = "HF_POSENC_EXTRA_BACKENDS"
"""A module in this environment variable has `BACKENDS` that come first in the table, in every process."""


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return all that a verdict depends on: versions, the source of this room, and the device's name."""
    found = {
        "hf_posenc": str(sys.modules["hf_posenc"].__version__),
        "source": _source(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "flash-attn-4": _version("flash-attn-4"),
        "extra backends": os.environ.get(EXTRA, ""),
    }
    if device.type != "cuda":
        capability = torch.backends.cpu.get_cpu_capability()
        return {**found, "device": f"{device.type} {platform.machine()} {capability}"}
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")
    properties = torch.cuda.get_device_properties(device)
    return {
        **found,
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()),
        "driver": str(driver()),
        "device": f"{properties.name}, compute capability {properties.major}.{properties.minor}",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _source() -> str:
    """A digest of the engine's source, which changes without the version while it is developed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def path_of(device: torch.device) -> Path:
    """Return the file of a device's verdicts."""
    text = json.dumps(fingerprint(device), sort_keys=True)
    return cache_folder() / f"backends-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read(device: torch.device) -> Verdicts:
    """Return the verdicts that are known of a device; none where the file is absent or damaged."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        entries = json.loads(path_of(device).read_text(encoding="utf-8"))["verdicts"]
        reasons = [entry.pop("reason") for entry in entries]
        return {Case(**case): reason for case, reason in zip(entries, reasons, strict=True)}
    return {}


def write(device: torch.device, verdicts: Verdicts, *, anew: bool = False) -> None:
    """Add verdicts to the file of a device, or replace all of them; a folder that cannot be written is left."""
    known = {**({} if anew else read(device)), **verdicts}
    entries = [{**asdict(case), "reason": reason} for case, reason in known.items()]
    path = path_of(device)
    # A process that writes at the same time may lose entries of the other, which are then found again.
    with contextlib.suppress(OSError, PosencError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_json({"of": fingerprint(device), "verdicts": entries}))
