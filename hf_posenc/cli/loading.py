"""Models and tokenizers by name, with errors of one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.cli.console import quiet_transformers
from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.options import ModelOptions

if TYPE_CHECKING:
    from hf_posenc.evaluation.measuring.candidates import Candidate

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def parse_patch(text: str) -> Candidate:
    """Return the patch that an option names; no text is read here whose length could set an automatic scale."""
    from hf_posenc.evaluation.measuring.candidates import Candidate

    return Candidate.parse(text, unpatched=False).without_automatic_scale()


def embedded_model() -> str:
    """Return the folder of the model that ships with the package."""
    from hf_posenc.embedded import model_path

    return str(model_path())


def one_thread() -> None:
    """Limit torch to one thread, for the embedded model.

    Its matrices are too small to gain much from a second thread, and threads that wait for each other on a busy
    machine cost minutes. With one thread the numbers do not depend on the number of cores.
    """
    import torch

    torch.set_num_threads(1)


def check_name(name: str) -> str:
    """Return the name of a model; raise for a path that does not exist, before the hub is asked for it."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists() or name.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2:
        raise PosencError(
            f"There is no model folder {name}. Give a folder with a config.json, or a hub name."
        )
    return name


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer; raise where there is none, or where its vocabulary is empty."""
    from transformers import AutoTokenizer

    quiet_transformers()
    name = check_name(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # a family, a missing library or the hub: each raises in its own way
        raise PosencError(
            f"{name} has no tokenizer that can be loaded ({one_line(error)}). Pass --tokenizer."
        ) from error
    # transformers makes an empty tokenizer from a config.json alone.
    tokens = tokenizer("hf_posenc reads text", add_special_tokens=False)["input_ids"]
    if set(tokens) <= {tokenizer.unk_token_id}:
        raise PosencError(f"The tokenizer of {name} turns text into nothing. Pass --tokenizer.")
    return tokenizer


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    attention: str | None = None,
    allow_missing_weights: bool = False,
) -> Any:
    """Load a causal language model, with the patch that it was saved with.

    The dtype `auto` is the checkpoint's own on an accelerator and float32 on a CPU. The default device is the first
    accelerator, or the CPU; `device_map` is passed to transformers instead.
    """
    import torch

    from hf_posenc.saving import from_pretrained

    quiet_transformers()
    if dtype not in DTYPES:
        raise PosencError(f"Unknown dtype {dtype!r}: {', '.join(DTYPES)}.")
    target = _device(device)
    on_cpu = target.type == "cpu" and device_map is None
    precision: Any = getattr(torch, dtype, None) or (torch.float32 if on_cpu else "auto")
    given = {"attn_implementation": attention, "device_map": device_map}
    options = {key: value for key, value in given.items() if value is not None}
    name = check_name(name)
    try:
        model = from_pretrained(
            name, dtype=precision, allow_missing_weights=allow_missing_weights, **options
        )
        return model if device_map is not None else model.to(target)
    except PosencError:
        raise
    except Exception as error:  # as for the tokenizer
        raise PosencError(f"The model {name} cannot be loaded: {one_line(error)}") from error


def live_model(name: str, *, whole: bool) -> Any:
    """Build the model on the meta device: its rotary tables are real, its weights are never read.

    With `whole` they are loaded, since a method that computes attention itself is tried on them.
    """
    from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

    from hf_posenc.engines.source import empty_model, stored_config
    from hf_posenc.patch.export import BLOCK
    from hf_posenc.saving import FILE

    quiet_transformers()
    name = check_name(name)
    # An adapter's config names the base model and the patch.
    if whole or (Path(name) / ADAPTER_CONFIG_NAME).is_file():
        return load_model(name)
    config = stored_config(name)
    if hasattr(config, BLOCK) or (Path(name) / FILE).is_file():
        return load_model(name, device_map="meta")  # saved with a patch
    try:
        return empty_model(config)
    except Exception as error:
        raise PosencError(f"The model of {name} cannot be built: {one_line(error)}") from error


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PosencError(
            f"The device {name!r} cannot be used: {str(error).splitlines()[0]}"
        ) from error
    return device


EMBEDDED = "hf_posenc's embedded model"


def open_session(options: ModelOptions) -> tuple[Any, Any, str]:
    """Load a model and its tokenizer, without a name the embedded ones; return them and the name in results."""
    if options.model is None:
        one_thread()
    name = options.model or embedded_model()
    tokenizer = load_tokenizer(options.tokenizer or name)
    model = load_model(
        name,
        dtype=options.dtype,
        device=options.device,
        device_map=options.device_map,
        attention=options.attn,
        allow_missing_weights=options.allow_missing_weights,
    )
    return model, tokenizer, options.model or EMBEDDED
