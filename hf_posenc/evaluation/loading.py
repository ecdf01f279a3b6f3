"""Models and tokenizers by name, with errors of one line, for commands and for the fine-tuning."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc import diagnosis
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.evaluation.options import CheckpointOptions, ModelOptions
from hf_posenc.gguf_file import find_gguf, loading_gguf, require_gguf

if TYPE_CHECKING:
    from hf_posenc.evaluation.measuring.candidates import Candidate

_TOKENIZER = "Pass --tokenizer with a folder or a hub name that has one."
ADAPTER = "adapter_config.json"


def parse_patch(text: str) -> Candidate:
    """Return the patch that an option names; no text is read here whose length could set an automatic scale."""
    from hf_posenc.evaluation.measuring.candidates import Candidate
    from hf_posenc.methods import get_method

    candidate = Candidate.parse(text, unpatched=False)
    for part in (part for part in candidate.parts if part.auto):
        get_method(part.method).from_options(**part.options)  # raises where it requires a scale
    parts = tuple(dataclasses.replace(part, auto=False) for part in candidate.parts)
    candidate = dataclasses.replace(candidate, parts=parts)
    candidate.check_values()
    return candidate


def embedded_model() -> str:
    """Return the folder of the model that ships with the package."""
    from hf_posenc.embedded import model_path

    return str(model_path())


def one_thread() -> None:
    """Limit torch to one thread, for the embedded model.

    A second one gains little on its small matrices, and costs minutes on a busy machine. With one thread the numbers do
    not depend on the number of cores.
    """
    import torch

    torch.set_num_threads(1)


verbose = False  # `--verbose` of the commands


def quiet_transformers() -> None:
    """Disable the log lines and progress bars of transformers and its hub client, unless a command is `verbose`."""
    if verbose:
        return
    import transformers
    from huggingface_hub.utils import logging

    log: Any = transformers.logging
    hub_log: Any = logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    hub_log.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)


def check_name(name: str, revision: str | None = None, *, given: str = "model") -> str:
    """Return the name of a model; raise if it is no folder, no GGUF file and not on the hub, after one request."""
    path = Path(name).expanduser()
    if path.is_dir() or find_gguf(path) is not None:
        if revision is not None:
            kind = "folder" if path.is_dir() else "file"
            raise PosencError(
                f"--revision {revision}: {name} is a {kind}, and only models on the hub have revisions. Leave it out."
            )
        return str(path)
    diagnosis.check_source(name, given, revision=revision)
    return name


def name_of(options: CheckpointOptions) -> str:
    """Return the name of the model, by default the folder of the embedded one, checked."""
    return check_name(options.model or embedded_model(), options.revision)


def load_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the config of a model, of an adapter that of its base model; raise if it cannot be read."""
    from transformers.utils.peft_utils import find_adapter_config_file

    adapter = None
    if find_gguf(name) is None:
        with contextlib.suppress(OSError):
            adapter = find_adapter_config_file(name, revision=revision)
    if adapter is not None:
        base, revision = base_of(Path(adapter), name)
        return load_config(base, revision=revision, trust_remote_code=trust_remote_code)
    return diagnosis.read_config(name, revision=revision, trust_remote_code=trust_remote_code)


def base_of(file: Path, name: str) -> tuple[str, str | None]:
    """Return the base model that an adapter's config names, and its revision; raise where it is not there."""
    values = diagnosis.read_json(file, name)
    base, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not base:
        raise PosencError(
            f"The adapter {name} does not name its base model. Merge it into the base model and give the result."
        )
    diagnosis.check_base(base, name, revision=revision)
    return base, revision


def build_empty(name: str, config: Any, *, causal: bool, trust_remote_code: bool = False) -> Any:
    """Build the model on the meta device; with `causal`, raise if it is not a causal language model.

    It is `None` for code of its own, which is built when its weights are loaded.
    """
    from hf_posenc.engines.engine import empty_model

    if causal:
        diagnosis.check_causal(config, name, "nothing that this command measures is defined for it")
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None
    try:
        return empty_model(config)
    except Exception as error:
        raise PosencError(
            f"The model of {name} cannot be built from its config.json: {diagnosis.reason_of(error, config)}"
        ) from error


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, given: str = "model"
) -> Any:
    """Load a tokenizer; raise where there is none, or where its vocabulary is empty."""
    from transformers import AutoTokenizer

    quiet_transformers()
    name = check_name(name, revision, given=given)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if (gguf := find_gguf(name)) is not None:
        require_gguf()
        options["gguf_file"] = str(gguf.resolve())
    try:
        with diagnosis.taken_warnings(
            "tokenization_utils_tokenizers", "incorrect tokenization"
        ) as taken:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent if gguf else name, **options)
        # transformers makes an empty tokenizer from a config.json alone.
        tokens = tokenizer("hf_posenc reads text", add_special_tokens=False)["input_ids"]
    except Exception as error:  # a family, a missing library or the hub: each raises in its own way
        check_tokenizer(name)
        cause = diagnosis.reason_of(error).rstrip(".")
        raise PosencError(
            f"The tokenizer of {name} cannot be loaded: {cause}. {_TOKENIZER}"
        ) from error
    for text in taken:
        warnings.warn(
            f"{text} Save it so in Python, with save_pretrained, and pass the folder as --tokenizer.",
            stacklevel=2,
        )
    if set(tokens) <= {tokenizer.unk_token_id}:
        raise PosencError(f"The tokenizer of {name} turns text into nothing. Pass --tokenizer.")
    return tokenizer


def has_tokenizer(name: str) -> bool:
    """Return False for a folder that has no files of a tokenizer, and is neither a GGUF model nor an adapter."""
    folder, kinds = Path(name).expanduser(), ("*token*", "*vocab*", "*.model", "*.gguf", ADAPTER)
    return not folder.is_dir() or any(path for kind in kinds for path in folder.glob(kind))


def check_tokenizer(name: str) -> None:
    """Raise for a folder without a tokenizer."""
    if not has_tokenizer(name):
        raise PosencError(f"{name} has no tokenizer files. {_TOKENIZER}")


def load_model(model: str | Path | None, **options: Any) -> Any:
    """Load a causal language model, with the patch that it was saved with; the options are those of `ModelOptions`.

    The dtype `auto` is the checkpoint's own on an accelerator and float32 on a CPU. The default device is the first
    accelerator, or the CPU; `device_map` is passed to transformers instead.
    """
    import torch

    from hf_posenc.evaluation.device import device_of
    from hf_posenc.saving import from_pretrained

    quiet_transformers()
    chosen = ModelOptions(model=None if model is None else str(model), **options)
    target, mapped = device_of(chosen.device), chosen.device_map is not None
    on_cpu = target.type == "cpu" and not mapped
    given = {
        "attn_implementation": chosen.attn,
        "device_map": chosen.device_map,
        "revision": chosen.revision,
    }
    name = name_of(chosen)
    try:
        loaded = from_pretrained(
            name,
            dtype=getattr(torch, chosen.dtype, None) or (torch.float32 if on_cpu else "auto"),
            allow_missing_weights=chosen.allow_missing_weights,
            trust_remote_code=chosen.trust_remote_code,
            **{key: value for key, value in given.items() if value is not None},
        )
        return loaded if mapped else loaded.to(target)
    except PosencError:
        raise
    except Exception as error:  # as for the tokenizer
        raise PosencError(
            f"The model {name} cannot be loaded: {diagnosis.unreadable(name) or diagnosis.reason_of(error)}"
        ) from error


def live_model(options: CheckpointOptions, *, whole: bool) -> Any:
    """Build the model on the meta device: its rotary tables are real, its weights are never read.

    With `whole` they are loaded, since a method that computes attention itself is tried on them.
    """
    from hf_posenc.methods import seam_of
    from hf_posenc.saving import take_patch

    quiet_transformers()
    name, trust = name_of(options), options.trust_remote_code
    config = load_config(name, revision=options.revision, trust_remote_code=trust)
    saved = take_patch(config, name)
    # An adapter's config names the base model and the patch.
    whole |= (Path(name) / ADAPTER).is_file()
    whole |= saved is not None and any(seam_of(method) != "rotary" for method in saved.build())
    if not whole and saved is None:
        model = build_empty(name, config, causal=False, trust_remote_code=trust)
        if model is not None:
            return model
    return load_model(**vars(options), device_map=None if whole else "meta")


def open_sizes(options: ModelOptions) -> tuple[Any, Any, str]:
    """Return what `open_session` returns, of a model without weights, whose cost alone is computed.

    A saved patch is in force, an adapter is added, code of the folder is run: on the meta device. A saved patch whose
    seam is found by reading the weights is the exception: that model is loaded.
    """
    import torch

    from hf_posenc.evaluation.device import device_of
    from hf_posenc.evaluation.scoring.decoder import mark_sizes_alone
    from hf_posenc.model.discovery import rotary_tables
    from hf_posenc.saving import take_patch

    quiet_transformers()
    name, trust = name_of(options), options.trust_remote_code
    config = load_config(name, revision=options.revision, trust_remote_code=trust)
    device, model = device_of(options.device), None
    dtype = "float32" if options.dtype == "auto" and device.type == "cpu" else options.dtype
    if not (Path(name) / ADAPTER).exists() and take_patch(copy.deepcopy(config), name) is None:
        if dtype != "auto":
            config.dtype = getattr(torch, dtype)
        if options.attn is not None:
            config._attn_implementation = options.attn
        model = build_empty(name, config, causal=True, trust_remote_code=trust)
    if model is None:
        try:
            with warnings.catch_warnings():
                # torch warns of every weight of an adapter that it does not copy
                warnings.simplefilter("ignore")
                on_meta = {"dtype": dtype, "device": None, "device_map": "meta"}
                model = load_model(**{**vars(options), **on_meta})
        except UnsupportedModelError:
            return open_session(options)
    for table in rotary_tables(model):
        if model.get_submodule(table.name) is table.module:  # not wrapped by a patch
            model.set_submodule(table.name, table.built())
    model = mark_sizes_alone(model.eval(), device)
    return model, _tokenizer_of(options, name), options.model or EMBEDDED


EMBEDDED = "hf_posenc's embedded model"


def open_session(options: ModelOptions) -> tuple[Any, Any, str]:
    """Load a model and its tokenizer, without a name the embedded ones; return them and the name in results."""
    if options.model is None:
        one_thread()
    quiet_transformers()
    name, trust = name_of(options), options.trust_remote_code
    with loading_gguf() if find_gguf(name) is not None else contextlib.nullcontext():
        # In this order, so that the first thing that is wrong is the one in the message; the weights come last.
        config = load_config(name, revision=options.revision, trust_remote_code=trust)
        build_empty(name, config, causal=True, trust_remote_code=trust)
        tokenizer = _tokenizer_of(options, name)
        model = load_model(**vars(options))
    return model, tokenizer, options.model or EMBEDDED


def _tokenizer_of(options: ModelOptions, name: str) -> Any:
    trust = options.trust_remote_code
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer, given="tokenizer", trust_remote_code=trust)
    return load_tokenizer(name, revision=options.revision, trust_remote_code=trust)
