"""Per-token losses of a causal language model, never holding more logits than a chunk of tokens.

The logits of 131,072 tokens over a vocabulary of 128,256 are 63 GiB in float32, the hidden states behind them 1 GiB
at most. So the decoder runs once over the whole window, and then the model's *own* forward runs over slices of the
hidden states, with the decoder replaced by a stub that hands them out. Soft caps, logit scales, biases and whatever
else a family does after its decoder stay the model's code.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import one_line

logger = logging.getLogger(__name__)

LOGITS_PER_CHUNK = 2**25
"""Logits held at a time: 128 MiB in float32, 8,192 tokens of a 4k vocabulary, 261 of a 128k one."""

_PROBE_TOKENS = 9
_PROBE_CHUNK = 4  # of 8 scored positions; below 4 rows CPU matrix products take another path and round differently


class TokenScorer:
    """Computes the negative log-likelihood of every token of a window.

    On construction a probe of a few tokens is run in both ways, by head replay and by the plain forward; where the
    logits differ by more than rounding, the scorer says so and uses the plain forward from then on.

    Args:
        model: A causal language model, patched or not; its evaluation mode is the caller's business.
        probe_ids: Some token ids, shape (n,) with n of at least 2; the first 9 are used.
        chunk: Tokens whose logits are held at a time; by default `LOGITS_PER_CHUNK` divided by the vocabulary.
        prefill: Tokens that the decoder runs at a time, with the keys and values of those before in a cache; by default
            all at once. What a layer makes on the way is then of this length, and the cache is all that grows.

    Attributes:
        exact: Whether the probe's logits by head replay had the very bits of the plain forward's.
        replays: Whether head replay is in use; False means full logits, and no prefill in pieces.
        chunk: As above, resolved.
        prefill: As above; may be changed between calls.

    Raises:
        PosencError: The model does not return logits for every token, or `chunk` or `prefill` is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        probe_ids: Tensor,
        *,
        chunk: int | None = None,
        prefill: int | None = None,
    ) -> None:
        for name, tokens in (("chunk", chunk), ("prefill", prefill)):
            if tokens is not None and tokens < 1:
                raise PosencError(f"A {name} has at least 1 token, not {tokens}.")
        self.model = model
        self.prefill: int | None = None
        self._options = _no_cache(model)
        probe = probe_ids[:_PROBE_TOKENS].unsqueeze(0).to(input_device(model))
        with torch.inference_mode():
            self._decoder, full = self._find_decoder(probe)
            self.chunk = chunk or _default_chunk(full.shape[-1])
            self.replays, self.exact = self._probe(probe, full)
        self.prefill = prefill
        if not self.replays:
            logger.warning(
                "%s: head replay does not reproduce the model's logits; full logits are held instead, "
                "which needs length x vocabulary of memory.",
                type(model).__name__,
            )

    @torch.inference_mode()
    def __call__(self, ids: Tensor, first: int = 1, *, read_last: bool = True) -> Tensor:
        """Scores a window, or several of one shape.

        Args:
            ids: Token ids, shape (n,) or (windows, n).
            first: Index of the first token to score, at least 1 (the token at index 0 has no prediction).
            read_last: Whether the model reads the last token, which predicts nothing that is scored.

        Returns:
            Negative log-likelihoods in nats of tokens `first .. n-1`, shape (n - first,) or (windows, n - first),
            float64, on the CPU.

        Raises:
            PosencError: There is no such token, or the prefill is to be in pieces and the model keeps no cache.
        """
        done, losses = first, []
        targets = ids.reshape(-1, ids.shape[-1])
        for logits in self.logits(targets, first, read_last=read_last):
            wanted = targets[:, done : done + logits.shape[1]].to(logits.device)
            done += logits.shape[1]
            loss = F.cross_entropy(_float(logits).flatten(0, 1), wanted.flatten(), reduction="none")
            losses.append(loss.to("cpu", torch.float64).view_as(wanted))
        return torch.cat(losses, dim=1).reshape(*ids.shape[:-1], -1)

    @torch.inference_mode()
    def logits(self, ids: Tensor, first: int, *, read_last: bool = True) -> Iterator[Tensor]:
        """The logits that predict tokens `first .. n-1`, a chunk at a time.

        Args:
            ids: Token ids, shape (n,) or (windows, n).
            first: As for a call, as is `read_last`.
            read_last: See there.

        Yields:
            Logits of the next tokens, shape (m, vocabulary) or (windows, m, vocabulary), each m up to `chunk`.

        Raises:
            PosencError: As for a call.
        """
        if not 1 <= first < ids.shape[-1]:
            raise PosencError(
                f"A window of {ids.shape[-1]} tokens cannot be scored from token {first}."
            )
        windows = ids.reshape(-1, ids.shape[-1]).to(input_device(self.model))
        read = windows if read_last else windows[:, :-1]
        # The token at index i is predicted by the hidden state at i - 1.
        made = self._replay if self.replays else self._full
        for logits in made(read, first - 1, ids.shape[-1] - 1):
            yield logits if ids.dim() > 1 else logits[0]

    def _forward(self, ids: Tensor, **options: Any) -> Any:
        return self.model(input_ids=ids, **(options or self._options))

    def _full(self, windows: Tensor, start: int, stop: int) -> Iterator[Tensor]:
        """The logits at positions `start .. stop-1`, from a plain forward."""
        logits = self._forward(windows).logits
        step = self._chunk_of(windows)
        for begin in range(start, stop, step):
            yield logits[:, begin : min(begin + step, stop)]

    def _replay(self, windows: Tensor, start: int, stop: int) -> Iterator[Tensor]:
        """The same by head replay: the logits of a chunk are all that exists of them at a time."""
        decoder = self._decoder
        assert decoder is not None
        step = self._chunk_of(windows)
        for offset, length, output in self._hidden(windows, decoder):
            for begin in range(max(start, offset), min(stop, offset + length), step):
                end = min(begin + step, stop, offset + length)
                part = slice(begin - offset, end - offset)
                with _forward_replaced(
                    decoder, lambda *_, part=part, output=output, **__: _sliced(output, part)
                ):
                    logits: Tensor = self._forward(windows[:, begin:end]).logits
                yield logits

    def _hidden(self, windows: Tensor, decoder: nn.Module) -> Iterator[tuple[int, int, Any]]:
        """Runs the decoder; yields the place, the length and the output of every piece of the prefill."""
        output: Any = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal output
            output = forward(*args, **kwargs)
            return _sliced(output, slice(-1, None))  # the head behind it then sees a single token

        forward = decoder.forward
        tokens = windows.shape[1]
        piece = self.prefill or tokens
        cache: Any = None
        for begin in range(0, tokens, piece):
            part = windows[:, begin : begin + piece]
            options = {} if piece >= tokens else {"use_cache": True, "past_key_values": cache}
            with _forward_replaced(decoder, run):
                cache = getattr(self._forward(part, **options), "past_key_values", None)
            if options and cache is None:
                raise PosencError(
                    f"{type(self.model).__name__} keeps no key-value cache, so its prefill cannot be run in pieces: "
                    "leave --prefill-chunk out."
                )
            yield begin, part.shape[1], output

    def _chunk_of(self, windows: Tensor) -> int:
        return max(1, self.chunk // len(windows))

    def _find_decoder(self, probe: Tensor) -> tuple[nn.Module | None, Tensor]:
        """The outermost module that reads the tokens and returns hidden states, and the probe's full logits.

        Found by watching a forward: names and nesting differ between families (`model`, `transformer`,
        `gpt_neox`, `model.decoder`), and wrappers such as PEFT's add levels of their own.
        """
        embeddings = _input_embeddings(self.model)
        found: list[nn.Module] = []

        def watch(module: nn.Module, _: Any, output: Any) -> None:
            hidden = _hidden_states(output)
            if hidden is not None and hidden.shape[:2] == probe.shape:
                found.append(module)  # hooks run when a module returns, so the outermost comes last

        hooks = [
            module.register_forward_hook(watch)
            for module in self.model.modules()
            if module is not self.model and any(part is embeddings for part in module.modules())
        ]
        try:
            output = self.model(input_ids=probe, **self._options)
        except Exception as error:  # a dtype or an attention backend that this machine lacks
            raise PosencError(
                f"{type(self.model).__name__} cannot be run here: {type(error).__name__}: {one_line(error)}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:2] != probe.shape:
            raise PosencError(
                f"{type(self.model).__name__} does not return logits for every token: perplexity needs a causal "
                "language model."
            )
        found = [module for module in found if module is not embeddings]
        return (found[-1] if found else None), logits

    def _probe(self, probe: Tensor, full: Tensor) -> tuple[bool, bool]:
        """Whether head replay gives the probe's logits: (up to rounding, bit for bit)."""
        if self._decoder is None:
            return False, False
        chunk, self.chunk = self.chunk, _PROBE_CHUNK
        try:
            replayed = torch.cat(list(self._replay(probe, 0, probe.shape[1] - 1)), dim=1)[0]
        except Exception as error:
            logger.warning("%s: head replay failed: %s", type(self.model).__name__, error)
            return False, False
        finally:
            self.chunk = chunk
        expected = full[0, :-1]
        if replayed.shape != expected.shape:
            return False, False
        tolerance = (
            32 * torch.finfo(full.dtype).eps * float(expected.nan_to_num(0, 0, 0).abs().max())
        )
        close = torch.allclose(replayed, expected, rtol=0, atol=tolerance, equal_nan=True)
        return close, bool(torch.equal(replayed, expected))


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module of the model into evaluation mode, and each back into its own mode on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def input_device(model: nn.Module) -> torch.device:
    """Where the model's token ids go."""
    return next(_input_embeddings(model).parameters()).device


def _input_embeddings(model: nn.Module) -> nn.Module:
    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    return embeddings


def _no_cache(model: nn.Module) -> dict[str, Any]:
    """`use_cache=False` as an argument, so that the model's config need not be touched."""
    parameters = inspect.signature(model.forward).parameters
    variadic = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"use_cache": False} if variadic or "use_cache" in parameters else {}


def _hidden_states(output: Any) -> Tensor | None:
    """The decoder's last hidden states, shape (batch, n, hidden), if this is a decoder's output."""
    if isinstance(output, tuple):
        first = output[0] if output else None
    else:
        first = None if hasattr(output, "logits") else getattr(output, "last_hidden_state", None)
    return first if isinstance(first, Tensor) and first.dim() == 3 else None


def _sliced(output: Any, positions: slice) -> Any:
    """The same output with the last hidden states of these positions only."""
    hidden = _hidden_states(output)
    assert hidden is not None
    if isinstance(output, tuple):
        return (hidden[:, positions], *output[1:])
    return type(output)(**{**output, "last_hidden_state": hidden[:, positions]})


@contextlib.contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
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


def _default_chunk(vocabulary: int) -> int:
    """`LOGITS_PER_CHUNK` in tokens, rounded down to whole tiles of 64 rows where there are so many."""
    chunk = max(1, LOGITS_PER_CHUNK // vocabulary)
    return chunk - chunk % 64 if chunk > 64 else chunk


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
