"""Decoder inside a causal language model: which module it is, its output in slices, whether it is causal, its end."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, one_line
from hf_posenc.model.discovery import SinCosTable, tables_of
from hf_posenc.model.unwrapping import evaluation_mode as evaluation_mode
from hf_posenc.model.unwrapping import hooked, swapped, unwrap
from hf_posenc.model.weights import execution_device, rounding_dtype
from hf_posenc.patch.state import state_of
from hf_posenc.seams.handover import tables_in_place
from hf_posenc.seams.held import TableEnd
from hf_posenc.seams.probes import TOKENS, ordinary_tokens
from hf_posenc.seams.traces import read_tables, rows_read

READS_AHEAD = 1e-3
READS_AHEAD_HALF = 0.05
"""Largest change of a causal model's logits, relative to the largest logit, when a later token changes. Measured over
all families of transformers: 1.4e-6 in float32 (rounding of experts), 0 in bfloat16, 0.2 to 1 if they read ahead."""


_SIZES_ALONE = "_hf_posenc_sizes_alone"


def mark_sizes_alone(model: nn.Module, device: torch.device) -> nn.Module:
    """Mark a model on the meta device as one whose cost on another device is computed, and which is never run."""
    vars(model)[_SIZES_ALONE] = device
    return model


def sizes_alone(model: nn.Module) -> torch.device | None:
    """Return the device for which the cost of a marked model is computed; `None` for a model that is run."""
    device: torch.device | None = vars(model).get(_SIZES_ALONE)
    return device


def find_decoder(
    model: nn.Module, probe: Tensor, options: dict[str, Any]
) -> tuple[nn.Module | None, Tensor]:
    """Return the outermost module that reads the tokens and returns hidden states, and the probe's logits.

    It is found by hooks on a forward: names and nesting differ between families (`model`, `transformer`,
    `gpt_neox`, `model.decoder`), and wrappers such as PEFT's add levels of their own. The probe has shape (1, n), its
    logits (1, n, vocabulary); the options are arguments for the forward.
    """
    name, embeddings = type(model).__name__, input_embeddings(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise PosencError(
            f"{name} is an encoder-decoder: its encoder reads the whole text before its decoder predicts any of it. "
            "Perplexity needs a causal language model."
        )
    candidates: list[nn.Module] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        hidden = hidden_states(output)
        if hidden is not None and hidden.shape[:2] == probe.shape:
            candidates.append(module)  # hooks run when a module returns, so the outermost is last

    handles = [
        module.register_forward_hook(note)
        for module in model.modules()
        if module not in (model, embeddings) and any(m is embeddings for m in module.modules())
    ]
    try:
        with hooked(handles):
            output = model(input_ids=probe, **options)
    except Exception as error:  # a dtype or an attention backend that this machine lacks
        raise PosencError(
            f"{name} cannot be run here: {type(error).__name__}: {one_line(error)}"
        ) from error
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != probe.shape:
        raise PosencError(
            f"{name} does not return logits for every token: perplexity needs a causal language model."
        )
    return (candidates[-1] if candidates else None), logits


def input_embeddings(model: nn.Module) -> nn.Module:
    """Return the module that maps token ids to vectors."""
    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    return embeddings


def input_device(model: nn.Module) -> torch.device:
    """Return the device of the model's token ids."""
    return execution_device(input_embeddings(model))


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return `use_cache=False` as an argument of the model's forward, if it takes one; its config stays unchanged."""
    parameters = inspect.signature(model.forward).parameters
    variadic = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"use_cache": False} if variadic or "use_cache" in parameters else {}


def hidden_states(output: Any) -> Tensor | None:
    """Return the last hidden states of a decoder's output, shape (batch, n, hidden); `None` for another output."""
    if isinstance(output, tuple):
        first = output[0] if output else None
    else:
        first = None if hasattr(output, "logits") else getattr(output, "last_hidden_state", None)
    return first if isinstance(first, Tensor) and first.dim() == 3 else None


def sliced(output: Any, positions: slice) -> Any:
    """Return a decoder's output with the last hidden states of these positions only.

    Several streams of the same positions, one behind the other, shape (batch, streams x n, hidden), are sliced each.
    """
    hidden = hidden_states(output)
    assert hidden is not None
    if isinstance(output, tuple):
        return (hidden[:, positions], *output[1:])
    batch, tokens, features = hidden.shape

    def slice_of(part: Any) -> Any:
        streams = isinstance(part, Tensor) and part.dim() == 3 and part.shape[1] % tokens == 0
        if not streams or (part.shape[0], part.shape[2]) != (batch, features):
            return part
        return part.unflatten(1, (-1, tokens))[:, :, positions].flatten(1, 2)

    return type(output)(**{name: slice_of(part) for name, part in output.items()})


def replaced(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """Replace an attribute of this one object, such as its forward; on exit, restore exactly what was there."""
    return swapped(vars(owner), name, value)  # accelerate's hooks set a forward


def check_causal(model: nn.Module, probe: Tensor, logits: Tensor, options: dict[str, Any]) -> None:
    """Check that changing a token leaves the logits in front of it unchanged, up to the rounding of experts."""
    full = (torch.float32, torch.float64)
    exact = logits.dtype in full and rounding_dtype(model) in full
    largest = float(logits.float().nan_to_num(0, 0, 0).abs().max())
    limit = largest * (READS_AHEAD if exact else READS_AHEAD_HALF)
    for place in {probe.shape[1] - 1, max(1, probe.shape[1] - 2)}:  # it may read a block ahead
        changed = probe.clone()
        others = probe[probe != probe[0, place]]
        changed[0, place] = others[0] if len(others) else (probe[0, place] - 1).abs()
        other = model(input_ids=changed, **options).logits
        before, after = (v[0, :place].float().nan_to_num(0, 0, 0) for v in (logits, other))
        if float((before - after).abs().max()) > limit:
            raise PosencError(
                f"{type(model).__name__} is not causal: its prediction of a token depends on that very token and "
                "those behind it, so that a perplexity would be meaningless. Load a causal language model; BERT and "
                "similar encoders are causal with is_decoder=True in their config."
            )


# The most tokens that a model has positions for: the rows of a table that ends, where it has one.


def position_limit(model: nn.Module) -> int | None:
    """Return the most tokens that a model, patched or not, has positions for; `None` where nothing ends.

    Rotations, distances and recurrences have no end. Embeddings of positions (GPT-2, OPT, BERT) and precomputed tables
    of sines and cosines (GPT-J, CTRL) or of distances (MPT) do. A trace of what is read by position finds them; it is
    made of a model with more embeddings than that of its tokens, or without a rotary table.
    """
    inner: Any = unwrap(model, adapters=False)
    growing, tables = tables_in_place(unwrap(model)), _tables(model)
    limits = [
        table.tensor().shape[0]
        for table in tables
        if isinstance(table, SinCosTable) and id(table.module) not in growing
    ]
    tokens = input_embeddings(model)
    others = any(isinstance(each, nn.Embedding) and each is not tokens for each in model.modules())
    if others or not tables:
        # A patched table has a hook: a short text may read it at other rows.
        hooks = (hook for module in inner.modules() for hook in module._forward_pre_hooks.values())
        patched = [hook.positions for hook in hooks if isinstance(hook, TableEnd)]
        try:
            limits += patched or _ends(inner)
        except Exception:  # whatever it is, the measurement meets and reports it
            return min(limits, default=None)
        # A bias by distance, made anew in every forward, ends where the config says (MPT), but not a patched one.
        longest = getattr(inner.config, "max_seq_len", None)
        if longest is not None and not tables and state_of(inner) is None:
            limits.append(longest)
    return min(limits, default=None)


def _ends(model: Any) -> Iterator[int]:
    """Yield the positions of every table of positions that a model reads."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tables = [reading for reading in read_tables(model) if reading.first is not None]
    reads = rows_read(model, ordinary_tokens(model, TOKENS)) if tables else {}
    for table in tables:
        tensor, last = tensors[table.name], max(int(row.max()) for _, row in reads[table.name])
        end = tensor.shape[table.axis] - (last - TOKENS + 1)
        # A buffer may grow when it is too short.
        if isinstance(tensor, nn.Parameter) or not _runs(model, end + 1):
            yield end


def _tables(model: nn.Module) -> list[Any]:
    try:
        return list(tables_of(unwrap(model)))
    except Exception:  # a model that cannot be patched, or with a config of its own kind
        return []


def _runs(model: Any, tokens: int) -> bool:
    ids = torch.ones(1, tokens, dtype=torch.int64, device=input_device(model))
    try:
        with evaluation_mode(model), torch.no_grad():
            model(input_ids=ids, **without_cache(model))
    except (IndexError, RuntimeError):
        return False
    return True


def too_long(model: nn.Module, tokens: int, limit: int) -> PosencError:
    """Return the error for a text of more tokens than `position_limit`."""
    way = "Give shorter lengths, or a method that makes its table longer, such as interpolate."
    if any(isinstance(table, SinCosTable) for table in _tables(model)):
        way = "Give shorter lengths, or a method that extends its table, such as yarn."
    inner: Any = unwrap(model)
    if getattr(inner.config, "max_seq_len", None) == limit:
        way = f"Give shorter lengths, or raise max_seq_len in its config: model.config.max_seq_len = {tokens}."
    state, name = state_of(inner), type(inner).__name__
    if state is not None and state.native is not None and state.native.has_length:
        way = f"Give shorter lengths, or {state.config.method} with target_length={tokens}."
    return PosencError(f"{tokens:,} tokens: {name} has positions for {limit:,}. {way}")
