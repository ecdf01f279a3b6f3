"""Times of whole models: the prefill of a long text, method by method, and `bench --suite gpu`.

The suite measures methods on one device, in layers beside plain attention and in a whole model. Nothing is downloaded:
queries, keys, weights and tokens are drawn at random. Each measurement is stored when it ends, and the most telling
come first, so that a budget of minutes leaves out the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.streamers import BaseStreamer

from hf_posenc.attention.checks.comparison import SCALE, methods
from hf_posenc.embedded import model_path
from hf_posenc.engines.engine import empty_model
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.device import Clock, Formulation, Layers, device_of
from hf_posenc.evaluation.device.result import (
    COMPILED,
    GENERATION,
    PERPLEXITY,
    PHASES,
    PLAIN,
    GpuResult,
    Row,
)
from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.grid import Grid, failure_field, listed, number
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, Candidate, parse_candidates
from hf_posenc.evaluation.measuring.execute import (
    Attempt,
    Failures,
    Item,
    Measurement,
    Value,
    patched_in,
)
from hf_posenc.evaluation.measuring.identity import config_hash, environment
from hf_posenc.evaluation.measuring.store import Key
from hf_posenc.evaluation.options import BenchOptions, refuse_others
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.estimate import backends, read_shape, run_cost
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.evaluation.suites import GPU
from hf_posenc.methods import seam_of


@dataclass
class SpeedResult:
    """Prefill of one window, timed under every method in turn, the baseline first, in several rounds.

    Attributes:
        length: Tokens of the window.
        memory: Meaning of `peak_bytes`.
        rounds: For each round and method seconds, peak and tokens at a time, or the reason of a failure.
    """

    length: int
    device: str
    threads: int | None
    memory: str | None
    methods: Sequence[str]
    rounds: Sequence[Mapping[str, Mapping[str, Any]]]

    def row(self, method: str) -> Row:
        """Return the times of a method beside those of the first one; memory is the largest peak."""
        own, first = ([v[name] for v in self.rounds] for name in (method, self.methods[0]))
        reasons = (values["failed"] for values in own if "failed" in values)
        if (failed := next(reasons, None if own else "not measured")) is not None:
            return Row("prefill", method, self.length, failed=failed)
        peaks = [values["peak_bytes"] for values in own]
        alone = any("failed" in values for values in first)
        return Row(
            *("prefill", method, self.length),
            seconds=[values["seconds"] for values in own],
            plain=[] if alone else [values["seconds"] for values in first],
            peak_bytes=None if None in peaks else max(peaks),
        )

    def pieces(self, method: str) -> int | None:
        """Return the least tokens that were run at a time; `None`: all."""
        sizes = (values[method].get("prefill") for values in self.rounds)
        return min(filter(None, sizes), default=None)

    def tables(self) -> list[Grid]:
        """Return the table of speed and memory by method."""
        grid = Grid.of(f"Prefill of {self.length:,} tokens", "method")
        for head in ("tokens/s", f"times as fast\nas {self.methods[0]}", "GiB at\nthe peak"):
            grid.column(head, numeric=True)
        for row in map(self.row, self.methods):
            if row.tokens_per_second is None:
                grid.row(row.method, *[failure_field(row.failed)] * 3)
                continue
            speedup = "-" if row.speedup is None else f"{row.speedup:.2f}"
            peak = None if row.peak_bytes is None else row.peak_bytes / 2**30
            grid.row(row.method, f"{row.tokens_per_second:,.0f}", speedup, number(peak, 3))
        return [grid]

    def notes(self) -> Iterator[str]:
        """Yield what was timed, on which machine."""
        count = self.threads
        threads = "" if count is None else f", {count} thread{'s' * (count != 1)}"
        yield (
            "Speed: one forward without a key-value cache, logits of the last token where the model can, median of "
            f"{len(self.rounds)} after a warm-up each, methods in turn, on {self.device}{threads}; times as fast: "
            "median over the rounds."
        )
        if self.memory is not None:
            yield f"GiB: {self.memory}, in the timed forward."
        for method in self.methods:
            if (size := self.pieces(method)) is not None:
                yield f"{method}: prefill in pieces of {size:,} tokens."

    def problems(self) -> Iterator[str]:
        """Yield the methods without a time."""
        for row in map(self.row, self.methods):
            if row.failed is not None:
                yield f"{row.method}: the prefill failed at length {row.length:,}: {row.failed}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        names = ("method", "tokens_per_second", "speedup", "peak_bytes", "failed")
        rows = [{name: getattr(self.row(each), name) for name in names} for each in self.methods]
        return {**asdict(self), "summary": rows}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeedResult:
        """Read the values of `to_dict`; the summary is computed again from the rounds."""
        return cls(**{name: value for name, value in values.items() if name != "summary"})


class SpeedRun(Measurement[Item, SpeedResult]):
    """Times the prefill of one window: a forward without a key-value cache, and the logits of its last token.

    A round times every method once, one after the other in this process, each after a warm-up forward of the same
    window: tables that a method builds at a new length, and choices of a library at its first call, are not in the
    time. An item is a whole round, so two methods are always compared under the same conditions. If memory runs out in
    the warm-up, less is run at a time, as for perplexity, and that is timed.

    `window` are token ids, shape (n,); the candidates are `checked` against the model, which `metadata` describes. The
    logits are those that score the tokens from the index `first` on; by default those of the last token.
    """

    scorer: TokenScorer

    def __init__(
        self,
        model: nn.Module,
        window: Tensor,
        candidates: Sequence[Candidate],
        *,
        rounds: int,
        chunk: int | None = None,
        prefill: int | None = None,
        first: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.window, self.candidates = model, window, candidates
        self._first = len(window) - 1 if first is None else first
        self.metadata = metadata or {}
        self.clock, self._at_once = Clock(model), (chunk, prefill)
        with evaluation_mode(model):
            self.scorer = TokenScorer(model, window, chunk=chunk, prefill=prefill)
        self._limits = {c.label: (self.scorer.chunk, self.scorer.prefill) for c in candidates}
        self.items = [
            Item(
                key=("round", number),
                length=len(window),
                cost=2 * len(window) * len(candidates),
                cells=tuple((candidate.label,) for candidate in candidates),
                order=number,
            )
            for number in range(rounds)
        ]

    @property
    def decisive(self) -> Mapping[str, Any]:
        return {
            "kind": "speed",
            "format": 2,
            "model": self.metadata["model"],
            "window_sha256": hashlib.sha256(self.window.numpy().tobytes()).hexdigest(),
            "length": len(self.window),
            "methods": [candidate.key for candidate in self.candidates],
            "at_once": self._at_once,
            **self.clock.machine(),
            "environment": environment(),
        }

    def measure(self, item: Item, attempt: Attempt) -> Value:
        timed = {}
        for turn, candidate in enumerate(self.candidates, 1):
            cell = (candidate.label,)
            if not attempt.is_lost(cell):
                values = attempt(partial(self.timed, candidate), [cell])
                if values is not None:
                    timed[candidate.label] = values
            attempt.advance(2 * len(self.window) * turn)
        return {"methods": timed}

    def collect(self, values: Mapping[Key, Value]) -> SpeedResult:
        failures = Failures.of(self.items, values.get).reasons()
        reasons = {cell[0]: {"failed": reason} for (_, cell), reason in failures.items()}
        labels = [candidate.label for candidate in self.candidates]
        timed = [values[item.key].get("methods", {}) for item in self.items]
        return SpeedResult(
            length=len(self.window),
            **self.clock.machine(),
            memory=self.clock.memory,
            methods=labels,
            rounds=[{x: methods.get(x) or reasons[x] for x in labels} for methods in timed],
        )

    def timed(self, candidate: Candidate) -> dict[str, Any]:
        """Return seconds, memory and tokens at a time of one forward, after one that is not timed."""
        scorer = self.scorer
        before = scorer.chunk, scorer.prefill
        # reductions of a method are its own, and kept for the next round
        scorer.chunk, scorer.prefill = self._limits[candidate.label]
        try:
            # Truncation reads the end of the window only.
            cut = max(0, len(self.window) - (candidate.most or len(self.window)))
            with patched_in(self.model, scorer, candidate, len(self.window)):
                forward = partial(scorer, self.window[cut:], max(1, self._first - cut))
                forward()
                scorer.stateful = False  # the warm-up has reset the model
                while True:
                    limits = scorer.reduced
                    seconds, peak = self.clock.time(forward)
                    if scorer.reduced == limits:  # otherwise memory ran out on the way
                        break
            prefill = scorer.prefill if scorer.pieces else None
        finally:
            self._limits[candidate.label] = scorer.chunk, scorer.prefill
            scorer.chunk, scorer.prefill = before
        return {"seconds": seconds, "peak_bytes": peak, "prefill": prefill}


def window_of(documents: Sequence[TokenizedDocument], length: int, special: Tensor) -> Tensor:
    """Return the first tokens of the documents, shape (length,), special tokens in front.

    Documents that are too short together are repeated.
    """
    parts, missing, index = [special], length - len(special), 0
    while missing > 0:
        document = documents[index % len(documents)]
        parts.append(document.tokens(0, min(missing, len(document.ids))))
        missing -= len(parts[-1])
        index += 1
    return torch.cat(parts)[:length]


# The suite gpu.

LENGTHS = (32768, 131072, 8192)
"""In the order in which they are measured."""
WHOLE = ("none", "yarn", "rerope", "alibi", "dual_chunk", "dynamic_yarn", "self_extend")
"""Methods of the whole model, unless others are given; layers have all that the engine computes, these first."""
DECODED = WHOLE[:4]
"""Those of a compiled generation, as a compilation takes a minute."""
ROUNDS = 7
TOKENS, GENERATIONS = 32, 3
"""New tokens of a generation, and rounds in which it alternates with the unpatched model's."""
ENOUGH = 10.0
"""Seconds of one measurement after which no further round begins."""
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
"""Sizes of Llama 3 8B."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GpuItem(Item):
    """One row of a phase at one length, and the work that measures it."""

    phase: str
    name: str
    work: Callable[[], dict[str, Any]]

    @classmethod
    def of(cls, phase: str, name: str, length: int, work: Callable[[], dict[str, Any]]) -> GpuItem:
        """Return the item of a row."""
        about: dict[str, Any] = {"key": (phase, name, length), "cells": ((phase, length),)}
        return cls(**about, length=length, cost=length, phase=phase, name=name, work=work)

    @property
    def label(self) -> str:
        return self.name


class GpuRun(Measurement[GpuItem, GpuResult]):
    """Times by length: a whole model that generates, and that scores every token; then layers by phase and method.

    Args:
        options: `methods`, `lengths` in the order in which they are measured, `rounds` and `budget`; the other fields
            are of other suites.
        config: Sizes as a config of transformers; by default those of Llama 3 8B on a GPU, of the embedded model on a
            CPU.
        device: By default the GPU if there is one.
        dtype: Name of the dtype; `"auto"`: bfloat16 on a GPU, float32 on a CPU.
        name: Name of the config, for reports.
        command: The command that gives the result again.
        peers: By method, how others publish it: a name, and the function that computes it in a layer.

    Raises:
        PosencError: Options of other suites, an unknown device, or a CPU without lengths.
    """

    def __init__(
        self,
        options: BenchOptions,
        config: Any = None,
        *,
        device: str | None = None,
        dtype: str = "auto",
        name: str | None = None,
        command: str | None = None,
        peers: Mapping[str, tuple[str, Formulation]] | None = None,
    ) -> None:
        refuse_others(options, ("suite", "methods", "lengths", "rounds", "budget"))
        self.device, specs = device_of(device), options.methods
        on_gpu, self.peers = self.device.type == "cuda", peers or {}
        if options.lengths is None and not on_gpu:
            raise PosencError(
                f"The suite gpu measures {listed(LENGTHS)} tokens, which takes a CPU days: give shorter lengths, such "
                "as --lengths 256,512."
            )
        if options.rounds == 0:
            raise PosencError("The suite gpu times every method: give --rounds 1 or more.")
        if TRUNCATION in (specs or ()):
            problem = f"--patch {TRUNCATION}: the suite gpu measures methods on windows of one length. Leave it out."
            raise PosencError(problem)
        if config is None and on_gpu:
            config, name = LlamaConfig(**LLAMA_8B), "Llama 3 8B"
        elif config is None:
            config, name = LlamaConfig.from_pretrained(model_path()), "hf_posenc's embedded model"
        automatic = "bfloat16" if on_gpu else "float32"
        self.dtype: torch.dtype = getattr(torch, automatic if dtype == "auto" else dtype)
        self.config, self.rounds = config, options.rounds or ROUNDS
        # Where `execute` and the clock find the device; the whole model is built when its turn comes.
        self.model = nn.Linear(1, 1, device=self.device)
        self.clock = Clock(self.model)
        self._whole: Any = None
        empty, self._lengths = empty_model(config), options.lengths or LENGTHS
        attention = read_shape(empty).attentions[0]
        sizes = (self.dtype, attention.key_dim, (attention.heads, attention.key_heads))
        self.layers = Layers(self.device, *sizes, self.clock, self.rounds, ENOUGH)
        about = {
            "name": f"{name or type(config).__name__} (its sizes, random weights)",
            "class": type(empty).__name__,
            "parameters": sum(each.numel() for each in empty.parameters()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attention": empty.config._attn_implementation,
            "config_sha256": config_hash(config),
        }
        self.metadata = {"model": about, "command": command}
        given = parse_candidates([method.name for method in methods()] if specs is None else specs)
        built = {c.label: c.parts[0].build(SCALE) for c in given if len(c.parts) == 1}
        self.methods = {n: m for n, m in built.items() if seam_of(m) in ("attention", "bias")}
        self.items = list(self._items(specs, on_gpu))
        if options.budget is not None:
            self.until = time.monotonic() + options.budget

    def _items(self, specs: Sequence[str] | None, on_gpu: bool) -> Iterator[GpuItem]:
        """Yield the whole model's rows and the layers of its methods, length by length; then those of the others."""
        whole = parse_candidates([*(WHOLE if specs is None else dict.fromkeys(("none", *specs)))])
        compiled = parse_candidates(DECODED) if specs is None else whole
        first = [n for n, m in self.methods.items() if specs is not None or m.name in WHOLE]
        for length in self._lengths:
            for phase, work in ((GENERATION, self._generation), (PERPLEXITY, self._forward)):
                for each in whole:
                    yield GpuItem.of(phase, each.label, length, partial(work, each, length))
            yield from self._of_layers(length, (PLAIN, *first))
            if on_gpu and length == self._lengths[0]:
                for each in compiled:
                    compiling = partial(self._generation, each, length, compiled=True)
                    yield GpuItem.of(COMPILED, each.label, length, compiling)
        for length in self._lengths:
            yield from self._of_layers(length, [n for n in self.methods if n not in first])

    def _of_layers(self, length: int, names: Sequence[str]) -> Iterator[GpuItem]:
        for phase, name in itertools.product(PHASES, names):
            method, measured = self.methods.get(name), partial(self.layers.measured, phase, length)
            yield GpuItem.of(phase, name, length, partial(measured, method))
            if method is not None and method.name in self.peers:
                title, peer = self.peers[method.name]
                theirs = partial(measured, method, peer)
                yield GpuItem.of(phase, f"{name}, {title}", length, theirs)

    @property
    def decisive(self) -> Mapping[str, Any]:
        return {
            "kind": GPU,
            "format": 1,
            "model": self.metadata["model"],
            "rounds": self.rounds,
            "backend": os.environ.get("HF_POSENC_BACKEND"),
            **self.clock.machine(),
            "environment": environment(),
        }

    def measure(self, item: GpuItem, attempt: Attempt) -> Value:
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
            return {"row": attempt(item.work) or {}}

    def collect(self, values: Mapping[Key, Value]) -> GpuResult:
        rows = []
        for item in self.items:
            if item.key in values:
                row, failed = values[item.key]["row"], values[item.key].get("failed")
                rows.append(Row(item.phase, item.name, item.length, failed=failed, **row))
        return GpuResult(
            records=rows,
            missing=self.total - len(rows),
            sizes=self.layers.sizes,
            machine=self.clock.machine(),
            memory=self.clock.memory,
            rounds=self.rounds,
            environment=environment(),
            fingerprint=self.fingerprint,
            **self.metadata,
        )

    def _drawn_model(self, length: int) -> tuple[Any, Tensor]:
        """Return the model, with random weights, and so many random tokens."""
        self._whole = self._whole or _built(self.config, self.device, self.dtype)
        vocabulary = self.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        return self._whole, torch.randint(vocabulary, (length,), generator=generator)

    def _generation(
        self, candidate: Candidate, length: int, compiled: bool = False
    ) -> dict[str, Any]:
        """Return the time of a new token after a prompt, by `generate`; compiled with a static cache."""
        model, ids = self._drawn_model(length)
        candidate, prompt = candidate.checked(model), ids[None].to(self.device)
        settings = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        if compiled:
            torch.compiler.reset()  # other methods have compiled the same forward
            settings.cache_implementation = "static"
        mask = torch.ones_like(prompt)

        def generated() -> tuple[float, int | None]:
            times = _Times()
            generate = partial(model.generate, prompt, attention_mask=mask, streamer=times)
            peak = self.clock.time(partial(generate, generation_config=settings))[1]
            # the later half, after compilation and choices of libraries
            steps = [after - before for before, after in itertools.pairwise(times.seen)]
            return float(f"{statistics.median(steps[len(steps) // 2 :]):.6g}"), peak

        found: dict[str, list[float]] = {"plain": [], "seconds": []}
        # A compiled forward of another patch is compiled again, so it does not alternate.
        for _ in range(1 if compiled else GENERATIONS):
            if not compiled and candidate.patches:
                found["plain"].append(generated()[0])
            with candidate.applied(model, length):
                seconds, peak = generated()
                attention = ", ".join(backends(model, length, queries=1))
            found["seconds"].append(seconds)
        return {"backend": attention, **found, "peak_bytes": peak}

    def _forward(self, candidate: Candidate, length: int) -> dict[str, Any]:
        """Return time and memory of a forward that scores every token, and the estimate of its memory."""
        model, ids = self._drawn_model(length)
        candidate = candidate.checked(model)
        run = SpeedRun(model, ids, [candidate], rounds=0, first=1)
        timed = run.timed(candidate)
        with candidate.applied(model, length):
            cost, attention = run_cost(model, [(length, length - 1)]), backends(model, length)
        pieces = [f"prefill by {size:,} tokens"] if (size := timed["prefill"]) else []
        return {
            "backend": ", ".join((*attention, *pieces)),
            "seconds": [timed["seconds"]],
            "peak_bytes": timed["peak_bytes"],
            "estimate_bytes": cost.total,
        }


def _built(config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a causal language model with random weights, drawn on the device."""
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model: Any = auto.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None  # random weights end nowhere
    whole: nn.Module = model.eval()
    return whole


class _Times(BaseStreamer):
    """The times at which `generate` hands over tokens: the prompt, then one at a time."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def put(self, value: Any) -> None:
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        pass
