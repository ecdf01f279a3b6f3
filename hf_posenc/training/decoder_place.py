"""Parts of a model that stand back while its own forward runs: the decoder, and the loss function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from hf_posenc.evaluation.decoder import input_embeddings, sliced


class DecoderPlace:
    """Where a language model holds the decoder that its forward calls; its head is what runs behind it.

    Args:
        model: The language model.
        forward: Its own forward.
        given: Arguments to find out with; nothing behind the first embedding is run.

    Raises:
        LookupError: The forward calls no part that holds the embeddings.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], given: dict[str, Any]
    ) -> None:
        def stop(module: nn.Module, _: Any) -> None:
            raise _ReachedError(module)

        places = list(_holders(model))
        hooks = [
            getattr(parent, name).register_forward_pre_hook(stop, prepend=True)
            for parent, name in places
        ]
        try:
            forward(**given)
        except _ReachedError as reached:
            calls = [getattr(parent, name) is reached.module for parent, name in places]
        else:
            raise LookupError("its forward calls no part that holds its embeddings")
        finally:
            for hook in hooks:
                hook.remove()
        self.parent, self.name = places[calls.index(True)]
        self.model = model

    @property
    def module(self) -> nn.Module:
        """The decoder; looked up anew each time, since wrappers such as FSDP's put other modules there."""
        decoder: nn.Module = getattr(self.parent, self.name)
        return decoder

    def run(
        self, forward: Callable[..., Any], given: dict[str, Any], made: list[Any] | None = None
    ) -> tuple[Any, Any]:
        """Runs the forward with the logits of the last token alone.

        Args:
            forward: The model's own forward.
            given: Its arguments.
            made: Where the decoder's output goes as soon as it is there.

        Returns:
            What the forward returned, and the whole output of the decoder.
        """
        made = [] if made is None else made

        def last(module: nn.Module, _: Any, output: Any) -> Any:
            made.append(output)
            return sliced(output, slice(-1, None))

        hook = self.module.register_forward_hook(last)  # behind those of FSDP, which see the whole
        try:
            output = forward(**given)
        finally:
            hook.remove()
        return output, made[0]

    @contextlib.contextmanager
    def handing_out(self, output: Any) -> Iterator[None]:
        """Puts a stub in the decoder's place, so that neither its forward nor anybody's hooks on it run."""
        decoder = self.module
        setattr(self.parent, self.name, _Stub(decoder, output))
        try:
            yield
        finally:
            setattr(self.parent, self.name, decoder)


class _Stub(nn.Module):
    """Hands out hidden states; of everything else that model code reads of a decoder, the decoder's."""

    def __init__(self, decoder: nn.Module, output: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "decoder":
                raise
            return getattr(self.decoder, name)


class _ReachedError(Exception):
    def __init__(self, module: nn.Module) -> None:
        self.module = module


def _holders(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The parts of a model that hold its embeddings, each as its parent and its name, from the outside in."""
    embeddings, parent = input_embeddings(model), model
    while True:
        for name, child in parent.named_children():
            if child is not embeddings and any(part is embeddings for part in child.modules()):
                yield parent, name
                parent = child
                break
        else:
            return


@contextlib.contextmanager
def loss_replaced(model: nn.Module, loss: Callable[..., Tensor]) -> Iterator[None]:
    """Replaces the loss function of this one model, and puts back exactly what was there.

    transformers: `PreTrainedModel.loss_function` is chosen by the config until somebody sets it.
    """
    had, before = "_loss_function" in vars(model), vars(model).get("_loss_function")
    model.loss_function = loss  # type: ignore[assignment]
    try:
        yield
    finally:
        if had:
            model._loss_function = before  # type: ignore[assignment]
        else:
            del model._loss_function
