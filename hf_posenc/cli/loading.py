"""Models and tokenizers by name, with errors of one line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
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


def check_name(name: str, revision: str | None = None, *, given: str = "model") -> str:
    """Return the name of a model; raise if it is neither a folder nor on the hub, after one request without retries."""
    from hf_posenc.saving import check_folder

    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise PosencError(
                f"--revision {revision}: {name} is a folder, and only models on the hub have revisions. Leave it out."
            )
        return str(path)
    check_folder(name, given)
    _check_hub(name, revision, given)
    return name


def _check_hub(name: str, revision: str | None, given: str) -> None:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    absent = f"There is no {given} {name}: no folder has this name"
    try:
        files = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")
        cached = (try_to_load_from_cache(name, file, revision=revision) for file in files)
        if any(isinstance(file, str) for file in cached):
            return
        if constants.HF_HUB_OFFLINE:
            raise PosencError(
                f"{absent}, and it is not cached. HF_HUB_OFFLINE is set: unset it to download, or give a folder."
            )
        HfApi().model_info(name, revision=revision, timeout=10)
    except HFValidationError as error:
        raise PosencError(f"{absent}, and it is no hub name ({_reason(error)}).") from error
    except RevisionNotFoundError as error:
        raise PosencError(
            f"{name} has no revision {revision}. Give a branch, a tag or a commit of it."
        ) from error
    except RepositoryNotFoundError as error:
        raise PosencError(
            f"{absent}, and the hub has none that you can read. Check the spelling, or log in with `hf auth login`."
        ) from error
    except PosencError:
        raise
    except Exception as error:  # no network, a proxy, a mirror: each raises in its own way
        raise PosencError(
            f"{absent}, it is not in the cache, and {constants.ENDPOINT} cannot be reached ({_reason(error)}). Give a "
            "folder, or try again with a network."
        ) from error


def load_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the config of a model, of an adapter that of its base model; raise if it cannot be read."""
    from transformers.utils.peft_utils import find_adapter_config_file

    from hf_posenc.patch.saving import stored_config
    from hf_posenc.saving import check_layers

    folder = Path(name)
    try:
        adapter = find_adapter_config_file(name, revision=revision)
    except OSError:
        adapter = None
    if adapter is not None:
        values = _read_json(Path(adapter), name)
        base = values.get("base_model_name_or_path")
        if not base:
            raise PosencError(
                f"The adapter {name} does not name its base model. Merge it into the base model and give the result."
            )
        revision = values.get("revision")
        base = check_name(str(base), revision, given=f"base model of {name},")
        return load_config(base, revision=revision, trust_remote_code=trust_remote_code)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            files = sorted(path.name for path in folder.iterdir())
            more = ", ..." * (len(files) > 5)
            held = f"it has {', '.join(files[:5])}{more}" if files else "it is empty"
            raise PosencError(
                f"The folder {name} has no config.json ({held}). Give the folder that save_pretrained wrote."
            )
        _check_rope(_read_json(folder / "config.json", name), name)
    try:
        config = stored_config(name, trust_remote_code=trust_remote_code, revision=revision)
    except Exception as error:  # an unknown model type, values of a wrong type, custom code
        raise PosencError(f"The config.json of {name} cannot be read: {_reason(error)}") from error
    check_layers(config, name)
    return config


def _read_json(file: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PosencError(f"The {file.name} of {name} is not JSON: {_reason(error)}") from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise PosencError(f"The {file.name} of {name} is a JSON {kind}, not an object.")
    return values


def _check_rope(values: Mapping[str, Any], name: str, place: str = "") -> None:
    """Refuse a base or a factor of a rotary embedding that is not a number above 0."""
    for key, value in values.items():
        if key == "hf_posenc":  # a patch and what it replaced, which its own reader checks
            continue
        if isinstance(value, dict):
            _check_rope(value, name, f"{place}{key}.")
        elif value is not None and (key == "rope_theta" or (key == "factor" and "rope" in place)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise PosencError(
                    f"The config.json of {name} has {place}{key} = {value!r}, which is not a number above 0. Correct "
                    "it there."
                )


def build_empty(name: str, config: Any, *, causal: bool, trust_remote_code: bool = False) -> Any:
    """Build the model on the meta device; with `causal`, raise if it is not a causal language model."""
    from transformers import AutoModelForCausalLM

    from hf_posenc.engines.source import empty_model

    custom = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if causal and not custom and type(config) not in AutoModelForCausalLM._model_mapping:
        raise PosencError(
            f"{name} is a {config.model_type} model, which is not a causal language model: nothing that this command "
            "measures is defined for it."
        )
    if custom and trust_remote_code:
        return None  # built from the folder's own code when its weights are loaded
    try:
        return empty_model(config)
    except Exception as error:
        raise PosencError(
            f"The model of {name} cannot be built from its config.json: {_reason(error, config)}"
        ) from error


def _reason(error: BaseException, config: Any = None) -> str:
    """Return the whole message of an error on one line, with advice for the command line."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError) and config is not None:  # transformers has no such class
        values: dict[str, Any] = config.to_dict()
        rope = values.get("rope_parameters")
        values |= {f"rope_parameters.{key}": value for key, value in dict(rope or {}).items()}
        named = (key for key, value in values.items() if value == error.args[0])
        text = f"{next(named, 'one of its values')}: {text} is unknown to transformers"
    elif isinstance(error, (LookupError, TypeError, AttributeError, AssertionError)) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if "trust_remote_code" in text:
        return "it needs the Python code that comes with it. Read that code, and pass --trust-remote-code to run it."
    return text


def load_tokenizer(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    given: str = "model",
) -> Any:
    """Load a tokenizer; raise where there is none, or where its vocabulary is empty."""
    from transformers import AutoTokenizer

    quiet_transformers()
    name = check_name(name, revision, given=given)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # a family, a missing library or the hub: each raises in its own way
        folder, reason = Path(name), f"The tokenizer of {name} cannot be loaded: {_reason(error)}"
        kinds = ("*token*", "*vocab*", "*.model")
        if folder.is_dir() and not any(path for kind in kinds for path in folder.glob(kind)):
            reason = f"{name} has no tokenizer files."
        advice = "Pass --tokenizer with a folder or a hub name that has one."
        raise PosencError(f"{reason} {advice}") from error
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
    revision: str | None = None,
    trust_remote_code: bool = False,
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
    if device is not None and device_map is not None and device_map != "meta":
        raise PosencError("--device and --device-map exclude each other: give one of them.")
    target = _device(device)
    on_cpu = target.type == "cpu" and device_map is None
    precision: Any = getattr(torch, dtype, None) or (torch.float32 if on_cpu else "auto")
    given = {"attn_implementation": attention, "device_map": device_map, "revision": revision}
    options = {key: value for key, value in given.items() if value is not None}
    name = check_name(name, revision)
    try:
        model = from_pretrained(
            name,
            dtype=precision,
            allow_missing_weights=allow_missing_weights,
            trust_remote_code=trust_remote_code,
            **options,
        )
        return model if device_map is not None else model.to(target)
    except PosencError:
        raise
    except Exception as error:  # as for the tokenizer
        raise PosencError(
            f"The model {name} cannot be loaded: {_unreadable(name) or _reason(error)}"
        ) from error


def _unreadable(name: str) -> str | None:
    """Return the first weights file of a folder that is not a whole safetensors file, and what it is instead."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            with file.open("rb") as content:
                pointer = content.read(64).startswith(b"version https://git-lfs")
            kind = "a Git LFS pointer and not the weights: run `git lfs pull` there"
            damaged = f"damaged or incomplete ({one_line(error)}): download it again"
            return f"{file.name} is {kind if pointer else damaged}."
    return None


def live_model(
    name: str, *, whole: bool, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Build the model on the meta device: its rotary tables are real, its weights are never read.

    With `whole` they are loaded, since a method that computes attention itself is tried on them.
    """
    from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

    from hf_posenc.methods import seam_of
    from hf_posenc.saving import take_patch

    quiet_transformers()
    name = check_name(name, revision)
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_config(name, **origin)
    saved = take_patch(config, name)
    whole |= saved is not None and any(seam_of(method) != "rotary" for method in saved.build())
    # An adapter's config names the base model and the patch.
    if whole or (Path(name) / ADAPTER_CONFIG_NAME).is_file():
        return load_model(name, **origin)
    if saved is not None:
        return load_model(name, device_map="meta", **origin)
    empty = build_empty(name, config, causal=False, trust_remote_code=trust_remote_code)
    return load_model(name, device_map="meta", **origin) if empty is None else empty


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
        raise PosencError(f"The device {name!r} cannot be used: {one_line(error)}") from error
    if device.type == "meta":
        raise PosencError("The device 'meta' holds no weights: give cpu, or an accelerator.")
    return device


EMBEDDED = "hf_posenc's embedded model"


def open_session(options: ModelOptions) -> tuple[Any, Any, str]:
    """Load a model and its tokenizer, without a name the embedded ones; return them and the name in results."""
    if options.model is None:
        one_thread()
    quiet_transformers()
    name = check_name(options.model or embedded_model(), options.revision)
    trust: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    origin = trust | {"revision": options.revision}
    # In this order, so that the first thing that is wrong is the one in the message; the weights come last.
    build_empty(name, load_config(name, **origin), causal=True, **trust)
    if options.tokenizer is None:
        tokenizer = load_tokenizer(name, **origin)
    else:
        tokenizer = load_tokenizer(options.tokenizer, given="tokenizer", **trust)
    model = load_model(
        name,
        dtype=options.dtype,
        device=options.device,
        device_map=options.device_map,
        attention=options.attn,
        allow_missing_weights=options.allow_missing_weights,
        **origin,
    )
    return model, tokenizer, options.model or EMBEDDED
