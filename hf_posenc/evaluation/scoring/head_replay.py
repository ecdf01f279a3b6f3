"""Per-token losses of a causal language model, with the logits of only a chunk of tokens in memory.

The logits of 131,072 tokens over a vocabulary of 128,256 are 63 GiB in float32, the hidden states behind them 1 GiB
at most. So the decoder runs once over the whole window, and then the model's *own* forward runs over slices of the
hidden states, with the decoder replaced by a stub that returns them. Soft caps, logit scales, biases and whatever
else a family computes after its decoder remain the model's code.

The decoder can run in pieces, over a cache. In most families that changes no number. Some keep no cache, some lose a
state when more than one token follows it (Mamba, Zamba), some restart their positions (Bamba), some take the first
piece for the prompt (Unlimited-OCR). Nothing in a model's interface reveals this, so it is tried on a short text first.

Nothing runs in inference mode: a model may be trained afterwards, and tensors that it keeps from a forward (FSDP2 its
buffers) could then not be written to.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.measuring.candidates import movement
from hf_posenc.evaluation.options import read_whole
from hf_posenc.evaluation.scoring import is_out_of_memory, release
from hf_posenc.evaluation.scoring.decoder import (
    check_causal,
    find_decoder,
    input_device,
    input_embeddings,
    position_limit,
    replaced,
    sizes_alone,
    sliced,
    too_long,
    without_cache,
)
from hf_posenc.model import masks
from hf_posenc.model.attention import IMPLEMENTATION, native_implementation, register
from hf_posenc.model.forward import CACHES as CACHE_NAMES
from hf_posenc.model.forward import cache_name
from hf_posenc.model.rotary import ENGINE
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.model.weights import rounding_dtype
from hf_posenc.patch.state import state_of

logger = logging.getLogger(__name__)

# Prefill in pieces.

# Names of the cache in different families, as an output and as an argument.
CACHES = (*CACHE_NAMES, "cache_params", "state")
# Tokens in a piece. A single one would be a decoding step, for which some families have another formula.
LEAST = 2
# Tokens of the texts that are tried, and of their pieces.
LEAST_PROBE, LONGEST_PIECE, LONGEST_PROBE = 64, 1024, 8192

SAME = 1e-5, 30, 1e-3
SAME_HALF = 1e-3, 2, 0.1
"""Nats a token, on average, by which pieces may differ from one forward: so many times what one rounding of the
embeddings changes, between a least and a most. Of 283 families in float32, those that read on correctly differ by at
most 3 times as much, the others by 4,000 and more; in bfloat16 by 1.4, and by 0.2 to 13: a small error passes there."""

_NEAR = 4  # tokens behind a seam, where a lost state shows most
_REACH = re.compile(r"window|chunk|topk|compress|budget|local_attention|block_size")


class _RefusedError(Exception):
    """A prefill in pieces differs from one forward; the message is the reason."""


@dataclass(frozen=True)
class Pieces:
    """Settings to run a text in pieces of `size` tokens.

    Some models need the positions of a piece, which most derive from the cache; some need a cache for the first one.
    A piece behind others has a mask of its tokens times all tokens before them, unless the engine computes attention:
    `config` is that of a text decoder for which it can.
    """

    size: int
    positions: bool = False
    cache: Callable[[], dict[str, Cache]] | None = None
    config: Any = field(default=None, repr=False)

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Let the engine compute attention inside a `with` block, where it can: no mask is then a matrix."""
        if self.config is None:
            yield
            return
        register()
        # no dense mask of the short texts of a trial either
        with replaced(self.config, IMPLEMENTATION, ENGINE), replaced(masks, "DENSE", 0):
            yield

    def bounds(self, tokens: int) -> list[tuple[int, int]]:
        """Return the begin and end of each piece; a last token that would be alone belongs to the piece before."""
        edges = [*range(0, tokens, self.size), tokens]
        if len(edges) > 2 and edges[-1] - edges[-2] < LEAST:
            del edges[-2]
        return list(itertools.pairwise(edges))

    def arguments(self, output: Any, windows: Tensor, begin: int, end: int) -> dict[str, Any]:
        """Return the arguments for tokens `begin .. end-1` of windows (k, n), after the output of a piece."""
        arguments: dict[str, Any] = {"use_cache": True}
        if begin:
            names = (name for name in CACHES if getattr(output, name, None) is not None)
            if (name := next(names, None)) is None:
                raise _RefusedError("it returns no cache")
            arguments[name] = getattr(output, name)
        elif self.cache is not None:
            arguments |= self.cache()
        if self.positions:
            positions = torch.arange(begin, end, device=windows.device)
            arguments["position_ids"] = positions.expand(len(windows), -1)
        return arguments


class Prefill:
    """Finds settings with which a model runs texts in pieces, if there are any.

    A random text is read whole and in pieces. If the config names windows or the like, a longer text is read in pieces
    of two sizes, with no more tokens at a time than requested, so that a trial never needs the memory that pieces save.
    The model may be patched between calls; `refused` is the reason that it is only run whole with its current patch.
    `score` returns the losses of a text of shape (n,), read in such pieces or (`None`) whole: shape (n - 1,).
    """

    def __init__(
        self, model: nn.Module, ids: Tensor, score: Callable[[Tensor, Pieces | None], Tensor]
    ) -> None:
        self._model, self._score = model, score
        self._alphabet = ids.unique().cpu()
        self._state: Any = None
        self._trials: dict[tuple[int, int, int], Pieces | None] = {}
        self.refused: str | None = None

    def pieces(self, size: int, tokens: int) -> Pieces | None:
        """Return the settings for a text of so many tokens; `None`: only whole, which is logged with the reason.

        They depend on the model, its patch and the two lengths alone, so that all processes of a run agree.
        """
        if len(Pieces(size).bounds(tokens)) < 2:
            return None
        state = state_of(self._model)
        if state is not self._state:
            self._state, self._trials, self.refused = state, {}, None
        if self.refused is not None:
            return None
        short = _at_most(tokens, max(LEAST_PROBE, min(size, LONGEST_PIECE)))
        reach = min(_reach(self._model), LONGEST_PROBE // 2)
        long = max(2 * reach, reach + 2 * min(size, LONGEST_PIECE)) if reach else short
        key = size, short, _at_most(tokens, long)
        if key not in self._trials:
            self._trials[key] = self._find(*key)
        return self._trials[key]

    def _find(self, size: int, short: int, long: int) -> Pieces | None:
        """Return the first settings that agree with one forward over `short` tokens, and with others over `long`."""
        part = max(LEAST, min(size, 2 * short // 5))
        longest = min(size, LONGEST_PIECE)
        other = longest - longest // 3 if longest > LEAST else LEAST + 1
        moving = "what it computes for a token depends on how much text follows"
        refused = moving if movement(self._model)[0] else ""
        for settings in () if refused else self._settings():
            try:
                self._compare(short, Pieces(part, **settings), None)
                if long > short:
                    self._compare(long, Pieces(longest, **settings), Pieces(other, **settings))
            except _RefusedError as error:
                refused = refused or str(error)
            else:
                return Pieces(size, **settings)
        self.refused = refused
        name = type(unwrap(self._model)).__name__
        logger.warning(
            "%s cannot be prefilled in pieces: %s. Its texts are run whole.", name, refused
        )
        return None

    def _settings(self) -> list[dict[str, Any]]:
        """Return the settings to try: those of most models, with positions, with a cache; first without masks."""
        model: Any = unwrap(self._model)
        parameters, config = inspect.signature(model.forward).parameters, _text_config(model)
        settings: list[dict[str, Any]] = [{}]
        if "position_ids" in parameters:
            settings.append({"positions": True})
        taken = cache_name(model)
        if taken is not None and config is not None:
            settings.append({"cache": lambda: {taken: DynamicCache(config=config)}})
        name = getattr(config, "_attn_implementation", None) or "eager"
        if native_implementation(name) != "sdpa":
            return settings
        return [*({**each, "config": config} for each in settings), *settings]

    def _compare(self, tokens: int, pieces: Pieces, other: Pieces | None) -> None:
        draw = torch.Generator().manual_seed(0)
        ids: Tensor = self._alphabet[torch.randint(len(self._alphabet), (tokens,), generator=draw)]
        try:
            losses = self._score(ids, pieces)
            expected = self._score(ids, other)
        except _RefusedError:
            raise
        except Exception as error:  # whatever a family's code raises when it meets a cache
            if is_out_of_memory(error):
                raise
            raise _RefusedError(f"{type(error).__name__}: {one_line(error)}") from error
        begins = {begin for each in (pieces, other) if each for begin, _ in each.bounds(tokens)}
        off = disagreement(losses, expected, seams := sorted(begins - {0}))
        full = rounding_dtype(self._model) in (torch.float32, torch.float64)
        least, factor, most = SAME if full else SAME_HALF
        if off > least and off > min(most, factor * self._rounding(ids, other, expected, seams)):
            against = "one forward" if other is None else f"pieces of {other.size:,} tokens"
            raise _RefusedError(
                f"in pieces of {pieces.size:,} tokens its losses are {off:.2g} nats a token off those of {against}"
            )

    def _rounding(self, ids: Tensor, way: Pieces | None, losses: Tensor, seams: list[int]) -> float:
        """Return how far off losses are where every number of the embeddings is off by one rounding, up or down."""

        def round_off(_: Any, __: Any, values: Tensor) -> Tensor:
            up = torch.randint(2, values.shape, generator=draw).to(values.device)
            return values * (1 + (2 * up - 1) * torch.finfo(values.dtype).eps).to(values.dtype)

        embeddings: Any = input_embeddings(self._model)
        draw = torch.Generator().manual_seed(0)
        hook = embeddings.register_forward_hook(round_off)
        try:
            off = [disagreement(self._score(ids, way), losses, seams) for _ in range(2)]
        finally:
            hook.remove()
        return max(off)


def disagreement(pieces: Tensor, whole: Tensor, seams: list[int]) -> float:
    """Return how far losses in pieces are from those of one forward, shape (n - 1,), in nats a token.

    The larger of two means of absolute differences: over all tokens that are predicted behind the first seam (a token
    at which a piece begins), and a quarter of that over the few right behind each seam. Equal infinities do not differ.
    """
    off = (pieces - whole).abs()
    off[(pieces == whole) | (pieces.isnan() & whole.isnan())] = 0.0
    off = off.nan_to_num(torch.inf, torch.inf)
    # The token at index i has its loss at i - 1, and is predicted from the hidden state at i - 1.
    near = torch.cat([off[seam : seam + _NEAR] for seam in seams])
    return max(float(off[seams[0] :].mean()), float(near.mean()) / 4)


def _reach(model: nn.Module) -> int:
    """Return the largest window, chunk or top-k of the text config, in tokens."""
    config = _text_config(unwrap(model))
    values = [
        number
        for name, value in ({} if config is None else config.to_dict()).items()
        if _REACH.search(name)
        for number in (value if isinstance(value, list | tuple) else [value])
    ]
    return max((number for number in values if type(number) is int), default=0)


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None


def _at_most(tokens: int, requested: int) -> int:
    """Return the requested length, or, for a shorter text, a power of two: many lengths then share few trials."""
    return requested if requested <= tokens else 1 << (tokens.bit_length() - 1)


# The scorer.
LOGITS_PER_CHUNK = 2**25
"""Logits held at a time: 128 MiB in float32, 8,192 tokens of a 4k vocabulary, 261 of a 128k one."""
LEAST_CHUNK, LEAST_PREFILL, SHRINK = 64, 512, 4
"""Limits of what is run at a time when memory runs out, in tokens, and the factor of a reduction."""
T = TypeVar("T")
_TILE = 64
"""Least rows of the last of several chunks: CPU matrix products of few rows may round differently."""
_PROBE_TOKENS = 9
_PROBE_CHUNK = 4  # of 8 scored positions; below 4 rows CPU matrix products take another path and round differently


class TokenScorer:
    """Computes the negative log-likelihood of every token of a window.

    The constructor runs a probe of a few tokens by head replay and by the plain forward. If the logits differ by more
    than rounding, the scorer logs a warning and uses the plain forward from then on. A prefill in pieces is tried
    before it is used (`Prefill`): if it changes the numbers, a warning reports that texts are run whole.

    Whenever memory runs out, less is run at a time from then on: fewer windows first, then fewer logits if the head ran
    out of memory, otherwise the prefill in pieces. Once nothing is left to reduce, the platform's error is raised.

    Args:
        model: A causal language model, patched or not; the caller sets its evaluation mode.
        probe_ids: Some token ids, shape (n,) with n of at least 2; the first 9 are used, all of them for texts that try
            a prefill in pieces.
        chunk: Tokens whose logits are held at a time; by default `LOGITS_PER_CHUNK` divided by the vocabulary, and
            whole tiles of 64 rows.
        prefill: Tokens that the decoder runs at a time, 2 or more, with the keys and values of those before in a cache;
            by default all. It bounds the activations of a layer, so that only the cache grows with the text.
        batch: Windows that are run at a time; by default all that are given.

    Attributes:
        exact: Whether the probe's logits by head replay were bit-identical to those of the plain forward.
        replays: Whether head replay is in use; False means full logits, and no prefill in pieces.
        pieces: Whether the prefill may be reduced to pieces: they give the same numbers for the current patch.
        stateful: Whether the model keeps the largest length it has read as state (transformers' own dynamic RoPE).
            Two tokens in front of every forward reset it.
        patient: Whether less is run at a time when memory runs out; otherwise the error is raised.

    `batch`, `chunk` and `prefill` may be changed between calls.

    Raises:
        PosencError: The model is an encoder-decoder, does not return logits for every token or reads ahead.

    Examples:
        >>> import torch
        >>> from hf_posenc.evaluation import TokenScorer
        >>> ids = torch.tensor(tokenizer(texts[0])["input_ids"])
        >>> scorer = TokenScorer(model.eval(), ids[:16])
        >>> losses = scorer(ids, 1)  # of the tokens 1, 2, ..., nats
        >>> tuple(losses.shape) == (len(ids) - 1,)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        probe_ids: Tensor,
        *,
        chunk: int | None = None,
        prefill: int | None = None,
        batch: int | None = None,
    ) -> None:
        for name, size in {"chunk": chunk, "prefill": prefill, "batch": batch}.items():
            if size is not None:
                read_whole(size, name, LEAST if name == "prefill" else 1)
        if not hasattr(unwrap(model), "get_input_embeddings"):
            problem = f"{type(model).__name__} has no token embeddings: give a causal language model of transformers."
            raise PosencError(problem)
        probe_ids = token_ids(probe_ids, model)
        self.model, self.batch = model, batch
        self.prefill: int | None = None
        self.pieces, self.stateful, self.patient = True, False, True
        self._in_head = False  # the last computation was one of logits, rather than of the decoder
        self._options = without_cache(model)
        if sizes_alone(model) is not None:  # `--dry-run`: head replay is expected to work
            self.replays, self.exact, self.positions = True, True, None
            self.chunk, self.prefill = chunk or 1, prefill
            return
        probe = probe_ids[:_PROBE_TOKENS].unsqueeze(0).to(input_device(model))
        with torch.no_grad():
            self._decoder, full = find_decoder(model, probe, self._options)
            check_causal(model, probe, full, self._options)
            limit = max(1, LOGITS_PER_CHUNK // full.shape[-1])
            self.chunk = chunk or (limit - limit % _TILE if limit > _TILE else limit)
            self.replays, self.exact = self._probe(probe, full)
        self.positions = position_limit(model)
        self.prefill = prefill
        self._pieces = Prefill(model, probe_ids, self._losses)
        if not self.replays:
            logger.warning(
                "%s: head replay does not reproduce the model's logits; full logits are held instead, "
                "which needs length x vocabulary of memory.",
                type(model).__name__,
            )

    @property
    def refused(self) -> str | None:
        """The reason that the last texts were not run in pieces, although `prefill` is set."""
        return self._pieces.refused

    @property
    def head_replay(self) -> str:
        """Agreement of head replay with full logits on the probe: `"bit-exact"`, `"up to rounding"` or `"off"`."""
        return ("bit-exact" if self.exact else "up to rounding") if self.replays else "off"

    @property
    def reduced(self) -> dict[str, int | None]:
        """Windows and tokens that are run at a time, after any reduction."""
        prefill = self.prefill if self.refused is None else None
        return {"batch": self.batch, "chunk": self.chunk, "prefill": prefill}

    @torch.no_grad()
    def __call__(self, ids: Tensor, first: int = 1, *, read_last: bool = True) -> Tensor:
        """Score a window, or several of one shape.

        Args:
            ids: Token ids, shape (n,) or (windows, n); lists and arrays too.
            first: Index of the first token to score, at least 1 (the token at index 0 has no prediction).
            read_last: Whether the model reads the last token, which predicts no scored token.

        Returns:
            Negative log-likelihoods in nats of tokens `first .. n-1`, shape (n - first,) or (windows, n - first),
            float64, on the CPU.

        Raises:
            PosencError: There is no such token, or the ids are none of the model's.
        """
        windows = token_ids(ids, self.model)
        shape, windows = windows.shape, windows.reshape(-1, windows.shape[-1])

        def score(part: Tensor) -> Tensor:
            return _nats(self.logits(part, first, read_last=read_last), part, first)

        return torch.cat(list(self._in_parts(windows, shape[-1], score))).reshape(*shape[:-1], -1)

    @torch.no_grad()
    def whole_logits(self, ids: Tensor, first: int, *, read_last: bool = True) -> Tensor:
        """Return the logits that predict tokens `first .. n-1` of a window of shape (n,), (n - first, vocabulary)."""

        def joined(part: Tensor) -> Tensor:
            chunks = list(self.logits(part[0], first, read_last=read_last))
            return torch.cat([chunk.to(chunks[0].device) for chunk in chunks])

        return next(self._in_parts(ids[None], len(ids) - first, joined))

    @torch.no_grad()
    def logits(self, ids: Tensor, first: int, *, read_last: bool = True) -> Iterator[Tensor]:
        """Yield the logits that predict tokens `first .. n-1`, a chunk at a time, with the arguments of a call.

        Each chunk has shape (m, vocabulary) or (windows, m, vocabulary), with m up to `chunk`. The windows are run all
        at once, and a lack of memory is raised.
        """
        ids = token_ids(ids, self.model)
        if not isinstance(first, int) or not 1 <= first < ids.shape[-1]:
            problem = f"A window of {ids.shape[-1]} tokens cannot be scored from token {first!r}."
            raise PosencError(problem)
        windows = ids.reshape(-1, ids.shape[-1]).to(input_device(self.model))
        read = windows if read_last else windows[:, :-1]
        self.check_length(read.shape[1])
        # The token at index i is predicted by the hidden state at i - 1.
        positions = first - 1, ids.shape[-1] - 1
        if self.replays:
            chunks = self._replay(read, *positions, self.pieces_of(read.shape[1]))
        else:
            self._in_head = False
            whole = self.model(input_ids=read, **self._options).logits[:, slice(*positions)]
            chunks = iter(whole.split(self._step(windows), dim=1))
        for logits in chunks:
            yield logits if ids.dim() > 1 else logits[0]

    def pieces_of(self, tokens: int) -> Pieces | None:
        """Return the pieces in which a text of so many tokens is run; `None`: whole."""
        size = self.prefill if self.replays else None
        return None if size is None else self._pieces.pieces(size, tokens)

    def reset(self, ids: Tensor) -> None:
        """Make a stateful model forget the largest length it has read; it reads two of these token ids, shape (n,)."""
        if self.stateful:
            list(self.logits(ids[:2], 1))

    def _in_parts(self, windows: Tensor, scored: int, run: Callable[[Tensor], T]) -> Iterator[T]:
        """Yield the results for windows (k, n), `batch` of them at a time, with less at a time if memory runs out."""
        done = 0
        while done < len(windows):
            part = windows[done : done + (self.batch or len(windows))]
            try:
                self.reset(part[0])
                result = run(part)
            except Exception as error:
                if not self.patient or not is_out_of_memory(error):
                    raise
                release(error)
                if not self._reduce(part, scored):
                    raise
                continue
            done += len(part)
            yield result

    def _reduce(self, windows: Tensor, scored: int) -> bool:
        """Run less at a time from now on; return False if nothing can be reduced."""
        count, tokens = windows.shape
        prefill = min(self.prefill or tokens, tokens)
        if count > 1:
            self.batch = count // 2
        elif self._in_head:
            if self.chunk <= LEAST_CHUNK or scored <= LEAST_CHUNK:
                return False
            self.chunk = max(LEAST_CHUNK, min(self.chunk, tokens) // SHRINK)
        # Refused pieces are run whole all the same.
        elif prefill > LEAST_PREFILL and self.pieces and self.replays and self.refused is None:
            self.prefill = max(LEAST_PREFILL, prefill // SHRINK)
        else:
            return False
        return True

    def check_length(self, tokens: int) -> None:
        """Raise if the model has no positions for so many tokens."""
        if self.positions is not None and tokens > self.positions:
            self.positions = position_limit(self.model)  # it may have been patched since
            if self.positions is not None and tokens > self.positions:
                raise too_long(self.model, tokens, self.positions)

    def _replay(
        self, windows: Tensor, start: int, stop: int, pieces: Pieces | None = None
    ) -> Iterator[Tensor]:
        """Yield the logits at positions `start .. stop-1` by head replay; no other logits exist at the time."""
        decoder = self._decoder
        assert decoder is not None
        step = self._step(windows)
        for offset, behind, output in self._hidden(windows, decoder, pieces):
            lowest, highest = max(start, offset), min(stop, behind)
            for begin in range(lowest, highest, step):
                end = min(begin + step, highest)
                # Some processors round products of few rows differently: a short last chunk repeats rows before it.
                low = max(lowest, min(begin, end - min(step, _TILE)))
                part, ids = sliced(output, slice(low - offset, end - offset)), windows[:, low:end]
                with replaced(decoder, "forward", lambda *_, part=part, **__: part):
                    logits: Tensor = self.model(input_ids=ids, **self._options).logits
                yield logits[:, begin - low :]

    def _hidden(
        self, windows: Tensor, decoder: nn.Module, pieces: Pieces | None
    ) -> Iterator[tuple[int, int, Any]]:
        """Run the decoder; yield the begin, the end and the output of every piece of the prefill."""
        output: Any = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal output
            output = forward(*args, **kwargs)
            return sliced(output, slice(-1, None))  # the head then computes a single token

        forward = decoder.forward
        tokens, before = windows.shape[1], None
        for begin, end in [(0, tokens)] if pieces is None else pieces.bounds(tokens):
            options = self._options
            if pieces is not None:
                options = pieces.arguments(before, windows, begin, end)
            output, self._in_head = None, False
            with (
                replaced(decoder, "forward", run),
                contextlib.nullcontext() if pieces is None else pieces.attention(),
            ):
                try:
                    before = self.model(input_ids=windows[:, begin:end], **options)
                except Exception:
                    # A head may count the token ids and fail on a single position. The decoder's output is complete.
                    if output is None or pieces is not None:
                        raise
            self._in_head = True
            yield begin, end, output

    def _losses(self, ids: Tensor, pieces: Pieces | None) -> Tensor:
        """Return the losses of a text run in these pieces, shape (n - 1,)."""
        window = ids.unsqueeze(0).to(input_device(self.model))
        return _nats(self._replay(window, 0, len(ids) - 1, pieces), ids[None], 1)[0]

    def _step(self, windows: Tensor) -> int:
        return max(1, self.chunk // len(windows))

    def _probe(self, probe: Tensor, full: Tensor) -> tuple[bool, bool]:
        """Return whether head replay reproduces the probe's logits: (up to rounding, bit for bit)."""
        if self._decoder is None:
            return False, False
        try:
            with replaced(self, "chunk", _PROBE_CHUNK):
                replayed = torch.cat(list(self._replay(probe, 0, probe.shape[1] - 1)), dim=1)[0]
        except Exception as error:
            logger.warning("%s: head replay failed: %s", type(self.model).__name__, error)
            return False, False
        expected = full[0, :-1]
        if replayed.shape != expected.shape:
            return False, False
        largest = float(expected.nan_to_num(0, 0, 0).abs().max())
        tolerance = 32 * torch.finfo(full.dtype).eps * largest
        close = torch.allclose(replayed, expected, rtol=0, atol=tolerance, equal_nan=True)
        return close, bool(torch.equal(replayed, expected))


def token_ids(ids: Any, model: nn.Module) -> Tensor:
    """Return the ids of one text or several, int64; raise for what is none, or for ids without an embedding."""
    tensor = torch.as_tensor(ids)
    right = not tensor.is_floating_point() and tensor.dim() in (1, 2)
    if not right or not len(tensor) or tensor.shape[-1] < 2:
        problem = "Token ids are whole numbers of shape (n,) or (windows, n), n at least 2, not"
        raise PosencError(f"{problem} {' '.join(repr(ids).split())[:80]}.")
    count = getattr(input_embeddings(model), "num_embeddings", None)
    if tensor.device.type == "cpu" and count is not None:  # elsewhere a comparison would wait
        least, largest = int(tensor.min()), int(tensor.max())
        if least < 0 or largest >= count:
            wrong = least if least < 0 else largest
            raise PosencError(f"Token {wrong:,}: the model has embeddings for 0 to {count - 1:,}.")
    return tensor.to(torch.int64)


def _nats(chunks: Iterator[Tensor], windows: Tensor, first: int) -> Tensor:
    """Return the losses of the tokens from `first` on, shape (windows, m), float64, on the CPU, from their logits."""
    losses = []
    for logits in chunks:
        ids = windows[:, first : first + logits.shape[1]].to(logits.device)
        first += logits.shape[1]
        single = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(single.flatten(0, 1), ids.flatten(), reduction="none")
        losses.append(loss.to("cpu", torch.float64).view_as(ids))
    return torch.cat(losses, dim=1)
