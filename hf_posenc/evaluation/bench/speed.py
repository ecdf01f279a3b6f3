"""How fast a model reads a long text under every method, and with how much memory."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.execute import Progress
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.evaluation.measuring.store import ALONE, Key, Records, Shard, Store, missing
from hf_posenc.evaluation.scoring.head_replay import FrugalScorer, TokenScorer, evaluation_mode
from hf_posenc.evaluation.scoring.memory import reason_of

# Times a piece of work and says how much memory it took at its peak.


ON_GPU = "allocated by PyTorch on the GPU at the peak, weights included"
ON_CPU = (
    "resident in memory at the peak, of the whole process: Python, libraries and weights included"
)

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class Clock:
    """Times work on the devices of a model.

    The clock is read when the devices have done all that was asked of them, before and after. Peaks of memory: on GPUs
    PyTorch's own count; on a CPU under Linux the kernel's high-water mark of this process, which is set back first;
    elsewhere none.

    Args:
        model: Where its weights are, the work is done.

    Attributes:
        memory: What the peaks are; `None` where there are none.
    """

    def __init__(self, model: nn.Module) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        self._devices = sorted(devices, key=str)
        self._gpus = [device for device in self._devices if device.type == "cuda"]
        self.memory: str | None = ON_GPU if self._gpus else None
        if all(device.type == "cpu" for device in self._devices) and _set_back():
            self.memory = ON_CPU

    def time(self, work: Callable[[], Any]) -> tuple[float, int | None]:
        """Does the work.

        Returns:
            Seconds, and the peak of memory in bytes.
        """
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        if self.memory == ON_CPU:
            _set_back()
        self._synchronize()
        began = time.perf_counter()
        work()
        self._synchronize()
        seconds = time.perf_counter() - began
        return seconds, self._peak()

    def machine(self) -> dict[str, Any]:
        """What does the work: its name, and the number of threads of a CPU."""
        if self._gpus:
            names = [torch.cuda.get_device_name(gpu) for gpu in self._gpus]
            kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
            return {"device": ", ".join(kinds), "threads": None}
        kind = self._devices[0].type
        return {"device": _cpu_name() or kind, "threads": torch.get_num_threads()}

    def _synchronize(self) -> None:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)

    def _peak(self) -> int | None:
        if self._gpus:
            return sum(torch.cuda.max_memory_allocated(gpu) for gpu in self._gpus)
        return _resident_peak() if self.memory == ON_CPU else None


def _set_back() -> bool:
    """Sets the kernel's high-water mark back to what is resident now; whether that can be done here."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _resident_peak() is not None


def _resident_peak() -> int | None:
    for line in _lines(_STATUS):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _cpu_name() -> str | None:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# What the timed prefills say of every method.


@dataclass(frozen=True)
class SpeedCell:
    """The speed and the memory of a method.

    Attributes:
        method: Its label.
        tokens_per_second: Tokens of the window by the median of the seconds of all rounds; `None` where it failed.
        lowest: Of the slowest round.
        highest: Of the fastest round.
        ratio: Times as fast as the first method: the median over the rounds, both of the same round.
        peak_bytes: The largest peak of memory; `None` where it cannot be told.
        prefill: Tokens that were run at a time; `None`: all.
        failed: Why there is no number.
    """

    method: str
    tokens_per_second: float | None = None
    lowest: float | None = None
    highest: float | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    prefill: int | None = None
    failed: str | None = None


@dataclass
class SpeedResult:
    """The prefill of one window, timed under every method in turn, several times over.

    Attributes:
        length: Tokens of the window.
        device: What ran it.
        threads: Threads of a CPU.
        memory: What `peak_bytes` is.
        methods: Labels, the baseline first.
        rounds: For each round and method seconds, peak and tokens at a time, or why it failed.
        cells: What follows from it, in the order of the methods.
    """

    length: int
    device: str
    threads: int | None
    memory: str | None
    methods: Sequence[str]
    rounds: Sequence[Mapping[str, Mapping[str, Any]]]
    cells: list[SpeedCell] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [self._cell(label) for label in self.methods]

    def cell(self, method: str) -> SpeedCell:
        """That of a method."""
        return self.cells[list(self.methods).index(method)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "length": self.length,
            "device": self.device,
            "threads": self.threads,
            "memory": self.memory,
            "methods": list(self.methods),
            "rounds": [
                {label: dict(values) for label, values in made.items()} for made in self.rounds
            ],
            "summary": [asdict(cell) for cell in self.cells],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeedResult:
        """Reads what `to_dict` wrote; the summary is made anew from the rounds."""
        return cls(**{name: value for name, value in values.items() if name != "summary"})

    def _cell(self, label: str) -> SpeedCell:
        mine = [made[label] for made in self.rounds]
        failed = next((values["failed"] for values in mine if "failed" in values), None)
        if failed is not None or not mine:
            return SpeedCell(label, failed=failed or "not measured")
        seconds = [values["seconds"] for values in mine]
        first = [made[self.methods[0]] for made in self.rounds]
        ratio = None
        if not any("failed" in values for values in first):
            pairs = zip(first, mine, strict=True)
            ratio = statistics.median(theirs["seconds"] / own["seconds"] for theirs, own in pairs)
        peaks = [values["peak_bytes"] for values in mine]
        pieces = [values["prefill"] for values in mine if values["prefill"] is not None]
        return SpeedCell(
            label,
            tokens_per_second=self.length / statistics.median(seconds),
            lowest=self.length / max(seconds),
            highest=self.length / min(seconds),
            ratio=ratio,
            peak_bytes=None if None in peaks else max(peaks),
            prefill=min(pieces, default=None),
        )


class SpeedRun:
    """Times the prefill of one window: a forward without a key-value cache, and the logits of its last token.

    A round times every method once, one after the other in this process, each after a warm-up forward of the same
    window: what a method builds when it meets a length, and what a library chooses at a first call, is not in the time.
    A round is stored whole, so two methods are always compared under the same conditions. Where memory runs out, the
    warm-up finds out how many tokens at a time fit, as for perplexity, and that is what is timed.

    Args:
        model: A causal language model, unpatched or with a saved patch.
        window: Token ids, shape (n,).
        candidates: What to compare, each `checked` against the model.
        rounds: How often every method is timed.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.
        prefill: Tokens that are run at a time; `None`: all.

    Attributes:
        clock: What times it.
    """

    def __init__(
        self,
        model: nn.Module,
        window: Tensor,
        candidates: Sequence[Candidate],
        *,
        rounds: int,
        chunk: int | None = None,
        prefill: int | None = None,
    ) -> None:
        self.model, self.window, self.candidates = model, window, candidates
        self.rounds, self.clock = rounds, Clock(model)
        self._at_once = (chunk, prefill)
        with evaluation_mode(model):
            self._scorer = TokenScorer(model, window, chunk=chunk, prefill=prefill)
        self._limits = {c.label: (self._scorer.chunk, self._scorer.prefill) for c in candidates}

    @property
    def keys(self) -> list[Key]:
        """What the rounds are stored under."""
        return [("round", number) for number in range(self.rounds)]

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads in the whole run, warm-ups included."""
        return 2 * len(self.window) * len(self.candidates) * self.rounds

    def open_store(
        self, folder: Path | str, described: dict[str, Any], shard: Shard = ALONE
    ) -> Store:
        """The records of a run in a folder.

        Args:
            folder: The run's folder.
            described: What the model is (`describe_model`).
            shard: This process's place.

        Raises:
            PosencError: The folder cannot be written to, or another process writes the same share.
        """
        settings = {
            "kind": "speed",
            "model": described,
            "window_sha256": hashlib.sha256(self.window.numpy().tobytes()).hexdigest(),
            "length": len(self.window),
            "methods": [candidate.key for candidate in self.candidates],
            "at_once": self._at_once,
            **self.clock.machine(),
            "environment": environment(),
        }
        return Store(Path(folder), settings, shard)

    def measure(self, store: Records, progress: Progress = lambda label, done, total: None) -> None:
        """Measures the rounds that are missing; at the end the model is what it was.

        Args:
            store: What was measured before, and where to put the rest.
            progress: Called after every method.
        """
        wanted = missing(store, self.keys)
        failed: dict[str, dict[str, Any]] = {}
        for key in self.keys:
            failed.update(_failures(store.get(key)))
        each, done = 2 * len(self.window), 0
        total = each * len(self.candidates) * len(wanted)
        with evaluation_mode(self.model):
            for key in wanted:
                made: dict[str, dict[str, Any]] = {}
                for candidate in self.candidates:
                    label = candidate.label
                    made[label] = failed.get(label) or self._timed(candidate)
                    done += each
                    progress(label, done, total)
                failed.update(_failures(made))
                store.append(key, made)

    def collect(self, store: Records) -> SpeedResult | None:
        """The result, from what is stored; `None` while something is missing."""
        if missing(store, self.keys):
            return None
        machine = self.clock.machine()
        return SpeedResult(
            length=len(self.window),
            device=machine["device"],
            threads=machine["threads"],
            memory=self.clock.memory,
            methods=[candidate.label for candidate in self.candidates],
            rounds=[store.get(key) or {} for key in self.keys],
        )

    def _timed(self, candidate: Candidate) -> dict[str, Any]:
        """Seconds and memory of one forward, after one that is not timed."""
        scorer = FrugalScorer(self._scorer)
        scorer.pieces = not candidate.length_dependent
        forward = self._forward(scorer)
        with self._limited(candidate.label), candidate.applied(self.model, len(self.window)):
            try:
                if candidate.stateful:
                    self._scorer(self.window[:2])  # resets transformers' stateful dynamic RoPE
                forward()
                while True:
                    limits = scorer.reduced
                    seconds, peak = self.clock.time(forward)
                    if scorer.reduced == limits:  # otherwise memory ran out on the way
                        break
            except Exception as error:  # as in a run of perplexities
                return {"failed": reason_of(error)}
            prefill = self._scorer.prefill if scorer.pieces else None
        return {"seconds": seconds, "peak_bytes": peak, "prefill": prefill}

    def _forward(self, scorer: FrugalScorer) -> Callable[[], Any]:
        last = len(self.window) - 1
        return lambda: scorer([self.window], last)

    @contextlib.contextmanager
    def _limited(self, label: str) -> Any:
        """What a method has come down to is its own, and kept from one round to the next."""
        scorer = self._scorer
        before = scorer.chunk, scorer.prefill
        scorer.chunk, scorer.prefill = self._limits[label]
        try:
            yield
        finally:
            self._limits[label] = scorer.chunk, scorer.prefill
            scorer.chunk, scorer.prefill = before


def window_of(documents: Sequence[TokenizedDocument], length: int, special: Tensor) -> Tensor:
    """The first tokens of the documents, special tokens in front: a text to be read at a length.

    Args:
        documents: One after the other, and again from the first where they are too short together.
        length: How many tokens.
        special: Token ids, shape (k,).

    Returns:
        Token ids, shape (length,).
    """
    parts, missing_tokens, index = [special], length - len(special), 0
    while missing_tokens > 0:
        document = documents[index % len(documents)]
        parts.append(document.tokens(0, min(missing_tokens, len(document.ids))))
        missing_tokens -= len(parts[-1])
        index += 1
    return torch.cat(parts)[:length]


def _failures(made: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {label: dict(values) for label, values in (made or {}).items() if "failed" in values}
