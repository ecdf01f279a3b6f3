"""Cross-entropy without the logits of a whole batch: the loss and the gradients of the plain one, in chunks of tokens.

The logits of 131,072 tokens over a vocabulary of 128,256 are 63 GiB in float32, and training needs them several times
over: in the model's dtype, in float32, their softmax, its gradient. In chunks there are as many as `chunk` tokens have.
The price is one more pass of the head, whose logits the backward pass makes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import one_line
from hf_posenc.evaluation.head_replay import evaluation_mode
from hf_posenc.training import loss_probe
from hf_posenc.training.collator import IGNORED
from hf_posenc.training.decoder_place import DecoderPlace, loss_replaced
from hf_posenc.training.forwards import (
    by_name,
    is_method_from,
    language_model,
    method_from,
    with_fields,
)
from hf_posenc.training.head_chunks import shifted, summed_loss, without_loss

logger = logging.getLogger(__name__)

LEAST_LOGITS = 2**23
"""Logits of a chunk, at least: 32 MiB in float32, 256 tokens of a 32k vocabulary."""

_PART_OF_HEAD = 4

_HANDLE = "_chunked_loss"


def chunk_loss(model: nn.Module, chunk: int | None = None) -> ChunkedLoss:
    """Makes a causal language model compute its loss in chunks of tokens.

    `model(**batch, labels=...).loss` is what it was, and so are all gradients; the output has no `logits`, since there
    never are any. A forward without labels is what it was. The model trains as before: with `transformers.Trainer`,
    peft, a bare accelerate loop, DDP, FSDP2, DeepSpeed, gradient checkpointing. Call this before they wrap it.

    Args:
        model: A causal language model of transformers, patched or not, or a `PeftModel` of one.
        chunk: Tokens of a batch whose logits exist at a time; by default `default_chunk`.
            A batch of no more tokens takes the plain forward.

    Returns:
        The handle that takes it back; called again, this gives the same one, with another chunk.

    Raises:
        PosencError: `chunk` is below 1.
    """
    if chunk is not None and chunk < 1:
        raise PosencError(f"A chunk has at least 1 token, not {chunk}.")
    inner = language_model(model)
    chunk = chunk or default_chunk(inner)
    before = vars(inner).get(_HANDLE)
    if not isinstance(before, ChunkedLoss):
        return ChunkedLoss(inner, chunk)
    before.chunk, before.active = chunk, True
    return before


def default_chunk(model: Any) -> int:
    """The tokens whose logits are a quarter as many as the weights of the head, or `LEAST_LOGITS`.

    So the loss needs about the memory of the head's gradient, and each product with the head is large enough to be
    worth reading those weights: 1,024 tokens of a model with 4,096 features.
    """
    text = model.config.get_text_config()
    features, vocabulary = int(getattr(text, "hidden_size", 0)), int(text.vocab_size)
    return max(1, features // _PART_OF_HEAD, LEAST_LOGITS // vocabulary)


class ChunkedLoss:
    """The forward of a model whose loss is computed in chunks; made by `chunk_loss`.

    Args:
        model: The language model.
        chunk: As below.

    Attributes:
        model: The language model.
        chunk: Tokens of a batch whose logits exist at a time.
        exact: Whether a probe gave the loss and the gradients of the plain forward, up to rounding. False means that
            the plain forward is used. None until the first batch where the model cannot run before it: its weights are
            sharded or on no device yet, or its attention needs another device.
        active: False once taken back.
    """

    def __init__(self, model: nn.Module, chunk: int) -> None:
        self.model = model
        self.chunk = chunk
        self.exact: bool | None = None
        self.active = True
        self._forward: Callable[..., Any] = model.forward
        self._had = "forward" in vars(model)
        self._of_model = True  # by the model's loss function, not by code in its forward
        self._probe()
        setattr(model, _HANDLE, self)
        model.forward = method_from(model, _HANDLE)

    def remove(self) -> None:
        """Gives the model its own forward back; what has wrapped it since, as accelerate does, stays around it."""
        self.active = False
        if not is_method_from(self.model, _HANDLE):
            return
        if self._had:
            self.model.forward = self._forward
        else:
            del self.model.forward
        delattr(self.model, _HANDLE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        given = by_name(self._forward, args, kwargs)
        labelled = given.get("labels") is not None or given.get("shift_labels") is not None
        if not (self.active and labelled):
            return self._forward(*args, **kwargs)
        if given.get("labels") is None:
            given["labels"] = given["shift_labels"]
        if self.exact is False:
            return self._forward(**given)
        if self._wants_tuple(given):
            output: Any = self(**{**given, "return_dict": True})
            return output.to_tuple()
        if given["labels"].numel() <= self.chunk:
            return with_fields(self._forward(**given), logits=None)
        return self._first(given) if self.exact is None else self._chunked(given)

    def _wants_tuple(self, given: dict[str, Any]) -> bool:
        wanted = given.get("return_dict")
        if wanted is None:
            wanted = getattr(getattr(self.model, "config", None), "return_dict", True)
        return not wanted

    def _chunked(self, given: dict[str, Any]) -> Any:
        decoder = self._decoder
        assert decoder is not None
        if not self._of_model:
            made, output = decoder.run(self._forward, without_loss(given))
            loss = self._mean(_cross_entropy, decoder, output, given, shifted(given["labels"]))
            return with_fields(made, loss=loss, logits=None)
        plain: Callable[..., Tensor] = self.model.loss_function  # type: ignore[assignment]
        outputs: list[Any] = []

        def loss_function(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # In place of the model's own, so that what its forward adds to the loss stays: the balance of experts.
            targets, items = (kwargs.pop(n, None) for n in ("shift_labels", "num_items_in_batch"))
            if targets is None:
                targets = shifted(labels, kwargs.get("ignore_index", IGNORED))

            def summed(logits: Tensor, aims: Tensor) -> Tensor:
                # transformers divides the sum by this number where it is given
                return plain(logits, aims, *args, shift_labels=aims, num_items_in_batch=1, **kwargs)

            return self._mean(summed, decoder, outputs[0], given, targets, items, **kwargs)

        with loss_replaced(self.model, loss_function):
            made, _ = decoder.run(self._forward, given, outputs)
        return with_fields(made, logits=None)

    def _mean(
        self,
        summed: Callable[[Tensor, Tensor], Tensor],
        decoder: DecoderPlace,
        output: Any,
        given: dict[str, Any],
        targets: Tensor,
        items: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        **_: Any,
    ) -> Tensor:
        total = summed_loss(
            self._forward, decoder, output, given, targets, chunk=self.chunk, loss=summed
        )
        count = (targets != ignore_index).sum() if items is None else items
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    def _probe(self) -> None:
        """Compares both forwards on a few tokens, unless the model cannot run yet."""
        if not loss_probe.runs_here(self.model):
            return
        given = loss_probe.batch(self.model)
        devices = {w.device for w in self.model.parameters() if w.device.type == "cuda"}
        with evaluation_mode(self.model), torch.random.fork_rng(list(devices)):
            try:
                with torch.no_grad():
                    decoder = self._find(given)
                    _, output = decoder.run(self._forward, without_loss(given))
            except Exception as error:
                logger.info("The loss in chunks waits for the first batch: %s", one_line(error))
                return
            with torch.enable_grad():
                self._decide(decoder, given, output)

    def _first(self, given: dict[str, Any]) -> Any:
        """The first batch of a model that was not probed before: its beginning is the probe."""
        try:
            with torch.no_grad():
                decoder = self._find(given)
        except Exception as error:
            return self._plain_from_now_on(one_line(error))(**given)
        _, output = decoder.run(self._forward, without_loss(given))
        with torch.no_grad():
            self._decide(decoder, *loss_probe.start_of(self._forward, given, output))
        with decoder.handing_out(output):
            return self(**given)

    def _find(self, given: dict[str, Any]) -> DecoderPlace:
        self._decoder = DecoderPlace(self.model, self._forward, without_loss(given))
        return self._decoder

    def _decide(self, decoder: DecoderPlace, given: dict[str, Any], output: Any) -> None:
        """Finds out which loss in chunks is the plain forward's, if any, for an output of the decoder."""
        chunk, self.chunk = self.chunk, loss_probe.CHUNK * len(given["labels"])
        reasons = []
        try:
            for self._of_model in (True, False):
                reason = loss_probe.difference(
                    self._forward, self._chunked, self.model, decoder, given, output
                )
                if reason is None:
                    self.exact = True
                    return
                reasons.append(reason)
        finally:
            self.chunk = chunk
        self._plain_from_now_on(reasons[0])

    def _plain_from_now_on(self, reason: str) -> Callable[..., Any]:
        self.exact = False
        logger.warning(
            "%s: its loss cannot be computed in chunks (%s); the plain forward is used, which holds the logits of the "
            "whole batch.",
            type(self.model).__name__,
            reason,
        )
        return self._forward


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.float().flatten(0, 1)
    return nn.functional.cross_entropy(flat, targets.to(flat.device).flatten(), reduction="sum")
