"""Tables chosen by the length of a request: its way from vLLM's engine, where the request arrives, to attention.

The engine core writes the length into the request's own parameters, and the tables that it chooses into the salt of its
cached prefixes. In the workers, a logits processor notes the lengths by row of the batch, and changes no logits: vLLM
hands the parameters of a batch to nothing else that a plug-in may add.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from hf_posenc.engines.served import PREFIX
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.methods import bucket_length
from hf_posenc.serve.checkpoint import ROWS, SERVED, STEPS

LENGTH = "hf_posenc_length"
"""The name among `extra_args` of a request's length in tokens, of which a request may give a greater one itself."""
_ADD = "preprocess_add_request"


def in_force(length: int, step: tuple[int, int]) -> int:
    """Return the length whose table serves a request: the original one, or with as many buckets as hold the request.

    Args:
        length: The request's own, in tokens.
        step: Tokens a bucket, and the original length.
    """
    bucket, original = step
    return int(bucket_length(torch.tensor(length - 1), original, bucket))


# Configuration


def register_configuration(architectures: list[str]) -> None:
    """Let patched architectures hand the lengths of requests to their workers."""
    for name in architectures:
        own = MODELS_CONFIG_MAP[PREFIX + name]
        if not issubclass(own, _Configured):
            MODELS_CONFIG_MAP[PREFIX + name] = type(own.__name__, (_Configured, own), {})


class _Configured(VerifyAndUpdateConfig):  # type: ignore[misc]
    """The part of an architecture's adjustments that adds the logits processor."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Add it, or raise if vLLM does not hand it the requests."""
        super().verify_and_update_config(vllm_config)
        model = vllm_config.model_config
        served = getattr(model.hf_config, SERVED, None)
        if not served or not served[STEPS]:
            return
        if vllm_config.speculative_config is not None:
            reason = "speculative decoding takes no logits processors"
        elif vllm_config.use_v2_model_runner:
            reason = "it needs vLLM's first model runner (VLLM_USE_V2_MODEL_RUNNER=0)"
        elif vllm_config.kv_transfer_config is not None:
            reason = "an instance that gets keys from another one may be asked for fewer tokens"
        elif model.runner_type != "generate":
            reason = f"--runner {model.runner_type} takes no logits processors"
        else:
            processor = f"{__name__}:{RequestLengths.__name__}"
            model.logits_processors = [*(model.logits_processors or ()), processor]
            return
        raise UnsupportedModelError(
            f'update="request" cannot be served so: {reason}. Patch with update="row", or leave that out.'
        )


# The engine core


def watch_engine() -> None:
    """Let the engine cores of this process pin the length of each request to a model with such a patch."""
    own: Any = getattr(EngineCore, _ADD, None)
    if own is None or hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
        model = self.vllm_config.model_config
        served = getattr(model.hf_config, SERVED, None)
        if served and served[STEPS]:
            _pin(request, served[STEPS], model.max_model_len)
        return own(self, request)

    setattr(EngineCore, _ADD, preprocess_add_request)


def _pin(request: Any, steps: list[tuple[int, int]], longest: int) -> None:
    """Write the length of a request into its parameters, and the tables that it chooses into its salt."""
    if request.resumable:
        raise PosencError(
            'update="request" pins the length of a request when it arrives, and the prompt of this one comes in '
            'pieces. Send it whole, or serve a patch with update="row".'
        )
    prompt = request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids
    parameters = request.sampling_params
    given = parameters.extra_args or {}
    length = max(min(len(prompt) + parameters.max_tokens, longest), given.get(LENGTH, 1))
    parameters.extra_args = {**given, LENGTH: length}
    tables = [in_force(length, step) for step in steps]
    # Without a salt, a short request may share the prefixes that any short request has. With one of the user's, the
    # tables come first, so that it never reads as one of other tables.
    if request.cache_salt or tables != [original for _, original in steps]:
        request.cache_salt = f"{tables} {request.cache_salt or ''}"


# The workers


class RequestLengths(LogitsProcessor):  # type: ignore[misc]
    """Notes the lengths of the requests in a worker's batch."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, int] = getattr(vllm_config.model_config.hf_config, SERVED)[ROWS]

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise for a length that is none, which fails the request alone."""
        given = (sampling_params.extra_args or {}).get(LENGTH, 1)
        if type(given) is not int or given < 1:
            raise PosencError(f"{LENGTH} is a number of tokens, and not {given!r}.")

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch."""
        process_dict_updates(self.rows, batch_update, lambda params, *_: params.extra_args[LENGTH])

    def is_argmax_invariant(self) -> bool:
        """Return True, since logits stay."""
        return True

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits."""
        return logits
