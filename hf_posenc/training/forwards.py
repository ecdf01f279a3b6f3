"""A model's forward: found inside wrappers, replaced on one model, called with names, its output changed."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn


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
