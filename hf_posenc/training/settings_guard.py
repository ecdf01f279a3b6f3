"""The same command continues a run; another one in its folder is refused, with what differs.

A run's folder holds `settings.json`: everything that determines its numbers. A run continued under other settings would
be neither the old run nor the new one, and nothing in its results would say so.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.files import finite, to_json, write_atomically
from hf_posenc.evaluation.identity import environment
from hf_posenc.training.checkpoints import (
    checkpoints,
    clear_partial,
    complete_checkpoints,
    discard,
    last_complete_checkpoint,
    step_of,
)
from hf_posenc.training.result_saving import CONFIGS

SETTINGS = "settings.json"
_FORMAT = 1
# Where a run is, who watches it, how often it saves and how its batches are fetched: none of the losses depend on them.
_NAMES = """output_dir logging_dir run_name project report_to disable_tqdm log_level log_level_replica log_on_each_node
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen
    save_strategy save_steps save_total_limit save_on_each_node enable_jit_checkpoint resume_from_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics debug ddp_timeout local_rank
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order restore_callback_states_from_checkpoint
    do_train do_eval do_predict fresh verify_export"""
_FREE = frozenset(_NAMES.split())
_LAUNCH = ("FSDP_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_")


def settings_of(arguments: TrainingArguments, **more: Any) -> dict[str, Any]:
    """Everything about a training that determines its losses, JSON-ready.

    Args:
        arguments: The Trainer's; what only says where and how often things are written is left out.
        **more: The model, its patch, the data, the positions.
    """
    from accelerate import PartialState

    given = {name: value for name, value in arguments.to_dict().items() if name not in _FREE}
    launched = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_LAUNCH) and value.lower() not in ("", "no", "false", "0")
    }
    sharding = PartialState().distributed_type.value
    processes = {"count": arguments.world_size, "distributed_type": sharding, **launched}
    made = {**more, "arguments": given, "processes": processes}
    return dict(json.loads(json.dumps(finite(made), default=str)))


def resume_point(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    explicit: Path | None = None,
    fresh: bool = False,
    device: str | None = None,
) -> Path | None:
    """Finds where a run continues, and removes what a kill left half written.

    Call it in one process per disk, while no other run writes to the folder.

    Args:
        folder: The run's folder; made where it does not exist.
        settings: Everything that determines the losses, as `settings_of` gives it.
        explicit: A checkpoint that the user names: the run continues from it under whatever settings. Once it has
            saved beyond it, the same command continues from its own last checkpoint.
        fresh: Remove checkpoints of other settings instead of refusing them.
        device: What the run computes on; another one than before is warned of.

    Returns:
        The checkpoint; `None`: the run begins.

    Raises:
        PosencError: The folder holds another run, a damaged checkpoint, or cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _read(folder)
    others = checkpoints(folder)
    if before is None and others and not fresh:
        raise PosencError(
            f"{folder} holds {others[-1].name}, and no {SETTINGS} says what run it is of. Choose another --output_dir "
            "(--resume_from_checkpoint can name a checkpoint in this one), or remove them with --fresh."
        )
    clear_partial(folder)
    changed = ["its settings are unknown"]
    if before is not None:
        changed = differences(before["settings"], settings)
    complete = complete_checkpoints(folder)
    occupied = bool(complete) or any((folder / name).exists() for name in CONFIGS)
    if changed and occupied and fresh:
        for path in complete:
            discard(path)
        complete = []
    elif changed and occupied and explicit is None:
        raise PosencError(
            f"{folder} holds a run with other settings: {_list(changed)}. Repeat its command to continue it, choose "
            "another --output_dir, or begin again in this one with --fresh. With --resume_from_checkpoint CHECKPOINT "
            "it goes on from there, but not as it would have."
        )
    named = None if explicit is None else str(explicit)
    continued = before is not None and not changed and before.get("continued") == named
    if explicit is None or (complete and continued):
        point = last_complete_checkpoint(folder)
        if point is not None and settings.get("arguments", {}).get("save_only_model"):
            raise PosencError(
                f"{point} holds no optimizer (--save_only_model), so the run cannot continue from it as it was. Name "
                "it in --resume_from_checkpoint to go on with a new one, or choose another --output_dir."
            )
    else:
        point = _explicit(explicit, folder, complete, settings)
    if point is not None and before is not None:
        _warn_of_environment(before, device)
    written = {
        "kind": "training",
        "format": _FORMAT,
        "settings": dict(settings),
        "continued": named if before is None or named is not None else before.get("continued"),
        "environment": environment(),
        "device": device,
    }
    write_atomically(folder / SETTINGS, to_json(written))
    return point


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two JSON values, as `name: before, now`."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        # Another version of transformers has other options; what both have is compared.
        keys = {*before} & {*now} if name == "arguments" else {*before, *now}
        for key in sorted(keys):
            path = f"{name}.{key}" if name else str(key)
            found += differences(before.get(key), now.get(key), path)
        return found
    if before == now:
        return []
    return [f"{name.removeprefix('arguments.')} was {_short(before)}, is {_short(now)}"]


def _list(changed: list[str]) -> str:
    more = f"; and {len(changed) - 4} more" if len(changed) > 4 else ""
    return "; ".join(changed[:4]) + more


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PosencError(f"{folder / SETTINGS} cannot be read: {error}.") from error
    if found.get("kind") != "training" or found.get("format") != _FORMAT:
        raise PosencError(
            f"{folder / SETTINGS} was not written by this version's training. Choose another --output_dir."
        )
    return dict(found)


def _explicit(
    explicit: Path, folder: Path, complete: list[Path], settings: Mapping[str, Any]
) -> Path:
    if not (explicit / "trainer_state.json").is_file():
        raise PosencError(
            f"{explicit} is no checkpoint, or one that was never finished: it has no trainer_state.json."
        )
    ahead = [path for path in complete if step_of(path) > step_of(explicit)]
    if explicit.resolve().parent == folder.resolve() and ahead:
        raise PosencError(
            f"{ahead[-1].name} lies ahead of {explicit.name}, and the run would write over it. Give another "
            f"--output_dir, remove {ahead[-1].name}, or leave --resume_from_checkpoint out to continue from it."
        )
    origin = _read(explicit.parent)
    changed = ["they are unknown"] if origin is None else differences(origin["settings"], settings)
    if changed:
        warnings.warn(
            f"{explicit.name} was written under other settings, so the run is no exact continuation: "
            f"{_list(changed)}.",
            stacklevel=2,
        )
    return explicit


def _warn_of_environment(before: Mapping[str, Any], device: str | None) -> None:
    then = {**before.get("environment", {}), "device": before.get("device")}
    if changed := differences(then, {**environment(), "device": device}):
        warnings.warn(
            f"The run continues, but its losses may differ in their last bits: {_list(changed)}.",
            stacklevel=2,
        )
