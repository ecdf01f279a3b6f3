"""Parts of a model that stand back while its own forward runs: the decoder, and the loss function."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from hf_posenc.evaluation.scoring.decoder import input_embeddings, sliced


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


# A model's forward: found inside wrappers, replaced on one model, called with names, its output changed.


def language_model(model: Any) -> nn.Module:
    """The model of transformers inside wrappers of torch and peft."""
    from accelerate.utils import extract_model_from_parallel

    inner: Any = extract_model_from_parallel(model)
    found: nn.Module = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return found


def method_from(model: nn.Module, attribute: str) -> Callable[..., Any]:
    """A forward for a model that calls one of its attributes, with the signature of the forward that it has.

    It is a method, since accelerate wraps the function in it and binds it again; it holds no model, so that the copy
    of a model calls its own; and `Trainer` reads the signature to tell which columns and arguments the model takes.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, attribute)(*args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(model.forward)
    replaced: Any = forward
    replaced.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    setattr(forward, attribute, forward)
    return types.MethodType(forward, model)


def is_method_from(model: nn.Module, attribute: str) -> bool:
    """Whether `method_from` made the model's forward, and nothing has been put around it since."""
    function = getattr(vars(model).get("forward"), "__func__", None)
    return function is not None and getattr(function, attribute, None) is function


def by_name(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """All arguments of a call by name."""
    names = [
        name
        for name, parameter in inspect.signature(forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return dict(zip(names, args, strict=False)) | kwargs


def with_fields(output: Any, **changes: Any) -> Any:
    """A model's output with other values of some fields; `None` leaves one out."""
    fields = {**output, **changes}
    return type(output)(**{name: value for name, value in fields.items() if value is not None})
