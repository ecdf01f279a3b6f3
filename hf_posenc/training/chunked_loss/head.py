"""The decoder of a language model, and its head run over slices of hidden states.

As in `hf_posenc.evaluation.scoring.head_replay`, but with gradients: the decoder runs once, and the model's own forward
runs over slices of its hidden states, which a stub returns instead of the decoder. Soft caps, scales and biases behind
the decoder remain the model's code. Each slice is a checkpoint (Chen et al. 2016, arXiv 1604.06174): only its loss is
kept, and the backward pass recomputes its logits.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from hf_posenc.evaluation.scoring.decoder import hidden_states, input_embeddings, sliced
from hf_posenc.training.batches.collator import IGNORED

Arguments = dict[str, Any]  # of a model's forward, by name


class Decoder:
    """The part of a language model that its forward calls first; the head is everything behind it.

    To find it, the forward is called with the arguments, and stopped before the first embedding. A LookupError is
    raised if it calls no part that holds the embeddings.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], arguments: Arguments) -> None:
        def stop(parent: nn.Module, name: str, *_: Any) -> None:
            raise _ReachedError(parent, name)

        hooks = [
            getattr(*holder).register_forward_pre_hook(partial(stop, *holder), prepend=True)
            for holder in _holders(model)
        ]
        try:
            forward(**arguments)
        except _ReachedError as reached:
            self._parent, self._name = reached.args
        else:
            raise LookupError("its forward calls no part that holds its embeddings")
        finally:
            for hook in hooks:
                hook.remove()
        self._model, self.forward = model, forward

    @property
    def module(self) -> nn.Module:
        """The decoder's module, read on each access: wrappers such as FSDP's replace it."""
        decoder: nn.Module = getattr(self._parent, self._name)
        return decoder

    def run(self, arguments: Arguments, outputs: list[Any] | None = None) -> tuple[Any, Any]:
        """Run the forward with the logits of the last token only; return its output and the decoder's whole one.

        The list `outputs` receives the decoder's output before the head runs.
        """
        outputs = [] if outputs is None else outputs

        def keep_last(module: nn.Module, _: Any, output: Any) -> Any:
            outputs.append(output)
            return sliced(output, slice(-1, None))

        # Behind the hooks of FSDP, which get the whole output.
        hook = self.module.register_forward_hook(keep_last)
        try:
            return self.forward(**arguments), outputs[0]
        finally:
            hook.remove()

    @contextlib.contextmanager
    def replaced(self, output: Any) -> Iterator[None]:
        """Replace the decoder by a stub that returns an output; neither its forward nor its hooks run."""
        decoder = self.module
        setattr(self._parent, self._name, _Stub(decoder, output))
        try:
            yield
        finally:
            setattr(self._parent, self._name, decoder)

    def mean_loss(
        self,
        output: Any,
        arguments: Arguments,
        targets: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        chunk: int,
        items: Tensor | int | None = None,
        ignored: int = IGNORED,
    ) -> Tensor:
        """Return the mean of all tokens' losses, or their sum by `items`, with the logits of `chunk` tokens at a time.

        The decoder's output is for the whole batch, and targets (batch, n) are the labels that positions predict. The
        loss is the sum over logits, shape (batch, m, vocabulary), and targets, shape (batch, m).
        """
        hidden = hidden_states(output)
        assert hidden is not None
        step = max(1, chunk // len(hidden))
        # Without loss, cache, and the balance of experts.
        accepted = inspect.signature(self.forward).parameters
        off = {name: False for name in ("use_cache", "output_router_logits") if name in accepted}
        options = {**without_loss(arguments), **off}
        options.pop("past_key_values", None)
        sums, inside = SinglePrecisionSums(), set(self.module.modules())
        # The modules sharded by FSDP2 that are neither in the decoder nor around it.
        sharded = [part for part in self._model.modules() if isinstance(part, FSDPModule)]
        sharded = [p for p in sharded if p not in inside and self.module not in p.modules()]

        def replay(states: Tensor, aims: Tensor, part: slice) -> Tensor:
            # Contiguous, as the whole is: some heads view it in another shape.
            handed = with_hidden(sliced(output, part), states.contiguous())
            few = {name: slice_argument(value, hidden, part) for name, value in options.items()}
            with self.replaced(handed), sums, _unsharded(sharded):
                return loss(self.forward(**few).logits, aims)

        total: Any = 0
        # `split` is one node, whose backward joins the gradients of all slices once. Each `hidden[:, a:b]` would make a
        # gradient of the whole length, in time quadratic in the length.
        for index, states in enumerate(hidden.split(step, dim=1)):
            part = slice(index * step, index * step + states.shape[1])
            aims = targets[:, part].contiguous()  # transformers flattens it by a view
            if torch.is_grad_enabled():
                total = total + checkpoint(replay, states, aims, part, use_reentrant=False)
            else:
                total = total + replay(states, aims, part)
        count = (targets != ignored).sum() if items is None else items
        mean: Tensor = total / (count.to(total.device) if isinstance(count, Tensor) else count)
        return mean


class _Stub(nn.Module):
    """Returns hidden states; all other attributes are the decoder's."""

    def __init__(self, decoder: nn.Module, output: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        if name in ("decoder", "output"):
            return super().__getattr__(name)
        return getattr(self.decoder, name)


class _ReachedError(Exception):
    """The forward has called a part that holds the embeddings: its parent and name."""


def _holders(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parts of a model that hold its embeddings, as parent and name, from the outside in."""
    embeddings = input_embeddings(model)
    for path, module in model.named_modules():  # parents first
        if module not in (model, embeddings) and embeddings in module.modules():
            parent, _, name = path.rpartition(".")
            yield model.get_submodule(parent), name


_Function: Any = torch.autograd.Function  # whose `apply` has no types


class SinglePrecisionSums(TorchFunctionMode):
    """Adds up the gradients of half-precision weights in float32, over all their uses, and rounds the sum once.

    Autograd adds up a weight's gradients in the weight's own dtype, and under autocast in that of its cast copy. With
    500 chunks in bfloat16 the error is about 2 %; from 512 chunks on, addends can be smaller than the last bit of the
    sum. One mode serves all chunks of a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_grad_enabled() and func.__name__ != "__get__":
            args, kwargs = tree_map_only(nn.Parameter, self._used, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _used(self, weight: nn.Parameter) -> Tensor:
        half = weight.dtype in (torch.bfloat16, torch.float16)
        cast = weight.dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type)
        if not (half or cast) or not weight.requires_grad or isinstance(weight, DTensor):
            return weight
        if id(weight) not in self._sums:
            self._sums[id(weight)] = weight, _Sum.apply(weight)
        used: Tensor = _Use.apply(self._sums[id(weight)][1], weight.detach())
        return used


class _Sum(_Function):  # type: ignore[misc]
    """An empty float32 tensor, for which autograd adds up gradients before they become the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Use(_Function):  # type: ignore[misc]
    """The weight's values, whose gradient flows to the sum."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


@contextlib.contextmanager
def _unsharded(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gather the whole weights of modules sharded by FSDP2, and hide their forwards from FSDP.

    FSDP's hooks reduce gradients and free weights behind the backward of each module. accelerate puts the last norm and
    the head into one group, which counts as run when each of its modules has run once. A head that runs once per slice
    would be freed and reduced behind the first slice that comes back, while the others still need its weights:
    gradients would be missing, or the process would access freed memory. With this, FSDP registers one run of the head.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            sharded: Any = module
            sharded.unshard()
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, name)
                others = [(n, h) for n, h in hooks.items() if "fsdp" not in str(h.__module__)]
                setattr(module, name, type(hooks)(others))
                stack.callback(setattr, module, name, hooks)
            stack.callback(module.register_forward_pre_hook(_cast_inputs).remove)
        yield


def _cast_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast inputs to the weights' dtype, as FSDP's own hook does with mixed precision."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    result: tuple[Any, ...] = tree_map_only(Tensor, cast, inputs)
    return result


def shifted(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return the label that each position predicts: that of the next token, and `ignored` at the end."""
    return F.pad(labels, (0, 1), value=ignored)[..., 1:]


def without_loss(arguments: Arguments) -> Arguments:
    """Return the arguments of a forward without those of its loss."""
    loss = ("labels", "shift_labels", "num_items_in_batch")
    return {name: value for name, value in arguments.items() if name not in loss}


def slice_argument(value: Any, like: Tensor, part: slice) -> Any:
    """Return some positions of an argument with one entry per token of `like`; any other argument unchanged."""
    each = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == like.shape[:2]
    return value[:, part] if each else value


def with_hidden(output: Any, states: Tensor) -> Any:
    """Return a decoder's output with other last hidden states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    return type(output)(**{**output, "last_hidden_state": states})
