"""The patch of a folder as vLLM reads it: from its config, and refused there if it cannot be served exactly."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import ModelRegistry, __version__
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.transformers_utils import config as vllm_config

from hf_posenc.diagnosis import read_json
from hf_posenc.engines.served import PREFIX, plain, served_layers
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.model.attention import Layer
from hf_posenc.model.parameters import PARAMETER_FILE
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.export import BLOCK
from hf_posenc.patch.files import FILE
from hf_posenc.saving import take_patch
from hf_posenc.serve.interfaces import moved

SERVED = "hf_posenc_served"
"""The attribute of vLLM's config with the patch in JSON, its folder, and the model's own length and rotation."""
STEPS, ROWS = "steps", "rows"
"""Its keys for tables that follow a request's length: bucket and original length of the layers, and the lengths in the
worker by row of the batch."""
INSIDE = "inside"
"""Its key for whether the patch is computed inside attention."""
IN_PROCESS: list[PatchConfig] = []
"""The patches of the models of this process."""
_LENGTH = "max_position_embeddings"
_UNBOUNDED = 1 << 31
_ROPE = "rope_parameters"
_SCALING = ("rope_scaling", _ROPE, "rope_theta", _LENGTH)


def register_reader(architectures: Sequence[str]) -> None:
    """Let vLLM read the patch in a Hugging Face config, and check its flags for the patched forms of architectures."""
    parsers = vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER
    own: Any = parsers["hf"]
    if issubclass(own, _Reader):
        return
    parsers["hf"] = type(own.__name__, (_Reader, own), {})
    module: Any = vllm_config
    # A refusal is definite: not tried again, and printed once.
    once = functools.partial(module.with_retry, fatal_errors=(PosencError,))
    module.with_retry = functools.update_wrapper(once, module.with_retry)
    PEFTHelper.from_local_dir = _checked(PEFTHelper.from_local_dir)
    for name in architectures:
        before = MODELS_CONFIG_MAP.get(name, VerifyAndUpdateConfig)
        MODELS_CONFIG_MAP[PREFIX + name] = type(name, (_Checked, before), {})


class _Checked:
    """The part of an architecture's check of vLLM's flags that is the plug-in's: before any process is started."""

    @classmethod
    def verify_and_update_model_config(cls, model_config: Any) -> None:
        super().verify_and_update_model_config(model_config)  # type: ignore[misc]
        text = model_config.hf_config.get_text_config(decoder=True)
        # Layers without a patch make their own tables, of this length.
        setattr(text, _LENGTH, max(getattr(text, _LENGTH), model_config.max_model_len))

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        super().verify_and_update_config(vllm_config)  # type: ignore[misc]
        parallel, drafts = vllm_config.parallel_config, vllm_config.speculative_config
        served = getattr(vllm_config.model_config.hf_config, SERVED)
        if not current_platform.is_cpu() and not current_platform.is_cuda():
            reason = f"the plug-in runs on a CPU or with CUDA, and this is {current_platform.device_name}"
        elif served[INSIDE] and current_platform.is_cuda() and _captured(vllm_config):
            reason = (
                "a full CUDA graph has no place for what it computes between kernels: leave cudagraph_mode out of "
                "--compilation-config, or give PIECEWISE"
            )
        elif parallel.pipeline_parallel_size > 1:
            reason = "layers are on several processes: leave --pipeline-parallel-size out, or give tensor parallelism"
        elif (
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1
        ):
            reason = "keys of one request are on several processes: leave context parallelism out"
        elif vllm_config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
            reason = f"keys are cached in {vllm_config.cache_config.cache_dtype}: leave --kv-cache-dtype out"
        elif drafts is not None and drafts.method not in ("ngram", "draft_model"):
            reason = f"drafts of {drafts.method} were not tried: the method ngram or draft_model is"
        else:
            return
        patch = PatchConfig.from_dict(served["patch"])
        raise PosencError(f"{patch} cannot be served by vLLM: {reason}.")


def _captured(vllm_config: Any) -> bool:
    """Return whether attention is asked to run in a CUDA graph; where nothing is asked, choose that it does not.

    The backend is chosen too, since the plug-in reads the pages of one on a GPU.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    compilation, attention = vllm_config.compilation_config, vllm_config.attention_config
    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    if attention.backend is None:
        attention.backend = AttentionBackendEnum.FLASH_ATTN
    return bool(compilation.cudagraph_mode.has_full_cudagraphs())


def _checked(own: Any) -> Any:
    """Return vLLM's reader of an adapter, which refuses one of another patch than its process serves."""

    @functools.wraps(own)
    def read_adapter(lora_path: str, *args: Any, **kwargs: Any) -> Any:
        block = read_json(Path(lora_path) / "adapter_config.json", lora_path).get(BLOCK)
        if block is not None:
            patch = PatchConfig.from_dict(block)
            if patch not in IN_PROCESS:
                served = " and ".join(map(str, IN_PROCESS)) or "no patch"
                raise PosencError(
                    f"The adapter in {lora_path} was trained in a model with {patch}, and this one is served with "
                    f"{served}. Serve the folder that save_pretrained of the patched base model writes."
                )
            if (Path(lora_path) / PARAMETER_FILE).is_file():
                raise PosencError(
                    f"The adapter in {lora_path} has parameters of {patch} of its own, which one server has once. "
                    "Merge it into its base: hf_posenc.from_pretrained(...).merge_and_unload().save_pretrained(...)."
                )
        return own(lora_path, *args, **kwargs)

    return staticmethod(read_adapter)


class _Reader:
    """The part of a config's parser that reads the patch."""

    def parse(self, model: str | Path, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        overrides = kwargs.get("hf_overrides")
        values, config = super().parse(model, *args, **kwargs)  # type: ignore[misc]
        if values.get(BLOCK) is not None or (Path(model) / FILE).is_file():
            given = overrides if isinstance(overrides, Mapping) else {}
            read(model, config, given, kwargs.get("revision"))
            values["architectures"] = config.architectures
        return values, config


def read(
    model: str | Path, config: Any, overrides: Mapping[str, Any], revision: str | None
) -> None:
    """Take the patch of a folder out of its config, which then describes the model before the patch, with its reach.

    Raises:
        PosencError: A patch that is damaged, that the model cannot take, or that vLLM cannot serve exactly.
    """
    names = config.architectures
    architectures = [name.removeprefix(PREFIX) for name in names]
    missing = [name for name in architectures if not _implements(name)]
    if missing and names == architectures and hasattr(config, BLOCK):
        return  # vLLM runs transformers' own code, which reads the table in the config
    patch = take_patch(config, model)
    if patch is None:
        return  # one that lies in the weights, which every engine computes
    if gone := moved():
        raise UnsupportedModelError(
            f"{patch} cannot be served by vLLM {__version__}, which has no {', no '.join(gone)}."
        )
    if missing:
        raise UnsupportedModelError(
            f"{model}: vLLM has no implementation of its own of {missing[0]}, and {patch} is served in one only."
        )
    if flags := [key for key in _SCALING if key in overrides]:
        raise _contradicted(patch, flags)
    text = config.get_text_config(decoder=True)
    own = getattr(text, _LENGTH)
    config.architectures = [PREFIX + name for name in architectures]
    rope = copy.deepcopy(getattr(text, _ROPE, None))
    served = {"patch": patch.to_dict(), "length": own, "rope": rope}
    setattr(config, SERVED, {**served, "folder": str(model), "revision": revision})
    layers, reach = layers_of(config)  # raises before anything is loaded
    steps = sorted({layer.request for layer in layers.values() if layer.request})
    inside = not all(plain(x) and x.encoding.query is None for x in layers.values())
    getattr(config, SERVED).update({STEPS: steps, ROWS: {}, INSIDE: inside})
    if reach is not None:
        text.max_position_embeddings = max(own, reach)
    else:
        text.model_max_length = config.model_max_length = _UNBOUNDED  # where the user asks for more


def _implements(architecture: str) -> bool:
    """Return whether vLLM has an implementation of its own, beside transformers' code, whose classes it rewrites."""
    known: Any = ModelRegistry.models.get(architecture)
    return known is not None and not known.module_name.endswith(".transformers")


def layers_of(config: Any) -> tuple[dict[int, Layer], int | None]:
    """Return what `served_layers` returns, from a config that `read` has changed.

    Raises:
        PosencError: A patch that the model cannot take, or that vLLM cannot serve exactly.
    """
    served = getattr(config, SERVED)
    patch = PatchConfig.from_dict(served["patch"])
    plain = copy.deepcopy(config)
    text = plain.get_text_config(decoder=True)
    if not _holds(
        getattr(text, _ROPE, None), served["rope"]
    ):  # vLLM sets dictionaries after its reader
        raise _contradicted(patch, [_ROPE])
    text.max_position_embeddings = served["length"]
    plain.architectures = [name.removeprefix(PREFIX) for name in plain.architectures]
    return served_layers(plain, patch, served["folder"], revision=served["revision"])


def _holds(value: Any, expected: Any) -> bool:
    """Return whether a block of the config still has every value that it had; vLLM adds some."""
    if isinstance(expected, Mapping):
        return isinstance(value, Mapping) and all(
            _holds(value.get(k), v) for k, v in expected.items()
        )
    return bool(value == expected)


def _contradicted(patch: PatchConfig, keys: Sequence[str]) -> PosencError:
    return PosencError(
        f"This folder is served with its patch {patch}, which --hf-overrides of {', '.join(keys)} contradicts. Leave "
        "the override out, or serve a folder without a patch."
    )
