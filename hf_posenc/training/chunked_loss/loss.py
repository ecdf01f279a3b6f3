"""Cross-entropy without the logits of a whole batch: the loss and the gradients of the plain one, in chunks of tokens.

The logits of 131,072 tokens over a vocabulary of 128,256 are 63 GiB in float32, and training needs them several times
over: in the model's dtype, in float32, their softmax, its gradient. In chunks there are as many as `chunk` tokens have.
The price is one more pass of the head, whose logits the backward pass makes again.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.scoring.decoder import (
    hidden_states,
    input_embeddings,
    sliced,
    without_cache,
)
from hf_posenc.evaluation.scoring.head_replay import evaluation_mode
from hf_posenc.training.batches.collator import IGNORED
from hf_posenc.training.chunked_loss.decoder import (
    DecoderPlace,
    by_name,
    is_method_from,
    language_model,
    loss_replaced,
    method_from,
    with_fields,
)
from hf_posenc.training.chunked_loss.head import (
    cut,
    shifted,
    summed_loss,
    with_hidden,
    without_loss,
)

# Whether the loss in chunks is the plain one: both on a few tokens, compared in value and in gradients.


CHUNK = 4
"""Positions of a chunk of the probe."""

_TOKENS, _BATCH = 9, 2


def runs_here(model: nn.Module) -> bool:
    """Whether all weights are here: not on the meta device, not sharded, not waiting for those of another process."""
    from torch.distributed.tensor import DTensor
    from transformers.integrations.fsdp import is_fsdp_enabled

    absent = (
        weight.is_meta or not weight.numel() or isinstance(weight, DTensor)
        for weight in model.parameters()
    )
    return not is_fsdp_enabled() and not any(absent)


def batch(model: Any) -> dict[str, Any]:
    """Arguments for a forward: two texts of a few tokens, some of which are not learned."""
    device = next(input_embeddings(model).parameters()).device
    ids = (
        torch.arange(_BATCH * _TOKENS, device=device) * 7919 + 11
    ) % model.config.get_text_config().vocab_size
    ids = ids.view(_BATCH, _TOKENS)
    labels = ids.masked_fill(ids % 5 == 0, IGNORED)
    return {"input_ids": ids, "labels": labels, **without_cache(model)}


def start_of(
    forward: Callable[..., Any], given: dict[str, Any], output: Any
) -> tuple[dict[str, Any], Any]:
    """The first tokens of a batch and of what the decoder made of it.

    All of them are labels, since a text may begin with many that are not learned; and the balance of experts is left
    out, for which the output counts all tokens.

    Args:
        forward: The model's own forward.
        given: Its arguments.
        output: What the decoder made of them.
    """
    hidden = hidden_states(output)
    assert hidden is not None
    first = slice(0, _TOKENS)
    few = {name: cut(value, hidden, first) for name, value in given.items()}
    few.pop("shift_labels", None)
    few["labels"] = few.get("input_ids", torch.zeros_like(few["labels"])).contiguous()
    if "output_router_logits" in inspect.signature(forward).parameters:
        few["output_router_logits"] = False
    return few, sliced(output, first)


def difference(
    plain: Callable[..., Any],
    chunked: Callable[[dict[str, Any]], Any],
    model: nn.Module,
    decoder: DecoderPlace,
    given: dict[str, Any],
    output: Any,
) -> str | None:
    """What is different about the loss in chunks.

    Where gradients are enabled, those of the hidden states and of all weights behind them are compared. Those of the
    decoder's weights follow from them.

    Args:
        plain: The model's own forward.
        chunked: The one to be compared with it.
        model: The language model.
        decoder: Where its decoder is.
        given: Arguments of the forward.
        output: What the decoder makes of them.

    Returns:
        One line, or `None` where all is equal up to rounding.
    """
    hidden = hidden_states(output)
    assert hidden is not None
    states = hidden.detach().requires_grad_(torch.is_grad_enabled())
    wanted = [states, *_behind(model, decoder.module)]
    handed = with_hidden(output, states)
    for name, arguments in _cases(plain, given):
        try:
            with decoder.handing_out(handed):
                expected = _measured(plain(**arguments), wanted)
                found = _measured(chunked(arguments), wanted)
        except Exception as error:
            return f"{type(error).__name__}: {one_line(error)}"
        for kind, a, b in zip(("loss", *["gradients"] * len(wanted)), found, expected, strict=True):
            if not _close(a, b, hidden.dtype):
                return f"another {kind}{name}" if kind == "loss" else f"other {kind}{name}"
    return None


def _cases(
    forward: Callable[..., Any], given: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", given
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        yield " with num_items_in_batch", given | {"num_items_in_batch": 5}
        yield " with shift_labels", given | {"shift_labels": given["labels"]}


def _behind(model: Any, decoder: nn.Module) -> list[Tensor]:
    """The weights that are learned outside the decoder, and those of the head, which may be the embeddings'."""
    inside = {id(weight) for weight in decoder.parameters()}
    weights = [weight for weight in model.parameters() if id(weight) not in inside]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weights += [] if head is None else list(head.parameters())
    return [weight for weight in {id(w): w for w in weights}.values() if weight.requires_grad]


def _measured(output: Any, wanted: list[Tensor]) -> list[Tensor | None]:
    loss: Tensor = output.loss
    if not loss.requires_grad:
        return [loss, *[None] * len(wanted)]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)]


def _close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> bool:
    if found is None or expected is None:
        return found is expected
    # Half of the digits: sums over the vocabulary round by the shape of the product, and what is wrong is so by far.
    # transformers computes losses in float32, those of a float64 model too.
    precision = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    largest = float(expected.nan_to_num(0, 0, 0).abs().max())
    tolerance = math.sqrt(precision) * largest
    return torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)


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
        if not runs_here(self.model):
            return
        given = batch(self.model)
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
            self._decide(decoder, *start_of(self._forward, given, output))
        with decoder.handing_out(output):
            return self(**given)

    def _find(self, given: dict[str, Any]) -> DecoderPlace:
        self._decoder = DecoderPlace(self.model, self._forward, without_loss(given))
        return self._decoder

    def _decide(self, decoder: DecoderPlace, given: dict[str, Any], output: Any) -> None:
        """Finds out which loss in chunks is the plain forward's, if any, for an output of the decoder."""
        chunk, self.chunk = self.chunk, CHUNK * len(given["labels"])
        reasons = []
        try:
            for self._of_model in (True, False):
                reason = difference(
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
