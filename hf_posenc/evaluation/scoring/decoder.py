"""The decoder inside a causal language model: which module it is, and how to hand out its hidden states in parts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, one_line

READS_AHEAD = 1e-3
READS_AHEAD_HALF = 0.05
"""How far, as a part of the largest logit, those of a causal model may move when a later token changes. Measured over
all families of transformers: 1.4e-6 in float32 (rounding of experts), 0 in bfloat16, 0.2 to 1 where they read ahead."""


def find_decoder(
    model: nn.Module, probe: Tensor, options: dict[str, Any]
) -> tuple[nn.Module | None, Tensor]:
    """The outermost module that reads the tokens and returns hidden states, and the probe's logits.

    Found by watching a forward: names and nesting differ between families (`model`, `transformer`,
    `gpt_neox`, `model.decoder`), and wrappers such as PEFT's add levels of their own.

    Args:
        model: A causal language model.
        probe: Token ids, shape (1, n).
        options: Arguments for the forward beside the token ids.

    Returns:
        The module, or `None` where no module is like that, and the logits, shape (1, n, vocabulary).

    Raises:
        PosencError: The model cannot be run, or does not return logits for every token.
    """
    name, embeddings = type(model).__name__, input_embeddings(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise PosencError(
            f"{name} is an encoder-decoder: its encoder reads the whole text before its decoder predicts any of it. "
            "Perplexity needs a causal language model."
        )
    found: list[nn.Module] = []

    def watch(module: nn.Module, _: Any, output: Any) -> None:
        hidden = hidden_states(output)
        if hidden is not None and hidden.shape[:2] == probe.shape:
            found.append(module)  # hooks run when a module returns, so the outermost comes last

    hooks = [
        module.register_forward_hook(watch)
        for module in model.modules()
        if module is not model and any(part is embeddings for part in module.modules())
    ]
    try:
        output = model(input_ids=probe, **options)
    except Exception as error:  # a dtype or an attention backend that this machine lacks
        raise PosencError(
            f"{name} cannot be run here: {type(error).__name__}: {one_line(error)}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != probe.shape:
        raise PosencError(
            f"{name} does not return logits for every token: perplexity needs a causal language model."
        )
    found = [module for module in found if module is not embeddings]
    return (found[-1] if found else None), logits


def input_embeddings(model: nn.Module) -> nn.Module:
    """The module that turns token ids into vectors."""
    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    return embeddings


def without_cache(model: nn.Module) -> dict[str, Any]:
    """`use_cache=False` as an argument, so that the model's config need not be touched."""
    parameters = inspect.signature(model.forward).parameters
    variadic = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"use_cache": False} if variadic or "use_cache" in parameters else {}


def hidden_states(output: Any) -> Tensor | None:
    """The decoder's last hidden states, shape (batch, n, hidden), if this is a decoder's output."""
    if isinstance(output, tuple):
        first = output[0] if output else None
    else:
        first = None if hasattr(output, "logits") else getattr(output, "last_hidden_state", None)
    return first if isinstance(first, Tensor) and first.dim() == 3 else None


def sliced(output: Any, positions: slice) -> Any:
    """The same output with the last hidden states of these positions only.

    A head may read more than they: several streams of the same positions, one behind the other, shape
    (batch, streams x n, hidden), are cut stream by stream.
    """
    hidden = hidden_states(output)
    assert hidden is not None
    if isinstance(output, tuple):
        return (hidden[:, positions], *output[1:])
    return type(output)(**{name: _cut(part, hidden, positions) for name, part in output.items()})


def _cut(part: Any, hidden: Tensor, positions: slice) -> Any:
    batch, tokens, features = hidden.shape
    streams = isinstance(part, Tensor) and part.dim() == 3 and part.shape[1] % tokens == 0
    if not streams or (part.shape[0], part.shape[2]) != (batch, features):
        return part
    return part.unflatten(1, (-1, tokens))[:, :, positions].flatten(1, 2)


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces the forward of this one module object, and puts back exactly what was there."""
    had = "forward" in vars(module)  # accelerate's hooks put one there
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if had:
            module.forward = before  # type: ignore[assignment]
        else:
            del module.forward


def check_causal(model: nn.Module, probe: Tensor, logits: Tensor, options: dict[str, Any]) -> None:
    """Changes a token and looks at what the model says of those in front of it.

    What a causal model computes there stays, but for the rounding of experts that are handed other groups of tokens.

    Args:
        model: A language model.
        probe: Token ids, shape (1, n) with n of at least 2.
        logits: What the model says of them, shape (1, n, vocabulary).
        options: Arguments for the forward beside the token ids.

    Raises:
        PosencError: The model reads ahead.
    """
    single = logits.dtype in (torch.float32, torch.float64) and not _is_half(model)
    limit = (READS_AHEAD if single else READS_AHEAD_HALF) * float(_finite(logits).abs().max())
    for place in {probe.shape[1] - 1, max(1, probe.shape[1] - 2)}:  # it may read a block ahead
        changed = probe.clone()
        others = probe[probe != probe[0, place]]
        changed[0, place] = others[0] if len(others) else (probe[0, place] - 1).abs()
        before, after = (
            _finite(x[0, :place]) for x in (logits, model(input_ids=changed, **options).logits)
        )
        if float((before - after).abs().max()) > limit:
            raise PosencError(
                f"{type(model).__name__} is not causal: what it predicts for a token depends on that very token and "
                "those behind it, so that a perplexity would mean nothing. Load a causal language model; BERT and its "
                "kin are causal with is_decoder=True in their config."
            )


def _is_half(model: nn.Module) -> bool:
    return next(model.parameters()).dtype not in (torch.float32, torch.float64)


def _finite(logits: Tensor) -> Tensor:
    return logits.float().nan_to_num(0, 0, 0)
