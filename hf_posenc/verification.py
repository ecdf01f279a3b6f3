"""Verification of a saved model: a clean process, by default without hf_posenc, must compute the same logits."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, VerificationError
from hf_posenc.model.rotary import PosencRotary
from hf_posenc.model.unwrapping import trial, unwrap
from hf_posenc.model.weights import execution_device, rounding_dtype
from hf_posenc.patch.patching import get_patch
from hf_posenc.saving import from_pretrained

# The largest difference of a logit, relative to the largest logit: rounding of another version's kernels.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_TOKENS = 128  # of a text that begins at position 0
_SPREAD = 64  # of one whose positions go to the end of the context

_CLEAN = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_posenc":
            raise ModuleNotFoundError("hf_posenc is kept out of this process")

task = json.loads(sys.argv[1])
plain = task["plain"]
if plain:
    sys.meta_path.insert(0, Absent())
sys.path[:0] = task["packages"]
import torch, transformers
torch.set_num_threads(task["threads"])
transformers.logging.set_verbosity_error()
if plain:
    auto = getattr(transformers, task["class"], transformers.AutoModelForCausalLM)
else:
    import hf_posenc as auto
model, info = auto.from_pretrained(
    task["directory"], dtype=getattr(torch, task["dtype"]), output_loading_info=True
)
model.eval()
probes = torch.load(task["probes"])
with torch.no_grad():
    logits = [model(**probe, use_cache=False).logits.float() for probe in probes]
if plain and "hf_posenc" in sys.modules:
    raise SystemExit("hf_posenc was imported")
torch.save(logits, task["logits"])
json.dump({"version": transformers.__version__, "missing": sorted(info["missing_keys"])}, open(task["report"], "w"))
"""


@dataclass(frozen=True)
class Verification:
    """The result of a clean process, with its version of transformers.

    Attributes:
        error: The largest difference of a logit, relative to the largest logit.
        tolerance: The largest such difference that is rounding.
        tokens: Number of tokens that were compared.
        reach: The largest position among them, plus one.
        missing: Weights that are missing in the directory.
        plain: hf_posenc was kept out of the process.
    """

    directory: str
    version: str
    error: float
    tolerance: float
    tokens: int
    reach: int
    missing: tuple[str, ...]
    plain: bool = True

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance and not self.missing

    def __str__(self) -> str:
        verdict = "the same model" if self.passed else "ANOTHER model"
        missing = f"; weights missing: {', '.join(self.missing[:3])}" if self.missing else ""
        how = "without" if self.plain else "with"
        return (
            f"{self.directory} in a clean process, transformers {self.version}, {how} hf_posenc: {verdict}; "
            f"logits differ by {self.error:.1e} of the largest ({self.tokens} tokens, positions to "
            f"{self.reach:,}){missing}"
        )


def verify_export(
    directory: str | Path,
    model: nn.Module | None = None,
    *,
    packages: str | Path | None = None,
    plain: bool = True,
) -> Verification:
    """Load a saved model in a process of its own, in which hf_posenc cannot be imported, and compare logits.

    Two texts of random tokens are read: one from position 0 on, and one whose positions are spread over the whole
    context that the patch reaches, so that far positions cost no long text.

    Args:
        directory: A folder that `save_pretrained` or `write_export` wrote.
        model: The expected model; by default that of the folder, loaded with its patch.
        packages: A folder of packages that come first there, such as another transformers
            (`pip install --target FOLDER transformers==4.57.1`).
        plain: False: the process loads it with `hf_posenc.from_pretrained`, as methods require that compute attention.

    Raises:
        PosencError: The clean process could not load or run it.
    """
    if model is None:
        # Missing weights are part of the result.
        model = from_pretrained(directory, dtype=torch.float32, allow_missing_weights=True)
        assert isinstance(model, nn.Module)
    inner: Any = unwrap(model)
    probes = _probes(inner)
    expected = _logits(model, probes)
    probes = probes[: len(expected)]
    rounding = _error(_rounded_otherwise(model, probes), expected)
    positions = probes[-1].get("position_ids", torch.arange(probes[-1]["input_ids"].shape[1]))
    with tempfile.TemporaryDirectory() as folder:
        logits, report = _in_a_clean_process(
            Path(folder), str(directory), inner, probes, packages, plain
        )
    error = _error(logits, expected)
    return Verification(
        str(directory),
        report["version"],
        math.inf if math.isnan(error) else error,
        TOLERANCES.get(rounding_dtype(inner), 3e-2) + rounding,
        sum(probe["input_ids"].numel() for probe in probes),
        int(positions.max()) + 1,
        tuple(report["missing"]),
        plain,
    )


def _error(logits: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((one - two).abs().max() / two.abs().max())
        for one, two in zip(logits, expected, strict=True)
    )


def _rounded_otherwise(model: nn.Module, probes: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the logits with every frequency of a patch one float32 further, as another order of operations rounds it.

    At position 65,536 that turns a pair by up to 0.004.
    """

    def further(table: Callable[..., Any], *arguments: Any) -> Any:
        inv_freq, factor = table(*arguments)
        eps = torch.finfo(torch.float32).eps
        # 1 is never rounded.
        return torch.where(inv_freq == 1, inv_freq, inv_freq * (1 + eps)), factor

    patched = [module for module in model.modules() if isinstance(module, PosencRotary)]
    try:
        for rotary in patched:
            vars(rotary)["table"] = functools.partial(further, rotary.table)
            rotary.refresh()
        return _logits(model, probes)
    finally:
        for rotary in patched:
            vars(rotary).pop("table", None)
            rotary.refresh()


def require(verification: Verification) -> None:
    """Refuse a directory that holds another model."""
    if not verification.passed:
        instead = " Load it with hf_posenc.from_pretrained instead." if verification.plain else ""
        raise VerificationError(f"{verification}.{instead}")


def _probes(model: Any) -> list[dict[str, Tensor]]:
    """The texts: token ids, and for the second positions and a mask.

    Without the mask transformers would take every jump of the positions for the start of another text.
    """
    text = model.config.get_text_config(decoder=True)
    patch = get_patch(model)
    trained = reach = int(getattr(text, "max_position_embeddings", None) or _TOKENS)
    if patch is not None:
        trained = patch.original_max_position_embeddings or trained
        reach = patch.extended_length or 2 * trained
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> Tensor:
        return torch.randint(0, int(text.vocab_size), (1, count), generator=generator)

    probes = [{"input_ids": ids(min(_TOKENS, trained))}]
    if "position_ids" in inspect.signature(model.forward).parameters and reach > _SPREAD:
        positions = torch.linspace(0, reach - 1, _SPREAD).round().long()[None]
        spread = {"input_ids": ids(_SPREAD), "position_ids": positions}
        probes.append({**spread, "attention_mask": torch.ones_like(positions)})
    return probes


def _logits(model: nn.Module, probes: list[dict[str, Tensor]]) -> list[Tensor]:
    """The logits of every text; only of the first where the model takes no positions (GPT-J's table is too short)."""
    device = execution_device(model)
    logits: list[Tensor] = []
    try:
        with trial(model):
            model.eval()  # in all its layers, as the other process runs it
            for probe in probes:
                inputs = {name: value.to(device) for name, value in probe.items()}
                logits.append(model(**inputs, use_cache=False).logits.float().cpu())
    except (IndexError, RuntimeError, ValueError, TypeError):
        if not logits:
            raise
    return logits


def _in_a_clean_process(
    folder: Path,
    directory: str,
    model: Any,
    probes: list[dict[str, Tensor]],
    packages: str | Path | None,
    plain: bool,
) -> tuple[list[Tensor], dict[str, Any]]:
    files = {name: str(folder / name) for name in ("probes", "logits", "report")}
    first = [] if packages is None else [str(Path(packages).resolve())]
    task = {
        **files,
        "plain": plain,
        "directory": directory,
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "packages": first if plain else [*first, str(Path(__file__).resolve().parents[1])],
        "threads": torch.get_num_threads(),
    }
    torch.save(probes, files["probes"])
    # -I: no PYTHONPATH, no current folder, no user's packages
    command = [sys.executable, "-I", "-c", _CLEAN, json.dumps(task)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()] or ["no message"]
        raise PosencError(f"A clean process cannot load {directory}: {lines[-1].strip()[:300]}")
    return torch.load(files["logits"]), json.loads((folder / "report").read_text(encoding="utf-8"))
